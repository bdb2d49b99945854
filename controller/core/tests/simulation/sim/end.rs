//! The end of the faults.

use shorthorn_controller_core::objects::Volume;
use shorthorn_controller_core::requests::{self, Change, SetNode};

use super::{Sim, user};

impl Sim {
    pub fn stop_faults(&mut self) {
        self.take_all_in();
        self.paused.clear();
        while !self.late.is_empty() {
            self.late_call_arrives(0);
        }
        for at in 0..self.nodes.len() {
            self.nodes[at].in_use = None;
            self.controller.close(&self.nodes[at].name, self.now);
        }
        let Some(lost) = self.lost else { return };
        let lost = self.nodes[lost].name.clone();
        let there = |volume: &&Volume| volume.spec.node_id.as_ref() == Some(&lost);
        let names: Vec<String> =
            self.store.volumes.values().filter(there).map(|volume| volume.metadata.name.clone()).collect();
        for name in names {
            if let Ok(Change::Store(volume)) = requests::detach(&self.store, &name) {
                assert!(self.put(volume.into()));
            }
        }
    }

    /// Opens or closes every device, for a user who does not release it when its volume is detached.
    pub fn use_devices(&mut self, used: bool) {
        self.nodes.iter_mut().for_each(|node| node.in_use = user(used));
    }

    /// Makes every volume that cannot leave its node wanted there again.
    pub fn want_back(&mut self) {
        for (name, _) in self.leaving() {
            let node = self.store.volumes[&name].status.current_node_id.clone().unwrap();
            if let Ok(Change::Store(volume)) = requests::detach(&self.store, &name) {
                assert!(self.put(volume.into()));
            }
            let Ok(Change::Store(volume)) = requests::attach(&self.store, &name, node.as_str()) else {
                panic!("{name} cannot be wanted on {node}");
            };
            assert!(self.put(volume.into()));
            let attach = self.store.volumes[&name].status.attach;
            self.wanted_back.insert(name, attach);
        }
    }

    /// Allows replicas again on all nodes but one, so that each volume finds places. A drained node stays
    /// drained.
    pub fn open_nodes(&mut self) {
        let drained = |at: &usize| {
            let node = self.store.nodes.get(self.nodes[*at].name.as_str());
            node.is_some_and(|node| node.spec.eviction_requested)
        };
        let closed = self.lost.or_else(|| (0..self.nodes.len()).find(drained));
        for at in (0..self.nodes.len()).filter(|at| Some(*at) != closed) {
            self.set_node(at, SetNode { allow_scheduling: Some(true), ..SetNode::default() });
        }
    }
}
