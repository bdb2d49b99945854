use std::rc::Rc;

use shorthorn_types::{Members, ReplicaReport, View};
use shorthorn_views::{Basis, ChangeProgress, ViewChange};

use crate::bits::{Bits, id, members};
use crate::model::Model;
use crate::network::Message;
use crate::rules::{Reported, view};
use crate::state::{Engine, Proposal, State, Underway};

impl Model {
    /// Returns the basis that a starting engine has found among the replicas that it has reached, without
    /// those in `left_out`.
    pub(crate) fn found(&self, state: &State, engine: u8, left_out: Bits) -> Option<Basis> {
        let at = state.engine(engine);
        if at.view.is_some() || at.underway.is_some() {
            return None;
        }
        let report =
            |replica: u8| Some((id(replica), (**at.welcomes[usize::from(replica)].as_ref()?).clone()));
        let reports: Vec<Reported> = at.reached.iter().filter_map(report).collect();
        let known = state.host(at.generation).known;
        if left_out.is_empty() {
            return self.rules.basis(reports, known);
        }
        self.rules.basis_without(&reports, known, &members(left_out), &members(at.reached))
    }

    /// Fixes the first view, and asks the arbiter for it if necessary. Replicas that are reached later get no
    /// proposal, because their reports would be unknown. Replicas that are left out get none either.
    pub(crate) fn choose(&self, state: &mut State, engine: u8, chosen: Bits, left_out: Bits) {
        let Some(found) = self.found(state, engine, left_out) else { return };
        let target = view(self.rules.view_id(state.engine(engine)), chosen);
        let at = state.engine_mut(engine);
        at.welcomes = Default::default();
        at.plan(target, found.honoured);
        let reached = at.reached;
        let Some(underway) = &mut at.underway else { return };
        underway.reached = left_out.iter().fold(reached, Bits::without);
        let asked = self.rules.asked_to_store(reached, underway.reached);
        underway.asks_first = self.rules.asks_first(&underway.change, &members(asked));
        if underway.asks_first {
            state.ask(engine);
        }
    }

    /// Copies the data of one member to all, at once, and proposes the first view.
    pub(crate) fn begin(&self, state: &mut State, engine: u8, source: u8) {
        let data = state.replica(source).data;
        for member in state.engine(engine).target().iter() {
            state.replica_mut(member).data = data;
        }
        state.propose(engine);
    }

    /// Handles an answer to an engine.
    pub(crate) fn at_engine(&self, state: &mut State, message: Message) {
        match message {
            Message::Opened { engine, replica } => {
                let at = state.engine_mut(engine);
                at.reached = at.reached.with(replica);
            }
            Message::Stored { engine, replica, .. } => {
                if let Some(underway) = &mut state.engine_mut(engine).underway {
                    underway.change.stored(id(replica));
                }
                self.install_if_complete(state, engine);
            }
            Message::Granted { engine, .. } => self.granted(state, engine),
            Message::Refused { engine } => {
                let at = state.engine_mut(engine);
                let (generation, refusal) = (at.generation, at.refusal);
                at.die();
                state.host_mut(generation).learn(refusal);
            }
            Message::Applied { engine, replica, write, .. } => {
                let answers = &mut state.engine_mut(engine).answers[usize::from(replica)];
                *answers = answers.with(write);
            }
            _ => {}
        }
    }

    fn granted(&self, state: &mut State, engine: u8) {
        let at = state.engine_mut(engine);
        let generation = at.generation;
        let Some(underway) = &mut at.underway else { return };
        underway.granted = true;
        underway.change.granted();
        let target = underway.change.target;
        if self.limits.keeps_grants {
            state.host_mut(generation).learn(Some(target));
        }
        self.install_if_complete(state, engine);
    }

    fn progress(&self, state: &State, at: &Engine) -> Option<ChangeProgress> {
        let holds = |replica: &u8| state.holds(at, Bits::NONE.with(*replica));
        let fenced = state.all().filter(holds).fold(Bits::NONE, Bits::with);
        Some(self.rules.progress(at, at.underway.as_ref()?, fenced))
    }

    pub(crate) fn needs_grant(&self, state: &State, at: &Engine) -> bool {
        self.progress(state, at) == Some(ChangeProgress::NeedsGrant)
    }

    /// Installs the proposed view if it is complete.
    fn install_if_complete(&self, state: &mut State, engine: u8) {
        if self.progress(state, state.engine(engine)) != Some(ChangeProgress::Committed) {
            return;
        }
        let at = state.engine_mut(engine);
        let members = at.target();
        at.view = at.underway.take().map(|underway| underway.change.target);
        at.served = true;
        at.rebuilt = at.rebuilt.filter(|rebuilt| !members.has(*rebuilt));
        let (number, reached) = (at.last_number(), at.reached);
        state.send_all(reached, |replica| Message::Commit { engine, replica, number });
        let generation = state.engine(engine).generation;
        if !state.engines.iter().any(|newer| newer.served && newer.generation > generation) {
            state.not_admitted = members.iter().fold(state.not_admitted, Bits::without);
        }
    }

    pub(crate) fn leave(&self, state: &mut State, engine: u8, replica: u8) {
        let left = state.engine(engine).members().without(replica);
        self.change(state, engine, left, Some(replica));
    }

    pub(crate) fn leave_too(&self, state: &mut State, engine: u8, replica: u8) {
        let left = state.engine(engine).target().without(replica);
        let at = state.engine_mut(engine);
        at.rebuilt = at.rebuilt.filter(|rebuilt| *rebuilt != replica);
        self.change(state, engine, left, Some(replica));
    }

    pub(crate) fn admit(&self, state: &mut State, engine: u8) {
        let at = state.engine(engine);
        let Some(rebuilt) = at.rebuilt else { return };
        let more = at.members().with(rebuilt);
        self.change(state, engine, more, None);
    }

    /// Proposes a view that replaces the current one, and closes the connection to the lost replica.
    fn change(&self, state: &mut State, engine: u8, replicas: Bits, lost: Option<u8>) {
        let target = view(self.rules.view_id(state.engine(engine)), replicas);
        let at = state.engine_mut(engine);
        let Some(committed) = at.view else { return };
        at.changes += 1;
        if let Some(lost) = lost {
            at.links[usize::from(lost)] += 1;
        }
        at.plan(target, ReplicaReport { committed, proposed: Vec::new() });
        state.propose(engine);
    }

    /// Copies the data of a member to a replica outside the view, at once. The replica is sent the requests
    /// in flight again, and all later ones.
    pub(crate) fn copy(&self, state: &mut State, engine: u8, replica: u8, source: u8) {
        state.replica_mut(replica).data = state.replica(source).data;
        state.not_admitted = state.not_admitted.with(replica);
        let at = state.engine_mut(engine);
        at.rebuilt = Some(replica);
        at.links[usize::from(replica)] += 1;
        if self.rules.sends_again() {
            at.answers[usize::from(replica)] = Bits::NONE;
            state.send_pending(engine, replica);
        }
    }
}

impl State {
    fn propose(&mut self, engine: u8) {
        let at = self.engine_mut(engine);
        let number = at.last_number();
        let Some(underway) = &mut at.underway else { return };
        underway.proposed = true;
        let reached = underway.reached;
        self.send_all(reached, |replica| Message::Propose { engine, replica, number });
    }

    /// Continues the engine in its old view, while its proposal is still in the network.
    pub(crate) fn give_up(&mut self, engine: u8) {
        let at = self.engine_mut(engine);
        at.underway = None;
        at.changes += 1;
        at.lose_rebuilt();
        for replica in at.members().iter() {
            self.send_pending(engine, replica);
        }
    }

    /// Sends the unanswered requests over the current connection.
    fn send_pending(&mut self, engine: u8, replica: u8) {
        let at = self.engine(engine);
        let (pending, answered, link) = (at.pending, at.answered(replica), at.link(replica));
        for write in pending.iter().filter(|write| !answered.has(*write)) {
            self.send(Message::Write { engine, replica, link, write });
        }
    }

    /// Asks the arbiter for an engine, and names the replicas that have stored the view or are fenced for it.
    pub(crate) fn ask(&mut self, engine: u8) {
        let at = self.engine_mut(engine);
        let number = at.last_number();
        let (Some(underway), Some(proposal)) = (&mut at.underway, at.proposals.last_mut()) else { return };
        underway.asked = true;
        let reached = members(underway.reached);
        Rc::make_mut(proposal).stored =
            if underway.proposed { *underway.change.stored_by() } else { reached };
        self.send(Message::Ask { engine, number });
    }

    /// Sends a write of the engine to all members, and to the rebuilding replica.
    pub(crate) fn write(&mut self, engine: u8) {
        let write = self.writes;
        self.writes += 1;
        let at = self.engine_mut(engine);
        at.pending = at.pending.with(write);
        let (to, links) = (at.receivers(), at.links);
        self.send_all(to, |replica| {
            let link = links[usize::from(replica)];
            Message::Write { engine, replica, link, write }
        });
    }

    pub(crate) fn acknowledge(&mut self, engine: u8, write: u8) {
        let at = self.engine_mut(engine);
        at.pending = at.pending.without(write);
        at.acknowledged = at.acknowledged.with(write);
        at.answers.iter_mut().for_each(|answered| *answered = answered.without(write));
    }
}

impl Engine {
    /// Plans the next view; it is not proposed yet.
    fn plan(&mut self, target: View, honoured: ReplicaReport) {
        let change = ViewChange::new(honoured.clone(), target);
        let reached = self.reached;
        self.underway = Some(Underway {
            change,
            reached,
            proposed: false,
            asks_first: false,
            asked: false,
            granted: false,
        });
        self.proposals.push(Rc::new(Proposal { target, honoured, stored: Members::NONE }));
    }

    /// Returns the members and the rebuilding replica.
    fn receivers(&self) -> Bits {
        self.rebuilt.into_iter().fold(self.members(), Bits::with)
    }

    /// Returns true if all necessary replicas have answered.
    pub(crate) fn is_answered(&self, write: u8) -> bool {
        self.receivers().iter().all(|replica| self.answered(replica).has(write))
    }

    pub(crate) fn lose_rebuilt(&mut self) {
        if let Some(rebuilt) = self.rebuilt.take() {
            self.links[usize::from(rebuilt)] += 1;
        }
    }
}

impl crate::state::HostState {
    fn learn(&mut self, granted: Option<View>) {
        self.known = self.known.into_iter().chain(granted).max_by_key(|view| view.id);
    }
}
