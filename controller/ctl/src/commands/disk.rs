//! Commands about disks of nodes.

use std::time::Duration;

use shorthorn_api::v1;

use super::ControllerSession;
use crate::args::DiskCommand;
use crate::calls::limited;
use crate::error::CtlError;
use crate::list::ListKind;
use crate::placement::of_tags;
use crate::wait::Drained;
use crate::{confirm, discover, output};

impl ControllerSession {
    pub(super) async fn disk(&mut self, command: DiskCommand) -> Result<String, CtlError> {
        let request = match command {
            DiskCommand::Add { node, path } => return self.add_disk(node, path).await,
            DiskCommand::Discover(args) => {
                return discover::run(&mut self.client, &self.server, self.format, args).await;
            }
            DiskCommand::Drain { node, path, no_wait, timeout } => {
                return self.drain_disk(node, path, no_wait, timeout).await;
            }
            DiskCommand::List { options } => {
                // Programs have got disks with their nodes from the beginning.
                let what = if self.format.is_for_people() { ListKind::Disks } else { ListKind::Nodes };
                return self.list(what, options).await;
            }
            DiskCommand::Remove { node, path, lost, force, yes } => {
                if lost && !yes {
                    confirm::disk_loss(&node, &path, force)?;
                }
                let request = limited(v1::RemoveNodeDiskRequest { node, path, lost, force });
                let node = self.client.remove_disk(request).await.map_err(self.error())?.into_inner();
                return output::node(self.format, node);
            }
            DiskCommand::Cordon { node, path } => v1::SetDiskRequest {
                node,
                path,
                allow_scheduling: Some(false),
                ..v1::SetDiskRequest::default()
            },
            DiskCommand::Uncordon { node, path } => v1::SetDiskRequest {
                node,
                path,
                allow_scheduling: Some(true),
                ..v1::SetDiskRequest::default()
            },
            DiskCommand::Set { node, path, tags, reserved, scheduling } => v1::SetDiskRequest {
                node,
                path,
                allow_scheduling: scheduling,
                tags: tags.map(of_tags),
                reserved_bytes: reserved,
                eviction_requested: None,
            },
        };
        let node = self.client.set_disk(limited(request)).await.map_err(self.error())?.into_inner();
        output::node(self.format, node)
    }

    async fn drain_disk(
        &mut self,
        node: String,
        path: String,
        no_wait: bool,
        limit: Duration,
    ) -> Result<String, CtlError> {
        let request = v1::SetDiskRequest {
            node: node.clone(),
            path: path.clone(),
            eviction_requested: Some(true),
            ..v1::SetDiskRequest::default()
        };
        self.client.set_disk(limited(request)).await.map_err(self.error())?;
        self.drained(&Drained { node, disk: Some(path) }, no_wait, limit).await
    }

    async fn add_disk(&mut self, node: String, path: String) -> Result<String, CtlError> {
        let request = limited(v1::AddNodeDiskRequest { node, path });
        let node = self.client.add_disk(request).await.map_err(self.error())?.into_inner();
        output::node(self.format, node)
    }
}
