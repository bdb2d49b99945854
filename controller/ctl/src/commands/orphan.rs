//! Commands about directories of replicas that no object knows.

use shorthorn_api::v1;

use super::ControllerSession;
use crate::args::OrphanCommand;
use crate::calls::limited;
use crate::confirm;
use crate::error::CtlError;
use crate::list::ListKind;

impl ControllerSession {
    pub(super) async fn orphan(&mut self, command: OrphanCommand) -> Result<String, CtlError> {
        match command {
            OrphanCommand::List { order } => self.list(ListKind::Orphans, order.into()).await,
            OrphanCommand::Delete { node, disk, name, yes } => {
                if !yes {
                    confirm::orphan_deletion(&name)?;
                }
                let done = format!("{name} is in the trash of disk {disk} of node {node}");
                let request = limited(v1::DeleteOrphanRequest { node, disk_path: disk, name });
                self.client.delete_orphan(request).await.map_err(self.error())?;
                Ok(done)
            }
        }
    }
}
