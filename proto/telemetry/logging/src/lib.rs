//! Logs: to standard error, as text for people or as JSON for programs.
#![forbid(unsafe_code)]

use std::fmt;
use std::io::{self, IsTerminal, Write};

use clap::ValueEnum;
use serde::Deserialize;
use tracing_subscriber::EnvFilter;

/// How a line of the log looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Lines for people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

impl fmt::Display for LogFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        })
    }
}

/// Checks what is given as a log level: `info`, or directives such as `info,shorthorn_engine=debug`. The filter itself
/// takes a word that it does not know for the name of a module, and then logs nothing else.
///
/// # Errors
/// Says what is wrong with it.
pub fn check_level(level: &str) -> Result<(), String> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    for directive in level.split(',') {
        let word = directive.rsplit_once('=').map_or(directive, |(_, level)| level);
        if !LEVELS.contains(&word) {
            return Err(format!("{word:?} is no log level: use {}", LEVELS.join(", ")));
        }
    }
    EnvFilter::builder().parse(level).map(|_| ()).map_err(|error| format!("{level:?}: {error}"))
}

/// Sends the logs of this process to standard error. `quiet` are directives for what says nothing that its callers do not
/// say better; the level may name them again.
pub fn start(level: &str, format: LogFormat, quiet: &[&str]) {
    let directives: Vec<&str> = quiet.iter().copied().chain([level]).collect();
    let filter = EnvFilter::builder().parse_lossy(directives.join(","));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| Unfailing)
        .with_ansi(io::stderr().is_terminal());
    // The journal has its own time stamps.
    let in_journal = std::env::var_os("JOURNAL_STREAM").is_some();
    match (format, in_journal) {
        (LogFormat::Json, _) => builder.json().init(),
        (LogFormat::Text, true) => builder.without_time().init(),
        (LogFormat::Text, false) => builder.init(),
    }
}

/// Standard error, except that writing never fails. Whoever reads our logs may end before us, and an
/// engine must not stop because nobody listens any more.
struct Unfailing;

impl Write for Unfailing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = io::stderr().write_all(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knows_levels() {
        assert!(check_level("info").is_ok());
        assert!(check_level("warn,shorthorn_engine=debug").is_ok());
        for wrong in ["", "inof", "info,", "shorthorn_engine=loud", "loud=,"] {
            assert!(check_level(wrong).is_err(), "{wrong}");
        }
    }
}
