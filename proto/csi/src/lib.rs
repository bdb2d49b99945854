//! The common part of both sockets of the CSI driver, that of a node and that of the controller. It has the
//! identity of the driver, checks of arguments, codes of failures, and the limit of one call at a time for a
//! volume.

#![forbid(unsafe_code)]

mod capability;
mod error;
mod gates;
mod identity;
mod size;

pub use capability::{Capability, FsKind, MountSpec, VolumeAccess, capability, options};
pub use error::CsiError;
pub use gates::{Gates, Pass};
pub use identity::{IdentityService, NOT_READY};
pub use size::{SizeRange, size_range};

/// Name of the driver.
pub const DRIVER_NAME: &str = "csi.shorthorn.io";
/// Topology key of the node itself.
pub const TOPOLOGY_NODE: &str = "topology.shorthorn.io/node";
/// Topology key of the zone that the node is in.
pub const TOPOLOGY_ZONE: &str = "topology.shorthorn.io/zone";
/// Larger requests are wrong: some strings, and maps of 4 KiB each.
pub const REQUEST_MAX_BYTES: usize = 64 << 10;
