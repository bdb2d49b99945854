//! Commands to a running engine. Each is stored in its spec file first, so that the next process knows it
//! too.

use std::path::Path;
use std::sync::Arc;

use shorthorn_control::{EngineSpec, ProcessCommand, RebuildLimits, ReplicaEndpoint, ScrubCommand};
use shorthorn_types::{Generation, ReplicaId, View, VolumeName};

use crate::serve::blocking;
use crate::serve::error::NodeError;
use crate::serve::instance::hub::finish;
use crate::serve::instance::{Hub, InstanceId, InstanceProcess, ProcessPhase, Spec, control_watch};

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
    pub(super) fn engine_of(
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
}

async fn send(id: &InstanceId, control: &Path, command: &ProcessCommand) -> Result<(), NodeError> {
    control_watch::request(control, command).await.map_err(|error| {
        NodeError::Unavailable(format!("cannot send a command to the {id}: {}: {error}", control.display()))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tokio::sync::watch;

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
}
