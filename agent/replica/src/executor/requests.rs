//! The requests in execution, by their slots.

use shorthorn_types::{ByteRange, Errno};
use shorthorn_wire::{Flags, Header, Opcode};

use super::cached_layer_sums::Checked;
use crate::limits::SLOTS;

/// The slot in which regions are read to be summed. No request has it.
#[allow(clippy::cast_possible_truncation)] // there are a few hundred
pub(super) const SUM_SLOT: u16 = SLOTS as u16;

/// A request in execution. Only [`Requests`] changes it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    pub header: Header,
    /// The range of the request, grown to whole blocks.
    pub blocks: ByteRange,
    /// Operations in the kernel, for reads and writes.
    pub pending: u16,
    pub failure: Option<Errno>,
    /// The piece of a layer that is being checked, if the request is a check.
    pub checked: Option<Checked>,
    /// True if the read data has to be compared with the sums of its blocks.
    pub wants_check: bool,
    /// True if each block of the read data matches a sum that counts.
    pub is_confirmed: bool,
    /// The page of sums up to which the rot beside a modification is known to be kept.
    pub kept_before: u64,
    /// True if the layers have changed since the operations in the kernel were planned.
    pub is_void: bool,
}

const NOTHING: Work = Work {
    header: Header::request(Opcode::Ping, 0, 0, 0),
    blocks: ByteRange::EMPTY,
    pending: 0,
    failure: None,
    checked: None,
    wants_check: false,
    is_confirmed: false,
    kept_before: 0,
    is_void: false,
};

/// See the module.
#[derive(Debug)]
pub(super) struct Requests {
    works: Box<[Work]>,
    /// The number of requests that want a check.
    checks: usize,
}

impl Requests {
    pub fn new() -> Requests {
        Requests { works: vec![NOTHING; SLOTS + 1].into(), checks: 0 }
    }

    /// Assigns `slot` to the request of `header`. Returns the blocks of its range.
    pub fn assign(&mut self, slot: u16, header: Header) -> ByteRange {
        let blocks = header.range().map_or(NOTHING.blocks, ByteRange::grown_to_blocks);
        self.works[usize::from(slot)] = Work { header, blocks, ..NOTHING };
        blocks
    }

    pub fn free(&mut self, slot: u16) {
        self.end_check(slot);
        self.works[usize::from(slot)] = NOTHING;
    }

    pub fn get(&self, slot: u16) -> &Work {
        &self.works[usize::from(slot)]
    }

    fn get_mut(&mut self, slot: u16) -> &mut Work {
        &mut self.works[usize::from(slot)]
    }

    /// Counts an operation of the request that the kernel has.
    pub fn began(&mut self, slot: u16) {
        self.get_mut(slot).pending += 1;
    }

    /// Ends an operation of the request.
    pub fn ended(&mut self, slot: u16) {
        self.get_mut(slot).pending -= 1;
    }

    /// Records the failure of an operation. The first one is the failure of the request.
    pub fn fail(&mut self, slot: u16, errno: Errno) {
        self.get_mut(slot).failure.get_or_insert(errno);
    }

    /// A layer has changed under all reads that the kernel has: they have to be planned again.
    pub fn void_plans(&mut self) {
        let works = self.works.iter_mut().take(SLOTS);
        works.filter(|work| is_planned(work.header.opcode)).for_each(|work| work.is_void = work.pending > 0);
    }

    /// Returns true if the request has to be planned again: see [`Requests::void_plans`]. The call records
    /// the request as planned again.
    pub fn take_void(&mut self, slot: u16) -> bool {
        let work = self.get_mut(slot);
        if work.is_void {
            work.failure = None;
        }
        std::mem::take(&mut work.is_void)
    }

    /// Records that the rot beside the modification in the slot is kept in all pages of sums before `number`.
    pub fn set_kept_rot_before(&mut self, slot: u16, number: u64) {
        self.get_mut(slot).kept_before = number;
    }

    /// Has the rot beside waiting modifications examined again, because regions are larger now.
    pub fn forget_kept_rot(&mut self) {
        self.works.iter_mut().for_each(|work| work.kept_before = 0);
    }

    /// Makes the request the check of a piece of a layer.
    pub fn check_layer(&mut self, slot: u16, piece: ByteRange, checked: Checked) {
        let work = self.get_mut(slot);
        (work.blocks, work.checked) = (piece, Some(checked));
    }

    /// Begins the check of a request, unless it wants none.
    pub fn begin_check(&mut self, slot: u16) {
        let wants = asks_for_check(&self.get(slot).header);
        self.get_mut(slot).wants_check = wants;
        self.checks += usize::from(wants);
    }

    /// Ends the check of the slot, if any.
    pub fn end_check(&mut self, slot: u16) {
        if std::mem::take(&mut self.get_mut(slot).wants_check) {
            self.checks -= 1;
        }
    }

    /// Records whether each block of the read data matches a sum that counts.
    pub fn set_confirmed(&mut self, slot: u16, is_confirmed: bool) {
        self.get_mut(slot).is_confirmed = is_confirmed;
    }

    /// Ends the checks of reads that overlap a modification of `range`.
    pub fn end_checks_of_reads(&mut self, range: ByteRange) {
        if self.checks > 0 {
            // A layer is read beside writes: its blocks are compared as a reader sees them at that moment.
            let is_layer = |work: &Work| matches!(work.header.opcode, Opcode::ReadLayer | Opcode::CheckLayer);
            let reads = self
                .works
                .iter_mut()
                .filter(|work| work.wants_check && !is_layer(work) && work.blocks.overlaps(range));
            for work in reads {
                work.wants_check = false;
                self.checks -= 1;
            }
        }
    }

    /// Returns true if a request modifies blocks of `range`.
    pub fn is_modified(&self, range: ByteRange) -> bool {
        self.works.iter().any(|work| is_modification(work.header.opcode) && work.blocks.overlaps(range))
    }
}

/// Returns true if the data of the range is read into the slot.
pub(crate) fn reads_data(header: &Header) -> bool {
    matches!(header.opcode, Opcode::Read | Opcode::ReadLayer | Opcode::Verify)
}

pub(super) fn is_durable(header: &Header) -> bool {
    header.flags.has(Flags::FUA)
}

/// The step that makes the data of a write durable before its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Durability {
    /// None: the next flush does it.
    Later,
    /// The write itself.
    WithWrite,
    /// A flush after the write.
    ByFlush,
}

/// Returns the step for a write to files with direct I/O, or to files that the kernel buffers. A durable
/// write to a buffered file may fail for lack of space because of other data. The kernel has not written that
/// data yet, and reports its error once: a later fdatasync succeeds. Only an fdatasync shows this clearly,
/// because its every error makes the replica fail.
pub(super) fn durability(header: &Header, direct_io: bool) -> Durability {
    match (is_durable(header), direct_io) {
        (false, _) => Durability::Later,
        (true, true) => Durability::WithWrite,
        (true, false) => Durability::ByFlush,
    }
}

/// Returns the layer that the request names.
pub(super) fn layer_of(header: &Header) -> Result<usize, Errno> {
    usize::try_from(header.status).map_err(|_| Errno::INVALID)
}

/// Returns true if the request wants its data compared with the sums.
fn asks_for_check(header: &Header) -> bool {
    match header.opcode {
        Opcode::Verify | Opcode::CheckLayer => true,
        Opcode::Read | Opcode::ReadLayer => header.flags.has(Flags::CHECKED),
        _ => false,
    }
}

/// Returns true if the request reads the blocks that a reader sees, in layers that a plan names.
pub(super) fn is_planned(opcode: Opcode) -> bool {
    matches!(opcode, Opcode::Read | Opcode::Verify | Opcode::Write)
}

pub(super) fn is_modification(opcode: Opcode) -> bool {
    matches!(opcode, Opcode::Write | Opcode::Discard | Opcode::WriteZeroes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(offset: u64, length: u64) -> ByteRange {
        ByteRange::new(offset, length).unwrap()
    }

    fn requests(assigned: &[(u16, Opcode, u64)]) -> Requests {
        let mut requests = Requests::new();
        for (slot, opcode, offset) in assigned {
            let blocks = requests.assign(*slot, Header::request(*opcode, 0, *offset, 512));
            assert_eq!(blocks, range(*offset, 512).grown_to_blocks());
        }
        requests
    }

    #[test]
    fn the_first_failure_counts() {
        let mut requests = requests(&[(3, Opcode::Read, 0)]);
        requests.began(3);
        requests.began(3);
        requests.fail(3, Errno::NO_SPACE);
        requests.ended(3);
        requests.fail(3, Errno::IO);
        assert_eq!((requests.get(3).pending, requests.get(3).failure), (1, Some(Errno::NO_SPACE)));
        requests.free(3);
        assert_eq!((requests.get(3).pending, requests.get(3).failure), (0, None));
    }

    #[test]
    fn a_modification_ends_the_checks_of_reads_beside_it() {
        let mut requests =
            requests(&[(0, Opcode::Verify, 0), (1, Opcode::Verify, 8192), (2, Opcode::CheckLayer, 0)]);
        (0..3).for_each(|slot| requests.begin_check(slot));
        requests.end_checks_of_reads(range(4096, 4096));
        assert!((0..3).all(|slot| requests.get(slot).wants_check), "no read overlaps it");
        requests.end_checks_of_reads(range(0, 4096));
        let wants = [0, 1, 2].map(|slot| requests.get(slot).wants_check);
        assert_eq!((wants, requests.checks), ([false, true, true], 2), "layers are compared all the same");
        requests.end_check(0);
        requests.free(1);
        requests.free(2);
        assert_eq!(requests.checks, 0);
    }

    #[test]
    fn reads_without_the_flag_want_no_check() {
        let mut requests = requests(&[(0, Opcode::Read, 0), (1, Opcode::Write, 0)]);
        requests.begin_check(0);
        requests.begin_check(1);
        assert!(!requests.get(0).wants_check && !requests.get(1).wants_check && requests.checks == 0);
    }

    #[test]
    fn only_direct_writes_make_their_data_durable_themselves() {
        let mut header = Header::request(Opcode::Write, 0, 0, 512);
        assert_eq!([true, false].map(|direct_io| durability(&header, direct_io)), [Durability::Later; 2]);
        header.flags = Flags::FUA;
        assert_eq!(durability(&header, true), Durability::WithWrite);
        assert_eq!(durability(&header, false), Durability::ByFlush);
    }

    #[test]
    fn only_modifications_modify() {
        let requests =
            requests(&[(0, Opcode::Read, 0), (1, Opcode::Discard, 8192), (2, Opcode::WriteLayer, 16384)]);
        assert!(!requests.is_modified(range(0, 4096)) && !requests.is_modified(range(16384, 4096)));
        assert!(requests.is_modified(range(4096, 8192)));
    }
}
