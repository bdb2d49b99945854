//! A replica whose disk has failed ends, and the next process serves again. Needs root, for mounts; without
//! it these tests say so and pass.
#![allow(clippy::unwrap_used)] // an unexpected value fails the test

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::disks::{Mounted, break_down, may_mount, move_head};
use common::*;
use shorthorn_control::{ReplicaPhase, ReplicaSpec};

/// The exit code of a replica that is to be started again.
const FAILED: i32 = 13;

/// A replica whose head alone lies on a disk that has broken down, and an engine that has got an error from
/// it. The rest of the directory can be written until `meets_it`.
struct Broken {
    replica: Replica,
    client: Client,
    _head: Mounted,
    _disk: Mounted,
}

impl Broken {
    /// Creates one with `number`: of the disk under `base`, and of the engine.
    fn new(base: &Path, spec: &ReplicaSpec, number: u64, prepare: impl FnOnce(&Path)) -> Broken {
        let mut replica = Replica::start(spec);
        replica.kill();
        let (image, point) = (base.join(format!("image-{number}")), base.join(format!("disk-{number}")));
        let disk = Mounted::ext4(&image, &point, 64 * MIB);
        let head = move_head(&spec.directory, &disk);
        let replica = Replica::start(spec);
        let mut client = replica.open(generation(number));
        prepare(&spec.directory);
        break_down(&disk.0);
        assert_eq!(client.write(4096, &[1; 4096]), Err(libc::EIO));
        Broken { replica, client, _head: head, _disk: disk }
    }
}

#[test]
fn it_ends_once_no_engine_is_connected_and_serves_again() {
    if !may_mount() {
        return;
    }
    let base = base();
    let spec = spec(base.path(), MIB);
    let Broken { replica, mut client, _head: head, _disk } = Broken::new(base.path(), &spec, 1, |_| ());
    assert_eq!(client.ping(), Err(libc::EIO), "the engine may keep it: its errors go to the writer");
    let reported = replica.status();
    assert!(reported.phase == ReplicaPhase::Failed && reported.failures == 1, "{reported:?}");
    drop(client);
    assert_eq!(replica.wait().code(), Some(FAILED));
    drop(head);

    let mut replica = Replica::start(&spec);
    let reported = replica.status();
    assert!(reported.phase == ReplicaPhase::Serving && reported.failures == 1, "{reported:?}");
    let (mut client, welcome) = replica.try_open(generation(2), 0).unwrap();
    assert!(welcome.lost_cache, "earlier writes may be gone");
    client.write(0, &pattern(1, 4096)).unwrap();
    replica.kill();

    // The next failure in a row, in another process.
    let Broken { replica, client, .. } = Broken::new(base.path(), &spec, 3, |_| ());
    let reported = replica.status();
    assert!(
        reported.phase == ReplicaPhase::Failed && reported.failures == 2 && reported.message.contains("60 s"),
        "{reported:?}"
    );
    drop(client);
    let (status, refusal) = replica.try_open(generation(3), 0).err().unwrap();
    assert!(status == libc::EIO && refusal.message.contains("60 s"), "the same engine: {refusal:?}");
    let (status, refusal) = replica.try_open(generation(4), 0).err().unwrap();
    assert!(status == libc::EIO && refusal.message.contains("10 s"), "it may need it: {refusal:?}");
    assert_eq!(replica.wait().code(), Some(FAILED));
}

/// An obstacle that neither lets the record be written nor be removed.
struct RecordBlocked {
    paths: [PathBuf; 2],
    record: Vec<u8>,
}

impl RecordBlocked {
    fn new(directory: &Path) -> RecordBlocked {
        let paths = [directory.join("shorthorn.boot"), directory.join("shorthorn.boot.tmp")];
        let record = fs::read(&paths[0]).unwrap();
        fs::remove_file(&paths[0]).unwrap();
        paths.iter().for_each(|path| fs::create_dir(path).unwrap());
        RecordBlocked { paths, record }
    }

    /// Removes the record.
    fn end(&self) {
        self.paths.iter().for_each(|path| fs::remove_dir(path).unwrap());
    }

    fn restore(&self) {
        self.end();
        fs::write(&self.paths[0], &self.record).unwrap();
    }
}

#[test]
fn it_may_end_if_it_can_record_the_loss_beside_its_socket() {
    if !may_mount() {
        return;
    }
    let base = base();
    let spec = spec(base.path(), MIB);
    let mut blocked = None;
    let block = |directory: &Path| blocked = Some(RecordBlocked::new(directory));
    let Broken { mut replica, client, _head: head, _disk } = Broken::new(base.path(), &spec, 1, block);
    let reported = replica.status();
    assert!(reported.phase == ReplicaPhase::Failed && reported.message.contains("600 s"), "{reported:?}");
    drop(client);
    replica.kill();
    drop(head);
    blocked.unwrap().restore();
    let replica = Replica::start(&spec);
    assert!(replica.try_open(generation(2), 0).unwrap().1.lost_cache);
    assert!(!base.path().join("control.lost").exists(), "the disk says so now");
}

#[test]
fn it_stays_until_the_disk_says_that_data_may_be_gone() {
    if !may_mount() {
        return;
    }
    let base = base();
    let spec = spec(base.path(), MIB);
    let mut blocked = None;
    let elsewhere = base.path().join("control.lost");
    let block = |directory: &Path| {
        fs::create_dir(&elsewhere).unwrap();
        blocked = Some(RecordBlocked::new(directory));
    };
    let Broken { replica, client, _head: head, _disk } = Broken::new(base.path(), &spec, 1, block);
    drop(client);
    let (status, refusal) = replica.try_open(generation(2), 0).err().unwrap();
    assert!(status == libc::EIO && refusal.message.contains("is not recorded yet"), "{refusal:?}");
    assert_eq!(replica.status().phase, ReplicaPhase::Failed);
    blocked.unwrap().end();
    fs::remove_dir(&elsewhere).unwrap();
    assert_eq!(replica.wait().code(), Some(FAILED), "it is recorded at the next try");
    drop(head);
    let replica = Replica::start(&spec);
    assert!(replica.try_open(generation(3), 0).unwrap().1.lost_cache);
}
