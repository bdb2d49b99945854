use crate::bits::{Bits, bits};
use crate::mutation::Mutation;
use crate::network::Message;
use crate::rules::Rules;
use crate::state::{Engine, State};
use crate::step::ModelStep;

/// The limits of the model.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Replicas, at most three.
    pub replicas: u8,
    /// The maximum number of engine processes.
    pub engines: u8,
    /// Writes, at most eight.
    pub writes: u8,
    /// The number of times that each engine may begin to change its view, or give up a change.
    pub changes: u8,
    /// True if replicas crash. Lost messages have the same consequences.
    pub replica_crashes: bool,
    /// True if an engine may continue in its old view. The real one never does.
    pub giving_up: bool,
    /// True if a host keeps the grants that its engine was given, for the engine's next start. Otherwise it
    /// knows only the grants in the attachment and in refusals.
    pub keeps_grants: bool,
    /// The number of times that the controller's store may be restored from a backup; `healing` has to be
    /// left out then.
    pub restores: u8,
    /// The number of times that hosts may lose their state.
    pub losses: u8,
    /// True if a start may leave out replicas that it has reached.
    pub offenders: bool,
    /// True if rule 6 is checked: that a volume can be started once all faults are over. It does not hold
    /// with `giving_up`. An engine may propose, continue in its old view, and then propose a view without a
    /// common member with the first. That leaves two proposals, of which the given-up one is not
    /// recognisable.
    pub healing: bool,
}

/// The possible steps, and their results.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    pub(crate) rules: Rules,
    pub(crate) limits: Limits,
}

impl Model {
    /// Creates a model with the real rules, or with one of them mutated.
    #[must_use]
    pub fn new(limits: Limits, mutation: Option<Mutation>) -> Model {
        Model { rules: Rules { mutation }, limits }
    }

    /// Returns the initial state.
    #[must_use]
    pub fn start(&self) -> State {
        State::new(self.limits.replicas)
    }

    /// Returns all possible steps in `state`; some may change nothing.
    #[must_use]
    pub fn steps(&self, state: &State) -> Vec<ModelStep> {
        let mut steps = Vec::new();
        if state.engines.len() < usize::from(self.limits.engines) {
            steps.push(ModelStep::Attach { higher: true });
            let stopped = |host: &u8| !self.runs(state, *host);
            let hosts = (0..8).take(state.hosts.len()).filter(stopped);
            steps.extend(hosts.map(|host| ModelStep::Restart { host, higher: true }));
            self.loss_steps(state, &mut steps);
        }
        self.restore_steps(state, &mut steps);
        if self.limits.replica_crashes {
            steps.extend(state.all().map(|replica| ModelStep::ReplicaCrash { replica }));
        }
        steps.extend(state.messages.iter().map(|message| ModelStep::Deliver(*message)));
        for (engine, at) in (0..).zip(&state.engines).filter(|(_, at)| at.alive) {
            steps.push(ModelStep::Crash { engine });
            self.start_steps(state, engine, at, &mut steps);
            self.change_steps(state, engine, at, &mut steps);
            self.admit_steps(state, engine, at, &mut steps);
            self.write_steps(state, engine, at, &mut steps);
        }
        steps
    }

    /// Returns `state` after `step`, one of [`Self::steps`].
    #[must_use]
    pub fn apply(&self, state: &State, step: ModelStep) -> State {
        let mut next = state.clone();
        match step {
            ModelStep::Attach { higher } => next.attach(self.rules, higher),
            ModelStep::BackUp => next.back_up(),
            ModelStep::Restore => next.restore(self.rules),
            ModelStep::Renew => next.arbiter = next.renewal().unwrap_or(next.arbiter),
            ModelStep::Restart { host, higher } => next.restart(self.rules, host, higher),
            ModelStep::StartAnew { host, higher } => next.start_without_state_file(self.rules, host, higher),
            ModelStep::Crash { engine } => next.engine_mut(engine).die(),
            ModelStep::ReplicaCrash { replica } => next.crash_replica(replica),
            ModelStep::Deliver(message) => self.deliver(&mut next, message),
            ModelStep::Choose { engine, members, left_out } => {
                self.choose(&mut next, engine, members, left_out)
            }
            ModelStep::Begin { engine, source } => self.begin(&mut next, engine, source),
            ModelStep::Leave { engine, replica } => self.leave(&mut next, engine, replica),
            ModelStep::LeaveToo { engine, replica } => self.leave_too(&mut next, engine, replica),
            ModelStep::GiveUp { engine } => next.give_up(engine),
            ModelStep::Copy { engine, replica, source } => self.copy(&mut next, engine, replica, source),
            ModelStep::Admit { engine } => self.admit(&mut next, engine),
            ModelStep::LoseRebuilt { engine } => next.engine_mut(engine).lose_rebuilt(),
            ModelStep::Ask { engine } => next.ask(engine),
            ModelStep::Write { engine } => next.write(engine),
            ModelStep::Acknowledge { engine, write } => next.acknowledge(engine, write),
        }
        let mut messages = std::mem::take(&mut next.messages);
        messages.retain(|message| next.is_of_use(*message));
        next.messages = messages;
        next
    }

    fn deliver(&self, state: &mut State, message: Message) {
        match message {
            Message::Open { .. }
            | Message::Propose { .. }
            | Message::Commit { .. }
            | Message::Write { .. } => {
                self.at_replica(state, message);
            }
            Message::Ask { engine, number } => self.at_arbiter(state, engine, number),
            Message::Opened { .. }
            | Message::Stored { .. }
            | Message::Applied { .. }
            | Message::Granted { .. }
            | Message::Refused { .. } => self.at_engine(state, message),
        }
    }

    /// Adds the steps in which the controller's store is restored from a backup.
    fn restore_steps(&self, state: &State, steps: &mut Vec<ModelStep>) {
        if state.restores < self.limits.restores {
            steps.push(ModelStep::BackUp);
            if state.may_restore() {
                steps.push(ModelStep::Restore);
            }
        }
        if state.restores > 0 {
            if state.engines.len() < usize::from(self.limits.engines) {
                steps.push(ModelStep::Attach { higher: false });
            }
            if state.renewal().is_some() {
                steps.push(ModelStep::Renew);
            }
        }
    }

    /// Adds the steps in which hosts lose their state. From then on numbers are used again, and either nonce
    /// may be the greater one.
    fn loss_steps(&self, state: &State, steps: &mut Vec<ModelStep>) {
        for (host, known) in (0..8).zip(&state.hosts) {
            if known.has_lost && !self.runs(state, host) {
                steps.push(ModelStep::Restart { host, higher: false });
            }
            if state.losses < self.limits.losses {
                steps.extend([true, false].map(|higher| ModelStep::StartAnew { host, higher }));
            }
        }
    }

    fn runs(&self, state: &State, host: u8) -> bool {
        let attach = u64::from(host) + 1;
        state.engines.iter().any(|engine| engine.alive && engine.generation.attach == attach)
    }

    fn start_steps(&self, state: &State, engine: u8, at: &Engine, steps: &mut Vec<ModelStep>) {
        let offenders = if self.limits.offenders { at.reached } else { Bits::NONE };
        for left_out in std::iter::once(Bits::NONE).chain(offenders.subsets()) {
            if let Some(found) = self.found(state, engine, left_out) {
                let chosen = bits(&found.members).subsets();
                steps.extend(chosen.map(|members| ModelStep::Choose { engine, members, left_out }));
            }
        }
        let Some(underway) = at.underway.as_ref().filter(|underway| underway.may_be_proposed()) else {
            return;
        };
        let members = bits(&underway.change.target.members);
        let may = |replica| self.rules.may_copy(&state.replica(replica).views, at.generation);
        if !members.iter().all(may) {
            return;
        }
        // One of several with the same data suffices.
        let is_first = |source: &u8| {
            let data = |replica: u8| state.replica(replica).data;
            members.iter().take_while(|other| other < source).all(|other| data(other) != data(*source))
        };
        steps.extend(members.iter().filter(is_first).map(|source| ModelStep::Begin { engine, source }));
    }

    fn change_steps(&self, state: &State, engine: u8, at: &Engine, steps: &mut Vec<ModelStep>) {
        let may_change = at.changes < self.limits.changes;
        if at.is_steady() && may_change && at.members().len() > 1 {
            let may_leave = |replica: &u8| self.may_propose(at, at.members().without(*replica));
            let leaving = at.members().iter().filter(may_leave);
            steps.extend(leaving.map(|replica| ModelStep::Leave { engine, replica }));
        }
        let Some(underway) = &at.underway else { return };
        if self.needs_grant(state, at) && !underway.asked && self.rules.asks_late(at) {
            steps.push(ModelStep::Ask { engine });
        }
        if at.view.is_none() || !may_change || !self.rules.may_give_up(underway) {
            return;
        }
        if self.limits.giving_up {
            steps.push(ModelStep::GiveUp { engine });
        }
        if at.target().len() > 1 {
            let may_leave = |replica: &u8| self.may_propose(at, at.target().without(*replica));
            let leaving = at.target().iter().filter(may_leave);
            steps.extend(leaving.map(|replica| ModelStep::LeaveToo { engine, replica }));
        }
    }

    /// Returns true unless the engine has less than half of its view left: such an engine ends, which it may
    /// do at any time.
    fn may_propose(&self, at: &Engine, left: Bits) -> bool {
        at.view.is_some_and(|view| self.rules.may_propose(&view.members, left))
    }

    fn admit_steps(&self, state: &State, engine: u8, at: &Engine, steps: &mut Vec<ModelStep>) {
        match at.rebuilt {
            Some(rebuilt) => {
                if !at.target().has(rebuilt) {
                    steps.push(ModelStep::LoseRebuilt { engine });
                }
                if at.is_steady() {
                    steps.push(ModelStep::Admit { engine });
                }
            }
            None if at.is_steady() && at.changes < self.limits.changes => {
                let outside = at.reached.iter().filter(|replica| !at.members().has(*replica));
                for replica in outside {
                    let holds = |source: &u8| state.holds(at, Bits::NONE.with(replica).with(*source));
                    let sources = at.members().iter().filter(holds);
                    steps.extend(sources.map(|source| ModelStep::Copy { engine, replica, source }));
                }
            }
            None => {}
        }
    }

    fn write_steps(&self, state: &State, engine: u8, at: &Engine, steps: &mut Vec<ModelStep>) {
        if at.is_steady() && state.writes < self.limits.writes {
            steps.push(ModelStep::Write { engine });
        }
        if at.view.is_some() {
            let done = at.pending.iter().filter(|write| at.is_answered(*write));
            steps.extend(done.map(|write| ModelStep::Acknowledge { engine, write }));
        }
    }
}
