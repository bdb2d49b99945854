use std::collections::{HashSet, VecDeque};
use std::hash::{BuildHasherDefault, DefaultHasher};

use crate::fingerprint::fingerprint;
use crate::invariants::{self, Violation};
use crate::model::Model;
use crate::state::State;
use crate::step::ModelStep;

/// The outcome of a search with its counts.
#[derive(Clone, Debug)]
pub struct SearchResult {
    /// The number of states seen.
    pub states: usize,
    /// The number of steps to the farthest of them.
    pub depth: usize,
    /// True if the search has visited all states.
    pub exhausted: bool,
    /// The violated invariant, and a shortest way to it.
    pub violation: Option<(Violation, Vec<ModelStep>)>,
}

/// The origin of a state: the former state, and the step.
struct Origin {
    from: u32,
    step: ModelStep,
}

/// Searches all states of `model`, breadth first, until `states_max` are seen.
#[must_use]
pub fn search(model: &Model, states_max: u32) -> SearchResult {
    let start = model.start();
    let mut seen: HashSet<u64, BuildHasherDefault<DefaultHasher>> = HashSet::default();
    seen.insert(fingerprint(&start));
    let mut origins: Vec<Origin> = Vec::new();
    // The states to examine, with their number (0 is the start, n was reached by origins[n - 1]) and depth.
    let mut queue: VecDeque<(State, u32, usize)> = VecDeque::from([(start, 0, 0)]);
    let mut depth = 0;
    while let Some((state, number, steps)) = queue.pop_front() {
        depth = steps;
        for step in model.steps(&state) {
            let next = model.apply(&state, step);
            if !seen.insert(fingerprint(&next)) {
                continue;
            }
            origins.push(Origin { from: number, step });
            let last = u32::try_from(origins.len()).unwrap_or(u32::MAX);
            if let Err(violation) = invariants::check(model, &state, &next) {
                let violation = Some((violation, way(&origins, last)));
                return SearchResult { states: seen.len(), depth: steps + 1, exhausted: false, violation };
            }
            if last >= states_max {
                return SearchResult { states: seen.len(), depth, exhausted: false, violation: None };
            }
            queue.push_back((next, last, steps + 1));
        }
    }
    SearchResult { states: seen.len(), depth, exhausted: true, violation: None }
}

/// Returns the steps from the start to state `number`.
fn way(origins: &[Origin], mut number: u32) -> Vec<ModelStep> {
    let mut steps = Vec::new();
    while let Some(origin) = usize::try_from(number).ok().and_then(|at| origins.get(at.checked_sub(1)?)) {
        steps.push(origin.step);
        number = origin.from;
    }
    steps.reverse();
    steps
}
