//! The command check: examines whether this host can serve volumes.
//!
//! `collect` reads the facts, `rules` judges them. The rules are pure.

mod bounded;
mod collect;
mod facts;
mod finding;
mod lvm;
mod rules;

use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use bounded::Bounded;
pub use finding::{HostFinding, Level};

use crate::cli::{CheckArgs, OutputFormat};
use crate::serve::config::Config;

/// The exit code if a check has failed.
pub const FAILED: u8 = 2;
/// The exit code if the worst finding is a warning.
pub const WARNED: u8 = 1;

/// The time limit for a check. Many other nodes that do not answer take a minute.
const LIMIT: Duration = Duration::from_secs(180);

/// The checks whose findings the agent shows to the controller. The agent shows the others in other ways, or
/// they need more than reading.
const SHOWN: [&str; 8] =
    ["kernel", "partitions", "multipath", "udev", "kubelet", "ports", "time", "instances"];

/// Checks this host, and writes the findings. Returns the exit code.
///
/// # Errors
/// The output cannot be written.
pub fn check(args: &CheckArgs) -> anyhow::Result<(String, u8)> {
    let findings = findings(args.config.as_deref());
    let text = match args.output {
        OutputFormat::Text => text(&findings),
        OutputFormat::Json => serde_json::to_string_pretty(&findings)?,
    };
    Ok((text, exit_code(&findings)))
}

/// Returns the findings about this host with the configuration in `file`, or in the usual place.
pub fn findings(file: Option<&Path>) -> Vec<HostFinding> {
    match Config::load(file) {
        Ok(config) => {
            // Anything may be on a file system that does not answer.
            let collected = Bounded::start(move || collect::collect(&config));
            let collected = collected.and_then(|collecting| collecting.wait_until(Instant::now() + LIMIT));
            match collected.map_err(anyhow::Error::from).flatten() {
                Ok(facts) => rules::examine(&facts),
                Err(error) => vec![rules::of_host(&format!("{error:#}"))],
            }
        }
        Err(error) => vec![rules::of_configuration(&error.to_string())],
    }
}

/// Returns the findings that are not well, as warnings of the node. Only the agent that runs calls this, and
/// shows them to the controller.
pub fn warnings(config: &Config) -> Vec<String> {
    let facts = match collect::collect_quietly(config, true) {
        Ok(facts) => facts,
        Err(error) => return vec![format!("this host cannot be checked: {error:#}")],
    };
    let is_shown = |finding: &HostFinding| finding.level != Level::Passed && SHOWN.contains(&finding.check);
    let findings = rules::examine(&facts).into_iter().filter(is_shown);
    let one_line = |finding: HostFinding| {
        format!("{}: {}; {}", finding.check, finding.message, finding.remedy.replace('\n', " or "))
    };
    findings.map(one_line).collect()
}

pub fn exit_code(findings: &[HostFinding]) -> u8 {
    match findings.iter().map(|finding| finding.level).max() {
        Some(Level::Failed) => FAILED,
        Some(Level::Warned) => WARNED,
        Some(Level::Passed) | None => 0,
    }
}

/// Returns the findings for people.
pub fn text(findings: &[HostFinding]) -> String {
    let mut text = String::new();
    for finding in findings {
        let _ = writeln!(text, "{:<7} {:<12} {}", finding.level.as_str(), finding.check, finding.message);
        for line in finding.remedy.lines() {
            let _ = writeln!(text, "{:<20} {line}", "");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(level: Level, remedy: &str) -> HostFinding {
        let message = "the clock is not synchronised".to_owned();
        HostFinding { check: "time", level, message, remedy: remedy.to_owned() }
    }

    #[test]
    fn the_worst_finding_is_the_exit_code() {
        use Level::{Failed, Passed, Warned};
        for (levels, code) in [
            (vec![], 0),
            (vec![Passed, Passed], 0),
            (vec![Passed, Warned, Passed], 1),
            (vec![Warned, Failed, Passed], 2),
        ] {
            let findings: Vec<HostFinding> = levels.iter().map(|level| finding(*level, "")).collect();
            assert_eq!(exit_code(&findings), code, "{levels:?}");
        }
    }

    #[test]
    fn a_finding_is_shown_with_its_remedy() {
        let shown = text(&[finding(Level::Warned, "timedatectl set-ntp true")]);
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines[0], "warned  time         the clock is not synchronised");
        assert_eq!(lines[1].trim(), "timedatectl set-ntp true");
        let shown = text(&[finding(Level::Warned, "apt install a\ndnf install b")]);
        let lines: Vec<&str> = shown.lines().map(str::trim).collect();
        assert_eq!(lines[1..], ["apt install a", "dnf install b"]);
        let json = serde_json::to_value(finding(Level::Failed, "x")).unwrap();
        assert_eq!((&json["level"], &json["check"]), (&"failed".into(), &"time".into()));
    }
}
