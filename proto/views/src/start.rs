use shorthorn_types::{Generation, Members, ReplicaId, ReplicaReport, View};
use thiserror::Error;

use crate::quorum::{Quorum, quorum};
use crate::replica::{newer, stands_for};

/// A replica with the statements about its views.
type Reported = (ReplicaId, ReplicaReport);

/// The basis of a starting engine. A quorum of each of its views has to be reached, and has to store the
/// first view. The members are in all of these views.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Basis {
    /// The newest committed view and every proposed one newer than it.
    pub honoured: ReplicaReport,
    /// The replicas that surely hold every acknowledged write, reached or not.
    pub holders: Members,
    /// The `holders` that were reached.
    pub members: Members,
    /// True if the arbiter has to grant the first view.
    pub needs_grant: bool,
}

/// The reason why an engine cannot start yet, or not without the operator.
#[derive(Debug, Error, PartialEq, Eq, Clone)]
pub enum CannotStart {
    /// No replica answers.
    #[error("no replica was reached")]
    NoReplica,
    /// Too few replicas of a view that may hold acknowledged writes.
    #[error("{} of {} replicas of view {view} were reached: more than half are needed; missing: {missing}",
        view.members.len() - missing.len(), view.members.len())]
    NoQuorum {
        /// The view that lacks a quorum.
        view: View,
        /// The members that were not reached.
        missing: Members,
    },
    /// The replica that the operator has chosen as the volume is missing, or has not got that decision.
    #[error("replica {0} is salvaged as the volume: the decision has to reach it first")]
    NotSalvaged(Members),
    /// Every replica that surely holds all acknowledged writes is missing.
    #[error("none of the replicas that hold every acknowledged write was reached; needed: one of {0}")]
    NoMember(Members),
}

/// Returns the basis for an engine that has fenced the replicas in `reports`. `granted` is the last view that
/// the arbiter has granted, as far as the engine knows. It counts as a proposed one.
///
/// Proposed views that are dead (`may_be_committed`) are left out: they would stand in the way of others for
/// ever.
///
/// # Errors
/// [`CannotStart`] names the missing replicas. An engine whose record of the grants may be old asks the
/// arbiter for the newest before it gives up.
#[allow(clippy::result_large_err)] // made once per start, and it carries the view that is missing
pub fn basis(reports: &[Reported], granted: Option<View>) -> Result<Basis, CannotStart> {
    let is_reached = |id| reports.iter().any(|(reached, _)| *reached == id);
    Start { reports, granted, stores: &is_reached, is_doubted: &|_| false }.basis()
}

/// Returns the same as [`basis`], without `offenders`: replicas that are fenced and have reported, but fail
/// later requests. They are not members and do not count for a quorum: the quorums consist of the replicas in
/// `stored`.
///
/// The report of an offender still adds views that have to be honoured. But it rules no view out: for that
/// the offender counts as one that was not reached. So more views have to be honoured than with the
/// offenders, never fewer.
///
/// # Errors
/// The errors of [`basis`], with the offenders among the missing replicas.
#[allow(clippy::result_large_err)]
pub fn basis_without(
    reports: &[Reported],
    granted: Option<View>,
    offenders: &Members,
    stored: &Members,
) -> Result<Basis, CannotStart> {
    let stores = |id| stored.contains(id) && !offenders.contains(id);
    Start { reports, granted, stores: &stores, is_doubted: &|id| offenders.contains(id) }.basis()
}

/// The inputs of a start.
struct Start<'a> {
    reports: &'a [Reported],
    granted: Option<View>,
    /// True if a replica is to store the first view.
    stores: &'a dyn Fn(ReplicaId) -> bool,
    /// True if it may have stored more than it has reported.
    is_doubted: &'a dyn Fn(ReplicaId) -> bool,
}

impl Start<'_> {
    #[allow(clippy::result_large_err)]
    fn basis(&self) -> Result<Basis, CannotStart> {
        let Start { reports, granted, .. } = *self;
        let committed = reports.iter().map(|(_, report)| report.committed).reduce(newer);
        let committed = committed.ok_or(CannotStart::NoReplica)?;
        // The operator has decided which replica is the volume: that ends all earlier views.
        let salvaged = granted.filter(View::is_first);
        if let Some(view) = salvaged.filter(|salvaged| committed.id < salvaged.id) {
            // The chosen replica has not got the decision: it still knows its former views.
            return Err(CannotStart::NotSalvaged(view.members));
        }
        let mut proposed: Vec<View> =
            reports.iter().flat_map(|(_, report)| report.proposed.clone()).collect();
        proposed.extend(granted);
        proposed.retain(|view| view.id > committed.id);
        proposed.sort_unstable_by_key(|view| view.id);
        proposed.dedup();
        // From the oldest on: no view can follow from a dead one.
        let mut alive = vec![committed];
        for view in &proposed {
            if self.may_be_committed(view, &alive) {
                alive.push(*view);
            }
        }
        let found = self.honour(committed, alive[1..].to_vec())?;
        // The arbiter does not know that its grant is dead: an engine that needs another one has to honour
        // it.
        let is_asked_for = |view: &View| found.needs_grant && granted == Some(*view);
        let more: Vec<View> =
            proposed.into_iter().filter(|view| alive.contains(view) || is_asked_for(view)).collect();
        if more == found.honoured.proposed { Ok(found) } else { self.honour(committed, more) }
    }

    /// Returns the possible members if all of these views have to be honoured, or an error if they are too
    /// few.
    #[allow(clippy::result_large_err)]
    fn honour(&self, committed: View, proposed: Vec<View>) -> Result<Basis, CannotStart> {
        let mut needs_grant = false;
        for view in std::iter::once(&committed).chain(&proposed) {
            let reached = view.members.filter(self.stores);
            match quorum(&view.members, &reached) {
                Quorum::More => {}
                Quorum::Half => needs_grant = true,
                Quorum::Less => {
                    let missing = view.members.filter(|id| !(self.stores)(id));
                    return Err(CannotStart::NoQuorum { view: *view, missing });
                }
            }
        }
        let holders = proposed.iter().fold(committed.members, |all, view| all.intersection(&view.members));
        let members = holders.filter(self.stores);
        if members.is_empty() {
            return Err(CannotStart::NoMember(holders));
        }
        Ok(Basis { honoured: ReplicaReport { committed, proposed }, holders, members, needs_grant })
    }

    /// Returns true if the proposed `view` may be committed, now or later; `older` are the views that it can
    /// follow from.
    ///
    /// If the view is committed, all its members have stored it, and so has a quorum of the newest committed
    /// view before it. That one is among `older`: a replica that stores a proposal stores the views that it
    /// honours. So the view is dead
    ///
    /// - if a member has not stored it, or less than half of each older view has. A reached replica that has
    ///   not stored it never will, because it is fenced; an unreached one may have.
    /// - if the arbiter has overruled it, and a later view excludes it: see [`Start::is_excluded`]. If none
    ///   excludes it, the view stays, even if the arbiter grants it no more. It may have been committed, and
    ///   be all that connects the committed view with the grant.
    fn may_be_committed(&self, view: &View, older: &[View]) -> bool {
        let may_have_stored = |id: ReplicaId| {
            let mut known =
                self.reports.iter().filter(|(reached, _)| *reached == id && !(self.is_doubted)(id));
            known.next().is_none_or(|(_, report)| {
                // One with the same members may have taken its place.
                let has = |stored: &View| stored == view || stands_for(stored, view);
                report.committed.id >= view.id || report.proposed.iter().any(has)
            })
        };
        let mut stored =
            older.iter().map(|older| quorum(&older.members, &older.members.filter(may_have_stored)));
        !self.is_excluded(view)
            && view.members.iter().all(may_have_stored)
            && stored.any(|stored| stored >= Quorum::Half)
    }

    /// Returns true if the arbiter has overruled `view`, and a reached member of the grant excludes it. That
    /// member has stored a newer view with the members of the grant.
    ///
    /// A grant overrules older views that lack one of its members. The engine of the newer view honoured the
    /// newest view that was ever committed before it. Assume that `view` was committed. Then a member of the
    /// newer view from outside of `view` was admitted later. The engine that did so had `view` or a newer one
    /// as its committed view, and every member since has stored that. So the reached one reports a committed
    /// view that is at least as new, and `view` was left out before.
    ///
    /// This also holds if a replica that has not stored `view` is away now, or has an older state of its
    /// disk.
    fn is_excluded(&self, view: &View) -> bool {
        self.granted.is_some_and(|granted| {
            let overrules = view.id < granted.id && !granted.members.is_subset_of(&view.members);
            let excludes = |stored: &View| stored.members == granted.members && stored.id > view.id;
            overrules
                && self.reports.iter().any(|(replica, report)| {
                    granted.members.contains(*replica)
                        && !(self.is_doubted)(*replica)
                        && report.proposed.iter().any(excludes)
                })
        })
    }
}

/// Returns true if the replica lacks a view that it must have stored: all members of a view have before it is
/// committed. One with the same members may have taken its place.
#[must_use]
pub fn forgets(replica: ReplicaId, report: &ReplicaReport, newest_committed: View) -> bool {
    newest_committed.members.contains(replica)
        && report.committed.id < newest_committed.id
        && !report
            .proposed
            .iter()
            .any(|view| view.id == newest_committed.id || stands_for(view, &newest_committed))
}

/// Returns true if no engine has ever had the replica store a view.
#[must_use]
pub fn knows_no_engine(report: &ReplicaReport) -> bool {
    report.committed.id.generation == Generation::NEVER && report.proposed.is_empty()
}

#[cfg(test)]
mod tests {
    use shorthorn_types::ViewId;

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
        let found =
            basis(&[report(1, old, &[new]), report(2, old, &[new]), report(3, old, &[])], None).unwrap();
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
    fn a_view_that_the_arbiter_has_overruled_is_dead() {
        let (old, mine, granted) = (view(1, &[1, 2]), view(2, &[1]), view(3, &[2]));
        let reports = [report(1, old, &[mine]), report(2, old, &[granted])];
        assert_eq!(
            basis(&reports, None),
            Err(CannotStart::NoMember(Members::NONE)),
            "either may be committed"
        );
        let found = basis(&reports, Some(granted)).unwrap();
        assert_eq!((found.members, found.honoured.proposed), (granted.members, vec![granted]));
        let unseen = basis(&reports[..1], Some(granted)).unwrap_err();
        assert!(matches!(unseen, CannotStart::NoQuorum { .. }), "2 may have stored it: {unseen}");
    }

    /// The engine of the grant has seen that 3 had not stored the view. Now 3 is away, or its disk was
    /// restored to an older state.
    #[test]
    fn an_overruled_view_is_dead_if_a_member_of_the_grant_has_stored_that() {
        let (old, mine, granted) = (view(1, &[1, 2, 3]), view(2, &[2, 3]), view(3, &[1]));
        let reports = [report(1, old, &[granted]), report(2, old, &[mine])];
        let torn = Err(CannotStart::NoMember(Members::NONE));
        assert_eq!(basis(&reports, None), torn);
        let found = basis(&reports, Some(granted)).unwrap();
        assert_eq!((found.members, found.honoured.proposed), (granted.members, vec![granted]));
        assert!(!found.needs_grant);
        // It was asked for again after an attempt that has failed.
        let again = view(4, &[1]);
        let found = basis(&reports, Some(again)).unwrap();
        assert_eq!((found.members, found.honoured.proposed), (granted.members, vec![granted]));
        assert!(without(&reports, Some(granted), &[1]).is_err(), "an offender excludes nothing");
    }

    /// 2 and then 4 have continued alone. The view that led to that is known only from a replica that had to
    /// leave, and does not know that it was committed.
    #[test]
    fn an_overruled_view_that_leads_to_the_grant_is_honoured() {
        let (old, first, granted) = (view(1, &[1, 2, 3]), view(2, &[1, 2]), view(5, &[4]));
        let reports = [report(1, old, &[first]), report(3, old, &[])];
        let unseen = basis(&reports, Some(granted)).unwrap_err();
        assert!(matches!(unseen, CannotStart::NoQuorum { view, .. } if view == granted), "{unseen}");
        // The same if half had stored it, with a grant.
        let old = view(1, &[0, 1, 2, 3]);
        let first = view(2, &[0, 2]);
        let reports = [report(0, old, &[first]), report(1, old, &[]), report(3, old, &[])];
        let unseen = basis(&reports, Some(granted)).unwrap_err();
        assert!(matches!(unseen, CannotStart::NoQuorum { view, .. } if view == granted), "{unseen}");
    }

    #[test]
    fn a_view_that_a_member_has_not_stored_is_dead() {
        let (old, new) = (view(1, &[1, 2, 3]), view(2, &[1, 2]));
        let reports = [report(1, old, &[new]), report(2, old, &[]), report(3, old, &[new])];
        assert_eq!(basis(&reports, None).unwrap().members, old.members);
        let unseen = basis(&[report(1, old, &[new]), report(3, old, &[])], None).unwrap();
        assert_eq!(unseen.honoured.proposed, [new], "2 may have stored it");
    }

    #[test]
    fn a_view_that_less_than_half_have_stored_is_dead() {
        let (old, first, second) = (view(1, &[1, 2, 3]), view(2, &[1]), view(3, &[3]));
        let reports = [report(1, old, &[first]), report(2, old, &[]), report(3, old, &[second])];
        assert_eq!(basis(&reports, None).unwrap().members, old.members);
        // Half of a view that is dead itself does not help.
        let (two, one) = (view(2, &[1, 2]), view(3, &[1]));
        let reports = [report(1, old, &[two, one]), report(2, old, &[]), report(3, old, &[])];
        assert_eq!(basis(&reports, Some(one)).unwrap().members, old.members);
    }

    #[test]
    fn a_dead_grant_is_honoured_if_the_start_needs_another() {
        let (old, granted) = (view(1, &[1, 2]), view(2, &[1]));
        let found = basis(&[report(1, old, &[])], Some(granted)).unwrap();
        assert_eq!((found.needs_grant, found.honoured.proposed), (true, vec![granted]));
        let both = [report(1, old, &[]), report(2, old, &[])];
        assert_eq!(basis(&both, Some(granted)).unwrap().honoured.proposed, []);
    }

    #[test]
    fn a_salvage_ends_all_earlier_views() {
        let mut salvaged = view(3, &[2]);
        salvaged.id.number = 0;
        let other = report(1, view(2, &[1]), &[]);
        let alone = basis(std::slice::from_ref(&other), Some(salvaged));
        assert_eq!(alone, Err(CannotStart::NotSalvaged(salvaged.members)));
        let unaware = basis(&[report(2, view(1, &[1, 2]), &[])], Some(salvaged));
        assert_eq!(unaware, Err(CannotStart::NotSalvaged(salvaged.members)), "it has not got the decision");
        let found = basis(&[other, report(2, salvaged, &[])], Some(salvaged)).unwrap();
        assert_eq!(found.members, salvaged.members);
    }

    /// Starts without some of the reached replicas.
    #[allow(clippy::result_large_err)]
    fn without(reports: &[Reported], granted: Option<View>, offenders: &[u64]) -> Result<Basis, CannotStart> {
        let stored = Members::new(reports.iter().map(|(replica, _)| *replica)).unwrap();
        let offenders = Members::new(offenders.iter().copied().map(id)).unwrap();
        basis_without(reports, granted, &offenders, &stored)
    }

    #[test]
    fn an_offender_is_not_a_member_and_does_not_store_views() {
        let now = view(1, &[1, 2, 3]);
        let all = [report(1, now, &[]), report(2, now, &[]), report(3, now, &[])];
        let found = without(&all, None, &[3]).unwrap();
        assert_eq!((found.members, found.needs_grant), (view(1, &[1, 2]).members, false));
        assert_eq!(found.holders, now.members);
        assert!(matches!(without(&all, None, &[2, 3]), Err(CannotStart::NoQuorum { .. })));
        assert!(matches!(without(&all[1..], None, &[3]), Err(CannotStart::NoQuorum { .. })));
        let two = view(1, &[1, 2]);
        assert!(without(&[report(1, two, &[]), report(2, two, &[])], None, &[2]).unwrap().needs_grant);
    }

    #[test]
    fn the_report_of_an_offender_is_honoured_but_does_not_exclude_views() {
        let (old, new) = (view(1, &[1, 2, 3]), view(2, &[2, 3]));
        let newer = [report(1, old, &[]), report(2, old, &[new]), report(3, new, &[])];
        let found = without(&newer, None, &[3]).unwrap();
        assert_eq!((found.honoured.committed, found.members), (new, Members::new([id(2)]).unwrap()));
        assert!(found.needs_grant, "half of the view that only the offender knows to be committed");
        let fewer = [report(1, old, &[]), report(2, old, &[new]), report(3, old, &[])];
        assert_eq!(basis(&fewer, None).unwrap().honoured.proposed, [], "3 has not stored it");
        let found = without(&fewer, None, &[3]).unwrap();
        assert_eq!(found.honoured.proposed, [new], "3 is not believed that it has not stored it");
        assert!(found.needs_grant);
    }

    #[test]
    fn a_start_that_needs_a_grant_only_without_an_offender_honours_a_dead_one() {
        let (old, granted) = (view(1, &[1, 2]), view(2, &[1]));
        let both = [report(1, old, &[]), report(2, old, &[])];
        let found = without(&both, Some(granted), &[2]).unwrap();
        assert_eq!((found.needs_grant, found.honoured.proposed), (true, vec![granted]));
        assert!(without(&both, Some(granted), &[1]).is_err(), "the grant leaves 2 out");
    }

    #[test]
    fn no_replica_is_not_enough() {
        assert_eq!(basis(&[], None), Err(CannotStart::NoReplica));
    }
}
