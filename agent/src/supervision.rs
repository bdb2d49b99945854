//! The common parts of both supervisors of engines and replicas: `run`, and `serve` without systemd.
//!
//! [`Lifecycle`] decides for both when a process is started, stopped and killed. Its callers stay separate.
//! `run` starts its children on its main thread, because they may ask for a signal at the end of their
//! parent. They end with it. The processes of `serve` outlive it, and the next one finds them.

mod lifecycle;
mod start_limit;

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

pub use lifecycle::{EndLimits, Lifecycle, LifecycleAction, LifecycleEvent};
pub use start_limit::AFTER_START_LIMIT;

/// The wait before the start after the first failure.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// The run time after which the start of a process is no longer a likely cause of its end.
const STABLE_AFTER: Duration = Duration::from_secs(10);

/// The wait between two starts of a process, which doubles with each failure in a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct RestartBackoff {
    failures: u32,
}

impl RestartBackoff {
    /// Counts an end of the process after it ran for `uptime`, and returns the wait before the next start.
    ///
    /// A clean end is not a failure, unless it follows the start immediately: an engine that hands its device
    /// over ends like that. Requests of the device wait for the next engine, which is started at once. With
    /// systemd it starts after `RestartSec=`. [`start_limit`] bounds the number of such starts.
    fn ended(&mut self, cleanly: bool, uptime: Duration) -> Duration {
        if cleanly && uptime >= FIRST_WAIT {
            self.failures = 0;
            return Duration::ZERO;
        }
        self.failures = if uptime >= STABLE_AFTER { 1 } else { self.failures.saturating_add(1) };
        FIRST_WAIT.saturating_mul(1 << (self.failures - 1).min(10)).min(LONGEST_WAIT)
    }

    /// Returns the number of failures in a row.
    fn failures(self) -> u32 {
        self.failures
    }
}

/// The program and the files of a process.
#[derive(Clone, Copy, Debug)]
pub struct Invocation<'a> {
    /// The path of the agent's program.
    pub program: &'a Path,
    /// True for an engine, false for a replica.
    pub is_engine: bool,
    /// The file with its parameters.
    pub spec: &'a Path,
    /// The file that it holds while it runs.
    pub pid_file: &'a Path,
    /// The file for its last error.
    pub error_file: &'a Path,
}

impl Invocation<'_> {
    /// Returns the command in a process group of its own: signals of a terminal are for the supervisor.
    #[must_use]
    pub fn command(self) -> Command {
        let mut command = Command::new(self.program);
        command.arg0("shorthorn-agent");
        match self.is_engine {
            true => command.arg("engine"),
            false => command.args(["replica", "serve"]),
        };
        command.arg("--spec").arg(self.spec);
        command.arg("--pid-file").arg(self.pid_file);
        command.arg("--error-file").arg(self.error_file);
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null());
        for variable in ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"] {
            command.env_remove(variable);
        }
        command
    }
}

/// Returns the error message that a process has left in its file; none if the file is missing or blank.
pub fn read_last_words(error_file: &Path) -> Option<String> {
    let words = fs::read_to_string(error_file).ok()?;
    Some(words.trim().to_owned()).filter(|words| !words.is_empty())
}

/// Describes the end of a process for people: its last words, if any, and the way in which it ended.
pub fn describe_end(words: Option<&str>, ended: &str) -> String {
    words.map_or_else(|| ended.to_owned(), |words| format!("{words} ({ended})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_words_are_read_without_blanks_and_stand_before_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("error");
        assert_eq!(read_last_words(&file), None, "the file is missing");
        for blank in ["", " \n"] {
            fs::write(&file, blank).unwrap();
            assert_eq!(read_last_words(&file), None);
        }
        fs::write(&file, "cannot open the disk\n").unwrap();
        let words = read_last_words(&file);
        assert_eq!(words.as_deref(), Some("cannot open the disk"));
        assert_eq!(describe_end(words.as_deref(), "exit status: 1"), "cannot open the disk (exit status: 1)");
        assert_eq!(describe_end(None, "signal: 9 (SIGKILL)"), "signal: 9 (SIGKILL)");
    }

    #[test]
    fn the_wait_doubles_until_the_process_was_stable() {
        let mut backoff = RestartBackoff::default();
        let waits_ms: Vec<u128> = (0..8).map(|_| backoff.ended(false, Duration::ZERO).as_millis()).collect();
        assert_eq!(waits_ms, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        assert_eq!(backoff.ended(false, STABLE_AFTER), FIRST_WAIT);
    }

    #[test]
    fn a_clean_end_is_not_a_failure_unless_it_comes_at_once() {
        let mut backoff = RestartBackoff::default();
        assert_eq!(backoff.ended(true, Duration::ZERO), FIRST_WAIT);
        assert_eq!(backoff.ended(false, Duration::ZERO), 2 * FIRST_WAIT);
        assert_eq!(backoff.ended(true, FIRST_WAIT), Duration::ZERO);
        assert_eq!((backoff.failures(), backoff.ended(false, Duration::ZERO)), (0, FIRST_WAIT));
    }
}
