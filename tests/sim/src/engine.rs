//! An engine process: the real core, and a shell around it as the engine crate has one.

use std::rc::Rc;

use shorthorn_core::{EngineCore, Event, Operation, Output, PeerConfig, PeerIndex, SlotId, ZeroBlocks};
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_types::{ByteRange, Errno, Generation, Members, ReplicaId, ReplicaReport, View, ViewId};

use crate::checker::Id;
use crate::disk::BLOCK_SECTORS;
use crate::net::{Answer, Ask, ConnId, Message};
use crate::world::{Occurrence, World};

/// Slots of the frontend.
pub const DEPTH: u16 = 16;
/// Slots for copies.
pub const COPY_SLOTS: u16 = 4;
/// The largest request of the core: a piece of a copy or of a scrub.
const BUFFER_SECTORS: usize = 2048;
/// A replica that is silent for so long has failed.
pub const REPLICA_TIMEOUT_MS: u64 = 1000;
const TICK_US: u64 = 100_000;
const ID_KIND: u64 = 0xffff_ffff_0000_0000;
const ID_REQUEST: u64 = 1 << 32;
const ID_PING: u64 = 2 << 32;
const ID_PROPOSE: u64 = 3 << 32;
const ID_COMMIT: u64 = 4 << 32;
const ID_MARK: u64 = 5 << 32;
/// Requests of tasks have ids from here on.
pub const ID_CALL: u64 = 1 << 40;

/// What a host keeps from one engine process to the next.
#[derive(Debug, Default)]
pub struct Host {
    /// The generation that was used last.
    pub generation: Generation,
    /// The newest grant that was received.
    pub granted: Option<View>,
    /// The process that runs.
    pub engine: Option<u64>,
}

/// One engine process.
#[derive(Debug)]
pub struct EngineProc {
    pub host: usize,
    pub generation: Generation,
    /// The size that it was told.
    pub size_bytes: u64,
    /// Once it serves.
    pub core: Option<EngineCore>,
    /// Every replica that it was given, by the index that the core knows.
    pub peers: Vec<ReplicaId>,
    /// The connection of each for requests.
    pub links: Vec<Option<ConnId>>,
    /// The connection of each for the courier.
    pub control: Vec<Option<ConnId>>,
    /// Whether what a replica has missed is known, by replica.
    pub known: Vec<bool>,
    /// Which are tracked by the core.
    pub tracked: Vec<bool>,
    pub buffers: Vec<Vec<Id>>,
    /// The view that is proposed and not through.
    pub pending: Option<(View, ReplicaReport)>,
    /// The view that waits for a grant.
    pub wants: Option<(View, ReplicaReport, Members)>,
    /// A grant that was received while the volume was being opened.
    pub was_granted: Option<View>,
    pub begun_us: u64,
}

impl World {
    /// Starts an engine process on `host` with the next generation.
    pub fn start_engine(&mut self, host: usize) {
        if self.hosts[host].engine.is_some() || self.controller.host != host {
            return;
        }
        let known = self.hosts[host].generation;
        let generation = if self.controller.attach > known.attach {
            // What the controller knows is passed with the attachment.
            self.hosts[host].granted = self.controller.arbiter.granted();
            Generation::new(self.controller.attach, 0)
        } else {
            Generation::new(known.attach, known.restart + 1)
        };
        self.hosts[host].generation = generation;
        let id = self.fresh();
        let peers: Vec<ReplicaId> = self.guest.replicas.clone();
        let count = peers.len();
        let begun_us = self.now;
        let process = EngineProc {
            host,
            generation,
            size_bytes: self.controller.size_bytes,
            core: None,
            links: vec![None; count],
            control: vec![None; count],
            known: vec![false; count],
            tracked: vec![true; count],
            peers,
            buffers: vec![vec![0; BUFFER_SECTORS]; usize::from(DEPTH + COPY_SLOTS)],
            pending: None,
            wants: None,
            was_granted: None,
            begun_us,
        };
        self.note(|| format!("engine {id} starts on host {host} as {generation}"));
        self.engines.insert(id, process);
        self.hosts[host].engine = Some(id);
        self.new_engines.push(id);
        self.count("engine starts");
    }

    /// The process is gone, and another one starts in its place after a moment.
    pub fn kill_engine(&mut self, host: usize) {
        let Some(id) = self.hosts[host].engine.take() else { return };
        self.note(|| format!("engine {id} is gone"));
        let conns: Vec<ConnId> = self
            .conns
            .iter()
            .filter(|(_, conn)| conn.engine == id && conn.engine_open)
            .map(|(at, _)| *at)
            .collect();
        for conn in conns {
            self.send(conn, true, Message::Close);
            self.engine_end_is_closed(conn);
        }
        self.engines.remove(&id);
        let delay = self.rng.u64(5_000..300_000);
        self.after(delay, Occurrence::StartEngine { host });
    }

    /// The engine has cleared what it can: it ends.
    fn settled(&mut self, engine: u64) {
        self.count("settled");
        self.end_engine(engine);
    }

    /// The process ends, unless it has already.
    pub fn end_engine(&mut self, engine: u64) {
        if let Some(host) = self.engines.get(&engine).map(|process| process.host) {
            self.kill_engine(host);
        }
    }

    fn engine_end_is_closed(&mut self, id: ConnId) {
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.engine_open = false;
        }
    }

    /// The controller attaches the volume to another host. The old engine is told nothing.
    pub fn attach_elsewhere(&mut self) {
        if !self.controller.up {
            return;
        }
        self.controller.attach += 1;
        self.controller.host = (self.controller.host + 1) % self.hosts.len();
        let (attach, host) = (self.controller.attach, self.controller.host);
        self.note(|| format!("attachment {attach} on host {host}"));
        self.guest_moves();
        // An engine of an earlier attachment on that host is stopped before.
        self.kill_engine(host);
        self.after(1000, Occurrence::StartEngine { host });
    }

    /// The engine's side of a connection sees that it is over.
    pub fn close_at_engine(&mut self, id: ConnId, reason: &str) {
        let Some(conn) = self.conns.get_mut(&id).filter(|conn| conn.engine_open) else { return };
        conn.engine_open = false;
        let engine = conn.engine;
        let Some(process) = self.engines.get_mut(&engine) else { return };
        for control in process.control.iter_mut().filter(|control| **control == Some(id)) {
            *control = None;
        }
        if let Some(peer) = process.links.iter().position(|link| *link == Some(id)) {
            let peer = index(peer);
            self.apply(engine, Event::Lost { peer, reason: reason.to_owned() });
            // Where the core did not know it as a member or a joiner, nobody else closes it.
            self.close_link(engine, peer);
        }
    }

    fn close_link(&mut self, engine: u64, peer: PeerIndex) {
        let Some(process) = self.engines.get_mut(&engine) else { return };
        let Some(link) = process.links[usize::from(peer)].take() else { return };
        self.send(link, true, Message::Close);
        self.engine_end_is_closed(link);
        self.apply(engine, Event::Closed { peer, queue: 0 });
    }

    /// Gives the core an event, and does what it says.
    pub fn apply(&mut self, engine: u64, event: Event) {
        let mut outputs = Vec::new();
        let Some(core) = self.engines.get_mut(&engine).and_then(|process| process.core.as_mut()) else {
            return;
        };
        core.apply(event, &mut outputs);
        for output in outputs {
            self.perform(engine, output);
        }
    }

    fn perform(&mut self, engine: u64, output: Output) {
        match output {
            Output::Send { peer, slot, operation, range, buffer_offset } => {
                let Some(process) = self.engines.get(&engine) else { return };
                let at = buffer_offset as usize / 512;
                let sectors = usize::try_from(range.length() / 512).unwrap_or(0);
                let data = || Rc::from(&process.buffers[usize::from(slot.slot)][at..at + sectors]);
                let ask = match operation {
                    Operation::Read => Ask::Read(range),
                    Operation::Write { fua } => Ask::Write(range, data(), fua),
                    Operation::Flush => Ask::Flush,
                    Operation::Discard => Ask::Discard(range),
                    Operation::WriteZeroes { fua } => Ask::WriteZeroes(range, fua),
                    Operation::Verify => Ask::Verify(range),
                };
                self.ask(engine, peer, ID_REQUEST | u64::from(slot.slot), ask);
            }
            Output::Complete { slot, outcome } => self.completed(engine, slot.slot, outcome),
            Output::Ping { peer } => self.ask(engine, peer, ID_PING, Ask::Ping),
            Output::Propose { peer, view, honoured } => {
                if let Some(process) = self.engines.get_mut(&engine) {
                    process.pending = Some((*view, (*honoured).clone()));
                }
                self.ask(
                    engine,
                    peer,
                    ID_PROPOSE | u64::from(view.id.number),
                    Ask::Propose(*view, *honoured),
                );
            }
            Output::Commit { peer, view } => {
                self.ask(engine, peer, ID_COMMIT | u64::from(view.id.number), Ask::Commit(*view));
            }
            Output::AskGrant { view, honoured, stored } => {
                self.count("grants asked");
                if let Some(process) = self.engines.get_mut(&engine) {
                    process.wants = Some((*view, *honoured, *stored));
                }
                self.after(500, Occurrence::AskArbiter { engine });
            }
            Output::Mark { peer, mark, change } => {
                self.ask(engine, peer, ID_MARK | u64::from(mark), Ask::Mark(change))
            }
            Output::Drop { peer, reason } => {
                self.note(|| format!("engine {engine} drops {peer}: {reason}"));
                self.count("drops");
                self.close_link(engine, peer);
            }
            Output::ViewChanged { view } => {
                self.note(|| format!("engine {engine}: view {view}"));
                if let Some(process) = self.engines.get_mut(&engine) {
                    process.pending = None;
                    process.wants = None;
                }
            }
            Output::Joined { peer } => {
                self.note(|| format!("engine {engine}: {peer} has joined"));
                self.count("joins");
            }
            Output::Equalised => self.count("equalised"),
            Output::Settled => self.settled(engine),
            Output::ScrubFound { range, odd, .. } => self.scrub_found(engine, range, &odd),
            Output::ScrubDone => self.count("scrubs"),
            Output::Expanded { size_bytes } => {
                self.note(|| format!("engine {engine}: the volume has {size_bytes} bytes"));
                self.count("expansions");
                self.device_grows(engine);
            }
            Output::Frozen { reason } => {
                self.note(|| format!("engine {engine} is frozen: {reason}"));
                self.count("frozen");
                if let Some(host) = self.engines.get(&engine).map(|process| process.host) {
                    self.kill_engine(host);
                }
            }
        }
    }

    /// Members that differ must not be, but a disk that cannot be read may.
    fn scrub_found(&mut self, engine: u64, range: ByteRange, odd: &[PeerIndex]) {
        let Some(process) = self.engines.get(&engine) else { return };
        let mut found =
            odd.iter().filter_map(|peer| self.replica_index(*process.peers.get(usize::from(*peer))?));
        if found.all(|at| !self.replicas[at].failed) {
            self.violate(format!("scrub: {odd:?} differ at {range}"));
        }
    }

    fn ask(&mut self, engine: u64, peer: PeerIndex, number: u64, ask: Ask) {
        let link = self.engines.get(&engine).and_then(|process| process.links[usize::from(peer)]);
        if let Some(link) = link {
            self.send(link, true, Message::Ask(number, ask));
        }
    }

    /// An answer has arrived at its engine.
    pub fn answered(&mut self, id: ConnId, number: u64, answer: Answer) {
        if let Some(call) = self.calls.get_mut(&(id, number)) {
            *call = Some(answer);
            return;
        }
        let Some(engine) = self.conns.get(&id).map(|conn| conn.engine) else { return };
        let Some(process) = self.engines.get(&engine) else { return };
        let Some(peer) = process.links.iter().position(|link| *link == Some(id)).map(index) else { return };
        if let Answer::Deposed(holder) = answer {
            return self.depose(engine, holder);
        }
        let outcome = match &answer {
            Answer::Error(errno) => Err(*errno),
            _ => Ok(()),
        };
        match number & ID_KIND {
            ID_PING => self.apply(engine, Event::Pong { peer }),
            ID_PROPOSE => {
                let view = ViewId { generation: process.generation, number: low(number) };
                match outcome {
                    Ok(()) => self.apply(engine, Event::ViewStored { peer, view }),
                    Err(errno) => self.close_at_engine(id, &format!("proposal refused: {errno}")),
                }
            }
            ID_MARK => match outcome {
                Ok(()) => self.apply(engine, Event::Marked { peer, mark: low(number) }),
                Err(errno) => self.close_at_engine(id, &format!("mark refused: {errno}")),
            },
            ID_REQUEST => self.request_answered(engine, peer, low(number), answer, outcome),
            _ => {}
        }
    }

    fn request_answered(
        &mut self,
        engine: u64,
        peer: PeerIndex,
        slot: u32,
        answer: Answer,
        outcome: Result<(), Errno>,
    ) {
        let slot = SlotId { queue: 0, slot: u16::try_from(slot).unwrap_or(u16::MAX) };
        let event = match answer {
            Answer::Data(data) => {
                let Some(process) = self.engines.get_mut(&engine) else { return };
                process.buffers[usize::from(slot.slot)][..data.len()].copy_from_slice(&data);
                if slot.slot >= DEPTH {
                    Event::CopyRead { peer, slot, zeroes: zero_blocks(&data) }
                } else {
                    Event::Reply { peer, slot, outcome }
                }
            }
            Answer::Check(check) => Event::Verified { peer, slot, outcome: Ok(check) },
            _ => Event::Reply { peer, slot, outcome },
        };
        self.apply(engine, event);
    }

    /// A newer engine holds the volume: this one ends for good.
    pub fn depose(&mut self, engine: u64, holder: Generation) {
        let Some(process) = self.engines.get(&engine) else { return };
        let host = process.host;
        self.note(|| format!("engine {engine} is deposed by {holder}"));
        self.count("deposed");
        self.kill_engine(host);
    }

    /// An engine is told the time.
    pub fn tick(&mut self, engine: u64) {
        if !self.engines.contains_key(&engine) {
            return;
        }
        let now_ms = self.now / 1000;
        self.apply(engine, Event::Tick { now_ms });
        self.after(TICK_US, Occurrence::Tick { engine });
    }

    /// An engine asks for a grant, again and again while it wants one.
    pub fn ask_arbiter(&mut self, engine: u64) {
        let Some((view, honoured, stored)) =
            self.engines.get(&engine).and_then(|process| process.wants.clone())
        else {
            return;
        };
        if self.controller.up {
            let attach = self.controller.attach;
            match self.controller.arbiter.ask(attach, view, &honoured, &stored) {
                Ok(recorded) => {
                    self.note(|| format!("granted: {view}"));
                    self.count("granted");
                    self.controller.arbiter = recorded;
                    let delay = self.rng.u64(100..5_000);
                    self.after(delay, Occurrence::Granted { engine, view });
                }
                Err(refused) => self.note(|| format!("not granted to {engine}: {refused}")),
            }
        }
        let delay = self.rng.u64(50_000..300_000);
        self.after(delay, Occurrence::AskArbiter { engine });
    }

    /// The arbiter's answer arrives.
    pub fn granted(&mut self, engine: u64, view: View) {
        let Some(process) = self.engines.get_mut(&engine) else { return };
        process.was_granted = Some(view);
        let host = process.host;
        self.hosts[host].granted = Some(view);
        self.apply(engine, Event::Granted { view: view.id });
    }

    /// How a replica is known to the core.
    pub fn peer_config(&self, engine: u64, peer: usize) -> Option<PeerConfig> {
        let process = self.engines.get(&engine)?;
        Some(PeerConfig { replica: process.peers[peer], local: peer == 0 })
    }
}

/// Which blocks of a piece are all zeroes.
fn zero_blocks(data: &[Id]) -> ZeroBlocks {
    let mut zeroes = ZeroBlocks::default();
    for (at, block) in data.chunks(BLOCK_SECTORS).enumerate() {
        if block.iter().all(|id| *id == 0) {
            zeroes[at / 64] |= 1 << (at % 64);
        }
    }
    zeroes
}

fn low(number: u64) -> u32 {
    u32::try_from(number & !ID_KIND).unwrap_or(u32::MAX)
}

/// The index of a peer.
pub fn index(peer: usize) -> PeerIndex {
    u8::try_from(peer).unwrap_or(u8::MAX)
}

const _: () = assert!(BUFFER_SECTORS as u64 * 512 >= shorthorn_types::REGION_BYTES_MIN);
const _: () = assert!(BLOCK_BYTES == 4096);
