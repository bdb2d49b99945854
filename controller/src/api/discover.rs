//! The block devices of nodes.

use shorthorn_api::v1;
use shorthorn_controller_core::{NodeName, requests};
use tonic::Status;

use super::server::Api;
use super::status;

impl Api {
    /// Returns the block devices of these nodes, or of all if none is named.
    pub(super) async fn discover(
        &self,
        request: v1::DiscoverNodeDevicesRequest,
    ) -> Result<v1::DiscoverNodeDevicesResponse, Status> {
        let names = {
            let cluster = self.store.state();
            for name in &request.nodes {
                requests::find_node(&cluster, name).map_err(|error| status::of_request(&error))?;
            }
            let wanted = |name: &&String| request.nodes.is_empty() || request.nodes.contains(name);
            let names = cluster.nodes.keys().filter(wanted).map(|name| NodeName::new(name));
            names.collect::<Result<Vec<_>, _>>().map_err(|error| Status::internal(error.to_string()))?
        };
        let nodes = self.fleet.discover_devices(names).await.into_iter().map(|(node, found)| {
            let (devices, problem) = match found {
                Ok(devices) => (devices, String::new()),
                Err(error) => (Vec::new(), error.to_string()),
            };
            v1::NodeDevices { node: node.to_string(), devices, problem }
        });
        Ok(v1::DiscoverNodeDevicesResponse { nodes: nodes.collect() })
    }
}
