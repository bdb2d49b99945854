//! CSI on a node: the services Identity and Node, and the service that kubelet finds a driver through.
//!
//! Every step is idempotent by looking at the kernel: what is mounted where (`mounts`), which number and size a device has
//! (`device`), what its first blocks say (`filesystem`). Nothing is remembered in files or in memory, so it does not
//! matter when the agent, kubelet or the host was restarted, nor which call of them got through.
//!
//! Where the block devices come from is the business of [`Volumes`].

#![forbid(unsafe_code)]

mod arguments;
mod command;
mod device;
mod error;
mod filesystem;
mod identity;
mod mounting;
mod mounts;
mod node;
mod registration;
mod volumes;

pub use device::DeviceNumber;
pub use identity::Identity;
pub use node::{NodeOptions, NodeService};
pub use registration::RegistrationService;
pub use volumes::{Condition, Device, Volume, Volumes, VolumesError};

/// Name of the driver.
pub const DRIVER_NAME: &str = "csi.shorthorn.io";
/// Topology key of the node itself.
pub const TOPOLOGY_NODE: &str = "topology.shorthorn.io/node";
/// Topology key of the zone that the node is in.
pub const TOPOLOGY_ZONE: &str = "topology.shorthorn.io/zone";
/// The longest value of a topology key: kubelet makes it a label of the Node.
pub const TOPOLOGY_VALUE_MAX_BYTES: usize = 63;
