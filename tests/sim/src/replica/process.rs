//! The process: connections, requests in the hands of the disk, pages, and its end.

use super::*;

impl World {
    fn disk_delay(&mut self, replica: usize) -> Micros {
        let replica = &mut self.replicas[replica];
        let base = replica.rng.u64(30..600);
        if replica.slow_by_us > 0 { base + replica.rng.u64(0..replica.slow_by_us) } else { base }
    }

    fn answer(&mut self, conn: ConnId, number: u64, answer: Answer) {
        if self.conns.get(&conn).is_some_and(|conn| conn.replica_open) {
            self.send(conn, false, Message::Answer(number, Box::new(answer)));
        }
    }

    /// A request has arrived at a replica.
    pub fn asked(&mut self, id: ConnId, number: u64, ask: Ask) {
        let Some(conn) = self.conns.get(&id) else { return };
        let (at, boot, place) = (conn.replica, conn.boot, conn.place);
        let replica = &self.replicas[at];
        if !replica.up || replica.boot != boot || !conn.replica_open {
            return self.end_at_replica(id);
        }
        if let Ask::Hello(generation, queue) = ask {
            if let Some(conn) = self.conns.get_mut(&id) {
                conn.place = Some((generation, queue));
            }
            return self.hello(at, id, number);
        }
        if place.is_none() || !replica.conns.contains(&id) {
            return self.end_at_replica(id);
        }
        if replica.failed {
            self.replicas[at].could_not_verify |= matches!(ask, Ask::Verify(_));
            return self.answer(id, number, Answer::Error(Errno::IO));
        }
        self.execute(at, Op { conn: id, number, ask, mark: 0 });
    }

    pub fn end_at_replica(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let at = conn.replica;
        if std::mem::replace(&mut conn.replica_open, false) {
            self.send(id, false, Message::Close);
        }
        self.replicas[at].conns.retain(|other| *other != id);
        self.replicas[at].candidates.retain(|(other, _)| *other != id);
        self.welcome_ready(at);
    }

    /// The engine has closed its end.
    pub fn engine_has_closed(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        conn.replica_open = false;
        let at = conn.replica;
        self.replicas[at].conns.retain(|other| *other != id);
        self.replicas[at].candidates.retain(|(other, _)| *other != id);
        self.welcome_ready(at);
    }

    fn hello(&mut self, at: usize, id: ConnId, number: u64) {
        let Some((generation, queue)) = self.conns.get(&id).and_then(|conn| conn.place) else { return };
        let replica = &mut self.replicas[at];
        if replica.failed {
            return self.end_at_replica(id);
        }
        let fence = replica.durable.views.fence(generation);
        let holder = replica.durable.views.generation();
        match fence {
            Err(Refused::Fenced { .. }) => {
                self.answer(id, number, Answer::Deposed(holder));
                return self.end_at_replica(id);
            }
            Err(_) => return self.end_at_replica(id),
            Ok(Fence::Raised | Fence::Same) => {}
        }
        let older: Vec<ConnId> = self.replicas[at]
            .conns
            .iter()
            .copied()
            .filter(|other| {
                let place = self.conns.get(other).and_then(|conn| conn.place);
                place.is_none_or(|(older, same)| older < generation || (older, same) == (generation, queue))
            })
            .collect();
        for conn in older {
            self.end_at_replica(conn);
        }
        self.replicas[at].candidates.push((id, number));
        self.welcome_ready(at);
    }

    /// Lets in whom no request of an older connection stands in the way of.
    fn welcome_ready(&mut self, at: usize) {
        let sabotaged = self.options.sabotage == Some(crate::Sabotage::ServeBeforeFenced);
        for (id, number) in std::mem::take(&mut self.replicas[at].candidates) {
            let replica = &self.replicas[at];
            let open = |op: &Op| replica.conns.contains(&op.conn);
            let quiet = replica.ops.values().chain(&replica.waiting).all(open) || sabotaged;
            if quiet {
                let greeting = replica.greeting();
                self.replicas[at].conns.push(id);
                self.answer(id, number, Answer::Welcome(Box::new(greeting)));
            } else {
                self.replicas[at].candidates.push((id, number));
            }
        }
    }

    fn execute(&mut self, at: usize, op: Op) {
        if let Some(range) = modified(&op.ask) {
            let sabotaged = self.options.sabotage == Some(crate::Sabotage::NoIntent);
            if !sabotaged && self.replicas[at].keeper.admit(range) == Admit::Wait {
                self.replicas[at].waiting.push_back(op);
                return self.write_pages(at);
            }
        }
        match &op.ask {
            Ask::Propose(..)
            | Ask::Commit(_)
            | Ask::Mark(_)
            | Ask::Layers
            | Ask::CopyBegin { .. }
            | Ask::CopySnapshot(_)
            | Ask::CopyEnd
            | Ask::Expand(_)
            | Ask::Regions(_) => {
                self.control(at, op);
            }
            Ask::Ping => self.answer(op.conn, op.number, Answer::Done),
            _ => self.give_to_disk(at, op),
        }
    }

    fn give_to_disk(&mut self, at: usize, mut op: Op) {
        op.mark = self.replicas[at].files.head.mark();
        let delay = self.disk_delay(at);
        let number = self.fresh();
        self.replicas[at].ops.insert(number, op);
        let boot = self.replicas[at].boot;
        self.after(delay, Occurrence::DiskDone { replica: at, boot, op: number });
    }

    /// The disk has done what a request asked for.
    pub fn disk_done(&mut self, at: usize, boot: u64, number: u64) {
        let lies = self.options.sabotage == Some(crate::Sabotage::LyingFlush);
        let replica = &mut self.replicas[at];
        if replica.boot != boot || !replica.up {
            return;
        }
        let Some(op) = replica.ops.remove(&number) else { return };
        let (mut answer, error) = replica.done(&op, lies);
        if replica.failed {
            // The kernel has done it all the same.
            answer = Answer::Error(Errno::IO);
            replica.could_not_verify |= matches!(op.ask, Ask::Verify(_));
        }
        if let Some(range) = modified(&op.ask) {
            let (engine, boot) = self.conns.get(&op.conn).map_or((0, 0), |conn| (conn.engine, conn.boot));
            self.note(|| {
                format!(
                    "  replica {at} of {boot} has done {} for {engine}: {answer:?}",
                    describe(&op.ask, range)
                )
            });
        }
        if matches!(answer, Answer::Error(Errno::NO_SPACE)) {
            self.count("error: no space");
        }
        self.answer(op.conn, op.number, answer);
        self.go_on_after(at, error);
        self.welcome_ready(at);
    }

    /// Counts an error; where it is one that nothing can be trusted after, nothing is served any more.
    fn go_on_after(&mut self, at: usize, error: Option<Broken>) {
        let Some(error) = error else { return };
        self.count(error.name());
        if matches!(error, Broken::Read | Broken::Verify) || self.replicas[at].failed {
            return;
        }
        let replica = &mut self.replicas[at];
        replica.failed = true;
        let (boot, restarts_after) = (replica.boot, replica.restarts_after.max(1));
        self.give_up_waiting(at, Errno::IO);
        self.after(restarts_after, Occurrence::Mend(Mend::Failed(at, boot)));
    }

    /// Answers everything that waits for a page with an error.
    fn give_up_waiting(&mut self, at: usize, errno: Errno) {
        let replica = &mut self.replicas[at];
        let marks = std::mem::take(&mut replica.marks);
        let waiting = std::mem::take(&mut replica.waiting);
        let marks = marks.into_iter().map(|(conn, number, _)| (conn, number));
        for (conn, number) in marks.chain(waiting.into_iter().map(|op| (op.conn, op.number))) {
            self.answer(conn, number, Answer::Error(errno));
        }
    }

    fn control(&mut self, at: usize, op: Op) {
        let Some((generation, _)) = self.conns.get(&op.conn).and_then(|conn| conn.place) else { return };
        let sabotaged = self.options.sabotage == Some(crate::Sabotage::OldProposals);
        let replica = &mut self.replicas[at];
        let writes_state =
            matches!(op.ask, Ask::Propose(..) | Ask::Commit(_) | Ask::CopyBegin { .. } | Ask::CopyEnd);
        let breaks = writes_state && replica.takes_error(Broken::State);
        if breaks && replica.rng.bool() {
            self.answer(op.conn, op.number, Answer::Error(Errno::IO));
            return self.go_on_after(at, Some(Broken::State));
        }
        let answer = match &op.ask {
            Ask::Propose(view, basis) => match replica.propose(generation, *view, basis) {
                Err(Errno::NOT_PERMITTED) if sabotaged => Ok(()),
                answer => answer,
            },
            Ask::Commit(view) => replica.commit(generation, *view),
            Ask::Mark(mark) => match replica.mark(mark) {
                Ok(None) => Ok(()),
                Ok(Some(ticket)) => {
                    replica.marks.push((op.conn, op.number, ticket));
                    return self.write_pages(at);
                }
                Err(errno) => Err(errno),
            },
            Ask::Layers => {
                let (has, file) = (replica.durable.has_snapshot, Rc::new(replica.files.snapshot.clone()));
                return self.answer(op.conn, op.number, Answer::Layers(has, file));
            }
            Ask::CopyBegin { has_snapshot } => replica.copy_begin(*has_snapshot),
            Ask::CopySnapshot(file) => {
                replica.files.snapshot = (**file).clone();
                replica.remap();
                Ok(())
            }
            Ask::CopyEnd => {
                replica.durable.rebuilding = false;
                Ok(())
            }
            Ask::Expand(size_bytes) => return self.expand_replica(at, &op, *size_bytes),
            Ask::Regions(query) => {
                let page = replica.regions(query);
                return self.answer(op.conn, op.number, Answer::Page(page));
            }
            _ => Ok(()),
        };
        // It is stored, and yet the last step of that has failed.
        let answer = if breaks { Err(Errno::IO) } else { answer };
        self.answer(op.conn, op.number, answer.map_or_else(Answer::Error, |()| Answer::Done));
        self.go_on_after(at, Some(Broken::State).filter(|_| breaks));
    }

    fn write_pages(&mut self, at: usize) {
        if self.replicas[at].failed {
            return;
        }
        let lazy = self.replicas[at].rng.bool();
        loop {
            let number = self.fresh();
            let replica = &mut self.replicas[at];
            let Some(write) = replica.keeper.begin_write(lazy) else { return };
            let (slot, key, page, bytes) = (write.slot, write.key, write.page, write.bytes.to_vec());
            replica.pages.insert(number, (slot, Some(key), page, bytes));
            let boot = replica.boot;
            let delay = self.disk_delay(at);
            self.after(delay, Occurrence::PageDone { replica: at, boot, write: number });
        }
    }

    /// A page of a set of regions is on the disk.
    pub fn page_done(&mut self, at: usize, boot: u64, number: u64) {
        let replica = &mut self.replicas[at];
        if replica.boot != boot || !replica.up {
            return;
        }
        let Some((slot, key, page, bytes)) = replica.pages.remove(&number) else { return };
        let breaks = key.is_some() && replica.takes_error(Broken::Page);
        let has_no_space = key.is_some() && replica.full_for_pages;
        if let Some(key) = key.filter(|_| !has_no_space) {
            let written = if breaks { replica.rng.usize(0..PAGE_BYTES / 512) * 512 } else { bytes.len() };
            replica.write_page(key, page, &bytes[..written]);
        }
        replica.keeper.end_write(slot, !breaks && !has_no_space);
        if breaks {
            return self.go_on_after(at, Some(Broken::Page));
        }
        if has_no_space {
            self.count("error: no space for a page");
            return self.give_up_waiting(at, Errno::NO_SPACE);
        }
        self.go_on_waiting(at);
    }

    /// Looks again at what waits for pages.
    fn go_on_waiting(&mut self, at: usize) {
        let replica = &mut self.replicas[at];
        let (done, rest): (Vec<_>, Vec<_>) = std::mem::take(&mut replica.marks)
            .into_iter()
            .partition(|(.., ticket)| replica.keeper.is_durable(ticket));
        replica.marks = rest;
        let waiting = std::mem::take(&mut replica.waiting);
        for (conn, number, _) in done {
            self.answer(conn, number, Answer::Done);
        }
        for op in waiting {
            self.execute(at, op);
        }
        self.write_pages(at);
    }

    /// The volume grows here: the directory first, then the files of the sets, one by one. The process may die in between.
    fn expand_replica(&mut self, at: usize, op: &Op, size_bytes: u64) {
        let is_calm = self.calm;
        let replica = &mut self.replicas[at];
        let is_cut_off = !is_calm && replica.rng.u8(..) < 20;
        let left = replica.rng.usize(0..3);
        if size_bytes > replica.size_bytes && replica.full_for_pages {
            return self.answer(op.conn, op.number, Answer::Error(Errno::NO_SPACE));
        }
        if size_bytes > replica.size_bytes {
            replica.size_bytes = size_bytes;
            let grown = replica.keeper.grown(Regions::of(size_bytes));
            let files: Vec<_> = grown.files().collect();
            let done = if is_cut_off { left.min(files.len()) } else { files.len() };
            replica.durable.sets.extend(files.into_iter().take(done));
            for (_, key, ..) in replica.pages.values_mut() {
                *key = None;
            }
            if is_cut_off {
                self.count("expansions cut off");
                let mut rng = self.rng.fork();
                self.kill_replica(at, false, 0, &mut rng);
                return;
            }
            replica.keeper.grow(grown);
            replica.map.grow(size_bytes);
            self.note(|| format!("replica {at} has {size_bytes} bytes now"));
        }
        let outcome = match size_bytes < self.replicas[at].size_bytes {
            true => Answer::Error(Errno::INVALID),
            false => Answer::Done,
        };
        self.answer(op.conn, op.number, outcome);
        self.go_on_waiting(at);
    }

    /// The process is killed; with `power`, its host is off. It is back after `for_us`; 0: some time. False where there is
    /// none.
    pub fn kill_replica(&mut self, at: usize, power: bool, for_us: Micros, rng: &mut Rng) -> bool {
        if !self.replicas[at].up {
            return false;
        }
        self.note(|| format!("replica {at} is killed{}", if power { ", its host has no power" } else { "" }));
        let replica = &mut self.replicas[at];
        replica.up = false;
        replica.paused = false;
        replica.backlog.clear();
        // What the kernel has already been given may happen, or a part of it.
        for op in std::mem::take(&mut replica.ops).into_values() {
            for (block, content) in replica.changes(&op.ask) {
                if rng.bool() {
                    replica.put(block, content);
                }
            }
        }
        for (_, key, page, bytes) in std::mem::take(&mut replica.pages).into_values() {
            let Some(key) = key else { continue };
            match rng.u8(0..3) {
                0 => {}
                1 => replica.write_page(key, page, &bytes),
                _ => replica.write_page(key, page, &bytes[..rng.usize(0..PAGE_BYTES / 512) * 512]),
            }
        }
        replica.waiting.clear();
        replica.marks.clear();
        replica.candidates.clear();
        if power {
            replica.files.head.lose_power(rng);
            replica.durable.power_was_lost = true;
        }
        for conn in std::mem::take(&mut replica.conns) {
            if rng.bool() {
                self.lose_suffix(conn, rng);
            }
            self.end_at_replica(conn);
        }
        if !self.replicas[at].gone {
            let delay = if for_us > 0 { for_us } else { rng.u64(5_000..2_500_000) };
            let boot = self.fresh();
            self.after(delay, Occurrence::StartReplica { replica: at, boot });
        }
        true
    }

    /// A replica process starts.
    pub fn start_replica(&mut self, at: usize, boot: u64) {
        if !self.replicas[at].up && !self.replicas[at].gone {
            self.note(|| format!("replica {at} starts"));
            self.replicas[at].restart(boot);
        }
    }

    /// Everything loses power at once.
    pub fn cut_power_of_all(&mut self, rng: &mut Rng) {
        for host in 0..self.hosts.len() {
            self.kill_engine(host, 0, rng);
        }
        for at in 0..self.replicas.len() {
            self.kill_replica(at, true, 0, rng);
        }
        for host in &mut self.hosts {
            (host.was_live, host.lost_writes) = (false, false);
        }
        // The guest was on one of the hosts.
        let now = self.now;
        self.guest_moves();
        self.settle_forgotten();
        self.checker.power_lost(now);
    }
}
