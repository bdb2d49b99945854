use crate::invariants::{self, Violation};
use crate::model::Model;
use crate::network::Message;
use crate::step::ModelStep;

/// A random run of the model.
#[derive(Clone, Debug)]
pub struct Walk {
    /// The steps that changed something.
    pub steps: Vec<ModelStep>,
    /// The invariant that the last step violates, if any.
    pub violation: Option<Violation>,
}

/// Walks `steps_max` random steps from the start. The same `seed` makes the same walk.
#[must_use]
pub fn walk(model: &Model, seed: u64, steps_max: usize) -> Walk {
    let mut random = fastrand::Rng::with_seed(seed);
    let weights = Weights::new(&mut random);
    let mut state = model.start();
    let mut steps = Vec::with_capacity(steps_max);
    while steps.len() < steps_max {
        let mut choices = model.steps(&state);
        let next = loop {
            let Some(step) = weights.choose(&mut random, &mut choices) else {
                return Walk { steps, violation: None };
            };
            let next = model.apply(&state, step);
            if next != state {
                steps.push(step);
                break next;
            }
        };
        if let Err(violation) = invariants::check(model, &state, &next) {
            return Walk { steps, violation: Some(violation) };
        }
        state = next;
    }
    Walk { steps, violation: None }
}

/// The relative probabilities of the kinds of steps. Every walk has its own weights. Walks without crashes
/// and with few commit marks reach other states than walks on which replicas leave all the time.
struct Weights([u32; KINDS]);

/// The number of kinds of steps.
const KINDS: usize = 17;

impl Weights {
    fn new(random: &mut fastrand::Rng) -> Weights {
        Weights(USUAL.map(|(usual, factors)| usual * factors[random.usize(0..factors.len())]))
    }

    fn of(&self, step: ModelStep) -> u32 {
        self.0[kind(step)]
    }

    /// Takes one step out of `choices`.
    fn choose(&self, random: &mut fastrand::Rng, choices: &mut Vec<ModelStep>) -> Option<ModelStep> {
        let total: u32 = choices.iter().map(|step| self.of(*step)).sum();
        let mut left = random.u32(0..total.max(1));
        let is_it = |step: &ModelStep| match left.checked_sub(self.of(*step)) {
            Some(rest) => {
                left = rest;
                false
            }
            None => true,
        };
        let chosen = choices.iter().position(is_it)?;
        Some(choices.swap_remove(chosen))
    }
}

/// The weights of steps that help an engine: rarely, seldom, as usual, often.
const DELAYED: [u32; 4] = [1, 4, 16, 64];
/// The weights of steps that hinder an engine: never, rarely, as usual, often.
const DISTURBED: [u32; 4] = [0, 1, 4, 16];

/// The usual weights and the factors that a walk chooses from, by [`kind`].
const USUAL: [(u32, [u32; 4]); KINDS] = [
    (1, DELAYED),
    (20, DISTURBED),
    (2, DISTURBED),
    (1, DISTURBED),
    (30, DISTURBED),
    (10, DISTURBED),
    (100, DELAYED),
    (100, DELAYED),
    (30, DISTURBED),
    (100, DELAYED),
    (100, DELAYED),
    (100, DELAYED),
    (100, DELAYED),
    (100, DELAYED),
    (100, DELAYED),
    (100, DELAYED),
    (100, DELAYED),
];

fn kind(step: ModelStep) -> usize {
    match step {
        ModelStep::Attach { .. } | ModelStep::BackUp | ModelStep::Restore => 0,
        ModelStep::Restart { .. } | ModelStep::StartAnew { .. } => 1,
        ModelStep::Crash { .. } => 2,
        ModelStep::ReplicaCrash { .. } => 3,
        ModelStep::Leave { .. } | ModelStep::LeaveToo { .. } => 4,
        ModelStep::GiveUp { .. } | ModelStep::LoseRebuilt { .. } => 5,
        ModelStep::Deliver(Message::Open { .. } | Message::Opened { .. }) => 6,
        ModelStep::Deliver(Message::Propose { .. } | Message::Stored { .. }) => 7,
        ModelStep::Deliver(Message::Commit { .. }) => 8,
        ModelStep::Deliver(Message::Write { .. } | Message::Applied { .. }) => 9,
        ModelStep::Deliver(Message::Ask { .. }) => 10,
        ModelStep::Deliver(Message::Granted { .. } | Message::Refused { .. }) => 11,
        ModelStep::Choose { .. } | ModelStep::Begin { .. } => 12,
        ModelStep::Copy { .. } | ModelStep::Admit { .. } => 13,
        ModelStep::Ask { .. } | ModelStep::Renew => 14,
        ModelStep::Write { .. } => 15,
        ModelStep::Acknowledge { .. } => 16,
    }
}
