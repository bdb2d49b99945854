//! An engine process as it runs: a shell around the real core, as the engine crate has one.

mod outputs;

use fastrand::Rng;
use shorthorn_checker::Id;
use shorthorn_core::{Event, PeerConfig, PeerIndex, SlotId, VolumeCheck, ZeroBlocks};
use shorthorn_types::{Errno, Generation, View, ViewId};

use crate::Sabotage;
use crate::disk::BLOCK_SECTORS;
use crate::engine::{DEPTH, EngineProc, index};
use crate::net::{ConnId, NetMessage, ReplicaAnswer};
use crate::occurrence::{Mend, Occurrence};
use crate::simulation::Simulation;

const TICK_US: u64 = 100_000;
const ID_KIND: u64 = 0xffff_ffff_0000_0000;
const ID_REQUEST: u64 = 1 << 32;
const ID_PING: u64 = 2 << 32;
const ID_PROPOSE: u64 = 3 << 32;
const ID_COMMIT: u64 = 4 << 32;
const ID_MARK: u64 = 5 << 32;
/// Requests of tasks have ids from here on.
pub const ID_CALL: u64 = 1 << 40;

impl Simulation {
    /// Starts an engine process on `host` with the next generation.
    pub fn start_engine(&mut self, host: usize) {
        if self.hosts[host].engine.is_some() || self.controller.host != host {
            return;
        }
        let known = self.hosts[host].generation;
        if self.controller.attach < known.attach {
            return; // its spec is older than the one that this host knows
        }
        let generation = if self.controller.attach > known.attach {
            // The attachment passes the knowledge of the controller on.
            self.hosts[host].granted_before = self.controller.arbiter.granted();
            (self.hosts[host].was_live, self.hosts[host].lost_writes) = (false, false);
            Generation::new(self.controller.attach, 0)
        } else {
            Generation::new(known.attach, known.restart + 1)
        };
        let generation = self.drawn(generation);
        self.hosts[host].generation = generation;
        let id = self.fresh();
        let size_bytes = self.controller.size_bytes;
        let mut process = EngineProc::new(host, generation, size_bytes, self.queues, self.now);
        for replica in &self.guest.replicas {
            process.add(*replica);
        }
        self.trace(|| format!("engine {id} starts on host {host} as {generation}"));
        self.engines.insert(id, process);
        self.hosts[host].engine = Some(id);
        self.new_engines.push(id);
        self.wake(id);
        self.count("engine starts");
    }

    /// Kills the attached engine process.
    pub fn kill_attached(&mut self, lingers_us: u64, for_us: u64, rng: &mut Rng) -> bool {
        let host = self.controller.host;
        let Some(engine) = self.hosts[host].engine else { return false };
        if lingers_us > 0 {
            let cut = self.hold_messages_of(engine);
            self.after(lingers_us, Occurrence::Mend(Mend::Cut(cut)));
        }
        self.kill_engine(host, for_us, rng);
        true
    }

    /// Kills the process, and starts another one after `for_us`; 0: after a random time. A part of the sent
    /// messages may be lost.
    pub fn kill_engine(&mut self, host: usize, for_us: u64, rng: &mut Rng) {
        let Some(id) = self.hosts[host].engine.take() else { return };
        self.trace(|| format!("engine {id} is gone"));
        let conns: Vec<ConnId> = self
            .conns
            .iter()
            .filter(|(_, conn)| conn.engine == id && conn.engine_open)
            .map(|(at, _)| *at)
            .collect();
        for conn in conns {
            if rng.bool() {
                self.lose_suffix(conn, rng);
            }
            self.send(conn, true, NetMessage::Close);
            self.engine_end_is_closed(conn);
        }
        self.engines.remove(&id);
        let delay = if for_us > 0 { for_us } else { self.rng.u64(5_000..300_000) };
        self.after(delay, Occurrence::StartEngine { host });
    }

    /// Ends the engine after it has cleared all that it can.
    fn cleared_all(&mut self, engine: u64) {
        self.count("cleared all");
        self.end_engine(engine);
    }

    /// Ends the process, unless it has ended already.
    pub fn end_engine(&mut self, engine: u64) {
        if let Some(process) = self.engines.get(&engine) {
            let (host, for_us) = (process.host, process.restarts_after);
            let mut rng = self.rng.fork();
            self.kill_engine(host, for_us, &mut rng);
        }
    }

    fn engine_end_is_closed(&mut self, id: ConnId) {
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.engine_open = false;
        }
        self.forget_if_over(id);
    }

    /// Returns the generation with a nonce of its own.
    pub fn drawn(&mut self, pair: Generation) -> Generation {
        let drawn = pair.with_nonce(self.rng.u64(..));
        if self.options.sabotage == Some(Sabotage::OldProposals) { pair } else { drawn }
    }

    /// Attaches the volume to another host, without a message to the old engine.
    pub fn attach_elsewhere(&mut self, rng: &mut Rng) -> bool {
        if !self.controller.up {
            return false;
        }
        self.controller.attach += 1;
        self.controller.host = (self.controller.host + 1) % self.hosts.len();
        let (attach, host) = (self.controller.attach, self.controller.host);
        self.trace(|| format!("attachment {attach} on host {host}"));
        self.guest_moves();
        // An engine of an earlier attachment on that host is stopped before.
        self.kill_engine(host, 0, rng);
        self.after(1000, Occurrence::StartEngine { host });
        true
    }

    /// Restarts the guest of that attachment, which has learned that its writes may be lost.
    pub fn attach_again(&mut self, attach: u64) {
        if self.controller.attach == attach {
            let mut rng = self.rng.fork();
            self.attach_elsewhere(&mut rng);
        }
        if self.controller.attach == attach {
            self.after(100_000, Occurrence::AttachAnew { attach }); // the controller is away
        }
    }

    /// Ends the engine's side of a connection.
    pub fn close_at_engine(&mut self, id: ConnId, reason: &str) {
        let Some(conn) = self.conns.get_mut(&id).filter(|conn| conn.engine_open) else { return };
        conn.engine_open = false;
        let engine = conn.engine;
        self.wake(engine);
        let Some(process) = self.engines.get_mut(&engine) else { return };
        for line in process.control_connections.iter_mut().filter(|line| line.conn == Some(id)) {
            line.conn = None;
        }
        if let Some((peer, _)) = process.link_of(id) {
            let peer = index(peer);
            self.apply(engine, Event::Lost { peer, reason: reason.to_owned() });
            // If the core did not know it as a member or a rebuilding replica, no other step closes it.
            self.close_queue(engine, id);
        }
    }

    /// Closes the connections of every queue to a failed replica, in its time.
    pub fn close_links(&mut self, engine: u64, peer: PeerIndex) {
        let Some(process) = self.engines.get(&engine) else { return };
        let links: Vec<ConnId> = process.links[usize::from(peer)].iter().flatten().copied().collect();
        for (queue, conn) in links.into_iter().enumerate() {
            if queue == 0 {
                self.close_queue(engine, conn);
            } else {
                let delay = self.rng.u64(1..2_000);
                self.after(delay, Occurrence::CloseQueue { engine, conn });
            }
        }
    }

    /// Closes a queue's connection to a replica, unless it has closed it.
    pub fn close_queue(&mut self, engine: u64, conn: ConnId) {
        let Some(process) = self.engines.get_mut(&engine) else { return };
        let Some((peer, queue)) = process.link_of(conn) else { return };
        process.links[peer][usize::from(queue)] = None;
        self.send(conn, true, NetMessage::Close);
        self.engine_end_is_closed(conn);
        let peer = index(peer);
        self.stop_waiting_for(engine, peer, queue);
        self.apply(engine, Event::Closed { peer, queue });
        self.wake(engine);
    }

    /// Handles the arrival of an answer at its engine.
    pub fn answered(&mut self, id: ConnId, number: u64, answer: ReplicaAnswer) {
        if let Some(call) = self.calls.get_mut(&(id, number)) {
            *call = Some(answer);
            if let Some(engine) = self.conns.get(&id).map(|conn| conn.engine) {
                self.wake(engine);
            }
            return;
        }
        let Some(engine) = self.conns.get(&id).map(|conn| conn.engine) else { return };
        let Some(process) = self.engines.get(&engine) else { return };
        let Some((peer, queue)) = process.link_of(id) else { return };
        let peer = index(peer);
        if let ReplicaAnswer::Deposed(holder) = answer {
            return self.depose(engine, holder);
        }
        let outcome = match &answer {
            ReplicaAnswer::Error(errno) => Err(*errno),
            _ => Ok(()),
        };
        match number & ID_KIND {
            ID_PING => {
                let event = match answer {
                    ReplicaAnswer::Pong { free_mib } => Event::Pong { peer, queue, free_mib: Some(free_mib) },
                    answer => {
                        self.count("error: ping");
                        let errno = if let ReplicaAnswer::Error(errno) = answer { errno } else { Errno::IO };
                        Event::PingFailed { peer, queue, errno }
                    }
                };
                self.apply(engine, event);
            }
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
            ID_REQUEST => {
                let slot = SlotId { queue, slot: u16::try_from(low(number)).unwrap_or(u16::MAX) };
                self.request_answered(engine, peer, slot, answer, outcome);
            }
            _ => {}
        }
    }

    fn request_answered(
        &mut self,
        engine: u64,
        peer: PeerIndex,
        slot: SlotId,
        answer: ReplicaAnswer,
        mut outcome: Result<(), Errno>,
    ) {
        if self.is_lied_about(engine, peer, slot, &mut outcome) {
            return;
        }
        let event = match answer {
            ReplicaAnswer::Data(data) => {
                let Some(process) = self.engines.get_mut(&engine) else { return };
                let at = process.read_to.get(&key(slot)).copied().unwrap_or(0);
                process.buffer(slot)[at..at + data.len()].copy_from_slice(&data);
                if slot.slot >= DEPTH {
                    Event::CopyRead { peer, slot, zeroes: zero_blocks(&data) }
                } else {
                    Event::Reply { peer, slot, outcome }
                }
            }
            ReplicaAnswer::Check(check) => {
                Event::Verified { peer, slot, outcome: Ok(VolumeCheck::unconfirmed(check)) }
            }
            _ => Event::Reply { peer, slot, outcome },
        };
        self.apply(engine, event);
    }

    /// Deposes the engine: a newer one holds the volume, and this one ends for good.
    pub fn depose(&mut self, engine: u64, holder: Generation) {
        if self.engines.contains_key(&engine) {
            self.trace(|| format!("engine {engine} is deposed by {holder}"));
            self.count("deposed");
            self.end_engine(engine);
            self.controller_learns(holder);
        }
    }

    /// Raises the number of the controller, whose store may be older than the replicas: the next attachment
    /// is above all that they hold.
    fn controller_learns(&mut self, holder: Generation) {
        if self.controller.up && self.controller.attach < holder.attach && self.saved_controller.is_some() {
            self.controller.attach = holder.attach;
            self.controller.arbiter = self.controller.arbiter.stale(holder.attach + 1);
            let mut rng = self.rng.fork();
            self.attach_elsewhere(&mut rng);
        }
    }

    /// Returns the time of the clock of the engine's host.
    pub fn clock_ms(&self, engine: u64) -> u64 {
        let host = self.engines.get(&engine).map_or(0, |process| process.host);
        self.now / 1000 + self.hosts[host].clock_ms
    }

    /// Advances the time of an engine.
    pub fn tick(&mut self, engine: u64) {
        if !self.engines.contains_key(&engine) {
            return;
        }
        let now_ms = self.clock_ms(engine);
        self.apply(engine, Event::Tick { now_ms });
        self.after(TICK_US, Occurrence::Tick { engine });
    }

    /// Asks for a grant for an engine, again and again while it wants one.
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
                    self.trace(|| format!("granted: {view}"));
                    self.count("granted");
                    self.controller.arbiter = recorded;
                    let delay = self.rng.u64(100..5_000);
                    self.after(delay, Occurrence::Granted { engine, view });
                }
                Err(refused) => {
                    self.trace(|| format!("not granted to {engine}: {refused}"));
                    if let Some(view) = refused.granted() {
                        // It has to honour that: when it starts again.
                        self.count("earlier grants sent");
                        let delay = self.rng.u64(100..5_000);
                        self.after(delay, Occurrence::Granted { engine, view });
                    }
                }
            }
        }
        let delay = self.rng.u64(50_000..300_000);
        self.after(delay, Occurrence::AskArbiter { engine });
    }

    /// Delivers the arbiter's answer.
    pub fn granted(&mut self, engine: u64, view: View) {
        let Some(process) = self.engines.get_mut(&engine) else { return };
        process.was_granted = Some(view);
        let host = process.host;
        self.wake(engine);
        // Never a view that is older than the known one.
        let known = self.hosts[host].granted;
        self.hosts[host].granted = known.filter(|known| known.id >= view.id).or(Some(view));
        self.apply(engine, Event::Granted { view: view.id });
    }

    /// Returns the configuration of a replica in the core.
    pub fn peer_config(&self, engine: u64, peer: usize) -> Option<PeerConfig> {
        let process = self.engines.get(&engine)?;
        Some(PeerConfig { replica: process.peers[peer].replica, local: peer == 0 })
    }
}

/// Returns a bit for each block of a piece that is all zeroes.
fn zero_blocks(data: &[Id]) -> ZeroBlocks {
    let mut zeroes = ZeroBlocks::default();
    for (at, block) in data.chunks(BLOCK_SECTORS).enumerate() {
        if block.iter().all(|id| *id == 0) {
            zeroes[at / 64] |= 1 << (at % 64);
        }
    }
    zeroes
}

fn key(slot: SlotId) -> (u16, u16) {
    (slot.queue, slot.slot)
}

fn low(number: u64) -> u32 {
    u32::try_from(number & !ID_KIND).unwrap_or(u32::MAX)
}
