use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;
use shorthorn_controller_core::Timestamp;
use shorthorn_controller_core::objects::{Metadata, Node};

use super::*;

const KIND: Kind = Kind::Node;

fn node(name: u8, version: u64) -> Object {
    let resource_version = ResourceVersion::new(version);
    let metadata = Metadata { resource_version, ..Metadata::new(format!("n{name}"), Timestamp::UNIX_EPOCH) };
    Object::Node(Node { metadata, spec: Default::default(), status: Default::default() })
}

fn key(name: u8) -> Key {
    Key::new(KIND, format!("n{name}"))
}

/// A message in flight.
#[derive(Clone, Debug)]
enum Heard {
    Is(u8, u64),
    Gone(u8, u64),
}

/// An API server, and the memory that follows its objects.
#[derive(Default)]
struct Model {
    version: u64,
    there: BTreeMap<u8, u64>,
    /// The history of each object: the version, and whether it exists with it.
    history: BTreeMap<u8, Vec<(u64, bool)>>,
    watch: VecDeque<Heard>,
    /// Answers to own calls: the current object, or that the removed version is gone.
    answers: Vec<Heard>,
    list: Option<ObjectList>,
    order: VersionOrder,
    state: ClusterState,
    /// The shown part of the history of each object.
    shown: BTreeMap<u8, usize>,
}

impl Model {
    fn write(&mut self, name: u8, is_ours: bool) {
        self.version += 1;
        self.there.insert(name, self.version);
        self.happened(name, true, Heard::Is(name, self.version));
        if is_ours {
            self.answers.push(Heard::Is(name, self.version));
        }
    }

    fn delete(&mut self, name: u8, is_ours: bool) {
        let Some(last) = self.there.remove(&name) else { return };
        self.version += 1;
        self.happened(name, false, Heard::Gone(name, self.version));
        if is_ours {
            // We know the version that we have removed, not that of the removal.
            self.answers.push(Heard::Gone(name, last));
        }
    }

    fn happened(&mut self, name: u8, is_there: bool, heard: Heard) {
        self.history.entry(name).or_default().push((self.version, is_there));
        self.watch.push_back(heard);
    }

    /// Breaks the watch; the next one continues from a list.
    fn list(&mut self) {
        self.watch.clear();
        let objects = self.there.iter().map(|(name, version)| node(*name, *version)).collect();
        self.list = Some(ObjectList { version: self.version, objects, ..ObjectList::default() });
    }

    fn hear(&mut self) {
        if let Some(list) = self.list.take() {
            self.order.relist(&mut self.state, KIND, list);
            return;
        }
        match self.watch.pop_front() {
            Some(Heard::Is(name, version)) => {
                self.order.take(&mut self.state, node(name, version));
                self.order.heard(KIND, version);
            }
            Some(Heard::Gone(name, version)) => {
                self.order.take_gone(&mut self.state, &key(name), version);
                self.order.heard(KIND, version);
            }
            None => {}
        }
    }

    fn answer(&mut self, which: usize) {
        if self.answers.is_empty() {
            return;
        }
        match self.answers.remove(which % self.answers.len()) {
            Heard::Is(name, version) => drop(self.order.take(&mut self.state, node(name, version))),
            Heard::Gone(name, version) => {
                self.order.remove(&mut self.state, &key(name), version);
            }
        }
    }

    /// Checks that the shown state of each object only advances in its history.
    fn check(&mut self) {
        for (name, history) in &self.history {
            let shown = self.shown.entry(*name).or_default();
            let now = place(self.state.version(&key(*name)));
            let at = if now == 0 {
                history.iter().skip(*shown).position(|(_, is_there)| !is_there).map(|at| at + *shown)
            } else {
                history.iter().position(|event| *event == (now, true))
            };
            let is_first = now == 0 && *shown == 0;
            match at {
                Some(at) if at >= *shown || is_first => *shown = (*shown).max(if is_first { 0 } else { at }),
                _ => assert!(is_first, "object {name} went back to {now} from {shown} of {history:?}"),
            }
        }
    }
}

#[derive(Clone, Debug)]
enum TestStep {
    Write(u8, bool),
    Delete(u8, bool),
    List,
    Hear,
    Answer(usize),
}

fn step() -> impl Strategy<Value = TestStep> {
    prop_oneof![
        4 => (0u8..3, any::<bool>()).prop_map(|(name, ours)| TestStep::Write(name, ours)),
        3 => (0u8..3, any::<bool>()).prop_map(|(name, ours)| TestStep::Delete(name, ours)),
        1 => Just(TestStep::List),
        5 => Just(TestStep::Hear),
        4 => any::<usize>().prop_map(TestStep::Answer),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn memory_never_returns_to_older_versions_and_converges(
        steps in prop::collection::vec(step(), 0..80)
    ) {
        let mut model = Model::default();
        for step in steps {
            match step {
                TestStep::Write(name, ours) => model.write(name, ours),
                TestStep::Delete(name, ours) => model.delete(name, ours),
                TestStep::List => model.list(),
                TestStep::Hear => model.hear(),
                TestStep::Answer(which) => model.answer(which),
            }
            model.check();
        }
        while model.list.is_some() || !model.watch.is_empty() {
            model.hear();
            model.check();
        }
        while !model.answers.is_empty() {
            model.answer(0);
            model.check();
        }
        let shown: BTreeMap<u8, u64> =
            (0..3).map(|name| (name, place(model.state.version(&key(name)))))
                .filter(|(_, version)| *version > 0).collect();
        prop_assert_eq!(shown, model.there);
        prop_assert!(model.order.removed.is_empty(), "{:?}", model.order.removed);
    }
}

#[test]
fn an_unreadable_object_keeps_its_known_state() {
    let (mut order, mut state) = (VersionOrder::default(), ClusterState::default());
    order.take(&mut state, node(1, 5));
    order.take(&mut state, node(2, 6));
    let list =
        ObjectList { version: 9, objects: Vec::new(), unreadable: vec![key(1)], ..ObjectList::default() };
    assert_eq!(order.relist(&mut state, KIND, list), [key(2)]);
    assert_eq!([1, 2].map(|name| place(state.version(&key(name)))), [5, 0]);
}

#[test]
fn an_api_server_that_was_set_back_is_believed() {
    let (mut order, mut state) = (VersionOrder::default(), ClusterState::default());
    order.relist(
        &mut state,
        KIND,
        ObjectList { version: 90, objects: vec![node(1, 80), node(2, 85)], ..ObjectList::default() },
    );
    let list = ObjectList { version: 50, objects: vec![node(1, 40)], ..ObjectList::default() };
    order.relist(&mut state, KIND, list);
    assert_eq!([1, 2].map(|name| place(state.version(&key(name)))), [40, 0]);
    assert!(order.take(&mut state, node(2, 51)));
}

fn left_out(version: u64) -> LeftOut {
    LeftOut::default().at_version(Some(version))
}

#[test]
fn an_unusable_object_is_left_out_until_a_newer_version_is_known() {
    let (mut order, mut state) = (VersionOrder::default(), ClusterState::default());
    let list = ObjectList { version: 9, left_out: [(key(1), left_out(5))].into(), ..ObjectList::default() };
    assert_eq!(order.relist(&mut state, KIND, list.clone()), [key(1)]);
    assert!(state.unknown(&key(1)).is_some());
    assert_eq!(order.relist(&mut state, KIND, list), [], "nothing has changed");
    assert!(order.take(&mut state, node(1, 10)));
    assert_eq!(state.unknown(&key(1)), None);
    assert!(!order.leave_out(&mut state, &key(1), left_out(8)), "that is older");
    assert!(order.leave_out(&mut state, &key(1), left_out(11)));
    let counted = |state: &ClusterState| (place(state.version(&key(1))), state.left_out().iter().count());
    assert_eq!(counted(&state), (10, 1), "its last state stays");
    assert!(order.take_gone(&mut state, &key(1), 12));
    assert_eq!(counted(&state), (0, 0));
    assert!(order.leave_out(&mut state, &key(2), left_out(13)));
    assert!(!order.take_gone(&mut state, &key(2), 12), "another one went before");
    let none = ObjectList { version: 20, ..ObjectList::default() };
    assert_eq!(order.relist(&mut state, KIND, none), [key(2)]);
    assert_eq!(state.left_out().iter().count(), 0);
}
