use shorthorn_store::{CreateOptions, OpenOptions, Store};

use super::*;
use crate::serve::disks::delete_replica;

const HOUR_MS: u64 = 3_600_000;
const NAME: &str = "v1-0123abcd";
const LIMITS: TrashLimits = TrashLimits { keep: Duration::from_hours(24), free_percent: 0 };

fn replica() -> InstanceId {
    InstanceId::parse(v1::InstanceKind::Replica, NAME).unwrap()
}

/// Returns a disk with one replica.
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

fn listed(disk: &Path) -> Vec<v1::TrashedReplica> {
    list(disk, "u-1", LIMITS).unwrap()
}

/// Deletes the replica.
fn moved(disk: &Path, note: &str, now_ms: u64) -> Result<(), NodeError> {
    let lock = lock(&directory_of(disk, &replica()))?;
    move_in(disk, &replica(), &lock, note, now_ms)
}

#[test]
fn a_deleted_replica_is_restored_unchanged() {
    let dir = disk();
    let directory = directory_of(dir.path(), &replica());
    fs::write(directory.join("mark"), "mine").unwrap();
    moved(dir.path(), "a note", HOUR_MS).unwrap();
    assert!(!directory.exists());
    let shown = listed(dir.path());
    assert_eq!(shown.len(), 1);
    assert_eq!((shown[0].volume.as_str(), shown[0].replica_id.as_str()), ("v1", "0123abcd"));
    assert_eq!((shown[0].deleted_ms, shown[0].expires_ms), (HOUR_MS, 25 * HOUR_MS));
    assert_eq!((shown[0].record.as_str(), shown[0].problem.as_str()), ("a note", ""));
    assert!(shown[0].allocated_bytes > 0 && trash_bytes(dir.path()) == shown[0].allocated_bytes);
    restore(dir.path(), &replica(), HOUR_MS).unwrap();
    assert_eq!(fs::read_to_string(directory.join("mark")).unwrap(), "mine");
    restore(dir.path(), &replica(), HOUR_MS).unwrap();
    remove(dir.path(), &replica(), HOUR_MS).unwrap();
    assert!(listed(dir.path()).is_empty() && directory.exists());
    restore(dir.path(), &replica(), HOUR_MS).unwrap();
    fs::remove_dir_all(&directory).unwrap();
    assert!(matches!(restore(dir.path(), &replica(), HOUR_MS), Err(NodeError::NotFound(_))));
}

#[test]
fn a_directory_that_a_process_has_open_stays() {
    let dir = disk();
    let directory = directory_of(dir.path(), &replica());
    let store = Store::open(&directory, OpenOptions::default()).unwrap();
    assert!(matches!(moved(dir.path(), "", 1), Err(NodeError::Precondition(_))));
    assert!(directory.exists() && !root_of(dir.path()).exists());
    store.close().unwrap();
    moved(dir.path(), "", 1).unwrap();
}

#[test]
fn no_replica_takes_the_place_of_another_one() {
    let dir = disk();
    moved(dir.path(), "", 1).unwrap();
    made(dir.path());
    assert!(matches!(restore(dir.path(), &replica(), 1), Err(NodeError::Precondition(_))));
    assert_eq!(listed(dir.path()).len(), 1);
}

/// Interrupts the move at every point: the directory is in one place, and in the trash only with its record.
#[test]
fn a_move_that_is_cut_off_loses_nothing() {
    let dir = disk();
    let (directory, folder) = (directory_of(dir.path(), &replica()), folder_of(dir.path(), &replica(), 7));
    make(&root_of(dir.path())).unwrap();
    make(&folder).unwrap();
    assert!(listed(dir.path()).is_empty() && directory.exists(), "before its record");
    fs::write(folder.join(RECORD), "{").unwrap();
    assert!(listed(dir.path()).is_empty() && directory.exists(), "within its record");
    // A repetition completes.
    moved(dir.path(), "", 7).unwrap();
    assert_eq!(listed(dir.path()).len(), 1);
    // A restore that is interrupted before the rest was removed.
    fs::write(folder.join(RESTORED), "").unwrap();
    assert!(!listed(dir.path())[0].restored && has(dir.path(), &replica()).unwrap());
    fs::rename(folder.join(DIRECTORY), &directory).unwrap();
    assert!(listed(dir.path())[0].restored && !has(dir.path(), &replica()).unwrap());
    restore(dir.path(), &replica(), 7).unwrap();
}

#[test]
fn a_record_that_is_damaged_or_of_another_one_restores_nothing() {
    let dir = disk();
    moved(dir.path(), "a note", 7).unwrap();
    let path = folder_of(dir.path(), &replica(), 7).join(RECORD);
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("a note", "b note")).unwrap();
    let shown = listed(dir.path());
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
fn the_oldest_are_deleted_first_by_age_or_lack_of_space() {
    let limits = TrashLimits { keep: Duration::from_hours(24), free_percent: 10 };
    let space = |available_bytes| DiskSpace { total_bytes: 1000, available_bytes };
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
fn a_sweep_ends_interrupted_deletions_and_keeps_young_directories() {
    let dir = disk();
    moved(dir.path(), "", HOUR_MS).unwrap();
    made(dir.path());
    moved(dir.path(), "", 2 * HOUR_MS).unwrap();
    let cut_off = root_of(dir.path()).join("v1-0123abcd.5.gone");
    fs::create_dir(&cut_off).unwrap();
    sweep(dir.path(), LIMITS, 25 * HOUR_MS);
    assert!(!cut_off.exists());
    let left: Vec<u64> = listed(dir.path()).iter().map(|shown| shown.deleted_ms).collect();
    assert_eq!(left, [2 * HOUR_MS]);
    remove(dir.path(), &replica(), 2 * HOUR_MS).unwrap();
    remove(dir.path(), &replica(), 2 * HOUR_MS).unwrap();
    assert_eq!(fs::read_dir(root_of(dir.path())).unwrap().count(), 0);
}

/// An interrupted undeletion finds the directories that it has restored, and so does a search for directories
/// without an owner.
#[test]
fn a_restored_replica_is_listed_until_its_record_is_removed() {
    let dir = disk();
    moved(dir.path(), "a note", 7).unwrap();
    restore(dir.path(), &replica(), 7).unwrap();
    let shown = listed(dir.path());
    assert!(shown[0].restored && shown[0].record == "a note" && shown[0].problem.is_empty(), "{shown:?}");
    assert_eq!(trash_bytes(dir.path()), 0, "it is not a trash");
    // Neither age nor lack of space deletes a directory that is in place.
    let full = TrashLimits { free_percent: 100, ..LIMITS };
    sweep(dir.path(), full, 1000 * HOUR_MS);
    assert!(directory_of(dir.path(), &replica()).exists() && listed(dir.path()).len() == 1);
    // Deleted again it is one directory, with one record.
    moved(dir.path(), "a later note", 9).unwrap();
    let shown = listed(dir.path());
    assert_eq!((shown.len(), shown[0].record.as_str(), shown[0].restored), (1, "a later note", false));
    assert_eq!(fs::read_dir(root_of(dir.path())).unwrap().count(), 1);
    // The deletion comes from a caller that does not know the volume.
    restore(dir.path(), &replica(), 9).unwrap();
    moved(dir.path(), "", 11).unwrap();
    let shown = listed(dir.path());
    assert_eq!((shown.len(), shown[0].record.as_str(), shown[0].restored), (1, "a later note", false));
}

#[test]
fn a_directory_that_an_export_reads_is_not_deleted() {
    let dir = disk();
    moved(dir.path(), "", HOUR_MS).unwrap();
    let folder = folder_of(dir.path(), &replica(), HOUR_MS);
    let lock = fs::File::open(folder.join(DIRECTORY).join("shorthorn.lock")).unwrap();
    // As an export holds it.
    lock.lock_shared().unwrap();
    assert!(matches!(remove(dir.path(), &replica(), HOUR_MS), Err(NodeError::Precondition(_))));
    sweep(dir.path(), LIMITS, 100 * HOUR_MS);
    assert!(folder.join(DIRECTORY).join("volume.meta").exists());
    drop(lock);
    sweep(dir.path(), LIMITS, 100 * HOUR_MS);
    assert!(!folder.exists());
}

#[test]
fn the_oldest_make_room_for_the_record_of_the_newest() {
    let dir = disk();
    for at in 1..=3 {
        moved(dir.path(), "", at).unwrap();
        made(dir.path());
    }
    let deleted = || -> Vec<u64> { listed(dir.path()).iter().map(|shown| shown.deleted_ms).collect() };
    let full = || NodeError::Exhausted("full".to_owned());
    // The disk has space once the two oldest are gone.
    let work = || if deleted().len() > 1 { Err(full()) } else { Ok(()) };
    with_room(work, || remove_oldest(dir.path())).unwrap();
    assert_eq!(deleted(), [3]);
    assert!(matches!(with_room(|| Err(full()), || remove_oldest(dir.path())), Err(NodeError::Exhausted(_))));
    assert!(deleted().is_empty() && directory_of(dir.path(), &replica()).exists());
    // Nothing else is a reason to delete anything.
    moved(dir.path(), "", 4).unwrap();
    let broken = || Err(NodeError::Unavailable("broken".to_owned()));
    assert!(with_room(broken, || remove_oldest(dir.path())).is_err());
    assert_eq!(deleted(), [4]);
}

#[test]
fn an_open_replica_is_not_deleted_if_the_trash_keeps_nothing() {
    let dir = disk();
    let directory = directory_of(dir.path(), &replica());
    let store = Store::open(&directory, OpenOptions::default()).unwrap();
    let nothing = TrashLimits { keep: Duration::ZERO, ..LIMITS };
    let delete = || delete_replica(dir.path(), &replica(), nothing, "");
    assert!(matches!(delete(), Err(NodeError::Precondition(_))) && directory.exists());
    store.close().unwrap();
    delete().unwrap();
    assert!(!directory.exists() && listed(dir.path()).is_empty());
}

#[test]
fn a_trash_that_cannot_be_read_is_not_taken_for_an_empty_one() {
    let dir = disk();
    moved(dir.path(), "", 7).unwrap();
    let (root, hidden) = (root_of(dir.path()), dir.path().join("hidden"));
    fs::rename(&root, &hidden).unwrap();
    assert!(!has(dir.path(), &replica()).unwrap() && listed(dir.path()).is_empty(), "the disk has no trash");
    // As far as the system says: no directory can be read there.
    fs::write(&root, "").unwrap();
    assert!(has(dir.path(), &replica()).is_err() && list(dir.path(), "", LIMITS).is_err());
    sweep(dir.path(), LIMITS, 100 * HOUR_MS);
    fs::remove_file(&root).unwrap();
    fs::rename(&hidden, &root).unwrap();
    // One folder of it cannot be looked at: a link that leads to itself.
    let inside = folder_of(dir.path(), &replica(), 7).join(DIRECTORY);
    fs::rename(&inside, dir.path().join("away")).unwrap();
    std::os::unix::fs::symlink(&inside, &inside).unwrap();
    assert!(has(dir.path(), &replica()).unwrap(), "its data may be there");
    let shown = listed(dir.path());
    assert!(shown.len() == 1 && !shown[0].problem.is_empty(), "{shown:?}");
    remove_leftovers(dir.path(), |_, _| true);
    assert_eq!(listed(dir.path()).len(), 1, "it is not a leftover");
}

/// A sweep may delete a directory for good while another caller restores or deletes it.
#[test]
fn a_directory_that_a_sweep_deletes_meanwhile_is_not_found() {
    let dir = disk();
    moved(dir.path(), "", 7).unwrap();
    let folder = folder_of(dir.path(), &replica(), 7);
    let record = entry(dir.path(), folder.clone()).unwrap();
    assert!(record.record.is_ok());
    // The deletion locks the directory until its end: nothing is moved out of a folder that is being deleted.
    let lock = lock_directory(&folder.join(DIRECTORY)).unwrap();
    assert!(matches!(restore(dir.path(), &replica(), 7), Err(NodeError::Precondition(_))));
    assert!(folder.join(DIRECTORY).exists() && !folder.join(RESTORED).exists());
    drop(lock);
    fs::rename(&folder, folder.with_extension("7.gone")).unwrap();
    assert!(matches!(restore(dir.path(), &replica(), 7), Err(NodeError::NotFound(_))));
    remove(dir.path(), &replica(), 7).unwrap();
    remove_tree(&folder).unwrap();
    assert!(entry(dir.path(), folder).is_none());
}
