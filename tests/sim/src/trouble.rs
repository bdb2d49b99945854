//! Trouble, and its end.

use fastrand::Rng;
use shorthorn_replica_core::RotLimits;
use shorthorn_types::limits::BLOCK_BYTES;

use crate::faults::Fault;
use crate::net::{Conn, ConnId, Cut, CutScope};
use crate::occurrence::{Mend, Occurrence};
use crate::replica::Replica;
use crate::replica_process::Rotting;
use crate::script::Strike;
use crate::simulation::{Controller, Simulation};

/// The volume is not made larger than that.
const EXPANDED_BYTES_MAX: u64 = 4 << 20;
/// The maximum time for which the engine that hands over clears.
const CLEAR_LIMIT_US: u64 = 100_000;

impl Simulation {
    /// Begins a fault.
    pub fn trouble(&mut self, strike: Strike) {
        if self.calm {
            return;
        }
        let Strike { salt, fault, .. } = strike;
        self.trace(|| format!("fault: {fault:?}"));
        if self.strike(&fault, &mut Rng::with_seed(salt)) {
            self.count_fault(&fault);
        }
    }

    /// Returns true if there was anything to strike.
    fn strike(&mut self, fault: &Fault, rng: &mut Rng) -> bool {
        match *fault {
            Fault::KillReplica { victim, power, for_us } => {
                let victim = self.victim(victim);
                self.kill_replica(victim, power, for_us, rng)
            }
            Fault::KillEngine { lingers_us, for_us } => self.kill_attached(lingers_us, for_us, rng),
            Fault::HandOver { for_us } => self.hand_over(for_us),
            Fault::AttachElsewhere => self.attach_elsewhere(rng),
            Fault::StopController { for_us } => {
                self.controller.up = false;
                self.after(for_us, Occurrence::Mend(Mend::Controller));
                true
            }
            Fault::CutPowerOfAll => {
                self.cut_power_of_all(rng);
                true
            }
            Fault::PauseEngine { tick_first, for_us } => self.pause_engine(tick_first, for_us),
            Fault::Isolate { keeps, tick_first, for_us, longer_us } => {
                self.isolate(keeps, tick_first, (for_us, longer_us), rng)
            }
            Fault::ClockJump { host, by_ms } => {
                self.hosts[host].clock_ms += by_ms;
                self.hosts[host].engine.is_some()
            }
            Fault::Replace { victim } => self.replace_replica(victim),
            Fault::Destroy { victim, replacement } => self.destroy_replica(victim, replacement, rng),
            Fault::Return { victim, for_us } => self.return_replica(victim, for_us),
            Fault::Expand { blocks } => self.expand_volume(blocks),
            Fault::LoseState { host } => self.lose_state(host),
            Fault::SaveController => {
                self.saved_controller = Some(self.controller.clone());
                true
            }
            Fault::RestoreController => self.restore_controller(rng),
            _ => self.strike_network(fault, rng) || self.strike_disk(fault, rng),
        }
    }

    fn strike_network(&mut self, fault: &Fault, rng: &mut Rng) -> bool {
        match *fault {
            Fault::Partition { host, victim, to_replica, to_engine, for_us } => {
                let (id, replica) = (self.fresh(), self.victim(victim));
                self.cuts.push(Cut { id, scope: CutScope::Pair(host, replica), to_replica, to_engine });
                self.after(for_us, Occurrence::Mend(Mend::Cut(id)));
                true
            }
            Fault::HalfOpen { pick, for_us } => {
                let Some(conn) = self.pick_connection(pick) else { return false };
                self.half_open(conn);
                self.after(for_us, Occurrence::Mend(Mend::HalfOpen(conn)));
                true
            }
            Fault::BreakConnection { pick } => {
                let Some(conn) = self.pick_connection(pick) else { return false };
                self.break_connection(conn, rng);
                true
            }
            _ => false,
        }
    }

    fn strike_disk(&mut self, fault: &Fault, rng: &mut Rng) -> bool {
        match *fault {
            Fault::FillDisk { victim, partial, pages, for_us } => {
                let victim = self.victim(victim);
                let replica = &mut self.replicas[victim];
                (replica.full, replica.is_partial, replica.full_for_pages) = (true, partial, pages);
                self.after(for_us, Occurrence::Mend(Mend::Disk(victim)));
                true
            }
            Fault::BreakDisk { victim, what, times, partial, for_us } => {
                let victim = self.victim(victim);
                let replica = &mut self.replicas[victim];
                replica.broken.insert(what, times);
                (replica.is_partial, replica.restarts_after) = (partial, for_us);
                true
            }
            Fault::Lie { victim, at, for_us } => {
                let (id, victim) = (self.fresh(), self.victim(victim));
                self.replicas[victim].lies.insert(at, id);
                self.after(for_us, Occurrence::Mend(Mend::Lie(victim, at, id)));
                true
            }
            Fault::SlowDisk { victim, by_us, for_us } => {
                let victim = self.victim(victim);
                self.replicas[victim].slow_by_us = by_us;
                self.after(for_us, Occurrence::Mend(Mend::Speed(victim)));
                true
            }
            Fault::PauseReplica { victim, for_us } => self.pause_replica(victim, for_us),
            Fault::RotSets { victim, for_us } => {
                let victim = self.victim(victim);
                // Without the stamps of others, or its own, a restored disk is like any other.
                let is_any_restored = self.replicas.iter().any(|replica| replica.is_rolled_back);
                let killed = !is_any_restored && self.kill_replica(victim, false, for_us, rng);
                killed && self.replicas[victim].rot_sets(rng)
            }
            Fault::RotBlocks { victim, blocks, vanish, anywhere } => {
                let victim = self.victim(victim);
                self.rot_blocks(victim, blocks, Rotting { vanish, anywhere }, rng)
            }
            Fault::OtherProgram { victim, for_us } => {
                let victim = self.victim(victim);
                self.open_by_other(victim, for_us, rng)
            }
            Fault::ScrubSnapshot { victim, for_us } => {
                let victim = self.victim(victim);
                self.scrub_snapshot(victim, for_us)
            }
            Fault::Scrub { repair, bytes_per_s, for_us } => self.scrub_for(repair, bytes_per_s, for_us),
            Fault::SaveDisk { victim } => {
                let victim = self.victim(victim);
                self.replicas[victim].save_disk();
                true
            }
            Fault::RestoreDisk { victim, for_us } => self.restore_disk(victim, for_us, rng),
            _ => false,
        }
    }

    fn pause_replica(&mut self, victim: usize, for_us: u64) -> bool {
        let victim = self.victim(victim);
        let replica = &mut self.replicas[victim];
        if !replica.up || replica.paused {
            return false;
        }
        replica.paused = true;
        let boot = replica.boot;
        self.after(for_us, Occurrence::Mend(Mend::Replica(victim, boot)));
        true
    }

    fn restore_disk(&mut self, victim: usize, for_us: u64, rng: &mut Rng) -> bool {
        let victim = self.victim(victim);
        // Two of three would agree that no region is missing, and one that does not know its stamp says
        // nothing.
        let tells = |replica: &Replica| !replica.is_rolled_back && replica.judgement().stamp.is_some();
        let is_known = self.replicas.iter().all(tells) && self.replicas[victim].has_saved_disk();
        let is_restored = is_known && self.kill_replica(victim, true, for_us, rng);
        if is_restored {
            self.replicas[victim].restore_disk(rng);
        }
        is_restored
    }

    /// Returns the replica that a number means.
    pub fn victim(&self, number: usize) -> usize {
        number % self.replicas.len()
    }

    fn pick_connection(&self, pick: u64) -> Option<ConnId> {
        let is_open = |conn: &&Conn| conn.engine_open && conn.replica_open && !conn.is_dead;
        let open: Vec<ConnId> =
            self.conns.iter().filter(|(_, conn)| is_open(conn)).map(|(id, _)| *id).collect();
        let at = usize::try_from(pick).unwrap_or(0).checked_rem(open.len())?;
        Some(open[at])
    }

    /// Records the expansion in the controller before the first engine learns of it.
    fn expand_volume(&mut self, blocks: u64) -> bool {
        let may = self.controller.up && self.controller.size_bytes < EXPANDED_BYTES_MAX;
        if may {
            self.controller.size_bytes += BLOCK_BYTES * blocks;
        }
        may
    }

    fn hand_over(&mut self, for_us: u64) -> bool {
        let Some(engine) = self.hosts[self.controller.host].engine else { return false };
        let Some(process) = self.engines.get_mut(&engine).filter(|process| !process.paused) else {
            return false;
        };
        process.restarts_after = for_us;
        self.after(CLEAR_LIMIT_US, Occurrence::EndEngine { engine });
        self.apply(engine, shorthorn_core::Event::ClearAll);
        true
    }

    pub(super) fn pause_engine(&mut self, tick_first: bool, for_us: u64) -> bool {
        let Some(engine) = self.hosts[self.controller.host].engine else { return false };
        let Some(process) = self.engines.get_mut(&engine).filter(|process| !process.paused) else {
            return false;
        };
        process.paused = true;
        self.after(for_us, Occurrence::Mend(Mend::Engine(engine, tick_first)));
        true
    }

    fn lose_state(&mut self, host: usize) -> bool {
        let has_state = self.hosts[host].generation != shorthorn_types::Generation::NEVER;
        self.hosts[host].generation = shorthorn_types::Generation::NEVER;
        self.hosts[host].granted = None;
        has_state
    }

    /// Restores the controller from the copy. Later records are lost, except for the size, which the replicas
    /// show.
    fn restore_controller(&mut self, rng: &mut Rng) -> bool {
        let Some(saved) = self.saved_controller.clone() else { return false };
        let before = self.controller.attach;
        // A replica that was opened since shows it. A store whose loss is not visible is not restored.
        let shown = self.replicas.iter().filter(|replica| replica.up && !replica.gone);
        let shown = shown.map(Replica::attach).max().unwrap_or_default();
        if shown <= saved.attach {
            return false;
        }
        self.trace(|| format!("the controller knows attachment {} of {before} again", saved.attach));
        // Numbers are also drawn above those of engines that agents report.
        let used = self.hosts.iter().map(|host| host.generation.attach).fold(shown, u64::max);
        let arbiter = saved.arbiter.stale(used + 1);
        let size_bytes = self.controller.size_bytes;
        self.controller = Controller { up: true, size_bytes, attach: used, arbiter, ..saved };
        self.attach_elsewhere(rng)
    }

    pub fn mend(&mut self, mend: Mend) {
        match mend {
            Mend::Cut(id) => {
                self.cuts.retain(|cut| cut.id != id);
                self.release_held();
            }
            Mend::HalfOpen(conn) => self.end_half_open(conn),
            Mend::Controller => self.controller.up = true,
            Mend::Disk(replica) => self.replicas[replica].has_space(),
            Mend::Speed(replica) => self.replicas[replica].slow_by_us = 0,
            Mend::Lie(replica, at, id) => {
                let lies = &mut self.replicas[replica].lies;
                // Lies that continue when all else is calm have an end of their own.
                if !self.calm && lies.get(&at) == Some(&id) {
                    lies.remove(&at);
                }
            }
            Mend::Scrub(engine, number) => self.stop_scrub(engine, number),
            Mend::Failed(replica, boot) => self.end_failed(replica, boot),
            Mend::Refusing(replica, boot) => self.restart_refusing(replica, boot),
            Mend::Engine(engine, tick_first) => self.resume_engine(engine, tick_first),
            Mend::Replica(replica, boot) => self.resume_replica(replica, boot),
        }
    }

    fn resume_engine(&mut self, engine: u64, tick_first: bool) {
        let Some(process) = self.engines.get_mut(&engine).filter(|process| process.paused) else { return };
        process.paused = false;
        let mut backlog = std::mem::take(&mut process.backlog);
        // A stable sort: everything else stays in order.
        backlog.sort_by_key(|what| matches!(what, Occurrence::Tick { .. }) != tick_first);
        self.wake(engine);
        for what in backlog {
            self.happen(what);
        }
    }

    fn resume_replica(&mut self, at: usize, boot: u64) {
        let replica = &mut self.replicas[at];
        if !replica.paused || replica.boot != boot {
            return;
        }
        replica.paused = false;
        for what in std::mem::take(&mut replica.backlog) {
            self.happen(what);
        }
    }

    /// Ends the trouble: all faults are repaired.
    pub fn calm_down(&mut self) {
        self.calm = true;
        self.slow_network = false;
        self.rot_places = 0;
        self.guest.budget = self.guest.budget.min(500);
        self.cuts.clear();
        self.release_held();
        self.controller.up = true;
        self.trace(|| "calm".to_owned());
        let dead: Vec<ConnId> =
            self.conns.iter().filter(|(_, conn)| conn.is_dead).map(|(id, _)| *id).collect();
        dead.into_iter().for_each(|conn| self.end_half_open(conn));
        let paused: Vec<u64> = self.engines.keys().copied().collect();
        paused.into_iter().for_each(|engine| self.resume_engine(engine, false));
        for at in 0..self.replicas.len() {
            self.resume_replica(at, self.replicas[at].boot);
            let replica = &mut self.replicas[at];
            replica.has_space();
            replica.slow_by_us = 0;
            replica.broken.clear();
            replica.known_rot.set_limits(RotLimits::default());
            // A replica that has seen an error of its disk serves nothing until it is started again. If that
            // is not recorded, its host is.
            if replica.failed {
                let power = !replica.may_end();
                let mut rng = self.rng.fork();
                self.kill_replica(at, power, 1000, &mut rng);
            }
        }
        if self.has_liar_at_proposals() {
            // The volume has to be opened while it lies.
            let mut rng = self.rng.fork();
            self.kill_attached(0, 0, &mut rng);
        }
    }
}
