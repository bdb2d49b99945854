//! Collects the actions of a run over a volume, and puts them in order.

use std::time::Duration;

use crate::objects::{Engine, Key, Kind, Object, ResourceVersion, Volume};
use crate::{Action, AgentCall, Decision, Event, NodeName};

/// The actions of a run over a volume, each for the stage in which it is performed. A failed action ends the
/// run, so that the order is part of each rule:
///
/// 1. writes of other objects, removals, and calls that need nothing of this run;
/// 2. the write of the volume;
/// 3. the events, because a run whose write fails is repeated with all of its events;
/// 4. the calls that depend on the stored volume;
/// 5. the write of the engine that records these calls.
pub(super) struct StagedActions {
    /// The volume, which all events are about.
    volume: Key,
    before_store: Decision,
    events: Vec<Event>,
    calls_after_store: Vec<(NodeName, AgentCall)>,
    engine_after_store: Option<Engine>,
}

impl StagedActions {
    /// Creates an empty collection for the volume of that name.
    pub(super) fn new(volume: &str) -> StagedActions {
        StagedActions {
            volume: Key::new(Kind::Volume, volume),
            before_store: Decision::nothing(),
            events: Vec::new(),
            calls_after_store: Vec::new(),
            engine_after_store: None,
        }
    }

    /// Writes an object other than the volume, before the volume.
    pub(super) fn write(&mut self, object: impl Into<Object>) {
        self.before_store.write(object);
    }

    /// Removes the object if it still has this resource version.
    pub(super) fn remove(&mut self, key: Key, resource_version: Option<ResourceVersion>) {
        self.before_store.actions.push(Action::Remove(key, resource_version));
    }

    /// Calls an agent before the volume is written.
    pub(super) fn call(&mut self, node: &NodeName, call: AgentCall) {
        self.before_store.call(node, call);
    }

    /// Calls an agent once the new state of the volume is stored.
    pub(super) fn call_after_store(&mut self, node: NodeName, call: AgentCall) {
        self.calls_after_store.push((node, call));
    }

    /// Writes the engine after the calls of [`StagedActions::call_after_store`], to record them.
    pub(super) fn write_engine_after_store(&mut self, engine: Engine) {
        self.engine_after_store = Some(engine);
    }

    /// Reports an event about the volume.
    pub(super) fn emit(&mut self, warning: bool, reason: &'static str, message: String) {
        self.events.push(Event { about: self.volume.clone(), warning, reason, message });
    }

    /// Looks again after `wait`, or sooner if that was decided already.
    pub(super) fn again_after(&mut self, wait: Duration) {
        self.before_store.again_after(wait);
    }

    /// Returns all actions in order. `changed` is the volume if its state has changed.
    pub(super) fn finish(self, changed: Option<Volume>) -> Decision {
        let mut decision = self.before_store;
        if let Some(volume) = changed {
            decision.write(volume);
        }
        decision.actions.extend(self.events.into_iter().map(Action::Emit));
        for (node, call) in self.calls_after_store {
            decision.call(&node, call);
        }
        if let Some(engine) = self.engine_after_store {
            decision.write(engine);
        }
        decision
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example::Example;
    use crate::observed::InstanceKey;

    fn stop(attach: u64) -> AgentCall {
        let instance = InstanceKey::engine(&"v".parse().unwrap());
        AgentCall::StopInstance { instance, attach: Some(attach) }
    }

    /// Returns each action as a word with its object.
    fn words(decision: &Decision) -> Vec<String> {
        let word = |action: &Action| match action {
            Action::Write(object) => format!("write {}", object.key()),
            Action::Remove(key, version) => format!("remove {key} {version:?}"),
            Action::Call(node, AgentCall::StopInstance { attach, .. }) => format!("call {node} {attach:?}"),
            Action::Call(node, call) => format!("call {node} {}", call.name()),
            Action::Emit(event) => format!("emit {} {}", event.about, event.reason),
        };
        decision.actions.iter().map(word).collect()
    }

    #[test]
    fn the_volume_is_written_before_its_events_and_the_calls_that_depend_on_it() {
        let mut example = Example::new();
        let (volume, engine) = (example.volume().clone(), example.engine().clone());
        let mut actions = StagedActions::new("v");
        actions.write_engine_after_store(engine.clone());
        actions.call_after_store("b".parse().unwrap(), stop(2));
        actions.emit(true, "First", String::new());
        actions.call(&"a".parse().unwrap(), stop(1));
        actions.emit(false, "Second", String::new());
        actions.write(engine);
        let expected = [
            "call a Some(1)",
            "write engine v",
            "write volume v",
            "emit volume v First",
            "emit volume v Second",
            "call b Some(2)",
            "write engine v",
        ];
        assert_eq!(words(&actions.finish(Some(volume))), expected);
    }

    #[test]
    fn an_unchanged_volume_is_not_written() {
        let mut actions = StagedActions::new("v");
        actions.remove(Key::new(Kind::Engine, "v"), ResourceVersion::new(7));
        actions.emit(false, "Removed", String::new());
        assert_eq!(words(&actions.finish(None)), ["remove engine v Some(7)", "emit volume v Removed"]);
        assert_eq!(StagedActions::new("v").finish(None), Decision::nothing());
    }

    #[test]
    fn the_shortest_wait_counts() {
        let mut actions = StagedActions::new("v");
        for seconds in [5, 2, 9] {
            actions.again_after(Duration::from_secs(seconds));
        }
        assert_eq!(actions.finish(None).requeue_after, Some(Duration::from_secs(2)));
    }
}
