//! The parts for Kubernetes: the custom resources, and the connection to the API server.

pub mod attachments;
pub mod claims;
mod client;
pub mod crds;
pub mod discover;
pub mod events;
pub mod guard;
pub mod guard_pods;
pub mod leader_pod;
pub mod lease;
pub mod lease_thread;
pub mod lost_node_pods;
#[cfg(test)]
mod manifests;
mod reflector;
pub mod restage;
pub mod workloads;

use kube::core::ApiResource;
use shorthorn_controller_core::objects::Kind;

pub use client::{ConnectError, KubernetesConfig, NodeDrainPolicy, PodsOfLostNodes, client_of, connect};

/// The API group of the custom resources.
pub const GROUP: &str = "shorthorn.io";
/// The version of the custom resources.
pub const VERSION: &str = "v1alpha1";
/// The label of engines and replicas with the name of their volume.
pub const VOLUME_LABEL: &str = "shorthorn.io/volume";
/// The field manager of all writes.
pub const FIELD_MANAGER: &str = "shorthorn-controller";
/// All kinds, in an order in which referring ones come first.
pub const KINDS: [Kind; 4] = [Kind::Node, Kind::Replica, Kind::Engine, Kind::Volume];

/// Returns the name of the kind in objects.
#[must_use]
pub const fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Volume => "Volume",
        Kind::Engine => "Engine",
        Kind::Replica => "Replica",
        Kind::Node => "Node",
    }
}

/// Returns the name of the kind in paths.
#[must_use]
pub fn plural(kind: Kind) -> String {
    format!("{}s", kind.as_str())
}

/// Returns the resource of a kind.
#[must_use]
pub fn resource(kind: Kind) -> ApiResource {
    ApiResource {
        group: GROUP.to_owned(),
        version: VERSION.to_owned(),
        api_version: format!("{GROUP}/{VERSION}"),
        kind: kind_name(kind).to_owned(),
        plural: plural(kind),
    }
}
