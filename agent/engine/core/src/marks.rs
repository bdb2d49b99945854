use shorthorn_types::MarkRegions;

use crate::event::{Output, Outputs};
use crate::membership::{PeerIndex, PeerMask};

/// A change of regions that some replicas have to make. At most one of each kind is outstanding.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    outstanding: Option<Outstanding>,
}

#[derive(Debug)]
struct Outstanding {
    number: u32,
    pending: PeerMask,
    sent_at_ms: u64,
}

impl Marks {
    pub fn is_outstanding(&self) -> bool {
        self.outstanding.is_some()
    }

    /// Sends the mark to the replicas in `to`, of which there is at least one.
    pub fn send(&mut self, number: u32, to: PeerMask, change: &MarkRegions, now_ms: u64, out: &mut Outputs) {
        assert!(self.outstanding.is_none() && !to.is_empty(), "mark {number} to {to:?}");
        self.outstanding = Some(Outstanding { number, pending: to, sent_at_ms: now_ms });
        out.extend(to.iter().map(|peer| Output::Mark { peer, mark: number, change: change.clone() }));
    }

    /// Records the answer of `peer`. Returns true if it was the last.
    pub fn answered(&mut self, peer: PeerIndex, number: u32) -> bool {
        match &self.outstanding {
            Some(mark) if mark.number == number => self.forget(peer),
            _ => false, // of a mark that nobody waits for any more
        }
    }

    /// Stops waiting for `peer`. Returns true if it was the last one.
    pub fn forget(&mut self, peer: PeerIndex) -> bool {
        let Some(mark) = &mut self.outstanding else { return false };
        mark.pending = mark.pending.without(PeerMask::one(peer));
        let is_done = mark.pending.is_empty();
        if is_done {
            self.outstanding = None;
        }
        is_done
    }

    /// Abandons the outstanding mark, if any.
    pub fn abandon(&mut self) {
        self.outstanding = None;
    }

    /// Returns the replicas that have not answered the mark, and when it was sent.
    pub fn pending(&self) -> Option<(PeerMask, u64)> {
        self.outstanding.as_ref().map(|mark| (mark.pending, mark.sent_at_ms))
    }
}
