//! The findings of checks.

use serde::Serialize;

/// The result of one check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// All is well.
    Passed,
    /// The host works now, but may fail after an event, or is slower than it could be.
    Warned,
    /// A part of the host does not work.
    Failed,
}

impl Level {
    pub const fn as_str(self) -> &'static str {
        match self {
            Level::Passed => "passed",
            Level::Warned => "warned",
            Level::Failed => "failed",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HostFinding {
    /// The name of the check, for programs.
    pub check: &'static str,
    pub level: Level,
    /// The finding, in a sentence.
    pub message: String,
    /// The command that fixes the problem, or several to choose from, one a line; empty without a problem.
    pub remedy: String,
}

pub fn passed(check: &'static str, message: String) -> HostFinding {
    HostFinding { check, level: Level::Passed, message, remedy: String::new() }
}

pub fn warned(check: &'static str, message: String, remedy: String) -> HostFinding {
    HostFinding { check, level: Level::Warned, message, remedy }
}

pub fn failed(check: &'static str, message: String, remedy: String) -> HostFinding {
    HostFinding { check, level: Level::Failed, message, remedy }
}
