//! The user of the volume: submits requests, and checks the answers and the replicas.

use super::*;

impl SimulatedVolume {
    pub fn submit(&mut self, slot: u16) {
        let operation = match self.dice.below(10) {
            0 => Operation::Flush,
            1 => Operation::WriteZeroes { fua: false },
            2 => Operation::Discard,
            3..=5 => Operation::Read,
            _ => Operation::Write { fua: false },
        };
        let has_data = matches!(operation, Operation::Read | Operation::Write { .. });
        let most = match self.dice.below(4) {
            0 if has_data => MAX_WRITE_UNITS,
            // More than fits the buffer of a copy.
            0 => UNITS as u64 - 1,
            _ => 4,
        };
        let length = 1 + self.dice.below(most);
        let start = self.dice.below(UNITS as u64 - length);
        let range = match operation {
            Operation::Flush => ByteRange::EMPTY,
            _ => ByteRange::new(start * UNIT_BYTES, length * UNIT_BYTES).unwrap(),
        };
        // Blocks that a discard covers in part stay as they are.
        let range = if operation == Operation::Discard { range.grown_to_blocks() } else { range };
        let value = if matches!(operation, Operation::Write { .. }) { self.next_value } else { 0 };
        self.next_value += 1;
        let mut asked =
            Asked { operation, range, value, allowed: BTreeMap::new(), is_disturbed: BTreeSet::new() };
        let modifies = |operation| !matches!(operation, Operation::Read | Operation::Flush);
        for unit in units(range) {
            let mut allowed = self.truth[unit].clone();
            for other in self.asked.iter_mut().flatten().filter(|other| units(other.range).contains(&unit)) {
                if modifies(other.operation) {
                    allowed.insert(other.value);
                    asked.is_disturbed.insert(unit);
                }
                if modifies(operation) {
                    other.allowed.entry(unit).or_default().insert(value);
                    other.is_disturbed.insert(unit);
                }
            }
            asked.allowed.insert(unit, allowed);
        }
        self.buffers[usize::from(slot)].fill(value);
        self.asked[usize::from(slot)] = Some(asked);
        self.apply(Event::Submit { queue: 0, request: Request { slot, operation, range } });
    }

    pub fn completed(&mut self, slot: SlotId, outcome: Result<(), shorthorn_types::Errno>) {
        let asked = self.asked[usize::from(slot.slot)].take().expect("a request");
        if outcome.is_err() {
            return self.request_failed(&asked);
        }
        let buffer = &self.buffers[usize::from(slot.slot)];
        for (at, unit) in units(asked.range).enumerate() {
            if asked.operation == Operation::Read {
                let value = buffer[at];
                assert!(asked.allowed[&unit].contains(&value), "unit {unit} reads {value}");
                if !asked.is_disturbed.contains(&unit) {
                    self.truth[unit] = BTreeSet::from([value]);
                }
            } else {
                self.truth[unit] = BTreeSet::from([asked.value]);
                for peer in self.peers_in(PeerState::Member) {
                    assert_eq!(self.replicas[peer].data[unit], asked.value, "unit {unit} of {peer}");
                }
            }
        }
        // The buffer must not be read any more.
        self.buffers[usize::from(slot.slot)].fill(u32::MAX);
    }

    /// Records a failed request, which may be done in part, but equally on all members.
    fn request_failed(&mut self, asked: &Asked) {
        self.failed += 1;
        if matches!(asked.operation, Operation::Read | Operation::Flush) {
            return;
        }
        for unit in units(asked.range) {
            self.truth[unit].insert(asked.value);
        }
        let members = self.peers_in(PeerState::Member);
        for unit in units(asked.range.grown_to_blocks()) {
            let values: BTreeSet<u32> = members.iter().map(|peer| self.replicas[*peer].data[unit]).collect();
            assert!(values.len() <= 1, "unit {unit} of {members:?} after a failure: {values:?}");
            assert!(values.is_subset(&self.truth[unit]), "unit {unit}: {values:?}");
        }
    }

    /// Checks that all members are equal outside of the ranges in flight.
    pub fn check_equal(&self) {
        let members = self.peers_in(PeerState::Member);
        let is_busy = |unit: usize| {
            let block = unit / BLOCK_UNITS;
            self.asked.iter().flatten().any(|asked| {
                asked.operation != Operation::Read
                    && units(asked.range).any(|unit| unit / BLOCK_UNITS == block)
            })
        };
        for unit in (0..UNITS).filter(|unit| !is_busy(*unit)) {
            let values: BTreeSet<u32> = members.iter().map(|peer| self.replicas[*peer].data[unit]).collect();
            assert_eq!(values.len(), 1, "unit {unit} of {members:?}");
            assert!(values.is_subset(&self.truth[unit]), "unit {unit}: {values:?}");
        }
    }
}
