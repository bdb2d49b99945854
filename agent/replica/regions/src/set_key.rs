use std::fmt;

use shorthorn_types::ReplicaId;

/// A set that a replica keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SetKey {
    /// Regions in which the members may differ after a crash.
    Intent,
    /// Regions that this replica lacks.
    OutOfSync(ReplicaId),
    /// Regions in which no sum of a block counts. The set matters only to the replica that keeps it.
    Unsummed,
}

impl SetKey {
    /// Returns the name as written in pages.
    pub(crate) fn name(self) -> [u8; 8] {
        let mut name = match self {
            SetKey::Unsummed => *b"unsummed",
            _ => *b"intent\0\0",
        };
        if let SetKey::OutOfSync(replica) = self {
            for (byte, digit) in name.iter_mut().zip(replica.to_string().bytes()) {
                *byte = digit;
            }
        }
        name
    }
}

impl fmt::Display for SetKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SetKey::Intent => f.write_str("intent"),
            // The file has this name: shorthorn.missed-REPLICA.
            SetKey::OutOfSync(replica) => write!(f, "missed-{replica}"),
            SetKey::Unsummed => f.write_str("unsummed"),
        }
    }
}
