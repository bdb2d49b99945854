//! Nodes n0, n1, …, each with one disk of 100 GiB of which 90 can be scheduled. The volumes have 1 GiB, and
//! are attached and healthy.

use proptest::prelude::*;
use shorthorn_types::{ReplicaId, VolumeName};

use super::*;
use crate::Timestamp;
use crate::objects::{
    ConditionType, DesireState, DiskSpec, DiskStatus, Finding, Metadata, Node, NodeSpec, NodeStatus,
    ReplicaSpec, Secret, StoredReplicaStatus,
};
use crate::observed::{AgentLink, ObservedAgent, ObservedDisk};
use crate::requests::CreateVolume;

const GIB: u64 = 1 << 30;
const DISK: &str = "/disk";
const DISK_BYTES: u64 = 100 * GIB;

fn now() -> Timestamp {
    Timestamp::UNIX_EPOCH
}

fn name(node: usize) -> NodeName {
    NodeName::new(&format!("n{node}")).unwrap()
}

struct Cluster {
    state: ClusterState,
    agents: Agents,
    next: u64,
}

impl Cluster {
    fn of(nodes: usize) -> Cluster {
        let mut cluster = Cluster { state: ClusterState::default(), agents: Agents::default(), next: 1 };
        for at in 0..nodes {
            cluster.add_node(at, None);
        }
        cluster
    }

    fn add_node(&mut self, at: usize, zone: Option<&str>) {
        let disk = DiskStatus { storage_maximum: DISK_BYTES, ..DiskStatus::default() };
        let mut status =
            NodeStatus { disk_status: [(DISK.to_owned(), disk)].into(), ..NodeStatus::default() };
        status.conditions.set(ConditionType::Ready, Finding::Well, now());
        let spec = NodeSpec {
            allow_scheduling: true,
            zone: zone.map(|zone| zone.parse().unwrap()),
            disks: [(DISK.to_owned(), DiskSpec::of_new(DISK_BYTES))].into(),
            ..NodeSpec::default()
        };
        self.state.insert(Node { metadata: Metadata::new(name(at).as_str(), now()), spec, status }.into());
        let seen = ObservedDisk { available_bytes: DISK_BYTES, ..ObservedDisk::default() };
        let disks = [(DISK.to_owned(), seen)].into();
        let agent =
            ObservedAgent { link: AgentLink::Synced, disks, ..ObservedAgent::new("http://agent", now()) };
        self.agents.insert(name(at), agent);
    }

    /// Adds a volume with a replica on each of these nodes.
    fn add_volume(&mut self, volume: &str, nodes: &[usize], change: impl FnOnce(&mut Volume)) {
        let wanted = CreateVolume {
            name: volume.to_owned(),
            size_bytes: GIB,
            number_of_replicas: Some(u32::try_from(nodes.len()).unwrap()),
            replica_soft_anti_affinity: true,
            ..CreateVolume::default()
        };
        let Ok(Change::Store(mut stored)) = wanted.apply(&self.state, Secret::new([1; 32]), now()) else {
            panic!("{volume} is refused");
        };
        stored.spec.node_id = nodes.first().map(|node| name(*node));
        stored.status.current_node_id = stored.spec.node_id.clone();
        stored.status.state = VolumeState::Attached;
        stored.status.robustness = Robustness::Healthy;
        change(&mut stored);
        self.state.insert(stored.into());
        for node in nodes {
            self.add_replica(volume, &name(*node), DISK);
        }
    }

    fn add_replica(&mut self, volume: &str, node: &NodeName, disk: &str) -> String {
        let (volume_name, replica_id) = (VolumeName::new(volume).unwrap(), ReplicaId::from_random(self.next));
        self.next += 1;
        let replica = ReplicaSpec::instance_name(&volume_name, replica_id);
        let spec = ReplicaSpec {
            volume_name,
            volume_size: GIB,
            replica_id,
            node_id: node.clone(),
            disk_path: disk.to_owned(),
            disk_id: String::new(),
            desire_state: DesireState::Running,
            eviction_requested: false,
        };
        let metadata = Metadata::new(&replica, now());
        self.state.insert(Replica { metadata, spec, status: StoredReplicaStatus::default() }.into());
        replica
    }

    fn plan(&self) -> RebalancePlan {
        RebalanceInput::of(&self.state, &self.agents, SchedulingLimits::default(), &[]).unwrap().plan()
    }

    fn ask(&mut self, replica: &str) {
        let Ok(Change::Store(replica)) = super::ask(&self.state, replica, true) else {
            panic!("{replica} is asked already")
        };
        self.state.insert(replica.into());
    }

    /// Moves the replica as if the copy were over.
    fn carry_out(&mut self, found: &Move) {
        self.state.remove(&crate::objects::Key::new(crate::objects::Kind::Replica, &found.replica));
        self.add_replica(&found.volume, &found.to.node, &found.to.disk_path);
    }

    fn counts(&self) -> Vec<u32> {
        let on = |node: &str| self.state.replicas.scheduled_on(node).map_or(0, |disks| disks[DISK].replicas);
        self.state.nodes.keys().map(|node| on(node)).collect()
    }
}

fn words(plan: &RebalancePlan) -> Vec<String> {
    let word =
        |found: &Move| format!("{} {}>{} {:?}", found.volume, found.from_node, found.to.node, found.gain);
    plan.moves.iter().map(word).collect()
}

#[test]
fn an_empty_node_gets_its_share_and_no_more() {
    let mut cluster = Cluster::of(3);
    for at in 0..8 {
        cluster.add_volume(&format!("v{at}"), &[0, 1], |_| {});
    }
    let plan = cluster.plan();
    assert_eq!(plan.moves.len(), 5, "{:?}", words(&plan));
    assert!(plan.moves.iter().all(|found| found.gain == Gain::Room && found.to.node == name(2)));
    for found in &plan.moves {
        cluster.carry_out(found);
    }
    assert_eq!(cluster.counts(), [5, 6, 5]);
    assert_eq!(words(&cluster.plan()), Vec::<String>::new());
}

#[test]
fn a_difference_of_one_replica_moves_nothing() {
    let mut cluster = Cluster::of(2);
    cluster.add_volume("v0", &[0], |_| {});
    assert_eq!(words(&cluster.plan()), Vec::<String>::new());
    cluster.add_volume("v1", &[0], |_| {});
    assert_eq!(words(&cluster.plan()), ["v0 n0>n1 Room"]);
}

#[test]
fn moves_that_separate_replicas_are_planned_first() {
    let mut cluster = Cluster::of(0);
    for (at, zone) in ["x", "x", "y", "y"].into_iter().enumerate() {
        cluster.add_node(at, Some(zone));
    }
    for at in 0..6 {
        cluster.add_volume(&format!("full{at}"), &[0, 2], |_| {});
    }
    cluster.add_volume("same-zone", &[0, 1], |_| {});
    cluster.add_volume("same-node", &[3, 3], |_| {});
    let words = words(&cluster.plan());
    assert_eq!(words[..2], ["same-zone n0>n3 Zone", "same-node n3>n1 Zone"], "{words:?}");
    assert!(words[2..].iter().all(|word| word.ends_with("Room")), "{words:?}");
}

#[test]
fn best_effort_locality_moves_one_replica_to_the_node_of_the_volume() {
    let mut cluster = Cluster::of(3);
    let local = |volume: &mut Volume| volume.spec.data_locality = crate::objects::DataLocality::BestEffort;
    cluster.add_volume("v", &[0, 1], |volume| {
        local(volume);
        volume.spec.node_id = Some(name(2));
    });
    cluster.add_volume("w", &[0, 1], local);
    let plan = cluster.plan();
    assert_eq!(words(&plan), ["v n0>n2 Locality"]);
    cluster.carry_out(&plan.moves[0]);
    assert_eq!(words(&cluster.plan()), Vec::<String>::new());
}

#[test]
fn volumes_that_cannot_be_moved_now_are_listed_with_the_reason() {
    let mut cluster = Cluster::of(2);
    for (volume, state, robustness) in [
        ("detached", VolumeState::Detached, Robustness::Unknown),
        ("degraded", VolumeState::Attached, Robustness::Degraded),
    ] {
        cluster.add_volume(volume, &[0], |volume| {
            (volume.status.state, volume.status.robustness) = (state, robustness);
        });
    }
    cluster.add_volume("moving", &[0], |_| {});
    cluster.add_volume("grows", &[0], |volume| {
        volume.status.current_size = Some(GIB);
        volume.spec.size += GIB;
    });
    let moving = cluster.state.replicas.keys().find(|name| name.starts_with("moving")).unwrap().clone();
    cluster.ask(&moving);
    let plan = cluster.plan();
    assert_eq!(words(&plan), Vec::<String>::new());
    let reasons: Vec<&str> = plan.left_out.keys().copied().collect();
    assert_eq!(
        reasons,
        [
            "being expanded",
            "having a replica that leaves its place already",
            "not attached, and replicas are moved only while their volume is",
            "not healthy"
        ]
    );
    let under_way: Vec<_> = plan.under_way.iter().map(|left| left.replica.as_deref()).collect();
    assert_eq!(under_way, [Some(moving.as_str())]);
}

#[test]
fn a_move_under_way_is_counted_on_before_and_after_its_copy_has_begun() {
    let mut cluster = Cluster::of(2);
    for at in 0..4 {
        cluster.add_volume(&format!("v{at}"), &[0], |_| {});
    }
    let first = cluster.plan().moves;
    assert_eq!(first.len(), 2);
    for found in &first {
        cluster.ask(&found.replica);
    }
    assert_eq!(words(&cluster.plan()), Vec::<String>::new());
    for found in &first {
        cluster.add_replica(&found.volume, &found.to.node, DISK);
    }
    assert_eq!(cluster.counts(), [4, 2]);
    assert_eq!(words(&cluster.plan()), Vec::<String>::new());
}

#[test]
fn only_the_volumes_that_were_named_are_moved() {
    let mut cluster = Cluster::of(2);
    for at in 0..4 {
        cluster.add_volume(&format!("v{at}"), &[0], |_| {});
    }
    let input = |only: &[&str]| {
        let only: Vec<String> = only.iter().map(|name| (*name).to_owned()).collect();
        RebalanceInput::of(&cluster.state, &cluster.agents, SchedulingLimits::default(), &only)
    };
    assert_eq!(words(&input(&["v3"]).unwrap().plan()), ["v3 n0>n1 Room"]);
    assert_eq!(input(&["v3", "x"]).unwrap_err(), RequestError::NoVolume("x".to_owned()));
}

proptest! {
    /// Starts from any places. Moves come to an end, and no node has two replicas of a volume while another
    /// one has none. No disk has two more than another one, unless a volume rules it out.
    #[test]
    fn moves_end_with_an_even_distribution(
        nodes in 2..6usize,
        volumes in prop::collection::vec((any::<u8>(), any::<u8>()), 1..25),
        at_a_time in 1..4usize,
    ) {
        let mut cluster = Cluster::of(nodes);
        for (at, (one, other)) in volumes.iter().enumerate() {
            let places = [usize::from(*one) % nodes, usize::from(*other) % nodes];
            cluster.add_volume(&format!("v{at}"), &places, |_| {});
        }
        let mut rounds = 0;
        loop {
            let plan = cluster.plan();
            if plan.moves.is_empty() {
                break;
            }
            for found in plan.moves.iter().take(at_a_time) {
                cluster.carry_out(found);
            }
            rounds += 1;
            prop_assert!(rounds <= 4 * volumes.len(), "no end: {:?}", words(&plan));
        }
        for volume in cluster.state.volumes.values() {
            let on: BTreeSet<_> =
                cluster.state.replicas_of(&volume.spec.volume_name)
                    .map(|replica| &replica.spec.node_id).collect();
            prop_assert_eq!(on.len(), 2, "{} is on one node", volume.metadata.name);
        }
        if nodes > 2 {
            let counts = cluster.counts();
            let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
            prop_assert!(most - least <= 2, "{counts:?}");
        }
    }
}
