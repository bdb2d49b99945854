use shorthorn_types::{Members, ViewId};

use super::*;
use crate::example::{Example, engine_in, id, now};
use crate::objects::{DesireState, EnginePhase};
use crate::observed::{AgentLink, Instance, ObservedEngine};
use crate::reconcile::Settings;

/// Runs `check` over the objects of the volume of the example.
fn with_objects<T>(example: &Example, check: impl FnOnce(&VolumeObjects<'_>) -> T) -> T {
    let context = Context {
        cluster: &example.cluster,
        agents: &example.agents,
        now: now(),
        random: Default::default(),
        settings: Settings::default(),
    };
    check(&VolumeObjects::of(&context, &example.cluster.volumes["v"]))
}

fn view(attach: u64, number: u32) -> View {
    let members = Members::new((1..=3).map(id)).unwrap();
    View { id: ViewId { generation: Generation::new(attach, 0), number }, members }
}

/// Has the agent of `node` report its replica, which has that number.
fn report(example: &mut Example, (number, node): (u64, &str), attach: u64, committed: View) {
    let views = Some(Box::new(ReplicaReport { committed, proposed: Vec::new() }));
    let allocated_bytes = number << 20;
    let shown =
        ObservedReplica { attach: Some(attach), views, allocated_bytes, ..ObservedReplica::default() };
    let instance = Instance { state: InstanceState::Running, message: None, detail: Detail::Replica(shown) };
    let key = InstanceKey::replica(&"v".parse().unwrap(), id(number));
    let mut agent = example.agents.get_mut(&node.parse().unwrap()).unwrap();
    agent.instances.insert(key, instance);
}

#[test]
fn an_engine_that_an_earlier_volume_has_left_behind_is_not_its_own() {
    let mut example = Example::new();
    assert!(with_objects(&example, |objects| objects.engine().is_some()));
    example.engine().metadata.deletion_timestamp = Some(now());
    example.engine().spec.desire_state = DesireState::Stopped;
    example.engine().spec.attach = Some(9);
    with_objects(&example, |objects| {
        assert!(objects.engine().is_none() && objects.has_engine_of_earlier_volume());
        assert_eq!(objects.known_attach(), Some(1), "the process is of the volume");
    });
}

#[test]
fn the_newest_attachment_of_any_reachable_process_is_known() {
    let mut example = Example::new();
    assert_eq!(with_objects(&example, |objects| objects.known_attach()), Some(1));
    report(&mut example, (2, "b"), 4, view(4, 1));
    report(&mut example, (3, "c"), 7, view(7, 1));
    assert_eq!(with_objects(&example, |objects| objects.refused_attach()), Some(7));
    example.agent("c").link = AgentLink::Down { since: now(), reason: String::new() };
    assert_eq!(with_objects(&example, |objects| objects.refused_attach()), Some(4));
    assert_eq!(with_objects(&example, |objects| objects.known_attach()), Some(4));
    example.engine_says(engine_in(5, EnginePhase::Serving));
    assert_eq!(with_objects(&example, |objects| objects.known_attach()), Some(5));
    example.engine().spec.attach = Some(6);
    assert_eq!(with_objects(&example, |objects| objects.known_attach()), Some(6));
}

#[test]
fn no_attachment_is_known_before_the_first_one() {
    let mut example = Example::new();
    example.engine().spec.attach = None;
    example.engine_says(ObservedEngine::default());
    assert_eq!(with_objects(&example, |objects| objects.known_attach()), None);
}

#[test]
fn only_a_view_of_the_serving_engine_is_served() {
    let mut example = Example::new();
    example.engine().status.generation = Some(Generation::new(1, 0));
    report(&mut example, (1, "a"), 1, view(1, 2));
    report(&mut example, (2, "b"), 1, view(1, 3));
    report(&mut example, (3, "c"), 1, view(2, 9));
    assert_eq!(with_objects(&example, |objects| objects.served_view()), Some(view(1, 3)));
    example.engine().status.seen_attach = None;
    assert_eq!(with_objects(&example, |objects| objects.served_view()), None);
}

#[test]
fn replicas_that_accept_the_old_engine_or_have_lost_their_views_do_not_count_for_a_fence() {
    let mut example = Example::new();
    report(&mut example, (1, "a"), 1, view(1, 1));
    report(&mut example, (2, "b"), 2, view(1, 1));
    report(&mut example, (3, "c"), 2, view(0, 0));
    let reports = with_objects(&example, |objects| objects.fenced_reports(Some(2)));
    assert_eq!(reports.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [id(2)]);
}

#[test]
fn the_largest_replica_and_all_obstacles_are_shown() {
    let mut example = Example::new();
    assert_eq!(with_objects(&example, |objects| objects.allocated_bytes()), None);
    report(&mut example, (1, "a"), 1, view(1, 1));
    report(&mut example, (2, "b"), 1, view(1, 1));
    assert_eq!(with_objects(&example, |objects| objects.allocated_bytes()), Some(2 << 20));
    assert_eq!(with_objects(&example, |objects| objects.replica_messages()), "");
    example.replica(2, |replica| replica.status.message = "the disk is full".to_owned());
    let shown = with_objects(&example, |objects| objects.replica_messages());
    assert_eq!(shown, format!("; v-{}: the disk is full", id(2)));
}
