//! The objects of the control plane, as they are stored, with Longhorn's field names if the meaning is
//! the same.
//!
//! The programs that only read objects or their definitions build this crate, and not the reconcilers.
#![forbid(unsafe_code)]

mod condition;
mod condition_status;
mod engine;
mod metadata;
mod node;
mod optional;
mod quoted;
mod replica;
pub mod schema;
mod unknown_words;
mod volume;

use serde::{Deserialize, Serialize};

pub use condition::{Condition, ConditionType, Conditions, Finding, NEXT_ATTACH, REPLICAS_STOPPING};
pub use engine::{
    Engine, EngineSpec, MemberRecord, ReplicaTarget, StoredEngineStatus, StoredExpansionStatus,
};
pub use jiff::Timestamp;
pub use metadata::{Key, Kind, Metadata, ResourceVersion};
pub use node::{
    AgentInfo, DeadMount, Discovered, DiskSpec, DiskStatus, FrontendStatus, Node, NodeSpec, NodeStatus,
    ObservedDisk, RESERVED_PERCENT,
};
pub use replica::{DataState, Replica, ReplicaSpec, StoredReplicaStatus};
pub use shorthorn_types::status::{
    CurrentState, DataLocality, DataLocalityError, DesireState, EnginePhase, Frontend, MemberMode,
    Robustness, UnknownFrontend, VolumeState,
};
pub use shorthorn_types::{Label, LabelError, Labels, NodeName, NodeNameError, SECRET_BYTES, Secret, labels};
pub use volume::{DEFAULT_REPLICAS, Display, RebuildLimits, Salvage, Volume, VolumeSpec, VolumeStatus};

/// Any object, as a store keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind")]
#[allow(clippy::large_enum_variant, reason = "few are under way at a time, and those in decisions are boxed")]
pub enum Object {
    /// The desired and the reported state of a volume.
    Volume(Volume),
    /// The engine of a volume.
    Engine(Engine),
    /// A replica of a volume.
    Replica(Replica),
    /// A node with its disks.
    Node(Node),
}

impl Object {
    /// Returns name, version and dates.
    #[must_use]
    pub const fn metadata(&self) -> &Metadata {
        match self {
            Object::Volume(object) => &object.metadata,
            Object::Engine(object) => &object.metadata,
            Object::Replica(object) => &object.metadata,
            Object::Node(object) => &object.metadata,
        }
    }

    /// Returns name, version and dates, for changes.
    pub const fn metadata_mut(&mut self) -> &mut Metadata {
        match self {
            Object::Volume(object) => &mut object.metadata,
            Object::Engine(object) => &mut object.metadata,
            Object::Replica(object) => &mut object.metadata,
            Object::Node(object) => &mut object.metadata,
        }
    }

    /// Returns the kind, which is the tag in the stored form.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        match self {
            Object::Volume(_) => Kind::Volume,
            Object::Engine(_) => Kind::Engine,
            Object::Replica(_) => Kind::Replica,
            Object::Node(_) => Kind::Node,
        }
    }

    /// Returns kind and name, which identify the object in a store.
    #[must_use]
    pub fn key(&self) -> Key {
        Key::new(self.kind(), &self.metadata().name)
    }
}

macro_rules! into_object {
    ($($kind:ident),*) => {$(
        impl From<$kind> for Object {
            fn from(object: $kind) -> Object {
                Object::$kind(object)
            }
        }
    )*};
}
into_object!(Volume, Engine, Replica, Node);
