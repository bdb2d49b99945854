use std::time::Duration;

use shorthorn_proto::v1;
use shorthorn_proto::v1::controller_client::ControllerClient;
use tonic::transport::Channel;

use super::args::{
    Cli, Command, CreateArgs, DiskCommand, Format, NodeCommand, ReplicaCommand, VolumeCommand, WaitArgs,
};
use super::error::CtlError;
use super::wait::{Goal, wait};
use super::{confirm, output};

/// The longest that a call may take: the controller answers at once, but an agent that prepares a disk
/// stands behind some calls.
const CALL_LIMIT: Duration = Duration::from_secs(30);

/// Does what the command line says.
///
/// # Errors
/// [`CtlError`], which says what to do and knows the exit code.
pub async fn run(cli: Cli) -> Result<(), CtlError> {
    let server = cli.server.to_string();
    let unreachable = |reason: String| CtlError::Unreachable { server: cli.server.to_string(), reason };
    let endpoint = cli.server.endpoint().map_err(|error| unreachable(error.to_string()))?;
    let channel = endpoint.connect_timeout(Duration::from_secs(5)).connect_lazy();
    let mut session = Session { client: ControllerClient::new(channel), server, format: cli.output };
    let text = match cli.command {
        Command::Volume(command) => session.volume(command).await?,
        Command::Replica(ReplicaCommand::List { volume }) => session.replicas(volume).await?,
        Command::Node(NodeCommand::List) => session.nodes().await?,
        Command::Disk(DiskCommand::Add { node, path }) => session.add_disk(node, path).await?,
    };
    output::print(&text)
}

struct Session {
    client: ControllerClient<Channel>,
    server: String,
    format: Format,
}

impl Session {
    fn error(&self) -> impl Fn(tonic::Status) -> CtlError + use<> {
        let server = self.server.clone();
        move |status| CtlError::of(&status, &server)
    }

    async fn volume(&mut self, command: VolumeCommand) -> Result<String, CtlError> {
        match command {
            VolumeCommand::Create(args) => self.create(args).await,
            VolumeCommand::List => {
                let request = limited(v1::ListVolumesRequest {});
                let list = self.client.list_volumes(request).await.map_err(self.error())?;
                output::volumes(self.format, list.into_inner().volumes)
            }
            VolumeCommand::Inspect { name } => {
                let request = limited(v1::GetVolumeRequest { name });
                let volume = self.client.get_volume(request).await.map_err(self.error())?;
                output::volume(self.format, volume.into_inner())
            }
            VolumeCommand::Attach { name, node, wait } => self.attach(name, node, wait).await,
            VolumeCommand::Detach { name, wait } => {
                let request = limited(v1::DetachVolumeRequest { name: name.clone() });
                let volume = self.client.detach_volume(request).await.map_err(self.error())?.into_inner();
                let volume = self.settle(volume, &Goal::Detached, wait).await?;
                self.show(volume, |volume| format!("volume {} is {}", volume.name, volume.state))
            }
            VolumeCommand::Delete { name, yes, wait } => self.delete(name, yes, wait).await,
        }
    }

    async fn create(&mut self, args: CreateArgs) -> Result<String, CtlError> {
        let request = limited(v1::CreateVolumeRequest {
            name: args.name,
            size_bytes: args.size.0,
            number_of_replicas: args.replicas,
            frontend: args.frontend,
            replica_soft_anti_affinity: args.soft_anti_affinity,
        });
        let volume = self.client.create_volume(request).await.map_err(self.error())?.into_inner();
        let volume = self.settle(volume, &Goal::Created, args.wait).await?;
        self.show(volume, |volume| {
            format!(
                "volume {} is {}; attach it: shorthornctl volume attach {} --node NODE",
                volume.name, volume.state, volume.name
            )
        })
    }

    async fn attach(&mut self, name: String, node: String, wait: WaitArgs) -> Result<String, CtlError> {
        let request = limited(v1::AttachVolumeRequest { name, node: node.clone() });
        let volume = self.client.attach_volume(request).await.map_err(self.error())?.into_inner();
        let volume = self.settle(volume, &Goal::Attached(node), wait).await?;
        self.show(volume, |volume| {
            let at =
                if volume.endpoint.is_empty() { String::new() } else { format!(": {}", volume.endpoint) };
            format!("volume {} is {} on {}{at}", volume.name, volume.state, volume.node)
        })
    }

    async fn delete(&mut self, name: String, yes: bool, wait: WaitArgs) -> Result<String, CtlError> {
        if !yes {
            // Nobody should be asked about a volume that is not there.
            let request = limited(v1::GetVolumeRequest { name: name.clone() });
            self.client.get_volume(request).await.map_err(self.error())?;
            confirm::deletion(&name)?;
        }
        let request = limited(v1::DeleteVolumeRequest { name });
        let volume = self.client.delete_volume(request).await.map_err(self.error())?.into_inner();
        let name = volume.name.clone();
        let end = if wait.no_wait { "is being deleted" } else { "is deleted" };
        let volume = self.settle(volume, &Goal::Deleted, wait).await?;
        self.show(volume, |_| format!("volume {name} {end}"))
    }

    /// Waits for the goal unless that is not wanted; the volume as it is then.
    async fn settle(
        &mut self,
        volume: v1::Volume,
        goal: &Goal,
        args: WaitArgs,
    ) -> Result<v1::Volume, CtlError> {
        if args.no_wait {
            return Ok(volume);
        }
        let end = wait(&mut self.client, &self.server, &volume.name, goal, args.timeout).await?;
        Ok(end.unwrap_or(volume))
    }

    /// A sentence for people, the volume for programs.
    fn show(
        &self,
        volume: v1::Volume,
        sentence: impl FnOnce(&v1::Volume) -> String,
    ) -> Result<String, CtlError> {
        match self.format {
            Format::Table => Ok(sentence(&volume)),
            format => output::volume(format, volume),
        }
    }

    async fn replicas(&mut self, volume: Option<String>) -> Result<String, CtlError> {
        let request = limited(v1::ListReplicasRequest { volume: volume.unwrap_or_default() });
        let list = self.client.list_replicas(request).await.map_err(self.error())?;
        output::replicas(self.format, list.into_inner().replicas)
    }

    async fn nodes(&mut self) -> Result<String, CtlError> {
        let request = limited(v1::ListNodesRequest {});
        let list = self.client.list_nodes(request).await.map_err(self.error())?;
        output::nodes(self.format, list.into_inner().nodes)
    }

    async fn add_disk(&mut self, node: String, path: String) -> Result<String, CtlError> {
        let request = limited(v1::AddNodeDiskRequest { node, path });
        let node = self.client.add_disk(request).await.map_err(self.error())?.into_inner();
        output::node(self.format, node)
    }
}

fn limited<T>(message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.set_timeout(CALL_LIMIT);
    request
}
