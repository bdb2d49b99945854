//! Moves members to their new addresses, one after the other.
//!
//! The connections of a member whose address has changed are given up, and it comes back over the new address
//! within a second. If several members change their addresses together, the volume would lose its majority
//! for that time. So the next one is moved when the one before is a member again. A member that does not
//! answer at its former address any more is moved at once: it is lost already.

use shorthorn_core::PeerIndex;

/// A member that is silent for so long does not answer at its former address. Longer than the interval of
/// PINGs by far more than the way to it and back takes.
pub(super) const SILENT_MS: u64 = 1500;

/// The members whose addresses have changed. Each replica is in it at most once.
#[derive(Debug, Default)]
pub(super) struct Moves {
    /// In the order of their changes, each with the reason.
    waiting: Vec<(PeerIndex, String)>,
    /// The members that were moved and are not back.
    under_way: Vec<PeerIndex>,
}

/// The standing of a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Peering {
    /// True if the replica is in the view.
    pub is_member: bool,
    /// The time since its last answer.
    pub silent_ms: u64,
}

impl Moves {
    /// Adds a replica whose address has changed, also if it changes again.
    pub(super) fn add(&mut self, peer: PeerIndex, reason: String) {
        self.waiting.retain(|(other, _)| *other != peer);
        self.waiting.push((peer, reason));
    }

    /// Notes that the replica is a member again, or was given up.
    pub(super) fn end(&mut self, peer: PeerIndex) {
        self.waiting.retain(|(other, _)| *other != peer);
        self.under_way.retain(|other| *other != peer);
    }

    /// Returns true if nothing waits.
    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Takes the replicas whose connections are to be given up now.
    pub(super) fn take(&mut self, peering: impl Fn(PeerIndex) -> Peering) -> Vec<(PeerIndex, String)> {
        let Moves { waiting, under_way } = self;
        waiting
            .extract_if(.., |(peer, _)| {
                let Peering { is_member, silent_ms } = peering(*peer);
                let goes = !is_member || silent_ms >= SILENT_MS || under_way.is_empty();
                if goes && is_member {
                    under_way.push(*peer);
                }
                goes
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWERS: Peering = Peering { is_member: true, silent_ms: 10 };

    fn moves(peers: &[PeerIndex]) -> Moves {
        let mut moves = Moves::default();
        peers.iter().for_each(|peer| moves.add(*peer, format!("{peer} has moved")));
        moves
    }

    fn taken(moves: &mut Moves, peering: impl Fn(PeerIndex) -> Peering) -> Vec<PeerIndex> {
        moves.take(peering).into_iter().map(|(peer, _)| peer).collect()
    }

    #[test]
    fn members_that_answer_move_one_after_the_other() {
        let mut moves = moves(&[1, 2, 3]);
        assert_eq!(taken(&mut moves, |_| ANSWERS), [1]);
        assert!(taken(&mut moves, |_| ANSWERS).is_empty(), "the first one is not back");
        moves.add(2, "2 has moved again".to_owned());
        moves.end(1);
        assert_eq!(taken(&mut moves, |_| ANSWERS), [3]);
        moves.end(3);
        assert_eq!(moves.take(|_| ANSWERS), [(2, "2 has moved again".to_owned())]);
        moves.end(2);
        assert!(moves.is_idle() && moves.under_way.is_empty());
    }

    #[test]
    fn a_member_that_is_silent_does_not_wait() {
        let mut moves = moves(&[1, 2, 3]);
        let silent = |peer| Peering { silent_ms: if peer == 3 { SILENT_MS } else { 0 }, ..ANSWERS };
        assert_eq!(taken(&mut moves, silent), [1, 3]);
        assert!(taken(&mut moves, silent).is_empty());
        moves.end(1);
        assert!(taken(&mut moves, silent).is_empty(), "the silent one is not back either");
        moves.end(3);
        assert_eq!(taken(&mut moves, silent), [2]);
    }

    #[test]
    fn a_replica_outside_the_view_holds_nothing_up() {
        let mut moves = moves(&[1, 2, 3]);
        let first_is_away = |peer| Peering { is_member: peer != 1, silent_ms: 0 };
        assert_eq!(taken(&mut moves, first_is_away), [1, 2]);
        // The replica that waits is given up.
        moves.end(3);
        assert!(moves.is_idle());
    }
}
