use std::hash::{DefaultHasher, Hasher};

use shorthorn_types::{Generation, ReplicaReport, View};

use shorthorn_views::Arbiter;

use crate::bits::{Bits, REPLICAS_MAX, bits};
use crate::network::Message;
use crate::state::{Engine, State};

/// All orders of up to three replicas. With fewer replicas, the first ones leave the others in place. A
/// fourth replica stays in place.
const ORDERS: [[u8; REPLICAS_MAX]; 6] =
    [[0, 1, 2, 3], [1, 0, 2, 3], [0, 2, 1, 3], [1, 2, 0, 3], [2, 0, 1, 3], [2, 1, 0, 3]];

/// Returns a number that is the same for states that differ only in the order of their replicas. Different
/// states have the same one so rarely (once in 2^64 pairs) that the search takes them for one.
pub(crate) fn fingerprint(state: &State) -> u64 {
    let orders = match state.replicas.len() {
        1 => &ORDERS[..1],
        2 => &ORDERS[..2],
        _ => &ORDERS[..],
    };
    let mut bytes = Vec::with_capacity(512);
    let hash = |order: &[u8; REPLICAS_MAX]| {
        bytes.clear();
        let mut writer = Writer { bytes: std::mem::take(&mut bytes), order: *order };
        writer.state(state);
        bytes = writer.bytes;
        let mut hasher = DefaultHasher::new();
        hasher.write(&bytes);
        hasher.finish()
    };
    orders.iter().map(hash).min().unwrap_or_default()
}

/// Writes a state down with its replicas in another order: replica `r` becomes `order[r]`.
struct Writer {
    bytes: Vec<u8>,
    order: [u8; REPLICAS_MAX],
}

impl Writer {
    fn state(&mut self, state: &State) {
        self.number(state.attach);
        self.arbiter(&state.arbiter);
        self.number(state.backup.0);
        self.arbiter(&state.backup.1);
        self.bytes.push(state.restores);
        self.number(state.restored_at as u64);
        self.bytes.extend([state.writes, state.losses, self.permuted(state.not_admitted)]);
        for host in &state.hosts {
            self.number(u64::from(host.restart));
            self.option(host.known);
            self.bytes.push(u8::from(host.has_lost));
        }
        for replica in self.places(state.replicas.len()) {
            let replica = &state.replicas[replica];
            self.generation(replica.views.generation());
            self.report(replica.views.report());
            self.bytes.push(replica.data.0);
        }
        for engine in &state.engines {
            self.engine(engine);
        }
        let order = self.order;
        let mut messages: Vec<Message> = state
            .messages
            .iter()
            .map(|message| message.with_replica(|replica| order[usize::from(replica)]))
            .collect();
        messages.sort_unstable();
        for message in messages {
            self.message(message);
        }
    }

    fn engine(&mut self, engine: &Engine) {
        self.generation(engine.generation);
        let flags = [u8::from(engine.alive), u8::from(engine.served), engine.changes];
        self.bytes.extend(flags);
        self.bytes.extend([self.permuted(engine.reached), engine.pending.0, engine.acknowledged.0]);
        self.bytes.push(engine.rebuilt.map_or(u8::MAX, |rebuilt| self.order[usize::from(rebuilt)]));
        self.option(engine.view);
        self.option(engine.refusal);
        for place in self.places(engine.answers.len()) {
            self.bytes.extend([engine.answers[place].0, engine.links[place]]);
            match &engine.welcomes[place] {
                Some(report) => self.report(report),
                None => self.bytes.push(u8::MAX),
            }
        }
        for proposal in &engine.proposals {
            self.view(proposal.target);
            self.report(&proposal.honoured);
            self.bytes.push(self.permuted(bits(&proposal.stored)));
        }
        if let Some(underway) = &engine.underway {
            let stored = self.permuted(bits(underway.change.stored_by()));
            let flags = [underway.proposed, underway.asks_first, underway.asked, underway.granted];
            self.bytes.extend([stored, self.permuted(underway.reached)]);
            self.bytes.extend(flags.map(u8::from));
        }
        self.bytes.push(u8::MAX);
    }

    /// Returns the replicas in the order of their new places.
    fn places(&self, count: usize) -> impl Iterator<Item = usize> + use<> {
        let order = self.order;
        (0..).take(count).filter_map(move |place| order.iter().position(|to| *to == place))
    }

    fn permuted(&self, replicas: Bits) -> u8 {
        replicas.iter().fold(Bits::NONE, |all, replica| all.with(self.order[usize::from(replica)])).0
    }

    fn number(&mut self, number: u64) {
        self.bytes.push(u8::try_from(number).unwrap_or(u8::MAX));
    }

    fn generation(&mut self, generation: Generation) {
        self.number(generation.attach);
        self.number(u64::from(generation.restart));
        self.number(generation.nonce);
    }

    fn view(&mut self, view: View) {
        self.generation(view.id.generation);
        self.number(u64::from(view.id.number));
        self.bytes.push(self.permuted(bits(&view.members)));
    }

    fn option(&mut self, view: Option<View>) {
        match view {
            Some(view) => self.view(view),
            None => self.bytes.push(u8::MAX),
        }
    }

    fn arbiter(&mut self, arbiter: &Arbiter) {
        self.option(arbiter.granted());
        self.number(arbiter.stale_since().unwrap_or_default());
    }

    fn report(&mut self, report: &ReplicaReport) {
        self.view(report.committed);
        self.number(report.proposed.len() as u64);
        for view in &report.proposed {
            self.view(*view);
        }
    }

    fn message(&mut self, message: Message) {
        let bytes = match message {
            Message::Open { engine, replica } => [0, engine, replica, 0, 0],
            Message::Opened { engine, replica } => [1, engine, replica, 0, 0],
            Message::Propose { engine, replica, number } => [2, engine, replica, number, 0],
            Message::Stored { engine, replica, number } => [3, engine, replica, number, 0],
            Message::Commit { engine, replica, number } => [4, engine, replica, number, 0],
            Message::Write { engine, replica, link, write } => [5, engine, replica, link, write],
            Message::Applied { engine, replica, link, write } => [6, engine, replica, link, write],
            Message::Ask { engine, number } => [7, engine, number, 0, 0],
            Message::Granted { engine, number } => [8, engine, number, 0, 0],
            Message::Refused { engine } => [9, engine, 0, 0, 0],
        };
        self.bytes.extend(bytes);
    }
}
