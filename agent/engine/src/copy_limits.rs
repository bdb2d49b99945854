//! The limits of rebuilds and resyncs, from the spec to the core.

use shorthorn_control::RebuildLimits;
use shorthorn_core::CopyLimits;

/// Converts the limits to those of the core.
pub(crate) fn copy_limits(limits: RebuildLimits) -> CopyLimits {
    CopyLimits { bytes_per_s: limits.bytes_per_s, share_percent: limits.share_percent }
}
