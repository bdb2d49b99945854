//! Makes the replica larger.

use shorthorn_regions::{GrownSets, SetKey};
use shorthorn_ring::Ring;
use shorthorn_store::{Store, StoreError};
use shorthorn_types::Regions;
use shorthorn_types::limits::MAX_VOLUME_BYTES;

use super::Executor;
use super::durable_state::DurableState;
use crate::error::ReplicaError;

/// The sets of the volume at its future size, whose files exist under other names.
#[derive(Debug)]
struct Grown {
    sets: GrownSets,
    files: Vec<(SetKey, Vec<u8>)>,
}

impl Grown {
    /// Writes the files that the sets need once the volume has grown.
    fn stage(regions: Regions, state: &DurableState, store: &Store) -> Result<Grown, StoreError> {
        let sets = state.intent_log().grown(regions);
        let grown = Grown { files: sets.files().collect(), sets };
        let staged = grown.files.iter().try_for_each(|(key, bytes)| store.region_files().stage(*key, bytes));
        match staged {
            Ok(()) => Ok(grown),
            Err(error) => {
                grown.discard(store);
                Err(error)
            }
        }
    }

    /// Replaces the files of the sets after the volume has grown.
    fn adopt(self, state: &mut DurableState, store: &Store) -> Result<(), StoreError> {
        for (key, bytes) in &self.files {
            // A repair of the directory may have deleted the file.
            let adopted = store.region_files().adopt(*key);
            let file = adopted.or_else(|_| store.region_files().make(*key, bytes))?;
            state.sets_mut().put_file(*key, file);
        }
        state.intent_log_mut().grow(self.sets);
        state.sets_mut().grown();
        Ok(())
    }

    /// Discards the grown sets, because the volume does not grow.
    fn discard(self, store: &Store) {
        for (key, _) in &self.files {
            store.region_files().unstage(*key);
        }
    }
}

impl Executor {
    /// Makes the volume larger. The files of the sets of regions come first, under other names, because they
    /// may need space. Then the directory grows, and then these files get their names. If the process ends
    /// before that, the sets are read from the files of the former size. Waits for the disk; requests may be
    /// in flight.
    ///
    /// # Errors
    /// The volume has its size from before then, or nothing is served any more.
    pub fn expand(&mut self, size_bytes: u64, ring: &mut Ring) -> Result<(), ReplicaError> {
        if size_bytes == self.store.size_bytes() {
            return Ok(());
        }
        if size_bytes > MAX_VOLUME_BYTES {
            return Err(ReplicaError::TooLarge(size_bytes));
        }
        self.background_sums.expand(self.state.intent_log_mut());
        let grown = Grown::stage(Regions::of(size_bytes), &self.state, &self.store)?;
        let expanded = self.store.expand(size_bytes);
        self.look_at_store();
        if let Err(error) = expanded {
            grown.discard(&self.store);
            if self.store.is_broken() {
                self.fail(&format!("an expansion was interrupted: {error}"));
            }
            return Err(error.into());
        }
        if let Err(error) = grown.adopt(&mut self.state, &self.store) {
            self.fail(&format!("the sets of regions could not follow an expansion: {error}"));
            return Err(error.into());
        }
        self.io.requests_mut().forget_kept_rot();
        // No other event wakes requests that wait for pages of the former files.
        self.resume_waiting(ring);
        Ok(())
    }
}
