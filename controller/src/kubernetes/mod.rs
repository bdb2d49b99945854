//! The parts for Kubernetes: the custom resources, and the connection to the API server.

pub mod attachments;
pub mod claims;
mod client;
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

pub use client::{KubernetesConfig, NodeDrainPolicy, PodsOfLostNodes, connect};
pub use shorthorn_kube::{ConnectError, GROUP, KINDS, VERSION, crds, kind_name, plural, resource};

/// The label of engines and replicas with the name of their volume.
pub const VOLUME_LABEL: &str = "shorthorn.io/volume";
/// The field manager of all writes.
pub const FIELD_MANAGER: &str = "shorthorn-controller";
