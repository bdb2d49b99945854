//! Results on standard output.

use std::io::Write;

use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;
use shorthorn_proto::v1;

use super::args::Format;
use super::error::CtlError;
use super::size::human;
use super::view::{NodeView, ReplicaView, VolumeView};

/// Writes `text` and ends its last line. A reader that went away (`| head`) has what it wanted.
pub(super) fn print(text: &str) -> Result<(), CtlError> {
    let mut output = std::io::stdout().lock();
    match writeln!(output, "{}", text.trim_end()).and_then(|()| output.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => result.map_err(|error| CtlError::Output(error.to_string())),
    }
}

fn for_programs(format: Format, value: &impl Serialize) -> Result<String, CtlError> {
    match format {
        Format::Json => {
            serde_json::to_string_pretty(value).map_err(|error| CtlError::Output(error.to_string()))
        }
        Format::Yaml | Format::Table => {
            serde_saphyr::to_string(value).map_err(|error| CtlError::Output(error.to_string()))
        }
    }
}

pub(super) fn volumes(format: Format, volumes: Vec<v1::Volume>) -> Result<String, CtlError> {
    if format != Format::Table {
        let views: Vec<VolumeView> = volumes.into_iter().map(Into::into).collect();
        return for_programs(format, &views);
    }
    if volumes.is_empty() {
        return Ok("There are no volumes. Make one: shorthornctl volume create NAME --size 10GiB".to_owned());
    }
    let mut table = table(&["NAME", "SIZE", "REPLICAS", "STATE", "ROBUSTNESS", "NODE", "DEVICE"]);
    for volume in volumes {
        let members = volume.replicas.iter().filter(|replica| replica.mode == "member").count();
        let attached = volume.state == "attached";
        let replicas = if attached {
            format!("{members}/{}", volume.number_of_replicas)
        } else {
            volume.number_of_replicas.to_string()
        };
        let size = human(volume.size_bytes);
        table.add_row([
            volume.name,
            size,
            replicas,
            volume.state,
            volume.robustness,
            dash(volume.current_node),
            dash(volume.endpoint),
        ]);
    }
    Ok(table.to_string())
}

/// One volume in full.
pub(super) fn volume(format: Format, volume: v1::Volume) -> Result<String, CtlError> {
    if format != Format::Table {
        return for_programs(format, &VolumeView::from(volume));
    }
    let mut facts = table(&[]);
    let engine = volume.engine.unwrap_or_default();
    for (name, value) in [
        ("Name", volume.name),
        ("Size", human(volume.size_bytes)),
        ("State", volume.state),
        ("Robustness", volume.robustness),
        ("Wanted on", dash(volume.node)),
        ("Node", dash(volume.current_node)),
        ("Device", dash(volume.endpoint)),
        ("Frontend", if engine.frontend.is_empty() { volume.frontend } else { engine.frontend }),
        ("Attachment", volume.attach.to_string()),
        ("View", dash(engine.view)),
        ("Created", volume.created),
    ] {
        facts.add_row([name.to_owned(), value]);
    }
    let mut text = facts.to_string();
    for condition in volume.conditions.iter().filter(|condition| !condition.status) {
        text.push_str(&format!("\n\n{}: {}", condition.reason, condition.message));
    }
    text.push_str("\n\n");
    text.push_str(&replica_table(volume.replicas));
    Ok(text)
}

pub(super) fn replicas(format: Format, replicas: Vec<v1::Replica>) -> Result<String, CtlError> {
    if format != Format::Table {
        let views: Vec<ReplicaView> = replicas.into_iter().map(Into::into).collect();
        return for_programs(format, &views);
    }
    Ok(if replicas.is_empty() { "There are no replicas.".to_owned() } else { replica_table(replicas) })
}

fn replica_table(replicas: Vec<v1::Replica>) -> String {
    let mut table = table(&["REPLICA", "NODE", "DISK", "STATE", "MODE", "ALLOCATED", "MESSAGE"]);
    for replica in replicas {
        let allocated = human(replica.allocated_bytes);
        table.add_row([
            replica.name,
            replica.node,
            replica.disk_path,
            replica.current_state,
            dash(replica.mode),
            allocated,
            replica.message,
        ]);
    }
    table.to_string()
}

pub(super) fn nodes(format: Format, nodes: Vec<v1::NodeObject>) -> Result<String, CtlError> {
    if format != Format::Table {
        let views: Vec<NodeView> = nodes.into_iter().map(Into::into).collect();
        return for_programs(format, &views);
    }
    if nodes.is_empty() {
        return Ok("There are no nodes. Start the controller with --node NAME=URL".to_owned());
    }
    Ok(node_table(nodes))
}

/// One node in full.
pub(super) fn node(format: Format, node: v1::NodeObject) -> Result<String, CtlError> {
    if format != Format::Table {
        return for_programs(format, &NodeView::from(node));
    }
    Ok(node_table(vec![node]))
}

fn node_table(nodes: Vec<v1::NodeObject>) -> String {
    let headers =
        ["NODE", "READY", "FRONTENDS", "DISK", "SIZE", "AVAILABLE", "RESERVED", "PROMISED", "MESSAGE"];
    let mut table = table(&headers);
    for node in nodes {
        let ready = node.conditions.iter().find(|condition| condition.r#type == "Ready");
        let word = ready.map_or("unknown", |ready| if ready.status { "yes" } else { "no" });
        let message = ready.map(|ready| ready.message.clone()).unwrap_or_default();
        let first = [node.name.clone(), word.to_owned(), dash(node.frontends.join(" "))];
        if node.disks.is_empty() {
            let hint = if message.is_empty() {
                format!("no disk: shorthornctl disk add {} PATH", node.name)
            } else {
                message
            };
            let nothing = std::iter::repeat_n("-".to_owned(), 5);
            table.add_row(first.into_iter().chain(nothing).chain([hint]));
            continue;
        }
        for disk in node.disks {
            let said = [message.as_str(), disk.problem.as_str()];
            let said: Vec<&str> = said.into_iter().filter(|text| !text.is_empty()).collect();
            let rest = [
                disk.path,
                human(disk.total_bytes),
                human(disk.available_bytes),
                human(disk.reserved_bytes),
                human(disk.scheduled_bytes),
                said.join("; "),
            ];
            table.add_row(first.iter().cloned().chain(rest));
        }
    }
    table.to_string()
}

fn table(headers: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_content_arrangement(ContentArrangement::Dynamic);
    if !headers.is_empty() {
        table.set_header(headers.iter().copied());
    }
    table
}

fn dash(text: String) -> String {
    if text.is_empty() { "-".to_owned() } else { text }
}
