//! Performs the steps by which the state of the replica becomes durable. Waits for the disk.

use std::os::fd::RawFd;

use shorthorn_regions::SetKey;
use shorthorn_replica_core::{Disk, DurableStep, RecordOutcome, StepError, is_final, revision_counter};
use shorthorn_store::{LossRecord, RegionFile, Store};
use shorthorn_types::Errno;
use shorthorn_views::ReplicaViews;

use crate::error::ReplicaError;
use crate::state::Owner;

/// The open files of the sets that are kept.
#[derive(Debug, Default)]
pub(super) struct SetFiles {
    files: Vec<(SetKey, RegionFile)>,
    /// Files of sets that have ended, or have new files, into which a page may still be written.
    retired: Vec<RegionFile>,
    /// Page writes that the ring has.
    in_flight: usize,
}

impl SetFiles {
    /// Returns the descriptor of a set's file.
    pub fn fd(&self, key: SetKey) -> Option<RawFd> {
        self.find(key).map(RegionFile::raw_fd)
    }

    /// Finds the open file of a set; none if the set does not exist.
    pub fn find(&self, key: SetKey) -> Option<&RegionFile> {
        self.files.iter().find(|(of, _)| *of == key).map(|(_, file)| file)
    }

    /// Adds the file of a set, or replaces it.
    pub fn put(&mut self, key: SetKey, file: RegionFile) {
        self.remove(key);
        self.files.push((key, file));
    }

    fn remove(&mut self, key: SetKey) {
        if let Some(at) = self.files.iter().position(|(of, _)| *of == key) {
            let (_, file) = self.files.swap_remove(at);
            self.retired.push(file);
        }
        self.drop_retired();
    }

    /// Counts a page write that the ring has.
    pub fn write_began(&mut self) {
        self.in_flight += 1;
    }

    /// Ends a page write.
    pub fn write_ended(&mut self) {
        self.in_flight -= 1;
        self.drop_retired();
    }

    /// Returns true if the ring has no page write.
    pub fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    /// Drops replaced files. A descriptor that a write in the ring names has to stay open until that has
    /// ended.
    fn drop_retired(&mut self) {
        if self.in_flight == 0 {
            self.retired.clear();
        }
    }
}

/// The directory of a replica, with the open files of its sets.
#[derive(Debug)]
pub(crate) struct ReplicaFiles<'a> {
    pub(super) store: &'a mut Store,
    pub(super) sets: &'a mut SetFiles,
    pub(super) owner: &'a Owner,
}

impl Disk for ReplicaFiles<'_> {
    type Error = ReplicaError;

    fn perform(&mut self, step: DurableStep<'_>) -> Result<(), ReplicaError> {
        match step {
            DurableStep::SaveViews(views) => {
                // The counter comes first: a number that is ahead does no harm, because the replica is in all
                // of these views. A number that is behind makes Longhorn rebuild the replica, which costs
                // less than a view that is not stored. Any other error of the disk is reported once, and may
                // be about other data.
                if let Err(error) = self.store_revision(views) {
                    if is_final(error.errno()) {
                        return Err(error);
                    }
                    tracing::warn!(
                        %error,
                        "revision.counter could not be stored: Longhorn would take this replica for an older \
                         one"
                    );
                }
                self.store.save_state(&self.owner.with_views(views)?)?;
            }
            DurableStep::MakeSet(key, bytes) => {
                let file = self.store.region_files().make(key, bytes)?;
                tracing::info!("the set of regions '{key}' is kept from now on");
                self.sets.put(key, file);
            }
            DurableStep::RemoveSet(key) => match self.store.region_files().remove(key) {
                Ok(()) => {
                    tracing::info!("the set of regions '{key}' is no longer kept");
                    self.sets.remove(key);
                }
                Err(error) => {
                    tracing::warn!(%error, "the set of regions '{key}' could not be removed");
                    return Err(error.into());
                }
            },
            DurableStep::RecordMadeUpFor => match self.store.cache_made_up_for() {
                Ok(()) => tracing::info!("the data that the page cache lost has been restored"),
                Err(error) => {
                    tracing::warn!(%error, "cannot record that lost data has been restored");
                    return Err(error.into());
                }
            },
            DurableStep::RecordLeft => {
                self.store.set_left(true)?;
                tracing::info!(
                    "the replica is not in the view of its volume: volume.meta says to Longhorn that it \
                     lacks data"
                );
            }
            DurableStep::RecordMember => {
                self.store.set_left(false)?;
                tracing::info!(
                    "the replica is in the view of its volume: volume.meta says to Longhorn that it is \
                     complete"
                );
            }
        }
        Ok(())
    }

    fn record_failure(&mut self, in_a_row: u32) -> RecordOutcome {
        let is_first = !self.store.has_lost_cache_now();
        match self.store.record_lost_cache(in_a_row) {
            Ok(LossRecord::Written) => RecordOutcome::Counted,
            Ok(LossRecord::FileRemoved | LossRecord::Elsewhere) => RecordOutcome::Uncounted,
            Err(error) if is_first => {
                tracing::error!(%error, "the possible loss of data could not be recorded");
                RecordOutcome::Not
            }
            Err(error) => {
                tracing::debug!(%error, "the possible loss of data could not be recorded");
                RecordOutcome::Not
            }
        }
    }
}

impl ReplicaFiles<'_> {
    /// Reports to Longhorn how new the replica is.
    pub(super) fn store_revision(&mut self, views: &ReplicaViews) -> Result<(), ReplicaError> {
        match revision_counter(self.owner.replica, views) {
            Some(counter) => Ok(self.store.set_revision_counter(counter)?),
            None => Ok(()),
        }
    }
}

impl StepError for ReplicaError {
    fn errno(&self) -> Errno {
        ReplicaError::errno(self)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use shorthorn_store::CreateOptions;
    use shorthorn_types::ReplicaId;

    use super::*;

    /// The file of a removed set stays open until the ring has written to it.
    #[test]
    fn a_retired_file_stays_open_while_a_page_is_written() {
        let temp = tempfile::tempdir().unwrap();
        let options = CreateOptions { size_bytes: 1 << 20, ..CreateOptions::default() };
        let store = Store::create(temp.path().join("replica"), options).unwrap();
        let key = SetKey::OutOfSync(ReplicaId::from_random(2));
        let mut files = SetFiles::default();
        files.put(key, store.region_files().make(key, &[0; 4096]).unwrap());
        let link = format!("/proc/self/fd/{}", files.fd(key).unwrap());
        let open = fs::read_link(&link).unwrap();
        files.write_began();
        files.remove(key);
        assert!(files.fd(key).is_none() && !files.is_idle());
        assert_eq!(fs::read_link(&link).unwrap(), open);
        files.write_ended();
        assert!(files.is_idle() && files.retired.is_empty());
    }
}
