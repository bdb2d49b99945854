//! Commands about nodes.

use std::time::Duration;

use shorthorn_api::v1;

use super::ControllerSession;
use crate::args::NodeCommand;
use crate::calls::limited;
use crate::error::CtlError;
use crate::list::ListKind;
use crate::placement::of_tags;
use crate::reboot::can_reboot;
use crate::wait::Drained;
use crate::{confirm, output, placement};

impl ControllerSession {
    pub(super) async fn node(&mut self, command: NodeCommand) -> Result<String, CtlError> {
        let allow = |name, allow| v1::SetNodeRequest {
            name,
            allow_scheduling: Some(allow),
            ..v1::SetNodeRequest::default()
        };
        let request = match command {
            NodeCommand::List { options } => return self.list(ListKind::Nodes, options).await,
            NodeCommand::Inspect { name } => {
                let request = limited(v1::InspectNodeRequest { name });
                let found = self.client.inspect_node(request).await.map_err(self.error())?.into_inner();
                return placement::node(self.format, found);
            }
            NodeCommand::Token(args) => return self.certificates().token(args).await,
            NodeCommand::Drain { name, no_wait, timeout } => return self.drain(name, no_wait, timeout).await,
            NodeCommand::CanReboot(args) => {
                return can_reboot(&mut self.client, &self.server, self.format, args).await;
            }
            NodeCommand::Add { name, address } => v1::SetNodeRequest {
                name,
                address: Some(address.0.to_string()),
                ..v1::SetNodeRequest::default()
            },
            NodeCommand::Delete { name, yes, force } => return self.delete_node(name, yes, force).await,
            NodeCommand::Release { name, cluster } => return self.release_node(name, cluster).await,
            NodeCommand::Cordon { name } => allow(name, false),
            NodeCommand::Uncordon { name } => allow(name, true),
            NodeCommand::Set { name, tags, zone } => {
                v1::SetNodeRequest { name, tags: tags.map(of_tags), zone, ..v1::SetNodeRequest::default() }
            }
        };
        let node = self.client.set_node(limited(request)).await.map_err(self.error())?.into_inner();
        output::node(self.format, node)
    }

    async fn release_node(&mut self, name: String, cluster: Option<String>) -> Result<String, CtlError> {
        let is_order = cluster.is_some();
        let request = v1::TakeNodeRequest { name: name.clone(), from_cluster: cluster.unwrap_or_default() };
        let answer = self.client.take_node(limited(request)).await.map_err(self.error())?.into_inner();
        let v1::TakeNodeResponse { was, cluster } = answer;
        Ok(match was.as_str() {
            "" => {
                format!(
                    "node {name} belongs to no cluster yet: the first controller that uses it claims it\n"
                )
            }
            was if was == cluster => format!("node {name} belongs to cluster {cluster}, which is this one\n"),
            was if is_order => {
                format!("node {name} belongs to cluster {cluster}, and was released by {was}\n")
            }
            was => format!(
                "node {name} belongs to cluster {was}, and this is cluster {cluster}. To have it released: \
                 shorthornctl node release {name} --cluster {was}\n"
            ),
        })
    }

    async fn delete_node(&mut self, name: String, yes: bool, force: bool) -> Result<String, CtlError> {
        if !yes {
            confirm::node_deletion(&name, force)?;
        }
        let request = v1::DeleteNodeRequest { name: name.clone(), confirm: name, force };
        let node = self.client.delete_node(limited(request)).await.map_err(self.error())?.into_inner();
        output::node(self.format, node)
    }

    async fn drain(&mut self, name: String, no_wait: bool, limit: Duration) -> Result<String, CtlError> {
        let request = v1::SetNodeRequest {
            name: name.clone(),
            eviction_requested: Some(true),
            ..v1::SetNodeRequest::default()
        };
        self.client.set_node(limited(request)).await.map_err(self.error())?;
        self.drained(&Drained { node: name, disk: None }, no_wait, limit).await
    }
}
