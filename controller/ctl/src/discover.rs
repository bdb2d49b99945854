//! The command disk discover.

use std::time::Duration;

use shorthorn_api::v1;
use shorthorn_api::v1::controller_client::ControllerClient;
use tonic::transport::Channel;

use super::args::DiscoverArgs;
use super::error::CtlError;
use super::format::Format;
use super::{list, output};

/// The longest that the examination of the devices of a page of nodes may take. The controller gives each
/// agent a minute.
const LIMIT: Duration = Duration::from_secs(90);
/// The number of nodes in a request. The controller asks all of them at the same time.
const PAGE: u32 = 32;

/// Lists the devices of all nodes, or of those that are named.
pub(super) async fn run(
    client: &mut ControllerClient<Channel>,
    server: &str,
    format: Format,
    args: DiscoverArgs,
) -> Result<String, CtlError> {
    let (mut nodes, mut page_token) = (Vec::new(), String::new());
    loop {
        let wanted = args.nodes.clone();
        let request = v1::DiscoverNodeDevicesRequest { nodes: wanted, page_size: PAGE, page_token };
        let mut request = tonic::Request::new(request);
        request.set_timeout(LIMIT);
        let found = client.discover_devices(request).await.map_err(|status| CtlError::of(&status, server))?;
        let page = found.into_inner();
        nodes.extend(page.nodes);
        if page.next_page_token.is_empty() {
            break;
        }
        page_token = page.next_page_token;
    }
    let unknown = nodes.iter().filter(|node| node.known_problem().is_some()).count();
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
