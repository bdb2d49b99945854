//! Frontends, which make a volume usable for a kernel or a client.
//!
//! A frontend has two halves. A [`QueueFrontend`] per queue lives on that queue's thread and ring: it
//! takes requests from the kernel or the client and answers them. The [`Device`] lives on the engine's main
//! thread: it brings the device up while the queues already serve, resizes it and removes it.

mod device;
mod first_read;
mod host;
mod iscsi;
mod kernel_release;
mod leftovers;
mod modules;
mod nbd;
pub mod node;
pub mod probe;
mod queue;
mod queue_attribute;
pub mod ublk;
mod wait;

pub use device::{Device, DeviceRecord, FrontendError, FrontendKind, FrontendSpec, Prepared, QueueSocket};
pub use iscsi::{IscsiIdentity, IscsidState, iscsid, prepare_iscsi, remove_iscsi_leftovers};
pub use leftovers::discard;
pub use modules::{NBD_PARTITIONS_REMEDY, nbd_partitions_max};
#[cfg(shorthorn_fuzzing)]
pub use nbd::fuzzing;
pub use nbd::{is_nbd_of_other_volume, prepare_nbd, prepare_socket, remove_nbd_leftovers};
pub use queue::{QueueFrontend, QueueIo, Quiesced, RefusedRequest, SOURCE};
pub use ublk::prepare_ublk;
