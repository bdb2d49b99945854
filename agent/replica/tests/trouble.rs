//! Disks that are full or broken. Needs root, for mounts; without it these tests say so and pass.
#![allow(clippy::unwrap_used)] // an unexpected value fails the test

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use common::disks::{Mounted, break_down, may_mount, move_head, run};
use common::*;
use shorthorn_control::ReplicaPhase;
use shorthorn_store::{OpenOptions, Store};
use shorthorn_types::limits::{ENGINE_FLIGHT_BYTES_MAX, MAX_IO_BYTES};
use shorthorn_types::{MarkAction, MarkRegions, Members, RegionsOf, ReplicaId, View, ViewId};
use shorthorn_wire::{Flags, Opcode, RegionsPage, RegionsQuery, ViewMessage};

/// Runs a test in a new ext4 of this size, if this user may mount one.
fn on_ext4(bytes: u64, test: impl FnOnce(&Path)) {
    if may_mount() {
        let base = base();
        test(&Mounted::ext4(&base.path().join("image"), &base.path().join("disk"), bytes).0);
    }
}

/// Runs the same in a tmpfs.
fn on_tmpfs(bytes: u64, test: impl FnOnce(&Path)) {
    if may_mount() {
        let base = base();
        test(&Mounted::tmpfs(&base.path().join("disk"), bytes).0);
    }
}

/// Writes blocks of 64 KiB, the first at `start`, until one is refused; how many were not.
fn fill(client: &mut Client, start: u64) -> u64 {
    for n in 0.. {
        match client.write(start + n * (64 << 10), &pattern(n, 64 << 10)) {
            Ok(()) => {}
            Err(errno) => {
                assert_eq!(errno, libc::ENOSPC);
                return n;
            }
        }
    }
    unreachable!()
}

fn a_full_disk_refuses_writes_and_the_replica_continues(directory: &Path) {
    let base = base();
    let mut spec = spec(base.path(), 256 * MIB);
    spec.directory = directory.join("v1-00000007");
    let replica = Replica::start(&spec);
    let mut client = replica.open(generation(1));
    let written = fill(&mut client, 0);
    assert!(written > 10);
    for n in 0..written {
        assert!(client.read(n * (64 << 10), 64 << 10).unwrap() == pattern(n, 64 << 10));
    }
    client.flush().unwrap();
    // Existing blocks can always be overwritten; and freed space can be used again.
    client.write(0, &pattern(1000, 64 << 10)).unwrap();
    client.call(Opcode::Discard, Flags::NONE, 8 * (64 << 10), 2 * (64 << 10), &[]).unwrap();
    client.flush().unwrap();
    client.write(written * (64 << 10), &pattern(1001, 64 << 10)).unwrap();
    assert!(client.read(written * (64 << 10), 64 << 10).unwrap() == pattern(1001, 64 << 10));
    assert_eq!(replica.status().phase, ReplicaPhase::Serving);
    assert!(replica.terminate().success());
}

/// Sends the maximum that an engine has in flight, of which nothing completes: the connection is read all the
/// same.
#[test]
fn a_ping_is_answered_while_the_disk_hangs() {
    if may_mount() {
        let base = base();
        let disk = Mounted::ext4(&base.path().join("image"), &base.path().join("disk"), 64 * MIB);
        let mut spec = spec(base.path(), 256 * MIB);
        spec.directory = disk.0.join("v1-00000007");
        let replica = Replica::start(&spec);
        let mut client = replica.open(generation(1));
        client.write(0, &pattern(0, 4096)).unwrap();
        let frozen = Frozen::new(&disk);
        let writes = ENGINE_FLIGHT_BYTES_MAX / u64::from(MAX_IO_BYTES);
        for n in 0..writes {
            client.send(
                Opcode::Write,
                Flags::NONE,
                n * MIB,
                MAX_IO_BYTES,
                &pattern(n, MAX_IO_BYTES as usize),
            );
        }
        client.send(Opcode::Flush, Flags::NONE, 0, 0, &[]);
        let ping = client.send(Opcode::Ping, Flags::NONE, 0, 0, &[]);
        assert_eq!(client.receive().unwrap().0.id, ping, "nothing else is answered");
        drop(frozen);
        let mut answered: Vec<Opcode> = (0..=writes).map(|_| client.receive().unwrap().0.opcode).collect();
        answered.sort_by_key(|opcode| *opcode == Opcode::Flush);
        assert_eq!(answered.pop(), Some(Opcode::Flush));
        assert!(answered.iter().all(|opcode| *opcode == Opcode::Write));
        assert!(replica.terminate().success());
    }
}

#[test]
fn a_full_ext4() {
    on_ext4(32 * MIB, a_full_disk_refuses_writes_and_the_replica_continues);
}

#[test]
fn a_full_tmpfs() {
    on_tmpfs(8 * MIB, a_full_disk_refuses_writes_and_the_replica_continues);
}

/// Needs space for zeroes above the data of a snapshot. Without space the discard fails, and other requests
/// do not.
fn a_full_disk_refuses_discards_above_a_snapshot(directory: &Path) {
    const BELOW: u64 = 2 * MIB;
    let base = base();
    let mut spec = spec(base.path(), 256 * MIB);
    spec.directory = directory.join("v1-00000007");
    assert!(Replica::start(&spec).terminate().success());
    let mut store = Store::open(&spec.directory, OpenOptions::default()).unwrap();
    store.write_at(&vec![7; usize::try_from(BELOW).unwrap()], 0, false).unwrap();
    store.snapshot("below", true, BTreeMap::new(), "2026-01-01T00:00:00Z").unwrap();
    store.close().unwrap();
    let replica = Replica::start(&spec);
    let mut client = replica.open(generation(1));
    let offset = |n: u64| BELOW + n * (64 << 10);
    let written = fill(&mut client, BELOW);
    assert!(written > 40);
    let discard = |client: &mut Client, offset: u64, bytes: u64| {
        client.call(Opcode::Discard, Flags::NONE, offset, u32::try_from(bytes).unwrap(), &[])
    };
    assert_eq!(discard(&mut client, 512, BELOW), Err(libc::ENOSPC));
    assert_eq!(replica.status().phase, ReplicaPhase::Serving);
    let found = client.read(0, u32::try_from(MIB).unwrap()).unwrap();
    assert!(found.chunks(4096).all(|block| block == [7; 4096] || block == [0; 4096]));
    // Without data in lower layers, a discard frees space.
    discard(&mut client, offset(0), 40 * (64 << 10)).unwrap();
    discard(&mut client, 512, BELOW - 1024).unwrap();
    let found = client.read(0, u32::try_from(MIB).unwrap()).unwrap();
    assert!(found[..4096].iter().all(|byte| *byte == 7) && found[4096..].iter().all(|byte| *byte == 0));
    let last = client.read(BELOW - 4096, 8192).unwrap();
    assert!(last[..4096].iter().all(|byte| *byte == 7) && last[4096..].iter().all(|byte| *byte == 0));
    let kept = offset(written - 1);
    assert!(client.read(kept, 64 << 10).unwrap() == pattern(written - 1, 64 << 10));
    assert!(replica.terminate().success());
}

#[test]
fn discards_on_a_full_ext4() {
    on_ext4(32 * MIB, a_full_disk_refuses_discards_above_a_snapshot);
}

#[test]
fn discards_on_a_full_tmpfs() {
    on_tmpfs(8 * MIB, a_full_disk_refuses_discards_above_a_snapshot);
}

/// Records overwrites on a full disk all the same, and lets a replica leave the views.
fn a_full_disk_loses_no_marks(directory: &Path) {
    let base = base();
    let mut spec = spec(base.path(), 256 * MIB);
    spec.directory = directory.join("v1-00000007");
    let mut replica = Replica::start(&spec);
    let (mut client, welcome) = replica.try_open(generation(1), 0).unwrap();
    let written = fill(&mut client, 0);
    let clear = MarkRegions {
        of: RegionsOf::Intent,
        action: MarkAction::Clear,
        runs: vec![(0, 4096)],
        stamp: 0,
        size_bytes: None,
    };
    client.send_text(Opcode::Mark, &clear).unwrap();
    let members = Members::new([spec.replica]).unwrap();
    let view = View { id: ViewId { generation: generation(1), number: 1 }, members };
    client.send_text(Opcode::Propose, &ViewMessage { view, basis: welcome.report }).unwrap();
    for n in [0, written / 2, written - 1] {
        client.write(n * (64 << 10), &pattern(n + 1000, 64 << 10)).unwrap();
    }
    replica.kill();
    let replica = Replica::start(&spec);
    let mut client = replica.open(generation(2));
    for of in [RegionsOf::Intent, RegionsOf::OutOfSync(ReplicaId::from_random(8))] {
        let page: RegionsPage =
            client.ask(Opcode::Regions, &RegionsQuery { of, from: 0, size_bytes: None }).unwrap();
        for n in [0, written / 2, written - 1] {
            let recorded = page
                .runs
                .iter()
                .any(|(first, count)| (u64::from(*first)..u64::from(first + count)).contains(&n));
            assert!(page.kept && recorded, "{of:?} lacks region {n}: {page:?}");
        }
    }
}

#[test]
fn marks_on_a_full_ext4() {
    on_ext4(32 * MIB, a_full_disk_loses_no_marks);
}

#[test]
fn marks_on_a_full_tmpfs() {
    on_tmpfs(8 * MIB, a_full_disk_loses_no_marks);
}

/// Returns a mark of the regions that another replica misses.
fn out_of_sync(action: MarkAction, runs: &[(u32, u32)]) -> MarkRegions {
    let of = RegionsOf::OutOfSync(ReplicaId::from_random(8));
    MarkRegions { of, action, runs: runs.to_vec(), stamp: 0, size_bytes: None }
}

/// Breaks the disk of a replica that holds some data, and lets `meets_it` be the first to notice.
fn after_an_io_error(meets_it: impl FnOnce(&mut Client)) {
    if !may_mount() {
        return;
    }
    let base = base();
    let disk = Mounted::ext4(&base.path().join("image"), &base.path().join("disk"), 64 * MIB);
    let mut spec = spec(base.path(), 32 * MIB);
    spec.directory = disk.0.join("v1-00000007");
    let mut replica = Replica::start(&spec);
    let mut client = replica.open(generation(1));
    client.write(0, &pattern(1, 64 << 10)).unwrap();
    client.send_text(Opcode::Mark, &out_of_sync(MarkAction::Add, &[(0, 1)])).unwrap();
    break_down(&disk.0);
    meets_it(&mut client);
    // A ping needs no disk: it is the replica that refuses.
    assert_eq!(client.ping(), Err(libc::EIO));
    assert_eq!(client.read(0, 4096), Err(libc::EIO));
    assert_eq!(client.write(0, &[1; 4096]), Err(libc::EIO));
    assert_eq!(client.call(Opcode::WriteZeroes, Flags::NONE, 0, 4096, &[]), Err(libc::EIO));
    assert_eq!(client.call(Opcode::Discard, Flags::NONE, 0, 4096, &[]), Err(libc::EIO));
    assert_eq!(client.flush(), Err(libc::EIO));
    let (status, refusal) = replica.try_open(generation(2), 0).err().unwrap();
    assert!(status == libc::EIO && refusal.message.contains("has failed"), "{refusal:?}");
    let reported = replica.status();
    assert!(reported.phase != ReplicaPhase::Serving && !reported.message.is_empty(), "{reported:?}");
    replica.kill();
}

#[test]
fn after_a_failed_write_the_replica_refuses_requests() {
    after_an_io_error(|client| assert_eq!(client.write(4096, &[1; 4096]), Err(libc::EIO)));
}

#[test]
fn after_a_failed_flush_the_replica_refuses_requests() {
    after_an_io_error(|client| assert_eq!(client.flush(), Err(libc::EIO)));
}

/// Refuses reads, which another replica can answer; this replica still takes writes.
#[test]
fn after_a_failed_removal_of_a_set_the_replica_refuses_requests() {
    after_an_io_error(|client| {
        let (errno, _) = client.send_text(Opcode::Mark, &out_of_sync(MarkAction::Forget, &[])).unwrap_err();
        assert_eq!(errno, libc::EIO);
    });
}

#[test]
fn a_failed_read_is_answered() {
    if !may_mount() {
        return;
    }
    let base = base();
    let disk = Mounted::ext4(&base.path().join("image"), &base.path().join("disk"), 64 * MIB);
    let mut spec = spec(base.path(), 32 * MIB);
    spec.directory = disk.0.join("v1-00000007");
    let mut replica = Replica::start(&spec);
    let mut client = replica.open(generation(1));
    client.write(0, &pattern(1, 64 << 10)).unwrap();
    break_down(&disk.0);
    assert_eq!(client.read(0, 4096), Err(libc::EIO));
    client.ping().unwrap();
    assert_eq!(replica.status().phase, ReplicaPhase::Serving);
    replica.kill();
}

/// A file system on which every write waits, until this is dropped.
struct Frozen<'a>(&'a Mounted);

impl<'a> Frozen<'a> {
    fn new(disk: &'a Mounted) -> Frozen<'a> {
        run("fsfreeze", &["--freeze", disk.0.to_str().unwrap()]);
        Frozen(disk)
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        let _ = Command::new("fsfreeze").arg("--unfreeze").arg(&self.0.0).status();
    }
}

/// A newer engine is not welcome as long as a write of the older one may still land.
#[test]
fn a_newer_engine_waits_for_writes_in_flight() {
    if !may_mount() {
        return;
    }
    let base = base();
    let disk = Mounted::ext4(&base.path().join("image"), &base.path().join("disk"), 64 * MIB);
    let mut replica = Replica::start(&spec(base.path(), MIB));
    let spec = replica.spec.clone();
    replica.kill();
    let _head = move_head(&spec.directory, &disk);
    let replica = Replica::start(&spec);
    let mut old = replica.open(generation(1));
    let frozen = Frozen::new(&disk);
    old.send(Opcode::Write, Flags::NONE, 0, 4096, &pattern(1, 4096));
    // It is answered although it came later: the write is in execution, and hangs.
    let ping = old.send(Opcode::Ping, Flags::NONE, 0, 0, &[]);
    assert_eq!(old.receive().unwrap().0.id, ping);

    let claim = replica.claim(generation(2), 0);
    let socket = replica.connect();
    let (sender, welcome) = std::sync::mpsc::channel();
    let newer = std::thread::spawn(move || {
        let opened = Client::open(socket, &claim, SECRET).unwrap().unwrap();
        sender.send(()).unwrap();
        opened.0
    });
    assert!(old.closed(), "the older one is closed at once");
    let early = welcome.recv_timeout(std::time::Duration::from_millis(500));
    drop(frozen);
    assert!(early.is_err(), "it was welcome while a write was in flight");
    assert!(newer.join().unwrap().read(0, 4096).unwrap() == pattern(1, 4096));
}

/// Starts a replica of which only the head lies on a disk that breaks down, so that the rest of the directory
/// can be written. Returns its report after a restart with a working disk, in the same boot of the host.
fn restarted_after(meets_it: impl FnOnce(Replica, Client)) {
    if !may_mount() {
        return;
    }
    let base = base();
    let disk = Mounted::ext4(&base.path().join("image"), &base.path().join("disk"), 64 * MIB);
    let mut replica = Replica::start(&spec(base.path(), MIB));
    let spec = replica.spec.clone();
    replica.kill();
    let head = move_head(&spec.directory, &disk);
    let replica = Replica::start(&spec);
    let (mut client, welcome) = replica.try_open(generation(1), 0).unwrap();
    assert!(!welcome.lost_cache);
    client.write(0, &pattern(1, 4096)).unwrap();
    break_down(&disk.0);
    meets_it(replica, client);
    drop(head);
    let replica = Replica::start(&spec);
    let (_, welcome) = replica.try_open(generation(2), 0).unwrap();
    assert!(welcome.lost_cache, "earlier writes may be gone");
}

#[test]
fn a_failed_flush_is_remembered_by_the_next_process() {
    restarted_after(|mut replica, mut client| {
        assert_eq!(client.flush(), Err(libc::EIO));
        replica.kill();
    });
}

#[test]
fn a_failed_write_is_remembered_by_the_next_process() {
    restarted_after(|mut replica, mut client| {
        assert_eq!(client.write(4096, &[1; 4096]), Err(libc::EIO));
        replica.kill();
    });
}

#[test]
fn a_failed_durable_write_is_remembered_by_the_next_process() {
    restarted_after(|mut replica, mut client| {
        assert_eq!(client.call(Opcode::Write, Flags::FUA, 4096, 4096, &[1; 4096]), Err(libc::EIO));
        replica.kill();
    });
}

#[test]
fn failed_zeroes_are_remembered_by_the_next_process() {
    restarted_after(|mut replica, mut client| {
        assert_eq!(client.call(Opcode::WriteZeroes, Flags::NONE, 0, 4096, &[]), Err(libc::EIO));
        replica.kill();
    });
}

#[test]
fn an_end_that_cannot_make_the_data_durable_is_remembered_by_the_next_process() {
    restarted_after(|replica, client| {
        assert!(!replica.terminate().success());
        drop(client);
    });
}

#[test]
fn a_replica_that_has_failed_is_stopped_and_remembers() {
    restarted_after(|replica, mut client| {
        assert_eq!(client.flush(), Err(libc::EIO));
        replica.terminate();
        drop(client);
    });
}

#[test]
fn if_the_loss_cannot_be_recorded_the_next_process_detects_it() {
    restarted_after(|mut replica, mut client| {
        let record = replica.spec.directory.join("shorthorn.boot.tmp");
        std::fs::create_dir(&record).unwrap();
        assert_eq!(client.flush(), Err(libc::EIO));
        std::fs::remove_dir(&record).unwrap();
        replica.kill();
    });
}

/// The engine was admitted before, and waits for a write whose failure is the cause.
#[test]
fn an_engine_that_waits_for_a_failing_write_is_refused() {
    if !may_mount() {
        return;
    }
    let base = base();
    let disk = Mounted::ext4(&base.path().join("image"), &base.path().join("disk"), 64 * MIB);
    let mut replica = Replica::start(&spec(base.path(), MIB));
    let spec = replica.spec.clone();
    replica.kill();
    let _head = move_head(&spec.directory, &disk);
    let replica = Replica::start(&spec);
    let mut old = replica.open(generation(1));
    let frozen = Frozen::new(&disk);
    old.send(Opcode::Write, Flags::NONE, 0, 4096, &pattern(1, 4096));
    let ping = old.send(Opcode::Ping, Flags::NONE, 0, 0, &[]);
    assert_eq!(old.receive().unwrap().0.id, ping);
    let (claim, socket) = (replica.claim(generation(2), 0), replica.connect());
    let newer = std::thread::spawn(move || Client::open(socket, &claim, SECRET).unwrap());
    assert!(old.closed(), "the older one is closed at once");
    break_down(&disk.0);
    drop(frozen);
    let (status, refusal) = newer.join().unwrap().err().unwrap();
    assert!(status == libc::EIO && refusal.message.contains("has failed"), "{refusal:?}");
}
