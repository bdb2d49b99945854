//! The trash of a disk, which keeps the directories of deleted replicas for a while.
//!
//! Each directory has a folder of its own in `replicas/.shorthorn-trash`, on the file system of the replicas.
//! The folder has a checked record, and the unchanged directory. The record is durable before the directory
//! is moved, so a directory in the trash always has its identity. A folder without a directory remains from a
//! move that was interrupted before or after it, and holds no data.
//!
//! The folder of a restored directory stays, with the record and a file `restored`. The agent lists the
//! directory as restored as long as it is in place. So an interrupted undeletion finds the directories that
//! it has restored, and removes the folders at the end. A directory without an owner is thus always listed.
//!
//! A folder that is deleted for good is renamed first, so that a partly deleted directory is never restored.
//! A deletion holds the lock that each process of a replica takes, and so does an export.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::sys::statvfs::statvfs;
use serde::{Deserialize, Serialize};
use shorthorn_api::v1;
use shorthorn_store::{DirectoryLock, StoreError, lock_directory, with_check, without_check};
use shorthorn_types::{ReplicaId, VolumeName};

use crate::serve::config::Config;
use crate::serve::directories::{REPLICAS, directory_of, remove_tree};
use crate::serve::error::NodeError;
use crate::serve::instance::InstanceId;
use crate::serve::salvage;

/// The folder of the trash, below the folder of replicas. Longhorn does not take it for a replica: its
/// replicas have names that end in a hyphen and eight letters or digits.
const TRASH: &str = ".shorthorn-trash";
const RECORD: &str = "record.json";
const DIRECTORY: &str = "replica";
/// The file in the folder of a directory that is restored to its place, or is about to be.
const RESTORED: &str = "restored";
/// The suffix of the name of a folder that is being deleted for good.
const GONE: &str = ".gone";
/// The longest record that a caller may have kept.
const RECORD_MAX_BYTES: usize = 64 << 10;
/// The time and the space after which deleted directories are removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrashLimits {
    /// The retention; zero keeps nothing.
    pub keep: Duration,
    /// The share of free space below which the oldest directories are deleted.
    pub free_percent: u32,
}

impl TrashLimits {
    /// Returns the limits of the configuration.
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

/// The identity of a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    volume: VolumeName,
    replica: ReplicaId,
    deleted_ms: u64,
    allocated_bytes: u64,
    /// The note of the caller for the restoration.
    #[serde(default)]
    note: String,
}

/// A directory in the trash.
#[derive(Clone, Debug, PartialEq, Eq)]
struct TrashEntry {
    folder: PathBuf,
    id: InstanceId,
    deleted_ms: u64,
    /// The path below the folder of the trash.
    directory: PathBuf,
    /// True if the directory is in its former place.
    is_restored: bool,
    /// The record, or the reason why the directory cannot be restored.
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

/// Locks the directory of a replica, so that no process opens it until the value is dropped.
///
/// # Errors
/// [`NodeError::Precondition`] if a process has it open.
pub fn lock(directory: &Path) -> Result<DirectoryLock, NodeError> {
    Ok(lock_directory(directory)?)
}

/// Moves the directory of a replica, which `_lock` protects, into the trash. Without a note, an existing one
/// stays. Older content of the trash is deleted if the disk has no space for the record.
///
/// # Errors
/// [`NodeError::Exhausted`] if the disk has no space for the record, and the trash has nothing else. The
/// directory is in its former place then.
pub fn move_in(
    disk: &Path,
    id: &InstanceId,
    _lock: &DirectoryLock,
    note: &str,
    now_ms: u64,
) -> Result<(), NodeError> {
    let InstanceId::Replica(volume, replica) = id else {
        return Err(NodeError::Invalid(format!("the {id} is not a replica")));
    };
    if note.len() > RECORD_MAX_BYTES {
        let length = note.len();
        return Err(NodeError::Invalid(format!(
            "a record of {length} bytes, and at most {RECORD_MAX_BYTES}"
        )));
    }
    let directory = directory_of(disk, id);
    let folder = folder_of(disk, id, now_ms);
    let record = Record {
        volume: volume.clone(),
        replica: *replica,
        deleted_ms: now_ms,
        allocated_bytes: allocated_bytes(&directory),
        note: if note.is_empty() { former_note(disk, id)? } else { note.to_owned() },
    };
    with_room(
        || {
            let written = write_folder(disk, &folder, &record);
            if written.is_err() {
                // It takes space that the next attempt needs, and holds nothing.
                let _ = fs::remove_dir_all(&folder);
            }
            written
        },
        || remove_oldest(disk),
    )?;
    move_durably(&directory, &folder.join(DIRECTORY))?;
    remove_leftovers(disk, |entry, _| entry == id);
    Ok(())
}

/// Returns the note of the newest folder from which the directory was restored: a later deletion without a
/// note moves it to the trash again.
fn former_note(disk: &Path, id: &InstanceId) -> Result<String, NodeError> {
    let restored = entries_of(disk, |other| other == id)?.into_iter().filter(|entry| entry.is_restored);
    let newest = restored.max_by_key(|entry| entry.deleted_ms);
    Ok(newest.and_then(|entry| entry.record.ok()).map(|record| record.note).unwrap_or_default())
}

fn write_folder(disk: &Path, folder: &Path, record: &Record) -> Result<(), NodeError> {
    make(&root_of(disk))?;
    sync(&disk.join(REPLICAS))?;
    make(folder)?;
    sync(&root_of(disk))?;
    write_record(folder, record)
}

/// Does `work` again for as long as the disk is full and `give_up` gives something else up.
fn with_room(
    mut work: impl FnMut() -> Result<(), NodeError>,
    mut give_up: impl FnMut() -> bool,
) -> Result<(), NodeError> {
    loop {
        match work() {
            Err(NodeError::Exhausted(_)) if give_up() => {}
            done => return done,
        }
    }
}

/// Deletes the oldest directory in the trash that is not being read. Returns false if the trash has none.
fn remove_oldest(disk: &Path) -> bool {
    let all = entries(disk).unwrap_or_else(|error| {
        tracing::warn!("{error}");
        Vec::new()
    });
    for entry in all.into_iter().filter(|entry| !entry.is_restored) {
        match remove(disk, &entry.id, entry.deleted_ms) {
            Ok(()) => {
                tracing::info!("{} is deleted for good: the disk is full", entry.folder.display());
                return true;
            }
            Err(error) => tracing::warn!("{error}"),
        }
    }
    false
}

/// Restores the directory of a replica from the trash to its place. Its record stays until it is removed.
///
/// # Errors
/// [`NodeError::NotFound`] if it does not exist, [`NodeError::Precondition`] if it cannot be used or is being
/// read, or if something else has its place.
pub fn restore(disk: &Path, id: &InstanceId, deleted_ms: u64) -> Result<(), NodeError> {
    let (folder, directory) = (folder_of(disk, id, deleted_ms), directory_of(disk, id));
    let is_in_place = directory.try_exists().map_err(NodeError::at(&directory))?;
    if !is_there(&folder)? {
        if is_in_place {
            return Ok(());
        }
        return Err(gone(&folder));
    }
    if is_in_place {
        return Err(NodeError::Precondition(format!(
            "{} already exists: two directories cannot be one replica",
            directory.display()
        )));
    }
    // Until the end: a sweep skips a locked directory.
    let _lock = lock_unless_unreadable(&folder.join(DIRECTORY))?;
    let restored = read_record(&folder, id, deleted_ms).map_err(NodeError::Precondition).and_then(|_| {
        let path = folder.join(RESTORED);
        fs::File::create(&path).and_then(|file| file.sync_all()).map_err(NodeError::at(&path))?;
        sync(&folder)?;
        move_durably(&folder.join(DIRECTORY), &directory)
    });
    match restored {
        // A sweep has come first.
        Err(_) if !folder.try_exists().map_err(NodeError::at(&folder))? => Err(gone(&folder)),
        Err(error) => Err(error),
        Ok(()) => {
            tracing::info!("{} is restored from the trash", directory.display());
            Ok(())
        }
    }
}

fn gone(folder: &Path) -> NodeError {
    NodeError::NotFound(format!("{} is no longer in the trash", folder.display()))
}

/// Locks a directory in the trash, against exports, restores and deletions. If that fails for another reason
/// than another lock, no other process can read the directory either.
fn lock_unless_unreadable(directory: &Path) -> Result<Option<DirectoryLock>, NodeError> {
    match lock_directory(directory) {
        Err(error @ StoreError::Locked { .. }) => Err(error.into()),
        lock => Ok(lock.ok()),
    }
}

/// Returns whether the data of that replica is in the trash: an empty directory must not take its place.
///
/// # Errors
/// The trash cannot be read: it may be there.
pub fn has(disk: &Path, id: &InstanceId) -> Result<bool, NodeError> {
    Ok(entries_of(disk, |other| other == id)?.iter().any(|entry| !entry.is_restored))
}

/// Deletes a directory in the trash for good. If it was restored, only the record is deleted.
///
/// # Errors
/// [`NodeError::Precondition`] if it is being read, and the error of the file system.
pub fn remove(disk: &Path, id: &InstanceId, deleted_ms: u64) -> Result<(), NodeError> {
    let folder = folder_of(disk, id, deleted_ms);
    if !folder.try_exists().map_err(NodeError::at(&folder))? {
        return Ok(());
    }
    // The lock lasts until the end: a running export is not interrupted, and none begins.
    let was_there = is_there(&folder)?;
    let _lock = if was_there { lock_unless_unreadable(&folder.join(DIRECTORY))? } else { None };
    if was_there && !is_there(&folder)? {
        // It was restored meanwhile; its record stays.
        return Ok(());
    }
    let mut gone = folder.clone().into_os_string();
    gone.push(GONE);
    let gone = PathBuf::from(gone);
    match fs::rename(&folder, &gone) {
        // Another deletion, such as a sweep, was faster.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        renamed => renamed.map_err(NodeError::at(&folder))?,
    }
    sync(&root_of(disk))?;
    remove_tree(&gone).map_err(NodeError::at(&gone))
}

/// Moves a directory durably: syncs the directory that it has left first. After a crash of a file system that
/// keeps no order it may be in both, but never in neither.
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
        return Err(format!("{} describes another directory", path.display()));
    }
    Ok(record)
}

/// Returns the allocated bytes of the readable files of a directory.
fn allocated_bytes(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.metadata().ok()).map(|file| file.blocks().saturating_mul(512)).sum()
}

/// Returns the content of the trash of a disk, the oldest first. A disk without a trash has none.
fn entries(disk: &Path) -> Result<Vec<TrashEntry>, NodeError> {
    entries_of(disk, |_| true)
}

/// Returns the folders of the selected replicas.
fn entries_of(disk: &Path, is_meant: impl Fn(&InstanceId) -> bool) -> Result<Vec<TrashEntry>, NodeError> {
    let root = root_of(disk);
    let found = match fs::read_dir(&root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        found => found.map_err(NodeError::at(&root))?,
    };
    let mut all = Vec::new();
    for found in found {
        let folder = found.map_err(NodeError::at(&root))?.path();
        if named(&folder).is_some_and(|(id, _)| is_meant(&id)) {
            all.extend(entry(disk, folder));
        }
    }
    all.sort_by(|one, other| (one.deleted_ms, &one.id).cmp(&(other.deleted_ms, &other.id)));
    Ok(all)
}

/// Returns the entry of a folder. None: it is empty, or gone meanwhile. An unreadable one counts as a folder
/// with its directory.
fn entry(disk: &Path, folder: PathBuf) -> Option<TrashEntry> {
    let (id, deleted_ms) = named(&folder)?;
    let (inside, in_place) = (folder.join(DIRECTORY), directory_of(disk, &id));
    let look = || -> io::Result<(bool, bool)> {
        let is_restored = folder.join(RESTORED).try_exists()?;
        Ok((is_directory(&inside)?, is_restored && is_directory(&in_place)?))
    };
    let (is_restored, record) = match look() {
        Ok((true, _)) => (false, read_record(&folder, &id, deleted_ms)),
        Ok((false, true)) => (true, read_record(&folder, &id, deleted_ms)),
        Ok((false, false)) => return None,
        Err(error) => (false, Err(format!("{}: {error}", folder.display()))),
    };
    // A sweep may have renamed it in the middle of that.
    if record.is_err() && folder.try_exists().is_ok_and(|is_there| !is_there) {
        return None;
    }
    let directory = if is_restored { in_place } else { inside };
    Some(TrashEntry { folder, id, deleted_ms, directory, is_restored, record })
}

fn is_directory(path: &Path) -> io::Result<bool> {
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        found => Ok(found?.is_dir()),
    }
}

/// Returns the replica of the folder, and the time of its deletion.
fn named(folder: &Path) -> Option<(InstanceId, u64)> {
    let (name, deleted_ms) = folder.file_name()?.to_str()?.rsplit_once('.')?;
    Some((InstanceId::parse(v1::InstanceKind::Replica, name).ok()?, deleted_ms.parse().ok()?))
}

impl TrashEntry {
    fn allocated_bytes(&self) -> u64 {
        match &self.record {
            Ok(record) => record.allocated_bytes,
            Err(_) => allocated_bytes(&self.directory),
        }
    }
}

/// Returns the content of the trash of a disk for the node API.
///
/// # Errors
/// The trash cannot be read.
pub fn list(disk: &Path, disk_uuid: &str, limits: TrashLimits) -> Result<Vec<v1::TrashedReplica>, NodeError> {
    let shown = |entry: TrashEntry| {
        let InstanceId::Replica(volume, replica) = &entry.id else { return None };
        // Without that it is not known how new the data is; then the record has to do.
        let holds = salvage::inspect(&entry.directory, false).unwrap_or_default();
        Some(v1::TrashedReplica {
            disk_path: disk.display().to_string(),
            disk_uuid: disk_uuid.to_owned(),
            volume: volume.to_string(),
            replica_id: replica.to_string(),
            deleted_ms: entry.deleted_ms,
            expires_ms: entry.deleted_ms.saturating_add(limits.keep_ms()),
            allocated_bytes: entry.allocated_bytes(),
            problem: entry.record.as_ref().err().cloned().unwrap_or_default(),
            generation_text: holds.generation_text,
            generation: holds.generation,
            committed: holds.committed,
            proposed: holds.proposed,
            restored: entry.is_restored,
            record: entry.record.map(|record| record.note).unwrap_or_default(),
        })
    };
    Ok(entries(disk)?.into_iter().filter_map(shown).collect())
}

/// Returns the bytes that the readable part of the trash of a disk takes.
pub fn trash_bytes(disk: &Path) -> u64 {
    entries(disk)
        .unwrap_or_default()
        .iter()
        .filter(|entry| !entry.is_restored)
        .map(TrashEntry::allocated_bytes)
        .sum()
}

#[derive(Clone, Copy, Debug)]
struct DiskSpace {
    total_bytes: u64,
    available_bytes: u64,
}

/// Returns the number of directories to delete, the oldest first. `all` has the times of deletion and the
/// sizes in that order.
fn outlived(all: &[(u64, u64)], limits: TrashLimits, space: DiskSpace, now_ms: u64) -> usize {
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

/// Deletes content of the trash of a disk that is old enough, or whose space the disk needs.
pub fn sweep(disk: &Path, limits: TrashLimits, now_ms: u64) {
    remove_gone(disk);
    remove_leftovers(disk, |_, deleted_ms| now_ms.saturating_sub(deleted_ms) >= limits.keep_ms());
    let all: Vec<TrashEntry> = match entries(disk) {
        Ok(all) => all.into_iter().filter(|entry| !entry.is_restored).collect(),
        Err(error) => {
            tracing::warn!("cannot clean up the trash: {error}");
            return;
        }
    };
    if all.is_empty() {
        return;
    }
    let Ok(space) = statvfs(disk) else { return };
    let space = DiskSpace {
        total_bytes: space.blocks().saturating_mul(space.fragment_size()),
        available_bytes: space.blocks_available().saturating_mul(space.fragment_size()),
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

/// Removes the folders, of those that are `meant`, that hold no directory and whose directory is not in
/// place. Interrupted moves leave them.
fn remove_leftovers(disk: &Path, meant: impl Fn(&InstanceId, u64) -> bool) {
    for found in fs::read_dir(root_of(disk)).into_iter().flatten().flatten() {
        let path = found.path();
        let is_meant = named(&path).is_some_and(|(id, deleted_ms)| meant(&id, deleted_ms));
        // A folder whose directory cannot be looked for stays.
        let is_empty = is_there(&path).is_ok_and(|is_there| !is_there) && entry(disk, path.clone()).is_none();
        if is_meant
            && is_empty
            && let Err(error) = remove_tree(&path)
        {
            tracing::warn!("{}: {error}", path.display());
        }
    }
}

/// Completes interrupted deletions.
fn remove_gone(disk: &Path) {
    for found in fs::read_dir(root_of(disk)).into_iter().flatten().flatten() {
        let path = found.path();
        let is_gone = path.to_str().is_some_and(|path| path.ends_with(GONE));
        if is_gone && let Err(error) = remove_tree(&path) {
            tracing::warn!("{}: {error}", path.display());
        }
    }
}

#[cfg(test)]
mod tests;
