//! What the tests of whole processes, the demonstration and the benchmarks share.

#[allow(clippy::cast_precision_loss)] // figures for people
pub mod bench;
mod binaries;
mod fio;
mod local_volume;
mod vm_host;

pub use binaries::binary;
pub use fio::{FioJob, FioReport, fio, parse_fio};
pub use local_volume::{LocalVolume, LocalVolumeOptions, Ready};
pub use vm_host::{NODE, VmHost};
