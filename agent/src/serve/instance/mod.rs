//! Engines and replicas as processes: their names, managers and states.

mod addresses;
mod backend;
mod children;
mod commands;
mod control_watch;
mod device_renewal;
mod hub;
mod message;
mod paths;
mod ports;
mod process;
mod program;
mod spec;
mod systemd;
mod table;
mod takeover;
mod units;
mod upgrade;

use std::fmt;

use shorthorn_api::v1;
use shorthorn_types::{ReplicaId, VolumeName};

pub use addresses::last_data_address;
pub use backend::{Backend, BackendError};
pub use children::Children;
pub use control_watch::io_counters;
pub use hub::{Hub, StartOptions};
pub use paths::InstancePaths;
pub use process::{InstanceProcess, ProcessPhase};
pub use spec::{Spec, endpoints, rebuild_limits, volume_size};
pub use systemd::Systemd;
pub use table::{InstanceWatch, Table};

use crate::serve::error::NodeError;

/// The identity of an instance.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum InstanceId {
    /// A volume has at most one engine on a node.
    Engine(VolumeName),
    /// The volume and the identity in its views.
    Replica(VolumeName, ReplicaId),
}

impl InstanceId {
    /// Parses a name from outside.
    ///
    /// # Errors
    /// [`NodeError::Invalid`] has the problem of the name.
    pub fn parse(kind: v1::InstanceKind, name: &str) -> Result<InstanceId, NodeError> {
        match kind {
            v1::InstanceKind::Engine => Ok(InstanceId::Engine(VolumeName::new(name)?)),
            v1::InstanceKind::Replica => {
                let parts = name.rsplit_once('-');
                let (volume, replica) = parts.ok_or_else(|| {
                    NodeError::Invalid(format!("instance name {name:?} is not <volume>-<replica id>"))
                })?;
                Ok(InstanceId::Replica(VolumeName::new(volume)?, replica.parse()?))
            }
            v1::InstanceKind::Unspecified => {
                Err(NodeError::Invalid("the kind of the instance is missing: engine or replica".into()))
            }
        }
    }

    /// Returns the kind for the node API.
    pub fn kind(&self) -> v1::InstanceKind {
        match self {
            InstanceId::Engine(_) => v1::InstanceKind::Engine,
            InstanceId::Replica(..) => v1::InstanceKind::Replica,
        }
    }

    /// Returns the name, which is unique in its kind.
    pub fn name(&self) -> String {
        match self {
            InstanceId::Engine(volume) => volume.to_string(),
            InstanceId::Replica(volume, replica) => format!("{volume}-{replica}"),
        }
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InstanceId::Engine(volume) => write!(f, "engine {volume}"),
            InstanceId::Replica(volume, replica) => write!(f, "replica {volume}-{replica}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_back() {
        for (kind, name) in [(v1::InstanceKind::Engine, "v-1"), (v1::InstanceKind::Replica, "v-1-0123abcd")] {
            let id = InstanceId::parse(kind, name).unwrap();
            assert_eq!((id.kind(), id.name().as_str()), (kind, name));
        }
    }

    #[test]
    fn invalid_names_are_refused() {
        for name in ["", "../v1", "v1/x", "V1", "v1\n"] {
            assert!(InstanceId::parse(v1::InstanceKind::Engine, name).is_err(), "{name:?}");
        }
        for name in ["v1", "v1-short", "-0123abcd", "../x-0123abcd", "v1-0123ABCD", "v1-0123abc/"] {
            assert!(InstanceId::parse(v1::InstanceKind::Replica, name).is_err(), "{name:?}");
        }
        assert!(InstanceId::parse(v1::InstanceKind::Unspecified, "v1").is_err());
    }
}
