use shorthorn_types::ByteRange;
use shorthorn_types::limits::{BLOCK_BYTES, MAX_IO_BYTES, MAX_MEMBERS};

use crate::event::ZeroBlocks;
use crate::membership::{PeerIndex, PeerMask};
use crate::request::Operation;
use crate::slot::SlotId;

/// The event that made the core copy a range to some members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyReason {
    /// Resyncs a region in which the members may differ. Requests for the region wait meanwhile.
    Resync { region: u32 },
    /// Replicas that are being rebuilt miss the region. The copy has its range in the range table.
    Rebuild { region: u32 },
    /// A scrub has found a difference between members. The copy has its range in the range table.
    Repair { odd: PeerMask, sources: PeerMask },
    /// A request has found no space on `sources`. It keeps its range in the range table meanwhile.
    Failed {
        request: SlotId,
        sources: PeerMask,
        /// Members that had no space for the data of another one, and became the source themselves.
        tried: PeerMask,
    },
}

/// A copy that makes a range equal on some replicas, a piece at a time: read from one, written to the others.
///
/// A copy ends when the last piece is written, or when no target is left. A target that fails is removed at
/// once. So the targets at the end are the replicas that have all of the range.
#[derive(Clone, Debug)]
pub(crate) struct Copy {
    why: CopyReason,
    /// The whole range of the copy.
    range: ByteRange,
    /// The part that is being copied, at most [`MAX_IO_BYTES`].
    piece: ByteRange,
    /// Replicas that get the copy.
    targets: PeerMask,
    /// The targets at the beginning, but for those that have failed: the source of one piece is a target of
    /// another.
    all: PeerMask,
    /// Members that have reported rot in the piece. They receive the piece from a sound member.
    rotten: PeerMask,
    /// Replicas that get the piece: targets, and members that hold rot there.
    to: PeerMask,
    /// The pieces before this offset are small: the members in `reported` hold rot in some of their blocks.
    narrow_until_bytes: u64,
    reported: PeerMask,
    /// True if all possible sources of the piece hold rot there: it is copied unchanged.
    is_unchecked: bool,
    step: CopyStep,
    /// Blocks of zeroes in the piece that need not be sent.
    zeroes: ZeroBlocks,
    /// True if the piece is read again, from another source, after all replicas have answered.
    starts_over: bool,
    /// For each replica, the time for which requests have waited for this copy because it had not answered.
    held_up_ms: [u64; MAX_MEMBERS],
}

/// The next step for the piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CopyStep {
    /// The piece has to be read, or read again if its source has failed.
    Read,
    /// The piece is in the buffer and written up to this offset.
    Write { at_bytes: u64 },
}

/// The next action of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyAction {
    /// Read the piece from a source.
    Read,
    /// Send this operation on a part of the piece, whose data is at an offset of the buffer.
    Write { operation: Operation, range: ByteRange, buffer_offset: u32, to: PeerMask },
    /// The whole range was copied, or no target is left.
    End,
}

/// The way to continue if no source of a block is sound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoSource {
    /// Copy the block unchanged.
    Unchecked,
    /// End the copy: it is a repair, which has no source.
    GivenUp,
}

impl Copy {
    pub fn new(why: CopyReason, range: ByteRange, targets: PeerMask) -> Copy {
        Copy {
            why,
            range,
            piece: piece_at(range, range.offset()),
            targets,
            all: targets,
            rotten: PeerMask::NONE,
            to: PeerMask::NONE,
            narrow_until_bytes: 0,
            reported: PeerMask::NONE,
            is_unchecked: false,
            step: CopyStep::Read,
            zeroes: [0; 4],
            starts_over: false,
            held_up_ms: [0; MAX_MEMBERS],
        }
    }

    pub fn why(&self) -> CopyReason {
        self.why
    }

    pub fn range(&self) -> ByteRange {
        self.range
    }

    /// Returns the piece that is being copied.
    pub fn piece(&self) -> ByteRange {
        self.piece
    }

    /// Returns the replicas that get the copy and have not failed.
    pub fn targets(&self) -> PeerMask {
        self.targets
    }

    /// Returns the members that hold rot in the piece.
    pub fn rotten(&self) -> PeerMask {
        self.rotten
    }

    /// Returns the members that have reported rot in the larger piece that contains the current piece.
    pub fn reported(&self) -> PeerMask {
        self.reported
    }

    /// Removes failed replicas.
    pub fn forget(&mut self, lost: PeerMask) {
        for peers in [&mut self.targets, &mut self.all, &mut self.to, &mut self.rotten] {
            *peers = peers.without(lost);
        }
    }

    /// Removes a replica from the reason of a repair, because its index means another replica from now on.
    pub fn replaced(&mut self, peer: PeerMask) {
        if let CopyReason::Repair { odd, sources } = &mut self.why {
            (*odd, *sources) = (odd.without(peer), sources.without(peer));
        }
    }

    /// Makes the copy end with the next action. Returns the targets that were left.
    pub fn cancel(&mut self) -> PeerMask {
        std::mem::replace(&mut self.targets, PeerMask::NONE)
    }

    /// Returns the next action after all replicas have answered the last one, and records the action as
    /// taken.
    pub fn next_action(&mut self) -> CopyAction {
        if self.targets.is_empty() {
            return CopyAction::End;
        }
        if std::mem::take(&mut self.starts_over) {
            self.step = CopyStep::Read;
        }
        if self.step == CopyStep::Read {
            return CopyAction::Read;
        }
        match self.next_run() {
            Some((range, is_zero)) => {
                let offset = range.offset() - self.piece.offset();
                self.step = CopyStep::Write { at_bytes: offset + range.length() };
                let operation = match is_zero {
                    // The targets have to store it as rot, not as data.
                    _ if self.is_unchecked => Operation::WriteRot,
                    true => Operation::WriteZeroes { fua: false },
                    false => Operation::Write { fua: false },
                };
                let buffer_offset = u32::try_from(offset).unwrap_or(u32::MAX);
                CopyAction::Write { operation, range, buffer_offset, to: self.to }
            }
            None if self.next_piece() => CopyAction::Read,
            None => CopyAction::End,
        }
    }

    /// Returns the next part of the piece that is all zeroes or all to be sent, and whether it is zeroes.
    fn next_run(&self) -> Option<(ByteRange, bool)> {
        let CopyStep::Write { at_bytes } = self.step else { return None };
        let end = self.piece.length();
        if at_bytes >= end {
            return None;
        }
        let is_zero = |at: u64| {
            let block = usize::try_from(at / BLOCK_BYTES).unwrap_or(usize::MAX);
            self.zeroes.get(block / 64).is_some_and(|word| word >> (block % 64) & 1 == 1)
        };
        let kind = is_zero(at_bytes);
        let mut to = at_bytes;
        while to < end && is_zero(to) == kind {
            to += BLOCK_BYTES;
        }
        Some((part(self.piece.offset() + at_bytes, to.min(end) - at_bytes), kind))
    }

    /// Advances to the next piece. Returns false at the end.
    fn next_piece(&mut self) -> bool {
        if self.piece.end() >= self.range.end() {
            return false;
        }
        let grown = self.grown_length();
        self.piece = piece_at(self.range, self.piece.end());
        if self.piece.offset() < self.narrow_until_bytes {
            let length = grown.min(self.narrow_until_bytes - self.piece.offset());
            self.piece = part(self.piece.offset(), length.min(self.piece.length()));
        } else {
            self.reported = PeerMask::NONE;
        }
        self.step = CopyStep::Read;
        (self.rotten, self.is_unchecked) = (PeerMask::NONE, false);
        true
    }

    /// Returns the length of the piece after this one, if that is beside rot. Rot is often alone, and
    /// sometimes a whole file is lost: both need few reads.
    fn grown_length(&self) -> u64 {
        let had_rot = !self.rotten.is_empty() || self.is_unchecked;
        if had_rot { BLOCK_BYTES } else { self.piece.length() * 2 }
    }

    /// Narrows the piece to its first half; the other one follows. Returns false if the piece is a single
    /// block already.
    fn narrow(&mut self) -> bool {
        if self.piece.length() <= BLOCK_BYTES {
            return false;
        }
        self.narrow_until_bytes = self.narrow_until_bytes.max(self.piece.end());
        self.piece = first_half(self.piece);
        self.rotten = PeerMask::NONE;
        true
    }

    /// Lets the piece be read from `source`, if one was found, while `members` are the members. Those of
    /// `alike` hold the same as the source, unless they hold rot. Returns the operation to send, or none if
    /// nothing is left to copy: then the copy has no target any more.
    pub fn read_from(
        &mut self,
        source: Option<PeerIndex>,
        members: PeerMask,
        alike: PeerMask,
    ) -> Option<Operation> {
        let source = source.map_or(PeerMask::NONE, PeerMask::one);
        // The previous piece may have had another source.
        match self.why {
            // Rot is copied to all, so that each of them records it.
            CopyReason::Resync { .. } if self.is_unchecked => self.targets = members,
            CopyReason::Resync { .. } => self.targets = members.without(alike),
            CopyReason::Failed { .. } => self.targets = self.all,
            CopyReason::Rebuild { .. } | CopyReason::Repair { .. } => {}
        }
        self.targets = self.targets.without(source);
        if source.is_empty() || self.targets.is_empty() {
            self.targets = PeerMask::NONE;
            return None;
        }
        self.to = self.targets.with(self.rotten.and(members)).without(source);
        // If a request has just failed at the source, it compares only with known rot. Both the data of the
        // request and the former data are sound.
        Some(if self.is_unchecked { Operation::Read } else { Operation::CheckedRead })
    }

    /// Handles rot in all possible sources of the piece, a single block. Data that every member has lost is
    /// copied as rot: otherwise no replica could ever become a member again.
    pub fn all_sources_rotten(&mut self) -> NoSource {
        if matches!(self.why, CopyReason::Repair { .. }) {
            self.targets = PeerMask::NONE;
            return NoSource::GivenUp;
        }
        (self.rotten, self.is_unchecked) = (PeerMask::NONE, true);
        NoSource::Unchecked
    }

    /// Returns true if the answer to a read may be that the source holds rot.
    pub fn expects_rot(&self) -> bool {
        self.step == CopyStep::Read && !self.is_unchecked
    }

    /// Records that `peer` holds rot in the piece: another member supplies the piece, to `peer` too. Returns
    /// the range of the rot, unless it is looked for in smaller pieces first.
    pub fn found_rot(&mut self, peer: PeerIndex) -> Option<ByteRange> {
        // Another member may hold rot in other blocks, and may have no checksum that shows it. It supplies
        // only the blocks that `peer` has lost. A replica that receives nothing but the block with its rot
        // keeps its checksums. If a request has failed, others may have no space for more than the source
        // holds.
        if self.narrow() {
            self.reported = self.reported.with(PeerMask::one(peer));
            return None;
        }
        self.rotten = self.rotten.with(PeerMask::one(peer));
        Some(self.piece)
    }

    /// Records that the piece is in the buffer, with its blocks of zeroes. Returns false if no read was under
    /// way.
    pub fn piece_read(&mut self, zeroes: ZeroBlocks) -> bool {
        if self.step != CopyStep::Read {
            return false;
        }
        // Rot is sent in one part, without a search for zeroes.
        self.zeroes = if self.is_unchecked { [0; 4] } else { zeroes };
        self.step = CopyStep::Write { at_bytes: 0 };
        true
    }

    /// Takes `peer`, which has no space, out of a copy that only repairs its rot. False if the copy is more
    /// than that.
    pub fn leaves_rot(&mut self, peer: PeerIndex) -> bool {
        if self.step == CopyStep::Read {
            return false;
        }
        let one = PeerMask::one(peer);
        match self.why {
            CopyReason::Repair { .. } => {
                self.targets = self.targets.without(one);
                self.to = self.to.without(one);
                true
            }
            // It stays a target of the pieces that follow.
            CopyReason::Failed { .. } if self.rotten.has(peer) => {
                self.to = self.to.without(one);
                if self.to.is_empty() {
                    self.step = CopyStep::Write { at_bytes: self.piece.length() };
                }
                true
            }
            _ => self.rotten.has(peer) && !self.targets.has(peer),
        }
    }

    /// Makes the member `peer` the source of the copy for a failed request, because it has no space for the
    /// data of the present source. It holds less data, which the others get from the current piece on. Each
    /// member becomes the source only once, so that this ends. Returns false if `peer` was the source before.
    pub fn becomes_source(&mut self, peer: PeerIndex) -> bool {
        let CopyReason::Failed { sources, tried, .. } = &mut self.why else { return false };
        if tried.has(peer) {
            return false;
        }
        *sources = PeerMask::one(peer);
        *tried = tried.with(*sources);
        self.starts_over = true;
        true
    }

    /// Records that requests have waited for this copy for another `step_ms` because of the replicas in
    /// `peers`.
    pub fn hold_up(&mut self, peers: PeerMask, step_ms: u64) {
        peers.iter().for_each(|peer| self.held_up_ms[usize::from(peer)] += step_ms);
    }

    /// Returns the first target for which requests have waited longer than `limit_ms`, and that time.
    pub fn held_up_beyond(&self, limit_ms: u64) -> Option<(PeerIndex, u64)> {
        let held_up_ms = |peer: PeerIndex| self.held_up_ms[usize::from(peer)];
        self.targets.iter().map(|peer| (peer, held_up_ms(peer))).find(|(_, ms)| *ms > limit_ms)
    }
}

/// Returns the part of `range` from `start` on that fits one buffer.
pub(crate) fn piece_at(range: ByteRange, start: u64) -> ByteRange {
    part(start, (range.end() - start).min(u64::from(MAX_IO_BYTES)))
}

fn first_half(range: ByteRange) -> ByteRange {
    let blocks = range.length().div_ceil(BLOCK_BYTES);
    part(range.offset(), blocks / 2 * BLOCK_BYTES)
}

fn part(start: u64, length: u64) -> ByteRange {
    ByteRange::new(start, length).unwrap_or(ByteRange::EMPTY)
}

#[cfg(test)]
mod tests;
