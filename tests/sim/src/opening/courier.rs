//! The couriers: each brings one replica back, in the steps of the real ones.

use super::*;

/// How often a copy is sent a stamp, if the core sends newer ones meanwhile.
const STAMP_TRIES: u32 = 5;

impl Process {
    /// The courier of a replica: brings it back whenever it is away.
    pub(super) async fn courier(&self, peer: usize) {
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
        let remembers = remembers(&greeting.report, last_view) && !self.was_rolled_back(me, &greeting)?;
        if remembers {
            self.bring_views(me, &greeting).await?;
        }
        if self.pending().is_some() {
            return None;
        }
        let lack = self.find_lack(me, replica, &greeting, remembers).await?;
        self.keep_accounts(me, &greeting, lack.is_copy).await?;
        let size_bytes = match self.connect_queues(me, replica).await {
            Some(size_bytes) => size_bytes,
            None => {
                self.sim.borrow_mut().close_links(self.engine, index(me));
                return None;
            }
        };
        self.hand_to_core(me, replica, lack, size_bytes).await
    }

    /// Whether its disk has not kept what it had stored before it left.
    fn was_rolled_back(&self, me: usize, greeting: &Greeting) -> Option<bool> {
        let mut world = self.sim.borrow_mut();
        let is_sabotaged = world.options.sabotage == Some(Sabotage::NoStamps);
        let process = world.engines.get(&self.engine)?;
        let sent = process.core.as_ref()?.stamp_of(index(me));
        let is_complete = process.peers[me].is_complete && !greeting.rebuilding;
        let rolled_back = is_complete && !is_current(greeting.stamp, sent) && !is_sabotaged;
        if rolled_back {
            world.count("rolled back replicas that came back");
        }
        Some(rolled_back)
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
    async fn keep_accounts(&self, me: usize, greeting: &Greeting, is_copy: bool) -> Option<()> {
        let regions = Regions::of(self.size_bytes());
        let nothing = RegionSet::empty(regions.count());
        for (other, is_complete) in self.others(me, greeting)? {
            if is_copy || !is_complete {
                self.told(me, forget(other)).await?;
            }
            if is_complete {
                self.keep_missed(&[me], other, &nothing, regions).await?;
            }
        }
        Some(())
    }

    /// The replicas outside the view that `me` may keep an account of, and whether all is known that they miss.
    fn others(&self, me: usize, greeting: &Greeting) -> Option<Vec<(ReplicaId, bool)>> {
        let view = self.view()?;
        let world = self.sim.borrow();
        let process = world.engines.get(&self.engine)?;
        let views = greeting.report.views();
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
            let is_copy = lack.is_copy;
            world.note(|| {
                let runs: Vec<_> = missing.runs(0).collect();
                format!("engine {}: {replica} joins, copy: {is_copy}, regions: {runs:?}", self.engine)
            });
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
        let ended = self.end_copy(&count_now, me, replica).await;
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

    async fn end_copy(&self, count_now: &[usize], me: usize, replica: ReplicaId) -> Option<()> {
        self.complete_accounts(count_now, me, replica).await?;
        let newest = || Some(self.sim.borrow().engines.get(&self.engine)?.core.as_ref()?.stamp());
        for _ in 0..STAMP_TRIES {
            let stamp = newest()?;
            let (of, action) = (RegionsOf::Intent, MarkAction::Stamp);
            let change = MarkRegions { of, action, runs: Vec::new(), stamp, size_bytes: 0 };
            self.told(me, Ask::Mark(change)).await?;
            if newest()? == stamp {
                return self.told(me, Ask::CopyEnd).await;
            }
        }
        None
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
    pub(super) fn members(&self) -> Vec<usize> {
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
        let stamp = {
            let world = self.sim.borrow();
            let process = world.engines.get(&self.engine)?;
            let stamp = |peer: usize| Some(process.core.as_ref()?.stamp_of(index(peer)));
            process.index_of(replica).and_then(stamp).unwrap_or(0)
        };
        for keeper in keepers {
            for runs in &pages {
                let (of, size_bytes) = (RegionsOf::Missed(replica), regions.size_bytes());
                let change =
                    MarkRegions { of, action: MarkAction::Add, runs: runs.clone(), stamp, size_bytes };
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
    pub(super) async fn with_line(&self, peer: usize, ask: Ask) -> Option<Answer> {
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

pub(super) fn forget(replica: ReplicaId) -> Ask {
    let of = RegionsOf::Missed(replica);
    Ask::Mark(MarkRegions { of, action: MarkAction::Forget, runs: Vec::new(), stamp: 0, size_bytes: 0 })
}
