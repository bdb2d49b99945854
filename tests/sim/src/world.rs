//! Everything that there is, and what happens next.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use fastrand::Rng;
use shorthorn_types::{Members, ReplicaId, View};
use shorthorn_views::Arbiter;

use crate::Options;
use crate::checker::{Checker, Micros};
use crate::engine::{EngineProc, Host};
use crate::faults::Fault;
use crate::guest::Guest;
use crate::net::{Answer, Conn, ConnId, Message};
use crate::replica::Replica;

/// Something that happens at a point in time.
#[derive(Debug)]
pub enum Occurrence {
    /// A message arrives.
    Deliver { conn: ConnId, to_replica: bool, message: Message },
    /// A disk has done what a request asked for.
    DiskDone { replica: usize, boot: u64, op: u64 },
    /// A disk has written a page of a set of regions.
    PageDone { replica: usize, boot: u64, write: u64 },
    /// An engine is told the time.
    Tick { engine: u64 },
    /// Trouble.
    Fault(Fault),
    /// A replica process starts.
    StartReplica { replica: usize, boot: u64 },
    /// An engine process starts on a host, unless there is one.
    StartEngine { host: usize },
    /// An engine process that hands over ends, whether it has settled or not.
    EndEngine { engine: u64 },
    /// An engine asks for a grant, if it still wants one.
    AskArbiter { engine: u64 },
    /// The arbiter's answer arrives.
    Granted { engine: u64, view: View },
    /// The guest may ask for something.
    Guest,
    /// Tasks look at the clock.
    Wake,
}

/// The controller: what it has recorded for the volume.
#[derive(Debug)]
pub struct Controller {
    /// Whether it runs.
    pub up: bool,
    /// Number of the newest attachment.
    pub attach: u64,
    /// Where that is.
    pub host: usize,
    /// What it has granted.
    pub arbiter: Arbiter,
    /// The size that the volume is to have; every engine that starts is told.
    pub size_bytes: u64,
}

/// The world of one volume.
#[derive(Debug)]
pub struct World {
    pub options: Options,
    pub now: Micros,
    pub rng: Rng,
    sequence: u64,
    queue: BTreeMap<(Micros, u64), Occurrence>,
    pub replicas: Vec<Replica>,
    pub hosts: Vec<Host>,
    pub engines: BTreeMap<u64, EngineProc>,
    pub conns: BTreeMap<ConnId, Conn>,
    /// Messages that a partition holds back, in order.
    held: VecDeque<(ConnId, bool, Message)>,
    pub controller: Controller,
    pub guest: Guest,
    /// What the guest had in flight when it moved: it may happen until the next engine serves.
    pub guest_forgot: Vec<crate::guest::Outstanding>,
    pub checker: Checker,
    /// Hosts and replicas that do not reach each other.
    pub cut: BTreeSet<(usize, usize)>,
    /// Answers that tasks wait for.
    pub calls: BTreeMap<(ConnId, u64), Option<Answer>>,
    /// Engine processes whose courier has to be started.
    pub new_engines: Vec<u64>,
    /// The first thing that must not be.
    pub violation: Option<String>,
    /// Whom an engine last could not start without.
    pub needed: Members,
    /// Trouble is over: what was broken is repaired, and no more comes.
    pub calm: bool,
    pub counts: BTreeMap<&'static str, u64>,
    pub log: Vec<String>,
}

impl World {
    /// A world in which nothing runs yet.
    pub fn new(
        options: Options,
        replicas: Vec<Replica>,
        hosts: usize,
        guest: Guest,
        checker: Checker,
        rng: Rng,
    ) -> World {
        World {
            options,
            now: 0,
            rng,
            sequence: 0,
            queue: BTreeMap::new(),
            replicas,
            hosts: (0..hosts).map(|_| Host::default()).collect(),
            engines: BTreeMap::new(),
            conns: BTreeMap::new(),
            held: VecDeque::new(),
            controller: Controller {
                up: true,
                attach: 1,
                host: 0,
                arbiter: Arbiter::default(),
                size_bytes: guest.size_bytes,
            },
            guest,
            guest_forgot: Vec::new(),
            checker,
            cut: BTreeSet::new(),
            calls: BTreeMap::new(),
            new_engines: Vec::new(),
            violation: None,
            needed: Members::NONE,
            calm: false,
            counts: BTreeMap::new(),
            log: Vec::new(),
        }
    }

    /// `what` happens after `delay`.
    pub fn after(&mut self, delay: Micros, what: Occurrence) {
        self.sequence += 1;
        self.queue.insert((self.now + delay, self.sequence), what);
    }

    /// A number that was never used before.
    pub fn fresh(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
    }

    /// Goes on to the next occurrence.
    pub fn next(&mut self) -> Option<Occurrence> {
        let ((at, _), what) = self.queue.pop_first()?;
        self.now = at;
        Some(what)
    }

    /// Counts something, for the summary.
    pub fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// Writes a line to the log of this run, if one is wanted.
    pub fn note(&mut self, line: impl FnOnce() -> String) {
        if self.options.trace {
            let line = line();
            self.log.push(format!("{:>12.3} {line}", self.now as f64 / 1000.0));
        }
    }

    /// Something that must never be.
    pub fn violate(&mut self, what: String) {
        self.note(|| format!("VIOLATION {what}"));
        self.violation.get_or_insert(what);
    }

    /// Index of a replica by its id.
    pub fn replica_index(&self, id: ReplicaId) -> Option<usize> {
        self.replicas.iter().position(|replica| replica.id == id)
    }

    /// Opens a connection from an engine to a replica. It may turn out that nobody is there.
    pub fn connect(&mut self, engine: u64, replica: usize) -> ConnId {
        let id = self.fresh();
        let boot = self.replicas[replica].boot;
        let conn = Conn {
            engine,
            replica,
            boot,
            engine_open: true,
            replica_open: self.replicas[replica].up,
            last_to_replica: 0,
            last_to_engine: 0,
            place: None,
        };
        self.conns.insert(id, conn);
        if !self.replicas[replica].up {
            self.send(id, false, Message::Close);
        }
        id
    }

    /// Sends a message; those of one direction of a connection arrive in order.
    pub fn send(&mut self, id: ConnId, to_replica: bool, message: Message) {
        let slow = self.options.slow_network && self.rng.u8(..) < 8;
        let delay = if slow { self.rng.u64(1_000..400_000) } else { self.rng.u64(20..300) };
        let now = self.now;
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let last = if to_replica { &mut conn.last_to_replica } else { &mut conn.last_to_engine };
        let at = (now + delay).max(*last);
        *last = at;
        self.after(at - now, Occurrence::Deliver { conn: id, to_replica, message });
    }

    /// A message has arrived, unless something holds it back.
    pub fn deliver(&mut self, id: ConnId, to_replica: bool, message: Message) {
        let Some(conn) = self.conns.get(&id) else { return };
        let host = self.engines.get(&conn.engine).map_or(0, |engine| engine.host);
        let blocked = self.cut.contains(&(host, conn.replica));
        let behind = self.held.iter().any(|(other, direction, _)| (*other, *direction) == (id, to_replica));
        if blocked || behind {
            self.held.push_back((id, to_replica, message));
            return;
        }
        self.arrive(id, to_replica, message);
    }

    /// Whatever is not held back any more arrives.
    pub fn release_held(&mut self) {
        for (conn, to_replica, message) in std::mem::take(&mut self.held) {
            self.deliver(conn, to_replica, message);
        }
    }

    fn arrive(&mut self, id: ConnId, to_replica: bool, message: Message) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        match (to_replica, message) {
            (true, Message::Close) => {
                conn.replica_open = false;
                self.engine_has_closed(id);
            }
            (true, Message::Ask(number, ask)) => self.asked(id, number, ask),
            (true, Message::Answer(..)) | (false, Message::Ask(..)) => {}
            (false, Message::Close) => self.close_at_engine(id, "it has closed the connection"),
            (false, Message::Answer(number, answer)) => {
                if conn.engine_open {
                    self.answered(id, number, answer);
                }
            }
        }
        let gone = self.conns.get(&id).is_some_and(|conn| !conn.engine_open && !conn.replica_open);
        if gone {
            self.conns.remove(&id);
        }
    }
}
