use shorthorn_types::ByteRange;

use crate::slot::SlotId;

/// The ranges that are in flight, and the requests that wait for them.
///
/// Requests that overlap are let through one after another, in the order in which they came, unless neither
/// [conflicts](RangeAccess) with the other. Ranges count as whole blocks, so that a replica may read, merge
/// and write a block for a request that covers a part of it.
///
/// A scan over an array: with the few hundred requests that can be in flight it is faster than a tree.
#[derive(Debug)]
pub struct RangeTable {
    active: Vec<RangeEntry>,
    waiting: Vec<RangeEntry>,
    next_order: u64,
}

/// The way in which a request uses its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeAccess {
    /// Reads from a member.
    Read,
    /// Copies from a member to replicas that serve no reads. It conflicts with modifications and other
    /// copies, but not with reads. If a member holds rot there, the copy repairs that member too: a read of
    /// it may return the rot or the stored data.
    Rebuild,
    /// Changes members.
    Modify,
}

impl RangeAccess {
    fn conflicts_with(self, other: RangeAccess) -> bool {
        match (self, other) {
            (RangeAccess::Modify, _)
            | (_, RangeAccess::Modify)
            | (RangeAccess::Rebuild, RangeAccess::Rebuild) => true,
            (RangeAccess::Read, _) | (_, RangeAccess::Read) => false,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct RangeEntry {
    start: u64,
    end: u64,
    slot: SlotId,
    access: RangeAccess,
    /// Greater than that of every entry that came before.
    order: u64,
}

impl RangeEntry {
    /// Returns true if `self` has to wait until `other` is done. A modification waits for an earlier read
    /// too. Otherwise the read could return data that is not on every member yet, and the next engine,
    /// started from another member, the former data.
    fn waits_for(&self, other: &RangeEntry) -> bool {
        self.access.conflicts_with(other.access)
            && other.order < self.order
            && self.start < other.end
            && other.start < self.end
    }
}

impl RangeTable {
    /// Creates a table with room for `requests` in flight.
    #[must_use]
    pub fn new(requests: usize) -> RangeTable {
        let room = || Vec::with_capacity(requests);
        RangeTable { active: room(), waiting: room(), next_order: 0 }
    }

    /// Adds a request. Returns true if it may start at once, else it waits.
    pub fn enter(&mut self, slot: SlotId, range: ByteRange, access: RangeAccess) -> bool {
        let range = range.grown_to_blocks();
        let entry =
            RangeEntry { start: range.offset(), end: range.end(), slot, access, order: self.next_order };
        self.next_order += 1;
        let blocked = self.active.iter().chain(&self.waiting).any(|earlier| entry.waits_for(earlier));
        if blocked {
            self.waiting.push(entry);
        } else {
            self.active.push(entry);
        }
        !blocked
    }

    /// Removes a request in flight and appends the requests that may start now to `ready`.
    pub fn leave(&mut self, slot: SlotId, ready: &mut Vec<SlotId>) {
        let Some(at) = self.active.iter().position(|entry| entry.slot == slot) else { return };
        self.active.swap_remove(at);
        if !self.waiting.is_empty() {
            self.wake(ready);
        }
    }

    /// Returns the requests that wait for the one in `slot`, which is in flight.
    pub fn waiting_for(&self, slot: SlotId) -> impl Iterator<Item = SlotId> {
        let active = self.active.iter().find(move |entry| entry.slot == slot);
        self.waiting
            .iter()
            .filter(move |entry| active.is_some_and(|active| entry.waits_for(active)))
            .map(|entry| entry.slot)
    }

    /// Lets those through whose range is free; the order of the others stays.
    fn wake(&mut self, ready: &mut Vec<SlotId>) {
        let mut at = 0;
        while at < self.waiting.len() {
            let entry = self.waiting[at];
            let mut earlier = self.active.iter().chain(&self.waiting[..at]);
            if earlier.any(|earlier| entry.waits_for(earlier)) {
                at += 1;
                continue;
            }
            self.waiting.remove(at);
            self.active.push(entry);
            ready.push(entry.slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::RangeAccess::{Modify, Read, Rebuild};
    use super::*;

    fn slot(slot: u16) -> SlotId {
        SlotId { queue: 0, slot }
    }

    fn blocks(first: u64, count: u64) -> ByteRange {
        ByteRange::new(first * 4096, count * 4096).unwrap()
    }

    #[test]
    fn writes_to_one_block_run_one_by_one() {
        let mut table = RangeTable::new(8);
        let part = |n: u64| ByteRange::new(n * 512, 512).unwrap();
        assert!(table.enter(slot(0), part(0), Modify));
        assert!(!table.enter(slot(1), part(7), Modify));
        assert!(!table.enter(slot(2), part(3), Read));
        assert!(table.enter(slot(3), part(8), Modify));
        let mut ready = Vec::new();
        table.leave(slot(0), &mut ready);
        assert_eq!(ready, [slot(1)], "the read came after the second write");
        table.leave(slot(1), &mut ready);
        assert_eq!(ready, [slot(1), slot(2)]);
    }

    #[test]
    fn reads_run_together_and_hold_writes_up() {
        let mut table = RangeTable::new(8);
        assert!(table.enter(slot(0), blocks(0, 4), Read));
        assert!(table.enter(slot(1), blocks(0, 4), Read));
        assert!(!table.enter(slot(2), blocks(0, 4), Modify));
        let mut ready = Vec::new();
        table.leave(slot(0), &mut ready);
        assert_eq!(ready, []);
        table.leave(slot(1), &mut ready);
        assert_eq!(ready, [slot(2)]);
    }

    #[test]
    fn reads_and_copies_of_a_rebuild_pass_one_another() {
        let mut table = RangeTable::new(8);
        assert!(table.enter(slot(0), blocks(0, 4), Rebuild));
        assert!(table.enter(slot(1), blocks(0, 4), Read));
        assert!(!table.enter(slot(2), blocks(3, 4), Modify));
        assert!(!table.enter(slot(3), blocks(0, 1), Rebuild));
        assert!(!table.enter(slot(4), blocks(3, 1), Read), "the modification came before");
        assert_eq!(table.waiting_for(slot(0)).collect::<Vec<_>>(), [slot(2), slot(3)]);
        assert_eq!(table.waiting_for(slot(1)).collect::<Vec<_>>(), [slot(2)]);
        let mut ready = Vec::new();
        table.leave(slot(0), &mut ready);
        assert_eq!(ready, [slot(3)], "the read still holds the modification back");
        table.leave(slot(1), &mut ready);
        assert_eq!(ready, [slot(3), slot(2)]);
    }

    proptest! {
        /// Compares the table with a plain model: a request may start if no earlier unfinished one conflicts
        /// with it.
        #[test]
        fn requests_start_in_the_order_of_a_plain_model(
            steps in prop::collection::vec((0u64..12, 1u64..5, 0u8..3, any::<prop::sample::Index>()), 1..60),
        ) {
            let mut table = RangeTable::new(64);
            let mut unfinished: Vec<(u16, ByteRange, RangeAccess)> = Vec::new();
            let mut going: Vec<u16> = Vec::new();
            for (n, (first, count, access, pick)) in (0u16..).zip(steps) {
                let (range, access) = (blocks(first, count), [Read, Rebuild, Modify][usize::from(access)]);
                unfinished.push((n, range, access));
                if table.enter(slot(n), range, access) {
                    going.push(n);
                }
                if !going.is_empty() && pick.index(3) > 0 {
                    let done = going.swap_remove(pick.index(going.len()));
                    unfinished.retain(|(other, ..)| *other != done);
                    let mut ready = Vec::new();
                    table.leave(slot(done), &mut ready);
                    going.extend(ready.iter().map(|id| id.slot));
                }
                let mut expected: Vec<u16> = (0..unfinished.len()).filter(|at| {
                    let (_, range, mine) = unfinished[*at];
                    let in_the_way = |(_, earlier, theirs): &(u16, ByteRange, RangeAccess)| {
                        let free = [(Read, Read), (Read, Rebuild), (Rebuild, Read)];
                        !free.contains(&(mine, *theirs)) && earlier.overlaps(range)
                    };
                    !unfinished[..*at].iter().any(in_the_way)
                }).map(|at| unfinished[at].0).collect();
                expected.sort_unstable();
                going.sort_unstable();
                prop_assert_eq!(&going, &expected);
            }
        }
    }
}
