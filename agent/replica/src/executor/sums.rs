//! Sums of snapshots' layers: as they are now, and as they are kept.
//!
//! A piece is read like other data, without delaying requests. Sums are kept rarely, and rot is repaired more
//! rarely still: that waits for the disk.

use std::ops::Range;

use shorthorn_ring::Ring;
use shorthorn_store::{ByteRange, FileIndex, FoundSums, LayerSums, SUM_PAGE_SPAN_BYTES, StoreError};
use shorthorn_types::Regions;
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_wire::{
    EMPTY_SUM, KeepSums, LayerCheck, LayerPatch, LayerRange, SUM_PIECE_BYTES, SummedRun, piece_sum,
};

use super::Executor;
use super::layer_sums::{Checked, PIECE_BYTES, no_layer, piece_of, sum_at};
use super::operation::{Outcome, kind};
use super::piece::Piece;
use crate::error::ReplicaError;

impl Executor {
    /// Begins to read a piece of a snapshot's layer. The request has finished when [`Executor::layer_check`]
    /// returns a result.
    pub fn start_check(
        &mut self,
        slot: u16,
        asked: &LayerRange,
        ring: &mut Ring,
    ) -> Result<(), ReplicaError> {
        let file = self.store.snapshot_layer(&asked.image).ok_or_else(|| no_layer(&asked.image))?;
        let piece_range = piece_of(asked, self.store.size_bytes())?;
        let kept = self.kept_sums(&asked.image)?.map(|sums| sum_at(sums, piece_range.offset()));
        let checked = Checked { file, piece: piece_range, kept: kept.filter(|sum| *sum != 0) };
        self.requests.check_layer(slot, piece_range, checked);
        self.buffers.touch(slot, piece_range);
        // Rot does not vote: it is as if it could not be read.
        self.begin_check(slot);
        self.read(slot, kind::READ, Piece::blocks_of(piece_range.length(), file), ring);
        Ok(())
    }

    fn kept_sums(&mut self, image: &str) -> Result<Option<&LayerSums>, StoreError> {
        if !self.sums.has(image) {
            let sums = match self.store.load_sums(image)? {
                FoundSums::Kept(sums) if sums.piece_bytes == PIECE_BYTES => Some(sums),
                FoundSums::Kept(_) | FoundSums::None => None,
                FoundSums::Damaged(reason) => {
                    tracing::warn!(
                        image,
                        reason,
                        "the checksums of a snapshot are damaged and ignored; a scrub makes those again on which all members agree"
                    );
                    None
                }
            };
            self.sums.put(image, sums);
        }
        Ok(self.sums.kept())
    }

    /// Returns the result of the check in `slot`, if a check was begun there.
    pub fn layer_check(&self, slot: u16, outcome: Outcome) -> Option<Result<LayerCheck, StoreError>> {
        let checked = self.work(slot).checked?;
        Some(self.summed(slot, checked, outcome))
    }

    fn summed(&self, slot: u16, checked: Checked, outcome: Outcome) -> Result<LayerCheck, StoreError> {
        let Checked { file, piece, kept } = checked;
        let sum = match outcome {
            Ok(()) => {
                let runs = self.store.layer_blocks(file, piece)?;
                Some(piece_sum(runs.iter().map(|run| self.summed_run(slot, piece, *run))))
            }
            Err(_) => None,
        };
        let next_bytes = self.next_piece(file, piece.end())?;
        Ok(LayerCheck { sum, kept, next_bytes })
    }

    fn summed_run(&self, slot: u16, piece: ByteRange, run: ByteRange) -> SummedRun {
        let number = |bytes: u64| u32::try_from(bytes / BLOCK_BYTES).unwrap_or(u32::MAX);
        SummedRun {
            first_block: number(run.offset() - piece.offset()),
            blocks: number(run.length()),
            crc32c: self.buffers.part(slot, piece.offset(), run).crc32c(),
        }
    }

    /// Returns the next piece from `from_bytes` on where the layer has blocks, or had when its sums were
    /// kept.
    fn next_piece(&self, file: FileIndex, from_bytes: u64) -> Result<Option<u64>, StoreError> {
        let data = self.store.next_layer_data(file, from_bytes)?;
        let has_data = data.map(|at| at.max(from_bytes) / SUM_PIECE_BYTES * SUM_PIECE_BYTES);
        let kept = self.sums.kept();
        let first = from_bytes / SUM_PIECE_BYTES;
        let had_data = kept.and_then(|sums| {
            let later = sums.sums.iter().skip(usize::try_from(first).unwrap_or(usize::MAX));
            let at = later.take_while(|sum| matches!(**sum, 0 | EMPTY_SUM)).count();
            let number = first + at as u64;
            (number < sums.sums.len() as u64).then_some(number * SUM_PIECE_BYTES)
        });
        let next = [has_data, had_data].into_iter().flatten().min();
        Ok(next.filter(|at| *at < self.store.size_bytes()))
    }

    /// Takes sums to keep.
    ///
    /// # Errors
    /// The sums do not fit the layer, or the error of the store.
    pub fn keep_sums(&mut self, message: &KeepSums) -> Result<(), ReplicaError> {
        let KeepSums { image, is_first, is_last, first_piece, sums } = message;
        let layer_bytes = self.store.snapshot_layer_bytes(image).ok_or_else(|| no_layer(image))?;
        if *is_first {
            self.sums.begin(image, layer_bytes);
        }
        let received = self.sums.receiving(image).ok_or_else(|| no_layer(image))?;
        let Some(received) = received else { return Ok(()) };
        let places = received.sums.iter_mut().skip(*first_piece as usize);
        if sums.len() > KeepSums::SUMS_MAX || places.len() < sums.len() {
            return Err(ReplicaError::Sums {
                image: image.clone(),
                first_piece: *first_piece,
                count: sums.len(),
            });
        }
        places.zip(sums).for_each(|(place, sum)| *place = *sum);
        if *is_last { self.save_received(image) } else { Ok(()) }
    }

    fn save_received(&mut self, image: &str) -> Result<(), ReplicaError> {
        let Some(received) = self.sums.take_received() else { return Ok(()) };
        let is_known = self.kept_sums(image)?.is_some_and(|kept| *kept == received);
        self.sums.forget();
        if !is_known {
            self.store.save_sums(image, &received)?;
            tracing::info!(image, pieces = received.sums.len(), "the sums of a snapshot are kept");
        }
        Ok(())
    }

    /// Repairs a piece of a snapshot's layer. Waits for the disk.
    ///
    /// # Errors
    /// The error of the store.
    pub fn repair_layer(
        &mut self,
        patch: &LayerPatch,
        data: &[u8],
        ring: &mut Ring,
    ) -> Result<(), ReplicaError> {
        let repaired = self.patch_layer(patch, data);
        // No other event wakes requests that wait for the pages of sets that were written beside the ring.
        self.go_on_waiting(ring);
        repaired
    }

    fn patch_layer(&mut self, patch: &LayerPatch, data: &[u8]) -> Result<(), ReplicaError> {
        let LayerPatch { image, offset_bytes, length_bytes, runs } = patch;
        let range = ByteRange::new(*offset_bytes, u64::from(*length_bytes)).map_err(StoreError::from)?;
        let run = |(first, count): &(u32, u32)| {
            let start = offset_bytes + u64::from(*first) * BLOCK_BYTES;
            ByteRange::new(start, u64::from(*count) * BLOCK_BYTES).map_err(StoreError::from)
        };
        let runs = runs.iter().map(run).collect::<Result<Vec<_>, _>>()?;
        let pages = pages_of_regions(self.state.intent_log().regions(), range);
        if pages.into_iter().any(|page| !self.block_sums.known.may_modify(page)) {
            return Err(ReplicaError::TooMuchRot(range));
        }
        // Blocks that the repair removes from the layer read as zeroes, also if it fails after that.
        self.requests.void_plans();
        self.zero_jobs.void_reads();
        let is_followed = self.end_sums_in(range);
        let repaired = match is_followed {
            true => self.store.repair_layer(image, range, &runs, data),
            false => {
                // The data that a reader sees there may have been summed with the rot in it.
                self.store.forget_block_sums()?;
                let repaired = self.store.repair_layer(image, range, &runs, data);
                self.renew_stored_sums()?;
                repaired
            }
        };
        repaired?;
        tracing::warn!(image, %range, bytes = data.len(), "a snapshot's layer was repaired");
        Ok(())
    }
}

impl Executor {
    /// The sums of the regions of `range` do not count any more, durably. False if that could not be done:
    /// then all sums have to be forgotten. Waits for the disk.
    fn end_sums_in(&mut self, range: ByteRange) -> bool {
        let intent_log = self.state.intent_log_mut();
        let regions = intent_log.regions().touched(range);
        intent_log.unsum(regions);
        self.sum_soon();
        // A page that the ring still writes could overtake those that are written here.
        self.marks.is_idle() && self.write_all_pages().is_ok()
    }
}

/// Returns the pages of sums that the end of the sums of `range` affects: sums end by region, and a region
/// may have several pages.
fn pages_of_regions(regions: Regions, range: ByteRange) -> Range<u64> {
    let ends = regions.bytes(regions.touched(range));
    ends.offset() / SUM_PAGE_SPAN_BYTES..ends.end().div_ceil(SUM_PAGE_SPAN_BYTES)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs::OpenOptions;
    use std::os::unix::fs::{FileExt, OpenOptionsExt};
    use std::path::Path;
    use std::time::Duration;

    use shorthorn_store::{AlignedBuffer, LostBlock, LostBlocks, sum_of_data};
    use shorthorn_wire::{Header, Opcode};

    use super::*;
    use crate::executor::kind;
    use crate::executor::tests::{SIZE, new_store};
    use crate::limits::BLOCK_BYTES_USIZE;

    const BLOCK: u64 = 3;

    /// Makes a replica whose snapshot has rot in a block. Returns the repair of it, too.
    fn with_rot_below(directory: &Path) -> (Executor, LayerPatch) {
        let (mut store, owner, loaded) = new_store(directory);
        store.write_at(&[7; 4096], BLOCK * BLOCK_BYTES, true).unwrap();
        store.snapshot("below", true, BTreeMap::new(), "2026-01-01T00:00:00Z").unwrap();
        let image = store.copy_layers().unwrap()[0].image.to_string();
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
        assert!(executor.block_sums.known.keep_some([(BLOCK, sum_of_data(&[7; 4096]))]));
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
        assert_eq!(executor.block_sums.known.is_rotten(BLOCK, found), Some(true));
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
            let image = store.copy_layers().unwrap()[1].image.to_string();
            let mut executor = Executor::new(store, owner, loaded).unwrap();
            let patch =
                LayerPatch { image, offset_bytes: BLOCK * BLOCK_BYTES, length_bytes: 4096, runs: vec![] };
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
                assert_eq!(executor.payload(0).crc32c(), crc32c::crc32c(&found.as_slice()[..512]));
            }
            assert!(found.as_slice()[512..3584].iter().all(|byte| *byte == 7), "{opcode:?} {start}");
        }
    }

    /// The repair writes the page of the set that the request waits for.
    #[test]
    fn a_request_that_waits_for_a_page_goes_on_after_a_repair() {
        let temp = tempfile::tempdir().unwrap();
        let (mut executor, patch) = with_rot_below(&temp.path().join("replica"));
        let mut ring = Ring::new(16).unwrap();
        begin_write(&mut executor, 0, BLOCK + 1, 4096, &mut ring);
        executor.repair_layer(&patch, &[7; 4096], &mut ring).unwrap();
        end_requests(&mut executor, 1, &mut ring, |_, _, _| {});
    }

    /// A page of a set that is being written keeps the repair from ending single sums.
    #[test]
    fn a_request_cures_a_lost_block_beside_a_repair_that_ends_all_sums() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("replica");
        let (mut executor, patch) = with_rot_below(&path);
        executor.block_sums.pages.begin(executor.store.open_block_sums().unwrap());
        executor.block_sums.lost = LostBlocks::from([(BLOCK, LostBlock::new(sum_of_data(&[1; 4096])))]);
        executor.store.save_lost_blocks(&executor.block_sums.lost).unwrap();
        executor.block_sums.know_lost();
        let (mut ring, mut repairs) = (Ring::new(16).unwrap(), 0);
        begin_write(&mut executor, 0, BLOCK, 4096, &mut ring);
        end_requests(&mut executor, 2, &mut ring, |executor, kind, ring| {
            if kind == kind::WRITE && repairs == 0 {
                begin_write(executor, 1, SIZE / BLOCK_BYTES - 1, 4096, ring);
                executor.write_pages(ring);
                assert!(!executor.marks.is_idle());
                executor.repair_layer(&patch, &[7; 4096], ring).unwrap();
                repairs += 1;
            }
        });
        assert!(repairs == 1 && !path.join("shorthorn.lost-blocks").exists());
        assert!(!executor.block_sums.known.has(BLOCK));
    }

    /// Other members have decided for other data, which could not be written here.
    #[test]
    fn rot_stays_known_after_a_repair_that_ends_all_sums() {
        let temp = tempfile::tempdir().unwrap();
        let (mut executor, patch) = with_rot_below(&temp.path().join("replica"));
        executor.block_sums.pages.begin(executor.store.open_block_sums().unwrap());
        assert!(executor.block_sums.known.keep_some([(BLOCK, sum_of_data(&[8; 4096]))]));
        let mut ring = Ring::new(16).unwrap();
        begin_write(&mut executor, 0, SIZE / BLOCK_BYTES - 1, 4096, &mut ring);
        executor.write_pages(&mut ring);
        assert!(!executor.marks.is_idle());
        executor.repair_layer(&patch, &[7; 4096], &mut ring).unwrap();
        end_requests(&mut executor, 1, &mut ring, |_, _, _| {});
        assert_eq!(executor.block_sums.known.is_rotten(BLOCK, sum_of_data(&[7; 4096])), Some(true));
    }

    #[test]
    fn a_repair_looks_at_all_pages_of_the_regions_that_it_touches() {
        let block = ByteRange::new(9 << 20, BLOCK_BYTES).unwrap();
        for (size_bytes, pages) in [(1 << 30, 4..5), (2 << 40, 4..5), (3 << 40, 4..6), (5 << 40, 4..8)] {
            assert_eq!(pages_of_regions(Regions::of(size_bytes), block), pages, "{size_bytes}");
        }
    }
}
