//! Carries out the commands of the command line: a connection to the controller, and a file for each noun.

mod cluster;
mod disk;
mod node;
mod orphan;
mod volume;

use std::time::Duration;

use shorthorn_api::v1::controller_client::ControllerClient;
use tonic::transport::Channel;

use super::args::{Cli, CtlCommand, ReplicaCommand};
use super::calls::limited;
use super::error::CtlError;
use super::format::Format;
use super::list::{ListKind, ListOptions, Lister, watch};
use super::reach::{ClusterAccess, ReachedController, reach};
use super::tls::Certificates;
use super::wait::{Drained, drain_rest, drained};
use super::{bundle, manual, output, placement, upgrade};

/// Runs the command of the command line.
///
/// # Errors
/// [`CtlError`], which has the remedy and the exit code.
pub async fn run(cli: Cli) -> Result<(), CtlError> {
    match &cli.command {
        // These need no connection.
        CtlCommand::Completion { shell } => return output::print(&manual::completion(*shell)),
        CtlCommand::Man { directory } => return manual::pages(directory),
        _ => {}
    }
    let ReachedController { channel, name, cluster } = reach(&cli.reach).await?;
    let client = ControllerClient::new(channel.clone());
    let session =
        ControllerSession { client, channel, server: name, format: cli.output, cluster: cluster.clone() };
    let done = session.run(cli.command).await;
    done.map_err(|error| match (error, cluster.and_then(|cluster| cluster.problem())) {
        // Messages of Kubernetes say more than that the connection broke.
        (CtlError::Unreachable { server, .. }, Some(reason)) => CtlError::Unreachable { server, reason },
        (error, _) => error,
    })
}

struct ControllerSession {
    /// The cluster through which the controller is reached, if any.
    cluster: Option<ClusterAccess>,
    client: ControllerClient<Channel>,
    channel: Channel,
    server: String,
    format: Format,
}

impl ControllerSession {
    async fn run(self, command: CtlCommand) -> Result<(), CtlError> {
        let mut session = self;
        let text = match command {
            CtlCommand::Status => return session.status().await,
            CtlCommand::SupportBundle(args) => {
                bundle::write(args, &session.client, session.cluster.as_ref()).await?
            }
            CtlCommand::Completion { .. } | CtlCommand::Man { .. } => String::new(),
            CtlCommand::Doctor => return session.doctor().await,
            CtlCommand::Volume(command) => session.volume(command).await?,
            CtlCommand::Replica(ReplicaCommand::List { volume, node, options }) => {
                let (volume, node) = (volume.unwrap_or_default(), node.unwrap_or_default());
                session.list(ListKind::Replicas { volume, node }, options).await?
            }
            CtlCommand::Replica(ReplicaCommand::Evict { name, no_wait, timeout }) => {
                placement::evict(&mut session.client, &session.server, name, (!no_wait).then_some(timeout))
                    .await?
            }
            CtlCommand::Node(command) => session.node(command).await?,
            CtlCommand::Disk(command) => session.disk(command).await?,
            CtlCommand::Orphan(command) => session.orphan(command).await?,
            CtlCommand::Rebalance(args) => session.rebalance(args).await?,
            CtlCommand::Tls(command) => session.certificates().run(command).await?,
            CtlCommand::Upgrade(command) => {
                upgrade::run(&session.client, &session.server, session.format, command).await?
            }
        };
        output::print(&text)
    }

    fn error(&self) -> impl Fn(tonic::Status) -> CtlError + use<> {
        let server = self.server.clone();
        move |status| CtlError::of(&status, &server)
    }

    fn certificates(&self) -> Certificates {
        Certificates::new(self.channel.clone(), self.server.clone(), self.format)
    }

    /// Returns a list as text. A watched list is written while it changes.
    async fn list(&mut self, what: ListKind, options: ListOptions) -> Result<String, CtlError> {
        let is_watched = options.order.watch;
        let lister = Lister { client: self.client.clone(), what, options };
        if is_watched {
            watch(lister, &self.server, self.format).await?;
            return Ok(String::new());
        }
        let list = lister.list().await?.map_err(self.error())?;
        list.warnings.iter().try_for_each(|warning| output::complain(warning))?;
        list.text(self.format)
    }

    async fn drained(&mut self, place: &Drained, no_wait: bool, limit: Duration) -> Result<String, CtlError> {
        let drain = if no_wait {
            self.client.get_drain(limited(place.request())).await.map_err(self.error())?.into_inner()
        } else {
            drained(&mut self.client, &self.server, place, limit).await?
        };
        drain_rest(self.format, place, drain)
    }
}
