//! Trouble, and its end.

use shorthorn_types::limits::BLOCK_BYTES;

use crate::world::{Occurrence, World};

/// The volume is not made larger than that.
const EXPANDED_BYTES_MAX: u64 = 4 << 20;

/// Something that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A replica process is killed; its kernel lives.
    KillReplica,
    /// The host of a replica loses power.
    CutPowerOfReplica,
    /// The engine process is killed.
    KillEngine,
    /// The engine process is asked to leave the device to the next one: it settles before it ends.
    HandOver,
    /// The volume is attached to another host; nobody tells the old one.
    AttachElsewhere,
    /// A host and a replica do not reach each other for a while.
    Partition,
    /// A connection breaks.
    BreakConnection,
    /// The controller is away for a while.
    StopController,
    /// Everything loses power at once.
    CutPowerOfAll,
    /// The disk of a replica is full for a while.
    FillDisk,
    /// A disk reports an error for a write.
    DiskError,
    /// A disk is slow for a while.
    SlowDisk,
    /// A replica is gone for good, and a new one takes its place.
    Replace,
    /// The volume is to be larger: no fault, but it meets them all.
    Expand,
    /// Something that was cut, full, slow or stopped is well again.
    Mend(Mend),
}

/// What is well again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mend {
    /// This host and this replica reach each other.
    Cut(usize, usize),
    /// The controller runs.
    Controller,
    /// The disk has space.
    Disk(usize),
    /// The disk is fast.
    Speed(usize),
}

const KINDS: [(Fault, u32); 14] = [
    (Fault::KillReplica, 10),
    (Fault::CutPowerOfReplica, 6),
    (Fault::KillEngine, 10),
    (Fault::AttachElsewhere, 3),
    (Fault::Partition, 8),
    (Fault::BreakConnection, 8),
    (Fault::StopController, 4),
    (Fault::CutPowerOfAll, 1),
    (Fault::FillDisk, 3),
    (Fault::DiskError, 3),
    (Fault::SlowDisk, 4),
    (Fault::Replace, 2),
    (Fault::HandOver, 6),
    (Fault::Expand, 5),
];

/// The engine that hands over settles for so long at most.
const SETTLE_LIMIT_US: u64 = 100_000;

impl World {
    /// Some trouble, and when the next comes.
    pub fn trouble(&mut self, fault: Fault) {
        if let Fault::Mend(mend) = fault {
            return self.mend(mend);
        }
        if self.calm {
            return;
        }
        self.note(|| format!("fault: {fault:?}"));
        self.count("faults");
        self.strike(fault);
        self.schedule_fault();
    }

    /// The next trouble comes some time.
    pub fn schedule_fault(&mut self) {
        let total: u32 = KINDS.iter().map(|(_, weight)| weight).sum();
        let mut pick = self.rng.u32(0..total);
        let mut chosen = Fault::KillEngine;
        for (fault, weight) in KINDS {
            if pick < weight {
                chosen = fault;
                break;
            }
            pick -= weight;
        }
        let delay = self.rng.u64(10_000..1_500_000);
        self.after(delay, Occurrence::Fault(chosen));
    }

    fn strike(&mut self, fault: Fault) {
        let victim = self.rng.usize(0..self.replicas.len());
        let while_us = self.rng.u64(50_000..4_000_000);
        match fault {
            Fault::KillReplica => self.kill_replica(victim, false),
            Fault::CutPowerOfReplica => self.kill_replica(victim, true),
            Fault::KillEngine => self.kill_engine(self.controller.host),
            Fault::HandOver => self.hand_over(),
            Fault::AttachElsewhere => self.attach_elsewhere(),
            Fault::Partition => {
                let host = self.rng.usize(0..self.hosts.len());
                self.cut.insert((host, victim));
                self.after(while_us, Occurrence::Fault(Fault::Mend(Mend::Cut(host, victim))));
            }
            Fault::BreakConnection => {
                let open: Vec<_> = self.conns.keys().copied().collect();
                if !open.is_empty() {
                    let conn = open[self.rng.usize(0..open.len())];
                    self.break_connection(conn);
                }
            }
            Fault::StopController => {
                self.controller.up = false;
                self.after(while_us, Occurrence::Fault(Fault::Mend(Mend::Controller)));
            }
            Fault::CutPowerOfAll => self.cut_power_of_all(),
            Fault::FillDisk => {
                self.replicas[victim].full = true;
                self.after(while_us, Occurrence::Fault(Fault::Mend(Mend::Disk(victim))));
            }
            Fault::DiskError => self.replicas[victim].errors_to_come += 1,
            Fault::SlowDisk => {
                self.replicas[victim].slow = true;
                self.after(while_us, Occurrence::Fault(Fault::Mend(Mend::Speed(victim))));
            }
            Fault::Replace => self.replace_replica(),
            Fault::Expand => self.expand_volume(),
            Fault::Mend(_) => {}
        }
    }

    /// The controller has recorded it when the first engine hears of it.
    fn expand_volume(&mut self) {
        if self.controller.up && self.controller.size_bytes < EXPANDED_BYTES_MAX {
            self.controller.size_bytes += BLOCK_BYTES * self.rng.u64(1..40);
        }
    }

    fn hand_over(&mut self) {
        let Some(engine) = self.hosts[self.controller.host].engine else { return };
        self.after(SETTLE_LIMIT_US, Occurrence::EndEngine { engine });
        self.apply(engine, shorthorn_core::Event::Settle);
    }

    fn mend(&mut self, mend: Mend) {
        match mend {
            Mend::Cut(host, replica) => {
                self.cut.remove(&(host, replica));
                self.release_held();
            }
            Mend::Controller => self.controller.up = true,
            Mend::Disk(replica) => self.replicas[replica].full = false,
            Mend::Speed(replica) => self.replicas[replica].slow = false,
        }
    }

    /// No more trouble: whatever is broken is repaired.
    pub fn calm_down(&mut self) {
        self.calm = true;
        self.options.slow_network = false;
        self.guest.budget = self.guest.budget.min(500);
        self.cut.clear();
        self.release_held();
        self.controller.up = true;
        for replica in &mut self.replicas {
            replica.full = false;
            replica.slow = false;
            replica.errors_to_come = 0;
        }
        self.note(|| "calm".to_owned());
        // A replica that has seen an error of its disk serves nothing until somebody starts it again.
        for at in 0..self.replicas.len() {
            if self.replicas[at].failed {
                self.kill_replica(at, false);
            }
        }
    }

    /// Both ends of a connection see its end, each in its time.
    pub fn break_connection(&mut self, conn: u64) {
        self.send(conn, true, crate::net::Message::Close);
        self.send(conn, false, crate::net::Message::Close);
    }
}
