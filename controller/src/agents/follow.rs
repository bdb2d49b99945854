//! Follows the agents of all nodes that somebody says the address of, while these come, change and go.

use std::collections::BTreeMap;
use std::sync::Arc;

use shorthorn_controller_core::NodeName;
use shorthorn_controller_core::objects::{Kind, Node};
use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinHandle;

use super::{Fleet, link};
use crate::address::ServerUrl;

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
                Ok(key) if key.kind != Kind::Node => continue,
                Ok(_) | Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return,
            }
            self.align(&mut following).await;
        }
    }

    /// Follows those who are to be followed now, and nobody else.
    async fn align(self: &Arc<Fleet>, following: &mut BTreeMap<NodeName, Following>) {
        let wanted = self.wanted();
        let is_left = |(node, link): &(&NodeName, &Following)| wanted.get(*node) != Some(&link.url);
        let left: Vec<NodeName> = following.iter().filter(is_left).map(|(node, _)| node.clone()).collect();
        for node in left {
            let Some(mut link) = following.remove(&node) else { continue };
            link.task.abort();
            // It may be at work on another thread: nothing of the old agent may be taken for the new one's.
            let _ = (&mut link.task).await;
            self.remove(&node);
            tracing::info!(%node, url = %link.url, "the agent is not followed any more");
            self.wake_all(&node);
        }
        for (node, url) in wanted {
            if following.contains_key(&node) {
                continue;
            }
            let is_known = self.peers().get(&node).is_some_and(|peer| peer.url == url);
            if !is_known && let Err(error) = self.add(&node, &url, true) {
                tracing::warn!(%node, %error, "the agent cannot be followed");
                continue;
            }
            let task = tokio::spawn(link::follow(Arc::clone(self), node.clone()));
            following.insert(node, Following { url, task });
        }
    }

    /// Where agents are: the configuration wins.
    fn wanted(&self) -> BTreeMap<NodeName, ServerUrl> {
        let world = self.store.world();
        let mut wanted: BTreeMap<NodeName, ServerUrl> = world.nodes.values().filter_map(address).collect();
        wanted.extend(self.configured.clone());
        wanted
    }
}

/// Where an object says that the agent of its node is.
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
