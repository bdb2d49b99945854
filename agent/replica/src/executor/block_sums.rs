//! The sums of blocks, and the knowledge of rot that they have shown.

use std::io;

use shorthorn_replica_core::KnownRot;
use shorthorn_store::{BlockSumsFile, LostBlocks, sum_of_zeroes};

use super::sum_file::SumFile;
use crate::limits::SLOTS;

/// The parts that store and compare the sums of blocks.
#[derive(Debug)]
pub(crate) struct BlockSums {
    pub(super) pages: SumFile,
    pub(super) waiting: WaitingSlots,
    /// Modifications that wait for pages of sums with rot.
    pub(super) unkept: WaitingSlots,
    /// Sums of blocks beside rot; requests are distinguished by their slots.
    pub(super) known: KnownRot<u16>,
    /// Blocks without any sound copy, as the directory records them.
    pub(super) lost: LostBlocks,
    /// The sum of a block of zeroes.
    pub(super) zero_sum: u32,
    /// The number of times that a request has found rot.
    pub(super) rotten: u64,
    /// The number of times that a page with rot was not tracked: see [`KnownRot`].
    pub(super) untracked: u64,
    pub(super) are_pages_reported: bool,
}

impl BlockSums {
    /// Keeps sums in the file. Without one, no block is summed.
    pub fn new(file: Option<BlockSumsFile>) -> io::Result<BlockSums> {
        Ok(BlockSums {
            pages: SumFile::new(file)?,
            waiting: WaitingSlots::new(),
            unkept: WaitingSlots::new(),
            known: KnownRot::default(),
            lost: LostBlocks::new(),
            zero_sum: sum_of_zeroes(),
            rotten: 0,
            untracked: 0,
            are_pages_reported: false,
        })
    }
}

/// Requests that wait for pages of sums. Those in `waiting` have read their data.
#[derive(Debug)]
pub(super) struct WaitingSlots {
    waiting: Vec<u16>,
    /// Requests that are examined again.
    retried: Vec<u16>,
}

impl WaitingSlots {
    fn new() -> WaitingSlots {
        WaitingSlots { waiting: Vec::with_capacity(SLOTS), retried: Vec::with_capacity(SLOTS) }
    }

    pub fn add(&mut self, slot: u16) {
        self.waiting.push(slot);
    }

    /// Takes all that wait, to examine them again. The list comes back by [`WaitingSlots::give_back`].
    pub fn take(&mut self) -> Vec<u16> {
        let empty = std::mem::take(&mut self.retried);
        std::mem::replace(&mut self.waiting, empty)
    }

    pub fn give_back(&mut self, retried: Vec<u16>) {
        debug_assert!(retried.is_empty());
        self.retried = retried;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_that_wait_again_are_kept_while_others_are_examined() {
        let mut waiting = WaitingSlots::new();
        waiting.add(3);
        waiting.add(4);
        let taken = waiting.take();
        assert_eq!(taken, [3, 4]);
        waiting.add(4);
        waiting.give_back(Vec::new());
        assert_eq!(waiting.take(), [4]);
    }
}
