//! Computes the remaining replicas of a volume if some are given up, with their disk or their node.
//!
//! Replicas in places that were given up before count as gone. The controller does not know the view of a
//! volume that is not served. A former member counts as a member unless the controller knows that it has
//! left.

use std::collections::BTreeSet;

use crate::objects::{DataState, Replica, Volume};
use crate::{ClusterState, given_up_places};

/// The outcome for a volume with its remaining replicas, the best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Survivors {
    /// The volume continues, or starts again, with the remaining replicas.
    Enough,
    /// The complete members that are left are too few to start without a salvage.
    TooFew,
    /// No complete replica is left, as far as the controller knows.
    NoCopy,
}

/// Returns the outcome for the volume without the replicas for which `is_lost` is true. A view that was
/// granted and not reported yet may be the newest. The worse outcome of that view and the known view counts.
#[must_use]
pub fn without(cluster: &ClusterState, volume: &Volume, is_lost: impl Fn(&Replica) -> bool) -> Survivors {
    let known = without_of(cluster, volume, &is_lost, |replica| is_member(cluster, volume, replica));
    let granted = volume.status.arbiter.granted().filter(|_| volume.status.grant_unreported);
    let Some(granted) = granted else { return known };
    let of_granted =
        without_of(cluster, volume, &is_lost, |replica| granted.members.contains(replica.spec.replica_id));
    known.max(of_granted)
}

fn without_of(
    cluster: &ClusterState,
    volume: &Volume,
    is_lost: impl Fn(&Replica) -> bool,
    is_member: impl Fn(&Replica) -> bool,
) -> Survivors {
    let has_data = |replica: &&Replica| replica.status.data == DataState::Present;
    let is_left =
        |replica: &&Replica| !is_lost(replica) && !given_up_places::is_replica_given_up(cluster, replica);
    let all: Vec<&Replica> = cluster.replicas_of(&volume.spec.volume_name).collect();
    let members: Vec<&Replica> = all.iter().copied().filter(|replica| is_member(replica)).collect();
    if !members.iter().any(|replica| has_data(replica) && is_lost(replica)) {
        // The view does not change. The very last data is the only source of a salvage.
        let loses = all.iter().any(|replica| has_data(replica) && is_lost(replica));
        let has_some = all.iter().any(|replica| has_data(replica) && is_left(replica));
        return if loses && !has_some { Survivors::NoCopy } else { Survivors::Enough };
    }
    let left = members.iter().filter(|replica| has_data(replica) && is_left(replica)).count();
    // Half of them needs a grant.
    let grants = volume.status.arbiter.stale_since().is_none();
    if left == 0 {
        Survivors::NoCopy
    } else if left * 2 > members.len() || left * 2 == members.len() && grants {
        Survivors::Enough
    } else {
        Survivors::TooFew
    }
}

/// The volumes that lose more than they can do without.
#[derive(Clone, Debug, Default)]
pub(crate) struct Losses<'a> {
    all: BTreeSet<&'a str>,
    everything: BTreeSet<&'a str>,
    too_many: BTreeSet<&'a str>,
}

impl<'a> Losses<'a> {
    /// Returns the survivors of the volumes of `replicas`, except for volumes that are being deleted.
    pub(crate) fn of(
        cluster: &'a ClusterState,
        replicas: impl Iterator<Item = &'a Replica>,
        is_lost: impl Fn(&Replica) -> bool,
    ) -> Losses<'a> {
        let names: BTreeSet<&str> = replicas.map(|replica| replica.spec.volume_name.as_str()).collect();
        let mut losses = Losses { all: names.clone(), ..Losses::default() };
        for name in names {
            let Some(volume) = cluster.volumes.get(name).filter(|volume| !volume.is_deleting()) else {
                continue;
            };
            match without(cluster, volume, &is_lost) {
                Survivors::Enough => {}
                Survivors::TooFew => drop(losses.too_many.insert(name)),
                Survivors::NoCopy => drop(losses.everything.insert(name)),
            }
        }
        losses
    }

    /// The sentence about an object of one of all these volumes that the controller cannot use: it may be
    /// one of the members.
    pub(crate) fn unknown(&self, cluster: &ClusterState) -> Option<String> {
        self.all.iter().find_map(|name| cluster.unknown_of(name))
    }

    /// Returns the names of the volumes without a complete replica left.
    pub(crate) fn everything(&self) -> Option<String> {
        Losses::named(&self.everything)
    }

    /// Returns the volumes with too few survivors.
    pub(crate) fn too_many(&self) -> Option<String> {
        Losses::named(&self.too_many)
    }

    fn named(names: &BTreeSet<&str>) -> Option<String> {
        (!names.is_empty()).then(|| listed(&names.iter().copied().collect::<Vec<_>>()))
    }
}

/// Returns true if the replica is in the view, as far as is known: an engine that serves says so.
fn is_member(cluster: &ClusterState, volume: &Volume, replica: &Replica) -> bool {
    let id = replica.spec.replica_id;
    let engine = cluster.engines.get(&volume.metadata.name);
    let serving = engine.filter(|engine| {
        engine.spec.attach == volume.status.attach
            && engine.status.seen_attach == engine.spec.attach
            && engine.status.is_serving()
    });
    match serving {
        Some(engine) => engine.status.has_member(id),
        None => {
            replica.status.failed_at.is_none()
                && (replica.status.healthy_at.is_some() || volume.status.first_members.contains(&id))
        }
    }
}

/// The most names in a message.
const NAMES_MAX: usize = 10;

/// Returns the names as a list, with the number of those that it leaves out.
pub(crate) fn listed(names: &[&str]) -> String {
    let shown = names.iter().take(NAMES_MAX).copied().collect::<Vec<_>>().join(", ");
    match names.len().checked_sub(NAMES_MAX) {
        None | Some(0) => shown,
        Some(more) => format!("{shown} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_types::{Generation, Members, ReplicaReport, View, ViewId};
    use shorthorn_views::Arbiter;

    use super::Survivors::{Enough, NoCopy, TooFew};
    use super::*;
    use crate::example::{DISK, Example, id, now};
    use crate::objects::VolumeState;

    /// The state of a replica, on a node of its own.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Is {
        /// A member, as far as is known.
        Whole,
        /// The replica has left the view.
        Stale,
        /// The replica was never started.
        Empty,
        /// A member on a disk that was given up before.
        OnLostDisk,
        /// A member on a node that was given up before.
        OnLostNode,
    }
    use Is::{Empty, OnLostDisk, OnLostNode, Stale, Whole};

    /// Returns a detached volume with these replicas.
    fn detached(replicas: &[Is]) -> Example {
        let mut example = Example::new();
        example.volume().status.state = VolumeState::Detached;
        example.engine().status = Default::default();
        for ((number, node), is) in (1..).zip(["a", "b", "c", "d"]).zip(replicas) {
            if number > 3 {
                example.add_node(node);
                example.add_replica(number, node);
                example.volume().status.first_members.push(id(number));
            }
            match is {
                Whole => {}
                Stale => example.replica(number, |replica| replica.status.failed_at = Some(now())),
                Empty => example.replica(number, |replica| {
                    (replica.status.data, replica.status.healthy_at) = (DataState::None, None);
                }),
                OnLostDisk => example.node(node).spec.disks.get_mut(DISK).unwrap().lost = true,
                OnLostNode => example.node(node).metadata.deletion_timestamp = Some(now()),
            }
        }
        let names = example.cluster.replicas.values().filter(|replica| {
            (replicas.len() + 1..=3).any(|number| replica.spec.replica_id == id(number as u64))
        });
        for name in names.map(|replica| replica.metadata.name.clone()).collect::<Vec<_>>() {
            example.cluster.remove(&crate::objects::Key::new(crate::objects::Kind::Replica, name));
        }
        example
    }

    fn without_first(example: &Example) -> Survivors {
        without(&example.cluster, &example.cluster.volumes["v"], |replica| replica.spec.replica_id == id(1))
    }

    #[test]
    fn a_detached_volume_needs_half_of_its_members() {
        let table: &[(&[Is], Survivors)] = &[
            (&[Whole, Whole, Whole], Enough),
            (&[Whole, Whole], Enough),
            (&[Whole], NoCopy),
            (&[Whole, Stale, Stale], NoCopy),
            (&[Whole, Whole, Stale], Enough),
            (&[Whole, OnLostDisk, Whole], TooFew),
            (&[Whole, OnLostNode, Whole], TooFew),
            (&[Whole, OnLostDisk, Stale], NoCopy),
            (&[Whole, OnLostNode, OnLostDisk], NoCopy),
            (&[Whole, OnLostDisk, OnLostNode, Whole], TooFew),
            (&[Whole, Whole, OnLostNode, Whole], Enough),
            (&[Whole, Empty, Empty], NoCopy),
            // A replica that is not a member: it is the only source of a salvage, or nothing changes.
            (&[Stale, Whole, Whole], Enough),
            (&[Stale, OnLostDisk, Whole], Enough),
            (&[Stale, OnLostDisk, OnLostNode], NoCopy),
            (&[Empty, Whole, Whole], Enough),
            (&[Empty, Empty, Empty], Enough),
        ];
        for (replicas, expected) in table {
            assert_eq!(without_first(&detached(replicas)), *expected, "{replicas:?}");
        }
    }

    #[test]
    fn half_is_too_few_if_the_arbiter_grants_nothing() {
        let mut example = detached(&[Whole, Whole]);
        let arbiter = example.volume().status.arbiter.stale(1);
        example.volume().status.arbiter = arbiter;
        assert_eq!(without_first(&example), TooFew);
    }

    /// The arbiter has granted a view of the first replica alone, which no replica has reported yet.
    #[test]
    fn a_view_that_was_granted_and_not_reported_counts() {
        let mut example = Example::new();
        let [one, two] = [(2, 1), (1, 2)].map(|(number, members)| View {
            id: ViewId { generation: Generation::new(1, 1), number },
            members: Members::new((1..=members).map(id)).unwrap(),
        });
        let honoured = ReplicaReport { committed: two, proposed: Vec::new() };
        let granted = Arbiter::default().ask(1, one, &honoured, &one.members).unwrap();
        example.volume().status.arbiter = granted;
        assert_eq!(without_first(&example), Enough, "it was reported long ago");
        example.volume().status.grant_unreported = true;
        assert_eq!(without_first(&example), NoCopy);
        example.volume().status.state = VolumeState::Detached;
        example.engine().status = Default::default();
        assert_eq!(without_first(&example), NoCopy);
        let others = without(&example.cluster, &example.cluster.volumes["v"], |replica| {
            replica.spec.replica_id == id(2)
        });
        assert_eq!(others, Enough);
    }

    #[test]
    fn an_engine_that_serves_knows_its_members() {
        let mut example = Example::new();
        assert_eq!(without_first(&example), Enough);
        (2..=3).for_each(|number| drop(example.engine().status.replica_mode_map.remove(&id(number))));
        assert_eq!(without_first(&example), NoCopy, "whatever was recorded of the others");
    }
}
