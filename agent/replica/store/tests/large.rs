//! A volume of 1 TiB with 50 snapshots. The only test of its program, because it measures memory.
#![allow(clippy::unwrap_used)] // clippy does not count helpers as tests

mod common;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use common::pattern;
use shorthorn_store::{ByteRange, CreateOptions, OpenOptions, Store, memory_limit_bytes};

const TIME: &str = "2026-01-01T00:00:00Z";
const SIZE_BYTES: u64 = 1 << 40;

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
fn a_large_replica_opens_within_a_second_and_32_mib() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("large");
    let options = CreateOptions { size_bytes: SIZE_BYTES, ..CreateOptions::default() };
    let mut store = Store::create(&path, options).unwrap();
    let data = pattern(1, 4096);
    for number in 0..50u64 {
        for write in 0..40 {
            let block = (number * 40 + write).wrapping_mul(0x9e37_79b9_7f4a_7c15) % (SIZE_BYTES / 4096);
            store.write_at(&data, block * 4096, false).unwrap();
        }
        store.snapshot(&format!("s{number}"), true, BTreeMap::new(), TIME).unwrap();
    }
    store.close().unwrap();

    let before_bytes = resident_bytes();
    let start = Instant::now();
    let mut store = Store::open(&path, OpenOptions::default()).unwrap();
    let opened = start.elapsed();
    let open_bytes = resident_bytes().saturating_sub(before_bytes);
    assert_eq!(store.layers().len(), 51);
    assert!(opened < Duration::from_secs(1), "{opened:?}");
    assert!(open_bytes <= 32 << 20, "{open_bytes}");

    let start = Instant::now();
    let mut segments = Vec::new();
    let requests = 4000;
    for request in 0..requests {
        segments.clear();
        let offset = SIZE_BYTES / requests * request / 4096 * 4096;
        store.plan_read(ByteRange::new(offset, 4096).unwrap(), &mut segments).unwrap();
        assert_eq!(segments.len(), 1);
    }
    let probed = start.elapsed() / u32::try_from(requests).unwrap();
    let used_bytes = resident_bytes().saturating_sub(before_bytes);
    assert!(used_bytes <= 32 << 20, "{used_bytes}");
    assert!(store.info().map.limit_bytes as u64 <= memory_limit_bytes(SIZE_BYTES));
    println!(
        "opened in {opened:?} with {open_bytes} bytes; {used_bytes} bytes after {requests} windows were \
         probed in {probed:?} each"
    );
}
