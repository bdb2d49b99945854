use std::rc::Rc;

use shorthorn_types::{Generation, Members, ReplicaReport, View, ViewId};
use shorthorn_views::{Arbiter, ReplicaViews, ViewChange};

use crate::bits::{Bits, REPLICAS_MAX, bits, members};
use crate::network::Message;

/// The most members of the view that a volume begins with. Further replicas are there to replace one.
const FIRST_MEMBERS: u8 = 3;

/// The complete state at one moment. It shares unchanged parts with its neighbours in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// The controller's: the current attachment.
    pub attach: u64,
    /// The record of the arbiter in the controller: its last grant.
    pub arbiter: Arbiter,
    /// For every attachment, from 1: the state that the engine's host keeps of it.
    pub hosts: Vec<HostState>,
    /// The durable and volatile state of each replica, by its number.
    pub replicas: Vec<Rc<Replica>>,
    /// Every engine process that ever was, in the order of their starts, which is not that of their
    /// generations.
    pub engines: Vec<Rc<Engine>>,
    /// The messages in flight, in order.
    pub messages: Vec<Message>,
    /// The number of submitted writes.
    pub writes: u8,
    /// The content of the backup of the controller's store.
    pub backup: (u64, Arbiter),
    /// Restores of the controller's store so far.
    pub restores: u8,
    /// The number of engines at the last restore.
    pub restored_at: usize,
    /// The number of times that a host has lost its state.
    pub losses: u8,
    /// For the invariants only: replicas whose data was replaced to make them members, which they are not
    /// yet.
    pub not_admitted: Bits,
}

/// The state that the host of an attachment keeps over restarts of its engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostState {
    /// The restart number of the last engine process.
    pub restart: u32,
    /// The last known grant: that of the attachment, or one received since.
    pub known: Option<View>,
    /// True if the host has lost its state: its engines may be refused until the volume is attached again.
    pub has_lost: bool,
}

/// The state of a replica, all durable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replica {
    /// The stored generation and the views.
    pub views: ReplicaViews,
    /// The writes that it has.
    pub data: Bits,
}

/// The state of an engine process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Engine {
    /// Attachment, restart and nonce.
    pub generation: Generation,
    /// True if the process runs.
    pub alive: bool,
    /// The reports of the replicas, received or in flight.
    pub welcomes: [Option<Rc<ReplicaReport>>; REPLICAS_MAX],
    /// Replicas whose report was received.
    pub reached: Bits,
    /// The committed view; none before the first one.
    pub view: Option<View>,
    /// All that it has proposed; the view numbered `n` is at `n - 1`.
    pub proposals: Vec<Rc<Proposal>>,
    /// The last of them, unless it is committed.
    pub underway: Option<Underway>,
    /// Writes neither acknowledged nor failed.
    pub pending: Bits,
    /// Per replica: which of them it has answered.
    pub answers: [Bits; REPLICAS_MAX],
    /// Per replica: the number of the current connection.
    pub links: [u8; REPLICAS_MAX],
    /// A replica outside the view that gets the writes too.
    pub rebuilt: Option<u8>,
    /// The acknowledged writes.
    pub acknowledged: Bits,
    /// True if its first view has come through.
    pub served: bool,
    /// The number of times that it has begun to change its view.
    pub changes: u8,
    /// The arbiter's record in a refusal on its way.
    pub refusal: Option<View>,
}

/// A proposed view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proposal {
    /// The view that the engine wants to commit.
    pub target: View,
    /// The report with the highest view among those that count.
    pub honoured: ReplicaReport,
    /// The replicas that had stored the view when the arbiter was asked, or those reached if it is asked
    /// first.
    pub stored: Members,
}

/// A change under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Underway {
    /// The state machine of the product.
    pub change: ViewChange,
    /// The replicas to which it may be proposed.
    pub reached: Bits,
    /// True if the change was proposed.
    pub proposed: bool,
    /// True if it must not be before it is granted.
    pub asks_first: bool,
    /// True if the arbiter was asked for it.
    pub asked: bool,
    /// True if the arbiter has granted it.
    pub granted: bool,
}

impl Underway {
    /// Returns true if the time has come to propose it.
    pub(crate) fn may_be_proposed(&self) -> bool {
        !self.proposed && (self.granted || !self.asks_first)
    }
}

impl State {
    /// Creates a volume that was just made.
    #[must_use]
    pub fn new(replicas: u8) -> State {
        let members = members(Bits::below(replicas.min(FIRST_MEMBERS)));
        let first = View { id: ViewId { generation: Generation::NEVER, number: 0 }, members };
        let replica = Rc::new(Replica { views: ReplicaViews::new(first), data: Bits::NONE });
        State {
            attach: 0,
            arbiter: Arbiter::default(),
            hosts: Vec::new(),
            replicas: vec![replica; usize::from(replicas)],
            engines: Vec::new(),
            messages: Vec::new(),
            writes: 0,
            backup: (0, Arbiter::default()),
            restores: 0,
            restored_at: 0,
            losses: 0,
            not_admitted: Bits::NONE,
        }
    }

    /// Returns all replicas.
    pub fn all(&self) -> impl Iterator<Item = u8> + use<> {
        (0..8).take(self.replicas.len())
    }

    /// Looks a replica up by its index, from 0.
    #[must_use]
    pub fn replica(&self, replica: u8) -> &Replica {
        &self.replicas[usize::from(replica)]
    }

    pub(crate) fn replica_mut(&mut self, replica: u8) -> &mut Replica {
        Rc::make_mut(&mut self.replicas[usize::from(replica)])
    }

    /// Looks an engine up by its index, from 0 in the order of their starts.
    #[must_use]
    pub fn engine(&self, engine: u8) -> &Engine {
        &self.engines[usize::from(engine)]
    }

    pub(crate) fn engine_mut(&mut self, engine: u8) -> &mut Engine {
        Rc::make_mut(&mut self.engines[usize::from(engine)])
    }

    /// Returns true if the message can still have an effect. Generations only rise, engines do not come back
    /// to life, and views are never numbered twice. A message without effect now never has one, and two
    /// states that differ only in it are equal.
    pub(crate) fn is_of_use(&self, message: Message) -> bool {
        let at = |engine: u8| self.engine(engine);
        let holder = |replica: u8| self.replica(replica).views.generation();
        match message {
            Message::Open { engine, replica } => {
                let (holder, generation) = (holder(replica), at(engine).generation);
                // Another engine may have the same one, if it draws no nonce.
                let is_shared = || self.engines.iter().filter(|one| one.generation == generation).count() > 1;
                let is_new = at(engine).welcomes[usize::from(replica)].is_none();
                holder < generation || (holder == generation && is_new && is_shared())
            }
            Message::Opened { engine, replica } => at(engine).alive && !at(engine).reached.has(replica),
            Message::Propose { engine, replica, .. } | Message::Commit { engine, replica, .. } => {
                holder(replica) <= at(engine).generation
            }
            Message::Write { engine, replica, link, .. } => {
                holder(replica) <= at(engine).generation && link == at(engine).link(replica)
            }
            Message::Stored { engine, replica, number } => {
                at(engine).waits_for(number) && !at(engine).stored_by().has(replica)
            }
            Message::Applied { engine, replica, link, write } => {
                let engine = at(engine);
                let is_open = engine.pending.has(write) && !engine.answered(replica).has(write);
                engine.alive && is_open && link == engine.link(replica)
            }
            Message::Ask { engine, .. } => at(engine).generation.attach == self.attach,
            Message::Granted { engine, number } => at(engine).waits_for(number),
            Message::Refused { engine } => at(engine).alive,
        }
    }

    /// Puts a message on its way, unless it is already.
    pub(crate) fn send(&mut self, message: Message) {
        if let Err(place) = self.messages.binary_search(&message) {
            self.messages.insert(place, message);
        }
    }

    /// Puts a message to each of `replicas` on its way.
    pub(crate) fn send_all(&mut self, replicas: Bits, message: impl Fn(u8) -> Message) {
        replicas.iter().for_each(|replica| self.send(message(replica)));
    }

    /// Returns the host of the attachment of `generation`.
    pub(crate) fn host(&self, generation: Generation) -> &HostState {
        &self.hosts[place(generation.attach)]
    }

    pub(crate) fn host_mut(&mut self, generation: Generation) -> &mut HostState {
        &mut self.hosts[place(generation.attach)]
    }

    /// Returns true if `engine` holds all of `replicas`.
    #[must_use]
    pub fn holds(&self, engine: &Engine, replicas: Bits) -> bool {
        replicas.iter().all(|replica| self.replica(replica).views.generation() == engine.generation)
    }
}

/// Returns the index of the host of an attachment.
pub(crate) fn place(attach: u64) -> usize {
    usize::try_from(attach).map_or(usize::MAX, |attach| attach - 1)
}

impl Engine {
    pub(crate) fn new(generation: Generation) -> Engine {
        Engine {
            generation,
            alive: true,
            welcomes: Default::default(),
            reached: Bits::NONE,
            view: None,
            proposals: Vec::new(),
            underway: None,
            pending: Bits::NONE,
            answers: Default::default(),
            links: Default::default(),
            rebuilt: None,
            acknowledged: Bits::NONE,
            served: false,
            changes: 0,
            refusal: None,
        }
    }

    /// Ends the process. Its messages are still on their way.
    pub(crate) fn die(&mut self) {
        *self = Engine {
            alive: false,
            proposals: std::mem::take(&mut self.proposals),
            links: self.links,
            acknowledged: self.acknowledged,
            served: self.served,
            ..Engine::new(self.generation)
        };
    }

    /// Returns the members of the committed view.
    #[must_use]
    pub fn members(&self) -> Bits {
        self.view.map_or(Bits::NONE, |view| bits(&view.members))
    }

    /// Returns the members of the pending view.
    #[must_use]
    pub fn target(&self) -> Bits {
        self.underway.as_ref().map_or(Bits::NONE, |underway| bits(&underway.change.target.members))
    }

    /// Returns true if it serves, and changes nothing.
    #[must_use]
    pub fn is_steady(&self) -> bool {
        self.alive && self.view.is_some() && self.underway.is_none()
    }

    /// Returns the replicas that have stored the pending view.
    pub(crate) fn stored_by(&self) -> Bits {
        self.underway.as_ref().map_or(Bits::NONE, |underway| bits(underway.change.stored_by()))
    }

    /// Returns true if the view `number` is under way.
    pub(crate) fn waits_for(&self, number: u8) -> bool {
        self.alive && self.underway.is_some() && self.proposals.len() == usize::from(number)
    }

    pub(crate) fn link(&self, replica: u8) -> u8 {
        self.links[usize::from(replica)]
    }

    pub(crate) fn answered(&self, replica: u8) -> Bits {
        self.answers[usize::from(replica)]
    }

    pub(crate) fn proposal(&self, number: u8) -> &Proposal {
        &self.proposals[usize::from(number) - 1]
    }

    /// Returns the number of the last proposal.
    pub(crate) fn last_number(&self) -> u8 {
        u8::try_from(self.proposals.len()).unwrap_or(u8::MAX)
    }
}
