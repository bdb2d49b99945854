//! Chooses the member that leaves a view with too many members.
//!
//! A member cannot be removed from a view from outside: its process is stopped, and the engine makes it leave
//! like a failed one. That takes a majority of the view that answers without it, or the arbiter's grant if
//! exactly half of two is left. So the chosen replica is one whose end the view survives, and never the last
//! complete one.

use shorthorn_types::ReplicaId;
use shorthorn_types::limits::MAX_MEMBERS;

use crate::drain::{self, EvictionReason};
use crate::objects::{CurrentState, DataLocality, DesireState, Engine, Replica, Volume};
use crate::reconcile::Context;
use crate::{ClusterState, Timestamp};

/// Returns the member to stop, if any. A view may have too many members. Then these leave first: a member
/// whose stop has begun, one that has to leave its place, one in a bad state. Then follow the member in the
/// worst place, and the newest. Otherwise it is one that has to be removed before its substitute is made.
pub(super) fn leaving<'a>(
    context: &Context<'_>,
    volume: &Volume,
    engine: &Engine,
    live: &[&'a Replica],
) -> Option<&'a Replica> {
    let members = live.iter().copied().filter(|replica| engine.status.has_member(replica.spec.replica_id));
    let members: Vec<&Replica> = members.collect();
    let wanted = volume.spec.number_of_replicas.max(1) as usize;
    // Without enough that stay it would be wanted again as soon as it has left.
    let staying = members.iter().filter(|replica| !drain::is_evicted(context.cluster, replica)).count();
    let has_surplus = staying >= wanted && members.len() != wanted;
    let surplus = Surplus { context, volume, engine, members };
    let candidates = surplus.members.iter().copied().filter(|replica| surplus.can_do_without(replica));
    if !has_surplus {
        let makes_room = |replica: &&Replica| makes_room(context.cluster, volume, engine, replica);
        return candidates
            .filter(makes_room)
            .min_by_key(|replica| drain::eviction_reason(context.cluster, replica));
    }
    candidates.max_by_key(|replica| surplus.rank(replica))
}

/// Returns true if the replica has to be removed before its substitute can be made, because an engine cannot
/// have one more. All others are members then, so that they are removed one at a time. A replica that only
/// has a better place elsewhere stays in its place.
pub(super) fn makes_room(
    cluster: &ClusterState,
    volume: &Volume,
    engine: &Engine,
    replica: &Replica,
) -> bool {
    let must_leave =
        drain::eviction_reason(cluster, replica).is_some_and(|leaves| leaves != EvictionReason::Location);
    let id = replica.spec.replica_id;
    let others = || cluster.replicas_of(&volume.spec.volume_name).filter(|other| other.spec.replica_id != id);
    must_leave
        && volume.spec.number_of_replicas as usize >= MAX_MEMBERS
        && others().count() + 1 >= MAX_MEMBERS
        && others().all(|other| engine.status.has_member(other.spec.replica_id))
}

/// The greater, the sooner it is removed.
type Rank = (bool, bool, bool, Badness, Timestamp, ReplicaId);
type Badness = (bool, usize, usize, usize, bool);

struct Surplus<'a, 'w, 'r> {
    context: &'a Context<'w>,
    volume: &'a Volume,
    engine: &'a Engine,
    members: Vec<&'r Replica>,
}

impl Surplus<'_, '_, '_> {
    /// Returns true if the healthy replicas without this one can change the view, and have everything.
    fn can_do_without(&self, replica: &Replica) -> bool {
        let id = replica.spec.replica_id;
        let others = self.members.iter().filter(|other| other.spec.replica_id != id && self.does_well(other));
        let (well, all) = (others.count(), self.members.len());
        well > all / 2 || all == 2 && well == 1
    }

    /// Returns true if it answers, according to its engine and its agent; its state is unknown while its
    /// agent is unreachable.
    fn does_well(&self, replica: &Replica) -> bool {
        let member = self.engine.status.replica_mode_map.get(&replica.spec.replica_id);
        member.is_some_and(|member| !member.awaited)
            && replica.status.current_state == CurrentState::Running
            && replica.spec.desire_state == DesireState::Running
    }

    fn rank(&self, replica: &Replica) -> Rank {
        (
            replica.spec.desire_state == DesireState::Stopped,
            drain::is_evicted(self.context.cluster, replica),
            !self.does_well(replica),
            self.badness_of_location(replica),
            replica.metadata.creation_timestamp,
            replica.spec.replica_id,
        )
    }

    /// Returns the faults of the place, the worst first: missing tags, other replicas at the same place,
    /// being where the volume is used.
    fn badness_of_location(&self, replica: &Replica) -> Badness {
        let (cluster, spec) = (self.context.cluster, &replica.spec);
        let zone = |replica: &Replica| {
            let node = cluster.nodes.get(replica.spec.node_id.as_str())?;
            node.zone().cloned()
        };
        let others = |same: &dyn Fn(&Replica) -> bool| {
            let id = spec.replica_id;
            self.members.iter().filter(|other| other.spec.replica_id != id && same(other)).count()
        };
        let here = zone(replica);
        let on_node = others(&|other| other.spec.node_id == spec.node_id);
        let on_disk =
            others(&|other| other.spec.node_id == spec.node_id && other.spec.disk_path == spec.disk_path);
        let in_zone = others(&|other| here.is_some() && zone(other) == here);
        let is_kept_local = self.volume.spec.data_locality == DataLocality::BestEffort
            && self.engine.spec.node_id.as_ref() == Some(&spec.node_id);
        (!self.is_selected(replica), on_disk, on_node, in_zone, !is_kept_local)
    }

    /// Returns true if its node and its disk have the tags that the volume asks for.
    fn is_selected(&self, replica: &Replica) -> bool {
        let Some(node) = self.context.cluster.nodes.get(replica.spec.node_id.as_str()) else { return true };
        let disk = node.spec.disks.get(&replica.spec.disk_path);
        self.volume.spec.node_selector.is_subset(&node.spec.tags)
            && disk.is_none_or(|disk| self.volume.spec.disk_selector.is_subset(&disk.tags))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::Label;
    use crate::example::{DISK, Example, id, now};
    use crate::objects::MemberRecord;
    use crate::reconcile::Settings;

    /// Returns the number of the replica that leaves.
    fn chosen(example: &Example) -> Option<u64> {
        let context = Context {
            cluster: &example.cluster,
            agents: &example.agents,
            now: now(),
            random: Default::default(),
            settings: Settings::default(),
        };
        let (volume, engine) = (&example.cluster.volumes["v"], &example.cluster.engines["v"]);
        let live: Vec<&Replica> = example.cluster.replicas_of(&volume.spec.volume_name).collect();
        let leaving = leaving(&context, volume, engine, &live)?;
        (1..=5).find(|number| id(*number) == leaving.spec.replica_id)
    }

    fn wanted(number: u32) -> Example {
        let mut example = Example::new();
        example.volume().spec.number_of_replicas = number;
        let age = |second| {
            move |replica: &mut Replica| {
                replica.metadata.creation_timestamp = Timestamp::from_second(second).unwrap();
            }
        };
        (1..=3).for_each(|number| example.replica(number, age(i64::try_from(number).unwrap())));
        example
    }

    fn awaited(example: &mut Example, number: u64) {
        let member = MemberRecord::awaited("it is slow".to_owned());
        example.engine().status.replica_mode_map.insert(id(number), member);
    }

    fn label(text: &str) -> Label {
        text.parse().unwrap()
    }

    #[test]
    fn the_newest_surplus_replica_is_removed() {
        assert_eq!(chosen(&wanted(3)), None);
        assert_eq!(chosen(&wanted(2)), Some(3));
        assert_eq!(chosen(&wanted(1)), Some(3), "one after the other");
    }

    #[test]
    fn a_replica_in_trouble_is_removed_first_if_the_others_are_a_majority() {
        let mut example = wanted(2);
        awaited(&mut example, 1);
        assert_eq!(chosen(&example), Some(1));
        awaited(&mut example, 2);
        assert_eq!(chosen(&example), None, "one of three that answers is no majority");

        let mut example = wanted(2);
        example.replica(2, |replica| replica.status.current_state = CurrentState::Unknown);
        assert_eq!(chosen(&example), Some(2), "its node is out of reach");
    }

    #[test]
    fn the_last_healthy_replica_is_never_removed() {
        let mut example = wanted(1);
        example.engine().status.replica_mode_map.remove(&id(3));
        assert_eq!(chosen(&example), Some(2), "the arbiter grants the other half");
        awaited(&mut example, 1);
        assert_eq!(chosen(&example), Some(1), "and not the one that is well");
        awaited(&mut example, 2);
        assert_eq!(chosen(&example), None);
        let mut alone = wanted(1);
        (2..=3).for_each(|number| drop(alone.engine().status.replica_mode_map.remove(&id(number))));
        assert_eq!(chosen(&alone), None);
    }

    #[test]
    fn a_stopping_replica_stays_chosen_while_the_view_can_lose_it() {
        let mut example = wanted(2);
        example.replica(1, |replica| replica.spec.desire_state = DesireState::Stopped);
        assert_eq!(chosen(&example), Some(1));
        example.replica(3, |replica| replica.spec.eviction_requested = true);
        awaited(&mut example, 2);
        assert_eq!(chosen(&example), None, "it is wanted again: two others do badly or leave");
    }

    #[test]
    fn the_replica_with_the_worst_place_is_removed() {
        let mut example = wanted(2);
        example.volume().spec.disk_selector = [label("fast")].into();
        for node in ["b", "c"] {
            let disks = &mut example.node(node).spec.disks;
            disks.get_mut(DISK).unwrap().tags = [label("fast")].into();
        }
        assert_eq!(chosen(&example), Some(1), "its disk lacks the tag");

        let mut example = wanted(2);
        example.node("a").spec.zone = Some(label("z1"));
        example.node("b").spec.zone = Some(label("z1"));
        example.node("c").spec.zone = Some(label("z2"));
        assert_eq!(chosen(&example), Some(2), "the newest of those in one zone");
        example.volume().spec.data_locality = DataLocality::BestEffort;
        assert_eq!(chosen(&example), Some(2));
        example.replica(1, |replica| {
            replica.metadata.creation_timestamp = now() + Duration::from_secs(9);
        });
        assert_eq!(chosen(&example), Some(2), "the volume is used on a");
        example.volume().spec.data_locality = DataLocality::Disabled;
        assert_eq!(chosen(&example), Some(1));
        example.replica(2, |replica| replica.spec.eviction_requested = true);
        assert_eq!(chosen(&example), Some(2), "it is to leave its place");
    }

    #[test]
    fn of_two_replicas_on_one_disk_one_is_removed() {
        let mut example = wanted(2);
        example.replica(2, |replica| replica.spec.node_id = "a".parse().unwrap());
        assert_eq!(chosen(&example), Some(2));
    }
}
