//! The invariants of the model.
//!
//! Words. An engine *has served* once its first view is committed. An engine is *newer* than another when its
//! generation is. To *hold* a replica is to be the generation that the replica has stored.
//!
//! 1. **Nothing is lost.** Every acknowledged write, of any engine and time, is on every member of the view
//!    of the newest engine that has served. It is also on every member of the pending view of this engine.
//!    While that engine is dead the rule has no subject; the next one that serves answers for all writes.
//! 2. **No fork.** An engine that is older than one that has served does not hold all members of its own
//!    view. So none of its writes can reach them all any more. It may still acknowledge a write that had
//!    reached them all before. Such a write is on the newer engine's members by rule 1, which counts it.
//! 3. **Reads.** The data that an engine can read, on a member that it holds, contains everything that it and
//!    all older engines have acknowledged. An engine that is older than one that has served can still read,
//!    but only on replicas that no newer engine has in its view. Its data lacks only writes that newer
//!    engines have acknowledged: a stale read, which only a lease would prevent. That is why a volume is
//!    attached elsewhere only when its old engine is stopped, or the replicas that it reads from are fenced.
//! 4. **No early member.** The view of the newest engine that has served has no replica whose data was
//!    replaced by a rebuild that is not complete. (An engine that does not know of a grant may take one
//!    for a member at first. It has no quorum then but by a grant, and does not get that.)
//! 5. **Generations only rise**, on every replica; and on every replica the committed view does.
//! 6. **It can start again.** Once all replicas and the arbiter are reached and no older engine is left, an
//!    engine of a new attachment starts. So does an engine that its host restarts, with the oldest record of
//!    the grants that the host may have. If the host has lost its state, the engine takes a new attachment
//!    instead. The remains of earlier engines block no start.

use std::fmt;

use crate::bits::Bits;
use crate::healing;
use crate::model::Model;
use crate::state::{Engine, State};

/// A violated invariant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Position in the list of rules, from 1.
    pub rule: u8,
    /// The objects that violate it.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rule {}: {}", self.rule, self.what)
    }
}

/// Checks the state `after`, and the step to it from `before`. `model` may leave rule 6 out.
///
/// # Errors
/// The first rule that is broken.
pub fn check(model: &Model, before: &State, after: &State) -> Result<(), Violation> {
    nothing_is_lost(after)?;
    no_fork(after)?;
    reads(after)?;
    no_early_member(after)?;
    generations_rise(before, after)?;
    if model.limits.healing { can_start(model, before, after) } else { Ok(()) }
}

fn newest_served(state: &State) -> Option<&Engine> {
    let served = state.engines.iter().filter(|engine| engine.served);
    served.max_by_key(|engine| engine.generation).map(|engine| &**engine)
}

fn broken(rule: u8, what: String) -> Result<(), Violation> {
    Err(Violation { rule, what })
}

fn nothing_is_lost(state: &State) -> Result<(), Violation> {
    let Some(newest) = newest_served(state).filter(|newest| newest.alive) else { return Ok(()) };
    let acknowledged = state.engines.iter().fold(Bits::NONE, |all, engine| all.union(engine.acknowledged));
    for replica in newest.members().union(newest.target()).iter() {
        let data = state.replica(replica).data;
        if !data.has_all(acknowledged) {
            let engine = newest.generation;
            return broken(
                1,
                format!("{acknowledged:?} are acknowledged; replica {replica} of {engine} has {data:?}"),
            );
        }
    }
    Ok(())
}

fn no_fork(state: &State) -> Result<(), Violation> {
    let Some(newest) = newest_served(state) else { return Ok(()) };
    let mut older = state.engines.iter().filter(|engine| engine.generation < newest.generation);
    match older.find(|engine| engine.view.is_some() && state.holds(engine, engine.members())) {
        Some(fork) => {
            broken(2, format!("{} and {} can both acknowledge", fork.generation, newest.generation))
        }
        None => Ok(()),
    }
}

fn reads(state: &State) -> Result<(), Violation> {
    for reader in &state.engines {
        let older = state.engines.iter().filter(|engine| engine.generation <= reader.generation);
        let acknowledged = older.fold(Bits::NONE, |all, engine| all.union(engine.acknowledged));
        for replica in reader.members().iter().filter(|one| state.holds(reader, Bits::NONE.with(*one))) {
            let newer = state.engines.iter().filter(|engine| engine.generation > reader.generation);
            if newer.clone().any(|engine| engine.members().has(replica)) {
                return broken(3, format!("{} reads from {replica}, of a newer view", reader.generation));
            }
            if !state.replica(replica).data.has_all(acknowledged) {
                return broken(3, format!("{} reads stale data from {replica}", reader.generation));
            }
        }
    }
    Ok(())
}

fn no_early_member(state: &State) -> Result<(), Violation> {
    let Some(newest) = newest_served(state).filter(|newest| newest.alive) else { return Ok(()) };
    let early = newest.members().intersection(state.not_admitted);
    if early.is_empty() {
        return Ok(());
    }
    broken(4, format!("{} serves with {early:?}, copied but not admitted", newest.generation))
}

fn generations_rise(before: &State, after: &State) -> Result<(), Violation> {
    for (replica, (before, after)) in before.replicas.iter().zip(&after.replicas).enumerate() {
        if after.views.generation() < before.views.generation() {
            return broken(5, format!("the generation of replica {replica} falls"));
        }
        if after.views.report().committed.id < before.views.report().committed.id {
            return broken(5, format!("the committed view of replica {replica} falls"));
        }
    }
    Ok(())
}

fn can_start(model: &Model, before: &State, after: &State) -> Result<(), Violation> {
    let views = |state: &State| state.replicas.iter().map(|one| one.views.clone()).collect::<Vec<_>>();
    if before.arbiter == after.arbiter && before.hosts == after.hosts && views(before) == views(after) {
        return Ok(());
    }
    healing::starts_again(model.rules, after).map_or_else(|what| broken(6, what), Ok)
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use shorthorn_types::{Generation, View, ViewId};

    use super::*;
    use crate::bits::members;
    use crate::model::Limits;

    /// Adds an engine that serves `replicas`, all of which it holds.
    fn serving(state: &mut State, attach: u64, replicas: Bits) {
        let generation = Generation::new(attach, 0);
        let mut engine = Engine::new(generation);
        engine.served = true;
        engine.view = Some(View { id: ViewId { generation, number: 1 }, members: members(replicas) });
        state.engines.push(Rc::new(engine));
        for replica in replicas.iter() {
            state.replica_mut(replica).views.fence(generation).unwrap();
        }
    }

    fn model(healing: bool) -> Model {
        let limits = Limits {
            replicas: 3,
            engines: 2,
            writes: 1,
            changes: 1,
            replica_crashes: false,
            giving_up: false,
            keeps_grants: false,
            restores: 0,
            losses: 0,
            offenders: false,
            healing,
        };
        Model::new(limits, None)
    }

    fn rule(before: &State, after: &State) -> u8 {
        check(&model(false), before, after).map_or_else(|violation| violation.rule, |()| 0)
    }

    #[test]
    fn each_invariant_is_broken_by_the_state_that_it_forbids() {
        let mut fine = State::new(3);
        serving(&mut fine, 1, Bits::below(3));
        assert_eq!(rule(&State::new(3), &fine), 0);
        assert_eq!(rule(&fine, &State::new(3)), 5, "generations fall");

        let mut lost = fine.clone();
        lost.engine_mut(0).acknowledged = Bits::NONE.with(0);
        assert_eq!(rule(&fine, &lost), 1);

        let mut early = fine.clone();
        early.not_admitted = Bits::NONE.with(2);
        assert_eq!(rule(&fine, &early), 4);

        let mut stale = fine.clone();
        serving(&mut stale, 2, Bits::below(2));
        assert_eq!(
            rule(&fine, &stale),
            0,
            "replica 2 is still read from, but has all that the old engine needs"
        );
        stale.engine_mut(0).acknowledged = Bits::NONE.with(0);
        (0..2).for_each(|replica| stale.replica_mut(replica).data = Bits::NONE.with(0));
        assert_eq!(rule(&fine, &stale), 3);
        stale.engine_mut(0).acknowledged = Bits::NONE;
        stale.engine_mut(1).acknowledged = Bits::NONE.with(0);
        assert_eq!(
            rule(&fine, &stale),
            0,
            "a stale read of a write that only the newer engine has acknowledged"
        );

        let mut fork = State::new(3);
        serving(&mut fork, 1, Bits::NONE.with(0));
        serving(&mut fork, 2, Bits::NONE.with(1));
        assert_eq!(rule(&State::new(3), &fork), 2);
    }

    #[test]
    fn two_views_in_each_others_way_break_the_sixth() {
        let torn = |storing: &[u8]| {
            let mut state = State::new(3);
            let first = state.replica(0).views.report().clone();
            for (number, engine) in (1..).zip([0, 1]) {
                let id = ViewId { generation: Generation::new(1, 0), number };
                let only = View { id, members: members(Bits::NONE.with(engine)) };
                for replica in storing {
                    let views = &mut state.replica_mut(*replica).views;
                    views.fence(id.generation).unwrap();
                    views.propose(id.generation, only, &first).unwrap();
                }
            }
            state.attach = 1;
            check(&model(true), &State::new(3), &state).map_err(|violation| violation.rule)
        };
        assert_eq!(torn(&[0, 1, 2]), Err(6));
        assert_eq!(torn(&[2]), Ok(()), "no member has stored them");
    }
}
