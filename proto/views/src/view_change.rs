use shorthorn_types::{Members, ReplicaId, ReplicaReport, View};

use crate::quorum::{Quorum, quorum};

/// A view on its way to being the current one.
///
/// It is complete when all its members and a quorum of each view that it has to honour have stored it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ViewChange {
    /// The honoured report in the proposal: the views of which it needs a quorum each.
    pub honoured: ReplicaReport,
    /// The view to propose and commit.
    pub target: View,
    stored: Members,
    granted: bool,
}

/// The progress of a [`ViewChange`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeProgress {
    /// Some members of the new view have not stored it yet.
    Storing,
    /// All members have, but that is not a quorum of a view that it replaces, and the arbiter cannot help.
    NoQuorum,
    /// Exactly half of a view that it replaces: the arbiter has to grant it.
    NeedsGrant,
    /// The view has its quorums and is committed.
    Committed,
}

impl ViewChange {
    /// Proposes `target`, honouring the views in `honoured`.
    #[must_use]
    pub fn new(honoured: ReplicaReport, target: View) -> ViewChange {
        ViewChange { honoured, target, stored: Members::NONE, granted: false }
    }

    /// Records that `replica` has stored the proposal durably.
    pub fn stored(&mut self, replica: ReplicaId) {
        // More replicas than fit a set cannot be proposed to: an error here changes nothing.
        if let Ok(stored) = self.stored.with(replica) {
            self.stored = stored;
        }
    }

    /// Records the grant of the arbiter.
    pub fn granted(&mut self) {
        self.granted = true;
    }

    /// Returns the replicas that have stored the view, for the question to the arbiter.
    #[must_use]
    pub fn stored_by(&self) -> &Members {
        &self.stored
    }

    /// Returns true if the change needs the arbiter when only `reached` can store it. A start asks before it
    /// proposes anything.
    #[must_use]
    pub fn would_need_grant(&self, reached: &Members) -> bool {
        let honoured = self.honoured.views();
        honoured.map(|view| quorum(&view.members, reached)).min() == Some(Quorum::Half)
    }

    /// Compares the members that have stored the new view with the quorums of the views that it replaces.
    #[must_use]
    pub fn progress(&self) -> ChangeProgress {
        if !self.target.members.is_subset_of(&self.stored) || self.target.members.is_empty() {
            return ChangeProgress::Storing;
        }
        let honoured = self.honoured.views();
        match honoured.map(|view| quorum(&view.members, &self.stored)).min() {
            Some(Quorum::Less) | None => ChangeProgress::NoQuorum,
            Some(Quorum::Half) if !self.granted => ChangeProgress::NeedsGrant,
            Some(Quorum::Half | Quorum::More) => ChangeProgress::Committed,
        }
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_types::{Generation, ViewId};

    use super::*;

    fn id(n: u64) -> ReplicaId {
        ReplicaId::from_random(n)
    }

    fn view(number: u32, ids: &[u64]) -> View {
        View {
            id: ViewId { generation: Generation::new(1, 0), number },
            members: Members::new(ids.iter().copied().map(id)).unwrap(),
        }
    }

    fn change(old: &[u64], new: &[u64]) -> ViewChange {
        ViewChange::new(ReplicaReport { committed: view(1, old), proposed: vec![] }, view(2, new))
    }

    #[test]
    fn two_of_three_continue_by_themselves() {
        let mut change = change(&[1, 2, 3], &[1, 2]);
        assert_eq!(change.progress(), ChangeProgress::Storing);
        change.stored(id(1));
        assert_eq!(change.progress(), ChangeProgress::Storing);
        change.stored(id(2));
        assert_eq!(change.progress(), ChangeProgress::Committed);
    }

    #[test]
    fn one_of_two_needs_the_arbiter() {
        let mut change = change(&[1, 2], &[1]);
        change.stored(id(1));
        assert_eq!(change.progress(), ChangeProgress::NeedsGrant);
        change.granted();
        assert_eq!(change.progress(), ChangeProgress::Committed);
    }

    #[test]
    fn one_of_three_is_never_enough() {
        let mut change = change(&[1, 2, 3], &[1]);
        change.stored(id(1));
        change.granted();
        assert_eq!(change.progress(), ChangeProgress::NoQuorum);
    }

    #[test]
    fn others_that_stored_it_count_for_the_quorum() {
        let mut change = change(&[1, 2, 3], &[1]);
        change.stored(id(1));
        change.stored(id(3));
        assert_eq!(change.progress(), ChangeProgress::Committed);
    }

    #[test]
    fn every_honoured_view_needs_its_quorum() {
        let honoured = ReplicaReport { committed: view(1, &[1, 2, 3]), proposed: vec![view(2, &[2, 3])] };
        let mut change = ViewChange::new(honoured, view(3, &[2]));
        change.stored(id(2));
        change.stored(id(1));
        assert_eq!(change.progress(), ChangeProgress::NeedsGrant);
        change.stored(id(3));
        assert_eq!(change.progress(), ChangeProgress::Committed);
    }
}
