//! Calls that come after their caller has given them up.

use shorthorn_controller_core::objects::Replica;
use shorthorn_controller_core::observed::InstanceKind;

use super::Sim;

impl Sim {
    pub(super) fn late_call_arrives(&mut self, which: usize) {
        if self.late.is_empty() {
            return;
        }
        self.reveal();
        self.late_call(which);
        self.hide();
    }

    fn late_call(&mut self, which: usize) {
        let (node, call) = self.late.remove(which % self.late.len());
        // How late a call can be is bounded by its time limit; a volume or a replica that was deleted since
        // is later.
        let volume = call.instance();
        let is_kept = |replica: &Replica| !replica.metadata.is_deleting();
        if volume.kind == InstanceKind::Replica && !self.store.replicas.get(&volume.name).is_some_and(is_kept)
        {
            return;
        }
        let known = self.store.engines.values().any(|engine| {
            let name = engine.spec.volume_name.as_str();
            self.store.volumes.get(name).is_some_and(|volume| !volume.metadata.is_deleting())
                && (volume.name == name || volume.name.starts_with(&format!("{name}-")))
        });
        if known {
            let _ = self.arrive(&node, &call, true);
        }
    }
}
