//! Tests clients that are slow to take an answer, or their data. They keep the memory of their slot until
//! they are through, although no request is in flight. The engine decides how slow they are: they wait until
//! it has considered releasing memory.

use std::io::Write;

use shorthorn_testkit::nbd::Nbd;

use crate::volume::Volume;

/// A slot is full with that, and far more than a socket holds.
const LENGTH: usize = 1 << 20;
const KEPT: &str = "keeping memory: data of a client is in transit";
const GIVEN_BACK: &str = "memory of large requests is released";

/// Returns data without two equal blocks, and without a block of zeroes.
fn pattern(seed: u32) -> Vec<u8> {
    let word = |n: u64| (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(seed) | 1;
    (0..LENGTH as u64 / 8).flat_map(|n| word(n).to_le_bytes()).collect()
}

/// Returns the offset of the first difference.
fn difference(one: &[u8], other: &[u8]) -> Option<usize> {
    one.iter().zip(other).position(|(one, other)| one != other)
}

#[test]
fn a_client_that_reads_its_answer_slowly_gets_the_written_data() {
    let mut volume = Volume::start(1, 16 << 20);
    let mut nbd = Nbd::connect(&volume.frontend(), "v1").unwrap();
    let data = pattern(1);
    nbd.write(0, &data).unwrap();
    let before = volume.count_in_log(&[KEPT, GIVEN_BACK]);
    nbd.begin_read(0, LENGTH).unwrap();
    volume.wait_for_log(&[KEPT, GIVEN_BACK], before);
    let found = nbd.end_read(LENGTH).unwrap();
    assert_eq!(difference(&found, &data), None);
    assert!(volume.log_of_engine().contains(KEPT));
    // When it has it, its memory is given back.
    volume.wait_for_log(&[GIVEN_BACK], 0);
    drop(nbd);
    volume.stop();
}

#[test]
fn a_client_that_sends_its_data_slowly_writes_all_of_it() {
    let mut volume = Volume::start(1, 16 << 20);
    let mut nbd = Nbd::connect(&volume.frontend(), "v1").unwrap();
    nbd.write(0, &pattern(2)).unwrap();
    let data = pattern(3);
    let before = volume.count_in_log(&[KEPT, GIVEN_BACK]);
    nbd.begin_write(0, LENGTH).unwrap();
    nbd.stream().write_all(&data[..LENGTH / 2]).unwrap();
    volume.wait_for_log(&[KEPT, GIVEN_BACK], before);
    nbd.stream().write_all(&data[LENGTH / 2..]).unwrap();
    nbd.end_write().unwrap();
    assert_eq!(difference(&nbd.read(0, LENGTH).unwrap(), &data), None);
    assert!(volume.log_of_engine().contains(KEPT));
    drop(nbd);
    volume.stop();
}
