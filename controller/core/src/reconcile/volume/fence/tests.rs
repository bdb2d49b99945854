use std::collections::BTreeMap;

use shorthorn_types::limits::MAX_MEMBERS;
use shorthorn_types::{Generation, Members, ReplicaId, ReplicaReport, View, ViewId, VolumeName};

use super::*;
use crate::objects::{
    CurrentState, DataState, EnginePhase, EngineSpec, Frontend, Key, Kind, Metadata, Node, Object, Replica,
    ReplicaSpec, Secret, StoredEngineStatus, StoredReplicaStatus, Volume, VolumeState, VolumeStatus,
};
use crate::observed::{
    AgentInfo, AgentLink, Agents, Detail, Instance, InstanceKey, InstanceState, ObservedAgent,
    ObservedReplica,
};
use crate::reconcile::{Context, Settings, reconcile};
use crate::requests::{Change, CreateVolume, RequestError, SalvageVolume};
use crate::{Action, ClusterState, NodeName, Timestamp};

const NODES: [&str; 3] = ["a", "b", "c"];
/// The number of the attachment whose engine is on node a, which does not answer.
const OLD: u64 = 2;

fn id(at: usize) -> ReplicaId {
    ReplicaId::from_random(at as u64 + 1)
}

fn node(at: usize) -> NodeName {
    NodeName::new(NODES[at]).unwrap()
}

fn view(attach: u64, number: u32, replicas: &[usize]) -> View {
    let members = Members::new(replicas.iter().map(|at| id(*at))).unwrap();
    View { id: ViewId { generation: Generation::new(attach, 1), number }, members }
}

fn first(replicas: usize) -> View {
    let members = Members::new((0..replicas).map(id)).unwrap();
    View { id: ViewId { generation: Generation::NEVER, number: 0 }, members }
}

/// A volume that is to leave node a, with a replica on each of the first `replicas` nodes.
struct Lost {
    cluster: ClusterState,
    agents: Agents,
}

impl Lost {
    fn new(replicas: usize) -> Lost {
        let wanted = CreateVolume { name: "v".to_owned(), size_bytes: 1 << 20, ..CreateVolume::default() };
        let Ok(Change::Store(mut volume)) =
            wanted.apply(&ClusterState::default(), Secret::new([1; 32]), Timestamp::UNIX_EPOCH)
        else {
            panic!("the volume is refused");
        };
        volume.status.state = VolumeState::Detaching;
        volume.status.current_node_id = Some(node(0));
        volume.status.attach = Some(OLD);
        let spec = EngineSpec {
            volume_name: VolumeName::new("v").unwrap(),
            volume_size: 1 << 20,
            node_id: Some(node(0)),
            desire_state: DesireState::Stopped,
            attach: Some(OLD),
            frontend: Frontend::Auto,
            replica_address_map: BTreeMap::new(),
            map_revision: 0,
        };
        let status =
            StoredEngineStatus { current_state: CurrentState::Unknown, ..StoredEngineStatus::default() };
        let metadata = Metadata::new("v", Timestamp::UNIX_EPOCH);
        let mut lost = Lost { cluster: ClusterState::default(), agents: Agents::default() };
        lost.cluster.insert(volume.into());
        lost.cluster.insert(Engine { metadata, spec, status }.into());
        for (at, name) in NODES.iter().enumerate().take(replicas) {
            lost.cluster.insert(Node::new(*name, Timestamp::UNIX_EPOCH).into());
            lost.cluster.insert(replica(at).into());
            let link = match at {
                0 => AgentLink::Down { since: Timestamp::UNIX_EPOCH, reason: "no answer".to_owned() },
                _ => AgentLink::Synced,
            };
            let info = Some(AgentInfo { name: (*name).to_owned(), ..AgentInfo::default() });
            let agent =
                ObservedAgent { link, info, ..ObservedAgent::new("http://agent", Timestamp::UNIX_EPOCH) };
            lost.agents.insert(node(at), agent);
            lost.replica_says(at, OLD, view(OLD, 1, &(0..replicas).collect::<Vec<_>>()));
        }
        lost
    }

    fn replica_says(&mut self, at: usize, attach: u64, committed: View) {
        let views = Some(Box::new(ReplicaReport { committed, proposed: Vec::new() }));
        let detail =
            Detail::Replica(ObservedReplica { attach: Some(attach), views, ..ObservedReplica::default() });
        let instance = Instance { state: InstanceState::Running, message: None, detail };
        let key = InstanceKey::replica(&VolumeName::new("v").unwrap(), id(at));
        self.agents.get_mut(&node(at)).unwrap().instances.insert(key, instance);
    }

    fn volume(&self) -> &Volume {
        &self.cluster.volumes["v"]
    }

    fn change(&mut self, change: impl FnOnce(&mut Volume)) {
        let mut volume = self.volume().clone();
        change(&mut volume);
        self.cluster.insert(volume.into());
    }

    /// Does a run and stores its result. Returns the replicas that have to refuse engines, each with the
    /// first generation not to refuse.
    fn run(&mut self) -> Vec<(String, u64)> {
        let now = Timestamp::UNIX_EPOCH + crate::reconcile::UNREACHABLE_AFTER;
        let (cluster, agents) = (&self.cluster, &self.agents);
        let context =
            Context { cluster, agents, now, random: [0; MAX_MEMBERS], settings: Settings::default() };
        let actions = reconcile(&context, &Key::new(Kind::Volume, "v")).actions;
        let mut fenced = Vec::new();
        for action in actions {
            match action {
                Action::Write(object) => self.cluster.insert(Object::clone(&object)),
                Action::Call(node, AgentCall::FenceReplica { attach, .. }) => {
                    assert!(
                        Some(attach) <= self.volume().status.attach,
                        "a number is used before it is stored"
                    );
                    fenced.push((node.to_string(), attach));
                }
                Action::Emit(_) => {}
                other => panic!("{other:?}"),
            }
        }
        fenced
    }

    /// Has the operator decide for the replica on node b, with that number.
    fn salvage(&mut self, attach: u64, done: bool) {
        self.change(|volume| {
            volume.status.arbiter = crate::salvage::arbiter(attach, id(1));
            volume.status.salvage = Some(crate::objects::Salvage {
                replica_id: id(1),
                attach,
                decided_at: Timestamp::UNIX_EPOCH,
                by: String::new(),
                reason: String::new(),
                losses: String::new(),
                done,
            });
        });
    }

    /// Draws the number and sends it to the replicas.
    fn begin(&mut self) {
        assert_eq!(self.run(), [], "the number is stored first");
        assert_eq!(self.volume().status.attach, Some(OLD + 1));
        self.run();
    }

    fn is_fenced(&self) -> bool {
        self.volume().status.fenced_attach == Some(OLD)
    }
}

fn replica(at: usize) -> Replica {
    let volume_name = VolumeName::new("v").unwrap();
    Replica {
        metadata: Metadata::new(ReplicaSpec::instance_name(&volume_name, id(at)), Timestamp::UNIX_EPOCH),
        spec: ReplicaSpec {
            volume_name,
            volume_size: 1 << 20,
            replica_id: id(at),
            node_id: node(at),
            disk_path: "/var/lib/longhorn".to_owned(),
            disk_id: String::new(),
            desire_state: DesireState::Running,
            eviction_requested: false,
        },
        status: StoredReplicaStatus {
            current_state: CurrentState::Running,
            ..StoredReplicaStatus::default()
        },
    }
}

#[test]
fn enough_replicas_that_refuse_the_engine_fence_it() {
    let mut lost = Lost::new(3);
    assert_eq!(lost.run(), []);
    let all = [("b".to_owned(), OLD + 1), ("c".to_owned(), OLD + 1)];
    assert_eq!(lost.run(), all);
    assert_eq!(lost.run(), all, "until they say so");
    lost.replica_says(1, OLD + 1, view(OLD, 1, &[0, 1, 2]));
    assert_eq!(lost.run(), all[1..]);
    assert!(!lost.is_fenced(), "two of three may go on yet");
    lost.replica_says(2, OLD + 1, view(OLD, 1, &[0, 1, 2]));
    lost.run();
    assert!(lost.is_fenced());
    assert_eq!(lost.volume().status.attach, Some(OLD + 1), "one number is enough");
    lost.run();
    let stopped = |replica: &Replica| replica.spec.desire_state == DesireState::Stopped;
    assert!(lost.cluster.replicas.values().all(stopped), "the detach continues");
}

#[test]
fn half_is_enough_unless_the_arbiter_granted_the_other_half() {
    let granted = view(OLD, 2, &[0]);
    for (grant, enough) in [(None, true), (Some(granted), false)] {
        let mut lost = Lost::new(2);
        if let Some(granted) = grant {
            let honoured = ReplicaReport { committed: view(OLD, 1, &[0, 1]), proposed: Vec::new() };
            lost.change(|volume| {
                let arbiter = &volume.status.arbiter;
                volume.status.arbiter = arbiter.ask(OLD, granted, &honoured, &granted.members).unwrap();
            });
        }
        lost.begin();
        lost.replica_says(1, OLD + 1, view(OLD, 1, &[0, 1]));
        lost.run();
        assert_eq!(lost.is_fenced(), enough, "{grant:?}");
    }
}

#[test]
fn replicas_that_have_lost_their_views_do_not_prove_a_fence() {
    let mut lost = Lost::new(3);
    lost.begin();
    lost.replica_says(1, OLD + 1, view(OLD, 1, &[0, 1, 2]));
    lost.replica_says(2, OLD + 1, first(3));
    lost.run();
    assert!(!lost.is_fenced());
    // Nor do several that agree, if an engine has served.
    let cases = [(true, None, false), (false, Some(OLD), false), (false, None, true)];
    for (was_member, served_attach, enough) in cases {
        let mut lost = Lost::new(3);
        let mut known = replica(0);
        known.status.healthy_at = was_member.then_some(Timestamp::UNIX_EPOCH);
        lost.cluster.insert(known.into());
        let mut engine = lost.cluster.engines["v"].clone();
        engine.status.served_attach = served_attach;
        lost.cluster.insert(engine.into());
        lost.begin();
        (1..3).for_each(|at| lost.replica_says(at, OLD + 1, first(3)));
        lost.run();
        assert_eq!(lost.is_fenced(), enough, "{was_member}, {served_attach:?}");
    }
}

#[test]
fn a_replica_that_does_not_report_its_views_is_not_counted() {
    let mut lost = Lost::new(2);
    lost.begin();
    lost.replica_says(1, OLD + 1, view(OLD, 1, &[0, 1]));
    for instance in lost.agents.get_mut(&node(1)).unwrap().instances.values_mut() {
        if let Detail::Replica(observed) = &mut instance.detail {
            observed.views = None;
        }
    }
    lost.run();
    assert!(!lost.is_fenced());
}

/// Returns a store that was restored from a backup: its volume is attached to node b.
fn restored(state: VolumeState) -> Lost {
    let mut lost = Lost::new(2);
    lost.change(|volume| {
        volume.status.state = state;
        volume.status.current_node_id = Some(node(1));
        volume.spec.node_id = Some(node(1));
    });
    lost
}

/// A device of an older engine may hold back requests from before the volume was attached elsewhere.
#[test]
fn after_a_restore_only_a_device_of_the_newest_known_attachment_continues() {
    for (since, expected) in [(OLD, OLD + 7), (OLD + 8, OLD + 8)] {
        let mut lost = restored(VolumeState::Attached);
        lost.change(|volume| volume.status.attached_since = Some(since));
        lost.replica_says(1, OLD + 7, view(OLD + 7, 1, &[0, 1]));
        lost.run();
        assert_eq!(lost.volume().status.attach, Some(OLD + 8));
        assert_eq!(lost.volume().status.attached_since, Some(expected));
    }
}

fn stale_since(lost: &Lost) -> Option<u64> {
    lost.volume().status.arbiter.stale_since()
}

#[test]
fn a_store_that_is_older_than_its_volume_shows_in_the_replicas() {
    for state in [VolumeState::Attached, VolumeState::Attaching, VolumeState::Detaching] {
        let mut lost = restored(state);
        lost.replica_says(1, OLD + 7, view(OLD + 7, 1, &[0, 1]));
        lost.run();
        assert_eq!(
            (lost.volume().status.attach, stale_since(&lost)),
            (Some(OLD + 8), Some(OLD + 8)),
            "{state:?}"
        );
        lost.replica_says(0, OLD + 20, view(OLD + 20, 2, &[0]));
        lost.run();
        assert_eq!(lost.volume().status.attach, Some(OLD + 8), "its node is not in reach");
    }
}

/// The number of its next attachment hides the difference.
#[test]
fn a_store_that_is_older_than_a_detached_volume_shows_when_it_is_attached() {
    for (known, stale) in [(OLD + 7, Some(OLD + 8)), (OLD, None)] {
        let mut lost = restored(VolumeState::Detached);
        lost.change(|volume| volume.status.current_node_id = None);
        lost.replica_says(1, known, view(known, 1, &[0, 1]));
        lost.run();
        assert_eq!((lost.volume().status.attach, stale_since(&lost)), (Some(known + 1), stale));
        assert_eq!(lost.volume().status.attached_since, Some(known + 1));
    }
}

#[test]
fn a_number_that_was_used_before_the_backup_was_restored_is_not_used_again() {
    let mut lost = restored(VolumeState::Attaching);
    lost.change(|volume| volume.status.attach = Some(OLD + 1));
    lost.replica_says(1, OLD + 1, view(OLD + 1, 1, &[0, 1]));
    lost.run();
    assert_eq!((lost.volume().status.attach, stale_since(&lost)), (Some(OLD + 2), Some(OLD + 2)));
    let mut launched = restored(VolumeState::Attaching);
    launched.replica_says(1, OLD, view(OLD, 1, &[0, 1]));
    launched.run();
    assert_eq!(stale_since(&launched), None, "that is the engine that was started");
}

#[test]
fn the_arbiter_grants_again_once_more_than_half_serve() {
    let mut lost = restored(VolumeState::Attached);
    let new = OLD + 8;
    lost.change(|volume| {
        volume.status.attach = Some(new);
        volume.status.arbiter = volume.status.arbiter.stale(new);
    });
    let stored = serde_json::to_string(&lost.volume().status).unwrap();
    assert_eq!(serde_json::from_str::<VolumeStatus>(&stored).unwrap(), lost.volume().status);
    let committed = view(new, 1, &[0, 1]);
    lost.replica_says(1, new, committed);
    lost.run();
    assert_eq!(stale_since(&lost), Some(new), "no engine of ours serves in that view");
    let mut engine = lost.cluster.engines["v"].clone();
    engine.spec.attach = Some(new);
    engine.spec.node_id = Some(node(1));
    engine.spec.desire_state = DesireState::Running;
    engine.status = StoredEngineStatus {
        current_state: CurrentState::Running,
        phase: Some(EnginePhase::Serving),
        generation: Some(committed.id.generation),
        endpoint: Some("/dev/longhorn/v".to_owned()),
        seen_attach: Some(new),
        ..StoredEngineStatus::default()
    };
    lost.cluster.insert(engine.into());
    lost.run();
    assert_eq!(stale_since(&lost), None);
    assert_eq!(lost.volume().status.arbiter.granted(), Some(committed));
}

/// Nodes a and c are destroyed with the engine and two of three replicas. The operator chooses the third.
#[test]
fn a_salvage_does_not_wait_for_an_engine_whose_node_is_given_up() {
    for (is_given_up, is_salvaged) in [(false, true), (true, false), (true, true)] {
        let mut lost = Lost::new(3);
        if is_given_up {
            let mut destroyed = lost.cluster.nodes["a"].clone();
            destroyed.metadata.deletion_timestamp = Some(Timestamp::UNIX_EPOCH);
            lost.cluster.insert(destroyed.into());
        }
        lost.agents.remove(&node(2));
        let mut chosen = replica(1);
        chosen.status.data = DataState::Present;
        lost.cluster.insert(chosen.into());
        lost.begin();
        let salvage = SalvageVolume {
            name: "v".to_owned(),
            replica: id(1).to_string(),
            confirm: "v".to_owned(),
            by: "test".to_owned(),
            reason: String::new(),
            losses: String::new(),
            known_attach: OLD + 1,
            are_all_known: false,
        };
        match salvage.apply(&lost.cluster, Timestamp::UNIX_EPOCH) {
            Ok(Change::Store(volume)) if is_given_up && is_salvaged => lost.cluster.insert(volume.into()),
            Err(RequestError::IsAttached(_)) if !is_given_up => {}
            _ => assert!(!is_salvaged, "{is_given_up}"),
        }
        lost.run();
        assert_eq!(lost.is_fenced(), is_given_up && is_salvaged);
        if lost.is_fenced() {
            lost.run();
            assert_eq!(lost.volume().status.state, VolumeState::Detached);
            assert!(lost.volume().status.pending_salvage().is_some());
        }
    }
}

#[test]
fn half_is_not_enough_if_grants_are_forgotten() {
    let mut lost = Lost::new(2);
    lost.begin();
    lost.change(|volume| volume.status.arbiter = volume.status.arbiter.stale(OLD + 1));
    lost.replica_says(1, OLD + 1, view(OLD, 1, &[0, 1]));
    lost.run();
    assert!(!lost.is_fenced());
}

/// The grant of a salvage counts only once the replica is the volume: until then the old engine may have a
/// majority.
#[test]
fn a_salvage_that_waits_does_not_fence_the_old_engine_by_its_own_grant() {
    for (replicas, done, enough) in [(3, false, false), (2, false, false), (3, true, true)] {
        let mut lost = Lost::new(replicas);
        lost.begin();
        let attach = lost.volume().status.attach.unwrap();
        lost.salvage(attach, done);
        // Only the chosen one refuses the old engine.
        let committed =
            if done { view(attach, 1, &[1]) } else { view(OLD, 1, &(0..replicas).collect::<Vec<_>>()) };
        lost.replica_says(1, attach, committed);
        lost.run();
        assert_eq!(lost.is_fenced(), enough, "of {replicas}, carried out: {done}");
    }
}

/// The agent of the chosen replica refuses a salvage whose number the replica knows already.
#[test]
fn the_fence_before_a_salvage_does_not_use_up_its_number() {
    // A salvage of an older version has drawn only its own number.
    for (drawn, number) in [(2, OLD + 1), (1, OLD + 1)] {
        let mut lost = Lost::new(3);
        let attach = OLD + drawn;
        lost.change(|volume| volume.status.attach = Some(attach));
        lost.salvage(attach, false);
        assert_eq!(lost.run(), [("b".to_owned(), number), ("c".to_owned(), number)], "{drawn}");
        for at in 1..3 {
            assert!(!lost.is_fenced());
            lost.replica_says(at, number, view(OLD, 1, &[0, 1, 2]));
            lost.run();
        }
        assert!(lost.is_fenced(), "by {number} of {attach}");
    }
}

/// A node that was broken into may report any number, also for volumes that it never had.
#[test]
fn numbers_far_above_the_stored_one_are_not_believed() {
    for reported in [u64::MAX, u64::MAX - 1, 1 << 63] {
        let mut lost = restored(VolumeState::Attaching);
        lost.replica_says(1, reported, view(OLD, 1, &[0, 1]));
        let engine = crate::observed::ObservedEngine {
            attach: Some(reported),
            ..crate::observed::ObservedEngine::default()
        };
        let instance = Instance {
            state: InstanceState::Stopped,
            message: None,
            detail: Detail::Engine(Box::new(engine)),
        };
        let key = InstanceKey::engine(&VolumeName::new("v").unwrap());
        lost.agents.get_mut(&node(1)).unwrap().instances.insert(key, instance);
        lost.change(|volume| volume.status.state = VolumeState::Detached);
        lost.change(|volume| volume.status.current_node_id = None);
        lost.run();
        assert_eq!(lost.volume().status.attach, Some(OLD + 1), "{reported}");
    }
}

/// Only a higher number starts an engine then.
#[test]
fn a_number_that_most_replicas_refuse_is_believed() {
    let used = 1 << 40;
    for (replicas, drawn) in [(vec![1], OLD + 1), (vec![0, 1], used + 1)] {
        let mut lost = restored(VolumeState::Detached);
        lost.change(|volume| volume.status.current_node_id = None);
        lost.agents.get_mut(&node(0)).unwrap().link = AgentLink::Synced;
        for at in replicas {
            lost.replica_says(at, used, view(OLD, 1, &[0, 1]));
        }
        lost.run();
        assert_eq!(lost.volume().status.attach, Some(drawn));
    }
}
