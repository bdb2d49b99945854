//! Epoch record: detects that another program has opened the directory.
//!
//! Longhorn rewrites `volume.meta` whenever it opens a replica, and so does Shorthorn. `shorthorn.guard`
//! identifies the file that Shorthorn wrote, by inode, time of modification, and checksum of its content. The
//! record is durable before the file gets its name, and keeps the previous identity. A crash between the two
//! therefore does not look like another program. A clean close records inode and time of change of the head
//! too.
//!
//! If the record does not fit, the *epoch* rises by one. All files beside the volume carry the epoch in
//! which they were written, and count only in that epoch. A copied directory does not fit either, which is
//! safe.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use nix::fcntl::OFlag;
use serde::{Deserialize, Serialize};
use shorthorn_chain::VOLUME_META;

use crate::directory::{Directory, stat_of};
use crate::error::StoreError;
use crate::info::Provenance;
use crate::state::STATE_FILE;
use crate::sums_files::BLOCK_SUMS_FILE;

pub(crate) const EPOCH_RECORD_FILE: &str = "shorthorn.guard";

/// The identity of one file among all files that have had its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileIdentity {
    inode: u64,
    mtime_ns: i128,
    crc32c: u32,
}

/// The head as a clean close left it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HeadIdentity {
    name: String,
    inode: u64,
    ctime_ns: i128,
}

/// The content of `shorthorn.guard`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EpochRecord {
    /// The epoch rises whenever another program may have changed the volume. Never 0.
    epoch: u64,
    /// The possible identities of `volume.meta`: the last one of Shorthorn, and the one before while it is
    /// replaced.
    volume_meta: Vec<FileIdentity>,
    /// The identity of the head, present after a clean close.
    head: Option<HeadIdentity>,
    /// Sizes of layers that are shorter than the one above for an undocumented reason.
    #[serde(default)]
    known_sizes: BTreeMap<String, u64>,
    /// The series of sums of blocks that counts: see `block_sums`. A version without sums drops it with any
    /// write.
    #[serde(default)]
    block_sums: Option<u64>,
    /// The newest series so far.
    #[serde(default)]
    last_series: u64,
    /// True from the opening of another program's directory until a state is saved. Until then the directory
    /// is not one that has lost its state. A version without the field drops it with any write.
    #[serde(default)]
    awaits_state: bool,
    /// True if the callers that change the volume keep the set of regions without sums.
    #[serde(skip)]
    keeps_sums: bool,
}

impl EpochRecord {
    /// Reads the record. An unreadable record counts as absent.
    pub fn load(directory: &Directory) -> Result<Option<EpochRecord>, StoreError> {
        Ok(directory.read(EPOCH_RECORD_FILE)?.and_then(|bytes| EpochRecord::parse(&bytes)))
    }

    /// Parses a record. A record with the highest possible epoch is rejected, because Shorthorn never writes
    /// it.
    fn parse(bytes: &[u8]) -> Option<EpochRecord> {
        let epoch_record: EpochRecord = serde_json::from_slice(bytes).ok()?;
        (1..u64::MAX).contains(&epoch_record.epoch).then_some(epoch_record)
    }

    /// Compares the record with the directory. The returned record is for the session that begins: in the
    /// same epoch if everything fits, otherwise in the next one.
    pub fn judge(
        directory: &Directory,
        found: Option<EpochRecord>,
    ) -> Result<(EpochRecord, Provenance), StoreError> {
        let volume_meta = identity(directory, VOLUME_META)?;
        let has_state = directory.stat(STATE_FILE)?.is_some();
        let Some(mut epoch_record) = found else {
            let volume_meta = vec![volume_meta];
            let epoch_record = EpochRecord { volume_meta, awaits_state: !has_state, ..EpochRecord::new() };
            return Ok((epoch_record, Provenance::Foreign { why: "Shorthorn has no record".to_owned() }));
        };
        let mut why = None;
        if !epoch_record.volume_meta.contains(&volume_meta) {
            why = Some("another program has written volume.meta since".to_owned());
        } else if let Some(head) = &epoch_record.head
            && HeadIdentity::of(directory, &head.name)?.as_ref() != Some(head)
        {
            why = Some(format!("another program has changed {} since", head.name));
        }
        epoch_record.head = None;
        epoch_record.volume_meta = vec![volume_meta];
        epoch_record.awaits_state &= !has_state;
        let Some(why) = why else {
            let why = "no state was saved since another program had the directory".to_owned();
            let provenance =
                if epoch_record.awaits_state { Provenance::Foreign { why } } else { Provenance::Ours };
            return Ok((epoch_record, provenance));
        };
        epoch_record.epoch += 1;
        epoch_record.block_sums = None;
        epoch_record.awaits_state = !has_state;
        Ok((epoch_record, Provenance::Foreign { why }))
    }

    /// Creates a record for a directory that has none. Its epochs begin with the time, so that they are above
    /// those of a lost record.
    pub fn new() -> EpochRecord {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        EpochRecord { epoch: u64::try_from(since.as_nanos()).unwrap_or(1), ..EpochRecord::default() }
    }

    /// Records that `temp` is about to become `volume.meta`.
    pub fn vouch(&mut self, directory: &Directory, temp: &str) -> Result<(), StoreError> {
        let next = identity(directory, temp)?;
        // One of ours is still in place: not the last one, if that could not be put there.
        let in_place = match directory.stat(VOLUME_META)? {
            Some(_) => {
                Some(identity(directory, VOLUME_META)?).filter(|known| self.volume_meta.contains(known))
            }
            None => None,
        };
        let last = self.volume_meta.pop();
        self.volume_meta = in_place.or(last).into_iter().chain([next]).collect();
        self.save(directory)
    }

    /// Records how the head is left.
    pub fn seal(&mut self, directory: &Directory, head: &str) -> Result<(), StoreError> {
        self.head = HeadIdentity::of(directory, head)?;
        Ok(())
    }

    /// Records, durably, that a state was saved or is about to be: from now on a missing state is a loss.
    pub fn expect_state(&mut self, directory: &Directory) -> Result<(), StoreError> {
        if !self.awaits_state {
            return Ok(());
        }
        self.awaits_state = false;
        self.save(directory).inspect_err(|_| self.awaits_state = true)
    }

    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    pub fn known_sizes(&self) -> &BTreeMap<String, u64> {
        &self.known_sizes
    }

    /// Replaces the known sizes; [`EpochRecord::save`] stores them.
    pub fn set_sizes(&mut self, sizes: BTreeMap<String, u64>) {
        self.known_sizes = sizes;
    }

    /// Adds to the known sizes, and returns true if that has changed them; [`EpochRecord::save`] stores them.
    pub fn learn_sizes(&mut self, sizes: BTreeMap<String, u64>) -> bool {
        let known = self.known_sizes.clone();
        self.known_sizes.extend(sizes);
        self.known_sizes != known
    }

    /// Returns the series of sums of blocks that counts.
    pub fn series(&self) -> Option<u64> {
        self.block_sums
    }

    /// Begins a series, durably. Pages of earlier series never count again: a later one has a greater number.
    pub fn begin_series(&mut self, directory: &Directory) -> Result<u64, StoreError> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = u64::try_from(since.as_nanos()).unwrap_or(1);
        let series = now.max(self.last_series.saturating_add(1));
        (self.block_sums, self.last_series) = (Some(series), series);
        if let Err(error) = self.save(directory) {
            self.block_sums = None;
            return Err(error);
        }
        Ok(series)
    }

    /// Invalidates all sums of blocks, durably, and removes their file.
    pub fn drop_series(&mut self, directory: &Directory) -> Result<(), StoreError> {
        if let Some(series) = self.block_sums.take()
            && let Err(error) = self.save(directory)
        {
            self.block_sums = Some(series);
            return Err(error);
        }
        directory.unlink(BLOCK_SUMS_FILE)
    }

    /// Invalidates all sums of blocks, durably. Changes of the volume do not keep the set of regions without
    /// sums from now on.
    pub fn forget_sums(&mut self, directory: &Directory) -> Result<(), StoreError> {
        self.drop_series(directory)?;
        self.set_keeps_sums(false);
        Ok(())
    }

    /// Records whether changes of the volume keep the set of regions without sums from now on.
    pub fn set_keeps_sums(&mut self, keeps_sums: bool) {
        self.keeps_sums = keeps_sums;
    }

    /// Returns true if a change of the volume would leave wrong sums behind.
    pub fn has_unkept_sums(&self) -> bool {
        self.block_sums.is_some() && !self.keeps_sums
    }

    pub fn save(&self, directory: &Directory) -> Result<(), StoreError> {
        let mut bytes = serde_json::to_vec(self)
            .map_err(|error| StoreError::io("write", directory.path_of(EPOCH_RECORD_FILE), error))?;
        bytes.push(b'\n');
        directory.replace(EPOCH_RECORD_FILE, &bytes)
    }
}

impl HeadIdentity {
    fn of(directory: &Directory, name: &str) -> Result<Option<HeadIdentity>, StoreError> {
        let stat = directory.stat(name)?;
        Ok(stat.map(|stat| HeadIdentity {
            name: name.to_owned(),
            inode: stat.inode,
            ctime_ns: stat.ctime_ns,
        }))
    }
}

/// Returns the identity, with the time of modification, not of change: a rename changes the latter.
fn identity(directory: &Directory, name: &str) -> Result<FileIdentity, StoreError> {
    let file = directory.open_file(name, OFlag::O_RDONLY)?;
    let stat = stat_of(&file).map_err(|error| StoreError::io("look at", directory.path_of(name), error))?;
    let bytes = directory.read(name)?.unwrap_or_default();
    Ok(FileIdentity { inode: stat.inode, mtime_ns: stat.mtime_ns, crc32c: crc32c::crc32c(&bytes) })
}

#[cfg(shorthorn_fuzzing)]
pub(crate) mod fuzzing {
    use super::*;

    /// A record that is accepted has an epoch that can rise, and is read again as the same.
    pub fn check(bytes: &[u8]) {
        let Some(epoch_record) = EpochRecord::parse(bytes) else { return };
        assert!(epoch_record.epoch > 0 && epoch_record.epoch < u64::MAX);
        let written = serde_json::to_vec(&epoch_record).expect("a record that was read");
        assert_eq!(EpochRecord::parse(&written), Some(epoch_record));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn epoch_record() -> EpochRecord {
        let meta = FileIdentity { inode: 7, mtime_ns: 1 << 60, crc32c: 5 };
        let head = HeadIdentity { name: "volume-head-000.img".to_owned(), inode: 8, ctime_ns: -1 };
        let known_sizes = BTreeMap::from([("volume-snap-a.img".to_owned(), 4096)]);
        EpochRecord {
            epoch: 9,
            volume_meta: vec![meta],
            head: Some(head),
            known_sizes,
            block_sums: Some(3),
            last_series: 3,
            awaits_state: false,
            keeps_sums: false,
        }
    }

    #[test]
    fn a_record_has_an_epoch_that_has_a_next_one() {
        let with = |epoch| serde_json::to_vec(&EpochRecord { epoch, ..epoch_record() }).unwrap();
        assert_eq!(EpochRecord::parse(&with(9)), Some(epoch_record()));
        assert_eq!((EpochRecord::parse(&with(0)), EpochRecord::parse(&with(u64::MAX))), (None, None));
    }

    #[test]
    fn sizes_are_learned_once() {
        let mut epoch_record = epoch_record();
        let sizes = |bytes| BTreeMap::from([("volume-snap-b.img".to_owned(), bytes)]);
        assert!(epoch_record.learn_sizes(sizes(4096)) && !epoch_record.learn_sizes(sizes(4096)));
        assert!(epoch_record.learn_sizes(sizes(8192)));
        assert_eq!(epoch_record.known_sizes().len(), 2);
        epoch_record.set_sizes(BTreeMap::new());
        assert!(epoch_record.known_sizes().is_empty());
    }

    #[test]
    fn a_series_counts_from_its_record_on_and_its_number_only_rises() {
        let temp = tempfile::tempdir().unwrap();
        let directory = Directory::open(temp.path()).unwrap();
        let mut epoch_record = EpochRecord { last_series: u64::MAX - 1, ..epoch_record() };
        assert_eq!(epoch_record.begin_series(&directory).unwrap(), u64::MAX);
        let stored = EpochRecord::load(&directory).unwrap().unwrap();
        assert_eq!(stored.series(), Some(u64::MAX));
        assert!(epoch_record.has_unkept_sums());
        epoch_record.set_keeps_sums(true);
        assert!(!epoch_record.has_unkept_sums());
        assert!(
            EpochRecord::load(&directory).unwrap().unwrap().has_unkept_sums(),
            "the next process may not"
        );
        epoch_record.forget_sums(&directory).unwrap();
        assert_eq!((epoch_record.series(), epoch_record.has_unkept_sums()), (None, false));
        let stored = EpochRecord::load(&directory).unwrap().unwrap();
        assert_eq!((stored.series(), stored.last_series), (None, u64::MAX));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_record_or_none(bytes in prop::collection::vec(any::<u8>(), 0..120)) {
            EpochRecord::parse(&bytes);
        }

        #[test]
        fn a_changed_record_is_none_or_written_again(
            at in any::<prop::sample::Index>(),
            new in prop::sample::select(
                vec!["0", "9", "99999999999999999999", "-1", "\"", "{", "]", "null", "\0", ""]
            ),
            removed in 0usize..4,
        ) {
            let mut bytes = serde_json::to_vec(&epoch_record()).unwrap();
            let at = at.index(bytes.len());
            bytes.splice(at..(at + removed).min(bytes.len()), new.bytes());
            if let Some(found) = EpochRecord::parse(&bytes) {
                prop_assert!(found.epoch > 0 && found.epoch.checked_add(1).is_some());
                prop_assert_eq!(EpochRecord::parse(&serde_json::to_vec(&found).unwrap()), Some(found));
            }
        }
    }
}
