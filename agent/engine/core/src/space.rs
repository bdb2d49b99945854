use shorthorn_views::Quorum;

use crate::membership::{Membership, PeerIndex, PeerMask};
use crate::replica_timeouts::ReplicaTimeouts;
use crate::request::Operation;
use crate::slot::{Slot, SlotId};

/// A disk with so much space has room for a change of the view.
const ROOM_MIB: u32 = 16;

/// Requests for which some members have no space, and the answers of members on their free space since then.
///
/// An answer to an older PING does not count, because the disk may have become full since. The answers are
/// forgotten when the first request arrives after a time without any.
#[derive(Debug)]
pub(crate) struct Space {
    /// In the order in which they have failed.
    requests: Vec<SlotId>,
    known: PeerMask,
    has_room: PeerMask,
    /// The time since which the members are asked.
    since_ms: u64,
}

/// The ways to continue a request for which some members have no space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WayOut {
    /// The members leave, and the request succeeds.
    Leave,
    /// The members may leave as soon as the others are not slow.
    Wait,
    /// The request fails, and all members are made equal.
    Fail,
}

impl Space {
    /// Creates the list with room for as many `requests`.
    pub fn new(requests: usize) -> Space {
        Space {
            requests: Vec::with_capacity(requests),
            known: PeerMask::NONE,
            has_room: PeerMask::NONE,
            since_ms: 0,
        }
    }

    /// Returns true if some request waits.
    pub fn is_awaited(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Lets the request in slot `id` wait. Returns true if the members have to be asked for their space.
    pub fn wait(&mut self, id: SlotId, now_ms: u64) -> bool {
        let is_first = self.requests.is_empty();
        if is_first {
            (self.known, self.has_room, self.since_ms) = (PeerMask::NONE, PeerMask::NONE, now_ms);
        }
        self.requests.push(id);
        is_first
    }

    /// Records the answer of `peer` to the PING of `pinged_at_ms`. Returns false if it is too old to count.
    pub fn ponged(&mut self, peer: PeerIndex, pinged_at_ms: Option<u64>, free_mib: u32) -> bool {
        if pinged_at_ms.is_none_or(|at_ms| at_ms <= self.since_ms) {
            return false;
        }
        let peer = PeerMask::one(peer);
        self.known = self.known.with(peer);
        self.has_room =
            if free_mib >= ROOM_MIB { self.has_room.with(peer) } else { self.has_room.without(peer) };
        true
    }

    /// Returns the request at position `at` of those that wait.
    pub fn get(&self, at: usize) -> Option<SlotId> {
        self.requests.get(at).copied()
    }

    /// Ends the wait of the request at position `at`. The later ones move up.
    pub fn remove(&mut self, at: usize) {
        self.requests.remove(at);
    }

    /// Ends the wait of the first request for which `test` is true, and returns it.
    pub fn remove_first(&mut self, test: impl Fn(&Space, SlotId) -> bool) -> Option<SlotId> {
        let at = self.requests.iter().position(|id| test(self, *id))?;
        Some(self.requests.remove(at))
    }

    /// Returns the way to continue the request in `slot`.
    pub fn way_out(
        &self,
        slot: &Slot,
        membership: &Membership,
        timeouts: &ReplicaTimeouts,
        now_ms: u64,
    ) -> WayOut {
        let members = membership.answering();
        let rest = members.without(slot.no_space);
        if rest == members {
            return WayOut::Leave;
        }
        let is_over = now_ms.saturating_sub(self.since_ms) > timeouts.wait_for_space_ms();
        let is_most = |peers: PeerMask| membership.quorum_of(peers) == Quorum::More;
        let has_no_room = self.known.without(self.has_room);
        if slot.operation == Operation::Discard || is_over || !is_most(rest.without(has_no_room)) {
            WayOut::Fail
        } else if is_most(rest.and(self.has_room).without(timeouts.slow())) {
            WayOut::Leave
        } else {
            WayOut::Wait
        }
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_types::{ByteRange, Generation, Members, ReplicaId, View, ViewId};

    use super::*;
    use crate::membership::PeerConfig;
    use crate::request::Request;

    const TIMEOUT_MS: u64 = 5000;
    const WRITE: Operation = Operation::Write { fua: false };

    fn id(slot: u16) -> SlotId {
        SlotId { queue: 0, slot }
    }

    /// Returns three members.
    fn members() -> Membership {
        let peer = |n| PeerConfig { replica: ReplicaId::from_random(n), local: false };
        let peers: Vec<PeerConfig> = (0..3).map(peer).collect();
        let view_id = ViewId { generation: Generation::new(1, 0), number: 1 };
        let members = Members::new(peers.iter().map(|peer| peer.replica)).unwrap();
        Membership::new(&peers, View { id: view_id, members })
    }

    fn way_out(space: &Space, operation: Operation, full: PeerMask, now_ms: u64) -> WayOut {
        let range = ByteRange::new(0, 4096).unwrap();
        let slot = Slot { no_space: full, ..Slot::of(Request { slot: 0, operation, range }) };
        space.way_out(&slot, &members(), &ReplicaTimeouts::new(1, TIMEOUT_MS, TIMEOUT_MS), now_ms)
    }

    #[test]
    fn a_full_member_leaves_when_a_majority_has_reported_room() {
        let mut space = Space::new(4);
        assert!(space.wait(id(0), 1000) && !space.wait(id(1), 2000), "the members are asked once");
        let full = PeerMask::one(0);
        assert!(!space.ponged(1, Some(1000), 100), "that PING may be older than the failure");
        assert!(!space.ponged(1, None, 100));
        assert!(space.ponged(1, Some(1001), ROOM_MIB));
        assert_eq!(way_out(&space, WRITE, full, 2000), WayOut::Wait, "the third has not answered");
        assert!(space.ponged(2, Some(1001), ROOM_MIB));
        assert_eq!(way_out(&space, WRITE, full, 2000), WayOut::Leave);
        assert!(space.ponged(2, Some(1002), ROOM_MIB - 1));
        assert_eq!(way_out(&space, WRITE, full, 2000), WayOut::Fail, "it has no room for the next view");
    }

    #[test]
    fn requests_fail_if_no_majority_has_done_them_and_when_their_time_is_over() {
        let mut space = Space::new(4);
        space.wait(id(0), 1000);
        let two = PeerMask::one(0).with(PeerMask::one(1));
        assert_eq!(way_out(&space, WRITE, two, 1000), WayOut::Fail);
        assert_eq!(way_out(&space, WRITE, PeerMask::one(0), 1000 + 2 * TIMEOUT_MS), WayOut::Wait);
        assert_eq!(way_out(&space, WRITE, PeerMask::one(0), 1001 + 2 * TIMEOUT_MS), WayOut::Fail);
        assert_eq!(way_out(&space, Operation::Discard, PeerMask::one(0), 1000), WayOut::Fail);
        assert_eq!(way_out(&space, WRITE, PeerMask::one(5), 1000), WayOut::Leave, "it has left since");
    }

    #[test]
    fn answers_are_forgotten_when_no_request_waits_any_more() {
        let mut space = Space::new(4);
        space.wait(id(0), 1000);
        [1, 2].into_iter().for_each(|peer| assert!(space.ponged(peer, Some(1500), 100)));
        assert_eq!(space.remove_first(|_, waiting| waiting == id(1)), None);
        assert_eq!(space.remove_first(|_, waiting| waiting == id(0)), Some(id(0)));
        assert!(!space.is_awaited() && space.wait(id(2), 2000));
        assert_eq!(way_out(&space, WRITE, PeerMask::one(0), 2000), WayOut::Wait);
    }

    #[test]
    fn the_later_ones_move_up() {
        let mut space = Space::new(4);
        for slot in 0..3 {
            space.wait(id(slot), 1000);
        }
        space.remove(0);
        assert_eq!((space.get(0), space.get(1), space.get(2)), (Some(id(1)), Some(id(2)), None));
    }
}
