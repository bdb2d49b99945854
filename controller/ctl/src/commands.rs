use std::time::Duration;

use shorthorn_api::v1;
use shorthorn_api::v1::controller_client::ControllerClient;
use shorthorn_types::status::Frontend;
use tonic::transport::Channel;

use super::args::{
    Cli, CreateArgs, CtlCommand, DiskCommand, NodeCommand, OrphanCommand, RebalanceArgs, ReplicaCommand,
    SalvageArgs, VolumeCommand, WaitArgs,
};
use super::calls::limited;
use super::doctor::CheckOutput;
use super::error::CtlError;
use super::format::Format;
use super::list::{ListKind, Lister, Options, watch};
use super::placement::of_tags;
use super::reach::{Cluster, Reached, reach};
use super::rebalance::{describe, rebalance};
use super::reboot::can_reboot;
use super::tls::Certificates;
use super::wait::{Drained, Goal, drain_rest, drained, wait};
use super::{bundle, cluster_checks, confirm, discover, doctor, manual, output, placement, status, upgrade};

/// An upgrade waits until the new process serves. The controller gives the agent two minutes for it.
const UPGRADE_LIMIT: Duration = Duration::from_secs(150);

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
    let Reached { channel, name, cluster } = reach(&cli.reach).await?;
    let client = ControllerClient::new(channel.clone());
    let session = Session { client, channel, server: name, format: cli.output, cluster: cluster.clone() };
    let done = session.run(cli.command).await;
    done.map_err(|error| match (error, cluster.and_then(|cluster| cluster.problem())) {
        // Messages of Kubernetes say more than that the connection broke.
        (CtlError::Unreachable { server, .. }, Some(reason)) => CtlError::Unreachable { server, reason },
        (error, _) => error,
    })
}

impl Session {
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
}

struct Session {
    /// The cluster through which the controller is reached, if any.
    cluster: Option<Cluster>,
    client: ControllerClient<Channel>,
    channel: Channel,
    server: String,
    format: Format,
}

impl Session {
    fn error(&self) -> impl Fn(tonic::Status) -> CtlError + use<> {
        let server = self.server.clone();
        move |status| CtlError::of(&status, &server)
    }

    fn certificates(&self) -> Certificates {
        Certificates::new(self.channel.clone(), self.server.clone(), self.format)
    }

    async fn status(&mut self) -> Result<(), CtlError> {
        let request = limited(v1::GetOverviewRequest {});
        let overview = self.client.get_overview(request).await.map_err(self.error())?.into_inner();
        let is_well = status::is_well(&overview);
        output::print(&status::text(self.format, overview)?)?;
        if is_well { Ok(()) } else { Err(CtlError::Unwell("something is wrong".to_owned())) }
    }

    async fn doctor(&mut self) -> Result<(), CtlError> {
        let mut checks = match &self.cluster {
            Some(cluster) => cluster_checks::examine(cluster).await,
            None => Vec::new(),
        };
        match self.ask_doctor().await {
            Ok(found) => checks.extend(found),
            // Messages of Kubernetes may have the reason.
            Err(error) if !checks.is_empty() => {
                let reason = self.cluster.as_ref().and_then(Cluster::problem);
                checks.push(doctor::unreachable(reason.unwrap_or_else(|| error.to_string())));
            }
            Err(error) => return Err(error),
        }
        output::print(&doctor::text(self.format, &checks)?)?;
        match doctor::failures(&checks) {
            0 => Ok(()),
            failures => Err(CtlError::Unwell(format!("checks that have failed: {failures}"))),
        }
    }

    async fn ask_doctor(&mut self) -> Result<Vec<CheckOutput>, CtlError> {
        let overview = self.client.get_overview(limited(v1::GetOverviewRequest {})).await;
        let overview = overview.map_err(self.error())?.into_inner();
        let found = self.client.examine(limited(v1::ExamineRequest {})).await.map_err(self.error())?;
        let found = found.into_inner().checks.into_iter().map(CheckOutput::from);
        Ok(std::iter::once(doctor::version_check(&overview.version)).chain(found).collect())
    }

    async fn volume(&mut self, command: VolumeCommand) -> Result<String, CtlError> {
        match command {
            VolumeCommand::Create(args) => self.create(args).await,
            VolumeCommand::List { namespace, options } => {
                let workloads = self.format != Format::Table && self.format != Format::Name;
                let namespace = namespace.unwrap_or_default();
                self.list(ListKind::Volumes { namespace, workloads }, options).await
            }
            VolumeCommand::Inspect { name } => self.inspect(name).await,
            VolumeCommand::Why { name } => {
                let request = limited(v1::GetVolumeRequest { name });
                let why = self.client.explain_volume(request).await.map_err(self.error())?;
                output::explanation(self.format, why.into_inner())
            }
            VolumeCommand::Replicas { name, count } => {
                let request = v1::SetNumberOfReplicasRequest { name, number_of_replicas: count };
                let volume =
                    self.client.set_number_of_replicas(limited(request)).await.map_err(self.error())?;
                self.show(volume.into_inner(), |volume| {
                    format!("volume {} should have {} replicas", volume.name, volume.number_of_replicas)
                })
            }
            VolumeCommand::Set(args) => {
                let request = placement::change(args);
                let volume = self.client.set_volume(limited(request)).await.map_err(self.error())?;
                self.show(volume.into_inner(), placement::sentence)
            }
            VolumeCommand::Expand { name, size, wait, timeout } => {
                self.expand(name, size, WaitArgs { no_wait: !wait, timeout }).await
            }
            VolumeCommand::RebuildLimit { name, bytes_per_s, share } => {
                let limits = v1::RebuildLimits { bytes_per_s, share_percent: share };
                self.limit_rebuilds(name, limits).await
            }
            VolumeCommand::Scrub { name, repair, rate, stop } => {
                self.scrub(v1::ScrubRequest { volume: name, stop, repair, bytes_per_s: rate }).await
            }
            VolumeCommand::UpgradeEngine { name } => self.upgrade(name).await,
            VolumeCommand::Salvage(args) => self.salvage(args).await,
            VolumeCommand::Attach { name, node, wait } => self.attach(name, node, wait).await,
            VolumeCommand::Detach { name, force, wait } => {
                let request = limited(v1::DetachVolumeRequest { name: name.clone(), force });
                let volume = self.client.detach_volume(request).await.map_err(self.error())?.into_inner();
                let volume = self.wait_for(volume, &Goal::Detached, wait).await?;
                self.show(volume, |volume| format!("volume {} is {}", volume.name, volume.shown_state()))
            }
            VolumeCommand::Delete { name, yes, wait } => self.delete(name, yes, wait).await,
            VolumeCommand::Trash { name: Some(name), remove: true, replica, yes, order: _ } => {
                self.remove_trash(name, replica.unwrap_or_default(), yes).await
            }
            VolumeCommand::Trash { name, order, .. } => {
                self.list(ListKind::Trash { volume: name.unwrap_or_default() }, order.into()).await
            }
            VolumeCommand::Undelete { name } => self.undelete(name).await,
        }
    }

    async fn limit_rebuilds(&mut self, name: String, limits: v1::RebuildLimits) -> Result<String, CtlError> {
        let request = v1::SetVolumeRebuildLimitsRequest { name, limits: Some(limits) };
        let volume = self.client.set_volume_rebuild_limits(limited(request)).await.map_err(self.error())?;
        self.show(volume.into_inner(), |volume| {
            let limits = volume.rebuild.unwrap_or_default();
            format!("copying for volume {} takes {}", volume.name, output::limits(limits))
        })
    }

    async fn scrub(&mut self, request: v1::ScrubRequest) -> Result<String, CtlError> {
        let stops = request.stop;
        let volume = self.client.scrub_volume(limited(request)).await.map_err(self.error())?;
        self.show(volume.into_inner(), |volume| {
            let what = if stops { "is no longer compared" } else { "are being compared" };
            format!("the replicas of volume {} {what}", volume.name)
        })
    }

    async fn create(&mut self, args: CreateArgs) -> Result<String, CtlError> {
        let frontend: Result<Frontend, _> = args.frontend.parse();
        let frontend = frontend.map_err(|error| CtlError::Refused(error.to_string()))?;
        let request = v1::CreateVolumeRequest {
            name: args.name,
            size_bytes: args.size,
            number_of_replicas: args.replicas,
            replica_soft_anti_affinity: args.soft_anti_affinity,
            replica_zone_soft_anti_affinity: Some(!args.hard_zone_anti_affinity),
            replica_disk_soft_anti_affinity: Some(!args.hard_disk_anti_affinity),
            node_selector: args.node_selector,
            disk_selector: args.disk_selector,
            data_locality: args.data_locality,
            verify_reads: args.verify_reads,
            encrypt_in_transit: args.encrypt_in_transit,
            ..v1::CreateVolumeRequest::default()
        };
        let request = limited(request.with_frontend(frontend));
        let volume = self.client.create_volume(request).await.map_err(self.error())?.into_inner();
        if args.encrypt_in_transit && !volume.encrypt_in_transit {
            let name = volume.name;
            return Err(CtlError::Refused(format!(
                "the controller is too old for encryption: volume {name} is there without. Delete it, and \
                 upgrade the controller"
            )));
        }
        let volume = self.wait_for(volume, &Goal::Created, args.wait).await?;
        self.show(volume, |volume| {
            format!(
                "volume {} is {}; attach it: shorthornctl volume attach {} --node NODE",
                volume.name,
                volume.shown_state(),
                volume.name
            )
        })
    }

    async fn attach(&mut self, name: String, node: String, wait: WaitArgs) -> Result<String, CtlError> {
        let request = limited(v1::AttachVolumeRequest { name, node: node.clone() });
        let volume = self.client.attach_volume(request).await.map_err(self.error())?.into_inner();
        let volume = self.wait_for(volume, &Goal::Attached(node), wait).await?;
        self.show(volume, |volume| {
            let at =
                if volume.endpoint.is_empty() { String::new() } else { format!(": {}", volume.endpoint) };
            format!("volume {} is {} on {}{at}", volume.name, volume.shown_state(), volume.node)
        })
    }

    async fn expand(&mut self, name: String, size_bytes: u64, wait: WaitArgs) -> Result<String, CtlError> {
        let request = limited(v1::ExpandVolumeRequest { name, size_bytes });
        let volume = self.client.expand_volume(request).await.map_err(self.error())?.into_inner();
        let volume = self.wait_for(volume, &Goal::Expanded(size_bytes), wait).await?;
        self.show(volume, |volume| format!("volume {} has {}", volume.name, output::size(volume)))
    }

    async fn upgrade(&mut self, name: String) -> Result<String, CtlError> {
        let mut request =
            tonic::Request::new(v1::UpgradeVolumeEngineRequest { name: name.clone(), only_outdated: false });
        request.set_timeout(UPGRADE_LIMIT);
        let upgraded = self.client.upgrade_volume_engine(request).await.map_err(self.error())?.into_inner();
        output::upgrade(self.format, &name, &upgraded)
    }

    /// Shows the choices; with a choice, confirms it and has it carried out.
    async fn salvage(&mut self, args: SalvageArgs) -> Result<String, CtlError> {
        let name = args.name;
        let request = limited(v1::GetVolumeRequest { name: name.clone() });
        let found = self.client.inspect_replicas(request).await.map_err(self.error())?.into_inner().replicas;
        let Some(replica) = args.replica else {
            return output::inspections(self.format, &name, found);
        };
        if !args.yes_i_may_lose_data {
            output::complain(&output::inspections(Format::Table, &name, found)?)?;
            confirm::salvage(&name, &replica)?;
        }
        let request = limited(v1::SalvageVolumeRequest {
            name: name.clone(),
            replica_id: replica,
            confirm: name,
            by: confirm::operator(),
            reason: args.reason,
        });
        let volume = self.client.salvage_volume(request).await.map_err(self.error())?.into_inner();
        self.show(volume, |volume| {
            let salvage = volume.salvage.clone().unwrap_or_default();
            format!(
                "volume {} continues from replica {} alone ({}); shorthornctl volume why {} shows the \
                 progress",
                volume.name, salvage.replica_id, salvage.losses, volume.name
            )
        })
    }

    async fn delete(&mut self, name: String, yes: bool, wait: WaitArgs) -> Result<String, CtlError> {
        if !yes {
            // No question is asked about a volume that does not exist.
            let request = limited(v1::GetVolumeRequest { name: name.clone() });
            self.client.get_volume(request).await.map_err(self.error())?;
            confirm::deletion(&name)?;
        }
        let request = limited(v1::DeleteVolumeRequest { name });
        let volume = self.client.delete_volume(request).await.map_err(self.error())?.into_inner();
        let name = volume.name.clone();
        let end = if wait.no_wait { "is being deleted" } else { "is deleted" };
        let volume = self.wait_for(volume, &Goal::Deleted, wait).await?;
        self.show(volume, |_| format!("volume {name} {end}"))
    }

    async fn undelete(&mut self, name: String) -> Result<String, CtlError> {
        let request = limited(v1::UndeleteVolumeRequest { name });
        let undeleted = self.client.undelete_volume(request).await.map_err(self.error())?.into_inner();
        let (volume, problems) = (undeleted.volume.unwrap_or_default(), undeleted.problems);
        if !problems.is_empty() {
            let (name, missing) = (&volume.name, problems.join("; "));
            return Err(CtlError::Incomplete(format!(
                "volume {name} is restored, perhaps incompletely: {missing}. After the repair, restore the \
                 rest with another shorthornctl volume undelete {name}"
            )));
        }
        self.show(volume, |volume| {
            let name = &volume.name;
            format!("volume {name} is back; attach it: shorthornctl volume attach {name} --node NODE")
        })
    }

    async fn remove_trash(
        &mut self,
        name: String,
        replica_id: String,
        yes: bool,
    ) -> Result<String, CtlError> {
        if !yes {
            confirm::trash_removal(&name)?;
        }
        let request = limited(v1::RemoveVolumeTrashRequest { name: name.clone(), replica_id });
        let v1::RemoveVolumeTrashResponse { removed, problems } =
            self.client.remove_trash(request).await.map_err(self.error())?.into_inner();
        let done = format!("{removed} directories of volume {name} are deleted for good");
        if problems.is_empty() {
            return Ok(done);
        }
        Err(CtlError::Incomplete(format!("{done}, and perhaps not all: {}", problems.join("; "))))
    }

    /// Waits for the goal unless that is not wanted; returns the volume after that.
    async fn wait_for(
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

    /// Formats a sentence for people, or the volume for programs.
    fn show(
        &self,
        volume: v1::Volume,
        sentence: impl FnOnce(&v1::Volume) -> String,
    ) -> Result<String, CtlError> {
        match self.format {
            Format::Table | Format::Wide => Ok(sentence(&volume)),
            format => output::volume(format, volume),
        }
    }

    /// Returns a list as text. A watched list is written while it changes.
    async fn list(&mut self, what: ListKind, options: Options) -> Result<String, CtlError> {
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

    async fn inspect(&mut self, name: String) -> Result<String, CtlError> {
        let request = limited(v1::GetVolumeRequest { name: name.clone() });
        let mut volume = self.client.get_volume(request).await.map_err(self.error())?.into_inner();
        if !volume.claim.is_empty() {
            let request =
                v1::ListVolumesRequest { name, page_size: 1, workloads: true, ..Default::default() };
            let list = self.client.list_volumes(limited(request)).await.map_err(self.error())?.into_inner();
            if !list.workloads_problem.is_empty() {
                output::complain(&format!("the workloads are not known: {}", list.workloads_problem))?;
            }
            let found = list.volumes.into_iter().next();
            volume.workloads = found.map(|found| found.workloads).unwrap_or_default();
        }
        output::volume(self.format, volume)
    }

    async fn node(&mut self, command: NodeCommand) -> Result<String, CtlError> {
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
                format!("node {name} belongs to no cluster yet; the first controller that uses it has it\n")
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

    async fn drained(&mut self, place: &Drained, no_wait: bool, limit: Duration) -> Result<String, CtlError> {
        let drain = if no_wait {
            self.client.get_drain(limited(place.request())).await.map_err(self.error())?.into_inner()
        } else {
            drained(&mut self.client, &self.server, place, limit).await?
        };
        drain_rest(self.format, place, drain)
    }

    async fn disk(&mut self, command: DiskCommand) -> Result<String, CtlError> {
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

    async fn orphan(&mut self, command: OrphanCommand) -> Result<String, CtlError> {
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

    async fn rebalance(&mut self, args: RebalanceArgs) -> Result<String, CtlError> {
        let is_shown = args.dry_run || args.no_wait || args.cancel;
        let (answer, begun) = rebalance(&mut self.client, &self.server, args).await?;
        if !self.format.is_for_people() {
            return output::rebalance(self.format, answer, begun);
        }
        Ok(match (is_shown, begun) {
            (true, _) => describe(&answer),
            (false, 0) => "every replica has the best placement".to_owned(),
            (false, 1) => "moved 1 replica; every replica has the best placement".to_owned(),
            (false, begun) => format!("moved {begun} replicas; every replica has the best placement"),
        })
    }

    async fn add_disk(&mut self, node: String, path: String) -> Result<String, CtlError> {
        let request = limited(v1::AddNodeDiskRequest { node, path });
        let node = self.client.add_disk(request).await.map_err(self.error())?.into_inner();
        output::node(self.format, node)
    }
}
