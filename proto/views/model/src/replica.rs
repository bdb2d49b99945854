use std::rc::Rc;

use crate::model::Model;
use crate::network::Message;
use crate::state::State;

impl Model {
    /// Handles a message of an engine at a replica: it stores the changes, and then answers.
    pub(crate) fn at_replica(&self, state: &mut State, message: Message) {
        match message {
            Message::Open { engine, replica } => {
                let generation = state.engine(engine).generation;
                let report = self.rules.open(&mut state.replica_mut(replica).views, generation);
                let Some(report) = report.filter(|_| state.engine(engine).alive) else { return };
                let at = state.engine_mut(engine);
                if at.proposals.is_empty() {
                    at.welcomes[usize::from(replica)] = Some(Rc::new(report));
                }
                state.send(Message::Opened { engine, replica });
            }
            Message::Propose { engine, replica, number } => {
                let at = Rc::clone(&state.engines[usize::from(engine)]);
                let views = &mut state.replica_mut(replica).views;
                if self.rules.propose(views, at.generation, at.proposal(number)) {
                    state.send(Message::Stored { engine, replica, number });
                }
            }
            Message::Commit { engine, replica, number } => {
                let generation = state.engine(engine).generation;
                let target = state.engine(engine).proposal(number).target;
                // A refused message has no effect, and the answer is not awaited.
                let _ = state.replica_mut(replica).views.commit(generation, target);
            }
            Message::Write { engine, replica, link, write } => {
                let generation = state.engine(engine).generation;
                let at = state.replica_mut(replica);
                if at.views.generation() == generation {
                    at.data = at.data.with(write);
                    state.send(Message::Applied { engine, replica, link, write });
                }
            }
            _ => {}
        }
    }
}

impl State {
    /// Crashes a replica: it keeps only its stored state, and its messages in flight are lost. A starting
    /// engine tries to open it again.
    pub(crate) fn crash_replica(&mut self, crashed: u8) {
        self.messages.retain(|message| match message {
            Message::Opened { replica, .. }
            | Message::Propose { replica, .. }
            | Message::Stored { replica, .. }
            | Message::Commit { replica, .. }
            | Message::Write { replica, .. }
            | Message::Applied { replica, .. } => *replica != crashed,
            _ => true,
        });
    }
}
