//! What an engine process does beside serving: open the volume, then bring replicas up. The same steps in the same order as
//! in the engine crate (`open`, `courier`), over simulated connections.

use std::cell::RefCell;
use std::future::Future;
use std::rc::Rc;

use shorthorn_core::{CopyLimits, CoreConfig, EngineCore, Event, PeerConfig, PeerState, ScrubConfig};
use shorthorn_types::{
    Generation, MarkAction, MarkRegions, Members, RUNS_PER_MARK_MAX, RegionSet, Regions, RegionsOf,
    ReplicaId, View, ViewId,
};
use shorthorn_views::{
    CannotStart, Change, Combined, Kept, NoPlan, Progress, Witness, combine, plan, remembers,
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
        let witnesses: Vec<Witness> = reached.iter().map(|one| witness(peers, one)).collect();
        let plan = match plan(&witnesses, granted) {
            Ok(plan) => plan,
            Err(NoPlan { cannot, .. }) => {
                let mut world = self.sim.borrow_mut();
                world.needed = match &cannot {
                    CannotStart::NoQuorum { missing, .. } | CannotStart::NoMember(missing) => *missing,
                    CannotStart::Nobody => Members::NONE,
                };
                world.note(|| {
                    let known = witnesses.iter().map(|one| format!("{} knows {:?}", one.replica, one.report));
                    let known: Vec<String> = known.collect();
                    format!("engine {} cannot start: {cannot}; {}", self.engine, known.join("; "))
                });
                return false;
            }
        };
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
            let Some(sets) = self.kept(one.conn, peers, &chosen, regions.count()).await else { return false };
            kept.push(sets);
        }
        let Combined { mut dirty, missed, is_complete } = combine(&kept, peers.len(), regions.count());
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
            copy_slots: COPY_SLOTS,
            copy_limits: CopyLimits { bytes_per_s: 0, share_percent: 50 },
            intent_interval_ms: 300,
            intent_keep_bytes: 0,
            refuses_requests,
        };
        self.serve(config, links, &plan.basis.honoured.committed, &is_complete, plan.lost_writes);
        true
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
    async fn kept(&self, conn: ConnId, peers: &[ReplicaId], chosen: &Members, count: u32) -> Option<Kept> {
        let (_, intent) = self.regions(conn, RegionsOf::Intent, count).await?;
        let mut missed = Vec::new();
        for replica in peers {
            missed.push(if chosen.contains(*replica) {
                None
            } else {
                let (is_kept, set) = self.regions(conn, RegionsOf::Missed(*replica), count).await?;
                is_kept.then_some(set)
            });
        }
        Some(Kept { intent, missed })
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

    /// All regions of one of a replica's sets, and whether it keeps it.
    async fn regions(&self, conn: ConnId, of: RegionsOf, count: u32) -> Option<(bool, RegionSet)> {
        let mut set = RegionSet::empty(count);
        let mut from = 0;
        loop {
            let Some(Answer::Page(page)) =
                self.call(conn, Ask::Regions(RegionsQuery { of, from, size_bytes: 0 })).await
            else {
                return None;
            };
            for (start, length) in page.runs {
                set.insert_run(start..start + length);
            }
            match page.next {
                Some(next) => from = next,
                None => return Some((page.kept, set)),
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
            self.with_line(member, forget(replica)).await;
        }
    }

    /// The courier of a replica: brings it back whenever it is away.
    async fn courier(&self, peer: usize) {
        loop {
            until(|| self.is_away(peer)).await;
            let mut pause = FIRST_PAUSE_US;
            loop {
                self.sleep(pause).await;
                let Some(replica) = self.is_away(peer) else { break };
                if self.attempt(peer, replica).await.is_some() {
                    break;
                }
                self.sim.borrow_mut().count("joins given up");
                pause = (pause * 2).min(LONGEST_PAUSE_US);
            }
        }
    }

    /// Which replica is to be brought back.
    fn is_away(&self, peer: usize) -> Option<ReplicaId> {
        let world = self.sim.borrow();
        let process = world.engines.get(&self.engine)?;
        let known = process.peers.get(peer).filter(|peer| !peer.is_given_up)?;
        let state = process.core.as_ref()?.membership().state(index(peer));
        (process.is_disconnected(peer) && state == PeerState::Failed).then_some(known.replica)
    }

    /// One attempt, from the first word to the core.
    async fn attempt(&self, me: usize, replica: ReplicaId) -> Option<()> {
        let greeting = self.open_line(me).await?;
        let last_view = self.sim.borrow().engines.get(&self.engine)?.peers[me].last_view;
        let remembers = remembers(&greeting.report, last_view);
        if remembers {
            self.bring_views(me, &greeting).await?;
        }
        if self.pending().is_some() {
            return None;
        }
        let lack = self.find_lack(me, replica, &greeting, remembers).await?;
        self.keep_accounts(me, &greeting).await?;
        let size_bytes = match self.connect_queues(me, replica).await {
            Some(size_bytes) => size_bytes,
            None => {
                self.sim.borrow_mut().close_links(self.engine, index(me));
                return None;
            }
        };
        self.hand_to_core(me, replica, lack, size_bytes).await
    }

    fn pending(&self) -> Option<(View, shorthorn_types::ReplicaReport)> {
        self.sim.borrow().engines.get(&self.engine)?.pending.clone()
    }

    fn view(&self) -> Option<View> {
        let world = self.sim.borrow();
        Some(world.engines.get(&self.engine)?.core.as_ref()?.membership().view())
    }

    /// Has the replica learn the current view, and store the one that is being brought through.
    async fn bring_views(&self, me: usize, greeting: &Greeting) -> Option<()> {
        if greeting.report.committed.id < self.view()?.id {
            self.tell_view(me).await?;
        }
        if let Some((view, honoured)) = self.pending() {
            self.told(me, Ask::Propose(view, honoured)).await?;
            let stored = Event::ViewStored { peer: index(me), view: view.id };
            self.sim.borrow_mut().apply(self.engine, stored);
        }
        Some(())
    }

    async fn tell_view(&self, me: usize) -> Option<()> {
        self.told(me, Ask::Commit(self.view()?)).await
    }

    /// It is not what it was: nobody takes what was counted since it left for all that it lacks.
    async fn depose(&self, me: usize, replica: ReplicaId) -> Option<()> {
        self.set_complete(me, false);
        if let Some(core) = self.sim.borrow_mut().engines.get_mut(&self.engine)?.core.as_mut() {
            core.distrust(index(me));
        }
        for keeper in self.accountants(me) {
            self.told(keeper, forget(replica)).await?;
        }
        self.tell_view(me).await
    }

    fn set_complete(&self, me: usize, is_complete: bool) {
        if let Some(process) = self.sim.borrow_mut().engines.get_mut(&self.engine) {
            process.peers[me].is_complete = is_complete;
        }
    }

    /// What it lacks beside what the core has counted. Makes it a copy of a member first, where it is not what it was.
    async fn find_lack(
        &self,
        me: usize,
        replica: ReplicaId,
        greeting: &Greeting,
        remembers: bool,
    ) -> Option<Lack> {
        let source = *self.members().first()?;
        let (theirs, _) = self.layers(source).await?;
        let (mine, _) = self.layers(me).await?;
        let is_complete = self.sim.borrow().engines.get(&self.engine)?.peers[me].is_complete;
        let regions = Regions::of(self.size_bytes());
        let is_what_it_was = is_complete && !greeting.rebuilding && remembers && mine == theirs;
        let mut missing = match is_what_it_was {
            true => RegionSet::empty(regions.count()),
            false => self.make_copy(me, replica, source, remembers, regions).await?,
        };
        // What it had not made durable may be gone, and what it alone was sent is in no member.
        let (_, intent) = self.regions_of(me, RegionsOf::Intent, regions).await?;
        missing.insert_all(&intent);
        Some(Lack { missing, regions, is_copy: !is_what_it_was })
    }

    /// Makes it a copy of `source`. Returns where the source has data.
    async fn make_copy(
        &self,
        me: usize,
        replica: ReplicaId,
        source: usize,
        remembers: bool,
        regions: Regions,
    ) -> Option<RegionSet> {
        let (has_snapshot, snapshot) = self.layers(source).await?;
        let begin = || self.with_line(me, Ask::CopyBegin { has_snapshot });
        match begin().await? {
            Answer::Done => {}
            // It remembers a view that it was in, although not the last one: it holds old data.
            Answer::Error(_) if !remembers => {
                self.sim.borrow_mut().count("deposed replicas");
                self.depose(me, replica).await?;
                matches!(begin().await?, Answer::Done).then_some(())?;
            }
            _ => return None,
        }
        self.tell_view(me).await?;
        self.told(me, Ask::CopySnapshot(snapshot)).await?;
        // First they begin to count, then the source is looked at: what changes meanwhile is in one or the other.
        let accountants = self.accountants(me);
        self.keep_missed(&accountants, replica, &RegionSet::empty(regions.count()), regions).await?;
        let (_, missing) = self.regions_of(source, RegionsOf::Allocated, regions).await?;
        self.keep_missed(&accountants, replica, &missing, regions).await?;
        self.sim.borrow_mut().count("full copies");
        Some(missing)
    }

    /// From now on it counts what the other absent ones miss, as the members do; where they do not know all of that, it
    /// keeps no account.
    async fn keep_accounts(&self, me: usize, greeting: &Greeting) -> Option<()> {
        let regions = Regions::of(self.size_bytes());
        let nothing = RegionSet::empty(regions.count());
        for (other, is_complete) in self.others(me, greeting)? {
            if is_complete {
                self.keep_missed(&[me], other, &nothing, regions).await?;
            } else {
                self.told(me, forget(other)).await?;
            }
        }
        Some(())
    }

    /// The replicas outside the view that `me` may keep an account of, and whether all is known that they miss.
    fn others(&self, me: usize, greeting: &Greeting) -> Option<Vec<(ReplicaId, bool)>> {
        let view = self.view()?;
        let world = self.sim.borrow();
        let process = world.engines.get(&self.engine)?;
        let views = std::iter::once(&greeting.report.committed).chain(&greeting.report.proposed);
        let mut others: Vec<ReplicaId> = greeting.tracks.iter().collect();
        others.extend(views.flat_map(|view| view.members.iter()));
        others.extend(process.peers.iter().filter(|peer| !peer.is_given_up).map(|peer| peer.replica));
        others.sort_unstable();
        others.dedup();
        others.retain(|id| *id != process.peers[me].replica && !view.members.contains(*id));
        let is_complete = |id: ReplicaId| {
            process.peers.iter().any(|peer| peer.replica == id && !peer.is_given_up && peer.is_complete)
        };
        Some(others.into_iter().map(|id| (id, is_complete(id))).collect())
    }

    /// Opens a connection for every queue. Returns the size that the replica has at least.
    async fn connect_queues(&self, me: usize, replica: ReplicaId) -> Option<u64> {
        let size_bytes = self.size_bytes();
        let queues = self.sim.borrow().queues;
        for queue in 0..queues {
            let (conn, _) = self.greet(replica, queue).await?;
            let mut world = self.sim.borrow_mut();
            world.engines.get_mut(&self.engine)?.links[me][usize::from(queue)] = Some(conn);
        }
        Some(size_bytes)
    }

    /// The core takes over, if the replica has followed every expansion that the core may be told of without it.
    async fn hand_to_core(&self, me: usize, replica: ReplicaId, lack: Lack, size_bytes: u64) -> Option<()> {
        let count_now = {
            let mut world = self.sim.borrow_mut();
            let process = world.engines.get(&self.engine)?;
            if size_bytes < process.size_bytes {
                world.close_links(self.engine, index(me));
                return None;
            }
            let missing = lack.missing.converted(lack.regions, process.core.as_ref()?.regions());
            world.note(|| format!("engine {}: {replica} joins, {} regions", self.engine, missing.len()));
            let core = world.engines.get_mut(&self.engine)?.core.as_mut()?;
            if lack.is_copy {
                core.is_in_copy(index(me));
            }
            world.apply(self.engine, Event::Join { peer: index(me), missing: Box::new(missing) });
            drop(world);
            self.accountants(me)
        };
        if !lack.is_copy {
            return Some(());
        }
        let kept = self.complete_accounts(&count_now, me, replica).await;
        let ended = if kept.is_some() { self.told(me, Ask::CopyEnd).await } else { None };
        match ended {
            Some(()) => {
                self.set_complete(me, true);
                self.sim.borrow_mut().apply(self.engine, Event::CopyEnded { peer: index(me) });
            }
            // A member that counts as being rebuilt would be none at the next start.
            None => {
                let reason = "its copy could not be ended".to_owned();
                self.sim.borrow_mut().apply(self.engine, Event::Lost { peer: index(me), reason });
            }
        }
        ended
    }

    /// Has `keepers` keep all that this one misses, which the core knows by now: first they count, then the core is asked.
    async fn complete_accounts(&self, keepers: &[usize], me: usize, replica: ReplicaId) -> Option<()> {
        let regions = Regions::of(self.size_bytes());
        self.keep_missed(keepers, replica, &RegionSet::empty(regions.count()), regions).await?;
        let (missed, regions) = {
            let world = self.sim.borrow();
            let core = world.engines.get(&self.engine)?.core.as_ref()?;
            (core.missed(index(me)).cloned(), core.regions())
        };
        match missed {
            Some(missed) => self.keep_missed(keepers, replica, &missed, regions).await,
            None => Some(()),
        }
    }

    /// The members, the one on this host first.
    fn members(&self) -> Vec<usize> {
        let world = self.sim.borrow();
        let Some(process) = world.engines.get(&self.engine) else { return Vec::new() };
        let Some(core) = &process.core else { return Vec::new() };
        let view = core.membership().view();
        let is_member = |peer: &usize| {
            let peer = &process.peers[*peer];
            !peer.is_given_up && view.members.contains(peer.replica)
        };
        (0..process.peers.len()).filter(is_member).collect()
    }

    /// Who has to count what `absent` misses: the members, and those that are about to be.
    fn accountants(&self, absent: usize) -> Vec<usize> {
        let world = self.sim.borrow();
        let Some(process) = world.engines.get(&self.engine) else { return Vec::new() };
        let Some(core) = &process.core else { return Vec::new() };
        let counts = |peer: &usize| {
            let state = core.membership().state(index(*peer));
            *peer != absent
                && !process.peers[*peer].is_given_up
                && matches!(state, PeerState::Member | PeerState::Joining)
        };
        (0..process.peers.len()).filter(counts).collect()
    }

    /// Has `keepers` count what `replica` misses, and `missed`, which counts in `regions`, as a part of that.
    async fn keep_missed(
        &self,
        keepers: &[usize],
        replica: ReplicaId,
        missed: &RegionSet,
        regions: Regions,
    ) -> Option<()> {
        let runs: Vec<(u32, u32)> = missed.runs(0).map(|run| (run.start, run.end - run.start)).collect();
        let mut pages: Vec<Vec<(u32, u32)>> = runs.chunks(RUNS_PER_MARK_MAX).map(<[_]>::to_vec).collect();
        if pages.is_empty() {
            pages.push(Vec::new());
        }
        for keeper in keepers {
            for runs in &pages {
                let (of, size_bytes) = (RegionsOf::Missed(replica), regions.size_bytes());
                let change = MarkRegions { of, action: MarkAction::Add, runs: runs.clone(), size_bytes };
                self.told(*keeper, Ask::Mark(change)).await?;
            }
        }
        Some(())
    }

    /// Whether a replica has a snapshot below its head, and that.
    async fn layers(&self, peer: usize) -> Option<(bool, Rc<crate::disk::SparseFile>)> {
        match self.with_line(peer, Ask::Layers).await? {
            Answer::Layers(has_snapshot, snapshot) => Some((has_snapshot, snapshot)),
            _ => None,
        }
    }

    async fn told(&self, peer: usize, ask: Ask) -> Option<()> {
        matches!(self.with_line(peer, ask).await, Some(Answer::Done)).then_some(())
    }

    /// Waits until nobody else uses a control connection, and takes it.
    async fn take_line(&self, peer: usize) -> Option<ConnId> {
        let taken = until(|| {
            let mut world = self.sim.borrow_mut();
            let Some(process) = world.engines.get_mut(&self.engine) else { return Some(None) };
            let line = process.lines.get_mut(peer)?;
            if line.is_busy {
                return None;
            }
            line.is_busy = true;
            Some(line.conn)
        });
        taken.await
    }

    fn give_line(&self, peer: usize, conn: Option<ConnId>) {
        let mut world = self.sim.borrow_mut();
        world.wake(self.engine);
        let conn = conn.filter(|conn| world.conns.get(conn).is_some_and(|conn| conn.engine_open));
        if let Some(process) = world.engines.get_mut(&self.engine) {
            process.lines[peer] = crate::engine::Line { conn, is_busy: false };
        }
    }

    /// Opens a new control connection to a replica, which closes the last one.
    async fn open_line(&self, peer: usize) -> Option<Greeting> {
        if let Some(old) = self.take_line(peer).await {
            self.close(old);
        }
        let made = self.make_line(peer).await;
        self.give_line(peer, made.as_ref().map(|(conn, _)| *conn));
        made.map(|(_, greeting)| greeting)
    }

    async fn make_line(&self, peer: usize) -> Option<(ConnId, Greeting)> {
        let replica = self.sim.borrow().engines.get(&self.engine)?.peers[peer].replica;
        self.greet(replica, CONTROL_QUEUE).await
    }

    /// Asks a replica something over its control connection, which is closed where that fails.
    async fn with_line(&self, peer: usize, ask: Ask) -> Option<Answer> {
        let conn = match self.take_line(peer).await {
            Some(conn) => Some(conn),
            None => self.make_line(peer).await.map(|(conn, _)| conn),
        };
        let Some(conn) = conn else {
            self.give_line(peer, None);
            return None;
        };
        let answer = self.call_within(conn, ask, LINE_LIMIT_US).await;
        if answer.is_none() {
            self.close(conn);
        }
        self.give_line(peer, Some(conn).filter(|_| answer.is_some()));
        answer
    }

    /// All regions of one of a replica's sets, in regions of the size that the engine counts in.
    async fn regions_of(&self, peer: usize, of: RegionsOf, regions: Regions) -> Option<(bool, RegionSet)> {
        let mut set = RegionSet::empty(regions.count());
        let mut from = 0;
        loop {
            let query = RegionsQuery { of, from, size_bytes: regions.size_bytes() };
            let Some(Answer::Page(page)) = self.with_line(peer, Ask::Regions(query)).await else {
                return None;
            };
            for (start, length) in page.runs {
                set.insert_run(start..start + length);
            }
            match page.next {
                Some(next) => from = next,
                None => return Some((page.kept, set)),
            }
        }
    }
}

/// What a replica lacks that is about to join.
struct Lack {
    missing: RegionSet,
    /// What it counts in: the volume may grow meanwhile.
    regions: Regions,
    /// It was made anew.
    is_copy: bool,
}

fn forget(replica: ReplicaId) -> Ask {
    let of = RegionsOf::Missed(replica);
    Ask::Mark(MarkRegions { of, action: MarkAction::Forget, runs: Vec::new(), size_bytes: 0 })
}

fn witness(peers: &[ReplicaId], one: &Reached) -> Witness {
    Witness {
        replica: peers[one.peer],
        report: one.greeting.report.clone(),
        rebuilding: one.greeting.rebuilding,
        lost_cache: one.greeting.lost_cache,
    }
}
