//! The commands of the controller and their flags.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Parser, Subcommand};
use shorthorn_controller_core::NodeName;
use shorthorn_logging::LogFormat;
use shorthorn_metrics::MetricsListen;
use shorthorn_pki::address::{Listen, ServerUrl};

use super::{ConfigError, TlsArgs};
use crate::kubernetes::{NodeDrainPolicy, PodsOfLostNodes};

/// The Shorthorn controller: reconciles volumes, schedules replicas, and serves CSI.
#[derive(Debug, Parser)]
#[command(version, about, long_about = None)]
pub struct Cli {
    /// Another action than to serve.
    #[command(subcommand)]
    pub command: ControllerCommand,
}

/// The subcommands of shorthorn-controller.
#[derive(Debug, Subcommand)]
pub enum ControllerCommand {
    /// Runs the controller in the foreground, until SIGTERM or SIGINT.
    Serve(Box<ServeArgs>),
    /// Prints the custom resource definitions, for kubectl apply -f -
    Crds(CrdsArgs),
    /// Prints the admission policies that keep volumes from being deleted by mistake, for kubectl apply -f -
    DeletionGuard(DeletionGuardArgs),
    /// Waits for SIGTERM or SIGINT; guard pods, for which kubectl drain waits, run this
    Pause,
    /// Writes a man page of each command to a directory
    #[command(hide = true)]
    Man {
        /// The directory to which the man pages are written.
        directory: PathBuf,
    },
}

/// The options of printing the definitions.
#[derive(Debug, Args)]
pub struct CrdsArgs {
    /// Leaves out the CEL rules, which API servers before 1.25 do not support.
    #[arg(long)]
    pub without_rules: bool,
}

/// Arguments of deletion-guard.
#[derive(Debug, Args)]
pub struct DeletionGuardArgs {
    /// The namespace of the objects and of the controller's service account.
    #[arg(long, default_value = "shorthorn-system")]
    pub namespace: String,
}

/// Arguments of serve.
#[derive(Debug, Default, Args)]
pub struct ServeArgs {
    /// TOML file with any of: store, listen, forward_listen, tls_listen, csi_listen, metrics_listen, log,
    /// log_format, replica_replace_after_s, storage_over_provisioning_percentage,
    /// storage_minimal_available_percentage, allow_volume_creation_with_degraded_availability,
    /// concurrent_replica_rebuild_per_node_limit, disable_scheduling_on_cordoned_node. The table nodes has
    /// lines NAME = "URL". The table kubernetes has namespace, kubeconfig, agent_port, pods_of_lost_nodes,
    /// auto_delete_pod_when_volume_detached_unexpectedly, node_drain_policy and guard_image. A flag overrides
    /// the file, and the nodes of both are used. Unknown keys are refused.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Database file of the volumes; created if it does not exist. Only one controller at a time can open it.
    #[arg(long, value_name = "FILE")]
    pub store: Option<PathBuf>,
    /// Stores the volumes as custom resources of Kubernetes. One of several controllers leads at a time.
    #[arg(long, conflicts_with = "store")]
    pub kubernetes: bool,
    /// Namespace of the custom resources [default: shorthorn-system]
    #[arg(long, value_name = "NAMESPACE")]
    pub namespace: Option<String>,
    /// Kubeconfig of the API server; the default is the pod's service account, then kubectl's configuration.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Port of the agents on the nodes of the cluster. The controller discovers nodes with the registered
    /// driver [default: 9501]
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub agent_port: Option<u16>,
    /// Action for terminating pods with Shorthorn volumes on lost nodes: delete force-deletes them, so that
    /// they start on other nodes. keep lets them wait for their node or an operator [default: delete]
    #[arg(long, value_name = "delete|keep")]
    pub pods_of_lost_nodes: Option<PodsOfLostNodes>,
    /// Deletes a pod whose device is gone, so that its volume is staged again. Applies only to pods that
    /// a controller re-creates [default: true]
    #[arg(long, value_name = "true|false")]
    pub auto_delete_pod_when_volume_detached_unexpectedly: Option<bool>,
    /// Policy for kubectl drain on a node with replicas that volumes in use need. With
    /// block-if-contains-last-replica and a --guard-image, the drain waits until the volumes no longer need
    /// them; with always-allow it does not wait [default: block-if-contains-last-replica]
    #[arg(long, value_name = "POLICY")]
    pub node_drain_policy: Option<NodeDrainPolicy>,
    /// Image of the guard pods, for which kubectl drain waits: the image of this controller, with
    /// shorthorn-controller in /usr/bin. Without it, the controller creates no guard pods and a drain does
    /// not wait
    #[arg(long, value_name = "IMAGE")]
    pub guard_image: Option<String>,
    /// The agent of a node: http://HOST:PORT, https://HOST:PORT or unix:///PATH. Repeat it for each node.
    #[arg(long = "node", value_name = "NAME=URL")]
    pub nodes: Vec<NodeFlag>,
    /// Address of the API for shorthornctl: unix:///PATH, or 127.0.0.1:PORT
    /// [default: unix:///run/shorthorn/controller.sock]
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<Listen>,
    /// Second address of the API: 127.0.0.1:PORT of a pod, which shorthornctl reaches by a port-forward; off
    /// by default
    #[arg(long, value_name = "ADDRESS")]
    pub forward_listen: Option<Listen>,
    /// Flags for TLS.
    #[command(flatten)]
    pub tls: TlsArgs,
    /// Socket for the CSI sidecars: unix:///PATH, on their host; off by default
    #[arg(long, value_name = "ADDRESS")]
    pub csi_listen: Option<Listen>,
    /// Address of /metrics, /healthz and /readyz: ADDRESS:PORT, or off. Every client that reaches it can read
    /// them [default: 127.0.0.1:9510, if that is free]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub metrics_listen: Option<MetricsListen>,
    /// Seconds for which a replica may be away from an attached volume before a new replica replaces it
    /// [default: 600]
    #[arg(long, value_name = "SECONDS")]
    pub replica_replace_after_s: Option<u64>,
    /// Bytes that may be scheduled on a disk, in percent of its unreserved space. More than 100 is possible,
    /// because replicas are sparse, but the disk can run out of space [default: 100]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(1..))]
    pub storage_over_provisioning_percentage: Option<u32>,
    /// Minimum free space of a disk for new replicas, in percent of its size [default: 10]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(..100))]
    pub storage_minimal_available_percentage: Option<u32>,
    /// Creates a volume with fewer replicas than requested if not all can be scheduled. The others are
    /// created once the volume is attached and they can be scheduled [default: true]
    #[arg(long, value_name = "true|false")]
    pub allow_volume_creation_with_degraded_availability: Option<bool>,
    /// Maximum number of concurrent rebuilds on a node. Further replacements are placed elsewhere or wait;
    /// volumes with the fewest replicas come first [default: 5]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..))]
    pub concurrent_replica_rebuild_per_node_limit: Option<u32>,
    /// Places no new replicas on nodes that are cordoned in Kubernetes; existing replicas stay
    /// [default: true]
    #[arg(long, value_name = "true|false")]
    pub disable_scheduling_on_cordoned_node: Option<bool>,
    /// Log level on standard error: error, warn, info, debug or trace, also per module
    /// (shorthorn_controller=debug,info) [default: info]
    #[arg(long, value_name = "FILTER", value_parser = log_level)]
    pub log: Option<String>,
    /// Log format: text for people, json for programs [default: text]
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<LogFormat>,
}

pub(super) fn log_level(text: &str) -> Result<String, String> {
    shorthorn_logging::check_level(text).map(|()| text.to_owned())
}

/// A node as a flag names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeFlag {
    pub(super) name: NodeName,
    pub(super) url: ServerUrl,
}

impl FromStr for NodeFlag {
    type Err = ConfigError;
    fn from_str(text: &str) -> Result<NodeFlag, ConfigError> {
        let (name, url) = text.split_once('=').ok_or_else(|| ConfigError::NodeForm(text.to_owned()))?;
        Ok(NodeFlag { name: name.parse()?, url: url.parse()? })
    }
}
