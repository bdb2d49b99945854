//! `shorthorn-agent run`, end to end.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{AgentProcess, agent, lives, signal_to, wait_for_end, wait_for_status};
use nix::sys::signal::Signal;
use serde_json::Value;
use shorthorn_control::{EnginePhase, ProcessStatus, ReplicaPhase};
use shorthorn_testkit::nbd::Nbd;

fn run(dir: &Path, more: &[&str]) -> Command {
    let mut command = agent();
    command.args(["run", "v1", "--size", "16MiB", "--dir"]).arg(dir).args(more);
    command
}

/// The announcement line of a ready volume.
struct ReadyAnnouncement(Value);

impl ReadyAnnouncement {
    fn of(running: &AgentProcess) -> ReadyAnnouncement {
        ReadyAnnouncement(serde_json::from_str(&running.line()).expect("a line of JSON"))
    }

    fn socket(&self) -> PathBuf {
        self.0["socket"].as_str().expect("a socket").into()
    }

    fn pid(&self, of: &str) -> u32 {
        u32::try_from(self.0["pids"][of].as_u64().expect("a pid")).unwrap()
    }

    fn replicas(&self) -> Vec<u32> {
        let pids = self.0["pids"]["replicas"].as_array().unwrap();
        pids.iter().map(|pid| u32::try_from(pid.as_u64().unwrap()).unwrap()).collect()
    }
}

#[test]
fn keeps_its_data_from_run_to_run() {
    let dir = tempfile::tempdir().unwrap();
    for turn in 0..3u8 {
        let mut running = AgentProcess::start(&mut run(dir.path(), &[]));
        let ready = ReadyAnnouncement::of(&running);
        assert_eq!((&ready.0["name"], &ready.0["device"]), (&"v1".into(), &Value::Null));
        let uri = format!("nbd+unix:///v1?socket={}", ready.socket().display());
        assert_eq!(ready.0["uri"], uri.as_str());
        assert_eq!(ready.pid("supervisor"), running.pid());
        assert_eq!(ready.replicas().len(), 3);
        {
            let mut nbd = Nbd::connect(&ready.socket(), "v1").unwrap();
            assert_eq!(nbd.size_bytes, 16 << 20);
            for earlier in 0..turn {
                assert_eq!(nbd.read(u64::from(earlier) * 4096, 4096).unwrap(), [earlier + 1; 4096]);
            }
            nbd.write(u64::from(turn) * 4096, &[turn + 1; 4096]).unwrap();
        }
        running.signal(Signal::SIGTERM);
        assert!(running.ended().success(), "{}", running.log_so_far());
        for pid in ready.replicas().into_iter().chain([ready.pid("engine")]) {
            assert!(!lives(pid), "process {pid} was left behind");
        }
        assert!(!ready.socket().exists(), "the socket was left behind");
        // Each run is an attachment of its own.
        let generation = ready.0["generation"].as_str().unwrap();
        assert!(generation.starts_with(&format!("{}.0#", turn + 1)), "{generation}");
    }
    let replicas = fs::read_dir(dir.path().join("replicas")).unwrap().count();
    assert_eq!(replicas, 3);
}

#[test]
fn refuses_another_volume_and_a_second_run() {
    let dir = tempfile::tempdir().unwrap();
    let first = AgentProcess::start(&mut run(dir.path(), &["--replicas", "1"]));
    ReadyAnnouncement::of(&first);
    let second = AgentProcess::start(&mut run(dir.path(), &["--replicas", "1"])).failed();
    assert!(second.contains(&format!("in use by process {}", first.pid())), "{second}");
    drop(first);
    let count = AgentProcess::start(&mut run(dir.path(), &["--replicas", "2"])).failed();
    assert!(count.contains("whose number of replicas is 1, not 2"), "{count}");
    let mut size = agent();
    size.args(["run", "v1", "--replicas", "1", "--size", "1GiB", "--dir"]).arg(dir.path());
    let size = AgentProcess::start(&mut size).failed();
    assert!(size.contains("whose size is 16 MiB (16777216 bytes), not 1 GiB (1073741824 bytes)"), "{size}");
}

#[test]
fn restarts_processes_that_die() {
    let dir = tempfile::tempdir().unwrap();
    let running = AgentProcess::start(&mut run(dir.path(), &["--replicas", "1"]));
    let ready = ReadyAnnouncement::of(&running);
    Nbd::connect(&ready.socket(), "v1").unwrap().write(0, &[1; 4096]).unwrap();
    let engine = ready.pid("engine");
    signal_to(engine, Signal::SIGKILL);
    wait_for_status(&dir.path().join("run/engine.control"), move |status| match status {
        ProcessStatus::Engine(status) => status.pid != Some(engine) && status.phase == EnginePhase::Serving,
        ProcessStatus::Replica(_) => false,
    });
    assert_eq!(Nbd::connect(&ready.socket(), "v1").unwrap().read(0, 4096).unwrap(), [1; 4096]);
    let replica = ready.replicas()[0];
    let id = ready.0["replicas"][0]["id"].as_str().unwrap().to_owned();
    signal_to(replica, Signal::SIGKILL);
    wait_for_status(&dir.path().join("run").join(format!("{id}.control")), move |status| match status {
        ProcessStatus::Replica(status) => status.pid != replica && status.phase == ReplicaPhase::Serving,
        ProcessStatus::Engine(_) => false,
    });
}

#[test]
fn leaves_nothing_behind_when_it_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let mut running = AgentProcess::start(&mut run(dir.path(), &["--replicas", "2"]));
    let ready = ReadyAnnouncement::of(&running);
    Nbd::connect(&ready.socket(), "v1").unwrap().write(4096, &[7; 4096]).unwrap();
    running.signal(Signal::SIGKILL);
    running.ended();
    for pid in ready.replicas().into_iter().chain([ready.pid("engine")]) {
        assert!(wait_for_end(pid), "process {pid} outlives its supervisor");
    }
    let again = AgentProcess::start(&mut run(dir.path(), &["--replicas", "2"]));
    assert_eq!(
        Nbd::connect(&ReadyAnnouncement::of(&again).socket(), "v1").unwrap().read(4096, 4096).unwrap(),
        [7; 4096]
    );
}

#[test]
fn continues_if_its_own_files_are_lost_or_older_than_the_replicas() {
    let dir = tempfile::tempdir().unwrap();
    let once = |block: u8| {
        let mut running = AgentProcess::start(&mut run(dir.path(), &["--replicas", "2"]));
        let ready = ReadyAnnouncement::of(&running);
        let mut nbd = Nbd::connect(&ready.socket(), "v1").unwrap();
        for earlier in 0..block {
            assert_eq!(nbd.read(u64::from(earlier) * 4096, 4096).unwrap(), [earlier + 1; 4096]);
        }
        nbd.write(u64::from(block) * 4096, &[block + 1; 4096]).unwrap();
        running.signal(Signal::SIGTERM);
        assert!(running.ended().success(), "{}", running.log_so_far());
        ready.0["generation"].as_str().unwrap().to_owned()
    };
    once(0);
    let old = fs::read(dir.path().join("volume.json")).unwrap();
    once(1);
    once(2);
    fs::write(dir.path().join("volume.json"), old).unwrap();
    fs::remove_file(dir.path().join("engine.json")).unwrap();
    let generation = once(3);
    assert!(generation.starts_with("4.0#"), "above the generations that the replicas know: {generation}");
}

#[test]
fn an_ordinary_user_can_run_one() {
    const ORDINARY_USER: u32 = 65534;
    let dir = tempfile::tempdir().unwrap();
    if fs::metadata(dir.path()).unwrap().uid() != 0 {
        return; // the tests run as an ordinary user
    }
    std::os::unix::fs::chown(dir.path(), Some(ORDINARY_USER), Some(ORDINARY_USER)).unwrap();
    // The binary may be in a directory that is closed to others. Another test that starts a process just then
    // could hold a copy made by this process open for writing.
    let binary = dir.path().join("shorthorn-agent");
    let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_shorthorn-agent")).arg(&binary).status().unwrap();
    assert!(copied.success());
    let mut command = Command::new(binary);
    command.args(["run", "v1", "--size", "16MiB", "--replicas", "2", "--dir"]).arg(dir.path().join("v1"));
    let mut running = AgentProcess::start(command.uid(ORDINARY_USER).gid(ORDINARY_USER));
    let ready = ReadyAnnouncement::of(&running);
    let mut nbd = Nbd::connect(&ready.socket(), "v1").unwrap();
    nbd.write(0, &[3; 4096]).unwrap();
    assert_eq!(nbd.read(0, 4096).unwrap(), [3; 4096]);
    drop(nbd);
    running.signal(Signal::SIGTERM);
    assert!(running.ended().success());
}

#[test]
fn long_paths_do_not_matter() {
    let dir = tempfile::tempdir().unwrap();
    let long = dir.path().join("x".repeat(120));
    let mut command = run(&long, &["--replicas", "1"]);
    command.env("XDG_RUNTIME_DIR", dir.path());
    let running = AgentProcess::start(&mut command);
    let socket = ReadyAnnouncement::of(&running).socket();
    assert!(socket.starts_with(dir.path()) && !socket.starts_with(&long), "{}", socket.display());
    Nbd::connect(&socket, "v1").unwrap().write(0, &[1; 512]).unwrap();
}

#[test]
fn a_failed_start_names_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let mut running = AgentProcess::start(&mut run(dir.path(), &["--replicas", "1"]));
    let ready = ReadyAnnouncement::of(&running);
    running.signal(Signal::SIGTERM);
    running.ended();
    let directory = PathBuf::from(ready.0["replicas"][0]["directory"].as_str().unwrap());
    fs::write(directory.join("volume.meta"), "{ damaged").unwrap();
    let log = AgentProcess::start(&mut run(dir.path(), &["--replicas", "1"])).failed();
    let last = log.lines().last().unwrap();
    assert!(last.contains("no replica can be opened") && last.contains("volume.meta"), "{log}");
}
