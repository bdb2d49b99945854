//! Commands to a running engine. Each is stored in its spec file first, so that the next process knows it
//! too.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use shorthorn_api::v1::{self, instance::Detail};
use shorthorn_control::{
    EnginePhase, EngineSpec, ProcessCommand, RebuildLimits, ReplicaEndpoint, ScrubCommand,
};
use shorthorn_types::{Generation, ReplicaId, View, VolumeName};
use tokio::time::{Instant, timeout};

use crate::serve::blocking;
use crate::serve::error::NodeError;
use crate::serve::instance::hub::finish;
use crate::serve::instance::program::{self, Comparison};
use crate::serve::instance::{
    Hub, InstanceId, InstanceProcess, InstanceWatch, ProcessPhase, Spec, control_watch,
};

/// The longest that the new process of an upgrade may take to serve. The last process may drain for 5 s, and
/// the new one waits up to 30 s for its replicas.
const UPGRADE_LIMIT: Duration = Duration::from_secs(60);

/// The longest that an engine may take to serve the device that was recreated. The engine starts again for
/// that, and waits up to 30 s for its replicas.
const RENEW_LIMIT: Duration = Duration::from_secs(60);

/// The result of an upgrade.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Upgraded {
    /// The time without service: from the moment when the old process had finished its requests, or was gone,
    /// until the new one served.
    pub pause: Duration,
    /// The process before.
    pub old_pid: i32,
    /// The process since; the same one if it was left alone.
    pub new_pid: i32,
}

impl Hub {
    /// Sends a grant to an engine; see the node API.
    ///
    /// # Errors
    /// [`NodeError::Precondition`] if it is not the engine of that attachment.
    pub async fn grant(
        self: &Arc<Hub>,
        volume: VolumeName,
        attach: Option<u64>,
        view: View,
    ) -> Result<(), NodeError> {
        let change = move |spec: &mut EngineSpec| {
            if spec.granted.is_none_or(|granted| granted.id < view.id) {
                spec.granted = Some(view);
            }
        };
        self.send_command(volume, attach, change, ProcessCommand::Grant { view }).await
    }

    /// Gives an engine another list of replicas; see the node API.
    ///
    /// # Errors
    /// [`NodeError::Precondition`] if it is not the engine of that attachment.
    pub async fn update_replicas(
        self: &Arc<Hub>,
        volume: VolumeName,
        attach: Option<u64>,
        replicas: Vec<ReplicaEndpoint>,
        revision: u64,
    ) -> Result<(), NodeError> {
        let hub = Arc::clone(self);
        let update = async move {
            let id = InstanceId::Engine(volume);
            let gate = hub.gate(&id);
            let _open = gate.lock().await;
            hub.update_replicas_now(&id, attach, replicas, revision).await
        };
        finish(tokio::spawn(update)).await
    }

    pub(super) async fn update_replicas_now(
        &self,
        id: &InstanceId,
        attach: Option<u64>,
        replicas: Vec<ReplicaEndpoint>,
        revision: u64,
    ) -> Result<(), NodeError> {
        if self.is_revision_old(id, attach, revision) {
            return Ok(());
        }
        let command = ProcessCommand::Replicas { replicas: replicas.clone() };
        self.send_command_now(id, attach, |spec| spec.replicas = replicas, command).await?;
        self.set_revision(id, attach, revision);
        Ok(())
    }

    /// Sets the limits of copies; see the node API.
    ///
    /// # Errors
    /// [`NodeError::Precondition`] if it is not the engine of that attachment.
    pub async fn set_limits(
        self: &Arc<Hub>,
        volume: VolumeName,
        attach: Option<u64>,
        limits: RebuildLimits,
    ) -> Result<(), NodeError> {
        self.send_command(
            volume,
            attach,
            move |spec| spec.rebuild = limits,
            ProcessCommand::Limits { limits },
        )
        .await
    }

    /// Makes the volume of an engine larger; see the node API.
    ///
    /// # Errors
    /// [`NodeError::Precondition`] if it is not the engine of that attachment.
    pub async fn expand(
        self: &Arc<Hub>,
        volume: VolumeName,
        attach: Option<u64>,
        size_bytes: u64,
    ) -> Result<(), NodeError> {
        let hub = Arc::clone(self);
        let expand = async move {
            let id = InstanceId::Engine(volume);
            let gate = hub.gate(&id);
            let _open = gate.lock().await;
            hub.expand_now(&id, attach, size_bytes).await
        };
        finish(tokio::spawn(expand)).await
    }

    /// Expands the volume. The spec comes first: once a replica has grown, every later engine knows it.
    pub(super) async fn expand_now(
        &self,
        id: &InstanceId,
        attach: Option<u64>,
        size_bytes: u64,
    ) -> Result<(), NodeError> {
        let change = |spec: &mut EngineSpec| spec.size_bytes = spec.size_bytes.max(size_bytes);
        self.send_command_now(id, attach, change, ProcessCommand::Expand { size_bytes }).await
    }

    /// Starts or stops a scrub; see the node API.
    ///
    /// # Errors
    /// [`NodeError::Precondition`] if no engine of the volume is here.
    pub async fn scrub(
        self: &Arc<Hub>,
        volume: VolumeName,
        scrub: Option<ScrubCommand>,
    ) -> Result<(), NodeError> {
        self.send_command(volume, None, |_| (), ProcessCommand::Scrub { scrub }).await
    }

    /// Keeps older engines from a replica; see the node API.
    ///
    /// # Errors
    /// [`NodeError::Precondition`] if it does not run here.
    pub async fn fence(
        self: &Arc<Hub>,
        volume: VolumeName,
        replica: ReplicaId,
        attach: u64,
    ) -> Result<(), NodeError> {
        let id = InstanceId::Replica(volume, replica);
        let gate = self.gate(&id);
        let _open = gate.lock().await;
        let control = match self.table().known(&id) {
            Some((Spec::Replica(spec), process)) if process.phase != ProcessPhase::Stopped => {
                spec.control_socket
            }
            _ => return Err(NodeError::Precondition(format!("the {id} does not run here"))),
        };
        let command = ProcessCommand::Fence { generation: Generation::new(attach, 0) };
        send(&id, &control, &command).await
    }

    async fn send_command(
        self: &Arc<Hub>,
        volume: VolumeName,
        attach: Option<u64>,
        change: impl FnOnce(&mut EngineSpec) + Send + 'static,
        command: ProcessCommand,
    ) -> Result<(), NodeError> {
        let hub = Arc::clone(self);
        // A task of its own: a disconnected caller must not leave half of it done.
        let sent = async move {
            let id = InstanceId::Engine(volume);
            let gate = hub.gate(&id);
            let _open = gate.lock().await;
            hub.send_command_now(&id, attach, change, command).await
        };
        finish(tokio::spawn(sent)).await
    }

    async fn send_command_now(
        &self,
        id: &InstanceId,
        attach: Option<u64>,
        change: impl FnOnce(&mut EngineSpec),
        command: ProcessCommand,
    ) -> Result<(), NodeError> {
        let (mut spec, process) = self.engine_of(id, attach)?;
        let before = spec.clone();
        change(&mut spec);
        let control = spec.control_socket.clone();
        if spec != before {
            let spec = Spec::Engine(spec);
            let stored = (spec.clone(), self.paths().clone());
            blocking(move || Ok(stored.0.update(&stored.1)?)).await?;
            self.table().set_spec(spec);
        }
        if process.phase == ProcessPhase::Stopped {
            return Ok(());
        }
        // The command is sent even if no process is known at this moment: one may have read the spec just
        // before.
        send(id, &control, &command).await
    }

    /// Returns the engine of that attachment, or of any if it is none.
    fn engine_of(
        &self,
        id: &InstanceId,
        attach: Option<u64>,
    ) -> Result<(EngineSpec, InstanceProcess), NodeError> {
        let Some((Spec::Engine(spec), process)) = self.table().known(id) else {
            return Err(NodeError::Precondition(format!("{id} does not exist on this node")));
        };
        let there = spec.attach;
        match attach.filter(|attach| *attach != there) {
            Some(attach) => {
                Err(NodeError::Precondition(format!("the {id} here is of attachment {there}, not {attach}")))
            }
            None => Ok((spec, process)),
        }
    }

    /// Replaces the process of an engine under I/O; see the node API. With `only_outdated`, a process that
    /// runs the installed program is left alone.
    ///
    /// # Errors
    /// [`NodeError::Precondition`] if it does not serve, [`NodeError::Unavailable`] if the new one does not
    /// serve in time: it continues to try.
    pub async fn upgrade(
        self: &Arc<Hub>,
        volume: VolumeName,
        attach: Option<u64>,
        only_outdated: bool,
    ) -> Result<Upgraded, NodeError> {
        let (hub, id) = (Arc::clone(self), InstanceId::Engine(volume));
        finish(tokio::spawn(async move { hub.upgrade_now(id, attach, only_outdated).await })).await
    }

    async fn upgrade_now(
        &self,
        id: InstanceId,
        attach: Option<u64>,
        only_outdated: bool,
    ) -> Result<Upgraded, NodeError> {
        let gate = self.gate(&id);
        let _open = gate.lock().await;
        let (_, process) = self.engine_of(&id, attach)?;
        let shown = self.published(&id)?;
        let Some(old_pid) = process.pid.filter(|_| is_serving(&shown)) else {
            let message = format!("the {id} does not serve: it can be upgraded when it does");
            return Err(NodeError::Precondition(message));
        };
        // Behind the gate: of two callers, the second one meets the process that the first one has started.
        if only_outdated && !is_outdated(&shown, old_pid).await? {
            return Ok(Upgraded { pause: Duration::ZERO, old_pid, new_pid: old_pid });
        }
        let mut watch = self.table().watch();
        self.backend().restart(&id).await?;
        let name = id.name();
        let measured = measure(&mut watch, &name, old_pid);
        let late = |_| {
            NodeError::Unavailable(format!(
                "the new process of the {id} does not serve within {} s and keeps trying; see its log",
                UPGRADE_LIMIT.as_secs()
            ))
        };
        let upgraded = timeout(UPGRADE_LIMIT, measured).await.map_err(late)??;
        tracing::info!(instance = %id, ?upgraded, "upgraded");
        Ok(upgraded)
    }
}

impl Hub {
    /// Replaces the device of an engine, if it could not grow while it was in use and has no user now. The
    /// new one has the size of the volume. Returns when it serves.
    ///
    /// # Errors
    /// [`NodeError`] has the obstacle. The engine is started in any case.
    pub async fn renew_device(self: &Arc<Hub>, volume: VolumeName) -> Result<(), NodeError> {
        let hub = Arc::clone(self);
        // A task of its own: a disconnected caller must not leave an engine stopped.
        finish(tokio::spawn(async move { hub.renew_now(InstanceId::Engine(volume)).await })).await
    }

    async fn renew_now(&self, id: InstanceId) -> Result<(), NodeError> {
        let mut watch = {
            let gate = self.gate(&id);
            let _open = gate.lock().await;
            let Some((Spec::Engine(spec), process)) = self.table().known(&id) else { return Ok(()) };
            let keeps_size = self.table().published(&id).is_some_and(|shown| keeps_size(&shown));
            if process.phase == ProcessPhase::Stopped || !keeps_size {
                return Ok(());
            }
            self.refuse_in_use(&spec).await?;
            let watch = self.table().watch();
            tracing::info!(instance = %id, "recreating the device with the size of the volume");
            self.table().set_process(&id, InstanceProcess { phase: ProcessPhase::Stopping, ..process });
            // The engine removes its device. For the controller it stays the same engine, which never
            // stopped.
            let stopped = self.backend().stop(&id).await;
            self.table().set_process(&id, InstanceProcess::only(ProcessPhase::Starting));
            if let Err(error) = self.backend().start(&id).await {
                self.table().set_process(&id, InstanceProcess::failed(error.to_string()));
                return Err(error.into());
            }
            stopped?;
            watch
        };
        let name = id.name();
        let late = |_| {
            NodeError::Unavailable(format!(
                "the {id} does not serve its new device within {} s and keeps trying; see its log",
                RENEW_LIMIT.as_secs()
            ))
        };
        timeout(RENEW_LIMIT, serves(&mut watch, &name)).await.map_err(late)?
    }
}

/// Returns true if the device of an engine has its new size only once it is recreated.
fn keeps_size(instance: &v1::Instance) -> bool {
    let Some(Detail::Engine(engine)) = &instance.detail else { return false };
    is_serving(instance) && engine.expansion.as_ref().is_some_and(|expansion| expansion.next_attach)
}

/// Waits until an engine serves whose device needs not be recreated.
async fn serves(watch: &mut InstanceWatch, name: &str) -> Result<(), NodeError> {
    loop {
        let changed = watch.changes.recv().await.map_err(NodeError::lost)?;
        let is_it = |instance: &v1::Instance| {
            instance.kind() == v1::InstanceKind::Engine && instance.name == name && is_serving(instance)
        };
        if changed.instance.is_some_and(|instance| is_it(&instance) && !keeps_size(&instance)) {
            return Ok(());
        }
    }
}

async fn send(id: &InstanceId, control: &Path, command: &ProcessCommand) -> Result<(), NodeError> {
    control_watch::request(control, command).await.map_err(|error| {
        NodeError::Unavailable(format!("cannot send a command to the {id}: {}: {error}", control.display()))
    })
}

fn is_serving(instance: &v1::Instance) -> bool {
    instance.state() == v1::InstanceState::Running && says_serving(instance)
}

fn says_serving(instance: &v1::Instance) -> bool {
    matches!(
        &instance.detail, Some(Detail::Engine(engine)) if engine.known_phase() == Some(EnginePhase::Serving)
    )
}

/// Returns true if the process of an engine runs another program than the installed one, or may do so.
async fn is_outdated(engine: &v1::Instance, pid: i32) -> Result<bool, NodeError> {
    let compared = blocking(move || Ok(program::differs(pid))).await?;
    let comparison = compared.map_or(Comparison::ByVersion, |differs| Comparison::Done { differs });
    let version = match &engine.detail {
        Some(Detail::Engine(engine)) => engine.known_version(),
        _ => None,
    };
    Ok(comparison.needs_upgrade(version).unwrap_or(true))
}

/// Waits for the end of one process and the start of the next one.
async fn measure(watch: &mut InstanceWatch, name: &str, old_pid: i32) -> Result<Upgraded, NodeError> {
    let mut quiet_since = None;
    loop {
        let changed = watch.changes.recv().await.map_err(NodeError::lost)?;
        let Some(instance) = changed
            .instance
            .filter(|instance| instance.kind() == v1::InstanceKind::Engine && instance.name == name)
        else {
            continue;
        };
        // A stopping engine continues to serve until everything is flushed.
        if instance.pid != old_pid || !says_serving(&instance) {
            quiet_since.get_or_insert_with(Instant::now);
        }
        if let Some(since) = quiet_since.filter(|_| instance.pid != old_pid && is_serving(&instance)) {
            return Ok(Upgraded { pause: since.elapsed(), old_pid, new_pid: instance.pid });
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tokio::sync::{broadcast, watch};

    use super::*;
    use crate::serve::instance::{Children, InstancePaths, Table};
    use crate::serve::network::Choice;

    #[tokio::test]
    async fn a_changed_spec_keeps_nested_fields_of_a_later_version() {
        let folder = tempfile::tempdir().unwrap();
        let paths = InstancePaths::prepare(&folder.path().join("s"), &folder.path().join("r")).unwrap();
        let stored = include_str!("../../../control/tests/releases/0.1.0/engine.json");
        let mut stored: Value = serde_json::from_str(stored).unwrap();
        stored["rebuild"] = json!({ "bytes_per_s": 0, "share_percent": 30, "later": { "x": 1 } });
        stored["replicas"][1]["later"] = true.into();
        let volume: VolumeName = stored["volume"].as_str().unwrap().parse().unwrap();
        let path = paths.spec(&InstanceId::Engine(volume.clone()));
        std::fs::write(&path, stored.to_string()).unwrap();
        let table = Table::new();
        let backend = Box::new(Children::new(paths.clone(), Arc::clone(&table)).unwrap());
        let (_choice, address) = watch::channel(Choice::default());
        let hub = Hub::start(10000..=10009, address, paths, table, backend).await.unwrap();
        hub.set_limits(volume, Some(4), RebuildLimits { bytes_per_s: Some(7), share_percent: 30 })
            .await
            .unwrap();
        let kept: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(kept["rebuild"], json!({ "bytes_per_s": 7, "share_percent": 30, "later": { "x": 1 } }));
        assert_eq!(kept["replicas"][1]["later"], true);
    }

    fn shown(pid: i32, phase: Option<EnginePhase>) -> v1::InstanceEvent {
        let engine = v1::EngineStatus::default().with_phase(phase);
        let instance = v1::Instance {
            kind: v1::InstanceKind::Engine.into(),
            name: "v1".into(),
            state: v1::InstanceState::Running.into(),
            pid,
            detail: Some(Detail::Engine(engine)),
            ..v1::Instance::default()
        };
        v1::InstanceEvent { instance: Some(instance), ..v1::InstanceEvent::default() }
    }

    fn with_expansion(phase: EnginePhase, next_attach: bool) -> v1::InstanceEvent {
        let mut event = shown(1, Some(phase));
        if let Some(Detail::Engine(engine)) = event.instance.as_mut().and_then(|shown| shown.detail.as_mut())
        {
            let (size_bytes, message) = (2 << 30, "the driver cannot".to_owned());
            engine.expansion = Some(v1::Expansion { size_bytes, message, next_attach });
        }
        event
    }

    #[test]
    fn only_a_device_that_cannot_grow_in_use_is_recreated() {
        let keeps = |event: v1::InstanceEvent| keeps_size(&event.instance.unwrap());
        assert!(keeps(with_expansion(EnginePhase::Serving, true)));
        // A running expansion ends by itself, and an engine that starts or is frozen has no size to take.
        for event in [
            with_expansion(EnginePhase::Serving, false),
            with_expansion(EnginePhase::Starting, true),
            shown(1, Some(EnginePhase::Serving)),
        ] {
            assert!(!keeps(event));
        }
    }

    #[tokio::test]
    async fn a_device_is_recreated_once_an_engine_serves_it() {
        let (sent, changes) = broadcast::channel(16);
        let mut watch = InstanceWatch { now: Vec::new(), changes };
        for event in [
            with_expansion(EnginePhase::Serving, true),
            shown(0, None),
            shown(2, Some(EnginePhase::Starting)),
            shown(2, Some(EnginePhase::Serving)),
        ] {
            sent.send(event).unwrap();
        }
        serves(&mut watch, "v1").await.unwrap();
        assert!(watch.changes.is_empty(), "not before the last of them");
    }

    #[tokio::test(start_paused = true)]
    async fn the_pause_is_from_the_end_of_one_to_the_service_of_the_next() {
        let (sent, changes) = broadcast::channel(16);
        let mut watch = InstanceWatch { now: Vec::new(), changes };
        let sender = async {
            // The old one still serves, then ends; the new one starts, then serves.
            for (wait_ms, pid, phase) in [
                (50, 1, Some(EnginePhase::Serving)),
                (10, 1, Some(EnginePhase::Stopping)),
                (20, 0, None),
                (30, 2, Some(EnginePhase::Starting)),
                (40, 2, Some(EnginePhase::Serving)),
            ] {
                tokio::time::sleep(Duration::from_millis(wait_ms)).await;
                sent.send(shown(pid, phase)).unwrap();
                tokio::task::yield_now().await;
            }
        };
        let (measured, ()) = tokio::join!(measure(&mut watch, "v1", 1), sender);
        let measured = measured.unwrap();
        assert_eq!((measured.old_pid, measured.new_pid), (1, 2));
        assert_eq!(measured.pause.as_millis(), 90);
    }
}
