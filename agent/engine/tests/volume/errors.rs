//! Errors that reach the user of the volume: each leaves a trace with its cause, and many leave little more.

use std::fs;

use shorthorn_control::EnginePhase;
use shorthorn_testkit::nbd::Nbd;

use crate::volume::Volume;

const OFFSET: u64 = 1 << 20;
const FAILED: &str = "a request has failed";
const REFUSED: &str = "a request is refused";
const MORE: &str = "more requests have failed or were refused";

fn lines(volume: &Volume, what: &str) -> Vec<String> {
    volume.log_of_engine().lines().filter(|line| line.contains(what)).map(str::to_owned).collect()
}

/// Reads, which must fail, and returns the errno.
fn failed_read(client: &mut Nbd, offset: u64) -> Option<i32> {
    client.read(offset, 4096).unwrap_err().raw_os_error()
}

#[test]
fn an_error_of_the_last_replica_is_logged_with_its_cause() {
    let mut volume = Volume::start(1, 16 << 20);
    let mut client = Nbd::connect(&volume.frontend(), "v1").unwrap();
    client.write(OFFSET, &[7; 4096]).unwrap();
    let head = format!("{}/volume-head-000.img", volume.directory(0));
    let file = fs::File::options().write(true).open(head).unwrap();
    file.set_len(0).unwrap();
    assert_eq!(failed_read(&mut client, OFFSET), Some(5));
    volume.wait_for_log(&[FAILED], 0);
    let line = lines(&volume, FAILED).remove(0);
    let replica = volume.endpoints()[0].replica;
    for part in [
        "volume=v1",
        &format!("replicas=\"{replica}\""),
        "operation=\"read\"",
        "offset_bytes=1048576",
        "length_bytes=4096",
        "os error 5",
        "no other replica is left",
    ] {
        assert!(line.contains(part), "{part} is not in {line}");
    }
    drop(client);
    file.set_len(volume.size_bytes).unwrap();
    volume.stop();
}

#[test]
fn invalid_requests_are_logged_and_counted() {
    let mut volume = Volume::start(1, 16 << 20);
    let mut client = Nbd::connect(&volume.frontend(), "v1").unwrap();
    assert_eq!(failed_read(&mut client, volume.size_bytes), Some(22));
    volume.wait_for_log(&[REFUSED], 0);
    let line = lines(&volume, REFUSED).remove(0);
    for part in ["operation=\"read\"", "offset_bytes=16777216", "length_bytes=4096", "os error 22"] {
        assert!(line.contains(part), "{part} is not in {line}");
    }
    assert_eq!(volume.counters().refused, 1);
    assert_eq!(volume.counters().read.operations, 0);
    drop(client);
    volume.stop();
}

/// The only member has lost power with writes that were not flushed: every request fails until the volume is
/// attached again.
#[test]
fn a_storm_of_errors_is_a_few_lines_and_a_number() {
    const ERRORS: usize = 500;
    let mut volume = Volume::start(1, 16 << 20);
    Nbd::connect(&volume.frontend(), "v1").unwrap().write_volatile(OFFSET, &[7; 4096]).unwrap();
    volume.lose_power(0, OFFSET);
    volume.start_replica(0);
    volume.kill_engine();
    volume.start_engine();
    volume.wait("it serves", |engine| engine.phase == EnginePhase::Serving && engine.lost_writes);
    let mut client = Nbd::connect(&volume.frontend(), "v1").unwrap();
    for _ in 0..ERRORS {
        assert_eq!(failed_read(&mut client, OFFSET), Some(5));
    }
    assert_eq!(volume.counters().read.failed, ERRORS as u64);
    drop(client);
    volume.stop();
    let reported = lines(&volume, FAILED);
    assert!(
        reported[0].contains("replicas=\"\"") && reported[0].contains("attached again"),
        "{}",
        reported[0]
    );
    let numbers: Vec<usize> = lines(&volume, MORE).iter().map(|line| count_of(line)).collect();
    // One connection is on one queue, which begins an interval every ten seconds at most.
    assert!(
        !numbers.is_empty() && reported.len() <= 10 * (numbers.len() + 1),
        "{} lines, {numbers:?}",
        reported.len()
    );
    assert_eq!(reported.len() + numbers.iter().sum::<usize>(), ERRORS, "none is left out");
}

fn count_of(line: &str) -> usize {
    let (_, rest) = line.split_once("count=").unwrap();
    rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap()
}
