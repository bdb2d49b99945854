//! The programs of the host that this frontend needs, run with limits.

use std::io::{self, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::commands::Call;
use super::tools;
use crate::host::Host;
use crate::{FrontendError, wait};

/// The program that puts a process out of the control group of the engine, which ends with the engine.
const SCOPE: &str = "systemd-run";
/// The program that talks to iscsid.
const INITIATOR: &str = "iscsiadm";
/// The time limit for systemd to report the state of the host. It answers at once, unless the host is
/// starting or stopping.
const STATE_LIMIT: Duration = Duration::from_secs(10);
/// The longest part of an error text of a program that is repeated.
const TEXT_BYTES_MAX: usize = 500;

impl Host {
    /// Returns the command for a program that outlives this process. All processes of a unit of systemd end
    /// with it, and those of a container too. So the program becomes a scope of its own if the host has
    /// systemd.
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
    pub(super) fn is_shutting_down(&self) -> bool {
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

/// Returns true if this answer of `systemctl is-system-running` means that the host shuts down.
fn is_stopping(answer: &[u8]) -> bool {
    answer.trim_ascii() == b"stopping"
}

/// Returns the message of a program that has ended: the part that fits into a pipe, shortened.
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

    #[test]
    fn a_stopping_host_is_recognised() {
        assert!(is_stopping(b"stopping\n"));
        for answer in [&b"running\n"[..], b"degraded\n", b"starting\n", b"offline\n", b""] {
            assert!(!is_stopping(answer));
        }
    }
}
