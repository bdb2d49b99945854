//! Block devices of nodes in a list.

use shorthorn_api::v1;
use shorthorn_types::HumanBytes;

use super::{Column, Entry, List, column, fields, wide};

const COLUMNS: [Column; 8] = [
    column("NODE"),
    column("DEVICE"),
    column("SIZE"),
    column("USE"),
    column("MODEL"),
    wide("SERIAL"),
    wide("TRANSPORT"),
    column("REASON"),
];

/// Returns the devices of nodes. Devices that do not fit are listed with `all` only.
pub(crate) fn devices(nodes: Vec<v1::NodeDevices>, all: bool) -> List {
    let unknown = nodes.iter().filter_map(|node| Some((&node.node, node.known_problem()?)));
    let mut warnings: Vec<String> = unknown
        .map(|(node, problem)| format!("the devices of node {node} are not known: {problem}"))
        .collect();
    let of_node =
        |node: v1::NodeDevices| node.devices.into_iter().map(move |device| (node.node.clone(), device));
    let devices: Vec<(String, v1::DiscoveredDevice)> = nodes.into_iter().flat_map(of_node).collect();
    let is_shown = |device: &v1::DiscoveredDevice| all || device.fits || device.needs_consent;
    let hidden = devices.iter().filter(|(_, device)| !is_shown(device)).count();
    if hidden > 0 {
        warnings.push(format!("devices that do not fit: {hidden}; --all shows them with the reasons"));
    }
    let entries = devices.into_iter().filter(|(_, device)| is_shown(device)).map(entry).collect();
    let if_empty = "No device can be used as a disk.";
    List { columns: &COLUMNS, entries, if_empty, warnings }
}

fn entry((node, device): (String, v1::DiscoveredDevice)) -> Entry {
    let fit = match (device.fits, device.needs_consent) {
        (true, _) => "fits",
        (false, true) => "needs a decision",
        (false, false) => "no",
    };
    let row = vec![
        node.clone(),
        device.path.clone(),
        HumanBytes(device.size_bytes).to_string(),
        fit.to_owned(),
        device.model.clone(),
        device.serial.clone(),
        device.transport.clone(),
        device.obstacles.join("; "),
    ];
    let name = format!("device/{node}:{}", device.path);
    let mut fields = fields(&device);
    fields["nodeID"] = node.into();
    Entry { name, rows: vec![row], fields }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Format;

    #[test]
    fn devices_that_do_not_fit_are_shown_on_demand() {
        let device = |name: &str, fits, needs_consent| v1::DiscoveredDevice {
            path: format!("/dev/{name}"),
            fits,
            needs_consent,
            obstacles: if fits { Vec::new() } else { vec!["a reason".to_owned()] },
            ..v1::DiscoveredDevice::default()
        };
        let found = vec![device("a", true, false), device("b", false, true), device("c", false, false)];
        let known = v1::NodeDevices { node: "n1".to_owned(), devices: found, problem: String::new() };
        let silent =
            v1::NodeDevices { node: "n2".to_owned(), problem: "no answer".to_owned(), ..Default::default() };
        let nodes = vec![known, silent];
        let list = devices(nodes.clone(), false);
        assert_eq!(list.text(Format::Name).unwrap(), "device/n1:/dev/a\ndevice/n1:/dev/b\n");
        assert!(list.warnings[0].contains("node n2 are not known: no answer"), "{:?}", list.warnings);
        assert!(list.warnings[1].contains("do not fit: 1; --all"), "{:?}", list.warnings);
        let all = devices(nodes, true);
        assert_eq!((all.entries.len(), all.warnings.len()), (3, 1));
        assert_eq!(all.entries[2].rows[0].len(), COLUMNS.len());
        assert_eq!(all.entries[2].fields["nodeID"], "n1");
        assert_eq!(all.entries[2].fields["obstacles"][0], "a reason");
    }
}
