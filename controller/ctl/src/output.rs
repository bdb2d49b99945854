//! Results on standard output.

use std::io::Write;

use serde::Serialize;
use shorthorn_api::{nonempty, v1};
use shorthorn_types::status::{CopyStatus, MemberMode, VolumeState};
use shorthorn_types::{Generation, HumanBytes};

use super::error::CtlError;
use super::format::Format;
use super::json::{InspectionOutput, RebalanceOutput, VolumeOutput};
use super::table::table;
use crate::terminal_text::terminal_text;

/// Writes `text` and ends its last line. A closed pipe (`| head`) is not an error.
pub(super) fn print(text: &str) -> Result<(), CtlError> {
    if text.trim_end().is_empty() {
        return Ok(());
    }
    let mut output = std::io::stdout().lock();
    match writeln!(output, "{}", terminal_text(text.trim_end())).and_then(|()| output.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => result.map_err(|error| CtlError::Output(error.to_string())),
    }
}

/// Writes a text that an operator has to read before a question to standard error.
pub(super) fn complain(text: &str) -> Result<(), CtlError> {
    let result = writeln!(std::io::stderr().lock(), "{}", terminal_text(text.trim_end()));
    result.map_err(|error| CtlError::Output(error.to_string()))
}

pub(super) fn for_programs(format: Format, value: &impl Serialize) -> Result<String, CtlError> {
    match format {
        Format::Json => {
            serde_json::to_string_pretty(value).map_err(|error| CtlError::Output(error.to_string()))
        }
        Format::Yaml | Format::Table | Format::Wide | Format::Name => {
            serde_saphyr::to_string(value).map_err(|error| CtlError::Output(error.to_string()))
        }
    }
}

/// Returns the number of members and of wanted replicas, with the progress of rebuilds.
pub(super) fn members(volume: &v1::Volume) -> String {
    if volume.known_state() != Some(VolumeState::Attached) {
        return volume.number_of_replicas.to_string();
    }
    let replicas: Vec<v1::EngineMember> =
        volume.replicas.iter().filter_map(v1::Replica::known_member).collect();
    let members = replicas.iter().filter(|replica| replica.known_mode() == MemberMode::Member).count();
    format!("{members}/{}{}", volume.number_of_replicas, copying(&replicas))
}

/// Returns the size, with the desired one if it differs.
pub(super) fn size(volume: &v1::Volume) -> String {
    let wanted = HumanBytes(volume.size_bytes).to_string();
    // A controller of an earlier version does not say it.
    match volume.current_size_bytes {
        0 => wanted,
        has if has == volume.size_bytes => wanted,
        has => format!("{}, to be {wanted}", HumanBytes(has)),
    }
}

/// Returns the progress of the rebuilds, for a cell of a table.
fn copying(replicas: &[v1::EngineMember]) -> String {
    let least = replicas.iter().filter_map(|replica| Some(CopyStatus::from(replica.copy?).percent())).min();
    least.map(|percent| format!(" ({percent} %)")).unwrap_or_default()
}

fn progress(copy: CopyStatus) -> String {
    let left = copy.left_s().map(|seconds| format!(", {seconds} s left"));
    format!("{} % at {}/s{}", copy.percent(), HumanBytes(copy.bytes_per_s), left.unwrap_or_default())
}

/// Limits of copying in words.
pub(super) fn limits(limits: v1::RebuildLimits) -> String {
    let share = format!("at most {} % of a busy volume's bytes", limits.share_percent);
    match limits.bytes_per_s {
        0 => share,
        rate => format!("{share}, and at most {}/s", HumanBytes(rate)),
    }
}

fn scrub(scrub: &v1::ScrubStatus) -> String {
    let place =
        if scrub.snapshot.is_empty() { String::new() } else { format!(" of snapshot {}", scrub.snapshot) };
    let state =
        if scrub.running { format!("at {}{place}", HumanBytes(scrub.at_bytes)) } else { "done".to_owned() };
    let last = if scrub.last.is_empty() { String::new() } else { format!(" ({})", scrub.last) };
    format!("{state}, {} differences, {} repaired{last}", scrub.found, scrub.repaired)
}

fn salvage(salvage: &v1::Salvage) -> String {
    let state = if salvage.done { "done" } else { "under way" };
    format!(
        "to replica {} ({state}), decided by {} at {}: {}; {}",
        salvage.replica_id, salvage.by, salvage.decided, salvage.reason, salvage.losses
    )
}

/// Formats the explanation of a volume's state.
pub(super) fn explanation(format: Format, why: v1::Explanation) -> Result<String, CtlError> {
    if !format.is_for_people() {
        return for_programs(format, &why);
    }
    let mut text = why.sentences.join("\n");
    if !why.hints.is_empty() {
        text.push_str("\n\nWhat you can do:");
        why.hints.iter().for_each(|hint| text.push_str(&format!("\n- {hint}")));
    }
    Ok(text)
}

/// Formats the result of an engine's upgrade.
pub(super) fn upgrade(
    format: Format,
    volume: &str,
    upgraded: &v1::UpgradeEngineResponse,
) -> Result<String, CtlError> {
    if !format.is_for_people() {
        return for_programs(format, upgraded);
    }
    Ok(format!(
        "the engine of volume {volume} is process {} now, {} before; requests waited for {} ms",
        upgraded.new_pid, upgraded.old_pid, upgraded.pause_ms
    ))
}

/// Formats the content of each replica of a volume, and the losses with it.
pub(super) fn inspections(
    format: Format,
    volume: &str,
    found: Vec<v1::InspectedReplica>,
) -> Result<String, CtlError> {
    if !format.is_for_people() {
        let views: Vec<InspectionOutput> = found.into_iter().map(Into::into).collect();
        return for_programs(format, &views);
    }
    let mut table =
        table(&["REPLICA", "NODE", "VIEW", "PROPOSED", "GENERATION", "STATE", "ALLOCATED", "WRITTEN"]);
    for replica in &found {
        let inspection = replica.inspection.clone().unwrap_or_default();
        let proposed: Vec<String> = inspection.proposed.iter().map(view).collect();
        let written = i64::try_from(inspection.modified_ms).ok().filter(|ms| *ms > 0);
        let written = written.and_then(|ms| jiff::Timestamp::from_second(ms / 1000).ok());
        table.add_row([
            replica.replica_id.clone(),
            replica.node.clone(),
            dash(inspection.committed.as_ref().map(view).unwrap_or_default()),
            dash(proposed.join(" ")),
            dash(inspection.shown_generation()),
            inspected_state(replica, &inspection),
            HumanBytes(inspection.allocated_bytes).to_string(),
            dash(written.map(|written| written.to_string()).unwrap_or_default()),
        ]);
    }
    let mut text = table.to_string();
    for replica in &found {
        let losses =
            if replica.losses.is_empty() { "no loss is known".to_owned() } else { replica.losses.join("; ") };
        let word = if replica.possible { "With" } else { "Impossible with" };
        text.push_str(&format!("\n\n{word} {}: {losses}", replica.replica_id));
    }
    text.push_str(&format!("\n\nTo choose: shorthornctl volume salvage {volume} --replica ID --reason TEXT"));
    Ok(text)
}

fn view(view: &v1::View) -> String {
    let generation = Generation::new(view.attach, view.restart).of_nonce(view.nonce);
    format!("{generation}/{} of {{{}}}", view.number, view.members.join(", "))
}

fn inspected_state(replica: &v1::InspectedReplica, inspection: &v1::ReplicaInspection) -> String {
    if !replica.error.is_empty() {
        return replica.error.clone();
    }
    let words = [
        (inspection.missing, "missing"),
        (inspection.running, "running"),
        (inspection.rebuilding, "rebuilding"),
        (inspection.dirty, "not closed cleanly"),
        (inspection.lost_cache, "cache lost"),
    ];
    let words = words.into_iter().filter(|(so, _)| *so).map(|(_, word)| word.to_owned());
    let words: Vec<String> = words.chain(inspection.problems.iter().cloned()).collect();
    if words.is_empty() { "stopped cleanly".to_owned() } else { words.join(", ") }
}

/// Formats all fields of a volume.
pub(super) fn volume(format: Format, volume: v1::Volume) -> Result<String, CtlError> {
    if format == Format::Name {
        return Ok(format!("volume/{}", volume.name));
    }
    if !format.is_for_people() {
        return for_programs(format, &VolumeOutput::from(volume));
    }
    let mut facts = table(&[]);
    let size = size(&volume);
    let [state, robustness, frontend] =
        [volume.shown_state(), volume.shown_robustness(), volume.shown_frontend()].map(str::to_owned);
    let granted = volume.shown_granted();
    let engine = volume.engine.unwrap_or_default();
    let view = engine.shown_view();
    let in_use = nonempty(engine.shown_frontend().to_owned());
    for (name, value) in [
        ("Name", volume.name),
        ("Size", size),
        ("State", state),
        ("Robustness", robustness),
        ("Wanted on", dash(volume.node)),
        ("Node", dash(volume.current_node)),
        ("Device", dash(volume.endpoint)),
        ("Frontend", in_use.unwrap_or(frontend)),
        ("Attachment", volume.attach.to_string()),
        ("View", dash(view)),
        ("Created", volume.created),
        ("Claim", dash(volume.claim)),
        ("Used by", dash(workloads(&volume.workloads))),
    ] {
        facts.add_row([name.to_owned(), value]);
    }
    for (name, value) in [
        ("Granted", Some(granted).filter(|granted| !granted.is_empty())),
        ("Copying", volume.rebuild.map(limits)),
        ("Resync", volume.resync.map(|copy| progress(copy.into()))),
        ("Scrub", volume.scrub.as_ref().map(scrub)),
        ("Salvage", volume.salvage.as_ref().map(salvage)),
    ] {
        if let Some(value) = value {
            facts.add_row([name.to_owned(), value]);
        }
    }
    let mut text = facts.to_string();
    for condition in volume.conditions.iter().filter(|condition| !condition.status) {
        text.push_str(&format!("\n\n{}: {}", condition.reason, condition.message));
    }
    text.push_str("\n\n");
    text.push_str(&replica_table(&volume.replicas));
    Ok(text)
}

fn replica_table(replicas: &[v1::Replica]) -> String {
    let mut table = table(&["REPLICA", "NODE", "DISK", "STATE", "MODE", "ALLOCATED", "MESSAGE"]);
    for replica in replicas {
        table.add_row(replica_row(replica));
    }
    table.to_string()
}

/// Returns the cells of a replica: name, node, disk, state, mode, size and message.
pub(super) fn replica_row(replica: &v1::Replica) -> [String; 7] {
    let member = replica.known_member();
    let mode = member.as_ref().map_or("", |member| member.known_mode().as_str());
    let mode = match member.as_ref().and_then(|member| member.copy) {
        Some(copy) => format!("{mode} {}", progress(copy.into())),
        None if replica.deleting => "being deleted".to_owned(),
        None => dash(mode.to_owned()),
    };
    [
        replica.name.clone(),
        replica.node.clone(),
        replica.disk_path.clone(),
        replica.shown_current_state().to_owned(),
        mode,
        HumanBytes(replica.allocated_bytes).to_string(),
        replica.message.clone(),
    ]
}

/// Returns the cells of a disk: node, path, identity, sizes, whether it gets new replicas, and message.
pub(super) fn disk_row(node: &str, disk: &v1::NodeDisk) -> [String; 8] {
    let allowed = match (disk.allow_scheduling, disk.eviction_requested) {
        (true, _) => "yes",
        (false, false) => "no",
        (false, true) => "no, it is drained",
    };
    let sizes = [disk.total_bytes, disk.available_bytes, disk.scheduled_bytes];
    let sizes = sizes.map(|bytes| HumanBytes(bytes).to_string());
    let [size, available, scheduled] = sizes;
    let (uuid, message) = (dash(disk.uuid.clone()), dash(disk.problem.clone()));
    [node.to_owned(), disk.path.clone(), uuid, size, available, scheduled, allowed.to_owned(), message]
}

/// Returns the users of a volume, each workload once.
pub(crate) fn workloads(all: &[v1::Workload]) -> String {
    let mut names: Vec<String> = all.iter().map(|one| format!("{}/{}", one.kind, one.name)).collect();
    names.dedup();
    names.join(", ")
}

/// Formats the moves for programs.
pub(super) fn rebalance(
    format: Format,
    answer: v1::RebalanceResponse,
    begun: usize,
) -> Result<String, CtlError> {
    for_programs(format, &RebalanceOutput::of(answer, begun))
}

/// Formats all fields of a node.
pub(super) fn node(format: Format, node: v1::NodeObject) -> Result<String, CtlError> {
    if format == Format::Name {
        return Ok(format!("node/{}", node.name));
    }
    if !format.is_for_people() {
        return for_programs(format, &node);
    }
    Ok(node_table(&node))
}

pub(super) fn node_table(node: &v1::NodeObject) -> String {
    let headers =
        ["NODE", "READY", "FRONTENDS", "DISK", "SIZE", "AVAILABLE", "RESERVED", "SCHEDULED", "MESSAGE"];
    let mut table = table(&headers);
    for row in node_rows(node) {
        table.add_row(row);
    }
    table.to_string()
}

/// Returns the cells of a node, a row for each of its disks: name, readiness, frontends, path, sizes, and
/// message.
pub(super) fn node_rows(node: &v1::NodeObject) -> Vec<Vec<String>> {
    let (word, message) = readiness(node);
    let first = [node.name.clone(), word.to_owned(), dash(node.frontends.join(" "))];
    if node.disks.is_empty() {
        let hint = if message.is_empty() {
            format!("no disk: shorthornctl disk add {} PATH", node.name)
        } else {
            message
        };
        let nothing = std::iter::repeat_n("-".to_owned(), 5);
        return vec![first.into_iter().chain(nothing).chain([hint]).collect()];
    }
    let row = |disk: &v1::NodeDisk| {
        let closed = match (disk.eviction_requested, disk.allow_scheduling) {
            (true, _) => "drained disk",
            (false, false) => "closed disk",
            (false, true) => "",
        };
        let said = [message.as_str(), closed, disk.problem.as_str()];
        let said: Vec<&str> = said.into_iter().filter(|text| !text.is_empty()).collect();
        let sizes = [disk.total_bytes, disk.available_bytes, disk.reserved_bytes, disk.scheduled_bytes];
        let sizes = sizes.map(|bytes| HumanBytes(bytes).to_string());
        let path = std::iter::once(disk.path.clone());
        first.iter().cloned().chain(path).chain(sizes).chain([said.join("; ")]).collect()
    };
    node.disks.iter().map(row).collect()
}

/// Returns whether a node can be used, and a message about it.
fn readiness(node: &v1::NodeObject) -> (&'static str, String) {
    let ready = node.conditions.iter().find(|condition| condition.r#type == "Ready");
    let word = ready.map_or("unknown", |ready| if ready.status { "yes" } else { "no" });
    let problem = ready.filter(|ready| !ready.status).and_then(|ready| nonempty(ready.message.clone()));
    let message = match problem {
        Some(problem) if node.deleting => format!("given up: {problem}"),
        None if node.deleting => "given up".to_owned(),
        Some(problem) => problem,
        None => closed_to_replicas(node).to_owned(),
    };
    (word, message)
}

/// Returns the reason why a node gets no new replicas, in a few words; empty if it gets some.
const fn closed_to_replicas(node: &v1::NodeObject) -> &'static str {
    match (node.allow_scheduling, node.eviction_requested) {
        (false, true) => "drained",
        (false, false) => "cordoned",
        (true, _) if node.machine_cordoned => "cordoned in Kubernetes",
        (true, _) => "",
    }
}

/// Formats names and values, a line each.
pub(super) fn facts(facts: &[(&str, String)]) -> String {
    let mut table = table(&[]);
    for (name, value) in facts {
        table.add_row([*name, value.as_str()]);
    }
    table.to_string()
}

pub(super) fn dash(text: String) -> String {
    if text.is_empty() { "-".to_owned() } else { text }
}
