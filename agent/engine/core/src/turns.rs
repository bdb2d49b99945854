use shorthorn_types::ByteRange;

use crate::ranges::{RangeAccess, RangeTable};
use crate::slot::SlotId;

/// The order in which requests and copies are sent.
///
/// A request first waits until its range is free, in the [`RangeTable`]. Then it has its turn. If it
/// cannot be sent at that moment, it is *held* behind all that are held already. The core tries all held
/// requests again at once, in that order. A request that still cannot be sent is held again.
///
/// The core changes the order while it loops over the slots of [`Turns::leave`] or [`Turns::take_held`]. So
/// the loop owns the list, and gives its memory back at the end: requests allocate nothing.
#[derive(Debug)]
pub(crate) struct Turns {
    ranges: RangeTable,
    held: Vec<SlotId>,
    /// Empty, for its memory.
    held_spare: Vec<SlotId>,
    /// Empty, for its memory.
    ready_spare: Vec<SlotId>,
}

impl Turns {
    /// Creates the order of at most `slots` requests and copies at once.
    pub fn new(slots: usize) -> Turns {
        let room = || Vec::with_capacity(slots);
        Turns { ranges: RangeTable::new(slots), held: room(), held_spare: room(), ready_spare: room() }
    }

    /// Lets the request or copy in slot `id` wait for its range. Returns true if it has its turn at once.
    pub fn enter(&mut self, id: SlotId, range: ByteRange, access: RangeAccess) -> bool {
        self.ranges.enter(id, range, access)
    }

    /// Frees the range of the finished request or copy in slot `id`. Returns the slots that have their turn
    /// now. The caller sends them and returns the list with [`Turns::give_back_ready`].
    #[must_use]
    pub fn leave(&mut self, id: SlotId) -> Vec<SlotId> {
        let mut ready = std::mem::take(&mut self.ready_spare);
        self.ranges.leave(id, &mut ready);
        ready
    }

    pub fn give_back_ready(&mut self, mut list: Vec<SlotId>) {
        list.clear();
        self.ready_spare = list;
    }

    /// Returns the slots that wait for the range of slot `id`.
    pub fn waiting_for(&self, id: SlotId) -> impl Iterator<Item = SlotId> {
        self.ranges.waiting_for(id)
    }

    /// Holds slot `id`, whose turn it is.
    pub fn hold(&mut self, id: SlotId) {
        self.held.push(id);
    }

    /// Returns the held slots, the oldest first.
    pub fn held(&self) -> impl Iterator<Item = SlotId> {
        self.held.iter().copied()
    }

    /// Takes all held slots to try them again. The caller returns the list with [`Turns::give_back_held`].
    #[must_use]
    pub fn take_held(&mut self) -> Vec<SlotId> {
        let spare = std::mem::take(&mut self.held_spare);
        std::mem::replace(&mut self.held, spare)
    }

    pub fn give_back_held(&mut self, mut list: Vec<SlotId>) {
        list.clear();
        self.held_spare = list;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(slot: u16) -> SlotId {
        SlotId { queue: 0, slot }
    }

    #[test]
    fn held_requests_keep_their_order_when_they_are_held_again() {
        let mut turns = Turns::new(8);
        (0..3).for_each(|slot| turns.hold(id(slot)));
        let taken = turns.take_held();
        assert_eq!(taken, [id(0), id(1), id(2)]);
        assert_eq!(turns.held().count(), 0);
        taken.iter().skip(1).for_each(|slot| turns.hold(*slot));
        turns.give_back_held(taken);
        assert_eq!(turns.held().collect::<Vec<_>>(), [id(1), id(2)]);
    }

    #[test]
    fn lists_keep_their_memory() {
        let mut turns = Turns::new(8);
        let range = ByteRange::new(0, 4096).unwrap();
        for _ in 0..3 {
            assert!(turns.enter(id(0), range, RangeAccess::Modify));
            assert!(!turns.enter(id(1), range, RangeAccess::Modify));
            let ready = turns.leave(id(0));
            assert_eq!((ready.as_slice(), ready.capacity()), ([id(1)].as_slice(), 8));
            turns.hold(id(1));
            turns.give_back_ready(ready);
            let held = turns.take_held();
            assert_eq!((held.as_slice(), held.capacity()), ([id(1)].as_slice(), 8));
            turns.give_back_held(held);
            let none = turns.leave(id(1));
            turns.give_back_ready(none);
        }
    }
}
