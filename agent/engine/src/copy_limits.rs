//! The limits of rebuilds, resyncs and scrubs, from the spec and the control socket to the core.

use std::num::NonZeroU64;

use shorthorn_control::{RebuildLimits, ScrubCommand};
use shorthorn_core::{CopyLimits, ScrubConfig};

/// Converts the limits to those of the core.
pub(crate) fn copy_limits(limits: RebuildLimits) -> CopyLimits {
    let RebuildLimits { bytes_per_s, share_percent } = limits;
    CopyLimits { bytes_per_s: bytes_per_s.and_then(NonZeroU64::new), share_percent }
}

/// Converts the command to the settings of the core.
pub(crate) fn scrub_config(command: ScrubCommand) -> ScrubConfig {
    let ScrubCommand { bytes_per_s, repair } = command;
    ScrubConfig { bytes_per_s: bytes_per_s.and_then(NonZeroU64::new), repair }
}
