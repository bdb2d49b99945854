//! Programs that read the device of an engine which was isolated, while another engine serves the volume.
//!
//! The engine is paused, and reaches one replica at most afterwards. A member that the newer engine does
//! without may answer it. A read of the time after the pause must not show older data than the newer engine
//! has acknowledged by then.

use fastrand::Rng;
use shorthorn_checker::Micros;
use shorthorn_core::{Event, Operation, Request, SlotId};
use shorthorn_types::{ByteRange, Errno};

use crate::guest::{Watcher, sectors};
use crate::net::{Cut, CutScope};
use crate::occurrence::{Mend, Occurrence};
use crate::simulation::Simulation;

/// The maximum number of reads after a pause.
const READS_MAX: u32 = 40;

impl Simulation {
    /// Pauses the engine, and cuts its host with one replica off from all others. The volume is attached
    /// elsewhere.
    pub fn isolate(
        &mut self,
        keeps: usize,
        tick_first: bool,
        (for_us, longer_us): (Micros, Micros),
        rng: &mut Rng,
    ) -> bool {
        let (host, engine) = (self.controller.host, self.guest.engine);
        let Some(engine) = engine.filter(|engine| self.hosts[host].engine == Some(*engine)) else {
            return false;
        };
        let slots = self.guest.slots.iter().take(usize::from(crate::engine::DEPTH));
        let free = slots.into_iter().position(Option::is_none).and_then(|slot| u16::try_from(slot).ok());
        let Some(slot) = free.filter(|_| self.controller.up && self.pause_engine(tick_first, for_us)) else {
            return false;
        };
        let kept = self.victim(keeps);
        // The replica is on the host of the engine, so no other host reaches it.
        let (hosts, replicas) = (self.hosts.len(), self.replicas.len());
        let pairs = (0..hosts).flat_map(|at| (0..replicas).map(move |to| (at, to)));
        for (at, replica) in pairs.filter(|(at, replica)| (*at == host) != (*replica == kept)) {
            let id = self.fresh();
            let scope = CutScope::Pair(at, replica);
            self.cuts.push(Cut { id, scope, to_replica: true, to_engine: true });
            self.after(for_us + longer_us, Occurrence::Mend(Mend::Cut(id)));
        }
        let slot = SlotId { queue: 0, slot };
        self.watchers.push(Watcher { engine, slot, read: None, reads: 0, rng: rng.fork() });
        // This happens at the end of the pause.
        self.after(1, Occurrence::Watch { engine });
        self.attach_elsewhere(rng)
    }

    /// Has the program read, if another engine serves the volume.
    pub fn watch(&mut self, engine: u64) {
        let size_bytes = self.guest.size_bytes;
        let is_superseded = self.guest.engine.is_some_and(|now| now != engine);
        let serves = self.engines.get(&engine).is_some_and(|process| process.core.is_some());
        let Some(watcher) = self.watchers.iter_mut().find(|watcher| watcher.engine == engine) else { return };
        if watcher.reads == 0 && !is_superseded || !serves || watcher.reads == READS_MAX {
            self.watchers.retain(|watcher| watcher.engine != engine);
            return;
        }
        watcher.reads += 1;
        let delay = watcher.rng.u64(1_000..100_000);
        let block = watcher.rng.u64(0..(size_bytes / 4096).min(24));
        let slot = watcher.slot;
        if let Ok(range) = ByteRange::new(block * 4096, 4096)
            && watcher.read.is_none()
        {
            watcher.read = Some((range, self.now));
            self.count("reads after a pause");
            let request = Request { slot: slot.slot, operation: Operation::Read, range };
            self.apply(engine, Event::Submit { queue: slot.queue, request });
        }
        self.after(delay, Occurrence::Watch { engine });
    }

    /// Looks at the answer of an engine that the guest does not use any more.
    pub fn watched(&mut self, engine: u64, slot: SlotId, outcome: Result<(), Errno>) {
        let is_its = |watcher: &&mut Watcher| watcher.engine == engine && watcher.slot == slot;
        let read = self.watchers.iter_mut().find(is_its).and_then(|watcher| watcher.read.take());
        let Some((range, asked)) = read.filter(|_| outcome.is_ok()) else { return };
        let Some(process) = self.engines.get_mut(&engine) else { return };
        let range = sectors(range);
        let data = &process.buffer(slot)[..range.len()];
        if let Some(stale) = self.checker.stale(range.start, data, asked) {
            self.violate(format!("engine {engine} was paused, and shows old data: {stale}"));
        }
        self.count("reads answered after a pause");
    }
}
