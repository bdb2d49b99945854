//! Reads the members' data in a piece of a layer, and repairs members with wrong data.

use shorthorn_core::{MemberChecksums, PeerIndex};
use shorthorn_types::ByteRange;
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_wire::{ExtentsQuery, Flags, LayerPatch, PATCH_BYTES_MAX, SummedRun, piece_sum};

use super::{Layer, Scrubber};
use crate::connection::{ConnectError, ReplicaConnection};
use crate::events::Done;

const BLOCK: usize = 4096;
const _: () = assert!(BLOCK as u64 == BLOCK_BYTES);

/// A piece of a layer as a member holds it: the runs of existing blocks, and the data of the whole piece with
/// zeroes elsewhere.
#[derive(Debug, PartialEq, Eq)]
struct Held {
    piece: ByteRange,
    runs: Vec<ByteRange>,
    data: Vec<u8>,
}

impl Held {
    fn part(&self, range: ByteRange) -> &[u8] {
        let start = distance(range.offset() - self.piece.offset());
        &self.data[start..start + distance(range.length())]
    }

    fn sum(&self) -> u32 {
        piece_sum(self.runs.iter().map(|run| SummedRun {
            first_block: blocks(run.offset() - self.piece.offset()),
            blocks: blocks(run.length()),
            crc32c: crc32c::crc32c(self.part(*run)),
        }))
    }

    /// Returns true if a layer that was checked with this sum holds the same. A check has no sum if the
    /// member knows a block there as rotten. That may be a block which lacks other data in the head: so the
    /// layer is read back then.
    fn is_in<E>(
        &self,
        sum: Option<u32>,
        read_back: impl FnOnce() -> Result<Option<Held>, E>,
    ) -> Result<bool, E> {
        match sum {
            Some(sum) => Ok(sum == self.sum()),
            None => Ok(read_back()?.is_some_and(|found| found == *self)),
        }
    }

    /// Returns the messages, each with its data, that make a layer hold the same.
    fn patches(&self, image: &str) -> Vec<(LayerPatch, Vec<u8>)> {
        let step = u64::from(PATCH_BYTES_MAX);
        let starts = (self.piece.offset()..self.piece.end()).step_by(distance(step));
        let patch = |start: u64| {
            let end = self.piece.end().min(start + step);
            let inside = self.runs.iter().filter_map(|run| {
                let from = run.offset().max(start);
                ByteRange::new(from, run.end().min(end).checked_sub(from)?).ok()
            });
            let inside: Vec<ByteRange> = inside.filter(|run| !run.is_empty()).collect();
            let patch = LayerPatch {
                image: image.to_owned(),
                offset_bytes: start,
                length_bytes: u32::try_from(end - start).unwrap_or(u32::MAX),
                runs: inside.iter().map(|run| (blocks(run.offset() - start), blocks(run.length()))).collect(),
            };
            (patch, inside.iter().flat_map(|run| self.part(*run)).copied().collect())
        };
        starts.map(patch).collect()
    }
}

/// Returns a distance inside a piece, which always fits.
fn distance(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

fn blocks(bytes: u64) -> u32 {
    u32::try_from(bytes / BLOCK_BYTES).unwrap_or(u32::MAX)
}

impl Scrubber {
    /// Reads the piece of the snapshot as a reader sees it, from each member that can read it. Members that
    /// hold the same data in different layers do not differ.
    pub(super) fn look_further(
        &mut self,
        layer: &Layer,
        piece: ByteRange,
        member_checksums: &mut [MemberChecksums],
    ) {
        for (peer, checksums) in member_checksums.iter_mut().filter(|(_, checksums)| checksums.sum.is_some())
        {
            let Some(number) = layer.number_at(*peer) else { continue };
            match self.shown(*peer, number, piece) {
                Ok(shown) => checksums.shown = Some(shown),
                Err(error) => self.skipped(*peer, &error),
            }
        }
    }

    fn shown(&self, peer: PeerIndex, number: u32, piece: ByteRange) -> Result<u32, ConnectError> {
        let mut data = vec![0; distance(piece.length())];
        let mut is_found = vec![false; data.len() / BLOCK];
        for layer in (0..=number).rev() {
            let held = self.hold(peer, layer, piece)?;
            for run in &held.runs {
                for at in (run.offset()..run.end()).step_by(BLOCK) {
                    let start = distance(at - piece.offset());
                    if !std::mem::replace(&mut is_found[start / BLOCK], true) {
                        data[start..start + BLOCK].copy_from_slice(&held.data[start..start + BLOCK]);
                    }
                }
            }
            if is_found.iter().all(|found| *found) {
                break;
            }
        }
        Ok(crc32c::crc32c(&data))
    }

    /// Returns the data of a member in a piece of one layer.
    fn hold(&self, peer: PeerIndex, layer: u32, piece: ByteRange) -> Result<Held, ConnectError> {
        let runs = self.runs(peer, layer, piece)?;
        let mut held = Held { piece, runs, data: vec![0; distance(piece.length())] };
        for run in &held.runs {
            let start = distance(run.offset() - piece.offset());
            let target = &mut held.data[start..start + distance(run.length())];
            self.context.with_control_of(peer, |control| {
                control.read_layer(layer, run.offset(), target, Flags::NONE)
            })?;
        }
        Ok(held)
    }

    fn runs(&self, peer: PeerIndex, layer: u32, piece: ByteRange) -> Result<Vec<ByteRange>, ConnectError> {
        let mut runs = Vec::new();
        let mut from = Some(piece.offset());
        while let Some(from_bytes) = from.filter(|from| *from < piece.end()) {
            let query = ExtentsQuery { layer, from_bytes };
            let size_bytes = || self.context.connector.size_bytes();
            let list = |control: &mut ReplicaConnection| control.list_extents(query, size_bytes);
            let page = self.context.with_control_of(peer, list)?;
            for extent in &page.extents {
                let end = extent.offset_bytes.saturating_add(extent.length_bytes).min(piece.end());
                join(&mut runs, extent.offset_bytes.max(piece.offset()), end);
            }
            from = page.next_bytes.filter(|next| *next > from_bytes);
        }
        Ok(runs)
    }

    /// Copies the data of the first readable one of `sources` to all members in `odd`, and checks the piece
    /// again.
    pub(super) fn repair(
        &self,
        layer: &Layer,
        piece: ByteRange,
        odd: &[PeerIndex],
        sources: &[PeerIndex],
        member_checksums: &[MemberChecksums],
    ) -> Done {
        if self.unrepaired.contains(&piece.offset()) {
            return Done::Failed("a layer below it differs there and comes first".to_owned());
        }
        let Some(_repairing) = self.context.snapshot_use.repairing() else {
            return Done::Failed(
                "a rebuild is copying the snapshots: the next scrub after it repairs this".to_owned(),
            );
        };
        let mut reason = "no member can be read".to_owned();
        for source in sources {
            let Some(number) = layer.number_at(*source) else { continue };
            let expected =
                member_checksums.iter().find(|(peer, _)| peer == source).and_then(|(_, found)| found.sum);
            match self.hold(*source, number, piece) {
                Ok(held) if Some(held.sum()) == expected => {
                    return match odd.iter().try_for_each(|peer| self.mend(layer, *peer, &held)) {
                        Ok(()) => Done::Repaired { from: *source },
                        Err(reason) => Done::Failed(reason),
                    };
                }
                Ok(_) => reason = format!("{} reads otherwise than before", self.replica(*source)),
                Err(error) => reason = format!("{}: {error}", self.replica(*source)),
            }
        }
        Done::Failed(reason)
    }

    fn mend(&self, layer: &Layer, peer: PeerIndex, held: &Held) -> Result<(), String> {
        let failed = |error: ConnectError| format!("{}: {error}", self.replica(peer));
        let read_back = || {
            let number = layer.number_at(peer);
            number.map(|number| self.hold(peer, number, held.piece)).transpose().map_err(failed)
        };
        // A layer that cannot be read is repaired.
        if held.is_in(None, read_back).unwrap_or(false) {
            return Ok(()); // an earlier scrub has repaired it, and the head still lacks other data
        }
        for (patch, data) in held.patches(&layer.image) {
            self.context
                .with_control_of(peer, |control| control.repair_layer(&patch, &data))
                .map_err(failed)?;
        }
        let check = self.check_one(layer, held.piece, peer).map_err(failed)?;
        if held.is_in(check.sum, read_back)? {
            return Ok(());
        }
        Err(format!("{} loses writes: replace its disk", self.replica(peer)))
    }
}

/// Appends a run, or extends the last one if they touch.
fn join(runs: &mut Vec<ByteRange>, start: u64, end: u64) {
    let start = runs.last().map_or(start, |last| start.max(last.end()));
    let joined = match runs.last() {
        Some(last) if last.end() == start => last.offset(),
        _ => start,
    };
    if end <= start {
        return;
    }
    let Ok(run) = ByteRange::new(joined, end - joined) else { return };
    if joined < start {
        runs.pop();
    }
    runs.push(run);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(first_block: u64, blocks: u64) -> ByteRange {
        ByteRange::new((256 + first_block) * BLOCK_BYTES, blocks * BLOCK_BYTES).unwrap()
    }

    #[test]
    fn a_piece_goes_in_patches_that_fit() {
        let data: Vec<u8> = (0..=255).flat_map(|block| [block; BLOCK]).collect();
        let held = Held { piece: range(0, 256), runs: vec![range(2, 1), range(127, 3)], data };
        let patches = held.patches("volume-snap-a.img");
        let found: Vec<_> = patches
            .iter()
            .map(|(patch, data)| (patch.offset_bytes, patch.runs.clone(), data.len()))
            .collect();
        let mib = 1 << 20;
        let expected = vec![(mib, vec![(2, 1), (127, 1)], 8192), (mib + (512 << 10), vec![(0, 2)], 8192)];
        assert_eq!(found, expected);
        assert_eq!((patches[0].1[0], patches[0].1[4096], patches[1].1[0]), (2, 127, 128));
        let short = Held { piece: range(0, 1), runs: vec![], data: vec![0; 4096] };
        assert_eq!(short.patches("a")[0].0.length_bytes, 4096);
    }

    /// The member may lack other data of the block in the head, for which it has no space.
    #[test]
    fn a_repaired_layer_with_a_block_that_is_known_as_rotten_is_read_back() {
        let held = |byte: u8| Held { piece: range(0, 1), runs: vec![range(0, 1)], data: vec![byte; BLOCK] };
        let unread = || -> Result<Option<Held>, ()> { panic!("its sum says enough") };
        assert_eq!([7, 8].map(|byte| held(7).is_in(Some(held(byte).sum()), unread)), [Ok(true), Ok(false)]);
        let found = [Ok(Some(held(7))), Ok(Some(held(8))), Ok(None), Err(())];
        let is_in = found.map(|found| held(7).is_in(None, || found));
        assert_eq!(is_in, [Ok(true), Ok(false), Ok(false), Err(())]);
    }

    #[test]
    fn runs_that_touch_are_one() {
        let mut runs = Vec::new();
        for (start, end) in [(0, 4096), (4096, 8192), (12288, 16384), (12288, 20480), (40960, 40960)] {
            join(&mut runs, start, end);
        }
        let run = |start, end| ByteRange::new(start, end - start).unwrap();
        assert_eq!(runs, [run(0, 8192), run(12288, 20480)]);
    }
}
