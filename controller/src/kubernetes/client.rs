//! The way to the API server.

use std::path::PathBuf;

use clap::ValueEnum;
use kube::Client;
use serde::Deserialize;
use shorthorn_kube::ApiServerError;
use shorthorn_kube::client::client_of_controller;

/// The treatment of pods that Kubernetes wants elsewhere while their node is lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum PodsOfLostNodes {
    /// Pods with Shorthorn volumes are deleted in place of their kubelet.
    #[default]
    Delete,
    /// Pods wait until their node is back or a user deletes them.
    Keep,
}

/// The policy for `kubectl drain` of nodes that volumes need. The words are Longhorn's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum NodeDrainPolicy {
    /// A drain waits until no volume would have fewer replicas than it needs.
    #[default]
    BlockIfContainsLastReplica,
    /// A drain does not wait.
    AlwaysAllow,
}

/// The API server, and the namespace in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesConfig {
    /// The namespace of all objects.
    pub namespace: String,
    /// The kubeconfig; none to connect like a pod, or else like kubectl.
    pub kubeconfig: Option<PathBuf>,
    /// The port of the agents on their nodes.
    pub agent_port: u16,
    /// The treatment of the pods of lost nodes.
    pub pods_of_lost_nodes: PodsOfLostNodes,
    /// True if the controller ends pods whose device is gone.
    pub ends_pods_without_device: bool,
    /// Decides if `kubectl drain` waits for volumes.
    pub node_drain_policy: NodeDrainPolicy,
    /// The image of the guard pods, for which a drain waits; none disables them.
    pub guard_image: Option<String>,
}

impl KubernetesConfig {
    /// Returns the image of guard pods, if there should be any.
    #[must_use]
    pub fn guard_pod_image(&self) -> Option<&str> {
        match self.node_drain_policy {
            NodeDrainPolicy::BlockIfContainsLastReplica => self.guard_image.as_deref(),
            NodeDrainPolicy::AlwaysAllow => None,
        }
    }
}

/// Returns a client; nothing is connected yet.
///
/// # Errors
/// [`ApiServerError`].
pub async fn connect(config: &KubernetesConfig) -> Result<Client, ApiServerError> {
    client_of_controller(config.kubeconfig.as_deref()).await
}
