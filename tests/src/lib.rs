//! The shared parts of the tests of whole processes, the demonstration and the benchmarks.

pub mod apiserver;
mod bad_disk;
mod bare_volume;
#[allow(clippy::cast_precision_loss)] // figures for people
pub mod bench;
mod caller;
pub mod claims;
mod cluster_node;
mod device_client;
mod fio;
mod guest;
pub mod hosts;
mod installation;
mod kubelet;
mod load;
mod local_volume;
mod nbd_client;
pub mod network;
mod packages;
mod processes;
mod provisioner;
mod sidecars;
mod small_disk;
pub mod soak;
mod vm_host;
mod waiting;

pub use bad_disk::BadDisk;
pub use bare_volume::{BareVolume, BareVolumeOptions, Transport};
pub use caller::Caller;
pub use cluster_node::ClusterNode;
pub use device_client::DeviceClient;
pub use fio::{FioJob, FioReport, fio, parse_fio};
pub use guest::{Guest, GuestCounts, GuestOptions, VolumeClient, Wait, WrongByte};
pub use installation::install;
pub use kubelet::{Kubelet, Mounted};
pub use load::{Load, under_load};
pub use local_volume::{LocalVolume, LocalVolumeOptions, Ready};
pub use nbd_client::{NbdClient, NbdCompletion, NbdRequest};
pub use packages::{build_packages, project};
pub use processes::{compare_exports, engine_status, is_whole, replica_status, signal, until_whole};
pub use provisioner::Provisioner;
pub use shorthorn_testkit::binary;
pub use sidecars::Sidecars;
pub use small_disk::SmallDisk;
pub use vm_host::{NODE, VmHost};
pub use waiting::until;
