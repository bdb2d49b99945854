//! Computes the losses with each replica of a volume as the only one, for the operator's decision on a
//! salvage.

use std::collections::BTreeMap;

use shorthorn_types::{Generation, Members, ReplicaId, ReplicaReport, View, ViewId};
use shorthorn_views::{Arbiter, Quorum, quorum};

/// The findings of an agent in the directory of a replica.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inspection {
    /// True if the directory exists and a replica could be started with it.
    pub usable: bool,
    /// The stored views; none if no engine has ever opened the replica.
    pub report: Option<ReplicaReport>,
    /// True if the replica was not closed cleanly.
    pub dirty: bool,
    /// True if the replica is being rebuilt.
    pub rebuilding: bool,
    /// True if the host was restarted, or the disk has failed, while data was not durable.
    pub lost_cache: bool,
}

/// The consequences for the volume with one replica as the only one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SalvageChoice {
    /// The replica that would be the only one.
    pub replica: ReplicaId,
    /// True if it can be chosen at all.
    pub possible: bool,
    /// The possible losses in sentences; empty if none are known.
    pub losses: Vec<String>,
}

/// Returns the arbiter of a volume that is salvaged to one replica. Its last grant is a view of that replica
/// alone, so that no engine starts from the others.
#[must_use]
pub fn arbiter(attach: u64, replica: ReplicaId) -> Arbiter {
    // One is within the bound of a set.
    let members = Members::new([replica]).unwrap_or_default();
    let first = View { id: ViewId { generation: Generation::NEVER, number: 0 }, members };
    let salvaged = View { id: ViewId { generation: Generation::new(attach, 0), number: 0 }, members };
    let honoured = ReplicaReport { committed: first, proposed: Vec::new() };
    // An arbiter that has granted nothing grants one of one.
    Arbiter::default().ask(attach, salvaged, &honoured, &members).unwrap_or_default()
}

/// Judges every replica. `inspections` has none for an unreadable replica; `granted` is the arbiter's last
/// grant.
#[must_use]
pub fn choices(
    inspections: &BTreeMap<ReplicaId, Option<Inspection>>,
    granted: Option<View>,
) -> Vec<SalvageChoice> {
    let known = CombinedViews::of(inspections, granted);
    inspections.iter().map(|(replica, inspection)| known.judge(*replica, inspection.as_ref())).collect()
}

/// The combined knowledge of all readable replicas.
struct CombinedViews {
    committed: Option<View>,
    /// Newer than that, each of which may have gone through.
    proposed: Vec<View>,
    unseen: Vec<ReplicaId>,
}

impl CombinedViews {
    fn of(inspections: &BTreeMap<ReplicaId, Option<Inspection>>, granted: Option<View>) -> CombinedViews {
        let seen = inspections.values().flatten().filter_map(|inspection| inspection.report.as_ref());
        let committed = seen.clone().map(|report| report.committed).max_by_key(|view| view.id);
        let mut proposed: Vec<View> =
            seen.flat_map(|report| report.proposed.clone()).chain(granted).collect();
        proposed.retain(|view| committed.is_none_or(|committed| view.id > committed.id));
        proposed.sort_unstable_by_key(|view| view.id);
        proposed.dedup();
        let unseen = inspections.iter().filter(|(_, inspection)| inspection.is_none());
        CombinedViews { committed, proposed, unseen: unseen.map(|(id, _)| *id).collect() }
    }

    fn judge(&self, replica: ReplicaId, inspection: Option<&Inspection>) -> SalvageChoice {
        let impossible = |why: &str| SalvageChoice { replica, possible: false, losses: vec![why.to_owned()] };
        let Some(found) = inspection else {
            return impossible(
                "the data is unknown, because its node does \
         not answer",
            );
        };
        if !found.usable {
            return impossible("the directory is missing or damaged");
        }
        if found.report.is_none() {
            return impossible("no engine has ever opened the replica: it has no data");
        }
        let mut losses = self.lost_views(replica);
        losses.extend(self.unknown(replica));
        if found.rebuilding {
            losses.push("the rebuild did not finish: parts of the data are old or missing".to_owned());
        }
        if found.lost_cache {
            losses.push(
                "the host restarted without a clean stop, or the disk failed: unflushed writes may be gone"
                    .to_owned(),
            );
        } else if found.dirty {
            losses.push("unclean close: any part of the writes in flight may be missing".to_owned());
        }
        SalvageChoice { replica, possible: true, losses }
    }

    /// Returns the views in which writes may have been acknowledged without this replica.
    fn lost_views(&self, replica: ReplicaId) -> Vec<String> {
        let without = |view: &&View| !view.members.contains(replica);
        let committed = self.committed.iter().filter(without).map(|view| {
            format!("lacks acknowledged writes of view {}, whose members are {}", view.id, view.members)
        });
        let proposed = self.proposed.iter().filter(without).map(|view| {
            format!(
                "lacks acknowledged writes of view {}, if that view was committed; its members are {}",
                view.id, view.members
            )
        });
        committed.chain(proposed).collect()
    }

    /// Returns a message if the unreadable replicas may have continued without this one and without the
    /// arbiter.
    fn unknown(&self, replica: ReplicaId) -> Option<String> {
        let newest = self.proposed.last().or(self.committed.as_ref())?;
        let unseen = Members::new(self.unseen.iter().copied()).ok()?;
        let may = newest.members.contains(replica) && quorum(&newest.members, &unseen) == Quorum::More;
        may.then(|| {
            format!(
                "{unseen} cannot be inspected: if they have continued without this replica, it lacks their \
                 writes"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u64) -> ReplicaId {
        ReplicaId::from_random(n)
    }

    fn view(attach: u64, number: u32, ids: &[u64]) -> View {
        let members = Members::new(ids.iter().copied().map(id)).unwrap();
        View { id: ViewId { generation: Generation::new(attach, 0), number }, members }
    }

    fn knows(committed: View, proposed: &[View]) -> Option<Inspection> {
        let report = ReplicaReport { committed, proposed: proposed.to_vec() };
        Some(Inspection { usable: true, report: Some(report), ..Inspection::default() })
    }

    fn judged(found: &[Option<Inspection>], granted: Option<View>) -> Vec<(bool, String)> {
        let found = found.iter().cloned().enumerate().map(|(at, found)| (id(at as u64 + 1), found)).collect();
        choices(&found, granted)
            .into_iter()
            .map(|choice| (choice.possible, choice.losses.join("; ")))
            .collect()
    }

    #[test]
    fn members_of_the_newest_view_lose_nothing_and_others_name_their_losses() {
        let (old, new) = (view(1, 1, &[1, 2, 3]), view(1, 2, &[1, 2]));
        let found = judged(&[knows(new, &[]), None, knows(old, &[])], None);
        assert_eq!(found[0], (true, String::new()));
        assert!(!found[1].0 && found[1].1.contains("does not answer"), "{found:?}");
        assert!(found[2].0 && found[2].1.contains("view 1.0/2"), "{found:?}");
    }

    #[test]
    fn grants_and_proposals_count_as_used() {
        let (old, new) = (view(1, 1, &[1, 2]), view(1, 2, &[1]));
        let found = judged(&[None, knows(old, &[])], Some(new));
        assert!(found[1].1.contains("view 1.0/2, if that view was committed"), "{found:?}");
        let found = judged(&[None, knows(old, &[])], None);
        assert_eq!(found[1], (true, String::new()), "half cannot have continued without a grant");
        let found = judged(&[knows(old, &[new]), knows(old, &[])], None);
        assert_eq!(found[0].1, "");
        assert!(found[1].1.contains("if that view was committed"), "{found:?}");
    }

    #[test]
    fn a_majority_out_of_reach_may_have_continued() {
        let old = view(1, 1, &[1, 2, 3]);
        let found = judged(&[None, None, knows(old, &[])], None);
        assert!(found[2].0 && found[2].1.contains("continued without this replica"), "{found:?}");
        let found = judged(&[None, knows(old, &[]), knows(old, &[])], None);
        assert_eq!(found[2].1, "");
    }

    #[test]
    fn the_state_of_a_directory_is_reported() {
        let inspection = knows(view(1, 1, &[1]), &[]).unwrap();
        let state_of = |inspection: Inspection| judged(&[Some(inspection)], None)[0].clone();
        assert!(state_of(Inspection { rebuilding: true, ..inspection.clone() }).1.contains("rebuild"));
        assert!(state_of(Inspection { dirty: true, ..inspection.clone() }).1.contains("in flight"));
        assert!(state_of(Inspection { lost_cache: true, ..inspection.clone() }).1.contains("flushed"));
        assert!(!state_of(Inspection { usable: false, ..inspection.clone() }).0);
        assert!(!state_of(Inspection { report: None, ..inspection }).0);
    }

    #[test]
    fn a_salvaged_volume_starts_from_that_replica_only() {
        let granted = arbiter(7, id(2)).granted().unwrap();
        assert_eq!(granted, view(7, 0, &[2]));
        // The other one, which alone could have started before, cannot any more.
        let other = (id(1), ReplicaReport { committed: view(5, 2, &[1]), proposed: vec![] });
        assert!(shorthorn_views::basis(std::slice::from_ref(&other), None).is_ok());
        assert!(shorthorn_views::basis(std::slice::from_ref(&other), Some(granted)).is_err());
        let chosen = (id(2), ReplicaReport { committed: granted, proposed: vec![] });
        let basis = shorthorn_views::basis(&[other, chosen], Some(granted)).unwrap();
        assert_eq!(basis.members, Members::new([id(2)]).unwrap());
    }
}
