//! Slots: limits of requests in flight per connection.

use std::collections::VecDeque;

use shorthorn_ring::SlotPool;

use crate::limits::{BYTES_IN_FLIGHT_MAX, CONNECTIONS_MAX, SHARED_SLOTS, SLOTS};

/// The slots of all connections.
///
/// Every connection can always have one request in flight, of any size. So connections never block each other
/// for good: each makes progress, if slowly. All other slots, and a number of bytes, are shared. A connection
/// that finds none left waits. The one that has waited longest is served first.
#[derive(Debug)]
pub(crate) struct ConnectionSlots {
    pool: SlotPool,
    uses: Box<[Use]>,
    /// The number of slots of each connection.
    held: [u16; CONNECTIONS_MAX],
    /// The number of slots in use beyond the first one of each connection.
    shared: usize,
    bytes: u64,
    waiting: VecDeque<Use>,
}

/// The slots of a connection, and its waiting request.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    connection: u16,
    bytes: u32,
}

impl ConnectionSlots {
    pub fn new() -> ConnectionSlots {
        let slots = u16::try_from(SLOTS).unwrap_or(u16::MAX);
        ConnectionSlots {
            pool: SlotPool::new(slots),
            uses: vec![Use::default(); SLOTS].into(),
            held: [0; CONNECTIONS_MAX],
            shared: 0,
            bytes: 0,
            waiting: VecDeque::with_capacity(CONNECTIONS_MAX),
        }
    }

    /// Takes a slot for a request of `connection` that needs `bytes` of data. If none is free, the connection
    /// waits: it must not ask again before [`ConnectionSlots::serve`] names it.
    pub fn take(&mut self, connection: u16, bytes: u32) -> Option<u16> {
        let wanted = Use { connection, bytes };
        if self.held(connection) == 0 || (self.waiting.is_empty() && self.fits(wanted)) {
            return Some(self.grant(wanted));
        }
        debug_assert!(!self.waiting.iter().any(|waiting| waiting.connection == connection));
        self.waiting.push_back(wanted);
        None
    }

    /// Returns the next waiting connection that can continue, and the slot that it was waiting for.
    pub fn serve(&mut self) -> Option<(u16, u16)> {
        let first_fits = self.waiting.front().is_some_and(|wanted| self.fits(*wanted));
        let at = if first_fits {
            0
        } else {
            self.waiting.iter().position(|wanted| self.held(wanted.connection) == 0)?
        };
        let wanted = self.waiting.remove(at)?;
        Some((wanted.connection, self.grant(wanted)))
    }

    fn fits(&self, wanted: Use) -> bool {
        self.shared < SHARED_SLOTS && self.bytes + u64::from(wanted.bytes) <= BYTES_IN_FLIGHT_MAX
    }

    fn grant(&mut self, wanted: Use) -> u16 {
        // At most SHARED_SLOTS are in use beyond one for each connection, and the pool has that many.
        let slot = self.pool.take().expect("there is a slot for every connection");
        self.uses[usize::from(slot)] = wanted;
        let held = &mut self.held[usize::from(wanted.connection)];
        self.shared += usize::from(*held > 0);
        *held += 1;
        self.bytes += u64::from(wanted.bytes);
        slot
    }

    /// Gives `slot` back.
    pub fn give(&mut self, slot: u16) {
        let Use { connection, bytes } = std::mem::take(&mut self.uses[usize::from(slot)]);
        let held = &mut self.held[usize::from(connection)];
        *held -= 1;
        self.shared -= usize::from(*held > 0);
        self.bytes -= u64::from(bytes);
        self.pool.give(slot);
    }

    /// Removes a connection that has ended from the waiting connections.
    pub fn forget(&mut self, connection: u16) {
        self.waiting.retain(|waiting| waiting.connection != connection);
    }

    /// Returns true if `connection` waits for a slot.
    pub fn is_waiting(&self, connection: u16) -> bool {
        self.waiting.iter().any(|waiting| waiting.connection == connection)
    }

    /// Returns the connection of the request in `slot`.
    pub fn connection(&self, slot: u16) -> u16 {
        self.uses[usize::from(slot)].connection
    }

    pub fn held(&self, connection: u16) -> u16 {
        self.held[usize::from(connection)]
    }

    /// Returns true if no slot is in use.
    pub fn is_idle(&self) -> bool {
        self.pool.free() == SLOTS
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use shorthorn_types::limits::MAX_IO_BYTES;

    use super::*;

    /// Takes slots until none is left for `connection`.
    fn exhaust(slots: &mut ConnectionSlots, connection: u16, bytes: u32) -> Vec<u16> {
        std::iter::from_fn(|| slots.take(connection, bytes)).collect()
    }

    #[test]
    fn one_connection_can_have_all_shared_slots_and_its_own() {
        let mut slots = ConnectionSlots::new();
        assert_eq!(exhaust(&mut slots, 3, 4096).len(), SHARED_SLOTS + 1);
        assert!(slots.is_waiting(3));
    }

    #[test]
    fn bytes_are_bounded_but_each_connection_has_its_first_request() {
        let mut slots = ConnectionSlots::new();
        let large = usize::try_from(BYTES_IN_FLIGHT_MAX / u64::from(MAX_IO_BYTES)).unwrap();
        assert_eq!(exhaust(&mut slots, 0, MAX_IO_BYTES).len(), large);
        for connection in 1..16 {
            assert_eq!(exhaust(&mut slots, connection, MAX_IO_BYTES).len(), 1);
        }
    }

    #[test]
    fn the_longest_waiting_connection_is_served_first() {
        let mut slots = ConnectionSlots::new();
        let mine = exhaust(&mut slots, 0, MAX_IO_BYTES);
        let other = slots.take(1, 0).unwrap();
        assert_eq!(slots.take(1, 512), None, "0 waits already");
        slots.give(mine[0]);
        assert_eq!(slots.serve().unwrap().0, 0);
        assert_eq!(slots.serve(), None, "again too many bytes for 1");
        slots.give(other);
        assert_eq!(slots.serve().unwrap().0, 1, "it has nothing now, so it is served");
        assert_eq!(slots.serve(), None);
    }

    #[test]
    fn closed_connections_do_not_wait() {
        let mut slots = ConnectionSlots::new();
        let all = exhaust(&mut slots, 0, 0);
        slots.forget(0);
        all.into_iter().for_each(|slot| slots.give(slot));
        assert_eq!(slots.serve(), None);
        assert!(slots.is_idle());
    }

    proptest! {
        /// Always gives a slot to a connection without a request, and serves waiting ones once the others
        /// have ended.
        #[test]
        fn no_connection_is_blocked_for_good(
            events in prop::collection::vec(
                (0u16..16, 0u32..=MAX_IO_BYTES, any::<bool>(), any::<prop::sample::Index>()), 1..2000
            ),
        ) {
            let mut slots = ConnectionSlots::new();
            let mut taken: Vec<u16> = Vec::new();
            for (connection, bytes, gives, which) in events {
                if gives && !taken.is_empty() {
                    slots.give(taken.swap_remove(which.index(taken.len())));
                } else if !slots.is_waiting(connection) {
                    let first = slots.held(connection) == 0;
                    let slot = slots.take(connection, bytes);
                    prop_assert!(slot.is_some() || !first);
                    taken.extend(slot);
                }
                while let Some((served, slot)) = slots.serve() {
                    prop_assert_eq!(slots.connection(slot), served);
                    taken.push(slot);
                }
                prop_assert!(slots.bytes <= BYTES_IN_FLIGHT_MAX + 16 * u64::from(MAX_IO_BYTES));
            }
            while let Some(slot) = taken.pop() {
                slots.give(slot);
                taken.extend(std::iter::from_fn(|| slots.serve()).map(|(_, slot)| slot));
            }
            prop_assert!(
                slots.is_idle() && slots.waiting.is_empty() && slots.bytes == 0 && slots.shared == 0
            );
        }
    }
}
