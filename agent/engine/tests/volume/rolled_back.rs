//! The disk of a replica is restored to an older state, while the view stays the same: it counts for nothing,
//! and is recreated.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use shorthorn_control::EnginePhase;
use shorthorn_testkit::nbd::Nbd;
use shorthorn_testkit::waiting::wait_for;

use crate::LIMIT;
use crate::volume::Volume;

const OFFSET: u64 = 1 << 20;
const VICTIM: usize = 2;
/// The offset of the stamp in a page of a set of regions.
const STAMP_AT: usize = 56;

/// The files in a replica's directory that change while the view stays the same.
struct ReplicaFiles {
    head: (PathBuf, Vec<u8>),
    intent: (PathBuf, Vec<u8>),
}

impl ReplicaFiles {
    fn of(volume: &Volume) -> ReplicaFiles {
        let directory = PathBuf::from(volume.directory(VICTIM));
        let read = |name: &str| {
            let path = directory.join(name);
            let bytes = fs::read(&path).unwrap();
            (path, bytes)
        };
        ReplicaFiles { head: read("volume-head-000.img"), intent: read("shorthorn.intent") }
    }

    fn stamp(&self) -> u32 {
        let stamp = |page: &[u8]| u32::from_le_bytes(page[STAMP_AT..STAMP_AT + 4].try_into().unwrap());
        self.intent.1.chunks(4096).map(stamp).max().unwrap()
    }

    /// Restores the files in place: a restored disk has the same files.
    fn restore(&self) {
        for (path, bytes) in [&self.head, &self.intent] {
            let file = fs::File::options().write(true).open(path).unwrap();
            file.set_len(bytes.len() as u64).unwrap();
            file.write_all_at(bytes, 0).unwrap();
        }
    }
}

fn write(volume: &Volume, fill: u8) {
    let mut client = Nbd::connect(&volume.frontend(), "v1").unwrap();
    client.write(OFFSET, &[fill; 4096]).unwrap();
    client.flush().unwrap();
}

/// Returns the state of a replica after its next `stamps`.
fn after(volume: &Volume, stamps: u32) -> ReplicaFiles {
    let first = ReplicaFiles::of(volume).stamp();
    wait_for("the stamps are stored", LIMIT, || {
        let state = ReplicaFiles::of(volume);
        if state.stamp() >= first + stamps { Ok(state) } else { Err(volume.log_of_engine()) }
    })
}

/// Returns a volume of three with a write that an older state of one of them lacks.
fn with_an_older_state() -> (Volume, ReplicaFiles) {
    let volume = Volume::start_with(3, 16 << 20, |volume| volume.intent_clear_after_ms = 20);
    write(&volume, 7);
    let older = after(&volume, 2);
    write(&volume, 8);
    // Of the last one a member may know nothing.
    after(&volume, 2);
    write(&volume, 8);
    after(&volume, 2);
    (volume, older)
}

fn assert_rebuilt(mut volume: Volume) {
    volume.wait("all are members", |engine| {
        engine.phase == EnginePhase::Serving
            && engine.resync.is_none()
            && engine.view.is_some_and(|view| view.members.len() == 3)
    });
    let log = volume.log_of_engine();
    assert!(log.contains("its disk was restored to an older state"), "{log}");
    let mut client = Nbd::connect(&volume.frontend(), "v1").unwrap();
    for _ in 0..6 {
        assert_eq!(client.read(OFFSET, 4096).unwrap(), [8; 4096]); // members take turns
    }
    drop(client);
    volume.stop();
    volume.assert_equal();
}

#[test]
fn a_restored_replica_is_not_a_member_of_the_first_view() {
    let (mut volume, older) = with_an_older_state();
    volume.kill_engine();
    volume.kill(VICTIM);
    older.restore();
    volume.start_replica(VICTIM);
    volume.start_engine();
    assert_rebuilt(volume);
}

#[test]
fn a_restored_replica_is_not_rebuilt_by_its_out_of_sync_regions() {
    let (mut volume, older) = with_an_older_state();
    volume.kill(VICTIM);
    volume.wait("it has left", |engine| engine.view.is_some_and(|view| view.members.len() == 2));
    older.restore();
    volume.start_replica(VICTIM);
    assert_rebuilt(volume);
}
