//! The block devices of nodes, a page of nodes at a time.

use shorthorn_api::v1;
use shorthorn_controller_core::{NodeName, requests};
use tonic::Status;

use super::list::{ANSWER_MAX_BYTES, ListPage, fitting, page, token_after};
use super::server::Api;
use super::status;
use crate::agents::ASKED_MAX;

/// More than the size of a device without its texts.
const DEVICE_BYTES: usize = 64;

impl Api {
    /// Returns the block devices of these nodes, or of all if none is named.
    pub(super) async fn discover(
        &self,
        request: v1::DiscoverNodeDevicesRequest,
    ) -> Result<v1::DiscoverNodeDevicesResponse, Status> {
        let v1::DiscoverNodeDevicesRequest { nodes: wanted, page_size, page_token } = request;
        // A page is asked at once: a larger one would take longer.
        let most = page_size.min(u32::try_from(ASKED_MAX).unwrap_or(u32::MAX));
        let (names, next_token) = {
            let cluster = self.store.state();
            for name in &wanted {
                requests::find_node(&cluster, name).map_err(|error| status::of_request(&error))?;
            }
            let ListPage { objects, next_token } = page(&cluster.nodes, most, &page_token, |node| {
                wanted.is_empty() || wanted.contains(&node.metadata.name)
            })?;
            let names = objects.into_iter().map(|node| NodeName::new(&node.metadata.name));
            let names = names.collect::<Result<Vec<_>, _>>();
            (names.map_err(|error| Status::internal(error.to_string()))?, next_token)
        };
        let nodes = self.fleet.discover_devices(names).await.into_iter().map(|(node, found)| {
            let (devices, problem) = match found {
                Ok(devices) => (devices, String::new()),
                Err(error) => (Vec::new(), error.to_string()),
            };
            v1::NodeDevices { node: node.to_string(), devices, problem }
        });
        let answer = bounded(nodes.collect(), next_token, ANSWER_MAX_BYTES);
        if page_size == 0 && !answer.next_page_token.is_empty() {
            let message = "the devices of all nodes are more than one answer holds: ask with page_size, as a \
                           newer shorthornctl does";
            return Err(Status::resource_exhausted(message));
        }
        Ok(answer)
    }
}

/// Returns the answer with the first of these nodes, as many as fit and at least one.
fn bounded(
    mut nodes: Vec<v1::NodeDevices>,
    next_page_token: String,
    max_bytes: usize,
) -> v1::DiscoverNodeDevicesResponse {
    let count = fitting(nodes.iter().map(size_bytes), max_bytes);
    if count >= nodes.len() {
        return v1::DiscoverNodeDevicesResponse { nodes, next_page_token };
    }
    nodes.truncate(count);
    let next_page_token = nodes.last().map(|node| token_after(&node.node)).unwrap_or_default();
    v1::DiscoverNodeDevicesResponse { nodes, next_page_token }
}

fn size_bytes(node: &v1::NodeDevices) -> usize {
    let device = |device: &v1::DiscoveredDevice| {
        let v1::DiscoveredDevice { path, name, model, serial, wwn, transport, obstacles, .. } = device;
        let texts = [path, name, model, serial, wwn, transport].into_iter().chain(obstacles);
        DEVICE_BYTES + texts.map(String::len).sum::<usize>()
    };
    node.node.len() + node.problem.len() + node.devices.iter().map(device).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, devices: usize) -> v1::NodeDevices {
        let device = v1::DiscoveredDevice { model: "x".repeat(936), ..v1::DiscoveredDevice::default() };
        v1::NodeDevices { node: name.to_owned(), devices: vec![device; devices], problem: String::new() }
    }

    #[test]
    fn an_answer_has_the_nodes_that_fit_and_the_token_of_the_rest() {
        let nodes = || vec![node("a", 2), node("b", 2), node("c", 1)];
        let answer = |max_bytes| {
            let found = bounded(nodes(), "after:c".to_owned(), max_bytes);
            let names: Vec<String> = found.nodes.into_iter().map(|node| node.node).collect();
            (names.concat(), found.next_page_token)
        };
        let expected = |names: &str, token: &str| (names.to_owned(), token.to_owned());
        assert_eq!(answer(6000), expected("abc", "after:c"));
        assert_eq!(answer(4500), expected("ab", "after:b"));
        assert_eq!(answer(100), expected("a", "after:a"), "at least one, so that the pages come to an end");
        assert!(bounded(Vec::new(), String::new(), 100).nodes.is_empty());
    }
}
