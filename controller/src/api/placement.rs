//! Serves the requirements of volumes on their places, the rest of drains, and the content of nodes.

use shorthorn_api::v1;
use shorthorn_controller_core::requests::{self, SetVolume};
use shorthorn_controller_core::{NodeName, Timestamp, drain};
use tonic::{Response, Status};

use super::server::{Api, RpcResult, drain_left};
use super::{messages, status};
use crate::agents::convert;

impl Api {
    pub(super) async fn change_placement(&self, request: v1::SetVolumeRequest) -> RpcResult<v1::Volume> {
        let tags = |tags: Option<v1::Tags>| tags.map(|tags| tags.tags);
        let locality = messages::data_locality(request.data_locality);
        let data_locality = locality.map_err(|error| status::of_request(&error))?;
        let wanted = SetVolume {
            name: request.name,
            number_of_replicas: request.number_of_replicas,
            node_selector: tags(request.node_selector),
            disk_selector: tags(request.disk_selector),
            data_locality,
            replica_soft_anti_affinity: request.replica_soft_anti_affinity,
            replica_zone_soft_anti_affinity: request.replica_zone_soft_anti_affinity,
            replica_disk_soft_anti_affinity: request.replica_disk_soft_anti_affinity,
        };
        self.change_volume(&wanted.name, |cluster| wanted.apply(cluster)).await
    }

    pub(super) async fn evict(&self, name: &str) -> RpcResult<v1::DrainLeft> {
        self.change(|cluster| requests::evict(cluster, name, Timestamp::now())).await?;
        let cluster = self.store.state();
        let replica = cluster.replicas.get(name);
        let gone = || status::of_request(&requests::RequestError::NoSuchReplica(name.to_owned()));
        let left = drain::of_replica(&cluster, &self.fleet.agents(), replica.ok_or_else(gone)?);
        Ok(Response::new(drain_left(left)))
    }

    pub(super) fn node_detail(&self, name: &str) -> Result<v1::NodeDetail, Status> {
        let cluster = self.store.state();
        let agents = self.fleet.agents();
        let node = requests::find_node(&cluster, name).map_err(|error| status::of_request(&error))?;
        let agent = NodeName::new(name).ok().and_then(|name| agents.get(&name));
        let info = agent.and_then(|agent| agent.info.as_ref());
        let frontends = node.status.frontends.iter().map(|frontend| {
            let (usable, reason) = (frontend.usable, frontend.reason.clone());
            let info = v1::FrontendInfo { usable, reason, ..v1::FrontendInfo::default() };
            info.with_frontend(frontend.name)
        });
        let here = cluster.replicas.values().filter(|replica| replica.spec.node_id.as_str() == name);
        Ok(v1::NodeDetail {
            node: Some(messages::node(&cluster, &agents, node)),
            frontends: frontends.collect(),
            data_address: node.status.data_address.clone().unwrap_or_default(),
            max_volumes: node.status.max_volumes.unwrap_or_default(),
            warnings: info.map(|info| info.warnings.clone()).unwrap_or_default(),
            feature_level: info.map(|info| info.feature_level).unwrap_or_default(),
            attached: drain::attached_to(&cluster, name).into_iter().map(str::to_owned).collect(),
            replicas: u32::try_from(here.count()).unwrap_or(u32::MAX),
            info: info.map(convert::rest_of_info),
        })
    }
}
