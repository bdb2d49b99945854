//! The guest: a file system's worth of requests on the device, and what it remembers of them.

use shorthorn_core::{Event, Operation, Request};
use shorthorn_types::{ByteRange, Errno, ReplicaId};

use crate::checker::{Id, Micros};
use crate::engine::DEPTH;
use crate::world::{Occurrence, World};

/// A request that is not done.
#[derive(Clone, Debug)]
pub struct Outstanding {
    pub operation: Operation,
    pub range: ByteRange,
    /// What a write writes: the same id in every sector.
    pub id: Id,
    pub submitted: Micros,
}

/// The guest, and the device that it uses.
#[derive(Debug)]
pub struct Guest {
    /// The replicas of the volume as the controller wants them.
    pub replicas: Vec<ReplicaId>,
    /// Size of the volume.
    pub size_bytes: u64,
    pub slots: Vec<Option<Outstanding>>,
    /// The engine process that serves the device.
    pub engine: Option<u64>,
    next_id: Id,
    /// Requests that were completed.
    pub done: u64,
    /// No new requests.
    pub resting: bool,
    /// Requests to make at most.
    pub budget: u64,
}

impl Guest {
    /// A guest of a volume.
    pub fn new(replicas: Vec<ReplicaId>, size_bytes: u64, first_id: Id, budget: u64) -> Guest {
        let slots = vec![None; usize::from(DEPTH)];
        Guest {
            replicas,
            size_bytes,
            slots,
            engine: None,
            next_id: first_id,
            done: 0,
            resting: false,
            budget,
        }
    }
}

/// The sectors that a request is about: of a discard, its whole blocks.
fn sectors_of(request: &Outstanding) -> std::ops::Range<usize> {
    match request.operation {
        Operation::Discard => sectors(request.range.shrunk_to_blocks()),
        _ => sectors(request.range),
    }
}

/// The sectors of a range.
pub fn sectors(range: ByteRange) -> std::ops::Range<usize> {
    let sector = |bytes: u64| usize::try_from(bytes / 512).unwrap_or(usize::MAX);
    sector(range.offset())..sector(range.end())
}

impl World {
    /// The guest may ask for something.
    pub fn guest_turn(&mut self) {
        let delay = if self.rng.u8(..) < 10 { self.rng.u64(1_000..400_000) } else { self.rng.u64(50..4_000) };
        self.after(delay, Occurrence::Guest);
        let oldest = self.guest.slots.iter().flatten().map(|request| request.submitted).min();
        self.checker.forget_before(oldest.unwrap_or(self.now));
        let free = self.guest.slots.iter().position(Option::is_none);
        let Some(slot) = free.filter(|_| !self.guest.resting && self.guest.budget > 0) else { return };
        self.guest.budget -= 1;
        let request = self.make_request();
        self.submit(slot, request);
    }

    fn make_request(&mut self) -> Outstanding {
        let blocks = self.guest.size_bytes / 4096;
        // Half of the requests are to one small area.
        let first = if self.rng.bool() { self.rng.u64(0..blocks.min(12)) } else { self.rng.u64(0..blocks) };
        let sector = first * 8 + if self.rng.u8(..) < 128 { self.rng.u64(0..8) } else { 0 };
        let count = match self.rng.u8(..) {
            0..100 => 8,
            100..180 => self.rng.u64(1..17),
            180..240 => self.rng.u64(1..65),
            _ => self.rng.u64(1..129),
        };
        let count = count.min(blocks * 8 - sector);
        let range = ByteRange::new(sector * 512, count * 512).unwrap_or(ByteRange::EMPTY);
        let fua = self.rng.u8(..) < 20;
        let operation = match self.rng.u8(..) {
            0..90 => Operation::Read,
            90..210 => Operation::Write { fua },
            210..225 => Operation::Flush,
            225..240 => Operation::WriteZeroes { fua },
            _ => Operation::Discard,
        };
        let id = if matches!(operation, Operation::Write { .. }) { self.guest.next_id } else { 0 };
        self.guest.next_id += 1;
        let range = if operation == Operation::Flush { ByteRange::EMPTY } else { range };
        Outstanding { operation, range, id, submitted: self.now }
    }

    fn submit(&mut self, slot: usize, request: Outstanding) {
        if matches!(
            request.operation,
            Operation::Write { .. } | Operation::WriteZeroes { .. } | Operation::Discard
        ) {
            self.checker.submit(sectors_of(&request), request.id, request.submitted);
        }
        self.note(|| format!("  asked: {request:?}"));
        self.guest.slots[slot] = Some(request);
        self.pass_on(slot);
    }

    /// The engine gets the request, if there is one that serves.
    fn pass_on(&mut self, slot: usize) {
        let Some(engine) = self.guest.engine else { return };
        let Some(request) = self.guest.slots[slot].clone() else { return };
        let Some(process) = self.engines.get_mut(&engine) else { return };
        if let Operation::Write { .. } = request.operation {
            let sectors = sectors(request.range).len();
            process.buffers[slot][..sectors].fill(request.id);
        }
        let slot = u16::try_from(slot).unwrap_or(u16::MAX);
        let request = Request { slot, operation: request.operation, range: request.range };
        self.apply(engine, Event::Submit { queue: 0, request });
    }

    /// An engine serves the device: it is given every request that is not done, as after a recovery.
    pub fn device_is_served(&mut self, engine: u64) {
        self.guest.engine = Some(engine);
        self.device_grows(engine);
        for slot in 0..self.guest.slots.len() {
            self.pass_on(slot);
        }
    }

    /// The device has the size of its engine's core.
    pub fn device_grows(&mut self, engine: u64) {
        let core = self.engines.get(&engine).and_then(|process| process.core.as_ref());
        let Some(size_bytes) = core.map(|core| core.regions().size_bytes()) else { return };
        if self.guest.engine != Some(engine) {
            return;
        }
        if size_bytes < self.guest.size_bytes {
            return self.violate(format!("the device shrinks to {size_bytes} bytes"));
        }
        self.guest.size_bytes = size_bytes;
        self.checker.grow(usize::try_from(size_bytes / 512).unwrap_or(usize::MAX));
    }

    /// The device is somewhere else now; whoever waited for the old one will never know.
    pub fn guest_moves(&mut self) {
        self.guest.engine = None;
        for request in self.guest.slots.iter_mut().filter_map(Option::take) {
            if changes(request.operation) {
                // Until the new engine serves, the old one may still bring it to the replicas.
                self.guest_forgot.push(request);
            }
        }
    }

    /// A new engine serves in a new attachment: what the old one had in flight has happened or never will.
    pub fn settle_forgotten(&mut self) {
        for request in std::mem::take(&mut self.guest_forgot) {
            self.checker.undecided(sectors_of(&request), request.id, request.submitted, self.now);
        }
    }

    /// A request is done.
    pub fn completed(&mut self, engine: u64, slot: u16, outcome: Result<(), Errno>) {
        if self.guest.engine != Some(engine) {
            return; // nobody uses that device any more
        }
        let Some(request) = self.guest.slots[usize::from(slot)].take() else {
            return self.violate(format!("slot {slot} is completed twice"));
        };
        self.guest.done += 1;
        self.note(|| format!("  done: {request:?} {outcome:?}"));
        let (range, now) = (sectors_of(&request), self.now);
        match (request.operation, outcome) {
            (Operation::Read, Ok(())) => {
                let Some(process) = self.engines.get(&engine) else { return };
                let data = process.buffers[usize::from(slot)][..range.len()].to_vec();
                if let Err(wrong) = self.checker.read(range.start, &data, request.submitted, now) {
                    self.violate(wrong);
                }
            }
            (Operation::Flush, Ok(())) => self.checker.flushed(request.submitted),
            (Operation::Read | Operation::Flush | Operation::Verify, _) => self.count("failed requests"),
            (Operation::Write { fua } | Operation::WriteZeroes { fua }, Ok(())) => {
                self.checker.acknowledged(range, request.id, request.submitted, now, fua);
            }
            (Operation::Discard, Ok(())) => {
                self.checker.acknowledged(range, request.id, request.submitted, now, false);
            }
            (_, Err(_)) => {
                self.count("failed requests");
                self.checker.failed(range, request.id, request.submitted, now);
            }
        }
    }
}

fn changes(operation: Operation) -> bool {
    matches!(operation, Operation::Write { .. } | Operation::WriteZeroes { .. } | Operation::Discard)
}
