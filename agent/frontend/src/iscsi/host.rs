//! The programs of the host that this frontend needs, run with limits.
//!
//! In a container they run in the mount and network namespaces of the host, by nsenter(1). The host is where
//! process 1 is, so the container must share the host's process ids.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::commands::Call;
use super::tools;
use crate::{FrontendError, wait};

/// The program that runs others in the namespaces of the host, and its options.
const ENTER: [&str; 6] = ["nsenter", "--target", "1", "--mount", "--net", "--"];
/// The program that puts a process out of the control group of the engine, which ends with the engine.
const SCOPE: &str = "systemd-run";
/// The program that talks to iscsid.
const INITIATOR: &str = "iscsiadm";
/// The directories that programs of the host are in.
const PROGRAM_DIRECTORIES: [&str; 4] = ["usr/sbin", "usr/bin", "sbin", "bin"];
/// The time limit for systemd to tell the state of the host.
const STATE_LIMIT: Duration = Duration::from_secs(10);
/// The longest part of an error text of a program that is repeated.
const TEXT_BYTES_MAX: usize = 500;

/// The host of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Host {
    is_container: bool,
}

impl Host {
    /// Compares the namespace of this process with that of process 1. Where neither can be read, it is the
    /// same.
    pub(crate) fn here() -> Host {
        let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/mnt"));
        let is_container = match (namespace("1"), namespace("self")) {
            (Ok(first), Ok(own)) => first != own,
            _ => false,
        };
        Host { is_container }
    }

    /// Returns the path of the host's root directory.
    fn root(&self) -> &'static Path {
        Path::new(if self.is_container { "/proc/1/root" } else { "/" })
    }

    /// Returns the path of a program of the host, seen from this process.
    pub(crate) fn find(&self, program: &str) -> Option<PathBuf> {
        PROGRAM_DIRECTORIES.iter().map(|dir| self.root().join(dir).join(program)).find(|path| path.exists())
    }

    /// Returns the command that runs `program` on the host.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = match self.is_container {
            false => Command::new(program),
            true => {
                let mut command = Command::new(ENTER[0]);
                command.args(&ENTER[1..]).arg(program);
                command
            }
        };
        // Messages to the service manager are of the engine only.
        command.env_remove("NOTIFY_SOCKET");
        command
    }

    /// Returns the command for a program that outlives this process. A unit of systemd ends with all of its
    /// processes, and a container too, so the program becomes a scope of its own if the host has systemd.
    pub(super) fn daemon(&self, description: &str, program: &str) -> Command {
        let has_systemd = self.root().join("run/systemd/system").exists() && self.find(SCOPE).is_some();
        if !has_systemd {
            return self.command(program);
        }
        let mut command = self.command(SCOPE);
        command.args(["--quiet", "--scope", "--collect", "--slice=shorthorn.slice"]);
        // A shutdown ends it after all file systems, as the engine removes it with its device before.
        command.args(["--property=DefaultDependencies=no", "--description", description, "--", program]);
        command
    }

    /// Returns true if systemd is about to halt or restart the host.
    pub(super) fn goes_down(&self) -> bool {
        let mut command = self.command("systemctl");
        command.arg("is-system-running").stdin(Stdio::null()).stderr(Stdio::null());
        let state = wait::within(STATE_LIMIT, move || command.output());
        state.is_ok_and(|state| is_stopping(&state.stdout))
    }

    /// Runs `call` and waits for its end, at most `limit`.
    ///
    /// # Errors
    /// It cannot run, does not end in time, or reports an error; the text has its own message.
    pub(super) fn run(
        &self,
        call: &Call,
        environment: &[(&str, &Path)],
        limit: Duration,
    ) -> Result<(), FrontendError> {
        let hint = || if call.program == INITIATOR { tools::hint(tools::iscsid()) } else { "" };
        let failed = |source: io::Error| {
            let source = io::Error::new(source.kind(), format!("{source}{}", hint()));
            FrontendError::System { action: format!("run {call}"), source }
        };
        let mut command = self.command(call.program);
        command.args(&call.arguments).envs(environment.iter().copied());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| failed(not_found(call.program, error)))?;
        let ended = wait::until(limit, || child.try_wait()).map_err(failed)?;
        let Some(status) = ended else {
            // It is reaped by the next process if it cannot be killed.
            let _ = child.kill();
            return Err(failed(wait::timed_out(limit)));
        };
        if status.code().is_some_and(|status| call.is_success(status)) {
            return Ok(());
        }
        Err(failed(io::Error::other(format!("{status}: {}", said(&mut child)))))
    }
}

/// Returns true if this answer of `systemctl is-system-running` means that the host goes down.
fn is_stopping(answer: &[u8]) -> bool {
    answer.trim_ascii() == b"stopping"
}

/// Returns the message of a program that has ended: what fits into a pipe, shortened.
fn said(child: &mut Child) -> String {
    let mut bytes = Vec::new();
    // Whatever can be read is better than nothing.
    let _ = child.stderr.take().map(|stderr| stderr.take(TEXT_BYTES_MAX as u64).read_to_end(&mut bytes));
    if bytes.is_empty() {
        let _ = child.stdout.take().map(|stdout| stdout.take(TEXT_BYTES_MAX as u64).read_to_end(&mut bytes));
    }
    String::from_utf8_lossy(&bytes).trim().replace('\n', "; ")
}

fn not_found(program: &str, error: io::Error) -> io::Error {
    if error.kind() != io::ErrorKind::NotFound {
        return error;
    }
    io::Error::new(error.kind(), format!("no program {program} (packages tgt, open-iscsi, util-linux)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(command: &Command) -> Vec<String> {
        let program = command.get_program().to_string_lossy().into_owned();
        [program]
            .into_iter()
            .chain(command.get_args().map(|word| word.to_string_lossy().into_owned()))
            .collect()
    }

    #[test]
    fn a_host_that_goes_down_is_known() {
        assert!(is_stopping(b"stopping\n"));
        for answer in [&b"running\n"[..], b"degraded\n", b"starting\n", b"offline\n", b""] {
            assert!(!is_stopping(answer));
        }
    }

    #[test]
    fn programs_run_on_the_host_from_a_container_too() {
        assert_eq!(words(&Host { is_container: false }.command("tgtadm")), ["tgtadm"]);
        let entered = ["nsenter", "--target", "1", "--mount", "--net", "--", "tgtadm"];
        assert_eq!(words(&Host { is_container: true }.command("tgtadm")), entered);
        assert_eq!(Host { is_container: true }.root(), Path::new("/proc/1/root"));
        assert!(Host { is_container: false }.find("sh").is_some());
        assert!(Host { is_container: false }.find("no-such-program").is_none());
    }
}
