use super::*;
use crate::observed::ReplicaView;

fn shown(world: &World, agents: &Agents) -> Volume {
    let context =
        Context { world, agents, now: now(), random: [7; MAX_MEMBERS], settings: Settings::default() };
    let actions = reconcile(&context, &Key::new(Kind::Volume, "v")).actions;
    let written = actions.iter().find_map(|action| match action {
        Action::Write(object) => match &**object {
            Object::Volume(volume) => Some(volume.clone()),
            _ => None,
        },
        _ => None,
    });
    written.unwrap_or_else(|| world.volumes["v"].clone())
}

#[test]
fn a_volume_shows_its_members_its_sizes_and_what_is_wrong() {
    let (mut world, mut agents) = (degraded_world(), agents(None));
    let mut volume = world.volumes["v"].clone();
    volume.metadata.generation = 4;
    world.insert(volume.into());
    let name = VolumeName::new("v").unwrap();
    for (node, id, allocated_bytes) in [("a", 1, 3 << 29), ("b", 2, 1 << 30)] {
        let detail = Detail::Replica(ReplicaView { allocated_bytes, ..ReplicaView::default() });
        let instance = Instance { state: InstanceState::Running, message: String::new(), detail };
        let key = InstanceKey::replica(&name, ReplicaId::from_random(id));
        agents.get_mut(&NodeName::new(node).unwrap()).unwrap().instances.insert(key, instance);
    }
    let volume = shown(&world, &agents);
    let display = &volume.status.display;
    let texts = [&display.size, &display.actual_size, &display.replicas, &display.reason];
    assert_eq!(texts, ["0.01Gi", "1.50Gi", "1/2", "ReplicaFailed"]);
    assert_eq!(volume.status.actual_size, 3 << 29, "of the largest replica");
    assert!(volume.status.conditions.iter().all(|condition| condition.observed_generation == 4));
    world.insert(volume.clone().into());
    assert_eq!(shown(&world, &agents).status.display, volume.status.display);
}

#[test]
fn nothing_is_shown_of_a_start_whose_steps_are_not_stored() {
    let mut world = degraded_world();
    let mut volume = world.volumes["v"].clone();
    volume.status.state = VolumeState::Attaching;
    volume.status.attach_started_at = Some(now());
    world.insert(volume.into());
    assert_eq!(shown(&world, &agents(None)).status.display, Default::default());
}
