//! The command doctor: checks the setup of a cluster.

use std::fmt::Write as _;

use serde::Serialize;
use shorthorn_api::v1;
use shorthorn_types::status::CheckOutcome::{self, Failed, Passed, Warned};

use super::error::CtlError;
use super::format::Format;
use super::output::for_programs;
use super::status::VERSION;

#[derive(Clone, Debug, Serialize)]
pub(super) struct CheckOutput {
    name: String,
    title: String,
    outcome: String,
    findings: Vec<FindingOutput>,
}

#[derive(Clone, Debug, Serialize)]
struct FindingOutput {
    outcome: String,
    message: String,
    fix: String,
}

impl From<v1::Check> for CheckOutput {
    fn from(check: v1::Check) -> CheckOutput {
        let outcome = check.shown_outcome().to_owned();
        let findings = check.findings.into_iter().map(|finding| FindingOutput {
            outcome: finding.shown_outcome().to_owned(),
            message: finding.message,
            fix: finding.fix,
        });
        CheckOutput { name: check.name, title: check.title, outcome, findings: findings.collect() }
    }
}

impl CheckOutput {
    /// Makes a check of this program from its finding, if any: severity, message, and remedy.
    pub(super) fn new(name: &str, title: &str, found: Option<(CheckOutcome, String, String)>) -> CheckOutput {
        let outcome = found.as_ref().map_or(Passed, |(outcome, ..)| *outcome).as_str().to_owned();
        let findings = found.into_iter().map(|(outcome, message, fix)| {
            let outcome = outcome.as_str().to_owned();
            FindingOutput { outcome, message, fix }
        });
        CheckOutput { name: name.to_owned(), title: title.to_owned(), outcome, findings: findings.collect() }
    }

    fn has_failed(&self) -> bool {
        self.outcome == Failed.as_str()
    }
}

/// Checks that the controller has the version of this program.
pub(super) fn version_check(controller: &str) -> CheckOutput {
    let found = (controller != VERSION).then(|| {
        let message = format!("shorthornctl is version {VERSION}, the controller {controller}");
        (Warned, message, "use the shorthornctl of the controller's version".to_owned())
    });
    CheckOutput::new("ctl-version", "shorthornctl is of the controller's version", found)
}

/// Returns the check that the controller did not answer, for that reason.
pub(super) fn unreachable(reason: String) -> CheckOutput {
    let fix = "see the checks above, and the log of the controller".to_owned();
    CheckOutput::new("controller", "the controller answers", Some((Failed, reason, fix)))
}

/// Returns the number of failed checks.
pub(super) fn failures(checks: &[CheckOutput]) -> usize {
    checks.iter().filter(|check| check.has_failed()).count()
}

/// Returns the checks as text.
pub(super) fn text(format: Format, checks: &[CheckOutput]) -> Result<String, CtlError> {
    if !format.is_for_people() {
        return for_programs(format, &checks);
    }
    let mut text = String::new();
    for check in checks {
        let _ = writeln!(text, "{:<7} {}", check.outcome, check.title);
        for finding in &check.findings {
            let _ = writeln!(text, "        - {}", finding.message);
            let _ = writeln!(text, "          {}", finding.fix);
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_shown_with_its_remedy() {
        let failed = Some((Failed, "no lease".to_owned(), "start it".to_owned()));
        let checks = [CheckOutput::new("lease", "a controller leads", failed), version_check(VERSION)];
        assert_eq!((failures(&checks), checks[1].outcome.as_str()), (1, "passed"));
        let text = super::text(Format::Table, &checks).unwrap();
        assert!(
            text.contains("failed  a controller leads\n        - no lease\n          start it"),
            "{text}"
        );
        let json: serde_json::Value =
            serde_json::from_str(&super::text(Format::Json, &checks).unwrap()).unwrap();
        assert_eq!(
            (&json[0]["outcome"], &json[0]["findings"][0]["fix"]),
            (&"failed".into(), &"start it".into())
        );
        assert_eq!(failures(&[version_check("0.0.1")]), 0, "another version only warns");
    }
}
