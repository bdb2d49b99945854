//! The places of replicas: the requirements of a volume, the rest of a drain, and the content of a node.

use std::time::Duration;

use serde::Serialize;
use shorthorn_api::v1;
use shorthorn_api::v1::controller_client::ControllerClient;
use shorthorn_types::status::VolumeState;
use tokio::time::{Instant, sleep, timeout_at};
use tonic::Code;
use tonic::transport::Channel;

use super::args::{SetVolumeArgs, TagList};
use super::calls::limited;
use super::error::{CtlError, is_unreachable};
use super::format::Format;
use super::output::{dash, facts, for_programs, node_table};
use super::wait::{HELD_LIMIT, ProgressLine};

/// The least time between two questions.
const POLL: Duration = Duration::from_millis(500);

pub(super) fn of_tags(tags: TagList) -> v1::Tags {
    v1::Tags { tags: tags.0 }
}

/// Makes the request for the changes of a volume.
pub(super) fn change(args: SetVolumeArgs) -> v1::SetVolumeRequest {
    let changes = args.changes;
    v1::SetVolumeRequest {
        name: args.name,
        number_of_replicas: changes.replicas,
        node_selector: changes.node_selector.map(of_tags),
        disk_selector: changes.disk_selector.map(of_tags),
        data_locality: changes.data_locality,
        replica_soft_anti_affinity: changes.soft_anti_affinity,
        replica_zone_soft_anti_affinity: changes.hard_zone_anti_affinity.map(|hard| !hard),
        replica_disk_soft_anti_affinity: changes.hard_disk_anti_affinity.map(|hard| !hard),
    }
}

/// Returns a sentence about the current requirements of a volume.
pub(super) fn sentence(volume: &v1::Volume) -> String {
    let mut text = format!("volume {} should have {} replicas", volume.name, volume.number_of_replicas);
    for (what, tags) in [("nodes", &volume.node_selector), ("disks", &volume.disk_selector)] {
        if !tags.is_empty() {
            text.push_str(&format!(", on {what} with {}", tags.join(", ")));
        }
    }
    let has = volume.replicas.iter().filter(|replica| !replica.deleting).count();
    let wanted = volume.number_of_replicas as usize;
    let is_attached = volume.known_state() == Some(VolumeState::Attached);
    let when = if is_attached { "in succession" } else { "once it is attached" };
    match has.cmp(&wanted) {
        std::cmp::Ordering::Less => text.push_str(&format!("; {} are created {when}", wanted - has)),
        std::cmp::Ordering::Greater => text.push_str(&format!("; {} are removed {when}", has - wanted)),
        std::cmp::Ordering::Equal => {}
    }
    text
}

/// Has the replica replaced, and waits until it is gone, if for a time.
pub(super) async fn evict(
    client: &mut ControllerClient<Channel>,
    server: &str,
    name: String,
    limit: Option<Duration>,
) -> Result<String, CtlError> {
    let progress = ProgressLine::start();
    let (mut deadline, mut held_since, mut was_there) = (None, None, false);
    loop {
        let request = limited(v1::EvictReplicaRequest { name: name.clone() });
        let state = match client.evict_replica(request).await {
            Ok(left) => {
                let left = left.into_inner();
                let Some(limit) = limit else {
                    return Ok(format!("replica {name} will be replaced and deleted: {}", left.message));
                };
                was_there = true;
                deadline.get_or_insert_with(|| Instant::now() + limit);
                held_since = left.held.then(|| held_since.unwrap_or_else(Instant::now));
                left.message
            }
            Err(status) if was_there && status.code() == Code::NotFound => {
                return Ok(format!("replica {name} is gone"));
            }
            // A controller that restarts comes back.
            Err(status) if was_there && is_unreachable(&status) => status.message().to_owned(),
            Err(status) => return Err(CtlError::of(&status, server)),
        };
        progress.say(&state);
        if held_since.is_some_and(|since: Instant| since.elapsed() >= HELD_LIMIT) {
            return Err(CtlError::Refused(format!(
                "replica {name} still exists: {state}. The controller continues as soon as possible"
            )));
        }
        let Some(deadline) = deadline else { continue };
        if timeout_at(deadline, sleep(POLL)).await.is_err() {
            return Err(CtlError::Timeout(format!(
                "replica {name} is still there: {state}. The controller continues"
            )));
        }
    }
}

/// A node, with details that only this node's call returns.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeDetailOutput {
    #[serde(flatten)]
    node: v1::NodeObject,
    frontend_details: Vec<FrontendOutput>,
    data_address: String,
    max_volumes: u32,
    warnings: Vec<String>,
    feature_level: u32,
    attached_volumes: Vec<String>,
    replica_count: u32,
    /// The printed fields of the answer of its agent.
    #[serde(flatten)]
    info: v1::NodeInfo,
}

#[derive(Debug, Serialize)]
struct FrontendOutput {
    name: String,
    usable: bool,
    reason: String,
}

pub(super) fn node(format: Format, mut detail: v1::NodeDetail) -> Result<String, CtlError> {
    let node = detail.node.take().unwrap_or_default();
    if format == Format::Name {
        return Ok(format!("node/{}", node.name));
    }
    if !format.is_for_people() {
        return for_programs(format, &node_output(node, detail));
    }
    let mut text = node_facts(&node, &detail);
    for frontend in &detail.frontends {
        let state =
            if frontend.usable { "usable".to_owned() } else { format!("not usable: {}", frontend.reason) };
        text.push_str(&format!("\nFrontend {}: {state}", frontend.shown_frontend()));
    }
    for condition in &node.conditions {
        let state = if condition.status { "yes" } else { "no" };
        let message =
            if condition.message.is_empty() { String::new() } else { format!(": {}", condition.message) };
        text.push_str(&format!(
            "\n{} {state} since {}{message}",
            condition.r#type, condition.last_transition
        ));
    }
    for warning in &detail.warnings {
        text.push_str(&format!("\nWarning: {warning}"));
    }
    text.push_str("\n\n");
    text.push_str(&node_table(&node));
    Ok(text)
}

fn node_output(node: v1::NodeObject, detail: v1::NodeDetail) -> NodeDetailOutput {
    let frontend = |found: v1::FrontendInfo| FrontendOutput {
        name: found.shown_frontend().to_owned(),
        usable: found.usable,
        reason: found.reason,
    };
    NodeDetailOutput {
        node,
        frontend_details: detail.frontends.into_iter().map(frontend).collect(),
        data_address: detail.data_address,
        max_volumes: detail.max_volumes,
        warnings: detail.warnings,
        feature_level: detail.feature_level,
        attached_volumes: detail.attached,
        replica_count: detail.replicas,
        info: detail.info.unwrap_or_default(),
    }
}

/// Returns the facts of a node that are one line each.
fn node_facts(node: &v1::NodeObject, detail: &v1::NodeDetail) -> String {
    let closed = match (node.deleting, node.eviction_requested, node.allow_scheduling) {
        (true, ..) => "no, it is given up",
        (_, true, _) => "no, it is drained",
        (_, _, false) => "no, it is cordoned",
        _ => "yes",
    };
    let most = if detail.max_volumes == 0 { "any number".to_owned() } else { detail.max_volumes.to_string() };
    facts(&[
        ("Name", node.name.clone()),
        ("Agent", dash(node.address.clone())),
        ("Version", dash(node.version.clone())),
        ("Data address", dash(detail.data_address.clone())),
        ("Zone", dash(node.zone.clone())),
        ("Tags", dash(node.tags.join(", "))),
        ("New replicas", closed.to_owned()),
        ("Replicas", detail.replicas.to_string()),
        ("Attached", format!("{} of {most}", detail.attached.len())),
        ("Volumes", dash(detail.attached.join(", "))),
    ])
}

#[cfg(test)]
mod tests {
    use shorthorn_types::status::Frontend;

    use super::*;

    #[test]
    fn the_effect_on_the_replicas_is_reported() {
        let replica = |deleting| v1::Replica { deleting, ..v1::Replica::default() };
        let mut volume = v1::Volume {
            name: "v".to_owned(),
            number_of_replicas: 1,
            replicas: vec![replica(false), replica(false), replica(true)],
            ..v1::Volume::default()
        }
        .with_state(VolumeState::Attached);
        assert_eq!(sentence(&volume), "volume v should have 1 replicas; 1 are removed in succession");
        volume.number_of_replicas = 3;
        volume = volume.with_state(VolumeState::Detached);
        volume.node_selector = vec!["fast".to_owned()];
        assert_eq!(
            sentence(&volume),
            "volume v should have 3 replicas, on nodes with fast; 1 are created once it is attached"
        );
    }

    #[test]
    fn a_node_is_shown_with_its_unusable_frontends_and_warnings() {
        let detail = v1::NodeDetail {
            node: Some(v1::NodeObject {
                name: "n".to_owned(),
                allow_scheduling: true,
                ..v1::NodeObject::default()
            }),
            frontends: vec![
                v1::FrontendInfo { reason: "no module".to_owned(), ..v1::FrontendInfo::default() }
                    .with_frontend(Frontend::Ublk),
            ],
            warnings: vec!["a manager runs here".to_owned()],
            attached: vec!["v".to_owned()],
            max_volumes: 8,
            ..v1::NodeDetail::default()
        };
        let text = node(Format::Table, detail.clone()).unwrap();
        for words in ["ublk: not usable: no module", "Warning: a manager", "1 of 8"] {
            assert!(text.contains(words), "{words} in {text}");
        }
        let json: serde_json::Value = serde_json::from_str(&node(Format::Json, detail).unwrap()).unwrap();
        assert_eq!((&json["name"], &json["frontendDetails"][0]["usable"]), (&"n".into(), &false.into()));
    }
}
