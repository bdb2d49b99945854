//! Objects that the store cannot read for a while. Rules look at all objects; the controller does not see
//! these.

use shorthorn_controller_core::left_out_objects::LeftOut;
use shorthorn_controller_core::objects::Key;

use super::{Sim, choose};

impl Sim {
    /// An object cannot be read any more, and its text says where it is or not.
    pub(super) fn leave_out(&mut self, which: usize) {
        let keys: Vec<Key> = self.store.keys().collect();
        let Some(key) = choose(&keys, which) else { return };
        let Some(object) = self.store.get(&key) else { return };
        let raw = serde_json::to_value(&object).ok().filter(|_| which.is_multiple_of(2));
        let left_out = LeftOut::new(key.kind, raw.as_ref(), "it is damaged", "wait");
        self.hidden.insert(key, (object, left_out));
        self.hide();
    }

    pub(super) fn take_in(&mut self, which: usize) {
        let keys: Vec<Key> = self.hidden.keys().cloned().collect();
        if let Some((object, _)) = choose(&keys, which).and_then(|key| self.hidden.remove(&key)) {
            self.store.insert(object);
        }
    }

    /// Makes all objects readable again.
    pub(super) fn take_all_in(&mut self) {
        self.reveal();
        self.hidden.clear();
    }

    /// Puts the hidden objects back into the store, so that a rule can look at all objects.
    pub(super) fn reveal(&mut self) {
        for (object, _) in self.hidden.values() {
            self.store.insert(object.clone());
        }
    }

    pub(super) fn hide(&mut self) {
        for (key, (_, left_out)) in &self.hidden {
            self.store.remove(key);
            self.store.leave_out(key.clone(), left_out.clone());
        }
    }
}
