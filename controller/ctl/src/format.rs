//! The format of results, and the form of durations on the command line.

use std::time::Duration;

use clap::ValueEnum;

/// Format of results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    Table,
    /// For people with wide screens.
    Wide,
    /// Kind and name, a line each.
    Name,
    /// For programs.
    Json,
    /// For programs.
    Yaml,
}

impl Format {
    /// Returns true if people read the output. If it has no names to show, `name` is like a table.
    pub(super) fn is_for_people(self) -> bool {
        !matches!(self, Format::Json | Format::Yaml)
    }
}

/// Parses a number of seconds, with or without its unit.
pub(super) fn seconds(text: &str) -> Result<Duration, String> {
    let text = text.strip_suffix('s').unwrap_or(text);
    let number: f64 = text.parse().map_err(|_| "a number of seconds, like 90".to_owned())?;
    Duration::try_from_secs_f64(number).map_err(|error| error.to_string())
}
