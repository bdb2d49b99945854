//! Shares the slots of one queue among its connections.

use std::collections::VecDeque;

use shorthorn_ring::SlotPool;

/// The slots of a queue, and the connections that wait for one.
///
/// Every connection has one slot to itself. A client that does not read its replies, or stops in the middle
/// of a write, therefore does not block another one. The other slots are common. A connection that finds none
/// waits in a queue. Only the first connection in the queue may take common slots, so that a request that
/// needs many at once gets them in the end.
#[derive(Debug)]
pub(super) struct SlotShare {
    pool: SlotPool,
    common_free: u16,
    held: Box<[u16]>,
    line: VecDeque<u16>,
    largest_reservation: u16,
}

impl SlotShare {
    /// Creates a share of `slots` for at most `connections`, of which there must not be more than slots.
    pub(super) fn new(slots: u16, connections: u16) -> SlotShare {
        assert!(connections > 0 && connections <= slots, "{connections} connections on {slots} slots");
        let common_free = slots - connections;
        SlotShare {
            pool: SlotPool::new(slots),
            common_free,
            held: vec![0; connections.into()].into(),
            line: VecDeque::with_capacity(connections.into()),
            largest_reservation: common_free + 1,
        }
    }

    /// Returns the maximum slots that one connection can have at once.
    pub(super) fn largest_reservation(&self) -> u16 {
        self.largest_reservation
    }

    /// Promises `count` slots to `connection`, which then takes each with [`SlotShare::take`]. If they are
    /// not free, it waits in the queue from now on.
    pub(super) fn reserve(&mut self, connection: u16, count: u16) -> bool {
        debug_assert!(count <= self.largest_reservation);
        let held = &mut self.held[usize::from(connection)];
        let common = if *held == 0 { count - 1 } else { count };
        let first = self.line.front().is_none_or(|first| *first == connection);
        if common > 0 && (!first || common > self.common_free) {
            if !self.line.contains(&connection) {
                self.line.push_back(connection);
            }
            return false;
        }
        *held += count;
        self.common_free -= common;
        self.leave(connection);
        true
    }

    /// Takes one of the reserved slots.
    ///
    /// # Panics
    /// No slot was reserved.
    pub(super) fn take(&mut self) -> u16 {
        self.pool.take().expect("slots are reserved only if they are free")
    }

    /// Returns `slot`, which `connection` does not need any more.
    pub(super) fn give(&mut self, connection: u16, slot: u16) {
        self.pool.give(slot);
        let held = &mut self.held[usize::from(connection)];
        *held -= 1;
        if *held > 0 {
            self.common_free += 1;
        }
    }

    /// Returns true if no connection has a slot.
    pub(super) fn is_idle(&self) -> bool {
        self.held.iter().all(|held| *held == 0)
    }

    /// Returns the connection at `position` of the queue.
    pub(super) fn waiting(&self, position: usize) -> Option<u16> {
        self.line.get(position).copied()
    }

    /// Removes `connection` from the queue.
    pub(super) fn leave(&mut self, connection: u16) {
        if !self.line.is_empty() {
            self.line.retain(|other| *other != connection);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn reserve(share: &mut SlotShare, connection: u16, count: u16) -> Option<Vec<u16>> {
        share.reserve(connection, count).then(|| (0..count).map(|_| share.take()).collect())
    }

    #[test]
    fn every_connection_can_reserve_a_slot() {
        let mut share = SlotShare::new(8, 3);
        assert_eq!(share.largest_reservation(), 6);
        assert!(reserve(&mut share, 0, 6).is_some(), "one takes all it can");
        assert!(reserve(&mut share, 0, 1).is_none());
        assert!(reserve(&mut share, 1, 1).is_some(), "the others have one each");
        assert!(reserve(&mut share, 2, 1).is_some());
        assert!(reserve(&mut share, 2, 1).is_none());
    }

    #[test]
    fn is_idle_when_every_slot_is_back() {
        let mut share = SlotShare::new(4, 2);
        assert!(share.is_idle());
        let slots = reserve(&mut share, 1, 2).unwrap();
        for slot in slots {
            assert!(!share.is_idle());
            share.give(1, slot);
        }
        assert!(share.is_idle());
    }

    #[test]
    fn a_large_reservation_is_not_overtaken() {
        let mut share = SlotShare::new(4, 2);
        let held = reserve(&mut share, 0, 2).unwrap();
        assert!(reserve(&mut share, 1, 3).is_none());
        share.give(0, held[0]);
        assert!(reserve(&mut share, 0, 2).is_none(), "stands behind the one in line");
        assert!(reserve(&mut share, 1, 3).is_some());
        assert_eq!(share.waiting(0), Some(0));
        assert_eq!(share.waiting(1), None);
    }

    proptest! {
        /// Reserves and returns slots in any order. Granted reservations find their slots, the queue advances
        /// as soon as all slots are returned, and no slot is lost.
        #[test]
        fn slots_are_neither_lost_nor_doubled(
            steps in proptest::collection::vec((0u16..4, 0u16..6), 0..200)
        ) {
            let mut share = SlotShare::new(9, 4);
            let mut held: Vec<Vec<u16>> = vec![vec![]; 4];
            for (connection, count) in steps {
                let mine = &mut held[usize::from(connection)];
                if count == 0 {
                    if let Some(slot) = mine.pop() { share.give(connection, slot); }
                } else if let Some(slots) = reserve(&mut share, connection, count) {
                    mine.extend(slots);
                }
                let mut all: Vec<u16> = held.iter().flatten().copied().collect();
                all.sort_unstable();
                all.dedup();
                prop_assert_eq!(all.len(), held.iter().map(Vec::len).sum::<usize>());
            }
            for (connection, slots) in held.into_iter().enumerate() {
                for slot in slots { share.give(u16::try_from(connection).unwrap(), slot); }
            }
            while let Some(first) = share.waiting(0) {
                let all = share.largest_reservation();
                let slots = reserve(&mut share, first, all).unwrap();
                for slot in slots { share.give(first, slot); }
            }
            prop_assert!(share.reserve(2, share.largest_reservation()));
        }
    }
}
