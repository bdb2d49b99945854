//! Two leaders: a controller is paused, another one takes over, and the first one wakes.

use std::collections::VecDeque;

use shorthorn_controller_core::Action;
use shorthorn_controller_core::objects::{Key, Kind};
use shorthorn_controller_core::observed::{InstanceKey, InstanceKind};

use super::{Fault, Op, Sim};
use crate::controller::Controller;

/// A decision of a controller that was paused, as far as it was not carried out.
#[derive(Debug)]
pub struct Paused {
    leader: u64,
    actions: VecDeque<Action>,
}

impl Sim {
    pub(super) fn take_over(&mut self) {
        let next = Controller::start(&self.nodes, self.now);
        let old = std::mem::replace(&mut self.controller, next);
        let leader = self.leader;
        self.paused.extend(old.runs.into_values().map(|actions| Paused { leader, actions }));
        self.leader += 1;
    }

    /// Carries out the next action of a decision, which ends with the first action that fails.
    pub(super) fn old_leader_acts(&mut self, which: usize) {
        let Some(at) = which.checked_rem(self.paused.len()) else { return };
        let Paused { leader, actions } = &mut self.paused[at];
        let (leader, action) = (*leader, actions.pop_front());
        let is_good = match action {
            None => false,
            Some(Action::Write(object)) => self.put(*object),
            Some(Action::Remove(key, version)) => self.remove(&key, version),
            Some(Action::Emit(_)) => true,
            Some(Action::Call(node, call)) => {
                let agent = self.nodes.iter().find(|agent| agent.name == node);
                // An agent that the new leader has not called yet takes the call, like a late one.
                if agent.is_some_and(|agent| agent.newest_leader <= leader) {
                    self.late.push((node, call));
                    self.late_call_arrives(self.late.len() - 1);
                }
                false
            }
        };
        if !is_good {
            self.paused.remove(at);
        }
    }

    /// Has a leader decide to stop the engine of volume v0 on node 0, and pauses it. The next leader attaches
    /// the volume there again, with the same engine. Then the first leader wakes.
    pub fn old_leader_stops_an_engine(&mut self) {
        self.step(&Op::Create);
        self.step(&Op::Attach(0, 0));
        self.converge();
        let engine = InstanceKey { kind: InstanceKind::Engine, name: "v0".to_owned() };
        let before = self.nodes[0].instances[&engine].clone();
        self.step(&Op::Detach(0));
        let keys = [Kind::Volume, Kind::Engine].map(|kind| Key::new(kind, "v0"));
        let mut decisions = 0;
        while !self.is_about_to_call(&keys[1]) {
            decisions += 1;
            assert!(decisions < 20, "the engine is not stopped");
            for key in &keys {
                self.decide(key);
                if !self.is_about_to_call(key) {
                    self.act_on(key, Fault::None);
                }
            }
        }
        self.step(&Op::TakeOver);
        self.step(&Op::Attach(0, 0));
        self.converge();
        assert_eq!(self.nodes[0].instances.get(&engine), Some(&before), "the engine continues");
        while !self.paused.is_empty() {
            self.step(&Op::OldLeaderActs(0));
        }
        assert_eq!(
            self.nodes[0].instances.get(&engine),
            Some(&before),
            "an old leader has stopped the engine"
        );
    }

    fn is_about_to_call(&self, key: &Key) -> bool {
        let next = self.controller.runs.get(key).and_then(VecDeque::front);
        matches!(next, Some(Action::Call(..)))
    }
}
