//! The record of a copy that is under way.
//!
//! A directory that is being copied to is marked as rebuilding. `shorthorn.copy` has the layers of the
//! source, whether they exist here yet, and which of them are complete. After any stop of the process or the
//! machine, the next opening continues. Incomplete layers are made again, complete ones are kept, and the
//! record of an ended copy is removed.
//!
//! A record that is damaged, or whose layers no directory can hold, must not keep the replica from opening
//! for ever. It is dropped, and no layer counts as complete. The replica stays marked as rebuilding, so the
//! next copy starts over. If the directory has no valid layout without the rest of the copy, it becomes that
//! of an empty volume.

use serde::{Deserialize, Serialize};
use shorthorn_chain::{
    ChainError, Checks, CopyLayer, CopyList, ImageName, VOLUME_META, VolumeMeta, with_check, without_check,
};

use crate::directory::Directory;
use crate::directory_scan::recover_directory;
use crate::epoch_record::EpochRecord;
use crate::error::StoreError;
use crate::step_executor::StepExecutor;
use crate::sums_files::sweep_sums;
use crate::timestamp::now_rfc3339;

type Result<T> = std::result::Result<T, StoreError>;

const COPY_FILE: &str = "shorthorn.copy";
const FORMAT: u32 = 1;

/// A copy that is under way.
#[derive(Clone, Debug)]
pub(crate) struct CopyRecord {
    /// The layers of the source.
    list: CopyList,
    /// True if the layers exist.
    prepared: bool,
    /// True for layers that are complete and durable.
    done: Vec<bool>,
    /// The epoch in which the record was written.
    epoch: u64,
}

/// The copy that an opening has found.
#[derive(Debug, Default)]
pub(crate) struct Resumed {
    /// The copy, if it can be continued.
    pub(crate) copy: Option<CopyRecord>,
    /// A message for people if the record was dropped: the copy starts over.
    pub(crate) dropped: Option<String>,
}

/// The reason why a record is of no use.
#[derive(Debug, PartialEq, Eq)]
enum Unusable {
    /// A newer program has written it.
    Format(u32),
    /// The problem. `is_prepared`: the directory may have data of the copy.
    Bad { reason: String, is_prepared: bool },
}

/// The part of the record that every format has.
#[derive(Debug, Deserialize)]
struct FormatOnly {
    format: u32,
}

/// The content of `shorthorn.copy`.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    format: u32,
    epoch: u64,
    size_bytes: u64,
    prepared: bool,
    done: Vec<bool>,
    layers: Vec<RecordLayer>,
}

#[derive(Debug, Serialize, Deserialize)]
struct RecordLayer {
    image: String,
    meta: String,
    size_bytes: u64,
}

impl CopyRecord {
    /// Begins a copy whose layers do not exist yet. `done` has one entry for each layer.
    pub(crate) fn new(list: CopyList, done: Vec<bool>, epoch: u64) -> CopyRecord {
        CopyRecord { list, prepared: false, done, epoch }
    }

    /// Returns the complete layers, if they are those of another source too.
    pub(crate) fn done_of(self, list: &CopyList) -> Option<Vec<bool>> {
        self.list.has_snapshots_of(list).then_some(self.done)
    }

    /// Returns for each layer whether it is complete.
    pub(crate) fn done(&self) -> &[bool] {
        &self.done
    }

    /// Returns true for a snapshot that is not complete yet. The head is never copied.
    pub(crate) fn is_open(&self, layer: usize) -> bool {
        self.snapshots().get(layer) == Some(&false)
    }

    /// Returns the oldest snapshot that is not complete yet.
    pub(crate) fn first_unfinished(&self) -> Option<usize> {
        self.snapshots().iter().position(|done| !done)
    }

    fn snapshots(&self) -> &[bool] {
        self.done.split_last().map_or(&[][..], |(_, snapshots)| snapshots)
    }

    pub(crate) fn complete(&mut self, layer: usize, directory: &Directory) -> Result<()> {
        self.done[layer] = true;
        self.save(directory)
    }

    /// Records that no layer is complete.
    pub(crate) fn forget_done(&mut self, directory: &Directory) -> Result<()> {
        if !self.done.contains(&true) {
            return Ok(());
        }
        self.done.fill(false);
        self.save(directory)
    }

    /// Resumes or removes an interrupted copy, before anything else in the directory is read. A reader leaves
    /// the copy alone.
    ///
    /// # Errors
    /// [`StoreError::CopyFormat`], or an I/O error.
    pub(crate) fn resume(
        executor: &StepExecutor<'_>,
        epoch_record: &mut EpochRecord,
        is_read_only: bool,
    ) -> Result<Resumed> {
        if is_read_only {
            return Ok(Resumed::default());
        }
        let directory = executor.directory();
        let Some(bytes) = directory.read(COPY_FILE)? else { return Ok(Resumed::default()) };
        // The copy has ended. Its record does not matter any more, even if it is damaged.
        if !read_volume(directory)?.is_rebuilding() {
            CopyRecord::remove(directory)?;
            return Ok(Resumed::default());
        }
        let mut copy = match CopyRecord::parse(&bytes) {
            Ok(copy) => copy,
            Err(Unusable::Format(format)) => {
                let (path, known) = (directory.path_of(COPY_FILE), FORMAT);
                return Err(StoreError::CopyFormat { path, format, known });
            }
            Err(Unusable::Bad { reason, is_prepared }) => {
                let dropped =
                    format!("{COPY_FILE} is of no use ({reason}): the copy from another replica starts over");
                CopyRecord::drop_record(executor, epoch_record, is_prepared)?;
                return Ok(Resumed { copy: None, dropped: Some(dropped) });
            }
        };
        if copy.epoch != epoch_record.epoch() {
            // Another program has had the directory open: no layer counts as complete.
            copy.done.fill(false);
            copy.epoch = epoch_record.epoch();
        }
        if !copy.prepared {
            copy.prepare(executor, epoch_record)?;
        }
        Ok(Resumed { copy: Some(copy), dropped: None })
    }

    /// Removes a record that is of no use. Repeatable, as long as the record is there. A directory without a
    /// valid layout is emptied only if the copy was about to replace its content anyway.
    fn drop_record(
        executor: &StepExecutor<'_>,
        epoch_record: &mut EpochRecord,
        is_prepared: bool,
    ) -> Result<()> {
        let directory = executor.directory();
        let accepting = Checks { accept_short_layers: true, accept_rebuilding: true, ..Checks::default() };
        match recover_directory(directory, &accepting) {
            Ok(recovery) => {
                // The copied replica has accepted the sizes of its layers. The next opening has no record.
                epoch_record.set_sizes(recovery.layout.short_layers());
                epoch_record.save(directory)?;
            }
            // Emptying the directory would not help against a foreign file, or a feature of a later program.
            Err(StoreError::Chain { source, .. })
                if !is_prepared
                    && !matches!(source, ChainError::ForeignMeta { .. } | ChainError::Unsupported { .. }) =>
            {
                CopyRecord::make_empty(executor, epoch_record)?;
            }
            Err(error) => return Err(error),
        }
        CopyRecord::remove(directory)
    }

    /// Makes the directory that of an empty volume of the same size.
    fn make_empty(executor: &StepExecutor<'_>, epoch_record: &mut EpochRecord) -> Result<()> {
        let directory = executor.directory();
        sweep_sums(directory, |_| false)?;
        epoch_record.drop_series(directory)?;
        let volume = read_volume(directory)?;
        let size_bytes = u64::try_from(volume.size).unwrap_or(0);
        let empty = CopyList::empty(size_bytes, &now_rfc3339());
        let empty = empty.map_err(|error| StoreError::chain(directory.path(), error))?;
        executor.run(&empty.steps(&volume, &directory.list()?, &[]), epoch_record)
    }

    /// Makes the layers. Repeatable.
    pub(crate) fn prepare(
        &mut self,
        executor: &StepExecutor<'_>,
        epoch_record: &mut EpochRecord,
    ) -> Result<()> {
        let directory = executor.directory();
        let steps = self.list.steps(&read_volume(directory)?, &directory.list()?, &self.done);
        executor.run(&steps, epoch_record)?;
        self.prepared = true;
        self.save(directory)
    }

    /// Parses the content of the file.
    fn parse(bytes: &[u8]) -> std::result::Result<CopyRecord, Unusable> {
        let unknown = |reason: String| Unusable::Bad { reason, is_prepared: true };
        let document = without_check(COPY_FILE, bytes)
            .map_err(|_| unknown("the check of the record is wrong".to_owned()))?;
        let format: FormatOnly =
            serde_json::from_slice(&document).map_err(|error| unknown(error.to_string()))?;
        if format.format != FORMAT {
            return Err(Unusable::Format(format.format));
        }
        let record: Record = serde_json::from_slice(&document).map_err(|error| unknown(error.to_string()))?;
        let bad = |reason: &str| Unusable::Bad { reason: reason.to_owned(), is_prepared: record.prepared };
        let layer = |layer: RecordLayer| {
            let image = ImageName::parse(&layer.image)?;
            Some(CopyLayer { image, meta: layer.meta.into_bytes(), size_bytes: layer.size_bytes })
        };
        let layers = record.layers.into_iter().map(layer).collect::<Option<Vec<_>>>();
        let layers = layers.ok_or_else(|| bad("the record names a file that is not a layer"))?;
        let list = CopyList::new(layers, record.size_bytes);
        let list = list.map_err(|error| bad(&error.to_string()))?;
        if record.done.len() != list.layers().len() {
            return Err(bad("the record lacks the progress of some layers"));
        }
        Ok(CopyRecord { list, prepared: record.prepared, done: record.done, epoch: record.epoch })
    }

    pub(crate) fn save(&self, directory: &Directory) -> Result<()> {
        let mut bytes = serde_json::to_vec(&self.record())
            .map_err(|error| StoreError::io("write", directory.path_of(COPY_FILE), error))?;
        bytes.push(b'\n');
        directory.replace(COPY_FILE, &with_check(bytes))
    }

    fn record(&self) -> Record {
        let layer = |layer: &CopyLayer| RecordLayer {
            image: layer.image.to_string(),
            meta: String::from_utf8_lossy(&layer.meta).into_owned(),
            size_bytes: layer.size_bytes,
        };
        let layers = self.list.layers();
        Record {
            format: FORMAT,
            epoch: self.epoch,
            size_bytes: layers.last().map_or(0, |head| head.size_bytes),
            prepared: self.prepared,
            done: self.done.clone(),
            layers: layers.iter().map(layer).collect(),
        }
    }

    /// Removes the record, after the copy has ended.
    pub(crate) fn remove(directory: &Directory) -> Result<()> {
        directory.unlink(COPY_FILE)?;
        directory.sync()
    }
}

fn read_volume(directory: &Directory) -> Result<VolumeMeta> {
    let bytes = directory.read(VOLUME_META)?.unwrap_or_default();
    VolumeMeta::parse(&bytes).map_err(|error| StoreError::chain(directory.path(), error))
}

#[cfg(shorthorn_fuzzing)]
pub(crate) mod fuzzing {
    use super::*;

    /// A record that is accepted has layers that a directory can hold, and is read again as the same.
    pub fn check(bytes: &[u8]) {
        let Ok(copy) = CopyRecord::parse(bytes) else { return };
        let sizes: Vec<u64> = copy.list.layers().iter().map(|layer| layer.size_bytes).collect();
        assert!(sizes.is_sorted() && sizes.len() == copy.done.len());
        let written = serde_json::to_vec(&copy.record()).expect("a record that was read");
        let again = CopyRecord::parse(&written).expect("a written record");
        assert_eq!((again.list, again.done, again.prepared), (copy.list, copy.done, copy.prepared));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const META: &str = "{\"Name\":\"volume-head-000.img\",\"Parent\":\"volume-snap-a.img\",\"Removed\":false,\
        \"UserCreated\":false,\"Created\":\"2026-11-20T23:36:34Z\",\"Labels\":null}\n";
    const OLDEST: &str = "{\"Name\":\"volume-snap-a.img\",\"Parent\":\"\",\"Removed\":false,\"UserCreated\":true,\"Created\":\"2026-11-20T23:36:34Z\",\"Labels\":null}\n\
                          ";

    fn file() -> Vec<u8> {
        let layer = |image: &str, meta: &str| RecordLayer {
            image: image.to_owned(),
            meta: meta.to_owned(),
            size_bytes: 1 << 20,
        };
        let layers = vec![layer("volume-snap-a.img", OLDEST), layer("volume-head-000.img", META)];
        let done = vec![true, false];
        let record = Record { format: FORMAT, epoch: 5, size_bytes: 1 << 20, prepared: true, done, layers };
        let mut bytes = serde_json::to_vec(&record).unwrap();
        bytes.push(b'\n');
        bytes
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let copy = CopyRecord::parse(&with_check(file())).unwrap();
        assert_eq!((copy.epoch, copy.prepared, copy.done), (5, true, vec![true, false]));
    }

    #[test]
    fn only_snapshots_are_open_until_they_are_complete() {
        let temp = tempfile::tempdir().unwrap();
        let directory = Directory::open(temp.path()).unwrap();
        let mut copy = CopyRecord::parse(&with_check(file())).unwrap();
        let open = |copy: &CopyRecord| [0, 1, 2].map(|layer| copy.is_open(layer));
        assert_eq!((open(&copy), copy.first_unfinished()), ([false; 3], None));
        copy.forget_done(&directory).unwrap();
        assert_eq!((open(&copy), copy.first_unfinished()), ([true, false, false], Some(0)));
        copy.complete(0, &directory).unwrap();
        let stored = CopyRecord::parse(&directory.read(COPY_FILE).unwrap().unwrap()).unwrap();
        assert_eq!((open(&stored), stored.done()), ([false; 3], &[true, false][..]));
    }

    #[test]
    fn layers_stay_complete_only_for_the_same_snapshots() {
        let copy = CopyRecord::parse(&with_check(file())).unwrap();
        let same = copy.list.clone();
        assert_eq!(copy.clone().done_of(&same), Some(vec![true, false]));
        let other = CopyList::empty(1 << 20, "2026-11-20T23:36:34Z").unwrap();
        assert_eq!(copy.done_of(&other), None);
    }

    proptest! {
        #[test]
        fn random_bytes_are_not_a_record(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(CopyRecord::parse(&bytes).is_err());
        }

        /// With a check that fits, as an attacker makes it.
        #[test]
        fn a_changed_record_is_refused_or_written_again(
            at in any::<prop::sample::Index>(),
            new in prop::sample::select(
                vec!["0", "9", "99999999999999999999", "-1", "\"", "{", "]", "../", "true", "\0", ""]
            ),
            removed in 0usize..6,
        ) {
            let mut bytes = file();
            let at = at.index(bytes.len() - 2);
            bytes.splice(at..(at + removed).min(bytes.len() - 2), new.bytes());
            if let Ok(copy) = CopyRecord::parse(&with_check(bytes)) {
                prop_assert_eq!(copy.done.len(), copy.list.layers().len());
                let again = serde_json::to_vec(&copy.record()).unwrap();
                let twin = CopyRecord::parse(&again).unwrap();
                prop_assert_eq!(serde_json::to_vec(&twin.record()).unwrap(), again);
            }
        }
    }
}
