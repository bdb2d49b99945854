//! A history that random walks do not meet: a view that a start must honour although the arbiter has
//! overruled it.

use shorthorn_views_model::invariants::check;
use shorthorn_views_model::{Bits, Limits, Message, Model, ModelStep, Mutation, Violation};

/// Three members, and a replica that replaces one.
const LIMITS: Limits = Limits {
    replicas: 4,
    engines: 2,
    writes: 1,
    changes: 4,
    replica_crashes: false,
    giving_up: false,
    keeps_grants: false,
    restores: 0,
    losses: 0,
    offenders: false,
    healing: false,
};

fn bits(replicas: &[u8]) -> Bits {
    replicas.iter().copied().fold(Bits::NONE, Bits::with)
}

fn deliver(message: Message) -> ModelStep {
    ModelStep::Deliver(message)
}

/// The engine fences `replicas`.
fn open(engine: u8, replicas: &[u8]) -> Vec<ModelStep> {
    let open = |replica: &u8| {
        [Message::Open { engine, replica: *replica }, Message::Opened { engine, replica: *replica }]
    };
    replicas.iter().flat_map(open).map(deliver).collect()
}

/// The volume is attached, and the engine makes `members` of the fenced `replicas` its first view.
fn start(engine: u8, replicas: &[u8], members: &[u8]) -> Vec<ModelStep> {
    let mut steps = vec![ModelStep::Attach { higher: true }];
    steps.extend(open(engine, replicas));
    steps.push(ModelStep::Choose { engine, members: bits(members), left_out: Bits::NONE });
    steps.push(ModelStep::Begin { engine, source: members[0] });
    steps.extend(store(engine, replicas, 1));
    steps
}

/// `replicas` store view `number`.
fn store(engine: u8, replicas: &[u8], number: u8) -> Vec<ModelStep> {
    let store = |replica: &u8| {
        let replica = *replica;
        [Message::Propose { engine, replica, number }, Message::Stored { engine, replica, number }]
    };
    replicas.iter().flat_map(store).map(deliver).collect()
}

/// The arbiter grants view `number`, which a replica has stored.
fn grant(engine: u8, number: u8) -> Vec<ModelStep> {
    let asked = [Message::Ask { engine, number }, Message::Granted { engine, number }];
    std::iter::once(ModelStep::Ask { engine }).chain(asked.map(deliver)).collect()
}

/// Replicas 0, 1 and 2 are the members. The engine loses 2, 0 and 1, and replica 3 replaces one of them
/// meanwhile. The message that the view of 0 and 1 is committed does not reach 0. Replica 3 alone gets a
/// write. Then another engine reaches 0 and 2.
fn history() -> Vec<ModelStep> {
    let engine = 0;
    [
        start(engine, &[0, 1, 2], &[0, 1, 2]),
        [0, 1, 2].map(|replica| deliver(Message::Commit { engine, replica, number: 1 })).to_vec(),
        vec![ModelStep::Leave { engine, replica: 2 }],
        store(engine, &[0, 1], 2),
        vec![ModelStep::Leave { engine, replica: 0 }],
        store(engine, &[1], 3),
        grant(engine, 3),
        open(engine, &[3]),
        vec![ModelStep::Copy { engine, replica: 3, source: 1 }, ModelStep::Admit { engine }],
        store(engine, &[1, 3], 4),
        vec![ModelStep::Leave { engine, replica: 1 }],
        store(engine, &[3], 5),
        grant(engine, 5),
        vec![
            ModelStep::Write { engine },
            deliver(Message::Write { engine, replica: 3, link: 1, write: 0 }),
            deliver(Message::Applied { engine, replica: 3, link: 1, write: 0 }),
            ModelStep::Acknowledge { engine, write: 0 },
        ],
        start(1, &[0, 2], &[0, 2]),
    ]
    .concat()
}

/// Returns the number of steps that the rules allow, and the violation in the last of them.
fn replay(mutation: Option<Mutation>) -> (usize, Option<Violation>) {
    let model = Model::new(LIMITS, mutation);
    let mut state = model.start();
    for (count, step) in history().into_iter().enumerate() {
        if !model.steps(&state).contains(&step) {
            println!("{step:?} is not possible; possible: {:?}", model.steps(&state));
            return (count, None);
        }
        let next = model.apply(&state, step);
        if let Err(violation) = check(&model, &state, &next) {
            return (count + 1, Some(violation));
        }
        state = next;
    }
    (history().len(), None)
}

#[test]
fn a_view_that_leads_to_a_grant_is_not_dead_because_of_it() {
    let is_chosen = |step: &ModelStep| matches!(step, ModelStep::Choose { engine: 1, .. });
    let choice = history().iter().position(is_chosen).expect("the second engine starts");
    let (possible, violation) = replay(None);
    assert_eq!(possible, choice, "the second engine cannot start");
    assert!(violation.is_none());
    let (possible, violation) = replay(Some(Mutation::DropOverruled));
    assert!(possible > choice);
    assert!(violation.is_some());
}
