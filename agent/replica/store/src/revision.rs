//! Longhorn's counter of revisions. See `E/pkg/replica/revision_counter.go` of longhorn-engine: one block
//! with the number in decimal digits, the rest of it zero bytes, written with direct I/O. Longhorn reads it
//! only if a volume has the counter enabled, and makes a missing file with the number 0.

use shorthorn_chain::REVISION_FILE;
use shorthorn_types::limits::BLOCK_BYTES;

use crate::error::StoreError;
use crate::store::Store;

impl Store {
    /// Stores the number that Longhorn compares with those of other replicas. Durable on return. The caller
    /// chooses the number.
    ///
    /// # Errors
    /// An I/O error; the number from before is then still there.
    pub fn set_revision_counter(&mut self, counter: u64) -> Result<(), StoreError> {
        self.medium.check_writable()?;
        let mut block = counter.to_string().into_bytes();
        block.resize(usize::try_from(BLOCK_BYTES).unwrap_or(0), 0);
        if self.medium.directory().read(REVISION_FILE)?.as_ref() == Some(&block) {
            return Ok(());
        }
        self.medium.directory().replace(REVISION_FILE, &block)
    }
}
