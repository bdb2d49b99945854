//! The copy from another replica that is under way, if any. [`CopyRecord`] stores it.

use shorthorn_chain::{Checks, CopyList};

use crate::copy_record::CopyRecord;
use crate::directory::Directory;
use crate::directory_scan::recover_directory;
use crate::epoch_record::EpochRecord;
use crate::error::StoreError;
use crate::image::Image;
use crate::medium::Medium;
use crate::sums_files::sweep_sums;

type Result<T> = std::result::Result<T, StoreError>;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct OngoingCopy {
    record: Option<CopyRecord>,
}

impl OngoingCopy {
    /// Continues the copy that an opening has found, if any.
    pub(crate) fn new(record: Option<CopyRecord>) -> OngoingCopy {
        OngoingCopy { record }
    }

    /// Returns true if a copy is under way.
    pub(crate) fn is_under_way(&self) -> bool {
        self.record.is_some()
    }

    /// Drops the copy, unless `is_rebuilding`. Returns the layers of `list` that it has made complete, one
    /// entry for each. None is complete if the snapshots are those of another source.
    pub(crate) fn take_done(&mut self, list: &CopyList, is_rebuilding: bool) -> Vec<bool> {
        let interrupted = self.record.take().filter(|_| is_rebuilding);
        let done = interrupted.and_then(|copy| copy.done_of(list));
        done.unwrap_or_else(|| vec![false; list.layers().len()])
    }

    /// Starts a copy. The mark is written first: with it, the next opening recognises any part of the rest.
    /// Without it, the record would look like that of a copy that has ended.
    pub(crate) fn start(
        &mut self,
        mut copy: CopyRecord,
        medium: &Medium,
        image: &mut Image,
        epoch_record: &mut EpochRecord,
    ) -> Result<()> {
        let executor = medium.executor();
        // New layers may get the inodes of removed ones.
        sweep_sums(medium.directory(), |_| false)?;
        epoch_record.drop_series(medium.directory())?;
        image.volume_mut().set_rebuilding(true);
        executor.run(&image.layout().volume_steps(), epoch_record)?;
        copy.save(medium.directory())?;
        executor.pass(|| "recorded the copy".to_owned())?;
        copy.prepare(&executor, epoch_record)?;
        executor.pass(|| "prepared the copy".to_owned())?;
        // The source has accepted the sizes of its layers.
        let accepting = Checks { accept_short_layers: true, accept_rebuilding: true, ..Checks::default() };
        image.set_layout(recover_directory(medium.directory(), &accepting)?.layout);
        epoch_record.set_sizes(image.layout().short_layers());
        epoch_record.save(medium.directory())?;
        image.accept_sizes(epoch_record.known_sizes());
        self.record = Some(copy);
        Ok(())
    }

    /// Returns true for a snapshot layer that is being copied to and is not complete yet.
    pub(crate) fn is_open(&self, layer: usize) -> bool {
        self.record.as_ref().is_some_and(|copy| copy.is_open(layer))
    }

    /// Returns for each layer whether it is complete; nothing without a copy.
    pub(crate) fn done(&self) -> &[bool] {
        self.record.as_ref().map_or(&[][..], CopyRecord::done)
    }

    /// Returns the oldest snapshot that is not complete yet.
    pub(crate) fn first_unfinished(&self) -> Option<usize> {
        self.record.as_ref().and_then(CopyRecord::first_unfinished)
    }

    /// Records that a layer, whose data is durable, is complete.
    pub(crate) fn complete(&mut self, layer: usize, directory: &Directory) -> Result<()> {
        let Some(copy) = &mut self.record else { return Err(StoreError::NoLayer(layer)) };
        copy.complete(layer, directory)
    }

    /// Makes each layer count as incomplete.
    pub(crate) fn forget_done(&mut self, directory: &Directory) -> Result<()> {
        self.record.as_mut().map_or(Ok(()), |copy| copy.forget_done(directory))
    }

    /// Ends the copy. The replica is not marked as rebuilding any more.
    pub(crate) fn end(&mut self, directory: &Directory) -> Result<()> {
        self.record = None;
        CopyRecord::remove(directory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CREATED: &str = "2026-11-20T23:36:34Z";

    fn empty_list() -> CopyList {
        CopyList::empty(1 << 20, CREATED).unwrap()
    }

    #[test]
    fn without_a_copy_no_layer_is_open_or_complete() {
        let mut copy = OngoingCopy::default();
        assert!(!copy.is_under_way() && !copy.is_open(0) && copy.done().is_empty());
        assert_eq!((copy.first_unfinished(), copy.take_done(&empty_list(), true)), (None, vec![false]));
        let directory = tempfile::tempdir().unwrap();
        let directory = Directory::open(directory.path()).unwrap();
        copy.forget_done(&directory).unwrap();
        assert!(matches!(copy.complete(0, &directory), Err(StoreError::NoLayer(0))));
    }

    #[test]
    fn an_interrupted_copy_keeps_complete_layers_only_while_the_replica_is_rebuilding() {
        for (is_rebuilding, done) in [(true, vec![true]), (false, vec![false])] {
            let record = CopyRecord::new(empty_list(), vec![true], 5);
            let mut copy = OngoingCopy::new(Some(record));
            assert!(copy.is_under_way());
            assert_eq!(copy.take_done(&empty_list(), is_rebuilding), done);
            assert!(!copy.is_under_way());
        }
    }
}
