//! The facts about a host that the checks judge.

use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;

use shorthorn_frontend::IscsidState;

use crate::serve::network::Choice;

/// The facts about this host.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// The release of the kernel (uname -r).
    pub kernel: String,
    /// The frontends that make a device: name, whether each is usable, and the reason.
    pub frontends: Vec<(String, bool, String)>,
    /// The number of partitions that the kernel reads of an NBD device; None if the driver is not loaded.
    pub nbd_partitions_max: Option<u32>,
    /// The daemon of the iSCSI initiator.
    pub iscsid: IscsidState,
    /// The daemons and rules of other block device tools.
    pub block_tools: BlockTools,
    pub kubelet: Kubelet,
    pub disks: Vec<DiskFacts>,
    /// The addresses that the agent is configured to listen on, and those that something listens on.
    pub ports: Ports,
    /// The clock; None if the kernel does not say.
    pub is_clock_synchronised: Option<bool>,
    /// The data address; None if it is configured off.
    pub data: Option<DataFacts>,
    /// The problem of TLS and its level: true if it keeps the node from being served.
    pub tls: Option<(bool, String)>,
    /// The reason why the kernel cannot encrypt connections of volumes; None if it can.
    pub no_encryption: Option<String>,
    /// The problem of instances that end with the agent; None if they outlive it.
    pub mortal_instances: Option<&'static str>,
    /// Warnings about a Longhorn that manages the same disks or devices.
    pub longhorn: Vec<String>,
}

/// Tools that would open or hold the devices of volumes.
#[derive(Clone, Debug, Default)]
pub struct BlockTools {
    /// True if a process multipathd runs.
    pub multipathd_runs: bool,
    /// The texts of multipath's configuration.
    pub multipath_config: String,
    /// True if LVM is installed.
    pub has_lvm: bool,
    /// True if the udev rule that hides devices of volumes from LVM is installed.
    pub has_udev_rule: bool,
    /// True if udev runs.
    pub udev_runs: bool,
    /// The settings of LVM; None if it is not installed, or was not asked.
    pub lvm: Option<LvmSettings>,
}

/// The settings of LVM that decide which devices it reads.
#[derive(Clone, Debug, Default)]
pub struct LvmSettings {
    /// The patterns of `devices/global_filter`, as LVM prints them.
    pub global_filter: String,
    /// The patterns of `devices/filter`.
    pub filter: String,
    /// True if LVM reads only devices of its devices file.
    pub uses_devices_file: bool,
}

/// The kubelet of this host.
#[derive(Clone, Debug, Default)]
pub struct Kubelet {
    /// True if the configuration demands the CSI driver.
    pub is_wanted: bool,
    /// The root directory, if a kubelet was found.
    pub root: Option<PathBuf>,
    /// The mount that the root directory is on, and whether it is shared; None if it is unknown.
    pub mount: Option<(PathBuf, bool)>,
}

/// A disk of this node.
#[derive(Clone, Debug, Default)]
pub struct DiskFacts {
    pub path: PathBuf,
    /// The problem that keeps the agent from using it, if any.
    pub problem: Option<String>,
    /// The type of its file system.
    pub filesystem: String,
    /// The size of the file system in bytes.
    pub total_bytes: u64,
    pub available_bytes: u64,
    /// The percentage that the trash and other programs are to leave free.
    pub reserve_percent: u32,
    /// True if it is on the root file system.
    pub is_on_root: bool,
}

/// Listening addresses.
#[derive(Clone, Debug, Default)]
pub struct Ports {
    /// True if an agent runs.
    pub agent_runs: bool,
    /// The addresses of the configuration, each with its key.
    pub own: Vec<(&'static str, SocketAddr)>,
    /// The addresses of all listening sockets of this host.
    pub listening: Vec<SocketAddr>,
    /// The ports of replicas.
    pub data_ports: Option<RangeInclusive<u16>>,
    /// The ports that known replicas have.
    pub replica_ports: Vec<u16>,
    /// The ports that the kernel gives to outgoing connections, without the reserved ones.
    pub ephemeral: Option<RangeInclusive<u16>>,
    /// The ports that the kernel does not give away (ip_local_reserved_ports).
    pub reserved: Vec<RangeInclusive<u16>>,
}

/// The data address and its network.
#[derive(Clone, Debug, Default)]
pub struct DataFacts {
    /// The address, and the problem if other nodes do not reach it.
    pub choice: Choice,
    /// The interface of the address, and its MTU in bytes.
    pub interface: Option<(String, u32)>,
    /// The addresses of replicas on other nodes, and whether each answers a small packet and a packet of the
    /// whole MTU.
    pub peers: Vec<(IpAddr, bool, bool)>,
}
