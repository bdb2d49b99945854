use shorthorn_types::MarkRegions;

use crate::event::{Output, Outputs};
use crate::membership::{PeerIndex, PeerMask};

/// The purpose of a mark. At most one mark is outstanding for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MarkFor {
    /// Regions are cleared, or the stamps before that stored.
    Clearing,
    /// A replica is about to become a member.
    Rebuilding,
}

/// Changes of regions that some replicas have to make.
///
/// Each mark has a number of its own, so that an answer to an abandoned mark changes nothing. While a mark is
/// outstanding, at least one replica has not answered it.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    last_number: u32,
    clearing: Option<Outstanding>,
    rebuilding: Option<Outstanding>,
}

#[derive(Debug)]
struct Outstanding {
    number: u32,
    /// Replicas that have not answered: at least one.
    pending: PeerMask,
    sent_at_ms: u64,
}

impl Marks {
    fn of(&mut self, purpose: MarkFor) -> &mut Option<Outstanding> {
        match purpose {
            MarkFor::Clearing => &mut self.clearing,
            MarkFor::Rebuilding => &mut self.rebuilding,
        }
    }

    /// Returns true if some replica has not answered the last mark for `purpose`.
    pub fn is_outstanding(&self, purpose: MarkFor) -> bool {
        match purpose {
            MarkFor::Clearing => self.clearing.is_some(),
            MarkFor::Rebuilding => self.rebuilding.is_some(),
        }
    }

    /// Sends the mark to the replicas in `to`, of which there is at least one.
    pub fn send(
        &mut self,
        purpose: MarkFor,
        to: PeerMask,
        change: &MarkRegions,
        now_ms: u64,
        out: &mut Outputs,
    ) {
        self.last_number = self.last_number.wrapping_add(1);
        let number = self.last_number;
        let place = self.of(purpose);
        assert!(place.is_none() && !to.is_empty(), "mark {number} to {to:?}");
        *place = Some(Outstanding { number, pending: to, sent_at_ms: now_ms });
        out.extend(to.iter().map(|peer| Output::Mark { peer, mark: number, change: change.clone() }));
    }

    /// Records the answer of `peer`. Returns the purpose of the mark if the answer was the last one.
    pub fn answered(&mut self, peer: PeerIndex, number: u32) -> Option<MarkFor> {
        let purposes = [MarkFor::Clearing, MarkFor::Rebuilding];
        let is_meant = |mark: &Outstanding| mark.number == number;
        let purpose =
            purposes.into_iter().find(|purpose| self.of(*purpose).as_ref().is_some_and(is_meant))?;
        self.forget(purpose, peer).then_some(purpose)
    }

    /// Stops waiting for `peer`. Returns true if it was the last one.
    pub fn forget(&mut self, purpose: MarkFor, peer: PeerIndex) -> bool {
        let Some(mark) = self.of(purpose) else { return false };
        mark.pending = mark.pending.without(PeerMask::one(peer));
        let is_done = mark.pending.is_empty();
        if is_done {
            *self.of(purpose) = None;
        }
        is_done
    }

    /// Abandons the outstanding mark, if any.
    pub fn abandon(&mut self, purpose: MarkFor) {
        *self.of(purpose) = None;
    }

    /// Returns the replicas that have not answered each outstanding mark, and when it was sent.
    pub fn pending(&self) -> impl Iterator<Item = (PeerMask, u64)> {
        let marks = [&self.clearing, &self.rebuilding].into_iter().flatten();
        marks.map(|mark| (mark.pending, mark.sent_at_ms))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn send(marks: &mut Marks, purpose: MarkFor, to: PeerMask) -> u32 {
        let mut out = Outputs::new();
        marks.send(purpose, to, &MarkRegions::stamp(1), 7, &mut out);
        assert_eq!(out.len(), to.iter().count());
        let Some(Output::Mark { mark, .. }) = out.pop() else { panic!("no mark in {out:?}") };
        mark
    }

    #[test]
    fn the_last_answer_or_loss_ends_a_mark() {
        let (mut marks, both) = (Marks::default(), PeerMask::one(0).with(PeerMask::one(2)));
        let first = send(&mut marks, MarkFor::Clearing, both);
        let second = send(&mut marks, MarkFor::Rebuilding, PeerMask::one(1));
        assert_ne!(first, second);
        assert_eq!(marks.pending().collect::<Vec<_>>(), [(both, 7), (PeerMask::one(1), 7)]);
        assert_eq!(marks.answered(0, first), None);
        assert_eq!(marks.answered(0, first), None, "a second answer of one counts for no other");
        assert!(!marks.forget(MarkFor::Rebuilding, 2), "it was not asked for that");
        assert!(marks.forget(MarkFor::Clearing, 2) && !marks.is_outstanding(MarkFor::Clearing));
        assert_eq!(marks.answered(1, second), Some(MarkFor::Rebuilding));
    }

    #[test]
    fn answers_to_an_abandoned_mark_change_nothing() {
        let mut marks = Marks::default();
        let abandoned = send(&mut marks, MarkFor::Clearing, PeerMask::one(0));
        marks.abandon(MarkFor::Clearing);
        let next = send(&mut marks, MarkFor::Clearing, PeerMask::one(0));
        assert_eq!(marks.answered(0, abandoned), None);
        assert!(marks.is_outstanding(MarkFor::Clearing));
        assert_eq!(marks.answered(0, next), Some(MarkFor::Clearing));
    }
}
