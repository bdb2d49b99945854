//! Out-of-sync sets that are no longer needed.

use shorthorn_types::limits::MAX_MEMBERS;
use shorthorn_types::{Members, ReplicaId, View};

/// Returns the replicas whose out-of-sync sets a replica that keeps those of `tracks` does not need. The
/// volume does not have these replicas any more. The volume has the `wanted` ones, and those of `views`,
/// which have to be all views that the replica knows and its engine honours.
///
/// A wrong removal loses no data: if one member of a first view has no set for a replica, that replica
/// becomes a copy ([`combine_sets`](crate::combine_sets)). That holds as long as no set is begun again that
/// looks complete. A replica begins sets from its write intent. Each is for a replica that is in the views
/// that it knows or gets, and not in the next one. So a set for a replica in such a view stays.
#[must_use]
pub fn out_of_sync_sets_to_forget<'a>(
    tracks: &Members,
    wanted: &Members,
    views: impl IntoIterator<Item = &'a View>,
) -> Members {
    let in_views: Vec<ReplicaId> = views.into_iter().flat_map(|view| view.members.iter()).collect();
    tracks.filter(|id| !wanted.contains(id) && !in_views.contains(&id))
}

/// Returns true if the replica `me`, which keeps the sets of `tracks`, may have no room for further sets.
/// Before it stores `target`, it has to begin one for every replica in `views` that is not in `target`.
#[must_use]
pub fn lacks_room<'a>(
    me: ReplicaId,
    tracks: &Members,
    target: &View,
    views: impl IntoIterator<Item = &'a View>,
) -> bool {
    let mut kept: Vec<ReplicaId> = tracks.iter().collect();
    for id in views.into_iter().flat_map(|view| view.members.iter()) {
        if id != me && !target.members.contains(id) && !kept.contains(&id) {
            kept.push(id);
        }
    }
    kept.len() > MAX_MEMBERS
}

#[cfg(test)]
mod tests {
    use shorthorn_types::{Generation, ViewId};

    use super::*;

    fn ids(of: &[u64]) -> Members {
        Members::new(of.iter().copied().map(ReplicaId::from_random)).unwrap()
    }

    fn view(attach: u64, of: &[u64]) -> View {
        View { id: ViewId { generation: Generation::new(attach, 0), number: 1 }, members: ids(of) }
    }

    #[test]
    fn out_of_sync_sets_of_removed_replicas_are_forgotten() {
        let now = view(5, &[1, 2]);
        assert_eq!(out_of_sync_sets_to_forget(&ids(&[3, 8, 9]), &ids(&[1, 2, 3]), [&now]), ids(&[8, 9]));
        assert_eq!(
            out_of_sync_sets_to_forget(&ids(&[3]), &ids(&[1, 2, 3]), [&now]),
            ids(&[]),
            "it may come back"
        );
    }

    #[test]
    fn out_of_sync_sets_of_replicas_in_any_view_stay() {
        let (old, now, next) = (view(3, &[1, 2, 7]), view(5, &[1, 2]), view(6, &[1, 2, 8]));
        let forget = |views: &[&View]| {
            out_of_sync_sets_to_forget(&ids(&[7, 8, 9]), &ids(&[1, 2]), views.iter().copied())
        };
        assert_eq!(forget(&[&now]), ids(&[7, 8, 9]));
        assert_eq!(forget(&[&now, &next]), ids(&[7, 9]), "it may be a member already");
        assert_eq!(
            forget(&[&old, &now, &next]),
            ids(&[9]),
            "an out-of-sync set would be begun again that is not whole"
        );
    }

    #[test]
    fn a_list_that_is_older_than_the_out_of_sync_set_costs_only_a_copy() {
        use shorthorn_types::RegionSet;

        use crate::{MemberSets, OutOfSyncSet, combine_sets};

        // Replica 3 is not in the list of an engine that has reached one of two members.
        let (now, list) = (view(5, &[1, 2]), ids(&[1, 2]));
        assert_eq!(out_of_sync_sets_to_forget(&ids(&[3]), &list, [&now]), ids(&[3]));
        // The next one has it again.
        let empty = || RegionSet::empty(4);
        let kept = |out_of_sync: Option<RegionSet>| {
            let out_of_sync_set = out_of_sync.map(|out_of_sync| OutOfSyncSet { out_of_sync, stamp: 0 });
            MemberSets { intent: empty(), stamp: None, out_of_sync: vec![None, None, out_of_sync_set] }
        };
        let all = combine_sets(&[kept(None), kept(Some(empty()))], 3, 4);
        assert!(
            !all.is_complete[2],
            "the other one has its out-of-sync set still, and it does not count as whole"
        );
    }

    #[test]
    fn each_replica_that_is_left_out_needs_room_for_its_set() {
        let me = ReplicaId::from_random(1);
        let (old, now) = (view(3, &[1, 2, 3]), view(5, &[1, 2]));
        let eight = ids(&[11, 12, 13, 14, 15, 16, 17, 18]);
        assert!(lacks_room(me, &eight, &now, [&old, &now]));
        assert!(!lacks_room(me, &eight, &now, [&now]), "no replica is left out");
        assert!(!lacks_room(me, &ids(&[3, 12, 13, 14, 15, 16, 17, 18]), &now, [&old]), "it has that one");
        assert!(!lacks_room(me, &ids(&[12, 13, 14, 15, 16, 17, 18]), &now, [&old]), "there is room for one");
        assert!(!lacks_room(ReplicaId::from_random(3), &eight, &now, [&old]), "it keeps none of itself");
    }
}
