//! A process of a volume: the engine or a replica.

use std::fmt;
use std::io;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::time::Instant;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use shorthorn_control::{
    ControlClient, ControlError, EnginePhase, ProcessCommand, ProcessStatus, ReplicaPhase,
};
use shorthorn_types::ReplicaId;

use crate::descriptor_store::DescriptorStore;
use crate::run::events::{self, SupervisorEvent};
use crate::run::runtime::ProcessFiles;
use crate::run::{RunError, STOP_LIMIT};
use crate::supervision::{
    EndLimits, Invocation, Lifecycle, LifecycleAction, LifecycleEvent, describe_end, read_last_words,
};

const LIMITS: EndLimits = EndLimits { orderly: None, stop: STOP_LIMIT };

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessRole {
    /// The engine of the volume.
    Engine,
    Replica(ReplicaId),
}

impl fmt::Display for ProcessRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ProcessRole::Engine => f.write_str("engine"),
            ProcessRole::Replica(id) => write!(f, "replica {id}"),
        }
    }
}

/// A process that is restarted when it ends.
#[derive(Debug)]
pub struct VolumeProcess {
    pub role: ProcessRole,
    /// Paths of its spec, its pid file and its sockets.
    pub files: ProcessFiles,
    /// The last status since the last start.
    pub status: Option<ProcessStatus>,
    /// The message of the last end.
    pub last_words: Option<String>,
    index: usize,
    with_parent: bool,
    events: SyncSender<SupervisorEvent>,
    lifecycle: Lifecycle,
    starts: u32,
    running: Option<RunningChild>,
    /// The store in which an engine leaves the sockets of its device for the next one.
    store: Option<DescriptorStore>,
}

#[derive(Debug)]
struct RunningChild {
    child: Child,
    ended: Arc<AtomicBool>,
}

impl VolumeProcess {
    /// Creates a process that is not started yet; `index` comes back in its `events`.
    pub fn new(
        role: ProcessRole,
        index: usize,
        files: ProcessFiles,
        with_parent: bool,
        events: SyncSender<SupervisorEvent>,
    ) -> VolumeProcess {
        VolumeProcess {
            role,
            files,
            status: None,
            last_words: None,
            index,
            with_parent,
            events,
            lifecycle: Lifecycle::new(LIMITS, role == ProcessRole::Engine),
            starts: 0,
            running: None,
            store: None,
        }
    }

    /// Starts the process for the first time.
    ///
    /// It must be called on the main thread, like [`act_if_due`](Self::act_if_due). A process that asks for
    /// the signal of its parent's end gets it when the starting thread ends.
    pub fn start(&mut self) -> Result<(), RunError> {
        self.handle(LifecycleEvent::Start)
    }

    /// Sends the process the command to stop for good, if it runs. An engine removes its device. The second
    /// call kills it.
    pub fn stop(&mut self) -> Result<(), RunError> {
        self.handle(LifecycleEvent::Stop)
    }

    /// Starts the process again, or ends it by stronger means, if that is due.
    ///
    /// # Errors
    /// [`RunError::Unclean`] if it outlives SIGKILL.
    pub fn act_if_due(&mut self) -> Result<(), RunError> {
        self.handle(LifecycleEvent::Tick)
    }

    /// Returns the time at which [`act_if_due`](Self::act_if_due) has something to do.
    pub fn deadline(&self) -> Option<Instant> {
        self.lifecycle.deadline()
    }

    /// Returns true before the first start.
    pub fn is_idle(&self) -> bool {
        self.lifecycle.is_idle()
    }

    /// Returns the number of failures in a row.
    pub fn failures(&self) -> u32 {
        self.lifecycle.failures()
    }

    fn handle(&mut self, event: LifecycleEvent) -> Result<(), RunError> {
        let mut next = Some(event);
        while let Some(event) = next {
            let action = self.lifecycle.handle(event, Instant::now());
            next = self.carry_out(action)?;
        }
        Ok(())
    }

    /// Carries out an action, and returns the event that it causes at once, if any.
    fn carry_out(&mut self, action: LifecycleAction) -> Result<Option<LifecycleEvent>, RunError> {
        match action {
            LifecycleAction::Wait | LifecycleAction::Pause(_) | LifecycleAction::Finish => {}
            LifecycleAction::Start | LifecycleAction::Replace => self.spawn()?,
            // Its start has failed.
            _ if self.running.is_none() => return Ok(Some(LifecycleEvent::Ended { cleanly: false })),
            LifecycleAction::Request(reason) => {
                let accepted = self.request_end(&reason.command());
                return Ok(Some(LifecycleEvent::Answered { accepted }));
            }
            LifecycleAction::Terminate => self.signal(Signal::SIGTERM)?,
            LifecycleAction::Kill => self.signal(Signal::SIGKILL)?,
            LifecycleAction::GiveUp => {
                let message = format!("process {} outlives SIGKILL", self.pid().unwrap_or_default());
                return Err(RunError::Unclean { role: self.role.to_string(), message });
            }
        }
        Ok(None)
    }

    fn spawn(&mut self) -> Result<(), RunError> {
        if self.role == ProcessRole::Engine && self.store.is_none() {
            let store = DescriptorStore::open(&self.files.notify);
            self.store = Some(store.map_err(RunError::at(&self.files.notify))?);
        }
        let child = self.command().spawn().map_err(RunError::doing("cannot start a process"))?;
        self.starts += 1;
        self.status = None;
        tracing::debug!(role = %self.role, pid = child.id(), "started");
        let ended = Arc::new(AtomicBool::new(false));
        let watched = Arc::clone(&ended);
        self.running = Some(RunningChild { child, ended });
        events::watch(self.files.control.clone(), (self.index, self.starts), watched, self.events.clone())
    }

    fn command(&self) -> Command {
        // The very program that runs, even if its file has been replaced since.
        let invocation = Invocation {
            program: Path::new("/proc/self/exe"),
            is_engine: self.role == ProcessRole::Engine,
            spec: &self.files.spec,
            pid_file: &self.files.pid,
            error_file: &self.files.error,
        };
        let mut command = invocation.command();
        if self.with_parent {
            command.arg("--parent").arg(std::process::id().to_string());
        }
        if let Some(store) = &self.store {
            store.pass_to(&mut command);
        }
        command
    }

    /// Returns the process id of the running process.
    pub fn pid(&self) -> Option<u32> {
        self.running.as_ref().map(|running| running.child.id())
    }

    /// Takes a status that came from start number `start`.
    pub fn take(&mut self, start: u32, status: ProcessStatus) {
        if start == self.starts && self.running.is_some() {
            self.status = Some(status);
        }
    }

    /// Returns true if it serves.
    pub fn serves(&self) -> bool {
        match &self.status {
            Some(ProcessStatus::Engine(engine)) => {
                engine.phase == EnginePhase::Serving && engine.endpoint.is_some()
            }
            Some(ProcessStatus::Replica(replica)) => replica.phase == ReplicaPhase::Serving,
            None => false,
        }
    }

    /// Returns the message in the status, unless it is empty.
    fn message(&self) -> Option<&str> {
        let message = match self.status.as_ref()? {
            ProcessStatus::Engine(engine) => &engine.message,
            ProcessStatus::Replica(replica) => &replica.message,
        };
        Some(message.as_str()).filter(|message| !message.is_empty())
    }

    /// Returns the reason why the process does not serve, for people.
    pub fn trouble(&self) -> String {
        match (self.message(), &self.last_words, self.pid()) {
            (Some(message), ..) => format!("the {} says: {message}", self.role),
            (None, Some(words), _) => format!("the {} ended: {words}", self.role),
            (None, None, Some(pid)) => format!("the {} (process {pid}) does not serve yet", self.role),
            (None, None, None) => format!("the {} is not started yet", self.role),
        }
    }

    /// Returns the exit status and a text for people, if the process has ended since the last call. Unless it
    /// was to stop, its next start is scheduled then.
    pub fn ended(&mut self) -> Result<Option<(ExitStatus, String)>, RunError> {
        let Some(running) = &mut self.running else { return Ok(None) };
        let status = running.child.try_wait().map_err(RunError::doing("cannot wait for a process"))?;
        let Some(status) = status else { return Ok(None) };
        running.ended.store(true, Ordering::Release);
        let reported = self.message().map(str::to_owned);
        self.running = None;
        self.status = None;
        let left = read_last_words(&self.files.error).or(reported);
        let words = describe_end(left.as_deref(), &status.to_string());
        self.last_words = Some(words.clone());
        self.handle(LifecycleEvent::Ended { cleanly: status.success() })?;
        Ok(Some((status, words)))
    }

    /// Asks it to do something, if it runs.
    pub fn request(&self, command: &ProcessCommand) -> Result<(), ControlError> {
        match self.running {
            Some(_) => ControlClient::connect(&self.files.control)?.request(command),
            None => Ok(()),
        }
    }

    /// Requests the process to end, and returns true if its control socket takes the request.
    fn request_end(&self, command: &ProcessCommand) -> bool {
        let sent = self.request(command);
        if let Err(error) = &sent {
            // It may just have begun, or be about to end.
            tracing::debug!(
                role = %self.role,
                %error,
                "the control socket does not accept a request to stop: sending a signal"
            );
        }
        sent.is_ok()
    }

    /// Sends it a signal, if it runs.
    fn signal(&self, signal: Signal) -> Result<(), RunError> {
        let Some(running) = &self.running else { return Ok(()) };
        // The process id cannot have been reused: only this process reaps it, and it has not.
        let pid = i32::try_from(running.child.id()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
        let pid = pid.map_err(RunError::doing("cannot signal a process"))?;
        kill(Pid::from_raw(pid), signal).map_err(RunError::doing("cannot signal a process"))
    }
}
