use std::fmt;

use shorthorn_types::{Members, ReplicaId};

/// The most replicas of the model.
pub(crate) const REPLICAS_MAX: usize = 4;

/// A small set of numbers below eight: of replicas, or of writes.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bits(pub(crate) u8);

impl Bits {
    /// The empty set.
    pub const NONE: Bits = Bits(0);

    /// Returns the numbers below `count`.
    #[must_use]
    pub fn below(count: u8) -> Bits {
        (0..count).fold(Bits::NONE, Bits::with)
    }

    /// Returns true if `item` is in it.
    #[must_use]
    pub fn has(self, item: u8) -> bool {
        self.0 & (1 << item) != 0
    }

    /// Returns the set with `item`.
    #[must_use]
    pub fn with(self, item: u8) -> Bits {
        Bits(self.0 | (1 << item))
    }

    /// Returns the set without `item`.
    #[must_use]
    pub fn without(self, item: u8) -> Bits {
        Bits(self.0 & !(1 << item))
    }

    /// Returns the union of both sets.
    #[must_use]
    pub fn union(self, other: Bits) -> Bits {
        Bits(self.0 | other.0)
    }

    /// Returns the intersection of both sets.
    #[must_use]
    pub fn intersection(self, other: Bits) -> Bits {
        Bits(self.0 & other.0)
    }

    /// Returns true if all of `other` is in it.
    #[must_use]
    pub fn has_all(self, other: Bits) -> bool {
        other.0 & !self.0 == 0
    }

    /// Returns all nonempty subsets.
    pub fn subsets(self) -> impl Iterator<Item = Bits> {
        (1..=self.0).map(Bits).filter(move |part| self.has_all(*part))
    }

    /// Returns the number of items.
    #[must_use]
    pub fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// Returns true if the set is empty.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the items in order.
    pub fn iter(self) -> impl Iterator<Item = u8> {
        (0..8).filter(move |item| self.has(*item))
    }
}

impl fmt::Debug for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

/// Returns the real name of a replica.
pub(crate) fn id(replica: u8) -> ReplicaId {
    ReplicaId::from_random(u64::from(replica))
}

/// Converts bits of the model to members of the real code.
pub(crate) fn members(replicas: Bits) -> Members {
    // Fewer than the real ones can be.
    Members::new(replicas.iter().map(id)).unwrap_or(Members::NONE)
}

/// Converts members of the real code to bits of the model.
pub(crate) fn bits(members: &Members) -> Bits {
    (0..8).filter(|replica| members.contains(id(*replica))).fold(Bits::NONE, Bits::with)
}
