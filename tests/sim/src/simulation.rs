//! The complete state, and its next event.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use fastrand::Rng;
use shorthorn_checker::{Checker, Micros};
use shorthorn_types::{Members, ReplicaId};
use shorthorn_views::Arbiter;

use crate::RunOptions;
use crate::engine::{EngineProc, HostState};
use crate::faults::{Fault, Replacement};
use crate::guest::{Guest, Outstanding, Watcher};
use crate::net::{Conn, ConnId, Cut, CutScope, Direction, NetMessage, ReplicaAnswer};
use crate::occurrence::Occurrence;
use crate::replica::Replica;
use crate::script::{HOSTS, Layout, Script};

/// The controller's record of the volume.
#[derive(Clone, Debug)]
pub struct Controller {
    /// True if it runs.
    pub up: bool,
    /// Number of the newest attachment.
    pub attach: u64,
    /// The host of the attachment.
    pub host: usize,
    /// The record of grants.
    pub arbiter: Arbiter,
    /// The wanted size of the volume; every starting engine gets it.
    pub size_bytes: u64,
}

/// The simulation of one volume.
#[derive(Debug)]
pub struct Simulation {
    pub options: RunOptions,
    pub queues: u16,
    pub slow_network: bool,
    /// See [`Script::rot_places`]; 0 after the trouble.
    pub rot_places: usize,
    pub now: Micros,
    pub rng: Rng,
    sequence: u64,
    queue: BinaryHeap<Reverse<(Micros, u64, usize)>>,
    /// The occurrences in the queue, by their place.
    occurrences: Vec<Option<Occurrence>>,
    free: Vec<usize>,
    pub replicas: Vec<Replica>,
    /// The layouts of the replicas.
    pub layouts: Vec<Layout>,
    pub hosts: Vec<HostState>,
    pub engines: BTreeMap<u64, EngineProc>,
    pub conns: BTreeMap<ConnId, Conn>,
    pub controller: Controller,
    /// An earlier copy of the controller's store.
    pub saved_controller: Option<Controller>,
    /// The order in which replicas that are gone are replaced.
    pub replacement: Replacement,
    /// The number of replicas that the volume is to have.
    pub wanted_replicas: usize,
    /// True if a replica has returned that was given up.
    pub has_returned: bool,
    pub guest: Guest,
    /// The requests in flight when the guest moved: they may happen until the next engine serves.
    pub guest_forgot: Vec<Outstanding>,
    pub checker: Checker,
    /// Programs at the devices of isolated engines.
    pub watchers: Vec<Watcher>,
    /// An engine has started from members that had all lost power, and no guest has started over since.
    pub lost_unreported: bool,
    /// The broken paths.
    pub cuts: Vec<Cut>,
    /// Answers that tasks wait for.
    pub calls: BTreeMap<(ConnId, u64), Option<ReplicaAnswer>>,
    /// Engine processes whose rebuild task has to be started.
    pub new_engines: Vec<u64>,
    /// Empty, for its memory.
    pub outputs: Vec<shorthorn_core::Output>,
    /// Engine processes whose tasks have something to look at.
    pub woken: Vec<u64>,
    /// Blocks that a disk has changed by itself, by replica.
    pub was_rotten: std::collections::BTreeSet<(usize, u64)>,
    /// The times at which blocks of snapshots were repaired last, by replica.
    pub repaired: BTreeMap<(usize, u64), Micros>,
    /// The number of checks that a replica could not make for an engine, which has not reported them yet.
    pub failed_checks: BTreeMap<(usize, u64), u32>,
    /// The number of complete scrubs.
    pub scrubs_done: u64,
    /// The first thing that must not be.
    pub violation: Option<String>,
    /// The replicas that the last failed start needed.
    pub needed: Members,
    /// The views that the last attempt to open the volume had to honour have no member in common.
    pub is_torn: bool,
    /// True if the trouble is over: faults are repaired, and no more come.
    pub calm: bool,
    pub counts: BTreeMap<&'static str, u64>,
    pub log: Vec<String>,
}

impl Simulation {
    /// Creates a simulation in which nothing runs yet.
    pub fn new(
        options: RunOptions,
        script: &Script,
        replicas: Vec<Replica>,
        guest: Guest,
        checker: Checker,
    ) -> Simulation {
        Simulation {
            options,
            queues: script.queues.max(1),
            slow_network: script.slow_network,
            rot_places: script.rot_places,
            now: 0,
            rng: Rng::with_seed(script.seed),
            sequence: 0,
            queue: BinaryHeap::new(),
            occurrences: Vec::new(),
            free: Vec::new(),
            replicas,
            layouts: Vec::new(),
            hosts: (0..HOSTS).map(|_| HostState::default()).collect(),
            engines: BTreeMap::new(),
            conns: BTreeMap::new(),
            controller: Controller {
                up: true,
                attach: 1,
                host: 0,
                arbiter: Arbiter::default(),
                size_bytes: guest.size_bytes,
            },
            saved_controller: None,
            replacement: Replacement::default(),
            wanted_replicas: guest.replicas.len(),
            has_returned: false,
            guest,
            guest_forgot: Vec::new(),
            checker,
            watchers: Vec::new(),
            lost_unreported: false,
            cuts: Vec::new(),
            calls: BTreeMap::new(),
            new_engines: Vec::new(),
            outputs: Vec::new(),
            woken: Vec::new(),
            was_rotten: std::collections::BTreeSet::new(),
            repaired: BTreeMap::new(),
            failed_checks: BTreeMap::new(),
            scrubs_done: 0,
            violation: None,
            needed: Members::NONE,
            is_torn: false,
            calm: false,
            counts: BTreeMap::new(),
            log: Vec::new(),
        }
    }

    /// Schedules `what` after `delay`.
    pub fn after(&mut self, delay: Micros, what: Occurrence) {
        self.sequence += 1;
        let place = self.free.pop().unwrap_or(self.occurrences.len());
        if place == self.occurrences.len() {
            self.occurrences.push(None);
        }
        self.occurrences[place] = Some(what);
        self.queue.push(Reverse((self.now + delay, self.sequence, place)));
    }

    /// Returns a number that was never used before.
    pub fn fresh(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
    }

    /// Advances to the next occurrence.
    pub fn next(&mut self) -> Option<Occurrence> {
        let Reverse((at, _, place)) = self.queue.pop()?;
        self.now = at;
        self.free.push(place);
        self.occurrences[place].take()
    }

    /// Counts something, for the summary.
    pub fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// Returns the count of an event.
    pub fn counted(&self, what: &'static str) -> u64 {
        self.counts.get(what).copied().unwrap_or(0)
    }

    /// Writes a line to the log of this run, if one is wanted.
    pub fn trace(&mut self, line: impl FnOnce() -> String) {
        if self.options.trace {
            let line = line();
            self.log.push(format!("{:>12.3} {line}", self.now as f64 / 1000.0));
        }
    }

    /// Records a violation.
    pub fn violate(&mut self, what: String) {
        self.trace(|| format!("VIOLATION {what}"));
        self.violation.get_or_insert(what);
    }

    /// Returns the index of a replica by its id.
    pub fn replica_index(&self, id: ReplicaId) -> Option<usize> {
        self.replicas.iter().position(|replica| replica.id == id)
    }

    /// Wakes the tasks of an engine.
    pub fn wake(&mut self, engine: u64) {
        if !self.woken.contains(&engine) {
            self.woken.push(engine);
        }
    }

    /// Opens a connection from an engine to a replica, which may turn out to be gone.
    pub fn connect(&mut self, engine: u64, replica: usize) -> ConnId {
        let id = self.fresh();
        let host = self.engines.get(&engine).map_or(0, |engine| engine.host);
        let is_up = self.replicas[replica].up;
        let conn = Conn {
            engine,
            host,
            replica,
            boot: self.replicas[replica].boot,
            engine_open: true,
            replica_open: is_up,
            is_dead: false,
            to_replica: Direction::default(),
            to_engine: Direction::default(),
            place: None,
        };
        self.conns.insert(id, conn);
        if !is_up {
            self.send(id, false, NetMessage::Close);
        }
        id
    }

    /// Sends a message; those of one direction of a connection arrive in order.
    pub fn send(&mut self, id: ConnId, to_replica: bool, message: NetMessage) {
        let slow = self.slow_network && self.rng.u8(..) < 8;
        let delay = if slow { self.rng.u64(1_000..400_000) } else { self.rng.u64(20..300) };
        let now = self.now;
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let direction = conn.direction(to_replica);
        let at = (now + delay).max(direction.last_us);
        direction.last_us = at;
        let number = direction.sent;
        direction.sent += 1;
        self.after(at - now, Occurrence::Deliver { conn: id, to_replica, number, message });
    }

    /// Delivers a message, unless something holds it back or it is lost.
    pub fn deliver(&mut self, id: ConnId, to_replica: bool, number: u64, message: NetMessage) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let is_cut = self.cuts.iter().any(|cut| cut.holds(conn, to_replica));
        let is_dead = conn.is_dead;
        let direction = conn.direction(to_replica);
        direction.arrived = number + 1;
        let is_lost = direction.lost_from.is_some_and(|from| number >= from);
        if is_dead || (is_lost && !matches!(message, NetMessage::Close)) {
            return self.count("messages lost");
        }
        if is_cut || !direction.held.is_empty() {
            direction.held.push_back(message);
            return;
        }
        self.take(id, to_replica, message);
    }

    /// Delivers the messages that are not held back any more.
    pub fn release_held(&mut self) {
        let waiting: Vec<ConnId> =
            self.conns.iter().filter(|(_, conn)| conn.holds_any()).map(|(id, _)| *id).collect();
        for id in waiting {
            for to_replica in [true, false] {
                let Some(conn) = self.conns.get_mut(&id) else { continue };
                if self.cuts.iter().any(|cut| cut.holds(conn, to_replica)) {
                    continue;
                }
                for message in std::mem::take(&mut conn.direction(to_replica).held) {
                    self.take(id, to_replica, message);
                }
            }
        }
    }

    /// Lets a process take a message, as soon as it runs.
    pub fn take(&mut self, id: ConnId, to_replica: bool, message: NetMessage) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let (engine, replica, engine_open) = (conn.engine, conn.replica, conn.engine_open);
        if to_replica && self.replicas[replica].paused && self.replicas[replica].boot == conn.boot {
            return self.replicas[replica].backlog.push(Occurrence::Take { conn: id, to_replica, message });
        }
        if let Some(process) = self.engines.get_mut(&engine).filter(|process| !to_replica && process.paused) {
            return process.backlog.push(Occurrence::Take { conn: id, to_replica, message });
        }
        match (to_replica, message) {
            (true, NetMessage::Close) => self.engine_has_closed(id),
            (true, NetMessage::Ask(number, ask)) => self.asked(id, number, *ask),
            (true, NetMessage::Answer(..)) | (false, NetMessage::Ask(..)) => {}
            (false, NetMessage::Close) => self.close_at_engine(id, "the replica closed the connection"),
            (false, NetMessage::Answer(number, answer)) => {
                if engine_open {
                    self.answered(id, number, *answer);
                }
            }
        }
        self.forget_if_over(id);
    }

    /// Ends a connection; each end notices in its time. A part of the messages in flight may be lost.
    pub fn break_connection(&mut self, id: ConnId, rng: &mut Rng) {
        self.lose_suffix(id, rng);
        self.send(id, true, NetMessage::Close);
        self.send(id, false, NetMessage::Close);
    }

    /// Loses the last of the messages in flight in each direction.
    pub fn lose_suffix(&mut self, id: ConnId, rng: &mut Rng) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        for to_replica in [true, false] {
            let direction = conn.direction(to_replica);
            if direction.lost_from.is_none() {
                direction.lost_from = Some(rng.u64(direction.arrived..=direction.sent));
            }
        }
    }

    /// Loses all later messages without an error.
    pub fn half_open(&mut self, id: ConnId) {
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.is_dead = true;
            conn.to_replica.held.clear();
            conn.to_engine.held.clear();
        }
    }

    /// Ends a half-open connection at both ends.
    pub fn end_half_open(&mut self, id: ConnId) {
        self.close_at_engine(id, "silent");
        self.end_at_replica(id);
        self.forget_if_over(id);
    }

    /// Holds the messages of a dead engine back until `until`.
    pub fn hold_messages_of(&mut self, engine: u64) -> u64 {
        let id = self.fresh();
        self.cuts.push(Cut { id, scope: CutScope::Engine(engine), to_replica: true, to_engine: false });
        id
    }

    pub fn forget_if_over(&mut self, id: ConnId) {
        let is_over = self.conns.get(&id).is_some_and(|conn| {
            let nothing_comes = conn.is_dead || !conn.holds_any();
            !conn.engine_open && !conn.replica_open && nothing_comes
        });
        if is_over {
            self.conns.remove(&id);
        }
    }

    /// Postpones an occurrence for a paused process, which handles it when it runs again.
    pub fn is_postponed(&mut self, what: Occurrence) -> Option<Occurrence> {
        let engine = match &what {
            Occurrence::Tick { engine }
            | Occurrence::CloseQueue { engine, .. }
            | Occurrence::Submit { engine, .. }
            | Occurrence::Watch { engine }
            | Occurrence::AskArbiter { engine }
            | Occurrence::Granted { engine, .. } => Some(*engine),
            _ => None,
        };
        if let Some(process) = engine.and_then(|engine| self.engines.get_mut(&engine))
            && process.paused
        {
            process.backlog.push(what);
            return None;
        }
        if let Occurrence::DiskDone { replica, boot, .. }
        | Occurrence::PageDone { replica, boot, .. }
        | Occurrence::Repair { replica, boot, .. } = &what
        {
            let replica = &mut self.replicas[*replica];
            if replica.paused && replica.boot == *boot {
                replica.backlog.push(what);
                return None;
            }
        }
        Some(what)
    }

    /// Schedules all events of a script.
    pub fn schedule(&mut self, script: &Script) {
        self.after(10, Occurrence::StartEngine { host: 0 });
        self.after(20, Occurrence::Guest);
        self.after(50_000, Occurrence::Control);
        for replica in 0..self.replicas.len() {
            self.after(1000, Occurrence::Sum { replica, boot: 0, is_read: None });
        }
        for strike in &script.faults {
            self.after(strike.at_us, Occurrence::Fault(strike.clone()));
        }
    }

    /// Counts a fault by its name.
    pub fn count_fault(&mut self, fault: &Fault) {
        self.count(fault.name());
    }
}
