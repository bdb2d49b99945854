//! The way to the API server.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueEnum;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde::Deserialize;
use thiserror::Error;

/// The longest that a connection to the API server may take to come about.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// The longest silence on a connection; longer than that of a watch.
const READ_LIMIT: Duration = Duration::from_secs(180);

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
    /// The policy for drains.
    pub node_drain_policy: NodeDrainPolicy,
    /// The image of the guard pods, for which a drain waits; none disables them.
    pub guard_image: Option<String>,
}

impl KubernetesConfig {
    /// Returns the image of guard pods, if there should be any.
    #[must_use]
    pub fn guards(&self) -> Option<&str> {
        match self.node_drain_policy {
            NodeDrainPolicy::BlockIfContainsLastReplica => self.guard_image.as_deref(),
            NodeDrainPolicy::AlwaysAllow => None,
        }
    }
}

/// The reason why the API server cannot be reached.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// The file is no kubeconfig.
    #[error("the kubeconfig {0} cannot be used: {1}")]
    Kubeconfig(PathBuf, kube::config::KubeconfigError),
    /// The context does not exist.
    #[error("the context {0} cannot be used: {1}")]
    Context(String, kube::config::KubeconfigError),
    /// The API server is configured nowhere.
    #[error("cannot find an API server: {0}; give --kubeconfig FILE")]
    Infer(kube::config::InferConfigError),
    /// The certificates or the like cannot be used.
    #[error("the way to the API server cannot be used: {0}")]
    Client(kube::Error),
}

/// Returns a client; nothing is connected yet.
///
/// # Errors
/// [`ConnectError`].
pub async fn connect(config: &KubernetesConfig) -> Result<Client, ConnectError> {
    let mut found = find(config.kubeconfig.as_deref(), None).await?;
    found.connect_timeout = Some(CONNECT_LIMIT);
    found.read_timeout = Some(READ_LIMIT);
    Client::try_from(found).map_err(ConnectError::Client)
}

/// Returns a client for a command, whose connections may be silent for long.
///
/// # Errors
/// [`ConnectError`].
pub async fn client_of(kubeconfig: Option<&Path>, context: Option<&str>) -> Result<Client, ConnectError> {
    let mut found = find(kubeconfig, context).await?;
    found.connect_timeout = Some(CONNECT_LIMIT);
    found.read_timeout = None;
    Client::try_from(found).map_err(ConnectError::Client)
}

/// Returns the API server of that context, of the current one, or of the pod that this runs in.
async fn find(kubeconfig: Option<&Path>, context: Option<&str>) -> Result<Config, ConnectError> {
    let options = KubeConfigOptions { context: context.map(str::to_owned), ..KubeConfigOptions::default() };
    match (kubeconfig, context) {
        (Some(path), _) => {
            let refused = |error| ConnectError::Kubeconfig(path.to_owned(), error);
            let kubeconfig = Kubeconfig::read_from(path).map_err(refused)?;
            Config::from_custom_kubeconfig(kubeconfig, &options).await.map_err(refused)
        }
        (None, Some(context)) => {
            let refused = |error| ConnectError::Context(context.to_owned(), error);
            Config::from_kubeconfig(&options).await.map_err(refused)
        }
        (None, None) => Config::infer().await.map_err(ConnectError::Infer),
    }
}
