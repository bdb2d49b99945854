//! What an engine process does beside serving: open the volume, then bring replicas up. The same steps in the same order as
//! in the engine crate (`open`, `courier`), over simulated connections.

mod courier;

use std::cell::RefCell;
use std::future::Future;
use std::rc::Rc;

use shorthorn_core::{CopyLimits, CoreConfig, EngineCore, Event, PeerConfig, PeerState, ScrubConfig};
use shorthorn_types::{
    Generation, MarkAction, MarkRegions, Members, RUNS_PER_MARK_MAX, RegionSet, Regions, RegionsOf,
    ReplicaId, View, ViewId, is_current,
};
use shorthorn_views::{
    Account, CannotStart, Change, Combined, Kept, NoPlan, Progress, Witness, combine, plan, remembers,
};
use shorthorn_wire::{CONTROL_QUEUE, RegionsQuery};

use crate::Sabotage;
use crate::engine::{COPY_SLOTS, DEPTH, ID_CALL, REPLICA_TIMEOUT_MS, index};
use crate::net::{Answer, Ask, ConnId, Greeting, Message};
use crate::tasks::{together, until};
use crate::world::{Occurrence, World};

/// The world, for tasks.
pub type Sim = Rc<RefCell<World>>;

const CALL_TIMEOUT_US: u64 = 1_000_000;
/// How long a replica may take for what is asked over a control connection.
const LINE_LIMIT_US: u64 = 10_000_000;
const RETRY_US: u64 = 100_000;
/// How long a courier waits before its first attempt,
const FIRST_PAUSE_US: u64 = 20_000;
/// and at most between two.
const LONGEST_PAUSE_US: u64 = 800_000;
/// How long members that do not answer are waited for when the others are enough.
const MISSING_LIMIT_US: u64 = 1_500_000;

/// One engine process, for its tasks.
#[derive(Clone)]
struct Process {
    sim: Sim,
    engine: u64,
}

/// A replica that answers, fenced.
struct Reached {
    peer: usize,
    conn: ConnId,
    greeting: Greeting,
}

/// Everything that an engine process does besides serving.
pub async fn live(sim: Sim, engine: u64) {
    let process = Process { sim, engine };
    process.open_patiently().await;
    let mut all: Vec<std::pin::Pin<Box<dyn Future<Output = ()> + '_>>> = vec![Box::pin(process.follow())];
    for peer in 0..shorthorn_types::limits::MAX_MEMBERS {
        all.push(Box::pin(process.courier(peer)));
    }
    together(all).await;
}

impl Process {
    async fn sleep(&self, us: u64) {
        let end = {
            let mut world = self.sim.borrow_mut();
            world.after(us, Occurrence::Wake { engine: self.engine });
            world.now + us
        };
        until(|| (self.sim.borrow().now >= end).then_some(())).await;
    }

    /// Asks a replica; none where the connection breaks or nothing comes in time.
    async fn call(&self, conn: ConnId, ask: Ask) -> Option<Answer> {
        self.call_within(conn, ask, CALL_TIMEOUT_US).await
    }

    async fn call_within(&self, conn: ConnId, ask: Ask, limit_us: u64) -> Option<Answer> {
        let (key, end) = {
            let mut world = self.sim.borrow_mut();
            let number = ID_CALL | world.fresh();
            world.calls.insert((conn, number), None);
            world.send(conn, true, Message::Ask(number, Box::new(ask)));
            world.after(limit_us, Occurrence::Wake { engine: self.engine });
            ((conn, number), world.now + limit_us)
        };
        let answer = until(|| {
            let mut world = self.sim.borrow_mut();
            if let Some(answer) = world.calls.get_mut(&key).and_then(Option::take) {
                return Some(Some(answer));
            }
            let open = world.conns.get(&conn).is_some_and(|conn| conn.engine_open);
            (!open || world.now >= end).then_some(None)
        })
        .await;
        let mut world = self.sim.borrow_mut();
        world.calls.remove(&key);
        if let Some(Answer::Deposed(holder)) = answer {
            world.depose(self.engine, holder);
            return None;
        }
        answer
    }

    async fn done(&self, conn: ConnId, ask: Ask) -> bool {
        matches!(self.call(conn, ask).await, Some(Answer::Done))
    }

    fn close(&self, conn: ConnId) {
        let mut world = self.sim.borrow_mut();
        world.send(conn, true, Message::Close);
        world.close_at_engine(conn, "it is not needed");
    }

    /// Opens a connection to a replica and fences it.
    async fn greet(&self, replica: ReplicaId, queue: u16) -> Option<(ConnId, Greeting)> {
        let (conn, generation) = {
            let mut world = self.sim.borrow_mut();
            let at = world.replica_index(replica)?;
            let generation = world.engines.get(&self.engine)?.generation;
            (world.connect(self.engine, at), generation)
        };
        match self.call(conn, Ask::Hello(generation, queue)).await {
            Some(Answer::Welcome(greeting)) if self.has_grown(conn, &greeting).await => {
                Some((conn, *greeting))
            }
            _ => {
                self.close(conn);
                None
            }
        }
    }

    fn size_bytes(&self) -> u64 {
        self.sim.borrow().engines.get(&self.engine).map_or(0, |process| process.size_bytes)
    }

    /// Whoever is greeted grows to the size that the engine was told; one that is larger is not taken.
    async fn has_grown(&self, conn: ConnId, greeting: &Greeting) -> bool {
        let size_bytes = self.size_bytes();
        greeting.size_bytes == size_bytes
            || (greeting.size_bytes < size_bytes && self.done(conn, Ask::Expand(size_bytes)).await)
    }

    /// Who has requests of the guest, or is about to.
    fn connected(&self) -> Vec<(usize, ReplicaId)> {
        let world = self.sim.borrow();
        let Some(process) = world.engines.get(&self.engine) else { return Vec::new() };
        let Some(core) = &process.core else { return Vec::new() };
        let is_connected = |peer: &usize| core.membership().state(index(*peer)) != PeerState::Failed;
        let peers = (0..process.peers.len()).filter(is_connected);
        peers.map(|peer| (peer, process.peers[peer].replica)).collect()
    }

    /// The controller may want a larger volume: the replicas grow, then the core. What does not succeed is tried again.
    async fn follow_size(&self) {
        {
            let mut world = self.sim.borrow_mut();
            let wanted = world.controller.size_bytes;
            let is_up = world.controller.up;
            let Some(process) = world.engines.get_mut(&self.engine) else { return };
            if is_up {
                process.size_bytes = process.size_bytes.max(wanted);
            }
            let has = process.core.as_ref().map_or(0, |core| core.regions().size_bytes());
            if has >= process.size_bytes {
                return;
            }
        }
        let mut grown: Vec<usize> = Vec::new();
        loop {
            let left: Vec<_> =
                self.connected().into_iter().filter(|(peer, _)| !grown.contains(peer)).collect();
            if left.is_empty() {
                let size_bytes = self.size_bytes();
                return self.sim.borrow_mut().apply(self.engine, Event::Expand { size_bytes });
            }
            let size_bytes = self.size_bytes();
            for (peer, _) in left {
                let grows = self.with_line(peer, Ask::Expand(size_bytes)).await;
                if !matches!(grows, Some(Answer::Done)) {
                    return;
                }
                grown.push(peer);
            }
        }
    }

    async fn open_patiently(&self) {
        while !self.open().await {
            self.sleep(RETRY_US).await;
            let mut world = self.sim.borrow_mut();
            // Whoever was attached before may have been told of a larger size, and so may this one by now.
            let wanted = if world.controller.up { world.controller.size_bytes } else { 0 };
            if let Some(engine) = world.engines.get_mut(&self.engine) {
                engine.size_bytes = engine.size_bytes.max(wanted);
            }
            // Every attempt that may have left a proposal somewhere has a generation of its own.
            let Some(engine) = world.engines.get(&self.engine) else { return };
            let host = engine.host;
            let Generation { attach, restart, .. } = world.hosts[host].generation;
            let generation = world.drawn(Generation::new(attach, restart + 1));
            world.hosts[host].generation = generation;
            if let Some(engine) = world.engines.get_mut(&self.engine) {
                engine.generation = generation;
                engine.wants = None;
                engine.was_granted = None;
                engine.links.iter_mut().for_each(|links| links.fill(None));
            }
        }
    }

    /// One attempt to open the volume.
    async fn open(&self) -> bool {
        let peers: Vec<ReplicaId> = match self.sim.borrow().engines.get(&self.engine) {
            Some(engine) => engine.peers.iter().map(|peer| peer.replica).collect(),
            None => return false,
        };
        let reached = self.reach(&peers).await;
        let result = self.open_with(&peers, &reached).await;
        if !result {
            for one in &reached {
                self.close(one.conn);
            }
        }
        result
    }

    /// Fences all replicas at once.
    async fn reach(&self, peers: &[ReplicaId]) -> Vec<Reached> {
        let mut waiting: Vec<_> = Vec::new();
        for (peer, replica) in peers.iter().enumerate() {
            waiting.push((peer, Box::pin(self.greet(*replica, 0))));
        }
        let mut reached = Vec::new();
        until(|| {
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            waiting.retain_mut(|(peer, greeting)| match greeting.as_mut().poll(&mut context) {
                std::task::Poll::Pending => true,
                std::task::Poll::Ready(None) => false,
                std::task::Poll::Ready(Some((conn, greeting))) => {
                    reached.push(Reached { peer: *peer, conn, greeting });
                    false
                }
            });
            waiting.is_empty().then_some(())
        })
        .await;
        reached.sort_by_key(|one| one.peer);
        reached
    }

    async fn open_with(&self, peers: &[ReplicaId], reached: &[Reached]) -> bool {
        let (generation, granted, patient) = {
            let world = self.sim.borrow();
            let Some(engine) = world.engines.get(&self.engine) else { return false };
            let patient = world.now < engine.begun_us + MISSING_LIMIT_US;
            let host = &world.hosts[engine.host];
            let granted =
                [host.granted, host.granted_before].into_iter().flatten().max_by_key(|view| view.id);
            (engine.generation, granted, patient)
        };
        let mut witnesses: Vec<Witness> = reached.iter().map(|one| witness(peers, one)).collect();
        if self.sim.borrow().options.sabotage == Some(Sabotage::NoStamps) {
            witnesses.iter_mut().for_each(|witness| witness.stamp = None);
        }
        let plan = match plan(&witnesses, granted) {
            Ok(plan) => plan,
            Err(NoPlan { cannot, unfit }) => {
                self.judge_unfit(&unfit);
                let mut world = self.sim.borrow_mut();
                world.needed = match &cannot {
                    CannotStart::NoQuorum { missing, .. } | CannotStart::NoMember(missing) => *missing,
                    CannotStart::Nobody => Members::NONE,
                };
                let is_torn = matches!(cannot, CannotStart::NoMember(holders) if holders.is_empty());
                world.is_torn = is_torn && unfit.is_empty();
                world.note(|| {
                    let known = witnesses.iter().map(|one| format!("{} knows {:?}", one.replica, one.report));
                    let known: Vec<String> = known.collect();
                    format!("engine {} cannot start: {cannot}; {}", self.engine, known.join("; "))
                });
                return false;
            }
        };
        self.judge_unfit(&plan.unfit);
        self.sim.borrow_mut().is_torn = false;
        let answers = |id| reached.iter().any(|one| peers[one.peer] == id);
        if plan.basis.holders.iter().any(|id| !answers(id)) && patient {
            return false;
        }
        let size = self.size_bytes();
        let regions = Regions::of(size);
        let chosen = plan.members;
        let view = View { id: ViewId { generation, number: 1 }, members: chosen };
        let asked: Vec<&Reached> =
            reached.iter().filter(|one| !plan.blank.contains(peers[one.peer])).collect();
        let change = Change::new(plan.basis.honoured.clone(), view);
        if !self.bring_through(peers, &asked, change, plan.lost_writes).await {
            return false;
        }
        let members: Vec<&Reached> = reached.iter().filter(|one| chosen.contains(peers[one.peer])).collect();
        let mut kept = Vec::new();
        for one in &members {
            let Some(sets) = self.kept(one, peers, &chosen, regions.count()).await else { return false };
            kept.push(sets);
        }
        let combined = combine(&kept, peers.len(), regions.count());
        let stamp = combined.first_stamp(reached.iter().map(|one| one.greeting.stamp));
        let Combined { mut dirty, missed, stamps, is_complete, .. } = combined;
        if self.sim.borrow().options.sabotage == Some(Sabotage::NoResync) {
            dirty = RegionSet::empty(regions.count());
        }
        for one in reached.iter().filter(|one| !chosen.contains(peers[one.peer])) {
            self.close(one.conn);
        }
        let Some(links) = self.connect_members(peers, &members).await else { return false };
        let refuses_requests = {
            let world = self.sim.borrow();
            let host = world.engines.get(&self.engine).map(|process| process.host);
            host.is_some_and(|host| world.hosts[host].lost_writes)
        };
        let config = CoreConfig {
            queues: self.sim.borrow().queues,
            depth: DEPTH,
            peers: peers
                .iter()
                .enumerate()
                .map(|(at, id)| PeerConfig { replica: *id, local: at == 0 })
                .collect(),
            view,
            replica_timeout_ms: REPLICA_TIMEOUT_MS,
            size_bytes: size,
            dirty,
            missed,
            stamp,
            missed_stamps: stamps,
            copy_slots: COPY_SLOTS,
            copy_limits: CopyLimits { bytes_per_s: 0, share_percent: 50 },
            intent_interval_ms: 300,
            intent_keep_bytes: 0,
            refuses_requests,
        };
        self.serve(config, links, &plan.basis.honoured.committed, &is_complete, plan.lost_writes);
        true
    }

    /// A replica is taken for one whose disk was restored only if it was. What an engine of an earlier attachment was told may be of
    /// long ago.
    fn judge_unfit(&self, unfit: &[(ReplicaId, String)]) {
        let mut world = self.sim.borrow_mut();
        let attach = world.engines.get(&self.engine).map(|process| process.generation.attach);
        if attach != Some(world.controller.attach) {
            return;
        }
        for (replica, why) in unfit.iter().filter(|(_, why)| why.contains("restored to an older state")) {
            let at = world.replica_index(*replica);
            if !at.is_some_and(|at| world.replicas[at].is_rolled_back) {
                world.violate(format!("{replica} has kept everything: {why}"));
            }
        }
    }

    /// The connections of all queues to the members: those of the first are there.
    async fn connect_members(
        &self,
        peers: &[ReplicaId],
        members: &[&Reached],
    ) -> Option<Vec<(usize, Vec<ConnId>)>> {
        let queues = self.sim.borrow().queues;
        let mut links = Vec::new();
        for one in members {
            let mut conns = vec![one.conn];
            for queue in 1..queues {
                conns.push(self.greet(peers[one.peer], queue).await?.0);
            }
            links.push((one.peer, conns));
        }
        Some(links)
    }

    /// The sets of regions that a member keeps.
    async fn kept(&self, one: &Reached, peers: &[ReplicaId], chosen: &Members, count: u32) -> Option<Kept> {
        let (conn, stamp) = (one.conn, one.greeting.stamp);
        let (_, intent, _) = self.regions(conn, RegionsOf::Intent, count).await?;
        let mut missed = Vec::new();
        for replica in peers {
            missed.push(if chosen.contains(*replica) {
                None
            } else {
                let of = RegionsOf::Missed(*replica);
                let (is_kept, missed, stamp) = self.regions(conn, of, count).await?;
                is_kept.then_some(Account { missed, stamp })
            });
        }
        Some(Kept { intent, stamp, missed })
    }

    /// Every member has lost power since a write: whoever has used the device since is told.
    fn note_losses(&self) {
        let mut world = self.sim.borrow_mut();
        world.count("starts from lost caches");
        let Some(host) = world.engines.get(&self.engine).map(|process| process.host) else { return };
        let host = &mut world.hosts[host];
        host.lost_writes |= host.was_live;
    }

    fn serve(
        &self,
        config: CoreConfig,
        links: Vec<(usize, Vec<ConnId>)>,
        last_view: &View,
        is_complete: &[bool],
        lost_writes: bool,
    ) {
        let mut world = self.sim.borrow_mut();
        let engine = self.engine;
        let now_ms = world.clock_ms(engine);
        let (view, dirty) = (config.view, config.dirty.len());
        world.note(|| format!("engine {engine} serves {view}; {dirty} regions are dirty"));
        if dirty > 0 && view.members.len() > 1 {
            world.count("resyncs after an unclean stop");
        }
        let mut core = EngineCore::new(&config);
        let unknown = (0..).zip(is_complete).filter(|(_, is_complete)| !**is_complete);
        unknown.for_each(|(peer, _)| core.distrust(peer));
        let Some(process) = world.engines.get_mut(&engine) else { return };
        process.core = Some(core);
        process.view = Some(view);
        for (peer, is_complete) in process.peers.iter_mut().zip(is_complete) {
            peer.is_complete = *is_complete;
            peer.last_view = Some(*last_view).filter(|view| view.members.contains(peer.replica));
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
        world.count("opened");
        world.apply(engine, Event::Tick { now_ms });
        // What broke before anybody looked at it is found out when it is used first.
        broken.retain(|(_, conn)| world.conns.get(conn).is_none_or(|conn| !conn.engine_open));
        for (peer, _) in broken {
            let reason = "it has closed the connection".to_owned();
            world.apply(engine, Event::Lost { peer: index(peer), reason });
            world.close_links(engine, index(peer));
        }
        let is_current = attach == world.controller.attach && host == world.controller.host;
        let refuses = config.refuses_requests;
        // Once a guest has begun with a newer engine, this one has changed nothing that it does not know.
        world.lost_untold |= (lost_writes || refuses) && (is_current || world.guest.engine.is_none());
        if is_current {
            world.settle_forgotten();
            world.hosts[host].was_live = true;
            if refuses {
                world.count("guests told of lost writes");
                let delay = world.rng.u64(100_000..1_000_000);
                world.after(delay, Occurrence::AttachAnew { attach });
            } else if std::mem::take(&mut world.lost_untold) {
                let now = world.now;
                world.checker.power_lost(now);
            }
            world.device_is_served(engine);
        }
        world.after(1000, Occurrence::Tick { engine });
    }

    /// Whether a replica keeps one of its sets, all of its regions, and the stamp that is kept with it.
    async fn regions(&self, conn: ConnId, of: RegionsOf, count: u32) -> Option<(bool, RegionSet, u32)> {
        let mut set = RegionSet::empty(count);
        let (mut from, mut stamp) = (0, 0);
        loop {
            let Some(Answer::Page(page)) =
                self.call(conn, Ask::Regions(RegionsQuery { of, from, size_bytes: 0 })).await
            else {
                return None;
            };
            for (start, length) in page.runs {
                set.insert_run(start..start + length);
            }
            stamp = stamp.max(page.stamp);
            match page.next {
                Some(next) => from = next,
                None => return Some((page.kept, set, stamp)),
            }
        }
    }

    /// Asks the arbiter where that is needed, has everybody store the first view, and marks it committed.
    ///
    /// Nothing is proposed before it is granted: what one half has stored and may never be granted would stand in the way of
    /// the other half for ever.
    async fn bring_through(
        &self,
        peers: &[ReplicaId],
        reached: &[&Reached],
        mut change: Change,
        lost_writes: bool,
    ) -> bool {
        let everybody = Members::new(reached.iter().map(|one| peers[one.peer])).unwrap_or_default();
        if change.would_need_grant(&everybody) {
            if !self.await_grant(&change, everybody).await {
                return false;
            }
            change.granted();
        }
        if lost_writes {
            self.note_losses();
        }
        for one in reached {
            if self.done(one.conn, Ask::Propose(change.target, change.honoured.clone())).await {
                change.stored(peers[one.peer]);
            }
        }
        if change.progress() != Progress::Through {
            return false;
        }
        for one in reached {
            // The answer is not waited for: a mark that gets lost only leaves more to honour.
            let mut world = self.sim.borrow_mut();
            let number = ID_CALL | world.fresh();
            world.send(one.conn, true, Message::Ask(number, Box::new(Ask::Commit(change.target))));
        }
        true
    }

    async fn await_grant(&self, change: &Change, reached: Members) -> bool {
        let end = {
            let mut world = self.sim.borrow_mut();
            world.count("grants asked");
            let Some(engine) = world.engines.get_mut(&self.engine) else { return false };
            engine.wants = Some((change.target, change.honoured.clone(), reached));
            world.after(100, Occurrence::AskArbiter { engine: self.engine });
            world.after(3 * CALL_TIMEOUT_US, Occurrence::Wake { engine: self.engine });
            world.now + 3 * CALL_TIMEOUT_US
        };
        until(|| {
            let world = self.sim.borrow();
            let engine = world.engines.get(&self.engine)?;
            let granted = engine.was_granted == Some(change.target);
            // One that this start does not honour: it begins again, with that.
            let other = engine.was_granted.is_some_and(|view| view.id > change.honoured.committed.id);
            (granted || other || world.now >= end).then_some(granted)
        })
        .await
    }

    /// What changes while it serves: which replicas the volume is to have, and its size.
    async fn follow(&self) {
        loop {
            self.sleep(RETRY_US).await;
            self.follow_replicas().await;
            self.follow_size().await;
            let mut world = self.sim.borrow_mut();
            if world.rng.u8(..) < 3 {
                let scrub = ScrubConfig { bytes_per_s: 0, repair: true };
                world.apply(self.engine, Event::Scrub(Some(scrub)));
            }
        }
    }

    /// The controller may have given the volume other replicas.
    async fn follow_replicas(&self) {
        for replica in self.exchange_replicas() {
            self.have_forgotten(replica).await;
        }
    }

    /// Takes new replicas in, and gives up those that are not wanted, as soon as they are not in the view. Returns these.
    fn exchange_replicas(&self) -> Vec<ReplicaId> {
        let mut world = self.sim.borrow_mut();
        let wanted = world.guest.replicas.clone();
        let is_up = world.controller.up;
        let Some(process) = world.engines.get_mut(&self.engine).filter(|_| is_up) else { return Vec::new() };
        let mut tracked = Vec::new();
        for replica in &wanted {
            if process.index_of(*replica).is_none() {
                tracked.extend(process.add(*replica));
            }
        }
        let unwanted: Vec<usize> = (0..process.peers.len())
            .filter(|peer| {
                let peer = &process.peers[*peer];
                !peer.is_given_up && !wanted.contains(&peer.replica)
            })
            .collect();
        for peer in tracked {
            let Some(config) = world.peer_config(self.engine, peer) else { continue };
            world.apply(self.engine, Event::Track { peer: index(peer), config });
        }
        let mut given_up = Vec::new();
        for peer in unwanted {
            let Some(process) = world.engines.get_mut(&self.engine) else { break };
            let replica = process.peers[peer].replica;
            let Some(core) = &process.core else { break };
            let is_member = core.membership().view().members.contains(replica)
                || core.membership().state(index(peer)) == PeerState::Member;
            if !is_member {
                process.peers[peer].is_given_up = true;
                given_up.push(replica);
                world.apply(self.engine, Event::Forget { peer: index(peer) });
            }
        }
        given_up
    }

    /// Has the members keep no account of a replica any more that is given up. Where that fails they keep it in vain.
    async fn have_forgotten(&self, replica: ReplicaId) {
        for member in self.members() {
            self.with_line(member, courier::forget(replica)).await;
        }
    }
}

fn witness(peers: &[ReplicaId], one: &Reached) -> Witness {
    Witness {
        replica: peers[one.peer],
        report: one.greeting.report.clone(),
        rebuilding: one.greeting.rebuilding,
        lost_cache: one.greeting.lost_cache,
        stamp: one.greeting.stamp,
    }
}
