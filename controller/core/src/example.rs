//! A small cluster for tests. Nodes a, b and c are in reach with a disk each. Volume v has a replica on each,
//! is attached to a, and is healthy.

use std::collections::BTreeMap;

use shorthorn_types::{Generation, ReplicaId, VolumeName};

use crate::objects::{
    ConditionType, Conditions, CurrentState, DataState, DesireState, DiskSpec, Engine, EnginePhase, Finding,
    Frontend, FrontendStatus, MemberMode, MemberRecord, Metadata, Node, NodeSpec, NodeStatus, Replica,
    ReplicaSpec, Robustness, Secret, StoredReplicaStatus, Volume, VolumeState,
};
use crate::observed::{
    AgentInfo, AgentLink, Agents, Detail, EngineStatus, Instance, InstanceKey, InstanceState, ObservedAgent,
    ObservedDisk, ObservedEngine,
};
use crate::requests::{Change, CreateVolume};
use crate::{ClusterState, NodeName, Timestamp};

pub(crate) const DISK: &str = "/disk";
pub(crate) const VERSION: &str = "1.0.0";

pub(crate) struct Example {
    pub(crate) cluster: ClusterState,
    pub(crate) agents: Agents,
}

pub(crate) fn now() -> Timestamp {
    Timestamp::UNIX_EPOCH
}

pub(crate) fn id(number: u64) -> ReplicaId {
    ReplicaId::from_random(number)
}

fn name(node: &str) -> NodeName {
    NodeName::new(node).unwrap()
}

fn volume_name() -> VolumeName {
    VolumeName::new("v").unwrap()
}

/// Returns the status that an engine of v reports in that phase, without any member.
pub(crate) fn status_of_engine(attach: u64, phase: EnginePhase) -> EngineStatus {
    EngineStatus { phase, ..EngineStatus::starting(volume_name(), Generation::new(attach, 0), 1 << 30) }
}

/// Returns an engine of that attachment in that phase, without any member.
pub(crate) fn engine_in(attach: u64, phase: EnginePhase) -> ObservedEngine {
    ObservedEngine::of(attach, status_of_engine(attach, phase))
}

impl Example {
    pub(crate) fn new() -> Example {
        let wanted = CreateVolume { name: "v".to_owned(), size_bytes: 1 << 30, ..CreateVolume::default() };
        let made = wanted.apply(&ClusterState::default(), Secret::new([1; 32]), now());
        let Ok(Change::Store(mut volume)) = made else { panic!("{made:?}") };
        volume.status.state = VolumeState::Attached;
        volume.status.robustness = Robustness::Healthy;
        volume.spec.node_id = Some(name("a"));
        volume.status.current_node_id = Some(name("a"));
        volume.status.attach = Some(1);
        volume.status.first_members = [1, 2, 3].map(id).to_vec();
        volume.status.conditions.set(ConditionType::Healthy, Finding::Well, now());
        let mut engine = Engine::of_new(&volume, now());
        engine.spec.node_id = Some(name("a"));
        engine.spec.desire_state = DesireState::Running;
        (engine.spec.attach, engine.status.seen_attach) = (Some(1), Some(1));
        engine.status.current_state = CurrentState::Running;
        engine.status.phase = Some(EnginePhase::Serving);
        let mut example = Example { cluster: ClusterState::default(), agents: Agents::default() };
        for (number, node) in [(1, "a"), (2, "b"), (3, "c")] {
            engine.status.replica_mode_map.insert(id(number), MemberRecord::of(MemberMode::Member));
            example.add_node(node);
            example.add_replica(number, node);
        }
        example.cluster.insert(volume.into());
        example.cluster.insert(engine.into());
        let status =
            EngineStatus { version: Some(VERSION.to_owned()), ..status_of_engine(1, EnginePhase::Serving) };
        example.engine_says(ObservedEngine::of(1, status));
        example
    }

    pub(crate) fn add_node(&mut self, node: &str) {
        let mut conditions = Conditions::default();
        conditions.set(ConditionType::Ready, Finding::Well, now());
        let disks = BTreeMap::from([(DISK.to_owned(), DiskSpec::of_new(100 << 30))]);
        let status = NodeStatus { conditions, version: VERSION.to_owned(), ..NodeStatus::default() };
        let spec = NodeSpec { allow_scheduling: true, disks, ..NodeSpec::default() };
        self.cluster.insert(Node { metadata: Metadata::new(node, now()), spec, status }.into());
        let mut agent = ObservedAgent::new("http://agent", now());
        agent.link = AgentLink::Synced;
        let ublk = FrontendStatus { name: Frontend::Ublk, usable: true, reason: String::new() };
        agent.info = Some(AgentInfo {
            name: node.to_owned(),
            version: VERSION.to_owned(),
            data_address: Some(format!("10.0.0.{}", node.as_bytes()[0])),
            frontends: vec![ublk],
            feature_level: 1,
            ..AgentInfo::default()
        });
        let disk = ObservedDisk {
            uuid: Some(format!("disk-of-{node}")),
            total_bytes: 100 << 30,
            available_bytes: 50 << 30,
            ..ObservedDisk::default()
        };
        agent.disks.insert(DISK.to_owned(), disk);
        self.agents.insert(name(node), agent);
    }

    pub(crate) fn add_replica(&mut self, number: u64, node: &str) {
        let spec = ReplicaSpec {
            volume_name: volume_name(),
            volume_size: 1 << 30,
            replica_id: id(number),
            node_id: name(node),
            disk_path: DISK.to_owned(),
            disk_id: String::new(),
            desire_state: DesireState::Running,
            eviction_requested: false,
        };
        let status = StoredReplicaStatus {
            current_state: CurrentState::Running,
            data: DataState::Present,
            healthy_at: Some(now()),
            ..StoredReplicaStatus::default()
        };
        let metadata = Metadata::new(ReplicaSpec::instance_name(&volume_name(), id(number)), now());
        self.cluster.insert(Replica { metadata, spec, status }.into());
    }

    pub(crate) fn engine_says(&mut self, engine: ObservedEngine) {
        let detail = Detail::Engine(Box::new(engine));
        let instance = Instance { state: InstanceState::Running, message: None, detail };
        let mut agent = self.agents.get_mut(&name("a")).unwrap();
        agent.instances.insert(InstanceKey::engine(&volume_name()), instance);
    }

    /// Returns the observed agent, for changes of anything but its instances.
    pub(crate) fn agent(&mut self, node: &str) -> &mut ObservedAgent {
        self.agents.not_indexed(&name(node)).unwrap()
    }

    pub(crate) fn info(&mut self, node: &str) -> &mut AgentInfo {
        self.agent(node).info.as_mut().unwrap()
    }

    pub(crate) fn node(&mut self, node: &str) -> &mut Node {
        self.cluster.nodes.get_mut(node).unwrap()
    }

    pub(crate) fn volume(&mut self) -> &mut Volume {
        self.cluster.volumes.get_mut("v").unwrap()
    }

    pub(crate) fn engine(&mut self) -> &mut Engine {
        self.cluster.engines.get_mut("v").unwrap()
    }

    pub(crate) fn replica(&mut self, number: u64, change: impl FnOnce(&mut Replica)) {
        let mut replica = self.cluster.replicas[&format!("v-{}", id(number))].clone();
        change(&mut replica);
        self.cluster.insert(replica.into());
    }
}
