//! Counts objects by state.

use shorthorn_controller_core::ClusterState;
use shorthorn_controller_core::objects::{
    ConditionType, CurrentState, EnginePhase, Kind, Node, Robustness, VolumeState,
};
use shorthorn_controller_core::observed::{Agents, ObservedAgent};
use shorthorn_metrics::MetricsPage;

const VOLUME_STATES: [VolumeState; 6] = [
    VolumeState::Creating,
    VolumeState::Attached,
    VolumeState::Detached,
    VolumeState::Attaching,
    VolumeState::Detaching,
    VolumeState::Deleting,
];
const ROBUSTNESSES: [Robustness; 4] =
    [Robustness::Healthy, Robustness::Degraded, Robustness::Faulted, Robustness::Unknown];
const CURRENT_STATES: [CurrentState; 6] = [
    CurrentState::Stopped,
    CurrentState::Starting,
    CurrentState::Running,
    CurrentState::Stopping,
    CurrentState::Error,
    CurrentState::Unknown,
];

fn number(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

/// Shows the objects of `cluster`, and every state even if it has no object.
pub(super) fn show(cluster: &ClusterState, page: &mut MetricsPage) {
    let mut volumes = [[0; ROBUSTNESSES.len()]; VOLUME_STATES.len()];
    for volume in cluster.volumes.values() {
        volumes[volume.status.state as usize][volume.status.robustness as usize] += 1;
    }
    let gauges = page.gauges("shorthorn_volumes", "Volumes, by state and robustness");
    for state in VOLUME_STATES {
        for robustness in ROBUSTNESSES {
            let labels = [("state", state.as_str()), ("robustness", robustness.as_str())];
            gauges.set(&labels, volumes[state as usize][robustness as usize]);
        }
    }
    let engines = cluster.engines.values().map(|engine| engine.status.current_state);
    show_processes(page, "shorthorn_engines", "Engines in the store, by state", engines);
    let replicas = cluster.replicas.values().map(|replica| replica.status.current_state);
    show_processes(page, "shorthorn_replicas", "Replicas in the store, by state", replicas);
    let frozen =
        cluster.engines.values().filter(|engine| engine.status.phase == Some(EnginePhase::Frozen)).count();
    page.gauges("shorthorn_frozen_volumes", "Volumes whose requests wait for replicas or the arbiter")
        .set(&[], number(frozen));
    let outdated =
        cluster.engines.values().filter(|engine| engine.status.needs_upgrade == Some(true)).count();
    page.gauges(
        "shorthorn_outdated_engines",
        "Engines whose program differs from the one that is installed on their node",
    )
    .set(&[], number(outdated));
    let nodes = page.gauges("shorthorn_nodes", "Nodes, by whether their agents are reachable");
    let ready = cluster.nodes.values().filter(|node| is_ready(node)).count();
    nodes.set(&[("ready", "true")], number(ready));
    nodes.set(&[("ready", "false")], number(cluster.nodes.len() - ready));
    let unusable = page.gauges(
        "shorthorn_unusable_objects",
        "Stored objects that the controller cannot use; shorthornctl doctor names them",
    );
    for kind in [Kind::Volume, Kind::Engine, Kind::Replica, Kind::Node] {
        let count = cluster.left_out().iter().filter(|(key, _)| key.kind == kind).count();
        unusable.set(&[("kind", kind.as_str())], number(count));
    }
    let closed =
        page.gauges("shorthorn_unschedulable_nodes", "Nodes that are cordoned or drained with shorthornctl");
    closed.set(&[], number(cluster.nodes.values().filter(|node| !node.spec.allow_scheduling).count()));
}

fn is_ready(node: &Node) -> bool {
    node.status.conditions.get(ConditionType::Ready).is_some_and(|ready| ready.status)
}

fn show_processes(page: &mut MetricsPage, name: &str, help: &str, all: impl Iterator<Item = CurrentState>) {
    let mut counts = [0; CURRENT_STATES.len()];
    for state in all {
        counts[state as usize] += 1;
    }
    let gauges = page.gauges(name, help);
    for state in CURRENT_STATES {
        gauges.set(&[("state", state.as_str())], counts[state as usize]);
    }
}

/// Shows the agents, by their present connection.
pub(super) fn show_agents(agents: &Agents, page: &mut MetricsPage) {
    let gauges =
        page.gauges("shorthorn_controller_agents", "Agents, by whether this controller is connected to them");
    let synced = agents.by_node().values().filter(|agent| ObservedAgent::is_synced(agent)).count();
    gauges.set(&[("connected", "true")], number(synced));
    gauges.set(&[("connected", "false")], number(agents.by_node().len() - synced));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_has_its_place() {
        assert!(VOLUME_STATES.iter().enumerate().all(|(at, state)| *state as usize == at));
        assert!(ROBUSTNESSES.iter().enumerate().all(|(at, robustness)| *robustness as usize == at));
        assert!(CURRENT_STATES.iter().enumerate().all(|(at, state)| *state as usize == at));
    }

    #[test]
    fn every_state_is_shown() {
        let mut page = MetricsPage::default();
        show(&ClusterState::default(), &mut page);
        show_agents(&Agents::default(), &mut page);
        let text = page.text().unwrap();
        for line in [
            "shorthorn_volumes{state=\"attached\",robustness=\"faulted\"} 0\n",
            "shorthorn_engines{state=\"error\"} 0\n",
            "shorthorn_replicas{state=\"unknown\"} 0\n",
            "shorthorn_nodes{ready=\"false\"} 0\n",
            "shorthorn_outdated_engines{} 0\n",
            "shorthorn_unusable_objects{kind=\"volume\"} 0\n",
            "shorthorn_controller_agents{connected=\"true\"} 0\n",
        ] {
            assert!(text.contains(line), "{line:?} is not in {text}");
        }
    }
}
