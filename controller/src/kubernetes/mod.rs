//! The code for Kubernetes: the connection to the API server, and its objects.
//!
//! - [`store`][]: the custom resources as the store of the controller.
//! - `list_watch`: the only list-and-watch; `reflector` keeps objects of others in memory with it.
//! - [`lease`][], [`lease_thread`][], [`leader_pod`][]: the election of the leader.
//! - [`events`][]: events, which people see with their volume.
//! - [`signer`][]: certificate signing requests of agents; the CA is in a Secret.
//! - [`discover`][], [`claims`][], [`attachments`][], [`workloads`][]: nodes, volumes and pods of others.
//! - [`deletion_guard`][], [`guard_pods`][], [`lost_node_pods`][], [`restage`][]: deletions and drains.

pub mod attachments;
mod ca_secret;
pub mod claims;
mod client;
pub mod deletion_guard;
pub mod discover;
pub mod events;
#[cfg(test)]
pub(crate) mod fake_api;
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
pub mod signer;
pub mod store;
pub mod workloads;

pub use ca_secret::CaSecret;
pub use client::{KubernetesConfig, NodeDrainPolicy, PodsOfLostNodes, connect};
pub use shorthorn_kube::{
    ApiServerError, FIELD_MANAGER, GROUP, KINDS, VERSION, VOLUME_LABEL, crds, kind_name, plural, resource,
};
