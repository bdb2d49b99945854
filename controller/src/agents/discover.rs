//! Asks agents for the block devices of their nodes.

use std::time::Duration;

use shorthorn_api::v1;
use shorthorn_controller_core::NodeName;
use tokio::task::JoinSet;

use super::{CallError, Fleet, limited};

/// An agent gives up after half of that: a device that hangs must not hold up the others.
const DISCOVER_LIMIT: Duration = Duration::from_secs(60);

impl Fleet {
    /// Returns the block devices of each of these nodes, or the reason why they are not known.
    pub async fn discover_devices(
        &self,
        nodes: Vec<NodeName>,
    ) -> Vec<(NodeName, Result<Vec<v1::DiscoveredDevice>, CallError>)> {
        let (mut asking, mut found) = (JoinSet::new(), Vec::new());
        for node in nodes {
            match self.client(&node) {
                Ok(mut client) => drop(asking.spawn(async move {
                    let request = limited(v1::DiscoverDevicesRequest {}, DISCOVER_LIMIT);
                    let answer = client.discover_devices(request).await;
                    (node, answer.map(|answer| answer.into_inner().devices).map_err(CallError::from))
                })),
                Err(error) => found.push((node, Err(error))),
            }
        }
        found.extend(asking.join_all().await);
        found.sort_by(|(one, _), (other, _)| one.cmp(other));
        found
    }
}
