use shorthorn_types::ByteRange;

use crate::ranges::{RangeAccess, RangeTable};
use crate::slot::SlotId;

/// The order in which requests and copies are sent.
///
/// A request first waits until its range is free, in the [`RangeTable`]. Then it is ready. If it cannot be
/// sent at that moment, it is *deferred* behind all that are deferred already. The core tries all deferred
/// requests again at once, in that order. A request that still cannot be sent is deferred again.
///
/// The core changes the order while it loops over the slots of [`DispatchQueue::leave`] or
/// [`DispatchQueue::take_deferred`]. So the loop owns the list, and gives its memory back at the end:
/// requests allocate nothing.
#[derive(Debug)]
pub(crate) struct DispatchQueue {
    ranges: RangeTable,
    deferred: Vec<SlotId>,
    /// Empty, for its memory.
    deferred_spare: Vec<SlotId>,
    /// Empty, for its memory.
    ready_spare: Vec<SlotId>,
}

impl DispatchQueue {
    /// Creates the order of at most `slots` requests and copies at once.
    pub fn new(slots: usize) -> DispatchQueue {
        let room = || Vec::with_capacity(slots);
        DispatchQueue {
            ranges: RangeTable::new(slots),
            deferred: room(),
            deferred_spare: room(),
            ready_spare: room(),
        }
    }

    /// Lets the request or copy in slot `id` wait for its range. Returns true if it is ready at once.
    pub fn enter(&mut self, id: SlotId, range: ByteRange, access: RangeAccess) -> bool {
        self.ranges.enter(id, range, access)
    }

    /// Frees the range of the finished request or copy in slot `id`. Returns the slots that are ready
    /// now. The caller sends them and returns the list with [`DispatchQueue::give_back_ready`].
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

    /// Defers slot `id`, which is ready.
    pub fn defer(&mut self, id: SlotId) {
        self.deferred.push(id);
    }

    /// Returns the deferred slots, the oldest first.
    pub fn deferred(&self) -> impl Iterator<Item = SlotId> {
        self.deferred.iter().copied()
    }

    /// Takes all deferred slots to try them again. The caller returns the list with
    /// [`DispatchQueue::give_back_deferred`].
    #[must_use]
    pub fn take_deferred(&mut self) -> Vec<SlotId> {
        let spare = std::mem::take(&mut self.deferred_spare);
        std::mem::replace(&mut self.deferred, spare)
    }

    pub fn give_back_deferred(&mut self, mut list: Vec<SlotId>) {
        list.clear();
        self.deferred_spare = list;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(slot: u16) -> SlotId {
        SlotId { queue: 0, slot }
    }

    #[test]
    fn deferred_requests_keep_their_order_when_they_are_deferred_again() {
        let mut queue = DispatchQueue::new(8);
        (0..3).for_each(|slot| queue.defer(id(slot)));
        let taken = queue.take_deferred();
        assert_eq!(taken, [id(0), id(1), id(2)]);
        assert_eq!(queue.deferred().count(), 0);
        taken.iter().skip(1).for_each(|slot| queue.defer(*slot));
        queue.give_back_deferred(taken);
        assert_eq!(queue.deferred().collect::<Vec<_>>(), [id(1), id(2)]);
    }

    #[test]
    fn lists_keep_their_memory() {
        let mut queue = DispatchQueue::new(8);
        let range = ByteRange::new(0, 4096).unwrap();
        for _ in 0..3 {
            assert!(queue.enter(id(0), range, RangeAccess::Modify));
            assert!(!queue.enter(id(1), range, RangeAccess::Modify));
            let ready = queue.leave(id(0));
            assert_eq!((ready.as_slice(), ready.capacity()), ([id(1)].as_slice(), 8));
            queue.defer(id(1));
            queue.give_back_ready(ready);
            let deferred = queue.take_deferred();
            assert_eq!((deferred.as_slice(), deferred.capacity()), ([id(1)].as_slice(), 8));
            queue.give_back_deferred(deferred);
            let none = queue.leave(id(1));
            queue.give_back_ready(none);
        }
    }
}
