//! Volume v has replicas on nodes a and b and is attached to c; a does not answer and is cordoned.

use shorthorn_types::{ReplicaId, VolumeName};

use super::*;
use crate::given_up_places;
use crate::objects::{
    DataState, DesireState, Engine, Finding, Metadata, NodeSpec, NodeStatus, Replica, ReplicaSpec, Secret,
    StoredReplicaStatus, VolumeState,
};
use crate::observed::AgentLink;
use crate::requests::CreateVolume;

fn now() -> Timestamp {
    Timestamp::UNIX_EPOCH
}

fn node(name: &str) -> NodeName {
    NodeName::new(name).unwrap()
}

fn replica(n: u64, on: &str) -> Replica {
    let volume_name = VolumeName::new("v").unwrap();
    let replica_id = ReplicaId::from_random(n);
    Replica {
        metadata: Metadata::new(ReplicaSpec::instance_name(&volume_name, replica_id), now()),
        spec: ReplicaSpec {
            volume_name,
            volume_size: 1 << 30,
            replica_id,
            node_id: node(on),
            disk_path: "/disk".to_owned(),
            disk_id: "disk".to_owned(),
            desire_state: DesireState::Running,
            eviction_requested: false,
        },
        status: StoredReplicaStatus {
            data: DataState::Present,
            healthy_at: Some(now()),
            ..StoredReplicaStatus::default()
        },
    }
}

struct Cluster {
    state: ClusterState,
    agents: Agents,
}

impl Cluster {
    fn new() -> Cluster {
        let (mut state, mut agents) = (ClusterState::default(), Agents::default());
        for name in ["a", "b", "c"] {
            let mut status = NodeStatus::default();
            let finding =
                if name == "a" { Finding::wrong("AgentUnreachable", "no answer") } else { Finding::Well };
            status.conditions.set(ConditionType::Ready, finding, now());
            let spec = NodeSpec { allow_scheduling: name != "a", ..NodeSpec::default() };
            state.insert(Node { metadata: Metadata::new(name, now()), spec, status }.into());
            let mut agent = ObservedAgent::new("http://agent", now());
            if name != "a" {
                agent.link = AgentLink::Synced;
            }
            agents.insert(node(name), agent);
        }
        let wanted = CreateVolume { name: "v".to_owned(), size_bytes: 1 << 30, ..CreateVolume::default() };
        let Ok(Change::Store(mut volume)) = wanted.apply(&state, Secret::new([1; 32]), now()) else {
            panic!("the volume is refused");
        };
        volume.spec.node_id = Some(node("c"));
        volume.status.state = VolumeState::Attached;
        state.insert(volume.into());
        state.insert(replica(1, "a").into());
        state.insert(replica(2, "b").into());
        Cluster { state, agents }
    }

    fn change_node(&mut self, change: impl FnOnce(&mut Node)) {
        let mut node = self.state.nodes["a"].clone();
        change(&mut node);
        self.state.insert(node.into());
    }

    fn change_replica(&mut self, n: u64, change: impl FnOnce(&mut Replica)) {
        let name = ReplicaSpec::instance_name(&VolumeName::new("v").unwrap(), ReplicaId::from_random(n));
        let mut replica = self.state.replicas.get(&name).unwrap().clone();
        change(&mut replica);
        self.state.insert(replica.into());
    }

    fn delete(&self, force: bool) -> Result<Change<Node>, RequestError> {
        let wanted = DeleteNode { name: "a".to_owned(), confirm: "a".to_owned(), force };
        wanted.apply(&self.state, &self.agents, now())
    }
}

#[test]
fn a_node_that_never_returns_is_given_up() {
    let mut cluster = Cluster::new();
    assert!(
        !given_up_places::is_node_given_up(&cluster.state, &node("a"))
            && given_up_places::is_node_given_up(&cluster.state, &node("z"))
    );
    let Change::Store(deleted) = cluster.delete(false).unwrap() else { panic!("it is so already") };
    assert_eq!(deleted.spec, cluster.state.nodes["a"].spec, "a deletion changes nothing else");
    cluster.state.insert(deleted.clone().into());
    assert!(given_up_places::is_node_given_up(&cluster.state, &node("a")) && is_named(&cluster.state, "a"));
    assert_eq!(cluster.delete(false), Ok(Change::AlreadySo(deleted)));
    let unconfirmed = DeleteNode { name: "b".to_owned(), confirm: "a".to_owned(), force: true };
    let refused = unconfirmed.apply(&cluster.state, &cluster.agents, now());
    assert_eq!(refused, Err(RequestError::NodeNotConfirmed("b".to_owned())));
    let unknown = DeleteNode { name: "z".to_owned(), ..DeleteNode::default() };
    assert!(matches!(unknown.apply(&cluster.state, &cluster.agents, now()), Err(RequestError::NoNode(_))));
}

#[test]
fn a_node_that_answers_is_never_given_up() {
    let mut cluster = Cluster::new();
    cluster.agents.get_mut(&node("a")).unwrap().link = AgentLink::Synced;
    assert_eq!(cluster.delete(true), Err(RequestError::NodeAnswers("a".to_owned())));
    // This controller does not know it yet, and the last one did.
    let mut cluster = Cluster::new();
    cluster.change_node(|node| node.status.conditions.set(ConditionType::Ready, Finding::Well, now()));
    assert_eq!(cluster.delete(true), Err(RequestError::NodeAnswers("a".to_owned())));
}

#[test]
fn a_node_with_an_attached_volume_is_not_given_up_even_by_force() {
    let mut cluster = Cluster::new();
    let mut volume = cluster.state.volumes["v"].clone();
    volume.spec.node_id = Some(node("a"));
    cluster.state.insert(volume.into());
    for force in [false, true] {
        let error = cluster.delete(force).unwrap_err().to_string();
        assert!(error.contains("attached to node a: v") && error.contains("volume detach"), "{error}");
    }
}

#[test]
fn force_gives_up_a_node_from_which_a_volume_cannot_be_detached() {
    let mut cluster = Cluster::new();
    let mut volume = cluster.state.volumes["v"].clone();
    volume.spec.node_id = None;
    volume.status.current_node_id = Some(node("a"));
    volume.status.state = VolumeState::Detaching;
    let mut engine = Engine::of_new(&volume, now());
    engine.spec.node_id = Some(node("a"));
    cluster.state.insert(volume.into());
    cluster.state.insert(engine.into());
    let error = cluster.delete(false).unwrap_err().to_string();
    assert!(error.contains("attached to node a: v") && error.contains("--force"), "{error}");
    assert!(cluster.delete(true).is_ok());
}

#[test]
fn only_force_gives_up_a_node_that_is_open_or_has_the_last_data() {
    let mut cluster = Cluster::new();
    cluster.change_node(|node| node.spec.allow_scheduling = true);
    assert_eq!(cluster.delete(false), Err(RequestError::NodeNotCordoned("a".to_owned())));
    assert!(cluster.delete(true).is_ok());
    let mut cluster = Cluster::new();
    cluster.change_replica(2, |replica| replica.status.failed_at = Some(now()));
    let error = cluster.delete(false).unwrap_err().to_string();
    assert!(error.contains("complete replica of v;"), "{error}");
    assert!(cluster.delete(true).is_ok());
    // It has left the view: nothing is lost with it.
    cluster.change_replica(1, |replica| replica.status.failed_at = Some(now()));
    assert!(cluster.delete(false).is_ok());
}

#[test]
fn many_names_are_cut_off() {
    assert_eq!(listed(&["a", "b"]), "a, b");
    assert_eq!(listed(&["v"; 12]), "v, v, v, v, v, v, v, v, v, v and 2 more");
}
