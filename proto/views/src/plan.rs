//! Members of the first view, planned from the reports of the fenced replicas.

use shorthorn_types::{Generation, Members, ReplicaId, ReplicaReport, View, is_current};

use crate::replica::stands_for;
use crate::start::{Basis, CannotStart, basis, basis_without, forgets, knows_no_engine};

/// The statements of one fenced replica about itself.
#[derive(Clone, Debug)]
pub struct FencedReplica {
    /// The identity that it stated.
    pub replica: ReplicaId,
    /// The views that it has stored.
    pub report: ReplicaReport,
    /// True if the replica lacks data, whatever its views say.
    pub rebuilding: bool,
    /// True if the host was restarted, or the disk has failed, while data was not durable. It may be true
    /// although nothing is lost: regions count as not durable for some seconds after they were flushed. After
    /// a loss that was made up for, they count so until they are cleared again.
    pub lost_cache: bool,
    /// The newest stamp that it has kept, if it knows.
    pub stamp: Option<u32>,
}

const FORGOTTEN: &str = "the replica does not know its former views: its directory was replaced. It has to \
 be rebuilt";
const ROLLED_BACK: &str = "the replica lacks later writes: its disk was restored to an older state. It has \
 to be rebuilt";
const BROKEN: &str = "the replica lacks data although it is in the view: its rebuild did not finish. It has \
    to be rebuilt again";

/// The result of a decision about which replicas a volume can start with.
#[derive(Clone, Debug)]
pub struct StartPlan {
    /// The views to honour.
    pub basis: Basis,
    /// Members of the first view.
    pub members: Members,
    /// Replicas that are members by the views but not of this plan, with the reason.
    pub unfit: Vec<(ReplicaId, String)>,
    /// Replicas that do not know the views that they were in, or whose disk was restored to an older state. A
    /// replica that knows none at all is blank too if others know some. Blank replicas do not count, and get
    /// no proposals. They would learn the views by that, and pass for replicas that hold everything but the
    /// regions counted since they left.
    pub blank: Members,
    /// True if every member may have lost data, so that acknowledged but unflushed writes may be lost. A user
    /// who has used the volume since before has to learn of it.
    pub lost_writes: bool,
}

impl StartPlan {
    /// Returns the same start without `offenders`: replicas that are fenced and have reported, but fail later
    /// requests. `fenced_replicas` and `granted` are those of the plan. None if the start needs an offender:
    /// as a member, because no other replica has kept everything, or to store the view.
    ///
    /// Only the members and the replicas that store the view become fewer, and the views to honour may become
    /// more ([`basis_without`]). The unfit and blank replicas, the possible losses, and whether writes are
    /// lost still follow from the reports of all, the offenders included.
    #[must_use]
    pub fn without(
        self,
        offenders: &Members,
        fenced_replicas: &[FencedReplica],
        granted: Option<View>,
    ) -> Option<StartPlan> {
        let StartPlan { members, unfit, blank, lost_writes, .. } = self;
        let counts = |fenced: &&FencedReplica| !blank.contains(fenced.replica);
        let reports: Vec<_> = fenced_replicas
            .iter()
            .filter(counts)
            .map(|fenced| (fenced.replica, fenced.report.clone()))
            .collect();
        let stored = Members::new(reports.iter().map(|(replica, _)| *replica)).ok()?;
        let basis = basis_without(&reports, granted, offenders, &stored).ok()?;
        let members = members.intersection(&basis.members);
        (!members.is_empty()).then_some(StartPlan { basis, members, unfit, blank, lost_writes })
    }
}

/// The reasons why a start is not possible now.
#[derive(Debug)]
pub struct NoPlan {
    /// The reason, with the missing replicas.
    pub cannot: CannotStart,
    /// The replicas that cannot be members, like [`StartPlan::unfit`].
    pub unfit: Vec<(ReplicaId, String)>,
}

/// Decides how to start after `fenced_replicas` were fenced; `granted` is the last view that the arbiter has
/// granted.
///
/// # Errors
/// [`NoPlan`] says which replicas are missing or unfit.
#[allow(clippy::result_large_err)] // made once per start
pub fn plan(fenced_replicas: &[FencedReplica], granted: Option<View>) -> Result<StartPlan, NoPlan> {
    let newest = fenced_replicas.iter().map(|fenced| fenced.report.committed).max_by_key(|view| view.id);
    let has_forgotten = |fenced: &&FencedReplica| {
        newest.is_some_and(|newest| forgets(fenced.replica, &fenced.report, newest))
    };
    let mut unfit: Vec<(ReplicaId, String)> = Vec::new();
    let forgotten = fenced_replicas.iter().filter(has_forgotten);
    unfit.extend(forgotten.map(|fenced| (fenced.replica, FORGOTTEN.to_owned())));
    let mut reports: Vec<_> = fenced_replicas
        .iter()
        .filter(|fenced| !has_forgotten(fenced))
        .map(|fenced| (fenced.replica, fenced.report.clone()))
        .collect();
    let mut found = basis(&reports, granted);
    let rolled_back = found.as_ref().map_or(Members::NONE, |basis| rolled_back(fenced_replicas, basis));
    if !rolled_back.is_empty() {
        unfit.extend(rolled_back.iter().map(|id| (id, ROLLED_BACK.to_owned())));
        reports.retain(|(id, _)| !rolled_back.contains(*id));
        found = basis(&reports, granted);
    }
    let basis = match found {
        Ok(basis) => basis,
        Err(cannot) => return Err(NoPlan { cannot, unfit }),
    };
    let is_whole =
        |id: ReplicaId| fenced_replicas.iter().any(|fenced| fenced.replica == id && !fenced.rebuilding);
    let members = basis.members.filter(is_whole);
    let broken = basis.members.filter(|id| !is_whole(id));
    unfit.extend(broken.iter().map(|id| (id, BROKEN.to_owned())));
    // A replica that may have lost unflushed writes is considered after the others. While one of those is
    // left, it is rebuilt later.
    let has_lost = |id| fenced_replicas.iter().any(|fenced| fenced.replica == id && fenced.lost_cache);
    let intact = members.filter(|id| !has_lost(id));
    let lost_writes = intact.is_empty();
    let members = if lost_writes { members } else { intact };
    if members.is_empty() {
        return Err(NoPlan {
            cannot: CannotStart::NoMember(basis.holders.filter(|id| !broken.contains(id))),
            unfit,
        });
    }
    let is_blank = |fenced: &&FencedReplica| {
        let others_know = newest.is_some_and(|newest| newest.id.generation != Generation::NEVER);
        has_forgotten(fenced)
            || rolled_back.contains(fenced.replica)
            || (others_know && knows_no_engine(&fenced.report))
    };
    let blank = Members::new(fenced_replicas.iter().filter(is_blank).map(|fenced| fenced.replica));
    // A set can hold all replicas.
    Ok(StartPlan { basis, members, unfit, blank: blank.unwrap_or_default(), lost_writes })
}

/// Returns the replicas that hold every acknowledged write by their views, but lack stamps that another one
/// of these replicas has. The stamp of a replica that is being rebuilt does not count: it may be older than
/// the rebuild.
fn rolled_back(fenced_replicas: &[FencedReplica], basis: &Basis) -> Members {
    let holders = || fenced_replicas.iter().filter(|fenced| basis.members.contains(fenced.replica));
    let newest = holders().filter(|holder| !holder.rebuilding).filter_map(|holder| holder.stamp).max();
    let newest = newest.unwrap_or(0);
    basis
        .members
        .filter(|id| holders().any(|holder| holder.replica == id && !is_current(holder.stamp, newest)))
}

/// Returns true if the replica has kept its state: it knows the last view if it was a member of it. A replica
/// without any known engine is new.
#[must_use]
pub fn remembers(report: &ReplicaReport, last: Option<View>) -> bool {
    let ReplicaReport { committed, proposed } = report;
    match last {
        Some(last) => {
            let has = |view: &View| view.id == last.id || stands_for(view, &last);
            committed.id >= last.id || proposed.iter().any(has)
        }
        None => committed.id.generation != Generation::NEVER || !proposed.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_types::ViewId;

    use super::*;

    fn id(n: u64) -> ReplicaId {
        ReplicaId::from_random(n)
    }

    fn ids(of: &[u64]) -> Members {
        Members::new(of.iter().copied().map(id)).unwrap()
    }

    fn view(attach: u64, of: &[u64]) -> View {
        let number = u32::from(attach > 0);
        View { id: ViewId { generation: Generation::new(attach, 0), number }, members: ids(of) }
    }

    fn fenced(n: u64, committed: View, proposed: &[View]) -> FencedReplica {
        let report = ReplicaReport { committed, proposed: proposed.to_vec() };
        FencedReplica { replica: id(n), report, rebuilding: false, lost_cache: false, stamp: Some(0) }
    }

    #[test]
    fn a_replica_that_has_lost_its_cache_is_rebuilt_later() {
        let now = view(3, &[1, 2]);
        let lost = |n| FencedReplica { lost_cache: true, ..fenced(n, now, &[]) };
        let found = plan(&[fenced(1, now, &[]), lost(2)], None).unwrap();
        assert_eq!(found.members, ids(&[1]));
        assert_eq!(found.basis.holders, now.members, "both are waited for");
        let all = plan(&[lost(1), lost(2)], None).unwrap();
        assert_eq!(all.members, now.members, "no replica is better");
    }

    #[test]
    fn writes_are_lost_if_every_member_has_lost_its_cache() {
        let now = view(3, &[1, 2, 3]);
        let lost = |n| FencedReplica { lost_cache: true, ..fenced(n, now, &[]) };
        let loses_writes = |of: &[FencedReplica]| plan(of, None).unwrap().lost_writes;
        assert!(!loses_writes(&[fenced(1, now, &[]), fenced(2, now, &[]), fenced(3, now, &[])]));
        assert!(!loses_writes(&[lost(1), lost(2), fenced(3, now, &[])]), "one has kept everything");
        assert!(loses_writes(&[lost(1), lost(2), lost(3)]));
        assert!(loses_writes(&[lost(1), lost(2)]), "a silent replica does not help");
        let rebuilding = FencedReplica { rebuilding: true, ..fenced(3, now, &[]) };
        assert!(loses_writes(&[lost(1), lost(2), rebuilding]), "nor does one that lacks data");
        let older = fenced(3, view(2, &[1, 2, 3]), &[]);
        let alone = view(3, &[1]);
        let last = FencedReplica { lost_cache: true, ..fenced(1, alone, &[]) };
        assert!(loses_writes(&[last, older]), "nor does one that had left the view");
    }

    #[test]
    fn a_replica_that_is_being_rebuilt_is_not_a_member() {
        let now = view(3, &[1, 2]);
        let broken = FencedReplica { rebuilding: true, ..fenced(2, now, &[]) };
        let plan = plan(&[fenced(1, now, &[]), broken], None).unwrap();
        assert_eq!(plan.members, ids(&[1]));
        assert!(!plan.basis.needs_grant, "the views that it knows count");
        assert_eq!(plan.unfit.len(), 1);
        assert_eq!(plan.unfit[0].0, id(2));
    }

    #[test]
    fn no_member_remains_if_all_are_being_rebuilt() {
        let now = view(3, &[1]);
        let broken = FencedReplica { rebuilding: true, ..fenced(1, now, &[]) };
        let none = plan(&[broken], None).unwrap_err();
        assert_eq!(none.cannot, CannotStart::NoMember(Members::NONE));
        assert!(none.unfit[0].1.contains("lacks data"));
    }

    /// Returns the plan with the reports of all, if it is possible without some of them as members.
    fn without(fenced_replicas: &[FencedReplica], offenders: &[u64]) -> Option<StartPlan> {
        plan(fenced_replicas, None).ok()?.without(&ids(offenders), fenced_replicas, None)
    }

    #[test]
    fn an_offender_is_left_out_if_the_others_are_enough() {
        let now = view(5, &[1, 2, 3]);
        let all = [1, 2, 3].map(|n| fenced(n, now, &[]));
        let found = without(&all, &[3]).unwrap();
        assert_eq!((found.members, found.basis.needs_grant), (ids(&[1, 2]), false));
        assert_eq!(found.basis.holders, now.members);
        assert!(without(&all, &[2, 3]).is_none());
        let two = view(5, &[1, 2]);
        let half = without(&[fenced(1, two, &[]), fenced(2, two, &[])], &[2]).unwrap();
        assert_eq!((half.members, half.basis.needs_grant), (ids(&[1]), true));
    }

    #[test]
    fn an_offender_that_alone_knows_the_newest_view_is_not_left_out() {
        // The others were left out of it by a grant that a restored store has forgotten.
        let (before, now) = (view(3, &[1, 2, 3]), view(5, &[3]));
        let all = [fenced(1, before, &[]), fenced(2, before, &[]), fenced(3, now, &[])];
        assert_eq!(plan(&all[..2], None).unwrap().members, ids(&[1, 2]), "no other replica knows");
        assert!(without(&all, &[3]).is_none());
    }

    #[test]
    fn empty_directories_do_not_start_a_volume_whose_offender_has_data() {
        let (first, now) = (view(0, &[1, 2, 3]), view(5, &[1, 2, 3]));
        let all = [fenced(1, first, &[]), fenced(2, first, &[]), fenced(3, now, &[])];
        assert!(plan(&all[..2], None).is_ok(), "no other replica has seen an engine");
        assert!(without(&all, &[3]).is_none());
        // Nor do they count beside one that has the data.
        let four = view(5, &[1, 2, 3, 4]);
        let first = view(0, &[1, 2, 3, 4]);
        let all = [fenced(1, four, &[]), fenced(2, first, &[]), fenced(3, four, &[]), fenced(4, four, &[])];
        assert_eq!(plan(&all, None).unwrap().members, ids(&[1, 3, 4]));
        let found = without(&all, &[3]).unwrap();
        assert_eq!((found.members, found.blank, found.basis.needs_grant), (ids(&[1, 4]), ids(&[2]), true));
        assert!(without(&all, &[3, 4]).is_none());
    }

    #[test]
    fn an_offender_that_alone_has_kept_everything_is_not_left_out() {
        let now = view(5, &[1, 2, 3]);
        let lost = |n| FencedReplica { lost_cache: true, ..fenced(n, now, &[]) };
        let all = [lost(1), lost(2), fenced(3, now, &[])];
        assert_eq!(plan(&all, None).unwrap().members, ids(&[3]));
        assert!(without(&all, &[3]).is_none());
        let found = without(&all, &[2]).unwrap();
        assert_eq!((found.members, found.lost_writes), (ids(&[3]), false));
        let found = without(&[lost(1), lost(2), lost(3)], &[3]).unwrap();
        assert_eq!((found.members, found.lost_writes), (ids(&[1, 2]), true), "as with 3");
    }

    #[test]
    fn the_stamp_of_an_offender_shows_restored_disks() {
        let now = view(5, &[1, 2, 3]);
        let stamped = |n, stamp| FencedReplica { stamp: Some(stamp), ..fenced(n, now, &[]) };
        let all = [stamped(1, 9), stamped(2, 7), stamped(3, 9)];
        assert_eq!(plan(&all, None).unwrap().blank, ids(&[2]));
        assert!(without(&all, &[3]).is_none(), "1 alone is less than half");
        let found = without(&all, &[2]).unwrap();
        assert_eq!((found.members, found.blank), (ids(&[1, 3]), ids(&[2])));
    }

    #[test]
    fn a_replica_with_an_empty_new_directory_counts_for_nothing() {
        let (first, now) = (view(0, &[1, 2, 3]), view(5, &[1, 2, 3]));
        let empty = fenced(3, first, &[]);
        let found = plan(&[fenced(1, now, &[]), fenced(2, now, &[]), empty.clone()], None).unwrap();
        assert_eq!(found.members, ids(&[1, 2]));
        assert!(found.unfit[0].1.contains("rebuilt"));
        assert_eq!(found.blank, ids(&[3]));
        // Nor does it count for the quorum.
        let alone = plan(&[fenced(1, now, &[]), empty], None).unwrap_err();
        assert!(matches!(alone.cannot, CannotStart::NoQuorum { .. }));
    }

    /// Has the same views as the others, because no member has left since.
    #[test]
    fn a_replica_whose_disk_was_restored_to_an_older_state_counts_for_nothing() {
        let now = view(5, &[1, 2, 3]);
        let stamped = |n, stamp| FencedReplica { stamp: Some(stamp), ..fenced(n, now, &[]) };
        let found = plan(&[stamped(1, 9), stamped(2, 8), stamped(3, 7)], None).unwrap();
        assert_eq!(
            (found.members, found.blank),
            (ids(&[1, 2]), ids(&[3])),
            "2 may not have got the last one"
        );
        assert!(found.unfit[0].1.contains("restored to an older state"));
        let alone = plan(&[stamped(1, 9), stamped(3, 7)], None).unwrap_err();
        assert!(matches!(alone.cannot, CannotStart::NoQuorum { .. }), "nor for the quorum");
        // A replica that has left the view has its set.
        let left = FencedReplica { stamp: Some(3), ..fenced(3, view(4, &[1, 2, 3]), &[]) };
        let two = view(5, &[1, 2]);
        let members = [1, 2].map(|n| FencedReplica { stamp: Some(9), ..fenced(n, two, &[]) });
        assert_eq!(plan(&[members.to_vec(), vec![left]].concat(), None).unwrap().blank, ids(&[]));
        let lost = FencedReplica { stamp: None, ..fenced(3, now, &[]) };
        assert_eq!(
            plan(&[stamped(1, 9), lost], None).unwrap().members,
            ids(&[1, 3]),
            "nothing speaks against it"
        );
        // Nor does it matter which one counts as rebuilt.
        let rebuilding = FencedReplica { rebuilding: true, ..stamped(1, 90) };
        assert_eq!(plan(&[rebuilding, stamped(2, 8), stamped(3, 8)], None).unwrap().members, ids(&[2, 3]));
    }

    /// Relies on a replica that keeps only the newest of several proposals with the same members.
    #[test]
    fn a_replica_that_has_a_newer_proposal_of_the_same_members_has_not_forgotten() {
        let (old, now, again) = (view(4, &[1, 2, 3]), view(5, &[1, 2]), view(6, &[1, 2]));
        let holder = fenced(1, old, &[again]);
        assert!(remembers(&holder.report, Some(now)));
        let found = plan(&[holder, fenced(2, now, &[again])], None).unwrap();
        assert_eq!((found.members, found.blank), (now.members, ids(&[])));
    }

    #[test]
    fn a_replica_that_was_away_and_is_empty_is_blank() {
        let (first, now) = (view(0, &[1, 2, 3]), view(5, &[1, 2]));
        let others = [fenced(1, now, &[]), fenced(2, now, &[])];
        let with = |third| [others.to_vec(), vec![third]].concat();
        let found = plan(&with(fenced(3, first, &[])), None).unwrap();
        assert_eq!((found.blank, found.unfit.len()), (ids(&[3]), 0));
        // A replica that knows an engine has kept its state, and none is blank before the first engine.
        assert_eq!(plan(&with(fenced(3, view(2, &[1, 2, 3]), &[])), None).unwrap().blank, ids(&[]));
        assert_eq!(plan(&with(fenced(3, first, &[view(2, &[1, 3])])), None).unwrap().blank, ids(&[]));
        let new: Vec<FencedReplica> = (1..=3).map(|n| fenced(n, first, &[])).collect();
        assert_eq!(plan(&new, None).unwrap().blank, ids(&[]));
    }

    #[test]
    fn a_replica_that_has_stored_the_view_and_missed_the_mark_is_a_member() {
        let (first, now) = (view(0, &[1, 2, 3]), view(5, &[1, 2, 3]));
        let found = plan(&[fenced(1, now, &[]), fenced(2, first, &[now]), fenced(3, first, &[now])], None);
        assert_eq!(found.unwrap().members, ids(&[1, 2, 3]));
    }

    fn numbered(attach: u64, number: u32) -> View {
        View { id: ViewId { generation: Generation::new(attach, 0), number }, members: ids(&[1]) }
    }

    #[test]
    fn a_replica_with_an_empty_new_directory_does_not_remember() {
        let report = |committed, proposed: &[View]| ReplicaReport { committed, proposed: proposed.to_vec() };
        assert!(!remembers(&report(numbered(0, 0), &[]), None));
        assert!(remembers(&report(numbered(0, 0), &[numbered(1, 1)]), None));
        assert!(remembers(&report(numbered(3, 1), &[]), None));
        let last = Some(numbered(3, 2));
        assert!(remembers(&report(numbered(3, 1), &[numbered(3, 2)]), last));
        assert!(remembers(&report(numbered(3, 4), &[]), last));
        assert!(!remembers(&report(numbered(3, 1), &[]), last), "an older copy of its directory");
    }
}
