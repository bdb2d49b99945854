//! Single decisions that the simulation rarely comes to; everything else is tested there.

use std::collections::BTreeMap;

use shorthorn_types::VolumeName;

use super::*;
use crate::objects::{
    ConditionType, CurrentState, DesireState, Engine, EngineSpec, EngineStatus, Frontend, Metadata, Object,
    Secret,
};
use crate::observed::{AgentInfo, Detail, EngineView, Instance, InstanceKey, InstanceState};
use crate::requests::{Change, CreateVolume};
use crate::{Action, AgentCall};

const ATTACH: u64 = 2;

fn now() -> Timestamp {
    Timestamp::UNIX_EPOCH
}

/// A volume whose engine should run on node a, and is not there yet.
fn world() -> World {
    let wanted = CreateVolume { name: "v".to_owned(), size_bytes: 1 << 20, ..CreateVolume::default() };
    let Ok(Change::Store(volume)) = wanted.apply(&World::default(), Secret::new([1; 32]), now()) else {
        panic!("the volume is refused");
    };
    let spec = EngineSpec {
        volume_name: VolumeName::new("v").unwrap(),
        volume_size: 1 << 20,
        node_id: Some(NodeName::new("a").unwrap()),
        desire_state: DesireState::Running,
        attach: ATTACH,
        frontend: Frontend::Auto,
        replica_address_map: BTreeMap::new(),
        map_revision: 0,
    };
    let mut world = World::default();
    world.insert(volume.into());
    let metadata = Metadata::new("v", now());
    world.insert(Engine { metadata, spec, status: EngineStatus::default() }.into());
    world
}

/// Agents of nodes a and b in reach; b shows an engine of the volume for that attachment.
fn agents(on_b: Option<u64>) -> Agents {
    let mut agents = Agents::default();
    for name in ["a", "b"] {
        let mut view = AgentView::new("http://agent", now());
        view.link = Link::Synced;
        view.info = Some(AgentInfo { name: name.to_owned(), ..AgentInfo::default() });
        if let Some(attach) = on_b.filter(|_| name == "b") {
            let detail = Detail::Engine(EngineView { attach, ..EngineView::default() });
            let instance = Instance { state: InstanceState::Running, message: String::new(), detail };
            view.instances.insert(InstanceKey::engine(&VolumeName::new("v").unwrap()), instance);
        }
        agents.by_node.insert(NodeName::new(name).unwrap(), view);
    }
    agents
}

fn decide(world: &World, agents: &Agents) -> Vec<Action> {
    let context =
        Context { world, agents, now: now(), random: [0; MAX_MEMBERS], settings: Settings::default() };
    reconcile(&context, &Key::new(Kind::Engine, "v")).actions
}

#[test]
fn a_start_is_stored_before_it_is_asked_for() {
    let actions = decide(&world(), &agents(None));
    let [Action::Write(object), Action::Call(node, AgentCall::StartEngine { attach: ATTACH, .. })] =
        actions.as_slice()
    else {
        panic!("{actions:#?}");
    };
    assert_eq!(node.as_str(), "a");
    assert!(
        matches!(&**object, Object::Engine(engine) if engine.status.current_state == CurrentState::Starting)
    );
}

#[test]
fn an_older_engine_elsewhere_is_stopped_and_a_newer_one_left_alone() {
    let stops = |on_b| {
        let actions = decide(&world(), &agents(Some(on_b)));
        actions.iter().any(|action| match action {
            Action::Call(node, AgentCall::StopInstance { attach, .. }) => {
                assert_eq!((node.as_str(), *attach), ("b", ATTACH));
                true
            }
            _ => false,
        })
    };
    assert!(stops(ATTACH - 1) && stops(ATTACH) && !stops(ATTACH + 1));
}

#[test]
fn an_agent_with_another_name_is_asked_for_nothing() {
    let mut agents = agents(None);
    for view in agents.by_node.values_mut() {
        view.info = Some(AgentInfo { name: "other".to_owned(), ..AgentInfo::default() });
    }
    let actions = decide(&world(), &agents);
    let [Action::Write(object)] = actions.as_slice() else { panic!("{actions:#?}") };
    let Object::Engine(engine) = &**object else { panic!("{object:#?}") };
    assert!(engine.status.message.contains("says that it is node \"other\""), "{}", engine.status.message);
}

#[test]
fn no_place_is_refused_while_nodes_may_still_come() {
    let world = world();
    let mut agents = agents(None);
    let volume_after = |agents: &Agents, now| {
        let context =
            Context { world: &world, agents, now, random: [0; MAX_MEMBERS], settings: Settings::default() };
        let decision = reconcile(&context, &Key::new(Kind::Volume, "v"));
        let written = decision.actions.iter().find_map(|action| match action {
            Action::Write(object) => match &**object {
                Object::Volume(volume) => Some(volume.clone()),
                _ => None,
            },
            _ => None,
        });
        (written.unwrap().status.conditions, decision.look_again)
    };
    for view in agents.by_node.values_mut() {
        view.link = Link::Down { since: now(), reason: "not reached yet".to_owned() };
    }
    let (conditions, again) = volume_after(&agents, now());
    assert_eq!(conditions.get(ConditionType::Settled).unwrap().reason, "WaitingForNodes");
    assert!(conditions.get(ConditionType::Scheduled).is_none());
    assert_eq!(again, Some(UNREACHABLE_AFTER));
    let (conditions, _) = volume_after(&agents, now() + UNREACHABLE_AFTER);
    assert_eq!(conditions.get(ConditionType::Scheduled).unwrap().reason, "NoPlace");
}
