//! Expands a volume. First its new size is scheduled on the disks of its replicas. Then the engine gets the
//! order, and grows first the replicas and then the device. The volume has its new size only when the device
//! shows it.
//!
//! A detached volume has the new size at once. An engine makes every replica grow before it serves, including
//! formerly absent ones, so no reader sees the old size again.

use super::VolumeReconciler;
use crate::objects::{
    ConditionType, Engine, EngineSpec, Finding, NEXT_ATTACH, Replica, ReplicaSpec, VolumeState,
};

impl VolumeReconciler<'_> {
    /// Brings the size to the stored replicas and the engine; returns true if they changed.
    pub(super) fn expand(&mut self) -> bool {
        let size = self.stored.spec.size;
        let smaller = |replica: &&Replica| replica.spec.volume_size < size;
        let replicas: Vec<&Replica> = self.objects.replicas().iter().copied().filter(smaller).collect();
        for replica in &replicas {
            let spec = ReplicaSpec { volume_size: size, ..replica.spec.clone() };
            self.actions.write(Replica { spec, ..(*replica).clone() });
        }
        if !replicas.is_empty() {
            return true;
        }
        let Some(engine) = self.objects.engine().filter(|engine| engine.spec.volume_size < size) else {
            return false;
        };
        let spec = EngineSpec { volume_size: size, ..engine.spec.clone() };
        self.actions.write(Engine { spec, ..engine.clone() });
        true
    }

    /// Records the actual size of the volume, and the obstacle of a larger one.
    pub(super) fn record_size(&mut self) {
        let size = self.stored.spec.size;
        if self.stored.is_deleting() {
            return;
        }
        if self.status.decided().current_size.is_none() {
            // From here on the size that is wanted may be changed alone.
            self.status.set_current_size(size);
            return;
        }
        if self.has_size() {
            if self.status.set_current_size(size) {
                self.actions.emit(false, "Expanded", format!("volume has {size} bytes now"));
            }
            if self.status.condition(ConditionType::Expanded).is_some() {
                self.status.set(ConditionType::Expanded, Finding::Well);
            }
            return;
        }
        let finding = self.find_expansion();
        self.status.set(ConditionType::Expanded, finding);
    }

    fn has_size(&self) -> bool {
        let size = self.stored.spec.size;
        let engine = self.objects.engine().filter(|engine| {
            engine.spec.attach == self.stored.status.attach
                && engine.status.seen_attach == engine.spec.attach
                && engine.status.is_serving()
        });
        match self.status.decided().state {
            VolumeState::Creating | VolumeState::Detached => true,
            _ if self.stored.status.current_size >= Some(size) => true,
            _ => engine.is_some_and(|engine| engine.status.current_size >= Some(size)),
        }
    }

    fn find_expansion(&self) -> Finding {
        let expansion = self.objects.engine().and_then(|engine| engine.status.expansion.as_ref());
        let obstacle = expansion.and_then(|expansion| expansion.message.as_deref());
        if expansion.is_some_and(|expansion| expansion.next_attach) {
            let why = obstacle.unwrap_or_default();
            return Finding::wrong(
                NEXT_ATTACH,
                format!("the device has its new size when the volume is attached again: {why}"),
            );
        }
        match obstacle {
            Some(obstacle) => Finding::wrong("Expanding", obstacle),
            _ if self.status.decided().state == VolumeState::Attached => {
                Finding::wrong("Expanding", "the replicas and the device are being expanded")
            }
            _ => Finding::wrong("Expanding", "the replicas are expanded when the volume is attached"),
        }
    }
}
