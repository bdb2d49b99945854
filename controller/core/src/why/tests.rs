//! Tests one volume, v, of replicas 1, 2 and 3 on nodes a, b and c, attached to a; each case changes a
//! little.

use std::collections::BTreeMap;

use shorthorn_types::{Generation, ReplicaId, ReplicaReport, View, ViewId, VolumeName};

use super::*;
use crate::example::status_of_engine;
use crate::objects::{
    DesireState, EnginePhase, EngineSpec, Finding, Frontend, MemberRecord, Metadata, ReplicaSpec, Robustness,
    Secret, StoredEngineStatus, StoredReplicaStatus,
};
use crate::observed::{self, ObservedAgent};
use crate::observed::{GrantWanted, Instance, InstanceState, MemberStatus, ObservedDisk, ScrubStatus};
use crate::requests::{Change, CreateVolume};
use crate::salvage;

struct Case {
    cluster: ClusterState,
    agents: Agents,
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_000_000 + second).unwrap()
}

fn id(n: u64) -> ReplicaId {
    ReplicaId::from_random(n)
}

fn node(n: u64) -> NodeName {
    NodeName::new(["a", "b", "c"][usize::try_from(n).unwrap() - 1]).unwrap()
}

fn view(number: u32, ids: &[u64]) -> View {
    let members = Members::new(ids.iter().copied().map(id)).unwrap();
    View { id: ViewId { generation: Generation::new(1, 0), number }, members }
}

fn replica(n: u64) -> Replica {
    let volume_name = VolumeName::new("v").unwrap();
    Replica {
        metadata: Metadata::new(ReplicaSpec::instance_name(&volume_name, id(n)), at(0)),
        spec: ReplicaSpec {
            volume_name,
            volume_size: 1 << 30,
            replica_id: id(n),
            node_id: node(n),
            disk_path: "/disk".to_owned(),
            disk_id: "disk".to_owned(),
            desire_state: DesireState::Running,
            eviction_requested: false,
        },
        status: StoredReplicaStatus {
            current_state: CurrentState::Running,
            ..StoredReplicaStatus::default()
        },
    }
}

fn engine() -> Engine {
    let members = (1..=3).map(|n| (id(n), MemberRecord::of(MemberMode::Member)));
    Engine {
        metadata: Metadata::new("v", at(0)),
        spec: EngineSpec {
            volume_name: VolumeName::new("v").unwrap(),
            volume_size: 1 << 30,
            node_id: Some(node(1)),
            desire_state: DesireState::Running,
            attach: Some(1),
            frontend: Frontend::Auto,
            replica_address_map: BTreeMap::new(),
            map_revision: 0,
        },
        status: StoredEngineStatus {
            current_state: CurrentState::Running,
            seen_attach: Some(1),
            phase: Some(EnginePhase::Serving),
            replica_mode_map: members.collect(),
            ..StoredEngineStatus::default()
        },
    }
}

impl Case {
    fn healthy() -> Case {
        let wanted = CreateVolume { name: "v".to_owned(), size_bytes: 1 << 30, ..CreateVolume::default() };
        let Ok(Change::Store(mut volume)) =
            wanted.apply(&ClusterState::default(), Secret::new([1; 32]), at(0))
        else {
            panic!("the volume is refused");
        };
        volume.status.state = VolumeState::Attached;
        volume.status.robustness = Robustness::Healthy;
        volume.status.current_node_id = Some(node(1));
        volume.status.attach = Some(1);
        volume.status.attach_started_at = Some(at(0));
        let mut cluster = ClusterState::default();
        cluster.insert(volume.into());
        cluster.insert(engine().into());
        (1..=3).for_each(|n| cluster.insert(replica(n).into()));
        let mut agents = Agents::default();
        for n in 1..=3 {
            let mut agent = ObservedAgent::new("http://agent", at(0));
            agent.link = AgentLink::Synced;
            let disk =
                ObservedDisk { total_bytes: 100 << 30, available_bytes: 50 << 30, ..ObservedDisk::default() };
            agent.disks.insert("/disk".to_owned(), disk);
            agents.insert(node(n), agent);
        }
        let mut case = Case { cluster, agents };
        case.engine_says(status_of_engine(1, EnginePhase::Serving));
        case
    }

    fn engine_says(&mut self, status: observed::EngineStatus) {
        self.engine().status.phase = Some(status.phase);
        let instance = Instance {
            state: InstanceState::Running,
            message: None,
            detail: Detail::Engine(Box::new(ObservedEngine::of(1, status))),
        };
        let key = InstanceKey::engine(&VolumeName::new("v").unwrap());
        self.agents.get_mut(&node(1)).unwrap().instances.insert(key, instance);
    }

    fn engine(&mut self) -> &mut Engine {
        self.cluster.engines.get_mut("v").unwrap()
    }

    fn volume(&mut self) -> &mut Volume {
        self.cluster.volumes.get_mut("v").unwrap()
    }

    fn replica(&mut self, n: u64, change: impl FnOnce(&mut StoredReplicaStatus)) {
        let mut replica = self.cluster.replicas[&format!("v-{}", id(n))].clone();
        change(&mut replica.status);
        self.cluster.insert(replica.into());
    }

    /// Sets replica 3 to `mode` since second 0, for that reason.
    fn away(&mut self, mode: MemberMode, message: &str) {
        let member =
            MemberRecord { message: message.to_owned(), away_since_ms: Some(1), ..MemberRecord::of(mode) };
        self.engine().status.replica_mode_map.insert(id(3), member);
        self.replica(3, |status| status.failed_at = Some(at(0)));
        if mode != MemberMode::Rebuilding {
            self.replica(3, |status| status.lost_since = Some(at(0)));
        }
    }

    fn silence(&mut self, n: u64) {
        let link = AgentLink::Down { since: at(0), reason: "connection refused".to_owned() };
        self.agents.get_mut(&node(n)).unwrap().link = link;
    }

    fn condition(&mut self, kind: ConditionType, reason: &'static str, message: &str) {
        self.volume().status.conditions.set(kind, Finding::wrong(reason, message), at(0));
    }

    /// Returns the explanation at second 60.
    fn said(&self) -> Explanation {
        let volume = &self.cluster.volumes["v"];
        explain(&self.cluster, &self.agents, volume, Settings::default(), at(60))
    }
}

fn check(name: &str, case: &Case, healthy: bool, words: &[&str]) {
    let said = case.said();
    let text = [said.sentences.join("\n"), said.hints.join("\n")].join("\n");
    assert_eq!(said.healthy, healthy, "{name}:\n{text}");
    for word in words {
        assert!(text.contains(word), "{name}: {word:?} is not in\n{text}");
    }
    assert!(!text.contains("\n\n") && !said.sentences.is_empty(), "{name}:\n{text}");
}

#[test]
fn volumes_that_serve() {
    let case = Case::healthy();
    check("healthy", &case, true, &["Volume v is healthy", "on node a", "3 of 3 replicas"]);
    assert!(case.said().hints.is_empty());

    let mut case = Case::healthy();
    case.away(MemberMode::Failed, "no answer for 5 s");
    case.silence(3);
    let words = [
        "degraded",
        "2 of 3",
        "on node c is missing since",
        "(1 min 0 s ago)",
        "the node is silent",
        "connection refused",
        "The controller replaces the replica in 9 min 0 s",
        "shorthorn-agent running",
    ];
    check("waiting for a replica", &case, false, &words);

    let mut case = Case::healthy();
    let late = MemberRecord::awaited("late for 5250 ms".to_owned());
    case.engine().status.replica_mode_map.insert(id(3), late);
    let words = [
        "Volume v is slow",
        "3 of 3 replicas",
        "on node c is slow: late for 5250 ms",
        "disk /disk of node c",
    ];
    check("slow", &case, false, &words);
}

#[test]
fn volumes_that_are_copied_or_compared() {
    let mut case = Case::healthy();
    case.away(MemberMode::Rebuilding, "");
    let copy = CopyStatus { total_bytes: 10 << 30, left_bytes: 4 << 30, bytes_per_s: 100 << 20 };
    let rebuilt = MemberStatus { copy: Some(copy), ..MemberStatus::of(id(3), MemberMode::Rebuilding) };
    let resync = Some(CopyStatus { total_bytes: 1 << 20, left_bytes: 1 << 19, bytes_per_s: 0 });
    case.engine_says(observed::EngineStatus {
        members: vec![rebuilt],
        resync,
        ..status_of_engine(1, EnginePhase::Serving)
    });
    let words = [
        "is being rebuilt: 60 % done, 4 GiB of 10 GiB remaining at 100 MiB/s, about 40 s left",
        "an unclean stop: 50 % done",
    ];
    check("rebuilding", &case, false, &words);

    let mut case = Case::healthy();
    case.away(MemberMode::Rebuilding, "replica 00000002 cannot read 4096 bytes at 8192 of a snapshot");
    let words =
        ["on node c is being rebuilt: replica 00000002 cannot read 4096 bytes at 8192 of a snapshot."];
    check("a rebuild that waits", &case, false, &words);

    let mut case = Case::healthy();
    case.agents.get_mut(&node(2)).unwrap().disks.get_mut("/disk").unwrap().available_bytes = 12 << 20;
    check("disk full", &case, false, &["Disk /disk of node b", "is full (12 MiB of 100 GiB", "Make room"]);

    let mut case = Case::healthy();
    let scrub =
        ScrubStatus { found: 3, repaired: 1, last: Some("at 4096".to_owned()), ..ScrubStatus::default() };
    case.engine_says(observed::EngineStatus {
        scrub: Some(scrub),
        ..status_of_engine(1, EnginePhase::Serving)
    });
    check("scrub", &case, false, &["found 3 places", "volume scrub v --repair"]);
}

#[test]
fn volumes_that_have_lost_something() {
    let mut case = Case::healthy();
    case.engine().status.lost_writes = true;
    check(
        "lost writes",
        &case,
        false,
        &["may have lost writes", "on node a", "volume detach v", "file system"],
    );

    let mut case = Case::healthy();
    case.engine().status.damaged_ranges = 2;
    check(
        "no sound copy",
        &case,
        false,
        &["is damaged", "2 ranges", "shorthorn-engine@v on node a", "backup"],
    );

    let mut case = Case::healthy();
    case.away(MemberMode::Failed, "I/O error");
    case.condition(ConditionType::Scheduled, "NoPlace", "3 of 4 replicas have a place; b: full");
    check("no place", &case, false, &["No disk can take a replacement", "b: full", "I/O error", "disk add"]);
}

#[test]
fn volumes_that_wait_for_the_arbiter() {
    let mut case = Case::healthy();
    let granted = view(2, &[1]);
    let honoured = ReplicaReport { committed: view(1, &[1, 2]), proposed: vec![] };
    let wanted = GrantWanted { view: view(3, &[2]), honoured, stored: view(3, &[2]).members };
    case.engine_says(observed::EngineStatus {
        grant_wanted: Some(wanted),
        ..status_of_engine(1, EnginePhase::Frozen)
    });
    check(
        "waiting for the arbiter",
        &case,
        false,
        &["is frozen", "only half", "v-00000002 on node b", "has been sent"],
    );
    case.volume().status.arbiter = salvage::arbiter(1, id(1));
    case.condition(
        ConditionType::Granted,
        "NotGranted",
        &format!("not granted: view {granted} is granted already"),
    );
    let words = ["view 1.0/2", "The volume waits for v-00000001 on node a", "volume salvage v"];
    check("refused by the arbiter", &case, false, &words);
}

#[test]
fn volumes_whose_engine_cannot_serve() {
    let mut case = Case::healthy();
    case.engine_says(status_of_engine(1, EnginePhase::Frozen));
    case.engine().status.message = Some("1 of 3".to_owned());
    case.away(MemberMode::Failed, "connection reset");
    let words = [
        "too few replicas answer",
        "requests wait: 1 of 3",
        "on node c is missing",
        "connection reset",
        "volume salvage v",
    ];
    check("no quorum", &case, false, &words);

    let mut case = Case::healthy();
    case.engine().status.current_state = CurrentState::Unknown;
    case.silence(1);
    check(
        "silent node",
        &case,
        false,
        &["Node a is silent since", "connection refused", "most likely it still serves"],
    );

    let mut case = Case::healthy();
    case.engine().status.current_state = CurrentState::Error;
    case.engine().status.phase = None;
    case.engine().status.message = Some("no frontend works".to_owned());
    check(
        "engine error",
        &case,
        false,
        &["engine of volume v is error: no frontend works", "shorthorn-engine@v"],
    );
}

#[test]
fn volumes_on_their_way() {
    let mut case = Case::healthy();
    case.volume().status.state = VolumeState::Attaching;
    case.condition(ConditionType::Settled, "WaitingForReplicas", "waiting for replicas");
    case.replica(2, |status| {
        status.current_state = CurrentState::Error;
        status.message = "the directory is missing".to_owned();
    });
    let words = [
        "attaching to node a, since",
        "waiting for replicas",
        "on node b does not run (error): the directory",
        "volume detach v",
        "volume salvage v",
    ];
    check("attaching stuck", &case, false, &words);

    let mut case = Case::healthy();
    case.volume().status.state = VolumeState::Creating;
    case.condition(ConditionType::Scheduled, "NoPlace", "there are no nodes");
    check("creating", &case, false, &["no place for all its replicas: there are no nodes", "disk add"]);

    let mut case = Case::healthy();
    case.volume().status.state = VolumeState::Detached;
    check("detached", &case, true, &["is detached: no process runs", "volume attach v"]);
    case.condition(
        ConditionType::Settled,
        REPLICAS_STOPPING,
        "the replicas are being stopped; v-1: no answer",
    );
    let words = ["the engine has stopped, and the replicas are being stopped; v-1: no answer."];
    check("detached with replicas", &case, true, &words);

    let mut case = Case::healthy();
    case.volume().status.state = VolumeState::Detaching;
    case.condition(ConditionType::Settled, "EngineNotStopped", "the device is in use by a mount");
    check("detaching", &case, false, &["is detaching: the device is in use by a mount", "unmount"]);
    case.engine().status.stop_refused = Some("in use".to_owned());
    case.engine().status.phase = Some(EnginePhase::Frozen);
    let words =
        ["The engine does not serve", "volume detach v --force, and then shorthornctl volume salvage v"];
    check("detaching a frozen volume", &case, false, &words);
    case.silence(1);
    let words = ["Node a is silent", "node delete a --force; then shorthornctl volume salvage v"];
    check("detaching from a silent node", &case, false, &words);

    let mut case = Case::healthy();
    case.volume().status.state = VolumeState::Detached;
    case.volume().status.salvage = Some(crate::objects::Salvage {
        replica_id: id(2),
        attach: 2,
        decided_at: at(0),
        by: "ann".to_owned(),
        reason: String::new(),
        losses: String::new(),
        done: false,
    });
    check("salvage", &case, false, &["being salvaged to replica v-00000002 on node b, as ann decided"]);
}

#[test]
fn a_replica_that_is_to_leave_a_drained_node_is_reported() {
    let mut case = Case::healthy();
    let mut drained = crate::objects::Node {
        metadata: Metadata::new("c", at(0)),
        spec: Default::default(),
        status: Default::default(),
    };
    drained.spec.eviction_requested = true;
    case.cluster.insert(drained.into());
    let name = ReplicaSpec::instance_name(&VolumeName::new("v").unwrap(), id(3));
    let leaves =
        format!("Replica {name} has to leave node c, which is drained: the replica is being replaced.");
    check("drained", &case, true, &[&leaves]);
    case.condition(ConditionType::Scheduled, "NoPlace", "no place");
    let cannot = "and cannot yet: no other disk can take it: no place.";
    check("drain is held", &case, true, &[cannot, "node uncordon c"]);
}

#[test]
fn an_expansion_reports_its_progress_and_obstacle() {
    let mut case = Case::healthy();
    let explain = |case: &Case| {
        explain(&case.cluster, &case.agents, &case.cluster.volumes["v"], Settings::default(), at(3))
    };
    let sentences = |case: &Case| explain(case).sentences.join("\n");
    assert!(!sentences(&case).contains("expanded"));
    let mut volume = case.cluster.volumes["v"].clone();
    (volume.spec.size, volume.status.current_size) = (3 << 30, Some(1 << 30));
    let finding = Finding::wrong("Expanding", "replica 00000001 does not grow: no space");
    volume.status.conditions.set(ConditionType::Expanded, finding, at(1));
    case.cluster.insert(volume.clone().into());
    let said = sentences(&case);
    let words = "is being expanded from 1 GiB to 3 GiB: replica 00000001 does not grow: no space.";
    assert!(said.contains(words), "{said}");
    let finding = Finding::wrong("NextAttach", "the device keeps its size");
    volume.status.conditions.set(ConditionType::Expanded, finding, at(2));
    case.cluster.insert(volume.into());
    let why = explain(&case);
    assert!(why.healthy, "its data is as safe as before");
    assert!(why.hints.iter().any(|hint| hint.contains("volume detach v")), "{:?}", why.hints);
}
