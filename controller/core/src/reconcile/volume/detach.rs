use super::Run;
use crate::Action;
use crate::objects::{
    CurrentState, DesireState, Engine, EngineSpec, Finding, Key, Kind, Metadata, Replica, Robustness, Volume,
    VolumeState,
};
use crate::reconcile::{Context, is_given_up};

/// Whether no engine of the volume can write any more: the data of one that is deleted may go.
pub(in crate::reconcile) fn engine_is_over(context: &Context<'_>, volume: &Volume) -> bool {
    let Some(engine) = context.world.engines.get(&volume.metadata.name) else { return true };
    let is_given_up = || engine.spec.node_id.as_ref().is_some_and(|node| is_given_up(context, node));
    engine.spec.desire_state == DesireState::Stopped
        && (engine.status.current_state == CurrentState::Stopped
            || engine.spec.attach <= volume.status.fenced_attach
            || is_given_up())
}

impl Run<'_> {
    /// The engine, then the replicas.
    pub(super) fn detach(&mut self) {
        if !self.engine_stopped() {
            return;
        }
        self.want_replicas(DesireState::Stopped);
        // A replica whose node is out of reach is stopped when that is back; generations keep it harmless.
        let stopped = |replica: &&Replica| {
            replica.spec.desire_state == DesireState::Stopped
                && matches!(replica.status.current_state, CurrentState::Stopped | CurrentState::Unknown)
        };
        if !self.replicas.iter().all(stopped) {
            let message = format!("the replicas are being stopped{}", self.replica_messages());
            self.settle(Finding::wrong("Detaching", message));
            return;
        }
        self.next.status.current_node_id = None;
        self.enter(VolumeState::Detached);
        self.next.status.robustness = Robustness::Unknown;
        self.settle(Finding::Well);
    }

    /// Whether no engine runs, or none that matters; asks for that where one may.
    pub(super) fn engine_stopped(&mut self) -> bool {
        let Some(engine) = self.engine else { return true };
        if engine.spec.desire_state != DesireState::Stopped {
            let spec = EngineSpec { desire_state: DesireState::Stopped, ..engine.spec.clone() };
            self.decision.write(Engine { spec, ..engine.clone() });
        } else if engine.status.current_state == CurrentState::Stopped
            || self.is_fenced(engine)
            || self.goes_with_its_node(engine)
        {
            return true;
        }
        let message = &engine.status.message;
        let finding = match engine.status.current_state {
            CurrentState::Unknown => {
                self.fence(engine, message);
                return false;
            }
            CurrentState::Stopping if !message.is_empty() => {
                Finding::wrong("EngineNotStopped", format!("the engine cannot be stopped yet: {message}"))
            }
            _ => Finding::wrong("Detaching", "the engine is being stopped"),
        };
        self.settle(finding);
        false
    }

    /// Whether the engine of a volume that is to be deleted is on a node that never comes back: no other one follows it.
    fn goes_with_its_node(&self, engine: &Engine) -> bool {
        self.stored.is_deleting()
            && engine.spec.node_id.as_ref().is_some_and(|node| is_given_up(self.context, node))
    }

    /// Everything stops, then the replicas go with their data, then the objects.
    pub(super) fn tear_down(&mut self) {
        self.enter(VolumeState::Deleting);
        if !self.engine_stopped() {
            return;
        }
        if !self.replicas.is_empty() {
            self.delete_replicas();
            return;
        }
        // An engine that is only fenced is still a process on its node: somebody has to know of it when that is back.
        if let Some(engine) =
            self.engine.filter(|engine| engine.status.current_state != CurrentState::Stopped)
            && !self.goes_with_its_node(engine)
        {
            let message = format!(
                "the data is deleted; the engine is stopped when its node is back: {}",
                engine.status.message
            );
            self.settle(Finding::wrong("NodeUnreachable", message));
            return;
        }
        // The volume goes last: while it is there, the next run finds what is left.
        let key = |kind| Key::new(kind, &self.stored.metadata.name);
        if let Some(engine) = self.engine {
            let version = engine.metadata.resource_version;
            self.decision.actions.push(Action::Remove(key(Kind::Engine), version));
        }
        self.decision.actions.push(Action::Remove(key(Kind::Volume), self.stored.metadata.resource_version));
        self.next = self.stored.clone();
    }

    /// Writes nothing else: a store may take a deletion and other changes by calls of their own.
    pub(super) fn ask_for_deletion(&mut self, replica: &Replica) {
        if replica.metadata.is_deleting() {
            return;
        }
        let metadata = Metadata { deletion_timestamp: Some(self.context.now), ..replica.metadata.clone() };
        self.decision.write(Replica { metadata, ..replica.clone() });
    }

    fn delete_replicas(&mut self) {
        for replica in self.replicas.clone() {
            self.ask_for_deletion(replica);
        }
        let message = format!("the data of the replicas is being deleted{}", self.replica_messages());
        self.settle(Finding::wrong("Deleting", message));
    }

    /// What stands in the way of the replicas.
    fn replica_messages(&self) -> String {
        let said = self.replicas.iter().filter(|replica| !replica.status.message.is_empty());
        said.map(|replica| format!("; {}: {}", replica.metadata.name, replica.status.message)).collect()
    }
}
