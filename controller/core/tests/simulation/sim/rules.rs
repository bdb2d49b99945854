//! What must hold after every step, and what must be so in the end.

use shorthorn_controller_core::objects::{CurrentState, Engine, Object, Robustness, Volume, VolumeState};
use shorthorn_controller_core::observed::{InstanceKey, InstanceKind};
use shorthorn_controller_core::{AgentCall, NodeName};

use super::Sim;
use crate::agent::SimAgent;

impl Sim {
    pub(super) fn check_write(&self, object: &Object) {
        match object {
            Object::Volume(volume) => {
                let stored = self.store.volumes.get(&volume.metadata.name);
                let attach = stored.map_or(0, |stored| stored.status.attach);
                assert!(volume.status.attach >= attach, "the attach number falls");
                assert!(volume.status.attach <= attach + 1, "the attach number jumps");
                let detached = volume.status.state == VolumeState::Detached;
                assert!(
                    !detached || !self.has_engine(volume),
                    "a volume is called detached with an engine there"
                );
            }
            Object::Engine(engine) => self.check_engine_write(engine),
            Object::Replica(_) | Object::Node(_) => {}
        }
    }

    /// Whether an engine is there that the controller knows of.
    fn has_engine(&self, volume: &Volume) -> bool {
        let key = InstanceKey::engine(&volume.spec.volume_name);
        self.nodes.iter().any(|node| node.instances.contains_key(&key) && !node.strays.contains(&key))
    }

    fn check_engine_write(&self, engine: &Engine) {
        let Some(stored) = self.store.engines.get(&engine.metadata.name) else { return };
        let same_map = engine.spec.replica_address_map == stored.spec.replica_address_map;
        assert!(engine.spec.attach > stored.spec.attach || same_map, "an attachment gets other replicas");
        let Some(node) =
            stored.spec.node_id.as_ref().filter(|node| engine.spec.node_id.as_ref() != Some(*node))
        else {
            return;
        };
        assert_eq!(stored.status.current_state, CurrentState::Stopped, "an engine moves that may run");
        let key = InstanceKey::engine(&engine.spec.volume_name);
        let node = self.nodes.iter().find(|other| other.name == *node).unwrap();
        let runs = node.instances.contains_key(&key) && !node.strays.contains(&key);
        assert!(!runs, "the engine of {} moves while it runs", key.name);
    }

    pub(super) fn check_call(&mut self, node: &NodeName, call: &AgentCall) {
        match call {
            AgentCall::StartEngine { volume, attach, replicas, .. } => {
                let stored = self.store.volumes[volume.as_str()].status.attach;
                assert!(*attach <= stored, "attachment {attach} is used before it is stored");
                let seen = self.store.engines[volume.as_str()].status.seen_attach;
                assert!(seen < *attach, "a lost engine is started again under its number {attach}");
                let names: Vec<String> = replicas.keys().map(|id| format!("{volume}-{id}")).collect();
                assert!(!names.is_empty(), "an engine is started without replicas");
                self.used.extend(names.iter().cloned());
                let this = (node.clone(), names);
                let first = self.started.entry((volume.to_string(), *attach)).or_insert_with(|| this.clone());
                assert_eq!(*first, this, "attachment {attach} of {volume} is used twice");
            }
            AgentCall::DeleteReplica { volume, .. } => {
                let stored = &self.store.volumes[volume.as_str()];
                assert!(stored.metadata.is_deleting(), "data of a volume that stays is deleted");
                let engine = &self.store.engines[volume.as_str()];
                assert_eq!(
                    engine.status.current_state,
                    CurrentState::Stopped,
                    "data is deleted under an engine"
                );
            }
            AgentCall::StartReplica { .. } | AgentCall::StopInstance { .. } => {}
        }
    }

    pub fn check_converged(&self) {
        for volume in self.store.volumes.values() {
            assert!(!volume.metadata.is_deleting(), "{} is never deleted", volume.metadata.name);
            self.check_volume(volume);
        }
        for node in &self.nodes {
            for key in node.instances.keys() {
                self.check_instance(node, key);
            }
            for name in &node.directories {
                let known = self.store.replicas.get(name);
                assert!(
                    known.is_some_and(|replica| replica.spec.node_id == node.name),
                    "{name} is left over"
                );
            }
        }
    }

    fn check_volume(&self, volume: &Volume) {
        let (spec, status) = (&volume.spec, &volume.status);
        let replicas = self.store.replicas_of(&spec.volume_name);
        let lost = replicas.filter(|replica| self.lost_directories.contains(&replica.metadata.name)).count();
        match &spec.node_id {
            None => {
                assert_eq!(status.state, VolumeState::Detached, "{volume:#?}");
                assert_eq!(status.current_node_id, None);
            }
            Some(_) if lost > 0 && status.state == VolumeState::Attaching => {
                assert_eq!(status.robustness, Robustness::Faulted, "{volume:#?}");
            }
            Some(node) => {
                assert_eq!(status.state, VolumeState::Attached, "{volume:#?}");
                assert_eq!(status.current_node_id.as_ref(), Some(node));
                let key = InstanceKey::engine(&spec.volume_name);
                let place = self.nodes.iter().find(|other| other.name == *node).unwrap();
                assert!(place.instances.contains_key(&key), "{} has no engine", volume.metadata.name);
            }
        }
    }

    fn check_instance(&self, node: &SimAgent, key: &InstanceKey) {
        let volume = match key.kind {
            InstanceKind::Engine => self.store.volumes.get(&key.name),
            InstanceKind::Replica => {
                let replica = self.store.replicas.get(&key.name);
                replica.and_then(|replica| self.store.volumes.get(replica.spec.volume_name.as_str()))
            }
        };
        let wanted = volume.and_then(|volume| volume.spec.node_id.as_ref());
        match key.kind {
            InstanceKind::Engine => assert_eq!(wanted, Some(&node.name), "{key} is left over"),
            InstanceKind::Replica => assert!(wanted.is_some(), "{key} is left over"),
        }
    }
}
