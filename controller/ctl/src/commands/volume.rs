//! Commands about volumes, with their trash.

use std::time::Duration;

use shorthorn_api::v1;
use shorthorn_types::status::Frontend;

use super::ControllerSession;
use crate::args::{CreateArgs, SalvageArgs, VolumeCommand, WaitArgs};
use crate::calls::limited;
use crate::error::CtlError;
use crate::format::Format;
use crate::list::ListKind;
use crate::wait::{Goal, wait};
use crate::{confirm, output, placement};

/// An upgrade waits until the new process serves. The controller gives the agent two minutes for it.
const UPGRADE_LIMIT: Duration = Duration::from_secs(150);

impl ControllerSession {
    pub(super) async fn volume(&mut self, command: VolumeCommand) -> Result<String, CtlError> {
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
                "the controller is too old for encryption: volume {name} was created without it. Delete the \
                 volume, and upgrade the controller"
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
}
