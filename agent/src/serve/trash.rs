//! The trash of a disk: where the directories of deleted replicas stay for a while.
//!
//! Each has a folder of its own in `replicas/.shorthorn-trash`, on the file system of the replicas: a checked record, and the
//! directory as it was. The record is durable before the directory is moved, so a directory in the trash always says whose it
//! is. A folder without a directory is what a move has left that was cut off before or after it, and holds nothing.
//!
//! A folder that is deleted for good is renamed first, so that a directory of which a part is gone is never restored.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::statvfs;
use serde::{Deserialize, Serialize};
use shorthorn_proto::v1;
use shorthorn_store::{StoreError, hold, with_check, without_check};
use shorthorn_types::{ReplicaId, VolumeName};
use tokio::sync::watch;

use crate::serve::blocking;
use crate::serve::config::Config;
use crate::serve::disks::{Disks, REPLICAS, directory_of};
use crate::serve::error::NodeError;
use crate::serve::instance::InstanceId;

/// Below the folder of replicas. Longhorn takes names that end in a hyphen and eight letters or digits for replicas.
const TRASH: &str = ".shorthorn-trash";
const RECORD: &str = "record.json";
const DIRECTORY: &str = "replica";
/// What the name of a folder ends with that is being deleted for good.
const GONE: &str = ".gone";
/// The longest record that a caller may have kept.
const RECORD_MAX_BYTES: usize = 64 << 10;
/// How often the trash is looked at. A disk does not fill up by the share that is kept free in that time.
const SWEEP_EVERY: Duration = Duration::from_secs(10);

/// How long something stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrashLimits {
    /// Zero: nothing is kept.
    pub keep: Duration,
    /// If less of the disk is free, the oldest go.
    pub free_percent: u32,
}

impl TrashLimits {
    /// Those of the configuration.
    pub fn of(config: &Config) -> TrashLimits {
        TrashLimits {
            keep: Duration::from_hours(config.trash_hours.into()),
            free_percent: config.trash_free_percent,
        }
    }

    fn keep_ms(self) -> u64 {
        u64::try_from(self.keep.as_millis()).unwrap_or(u64::MAX)
    }
}

/// Whose directory it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    volume: VolumeName,
    replica: ReplicaId,
    deleted_ms: u64,
    allocated_bytes: u64,
    /// What the caller wants to know when it is restored.
    #[serde(default)]
    note: String,
}

/// A directory in the trash.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    folder: PathBuf,
    id: InstanceId,
    deleted_ms: u64,
    /// Why it cannot be restored, where that is so.
    record: Result<Record, String>,
}

/// Milliseconds since 1970.
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn root_of(disk: &Path) -> PathBuf {
    disk.join(REPLICAS).join(TRASH)
}

fn folder_of(disk: &Path, id: &InstanceId, deleted_ms: u64) -> PathBuf {
    root_of(disk).join(format!("{}.{deleted_ms}", id.name()))
}

fn sync(directory: &Path) -> Result<(), NodeError> {
    fs::File::open(directory).and_then(|open| open.sync_all()).map_err(NodeError::at(directory))
}

fn make(directory: &Path) -> Result<(), NodeError> {
    match fs::DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(NodeError::at(directory)(error)),
        _ => Ok(()),
    }
}

/// Moves the directory of a replica that no process has open into the trash.
///
/// # Errors
/// [`NodeError::Precondition`] if a process has it open; [`NodeError::Exhausted`] if the disk has no space for the record. The
/// directory is where it was then.
pub fn move_in(disk: &Path, id: &InstanceId, note: &str, now_ms: u64) -> Result<(), NodeError> {
    let InstanceId::Replica(volume, replica) = id else {
        return Err(NodeError::Invalid(format!("the {id} is no replica")));
    };
    if note.len() > RECORD_MAX_BYTES {
        let length = note.len();
        return Err(NodeError::Invalid(format!(
            "a record of {length} bytes, and at most {RECORD_MAX_BYTES}"
        )));
    }
    let directory = directory_of(disk, id);
    // Until the end: whoever opens it meanwhile finds it held, and after that it is not there.
    let _held = hold(&directory).map_err(|error| of_store(&error))?;
    let folder = folder_of(disk, id, now_ms);
    make(&root_of(disk))?;
    sync(&disk.join(REPLICAS))?;
    make(&folder)?;
    sync(&root_of(disk))?;
    let record = Record {
        volume: volume.clone(),
        replica: *replica,
        deleted_ms: now_ms,
        allocated_bytes: allocated_bytes(&directory),
        note: note.to_owned(),
    };
    write_record(&folder, &record)?;
    move_durably(&directory, &folder.join(DIRECTORY))
}

/// Takes the directory of a replica out of the trash, to where it was.
///
/// # Errors
/// [`NodeError::NotFound`] if it is not there, [`NodeError::Precondition`] if it cannot be used, or if something else has its
/// place.
pub fn restore(disk: &Path, id: &InstanceId, deleted_ms: u64) -> Result<(), NodeError> {
    let (folder, directory) = (folder_of(disk, id, deleted_ms), directory_of(disk, id));
    let is_in_place = directory.try_exists().map_err(NodeError::at(&directory))?;
    if !is_there(&folder)? {
        if is_in_place {
            return Ok(());
        }
        return Err(NodeError::NotFound(format!("{} is not in the trash any more", folder.display())));
    }
    if is_in_place {
        return Err(NodeError::Precondition(format!(
            "{} is there already: two directories cannot be one replica",
            directory.display()
        )));
    }
    read_record(&folder, id, deleted_ms).map_err(NodeError::Precondition)?;
    move_durably(&folder.join(DIRECTORY), &directory)?;
    tracing::info!("{} is restored from the trash", directory.display());
    // What is left is empty, and goes sooner or later.
    let _ = fs::remove_dir_all(&folder);
    Ok(())
}

/// Deletes a directory in the trash for good.
///
/// # Errors
/// What the file system says.
pub fn remove(disk: &Path, id: &InstanceId, deleted_ms: u64) -> Result<(), NodeError> {
    let folder = folder_of(disk, id, deleted_ms);
    if !folder.try_exists().map_err(NodeError::at(&folder))? {
        return Ok(());
    }
    let mut gone = folder.clone().into_os_string();
    gone.push(GONE);
    let gone = PathBuf::from(gone);
    fs::rename(&folder, &gone).map_err(NodeError::at(&folder))?;
    sync(&root_of(disk))?;
    fs::remove_dir_all(&gone).map_err(NodeError::at(&gone))
}

/// Both directories are durable as they are after it: the one that it has left first, as it may be in both after a crash of a
/// file system that keeps no order, and in none never.
fn move_durably(from: &Path, to: &Path) -> Result<(), NodeError> {
    fs::rename(from, to).map_err(NodeError::at(from))?;
    for parent in [to.parent(), from.parent()].into_iter().flatten() {
        sync(parent)?;
    }
    Ok(())
}

fn is_there(folder: &Path) -> Result<bool, NodeError> {
    folder.join(DIRECTORY).try_exists().map_err(NodeError::at(folder))
}

fn write_record(folder: &Path, record: &Record) -> Result<(), NodeError> {
    let path = folder.join(RECORD);
    let mut document = serde_json::to_vec(record)
        .map_err(|error| NodeError::Unavailable(format!("{}: {error}", path.display())))?;
    document.push(b'\n');
    let written = fs::write(&path, with_check(document)).and_then(|()| fs::File::open(&path)?.sync_all());
    written.map_err(NodeError::at(&path))?;
    sync(folder)
}

fn read_record(folder: &Path, id: &InstanceId, deleted_ms: u64) -> Result<Record, String> {
    let path = folder.join(RECORD);
    let bytes = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let document = without_check(RECORD, &bytes).map_err(|error| error.to_string())?;
    let record: Record =
        serde_json::from_slice(&document).map_err(|error| format!("{}: {error}", path.display()))?;
    let is_its_own = *id == InstanceId::Replica(record.volume.clone(), record.replica);
    if !is_its_own || record.deleted_ms != deleted_ms {
        return Err(format!("{} is of another directory", path.display()));
    }
    Ok(record)
}

/// What the files of a directory take on the disk, as far as they can be looked at.
fn allocated_bytes(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.metadata().ok()).map(|file| file.blocks().saturating_mul(512)).sum()
}

fn of_store(error: &StoreError) -> NodeError {
    match error {
        StoreError::Locked { .. } => NodeError::Precondition(error.to_string()),
        _ => NodeError::Unavailable(error.to_string()),
    }
}

/// What is in the trash of a disk, the oldest first.
fn entries(disk: &Path) -> Vec<Entry> {
    let found = fs::read_dir(root_of(disk)).into_iter().flatten().flatten();
    let mut all: Vec<Entry> = found.filter_map(|found| entry(found.path())).collect();
    all.sort_by(|one, other| (one.deleted_ms, &one.id).cmp(&(other.deleted_ms, &other.id)));
    all
}

fn entry(folder: PathBuf) -> Option<Entry> {
    let (name, deleted_ms) = folder.file_name()?.to_str()?.rsplit_once('.')?;
    let (id, deleted_ms) =
        (InstanceId::parse(v1::InstanceKind::Replica, name).ok()?, deleted_ms.parse().ok()?);
    if !folder.join(DIRECTORY).is_dir() {
        return None;
    }
    let record = read_record(&folder, &id, deleted_ms);
    Some(Entry { folder, id, deleted_ms, record })
}

impl Entry {
    fn allocated_bytes(&self) -> u64 {
        match &self.record {
            Ok(record) => record.allocated_bytes,
            Err(_) => allocated_bytes(&self.folder.join(DIRECTORY)),
        }
    }
}

/// What is in the trash of a disk, as the node API shows it.
pub fn list(disk: &Path, disk_uuid: &str, limits: TrashLimits) -> Vec<v1::TrashedReplica> {
    let shown = |entry: Entry| {
        let InstanceId::Replica(volume, replica) = &entry.id else { return None };
        Some(v1::TrashedReplica {
            disk_path: disk.display().to_string(),
            disk_uuid: disk_uuid.to_owned(),
            volume: volume.to_string(),
            replica_id: replica.to_string(),
            deleted_ms: entry.deleted_ms,
            expires_ms: entry.deleted_ms.saturating_add(limits.keep_ms()),
            allocated_bytes: entry.allocated_bytes(),
            problem: entry.record.as_ref().err().cloned().unwrap_or_default(),
            record: entry.record.map(|record| record.note).unwrap_or_default(),
        })
    };
    entries(disk).into_iter().filter_map(shown).collect()
}

/// What the trash of a disk takes of it.
pub fn trash_bytes(disk: &Path) -> u64 {
    entries(disk).iter().map(Entry::allocated_bytes).sum()
}

/// The space of a disk.
#[derive(Clone, Copy, Debug)]
struct Space {
    total_bytes: u64,
    available_bytes: u64,
}

/// How many of these go, the oldest first: `all` are the times of deletion and sizes in that order.
fn outlived(all: &[(u64, u64)], limits: TrashLimits, space: Space, now_ms: u64) -> usize {
    let is_over = |deleted_ms: u64| now_ms.saturating_sub(deleted_ms) >= limits.keep_ms();
    let wanted_bytes = u128::from(space.total_bytes) * u128::from(limits.free_percent) / 100;
    let mut available_bytes = u128::from(space.available_bytes);
    let mut gone = 0;
    for (deleted_ms, bytes) in all {
        if !is_over(*deleted_ms) && available_bytes >= wanted_bytes {
            break;
        }
        available_bytes += u128::from(*bytes);
        gone += 1;
    }
    gone
}

/// Deletes what has been in the trash of a disk for long enough, or what the disk needs the space of.
pub fn sweep(disk: &Path, limits: TrashLimits, now_ms: u64) {
    remove_gone(disk);
    let all = entries(disk);
    if all.is_empty() {
        return;
    }
    let Ok(space) = statvfs(disk) else { return };
    let space = Space {
        total_bytes: space.f_blocks.saturating_mul(space.f_frsize),
        available_bytes: space.f_bavail.saturating_mul(space.f_frsize),
    };
    let sizes: Vec<(u64, u64)> =
        all.iter().map(|entry| (entry.deleted_ms, entry.allocated_bytes())).collect();
    for entry in &all[..outlived(&sizes, limits, space, now_ms)] {
        match remove(disk, &entry.id, entry.deleted_ms) {
            Ok(()) => tracing::info!("{} is deleted for good", entry.folder.display()),
            Err(error) => tracing::warn!("{error}"),
        }
    }
}

/// Ends the deletions that were cut off, and removes what a move has left.
fn remove_gone(disk: &Path) {
    for found in fs::read_dir(root_of(disk)).into_iter().flatten().flatten() {
        let path = found.path();
        let is_gone = path.to_str().is_some_and(|path| path.ends_with(GONE));
        if is_gone && let Err(error) = fs::remove_dir_all(&path) {
            tracing::warn!("{}: {error}", path.display());
        }
    }
}

/// Sweeps the trash of all disks now and then, until the agent stops.
pub async fn keep_swept(disks: Arc<Disks>, limits: TrashLimits, mut stopping: watch::Receiver<bool>) {
    loop {
        let all = Arc::clone(&disks);
        let swept = blocking(move || {
            all.paths().iter().for_each(|disk| sweep(disk, limits, now_ms()));
            Ok(())
        });
        if let Err(error) = swept.await {
            tracing::warn!("the trash is not swept: {error}");
        }
        tokio::select! {
            () = tokio::time::sleep(SWEEP_EVERY) => {}
            _ = stopping.wait_for(|stopping| *stopping) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_store::{CreateOptions, OpenOptions, Store};

    use super::*;

    const HOUR_MS: u64 = 3_600_000;
    const NAME: &str = "v1-0123abcd";
    const LIMITS: TrashLimits = TrashLimits { keep: Duration::from_hours(24), free_percent: 0 };

    fn replica() -> InstanceId {
        InstanceId::parse(v1::InstanceKind::Replica, NAME).unwrap()
    }

    /// A disk with one replica.
    fn disk() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join(REPLICAS)).unwrap();
        made(dir.path());
        dir
    }

    fn made(disk: &Path) -> PathBuf {
        let directory = directory_of(disk, &replica());
        let created = CreateOptions { size_bytes: 1 << 20, ..CreateOptions::default() };
        Store::create(&directory, created).unwrap().close().unwrap();
        directory
    }

    #[test]
    fn what_was_deleted_comes_back_as_it_was() {
        let dir = disk();
        let directory = directory_of(dir.path(), &replica());
        fs::write(directory.join("mark"), "mine").unwrap();
        move_in(dir.path(), &replica(), "a note", HOUR_MS).unwrap();
        assert!(!directory.exists());
        let shown = list(dir.path(), "u-1", LIMITS);
        assert_eq!(shown.len(), 1);
        assert_eq!((shown[0].volume.as_str(), shown[0].replica_id.as_str()), ("v1", "0123abcd"));
        assert_eq!((shown[0].deleted_ms, shown[0].expires_ms), (HOUR_MS, 25 * HOUR_MS));
        assert_eq!((shown[0].record.as_str(), shown[0].problem.as_str()), ("a note", ""));
        assert!(shown[0].allocated_bytes > 0 && trash_bytes(dir.path()) == shown[0].allocated_bytes);
        restore(dir.path(), &replica(), HOUR_MS).unwrap();
        assert_eq!(fs::read_to_string(directory.join("mark")).unwrap(), "mine");
        assert!(list(dir.path(), "u-1", LIMITS).is_empty());
        restore(dir.path(), &replica(), HOUR_MS).unwrap();
        fs::remove_dir_all(&directory).unwrap();
        assert!(matches!(restore(dir.path(), &replica(), HOUR_MS), Err(NodeError::NotFound(_))));
    }

    #[test]
    fn a_directory_that_a_process_has_open_stays() {
        let dir = disk();
        let directory = directory_of(dir.path(), &replica());
        let store = Store::open(&directory, OpenOptions::default()).unwrap();
        assert!(matches!(move_in(dir.path(), &replica(), "", 1), Err(NodeError::Precondition(_))));
        assert!(directory.exists() && !root_of(dir.path()).exists());
        store.close().unwrap();
        move_in(dir.path(), &replica(), "", 1).unwrap();
    }

    #[test]
    fn no_replica_takes_the_place_of_another_one() {
        let dir = disk();
        move_in(dir.path(), &replica(), "", 1).unwrap();
        made(dir.path());
        assert!(matches!(restore(dir.path(), &replica(), 1), Err(NodeError::Precondition(_))));
        assert_eq!(list(dir.path(), "", LIMITS).len(), 1);
    }

    /// Wherever the move is cut off, the directory is in one place, and in the trash only with its record.
    #[test]
    fn a_move_that_is_cut_off_loses_nothing() {
        let dir = disk();
        let (directory, folder) =
            (directory_of(dir.path(), &replica()), folder_of(dir.path(), &replica(), 7));
        make(&root_of(dir.path())).unwrap();
        make(&folder).unwrap();
        assert!(list(dir.path(), "", LIMITS).is_empty() && directory.exists(), "before its record");
        fs::write(folder.join(RECORD), "{").unwrap();
        assert!(list(dir.path(), "", LIMITS).is_empty() && directory.exists(), "within its record");
        // The same again goes to its end.
        move_in(dir.path(), &replica(), "", 7).unwrap();
        assert_eq!(list(dir.path(), "", LIMITS).len(), 1);
        // A restore that is cut off before the rest was removed.
        fs::rename(folder.join(DIRECTORY), &directory).unwrap();
        assert!(list(dir.path(), "", LIMITS).is_empty() && folder.exists());
        restore(dir.path(), &replica(), 7).unwrap();
    }

    #[test]
    fn a_record_that_is_damaged_or_of_another_one_restores_nothing() {
        let dir = disk();
        move_in(dir.path(), &replica(), "a note", 7).unwrap();
        let path = folder_of(dir.path(), &replica(), 7).join(RECORD);
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replace("a note", "b note")).unwrap();
        let shown = list(dir.path(), "", LIMITS);
        assert!(shown[0].problem.contains("ShorthornCheck") && shown[0].record.is_empty(), "{shown:?}");
        assert!(shown[0].allocated_bytes > 0);
        assert!(matches!(restore(dir.path(), &replica(), 7), Err(NodeError::Precondition(_))));
        fs::write(&path, &text).unwrap();
        let moved = folder_of(dir.path(), &replica(), 8);
        fs::rename(folder_of(dir.path(), &replica(), 7), &moved).unwrap();
        assert!(matches!(restore(dir.path(), &replica(), 8), Err(NodeError::Precondition(_))));
        assert!(moved.join(DIRECTORY).exists());
    }

    #[test]
    fn the_oldest_go_first_when_their_time_is_over_or_space_is_short() {
        let limits = TrashLimits { keep: Duration::from_hours(24), free_percent: 10 };
        let space = |available_bytes| Space { total_bytes: 1000, available_bytes };
        let all = [(0, 30), (10 * HOUR_MS, 30), (20 * HOUR_MS, 30)];
        let gone = |available, hours| outlived(&all, limits, space(available), hours * HOUR_MS);
        assert_eq!(gone(100, 23), 0);
        assert_eq!((gone(100, 24), gone(100, 34), gone(100, 44)), (1, 2, 3));
        assert_eq!((gone(99, 23), gone(70, 23), gone(69, 23), gone(0, 23)), (1, 1, 2, 3));
        // A clock that was set back deletes nothing.
        assert_eq!(outlived(&[(HOUR_MS, 1)], limits, space(500), 0), 0);
        let off = TrashLimits { keep: Duration::ZERO, free_percent: 0 };
        assert_eq!(outlived(&all, off, space(500), 20 * HOUR_MS), 3);
    }

    #[test]
    fn a_sweep_ends_what_was_cut_off_and_leaves_what_is_young() {
        let dir = disk();
        move_in(dir.path(), &replica(), "", HOUR_MS).unwrap();
        made(dir.path());
        move_in(dir.path(), &replica(), "", 2 * HOUR_MS).unwrap();
        let cut_off = root_of(dir.path()).join("v1-0123abcd.5.gone");
        fs::create_dir(&cut_off).unwrap();
        sweep(dir.path(), LIMITS, 25 * HOUR_MS);
        assert!(!cut_off.exists());
        let left: Vec<u64> = list(dir.path(), "", LIMITS).iter().map(|shown| shown.deleted_ms).collect();
        assert_eq!(left, [2 * HOUR_MS]);
        remove(dir.path(), &replica(), 2 * HOUR_MS).unwrap();
        remove(dir.path(), &replica(), 2 * HOUR_MS).unwrap();
        assert_eq!(fs::read_dir(root_of(dir.path())).unwrap().count(), 0);
    }
}
