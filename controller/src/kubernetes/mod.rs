//! The parts for Kubernetes: the custom resources, and the connection to the API server.

pub mod attachments;
pub mod claims;
mod client;
pub mod discover;
pub mod guard;
pub mod guard_pods;
pub mod leader_pod;
pub mod lease;
pub mod lease_thread;
pub(crate) mod list_watch;
pub mod lost_node_pods;
#[cfg(test)]
mod manifests;
mod reflector;
pub mod restage;
pub mod workloads;

pub use client::{KubernetesConfig, NodeDrainPolicy, PodsOfLostNodes, connect};
pub use shorthorn_kube::{
    ConnectError, FIELD_MANAGER, GROUP, KINDS, VERSION, VOLUME_LABEL, crds, kind_name, plural, resource,
};
