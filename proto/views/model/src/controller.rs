use std::rc::Rc;

use shorthorn_types::Generation;
use shorthorn_views::Arbiter;

use crate::bits::Bits;
use crate::model::Model;
use crate::network::Message;
use crate::rules::Rules;
use crate::state::{Engine, HostState, State, place};

impl State {
    /// Raises the attachment, and sends the last grant to the engine.
    pub(crate) fn attach(&mut self, rules: Rules, higher: bool) {
        self.attach += 1;
        let host = HostState { restart: 0, known: self.arbiter.granted(), has_lost: false };
        let place = place(self.attach);
        // Numbers that were left out, or were drawn before the store was restored, are of hosts that know
        // nothing.
        while self.hosts.len() <= place {
            self.hosts.push(HostState { restart: 0, known: None, has_lost: true });
        }
        self.hosts[place] = host;
        self.run_again(rules, Generation::new(self.attach, 0), higher);
    }

    /// Makes a backup of the controller's store, which replaces the former one.
    pub(crate) fn back_up(&mut self) {
        self.backup = (self.attach, self.arbiter.clone());
    }

    /// Returns true if the controller would notice that a store restored from this backup is older than the
    /// volume, or would lose nothing by it.
    pub(crate) fn may_restore(&self) -> bool {
        let (attach, arbiter) = &self.backup;
        (*attach, arbiter) != (self.attach, &self.arbiter)
            && (self.opened_attach() > *attach || *arbiter == self.arbiter)
    }

    /// Restores the store from the backup; the replicas show whether it is older than the volume.
    pub(crate) fn restore(&mut self, rules: Rules) {
        self.restores += 1;
        (self.attach, self.arbiter) = self.backup.clone();
        self.restored_at = self.engines.len();
        if self.opened_attach() > self.attach {
            self.attach = self.opened_attach() + 1;
            self.arbiter = rules.stale(&self.arbiter, self.attach);
        }
    }

    /// Returns the view by which the arbiter grants again: of an engine that was started since.
    pub(crate) fn renewal(&self) -> Option<Arbiter> {
        let is_new = |generation: Generation| {
            let mut since = self.engines.iter().skip(self.restored_at);
            generation.attach == self.attach && since.any(|engine| engine.generation == generation)
        };
        let committed = self.replicas.iter().map(|replica| replica.views.report().committed);
        let newest = committed.filter(|view| is_new(view.id.generation)).max_by_key(|view| view.id)?;
        self.arbiter.renewed(newest)
    }

    /// Returns the newest attachment that has opened a replica.
    fn opened_attach(&self) -> u64 {
        let opened = self.replicas.iter().map(|replica| replica.views.generation().attach);
        opened.max().unwrap_or_default()
    }

    /// Restarts the engine of a host, without the controller.
    pub(crate) fn restart(&mut self, rules: Rules, host: u8, higher: bool) {
        let known = &mut self.hosts[usize::from(host)];
        known.restart += 1;
        let pair = Generation::new(u64::from(host) + 1, known.restart);
        self.run_again(rules, pair, higher);
    }

    /// Starts an engine on a host that has lost its state file, like the first one of the attachment. Another
    /// one may run: the lock that kept a second one from starting may be lost too.
    pub(crate) fn start_without_state_file(&mut self, rules: Rules, host: u8, higher: bool) {
        self.losses += 1;
        self.hosts[usize::from(host)] = HostState { restart: 0, known: None, has_lost: true };
        self.run_again(rules, Generation::new(u64::from(host) + 1, 0), higher);
    }

    /// Draws another nonce for a pair that was used before.
    fn run_again(&mut self, rules: Rules, pair: Generation, higher: bool) {
        let used = self.engines.iter().map(|engine| engine.generation);
        let used = used.filter(|used| (used.attach, used.restart) == (pair.attach, pair.restart));
        let next = if higher {
            used.map(|used| used.nonce + 1).max()
        } else {
            used.map(|used| used.nonce.saturating_sub(1)).min()
        };
        self.run(rules.nonce(pair, next));
    }

    fn run(&mut self, generation: Generation) {
        let engine = u8::try_from(self.engines.len()).unwrap_or(u8::MAX);
        self.engines.push(Rc::new(Engine::new(generation)));
        let all = Bits::below(u8::try_from(self.replicas.len()).unwrap_or(u8::MAX));
        self.send_all(all, |replica| Message::Open { engine, replica });
    }
}

impl Model {
    /// Records in the arbiter, then answers. A crash between the two is an answer that never arrives.
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
