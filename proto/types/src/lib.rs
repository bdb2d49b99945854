//! The words of Shorthorn as types, the same for replica, engine, agent and controller.
//!
//! Nothing here does I/O, reads a clock or allocates on the I/O path.
#![forbid(unsafe_code)]

mod checked;
mod device_number;
mod errno;
mod generation;
mod hexadecimal;
mod image_kind;
mod label;
pub mod limits;
mod name;
mod node_name;
pub mod optional;
mod range;
mod regions;
mod replica_id;
mod secret;
mod size;
pub mod status;
mod view;

pub use device_number::{DeviceNumber, DeviceNumberError};
pub use errno::Errno;
pub use generation::{Generation, ParseViewError};
pub use hexadecimal::{from_hex, hex};
pub use image_kind::{HEAD_PREFIX, IMAGE_SUFFIX, ImageKind, SNAPSHOT_PREFIX};
pub use label::{Label, LabelError, Labels, MAX_LABEL_BYTES, labels};
pub use name::{VolumeName, VolumeNameError};
pub use node_name::{NodeName, NodeNameError};
pub use range::{ByteRange, RangeError};
pub use regions::{
    MarkAction, MarkRegions, REGION_BYTES_MIN, REGIONS_MAX, RUNS_PER_MARK_MAX, RegionSet, Regions, RegionsOf,
    is_current,
};
pub use replica_id::{ReplicaId, ReplicaIdError};
pub use secret::{SECRET_BYTES, Secret, SecretError};
pub use size::{HumanBytes, HumanGib, ParseBytesError, parse_bytes};
pub use view::{Members, ReplicaReport, TooManyMembers, View, ViewId};
