use std::collections::BTreeMap;
use std::path::Path;

use shorthorn_types::HumanGib;

use super::{Context, GIVE_UP_CHECK, Reachability, reachability};
use crate::objects::{ConditionType, DiskSpec, DiskStatus, EnginePhase, Finding, Frontend, Key, Kind, Node};
use crate::observed::{Detail, Instance, InstanceKey, ObservedAgent};
use crate::{Action, AgentCall, Decision, NodeName, lost_node};

pub(super) fn reconcile(context: &Context<'_>, name: &str) -> Decision {
    let mut decision = Decision::nothing();
    let Ok(node_name) = NodeName::new(name) else { return decision };
    let agent = context.agents.get(&node_name);
    let stored = context.cluster.nodes.get(name);
    let mut node = match (stored, agent) {
        (Some(node), _) => node.clone(),
        (None, _) if context.cluster.unknown(&Key::new(Kind::Node, name)).is_some() => return decision,
        (None, Some(agent)) if !agent.from_object => Node::new(name, context.now),
        // The object of the node is gone: the operator has given the node up, and this controller has not
        // forgotten it yet.
        (None, _) => return decision,
    };
    if node.metadata.is_deleting()
        && let Reachability::Unreachable(_) = reachability(context, &node_name)
    {
        return give_up(context, node);
    }
    if let Some(agent) = agent.filter(|agent| !agent.from_object) {
        node.spec.address.clone_from(&agent.address);
    }
    let mut changed = None;
    let ready = match reachability(context, &node_name) {
        Reachability::Reachable(agent) => {
            take_over(&mut node, agent);
            Some(Finding::Well)
        }
        Reachability::Unreachable(reason) => Some(Finding::wrong("AgentUnreachable", reason)),
        Reachability::Uncertain(wait) => {
            decision.again_after(wait);
            None
        }
    };
    if let Some(finding) = ready {
        changed = event_of(&node, &finding);
        node.status.conditions.set(ConditionType::Ready, finding, context.now);
        node.status.conditions.observe(node.metadata.generation);
    }
    let lost: Vec<String> = lost_disks(&node).map(str::to_owned).collect();
    if stored != Some(&node) {
        decision.write(node);
        if let Some((is_warning, reason, message)) = changed {
            decision.emit(Key::new(Kind::Node, name), is_warning, reason, message);
        }
    }
    // Last, because a process that hangs must not delay other actions.
    stop_forgotten(context, &node_name, &lost, &mut decision);
    stop_ownerless(context, &node_name, &mut decision);
    decision
}

/// Stops engines whose volume is deleted and that no object names: their node was given up before the
/// deletion, and is back. If a restored store lacks a volume, its engine continues to serve its user. An
/// agent refuses to stop an engine whose device is in use. It cannot tell whether a socket has clients, so an
/// engine that serves one stays. The engine of a deleted volume has lost its replicas elsewhere, and does not
/// serve for long.
fn stop_ownerless(context: &Context<'_>, node: &NodeName, decision: &mut Decision) {
    let Reachability::Reachable(agent) = reachability(context, node) else { return };
    let cluster = context.cluster;
    let ownerless = agent.instances.iter().filter_map(|(key, instance)| {
        let Detail::Engine(shown) = &instance.detail else { return None };
        let is_known = cluster.engines.contains_key(&key.name) || cluster.volumes.contains_key(&key.name);
        let may_have_clients = shown.reported.as_ref().is_some_and(|status| {
            status.frontend == Some(Frontend::Socket) && status.phase == EnginePhase::Serving
        });
        // Without a number the call would stop any engine of the name.
        (!is_known && !may_have_clients && cluster.unknown_of(&key.name).is_none())
            .then_some((key, shown.attach?))
    });
    let mut ownerless: Vec<(&InstanceKey, u64)> = ownerless.collect();
    // A call that fails is the last one of its run.
    ownerless.sort_by_key(|(key, _)| agent.failures.contains_key(key));
    if !ownerless.is_empty() {
        decision.again_after(GIVE_UP_CHECK);
    }
    for (key, attach) in ownerless {
        decision.call(node, AgentCall::StopInstance { instance: key.clone(), attach: Some(attach) });
    }
}

fn lost_disks(node: &Node) -> impl Iterator<Item = &str> {
    node.spec.disks.iter().filter(|(_, disk)| disk.lost).map(|(path, _)| path.as_str())
}

/// Stops the processes on disks that are given up whose replicas are forgotten: nothing else knows of them. A
/// process that waits for its disk may not end at once, so this is done until the agent does not show it any
/// more.
fn stop_forgotten(context: &Context<'_>, node: &NodeName, lost: &[String], decision: &mut Decision) {
    if lost.is_empty() {
        return;
    }
    let Reachability::Reachable(agent) = reachability(context, node) else { return };
    let is_there = |(key, instance): &(&InstanceKey, &Instance)| {
        let Detail::Replica(shown) = &instance.detail else { return false };
        let is_on_lost = |directory| lost.iter().any(|disk| Path::new(directory).starts_with(disk));
        let is_lost = shown.directory.as_ref().is_some_and(is_on_lost);
        let is_unknown = || context.cluster.unknown(&Key::new(Kind::Replica, &key.name)).is_some();
        is_lost && !context.cluster.replicas.contains_key(&key.name) && !is_unknown()
    };
    let mut forgotten: Vec<&InstanceKey> =
        agent.instances.iter().filter(is_there).map(|(key, _)| key).collect();
    // A call that fails is the last one of its run.
    forgotten.sort_by_key(|key| agent.failures.contains_key(key));
    if !forgotten.is_empty() {
        decision.again_after(GIVE_UP_CHECK);
    }
    for key in forgotten {
        decision.call(node, AgentCall::StopInstance { instance: key.clone(), attach: None });
    }
}

/// Returns the event if a node is lost, back, or new: true for a warning, the reason, and the message.
fn event_of(node: &Node, found: &Finding) -> Option<(bool, &'static str, String)> {
    let name = &node.metadata.name;
    let was_ready = node.status.conditions.get(ConditionType::Ready).map(|ready| ready.status);
    match (was_ready, found) {
        (Some(true), Finding::Wrong(_, why)) => {
            Some((true, "NodeLost", format!("node {name} is lost: {why}")))
        }
        (Some(false), Finding::Well) => {
            Some((false, "NodeReady", format!("node {name} is back: its agent answers")))
        }
        (None, Finding::Well) => Some((false, "NodeReady", format!("the agent of node {name} answers"))),
        (None, Finding::Wrong(_, why)) => {
            Some((true, "NodeNotReady", format!("node {name} cannot be reached: {why}")))
        }
        (Some(true), Finding::Well) | (Some(false), Finding::Wrong(..)) => None,
    }
}

/// Removes the object once nothing names the node any more. A stored object still does, and so does the
/// configuration, which would bring it back.
fn give_up(context: &Context<'_>, mut node: Node) -> Decision {
    let name = node.metadata.name.clone();
    let agent = NodeName::new(&name).ok().and_then(|name| context.agents.get(&name));
    let left = if lost_node::is_named(context.cluster, &name) {
        "stored objects still name the node: the controller deletes each Replica object once its volume no \
         longer needs the replica"
            .to_owned()
    } else if agent.is_some_and(|agent| !agent.from_object) {
        format!("the controller is configured with its agent: start it without --node {name}=URL")
    } else {
        let mut decision = Decision::nothing();
        let key = Key::new(Kind::Node, &name);
        decision.emit(key.clone(), false, "NodeDeleted", format!("node {name} is given up"));
        decision.actions.push(Action::Remove(key, node.metadata.resource_version));
        return decision;
    };
    let mut decision = Decision { requeue_after: Some(GIVE_UP_CHECK), ..Decision::nothing() };
    let stored = node.status.conditions.clone();
    node.status.conditions.set(ConditionType::Ready, Finding::wrong("GivenUp", left), context.now);
    if node.status.conditions != stored {
        decision.write(node);
    }
    decision
}

/// Copies the status of the agent, and the disks that its administrator has added.
fn take_over(node: &mut Node, agent: &ObservedAgent) {
    if let Some(info) = &agent.info {
        node.status.take_over(info);
    }
    for (path, disk) in &agent.disks {
        node.spec.disks.entry(path.clone()).or_insert_with(|| DiskSpec::of_new(disk.total_bytes));
    }
    let before = &node.status.disk_status;
    let known = |path: &String| match agent.disks.get(path) {
        Some(disk) => DiskStatus::of(disk, before.get(path)),
        None => DiskStatus {
            problem: Some(format!(
                "the agent does not know this disk: run shorthornctl disk add {} {path}",
                node.metadata.name
            )),
            ..DiskStatus::default()
        },
    };
    let disks: BTreeMap<_, _> = node.spec.disks.keys().map(|path| (path.clone(), known(path))).collect();
    node.status.free_space = free_space(disks.values());
    node.status.disk_status = disks;
}

/// Returns the free space of all disks in words; empty if it is unknown.
fn free_space<'a>(disks: impl Iterator<Item = &'a DiskStatus>) -> String {
    let sums = disks.fold((0, 0), |(free, all), disk| {
        (disk.storage_available.saturating_add(free), disk.storage_maximum.saturating_add(all))
    });
    match sums {
        (_, 0) => String::new(),
        (free, all) => format!("{} of {}", HumanGib(free), HumanGib(all)),
    }
}

#[cfg(test)]
mod tests;
