use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::fcntl::{FallocateFlags, fallocate};
use shorthorn_store::{AlignedBuffer, LayerSums, LostBlock, LostBlocks, sum_of_data, sum_of_zeroes};
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_types::{Errno, MarkAction, MarkRegions, RegionsOf};
use shorthorn_wire::{Flags, Header, Opcode};

use super::*;
use crate::executor::block::number_in_page;
use crate::executor::cached_layer_sums::PIECE_BYTES;
use crate::executor::kind;
use crate::executor::tests::{SIZE, new_store};
use crate::limits::BLOCK_BYTES_USIZE;

const BLOCK: u64 = 3;

/// Makes a replica whose snapshot has rot in a block. Returns the repair of it, too.
fn with_rot_below(directory: &Path) -> (Executor, LayerPatch) {
    let (mut store, owner, loaded) = new_store(directory);
    store.write_at(&[7; 4096], BLOCK * BLOCK_BYTES, true).unwrap();
    store.snapshot("below", true, BTreeMap::new(), "2026-01-01T00:00:00Z").unwrap();
    let image = store.chain().copy_layers().unwrap()[0].image.to_string();
    let mut rot = AlignedBuffer::new(BLOCK_BYTES_USIZE);
    rot.as_mut_slice().fill(1);
    let layer = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(directory.join(&image));
    layer.unwrap().write_all_at(rot.as_slice(), BLOCK * BLOCK_BYTES).unwrap();
    let (offset_bytes, runs) = (BLOCK * BLOCK_BYTES, vec![(0, 1)]);
    let patch = LayerPatch { image, offset_bytes, length_bytes: 4096, runs };
    (Executor::new(store, owner, loaded).unwrap(), patch)
}

fn begin_write(executor: &mut Executor, slot: u16, block: u64, length_bytes: u32, ring: &mut Ring) {
    executor.assign(slot, Header::request(Opcode::Write, 1, block * BLOCK_BYTES, length_bytes));
    executor.start(slot, ring);
}

/// Executes `count` requests to their ends. `see` may act before each completion.
fn end_requests(
    executor: &mut Executor,
    count: usize,
    ring: &mut Ring,
    mut see: impl FnMut(&mut Executor, u8, &mut Ring),
) {
    let (mut completions, mut finished, mut ended) = (Vec::new(), Vec::new(), 0);
    while ended < count {
        executor.write_pages(ring);
        ring.wait(Some(Duration::from_secs(5)), &mut completions).unwrap();
        assert!(!completions.is_empty(), "a request waits, and nothing happens");
        for completion in completions.drain(..) {
            see(executor, completion.token.kind, ring);
            executor.on_completion(completion, ring);
        }
        executor.take_finished(&mut finished);
        ended += finished.len();
        assert!(finished.drain(..).all(|(_, outcome)| outcome == Ok(())));
    }
}

/// The request reads the rot before the repair, and writes it after that.
#[test]
fn rot_that_a_request_merges_beside_a_repair_stays_known() {
    let temp = tempfile::tempdir().unwrap();
    let (mut executor, patch) = with_rot_below(&temp.path().join("replica"));
    assert!(executor.block_sums.known().keep_some([(BLOCK, sum_of_data(&[7; 4096]))]));
    let (mut ring, mut repairs) = (Ring::new(16).unwrap(), 0);
    begin_write(&mut executor, 0, BLOCK, 512, &mut ring);
    end_requests(&mut executor, 1, &mut ring, |executor, kind, ring| {
        if kind == kind::WRITE {
            executor.repair_layer(&patch, &[7; 4096], ring).unwrap();
            repairs += 1;
        }
    });
    assert_eq!(repairs, 1);
    let mut block = AlignedBuffer::new(BLOCK_BYTES_USIZE);
    executor.store.read_at(block.as_mut_slice(), BLOCK * BLOCK_BYTES).unwrap();
    let found = sum_of_data(block.as_slice());
    assert_eq!(executor.block_sums.known().is_rotten(BLOCK, found), Some(true));
}

/// Makes a replica whose disk has lost a block of the snapshot. Returns the repair of it, too.
fn with_vanished_below(directory: &Path) -> (Executor, LayerPatch) {
    let (mut store, owner, loaded) = new_store(directory);
    store.write_at(&[7; 4096], BLOCK * BLOCK_BYTES, true).unwrap();
    store.snapshot("below", true, BTreeMap::new(), "2026-01-01T00:00:00Z").unwrap();
    let image = store.chain().copy_layers().unwrap()[0].image.to_string();
    let layer = OpenOptions::new().write(true).open(directory.join(&image)).unwrap();
    let how = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let (offset_bytes, runs) = (BLOCK * BLOCK_BYTES, vec![(0, 1)]);
    fallocate(&layer, how, i64::try_from(offset_bytes).unwrap(), 4096).unwrap();
    let patch = LayerPatch { image, offset_bytes, length_bytes: 4096, runs };
    (Executor::new(store, owner, loaded).unwrap(), patch)
}

fn shown(executor: &mut Executor) -> u32 {
    let mut block = AlignedBuffer::new(BLOCK_BYTES_USIZE);
    executor.store.read_at(block.as_mut_slice(), BLOCK * BLOCK_BYTES).unwrap();
    sum_of_data(block.as_slice())
}

/// Stores the sums of a region, with one of `BLOCK`. They count.
fn sum_region(executor: &mut Executor, sum: u32, ring: &mut Ring) {
    let block = ByteRange::new(BLOCK * BLOCK_BYTES, BLOCK_BYTES).unwrap();
    executor.block_sums.begin(executor.store.open_block_sums().unwrap());
    assert_eq!(executor.block_sums.load_page(0, ring), None);
    end_reads(executor, ring);
    let at = executor.block_sums.load_page(0, ring).unwrap();
    executor.block_sums.pages().sums_mut(at).set(number_in_page(block), sum);
    assert!(executor.block_sums.write_page(at, 0, ring));
    end_reads(executor, ring);
    let intent_log = executor.state.intent_log_mut();
    let region = intent_log.regions().touched(block);
    intent_log.keep_unsummed(None);
    intent_log.want_sums(region.clone());
    assert!(intent_log.begin_sums(region));
    intent_log.end_sums(true);
    assert!(is_summed(block, executor.state.intent_log()));
}

/// Other pages take the place of the first one in memory.
fn forget_first_page(executor: &mut Executor, ring: &mut Ring) {
    for page in 100..130 {
        executor.block_sums.load_page(page, ring);
        end_reads(executor, ring);
    }
    assert!(executor.block_sums.pages().peek(0).is_none());
}

fn end_reads(executor: &mut Executor, ring: &mut Ring) {
    let mut completions = Vec::new();
    ring.wait(None, &mut completions).unwrap();
    completions.drain(..).for_each(|completion| executor.on_completion(completion, ring));
}

fn zero_block(executor: &mut Executor, opcode: Opcode, ring: &mut Ring) {
    executor.assign(0, Header::request(opcode, 1, BLOCK * BLOCK_BYTES, 4096));
    executor.start(0, ring);
    end_requests(executor, 1, ring, |_, _, _| {});
    executor.free(0);
}

#[test]
fn zeroes_over_a_vanished_block_are_not_repaired_away() {
    for opcode in [Opcode::WriteZeroes, Opcode::Discard] {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("replica");
        let (mut executor, patch) = with_vanished_below(&path);
        let former = sum_of_data(&[7; 4096]);
        assert!(executor.block_sums.known().keep_some([(BLOCK, former)]));
        let mut ring = Ring::new(16).unwrap();
        zero_block(&mut executor, opcode, &mut ring);
        assert!(!executor.block_sums.knows(BLOCK));
        // Nothing proves the zeroes: other members decide.
        let refused = executor.repair_layer(&patch, &[7; 4096], &mut ring).unwrap_err();
        assert!(matches!(refused, ReplicaError::UndecidedHole(_)), "{refused}");
        assert_eq!(shown(&mut executor), sum_of_zeroes(), "{opcode:?}");
        let known = executor.block_sums.known();
        assert_eq!([former, sum_of_zeroes()].map(|sum| known.is_rotten(BLOCK, sum)), [Some(true); 2]);
        begin_write(&mut executor, 0, BLOCK, 4096, &mut ring);
        end_requests(&mut executor, 1, &mut ring, |_, _, _| {});
        executor.free(0);
        let decided = shown(&mut executor);
        executor.repair_layer(&patch, &[7; 4096], &mut ring).unwrap();
        assert_eq!(shown(&mut executor), decided);
        let mut repaired = [0; 4096];
        let layer = std::fs::File::open(path.join(&patch.image)).unwrap();
        layer.read_exact_at(&mut repaired, BLOCK * BLOCK_BYTES).unwrap();
        assert_eq!(sum_of_data(&repaired), former);
    }
}

#[test]
fn a_sum_decides_between_zeroes_and_the_data_of_the_layer() {
    for sum in [sum_of_zeroes(), sum_of_data(&[7; 4096])] {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("replica");
        let (mut executor, patch) = with_vanished_below(&path);
        let mut ring = Ring::new(64).unwrap();
        sum_region(&mut executor, sum, &mut ring);
        // Their page has to be read first.
        forget_first_page(&mut executor, &mut ring);
        assert!(executor.repair_layer(&patch, &[7; 4096], &mut ring).is_err());
        assert_eq!(shown(&mut executor), sum_of_zeroes());
        end_reads(&mut executor, &mut ring);
        executor.repair_layer(&patch, &[7; 4096], &mut ring).unwrap();
        assert_eq!(shown(&mut executor), sum);
        assert_ne!(executor.block_sums.known().is_rotten(BLOCK, sum), Some(true));
    }
}

/// No sum says so: a whole region has vanished.
#[test]
fn zeroes_that_another_member_gives_decide_about_a_block_that_the_disk_had_lost() {
    let temp = tempfile::tempdir().unwrap();
    let (mut executor, patch) = with_vanished_below(&temp.path().join("replica"));
    let mut ring = Ring::new(16).unwrap();
    zero_block(&mut executor, Opcode::WriteZeroes, &mut ring);
    let refused = executor.repair_layer(&patch, &[7; 4096], &mut ring).unwrap_err();
    assert!(matches!(refused, ReplicaError::UndecidedHole(_)), "{refused}");
    zero_block(&mut executor, Opcode::WriteZeroes, &mut ring);
    executor.repair_layer(&patch, &[7; 4096], &mut ring).unwrap();
    assert_eq!(shown(&mut executor), sum_of_zeroes());
}

/// The snapshot above has no data there, and every member has kept its sum.
#[test]
fn a_restored_block_ends_the_sums_of_later_snapshots() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("replica");
    let (mut executor, patch) = with_vanished_below(&path);
    let mut ring = Ring::new(16).unwrap();
    zero_block(&mut executor, Opcode::WriteZeroes, &mut ring);
    executor.store.snapshot("above", true, BTreeMap::new(), "2026-01-01T00:00:00Z").unwrap();
    let images: Vec<String> =
        executor.store.chain().copy_layers().unwrap().iter().map(|layer| layer.image.to_string()).collect();
    for image in &images[..2] {
        let bytes = executor.store.snapshot_layers().size_bytes(image).unwrap();
        let sums = LayerSums::new(bytes, PIECE_BYTES, 9).unwrap();
        executor.store.snapshot_layers().save_sums(image, &sums).unwrap();
    }
    assert!(executor.layer_sums.load(&images[1], &executor.store).unwrap().is_some());
    assert!(executor.block_sums.known().keep_some([(BLOCK, sum_of_zeroes())]));
    executor.repair_layer(&patch, &[7; 4096], &mut ring).unwrap();
    assert!(executor.layer_sums.load(&images[1], &executor.store).unwrap().is_none());
    assert!(executor.layer_sums.load(&images[0], &executor.store).unwrap().is_some());
    assert_eq!(shown(&mut executor), sum_of_zeroes());
}

#[test]
fn a_repair_brings_back_a_block_that_its_sum_proves() {
    let temp = tempfile::tempdir().unwrap();
    let (mut executor, patch) = with_vanished_below(&temp.path().join("replica"));
    let former = sum_of_data(&[7; 4096]);
    assert!(executor.block_sums.known().keep_some([(BLOCK, former)]));
    executor.repair_layer(&patch, &[7; 4096], &mut Ring::new(16).unwrap()).unwrap();
    assert_eq!(shown(&mut executor), former);
    assert_eq!(executor.block_sums.known().is_rotten(BLOCK, former), Some(false));
}

/// The request has found nothing below the head: after the repair its writes are not enough.
#[test]
fn a_repair_brings_back_no_block_that_a_request_is_modifying() {
    for (opcode, length_bytes) in [(Opcode::WriteZeroes, 4096), (Opcode::Discard, 4096), (Opcode::Write, 512)]
    {
        let temp = tempfile::tempdir().unwrap();
        let (mut executor, patch) = with_vanished_below(&temp.path().join("replica"));
        let mut ring = Ring::new(16).unwrap();
        executor.assign(0, Header::request(opcode, 1, BLOCK * BLOCK_BYTES, length_bytes));
        executor.start(0, &mut ring);
        let refused = executor.repair_layer(&patch, &[7; 4096], &mut ring).unwrap_err();
        assert_eq!(refused.errno(), Errno::AGAIN, "{opcode:?}: {refused}");
        end_requests(&mut executor, 1, &mut ring, |_, _, _| {});
        executor.free(0);
    }
}

/// Members may hold the same data in different layers. The repair of a block beside this one makes the
/// layers equal.
#[test]
fn a_request_does_not_see_a_hole_that_a_repair_makes() {
    for (opcode, start) in
        [(Opcode::Read, 0), (Opcode::Write, 0), (Opcode::WriteZeroes, 0), (Opcode::WriteZeroes, 3584)]
    {
        let temp = tempfile::tempdir().unwrap();
        let (mut store, owner, loaded) = new_store(&temp.path().join("replica"));
        for name in ["lower", "upper"] {
            store.write_at(&[7; 4096], BLOCK * BLOCK_BYTES, true).unwrap();
            store.snapshot(name, true, BTreeMap::new(), "2026-01-01T00:00:00Z").unwrap();
        }
        let image = store.chain().copy_layers().unwrap()[1].image.to_string();
        let mut executor = Executor::new(store, owner, loaded).unwrap();
        let patch = LayerPatch { image, offset_bytes: BLOCK * BLOCK_BYTES, length_bytes: 4096, runs: vec![] };
        let mut ring = Ring::new(16).unwrap();
        // Its region is recorded as dirty already.
        begin_write(&mut executor, 1, BLOCK + 1, 512, &mut ring);
        end_requests(&mut executor, 1, &mut ring, |_, _, _| {});
        executor.free(1);
        executor.assign(0, Header::request(opcode, 1, BLOCK * BLOCK_BYTES + start, 512));
        executor.start(0, &mut ring);
        executor.repair_layer(&patch, &[], &mut ring).unwrap();
        end_requests(&mut executor, 1, &mut ring, |_, _, _| {});
        let mut found = AlignedBuffer::new(BLOCK_BYTES_USIZE);
        executor.store.read_at(found.as_mut_slice(), BLOCK * BLOCK_BYTES).unwrap();
        if opcode == Opcode::Read {
            assert_eq!(executor.io.payload(0).crc32c(), crc32c::crc32c(&found.as_slice()[..512]));
        }
        assert!(found.as_slice()[512..3584].iter().all(|byte| *byte == 7), "{opcode:?} {start}");
    }
}

/// The repair writes the page of the set that the request waits for.
#[test]
fn a_request_that_waits_for_a_page_continues_after_a_repair() {
    let temp = tempfile::tempdir().unwrap();
    let (mut executor, patch) = with_rot_below(&temp.path().join("replica"));
    let mut ring = Ring::new(16).unwrap();
    begin_write(&mut executor, 0, BLOCK + 1, 4096, &mut ring);
    executor.repair_layer(&patch, &[7; 4096], &mut ring).unwrap();
    end_requests(&mut executor, 1, &mut ring, |_, _, _| {});
}

#[test]
fn a_request_cures_a_lost_block_beside_a_repair() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("replica");
    let (mut executor, patch) = with_rot_below(&path);
    executor.block_sums.begin(executor.store.open_block_sums().unwrap());
    *executor.block_sums.lost() = LostBlocks::from([(BLOCK, LostBlock::new(sum_of_data(&[1; 4096])))]);
    executor.store.save_lost_blocks(executor.block_sums.lost()).unwrap();
    executor.block_sums.know_lost();
    let (mut ring, mut repairs) = (Ring::new(16).unwrap(), 0);
    begin_write(&mut executor, 0, BLOCK, 4096, &mut ring);
    end_requests(&mut executor, 1, &mut ring, |executor, kind, ring| {
        if kind == kind::WRITE && repairs == 0 {
            executor.repair_layer(&patch, &[7; 4096], ring).unwrap();
            repairs += 1;
        }
    });
    assert!(repairs == 1 && !path.join("shorthorn.lost-blocks").exists());
    assert!(!executor.block_sums.knows(BLOCK));
}

/// A page that the kernel is writing could overtake the pages that the repair writes.
#[test]
fn a_repair_is_tried_again_after_the_write_of_a_set() {
    let temp = tempfile::tempdir().unwrap();
    let (mut executor, patch) = with_rot_below(&temp.path().join("replica"));
    executor.block_sums.begin(executor.store.open_block_sums().unwrap());
    let mut ring = Ring::new(16).unwrap();
    begin_write(&mut executor, 0, SIZE / BLOCK_BYTES - 1, 4096, &mut ring);
    executor.write_pages(&mut ring);
    assert!(!executor.state.is_idle());
    let refused = executor.repair_layer(&patch, &[7; 4096], &mut ring).unwrap_err();
    assert_eq!(refused.errno(), Errno::AGAIN, "{refused}");
    assert_eq!(shown(&mut executor), sum_of_data(&[1; 4096]));
    end_requests(&mut executor, 1, &mut ring, |_, _, _| {});
    executor.repair_layer(&patch, &[7; 4096], &mut ring).unwrap();
    assert_eq!(shown(&mut executor), sum_of_data(&[7; 4096]));
}

/// The request has read the rot, and waits for the page that would show it. The repair ends these sums.
#[test]
fn a_read_that_waits_for_its_sums_does_not_return_rot_after_a_repair() {
    let temp = tempfile::tempdir().unwrap();
    let (mut executor, patch) = with_rot_below(&temp.path().join("replica"));
    let mut ring = Ring::new(64).unwrap();
    sum_region(&mut executor, sum_of_data(&[7; 4096]), &mut ring);
    forget_first_page(&mut executor, &mut ring);
    let read = Header::request(Opcode::Read, 1, BLOCK * BLOCK_BYTES, 4096);
    executor.assign(0, Header { flags: Flags::CHECKED, ..read });
    executor.start(0, &mut ring);
    end_reads(&mut executor, &mut ring);
    assert!(executor.io.work(0).wants_check && executor.io.work(0).pending == 0, "it waits for the page");
    executor.repair_layer(&patch, &[7; 4096], &mut ring).unwrap();
    end_requests(&mut executor, 1, &mut ring, |_, _, _| {});
    assert_eq!(executor.io.payload(0).crc32c(), crc32c::crc32c(&[7; 4096]));
}

/// The sum is that of zeroes which a request has made. The repair of the layer would be refused.
#[test]
fn a_sum_of_zeroes_does_not_confirm_the_hole_of_a_layer() {
    let (temp, mut ring) = (tempfile::tempdir().unwrap(), Ring::new(64).unwrap());
    let (mut executor, _) = with_vanished_below(&temp.path().join("replica"));
    sum_region(&mut executor, sum_of_zeroes(), &mut ring);
    for opcode in [Opcode::ReadLayer, Opcode::Verify] {
        let read = Header::request(opcode, 1, BLOCK * BLOCK_BYTES, 4096);
        executor.assign(0, Header { flags: Flags::CHECKED, ..read });
        executor.start(0, &mut ring);
        if opcode == Opcode::ReadLayer {
            end_requests(&mut executor, 1, &mut ring, |_, _, _| {});
        } else {
            let mut finished = Vec::new();
            executor.take_finished(&mut finished); // a reader's hole is not read from the disk
            assert_eq!(finished, [(0, Ok(()))]);
        }
        assert_eq!(executor.io.is_confirmed(0), opcode == Opcode::Verify);
        executor.free(0);
    }
}

/// The repair ends the sum that shows the rot. If it fails then, zeroes would look sound.
#[test]
fn a_block_that_has_vanished_stays_known_as_rot_if_its_repair_fails() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("replica");
    let (mut executor, patch) = with_vanished_below(&path);
    let (mut ring, former) = (Ring::new(64).unwrap(), sum_of_data(&[7; 4096]));
    sum_region(&mut executor, former, &mut ring);
    let (layer, elsewhere) = (path.join(&patch.image), temp.path().join("layer"));
    std::fs::rename(&layer, &elsewhere).unwrap();
    executor.repair_layer(&patch, &[7; 4096], &mut ring).unwrap_err();
    std::fs::rename(&elsewhere, &layer).unwrap();
    let is_rotten = |executor: &mut Executor| {
        [sum_of_zeroes(), former].map(|sum| executor.block_sums.known().is_rotten(BLOCK, sum))
    };
    assert_eq!(is_rotten(&mut executor), [Some(true), Some(false)]);
    executor.repair_layer(&patch, &[7; 4096], &mut ring).unwrap();
    assert_eq!((is_rotten(&mut executor)[1], shown(&mut executor)), (Some(false), former));
}

/// A repair that fails, or a crash in it, may leave half of the block written.
#[test]
fn the_sum_of_a_block_counts_until_its_repair_is_durable() {
    for (byte, counts) in [(7, true), (8, false)] {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("replica");
        let (mut executor, patch) = with_rot_below(&path);
        let mut ring = Ring::new(64).unwrap();
        sum_region(&mut executor, sum_of_data(&[7; 4096]), &mut ring);
        let block = ByteRange::new(BLOCK * BLOCK_BYTES, BLOCK_BYTES).unwrap();
        let (layer, elsewhere) = (path.join(&patch.image), temp.path().join("layer"));
        std::fs::rename(&layer, &elsewhere).unwrap();
        executor.repair_layer(&patch, &[byte; 4096], &mut ring).unwrap_err();
        assert_eq!(is_summed(block, executor.state.intent_log()), counts, "{byte}");
        std::fs::rename(&elsewhere, &layer).unwrap();
        executor.repair_layer(&patch, &[byte; 4096], &mut ring).unwrap();
        assert_eq!(shown(&mut executor), sum_of_data(&[byte; 4096]));
        assert!(
            !is_summed(block, executor.state.intent_log()),
            "the region is summed again, which frees the places of its blocks"
        );
    }
}

/// Executes the run of sums that is due now.
fn sum_now(executor: &mut Executor, ring: &mut Ring) {
    let mut completions = Vec::new();
    executor.background_sums.schedule().wait_until(Instant::now());
    executor.sum(ring);
    assert!(executor.background_sums.is_running());
    while executor.background_sums.is_running() {
        ring.wait(Some(Duration::from_secs(5)), &mut completions).unwrap();
        assert!(!completions.is_empty(), "the sums wait, and nothing happens");
        for completion in completions.drain(..) {
            executor.on_completion(completion, ring);
        }
        executor.sum(ring);
    }
}

/// An engine repairs a block of the head, and clears the region. Sums beside it stay as they are.
#[test]
fn the_blocks_of_a_repaired_region_need_no_memory_once_it_is_read_back() {
    let temp = tempfile::tempdir().unwrap();
    let (store, owner, loaded) = new_store(&temp.path().join("replica"));
    let mut executor = Executor::new(store, owner, loaded).unwrap();
    executor.store.write_at(&[1; 4096], BLOCK * BLOCK_BYTES, true).unwrap();
    let (mut ring, right) = (Ring::new(16).unwrap(), sum_of_data(&[7; 4096]));
    sum_region(&mut executor, right, &mut ring);
    let at = executor.block_sums.load_page(0, &mut ring).unwrap();
    let beside = ByteRange::new((BLOCK + 2) * BLOCK_BYTES, BLOCK_BYTES).unwrap();
    executor.block_sums.pages().sums_mut(at).set(number_in_page(beside), 99);
    let known = executor.block_sums.known();
    assert!(known.keep_some([(BLOCK, right), (BLOCK + 1, sum_of_zeroes())]));
    known.reported(BLOCK);
    executor.assign(0, Header::request(Opcode::Write, 1, BLOCK * BLOCK_BYTES, 4096));
    executor.io.payload(0).copy_from(&[7; 4096]);
    executor.start(0, &mut ring);
    end_requests(&mut executor, 1, &mut ring, |_, _, _| {});
    executor.free(0);
    let block = ByteRange::new(BLOCK * BLOCK_BYTES, BLOCK_BYTES).unwrap();
    assert!(is_summed(block, executor.state.intent_log()) && executor.block_sums.knows(BLOCK));
    let (of, action) = (RegionsOf::Intent, MarkAction::Clear);
    let mark = MarkRegions { of, action, runs: vec![(0, 1)], stamp: 0, size_bytes: None };
    executor.state.intent_log_mut().mark(&mark).unwrap();
    sum_now(&mut executor, &mut ring);
    assert!(is_summed(block, executor.state.intent_log()) && executor.block_sums.known().is_empty());
    let intent_log = executor.state.intent_log();
    let sums = [block, beside].map(|block| executor.block_sums.kept_sum(block, intent_log));
    assert_eq!(sums, [Some(right), Some(99)]);
    assert!(!executor.state.intent_log().wants_sums());
}
