//! Serves the calls for an operator who repairs a volume.

use std::collections::BTreeMap;

use shorthorn_api::v1;
use shorthorn_controller_core::objects::Replica;
use shorthorn_controller_core::requests::{self, SalvageVolume};
use shorthorn_controller_core::salvage::{self, SalvageChoice};
use shorthorn_controller_core::{Timestamp, why};
use shorthorn_types::View;
use tokio::task::JoinSet;
use tonic::{Response, Status};

use super::server::{Api, RpcResult};
use super::status;
use crate::agents::{AgentCallError, convert};

/// The maximum length of an operator's words, which are kept with the volume.
const WORDS_MAX_CHARS: usize = 500;

impl Api {
    pub(super) fn explain(&self, name: &str) -> Result<v1::Explanation, Status> {
        let cluster = self.store.state();
        let volume = requests::find(&cluster, name).map_err(|error| status::of_request(&error))?;
        let agents = self.fleet.agents();
        let why = why::explain(&cluster, &agents, volume, self.settings, Timestamp::now());
        Ok(v1::Explanation { healthy: why.healthy, sentences: why.sentences, hints: why.hints })
    }

    pub(super) async fn scrub(&self, request: v1::ScrubRequest) -> RpcResult<v1::Volume> {
        let name = request.volume.clone();
        let location = requests::engine_location(&self.store.state(), &name);
        let (node, _) = location.map_err(|error| status::of_request(&error))?;
        self.fleet.scrub(&node, request).await.map_err(|error| status::of_call(&error))?;
        self.show(&name).map(Response::new)
    }

    pub(super) async fn upgrade(
        &self,
        request: v1::UpgradeVolumeEngineRequest,
    ) -> RpcResult<v1::UpgradeEngineResponse> {
        let v1::UpgradeVolumeEngineRequest { name: volume, only_outdated } = request;
        let location = requests::engine_location(&self.store.state(), &volume);
        let (node, attach) = location.map_err(|error| status::of_request(&error))?;
        let request = v1::UpgradeEngineRequest { volume, attach, only_outdated };
        let upgraded = self.fleet.upgrade_engine(&node, request).await;
        upgraded.map(Response::new).map_err(|error| status::of_call(&error))
    }

    /// Returns the content of every replica of a volume, and the losses with each as the only one.
    pub(super) async fn inspect(&self, name: &str) -> Result<Vec<v1::InspectedReplica>, Status> {
        let (replicas, granted) = {
            let cluster = self.store.state();
            let volume = requests::find(&cluster, name).map_err(|error| status::of_request(&error))?;
            let replicas = cluster.replicas_of(&volume.spec.volume_name).cloned().collect::<Vec<Replica>>();
            (replicas, volume.status.arbiter.granted())
        };
        let mut asking = JoinSet::new();
        for replica in replicas {
            let fleet = std::sync::Arc::clone(&self.fleet);
            asking.spawn(async move {
                let spec = &replica.spec;
                let (volume, disk) = (&spec.volume_name, &spec.disk_path);
                let found = fleet.inspect_replica(&spec.node_id, volume, spec.replica_id, disk).await;
                (replica, found)
            });
        }
        Ok(judged(asking.join_all().await, granted))
    }

    pub(super) async fn salvage(&self, request: v1::SalvageVolumeRequest) -> RpcResult<v1::Volume> {
        let found = self.inspect(&request.name).await?;
        let chosen = found.iter().find(|found| found.replica_id == request.replica_id);
        if let Some(chosen) = chosen.filter(|chosen| !chosen.possible) {
            let why = chosen.losses.join("; ");
            let message =
                format!("volume {} cannot be salvaged with {}: {why}", request.name, request.replica_id);
            return Err(Status::failed_precondition(message));
        }
        let losses = chosen.map(|chosen| chosen.losses.join("; ")).unwrap_or_default();
        let losses = if losses.is_empty() { "no loss is known".to_owned() } else { losses };
        let wanted = SalvageVolume {
            name: request.name.clone(),
            replica: request.replica_id,
            confirm: request.confirm,
            by: short(&request.by, "an operator"),
            reason: short(&request.reason, "no reason given"),
            losses,
            known_attach: newest_attach(&found),
            are_all_known: found.iter().all(|found| found.inspection.is_some()),
        };
        tracing::warn!(
            volume = wanted.name,
            replica = wanted.replica,
            by = wanted.by,
            reason = wanted.reason,
            losses = wanted.losses,
            "salvage requested"
        );
        self.change_volume(&request.name, |cluster| wanted.apply(cluster, Timestamp::now())).await
    }
}

/// Returns the newest attachment that any of these replicas knows.
fn newest_attach(found: &[v1::InspectedReplica]) -> u64 {
    let inspections = found.iter().filter_map(|found| found.inspection.as_ref());
    let known = inspections.flat_map(|inspection| {
        let opened = inspection.known_generation().map(|generation| generation.attach);
        inspection.committed.iter().chain(&inspection.proposed).map(|view| view.attach).chain(opened)
    });
    known.max().unwrap_or(0)
}

fn short(words: &str, otherwise: &str) -> String {
    let words: String = words.trim().chars().take(WORDS_MAX_CHARS).collect();
    if words.is_empty() { otherwise.to_owned() } else { words }
}

type Inspected = (Replica, Result<v1::ReplicaInspection, AgentCallError>);

fn judged(found: Vec<Inspected>, granted: Option<View>) -> Vec<v1::InspectedReplica> {
    let inspections = found
        .iter()
        .map(|(replica, found)| (replica.spec.replica_id, found.as_ref().ok().map(convert::inspection)));
    let choices = salvage::choices(&inspections.collect(), granted);
    let mut choices: BTreeMap<_, SalvageChoice> =
        choices.into_iter().map(|choice| (choice.replica, choice)).collect();
    let mut shown: Vec<v1::InspectedReplica> = found
        .into_iter()
        .map(|(replica, found)| {
            let choice = choices.remove(&replica.spec.replica_id);
            let (inspection, error) = match found {
                Ok(inspection) => (Some(inspection), String::new()),
                Err(error) => (None, error.to_string()),
            };
            v1::InspectedReplica {
                replica_id: replica.spec.replica_id.to_string(),
                node: replica.spec.node_id.to_string(),
                inspection,
                error,
                possible: choice.as_ref().is_some_and(|choice| choice.possible),
                losses: choice.map(|choice| choice.losses).unwrap_or_default(),
            }
        })
        .collect();
    shown.sort_by(|a, b| a.replica_id.cmp(&b.replica_id));
    shown
}
