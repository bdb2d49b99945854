//! Processes that are started again when they end, as systemd does.

use std::collections::BTreeMap;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;

use crate::{signal, until};

/// RestartSec of the units.
const RESTART_PAUSE: Duration = Duration::from_millis(100);
/// Between two looks for processes that have ended, or that are to be started again.
const LOOK_PAUSE: Duration = Duration::from_millis(20);
const STOP_LIMIT: Duration = Duration::from_secs(60);

/// Processes, killed when dropped.
#[derive(Debug)]
pub(super) struct Supervisor {
    shared: Arc<Mutex<SupervisorState>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct SupervisorState {
    is_over: bool,
    processes: Vec<SupervisedProcess>,
    ends: BTreeMap<String, u32>,
}

#[derive(Debug)]
struct SupervisedProcess {
    name: String,
    command: Command,
    child: Option<Child>,
    /// True if it stays dead.
    is_held: bool,
    start_at: Instant,
}

impl Supervisor {
    /// Starts all of these, by name.
    pub fn start(commands: Vec<(String, Command)>) -> Supervisor {
        let process = |(name, command)| SupervisedProcess {
            name,
            command,
            child: None,
            is_held: false,
            start_at: Instant::now(),
        };
        let processes = commands.into_iter().map(process).collect();
        let shared = Arc::new(Mutex::new(SupervisorState { processes, ..SupervisorState::default() }));
        let watched = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            while !lock(&watched).run_once() {
                thread::sleep(LOOK_PAUSE);
            }
        });
        Supervisor { shared, thread: Some(thread) }
    }

    /// Kills the process with SIGKILL. It stays dead until [`Supervisor::release`].
    ///
    /// # Errors
    /// It does not run: it has ended by itself a moment ago.
    pub fn kill(&self, index: usize) -> Result<()> {
        let mut shared = lock(&self.shared);
        let process = &mut shared.processes[index];
        let mut child = process.child.take().with_context(|| format!("{} does not run", process.name))?;
        process.is_held = true;
        child.kill()?;
        child.wait()?;
        process.start_at = Instant::now() + RESTART_PAUSE;
        Ok(())
    }

    /// Lets the process run again.
    pub fn release(&self, index: usize) {
        lock(&self.shared).processes[index].is_held = false;
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// It does not run.
    pub fn signal(&self, index: usize, what: Signal) -> Result<()> {
        let mut shared = lock(&self.shared);
        let process = &mut shared.processes[index];
        let Some(child) = &mut process.child else { bail!("{} does not run", process.name) };
        if child.try_wait()?.is_some() {
            bail!("{} has ended", process.name);
        }
        // It is not waited for, so the number is still its own.
        signal(child.id().try_into()?, what)
    }

    /// Returns the ends of processes that the test did not kill, with their numbers.
    pub fn ends(&self) -> BTreeMap<String, u32> {
        lock(&self.shared).ends.clone()
    }

    /// Lets processes end: from now on none is restarted.
    pub fn let_end(&mut self) {
        lock(&self.shared).is_over = true;
        if let Some(thread) = self.thread.take() {
            // Nothing is left to be done if it has panicked.
            let _ = thread.join();
        }
    }

    /// Stops all of them in order, and starts none again.
    ///
    /// # Errors
    /// One does not stop in time.
    pub fn stop(&mut self) -> Result<()> {
        self.let_end();
        for process in lock(&self.shared).processes.iter_mut().rev() {
            let Some(mut child) = process.child.take() else { continue };
            if child.try_wait()?.is_some() {
                continue;
            }
            signal(child.id().try_into()?, Signal::SIGTERM)?;
            let ended = until("end of a process that is to stop", STOP_LIMIT, || Ok(child.try_wait()?));
            if let Err(error) = ended {
                child.kill()?;
                child.wait()?;
                return Err(error.context(process.name.clone()));
            }
        }
        Ok(())
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.let_end();
        for mut child in lock(&self.shared).processes.iter_mut().filter_map(|process| process.child.take()) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn lock(shared: &Mutex<SupervisorState>) -> MutexGuard<'_, SupervisorState> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SupervisorState {
    /// Looks after all processes once; returns whether that is over.
    fn run_once(&mut self) -> bool {
        if self.is_over {
            return true;
        }
        for process in &mut self.processes {
            if let Some(status) = process.ended() {
                *self.ends.entry(format!("{}: {status}", process.name)).or_default() += 1;
                process.child = None;
                process.start_at = Instant::now() + RESTART_PAUSE;
            }
            if process.child.is_none() && !process.is_held && Instant::now() >= process.start_at {
                // Tried again in the next iteration.
                process.child = process.command.spawn().ok();
            }
        }
        false
    }
}

impl SupervisedProcess {
    fn ended(&mut self) -> Option<ExitStatus> {
        self.child.as_mut()?.try_wait().ok()?
    }
}
