//! The connections to the agents, one for each node.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use shorthorn_controller_core::NodeName;
use shorthorn_pki::address::{AddressError, ServerUrl};
use shorthorn_pki::{Credentials, Role};
use tokio::sync::{Mutex, OwnedMutexGuard};
use tonic::transport::{Channel, Endpoint};

/// The longest that a connection may take to come about. A SYN is sent again after 1 s and 3 s.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// The interval of probes of a silent connection, and the time limit of the answer. With the limit it is as
/// long as `UNREACHABLE_AFTER` of the reconcilers.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// The connections to all agents with a known address.
pub(super) struct AgentConnections {
    /// None: only agents on this host are connected to.
    credentials: Option<Credentials>,
    by_node: RwLock<BTreeMap<NodeName, AgentConnection>>,
}

/// The connection to an agent, and its address.
pub(super) struct AgentConnection {
    url: ServerUrl,
    channel: Channel,
    /// Held while disks are queried or added, so that an older answer never replaces a newer one.
    asking_for_disks: Arc<Mutex<()>>,
}

impl AgentConnections {
    /// Creates an empty collection. Agents on other hosts have to prove the name of their node.
    pub(super) fn new(credentials: Option<Credentials>) -> AgentConnections {
        AgentConnections { credentials, by_node: RwLock::default() }
    }

    /// Makes a connection to the agent of `node`, which is opened by the first call.
    ///
    /// # Errors
    /// [`AddressError`] for a URL that can never work.
    pub(super) fn connect(&self, node: &NodeName, url: &ServerUrl) -> Result<AgentConnection, AddressError> {
        let role = Role::Node(node.clone());
        let channel = url.connect(&protected(url.endpoint()?), self.credentials.as_ref(), role)?;
        Ok(AgentConnection { url: url.clone(), channel, asking_for_disks: Arc::default() })
    }

    /// Uses this connection for the agent of `node` from here on.
    pub(super) fn insert(&self, node: NodeName, connection: AgentConnection) {
        self.by_node_mut().insert(node, connection);
    }

    /// Forgets the agent of `node`.
    pub(super) fn remove(&self, node: &NodeName) {
        self.by_node_mut().remove(node);
    }

    /// Returns the nodes whose agents have a connection.
    pub(super) fn nodes(&self) -> Vec<NodeName> {
        self.by_node().keys().cloned().collect()
    }

    /// Returns the number of nodes that have one.
    pub(super) fn count(&self) -> usize {
        self.by_node().len()
    }

    /// Returns true if the connection of `node` has that address.
    pub(super) fn is_to(&self, node: &NodeName, url: &ServerUrl) -> bool {
        self.by_node().get(node).is_some_and(|connection| connection.url == *url)
    }

    /// Returns the channel to the agent of `node`; none if its address is unknown.
    pub(super) fn channel(&self, node: &NodeName) -> Option<Channel> {
        self.by_node().get(node).map(|connection| connection.channel.clone())
    }

    /// Waits until no other caller asks the agent of `node` for its disks; none if its address is unknown.
    pub(super) async fn ask_for_disks(&self, node: &NodeName) -> Option<OwnedMutexGuard<()>> {
        let asking = Arc::clone(&self.by_node().get(node)?.asking_for_disks);
        Some(asking.lock_owned().await)
    }

    fn by_node(&self) -> RwLockReadGuard<'_, BTreeMap<NodeName, AgentConnection>> {
        self.by_node.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn by_node_mut(&self) -> RwLockWriteGuard<'_, BTreeMap<NodeName, AgentConnection>> {
        self.by_node.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Limits the time that an unresponsive peer can cost.
fn protected(endpoint: Endpoint) -> Endpoint {
    endpoint
        .connect_timeout(CONNECT_LIMIT)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE)
        .keep_alive_while_idle(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str) -> NodeName {
        NodeName::new(name).unwrap()
    }

    fn url(socket: &str) -> ServerUrl {
        format!("unix:///run/{socket}").parse().unwrap()
    }

    fn connected(nodes: &[&str]) -> AgentConnections {
        let connections = AgentConnections::new(None);
        for name in nodes {
            let connection = connections.connect(&node(name), &url(name)).unwrap();
            connections.insert(node(name), connection);
        }
        connections
    }

    #[tokio::test]
    async fn a_connection_is_used_until_it_is_removed() {
        let connections = connected(&["a", "b"]);
        assert_eq!((connections.nodes(), connections.count()), (vec![node("a"), node("b")], 2));
        assert!(connections.channel(&node("a")).is_some() && connections.channel(&node("c")).is_none());
        connections.remove(&node("a"));
        assert_eq!((connections.nodes(), connections.count()), (vec![node("b")], 1));
        assert!(connections.channel(&node("a")).is_none());
    }

    #[tokio::test]
    async fn a_connection_is_to_its_last_address() {
        let connections = connected(&["a"]);
        assert!(connections.is_to(&node("a"), &url("a")) && !connections.is_to(&node("b"), &url("a")));
        let moved = connections.connect(&node("a"), &url("moved")).unwrap();
        assert!(connections.is_to(&node("a"), &url("a")), "the new one is not used yet");
        connections.insert(node("a"), moved);
        assert!(connections.is_to(&node("a"), &url("moved")) && !connections.is_to(&node("a"), &url("a")));
    }

    #[tokio::test(start_paused = true)]
    async fn one_caller_at_a_time_asks_an_agent_for_its_disks() {
        let connections = connected(&["a", "b"]);
        let (a, b) = (node("a"), node("b"));
        let asking = connections.ask_for_disks(&a).await.unwrap();
        assert!(connections.ask_for_disks(&b).await.is_some(), "another agent");
        let second = tokio::time::timeout(CONNECT_LIMIT, connections.ask_for_disks(&a)).await;
        assert!(second.is_err(), "both ask");
        drop(asking);
        assert!(connections.ask_for_disks(&a).await.is_some());
        assert!(connections.ask_for_disks(&node("c")).await.is_none());
    }
}
