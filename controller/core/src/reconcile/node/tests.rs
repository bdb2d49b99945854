use super::*;
use crate::example::{Example, status_of_engine};
use crate::left_out_objects::LeftOut;
use crate::observed::{AgentInfo, AgentLink, Agents, EngineStatus, ObservedDisk, ObservedEngine};
use crate::reconcile::{Settings, UNREACHABLE_AFTER};
use crate::{ClusterState, Timestamp};
use shorthorn_types::limits::MAX_MEMBERS;

const GIB: u64 = 1 << 30;

fn now() -> Timestamp {
    Timestamp::UNIX_EPOCH + UNREACHABLE_AFTER
}

/// Returns the agent of node a, which answers or has not for long, and has a disk with so much free.
fn agents(answers: bool, free_bytes: u64) -> Agents {
    let mut agent = ObservedAgent::new("http://a:1", Timestamp::UNIX_EPOCH);
    agent.from_object = true;
    if answers {
        agent.link = AgentLink::Synced;
    }
    agent.info = Some(AgentInfo { name: "a".to_owned(), ..AgentInfo::default() });
    let disk =
        ObservedDisk { total_bytes: 100 * GIB, available_bytes: free_bytes, ..ObservedDisk::default() };
    agent.disks.insert("/d".to_owned(), disk);
    let mut agents = Agents::default();
    agents.insert(NodeName::new("a").unwrap(), agent);
    agents
}

/// Runs the reconciler, and stores its result in the cluster state. Returns the reported events, and whether
/// the node is written.
fn run(cluster: &mut ClusterState, agents: &Agents) -> (Vec<(bool, &'static str)>, bool) {
    let context =
        Context { cluster, agents, now: now(), random: [0; MAX_MEMBERS], settings: Settings::default() };
    let decision = reconcile(&context, "a");
    let (mut reported, mut written) = (Vec::new(), false);
    for action in decision.actions {
        match action {
            Action::Write(object) => {
                cluster.insert(*object);
                written = true;
            }
            Action::Emit(event) if written => reported.push((event.warning, event.reason)),
            other => panic!("{other:?}"),
        }
    }
    (reported, written)
}

fn cluster() -> ClusterState {
    let mut cluster = ClusterState::default();
    cluster.insert(Node::new("a", now()).into());
    cluster
}

#[test]
fn each_change_of_reachability_is_reported_once() {
    let mut cluster = cluster();
    let (here, gone) = (agents(true, GIB), agents(false, GIB));
    assert_eq!(run(&mut cluster, &here), (vec![(false, "NodeReady")], true));
    assert_eq!(run(&mut cluster, &here), (vec![], false));
    assert_eq!(run(&mut cluster, &gone), (vec![(true, "NodeLost")], true));
    assert_eq!(run(&mut cluster, &gone), (vec![], false));
    assert_eq!(run(&mut cluster, &here), (vec![(false, "NodeReady")], true));
}

#[test]
fn free_space_is_stored_in_steps() {
    let mut cluster = cluster();
    let mut stored = |free_bytes| {
        let (_, written) = run(&mut cluster, &agents(true, free_bytes));
        let status = &cluster.nodes["a"].status;
        (status.disk_status["/d"].storage_available, status.free_space.clone(), written)
    };
    assert_eq!(stored(50 * GIB), (50 * GIB, "50.0 GiB of 100.0 GiB".to_owned(), true));
    assert_eq!(stored(50 * GIB - 1000), (50 * GIB, "50.0 GiB of 100.0 GiB".to_owned(), false));
    assert_eq!(stored(49 * GIB).0, 49 * GIB);
    assert_eq!(stored(0), (0, "0.0 GiB of 100.0 GiB".to_owned(), true));
    assert_eq!(stored(1).0, 1);
}

/// The node was given up, the volume was deleted without it, and the node is back.
#[test]
fn an_engine_of_a_deleted_volume_is_stopped_when_its_node_is_back() {
    let mut example = Example::new();
    let calls = |example: &Example| {
        let Example { cluster, agents } = example;
        let context =
            Context { cluster, agents, now: now(), random: [0; MAX_MEMBERS], settings: Settings::default() };
        let decision = reconcile(&context, "a");
        let calls: Vec<AgentCall> = decision
            .actions
            .into_iter()
            .filter_map(|action| match action {
                Action::Call(node, call) if node.as_str() == "a" => Some(call),
                _ => None,
            })
            .collect();
        (calls, decision.requeue_after)
    };
    let of_volume = |calls: &[AgentCall]| match calls {
        [AgentCall::StopInstance { instance, attach }] => Some((instance.name.clone(), (*attach)?)),
        [] => None,
        other => panic!("{other:#?}"),
    };
    assert_eq!(of_volume(&calls(&example).0), None, "it is in use");
    let (volume, engine) = (Key::new(Kind::Volume, "v"), Key::new(Kind::Engine, "v"));
    example.cluster.remove(&volume);
    assert_eq!(of_volume(&calls(&example).0), None, "its object sees to it");
    example.cluster.remove(&engine);
    let (stops, again) = calls(&example);
    assert_eq!((of_volume(&stops), again), (Some(("v".to_owned(), 1)), Some(GIVE_UP_CHECK)));
    for key in [volume, engine] {
        let mut cluster = example.cluster.clone();
        cluster.leave_out(key.clone(), LeftOut::default());
        let unknown = Example { cluster, agents: example.agents.clone() };
        assert_eq!(of_volume(&calls(&unknown).0), None, "{key} cannot be used");
    }
    let socket = |phase| {
        let frontend = Some(Frontend::Socket);
        ObservedEngine::of(1, EngineStatus { frontend, ..status_of_engine(1, phase) })
    };
    example.engine_says(socket(EnginePhase::Serving));
    assert_eq!(of_volume(&calls(&example).0), None, "its socket may have clients");
    example.engine_says(socket(EnginePhase::Frozen));
    assert_eq!(of_volume(&calls(&example).0), Some(("v".to_owned(), 1)));
}

#[test]
fn no_node_is_made_beside_one_that_was_left_out() {
    let mut agents = agents(true, GIB);
    agents.get_mut(&NodeName::new("a").unwrap()).unwrap().from_object = false;
    let mut cluster = ClusterState::default();
    cluster.leave_out(Key::new(Kind::Node, "a"), LeftOut::default());
    assert_eq!(run(&mut cluster, &agents), (vec![], false));
    cluster.forget_left_out(&Key::new(Kind::Node, "a"));
    assert!(run(&mut cluster, &agents).1, "it is new");
}
