//! The whole cluster on one screen.

use std::fmt::Write as _;

use serde::Serialize;
use shorthorn_api::v1;
use shorthorn_types::HumanBytes;

use super::error::CtlError;
use super::format::Format;
use super::output::for_programs;

/// The version of this program.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct OverviewOutput {
    well: bool,
    version: String,
    ctl_version: &'static str,
    cluster: String,
    volumes: VolumesOutput,
    nodes: NodesOutput,
    space: SpaceOutput,
    wrong: Vec<MatterOutput>,
    wrong_more: u32,
    waiting: Vec<MatterOutput>,
    waiting_more: u32,
    versions: Vec<VersionOutput>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct VolumesOutput {
    all: u32,
    attached: u32,
    healthy: u32,
    degraded: u32,
    faulted: u32,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct NodesOutput {
    all: u32,
    ready: u32,
    closed: u32,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct SpaceOutput {
    storage_maximum: u64,
    storage_available: u64,
    #[serde(rename = "storageScheduled")]
    scheduled_bytes: u64,
}

#[derive(Debug, Serialize)]
struct MatterOutput {
    about: String,
    reason: String,
    message: String,
}

#[derive(Debug, Serialize)]
struct VersionOutput {
    program: String,
    version: String,
    count: u32,
    names: Vec<String>,
    differs: bool,
}

/// Returns true if the overview has no problem.
pub(super) fn is_well(overview: &v1::Overview) -> bool {
    overview.wrong.as_ref().is_none_or(|wrong| wrong.listed.is_empty())
}

/// Returns the overview as text.
pub(super) fn text(format: Format, overview: v1::Overview) -> Result<String, CtlError> {
    if !format.is_for_people() {
        return for_programs(format, &overview_output(overview));
    }
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "{name:<9} {value}");
    };
    line("Cluster", format!("{}, controller {}", overview.cluster, overview.version));
    line(
        "Volumes",
        format!(
            "{}: {} attached, {} healthy, {} degraded, {} faulted",
            overview.volumes, overview.attached, overview.healthy, overview.degraded, overview.faulted
        ),
    );
    line(
        "Nodes",
        format!(
            "{}: {} ready, {} closed to new replicas",
            overview.nodes, overview.ready_nodes, overview.closed_nodes
        ),
    );
    let sizes = [overview.available_bytes, overview.total_bytes, overview.scheduled_bytes].map(HumanBytes);
    line("Space", format!("{} free of {}, {} scheduled", sizes[0], sizes[1], sizes[2]));
    for (number, version) in overview.versions.iter().enumerate() {
        line(if number == 0 { "Versions" } else { "" }, version_line(version));
    }
    if overview.version != VERSION {
        line("", format!("shorthornctl {VERSION}, which differs from the controller"));
    }
    text.push_str(&list("Wrong", overview.wrong.unwrap_or_default(), "nothing"));
    text.push_str(&list("Waiting", overview.waiting.unwrap_or_default(), "nothing"));
    Ok(text)
}

fn version_line(found: &v1::ProgramVersion) -> String {
    let version = if found.version.is_empty() { "of a version not known" } else { &found.version };
    let differs = if found.differs { ", which differs from the controller" } else { "" };
    let rest = found.count as usize - found.names.len().min(found.count as usize);
    let rest = if rest > 0 && !found.names.is_empty() { format!(" and {rest} more") } else { String::new() };
    match (found.names.is_empty(), found.differs) {
        (false, true) => format!("{} {version} ({}{rest}){differs}", found.program, found.names.join(", ")),
        _ if found.count == 1 => format!("{} {version}{differs}", found.program),
        _ => format!("{} {}s {version}{differs}", found.count, found.program),
    }
}

fn list(title: &str, matters: v1::Matters, nothing: &str) -> String {
    if matters.listed.is_empty() {
        return format!("\n{title}: {nothing}\n");
    }
    let number = matters.listed.len() + matters.more as usize;
    let mut text = format!("\n{title}: {number}\n");
    for matter in &matters.listed {
        let _ = writeln!(text, "- {} ({}): {}", matter.about, matter.reason, matter.message);
    }
    if matters.more > 0 {
        let _ = writeln!(text, "- and {} more", matters.more);
    }
    text
}

fn overview_output(overview: v1::Overview) -> OverviewOutput {
    let well = is_well(&overview);
    let matters = |matters: Option<v1::Matters>| {
        let matters = matters.unwrap_or_default();
        let listed = matters.listed.into_iter().map(|matter| {
            let v1::Matter { about, reason, message } = matter;
            MatterOutput { about, reason, message }
        });
        (listed.collect(), matters.more)
    };
    let ((wrong, wrong_more), (waiting, waiting_more)) = (matters(overview.wrong), matters(overview.waiting));
    let version = |found: v1::ProgramVersion| {
        let v1::ProgramVersion { program, version, count, names, differs } = found;
        VersionOutput { program, version, count, names, differs }
    };
    OverviewOutput {
        well,
        version: overview.version,
        ctl_version: VERSION,
        cluster: overview.cluster,
        volumes: VolumesOutput {
            all: overview.volumes,
            attached: overview.attached,
            healthy: overview.healthy,
            degraded: overview.degraded,
            faulted: overview.faulted,
        },
        nodes: NodesOutput {
            all: overview.nodes,
            ready: overview.ready_nodes,
            closed: overview.closed_nodes,
        },
        space: SpaceOutput {
            storage_maximum: overview.total_bytes,
            storage_available: overview.available_bytes,
            scheduled_bytes: overview.scheduled_bytes,
        },
        wrong,
        wrong_more,
        waiting,
        waiting_more,
        versions: overview.versions.into_iter().map(version).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overview() -> v1::Overview {
        let version = |program: &str, version: &str, names: &[&str], count| v1::ProgramVersion {
            program: program.to_owned(),
            version: version.to_owned(),
            count,
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            differs: version != VERSION,
        };
        let versions =
            vec![version("agent", VERSION, &["a", "b"], 2), version("engine", "0.0.9", &["v", "w"], 7)];
        v1::Overview { version: VERSION.to_owned(), versions, ..v1::Overview::default() }
    }

    #[test]
    fn problems_are_shown_and_so_is_a_version_that_differs() {
        let text = super::text(Format::Table, overview()).unwrap();
        assert!(text.contains(&format!("2 agents {VERSION}\n")), "{text}");
        assert!(text.contains("engine 0.0.9 (v, w and 5 more), which differs"), "{text}");
        assert!(text.contains("Wrong: nothing") && is_well(&overview()), "{text}");
        let matter = v1::Matter {
            about: "volume v".to_owned(),
            reason: "NoQuorum".to_owned(),
            message: "it is frozen".to_owned(),
        };
        let ill = v1::Overview {
            wrong: Some(v1::Matters { listed: vec![matter], more: 3 }),
            version: "9.9.9".to_owned(),
            ..overview()
        };
        assert!(!is_well(&ill));
        let text = super::text(Format::Table, ill.clone()).unwrap();
        for words in ["Wrong: 4", "volume v (NoQuorum): it is frozen", "and 3 more", "shorthornctl"] {
            assert!(text.contains(words), "{words} in {text}");
        }
        let json: serde_json::Value = serde_json::from_str(&super::text(Format::Json, ill).unwrap()).unwrap();
        assert_eq!((&json["well"], &json["wrong"][0]["reason"]), (&false.into(), &"NoQuorum".into()));
    }
}
