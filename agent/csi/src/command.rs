//! Runs programs of the host: without a shell, with a time limit, and with a bound on the kept output.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use shorthorn_linux::process::ProcessFd;
use thiserror::Error;

/// The most that is kept of an output; the rest is read and dropped.
const OUTPUT_MAX_BYTES: usize = 8 << 10;
/// The most of it that an error message repeats.
const SHOWN_MAX_CHARS: usize = 600;

/// A program and its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tool {
    program: &'static str,
    arguments: Vec<OsString>,
    limit: Duration,
}

/// The result of a program that has ended by itself.
#[derive(Debug)]
pub(crate) struct Finished {
    /// Exit status; None: a signal.
    pub code: Option<i32>,
    /// Standard output.
    pub output: String,
    /// Standard error.
    pub errors: String,
    tool: Tool,
}

/// The reason why a program has failed.
#[derive(Debug, Error)]
pub(crate) enum CommandError {
    /// The program cannot be run.
    #[error("{program} cannot be run: {source}; install the package that contains it")]
    Missing { program: &'static str, source: io::Error },
    /// The system failed while it ran.
    #[error("{program}: {source}")]
    System { program: &'static str, source: io::Error },
    /// The program was killed after the time limit.
    #[error("{program} did not end within {limit:?} and was killed")]
    TooSlow { program: &'static str, limit: Duration },
    /// The program has reported a failure.
    #[error("{program} failed ({status}): {message}")]
    Failed { program: &'static str, status: String, message: String },
}

impl Tool {
    /// Runs `program`, which is searched on the PATH.
    pub(crate) fn new(program: &'static str, limit: Duration) -> Tool {
        Tool { program, arguments: Vec::new(), limit }
    }

    pub(crate) fn arg(mut self, argument: impl AsRef<OsStr>) -> Tool {
        self.arguments.push(argument.as_ref().to_owned());
        self
    }

    pub(crate) fn args<I: IntoIterator<Item: AsRef<OsStr>>>(mut self, arguments: I) -> Tool {
        self.arguments.extend(arguments.into_iter().map(|argument| argument.as_ref().to_owned()));
        self
    }

    #[cfg(test)]
    pub(crate) fn arguments(&self) -> &[OsString] {
        &self.arguments
    }

    /// Runs it; any exit status is an answer.
    ///
    /// After the time limit it is killed, and then waited for without a limit. A process that may still write
    /// to a device must not be forgotten. A caller that cannot wait so long has to run this on a thread of
    /// its own.
    pub(crate) fn run(self) -> Result<Finished, CommandError> {
        let (program, limit) = (self.program, self.limit);
        let mut child = Command::new(program)
            .args(&self.arguments)
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A group of its own, so that its children can be killed with it.
            .process_group(0)
            .spawn()
            .map_err(|source| CommandError::Missing { program, source })?;
        let followed = follow(&mut child, limit);
        if !matches!(followed, Ok(FollowedCommand { ended: true, .. })) {
            // It cannot have been reaped: its number is still its own.
            let group = i32::try_from(child.id()).ok().map(Pid::from_raw);
            let _ = group.map(|group| killpg(group, Signal::SIGKILL));
        }
        let status = child.wait();
        let followed = followed.map_err(|source| CommandError::System { program, source })?;
        if !followed.ended {
            return Err(CommandError::TooSlow { program, limit });
        }
        let status: ExitStatus = status.map_err(|source| CommandError::System { program, source })?;
        Ok(Finished {
            code: status.code(),
            output: followed.output.into_text(),
            errors: followed.errors.into_text(),
            tool: self,
        })
    }

    /// Runs it; any exit status but 0 is an error.
    pub(crate) fn succeed(self) -> Result<Finished, CommandError> {
        let finished = self.run()?;
        if finished.code == Some(0) { Ok(finished) } else { Err(finished.failed()) }
    }
}

impl Finished {
    /// Returns the failure as an error.
    pub(crate) fn failed(&self) -> CommandError {
        let status = self.code.map_or_else(|| "a signal".to_owned(), |code| format!("exit status {code}"));
        let said = format!("{} {}", self.errors.trim(), self.output.trim());
        let message = said.split_whitespace().collect::<Vec<_>>().join(" ");
        let message = message.chars().take(SHOWN_MAX_CHARS).collect();
        CommandError::Failed { program: self.tool.program, status, message }
    }
}

struct FollowedCommand {
    ended: bool,
    output: CapturedPipe,
    errors: CapturedPipe,
}

/// The beginning of an output.
struct CapturedPipe {
    pipe: Option<Box<dyn Pipe>>,
    bytes: Vec<u8>,
}

trait Pipe: Read + AsFd {}
impl<T: Read + AsFd> Pipe for T {}

impl CapturedPipe {
    fn new(pipe: Option<impl Pipe + 'static>) -> io::Result<CapturedPipe> {
        if let Some(pipe) = &pipe {
            fcntl(pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        }
        Ok(CapturedPipe { pipe: pipe.map(|pipe| Box::new(pipe) as Box<dyn Pipe>), bytes: Vec::new() })
    }

    /// Reads the available output.
    fn drain(&mut self) -> io::Result<()> {
        let mut chunk = [0; 4096];
        while let Some(pipe) = &mut self.pipe {
            match pipe.read(&mut chunk) {
                Ok(0) => self.pipe = None,
                Ok(got) => {
                    let room = OUTPUT_MAX_BYTES - self.bytes.len();
                    self.bytes.extend_from_slice(&chunk[..got.min(room)]);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn into_text(self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

/// Reads the output of a child until it ends, or until the limit. Does not wait for processes that it has
/// left running.
fn follow(child: &mut Child, limit: Duration) -> io::Result<FollowedCommand> {
    let process = ProcessFd::of_child(child)?;
    let deadline = Instant::now() + limit;
    let mut output = CapturedPipe::new(child.stdout.take())?;
    let mut errors = CapturedPipe::new(child.stderr.take())?;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut fds = vec![PollFd::new(process.as_fd(), PollFlags::POLLIN)];
        for pipe in [&output.pipe, &errors.pipe].into_iter().flatten() {
            fds.push(PollFd::new(pipe.as_fd(), PollFlags::POLLIN));
        }
        match poll(&mut fds, PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)) {
            Err(Errno::EINTR) => continue,
            other => other?,
        };
        let ended = fds[0].any() != Some(false);
        drop(fds);
        output.drain()?;
        errors.drain()?;
        if ended || left.is_zero() {
            return Ok(FollowedCommand { ended, output, errors });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn keeps_both_outputs_and_the_status() {
        let finished = Tool::new("sh", LONG).args(["-c", "echo out; echo err >&2; exit 3"]).run().unwrap();
        assert_eq!(
            (finished.code, finished.output.as_str(), finished.errors.as_str()),
            (Some(3), "out\n", "err\n")
        );
        let error =
            Tool::new("sh", LONG).args(["-c", "echo why >&2; exit 4"]).succeed().unwrap_err().to_string();
        assert_eq!(error, "sh failed (exit status 4): why");
        assert!(matches!(Tool::new("no-such-program", LONG).run(), Err(CommandError::Missing { .. })));
    }

    #[test]
    fn a_long_output_is_read_to_its_end_and_kept_in_part() {
        let finished = Tool::new("head", LONG).args(["-c", "1000000", "/dev/zero"]).run().unwrap();
        assert_eq!((finished.code, finished.output.len()), (Some(0), OUTPUT_MAX_BYTES));
    }

    #[test]
    fn a_timeout_kills_the_command_and_its_children() {
        let dir = tempfile::tempdir().unwrap();
        let pid = dir.path().join("pid");
        let script = format!("sleep 1000 & echo $! > {}; wait", pid.display());
        let begun = Instant::now();
        let error = Tool::new("sh", Duration::from_millis(500)).args(["-c", &script]).run().unwrap_err();
        assert!(matches!(error, CommandError::TooSlow { .. }), "{error}");
        assert!(begun.elapsed() < LONG);
        let pid: i32 = std::fs::read_to_string(pid).unwrap().trim().parse().unwrap();
        // A signal is delivered when the process next runs. Whether its parent has reaped it is not ours.
        let is_dead = || {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.is_empty() || stat.contains(") Z") || stat.contains(") X")
        };
        while !is_dead() {
            assert!(begun.elapsed() < LONG, "process {pid} lives on");
            std::thread::yield_now();
        }
    }

    #[test]
    fn processes_left_running_are_not_waited_for() {
        let begun = Instant::now();
        let finished = Tool::new("sh", LONG).args(["-c", "sleep 5 & exit 0"]).run().unwrap();
        assert_eq!(finished.code, Some(0));
        assert!(begun.elapsed() < Duration::from_secs(4));
    }
}
