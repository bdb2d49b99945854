//! Connects to the agents and keeps their observed states. No other part connects to them.

mod agent_stream;
mod cluster;
mod connections;
pub(crate) mod convert;
mod discover;
mod follow;
mod requests;

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use shorthorn_api::v1::node_client::NodeClient;
use shorthorn_controller_core::objects::{Key, Kind};
use shorthorn_controller_core::observed::{Agents, CallFailure, ObservedAgent};
use shorthorn_controller_core::reconcile::concerned;
use shorthorn_controller_core::{AgentCall, NodeName, Timestamp};
use shorthorn_pki::Credentials;
use shorthorn_pki::address::{AddressError, ServerUrl};
use thiserror::Error;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Code, Status};

use self::cluster::OfCluster;
use self::connections::AgentConnections;
use self::convert::AgentRequest;
pub(crate) use self::discover::ASKED_MAX;
pub use self::requests::{Found, FoundTrash};
use crate::counters::Metrics;
use crate::queue::WorkQueue;
use crate::store::ObjectStore;

/// The time limit for the answer of an agent that starts or inspects an instance. A busy disk delays the
/// files that it stores by seconds.
pub(crate) const CALL_LIMIT: Duration = Duration::from_secs(15);
/// The longest answer of an agent that waits for an engine to end, which has 45 s, or deletes a directory.
const STOP_LIMIT: Duration = Duration::from_secs(90);

/// The connection to an agent. Each call over it names the cluster and the leader.
pub(crate) type AgentChannel = InterceptedService<Channel, OfCluster>;

type Client = NodeClient<AgentChannel>;

/// The reason why a call to an agent failed.
#[derive(Debug, Error)]
pub enum AgentCallError {
    /// No such node in the configuration.
    #[error(
        "the address of the agent of node {0} is unknown: start the controller with --node {0}=URL, or set \
         spec.address of its object"
    )]
    NotConfigured(NodeName),
    /// The agent of the node is unreachable.
    #[error("the agent of node {0} is unreachable")]
    OutOfReach(NodeName),
    /// The agent has an earlier release than the request needs.
    #[error(
        "the agent of node {node} is too old to {what} (version {version}): upgrade the agent of node {node}"
    )]
    TooOld {
        /// The node whose agent has to be upgraded.
        node: NodeName,
        /// The verb of the request.
        what: &'static str,
        /// The release of the agent, or "not known".
        version: String,
    },
    /// The agent has refused the request.
    #[error("{message}")]
    Refused {
        /// The code of gRPC.
        code: Code,
        /// The reason in the answer of the agent.
        message: String,
    },
}

impl AgentCallError {
    /// Returns the code for the caller of the controller.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            AgentCallError::NotConfigured(_) => Code::NotFound,
            AgentCallError::OutOfReach(_) => Code::Unavailable,
            AgentCallError::TooOld { .. } => Code::FailedPrecondition,
            AgentCallError::Refused { code, .. } => *code,
        }
    }
}

impl From<Status> for AgentCallError {
    fn from(status: Status) -> AgentCallError {
        let text = status.message();
        let message = if text.is_empty() { status.code().to_string() } else { text.to_owned() };
        AgentCallError::Refused { code: status.code(), message }
    }
}

/// The agents of all nodes with an address, in the configuration or in the node's object.
pub struct Fleet {
    store: Arc<dyn ObjectStore>,
    queue: Arc<WorkQueue>,
    metrics: Metrics,
    configured: BTreeMap<NodeName, ServerUrl>,
    connections: AgentConnections,
    agents: RwLock<Agents>,
}

impl std::fmt::Debug for Fleet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fleet").field("configured", &self.configured).finish_non_exhaustive()
    }
}

impl Fleet {
    /// Creates the fleet of these nodes, and of those whose objects have an address; nothing is connected
    /// yet.
    ///
    /// # Errors
    /// [`AddressError`] for a URL that can never work.
    pub fn new(
        nodes: &BTreeMap<NodeName, ServerUrl>,
        store: Arc<dyn ObjectStore>,
        queue: Arc<WorkQueue>,
        metrics: Metrics,
    ) -> Result<Arc<Fleet>, AddressError> {
        Fleet::with_tls(nodes, store, queue, metrics, None)
    }

    /// The fleet of these nodes. Agents on other hosts have to prove the name of their node.
    ///
    /// # Errors
    /// [`AddressError`] for a URL that can never work.
    pub fn with_tls(
        nodes: &BTreeMap<NodeName, ServerUrl>,
        store: Arc<dyn ObjectStore>,
        queue: Arc<WorkQueue>,
        metrics: Metrics,
        credentials: Option<Credentials>,
    ) -> Result<Arc<Fleet>, AddressError> {
        let fleet = Fleet {
            store,
            queue,
            metrics,
            configured: nodes.clone(),
            connections: AgentConnections::new(credentials),
            agents: RwLock::default(),
        };
        for (node, url) in nodes {
            fleet.add(node, url, false)?;
        }
        // An unknown node counts as lost: the first decisions of a new controller need all of them.
        fleet.know_stored();
        Ok(Arc::new(fleet))
    }

    fn add(&self, node: &NodeName, url: &ServerUrl, from_object: bool) -> Result<(), AddressError> {
        let connection = self.connections.connect(node, url)?;
        let agent = ObservedAgent { from_object, ..ObservedAgent::new(url.to_string(), Timestamp::now()) };
        self.agents_mut().insert(node.clone(), agent);
        self.connections.insert(node.clone(), connection);
        Ok(())
    }

    /// Does not know the agent of `node` any more.
    fn remove(&self, node: &NodeName) {
        self.connections.remove(node);
        self.agents_mut().remove(node);
    }

    /// Returns the observed agents. The guard must not be held across an await.
    pub fn agents(&self) -> RwLockReadGuard<'_, Agents> {
        self.agents.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn agents_mut(&self) -> RwLockWriteGuard<'_, Agents> {
        self.agents.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an agent as it is seen, without a connection.
    #[cfg(test)]
    pub(crate) fn insert_observed(&self, node: &str, agent: ObservedAgent) {
        self.agents_mut().insert(NodeName::new(node).unwrap(), agent);
    }

    /// Returns the keys of the nodes whose agents are known, stored or not.
    pub fn node_keys(&self) -> Vec<Key> {
        self.connections.nodes().iter().map(|node| Key::new(Kind::Node, node.as_str())).collect()
    }

    fn client(&self, node: &NodeName) -> Result<Client, AgentCallError> {
        let channel = self.connections.channel(node);
        let channel = channel.ok_or_else(|| AgentCallError::NotConfigured(node.clone()))?;
        Ok(NodeClient::new(self.with_cluster(channel)))
    }

    fn with_cluster(&self, channel: Channel) -> AgentChannel {
        InterceptedService::new(channel, OfCluster::new(self.store.cluster(), self.store.leader()))
    }

    /// Returns the nodes whose agents are connected.
    pub(crate) fn connected(&self) -> Vec<NodeName> {
        let agents = self.agents();
        let synced = agents.by_node().iter().filter(|(_, agent)| agent.is_synced());
        synced.map(|(node, _)| node.clone()).collect()
    }

    /// Returns the connection to the agent of `node`, if it is connected.
    pub(crate) fn channel(&self, node: &NodeName) -> Option<AgentChannel> {
        if !self.agents().get(node).is_some_and(ObservedAgent::is_synced) {
            return None;
        }
        self.connections.channel(node).map(|channel| self.with_cluster(channel))
    }

    /// Has everything on `node` looked at.
    fn wake_all(&self, node: &NodeName) {
        let cluster = self.store.state();
        let mut keys = concerned(&cluster, &Key::new(Kind::Node, node.as_str()));
        keys.extend(cluster.engines_on(node.as_str()).flat_map(|engine| {
            [Kind::Volume, Kind::Engine].map(|kind| Key::new(kind, &engine.metadata.name))
        }));
        let replicas = cluster.replicas_on(node.as_str());
        keys.extend(replicas.map(|replica| Key::new(Kind::Replica, &replica.metadata.name)));
        drop(cluster);
        self.queue.add(keys);
        // A node without an agent in reach takes no replica.
        self.queue.open_places();
    }

    pub(crate) fn change(&self, node: &NodeName, change: impl FnOnce(&mut ObservedAgent)) {
        if let Some(mut agent) = self.agents_mut().get_mut(node) {
            change(&mut agent);
        }
    }

    /// Asks the agent of `node` for something, and remembers its answer for the next decision.
    ///
    /// # Errors
    /// [`AgentCallError`]; the next decision about the instance sees it too.
    pub async fn call(&self, node: &NodeName, call: &AgentCall) -> Result<(), AgentCallError> {
        if !self.agents().get(node).is_some_and(ObservedAgent::is_synced) {
            return Err(AgentCallError::OutOfReach(node.clone()));
        }
        let started = Instant::now();
        let result = if self.can(node, convert::level_of(call)) {
            self.send(node, call).await.map_err(|error| self.blamed(node, call.verb(), error))
        } else {
            Err(self.too_old(node, call.verb()))
        };
        let code = result.as_ref().err().map_or(Code::Ok, AgentCallError::code);
        self.metrics.called_agent(call.name(), &format!("{code:?}"), started.elapsed());
        self.change(node, |agent| {
            match &result {
                Ok(()) => agent.failures.remove(&call.instance()),
                Err(error) => {
                    let message = format!("cannot {}: {error}", call.verb());
                    agent.failures.insert(call.instance(), CallFailure { call: call.name(), message })
                }
            };
        });
        result
    }

    /// Returns the answer of the agent of `node`. If the agent does not know the request, the error names the
    /// agent to upgrade.
    async fn answer<T>(
        &self,
        node: &NodeName,
        what: &'static str,
        asked: impl Future<Output = Result<tonic::Response<T>, Status>>,
    ) -> Result<T, AgentCallError> {
        let answered = asked.await.map(tonic::Response::into_inner);
        answered.map_err(|status| self.blamed(node, what, status.into()))
    }

    /// Returns the error with its remedy: a call that an agent does not know has one remedy, for any message
    /// of gRPC.
    fn blamed(&self, node: &NodeName, what: &'static str, error: AgentCallError) -> AgentCallError {
        match error {
            AgentCallError::Refused { code: Code::Unimplemented, .. } => self.too_old(node, what),
            error => error,
        }
    }

    /// Returns true if the agent of `node` reports the features of that level.
    fn can(&self, node: &NodeName, level: u32) -> bool {
        let agents = self.agents();
        let info = agents.get(node).and_then(|agent| agent.info.as_ref());
        level == 0 || info.is_some_and(|info| info.feature_level >= level)
    }

    fn too_old(&self, node: &NodeName, what: &'static str) -> AgentCallError {
        let agents = self.agents();
        let info = agents.get(node).and_then(|agent| agent.info.as_ref());
        let version = info.map_or_else(|| "not known".to_owned(), |info| info.version.clone());
        AgentCallError::TooOld { node: node.clone(), what, version }
    }

    async fn send(&self, node: &NodeName, call: &AgentCall) -> Result<(), AgentCallError> {
        let mut client = self.client(node)?;
        match convert::message(call) {
            AgentRequest::StartReplica(request) => {
                client.start_replica(limited(request, CALL_LIMIT)).await.map(drop)
            }
            AgentRequest::StartEngine(request) => {
                client.start_engine(limited(request, CALL_LIMIT)).await.map(drop)
            }
            AgentRequest::Grant(request) => client.grant(limited(request, CALL_LIMIT)).await.map(drop),
            AgentRequest::UpdateReplicas(request) => {
                client.update_replicas(limited(request, CALL_LIMIT)).await.map(drop)
            }
            AgentRequest::SetRebuildLimits(request) => {
                client.set_rebuild_limits(limited(request, CALL_LIMIT)).await.map(drop)
            }
            AgentRequest::FenceReplica(request) => {
                client.fence_replica(limited(request, CALL_LIMIT)).await.map(drop)
            }
            AgentRequest::ExpandEngine(request) => {
                client.expand_engine(limited(request, CALL_LIMIT)).await.map(drop)
            }
            AgentRequest::SalvageReplica(request) => {
                client.salvage_replica(limited(request, STOP_LIMIT)).await.map(drop)
            }
            AgentRequest::StopInstance(request) => {
                client.stop_instance(limited(request, STOP_LIMIT)).await.map(drop)
            }
            AgentRequest::DeleteReplica(request) => {
                client.delete_replica(limited(request, STOP_LIMIT)).await.map(drop)
            }
        }
        .map_err(AgentCallError::from)
    }
}

pub(crate) fn limited<T>(message: T, limit: Duration) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.set_timeout(limit);
    request
}

#[cfg(test)]
mod tests;
