//! Requests of an operator to agents, and the content of their disks. A call of a decision is `Fleet::call`.

use std::time::Duration;

use shorthorn_api::v1;
use shorthorn_controller_core::NodeName;
use shorthorn_controller_core::observed::{ObservedAgent, ObservedDisk};
use shorthorn_controller_core::orphans::FoundDirectory;
use shorthorn_controller_core::undelete::Trashed;
use shorthorn_types::{ReplicaId, VolumeName};
use tonic::{Response, Status};

use super::discover::at_most;
use super::{ASKED_MAX, AgentCallError, CALL_LIMIT, Client, Fleet, STOP_LIMIT, convert, limited};

/// The longest that an agent may take to replace the process of an engine. The agent itself gives the new
/// process a minute, and the last one may end before.
const UPGRADE_LIMIT: Duration = Duration::from_secs(120);

/// Findings on the disks of some nodes.
#[derive(Clone, Debug)]
pub struct Found<T> {
    /// The findings, by node.
    pub found: Vec<T>,
    /// The nodes that do not answer.
    pub silent: Vec<NodeName>,
    /// The disks and nodes whose content is not known, in sentences.
    pub problems: Vec<String>,
}

/// The content of the trash, with the nodes.
pub type FoundTrash = Found<(NodeName, v1::TrashedReplica)>;

impl FoundTrash {
    /// Returns the missing parts, in sentences.
    #[must_use]
    pub fn unknown(&self) -> Vec<String> {
        let silent = self.silent.iter().map(|node| format!("node {node} does not list its trash"));
        silent.chain(self.problems.iter().cloned()).collect()
    }
}

impl<T> Found<T> {
    /// Sorts answers: those with findings, and the reasons why findings are missing.
    fn sorted<A>(
        answers: Vec<(NodeName, Result<A, AgentCallError>)>,
        mut findings: impl FnMut(&NodeName, A, &mut Vec<T>, &mut Vec<String>),
    ) -> Found<T> {
        let mut all = Found { found: Vec::new(), silent: Vec::new(), problems: Vec::new() };
        for (node, answer) in answers {
            match answer {
                Ok(answer) => findings(&node, answer, &mut all.found, &mut all.problems),
                Err(error @ AgentCallError::TooOld { .. }) => all.problems.push(error.to_string()),
                Err(error) => {
                    tracing::warn!(%node, %error, "the content of its disks is unknown");
                    all.silent.push(node);
                }
            }
        }
        all
    }
}

impl Fleet {
    /// Returns the nodes whose agents are known, reachable or not.
    pub fn known(&self) -> Vec<NodeName> {
        self.agents().by_node().keys().cloned().collect()
    }

    /// Returns an error unless the agent of `node` is connected.
    fn in_reach(&self, node: &NodeName) -> Result<(), AgentCallError> {
        let is_synced = self.agents().get(node).is_some_and(ObservedAgent::is_synced);
        is_synced.then_some(()).ok_or_else(|| AgentCallError::OutOfReach(node.clone()))
    }

    /// Asks the connected ones of these agents, a few at a time. Returns an answer or an error for each.
    async fn each<T, F>(
        &self,
        nodes: Vec<NodeName>,
        what: &'static str,
        ask: impl Fn(Client) -> F,
    ) -> Vec<(NodeName, Result<T, AgentCallError>)>
    where
        T: Send + 'static,
        F: Future<Output = Result<Response<T>, Status>> + Send + 'static,
    {
        let question = |node: NodeName| {
            let asked = self.in_reach(&node).and_then(|()| self.client(&node)).map(&ask);
            async move {
                let answer = match asked {
                    Ok(asked) => asked.await.map(Response::into_inner).map_err(AgentCallError::from),
                    Err(error) => Err(error),
                };
                (node, answer)
            }
        };
        let mut answers = at_most(ASKED_MAX, nodes.into_iter().map(question)).await;
        answers.sort_by(|(one, _), (other, _)| one.cmp(other));
        let blamed = |(node, answer): (NodeName, Result<T, AgentCallError>)| {
            let answer = answer.map_err(|error| self.blamed(&node, what, error));
            (node, answer)
        };
        answers.into_iter().map(blamed).collect()
    }

    /// Requests the content of a replica's directory from the agent of `node`.
    ///
    /// # Errors
    /// [`AgentCallError`].
    pub async fn inspect_replica(
        &self,
        node: &NodeName,
        volume: &VolumeName,
        replica: ReplicaId,
        disk_path: &str,
    ) -> Result<v1::ReplicaInspection, AgentCallError> {
        self.in_reach(node)?;
        let request = limited(convert::inspect_request(volume, replica, disk_path), CALL_LIMIT);
        self.answer(node, "inspect a replica", self.client(node)?.inspect_replica(request)).await
    }

    /// Returns the content of the trash on these nodes.
    pub async fn trash(&self, nodes: Vec<NodeName>) -> FoundTrash {
        let ask = |mut client: Client| async move {
            client.list_trash(limited(v1::ListTrashRequest {}, CALL_LIMIT)).await
        };
        let answers = self.each(nodes, "list its trash", ask).await;
        Found::sorted(answers, |node, answer: v1::ListTrashResponse, found, problems| {
            found.extend(answer.replicas.into_iter().map(|trashed| (node.clone(), trashed)));
            problems.extend(answer.problems.into_iter().map(|problem| format!("node {node}: {problem}")));
        })
    }

    /// Returns the content of the trash on the disks of one node.
    ///
    /// # Errors
    /// [`AgentCallError`].
    pub async fn trash_on(&self, node: &NodeName) -> Result<v1::ListTrashResponse, AgentCallError> {
        let request = limited(v1::ListTrashRequest {}, CALL_LIMIT);
        self.answer(node, "list its trash", self.client(node)?.list_trash(request)).await
    }

    /// Has the agent of `node` take a directory out of the trash.
    ///
    /// # Errors
    /// [`AgentCallError`].
    pub async fn restore_replica(&self, trashed: &Trashed) -> Result<(), AgentCallError> {
        let request = limited(convert::restore_request(trashed), CALL_LIMIT);
        let mut client = self.client(&trashed.node)?;
        let restored = client.restore_replica(request);
        self.answer(&trashed.node, "restore a replica", restored).await.map(drop)
    }

    /// Returns the directories of replicas on the disks of these nodes.
    pub async fn directories(&self, nodes: Vec<NodeName>) -> Found<FoundDirectory> {
        let ask = |mut client: Client| async move {
            client.list_disks(limited(v1::ListDisksRequest {}, CALL_LIMIT)).await
        };
        let answers = self.each(nodes, "list its disks", ask).await;
        Found::sorted(answers, |node, answer: v1::ListDisksResponse, found, _| {
            found.extend(convert::directories(node, answer.disks));
        })
    }

    /// Makes the agent of `node` stop using a directory; its content stays.
    ///
    /// # Errors
    /// [`AgentCallError`].
    pub async fn remove_disk(&self, node: &NodeName, path: &str) -> Result<(), AgentCallError> {
        self.in_reach(node)?;
        // Later than a question that is under way, whose answer still has it.
        let _asking = self.connections.ask_for_disks(node).await;
        let request = v1::RemoveDiskRequest { path: path.to_owned() };
        let mut client = self.client(node)?;
        self.answer(node, "remove a disk", client.remove_disk(limited(request, CALL_LIMIT))).await?;
        self.change(node, |agent| drop(agent.disks.remove(path)));
        Ok(())
    }

    /// Makes the agent of its node delete a directory in the trash for good; of a restored one, only its
    /// record.
    ///
    /// # Errors
    /// [`AgentCallError`].
    pub async fn remove_trash(&self, trashed: &Trashed) -> Result<(), AgentCallError> {
        let request = limited(convert::remove_trash_request(trashed), STOP_LIMIT);
        let mut client = self.client(&trashed.node)?;
        let removed = client.remove_trash(request);
        self.answer(&trashed.node, "delete trash", removed).await.map(drop)
    }

    /// Has the agent of `node` replace the process of an engine.
    ///
    /// # Errors
    /// [`AgentCallError`].
    pub async fn upgrade_engine(
        &self,
        node: &NodeName,
        request: v1::UpgradeEngineRequest,
    ) -> Result<v1::UpgradeEngineResponse, AgentCallError> {
        let mut client = self.client(node)?;
        let upgraded = client.upgrade_engine(limited(request, UPGRADE_LIMIT));
        self.answer(node, "upgrade an engine", upgraded).await
    }

    /// Has the agent of `node` start or stop a scrub.
    ///
    /// # Errors
    /// [`AgentCallError`].
    pub async fn scrub(&self, node: &NodeName, request: v1::ScrubRequest) -> Result<(), AgentCallError> {
        let request = limited(request, CALL_LIMIT);
        self.answer(node, "scrub a volume", self.client(node)?.scrub(request)).await.map(drop)
    }

    /// Returns the cluster of the node according to its agent; empty: none yet. And that of this controller.
    ///
    /// # Errors
    /// [`AgentCallError`].
    pub async fn cluster_of(&self, node: &NodeName) -> Result<(String, String), AgentCallError> {
        let request = limited(v1::GetNodeRequest {}, CALL_LIMIT);
        let info = self.answer(node, "describe its node", self.client(node)?.get_node(request)).await?;
        Ok((info.cluster, self.store.cluster().to_owned()))
    }

    /// Has the agent of `node` belong to the cluster of this controller instead of `from`.
    ///
    /// # Errors
    /// [`AgentCallError`].
    pub async fn take_node(&self, node: &NodeName, from: &str) -> Result<(), AgentCallError> {
        let request = limited(v1::ReleaseNodeRequest { cluster: from.to_owned() }, CALL_LIMIT);
        // The features are not known yet: the report of another cluster's node is not taken over.
        self.answer(node, "hand its node over", self.client(node)?.release_node(request)).await.map(drop)
    }

    /// Has the agent of `node` prepare a disk.
    ///
    /// # Errors
    /// [`AgentCallError`].
    pub async fn add_disk(&self, node: &NodeName, path: &str) -> Result<ObservedDisk, AgentCallError> {
        let _asking = self.connections.ask_for_disks(node).await;
        let request = limited(v1::AddDiskRequest { path: path.to_owned() }, CALL_LIMIT);
        let disk = self.answer(node, "add a disk", self.client(node)?.add_disk(request)).await?;
        let (path, disk) = convert::disk(disk);
        self.change(node, |agent| drop(agent.disks.insert(path, disk.clone())));
        Ok(disk)
    }
}
