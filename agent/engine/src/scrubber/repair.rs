//! Reads the members' data in a piece of a layer, and repairs members with wrong data.
//!
//! A repair replaces only blocks that differ from the source. If the source alone can read the whole piece,
//! it may hold unnoticed rot in a block that the other member has sound. Then the repair replaces only the
//! blocks that the other member cannot read: see [`SourceProof`].

use std::time::{Duration, Instant};

use shorthorn_core::{BlockState, MemberSums, PeerIndex, SourceProof};
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_types::{ByteRange, Errno};
use shorthorn_wire::{ExtentsQuery, Flags, LayerPatch, PATCH_BYTES_MAX, SummedRun, piece_sum};

use super::{ScrubbedLayer, Scrubber};
use crate::connection::{ConnectError, ReplicaConnection};
use crate::events::Done;

/// The time within which the last write of a repair has to begin. No rebuild begins meanwhile.
const REPAIR_LIMIT: Duration = Duration::from_mins(1);
/// The pause before a repair that a replica cannot do now is repeated: about the time of a few writes.
const AGAIN_PAUSE: Duration = Duration::from_millis(20);

const BLOCK: usize = 4096;
const _: () = assert!(BLOCK as u64 == BLOCK_BYTES);

/// A piece of a layer as a member holds it: the runs of existing blocks, and the data of the whole piece with
/// zeroes elsewhere.
#[derive(Debug, PartialEq, Eq)]
struct PieceContent {
    piece: ByteRange,
    runs: Vec<ByteRange>,
    data: Vec<u8>,
}

impl PieceContent {
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
        read_back: impl FnOnce() -> Result<Option<PieceContent>, E>,
    ) -> Result<bool, E> {
        match sum {
            Some(sum) => Ok(sum == self.sum()),
            None => Ok(read_back()?.is_some_and(|found| found == *self)),
        }
    }

    /// Returns true if the layer has the block.
    fn has(&self, block: ByteRange) -> bool {
        self.runs.iter().any(|run| run.overlaps(block))
    }

    /// Returns true if the layers of two members are equal in the block.
    fn is_same(&self, other: &PieceContent, block: ByteRange) -> bool {
        self.has(block) == other.has(block) && self.part(block) == other.part(block)
    }

    /// Takes these blocks, in order, from `source`.
    fn take(&mut self, taken: &[ByteRange], source: &PieceContent) {
        let has =
            |block: &ByteRange| if taken.contains(block) { source.has(*block) } else { self.has(*block) };
        let mut runs = Vec::new();
        for block in block_ranges(self.piece).filter(has) {
            join(&mut runs, block.offset(), block.end());
        }
        self.runs = runs;
        for block in taken {
            let start = distance(block.offset() - self.piece.offset());
            self.data[start..start + distance(block.length())].copy_from_slice(source.part(*block));
        }
    }

    /// Returns the messages, each with its data, that make a layer hold the same in `range`.
    fn patches(&self, image: &str, range: ByteRange) -> Vec<(LayerPatch, Vec<u8>)> {
        let step = u64::from(PATCH_BYTES_MAX);
        let starts = (range.offset()..range.end()).step_by(distance(step));
        let patch = |start: u64| {
            let end = range.end().min(start + step);
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

/// A member to repair from.
struct RepairSource<'a> {
    content: &'a PieceContent,
    proof: SourceProof,
    /// All members that may be right.
    sources: &'a [PeerIndex],
}

/// The reason why a member still differs after the attempt of a repair.
#[derive(Debug, thiserror::Error)]
enum NotRepaired {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("the scrub was stopped")]
    Stopped,
    #[error("a rebuild is copying the snapshots: the next scrub after it repairs this")]
    Copying,
    #[error("the replica was too busy for {} s: the next scrub continues the repair", REPAIR_LIMIT.as_secs())]
    TooSlow,
    #[error("the snapshots have changed meanwhile: the next scrub repairs this")]
    Changed,
    #[error("the replica loses writes: replace its disk")]
    LosesWrites,
    #[error("other blocks differ too, and no checksum proves that the other members are right there")]
    Undecided,
}

fn block_ranges(range: ByteRange) -> impl Iterator<Item = ByteRange> {
    let starts = (range.offset()..range.end()).step_by(BLOCK);
    starts.filter_map(move |at| ByteRange::new(at, BLOCK_BYTES.min(range.end() - at)).ok())
}

/// Returns the two halves of a range of several blocks.
fn halves(range: ByteRange) -> Option<[ByteRange; 2]> {
    let first = range.length().div_ceil(BLOCK_BYTES) / 2 * BLOCK_BYTES;
    let part = |start, length| ByteRange::new(start, length).ok().filter(|part| !part.is_empty());
    Some([part(range.offset(), first)?, part(range.offset() + first, range.length() - first)?])
}

/// Returns true if the replica answers that it cannot read the data, or that it is rotten.
fn is_unreadable(error: &ConnectError) -> bool {
    matches!(error, ConnectError::Refused { errno, .. } if [Errno::IO, Errno::ROTTEN].contains(errno))
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
    pub(super) fn read_shown_data(
        &mut self,
        layer: &ScrubbedLayer,
        piece: ByteRange,
        member_sums: &mut [MemberSums],
    ) {
        for (peer, checksums) in member_sums.iter_mut().filter(|(_, checksums)| checksums.sum.is_some()) {
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
            let content = self.read_content(peer, layer, piece)?;
            for run in &content.runs {
                for at in (run.offset()..run.end()).step_by(BLOCK) {
                    let start = distance(at - piece.offset());
                    if !std::mem::replace(&mut is_found[start / BLOCK], true) {
                        data[start..start + BLOCK].copy_from_slice(&content.data[start..start + BLOCK]);
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
    fn read_content(
        &self,
        peer: PeerIndex,
        layer: u32,
        piece: ByteRange,
    ) -> Result<PieceContent, ConnectError> {
        let runs = self.runs(peer, layer, piece)?;
        let mut content = PieceContent { piece, runs, data: vec![0; distance(piece.length())] };
        for run in &content.runs {
            let start = distance(run.offset() - piece.offset());
            let target = &mut content.data[start..start + distance(run.length())];
            self.context.with_control_of(peer, |control| {
                control.read_layer(layer, run.offset(), target, Flags::NONE)
            })?;
        }
        Ok(content)
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
        layer: &ScrubbedLayer,
        piece: ByteRange,
        odd: &[PeerIndex],
        sources: &[PeerIndex],
        member_sums: &[MemberSums],
    ) -> Done {
        if self.unrepaired.contains(&piece.offset()) {
            return Done::Failed("a layer below it differs there and comes first".to_owned());
        }
        if self.context.snapshot_use.repairing().is_none() {
            return Done::Failed(NotRepaired::Copying.to_string());
        }
        let mut reason = "no member can be read".to_owned();
        for source in sources {
            let Some(number) = layer.number_at(*source) else { continue };
            let expected =
                member_sums.iter().find(|(peer, _)| peer == source).and_then(|(_, found)| found.sum);
            match self.read_content(*source, number, piece) {
                Ok(content) if Some(content.sum()) == expected => {
                    let proof = SourceProof::of(*source, sources, member_sums);
                    let from = RepairSource { content: &content, proof, sources };
                    // One that cannot be repaired, or not in every block, does not keep rot in the others.
                    let failures = odd.iter().filter_map(|peer| {
                        let reason = self.mend(layer, *peer, &from).err()?;
                        Some(format!("{}: {reason}", self.replica(*peer)))
                    });
                    let reasons: Vec<String> = failures.collect();
                    return match reasons.is_empty() {
                        true => Done::Repaired { from: *source },
                        false => Done::Failed(reasons.join("; ")),
                    };
                }
                Ok(_) => reason = format!("{} reads otherwise than before", self.replica(*source)),
                Err(error) => reason = format!("{}: {error}", self.replica(*source)),
            }
        }
        Done::Failed(reason)
    }

    fn mend(
        &self,
        layer: &ScrubbedLayer,
        peer: PeerIndex,
        from: &RepairSource<'_>,
    ) -> Result<(), NotRepaired> {
        let Some(number) = layer.number_at(peer) else { return Ok(()) };
        let read_back = || self.read_content(peer, number, from.content.piece).map(Some);
        // A layer that cannot be read is repaired.
        if from.content.is_in(None, read_back).unwrap_or(false) {
            return Ok(()); // an earlier scrub has repaired it, and the head still lacks other data
        }
        let (mut content, replaced) = self.blocks_to_replace(layer, peer, number, from)?;
        // A disk may need seconds for each block that it cannot read: rebuilds begin beside the reads above.
        let Some(_repairing) = self.context.snapshot_use.repairing() else {
            return Err(NotRepaired::Copying);
        };
        let until = Instant::now() + REPAIR_LIMIT;
        if self.number_of(layer, peer)? != Some(number) {
            return Err(NotRepaired::Changed);
        }
        content.take(&replaced, from.content);
        let mut ranges = Vec::new();
        replaced.iter().for_each(|block| join(&mut ranges, block.offset(), block.end()));
        for (patch, data) in ranges.iter().flat_map(|range| content.patches(&layer.image, *range)) {
            self.patch(peer, &patch, &data, until)?;
        }
        let check = self.check_one(layer, content.piece, peer)?;
        if !content.is_in(check.sum, read_back)? {
            return Err(NotRepaired::LosesWrites);
        }
        if content == *from.content { Ok(()) } else { Err(NotRepaired::Undecided) }
    }

    /// Returns the data of a member in a piece of one layer, and the blocks in which the source is right.
    fn blocks_to_replace(
        &self,
        layer: &ScrubbedLayer,
        peer: PeerIndex,
        number: u32,
        from: &RepairSource<'_>,
    ) -> Result<(PieceContent, Vec<ByteRange>), NotRepaired> {
        let (content, unreadable) = self.read_readable_blocks(peer, number, from.content.piece)?;
        let mut replaced = Vec::new();
        for block in block_ranges(content.piece) {
            let state = match unreadable.contains(&block) {
                true => BlockState::Unreadable,
                false if content.is_same(from.content, block) => continue,
                false => {
                    self.check_stop()?;
                    self.block_state(peer, number, block)?
                }
            };
            if from.proof.replaces(state, || self.is_confirmed(layer, from, block)) {
                replaced.push(block);
            }
        }
        Ok((content, replaced))
    }

    /// Returns an error if the scrub was stopped.
    fn check_stop(&self) -> Result<(), NotRepaired> {
        self.pause(Duration::ZERO).map_err(|_| NotRepaired::Stopped)
    }

    /// Returns the number that the layer has at the member now.
    fn number_of(&self, layer: &ScrubbedLayer, peer: PeerIndex) -> Result<Option<u32>, ConnectError> {
        let images = self.images_of(peer)?;
        let number = images.iter().position(|image| *image == layer.image);
        Ok(number.and_then(|number| u32::try_from(number).ok()))
    }

    /// Repairs a part of a layer, again and again while the replica cannot do it now.
    fn patch(
        &self,
        peer: PeerIndex,
        patch: &LayerPatch,
        data: &[u8],
        until: Instant,
    ) -> Result<(), NotRepaired> {
        loop {
            self.check_stop()?;
            if Instant::now() > until {
                return Err(NotRepaired::TooSlow);
            }
            match self.context.with_control_of(peer, |control| control.repair_layer(patch, data)) {
                Err(ConnectError::Refused { errno: Errno::AGAIN, .. }) => {
                    self.pause(AGAIN_PAUSE).map_err(|_| NotRepaired::Stopped)?;
                }
                repaired => return Ok(repaired?),
            }
        }
    }

    /// Returns the data of a member in a piece of one layer, and the blocks that it cannot read, or that it
    /// knows as rotten.
    fn read_readable_blocks(
        &self,
        peer: PeerIndex,
        layer: u32,
        piece: ByteRange,
    ) -> Result<(PieceContent, Vec<ByteRange>), NotRepaired> {
        let runs = self.runs(peer, layer, piece)?;
        let mut content = PieceContent { piece, runs, data: vec![0; distance(piece.length())] };
        let (mut unreadable, mut parts) = (Vec::new(), vec![piece]);
        // Each step removes a part, or halves it: at most twice as many steps as blocks.
        while let Some(part) = parts.pop() {
            self.check_stop()?;
            let start = distance(part.offset() - piece.offset());
            let target = &mut content.data[start..start + distance(part.length())];
            let read = self.context.with_control_of(peer, |control| {
                control.read_layer(layer, part.offset(), target, Flags::CHECKED)
            });
            match (read, halves(part)) {
                (Ok(_), _) => {}
                (Err(error), halves) if is_unreadable(&error) => match halves {
                    Some(halves) => parts.extend(halves),
                    None => unreadable.push(part),
                },
                (Err(error), _) => return Err(error.into()),
            }
        }
        Ok((content, unreadable))
    }

    fn block_state(&self, peer: PeerIndex, layer: u32, block: ByteRange) -> Result<BlockState, ConnectError> {
        let mut data = vec![0; distance(block.length())];
        let read = |control: &mut ReplicaConnection| {
            control.read_layer(layer, block.offset(), &mut data, Flags::CHECKED)
        };
        match self.context.with_control_of(peer, read) {
            Ok(true) => Ok(BlockState::Confirmed),
            Ok(false) => Ok(BlockState::Readable),
            Err(error) if is_unreadable(&error) => Ok(BlockState::Unreadable),
            Err(error) => Err(error),
        }
    }

    /// Returns true if a source that holds the same data in the block has a checksum that confirms it.
    fn is_confirmed(&self, layer: &ScrubbedLayer, from: &RepairSource<'_>, block: ByteRange) -> bool {
        from.sources.iter().any(|source| {
            let Some(number) = layer.number_at(*source) else { return false };
            let mut data = vec![0; distance(block.length())];
            let read = |control: &mut ReplicaConnection| {
                control.read_layer(number, block.offset(), &mut data, Flags::CHECKED)
            };
            let is_confirmed = self.context.with_control_of(*source, read).unwrap_or(false);
            is_confirmed && data == from.content.part(block)
        })
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
    fn a_piece_is_split_into_patches_that_fit() {
        let data: Vec<u8> = (0..=255).flat_map(|block| [block; BLOCK]).collect();
        let content = PieceContent { piece: range(0, 256), runs: vec![range(2, 1), range(127, 3)], data };
        let patches = content.patches("volume-snap-a.img", range(0, 256));
        let found: Vec<_> = patches
            .iter()
            .map(|(patch, data)| (patch.offset_bytes, patch.runs.clone(), data.len()))
            .collect();
        let mib = 1 << 20;
        let expected = vec![(mib, vec![(2, 1), (127, 1)], 8192), (mib + (512 << 10), vec![(0, 2)], 8192)];
        assert_eq!(found, expected);
        assert_eq!((patches[0].1[0], patches[0].1[4096], patches[1].1[0]), (2, 127, 128));
        let short = PieceContent { piece: range(0, 1), runs: vec![], data: vec![0; 4096] };
        assert_eq!(short.patches("a", range(0, 1))[0].0.length_bytes, 4096);
    }

    /// The member may lack other data of the block in the head, for which it has no space.
    #[test]
    fn a_repaired_layer_with_a_block_that_is_known_as_rotten_is_read_back() {
        let content =
            |byte: u8| PieceContent { piece: range(0, 1), runs: vec![range(0, 1)], data: vec![byte; BLOCK] };
        let unread = || -> Result<Option<PieceContent>, ()> { panic!("its sum says enough") };
        assert_eq!(
            [7, 8].map(|byte| content(7).is_in(Some(content(byte).sum()), unread)),
            [Ok(true), Ok(false)]
        );
        let found = [Ok(Some(content(7))), Ok(Some(content(8))), Ok(None), Err(())];
        let is_in = found.map(|found| content(7).is_in(None, || found));
        assert_eq!(is_in, [Ok(true), Ok(false), Ok(false), Err(())]);
    }

    #[test]
    fn a_repair_of_single_blocks_leaves_the_others() {
        let content = |runs: &[ByteRange], byte: u8| {
            let mut data = vec![0; 4 * BLOCK];
            for run in runs {
                let start = distance(run.offset() - range(0, 4).offset());
                data[start..start + distance(run.length())].fill(byte);
            }
            PieceContent { piece: range(0, 4), runs: runs.to_vec(), data }
        };
        let source = content(&[range(0, 2), range(3, 1)], 7);
        let mut odd = content(&[range(1, 2)], 8);
        let before = content(&[range(1, 2)], 8);
        odd.take(&[range(0, 1), range(2, 1)], &source);
        assert_eq!(odd.runs, [range(0, 2)]);
        assert_eq!(
            [0, 1, 2, 3].map(|block| odd.is_same(&source, range(block, 1))),
            [true, false, true, false]
        );
        assert!(odd.is_same(&before, range(1, 1)) && odd.is_same(&before, range(3, 1)));
        let patches = odd.patches("a", range(2, 1));
        assert_eq!((patches.len(), &patches[0].0.runs[..]), (1, &[][..]));
        assert_eq!((patches[0].0.offset_bytes, patches[0].0.length_bytes), (258 * BLOCK_BYTES, 4096));
    }

    #[test]
    fn ranges_are_halved_down_to_blocks() {
        assert_eq!(halves(range(0, 3)), Some([range(0, 1), range(1, 2)]));
        assert_eq!(halves(range(5, 1)), None);
        let short = ByteRange::new(0, BLOCK_BYTES + 512).unwrap();
        let parts =
            [(0, BLOCK_BYTES), (BLOCK_BYTES, 512)].map(|(at, length)| ByteRange::new(at, length).unwrap());
        assert_eq!(halves(short), Some(parts));
        assert!(block_ranges(short).eq(parts));
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
