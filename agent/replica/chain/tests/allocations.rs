//! Plans allocate nothing once the windows that they touch are known: under memory pressure the
//! kernel writes back through the process that makes them.
#![allow(clippy::unwrap_used)] // clippy does not count helpers as tests

use std::convert::Infallible;

use shorthorn_chain::{BlockMap, ByteRange, ExtentSource, FileIndex};
use shorthorn_testkit::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

/// Three layers with every third block each.
struct Thirds;

impl ExtentSource for Thirds {
    type Error = Infallible;

    fn data_extents(
        &mut self,
        file: FileIndex,
        range: ByteRange,
        found: &mut dyn FnMut(ByteRange),
    ) -> Result<(), Infallible> {
        for block in
            (range.offset() / 4096..range.end() / 4096).filter(|block| block % 3 == file.slot() as u64)
        {
            found(ByteRange::new(block * 4096, 4096).unwrap());
        }
        Ok(())
    }
}

#[test]
fn plans_allocate_nothing_after_warm_up() {
    let chain = (0..3).filter_map(FileIndex::new).collect();
    let mut map = BlockMap::new(64 << 20, chain, true);
    let (mut segments, mut steps) = (Vec::with_capacity(1 << 10), Vec::with_capacity(1 << 10));
    let mut round = || {
        for number in 0..500u64 {
            let range = ByteRange::new(number * 122_880 + 512, 40_960).unwrap();
            segments.clear();
            steps.clear();
            map.plan_read(range, &mut Thirds, &mut segments).unwrap();
            map.plan_write(range, &mut Thirds).unwrap();
            map.plan_discard(range, &mut Thirds, &mut steps).unwrap();
            map.plan_write_zeroes(range, &mut Thirds, &mut steps).unwrap();
            map.written(range);
            map.punched(range);
        }
    };
    round();
    let before = ALLOCATOR.allocations();
    round();
    let after = ALLOCATOR.allocations();
    assert_eq!(after, before, "after warm-up");
}
