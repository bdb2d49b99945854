//! What an engine process does beside serving: open the volume, then bring replicas up. The same steps as in the engine
//! crate, over simulated connections.

use std::cell::RefCell;
use std::future::Future;
use std::rc::Rc;

use shorthorn_core::{CopyLimits, CoreConfig, EngineCore, Event, PeerConfig, PeerState, ScrubConfig};
use shorthorn_types::{
    MarkAction, MarkRegions, Members, RUNS_PER_MARK_MAX, RegionSet, Regions, RegionsOf, ReplicaId, View,
    ViewId,
};
use shorthorn_views::{CannotStart, Change, Combined, Kept, NoPlan, Progress, Witness, combine, plan};
use shorthorn_wire::{CONTROL_QUEUE, RegionsQuery};

use crate::engine::{COPY_SLOTS, DEPTH, ID_CALL, REPLICA_TIMEOUT_MS, index};
use crate::net::{Answer, Ask, ConnId, Greeting, Message};
use crate::tasks::until;
use crate::world::{Occurrence, World};

/// The world, for tasks.
pub type Sim = Rc<RefCell<World>>;

const CALL_TIMEOUT_US: u64 = 1_000_000;
const RETRY_US: u64 = 100_000;
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
    process.courier().await;
}

impl Process {
    async fn sleep(&self, us: u64) {
        let end = {
            let mut world = self.sim.borrow_mut();
            world.after(us, Occurrence::Wake);
            world.now + us
        };
        until(|| (self.sim.borrow().now >= end).then_some(())).await;
    }

    /// Asks a replica; none where the connection breaks or nothing comes in time.
    async fn call(&self, conn: ConnId, ask: Ask) -> Option<Answer> {
        let (key, end) = {
            let mut world = self.sim.borrow_mut();
            let number = ID_CALL | world.fresh();
            world.calls.insert((conn, number), None);
            world.send(conn, true, Message::Ask(number, ask));
            world.after(CALL_TIMEOUT_US, Occurrence::Wake);
            ((conn, number), world.now + CALL_TIMEOUT_US)
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
                Some((conn, greeting))
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
        peers.map(|peer| (peer, process.peers[peer])).collect()
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
            for (peer, replica) in left {
                let Some((conn, _)) = self.greet(replica, CONTROL_QUEUE).await else { return };
                self.close(conn);
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
            world.hosts[host].generation.restart += 1;
            let generation = world.hosts[host].generation;
            if let Some(engine) = world.engines.get_mut(&self.engine) {
                engine.generation = generation;
                engine.wants = None;
                engine.was_granted = None;
                engine.links.fill(None);
            }
        }
    }

    /// One attempt to open the volume.
    async fn open(&self) -> bool {
        let peers: Vec<ReplicaId> = match self.sim.borrow().engines.get(&self.engine) {
            Some(engine) => engine.peers.clone(),
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
            (engine.generation, world.hosts[engine.host].granted, patient)
        };
        let witnesses: Vec<Witness> = reached.iter().map(|one| witness(peers, one)).collect();
        let plan = match plan(&witnesses, granted) {
            Ok(plan) => plan,
            Err(NoPlan { cannot, .. }) => {
                if let CannotStart::NoQuorum { missing, .. } | CannotStart::NoMember(missing) = &cannot {
                    self.sim.borrow_mut().needed = *missing;
                }
                self.sim.borrow_mut().note(|| format!("engine {} cannot start: {cannot}", self.engine));
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
        if !self.bring_through(peers, &asked, Change::new(plan.basis.honoured.clone(), view)).await {
            return false;
        }
        let members: Vec<&Reached> = reached.iter().filter(|one| chosen.contains(peers[one.peer])).collect();
        let mut kept = Vec::new();
        for one in &members {
            let Some(sets) = self.kept(one.conn, peers, &chosen, regions.count()).await else { return false };
            kept.push(sets);
        }
        let Combined { dirty, missed, is_complete } = combine(&kept, peers.len(), regions.count());
        for one in reached.iter().filter(|one| !chosen.contains(peers[one.peer])) {
            self.close(one.conn);
        }
        self.note_losses(&members);
        let config = CoreConfig {
            queues: 1,
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
            refuses_requests: false,
        };
        self.serve(config, &members, is_complete);
        true
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

    /// Where every member has lost power since a write, that write may be gone.
    fn note_losses(&self, members: &[&Reached]) {
        let mut world = self.sim.borrow_mut();
        if members.iter().all(|one| one.greeting.lost_cache) {
            let now = world.now;
            world.count("starts from lost caches");
            world.checker.power_lost(now);
        }
    }

    fn serve(&self, config: CoreConfig, members: &[&Reached], known: Vec<bool>) {
        let mut world = self.sim.borrow_mut();
        let (now_ms, engine) = (world.now / 1000, self.engine);
        let (view, dirty) = (config.view, config.dirty.len());
        world.note(|| format!("engine {engine} serves {view}; {dirty} regions are dirty"));
        let mut core = EngineCore::new(&config);
        let unknown = (0..).zip(&known).filter(|(_, known)| !**known);
        unknown.for_each(|(peer, _)| core.distrust(peer));
        let Some(process) = world.engines.get_mut(&engine) else { return };
        process.core = Some(core);
        process.known = known;
        for one in members {
            process.links[one.peer] = Some(one.conn);
        }
        process.wants = None;
        let (attach, host) = (process.generation.attach, process.host);
        world.count("opened");
        if attach == world.controller.attach && host == world.controller.host {
            world.settle_forgotten();
            world.apply(engine, Event::Tick { now_ms });
            world.device_is_served(engine);
        } else {
            world.apply(engine, Event::Tick { now_ms });
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
    async fn bring_through(&self, peers: &[ReplicaId], reached: &[&Reached], mut change: Change) -> bool {
        let everybody = Members::new(reached.iter().map(|one| peers[one.peer])).unwrap_or_default();
        if change.would_need_grant(&everybody) {
            if !self.await_grant(&change, everybody).await {
                return false;
            }
            change.granted();
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
            world.send(one.conn, true, Message::Ask(number, Ask::Commit(change.target)));
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
            world.after(3 * CALL_TIMEOUT_US, Occurrence::Wake);
            world.now + 3 * CALL_TIMEOUT_US
        };
        until(|| {
            let world = self.sim.borrow();
            let engine = world.engines.get(&self.engine)?;
            let granted = engine.was_granted.is_some_and(|view| view == change.target);
            (granted || world.now >= end).then_some(granted)
        })
        .await
    }

    /// Brings replicas up that are away.
    async fn courier(&self) {
        loop {
            self.sleep(RETRY_US).await;
            self.follow_replicas();
            self.follow_size().await;
            let peers = match self.sim.borrow().engines.get(&self.engine) {
                Some(engine) => engine.peers.clone(),
                None => return,
            };
            for (peer, replica) in peers.into_iter().enumerate() {
                if self.is_away(peer) {
                    self.bring_up(peer, replica).await;
                }
            }
            let mut world = self.sim.borrow_mut();
            if world.rng.u8(..) < 3 {
                let scrub = ScrubConfig { bytes_per_s: 0, repair: true };
                world.apply(self.engine, Event::Scrub(Some(scrub)));
            }
        }
    }

    /// The controller may have given the volume other replicas.
    fn follow_replicas(&self) {
        let mut world = self.sim.borrow_mut();
        let wanted = world.guest.replicas.clone();
        let Some(process) = world.engines.get_mut(&self.engine) else { return };
        for replica in &wanted {
            if !process.peers.contains(replica) && process.peers.len() < 8 {
                process.peers.push(*replica);
                process.links.push(None);
                process.control.push(None);
                process.known.push(false);
                process.tracked.push(false);
            }
        }
        let gone: Vec<usize> = (0..process.peers.len())
            .filter(|peer| process.tracked[*peer] && !wanted.contains(&process.peers[*peer]))
            .collect();
        for peer in gone {
            let state = world.engines.get(&self.engine).and_then(|process| process.core.as_ref());
            if state.is_some_and(|core| core.membership().state(index(peer)) == PeerState::Failed) {
                world.apply(self.engine, Event::Forget { peer: index(peer) });
                if let Some(process) = world.engines.get_mut(&self.engine) {
                    process.tracked[peer] = false;
                    process.known[peer] = false;
                }
            }
        }
    }

    fn is_away(&self, peer: usize) -> bool {
        let world = self.sim.borrow();
        let Some(process) = world.engines.get(&self.engine) else { return false };
        let Some(core) = &process.core else { return false };
        let wanted = world.guest.replicas.contains(&process.peers[peer]);
        wanted && process.links[peer].is_none() && core.membership().state(index(peer)) == PeerState::Failed
    }

    async fn bring_up(&self, peer: usize, replica: ReplicaId) {
        let Some((conn, greeting)) = self.greet(replica, CONTROL_QUEUE).await else { return };
        if self.bring_up_over(conn, peer, replica, &greeting).await.is_none() {
            self.sim.borrow_mut().count("joins given up");
        }
        self.close(conn);
    }

    /// See the design: what the replica misses is counted from the start, then found out, then copied.
    async fn bring_up_over(
        &self,
        conn: ConnId,
        peer: usize,
        replica: ReplicaId,
        greeting: &Greeting,
    ) -> Option<()> {
        self.track(peer);
        let pending = self.sim.borrow().engines.get(&self.engine)?.pending.clone();
        if let Some((view, honoured)) = pending {
            // Who stores a view counts for the quorum of those that it replaces, member of it or not.
            if self.done(conn, Ask::Propose(view, honoured)).await {
                self.sim
                    .borrow_mut()
                    .apply(self.engine, Event::ViewStored { peer: index(peer), view: view.id });
            }
            return None;
        }
        let (count, known) = {
            let world = self.sim.borrow();
            let process = world.engines.get(&self.engine)?;
            (Regions::of(process.size_bytes).count(), process.known[peer])
        };
        let size_bytes = self.size_bytes();
        let missing = if known && !greeting.rebuilding {
            self.regions(conn, RegionsOf::Intent, count).await?.1
        } else {
            self.make_fresh(conn, replica, count).await?
        };
        for (other, known) in self.absent_but(replica) {
            let action = if known { MarkAction::Add } else { MarkAction::Forget };
            let of = RegionsOf::Missed(other);
            let mark = MarkRegions { of, action, runs: Vec::new(), size_bytes: 0 };
            self.done(conn, Ask::Mark(mark)).await.then_some(())?;
        }
        let (link, _) = self.greet(replica, 0).await?;
        if self.size_bytes() != size_bytes {
            self.close(link);
            return None;
        }
        let mut world = self.sim.borrow_mut();
        let process = world.engines.get_mut(&self.engine)?;
        process.links[peer] = Some(link);
        let regions = process.core.as_ref()?.regions();
        let missing = missing.converted(Regions::of(size_bytes), regions);
        world.note(|| format!("engine {}: {replica} joins, {} regions", self.engine, missing.len()));
        world.apply(self.engine, Event::Join { peer: index(peer), missing: Box::new(missing) });
        world.engines.get_mut(&self.engine)?.known[peer] = true;
        Some(())
    }

    fn track(&self, peer: usize) {
        let mut world = self.sim.borrow_mut();
        let Some(config) = world.peer_config(self.engine, peer) else { return };
        let Some(process) = world.engines.get_mut(&self.engine) else { return };
        if !std::mem::replace(&mut process.tracked[peer], true) {
            world.apply(self.engine, Event::Track { peer: index(peer), config });
        }
    }

    /// The others that are away, and whether all is known that they miss.
    fn absent_but(&self, replica: ReplicaId) -> Vec<(ReplicaId, bool)> {
        let world = self.sim.borrow();
        let Some(process) = world.engines.get(&self.engine) else { return Vec::new() };
        let Some(core) = &process.core else { return Vec::new() };
        let members: Members = core.membership().view().members;
        let others = (0..process.peers.len()).filter(|at| process.tracked[*at]);
        let others = others.map(|at| (process.peers[at], process.known[at]));
        others.filter(|(id, _)| *id != replica && !members.contains(*id)).collect()
    }

    /// Makes an empty copy of the replica, and finds out what there is to copy.
    async fn make_fresh(&self, conn: ConnId, replica: ReplicaId, count: u32) -> Option<RegionSet> {
        self.done(conn, Ask::CopyBegin).await.then_some(())?;
        let members: Vec<(usize, ReplicaId)> = {
            let world = self.sim.borrow();
            let process = world.engines.get(&self.engine)?;
            let view = process.core.as_ref()?.membership().view();
            let in_view = process.peers.iter().enumerate().filter(|(_, id)| view.members.contains(**id));
            in_view.map(|(at, id)| (at, *id)).collect()
        };
        let mut conns = Vec::new();
        for (at, id) in &members {
            conns.push((*at, self.greet(*id, CONTROL_QUEUE).await?.0));
        }
        let result = self.count_missing(&conns, replica, count).await;
        for (_, conn) in conns {
            self.close(conn);
        }
        let missing = result?;
        self.done(conn, Ask::CopyEnd).await.then_some(())?;
        let mut world = self.sim.borrow_mut();
        world.count("full copies");
        Some(missing)
    }

    async fn count_missing(
        &self,
        members: &[(usize, ConnId)],
        replica: ReplicaId,
        count: u32,
    ) -> Option<RegionSet> {
        let of = RegionsOf::Missed(replica);
        for (_, member) in members {
            let begin = MarkRegions { of, action: MarkAction::Add, runs: Vec::new(), size_bytes: 0 };
            self.done(*member, Ask::Mark(begin)).await.then_some(())?;
        }
        let (_, source) = members.first()?;
        let (_, missing) = self.regions(*source, RegionsOf::Allocated, count).await?;
        let runs: Vec<(u32, u32)> = missing.runs(0).map(|run| (run.start, run.end - run.start)).collect();
        for (_, member) in members {
            for runs in runs.chunks(RUNS_PER_MARK_MAX) {
                let add = MarkRegions { of, action: MarkAction::Add, runs: runs.to_vec(), size_bytes: 0 };
                self.done(*member, Ask::Mark(add)).await.then_some(())?;
            }
        }
        Some(missing)
    }
}

fn witness(peers: &[ReplicaId], one: &Reached) -> Witness {
    Witness {
        replica: peers[one.peer],
        report: one.greeting.report.clone(),
        rebuilding: one.greeting.rebuilding,
        lost_cache: one.greeting.lost_cache,
    }
}
