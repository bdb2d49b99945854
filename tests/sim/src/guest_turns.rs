//! The turns of the guest: it makes requests, and the checker records them with their answers.

use shorthorn_checker::has_rot;
use shorthorn_core::{Event, Operation, Request, SlotId};
use shorthorn_types::{ByteRange, Errno};

use crate::engine::DEPTH;
use crate::guest::{Outstanding, Watcher, sectors};
use crate::occurrence::Occurrence;
use crate::simulation::Simulation;

/// Returns the sectors of a request: of a discard, its whole blocks.
fn sectors_of(request: &Outstanding) -> std::ops::Range<usize> {
    match request.operation {
        Operation::Discard => sectors(request.range.shrunk_to_blocks()),
        _ => sectors(request.range),
    }
}

impl Simulation {
    /// Lets the guest send a request.
    pub fn guest_turn(&mut self) {
        let rng = &mut self.guest.rng;
        let delay = if rng.u8(..) < 10 { rng.u64(1_000..400_000) } else { rng.u64(50..4_000) };
        self.after(delay, Occurrence::Guest);
        let asked = self.guest.slots.iter().flatten().map(|request| request.submitted);
        let oldest = asked.chain(self.watchers.iter().filter_map(Watcher::asked)).min();
        self.checker.forget_before(oldest.unwrap_or(self.now));
        // Any queue, and there the first slot that is free.
        let depth = usize::from(DEPTH);
        let queue = self.guest.rng.usize(0..self.guest.slots.len() / depth);
        let of_queue = &self.guest.slots[queue * depth..(queue + 1) * depth];
        let free = of_queue.iter().position(Option::is_none).map(|slot| queue * depth + slot);
        let Some(slot) = free.filter(|_| !self.guest.resting && self.guest.budget > 0) else { return };
        self.guest.budget -= 1;
        let request = self.make_request();
        self.submit(slot, request);
    }

    fn make_request(&mut self) -> Outstanding {
        let blocks = self.guest.size_bytes / 4096;
        // Half of the requests are to one small area.
        let rng = &mut self.guest.rng;
        let first = if rng.bool() { rng.u64(0..blocks.min(12)) } else { rng.u64(0..blocks) };
        let sector = first * 8 + if rng.u8(..) < 128 { rng.u64(0..8) } else { 0 };
        let count = match rng.u8(..) {
            0..100 => 8,
            100..180 => rng.u64(1..17),
            180..240 => rng.u64(1..65),
            _ => rng.u64(1..129),
        };
        let count = count.min(blocks * 8 - sector);
        let range = ByteRange::new(sector * 512, count * 512).unwrap_or(ByteRange::EMPTY);
        let fua = rng.u8(..) < 20;
        let operation = match rng.u8(..) {
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
        self.trace(|| format!("  asked: {request:?}"));
        self.guest.slots[slot] = Some(request);
        self.pass_on(slot);
    }

    /// Passes the request to a serving engine, if any.
    fn pass_on(&mut self, slot: usize) {
        let Some(engine) = self.guest.engine else { return };
        if let Some(what) = self.is_postponed(Occurrence::Submit { engine, slot }) {
            self.happen(what);
        }
    }

    /// Takes the request in a slot into an engine.
    pub fn engine_takes(&mut self, engine: u64, at: usize) {
        if self.guest.engine != Some(engine) {
            return;
        }
        let Some(request) = self.guest.slots[at].clone() else { return };
        let Some(process) = self.engines.get_mut(&engine) else { return };
        let id = slot_id(at);
        if let Operation::Write { .. } = request.operation {
            let sectors = sectors(request.range).len();
            process.buffer(id)[..sectors].fill(request.id);
        }
        let taken = Request { slot: id.slot, operation: request.operation, range: request.range };
        self.apply(engine, Event::Submit { queue: id.queue, request: taken });
    }

    /// Serves the device by an engine, which gets every unfinished request, as after a recovery.
    pub fn device_is_served(&mut self, engine: u64) {
        self.guest.engine = Some(engine);
        self.device_grows(engine);
        for slot in 0..self.guest.slots.len() {
            self.pass_on(slot);
        }
    }

    /// Grows the device to the size of its engine's core.
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

    /// Moves the device to another host; waiting requests of the old one are never answered.
    pub fn guest_moves(&mut self) {
        self.guest.engine = None;
        for request in self.guest.slots.iter_mut().filter_map(Option::take) {
            if changes(request.operation) {
                // Until the new engine serves, the old one may still bring it to the replicas.
                self.guest_forgot.push(request);
            }
        }
    }

    /// Settles the requests of an old attachment when a new engine serves: they have happened or never will.
    pub fn mark_forgotten_undecided(&mut self) {
        for request in std::mem::take(&mut self.guest_forgot) {
            self.checker.undecided(sectors_of(&request), request.id, request.submitted, self.now);
        }
    }

    /// Completes a request.
    pub fn completed(&mut self, engine: u64, id: SlotId, outcome: Result<(), Errno>) {
        if self.guest.engine != Some(engine) {
            return self.watched(engine, id, outcome);
        }
        let Some(request) = self.guest.slots[place(id)].take() else {
            return self.violate(format!("slot {id:?} is completed twice"));
        };
        self.guest.done += 1;
        let host = self.engines.get(&engine).map(|process| process.host);
        if outcome.is_ok() && host.is_some_and(|host| self.hosts[host].lost_writes) {
            return self.violate(format!("writes may be gone, and the guest gets no error: {request:?}"));
        }
        self.trace(|| format!("  done: {request:?} {outcome:?}"));
        let (range, now) = (sectors_of(&request), self.now);
        match (request.operation, outcome) {
            (Operation::Read, Ok(())) => {
                let Some(process) = self.engines.get_mut(&engine) else { return };
                let data = &process.buffer(id)[..range.len()];
                // Its engine has reads verified: see `Opening::config`.
                if engine % 2 == 1 && has_rot(data) {
                    return self.violate(format!("{request:?} shows rot, though it was verified"));
                }
                if let Err(wrong) = self.checker.read(range.start, data, request.submitted, now) {
                    self.violate(wrong);
                }
            }
            (Operation::Flush, Ok(())) => self.checker.flushed(request.submitted),
            (
                Operation::Read
                | Operation::CheckedRead
                | Operation::Flush
                | Operation::Verify
                | Operation::WriteRot,
                _,
            ) => {
                self.count("failed requests");
            }
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

/// Returns the slot of an engine's queue for a slot of the guest.
fn slot_id(at: usize) -> SlotId {
    let number = |n: usize| u16::try_from(n).unwrap_or(u16::MAX);
    SlotId { queue: number(at / usize::from(DEPTH)), slot: number(at % usize::from(DEPTH)) }
}

/// Returns the place of a slot, the inverse of the above.
fn place(id: SlotId) -> usize {
    usize::from(id.queue) * usize::from(DEPTH) + usize::from(id.slot)
}

fn changes(operation: Operation) -> bool {
    matches!(operation, Operation::Write { .. } | Operation::WriteZeroes { .. } | Operation::Discard)
}
