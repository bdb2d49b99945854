//! Instances as processes of our own, if PID 1 is not systemd.
//!
//! An instance outlives the agent that has started it. It is in a process group of its own, and gets no
//! signal at the agent's end. It holds its pid file, so the next agent finds it. A task per instance waits
//! for its end, and restarts it.

use std::collections::HashMap;
use std::fs;
use std::future::pending;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use shorthorn_api::v1::InstanceKind;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use crate::descriptor_store::DescriptorStore;
use crate::pid_file::{PidFileHolder, is_held};
use crate::serve::instance::backend::BackendFuture;
use crate::serve::instance::process::{ORDERLY_LIMIT, end_of, request_end};
use crate::serve::instance::{
    Backend, BackendError, InstanceId, InstancePaths, InstanceProcess, ProcessPhase, Table, program,
};
use crate::supervision::{
    AFTER_START_LIMIT, EndLimits, Invocation, Lifecycle, LifecycleAction, LifecycleEvent, describe_end,
    read_last_words,
};

/// The time limit for a process to stop. An engine writes its device back within 30 s, and ends within some
/// seconds after that.
const STOP_LIMIT: Duration = Duration::from_secs(40);
/// Names the current boot of the host.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Runs the instances as children of the agent.
#[derive(Debug)]
pub struct Children {
    paths: InstancePaths,
    table: Arc<Table>,
    runners: Mutex<HashMap<InstanceId, ChildRunner>>,
}

#[derive(Debug)]
struct ChildRunner {
    /// Set to have the instance stopped.
    stop: watch::Sender<bool>,
    /// Notified to have a new process take over.
    restart: Arc<Notify>,
    task: JoinHandle<Result<(), BackendError>>,
}

impl Children {
    /// Creates a backend that runs nothing yet.
    ///
    /// # Errors
    /// The pid files of an earlier boot cannot be distinguished from those of this one.
    pub fn new(paths: InstancePaths, table: Arc<Table>) -> io::Result<Children> {
        forget_earlier_boots(&paths)?;
        Ok(Children { paths, table, runners: Mutex::default() })
    }

    fn run(&self, id: &InstanceId) {
        let mut runners = self.runners.lock().unwrap_or_else(PoisonError::into_inner);
        if runners.get(id).is_some_and(|runner| !runner.task.is_finished()) {
            return;
        }
        let (stop, stopping) = watch::channel(false);
        let restart = Arc::new(Notify::new());
        let limits = EndLimits { orderly: Some(ORDERLY_LIMIT), stop: STOP_LIMIT };
        let instance = ChildInstance {
            id: id.clone(),
            paths: self.paths.clone(),
            table: Arc::clone(&self.table),
            stopping,
            restart: Arc::clone(&restart),
            store: None,
            lifecycle: Lifecycle::new(limits, id.kind() == InstanceKind::Engine),
            living: None,
            last_end: ProcessEnd::Well,
        };
        let task = tokio::spawn(instance.run());
        runners.insert(id.clone(), ChildRunner { stop, restart, task });
    }
}

impl Backend for Children {
    fn adopt<'a>(&'a self, id: &'a InstanceId) -> BackendFuture<'a> {
        Box::pin(async move {
            // A pid file of this boot of the host shows that the process had to run.
            if self.paths.pid(id).exists() {
                self.run(id);
            } else {
                self.table.set_process(id, InstanceProcess::only(ProcessPhase::Stopped));
            }
            Ok(())
        })
    }

    fn start<'a>(&'a self, id: &'a InstanceId) -> BackendFuture<'a> {
        Box::pin(async move {
            self.run(id);
            Ok(())
        })
    }

    fn stop<'a>(&'a self, id: &'a InstanceId) -> BackendFuture<'a> {
        Box::pin(async move {
            let runner = self.runners.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
            let Some(ChildRunner { stop, task, .. }) = runner else { return Ok(()) };
            stop.send_replace(true);
            let ended = task
                .await
                .unwrap_or_else(|lost| Err(BackendError::NotStopped(id.to_string(), lost.to_string())));
            if ended.is_err() {
                // It is still there: it must not be forgotten.
                self.run(id);
            }
            ended
        })
    }

    fn restart<'a>(&'a self, id: &'a InstanceId) -> BackendFuture<'a> {
        Box::pin(async move {
            // Without a runner, the process that it finds has the former spec.
            self.run(id);
            let runners = self.runners.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(runner) = runners.get(id) {
                runner.restart.notify_one();
            }
            Ok(())
        })
    }
}

/// Removes the pid files of an earlier boot, whose processes are not restarted by themselves.
fn forget_earlier_boots(paths: &InstancePaths) -> io::Result<()> {
    let at = |path: &Path| {
        let path = path.display().to_string();
        move |error: io::Error| io::Error::new(error.kind(), format!("{path}: {error}"))
    };
    let current = fs::read(BOOT_ID).map_err(at(Path::new(BOOT_ID)))?;
    let marker = paths.boot_id();
    if fs::read(&marker).is_ok_and(|marked| marked == current) {
        return Ok(());
    }
    paths.remove_pid_files()?;
    fs::write(&marker, current).map_err(at(&marker))
}

/// An instance that is to run.
struct ChildInstance {
    id: InstanceId,
    paths: InstancePaths,
    table: Arc<Table>,
    stopping: watch::Receiver<bool>,
    restart: Arc<Notify>,
    /// The store in which an engine leaves the sockets of its device for the next one.
    store: Option<DescriptorStore>,
    lifecycle: Lifecycle,
    /// The process, from its start until its end was reported to the lifecycle.
    living: Option<Living>,
    /// The way in which the last process ended.
    last_end: ProcessEnd,
}

/// A process that lives, or did until just now.
struct Living {
    pid: i32,
    fd: AsyncFd<OwnedFd>,
    holder: PidFileHolder,
    child: Option<Child>,
}

impl ChildInstance {
    /// Keeps it running until it is to stop.
    async fn run(mut self) -> Result<(), BackendError> {
        self.open_store();
        // A process that runs already is found first, and then stopped.
        let is_stopped = *self.stopping.borrow() && !self.may_run();
        let mut event = if is_stopped { LifecycleEvent::Stop } else { LifecycleEvent::Start };
        loop {
            let action = self.lifecycle.handle(event, Instant::now().into_std());
            if action == LifecycleAction::Finish {
                return self.finish();
            }
            event = match self.carry_out(action).await? {
                Some(event) => event,
                None => self.next_event().await,
            };
        }
    }

    /// Returns true unless no process holds the pid file.
    fn may_run(&self) -> bool {
        is_held(&self.paths.pid(&self.id)).unwrap_or(true)
    }

    /// Removes the files of the process. A process that could not be found may hold them: then the instance
    /// has not stopped.
    fn finish(&self) -> Result<(), BackendError> {
        if self.may_run() {
            let reason = format!(
                "another process holds {}; lslocks on the host shows it",
                self.paths.pid(&self.id).display()
            );
            return Err(BackendError::NotStopped(self.id.to_string(), reason));
        }
        // From here on the next agent leaves it alone.
        self.paths.remove_runtime_files(&self.id);
        Ok(())
    }

    fn open_store(&mut self) {
        if self.id.kind() == InstanceKind::Engine {
            let store = DescriptorStore::open(&self.paths.notify(&self.id));
            let refused = |error: &io::Error| {
                tracing::warn!(
                    instance = %self.id,
                    "no sockets can be handed over: {error}"
                )
            };
            self.store = store.inspect_err(refused).ok();
        }
    }

    /// Carries out an action, and returns the event that it causes at once, if any.
    async fn carry_out(&mut self, action: LifecycleAction) -> Result<Option<LifecycleEvent>, BackendError> {
        match action {
            LifecycleAction::Wait | LifecycleAction::Finish => return Ok(None),
            LifecycleAction::Start => return Ok(self.start()),
            LifecycleAction::Replace => {
                self.report(InstanceProcess::only(ProcessPhase::Starting));
                return Ok(self.start());
            }
            LifecycleAction::Pause(backoff) => {
                self.report_end(backoff);
                return Ok(None);
            }
            LifecycleAction::Request(reason) => {
                let accepted = request_end(&self.id, &self.paths, &reason.command()).await;
                return Ok(Some(LifecycleEvent::Answered { accepted }));
            }
            LifecycleAction::Terminate | LifecycleAction::Kill | LifecycleAction::GiveUp => {}
        }
        let Some(Living { pid, holder, .. }) = &self.living else {
            return Ok(Some(LifecycleEvent::Ended { cleanly: true }));
        };
        let system = |action: &str| {
            let action = format!("{action} {pid}");
            move |source| BackendError::System { action, source }
        };
        match action {
            LifecycleAction::Terminate => holder.terminate().map_err(system("stop process"))?,
            LifecycleAction::Kill => {
                tracing::error!(
                    instance = %self.id,
                    pid,
                    "does not stop within {STOP_LIMIT:?}: killing it"
                );
                holder.kill().map_err(system("kill"))?;
            }
            _ => return Err(BackendError::Immortal(*pid)),
        }
        Ok(None)
    }

    /// Waits for the next event of the process, its owner or the clock.
    async fn next_event(&mut self) -> LifecycleEvent {
        let (is_ending, is_stopping) = (self.lifecycle.is_ending(), self.lifecycle.is_stopping());
        let deadline = self.lifecycle.deadline();
        tokio::select! {
            biased;
            () = stop_requested(&mut self.stopping), if !is_stopping => {
                if let Some(living) = &self.living {
                    self.report(InstanceProcess::with_pid(ProcessPhase::Stopping, living.pid));
                }
                LifecycleEvent::Stop
            }
            // While a process ends, a request stays for the next one, which may have the former spec.
            () = self.restart.notified(), if !is_ending => LifecycleEvent::Handover,
            ended = end_of_process(&mut self.living) => {
                self.living = None;
                let cleanly = matches!(ended, ProcessEnd::Well);
                self.last_end = ended;
                LifecycleEvent::Ended { cleanly }
            }
            () = time_comes(deadline) => LifecycleEvent::Tick,
        }
    }

    /// Says how the process ended, and that the next one starts after `backoff`.
    fn report_end(&self, backoff: Duration) {
        match &self.last_end {
            ProcessEnd::Well if backoff >= AFTER_START_LIMIT => {
                let words = format!("ended too often within a minute: the next start is in {backoff:?}");
                tracing::warn!(instance = %self.id, "{words}");
                self.report(InstanceProcess::failed(words));
            }
            ProcessEnd::Well => {
                tracing::info!(instance = %self.id, ?backoff, "ended by itself, starting the next one");
                self.report(InstanceProcess::only(ProcessPhase::Starting));
            }
            ProcessEnd::Badly(how) => {
                let left = read_last_words(&self.paths.error(&self.id));
                let words = describe_end(left.as_deref(), how);
                tracing::warn!(instance = %self.id, ?backoff, "ended, starting it again: {words}");
                self.report(InstanceProcess::failed(words));
            }
            ProcessEnd::NotStarted(words) => {
                tracing::warn!(instance = %self.id, ?backoff, "not started, trying again: {words}");
                self.report(InstanceProcess::failed(words.clone()));
            }
        }
    }

    fn report(&self, process: InstanceProcess) {
        self.table.set_process(&self.id, process);
    }

    /// Starts a process, or reports its end if that fails.
    fn start(&mut self) -> Option<LifecycleEvent> {
        match self.find_or_spawn() {
            Ok(living) => {
                self.report(InstanceProcess::with_pid(ProcessPhase::Running, living.pid));
                self.living = Some(living);
                None
            }
            Err(error) => {
                self.last_end = ProcessEnd::NotStarted(error.to_string());
                Some(LifecycleEvent::Ended { cleanly: false })
            }
        }
    }

    /// Returns the process that runs already, else a new one. If both happen at once, the new one finds the
    /// pid file held and ends, and the next call finds the other.
    fn find_or_spawn(&self) -> io::Result<Living> {
        let pid_file = self.paths.pid(&self.id);
        let at = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", pid_file.display()));
        if let Some(holder) = PidFileHolder::find(&pid_file).map_err(at)? {
            tracing::info!(instance = %self.id, pid = holder.pid(), "found running");
            let fd = end_of(holder.fd()?)?;
            return Ok(Living { pid: holder.pid(), fd, holder, child: None });
        }
        // From here on the next agent starts it, should this one be killed now.
        fs::OpenOptions::new().create(true).append(true).open(&pid_file)?;
        let child = self.command(&pid_file).spawn()?;
        let pid = i32::try_from(child.id()).map_err(io::Error::other)?;
        let holder = PidFileHolder::of_child(&child)?;
        let fd = end_of(holder.fd()?)?;
        tracing::info!(instance = %self.id, pid, "started");
        Ok(Living { pid, fd, holder, child: Some(child) })
    }

    fn command(&self, pid_file: &Path) -> Command {
        // A start after an upgrade runs the new one.
        let invocation = Invocation {
            program: &program::installed(),
            is_engine: self.id.kind() == InstanceKind::Engine,
            spec: &self.paths.spec(&self.id),
            pid_file,
            error_file: &self.paths.error(&self.id),
        };
        let mut command = invocation.command();
        if let Some(store) = &self.store {
            store.pass_to(&mut command);
        }
        command
    }
}

/// The way in which a process ended.
enum ProcessEnd {
    /// The end was requested: another program requested the engine to leave its device to the next one.
    Well,
    /// The process failed; a message.
    Badly(String),
    /// The process was neither found nor started; a message.
    NotStarted(String),
}

/// Waits until the instance is to stop, or the sender is gone.
async fn stop_requested(stopping: &mut watch::Receiver<bool>) {
    let _ = stopping.wait_for(|stop| *stop).await;
}

/// Waits until `deadline`; forever without one.
async fn time_comes(deadline: Option<std::time::Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline.into()).await,
        None => pending().await,
    }
}

/// Waits for the end of the process, and says how it was; forever without a process.
async fn end_of_process(living: &mut Option<Living>) -> ProcessEnd {
    match living {
        Some(living) => living.ended().await,
        None => pending().await,
    }
}

impl Living {
    /// Waits for its end, and says how it was.
    async fn ended(&mut self) -> ProcessEnd {
        if let Err(error) = self.fd.readable().await {
            return ProcessEnd::Badly(format!("cannot wait for process {}: {error}", self.pid));
        }
        match self.child.as_mut().map(Child::wait) {
            Some(Ok(status)) if status.success() => ProcessEnd::Well,
            Some(Ok(status)) => ProcessEnd::Badly(status.to_string()),
            Some(Err(error)) => ProcessEnd::Badly(error.to_string()),
            None => ProcessEnd::Badly(format!("process {} ended", self.pid)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::process::ExitStatusExt;

    use shorthorn_types::VolumeName;

    use super::*;
    use crate::pid_file::tests::holder_process;

    fn children(dir: &Path) -> (Children, InstanceId, std::path::PathBuf) {
        let paths = InstancePaths::prepare(&dir.join("state"), &dir.join("runtime")).unwrap();
        let id = InstanceId::Engine("v".parse::<VolumeName>().unwrap());
        let pid_file = paths.pid(&id);
        (Children::new(paths, Table::new()).unwrap(), id, pid_file)
    }

    #[tokio::test]
    async fn a_stop_before_the_first_look_ends_the_process_that_holds_the_pid_file() {
        let dir = tempfile::tempdir().unwrap();
        let (children, id, pid_file) = children(dir.path());
        let mut holder = holder_process(&pid_file);
        children.adopt(&id).await.unwrap();
        // The task of the instance has not run yet: this test has one thread.
        children.stop(&id).await.unwrap();
        assert!(!pid_file.exists());
        let status = holder.try_wait().unwrap().expect("the process still runs");
        assert_eq!(status.signal(), Some(nix::libc::SIGTERM));
    }

    #[tokio::test]
    async fn an_instance_whose_pid_file_cannot_be_read_has_not_stopped() {
        let dir = tempfile::tempdir().unwrap();
        let (children, id, pid_file) = children(dir.path());
        symlink(&pid_file, &pid_file).unwrap();
        children.start(&id).await.unwrap();
        let error = children.stop(&id).await.unwrap_err().to_string();
        assert!(error.contains("lslocks") && pid_file.is_symlink(), "{error}");
    }
}
