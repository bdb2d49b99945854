//! The real binary, started by a test and gone when the test is.
#![allow(dead_code, reason = "every test binary uses a part")]

pub mod api_server;
pub mod controller;
pub mod go_client;
pub mod kubelet;
pub mod node;
pub mod tls;

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use shorthorn_linux::process::ProcessFd;

/// The time limit of every wait, far above the usual durations: reaching it is a bug.
pub const LIMIT: Duration = Duration::from_secs(60);

pub fn agent() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shorthorn-agent"));
    command.env_remove("SHORTHORN_LOG").env_remove("NOTIFY_SOCKET");
    command
}

/// A process of the binary; killed when this is dropped.
pub struct AgentProcess {
    child: Child,
    lines: Receiver<String>,
    log: Receiver<String>,
}

impl AgentProcess {
    pub fn start(command: &mut Command) -> AgentProcess {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let lines = forward(child.stdout.take().expect("a pipe"));
        let log = forward_log(child.stderr.take().expect("a pipe"));
        AgentProcess { child, lines, log }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the next line of standard output.
    pub fn line(&self) -> String {
        match self.lines.recv_timeout(LIMIT) {
            Ok(line) => line,
            Err(error) => panic!("no line on standard output ({error}); log:\n{}", self.log_so_far()),
        }
    }

    /// Waits for a line of the log that contains `text`.
    pub fn wait_for_log(&self, text: &str) {
        loop {
            match self.log.recv_timeout(LIMIT) {
                Ok(line) if line.contains(text) => return,
                Ok(_) => {}
                Err(error) => panic!("no {text:?} in the log: {error}"),
            }
        }
    }

    pub fn log_so_far(&self) -> String {
        self.log.try_iter().collect::<Vec<_>>().join("\n")
    }

    pub fn signal(&self, signal: Signal) {
        signal_to(self.pid(), signal);
    }

    /// Waits for its end.
    pub fn ended(&mut self) -> ExitStatus {
        let pid = self.pid();
        assert!(wait_for_end(pid), "process {pid} does not end; log:\n{}", self.log_so_far());
        self.child.wait().expect("it is our child")
    }

    /// Waits for the end of the process, and returns its standard error.
    pub fn failed(&mut self) -> String {
        let status = self.ended();
        let log = self.log.iter().collect::<Vec<_>>().join("\n");
        assert!(!status.success(), "it should have failed; log:\n{log}");
        log
    }
}

impl Drop for AgentProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn forward(pipe: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        for line in BufReader::new(pipe).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Forwards like [`forward`], except that the pipe is drained to its end: children of an agent write to it as
/// well.
fn forward_log(pipe: ChildStderr) -> Receiver<String> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        for line in BufReader::new(pipe).lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    receiver
}

pub fn signal_to(pid: u32, signal: Signal) {
    kill(Pid::from_raw(i32::try_from(pid).unwrap()), signal).unwrap();
}

/// Returns true if a process ends within the limit. A missing process has ended.
fn ends_within(pid: u32, limit: Duration) -> bool {
    let process = ProcessFd::open(i32::try_from(pid).unwrap()).unwrap();
    process.is_none_or(|process| process.ends_within(Some(limit)).unwrap())
}

/// Returns true if a process ends within the limit. A missing process has ended.
pub fn wait_for_end(pid: u32) -> bool {
    ends_within(pid, LIMIT)
}

/// Returns true if a process lives.
pub fn lives(pid: u32) -> bool {
    !ends_within(pid, Duration::ZERO)
}

/// Returns the first status on the control socket at `path` that is as wanted. The socket may not be there
/// yet.
pub fn wait_for_status(
    path: &Path,
    wanted: impl Fn(&shorthorn_control::ProcessStatus) -> bool + Send + 'static,
) {
    let (done, waited) = channel();
    let path = path.to_owned();
    thread::spawn(move || {
        loop {
            let watch = shorthorn_control::ControlClient::connect(&path)
                .and_then(shorthorn_control::ControlClient::watch);
            if watch.into_iter().flatten().map_while(Result::ok).any(|status| wanted(&status)) {
                let _ = done.send(());
                return;
            }
            thread::yield_now();
        }
    });
    waited.recv_timeout(LIMIT).expect("the process did not print the wanted line");
}
