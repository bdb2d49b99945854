//! Longhorn's counter of revisions. See `E/pkg/replica/revision_counter.go` of longhorn-engine: one block
//! with the number in decimal digits, the rest of it zero bytes, written with direct I/O. Longhorn reads it
//! only if a volume has the counter enabled, and makes a missing file with the number 0.

use shorthorn_chain::REVISION_FILE;
use shorthorn_types::limits::BLOCK_BYTES;

use crate::directory::Directory;
use crate::error::StoreError;

/// Stores the number that Longhorn compares with those of other replicas. Durable on return.
pub(crate) fn save_counter(directory: &Directory, counter: u64) -> Result<(), StoreError> {
    let mut block = counter.to_string().into_bytes();
    block.resize(usize::try_from(BLOCK_BYTES).unwrap_or(0), 0);
    if directory.read(REVISION_FILE)?.as_ref() == Some(&block) {
        return Ok(());
    }
    directory.replace(REVISION_FILE, &block)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counter_is_a_block_that_is_written_only_when_it_changes() {
        let temp = tempfile::tempdir().unwrap();
        let directory = Directory::open(temp.path()).unwrap();
        save_counter(&directory, 42).unwrap();
        let block = directory.read(REVISION_FILE).unwrap().unwrap();
        assert!(
            block.len() == 4096 && block.starts_with(b"42\0") && block[2..].iter().all(|byte| *byte == 0)
        );
        let inode = || directory.stat(REVISION_FILE).unwrap().unwrap().inode;
        let former = inode();
        save_counter(&directory, 42).unwrap();
        assert_eq!(inode(), former);
        save_counter(&directory, 7).unwrap();
        assert!(directory.read(REVISION_FILE).unwrap().unwrap().starts_with(b"7\0"));
    }
}
