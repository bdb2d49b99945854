//! Logs: to standard error, as text for people or as JSON for programs.
#![forbid(unsafe_code)]

use std::fmt;
use std::io::{self, IsTerminal, Write};

use clap::ValueEnum;
use serde::Deserialize;
use tracing_subscriber::EnvFilter;

/// Formats of log lines on standard error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Text for people.
    #[default]
    Text,
    /// A JSON object per line.
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

/// Checks a log level: `info`, or directives such as `info,shorthorn_engine=debug`. The filter itself takes
/// an unknown word for the name of a module, and then logs nothing else.
///
/// # Errors
/// The problem of the level.
pub fn check_level(level: &str) -> Result<(), String> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    for directive in level.split(',') {
        let word = directive.rsplit_once('=').map_or(directive, |(_, level)| level);
        if !LEVELS.contains(&word) {
            return Err(format!("{word:?} is not a log level: use {}", LEVELS.join(", ")));
        }
    }
    EnvFilter::builder().parse(level).map(|_| ()).map_err(|error| format!("{level:?}: {error}"))
}

/// Sends the logs of this process to standard error. The directives `quiet` come before those of `level`,
/// which may override them. From now on a panic of any thread ends the process.
pub fn start(level: &str, format: LogFormat, quiet: &[&str]) {
    abort_on_panic();
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

/// Aborts the process at a panic: a daemon that lost a thread looks alive and does not work. Its supervisor
/// starts an aborted one again. The release profile aborts by itself; programs under test are built like
/// tests, which cannot.
fn abort_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
}

/// Standard error, except that writing never fails. The reader of the logs may end before an
/// engine, which must not stop because of that.
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

    const PANICS: &str = "SHORTHORN_LOGGING_TEST_PANICS";

    #[test]
    fn a_panic_of_any_thread_ends_the_process() {
        use std::os::unix::process::ExitStatusExt;
        if std::env::var_os(PANICS).is_some() {
            start("info", LogFormat::Text, &[]);
            let ended = std::thread::spawn(|| panic!("of a thread")).join();
            panic!("the process continues with {ended:?}");
        }
        let this = std::env::current_exe().unwrap();
        let test = "tests::a_panic_of_any_thread_ends_the_process";
        let output =
            std::process::Command::new(this).args(["--exact", test]).env(PANICS, "1").output().unwrap();
        assert_eq!(output.status.signal(), Some(6), "{output:?}");
    }

    #[test]
    fn knows_levels() {
        assert!(check_level("info").is_ok());
        assert!(check_level("warn,shorthorn_engine=debug").is_ok());
        for wrong in ["", "inof", "info,", "shorthorn_engine=loud", "loud=,"] {
            assert!(check_level(wrong).is_err(), "{wrong}");
        }
    }
}
