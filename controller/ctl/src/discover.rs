//! The command disk discover.

use std::time::Duration;

use shorthorn_api::v1;
use shorthorn_api::v1::controller_client::ControllerClient;
use tonic::transport::Channel;

use super::args::DiscoverArgs;
use super::error::CtlError;
use super::format::Format;
use super::{list, output};

/// The longest that the examination of all devices may take.
const LIMIT: Duration = Duration::from_secs(90);

/// Lists the devices of all nodes, or of those that are named.
pub(super) async fn run(
    client: &mut ControllerClient<Channel>,
    server: &str,
    format: Format,
    args: DiscoverArgs,
) -> Result<String, CtlError> {
    let mut request = tonic::Request::new(v1::DiscoverNodeDevicesRequest { nodes: args.nodes });
    request.set_timeout(LIMIT);
    let found = client.discover_devices(request).await.map_err(|status| CtlError::of(&status, server))?;
    let nodes = found.into_inner().nodes;
    let unknown = nodes.iter().filter(|node| !node.problem.is_empty()).count();
    let is_partial = unknown > 0 && unknown == nodes.len();
    let list = list::devices(nodes, args.all || !format.is_for_people());
    for warning in &list.warnings {
        output::complain(warning)?;
    }
    if is_partial {
        return Err(CtlError::Incomplete("no agent has listed its devices".to_owned()));
    }
    list.text(format)
}
