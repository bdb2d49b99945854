//! Follows the agents of all nodes with a known address, while nodes are added, changed and removed.

use std::collections::BTreeMap;
use std::sync::Arc;

use shorthorn_controller_core::NodeName;
use shorthorn_controller_core::objects::{Kind, Node};
use shorthorn_pki::address::ServerUrl;
use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinHandle;

use super::{Fleet, agent_stream};

/// An agent that is followed, until this is dropped.
struct Following {
    url: ServerUrl,
    task: JoinHandle<()>,
}

impl Drop for Following {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Fleet {
    /// Follows every agent, until it is dropped.
    pub async fn run(self: Arc<Fleet>) {
        let mut changes = self.store.changes();
        let mut following = BTreeMap::new();
        self.align(&mut following).await;
        loop {
            match changes.recv().await {
                Ok(key) if key.kind != Kind::Node => {}
                // With thousands of nodes, a check of all of them takes long, and their objects change often.
                Ok(key) => {
                    if let Ok(node) = NodeName::new(&key.name) {
                        let wanted = self.wanted_of(&node);
                        self.align_one(&mut following, node, wanted).await;
                    }
                }
                Err(RecvError::Lagged(_)) => self.align(&mut following).await,
                Err(RecvError::Closed) => return,
            }
        }
    }

    /// Follows exactly the agents that are wanted now.
    async fn align(self: &Arc<Fleet>, following: &mut BTreeMap<NodeName, Following>) {
        let wanted = self.wanted();
        let left: Vec<NodeName> =
            following.keys().filter(|node| !wanted.contains_key(*node)).cloned().collect();
        for node in left {
            self.align_one(following, node, None).await;
        }
        for (node, url) in wanted {
            self.align_one(following, node, Some(url)).await;
        }
    }

    /// Follows the agent of `node` at that address; none: does not follow it.
    async fn align_one(
        self: &Arc<Fleet>,
        following: &mut BTreeMap<NodeName, Following>,
        node: NodeName,
        wanted: Option<ServerUrl>,
    ) {
        if following.get(&node).map(|link| &link.url) == wanted.as_ref() {
            return;
        }
        if let Some(mut link) = following.remove(&node) {
            link.task.abort();
            // The task may still run on another thread. State of the old agent must not count as the new
            // one's.
            let _ = (&mut link.task).await;
            self.remove(&node);
            tracing::info!(%node, url = %link.url, "stopped watching the agent");
            self.wake_all(&node);
        }
        let Some(url) = wanted.filter(|url| self.know(&node, url)) else { return };
        let task = tokio::spawn(agent_stream::follow(Arc::clone(self), node.clone()));
        following.insert(node, Following { url, task });
    }

    /// Adds all agents with a known address.
    pub(super) fn know_stored(&self) {
        for (node, url) in self.wanted() {
            self.know(&node, &url);
        }
    }

    /// Adds an agent at that address; returns false if it can never be reached there.
    fn know(&self, node: &NodeName, url: &ServerUrl) -> bool {
        if self.connections.is_to(node, url) {
            return true;
        }
        let added = self.add(node, url, true);
        added.inspect_err(|error| tracing::warn!(%node, %error, "the agent cannot be followed")).is_ok()
    }

    /// Returns the addresses of the agents; those of the configuration win.
    fn wanted(&self) -> BTreeMap<NodeName, ServerUrl> {
        let cluster = self.store.state();
        let mut wanted: BTreeMap<NodeName, ServerUrl> = cluster.nodes.values().filter_map(address).collect();
        wanted.extend(self.configured.clone());
        wanted
    }

    /// Returns the address of one agent; none: it has none, or none that can be used.
    fn wanted_of(&self, node: &NodeName) -> Option<ServerUrl> {
        let stored = || {
            let cluster = self.store.state();
            cluster.nodes.get(node.as_str()).and_then(address).map(|(_, url)| url)
        };
        self.configured.get(node).cloned().or_else(stored)
    }
}

/// Returns the address of the agent in the object of its node.
fn address(node: &Node) -> Option<(NodeName, ServerUrl)> {
    let name = NodeName::new(&node.metadata.name).ok()?;
    if node.spec.address.is_empty() {
        return None;
    }
    match node.spec.address.parse() {
        Ok(url) => Some((name, url)),
        Err(error) => {
            tracing::warn!(node = %name, %error, "spec.address cannot be used");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_controller_core::Timestamp;
    use shorthorn_controller_core::objects::{Metadata, NodeSpec, NodeStatus};

    use super::*;
    use crate::counters::Metrics;
    use crate::queue::WorkQueue;
    use crate::store::{MemoryStore, ObjectStore};

    #[tokio::test]
    async fn a_new_controller_does_not_count_unchecked_nodes_as_lost() {
        let spec = NodeSpec { address: "unix:///run/agent.sock".to_owned(), ..NodeSpec::default() };
        let metadata = Metadata::new("a", Timestamp::now());
        let store = MemoryStore::new();
        store.put(Node { metadata, spec, status: NodeStatus::default() }.into()).await.unwrap();
        let fleet =
            Fleet::new(&BTreeMap::new(), Arc::new(store), Arc::new(WorkQueue::new()), Metrics::default())
                .unwrap();
        let node = NodeName::new("a").unwrap();
        assert!(fleet.agents().get(&node).is_some(), "known before anybody decides anything");
    }
}
