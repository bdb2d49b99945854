//! Table of the instances of this node, with notifications of changes.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use shorthorn_api::v1;
use shorthorn_api::v1::instance::Detail;
use shorthorn_api::v1::instance_event::Type;
use shorthorn_control::{EnginePhase, EngineSpec, ProcessStatus, ReplicaSpec};
use shorthorn_types::VolumeName;
use tokio::sync::{broadcast, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::serve::instance::message::says_serving;
use crate::serve::instance::program::{self, Comparison};
use crate::serve::instance::{InstanceId, InstanceProcess, Spec, control_watch, message, ports};

/// The interval of checking the file of the installed program.
const PROGRAM_EVERY: Duration = Duration::from_secs(10);
/// The number of events that a watcher may be behind before it is disconnected.
const WATCH_LAG_MAX: usize = 1024;
/// The time without service after which an engine counts as unserved. An upgrade allows a new process the
/// same time until it serves.
pub const UNSERVED_AFTER: Duration = Duration::from_secs(60);

/// All instances. Backends add the observed states of processes. The table follows the control socket of each
/// living process.
#[derive(Debug)]
pub struct Table(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    entries: BTreeMap<InstanceId, InstanceEntry>,
    changes: broadcast::Sender<v1::InstanceEvent>,
}

#[derive(Debug)]
struct InstanceEntry {
    spec: Spec,
    process: InstanceProcess,
    status: Option<ProcessStatus>,
    program: Comparison,
    published: v1::Instance,
    /// The last time at which an engine was seen to serve; until then, the time at which the entry was made.
    last_served: Instant,
    /// Follows the control socket while the process lives.
    follower: Option<JoinHandle<()>>,
}

impl Drop for InstanceEntry {
    fn drop(&mut self) {
        if let Some(follower) = self.follower.take() {
            follower.abort();
        }
    }
}

/// All instances at one moment, and every change from then on.
#[derive(Debug)]
pub struct InstanceWatch {
    /// The instances at the start of the watch.
    pub now: Vec<v1::Instance>,
    /// The later changes.
    pub changes: broadcast::Receiver<v1::InstanceEvent>,
}

impl Table {
    /// Creates a table of no instance.
    pub fn new() -> Arc<Table> {
        let (changes, _) = broadcast::channel(WATCH_LAG_MAX);
        Arc::new(Table(Mutex::new(Inner { entries: BTreeMap::new(), changes })))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Entries are changed whole, so a panic elsewhere leaves nothing half-written.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn list(&self) -> Vec<v1::Instance> {
        self.lock().entries.values().map(|entry| entry.published.clone()).collect()
    }

    /// Returns all instances, and every later change.
    pub fn watch(&self) -> InstanceWatch {
        let inner = self.lock();
        let now = inner.entries.values().map(|entry| entry.published.clone()).collect();
        InstanceWatch { now, changes: inner.changes.subscribe() }
    }

    pub fn known(&self, id: &InstanceId) -> Option<(Spec, InstanceProcess)> {
        let inner = self.lock();
        inner.entries.get(id).map(|entry| (entry.spec.clone(), entry.process.clone()))
    }

    /// Returns an instance as the node API shows it.
    pub fn published(&self, id: &InstanceId) -> Option<v1::Instance> {
        self.lock().entries.get(id).map(|entry| entry.published.clone())
    }

    /// Returns the engines that have a process, each with its control socket.
    pub fn engines(&self) -> Vec<(VolumeName, PathBuf)> {
        let inner = self.lock();
        let living = inner.entries.values().filter(|entry| entry.process.pid.is_some());
        living
            .filter_map(|entry| match &entry.spec {
                Spec::Engine(spec) => Some((spec.volume.clone(), spec.control_socket.clone())),
                Spec::Replica(_) => None,
            })
            .collect()
    }

    /// Returns the identities of all replicas in the table, without those of engines.
    pub fn replicas(&self) -> Vec<InstanceId> {
        let inner = self.lock();
        inner.entries.keys().filter(|id| matches!(id, InstanceId::Replica(..))).cloned().collect()
    }

    pub fn engine_specs(&self) -> Vec<(InstanceId, EngineSpec)> {
        self.specs(|spec| match spec {
            Spec::Engine(spec) => Some(spec.clone()),
            Spec::Replica(_) => None,
        })
    }

    /// Returns the specs of all replicas.
    pub fn replica_specs(&self) -> Vec<(InstanceId, ReplicaSpec)> {
        self.specs(|spec| match spec {
            Spec::Replica(spec) => Some(spec.clone()),
            Spec::Engine(_) => None,
        })
    }

    fn specs<T>(&self, of: impl Fn(&Spec) -> Option<T>) -> Vec<(InstanceId, T)> {
        let inner = self.lock();
        inner.entries.iter().filter_map(|(id, entry)| Some((id.clone(), of(&entry.spec)?))).collect()
    }

    /// Returns the ports of all instances but one.
    pub fn ports_of_others(&self, id: &InstanceId) -> Vec<u16> {
        let inner = self.lock();
        let others = inner.entries.iter().filter(|(other, _)| *other != id);
        others.filter_map(|(_, entry)| ports::of(&entry.spec)).collect()
    }

    /// Returns true if requests of an engine's users have waited for a minute, and may wait for ever. The
    /// engine is frozen, cannot open its volume, or has no process. A process without a status may serve.
    pub fn is_unserved(&self, id: &InstanceId) -> bool {
        let inner = self.lock();
        let Some(entry) = inner.entries.get(id) else { return false };
        let Some(Detail::Engine(engine)) = &entry.published.detail else { return false };
        let cannot_serve = match engine.known_phase() {
            None => entry.process.pid.is_none(),
            Some(EnginePhase::Serving | EnginePhase::Unknown) => false,
            Some(
                EnginePhase::Starting | EnginePhase::Frozen | EnginePhase::Stopping | EnginePhase::Stopped,
            ) => true,
        };
        cannot_serve && entry.last_served.elapsed() >= UNSERVED_AFTER
    }

    /// Adds an instance, in place of one of the same name.
    pub fn insert(&self, spec: Spec, process: InstanceProcess) {
        let id = spec.id();
        let published = message::instance(&spec, &process, None);
        let (program, status, follower) = Default::default();
        let (shown, last_served) = (published.clone(), Instant::now());
        let entry = InstanceEntry { spec, process, status, program, published: shown, last_served, follower };
        let mut inner = self.lock();
        inner.entries.insert(id, entry);
        inner.broadcast(Type::Set, published);
    }

    /// Sets the stored spec; the process continues with the former one.
    pub fn set_spec(&self, spec: Spec) {
        let id = spec.id();
        let mut inner = self.lock();
        if let Some(entry) = inner.entries.get_mut(&id) {
            entry.spec = spec;
            inner.publish(&id);
        }
    }

    /// Forgets an instance.
    pub fn remove(&self, id: &InstanceId) {
        let mut inner = self.lock();
        if let Some(entry) = inner.entries.remove(id) {
            inner.broadcast(Type::Gone, entry.published.clone());
        }
    }

    /// Sets the observed state of the process of an instance; ignored if the instance is not here any more.
    pub fn set_process(self: &Arc<Table>, id: &InstanceId, process: InstanceProcess) {
        let mut inner = self.lock();
        let Some(entry) = inner.entries.get_mut(id) else { return };
        let changed = entry.process.pid != process.pid;
        entry.process = process;
        if changed {
            (entry.status, entry.program) = Default::default();
            if let Some(follower) = entry.follower.take() {
                follower.abort();
            }
            if let Some(pid) = entry.process.pid {
                let table = Arc::clone(self);
                let (id, control) = (id.clone(), entry.spec.control_socket());
                let take = move |status| table.set_status(&id, pid, status);
                entry.follower = Some(tokio::spawn(control_watch::follow(control, take)));
            }
        }
        inner.publish(id);
    }

    fn set_status(self: &Arc<Table>, id: &InstanceId, pid: i32, status: Option<ProcessStatus>) {
        let mut inner = self.lock();
        if let Some(entry) = inner.entries.get_mut(id).filter(|entry| entry.process.pid == Some(pid)) {
            // Before its first status, the process may still be the program of systemd that starts it.
            if matches!(status, Some(ProcessStatus::Engine(_))) && entry.program == Comparison::NotBegun {
                entry.program = Comparison::UnderWay;
                tokio::spawn(Arc::clone(self).compare(id.clone(), pid));
            }
            entry.status = status;
            inner.publish(id);
        }
    }

    /// Compares the programs again whenever the file of the installed one was replaced. Ends with the agent.
    /// A package may replace it without a restart of the agent, as a rollback without its scripts does.
    pub async fn follow_program(self: Arc<Table>, mut stopping: watch::Receiver<bool>) {
        let mut file = program::installed_file();
        loop {
            tokio::select! {
                () = tokio::time::sleep(PROGRAM_EVERY) => {}
                _ = stopping.wait_for(|stopping| *stopping) => return,
            }
            let now = program::installed_file();
            if now == file {
                continue;
            }
            file = now;
            tracing::info!("the installed program was replaced: engines are compared with it again");
            for (id, pid) in self.compared() {
                Arc::clone(&self).compare(id, pid).await;
            }
        }
    }

    /// Returns the engines whose programs were compared. A comparison under way notices the new file itself.
    fn compared(&self) -> Vec<(InstanceId, i32)> {
        let inner = self.lock();
        let is_over =
            |entry: &InstanceEntry| matches!(entry.program, Comparison::Done { .. } | Comparison::ByVersion);
        let compared = inner.entries.iter().filter(|(_, entry)| is_over(entry));
        compared.filter_map(|(id, entry)| Some((id.clone(), entry.process.pid?))).collect()
    }

    async fn compare(self: Arc<Table>, id: InstanceId, pid: i32) {
        let compared = tokio::task::spawn_blocking(move || program::differs(pid)).await;
        let program = match compared {
            Ok(Ok(differs)) => Comparison::Done { differs },
            Ok(Err(error)) => {
                tracing::info!(instance = %id, pid, "only the version is compared: {error}");
                Comparison::ByVersion
            }
            Err(lost) => {
                tracing::warn!(instance = %id, pid, "only the version is compared: {lost}");
                Comparison::ByVersion
            }
        };
        let mut inner = self.lock();
        if let Some(entry) = inner.entries.get_mut(&id).filter(|entry| entry.process.pid == Some(pid)) {
            entry.program = program;
            inner.publish(&id);
        }
    }
}

impl InstanceEntry {
    /// Returns true if its process is an engine of another program than the installed one; none if that is
    /// not known.
    fn needs_upgrade(&self) -> Option<bool> {
        let Some(ProcessStatus::Engine(engine)) = &self.status else { return None };
        self.program.needs_upgrade(engine.version.as_deref())
    }
}

impl Inner {
    fn publish(&mut self, id: &InstanceId) {
        let Some(entry) = self.entries.get_mut(id) else { return };
        let mut shown = message::instance(&entry.spec, &entry.process, entry.status.as_ref());
        if let Some(Detail::Engine(engine)) = &mut shown.detail {
            engine.needs_upgrade = entry.needs_upgrade();
        }
        if says_serving(&entry.published) {
            entry.last_served = Instant::now();
        }
        if shown != entry.published {
            entry.published = shown.clone();
            self.broadcast(Type::Set, shown);
        }
    }

    fn broadcast(&self, r#type: Type, instance: v1::Instance) {
        // It fails only without watchers.
        let _ = self.changes.send(v1::InstanceEvent { r#type: r#type.into(), instance: Some(instance) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::instance::message::tests::{in_phase, spec};
    use crate::serve::instance::{InstancePaths, ProcessPhase};

    const PID: i32 = 4711;
    const SECOND: Duration = Duration::from_secs(1);

    /// Returns a table with the running engine of attachment 5.
    fn table() -> (Arc<Table>, InstanceId) {
        let dir = tempfile::tempdir().unwrap();
        let paths = InstancePaths::prepare(&dir.path().join("s"), &dir.path().join("r")).unwrap();
        let (table, spec) = (Table::new(), spec(&paths, 5));
        let id = spec.id();
        table.insert(spec, InstanceProcess::only(ProcessPhase::Starting));
        table.set_process(&id, InstanceProcess::with_pid(ProcessPhase::Running, PID));
        (table, id)
    }

    #[tokio::test(start_paused = true)]
    async fn an_engine_is_unserved_a_minute_after_it_has_served() {
        let (table, id) = table();
        let show = |phase| table.set_status(&id, PID, Some(in_phase(5, phase)));
        show(EnginePhase::Serving);
        tokio::time::advance(2 * UNSERVED_AFTER).await;
        assert!(!table.is_unserved(&id), "it serves");
        show(EnginePhase::Frozen);
        tokio::time::advance(UNSERVED_AFTER - SECOND).await;
        assert!(!table.is_unserved(&id), "it was frozen a short time ago");
        // The next process waits for the same replicas.
        show(EnginePhase::Starting);
        tokio::time::advance(2 * SECOND).await;
        assert!(table.is_unserved(&id));
        for phase in [EnginePhase::Serving, EnginePhase::Unknown] {
            show(phase);
            assert!(!table.is_unserved(&id), "{phase:?}");
        }
        show(EnginePhase::Frozen);
        assert!(!table.is_unserved(&id), "it has served again");
    }

    #[tokio::test(start_paused = true)]
    async fn an_engine_that_reports_nothing_is_unserved_only_without_a_process() {
        let (table, id) = table();
        tokio::time::advance(UNSERVED_AFTER).await;
        assert!(!table.is_unserved(&id));
        table.set_process(&id, InstanceProcess::failed("no replica answers"));
        assert!(table.is_unserved(&id));
    }
}
