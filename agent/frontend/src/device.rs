use std::os::fd::OwnedFd;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use shorthorn_types::VolumeName;
use shorthorn_types::status::Frontend;

use crate::QueueFrontend;
use shorthorn_types::DeviceNumber;

/// The drivers that can make a device of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FrontendKind {
    /// /dev/ublkbN through the ublk driver.
    Ublk,
    /// /dev/nbdN through generic netlink.
    Nbd,
    /// /dev/sdX through the kernel's iSCSI initiator and a tgtd of its own.
    Iscsi,
    /// NBD on a Unix socket: no kernel driver, no device.
    Socket,
}

impl From<FrontendKind> for Frontend {
    fn from(kind: FrontendKind) -> Frontend {
        match kind {
            FrontendKind::Ublk => Frontend::Ublk,
            FrontendKind::Nbd => Frontend::Nbd,
            FrontendKind::Iscsi => Frontend::Iscsi,
            FrontendKind::Socket => Frontend::Socket,
        }
    }
}

impl std::fmt::Display for FrontendKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(Frontend::from(*self).as_str())
    }
}

/// The inputs of a frontend.
#[derive(Clone, Debug)]
pub struct FrontendSpec {
    /// The name of the device node.
    pub volume: VolumeName,
    /// The size of the volume in bytes.
    pub size_bytes: u64,
    /// The number of queues; each gets a [`QueueFrontend`].
    pub queues: u16,
    /// The number of requests in flight per queue; the arena of a queue has as many slots.
    pub depth: u16,
    /// The path of the socket, for [`FrontendKind::Socket`]. The files of [`FrontendKind::Iscsi`] are beside
    /// it.
    pub socket_path: PathBuf,
    /// The directory of the device nodes, `/dev/longhorn`.
    pub device_dir: PathBuf,
    /// The device of an earlier engine process of this attachment, to be recovered.
    pub previous: Option<DeviceRecord>,
    /// True if every request will be answered with an error: then a read proves nothing about the device.
    pub refuses_requests: bool,
}

/// The durable record from which the device is recovered after the process died.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceRecord {
    /// The driver that made the device.
    pub kind: FrontendKind,
    /// Number of the kernel's device: N of /dev/ublkbN or /dev/nbdN. For iSCSI the index of the target's
    /// loopback address; absent for the socket.
    pub kernel_id: Option<u32>,
    /// The number of queues; a recovered device keeps its queues and depth.
    pub queues: u16,
    /// See `queues`.
    pub depth: u16,
}

/// A socket that an earlier process has handed over, at the start of a request: see [`crate::Quiesced::At`].
#[derive(Debug)]
pub struct QueueSocket {
    /// Index of the queue that served the socket.
    pub queue: u16,
    /// Our end of it.
    pub socket: OwnedFd,
}

/// A frontend whose device exists, or is about to, and serves nothing yet.
pub struct Prepared {
    /// The frontends of the queues, in order.
    pub queues: Vec<Box<dyn QueueFrontend>>,
    /// The control half.
    pub device: Box<dyn Device>,
}

impl std::fmt::Debug for Prepared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Prepared").field("queues", &self.queues.len()).finish_non_exhaustive()
    }
}

/// The half of a frontend that lives on the engine's main thread; its calls may block.
pub trait Device: Send {
    /// Returns the record to store before [`Device::go_live`].
    fn record(&self) -> DeviceRecord;

    /// Makes the device usable: the queues already serve. Returns the path under which people find it:
    /// `/dev/longhorn/<volume>`, or the socket.
    ///
    /// # Errors
    /// The obstacle.
    fn go_live(&mut self) -> Result<PathBuf, FrontendError>;

    /// Returns the kernel's number of the live device; none for a socket.
    fn number(&self) -> Option<DeviceNumber> {
        None
    }

    /// Returns the size that the user of the device sees.
    fn size_bytes(&self) -> u64;

    /// Announces the larger size of the volume to the device.
    ///
    /// # Errors
    /// [`FrontendError::Unsupported`] if the kernel cannot do it while the device is in use.
    fn resize(&mut self, size_bytes: u64) -> Result<(), FrontendError>;

    /// Returns a description of the users of the device (mounts, devices on top of it, processes); none if it
    /// has none.
    fn in_use(&self) -> Option<String>;

    /// Returns true if a process that ends must stop the device, and not leave it to the next one. That is so
    /// if the host shuts down and its kernel would wait for the device, although no process uses it.
    fn ends_with_host(&self) -> bool {
        false
    }

    /// Takes the node away first, then the device; the queues still serve meanwhile.
    ///
    /// # Errors
    /// The obstacle.
    fn stop(&mut self) -> Result<(), FrontendError>;
}

/// The reason why a frontend has failed.
#[derive(Debug, thiserror::Error)]
pub enum FrontendError {
    /// This kernel cannot do it.
    #[error("the frontend {frontend} cannot be used on this host: {reason}")]
    Unsupported {
        /// The driver that was asked for.
        frontend: FrontendKind,
        /// The missing feature, and the remedy.
        reason: String,
    },
    /// The name or device is used by another program, and must not be touched.
    #[error("{action}: {reason}")]
    Refused {
        /// The action that failed, with its object.
        action: String,
        /// The obstacle, and the remedy.
        reason: String,
    },
    /// A call to the kernel failed.
    #[error("{action}: {source}")]
    System {
        /// The action that failed, with its object.
        action: String,
        /// The answer of the kernel.
        source: std::io::Error,
    },
}
