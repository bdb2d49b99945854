//! Events of the supervisor: signals, and statuses of its processes.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::thread;
use std::time::Duration;

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use shorthorn_control::{ControlClient, ProcessStatus};

use crate::run::RunError;

/// The number of events that wait to be handled; their senders wait while it is full.
pub const QUEUE: usize = 64;
/// Small: these threads only move a line of JSON.
const STACK_BYTES: usize = 128 << 10;
/// The first pause between attempts to reach a control socket that the process has not bound yet.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// An input of the main loop: a signal, the end of a child, or the status of a process.
#[derive(Debug)]
pub enum SupervisorEvent {
    /// SIGTERM or SIGINT.
    Stop,
    /// SIGHUP: a new process is to take the place of the engine.
    Handover,
    /// A child ended.
    Child,
    /// The status of a process. The numbers are those it was given to [`watch`].
    Status(usize, u32, Box<ProcessStatus>),
}

/// Blocks SIGTERM, SIGINT, SIGHUP and SIGCHLD, which can then only be read from the result.
pub fn block_signals() -> Result<SignalFd, RunError> {
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGCHLD] {
        signals.add(signal);
    }
    signals.thread_block().map_err(RunError::doing("cannot block signals"))?;
    SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC).map_err(RunError::doing("cannot receive signals"))
}

/// Turns signals into events, on a thread of its own.
pub fn forward_signals(signals: SignalFd, events: SyncSender<SupervisorEvent>) -> Result<(), RunError> {
    let forward = move || {
        while let Ok(Some(signal)) = signals.read_signal() {
            let event = match i32::try_from(signal.ssi_signo).map(Signal::try_from) {
                Ok(Ok(Signal::SIGCHLD)) => SupervisorEvent::Child,
                Ok(Ok(Signal::SIGHUP)) => SupervisorEvent::Handover,
                _ => SupervisorEvent::Stop,
            };
            if events.send(event).is_err() {
                return;
            }
        }
    };
    spawn("signals", forward)
}

/// Turns the statuses of a process into events, on a thread of its own, until `ended` is set.
pub fn watch(
    control: PathBuf,
    (process, start): (usize, u32),
    ended: Arc<AtomicBool>,
    events: SyncSender<SupervisorEvent>,
) -> Result<(), RunError> {
    let watch = move || {
        let mut pause = FIRST_PAUSE;
        while !ended.load(Ordering::Acquire) {
            // The process may not be that far yet, or not be any more: both look the same from here.
            let statuses = ControlClient::connect(&control).and_then(ControlClient::watch);
            for status in statuses.into_iter().flatten().map_while(Result::ok) {
                pause = FIRST_PAUSE;
                if events.send(SupervisorEvent::Status(process, start, Box::new(status))).is_err() {
                    return;
                }
            }
            thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    };
    spawn("watch", watch)
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), RunError> {
    let builder = thread::Builder::new().name(name.into()).stack_size(STACK_BYTES);
    builder.spawn(body).map(|_| ()).map_err(RunError::doing("cannot start a thread"))
}
