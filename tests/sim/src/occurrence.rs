//! Occurrences of a run, which happen at a point in time each.

use shorthorn_types::View;

use crate::faults::LieAt;
use crate::net::{ConnId, NetMessage};
use crate::script::Strike;

/// An occurrence at a point in time.
#[derive(Debug)]
pub enum Occurrence {
    /// A message arrives at a host; `number` counts those of its connection and direction.
    Deliver { conn: ConnId, to_replica: bool, number: u64, message: NetMessage },
    /// A process takes a message.
    Take { conn: ConnId, to_replica: bool, message: NetMessage },
    /// A disk has completed a request.
    DiskDone { replica: usize, boot: u64, op: u64 },
    /// A disk has written a page of a set of regions.
    PageDone { replica: usize, boot: u64, write: u64 },
    /// A replica process searches regions to sum, or has read (false) or written (true) the ones that it has
    /// begun.
    Sum { replica: usize, boot: u64, is_read: Option<bool> },
    /// A scrub repairs a block of the snapshot of a replica, or all that are left.
    Repair { replica: usize, boot: u64, block: Option<u64> },
    /// The time of an engine advances.
    Tick { engine: u64 },
    /// A fault begins.
    Fault(Strike),
    /// A fault is repaired.
    Mend(Mend),
    /// A replica process starts.
    StartReplica { replica: usize, boot: u64 },
    /// An engine process starts on a host, unless there is one.
    StartEngine { host: usize },
    /// An engine process that hands over ends, whether it has cleared the write intents or not.
    EndEngine { engine: u64 },
    /// A queue of an engine closes its connection to a replica.
    CloseQueue { engine: u64, conn: ConnId },
    /// An engine takes the guest's request in a slot.
    Submit { engine: u64, slot: usize },
    /// A program reads the device of an engine that was isolated.
    Watch { engine: u64 },
    /// An engine asks for a grant, if it still wants one.
    AskArbiter { engine: u64 },
    /// The arbiter's answer arrives.
    Granted { engine: u64, view: View },
    /// The volume is attached again, unless that was done since this attachment.
    AttachAnew { attach: u64 },
    /// The controller looks for replicas that are lost.
    Control,
    /// The guest may ask for something.
    Guest,
    /// Tasks of an engine look at the clock.
    Wake { engine: u64 },
}

/// A repair of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mend {
    /// Ends the network cut with this number.
    Cut(u64),
    /// Both ends of this connection find out that it is over.
    HalfOpen(ConnId),
    /// The controller runs.
    Controller,
    /// The disk has space.
    Disk(usize),
    /// The disk is fast.
    Speed(usize),
    /// The replica does not lie, unless it has begun to do so once more.
    Lie(usize, LieAt, u64),
    /// The replica process that has failed ends, if it may, and is started again.
    Failed(usize, u64),
    /// A scrub of an engine is stopped, if it is still this one.
    Scrub(u64, u64),
    /// The engine process continues.
    Engine(u64, bool),
    /// The operator restarts the replica process, which refuses modifications beside rot.
    Refusing(usize, u64),
    /// The replica process continues, if it is still this one.
    Replica(usize, u64),
}
