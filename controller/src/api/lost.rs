//! Disks that are used no more, and directories that are left over.

use std::sync::atomic::{AtomicBool, Ordering};

use shorthorn_api::v1;
use shorthorn_controller_core::lost_disk::RemoveDisk;
use shorthorn_controller_core::observed::InstanceKey;
use shorthorn_controller_core::requests::Change;
use shorthorn_controller_core::{AgentCall, NodeName, orphans};
use tonic::Status;

use super::list::{nodes_page, shortened};
use super::server::Api;
use super::status;
use crate::agents::Found;

impl Api {
    /// Removes a disk. If the disk is usable, its agent removes it first, because the agent would report it
    /// again.
    pub(super) async fn take_disk_away(
        &self,
        request: v1::RemoveNodeDiskRequest,
    ) -> Result<v1::NodeObject, Status> {
        let v1::RemoveNodeDiskRequest { node, path, lost, force } = request;
        let wanted = RemoveDisk { node, path, lost, force };
        let checked = wanted.apply(&self.store.state(), &self.fleet.agents());
        checked.map_err(|error| status::of_request(&error))?;
        if lost {
            tracing::warn!(node = wanted.node, disk = wanted.path, force, "a disk is given up");
        } else {
            let node = NodeName::new(&wanted.node).map_err(|error| status::of_request(&error.into()))?;
            self.check_trash(&node, &wanted).await?;
            let was_open = AtomicBool::new(false);
            self.change(|cluster| {
                let closed = wanted.closed(cluster, &self.fleet.agents())?;
                was_open.store(matches!(closed, Change::Store(_)), Ordering::Relaxed);
                Ok(closed)
            })
            .await?;
            if let Err(error) = self.fleet.remove_disk(&node, &wanted.path).await {
                let refused = status::of_call(&error);
                return Err(self.open_again(&wanted, was_open.into_inner(), refused).await);
            }
        }
        self.change(|cluster| wanted.apply(cluster, &self.fleet.agents())).await?;
        self.show_node(&wanted.node)
    }

    /// A disk that its agent has not removed takes replicas again. If the agent has removed it and the
    /// answer was lost, its status says so, and nothing is placed there. Returns the error for the caller.
    async fn open_again(&self, wanted: &RemoveDisk, was_open: bool, refused: Status) -> Status {
        if !was_open {
            return refused;
        }
        match self.change(|cluster| wanted.reopened(cluster)).await {
            Ok(()) => refused,
            Err(error) => {
                let RemoveDisk { node, path, .. } = wanted;
                let message = format!(
                    "{}; the disk stays cordoned ({}): shorthornctl disk uncordon {node} {path}",
                    refused.message(),
                    error.message()
                );
                Status::new(refused.code(), message)
            }
        }
    }

    /// Checks that the trash of a disk is empty, or that the request forces the removal of the disk. After
    /// the removal, the trash cannot be listed. A disk that was given up is not checked, because it cannot be
    /// asked.
    async fn check_trash(&self, node: &NodeName, wanted: &RemoveDisk) -> Result<(), Status> {
        let is_given_up = self
            .store
            .state()
            .nodes
            .get(&wanted.node)
            .is_some_and(|node| node.spec.disks.get(&wanted.path).is_some_and(|disk| disk.lost));
        if is_given_up {
            return Ok(());
        }
        let listed = self.fleet.trash_on(node).await.map_err(|error| status::of_call(&error))?;
        let is_there = |trashed: &&v1::TrashedReplica| trashed.disk_path == wanted.path && !trashed.restored;
        let directories = listed.replicas.iter().filter(is_there).count();
        wanted.leave_trash(directories).map_err(|error| status::of_request(&error))
    }

    /// Returns the orphans, a page of nodes at a time.
    pub(super) async fn orphans(
        &self,
        request: v1::ListOrphansRequest,
    ) -> Result<v1::ListOrphansResponse, Status> {
        let v1::ListOrphansRequest { page_size, page_token } = request;
        let page = nodes_page(self.fleet.known(), page_size, &page_token)?;
        let Found { found, silent, problems } = self.fleet.directories(page.nodes.clone()).await;
        let found = orphans::orphans(&self.store.state(), found);
        let shown = found.into_iter().map(|directory| v1::Orphan {
            node: directory.node.to_string(),
            name: directory.name(),
            disk_path: directory.disk_path,
            disk_uuid: directory.disk_uuid.unwrap_or_default(),
        });
        let mut orphans: Vec<v1::Orphan> = shown.collect();
        let page = shortened(page, page_size, &mut orphans, |orphan| &orphan.node, size_bytes)?;
        Ok(v1::ListOrphansResponse {
            orphans,
            silent_nodes: silent.iter().map(ToString::to_string).collect(),
            problems,
            next_page_token: page.next_token,
        })
    }

    /// Moves an orphan to the trash. A process of it may run, as on a node that was given up while it was
    /// down.
    pub(super) async fn trash_orphan(
        &self,
        request: v1::DeleteOrphanRequest,
    ) -> Result<v1::DeleteOrphanResponse, Status> {
        let v1::DeleteOrphanRequest { node, disk_path, name } = request;
        let on = NodeName::new(&node).map_err(|error| status::of_request(&error.into()))?;
        let Found { found, .. } = self.fleet.directories(vec![on]).await;
        let orphan = orphans::find(&self.store.state(), found, &node, &disk_path, &name)
            .map_err(|error| status::of_request(&error))?;
        tracing::warn!(node, disk_path, name, "an orphan is deleted");
        let instance = InstanceKey::replica(&orphan.volume, orphan.replica_id);
        let stop = AgentCall::StopInstance { instance, attach: None };
        self.fleet.call(&orphan.node, &stop).await.map_err(|error| status::of_call(&error))?;
        // The stop may have taken long: an undeletion may have stored it meanwhile.
        let orphan = orphans::find(&self.store.state(), vec![orphan], &node, &disk_path, &name)
            .map_err(|error| status::of_request(&error))?;
        // An agent that knows a record of it keeps that.
        let delete = AgentCall::DeleteReplica {
            disk_path: orphan.disk_path,
            disk_uuid: orphan.disk_uuid,
            volume: orphan.volume,
            replica_id: orphan.replica_id,
            record: String::new(),
        };
        self.fleet.call(&orphan.node, &delete).await.map_err(|error| status::of_call(&error))?;
        Ok(v1::DeleteOrphanResponse {})
    }
}

/// Returns more than the size of an orphan in an answer.
fn size_bytes(orphan: &v1::Orphan) -> usize {
    let v1::Orphan { node, disk_path, disk_uuid, name } = orphan;
    let texts = [node, disk_path, disk_uuid, name].into_iter();
    texts.map(|text| text.len() + 8).sum::<usize>()
}
