//! The member that a copy is read from.

use shorthorn_core::EngineCore;

use crate::serving::Address;

/// A member that is read to make a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// The number and the id of the member.
    pub address: Address,
    /// True if it has failed as the source of an earlier attempt.
    pub has_failed: bool,
    /// The number of its losses when it was chosen.
    pub(super) losses: u64,
}

impl Source {
    #[cfg(test)]
    pub(crate) fn new(address: Address, losses: u64) -> Source {
        Source { address, has_failed: false, losses }
    }

    /// Returns true if the source has been a member all the time until now. Otherwise it may have been
    /// recreated before it was read, and no data that was read from it counts.
    #[must_use]
    pub fn has_stayed(&self, core: &EngineCore) -> bool {
        core.membership().losses_of_member(self.address.peer) == Some(self.losses)
    }
}
