//! CSI on a node: the service Node, and the service through which kubelet finds a driver. `shorthorn-csi` has
//! the common part with the socket of the controller.
//!
//! Every step is idempotent by looking at the kernel. It looks at the mounts (`shorthorn_linux`), the number
//! and size of a device (`device`), and the content of its first blocks (`filesystem`). Nothing is remembered
//! in files or in memory. So it does not matter when the agent, kubelet or the host was restarted, nor which
//! of their calls succeeded. Only the dead mounts found are kept for callers that ask (`dead_mounts`).
//!
//! [`NodeVolumes`] supplies the block devices.

#![forbid(unsafe_code)]

mod arguments;
mod command;
mod dead_mounts;
mod device;
mod error;
mod filesystem;
mod mounting;
mod node;
mod registration;
mod volumes;

pub use dead_mounts::{DeadMount, DeadMounts};
pub use node::{CsiNodeService, NodeOptions};
pub use registration::RegistrationService;
pub use shorthorn_types::DeviceNumber;
pub use volumes::{NodeVolume, NodeVolumes, VolumeDevice, VolumeHealth, VolumesError};
