//! Decides on the robustness of a volume, and on the start of its engine.

use std::collections::BTreeMap;
use std::time::Duration;

use shorthorn_types::ReplicaId;

use crate::objects::{
    ConditionType, CurrentState, DesireState, Engine, EnginePhase, Finding, MemberMode, Replica, Robustness,
    StoredEngineStatus, Volume,
};
use crate::{NodeName, ReplicaTarget};

/// The reason of [`lost_writes`], and of its event.
const LOST_WRITES: &str = "LostWrites";
/// The reason of [`damaged`], and of its event.
const DATA_DAMAGED: &str = "DataDamaged";

/// Returns the event about lost data that is due: the volume does not have this reason yet.
pub(super) fn new_loss(volume: &Volume, finding: &Finding) -> Option<(&'static str, String)> {
    let Finding::Wrong(reason, message) = finding else { return None };
    let loss = [LOST_WRITES, DATA_DAMAGED].into_iter().find(|loss| loss == reason)?;
    let shown = volume.status.conditions.get(ConditionType::Healthy);
    let is_shown = shown.is_some_and(|shown| !shown.status && shown.reason == loss);
    (!is_shown).then(|| (loss, message.clone()))
}

/// Returns the robustness of an attached volume and its `Healthy` condition.
pub(super) fn attached(volume: &Volume, engine: &Engine, replicas: &[&Replica]) -> (Robustness, Finding) {
    let status = &engine.status;
    match status.current_state {
        CurrentState::Unknown => {
            return (Robustness::Unknown, Finding::wrong("NodeUnreachable", status.problem()));
        }
        CurrentState::Error => return (Robustness::Faulted, engine_trouble(engine)),
        _ => {}
    }
    match status.phase {
        Some(EnginePhase::Serving) if status.lost_writes => (Robustness::Faulted, lost_writes(engine)),
        Some(EnginePhase::Serving) => members(volume, engine, replicas),
        Some(EnginePhase::Frozen) => {
            let message = format!(
                "the engine has lost its quorum and does not serve requests ({}); bring the missing replicas \
                 back: {}",
                said(status),
                missing(engine, replicas)
            );
            (Robustness::Faulted, Finding::wrong("NoQuorum", message))
        }
        _ => {
            let message = format!("the engine is starting ({})", said(status));
            (Robustness::Unknown, Finding::wrong("EngineStarting", message))
        }
    }
}

/// Returns the `Healthy` condition for an engine that cannot run.
pub(super) fn engine_trouble(engine: &Engine) -> Finding {
    let node = engine.spec.node_id.as_ref().map_or("", NodeName::as_str);
    let message = format!(
        "the engine on node {node} fails ({}); see the log of its unit there, and detach and attach to try \
         again",
        said(&engine.status)
    );
    Finding::wrong("EngineFailed", message)
}

/// Reports lost writes: every request of the device fails until its user releases it.
fn lost_writes(engine: &Engine) -> Finding {
    let node = engine.spec.node_id.as_ref().map_or("", NodeName::as_str);
    let message = format!(
        "every request to the device on node {node} is answered with an error. All replicas lost power \
         during its use, and acknowledged writes that were not flushed may be gone. Stop its users, detach \
         and attach the volume, and check the file system"
    );
    Finding::wrong(LOST_WRITES, message)
}

/// Reports ranges whose reads return data that was never written.
fn damaged(volume: &Volume, engine: &Engine) -> Finding {
    let node = engine.spec.node_id.as_ref().map_or("", NodeName::as_str);
    let message = format!(
        "data is damaged and no replica has a sound copy of it ({} ranges since the engine was started). The \
         log of shorthorn-engine@{} on node {node} names each range; restore them from a backup",
        engine.status.damaged_ranges, volume.metadata.name
    );
    Finding::wrong(DATA_DAMAGED, message)
}

fn members(volume: &Volume, engine: &Engine, replicas: &[&Replica]) -> (Robustness, Finding) {
    let modes = &engine.status.replica_mode_map;
    let count = modes.values().filter(|member| member.mode == MemberMode::Member).count();
    let wanted = volume.spec.number_of_replicas as usize;
    if engine.status.damaged_ranges > 0 {
        return (Robustness::Degraded, damaged(volume, engine));
    }
    if count >= wanted {
        return match slow(engine, replicas) {
            slow if slow.is_empty() => (Robustness::Healthy, Finding::Well),
            slow => (Robustness::Degraded, Finding::wrong("ReplicaSlow", slow)),
        };
    }
    let message = format!("{count} of {wanted} replicas have all data: {}", missing(engine, replicas));
    if count == 0 {
        return (Robustness::Faulted, Finding::wrong("NoReplica", message));
    }
    (Robustness::Degraded, Finding::wrong("ReplicaFailed", message))
}

/// Returns the members for which requests wait, each with its reason.
fn slow(engine: &Engine, replicas: &[&Replica]) -> String {
    let reason = |replica: &&Replica| {
        let member = engine.status.replica_mode_map.get(&replica.spec.replica_id)?;
        let at = format!("{} on {}", replica.metadata.name, replica.spec.node_id);
        member.awaited.then(|| format!("{at} is slow ({})", member.message))
    };
    replicas.iter().filter_map(reason).collect::<Vec<_>>().join("; ")
}

/// Returns the replicas that are not members, each with its reason.
fn missing(engine: &Engine, replicas: &[&Replica]) -> String {
    let reason = |replica: &&Replica| {
        let member = engine.status.replica_mode_map.get(&replica.spec.replica_id);
        if member.is_some_and(|member| member.mode == MemberMode::Member) {
            return None;
        }
        let said = [member.map_or("", |member| &member.message), &replica.status.message];
        let said = said.into_iter().find(|text| !text.is_empty());
        let mode = member.map_or("was not there when the engine started", |member| match member.mode {
            MemberMode::Failed => "left the view",
            MemberMode::Rebuilding => "is being rebuilt",
            MemberMode::Connecting | MemberMode::Member => "is connecting",
        });
        let at = format!("{} on {} {mode}", replica.metadata.name, replica.spec.node_id);
        Some(said.map_or_else(|| at.clone(), |said| format!("{at} ({said})")))
    };
    replicas.iter().filter_map(reason).collect::<Vec<_>>().join("; ")
}

fn said(status: &StoredEngineStatus) -> &str {
    status.message.as_deref().unwrap_or("no reason given")
}

/// The decision on starting the engine now.
pub(super) enum StartReadiness {
    /// Enough replicas run: the engine gets their addresses.
    Ready(BTreeMap<ReplicaId, ReplicaTarget>),
    /// The start has to wait: the rest of the time limit, and the missing replicas.
    Wait(Duration, String),
    /// Too few replicas are available, and the time limit is over.
    TooFew(String),
}

/// Decides which replicas an engine on `node` can start with. `left` is the rest of the time for slow ones.
/// `unknown` are the other replicas that may be members, with the reasons why their objects cannot be used.
/// `node_was_lost`: the engine follows a fenced one, so replicas on unreachable nodes are not waited for.
pub(super) fn readiness(
    replicas: &[&Replica],
    unknown: Vec<String>,
    first_members: &[ReplicaId],
    node: &NodeName,
    left: Duration,
    node_was_lost: bool,
) -> StartReadiness {
    let all = replicas.len() + unknown.len();
    let mut targets = BTreeMap::new();
    let mut missing = Vec::new();
    let mut are_all_final = true;
    for replica in replicas {
        match target(replica, node) {
            Ok(target) => drop(targets.insert(replica.spec.replica_id, target)),
            Err((reason, may_come)) => {
                are_all_final &= !may_come;
                missing.push(format!("{} on {}: {reason}", replica.metadata.name, replica.spec.node_id));
            }
        }
    }
    // Each unknown replica may be a member.
    let members = members_in_view(replicas, first_members) + unknown.len();
    missing.extend(unknown);
    if all == 0 {
        missing.push("the volume has none".to_owned());
    }
    // Half of them would need the arbiter's grant, so the others usually get the time to answer.
    let needed = members.div_ceil(2).max(1);
    let needed_at_once = if node_was_lost { needed } else { members / 2 + 1 };
    let is_enough =
        targets.len() >= needed_at_once && are_all_final || targets.len() >= needed && left.is_zero();
    if missing.is_empty() || is_enough {
        return StartReadiness::Ready(targets);
    }
    let message = missing.join("; ");
    if !left.is_zero() {
        return StartReadiness::Wait(left, message);
    }
    StartReadiness::TooFew(format!(
        "{} of {} replicas run and {needed} are needed; it starts as soon as enough are back, \
         or detach it to give up: {message}",
        targets.len(),
        all,
    ))
}

/// Returns the number of replicas in the view, as far as the controller knows: those that have not left it.
/// Only the engine knows the view, and it refuses to serve if this guess is too low.
fn members_in_view(replicas: &[&Replica], first_members: &[ReplicaId]) -> usize {
    let was_member = |replica: &&&Replica| {
        replica.status.failed_at.is_none()
            && (replica.status.healthy_at.is_some() || first_members.contains(&replica.spec.replica_id))
    };
    replicas.iter().filter(was_member).count()
}

/// Returns the address of the replica for an engine on `node`. The error has the reason, and whether that may
/// change soon by itself.
pub(super) fn target(replica: &Replica, node: &NodeName) -> Result<ReplicaTarget, (String, bool)> {
    let status = &replica.status;
    match status.current_state {
        CurrentState::Running => {}
        CurrentState::Unknown => return Err((status.message.clone(), false)),
        state => {
            let is_starting =
                state == CurrentState::Stopped && replica.spec.desire_state == DesireState::Running;
            let state = if is_starting { CurrentState::Starting } else { state };
            let text = if status.message.is_empty() { state.as_str() } else { &status.message };
            return Err((text.to_owned(), true));
        }
    }
    let local = replica.spec.node_id == *node;
    let (unix, other): (Vec<_>, Vec<_>) =
        status.addresses.iter().cloned().partition(|address| address.starts_with("unix:"));
    let addresses: Vec<String> = if local { unix.into_iter().chain(other).collect() } else { other };
    if addresses.is_empty() {
        let reason = if local {
            "replica runs without an address".to_owned()
        } else {
            "replica has no address for other nodes: set data_interface or data_address in the configuration \
             of its agent"
                .to_owned()
        };
        return Err((reason, false));
    }
    Ok(ReplicaTarget { addresses, local })
}

#[cfg(test)]
mod tests {
    use shorthorn_types::VolumeName;

    use super::*;
    use crate::Timestamp;
    use crate::objects::{DesireState, Metadata, ReplicaSpec, StoredReplicaStatus};
    use crate::reconcile::REPLICA_WAIT;

    /// Returns replicas on nodes of their own, of which the first `running` run and the nodes of the others
    /// do not answer.
    fn readiness_with(running: u64, all: u64, left: Duration, node_was_lost: bool) -> StartReadiness {
        readiness_beside(0, running, all, left, node_was_lost)
    }

    /// Returns the decision if `unknown` more replicas are stored and cannot be used.
    fn readiness_beside(
        unknown: usize,
        running: u64,
        all: u64,
        left: Duration,
        node_was_lost: bool,
    ) -> StartReadiness {
        let replica = |at: u64| {
            let replica_id = ReplicaId::from_random(at + 1);
            let status = StoredReplicaStatus {
                current_state: if at < running { CurrentState::Running } else { CurrentState::Unknown },
                healthy_at: Some(Timestamp::UNIX_EPOCH),
                addresses: vec![format!("tcp:10.0.0.{at}:10000")],
                ..StoredReplicaStatus::default()
            };
            let spec = ReplicaSpec {
                volume_name: VolumeName::new("v").unwrap(),
                volume_size: 1 << 20,
                replica_id,
                node_id: NodeName::new(&format!("n{at}")).unwrap(),
                disk_path: "/disk".to_owned(),
                disk_id: String::new(),
                desire_state: DesireState::Running,
                eviction_requested: false,
            };
            Replica {
                metadata: Metadata::new(format!("v-{replica_id}"), Timestamp::UNIX_EPOCH),
                spec,
                status,
            }
        };
        let replicas: Vec<Replica> = (0..all).map(replica).collect();
        let replicas: Vec<&Replica> = replicas.iter().collect();
        let unknown = vec!["it cannot be used".to_owned(); unknown];
        readiness(&replicas, unknown, &[], &NodeName::new("n0").unwrap(), left, node_was_lost)
    }

    #[test]
    fn a_majority_starts_at_once_and_half_of_the_replicas_after_the_wait() {
        let starts_after = |lost, running, all, left| {
            matches!(readiness_with(running, all, left, lost), StartReadiness::Ready(_))
        };
        let starts = |running, all, left| starts_after(false, running, all, left);
        for (running, all) in [(2, 3), (3, 4), (3, 5), (1, 1)] {
            assert!(starts(running, all, REPLICA_WAIT), "{running} of {all}");
        }
        for (running, all) in [(1, 2), (2, 4), (3, 6)] {
            assert!(!starts(running, all, REPLICA_WAIT), "{running} of {all}");
            assert!(starts(running, all, Duration::ZERO), "{running} of {all}: the arbiter decides");
            assert!(starts_after(true, running, all, REPLICA_WAIT), "{running} of {all}: no other may come");
        }
        for (running, all) in [(0, 1), (1, 3), (1, 4), (2, 5), (0, 2)] {
            for lost in [false, true] {
                assert!(!starts_after(lost, running, all, Duration::ZERO), "{running} of {all}");
            }
        }
    }

    #[test]
    fn replicas_that_the_controller_cannot_use_count_as_members_that_do_not_run() {
        let starts = |unknown, running, left| {
            matches!(readiness_beside(unknown, running, running, left, false), StartReadiness::Ready(_))
        };
        for left in [REPLICA_WAIT, Duration::ZERO] {
            assert!(starts(1, 2, left), "2 of 3");
            assert!(!starts(2, 1, left), "1 of 3");
            assert!(!starts(3, 0, left) && !starts(0, 0, left), "none");
        }
        let StartReadiness::TooFew(message) = readiness_beside(3, 0, 0, Duration::ZERO, false) else {
            panic!("it starts without replicas")
        };
        assert!(message.contains("0 of 3") && message.contains("cannot be used"), "{message}");
    }
}
