//! Moves members to their new addresses, one after the other.
//!
//! The connections of a member whose address has changed are given up, and it comes back over the new address
//! within a second. A member that answers is moved only if the other members that answer are a majority of
//! the view. The previously moved one has to be a member again. Otherwise the volume would lose its majority
//! for that time, or for good if the new address does not work. A member that does not answer at its former
//! address any more is moved at once if the others are a majority. If they are not, it gets the time of a
//! late replica first: its silence may be short, and the volume would stop.
//!
//! A member whose address changes back before it was moved stays: its connections are those of this address.

use shorthorn_core::PeerIndex;

/// The time after which a member that owes the answer to PING does not answer at its former address. By far
/// longer than the round trip.
pub(super) const SILENT_MS: u64 = 1500;

/// The members whose addresses have changed. Each replica is in it at most once.
#[derive(Debug, Default)]
pub(super) struct Moves {
    /// In the order of their changes.
    waiting: Vec<WaitingMove>,
    /// The members that were moved and are not back.
    under_way: Vec<PeerIndex>,
}

/// A member that is to be moved.
#[derive(Debug)]
struct WaitingMove {
    peer: PeerIndex,
    reason: String,
    /// The addresses before the first change since the connections were made.
    connected_to: Vec<String>,
}

/// The membership of a replica, and its answers to PING.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Peering {
    /// True if the replica is in the view, and its connections are not lost.
    pub is_member: bool,
    /// The time for which it owes the answer to PING.
    pub silent_ms: u64,
}

impl Peering {
    fn answers(self) -> bool {
        self.is_member_within(SILENT_MS)
    }

    fn is_member_within(self, limit_ms: u64) -> bool {
        self.is_member && self.silent_ms < limit_ms
    }
}

impl Moves {
    /// Replaces the `former` addresses of a replica by its `next` ones. If none of its connections has one of
    /// the `next` addresses, its host has most likely lost the former ones. Then the replica has to move.
    pub(super) fn readdress(&mut self, peer: PeerIndex, former: &[String], next: &[String], reason: String) {
        let waits = self.waiting.iter().position(|waiting| waiting.peer == peer);
        let connected_to =
            waits.map_or_else(|| former.to_vec(), |place| self.waiting.remove(place).connected_to);
        // A replica on this host keeps its Unix socket.
        if !connected_to.iter().any(|address| next.contains(address)) {
            self.waiting.push(WaitingMove { peer, reason, connected_to });
        }
    }

    /// Records that the replica is a member again, or was given up.
    pub(super) fn end(&mut self, peer: PeerIndex) {
        self.waiting.retain(|waiting| waiting.peer != peer);
        self.under_way.retain(|other| *other != peer);
    }

    /// Returns true if nothing waits.
    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Takes the replicas whose connections are to be given up now. `view_members` is the size of the view,
    /// and `peers` has the state of each replica at its index. `timeout_ms` is the time of a late replica.
    pub(super) fn take(
        &mut self,
        view_members: usize,
        peers: &[Peering],
        timeout_ms: u64,
    ) -> Vec<(PeerIndex, String)> {
        let Moves { waiting, under_way } = self;
        waiting
            .extract_if(.., |WaitingMove { peer, .. }| {
                let peering = peers.get(usize::from(*peer)).copied().unwrap_or_default();
                let has_majority = is_majority_without(*peer, view_members, peers);
                let limit_ms = if has_majority { SILENT_MS } else { timeout_ms.max(SILENT_MS) };
                let can_wait = peering.is_member_within(limit_ms);
                let is_taken = !can_wait || (under_way.is_empty() && has_majority);
                if is_taken && peering.is_member {
                    under_way.push(*peer);
                }
                is_taken
            })
            .map(|waiting| (waiting.peer, waiting.reason))
            .collect()
    }
}

/// Returns true if the members that answer are a majority of the view without `peer`.
fn is_majority_without(peer: PeerIndex, view_members: usize, peers: &[Peering]) -> bool {
    let others = (0..).zip(peers).filter(|(other, peering)| *other != peer && peering.answers());
    2 * others.count() > view_members
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use shorthorn_types::limits::MAX_MEMBERS;

    use super::*;

    const ANSWERS: Peering = Peering { is_member: true, silent_ms: 10 };
    const SILENT: Peering = Peering { is_member: true, silent_ms: SILENT_MS };
    const TIMEOUT_MS: u64 = 2500;
    const LATE: Peering = Peering { is_member: true, silent_ms: TIMEOUT_MS };
    const AWAY: Peering = Peering { is_member: false, silent_ms: 0 };

    fn moves(peers: &[PeerIndex]) -> Moves {
        let mut moves = Moves::default();
        peers.iter().for_each(|peer| readdress(&mut moves, *peer, "a", "b", "has moved"));
        moves
    }

    fn readdress(moves: &mut Moves, peer: PeerIndex, former: &str, next: &str, event: &str) {
        moves.readdress(peer, &[former.to_owned()], &[next.to_owned()], format!("{peer} {event}"));
    }

    /// Takes those of a view with all members in `peers`.
    fn taken(moves: &mut Moves, peers: &[Peering]) -> Vec<PeerIndex> {
        let members = peers.iter().filter(|peering| peering.is_member).count();
        moves.take(members, peers, TIMEOUT_MS).into_iter().map(|(peer, _)| peer).collect()
    }

    #[test]
    fn members_that_answer_move_one_after_the_other() {
        let mut moves = moves(&[0, 1, 2]);
        assert_eq!(taken(&mut moves, &[ANSWERS; 3]), [0]);
        assert!(taken(&mut moves, &[ANSWERS; 3]).is_empty(), "the first one is not back");
        readdress(&mut moves, 1, "b", "c", "has moved again");
        moves.end(0);
        assert_eq!(taken(&mut moves, &[ANSWERS; 3]), [2]);
        moves.end(2);
        assert_eq!(moves.take(3, &[ANSWERS; 3], TIMEOUT_MS), [(1, "1 has moved again".to_owned())]);
        moves.end(1);
        assert!(moves.is_idle() && moves.under_way.is_empty());
    }

    #[test]
    fn a_member_whose_address_changes_back_stays() {
        let mut moves = moves(&[0, 1]);
        readdress(&mut moves, 1, "b", "c", "has moved again");
        readdress(&mut moves, 1, "c", "a", "is back");
        assert_eq!(taken(&mut moves, &[ANSWERS; 3]), [0]);
        assert!(moves.is_idle());
        // Its connections are given up: a further change is one of the address that it comes back to.
        readdress(&mut moves, 0, "b", "a", "has moved back");
        moves.end(1);
        assert!(!moves.is_idle());
        moves.end(0);
        assert!(moves.is_idle());
    }

    #[test]
    fn a_replica_that_keeps_an_address_is_not_moved() {
        let (old, new) = ("tcp:10.0.0.1:10000", "tcp:10.0.0.2:10000");
        for (former, next, is_moved) in [
            (&[old][..], &[new][..], true),
            (&[old], &[new, old], false),
            // It is on this host.
            (&["unix:/r", old], &["unix:/r", new], false),
        ] {
            let addresses = |all: &[&str]| all.iter().map(ToString::to_string).collect::<Vec<_>>();
            let mut moves = Moves::default();
            moves.readdress(0, &addresses(former), &addresses(next), String::new());
            assert_eq!(!moves.is_idle(), is_moved, "{former:?} to {next:?}");
        }
    }

    #[test]
    fn a_member_that_is_silent_does_not_wait() {
        let mut moves = moves(&[0, 1, 2]);
        let peers = [ANSWERS, ANSWERS, SILENT];
        assert_eq!(taken(&mut moves, &peers), [2], "without another one, one of three would be left");
        assert!(taken(&mut moves, &peers).is_empty(), "the silent one is not back");
        assert!(moves.take(3, &[ANSWERS, SILENT, AWAY], TIMEOUT_MS).is_empty(), "one of three would be left");
        assert_eq!(moves.take(3, &[ANSWERS, LATE, AWAY], TIMEOUT_MS), [(1, "1 has moved".to_owned())]);
        moves.end(2);
        assert!(taken(&mut moves, &[ANSWERS; 3]).is_empty(), "1 is not back");
        moves.end(1);
        assert_eq!(taken(&mut moves, &[ANSWERS; 3]), [0]);
    }

    #[test]
    fn a_member_waits_while_others_are_away_for_other_reasons() {
        let mut moves = moves(&[0]);
        for peers in [[ANSWERS, ANSWERS, SILENT], [ANSWERS, SILENT, ANSWERS]] {
            assert!(taken(&mut moves, &peers).is_empty(), "one of three would be left");
        }
        // The third one has left the view, or is about to leave it.
        assert!(taken(&mut moves, &[ANSWERS, ANSWERS, AWAY]).is_empty(), "half of the view would be left");
        assert!(moves.take(3, &[ANSWERS, ANSWERS, AWAY], TIMEOUT_MS).is_empty());
        assert_eq!(taken(&mut moves, &[ANSWERS; 3]), [0]);
    }

    #[test]
    fn the_last_members_move_when_their_former_addresses_are_silent() {
        for count in [1, 2] {
            let mut moves = moves(&[0]);
            let mut peers = vec![ANSWERS; count];
            assert!(taken(&mut moves, &peers).is_empty(), "the view of {count} would have no majority");
            peers[0] = SILENT;
            assert!(taken(&mut moves, &peers).is_empty(), "a short silence stops no volume");
            peers[0] = LATE;
            assert_eq!(taken(&mut moves, &peers), [0]);
        }
    }

    #[test]
    fn a_replica_outside_the_view_holds_nothing_up() {
        let mut moves = moves(&[0, 1, 2]);
        let peers = [AWAY, ANSWERS, ANSWERS, ANSWERS];
        assert_eq!(taken(&mut moves, &peers), [0, 1]);
        // The replica that waits is given up.
        moves.end(2);
        assert!(moves.is_idle());
    }

    fn peering() -> impl Strategy<Value = Peering> {
        (any::<bool>(), 0..2 * SILENT_MS).prop_map(|(is_member, silent_ms)| Peering { is_member, silent_ms })
    }

    proptest! {
        /// The members that answer and were not given up stay a majority, and the moves come to an end.
        #[test]
        fn no_move_costs_the_majority(
            rounds in prop::collection::vec(prop::collection::vec(peering(), MAX_MEMBERS), 1..20),
            away in 0..MAX_MEMBERS,
        ) {
            let all: Vec<PeerIndex> = (0..).take(MAX_MEMBERS).collect();
            let mut moves = moves(&all);
            for mut peers in rounds {
                // A replica that was given up is not a member.
                moves.under_way.iter().for_each(|peer| peers[usize::from(*peer)] = AWAY);
                let view_members = away + peers.iter().filter(|peering| peering.is_member).count();
                let before = moves.under_way.clone();
                let taken: Vec<usize> =
                    moves.take(view_members, &peers, TIMEOUT_MS)
                        .iter().map(|(peer, _)| usize::from(*peer)).collect();
                let prompt = taken.iter().filter(|peer| peers[**peer].answers()).count();
                if prompt > 0 {
                    prop_assert!(before.is_empty() && prompt == 1, "{taken:?} beside {before:?}");
                    let stay = (0..MAX_MEMBERS)
                        .filter(|peer| peers[*peer].answers() && !taken.contains(peer));
                    prop_assert!(2 * stay.count() > view_members, "{taken:?} of {peers:?}");
                }
            }
            for _ in 0..=MAX_MEMBERS {
                moves.under_way.clone().into_iter().for_each(|peer| moves.end(peer));
                moves.take(MAX_MEMBERS, &[ANSWERS; MAX_MEMBERS], TIMEOUT_MS);
            }
            prop_assert!(moves.is_idle());
        }
    }
}
