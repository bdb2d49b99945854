use shorthorn_types::{Members, ReplicaId, ReplicaReport, View};
use thiserror::Error;

use crate::quorum::{Quorum, quorum};
use crate::replica::newer;

/// What an engine has to honour that starts: a quorum of each of these views has to be reached, and has to
/// store its first view; its members are in all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Basis {
    /// The newest committed view and every proposed one newer than it.
    pub honoured: ReplicaReport,
    /// The replicas that surely hold every acknowledged write, reached or not.
    pub holders: Members,
    /// Those of them that were reached.
    pub members: Members,
    /// Whether the arbiter has to grant the first view.
    pub needs_grant: bool,
}

/// Why an engine cannot start yet, or not without the operator.
#[derive(Debug, Error, PartialEq, Eq, Clone)]
pub enum CannotStart {
    /// No replica answers.
    #[error("no replica was reached")]
    Nobody,
    /// Too few replicas of a view that may hold acknowledged writes.
    #[error("{} of {} replicas of view {view} were reached: more than half are needed; missing: {missing}",
        view.members.len() - missing.len(), view.members.len())]
    NoQuorum {
        /// The view.
        view: View,
        /// Its replicas that were not reached.
        missing: Members,
    },
    /// Every replica that surely holds all acknowledged writes is missing.
    #[error("none of the replicas that hold every acknowledged write was reached; needed: one of {0}")]
    NoMember(Members),
}

/// What an engine has to honour that has fenced the replicas in `reports`; `granted` is the last view that
/// the arbiter has granted: it counts as a proposed one.
///
/// # Errors
/// [`CannotStart`] says who is missing.
#[allow(clippy::result_large_err)] // made once per start, and it carries the view that is missing
pub fn basis(reports: &[(ReplicaId, ReplicaReport)], granted: Option<View>) -> Result<Basis, CannotStart> {
    let committed = reports.iter().map(|(_, report)| report.committed).reduce(newer);
    let committed = committed.ok_or(CannotStart::Nobody)?;
    let mut proposed: Vec<View> = reports.iter().flat_map(|(_, report)| report.proposed.clone()).collect();
    proposed.extend(granted);
    proposed.retain(|view| view.id > committed.id);
    proposed.sort_unstable_by_key(|view| view.id);
    proposed.dedup();

    let all = proposed.iter().fold(committed.members, |all, view| all.intersection(&view.members));
    let is_reached = |id| reports.iter().any(|(reached, _)| *reached == id);
    let mut needs_grant = false;
    for view in std::iter::once(&committed).chain(&proposed) {
        let reached = view.members.filter(is_reached);
        match quorum(&view.members, &reached) {
            Quorum::More => {}
            Quorum::Half => needs_grant = true,
            Quorum::Less => {
                let missing = view.members.filter(|id| !is_reached(id));
                return Err(CannotStart::NoQuorum { view: *view, missing });
            }
        }
    }
    let members = all.filter(is_reached);
    if members.is_empty() {
        return Err(CannotStart::NoMember(all));
    }
    Ok(Basis { honoured: ReplicaReport { committed, proposed }, holders: all, members, needs_grant })
}

#[cfg(test)]
mod tests {
    use shorthorn_types::{Generation, ViewId};

    use super::*;

    fn id(n: u64) -> ReplicaId {
        ReplicaId::from_random(n)
    }

    fn view(attach: u64, ids: &[u64]) -> View {
        View {
            id: ViewId { generation: Generation::new(attach, 0), number: 1 },
            members: Members::new(ids.iter().copied().map(id)).unwrap(),
        }
    }

    fn report(n: u64, committed: View, proposed: &[View]) -> (ReplicaId, ReplicaReport) {
        (id(n), ReplicaReport { committed, proposed: proposed.to_vec() })
    }

    #[test]
    fn the_newest_committed_view_decides() {
        let (old, new) = (view(1, &[1, 2, 3]), view(2, &[1, 2]));
        let found = basis(&[report(1, new, &[]), report(2, new, &[]), report(3, old, &[])], None).unwrap();
        assert_eq!(found.members, new.members);
        assert!(!found.needs_grant);
        let alone = basis(&[report(3, old, &[])], None);
        assert!(matches!(alone, Err(CannotStart::NoQuorum { .. })), "{alone:?}");
    }

    #[test]
    fn every_proposed_view_needs_a_quorum_and_limits_the_members() {
        let (old, new) = (view(1, &[1, 2, 3]), view(2, &[1, 2]));
        let found = basis(&[report(1, old, &[new]), report(2, old, &[]), report(3, old, &[])], None).unwrap();
        assert_eq!(found.members, new.members);
        let found = basis(&[report(1, old, &[new]), report(3, old, &[])], None).unwrap();
        assert!(found.needs_grant, "half of the proposed view");
        assert_eq!(found.members, Members::new([id(1)]).unwrap());
        assert_eq!(found.holders, new.members, "2 holds everything too, if only it were there");
        let other = view(3, &[2, 3]);
        let torn = basis(&[report(1, old, &[new]), report(3, old, &[other])], None).unwrap_err();
        assert_eq!(torn, CannotStart::NoMember(Members::new([id(2)]).unwrap()));
    }

    #[test]
    fn a_grant_counts_as_proposed() {
        let (old, granted) = (view(1, &[1, 2]), view(2, &[2]));
        let found = basis(&[report(1, old, &[])], Some(granted)).unwrap_err();
        assert!(matches!(found, CannotStart::NoQuorum { .. }), "{found}");
        assert!(basis(&[report(1, old, &[])], None).unwrap().needs_grant);
    }

    #[test]
    fn nobody_is_not_enough() {
        assert_eq!(basis(&[], None), Err(CannotStart::Nobody));
    }
}
