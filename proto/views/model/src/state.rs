use std::rc::Rc;

use shorthorn_types::{Generation, Members, ReplicaReport, View, ViewId};
use shorthorn_views::{Arbiter, Change, ReplicaViews};

use crate::bits::{Bits, REPLICAS_MAX, bits, members};
use crate::network::Message;

/// Everything, at one moment. What is shared with the states around it is shared in memory too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// The controller's: the current attachment.
    pub attach: u64,
    /// The controller's: what it has granted.
    pub arbiter: Arbiter,
    /// For every attachment, from 1: what the engine's host remembers of it.
    pub hosts: Vec<Host>,
    /// The replicas.
    pub replicas: Vec<Rc<Replica>>,
    /// Every engine process that ever was, in the order of their starts, which is not that of their generations.
    pub engines: Vec<Rc<Engine>>,
    /// What is on its way, in order.
    pub messages: Vec<Message>,
    /// How many writes have been submitted.
    pub writes: u8,
    /// The controller's: what a backup of its store has.
    pub backup: (u64, Arbiter),
    /// How often that was restored.
    pub restores: u8,
    /// How many engines there were then.
    pub restored_at: usize,
    /// How often a host has lost what it remembered.
    pub losses: u8,
    /// For the invariants only: replicas whose data was replaced to make them members, which they are not yet.
    pub unjoined: Bits,
}

/// What the host of one attachment keeps over a restart of its engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Of the engine process that was started last.
    pub restart: u32,
    /// The last grant that it knows: what the controller said when it attached, or what was heard since.
    pub known: Option<View>,
    /// True if it has lost what it remembered: its engines may be refused until the volume is attached again.
    pub has_lost: bool,
}

/// One replica. All of it is durable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replica {
    /// Who holds it, and the views.
    pub views: ReplicaViews,
    /// The writes that it has.
    pub data: Bits,
}

/// One engine process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Engine {
    /// Its own.
    pub generation: Generation,
    /// True if the process runs.
    pub alive: bool,
    /// What the replicas have reported, received or on its way.
    pub welcomes: [Option<Rc<ReplicaReport>>; REPLICAS_MAX],
    /// Whose report was received.
    pub reached: Bits,
    /// The view that is through; none before the first is.
    pub view: Option<View>,
    /// All that it has proposed; the view numbered `n` is at `n - 1`.
    pub proposals: Vec<Rc<Proposal>>,
    /// The last of them, unless it is through.
    pub underway: Option<Underway>,
    /// Writes neither acknowledged nor failed.
    pub pending: Bits,
    /// Per replica: which of them it has answered.
    pub answers: [Bits; REPLICAS_MAX],
    /// Per replica: the number of the current connection.
    pub links: [u8; REPLICAS_MAX],
    /// A replica outside the view that gets the writes too.
    pub joiner: Option<u8>,
    /// What it has acknowledged.
    pub acknowledged: Bits,
    /// True if its first view has come through.
    pub served: bool,
    /// How often it has begun to change its view.
    pub changes: u8,
    /// The arbiter's record in a refusal on its way.
    pub refusal: Option<View>,
}

/// A proposed view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proposal {
    /// The view.
    pub target: View,
    /// What it honours.
    pub honoured: ReplicaReport,
    /// Who had stored it when the arbiter was asked, or was reached, where it is asked first.
    pub stored: Members,
}

/// A change under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Underway {
    /// The real state machine.
    pub change: Change,
    /// To whom it may be proposed.
    pub reached: Bits,
    /// True if it was.
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
    /// A volume that was just made.
    #[must_use]
    pub fn new(replicas: u8) -> State {
        let members = members(Bits::below(replicas));
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
            unjoined: Bits::NONE,
        }
    }

    /// Every replica.
    pub fn all(&self) -> impl Iterator<Item = u8> + use<> {
        (0..8).take(self.replicas.len())
    }

    /// Replica number `replica`.
    #[must_use]
    pub fn replica(&self, replica: u8) -> &Replica {
        &self.replicas[usize::from(replica)]
    }

    pub(crate) fn replica_mut(&mut self, replica: u8) -> &mut Replica {
        Rc::make_mut(&mut self.replicas[usize::from(replica)])
    }

    /// Engine number `engine`.
    #[must_use]
    pub fn engine(&self, engine: u8) -> &Engine {
        &self.engines[usize::from(engine)]
    }

    pub(crate) fn engine_mut(&mut self, engine: u8) -> &mut Engine {
        Rc::make_mut(&mut self.engines[usize::from(engine)])
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

    /// What remembers for `generation`.
    pub(crate) fn host(&self, generation: Generation) -> &Host {
        &self.hosts[place(generation.attach)]
    }

    pub(crate) fn host_mut(&mut self, generation: Generation) -> &mut Host {
        &mut self.hosts[place(generation.attach)]
    }

    /// Returns true if `engine` holds all of `replicas`.
    #[must_use]
    pub fn holds(&self, engine: &Engine, replicas: Bits) -> bool {
        replicas.iter().all(|replica| self.replica(replica).views.generation() == engine.generation)
    }
}

/// Of the host of an attachment.
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
            joiner: None,
            acknowledged: Bits::NONE,
            served: false,
            changes: 0,
            refusal: None,
        }
    }

    /// The process has ended. Its messages are still on their way.
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

    /// Members of the view that is through.
    #[must_use]
    pub fn members(&self) -> Bits {
        self.view.map_or(Bits::NONE, |view| bits(&view.members))
    }

    /// Members of the view under way.
    #[must_use]
    pub fn target(&self) -> Bits {
        self.underway.as_ref().map_or(Bits::NONE, |underway| bits(&underway.change.target.members))
    }

    /// Returns true if it serves, and changes nothing.
    #[must_use]
    pub fn is_steady(&self) -> bool {
        self.alive && self.view.is_some() && self.underway.is_none()
    }

    /// Who has stored the view under way.
    pub(crate) fn who_stored(&self) -> Bits {
        self.underway.as_ref().map_or(Bits::NONE, |underway| bits(underway.change.who_stored()))
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

    /// The number of what was proposed last.
    pub(crate) fn last_number(&self) -> u8 {
        u8::try_from(self.proposals.len()).unwrap_or(u8::MAX)
    }
}
