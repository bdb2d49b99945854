//! A grant counts beside the known members until everything that is stored is as new.

use shorthorn_types::{Generation, Members, ReplicaReport, View, ViewId};
use shorthorn_views::Arbiter;

use super::*;
use crate::example::{Example, engine_in, id, status_of_engine};
use crate::objects::Volume;
use crate::observed::{self, GrantWanted, ObservedReplica};

fn view(number: u32, members: u64) -> View {
    let generation = Generation::new(1, 1);
    View { id: ViewId { generation, number }, members: Members::new((1..=members).map(id)).unwrap() }
}

/// The volume as the next run stores it, if it does.
fn decided(example: &Example) -> Option<Volume> {
    let Example { cluster, agents } = example;
    let context =
        Context { cluster, agents, now: now(), random: [0; MAX_MEMBERS], settings: Settings::default() };
    let actions = reconcile(&context, &Key::new(Kind::Volume, "v")).actions;
    actions.into_iter().find_map(|action| match action {
        Action::Write(object) => match *object {
            Object::Volume(volume) => Some(volume),
            _ => None,
        },
        _ => None,
    })
}

#[test]
fn a_grant_is_unreported_until_all_that_is_stored_is_as_new() {
    let mut example = Example::new();
    example.cluster.remove(&Key::new(Kind::Replica, format!("v-{}", id(3))));
    example.engine().status.generation = Some(Generation::new(1, 1));
    example.engine().status.replica_mode_map.remove(&id(3));
    let honoured = ReplicaReport { committed: view(1, 2), proposed: Vec::new() };
    let wanted = GrantWanted { view: view(2, 1), honoured: honoured.clone(), stored: view(2, 1).members };
    let grant_wanted = Some(wanted);
    let frozen = observed::EngineStatus { grant_wanted, ..status_of_engine(1, EnginePhase::Frozen) };
    example.engine_says(ObservedEngine::of(1, frozen));
    let granted = decided(&example).unwrap();
    assert!(granted.status.grant_unreported, "it is stored in the same write as the grant");
    assert_eq!(
        granted.status.arbiter,
        Arbiter::default().ask(1, view(2, 1), &honoured, &view(2, 1).members).unwrap()
    );
    *example.volume() = granted;
    example.engine_says(engine_in(1, EnginePhase::Serving));
    let is_reported =
        |example: &Example| decided(example).is_some_and(|volume| !volume.status.grant_unreported);
    assert!(!is_reported(&example), "no replica has reported it");
    let mut view_of = example.agents.get_mut(&NodeName::new("a").unwrap()).unwrap();
    let report = ReplicaReport { committed: view(2, 1), proposed: Vec::new() };
    let detail = Detail::Replica(ObservedReplica {
        attach: Some(1),
        views: Some(Box::new(report)),
        ..ObservedReplica::default()
    });
    let instance = Instance { state: InstanceState::Running, message: None, detail };
    view_of.instances.insert(InstanceKey::replica(&VolumeName::new("v").unwrap(), id(1)), instance);
    drop(view_of);
    assert!(!is_reported(&example), "the stored engine has the members of before");
    example.engine().status.replica_mode_map.insert(id(2), MemberRecord::of(MemberMode::Failed));
    assert!(!is_reported(&example), "the stored replica has not left the view");
    example.replica(2, |replica| replica.status.failed_at = Some(now()));
    assert!(is_reported(&example));
}
