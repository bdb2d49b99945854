//! The operations on instances: start, stop, find again.
//!
//! An instance that should run has a spec file. The file is written before the process is started, and
//! removed when the process is gone. So an agent that was killed anywhere in between can continue.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::ops::RangeInclusive;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use shorthorn_api::v1;
use shorthorn_control::{EngineSpec, ReplicaSpec};
use shorthorn_frontend::node::{DeviceNumber, in_use};
use shorthorn_frontend::{discard, is_nbd_of_other_volume};
use shorthorn_store::{StoreError, check_binding, lock_directory};
use shorthorn_tls::check_kernel;
use shorthorn_wire::directory_fingerprint;
use tokio::task::JoinHandle;

use crate::serve::blocking;
use crate::serve::error::NodeError;
use crate::serve::instance::table::UNSERVED_AFTER;
use crate::serve::instance::{
    Backend, InstanceId, InstancePaths, InstanceProcess, ProcessPhase, Spec, Table, ports,
};
use crate::serve::network::{Choice, DataAddress};

/// The instances of this node.
pub struct Hub {
    table: Arc<Table>,
    backend: Box<dyn Backend>,
    paths: InstancePaths,
    data_ports: RangeInclusive<u16>,
    data_address: DataAddress,
    /// Lock from the choice of a port until the table shows it.
    choosing_port: tokio::sync::Mutex<()>,
    /// Locks that allow one operation at a time on each instance.
    gates: Mutex<HashMap<InstanceId, Arc<tokio::sync::Mutex<()>>>>,
    /// The newest list of replicas that each engine was given: attachment and number. Calls that come late
    /// are recognised by it; none comes later than the agent that took it has ended.
    revisions: Mutex<HashMap<InstanceId, (Option<u64>, u64)>>,
}

/// The options of a start beside the spec.
#[derive(Clone, Copy, Debug, Default)]
pub struct StartOptions {
    /// Number of the list of replicas of an engine.
    pub revision: u64,
    /// The oldest attachment whose engine this one may take the device over from.
    pub continues: Option<u64>,
    /// The directory of the replica is given to the volume of this secret.
    pub rebind: bool,
}

impl Hub {
    /// Finds the instances of an earlier agent again. `backend` reports to `table`.
    ///
    /// # Errors
    /// The directory of spec files cannot be read, or the backend does not answer.
    pub async fn start(
        data_ports: RangeInclusive<u16>,
        data_address: DataAddress,
        paths: InstancePaths,
        table: Arc<Table>,
        backend: Box<dyn Backend>,
    ) -> Result<Arc<Hub>, NodeError> {
        let (gates, revisions, choosing_port) = Default::default();
        let hub = Hub { table, backend, paths, data_ports, data_address, choosing_port, gates, revisions };
        hub.adopt_all().await?;
        let hub = Arc::new(hub);
        hub.continue_takeovers();
        hub.forbid_creations();
        Ok(hub)
    }

    /// Forbids the creation of directories that are there in specs of earlier versions. A disk may hang, so
    /// nothing waits for that.
    fn forbid_creations(self: &Arc<Hub>) {
        for (id, spec) in self.table.replica_specs() {
            if !spec.create || spec.create_once {
                continue;
            }
            let hub = Arc::clone(self);
            tokio::spawn(async move {
                if let Err(error) = hub.forbid_creation(&id, spec.directory).await {
                    tracing::warn!(instance = %id, "the creation of its directory is not forbidden: {error}");
                }
            });
        }
    }

    async fn forbid_creation(&self, id: &InstanceId, directory: PathBuf) -> Result<(), NodeError> {
        if !blocking(move || Ok(directory.join("volume.meta").exists())).await? {
            return Ok(());
        }
        let gate = self.gate(id);
        let _open = gate.lock().await;
        let Some((Spec::Replica(spec), _)) = self.table.known(id) else { return Ok(()) };
        let spec = Spec::Replica(ReplicaSpec { create: false, ..spec });
        self.table.set_spec(spec.clone());
        let paths = self.paths.clone();
        blocking(move || Ok(spec.update(&paths)?)).await
    }

    async fn adopt_all(&self) -> Result<(), NodeError> {
        for kind in [v1::InstanceKind::Engine, v1::InstanceKind::Replica] {
            for id in spec_files(&self.paths.specs(kind), kind)? {
                match Spec::load(&id, &self.paths) {
                    Ok(spec) => {
                        self.table.insert(spec, InstanceProcess::only(ProcessPhase::Stopped));
                        self.backend.adopt(&id).await?;
                    }
                    // Its process, if any, continues; a new start writes the file again.
                    Err(error) => tracing::error!(instance = %id, "the spec file cannot be read: {error}"),
                }
            }
        }
        Ok(())
    }

    /// Returns the places of the files of instances.
    pub fn paths(&self) -> &InstancePaths {
        &self.paths
    }

    pub fn table(&self) -> &Arc<Table> {
        &self.table
    }

    /// Returns the data address of this node.
    pub fn data_address(&self) -> Choice {
        self.data_address.borrow().clone()
    }

    pub(super) fn data_ports(&self) -> RangeInclusive<u16> {
        self.data_ports.clone()
    }

    pub(super) fn backend(&self) -> &dyn Backend {
        self.backend.as_ref()
    }

    /// Starts an instance; see the node API.
    ///
    /// # Errors
    /// [`NodeError::Exists`] if it runs with another spec, [`NodeError::Precondition`] if the request is
    /// older than the last one here.
    pub async fn start_instance(
        self: &Arc<Hub>,
        spec: Spec,
        options: StartOptions,
    ) -> Result<v1::Instance, NodeError> {
        let hub = Arc::clone(self);
        // A task of its own: a disconnected caller must not leave half of it done.
        finish(tokio::spawn(async move { hub.start_now(spec, options).await })).await
    }

    async fn start_now(
        self: Arc<Hub>,
        mut spec: Spec,
        options: StartOptions,
    ) -> Result<v1::Instance, NodeError> {
        let id = spec.id();
        let gate = self.gate(&id);
        let _open = gate.lock().await;
        let (mut takes_over, mut is_known) = (false, false);
        if let Some((known, process)) = self.table.known(&id) {
            refuse_older(&spec, &known)?;
            let same = spec.is_same_request(&known);
            if same && process.phase != ProcessPhase::Stopped {
                self.backend.start(&id).await?;
                self.catch_up(&spec, &known, options).await?;
                return self.published(&id);
            }
            takes_over =
                !same && process.phase != ProcessPhase::Stopped && may_take_over(&spec, &known, options);
            if !same && process.phase != ProcessPhase::Stopped && !takes_over {
                return Err(NodeError::Exists(format!("the {id} runs with other arguments: stop it first")));
            }
            ports::keep(&mut spec, &known);
            spec.keep_size(&known);
            is_known = same;
            if same {
                spec.keep_unknown(&known);
            }
        }
        self.prepare(&spec, options.rebind).await?;
        let choosing = self.choosing_port().await;
        if let Spec::Replica(replica) = &mut spec {
            let (address, taken) = (self.data_address().address, self.table.ports_of_others(&id));
            ports::choose(replica, address, &self.data_ports, &taken)?;
        }
        let stored = (spec.clone(), self.paths.clone());
        let store = move || {
            let (spec, paths) = &stored;
            let stored = if is_known { spec.update(paths) } else { spec.store(paths) };
            Ok(stored?)
        };
        blocking(store).await?;
        self.set_revision(&id, spec.attach(), options.revision);
        let started = if takes_over {
            self.table.set_spec(spec);
            drop(choosing);
            self.backend.restart(&id).await
        } else {
            self.table.insert(spec, InstanceProcess::only(ProcessPhase::Starting));
            drop(choosing);
            self.backend.start(&id).await
        };
        if let Err(error) = started {
            if !takes_over {
                self.table.set_process(&id, InstanceProcess::failed(error.to_string()));
            }
            return Err(error.into());
        }
        self.published(&id)
    }

    /// Waits for the right to choose the port of a replica. Its holder keeps it until the table shows the
    /// port: another start would choose the same one.
    pub(super) async fn choosing_port(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.choosing_port.lock().await
    }

    /// Prepares the host for a process: encryption, and the directory of a replica.
    async fn prepare(&self, spec: &Spec, rebind: bool) -> Result<(), NodeError> {
        if spec.encrypts_in_transit() {
            // It loads the module too, which the processes may not.
            blocking(|| check_kernel().map_err(|error| NodeError::Precondition(error.to_string()))).await?;
        }
        let Spec::Replica(replica) = spec else { return Ok(()) };
        let fingerprint = directory_fingerprint(replica.secret.bytes(), replica.encrypt_in_transit);
        let directory = replica.directory.clone();
        blocking(move || bind(&directory, &fingerprint, rebind)).await
    }

    /// Gives a running engine the replicas, and the size, of the same request.
    async fn catch_up(&self, spec: &Spec, known: &Spec, options: StartOptions) -> Result<(), NodeError> {
        let (Spec::Engine(asked), Spec::Engine(known)) = (spec, known) else { return Ok(()) };
        if asked.replicas != known.replicas {
            let replicas = asked.replicas.clone();
            self.update_replicas_now(&spec.id(), Some(asked.attach), replicas, options.revision).await?;
        }
        if asked.size_bytes > known.size_bytes {
            self.expand_now(&spec.id(), Some(asked.attach), asked.size_bytes).await?;
        }
        Ok(())
    }

    pub(super) fn is_revision_old(&self, id: &InstanceId, attach: Option<u64>, revision: u64) -> bool {
        let revisions = self.revisions.lock().unwrap_or_else(PoisonError::into_inner);
        revisions.get(id).is_some_and(|newest| *newest > (attach, revision))
    }

    pub(super) fn set_revision(&self, id: &InstanceId, attach: Option<u64>, revision: u64) {
        if id.kind() == v1::InstanceKind::Engine {
            let mut revisions = self.revisions.lock().unwrap_or_else(PoisonError::into_inner);
            revisions.insert(id.clone(), (attach, revision));
        }
    }

    /// Stops an instance, and forgets it; see the node API. An engine of a later attachment than `attach`
    /// stays. With `force`, an engine that is unserved ([`Table::is_unserved`]) may have its device in use.
    ///
    /// # Errors
    /// [`NodeError::Precondition`] if its device is in use.
    pub async fn stop_instance(
        self: &Arc<Hub>,
        id: InstanceId,
        attach: Option<u64>,
        force: bool,
    ) -> Result<(), NodeError> {
        let hub = Arc::clone(self);
        finish(tokio::spawn(async move { hub.stop_now(&id, attach, force).await })).await
    }

    async fn stop_now(&self, id: &InstanceId, attach: Option<u64>, force: bool) -> Result<(), NodeError> {
        let gate = self.gate(id);
        let _open = gate.lock().await;
        let Some((spec, process)) = self.table.known(id) else { return Ok(()) };
        let is_later = |running: u64| attach.is_some_and(|attach| running > attach);
        if spec.attach().is_some_and(is_later) {
            return Ok(());
        }
        if let (Spec::Engine(engine), false) = (&spec, process.phase == ProcessPhase::Stopped) {
            if force && self.table.is_unserved(id) {
                // Its device is not opened: that could wait for the same replicas.
                tracing::warn!(instance = %id, "stopping it by force, even if its device is in use");
            } else {
                self.refuse_in_use(engine).await.map_err(|error| with_limit_of_force(error, force))?;
            }
        }
        if process.phase != ProcessPhase::Stopped {
            self.table.set_process(id, InstanceProcess { phase: ProcessPhase::Stopping, ..process });
        }
        self.backend.stop(id).await?;
        if let Spec::Engine(engine) = spec {
            // An engine that a newer one has deposed ends without taking its device away.
            let discarded = blocking(move || Ok(discard(&engine.volume, &engine.device_dir))).await?;
            discarded.map_err(|error| NodeError::Precondition(error.to_string()))?;
        }
        self.forget(id).await
    }

    /// Returns an error with the users of an engine's device, if it has any.
    pub(super) async fn refuse_in_use(&self, engine: &EngineSpec) -> Result<(), NodeError> {
        let (node, volume) = (engine.device_dir.join(engine.volume.as_str()), engine.volume.clone());
        let user = move || {
            let number = fs::symlink_metadata(&node).map(|meta| DeviceNumber::of(meta.rdev()));
            // The users of another volume do not keep this one, and its device is not opened.
            if number.is_ok_and(|number| is_nbd_of_other_volume(number, &volume)) {
                return Ok(None);
            }
            Ok(in_use(&node).map(|user| (node, user)))
        };
        let user = blocking(user).await?;
        match user {
            Some((node, user)) => {
                Err(NodeError::Precondition(format!("{} is in use: {user}", node.display())))
            }
            None => Ok(()),
        }
    }

    /// Forgets a stopped instance: removes its spec file, then notifies the watchers.
    async fn forget(&self, id: &InstanceId) -> Result<(), NodeError> {
        let path = self.paths.spec(id);
        blocking(move || remove_durably(&path).map_err(NodeError::at(&path))).await?;
        self.paths.remove_creation_record(id);
        self.table.remove(id);
        self.revisions.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
        Ok(())
    }

    /// Does `work` while the instance is stopped and cannot be started.
    ///
    /// # Errors
    /// [`NodeError::Precondition`] if it is not stopped, and the error of `work`.
    pub async fn while_stopped<T: Send + 'static>(
        &self,
        id: &InstanceId,
        work: impl FnOnce() -> Result<T, NodeError> + Send + 'static,
    ) -> Result<T, NodeError> {
        let gate = self.gate(id);
        let _open = gate.lock().await;
        if let Some((_, process)) = self.table.known(id) {
            if process.phase != ProcessPhase::Stopped {
                return Err(NodeError::Precondition(format!("the {id} runs: stop it first")));
            }
            self.forget(id).await?;
        }
        blocking(work).await
    }

    /// Does `work` while the instance is neither started nor stopped. The argument is true if a process
    /// exists.
    ///
    /// # Errors
    /// The error of `work`.
    pub async fn beside<T: Send + 'static>(
        &self,
        id: &InstanceId,
        work: impl FnOnce(bool) -> Result<T, NodeError> + Send + 'static,
    ) -> Result<T, NodeError> {
        let gate = self.gate(id);
        let _open = gate.lock().await;
        let runs = self.table.known(id).is_some_and(|(_, process)| process.phase != ProcessPhase::Stopped);
        blocking(move || work(runs)).await
    }

    pub(super) fn gate(&self, id: &InstanceId) -> Arc<tokio::sync::Mutex<()>> {
        let mut gates = self.gates.lock().unwrap_or_else(PoisonError::into_inner);
        // Unused ones are removed, so that the gates are never more than the operations under way.
        gates.retain(|_, gate| Arc::strong_count(gate) > 1);
        Arc::clone(gates.entry(id.clone()).or_default())
    }

    /// Removes old states of engines whose volumes are deleted or attached elsewhere.
    ///
    /// # Errors
    /// [`NodeError`] names the file.
    pub async fn remove_old_engine_states(&self) -> Result<(), NodeError> {
        let failed = |error: io::Error| NodeError::Unavailable(error.to_string());
        let paths = self.paths.clone();
        let old = blocking(move || paths.old_engine_states(SystemTime::now()).map_err(failed)).await?;
        for volume in old {
            // A start of an engine of the volume waits, or has stored its spec.
            let gate = self.gate(&InstanceId::Engine(volume.clone()));
            let _open = gate.lock().await;
            let paths = self.paths.clone();
            let remove = move || paths.remove_old_engine_state(&volume, SystemTime::now()).map_err(failed);
            blocking(remove).await?;
        }
        Ok(())
    }

    pub(super) fn published(&self, id: &InstanceId) -> Result<v1::Instance, NodeError> {
        let published = self.table.published(id);
        published.ok_or_else(|| NodeError::Unavailable(format!("the {id} was stopped meanwhile")))
    }
}

pub(super) async fn finish<T>(task: JoinHandle<Result<T, NodeError>>) -> Result<T, NodeError> {
    task.await.map_err(NodeError::lost)?
}

/// Refuses a directory that belongs to another volume, or gives it to this one if `rebind` is true. The
/// replica process writes the fingerprint of a directory that has none.
fn bind(directory: &Path, fingerprint: &str, rebind: bool) -> Result<(), NodeError> {
    if !directory.try_exists().map_err(NodeError::at(directory))? {
        return Ok(());
    }
    match check_binding(directory, fingerprint) {
        Err(StoreError::OtherSecret(_) | StoreError::FingerprintDamaged { .. }) if rebind => {
            let lock = lock_directory(directory)?;
            shorthorn_store::rebind(directory, &lock, fingerprint)?;
            tracing::info!("{} now belongs to the undeleted volume", directory.display());
            Ok(())
        }
        checked => Ok(checked?),
    }
}

/// Adds to the refusal of a forced stop when it is done.
fn with_limit_of_force(error: NodeError, force: bool) -> NodeError {
    match error {
        NodeError::Precondition(message) if force => {
            let limit = UNSERVED_AFTER.as_secs();
            NodeError::Precondition(format!(
                "{message}; the engine is stopped once it has not served for {limit} s"
            ))
        }
        other => other,
    }
}

/// A request of an earlier attachment that comes late must not undo a later one.
fn refuse_older(spec: &Spec, known: &Spec) -> Result<(), NodeError> {
    match (spec.attach(), known.attach()) {
        (Some(asked), Some(newest)) if asked < newest => {
            Err(NodeError::Precondition(format!("attachment {asked} is over: the newest here is {newest}")))
        }
        _ => Ok(()),
    }
}

/// Returns true if an existing engine may be replaced with its device carried over.
fn may_take_over(spec: &Spec, known: &Spec, options: StartOptions) -> bool {
    match (spec, known) {
        (Spec::Engine(asked), Spec::Engine(known)) => {
            options.continues.is_some_and(|oldest| (oldest..asked.attach).contains(&known.attach))
                && (&asked.volume, asked.frontend) == (&known.volume, known.frontend)
                && asked.size_bytes >= known.size_bytes
        }
        _ => false,
    }
}

/// Returns the instances that have a spec file in `dir`; other files there are left alone.
pub(super) fn spec_files(dir: &Path, kind: v1::InstanceKind) -> Result<Vec<InstanceId>, NodeError> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(NodeError::at(dir))? {
        let name = entry.map_err(NodeError::at(dir))?.file_name();
        let stem = name.to_str().and_then(|name| name.strip_suffix(".json"));
        match stem.map(|stem| InstanceId::parse(kind, stem)) {
            Some(Ok(id)) => found.push(id),
            _ => tracing::debug!("{}: {} is not a spec file", dir.display(), name.display()),
        }
    }
    found.sort();
    Ok(found)
}

fn remove_durably(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    fs::File::open(path.parent().unwrap_or_else(|| Path::new("/")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use tokio::sync::watch;

    use super::*;
    use crate::serve::instance::backend::tests::Commanded;
    use crate::serve::instance::message::tests::spec;

    #[tokio::test]
    async fn an_unserved_engine_whose_device_is_in_use_is_stopped_by_force() {
        let folder = tempfile::tempdir().unwrap();
        let paths = InstancePaths::prepare(&folder.path().join("s"), &folder.path().join("r")).unwrap();
        let Spec::Engine(engine) = spec(&paths, 5) else { panic!("it is an engine") };
        let engine = Spec::Engine(EngineSpec { device_dir: folder.path().join("dev"), ..engine });
        engine.store(&paths).unwrap();
        // A device that cannot be opened counts as in use.
        fs::create_dir(folder.path().join("dev")).unwrap();
        symlink("v", folder.path().join("dev/v")).unwrap();
        let commanded = Commanded::default();
        let (table, backend) = (Table::new(), Box::new(commanded.clone()));
        let (_choice, address) = watch::channel(Choice::default());
        let hub =
            Hub::start(10000..=10009, address, paths.clone(), Arc::clone(&table), backend).await.unwrap();
        let id = engine.id();
        table.set_process(&id, InstanceProcess::failed("no replica answers"));
        let stop =
            async |force| hub.stop_instance(id.clone(), Some(5), force).await.map_err(|e| e.to_string());

        let refused = stop(true).await.unwrap_err();
        assert!(refused.contains("in use") && refused.contains("has not served for 60 s"), "{refused}");
        tokio::time::pause();
        tokio::time::advance(UNSERVED_AFTER).await;
        let refused = stop(false).await.unwrap_err();
        assert!(refused.contains("in use") && !refused.contains("60 s"), "{refused}");
        assert!(commanded.take().is_empty() && paths.spec(&id).exists());

        stop(true).await.unwrap();
        assert_eq!(commanded.take(), ["stop"]);
        assert!(!paths.spec(&id).exists() && table.known(&id).is_none());
    }
}
