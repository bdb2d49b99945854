use super::{Context, Reachability, START_CHECK, is_given_up, quiet_left, reachability};
use crate::objects::{CurrentState, DesireState, Engine, EnginePhase, Key, Kind, StoredEngineStatus, Volume};
use crate::observed::{Detail, Instance, InstanceKey, InstanceState, ObservedAgent, ObservedEngine};
use crate::{Action, AgentCall, Decision, NodeName, StartEngine};

pub(super) fn reconcile(context: &Context<'_>, name: &str) -> Decision {
    let Some(engine) = context.cluster.engines.get(name) else { return Decision::nothing() };
    let Some(node) = &engine.spec.node_id else {
        let actions = if has_no_volume(context, engine) { vec![remove(engine)] } else { Vec::new() };
        return Decision { actions, requeue_after: None };
    };
    if is_left_behind(context, engine)
        && (engine.status.current_state == CurrentState::Stopped || is_given_up(context, node))
    {
        return Decision { actions: vec![remove(engine)], requeue_after: None };
    }
    let mut decision = match reachability(context, node) {
        Reachability::Uncertain(wait) => Decision { requeue_after: Some(wait), ..Decision::nothing() },
        Reachability::Unreachable(reason) => mark_unreachable(engine, reason),
        Reachability::Reachable(agent) => match engine.spec.desire_state {
            DesireState::Running => run(context, engine, node, agent),
            DesireState::Stopped => stop(context, engine, node, agent),
        },
    };
    // Last, because an engine that cannot be stopped must not delay other actions.
    stop_strays(context, engine, node, &mut decision);
    decision
}

fn remove(engine: &Engine) -> Action {
    Action::Remove(Key::new(Kind::Engine, &engine.metadata.name), engine.metadata.resource_version)
}

/// Returns true if the engine was never attached and has no volume. A former leader that was paused made it
/// after another one had deleted the volume.
fn has_no_volume(context: &Context<'_>, engine: &Engine) -> bool {
    let name = &engine.metadata.name;
    engine.spec.attach.is_none()
        && engine.spec.desire_state == DesireState::Stopped
        && !context.cluster.volumes.contains_key(name)
        && context.cluster.unknown(&Key::new(Kind::Volume, name)).is_none()
}

/// Returns true if the engine was left behind by a deleted volume. It is fenced, and its process will be
/// stopped when its node is back. A volume of the same name is another one, which has not reached that
/// number.
pub(super) fn is_left_behind(context: &Context<'_>, engine: &Engine) -> bool {
    let volume = context.cluster.volumes.get(&engine.metadata.name);
    if context.cluster.unknown(&Key::new(Kind::Volume, &engine.metadata.name)).is_some() {
        return false;
    }
    engine.metadata.is_deleting()
        && engine.spec.desire_state == DesireState::Stopped
        && volume.is_none_or(|volume| volume.status.attach < engine.spec.attach)
}

/// Stops engines of this volume on other nodes, and makes their nodes forget ended ones. A late start call
/// makes such an engine, and a node that was lost with the volume has one. It is fenced, but blocks the next
/// attachment there.
fn stop_strays(context: &Context<'_>, engine: &Engine, node: &NodeName, decision: &mut Decision) {
    let key = InstanceKey::engine(&engine.spec.volume_name);
    let shown = context.agents.with_engine(&engine.spec.volume_name);
    for (other, agent) in shown.filter(|(other, _)| *other != node) {
        // An agent that is followed by its former name, too, shows the engine of its own node.
        let is_named = agent.info.as_ref().is_some_and(|info| info.name == other.as_str());
        let stray = agent.instances.get(&key).filter(|_| agent.is_synced() && is_named);
        if stray.is_some_and(|stray| is_older(stray, engine.spec.attach)) {
            let attach = engine.spec.attach;
            let call = AgentCall::StopInstance { instance: key.clone(), attach };
            decision.call(other, call);
        }
    }
}

/// Returns true if the instance was made for this attachment or an earlier one. It may have no process any
/// more: its node keeps its spec, with the secret of the volume, until it is stopped.
fn is_older(instance: &Instance, attach: Option<u64>) -> bool {
    observed_engine(instance).is_some_and(|shown| shown.attach <= attach)
}

/// Writes the status if it differs from the stored one.
fn write_status(decision: &mut Decision, engine: &Engine, status: StoredEngineStatus) {
    if status != engine.status {
        decision.write(Engine { status, ..engine.clone() });
    }
}

fn mark_unreachable(engine: &Engine, reason: String) -> Decision {
    let mut decision = Decision::nothing();
    let mut status = engine.status.clone();
    let is_stopped_as_desired =
        engine.spec.desire_state == DesireState::Stopped && status.current_state == CurrentState::Stopped;
    if !is_stopped_as_desired {
        // The last status stays: most likely the engine still serves, and only the controller does not see
        // it.
        status.current_state = CurrentState::Unknown;
        status.message = Some(reason);
    }
    write_status(&mut decision, engine, status);
    decision
}

/// Returns true if the process has ended for good: its agent does not start it again.
fn has_ended(instance: &Instance, shown: &ObservedEngine) -> bool {
    instance.state == InstanceState::Stopped
        || (instance.state == InstanceState::Error && shown.phase() == Some(EnginePhase::Stopped))
}

/// Returns the observed process of exactly this attachment, unless it has ended or is about to.
pub(super) fn living<'a>(
    engine: &Engine,
    agent: &'a ObservedAgent,
) -> Option<(&'a Instance, &'a ObservedEngine)> {
    let instance = agent.instances.get(&InstanceKey::engine(&engine.spec.volume_name))?;
    let shown = observed_engine(instance).filter(|shown| shown.is_of(engine.spec.attach))?;
    let is_living = instance.state != InstanceState::Stopping && !has_ended(instance, shown);
    is_living.then_some((instance, shown))
}

fn observed_engine(instance: &Instance) -> Option<&ObservedEngine> {
    match &instance.detail {
        Detail::Engine(shown) => Some(shown),
        Detail::Replica(_) => None,
    }
}

fn run(context: &Context<'_>, engine: &Engine, node: &NodeName, agent: &ObservedAgent) -> Decision {
    let key = InstanceKey::engine(&engine.spec.volume_name);
    let mut decision = Decision::nothing();
    // The number is drawn before the engine is desired to run.
    let Some(attach) = engine.spec.attach else { return decision };
    let instance = agent.instances.get(&key);
    let shown = instance.and_then(observed_engine);
    match (instance, shown) {
        // Without the number it could be any engine, so it is neither used nor stopped.
        (_, Some(shown)) if shown.attach.is_none() => {
            let message = "the agent does not say which attachment its engine is for: upgrade it";
            let message = Some(message.to_owned());
            let status =
                StoredEngineStatus { current_state: CurrentState::Error, message, ..cleared(engine) };
            write_status(&mut decision, engine, status);
        }
        // A later engine than the one asked for: this decision is made from an old state, the next is not.
        (_, Some(shown)) if shown.attach > Some(attach) => {}
        (Some(instance), Some(shown)) if shown.attach == Some(attach) => {
            follow(context, (engine, attach), instance, shown, &mut decision);
        }
        (_, shown) if engine.status.seen_attach >= Some(attach) => {
            let status = lost(engine, format!("the engine process is gone from node {node}"));
            debug_assert!(shown.is_none_or(|shown| shown.attach < Some(attach)));
            write_status(&mut decision, engine, status);
        }
        (_, shown) => {
            let failure = agent.failures.get(&key).map(|failure| &failure.message);
            let Some(volume) = context.cluster.volumes.get(engine.spec.volume_name.as_str()) else {
                return decision;
            };
            if volume.status.pending_salvage().is_some() {
                // The engine is about to be stopped, and the next one has a higher number.
                return decision;
            }
            // Before the call: from here on, the stored state says that a process may be there.
            write_status(&mut decision, engine, starting(engine, volume, failure));
            let mut continues = None;
            match shown.and_then(|shown| shown.attach) {
                // The volume was attached nowhere else since: the device continues, even if it is in use.
                Some(older) if volume.status.attached_since.is_some_and(|since| since <= older) => {
                    continues = volume.status.attached_since;
                }
                Some(older) => {
                    let stop = AgentCall::StopInstance { instance: key, attach: Some(older) };
                    decision.call(node, stop);
                }
                None => {}
            }
            start((engine, attach), volume, node, continues, &mut decision);
        }
    }
    decision
}

/// Copies the status of this attachment's process, and sends it the changes since its start.
fn follow(
    context: &Context<'_>,
    (engine, attach): (&Engine, u64),
    instance: &Instance,
    shown: &ObservedEngine,
    decision: &mut Decision,
) {
    let mut status = taken_over(engine, instance, shown);
    let ends = matches!(status.current_state, CurrentState::Stopping | CurrentState::Error);
    let volume = context.cluster.volumes.get(engine.spec.volume_name.as_str());
    let left = quiet_left(context, volume);
    if is_step(&engine.status, &status) && !left.is_zero() {
        status = engine.status.clone();
        decision.again_after(left);
    }
    if status != engine.status || ends {
        // The status comes first; its change causes the next run, which sends the rest.
        write_status(decision, engine, status);
        return;
    }
    let (Some(volume), Some(node)) = (volume, &engine.spec.node_id) else { return };
    let name = engine.spec.volume_name.clone();
    if status.map_revision != engine.spec.map_revision {
        let revision = engine.spec.map_revision;
        let replicas = engine.spec.replica_address_map.clone();
        decision.call(node, AgentCall::UpdateReplicas { volume: name.clone(), attach, replicas, revision });
        status.map_revision = revision;
    }
    let size_bytes = engine.spec.volume_size;
    if status.volume_size.max(status.current_size) < Some(size_bytes) {
        decision.call(node, AgentCall::ExpandEngine { volume: name.clone(), attach, size_bytes });
        status.volume_size = Some(size_bytes);
    }
    let limits = volume.spec.rebuild;
    if status.rebuild != Some(limits) {
        decision.call(node, AgentCall::SetRebuildLimits { volume: name, attach, limits });
        status.rebuild = Some(limits);
    }
    write_status(decision, engine, status);
}

/// Returns true if this is a start that makes progress as expected.
fn is_step(stored: &StoredEngineStatus, shown: &StoredEngineStatus) -> bool {
    let starts = |state| matches!(state, CurrentState::Starting | CurrentState::Running);
    stored.current_state == CurrentState::Starting
        && starts(shown.current_state)
        && !matches!(shown.phase, Some(EnginePhase::Serving | EnginePhase::Frozen))
        && shown.message.is_none()
}

fn starting(engine: &Engine, volume: &Volume, failure: Option<&String>) -> StoredEngineStatus {
    StoredEngineStatus {
        current_state: if failure.is_some() { CurrentState::Error } else { CurrentState::Starting },
        message: failure.cloned(),
        map_revision: engine.spec.map_revision,
        volume_size: Some(engine.spec.volume_size),
        rebuild: Some(volume.spec.rebuild),
        ..cleared(engine)
    }
}

/// Returns the status of an engine without a process; the record of having been seen stays.
fn cleared(engine: &Engine) -> StoredEngineStatus {
    StoredEngineStatus {
        seen_attach: engine.status.seen_attach,
        lost_attach: engine.status.lost_attach,
        served_attach: engine.status.served_attach,
        ..StoredEngineStatus::default()
    }
}

fn lost(engine: &Engine, message: String) -> StoredEngineStatus {
    let lost_attach = engine.status.seen_attach.max(engine.spec.attach);
    let message = Some(message);
    StoredEngineStatus { current_state: CurrentState::Error, message, lost_attach, ..cleared(engine) }
}

/// Returns the status from the process of this attachment.
fn taken_over(engine: &Engine, instance: &Instance, shown: &ObservedEngine) -> StoredEngineStatus {
    let attach = engine.spec.attach;
    debug_assert_eq!(shown.attach, attach);
    if has_ended(instance, shown) {
        let why = instance.message.as_deref().unwrap_or("no reason given");
        let seen = StoredEngineStatus { seen_attach: attach, ..engine.status.clone() };
        let engine = Engine { status: seen, ..engine.clone() };
        return lost(&engine, format!("the engine stopped by itself: {why}"));
    }
    let mut status = StoredEngineStatus {
        current_state: match instance.state {
            InstanceState::Starting => CurrentState::Starting,
            InstanceState::Running => CurrentState::Running,
            InstanceState::Stopping | InstanceState::Stopped => CurrentState::Stopping,
            InstanceState::Error => CurrentState::Error,
        },
        seen_attach: attach,
        lost_attach: engine.status.lost_attach,
        served_attach: engine.status.served_attach,
        message: instance.message.clone(),
        map_revision: engine.status.map_revision,
        volume_size: engine.status.volume_size,
        current_size: shown.size_bytes,
        rebuild: engine.status.rebuild,
        needs_upgrade: shown.needs_upgrade,
        ..StoredEngineStatus::of_reported(shown.reported.as_ref())
    };
    if status.is_serving() {
        status.served_attach = attach;
    }
    status
}

fn start(
    (engine, attach): (&Engine, u64),
    volume: &Volume,
    node: &NodeName,
    continues: Option<u64>,
    decision: &mut Decision,
) {
    let spec = &engine.spec;
    let call = StartEngine {
        volume: spec.volume_name.clone(),
        size_bytes: spec.volume_size,
        attach,
        replicas: spec.replica_address_map.clone(),
        frontend: spec.frontend,
        secret: volume.spec.secret.clone(),
        granted: volume.status.arbiter.granted().map(Box::new),
        rebuild: volume.spec.rebuild,
        revision: spec.map_revision,
        continues,
        verify_reads: volume.spec.verify_reads,
        encrypt_in_transit: volume.spec.encrypt_in_transit,
    };
    decision.call(node, AgentCall::StartEngine(call));
    decision.again_after(START_CHECK);
}

fn stop(context: &Context<'_>, engine: &Engine, node: &NodeName, agent: &ObservedAgent) -> Decision {
    let key = InstanceKey::engine(&engine.spec.volume_name);
    let mut decision = Decision::nothing();
    let instance = agent.instances.get(&key);
    // Stored as stopped, but still running: a start call came late. The engine is fenced, but prevents the
    // next start.
    let shown = instance.is_some_and(|instance| is_older(instance, engine.spec.attach));
    let call = stop_call(context, engine);
    if engine.status.current_state == CurrentState::Stopped {
        if shown {
            decision.call(node, call);
        }
        return decision;
    }
    let failure = agent.failures.get(&key).map(|failure| &failure.message);
    let status = stopping(engine, agent, failure);
    if status != engine.status {
        // The status is stored first. Its change causes the next run, which makes the call.
        write_status(&mut decision, engine, status);
        return decision;
    }
    decision.call(node, call);
    write_status(&mut decision, engine, cleared(engine));
    decision
}

/// Returns the call that stops the engine: by force, if its attachment was detached by force.
fn stop_call(context: &Context<'_>, engine: &Engine) -> AgentCall {
    let (volume, attach) = (engine.spec.volume_name.clone(), engine.spec.attach);
    let stored = context.cluster.volumes.get(volume.as_str());
    if stored.is_some_and(|stored| stored.spec.is_detached_by_force(attach)) {
        return AgentCall::ForceStopEngine { volume, attach };
    }
    AgentCall::StopInstance { instance: InstanceKey::engine(&volume), attach }
}

/// Returns the status of an engine that has to stop. An engine whose device is in use may serve for long. Its
/// status is kept up to date, so that its volume is repaired meanwhile.
fn stopping(engine: &Engine, agent: &ObservedAgent, failure: Option<&String>) -> StoredEngineStatus {
    let stop_refused = failure.or(engine.status.stop_refused.as_ref()).cloned();
    match living(engine, agent) {
        Some((instance, shown)) if stop_refused.is_some() => {
            StoredEngineStatus { stop_refused, ..taken_over(engine, instance, shown) }
        }
        _ => StoredEngineStatus {
            current_state: CurrentState::Stopping,
            message: failure.cloned(),
            stop_refused: failure.cloned(),
            ..engine.status.clone()
        },
    }
}
