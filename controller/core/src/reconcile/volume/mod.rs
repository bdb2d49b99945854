//! The life of a volume: its state machine, one step per run.

mod actions;
mod arbiter;
mod attach;
mod create;
mod detach;
mod display;
mod expand;
mod fence;
mod replace;
mod restored_store;
mod salvage;
mod status_update;
mod surplus;
mod volume_objects;

pub(super) use detach::engine_is_over;
pub use display::is_noticeable;
pub(super) use replace::may_go;

use self::actions::StagedActions;
use self::status_update::StatusUpdate;
use self::volume_objects::VolumeObjects;
use super::{Context, Reachability, health, quiet_left, reachability, remaining};
use crate::Decision;
use crate::objects::{ConditionType, Finding, Key, Kind, Robustness, Volume, VolumeState};

/// The word for programs of a deletion that a PersistentVolume holds up.
const DELETION_HELD: &str = "DeletionHeld";

/// The word for programs of a volume that waits for an object that the controller cannot use.
const OBJECT_UNKNOWN: &str = "ObjectUnknown";

/// A run over a volume: its objects, and the new status and the actions so far.
struct VolumeReconciler<'a> {
    context: &'a Context<'a>,
    stored: &'a Volume,
    status: StatusUpdate<'a>,
    objects: VolumeObjects<'a>,
    actions: StagedActions,
}

pub(super) fn reconcile(context: &Context<'_>, name: &str) -> Decision {
    let Some(stored) = context.cluster.volumes.get(name) else { return Decision::nothing() };
    let mut reconciler = VolumeReconciler {
        context,
        stored,
        status: StatusUpdate::new(stored, context.now),
        objects: VolumeObjects::of(context, stored),
        actions: StagedActions::new(name),
    };
    match context.cluster.unknown(&Key::new(Kind::Engine, name)) {
        // It may write: nothing that follows from its state can be decided.
        Some(message) => reconciler.set_settled(Finding::wrong(OBJECT_UNKNOWN, message)),
        None => reconciler.step(),
    }
    reconciler.show();
    reconciler.actions.finish(reconciler.status.finish())
}

impl VolumeReconciler<'_> {
    fn step(&mut self) {
        if let Some(persistent_volume) = self.stored.deletion_waits_for() {
            self.hold_deletion(persistent_volume);
        } else if self.stored.status.conditions.get(ConditionType::Accepted).is_some() {
            // The volume was refused once; a volume that comes here is valid.
            self.status.set(ConditionType::Accepted, Finding::Well);
        }
        // A volume whose device is in use continues until it can be stopped, even if it is deleted.
        if !self.stored.is_deleting() || !engine_is_over(self.context, self.stored) {
            if self.renew_stale_attach() {
                return;
            }
            self.renew_record();
            self.record_reported_grant();
            self.arbitrate();
            if self.expand() {
                return;
            }
        }
        self.advance();
        self.record_size();
    }

    /// Lets the volume continue as if the deletion had not been requested, because a PersistentVolume may be
    /// in use.
    fn hold_deletion(&mut self, persistent_volume: &str) {
        let message = format!(
            "deletion requested: the volume is deleted once PersistentVolume {persistent_volume} is deleted \
             or released"
        );
        let accepted = self.stored.status.conditions.get(ConditionType::Accepted);
        if accepted.is_none_or(|accepted| accepted.status || accepted.message != message) {
            self.actions.emit(true, DELETION_HELD, message.clone());
        }
        let finding = Finding::wrong(DELETION_HELD, message);
        self.status.set(ConditionType::Accepted, finding);
    }

    fn advance(&mut self) {
        let desired = self.stored.spec.node_id.as_ref();
        let here = desired.is_some() && desired == self.stored.status.current_node_id.as_ref();
        match self.stored.status.state {
            _ if self.stored.is_deleting() => self.tear_down(),
            VolumeState::Creating => self.create(),
            VolumeState::Detached | VolumeState::Attaching
                if self.stored.status.pending_salvage().is_some() =>
            {
                self.salvage();
            }
            VolumeState::Detached => match desired.cloned() {
                Some(node) => self.begin_attach(node),
                None => self.stop_replicas(),
            },
            VolumeState::Attaching if here => self.attach(),
            VolumeState::Attached if here => self.maintain_attached(),
            // Stored before anything is stopped.
            VolumeState::Attaching | VolumeState::Attached => {
                self.enter(VolumeState::Detaching);
                self.set_settled(Finding::wrong("Detaching", "the engine is being stopped"));
            }
            VolumeState::Detaching if here => {
                if !self.keep_attached() {
                    self.detach();
                }
            }
            VolumeState::Detaching | VolumeState::Deleting => self.detach(),
        }
    }

    fn enter(&mut self, state: VolumeState) {
        if self.status.enter(state) {
            let node = self.status.decided().current_node_id.as_ref();
            let at = node.map(|node| format!(", node {node}")).unwrap_or_default();
            let message = format!("volume is {}{at}", state.as_str());
            self.actions.emit(false, reason(state), message);
        }
    }

    /// Returns true if the run ends here because an object of the volume is stored that the controller cannot
    /// use.
    fn waits_for_unknown(&mut self) -> bool {
        let unknown = self.context.cluster.unknown_of(&self.stored.metadata.name);
        let Some(message) = unknown else { return false };
        self.set_settled(Finding::wrong(OBJECT_UNKNOWN, message));
        true
    }

    /// Records the event that the volume waits for, if any.
    fn set_settled(&mut self, finding: Finding) {
        self.status.set(ConditionType::Settled, finding);
    }

    /// Records like [`VolumeReconciler::set_settled`], but not for a start that may soon be over.
    fn set_settled_of_start(&mut self, finding: Finding) {
        let left = quiet_left(self.context, Some(self.stored));
        if left.is_zero() {
            self.set_settled(finding);
        } else {
            self.actions.again_after(left);
        }
    }

    /// Records why the robustness of a detached volume is not known. That is not a problem, so it is not
    /// reported.
    fn set_health_unknown(&mut self) {
        self.status.set_robustness(Robustness::Unknown);
        let message = "the volume is not attached, and only its engine knows which replicas have all data";
        let finding = Finding::wrong("NotAttached", message);
        self.status.set(ConditionType::Healthy, finding);
    }

    fn set_health(&mut self, robustness: Robustness, finding: Finding) {
        let worse = matches!(robustness, Robustness::Degraded | Robustness::Faulted);
        if self.status.set_robustness(robustness) {
            let message = match &finding {
                Finding::Well => format!("volume is {}", robustness.as_str()),
                Finding::Wrong(_, message) => format!("volume is {}: {message}", robustness.as_str()),
            };
            self.actions.emit(worse, health_reason(robustness), message);
        }
        self.status.set(ConditionType::Healthy, finding);
    }
}

/// Returns the word for programs of the event that a volume has come to a state.
const fn reason(state: VolumeState) -> &'static str {
    match state {
        VolumeState::Creating => "Creating",
        VolumeState::Attached => "Attached",
        VolumeState::Detached => "Detached",
        VolumeState::Attaching => "Attaching",
        VolumeState::Detaching => "Detaching",
        VolumeState::Deleting => "Deleting",
    }
}

/// Returns the same for its robustness.
const fn health_reason(robustness: Robustness) -> &'static str {
    match robustness {
        Robustness::Healthy => "Healthy",
        Robustness::Degraded => "Degraded",
        Robustness::Faulted => "Faulted",
        Robustness::Unknown => "HealthUnknown",
    }
}
