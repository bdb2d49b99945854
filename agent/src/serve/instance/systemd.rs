//! Instances as units of systemd.
//!
//! The unit files keep an instance running: they restart it when it dies, and give up after many times in a
//! row. The backend starts and stops the units, follows them, and retries those that systemd has given up.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use shorthorn_api::v1::InstanceKind;
use shorthorn_control::ProcessCommand;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_stream::StreamExt;
use zbus::fdo::PropertiesProxy;
use zbus::{Connection, OwnedObjectPath};

use crate::serve::instance::backend::BackendFuture;
use crate::serve::instance::process::{ORDERLY_LIMIT, ends_within, request_end};
use crate::serve::instance::units::{JobRemovedStream, ManagerProxy, ServiceProxy, UnitProxy, unit_of};
use crate::serve::instance::{
    Backend, BackendError, InstanceId, InstancePaths, InstanceProcess, ProcessPhase, Table,
};
use crate::supervision::{AFTER_START_LIMIT, describe_end, read_last_words};

const DESTINATION: &str = "org.freedesktop.systemd1";
/// The time limit of a stop. It is longer than the `TimeoutStopSec=` of the units: systemd kills the process
/// before.
const STOP_LIMIT: Duration = Duration::from_secs(120);
/// The number of processes of an engine that are asked to end before its unit is stopped.
const ORDERLY_ROUNDS: u32 = 3;
/// A unit that systemd has given up is tried again after this.
const FIRST_RETRY: Duration = AFTER_START_LIMIT;
const LONGEST_RETRY: Duration = Duration::from_secs(120);

/// Runs the instances as units of systemd.
pub struct Systemd {
    bus: Bus,
    followers: Mutex<HashMap<InstanceId, JoinHandle<()>>>,
}

#[derive(Clone)]
struct Bus {
    connection: Connection,
    manager: ManagerProxy<'static>,
    paths: InstancePaths,
    table: Arc<Table>,
}

impl Systemd {
    /// Connects to the systemd of this host.
    ///
    /// # Errors
    /// [`BackendError::Bus`].
    pub async fn connect(paths: InstancePaths, table: Arc<Table>) -> Result<Systemd, BackendError> {
        let connection = Connection::system().await?;
        let manager = ManagerProxy::new(&connection).await?;
        manager.subscribe().await?;
        let bus = Bus { connection, manager, paths, table };
        Ok(Systemd { bus, followers: Mutex::default() })
    }

    /// Returns the connection, without which the agent sees no more events.
    pub fn connection(&self) -> &Connection {
        &self.bus.connection
    }

    /// Follows the unit of `id`, unless it is followed already.
    async fn follow(&self, id: &InstanceId) -> Result<(), BackendError> {
        let path = self.bus.manager.load_unit(&unit_of(id)).await?;
        let mut followers = self.followers.lock().unwrap_or_else(PoisonError::into_inner);
        if followers.get(id).is_none_or(JoinHandle::is_finished) {
            let (bus, followed) = (self.bus.clone(), id.clone());
            let task = tokio::spawn(async move {
                if let Err(error) = bus.follow(&followed, path).await {
                    tracing::error!(instance = %followed, "no longer watched: {error}");
                }
            });
            followers.insert(id.clone(), task);
        }
        Ok(())
    }
}

impl Backend for Systemd {
    fn adopt<'a>(&'a self, id: &'a InstanceId) -> BackendFuture<'a> {
        Box::pin(async move {
            // A caller before the first check must not see it as stopped for good, because it may run.
            self.bus.table.set_process(id, InstanceProcess::only(ProcessPhase::Starting));
            self.follow(id).await
        })
    }

    fn start<'a>(&'a self, id: &'a InstanceId) -> BackendFuture<'a> {
        Box::pin(async move {
            self.bus.start(id).await?;
            self.follow(id).await
        })
    }

    fn stop<'a>(&'a self, id: &'a InstanceId) -> BackendFuture<'a> {
        Box::pin(async move {
            // Before the unit is stopped, so that it is not tried again meanwhile, and nothing is said of it
            // after.
            let follower = self.followers.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
            if let Some(follower) = follower {
                follower.abort();
                let _ = follower.await;
            }
            if let Err(error) = self.bus.stop(id).await {
                self.follow(id).await?;
                return Err(error);
            }
            self.bus.paths.remove_runtime_files(id);
            Ok(())
        })
    }

    fn restart<'a>(&'a self, id: &'a InstanceId) -> BackendFuture<'a> {
        Box::pin(async move {
            self.bus.restart(id).await?;
            self.follow(id).await
        })
    }
}

impl Bus {
    async fn start(&self, id: &InstanceId) -> Result<(), BackendError> {
        let unit = unit_of(id);
        // A unit that was given up is not started before that. The call fails if the unit is not loaded.
        let _ = self.manager.reset_failed_unit(&unit).await;
        match self.manager.start_unit(&unit, "replace").await {
            Err(error) if is_no_such_unit(&error) => Err(BackendError::NoUnit(unit)),
            other => other.map(|_| ()).map_err(BackendError::from),
        }
    }

    async fn stop(&self, id: &InstanceId) -> Result<(), BackendError> {
        let unit = unit_of(id);
        if id.kind() == InstanceKind::Engine {
            self.end_orderly(id).await?;
        }
        let mut removed = self.manager.receive_job_removed().await?;
        let job = match self.manager.stop_unit(&unit, "replace").await {
            Err(error) if is_no_such_unit(&error) => return Ok(()),
            other => other?,
        };
        let result = done(&mut removed, &job).await?;
        // Forgets that it was killed, if it was.
        let _ = self.manager.reset_failed_unit(&unit).await;
        if result == "done" { Ok(()) } else { Err(BackendError::NotStopped(unit, result)) }
    }

    /// Asks the process to end in another way before SIGTERM, which would leave the device to the next
    /// process. The unit starts it again a moment later, unless it is stopped by then: such a process is
    /// asked as well.
    async fn end_orderly(&self, id: &InstanceId) -> Result<(), BackendError> {
        let path = self.manager.load_unit(&unit_of(id)).await?;
        let service = ServiceProxy::new(&self.connection, path).await?;
        for _ in 0..ORDERLY_ROUNDS {
            let pid = i32::try_from(service.main_pid().await?).unwrap_or_default();
            if pid == 0 || !request_end(id, &self.paths, &ProcessCommand::Stop).await {
                return Ok(());
            }
            if !ends_within(pid, ORDERLY_LIMIT).await {
                tracing::warn!(instance = %id, pid, "does not end within {ORDERLY_LIMIT:?}");
                return Ok(());
            }
        }
        Ok(())
    }

    async fn restart(&self, id: &InstanceId) -> Result<(), BackendError> {
        let unit = unit_of(id);
        let _ = self.manager.reset_failed_unit(&unit).await;
        // On SIGTERM the old process hands over. Only this job may end it: otherwise the unit would start the
        // next one by itself, and this job would end that one too. The job continues until the new process is
        // ready, which may wait for replicas: the agent does not wait for that.
        match self.manager.restart_unit(&unit, "replace").await {
            Err(error) if is_no_such_unit(&error) => Err(BackendError::NoUnit(unit)),
            other => other.map(|_| ()).map_err(BackendError::from),
        }
    }

    /// Reports how the unit is, now and after every change; ends only with an error.
    async fn follow(&self, id: &InstanceId, path: OwnedObjectPath) -> Result<(), BackendError> {
        let properties = PropertiesProxy::new(&self.connection, DESTINATION, path.clone()).await?;
        let unit = UnitProxy::new(&self.connection, path.clone()).await?;
        let service = ServiceProxy::new(&self.connection, path).await?;
        // Before the first look, so that no change is missed.
        let mut changes = properties.receive_properties_changed().await?;
        let mut retry = FIRST_RETRY;
        let mut words = None;
        loop {
            let process = self.read_process(id, &unit, &service, &mut words).await?;
            let given_up = process.phase == ProcessPhase::Failed && unit.active_state().await? == "failed";
            if process.phase == ProcessPhase::Running {
                retry = FIRST_RETRY;
            }
            self.table.set_process(id, process);
            let changed = async {
                let closed = || BackendError::NotStopped(unit_of(id), "the connection was lost".into());
                changes.next().await.map(|_| ()).ok_or_else(closed)
            };
            tokio::select! {
                changed = changed => changed?,
                () = sleep(retry), if given_up => {
                    tracing::warn!(instance = %id, "systemd has given it up: trying again");
                    retry = (retry * 2).min(LONGEST_RETRY);
                    self.start(id).await?;
                }
            }
        }
    }

    async fn read_process(
        &self,
        id: &InstanceId,
        unit: &UnitProxy<'_>,
        service: &ServiceProxy<'_>,
        words: &mut Option<String>,
    ) -> Result<InstanceProcess, BackendError> {
        let (active, sub) = (unit.active_state().await?, unit.sub_state().await?);
        let pid = service.main_pid().await?;
        let phase = match (active.as_str(), sub.as_str()) {
            ("active" | "reloading", _) => ProcessPhase::Running,
            ("activating", "auto-restart" | "auto-restart-queued") | ("failed", _) => ProcessPhase::Failed,
            ("activating", _) => ProcessPhase::Starting,
            ("deactivating", _) => ProcessPhase::Stopping,
            // A restart passes through here between the end of one process and the start of the next. Its job
            // may end after the state was read: then the state has changed, which is reported next.
            _ if unit.job().await?.0 != 0 => ProcessPhase::Starting,
            _ if unit.active_state().await? != active => ProcessPhase::Starting,
            _ => ProcessPhase::Stopped,
        };
        if phase == ProcessPhase::Failed {
            let result = service.result().await?;
            if active == "activating" && result == "success" {
                // It has left its device to the next process, which is about to be started.
                return Ok(InstanceProcess::only(ProcessPhase::Starting));
            }
            // The next process may have removed them already: then those of the one before do as well.
            *words = read_last_words(&self.paths.error(id)).or_else(|| words.take());
            return Ok(InstanceProcess::failed(describe_end(words.as_deref(), &result)));
        }
        if phase == ProcessPhase::Running {
            *words = None;
        }
        let pid = i32::try_from(pid).ok().filter(|pid| *pid != 0);
        Ok(InstanceProcess { phase, pid, message: None })
    }
}

/// Waits for the end of a job, and says how it ended.
async fn done(removed: &mut JobRemovedStream, job: &OwnedObjectPath) -> Result<String, BackendError> {
    let done = async {
        while let Some(signal) = removed.next().await {
            let arguments = signal.args()?;
            if arguments.job == *job {
                return Ok::<String, zbus::Error>(arguments.result.clone());
            }
        }
        Ok("the connection was lost".to_owned())
    };
    match timeout(STOP_LIMIT, done).await {
        Ok(result) => Ok(result?),
        Err(_) => Ok(format!("no answer within {STOP_LIMIT:?}")),
    }
}

fn is_no_such_unit(error: &zbus::Error) -> bool {
    let zbus::Error::MethodError(name, ..) = error else { return false };
    name.as_str() == "org.freedesktop.systemd1.NoSuchUnit"
}
