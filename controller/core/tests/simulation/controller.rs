//! The shell of a simulated controller: the agents as it has observed them, and the running reconcilers.

use std::collections::{BTreeMap, VecDeque};

use shorthorn_controller_core::objects::{Frontend, FrontendStatus, Key};
use shorthorn_controller_core::observed::{AgentInfo, AgentLink, Agents, ObservedAgent, ObservedDisk};
use shorthorn_controller_core::{Action, NodeName, Timestamp};

use crate::agent::{Event, SimAgent};

/// The state of a controller, all of which is lost in a crash.
#[derive(Debug)]
pub struct Controller {
    pub agents: Agents,
    /// The sent but unread events of the open streams.
    pub streams: BTreeMap<NodeName, VecDeque<Event>>,
    /// The actions that are left of the decisions made.
    pub runs: BTreeMap<Key, VecDeque<Action>>,
}

impl Controller {
    pub fn start(nodes: &[SimAgent], now: Timestamp) -> Controller {
        let agent =
            |node: &SimAgent| (node.name.clone(), ObservedAgent::new(format!("http://{}", node.name), now));
        Controller {
            agents: nodes.iter().map(agent).collect(),
            streams: BTreeMap::new(),
            runs: BTreeMap::new(),
        }
    }

    pub fn open(&mut self, node: &SimAgent) {
        let Some(mut agent) = self.agents.get_mut(&node.name) else { return };
        agent.info = Some(AgentInfo {
            name: node.name.to_string(),
            version: "1".to_owned(),
            zone: None,
            data_address: Some("10.0.0.1".to_owned()),
            frontends: vec![FrontendStatus { name: Frontend::Ublk, usable: true, reason: String::new() }],
            max_volumes: None,
            feature_level: 0,
            dead_mounts: Vec::new(),
            warnings: Vec::new(),
        });
        let disk = ObservedDisk {
            uuid: Some("disk".to_owned()),
            total_bytes: 1 << 40,
            available_bytes: 1 << 39,
            ..ObservedDisk::default()
        };
        agent.disks = BTreeMap::from([("/disk".to_owned(), disk)]);
        agent.instances.clone_from(&node.instances);
        agent.failures.clear();
        agent.link = AgentLink::Synced;
        self.streams.insert(node.name.clone(), VecDeque::new());
    }

    pub fn close(&mut self, node: &NodeName, now: Timestamp) {
        if self.streams.remove(node).is_some()
            && let Some(mut agent) = self.agents.get_mut(node)
        {
            agent.link = AgentLink::Down { since: now, reason: "connection reset".to_owned() };
        }
    }

    /// Reads the next event of a stream; true if there was one.
    pub fn read(&mut self, node: &NodeName, keep: bool) -> bool {
        let Some(stream) = self.streams.get_mut(node) else { return false };
        let event = if keep { stream.front().cloned() } else { stream.pop_front() };
        let (Some(event), Some(mut agent)) = (event, self.agents.get_mut(node)) else { return false };
        match event {
            Event::Set(key, instance) => drop(agent.instances.insert(key, *instance)),
            Event::Gone(key) => drop(agent.instances.remove(&key)),
        }
        true
    }
}
