//! The tasks of an engine process beside serving: open the volume, then bring replicas back, expand them and
//! give them up. The steps are those of [`shorthorn_recovery`], over simulated connections.

mod link;
mod rebuild_task;

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;

use shorthorn_core::{
    CopyLimits, CoreConfig, EngineCore, Event, Outputs, PeerConfig, PeerState, ScrubConfig,
};
use shorthorn_recovery::{
    Grant, NotOpen, Offenders, Opened, OpeningEngine, Proposal, Reached, ServingEngine, Volume, conclude,
    grow_replicas, open, propose_to,
};
use shorthorn_types::{Generation, Members, RegionSet, ReplicaId};
use shorthorn_views::{CannotStart, Change, FencedReplica, KeptSets, NoPlan, Plan};
use shorthorn_wire::Welcome;

use crate::Sabotage;
use crate::engine::{COPY_SLOTS, DEPTH, FLIGHT_LIMITS, ID_CALL, LATE_LIMIT_MS, REPLICA_TIMEOUT_MS, index};
use crate::net::{Answer, Ask, ConnId, Message};
use crate::simulation::{Occurrence, Simulation};
use crate::tasks::{all, until};
use link::{CallError, Via, Wire};

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
struct Process {
    sim: Sim,
    engine: u64,
}

/// Runs all tasks of an engine process besides serving.
pub async fn live(sim: Sim, engine: u64) {
    let process = Process { sim, engine };
    process.open_patiently().await;
    let mut tasks: Vec<Pin<Box<dyn Future<Output = ()> + '_>>> = vec![Box::pin(process.follow())];
    for peer in 0..shorthorn_types::limits::MAX_MEMBERS {
        tasks.push(Box::pin(process.rebuild_task(peer)));
    }
    all(tasks).await;
}

impl Process {
    async fn sleep(&self, us: u64) {
        let end = {
            let mut sim = self.sim.borrow_mut();
            sim.after(us, Occurrence::Wake { engine: self.engine });
            sim.now + us
        };
        until(|| (self.sim.borrow().now >= end).then_some(())).await;
    }

    /// Asks a replica, and waits for the answer until the connection breaks or the time is over.
    async fn call(&self, conn: ConnId, ask: Ask, limit_us: u64) -> Result<Answer, CallError> {
        let (key, end) = {
            let mut sim = self.sim.borrow_mut();
            let number = ID_CALL | sim.fresh();
            sim.calls.insert((conn, number), None);
            sim.send(conn, true, Message::Ask(number, Box::new(ask)));
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
            Some(Answer::Deposed(holder)) => Err(CallError::Deposed(holder)),
            Some(Answer::Error(errno)) => Err(CallError::Refused(errno)),
            Some(answer) => Ok(answer),
            None => Err(CallError::Broken),
        }
    }

    fn close(&self, conn: ConnId) {
        // It cannot be borrowed when the simulation ends: then nothing is left to close.
        let Ok(mut sim) = self.sim.try_borrow_mut() else { return };
        if sim.conns.get(&conn).is_some_and(|conn| conn.engine_open) {
            sim.send(conn, true, Message::Close);
            sim.close_at_engine(conn, "it is not needed");
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
        let Answer::Welcome(mut welcome) = answer else { return Err(CallError::Broken) };
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
                Ok((opened, volume, lost_writes)) => {
                    return self.serve(opened, &volume, lost_writes);
                }
                Err(NotOpen::Deposed(holder)) => return self.depose(holder),
                Err(NotOpen::Waiting(_)) => self.sleep(RETRY_US).await,
                Err(NotOpen::Torn { .. } | NotOpen::Stopped(())) => {
                    let pause_us = u64::try_from(offenders.pause().as_micros()).unwrap_or(0);
                    self.sleep(RETRY_US.max(pause_us)).await;
                    self.take_next_generation();
                }
            }
            self.take_orders();
        }
    }

    /// Takes orders before an attempt: the controller may want a larger volume by now, or other replicas.
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
    ) -> Result<(Opened<Connections>, Volume, bool), NotOpen<()>> {
        let volume = {
            let sim = self.sim.borrow();
            let engine = sim.engines.get(&self.engine).ok_or(NotOpen::Stopped(()))?;
            let host = &sim.hosts[engine.host];
            Volume {
                generation: engine.generation,
                replicas: engine.peers.iter().map(|peer| peer.replica).collect(),
                size_bytes: engine.size_bytes,
                granted: [host.granted, host.granted_before].into_iter().flatten().max_by_key(|view| view.id),
                missing_limit_ms: MISSING_LIMIT_MS,
                member_limit_ms: MEMBER_LIMIT_MS,
            }
        };
        let mut attempt = Attempt {
            process: self.clone(),
            replicas: volume.replicas.clone(),
            search: Vec::new(),
            lost_writes: false,
            leaves_out: false,
        };
        let opened = open(&mut attempt, &volume, offenders).await?;
        if attempt.leaves_out {
            self.sim.borrow_mut().count("starts without an offender");
        }
        Ok((opened, volume, attempt.lost_writes))
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

    fn config(&self, opened: &Opened<Connections>, volume: &Volume) -> CoreConfig {
        let sim = self.sim.borrow();
        let host = sim.engines.get(&self.engine).map(|process| process.host);
        let is_sabotaged = sim.options.sabotage == Some(Sabotage::NoResync);
        let peer = |(at, id): (usize, &ReplicaId)| PeerConfig { replica: *id, local: at == 0 };
        CoreConfig {
            queues: sim.queues,
            depth: DEPTH,
            peers: volume.replicas.iter().enumerate().map(peer).collect(),
            view: opened.view,
            replica_timeout_ms: REPLICA_TIMEOUT_MS,
            late_limit_ms: LATE_LIMIT_MS,
            flight_limits: FLIGHT_LIMITS,
            size_bytes: volume.size_bytes,
            dirty: match is_sabotaged {
                true => RegionSet::empty(shorthorn_types::Regions::of(volume.size_bytes).count()),
                false => opened.dirty.clone(),
            },
            out_of_sync: opened.out_of_sync.clone(),
            stamp: opened.stamp,
            out_of_sync_stamps: opened.out_of_sync_stamps.clone(),
            copy_slots: COPY_SLOTS,
            copy_limits: CopyLimits { bytes_per_s: 0, share_percent: 50 },
            intent_interval_ms: 300,
            intent_keep_bytes: 0,
            verify_reads: self.engine % 2 == 1,
            refuses_requests: host.is_some_and(|host| sim.hosts[host].lost_writes),
        }
    }

    /// Serves the volume. `lost_writes`: the members had lost writes when the volume was opened.
    fn serve(&self, opened: Opened<Connections>, volume: &Volume, lost_writes: bool) {
        let config = self.config(&opened, volume);
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
            let reason = "it has closed the connection".to_owned();
            sim.apply(engine, Event::Lost { peer: index(peer), reason });
            sim.close_links(engine, index(peer));
        }
        let is_current = attach == sim.controller.attach && host == sim.controller.host;
        let refuses = config.refuses_requests;
        // Once a guest has begun with a newer engine, this one has changed nothing that it does not know.
        sim.lost_untold |= (lost_writes || refuses) && (is_current || sim.guest.engine.is_none());
        if is_current {
            sim.mark_forgotten_undecided();
            sim.hosts[host].was_live = true;
            if refuses {
                sim.count("guests told of lost writes");
                let delay = sim.rng.u64(100_000..1_000_000);
                sim.after(delay, Occurrence::AttachAnew { attach });
            } else if std::mem::take(&mut sim.lost_untold) {
                let now = sim.now;
                sim.checker.power_lost(now);
            }
            sim.device_is_served(engine);
        }
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
                let scrub = ScrubConfig { bytes_per_s: 0, repair: true };
                sim.apply(self.engine, Event::Scrub(Some(scrub)));
            }
        }
    }

    /// Follows the replicas that the controller has given the volume.
    async fn follow_replicas(&self) {
        if self.exchange_replicas() {
            // A member that does not forget keeps the out-of-sync set in vain.
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

/// The connections to the members: by replica and queue.
type Connections = Vec<(usize, Vec<ConnId>)>;

/// An attempt to open the volume, driven by [`shorthorn_recovery`].
struct Attempt {
    process: Process,
    replicas: Vec<ReplicaId>,
    /// Greets replicas that had not answered, while the arbiter is waited for. Each says whether it answers.
    search: Vec<(ReplicaId, Greeting)>,
    lost_writes: bool,
    /// True if the attempt continues without some of the reached replicas.
    leaves_out: bool,
}

type Greeting = Pin<Box<dyn Future<Output = bool>>>;

impl OpeningEngine for Attempt {
    type Link = Via<Wire>;
    type Connections = Connections;
    type Stop = ();

    async fn reach(&mut self) -> Result<Vec<Reached<Via<Wire>>>, NotOpen<()>> {
        let process = &self.process;
        let handshake = |replica| async move { process.handshake(replica, 0).await };
        let answers = all(self.replicas.iter().map(|replica| Box::pin(handshake(*replica))).collect()).await;
        let mut reached = Vec::new();
        for (replica, answer) in self.replicas.iter().zip(answers) {
            match answer {
                Ok((link, welcome)) => reached.push(Reached { replica: *replica, link, welcome }),
                Err(CallError::Deposed(holder)) => return Err(NotOpen::Deposed(holder)),
                Err(_) => {}
            }
        }
        Ok(reached)
    }

    fn planned(&mut self, fenced_replicas: &[FencedReplica], plan: Result<&Plan, &NoPlan>) {
        match plan {
            Ok(plan) => {
                self.process.judge_unfit(&plan.unfit);
                self.process.sim.borrow_mut().is_torn = false;
                self.lost_writes = plan.lost_writes;
            }
            Err(none) => {
                self.process.judge_unfit(&none.unfit);
                self.process.cannot_start(fenced_replicas, none);
            }
        }
    }

    fn offended(&mut self, replica: ReplicaId, reason: &str) {
        let engine = self.process.engine;
        let mut sim = self.process.sim.borrow_mut();
        sim.trace(|| format!("engine {engine}: {replica} makes an attempt fail: {reason}"));
    }

    fn leaves_out(&mut self, replica: ReplicaId, _: &str) {
        self.leaves_out = true;
        let engine = self.process.engine;
        let mut sim = self.process.sim.borrow_mut();
        sim.trace(|| format!("engine {engine} leaves {replica} out"));
        sim.count("attempts without an offender");
    }

    fn waited_ms(&self) -> u64 {
        let sim = self.process.sim.borrow();
        let begun_us = sim.engines.get(&self.process.engine).map_or(sim.now, |engine| engine.begun_us);
        (sim.now - begun_us) / 1000
    }

    fn has_user(&self) -> bool {
        let sim = self.process.sim.borrow();
        let host = sim.engines.get(&self.process.engine).map(|process| process.host);
        host.is_some_and(|host| sim.hosts[host].was_live && !sim.hosts[host].lost_writes)
    }

    fn ask_arbiter(&mut self, change: &Change, stored: Members) {
        let engine = self.process.engine;
        let mut sim = self.process.sim.borrow_mut();
        sim.count("grants asked");
        sim.after(100, Occurrence::AskArbiter { engine });
        if let Some(process) = sim.engines.get_mut(&engine) {
            process.wants = Some((change.target, change.honoured.clone(), stored));
        }
    }

    async fn next_grant(&mut self, reached: &mut [Reached<Via<Wire>>]) -> Result<Grant, NotOpen<()>> {
        if self.search.is_empty() {
            self.process.sleep(RETRY_US).await;
            let is_reached = |replica| reached.iter().any(|one| one.replica == replica);
            for replica in self.replicas.iter().copied().filter(|replica| !is_reached(*replica)) {
                let process = self.process.clone();
                let greeting = async move { process.handshake(replica, 0).await.is_ok() };
                self.search.push((replica, Box::pin(greeting)));
            }
        }
        let (process, search, replicas) = (&self.process, &mut self.search, &self.replicas);
        std::future::poll_fn(|context| {
            {
                let mut sim = process.sim.borrow_mut();
                let has_others = sim.controller.up && sim.guest.replicas != *replicas;
                let (is_up, wanted_bytes) = (sim.controller.up, sim.controller.size_bytes);
                let Some(engine) = sim.engines.get_mut(&process.engine) else { return Poll::Pending };
                let is_larger = is_up && wanted_bytes > engine.size_bytes;
                if let Some(view) = engine.was_granted.take() {
                    return Poll::Ready(Ok(Grant::Answered(view)));
                }
                if has_others {
                    sim.count("starts with another list of replicas");
                    return Poll::Ready(Err(NotOpen::torn("the volume has other replicas now")));
                }
                if is_larger {
                    sim.count("starts with another size");
                    return Poll::Ready(Err(NotOpen::torn("the volume is to be larger now")));
                }
            }
            let mut back = None;
            search.retain_mut(|(replica, greeting)| match greeting.as_mut().poll(context) {
                Poll::Pending => true,
                Poll::Ready(answers) => {
                    back = back.or_else(|| answers.then_some(*replica));
                    false
                }
            });
            match back {
                Some(replica) => {
                    process.sim.borrow_mut().count("starts with a replica that is back");
                    Poll::Ready(Ok(Grant::Back(replica)))
                }
                None if search.is_empty() => Poll::Ready(Ok(Grant::Nothing)),
                None => Poll::Pending,
            }
        })
        .await
    }

    fn ask_no_more(&mut self) {
        if let Some(process) = self.process.sim.borrow_mut().engines.get_mut(&self.process.engine) {
            process.wants = None;
        }
        self.search.clear();
    }

    fn record_lost_writes(&mut self) -> Result<(), ()> {
        self.process.record_losses();
        Ok(())
    }

    async fn propose(
        &mut self,
        to: Vec<Reached<Via<Wire>>>,
        proposal: &Proposal,
    ) -> Vec<(Reached<Via<Wire>>, Result<Option<KeptSets>, CallError>)> {
        let propose = |mut one| async move {
            let answer = propose_to(&mut one, proposal).await;
            (one, answer)
        };
        all(to.into_iter().map(|one| Box::pin(propose(one))).collect()).await
    }

    async fn connect(
        &mut self,
        reached: Vec<Reached<Via<Wire>>>,
        proposal: &Proposal,
    ) -> Result<Connections, NotOpen<()>> {
        let (process, replicas) = (&self.process, &self.replicas);
        let connect = |one| process.connect_member(one, proposal, replicas);
        let connected = all(reached.into_iter().map(|one| Box::pin(connect(one))).collect()).await;
        let links: Result<Vec<_>, ReplicaId> = connected.into_iter().collect();
        let links = links.map_err(|replica| NotOpen::torn_by(replica, "a queue is not connected"))?;
        let into_conns = |(peer, links): (usize, Vec<Via<Wire>>)| {
            (peer, links.into_iter().map(|link| link.0.into_conn()).collect())
        };
        Ok(links.into_iter().filter(|(_, links)| !links.is_empty()).map(into_conns).collect())
    }
}

impl Process {
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
            let (link, greeting) = self.handshake(replica, queue).await.map_err(|_| replica)?;
            if greeting.run != welcome.run {
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
            CannotStart::NoQuorum { missing, .. } | CannotStart::NoMember(missing) => *missing,
            CannotStart::Nobody => Members::NONE,
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
