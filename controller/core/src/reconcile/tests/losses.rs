//! An engine that refuses every request because writes may be lost.

use super::*;
use crate::objects::{EnginePhase, Robustness, Volume, VolumeState};

/// Returns a cluster in which the volume is attached to node a and served there.
fn serving(lost_writes: bool) -> ClusterState {
    let mut cluster = cluster();
    let mut volume = cluster.volumes["v"].clone();
    volume.spec.node_id = Some(NodeName::new("a").unwrap());
    volume.status.current_node_id = volume.spec.node_id.clone();
    volume.status.state = VolumeState::Attached;
    volume.status.robustness = Robustness::Healthy;
    volume.status.attach = Some(ATTACH);
    cluster.insert(volume.into());
    let mut engine = cluster.engines["v"].clone();
    engine.status.current_state = CurrentState::Running;
    engine.status.seen_attach = Some(ATTACH);
    engine.status.phase = Some(EnginePhase::Serving);
    engine.status.lost_writes = lost_writes;
    cluster.insert(engine.into());
    cluster
}

/// Returns the volume as it is stored then, and its warnings.
fn watch(cluster: &ClusterState) -> (Option<Volume>, Vec<&'static str>) {
    let agents = agents(None);
    let context = Context {
        cluster,
        agents: &agents,
        now: now(),
        random: [0; MAX_MEMBERS],
        settings: Settings::default(),
    };
    let (mut volume, mut reported) = (None, Vec::new());
    for action in reconcile(&context, &Key::new(Kind::Volume, "v")).actions {
        match action {
            Action::Emit(event) if event.warning => reported.push(event.reason),
            Action::Write(object) => {
                if let Object::Volume(written) = *object {
                    volume = Some(written);
                }
            }
            _ => {}
        }
    }
    (volume, reported)
}

#[test]
fn a_loss_of_writes_is_reported_once_and_shown_as_long_as_it_lasts() {
    let mut cluster = serving(true);
    let (volume, reported) = watch(&cluster);
    let volume = volume.unwrap();
    assert!(reported.contains(&"LostWrites"), "{reported:?}");
    assert_eq!(volume.status.robustness, Robustness::Faulted);
    let healthy = volume.status.conditions.get(ConditionType::Healthy).unwrap();
    assert_eq!((healthy.status, healthy.reason.as_str()), (false, "LostWrites"));
    assert!(healthy.message.contains("detach and attach"), "{}", healthy.message);
    cluster.insert(volume.into());
    assert_eq!(watch(&cluster).1, [""; 0]);
    assert!(!watch(&serving(false)).1.contains(&"LostWrites"));
}

#[test]
fn a_volume_with_damaged_data_is_not_healthy() {
    let mut cluster = serving(false);
    let engine = cluster.engines["v"].clone();
    let ids = cluster.replicas.values().map(|replica| replica.spec.replica_id);
    let replicas = ids.map(|id| (id, MemberRecord::of(MemberMode::Member))).collect();
    let mut status = engine.status.clone();
    (status.replica_mode_map, status.damaged_ranges) = (replicas, 2);
    cluster.insert(Engine { status, ..engine }.into());
    let (volume, reported) = watch(&cluster);
    let volume = volume.unwrap();
    assert_eq!(volume.status.robustness, Robustness::Degraded);
    let healthy = volume.status.conditions.get(ConditionType::Healthy).unwrap();
    assert_eq!((healthy.status, healthy.reason.as_str()), (false, "DataDamaged"));
    assert!(reported.contains(&"DataDamaged"), "{reported:?}");
}
