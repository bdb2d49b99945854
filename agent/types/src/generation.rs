use std::fmt;

use serde::{Deserialize, Serialize};

/// Who may write: an engine with a higher generation fences every engine with a lower one.
///
/// The controller raises `attach` by compare-and-swap at every attach. A restart of the engine on
/// the same node, which the controller has no part in, raises `restart`; the lock on the engine's
/// own state file makes sure that at most one process has any one pair. Ordered by attach, then restart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Generation {
    /// The number of the attachment, from 1; 0 is a volume that was never attached.
    pub attach: u64,
    /// The number of the engine process within the attachment.
    pub restart: u32,
}

impl Generation {
    /// A replica that no engine has opened yet.
    pub const NEVER: Generation = Generation { attach: 0, restart: 0 };

    /// The generation `attach`.`restart`.
    #[must_use]
    pub const fn new(attach: u64, restart: u32) -> Generation {
        Generation { attach, restart }
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.attach, self.restart)
    }
}
