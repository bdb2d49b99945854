use std::rc::Rc;

use shorthorn_types::Generation;

use crate::bits::Bits;
use crate::model::Model;
use crate::network::Message;
use crate::state::{Engine, Host, State};

impl State {
    /// The controller raises the attachment, and tells the engine what was granted last.
    pub(crate) fn attach(&mut self) {
        self.attach += 1;
        self.hosts.push(Host { restart: 0, known: self.arbiter.granted() });
        self.run(Generation::new(self.attach, 0));
    }

    /// A host starts its engine again; the controller has no part in it.
    pub(crate) fn restart(&mut self, host: u8) {
        let known = &mut self.hosts[usize::from(host)];
        known.restart += 1;
        let generation = Generation::new(u64::from(host) + 1, known.restart);
        self.run(generation);
    }

    fn run(&mut self, generation: Generation) {
        let engine = u8::try_from(self.engines.len()).unwrap_or(u8::MAX);
        self.engines.push(Rc::new(Engine::new(generation)));
        let all = Bits::below(u8::try_from(self.replicas.len()).unwrap_or(u8::MAX));
        self.send_all(all, |replica| Message::Open { engine, replica });
    }
}

impl Model {
    /// The arbiter records, then answers. A crash between the two is an answer that never arrives.
    pub(crate) fn at_arbiter(&self, state: &mut State, engine: u8, number: u8) {
        let at = state.engine(engine);
        let answer = self.rules.ask(&state.arbiter, state.attach, at.generation, at.proposal(number));
        match answer {
            Ok(record) => {
                state.arbiter = record;
                state.send(Message::Granted { engine, number });
            }
            Err(refused) => {
                if at.alive {
                    state.engine_mut(engine).refusal = refused.granted();
                    state.send(Message::Refused { engine });
                }
            }
        }
    }
}
