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
/// forgotten when the first request that needs them arrives after a time without any. A discard needs none:
/// however many discards fail, the next write has its own time.
#[derive(Debug)]
pub(crate) struct Space {
    /// In the order in which they have failed.
    requests: Vec<WaitingForSpace>,
    /// The number of requests that need the answers of the members.
    asking: usize,
    known: PeerMask,
    has_room: PeerMask,
    /// The time since which the members are asked.
    since_ms: u64,
}

/// A request that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WaitingForSpace {
    /// The slot of the request.
    pub id: SlotId,
    /// The time since which it waits.
    pub since_ms: u64,
    /// True if it needs the answers of the members.
    asks: bool,
}

/// The action for a request for which some members have no space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoSpaceAction {
    /// The engine drops these members, and the request succeeds.
    Drop,
    /// The engine may drop them as soon as the others are not slow.
    Wait,
    /// The request fails, and all members are resynced.
    Fail,
}

impl Space {
    /// Creates the list with room for as many `requests`.
    pub fn new(requests: usize) -> Space {
        Space {
            requests: Vec::with_capacity(requests),
            asking: 0,
            known: PeerMask::NONE,
            has_room: PeerMask::NONE,
            since_ms: 0,
        }
    }

    /// Returns true if some request waits.
    pub fn has_waiting(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Lets the request in slot `id` wait. Returns true if the members have to be asked for their space.
    pub fn wait(&mut self, id: SlotId, operation: Operation, now_ms: u64) -> bool {
        let asks = operation != Operation::Discard;
        let is_first = asks && self.asking == 0;
        if is_first {
            (self.known, self.has_room, self.since_ms) = (PeerMask::NONE, PeerMask::NONE, now_ms);
        }
        self.asking += usize::from(asks);
        self.requests.push(WaitingForSpace { id, since_ms: now_ms, asks });
        is_first
    }

    /// Records the answer of `peer` to the PING of `pinged_at_ms`. Returns false if it is too old to count.
    pub fn ponged(&mut self, peer: PeerIndex, pinged_at_ms: Option<u64>, free_mib: Option<u32>) -> bool {
        if pinged_at_ms.is_none_or(|at_ms| at_ms <= self.since_ms) {
            return false;
        }
        let peer = PeerMask::one(peer);
        self.known = self.known.with(peer);
        let has_room = free_mib.is_some_and(|free_mib| free_mib >= ROOM_MIB);
        self.has_room = if has_room { self.has_room.with(peer) } else { self.has_room.without(peer) };
        true
    }

    /// Returns the request at position `at` of those that wait.
    pub fn get(&self, at: usize) -> Option<WaitingForSpace> {
        self.requests.get(at).copied()
    }

    /// Ends the wait of the request at position `at`. The later ones move up.
    pub fn remove(&mut self, at: usize) {
        let removed = self.requests.remove(at);
        self.asking -= usize::from(removed.asks);
    }

    /// Ends the wait of the first request for which `test` is true, and returns it.
    pub fn remove_first(&mut self, test: impl Fn(&Space, WaitingForSpace) -> bool) -> Option<SlotId> {
        let at = self.requests.iter().position(|waiting| test(self, *waiting))?;
        let id = self.requests[at].id;
        self.remove(at);
        Some(id)
    }

    /// Returns the action for the request in `slot`, which has waited for `waited_ms`.
    pub fn no_space_action(
        &self,
        slot: &Slot,
        membership: &Membership,
        timeouts: &ReplicaTimeouts,
        waited_ms: u64,
    ) -> NoSpaceAction {
        let members = membership.answering();
        let rest = members.without(slot.no_space());
        if rest == members {
            return NoSpaceAction::Drop;
        }
        let is_over = waited_ms > timeouts.wait_for_space_ms();
        let is_most = |peers: PeerMask| membership.quorum_of(peers) == Quorum::More;
        let has_no_room = self.known.without(self.has_room);
        if slot.operation() == Operation::Discard || is_over || !is_most(rest.without(has_no_room)) {
            NoSpaceAction::Fail
        } else if is_most(rest.and(self.has_room).without(timeouts.slow())) {
            NoSpaceAction::Drop
        } else {
            NoSpaceAction::Wait
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

    fn no_space_action(space: &Space, operation: Operation, full: PeerMask, waited_ms: u64) -> NoSpaceAction {
        let range = ByteRange::new(0, 4096).unwrap();
        let mut slot = Slot::of(Request { slot: 0, operation, range });
        full.iter().for_each(|peer| slot.record_no_space(peer));
        space.no_space_action(&slot, &members(), &ReplicaTimeouts::new(1, TIMEOUT_MS, TIMEOUT_MS), waited_ms)
    }

    #[test]
    fn a_full_member_leaves_when_a_majority_has_reported_room() {
        let mut space = Space::new(4);
        let is_first = space.wait(id(0), WRITE, 1000) && !space.wait(id(1), WRITE, 2000);
        assert!(is_first, "the members are asked once");
        let full = PeerMask::one(0);
        assert!(!space.ponged(1, Some(1000), Some(100)), "that PING may be older than the failure");
        assert!(!space.ponged(1, None, Some(100)));
        assert!(space.ponged(1, Some(1001), Some(ROOM_MIB)));
        assert_eq!(
            no_space_action(&space, WRITE, full, 1000),
            NoSpaceAction::Wait,
            "the third has not answered"
        );
        assert!(space.ponged(2, Some(1001), Some(ROOM_MIB)));
        assert_eq!(no_space_action(&space, WRITE, full, 1000), NoSpaceAction::Drop);
        assert!(space.ponged(2, Some(1002), Some(ROOM_MIB - 1)));
        assert_eq!(
            no_space_action(&space, WRITE, full, 1000),
            NoSpaceAction::Fail,
            "it has no room for the next view"
        );
    }

    #[test]
    fn requests_fail_if_no_majority_has_done_them_and_when_their_time_is_over() {
        let mut space = Space::new(4);
        space.wait(id(0), WRITE, 1000);
        let two = PeerMask::one(0).with(PeerMask::one(1));
        assert_eq!(no_space_action(&space, WRITE, two, 0), NoSpaceAction::Fail);
        assert_eq!(no_space_action(&space, WRITE, PeerMask::one(0), 2 * TIMEOUT_MS), NoSpaceAction::Wait);
        assert_eq!(no_space_action(&space, WRITE, PeerMask::one(0), 1 + 2 * TIMEOUT_MS), NoSpaceAction::Fail);
        assert_eq!(no_space_action(&space, Operation::Discard, PeerMask::one(0), 0), NoSpaceAction::Fail);
        assert_eq!(
            no_space_action(&space, WRITE, PeerMask::one(5), 0),
            NoSpaceAction::Drop,
            "it has left since"
        );
    }

    #[test]
    fn answers_are_forgotten_when_no_request_waits_any_more() {
        let mut space = Space::new(4);
        space.wait(id(0), WRITE, 1000);
        [1, 2].into_iter().for_each(|peer| assert!(space.ponged(peer, Some(1500), Some(100))));
        assert_eq!(space.remove_first(|_, waiting| waiting.id == id(1)), None);
        assert_eq!(space.remove_first(|_, waiting| waiting.id == id(0)), Some(id(0)));
        assert!(!space.has_waiting() && space.wait(id(2), WRITE, 2000));
        assert_eq!(no_space_action(&space, WRITE, PeerMask::one(0), 0), NoSpaceAction::Wait);
    }

    /// A guest may send discards that fail for hours, so that one always waits.
    #[test]
    fn a_stream_of_discards_takes_no_time_of_a_write() {
        let mut space = Space::new(4);
        assert!(!space.wait(id(0), Operation::Discard, 1000), "a discard needs no answer");
        space.wait(id(1), Operation::Discard, 60_000);
        space.remove_first(|_, waiting| waiting.id == id(0));
        assert!(space.wait(id(2), WRITE, 61_000), "the members are asked now");
        assert!(!space.ponged(1, Some(60_999), Some(100)), "that answer is about an earlier time");
        space.wait(id(3), WRITE, 62_000);
        assert_eq!([1, 2].map(|at| space.get(at).unwrap().since_ms), [61_000, 62_000]);
        (0..3).for_each(|_| space.remove(0));
        assert!(!space.has_waiting() && space.wait(id(0), WRITE, 63_000));
    }

    #[test]
    fn later_requests_move_up() {
        let mut space = Space::new(4);
        for slot in 0..3 {
            space.wait(id(slot), WRITE, 1000);
        }
        space.remove(0);
        let waiting = [0, 1, 2].map(|at| space.get(at).map(|waiting| waiting.id));
        assert_eq!(waiting, [Some(id(1)), Some(id(2)), None]);
    }
}
