//! Replicas whose addresses change while the former ones still work.

use std::time::Instant;

use shorthorn_control::ProcessCommand;

use crate::LIMIT;
use crate::load::Load;
use crate::volume::Volume;

const FAILED: &str = "a replica has failed";
const BACK: &str = "a replica is a member again";

#[test]
fn two_of_three_replicas_that_move_together_move_one_after_the_other() {
    let mut volume = Volume::start(3, 64 << 20);
    let load = Load::start(&volume, 51);
    load.wait_for_writes(100);
    let mut replicas = volume.endpoints();
    for replica in &mut replicas[1..] {
        // Another path of the same socket.
        let former = replica.addresses[0].strip_prefix("unix:").unwrap().to_owned();
        let next = format!("{former}-next");
        std::os::unix::fs::symlink(&former, &next).unwrap();
        replica.addresses = vec![format!("unix:{next}")];
    }
    volume.request(&ProcessCommand::Replicas { replicas });
    let begin = Instant::now();
    while volume.log_of_engine().matches(BACK).count() < 2 {
        assert!(begin.elapsed() < LIMIT, "{}", volume.log_of_engine());
        load.wait_for_writes(20);
    }
    load.wait_for_writes(100);
    load.stop_and_verify(&volume);
    let log = volume.log_of_engine();
    let events: Vec<&str> = log
        .lines()
        .flat_map(|line| [FAILED, BACK].into_iter().filter(|event| line.contains(event)))
        .collect();
    assert_eq!(events, [FAILED, BACK, FAILED, BACK], "a majority of members at any time: {log}");
    assert_eq!(log.matches("the address has changed to").count(), 2, "{log}");
    volume.stop();
    volume.assert_equal();
}

/// While one of three replicas is away, another one whose address changes waits.
#[test]
fn a_replica_whose_address_changes_back_keeps_its_connections() {
    let mut volume = Volume::start(3, 64 << 20);
    let load = Load::start(&volume, 52);
    load.wait_for_writes(100);
    volume.kill(1);
    volume.wait_for_log(&[FAILED], 0);
    let former = volume.endpoints();
    let mut replicas = former.clone();
    let path = former[2].addresses[0].strip_prefix("unix:").unwrap();
    std::os::unix::fs::symlink(path, format!("{path}-next")).unwrap();
    replicas[2].addresses = vec![format!("unix:{path}-next")];
    volume.request(&ProcessCommand::Replicas { replicas });
    volume.wait_for_log(&["a replica has another address"], 0);
    volume.request(&ProcessCommand::Replicas { replicas: former });
    volume.wait_for_log(&["a replica has another address"], 1);
    volume.start_replica(1);
    volume.wait_for_log(&[BACK], 0);
    load.wait_for_writes(100);
    load.stop_and_verify(&volume);
    assert_eq!(volume.count_in_log(&[FAILED]), 1, "{}", volume.log_of_engine());
    volume.stop();
    volume.assert_equal();
}
