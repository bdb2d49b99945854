//! The tasks of an engine process beside serving: open the volume, then rebuild replicas, expand them and
//! give them up. The steps are those of [`shorthorn_recovery`], over simulated connections.

mod attempt;
mod rebuild_task;
mod simulated_link;

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;

use shorthorn_core::{
    CopyLimits, CoreConfig, EngineCore, Event, Outputs, PeerConfig, PeerState, ScrubConfig,
};
use shorthorn_recovery::{
    NotOpen, Offenders, OpenRequest, Opened, Proposal, Reached, ServingEngine, conclude, grow_replicas, open,
};
use shorthorn_types::{Generation, Members, RegionSet, ReplicaId};
use shorthorn_views::{CannotStart, FencedReplica, NoPlan};
use shorthorn_wire::Welcome;

use crate::Sabotage;
use crate::engine::{
    COPY_SLOTS, DEPTH, FLIGHT_LIMITS, LATE_LIMIT_MS, REPLICA_TIMEOUT_MS, index, verifies_reads,
};
use crate::engine_shell::ID_CALL;
use crate::net::{Ask, ConnId, NetMessage, ReplicaAnswer};
use crate::occurrence::Occurrence;
use crate::simulation::Simulation;
use crate::tasks::{all, until};
use attempt::{MemberConnections, OpenAttempt};
use simulated_link::{CallError, Via, Wire};

/// The simulation, for tasks.
pub type Sim = Rc<RefCell<Simulation>>;

const CALL_TIMEOUT_US: u64 = 1_000_000;
/// The time limit of a replica for an answer over a control connection.
const LINE_LIMIT_US: u64 = 10_000_000;
const RETRY_US: u64 = 100_000;
/// The pause of a rebuild task before its first attempt.
const FIRST_PAUSE_US: u64 = 20_000;
/// The maximum pause of a rebuild task between two attempts.
const LONGEST_PAUSE_US: u64 = 800_000;
/// The time limit for members that do not answer, if the others are enough.
const MISSING_LIMIT_MS: u64 = 1500;
/// The same if the others have lost writes that the guest counts on.
const MEMBER_LIMIT_MS: u64 = 3000;

/// An engine process, for its tasks.
#[derive(Clone)]
struct EngineHandle {
    sim: Sim,
    engine: u64,
}

/// Runs all tasks of an engine process besides serving.
pub async fn live(sim: Sim, engine: u64) {
    let process = EngineHandle { sim, engine };
    process.open_patiently().await;
    let mut tasks: Vec<Pin<Box<dyn Future<Output = ()> + '_>>> = vec![Box::pin(process.follow())];
    for peer in 0..shorthorn_types::limits::MAX_MEMBERS {
        tasks.push(Box::pin(process.rebuild_task(peer)));
    }
    all(tasks).await;
}

impl EngineHandle {
    async fn sleep(&self, us: u64) {
        let end = {
            let mut sim = self.sim.borrow_mut();
            sim.after(us, Occurrence::Wake { engine: self.engine });
            sim.now + us
        };
        until(|| (self.sim.borrow().now >= end).then_some(())).await;
    }

    /// Asks a replica, and waits for the answer until the connection breaks or the time is over.
    async fn call(&self, conn: ConnId, ask: Ask, limit_us: u64) -> Result<ReplicaAnswer, CallError> {
        let (key, end) = {
            let mut sim = self.sim.borrow_mut();
            let number = ID_CALL | sim.fresh();
            sim.calls.insert((conn, number), None);
            sim.send(conn, true, NetMessage::Ask(number, Box::new(ask)));
            sim.after(limit_us, Occurrence::Wake { engine: self.engine });
            ((conn, number), sim.now + limit_us)
        };
        let answer = until(|| {
            let mut sim = self.sim.borrow_mut();
            if let Some(answer) = sim.calls.get_mut(&key).and_then(Option::take) {
                return Some(Some(answer));
            }
            let open = sim.conns.get(&conn).is_some_and(|conn| conn.engine_open);
            (!open || sim.now >= end).then_some(None)
        })
        .await;
        self.sim.borrow_mut().calls.remove(&key);
        match answer {
            Some(ReplicaAnswer::Deposed(holder)) => Err(CallError::Deposed(holder)),
            Some(ReplicaAnswer::Error(errno)) => Err(CallError::Refused(errno)),
            Some(answer) => Ok(answer),
            None => Err(CallError::Broken),
        }
    }

    fn close(&self, conn: ConnId) {
        // It cannot be borrowed when the simulation ends: then nothing is left to close.
        let Ok(mut sim) = self.sim.try_borrow_mut() else { return };
        if sim.conns.get(&conn).is_some_and(|conn| conn.engine_open) {
            sim.send(conn, true, NetMessage::Close);
            sim.close_at_engine(conn, "not needed");
        }
    }

    /// Opens a connection to a replica, fences it, and gives it the size of the volume.
    async fn handshake(&self, replica: ReplicaId, queue: u16) -> Result<(Via<Wire>, Welcome), CallError> {
        let (conn, generation) = {
            let mut sim = self.sim.borrow_mut();
            let at = sim.replica_index(replica).ok_or(CallError::Broken)?;
            let generation = sim.engines.get(&self.engine).ok_or(CallError::Broken)?.generation;
            (sim.connect(self.engine, at), generation)
        };
        let mut link = Via(Wire { process: self.clone(), conn });
        let answer = self.call(conn, Ask::Hello(generation, queue), CALL_TIMEOUT_US).await?;
        let ReplicaAnswer::Welcome(mut welcome) = answer else { return Err(CallError::Broken) };
        let fits = shorthorn_recovery::fit(&mut link, &mut welcome, self.size_bytes()).await;
        fits.map_err(CallError::from)?;
        if self.sim.borrow().options.sabotage == Some(Sabotage::NoStamps) {
            welcome.stamp = None;
        }
        Ok((link, *welcome))
    }

    fn depose(&self, holder: Generation) {
        self.sim.borrow_mut().depose(self.engine, holder);
    }

    /// Follows a larger size from the controller: grows the replicas, then the core. Failures are retried.
    async fn follow_size(&self) {
        {
            let mut sim = self.sim.borrow_mut();
            let wanted = sim.controller.size_bytes;
            let is_up = sim.controller.up;
            let Some(process) = sim.engines.get_mut(&self.engine) else { return };
            if is_up {
                process.size_bytes = process.size_bytes.max(wanted);
            }
            let has = process.core.as_ref().map_or(0, |core| core.regions().size_bytes());
            if has >= process.size_bytes {
                return;
            }
        }
        if let Err(not_grown) = grow_replicas(self).await
            && let CallError::Deposed(holder) = not_grown.error
        {
            self.depose(holder);
        }
    }

    async fn open_patiently(&self) {
        let mut offenders = Offenders::default();
        loop {
            if self.sim.borrow().options.sabotage == Some(Sabotage::NoOffenders) {
                offenders = Offenders::default();
            }
            match self.attempt_to_open(&mut offenders).await {
                Ok((opened, request, lost_writes)) => {
                    return self.serve(opened, &request, lost_writes);
                }
                Err(NotOpen::Deposed(holder)) => return self.depose(holder),
                Err(NotOpen::Waiting(_)) => self.sleep(RETRY_US).await,
                Err(NotOpen::Aborted { .. } | NotOpen::Stopped(())) => {
                    let pause_us = u64::try_from(offenders.pause().as_micros()).unwrap_or(0);
                    self.sleep(RETRY_US.max(pause_us)).await;
                    self.take_next_generation();
                }
            }
            self.take_orders();
        }
    }

    /// Takes commands before an attempt: the controller may want a larger volume by now, or other replicas.
    fn take_orders(&self) {
        let mut sim = self.sim.borrow_mut();
        if !sim.controller.up {
            return;
        }
        let (size_bytes, replicas) = (sim.controller.size_bytes, sim.guest.replicas.clone());
        if let Some(engine) = sim.engines.get_mut(&self.engine) {
            engine.size_bytes = engine.size_bytes.max(size_bytes);
            engine.set_replicas(&replicas);
        }
    }

    /// Takes the next generation after a view was proposed or asked for: the next attempt must not use its
    /// number again.
    fn take_next_generation(&self) {
        let mut sim = self.sim.borrow_mut();
        let Some(engine) = sim.engines.get(&self.engine) else { return };
        let host = engine.host;
        let Generation { attach, restart, .. } = sim.hosts[host].generation;
        let generation = sim.drawn(Generation::new(attach, restart + 1));
        sim.hosts[host].generation = generation;
        if let Some(engine) = sim.engines.get_mut(&self.engine) {
            engine.generation = generation;
            engine.was_granted = None;
        }
    }

    /// Makes one attempt to open the volume. Returns whether the members had lost writes, too.
    async fn attempt_to_open(
        &self,
        offenders: &mut Offenders,
    ) -> Result<(Opened<MemberConnections>, OpenRequest, bool), NotOpen<()>> {
        let request = {
            let sim = self.sim.borrow();
            let engine = sim.engines.get(&self.engine).ok_or(NotOpen::Stopped(()))?;
            let host = &sim.hosts[engine.host];
            OpenRequest {
                generation: engine.generation,
                replicas: engine.peers.iter().map(|peer| peer.replica).collect(),
                size_bytes: engine.size_bytes,
                granted: [host.granted, host.granted_before].into_iter().flatten().max_by_key(|view| view.id),
                missing_limit_ms: MISSING_LIMIT_MS,
                member_limit_ms: MEMBER_LIMIT_MS,
            }
        };
        let mut attempt = OpenAttempt::new(self.clone(), request.replicas.clone());
        let opened = open(&mut attempt, &request, offenders).await?;
        if attempt.leaves_out {
            self.sim.borrow_mut().count("starts without an offender");
        }
        Ok((opened, request, attempt.lost_writes))
    }

    /// Checks that a replica is judged as restored from an older disk only if it was. The reports of an
    /// engine of an earlier attachment may be old.
    fn judge_unfit(&self, unfit: &[(ReplicaId, String)]) {
        let mut sim = self.sim.borrow_mut();
        let attach = sim.engines.get(&self.engine).map(|process| process.generation.attach);
        if attach != Some(sim.controller.attach) {
            return;
        }
        for (replica, why) in unfit.iter().filter(|(_, why)| why.contains("restored to an older state")) {
            let at = sim.replica_index(*replica);
            if !at.is_some_and(|at| sim.replicas[at].is_rolled_back) {
                sim.violate(format!("{replica} has kept everything: {why}"));
            }
        }
    }

    /// Records that every member has lost power since a write. The user of the device since then learns of
    /// it.
    fn record_losses(&self) {
        let mut sim = self.sim.borrow_mut();
        sim.count("starts from lost caches");
        let Some(host) = sim.engines.get(&self.engine).map(|process| process.host) else { return };
        let host = &mut sim.hosts[host];
        host.lost_writes |= host.was_live;
    }

    fn config(&self, opened: &Opened<MemberConnections>, request: &OpenRequest) -> CoreConfig {
        let sim = self.sim.borrow();
        let host = sim.engines.get(&self.engine).map(|process| process.host);
        let is_sabotaged = sim.options.sabotage == Some(Sabotage::NoResync);
        let peer = |(at, id): (usize, &ReplicaId)| PeerConfig { replica: *id, local: at == 0 };
        CoreConfig {
            queues: sim.queues,
            depth: DEPTH,
            peers: request.replicas.iter().enumerate().map(peer).collect(),
            view: opened.view,
            replica_timeout_ms: REPLICA_TIMEOUT_MS,
            late_limit_ms: LATE_LIMIT_MS,
            flight_limits: FLIGHT_LIMITS,
            size_bytes: request.size_bytes,
            dirty: match is_sabotaged {
                true => RegionSet::empty(shorthorn_types::Regions::of(request.size_bytes).count()),
                false => opened.dirty.clone(),
            },
            resync_sources: opened.resync_sources.clone(),
            out_of_sync: opened.out_of_sync.clone(),
            stamp: opened.stamp,
            out_of_sync_stamps: opened.out_of_sync_stamps.clone(),
            copy_slots: COPY_SLOTS,
            copy_limits: CopyLimits { bytes_per_s: None, share_percent: 50 },
            intent_interval_ms: Some(300),
            intent_keep_bytes: 0,
            verify_reads: verifies_reads(self.engine),
            refuses_requests: host.is_some_and(|host| sim.hosts[host].lost_writes),
        }
    }

    /// Serves the volume. `lost_writes`: the members had lost writes when the volume was opened.
    fn serve(&self, opened: Opened<MemberConnections>, request: &OpenRequest, lost_writes: bool) {
        let config = self.config(&opened, request);
        let Opened { last_view, connections: links, is_out_of_sync_complete: is_complete, runs, .. } = opened;
        let mut sim = self.sim.borrow_mut();
        let engine = self.engine;
        let now_ms = sim.clock_ms(engine);
        let (view, dirty) = (config.view, config.dirty.len());
        sim.trace(|| format!("engine {engine} serves {view}; {dirty} regions are dirty"));
        if dirty > 0 && view.members.len() > 1 {
            sim.count("resyncs after an unclean stop");
        }
        let mut core = EngineCore::new(&config);
        let unknown = (0..).zip(&is_complete).filter(|(_, is_complete)| !**is_complete);
        unknown.for_each(|(peer, _)| core.distrust(peer));
        let Some(process) = sim.engines.get_mut(&engine) else { return };
        process.core = Some(core);
        process.view = Some(view);
        for (peer, is_complete) in process.peers.iter_mut().zip(&is_complete) {
            peer.is_complete = *is_complete;
            peer.last_view = Some(last_view).filter(|view| view.members.contains(peer.replica));
        }
        for (peer, run) in process.peers.iter_mut().zip(runs) {
            peer.run = run;
        }
        let mut broken = Vec::new();
        for (peer, conns) in links {
            for (queue, conn) in conns.into_iter().enumerate() {
                process.links[peer][queue] = Some(conn);
                broken.push((peer, conn));
            }
        }
        process.wants = None;
        let (attach, host) = (process.generation.attach, process.host);
        sim.count("opened");
        sim.apply(engine, Event::Tick { now_ms });
        // A connection that broke unnoticed fails at its next use.
        broken.retain(|(_, conn)| sim.conns.get(conn).is_none_or(|conn| !conn.engine_open));
        for (peer, _) in broken {
            let reason = "the replica closed the connection".to_owned();
            sim.apply(engine, Event::Lost { peer: index(peer), reason });
            sim.close_links(engine, index(peer));
        }
        sim.begin_for_guest(engine, (attach, host), lost_writes, config.refuses_requests);
        sim.after(1000, Occurrence::Tick { engine });
    }

    /// Follows changes while the engine serves: the wanted replicas, and the size.
    async fn follow(&self) {
        loop {
            self.sleep(RETRY_US).await;
            self.follow_replicas().await;
            self.follow_size().await;
            let mut sim = self.sim.borrow_mut();
            if sim.rng.u8(..) < 3 {
                let scrub = ScrubConfig { bytes_per_s: None, repair: true };
                sim.order_scrub(self.engine, 0, scrub);
            }
        }
    }

    /// Follows the replicas that the controller has given the volume.
    async fn follow_replicas(&self) {
        if self.exchange_replicas() {
            // A member that does not forget keeps an out-of-sync set that nothing needs.
            shorthorn_recovery::give_up(self).await;
        }
    }

    /// Adds new replicas, and gives up unwanted ones as soon as they are not in the view. Returns whether any
    /// was given up.
    fn exchange_replicas(&self) -> bool {
        let mut sim = self.sim.borrow_mut();
        let wanted = sim.guest.replicas.clone();
        let is_up = sim.controller.up;
        let Some(process) = sim.engines.get_mut(&self.engine).filter(|_| is_up) else { return false };
        let unwanted: Vec<usize> = (0..process.peers.len())
            .filter(|peer| {
                let peer = &process.peers[*peer];
                !peer.is_given_up && !wanted.contains(&peer.replica)
            })
            .collect();
        let mut has_given_up = false;
        for peer in unwanted {
            let Some(process) = sim.engines.get_mut(&self.engine) else { break };
            let replica = process.peers[peer].replica;
            let Some(core) = &process.core else { break };
            let is_member = core.membership().view().members.contains(replica)
                || core.membership().state(index(peer)) == PeerState::Member;
            if !is_member {
                process.peers[peer].is_given_up = true;
                has_given_up = true;
                sim.apply(self.engine, Event::Forget { peer: index(peer) });
            }
        }
        let Some(process) = sim.engines.get_mut(&self.engine) else { return has_given_up };
        let mut tracked = Vec::new();
        for replica in &wanted {
            if process.index_of(*replica).is_none() {
                tracked.extend(process.add(*replica));
            }
        }
        for peer in tracked {
            let Some(config) = sim.peer_config(self.engine, peer) else { continue };
            sim.apply(self.engine, Event::Track { peer: index(peer), config });
        }
        has_given_up
    }
}

impl EngineHandle {
    /// Has a replica mark the view as committed; connects all queues to a member. Fails with the replica.
    async fn connect_member(
        &self,
        mut one: Reached<Via<Wire>>,
        proposal: &Proposal,
        replicas: &[ReplicaId],
    ) -> Result<(usize, Vec<Via<Wire>>), ReplicaId> {
        // A mark that gets lost only leaves more to honour.
        let _ = conclude(&mut one, proposal).await;
        let queues = self.sim.borrow().queues;
        let Reached { replica, link, welcome } = one;
        let peer = replicas.iter().position(|id| *id == replica).ok_or(replica)?;
        if !proposal.view.members.contains(replica) {
            return Ok((peer, Vec::new()));
        }
        let mut links = vec![link];
        for queue in 1..queues {
            let (link, answer) = self.handshake(replica, queue).await.map_err(|_| replica)?;
            if answer.run != welcome.run {
                self.close(link.0.into_conn());
                return Err(replica);
            }
            links.push(link);
        }
        Ok((peer, links))
    }

    fn cannot_start(&self, fenced_replicas: &[FencedReplica], none: &NoPlan) {
        let NoPlan { cannot, unfit } = none;
        let mut sim = self.sim.borrow_mut();
        sim.needed = match cannot {
            CannotStart::NoQuorum { missing, .. }
            | CannotStart::NoMember(missing)
            | CannotStart::NotSalvaged(missing) => *missing,
            CannotStart::NoReplica => Members::NONE,
        };
        let is_torn = matches!(cannot, CannotStart::NoMember(holders) if holders.is_empty());
        sim.is_torn = is_torn && unfit.is_empty();
        sim.trace(|| {
            let known = fenced_replicas.iter().map(|one| format!("{} knows {:?}", one.replica, one.report));
            let known: Vec<String> = known.collect();
            format!("engine {} cannot start: {cannot}; {}", self.engine, known.join("; "))
        });
    }
}

impl Simulation {
    /// Serves the device to the guest, unless the volume is attached elsewhere by now. `lost_writes`: the
    /// members had lost writes when the volume was opened. `refuses`: the engine answers each request
    /// with an error.
    fn begin_for_guest(
        &mut self,
        engine: u64,
        (attach, host): (u64, usize),
        lost_writes: bool,
        refuses: bool,
    ) {
        let is_current = attach == self.controller.attach && host == self.controller.host;
        // Once a guest has begun with a newer engine, this one has changed nothing that it does not know.
        self.lost_unreported |= (lost_writes || refuses) && (is_current || self.guest.engine.is_none());
        if is_current {
            self.mark_forgotten_undecided();
            self.hosts[host].was_live = true;
            if refuses {
                self.count("lost writes reported to guests");
                let delay = self.rng.u64(100_000..1_000_000);
                self.after(delay, Occurrence::AttachAnew { attach });
            } else if std::mem::take(&mut self.lost_unreported) {
                let now = self.now;
                self.checker.power_lost(now);
            }
            self.device_is_served(engine);
        }
    }
}
