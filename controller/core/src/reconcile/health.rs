//! How safe the data of a volume is, and whether it can start.

use std::collections::BTreeMap;
use std::time::Duration;

use shorthorn_types::ReplicaId;

use crate::objects::{CurrentState, DesireState, Engine, Finding, MemberMode, Replica, Robustness, Volume};
use crate::{NodeName, ReplicaTarget};

/// The robustness of an attached volume and what its `Healthy` condition says.
pub(super) fn attached(volume: &Volume, engine: &Engine, replicas: &[&Replica]) -> (Robustness, Finding) {
    let status = &engine.status;
    match status.current_state {
        CurrentState::Unknown => {
            return (Robustness::Unknown, Finding::wrong("NodeUnreachable", status.message.clone()));
        }
        CurrentState::Error => return (Robustness::Faulted, engine_trouble(engine)),
        _ => {}
    }
    match status.phase.as_str() {
        "serving" => members(volume, engine, replicas),
        "frozen" => {
            let message = format!(
                "the engine has lost its quorum and serves nothing ({}); bring the missing replicas back: {}",
                said(&status.message),
                missing(engine, replicas)
            );
            (Robustness::Faulted, Finding::wrong("NoQuorum", message))
        }
        _ => {
            let message = format!("the engine is starting ({})", said(&status.message));
            (Robustness::Unknown, Finding::wrong("EngineStarting", message))
        }
    }
}

/// What the `Healthy` condition says about an engine that cannot run.
pub(super) fn engine_trouble(engine: &Engine) -> Finding {
    let node = engine.spec.node_id.as_ref().map_or("", NodeName::as_str);
    let message = format!(
        "the engine on node {node} fails ({}); see the log of its unit there, and detach and attach to try again",
        said(&engine.status.message)
    );
    Finding::wrong("EngineFailed", message)
}

fn members(volume: &Volume, engine: &Engine, replicas: &[&Replica]) -> (Robustness, Finding) {
    let modes = &engine.status.replica_mode_map;
    let count = modes.values().filter(|member| member.mode == MemberMode::Member).count();
    let wanted = volume.spec.number_of_replicas as usize;
    if count >= wanted {
        return (Robustness::Healthy, Finding::Well);
    }
    let message = format!("{count} of {wanted} replicas have all data: {}", missing(engine, replicas));
    if count == 0 {
        return (Robustness::Faulted, Finding::wrong("NoReplica", message));
    }
    (Robustness::Degraded, Finding::wrong("ReplicaFailed", message))
}

/// The replicas that are not members, each with its reason.
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
            MemberMode::Rebuilding => "is being brought up",
            MemberMode::Connecting | MemberMode::Member => "is connecting",
        });
        let at = format!("{} on {} {mode}", replica.metadata.name, replica.spec.node_id);
        Some(said.map_or_else(|| at.clone(), |said| format!("{at} ({said})")))
    };
    replicas.iter().filter_map(reason).collect::<Vec<_>>().join("; ")
}

fn said(message: &str) -> &str {
    if message.is_empty() { "no reason given" } else { message }
}

/// Whether the engine can be started now.
pub(super) enum Readiness {
    /// With these replicas.
    Ready(BTreeMap<ReplicaId, ReplicaTarget>),
    /// Not yet; the rest of the time limit, and who is waited for.
    Wait(Duration, String),
    /// Too few, and the time limit is over.
    TooFew(String),
}

/// Which replicas an engine on `node` can start with. `left` is what is left of the time that slow ones get.
pub(super) fn readiness(
    replicas: &[&Replica],
    first_members: &[ReplicaId],
    node: &NodeName,
    left: Duration,
) -> Readiness {
    let mut targets = BTreeMap::new();
    let mut missing = Vec::new();
    let mut all_settled = true;
    for replica in replicas {
        match target(replica, node) {
            Ok(target) => drop(targets.insert(replica.spec.replica_id, target)),
            Err((reason, may_come)) => {
                all_settled &= !may_come;
                missing.push(format!("{} on {}: {reason}", replica.metadata.name, replica.spec.node_id));
            }
        }
    }
    let needed = needed(replicas, first_members);
    let enough = targets.len() >= needed;
    if missing.is_empty() || (enough && (all_settled || left.is_zero())) {
        return Readiness::Ready(targets);
    }
    let message = missing.join("; ");
    if !left.is_zero() {
        return Readiness::Wait(left, message);
    }
    Readiness::TooFew(format!(
        "{} of {} replicas run and {needed} are needed; it starts as soon as enough are back, \
         or detach it to give up: {message}",
        targets.len(),
        replicas.len(),
    ))
}

/// How many replicas an engine must find to form a quorum: more than half of those that, as far as the
/// controller knows, have not left the view. Only the engine knows the view; it refuses to serve where
/// this guess is too low.
fn needed(replicas: &[&Replica], first_members: &[ReplicaId]) -> usize {
    let was_member = |replica: &&&Replica| {
        replica.status.failed_at.is_none()
            && (replica.status.healthy_at.is_some() || first_members.contains(&replica.spec.replica_id))
    };
    replicas.iter().filter(was_member).count() / 2 + 1
}

/// Where an engine on `node` finds the replica; else why not, and whether that may change by itself soon.
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
            "it runs without an address".to_owned()
        } else {
            "it has no address that other nodes reach: set data_address in the agent's configuration there"
                .to_owned()
        };
        return Err((reason, false));
    }
    Ok(ReplicaTarget { addresses, local })
}
