use super::*;
use crate::example::{Example, VERSION, id, now, status_of_engine};
use crate::objects::{Finding, MemberMode};
use crate::observed::{CopyStatus, EnginePhase, EngineStatus, MemberStatus, ObservedEngine};

fn overview(example: &Example) -> Overview {
    Overview::of(&example.cluster, &example.agents, VERSION)
}

#[test]
fn a_healthy_cluster_has_nothing_to_say() {
    let overview = overview(&Example::new());
    assert_eq!((&overview.wrong, &overview.waiting), (&Issues::default(), &Issues::default()));
    let volumes = VolumeCounts { all: 1, attached: 1, healthy: 1, degraded: 0, faulted: 0 };
    assert_eq!((overview.volumes, overview.nodes, overview.ready_nodes), (volumes, 3, 3));
    assert_eq!((overview.space.total_bytes, overview.space.scheduled_bytes), (300 << 30, 3 << 30));
    let versions: Vec<_> =
        overview.versions.iter().map(|found| (found.program, found.count, found.differs)).collect();
    assert_eq!(versions, [("controller", 1, false), ("agent", 3, false), ("engine", 1, false)]);
}

#[test]
fn problems_and_pending_events_are_shown_apart() {
    let mut example = Example::new();
    let volume = example.volume();
    volume.status.robustness = Robustness::Degraded;
    let conditions = &mut volume.status.conditions;
    conditions.set(ConditionType::Healthy, Finding::wrong("ReplicaFailed", "2 of 3"), now());
    conditions.set(ConditionType::Expanded, Finding::wrong("Growing", "it grows"), now());
    let copy = Some(CopyStatus { total_bytes: 100, left_bytes: 25, bytes_per_s: 5 });
    let status = EngineStatus {
        version: Some("0.9.0".to_owned()),
        members: vec![MemberStatus { copy, ..MemberStatus::of(id(3), MemberMode::Rebuilding) }],
        ..status_of_engine(1, EnginePhase::Serving)
    };
    example.engine_says(ObservedEngine::of(1, status));
    example.agent("c").disks.get_mut("/disk").unwrap().problem = Some("it is read-only".to_owned());
    let ready = &mut example.node("b").status.conditions;
    ready.set(ConditionType::Ready, Finding::wrong("AgentUnreachable", "no route"), now());
    let overview = overview(&example);
    let words = |issues: &Issues| -> Vec<String> {
        issues.listed.iter().map(|issue| format!("{}: {}", issue.about, issue.reason)).collect()
    };
    assert_eq!(
        words(&overview.wrong),
        ["node b: AgentUnreachable", "disk /disk of node c: DiskProblem", "volume v: ReplicaFailed"]
    );
    assert_eq!(words(&overview.waiting), ["volume v: Growing", "volume v: Rebuilding"]);
    assert!(overview.waiting.listed[1].message.contains("75 %, about 5 s left"), "{overview:?}");
    let engine = overview.versions.iter().find(|found| found.program == "engine").unwrap();
    assert!(engine.differs && engine.names == ["v"]);
}

#[test]
fn the_health_of_a_detached_volume_is_hidden_and_lists_are_bounded() {
    let mut example = Example::new();
    let volume = example.volume();
    (volume.status.state, volume.status.robustness) = (VolumeState::Detached, Robustness::Unknown);
    volume.status.conditions.set(ConditionType::Healthy, Finding::wrong("NotAttached", "x"), now());
    assert_eq!(overview(&example).wrong, Issues::default());
    for number in 0..60 {
        let mut volume = example.cluster.volumes["v"].clone();
        volume.metadata.name = format!("w{number}");
        volume.status.robustness = Robustness::Faulted;
        example.cluster.insert(volume.into());
    }
    let wrong = overview(&example).wrong;
    assert_eq!((wrong.listed.len(), wrong.more), (ISSUES_MAX, 10));
}

#[test]
fn a_replica_that_is_to_leave_and_cannot_is_wrong() {
    let mut example = Example::new();
    example.replica(2, |replica| replica.spec.eviction_requested = true);
    assert_eq!(overview(&example).waiting.listed[0].reason, "Evicting");
    example.volume().status.state = VolumeState::Detached;
    assert_eq!(overview(&example).wrong.listed[0].reason, "EvictionHeld");
}
