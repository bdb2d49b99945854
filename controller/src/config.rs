//! The configuration of the controller: flags, and a TOML file for the rest.

mod args;
mod tls;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::num::{NonZeroU16, NonZeroU32};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use shorthorn_controller_core::reconcile::{REBUILDS_PER_NODE, REPLICA_REPLACE_AFTER, Settings};
use shorthorn_controller_core::scheduler::SchedulingLimits;
use shorthorn_controller_core::{NodeName, NodeNameError};
use shorthorn_kube::DEFAULT_NAMESPACE;
use shorthorn_logging::LogFormat;
use shorthorn_metrics::{MetricsListen, MetricsListenError};
use shorthorn_pki::address::{AddressError, DEFAULT_SERVER, Listen, ServerUrl};
use thiserror::Error;

use self::args::log_level;
pub use self::args::{Cli, ControllerCommand, CrdsArgs, DeletionGuardArgs, NodeFlag, ServeArgs};
pub use self::tls::TlsArgs;
use crate::kubernetes::{KubernetesConfig, NodeDrainPolicy, PodsOfLostNodes};

/// Default port of the agents on the nodes of a Kubernetes cluster.
pub const DEFAULT_AGENT_PORT: u16 = 9501;
/// Default log level.
const DEFAULT_LOG: &str = "info";
/// Default address of metrics and health.
pub const DEFAULT_METRICS: MetricsListen = MetricsListen::loopback(9510);

/// Errors of a configuration.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// A node without a URL.
    #[error("{0:?} is not NAME=URL, like node-a=http://127.0.0.1:9501")]
    NodeForm(String),
    /// A name that can never work.
    #[error(transparent)]
    NodeName(#[from] NodeNameError),
    /// An address that can never work.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// A node with two URLs.
    #[error("node {0} is given twice, with different URLs")]
    NodeTwice(NodeName),
    /// The file cannot be read.
    #[error("cannot read the configuration {0}: {1}")]
    Read(PathBuf, std::io::Error),
    /// The file has an unknown key or a wrong value; the message has the line.
    #[error("the configuration {0} has a mistake:\n{1}")]
    Parse(PathBuf, Box<toml::de::Error>),
    /// A percentage that can never work.
    #[error("{0} = {1}: use {2}")]
    Percentage(&'static str, u32, &'static str),
    /// An unknown log level.
    #[error("log: {0}")]
    Log(String),
    /// An address of metrics that can never work.
    #[error("metrics_listen: {0}")]
    MetricsListen(#[from] MetricsListenError),
    /// The CSI listener is for processes on the same host, and the permissions of its file protect it.
    #[error("csi_listen = {0}: use unix:///path/of/csi.sock")]
    CsiListen(Listen),
    /// CSI and the API have the same address.
    #[error("csi_listen and listen are both {0}: use different addresses")]
    SameListen(Listen),
    /// No store is configured.
    #[error("no store is configured: give --store FILE or --kubernetes, or the same in the --config file")]
    NoStore,
    /// Two stores are configured.
    #[error("the configuration {0} has both store and [kubernetes]: remove one of them")]
    TwoStores(PathBuf),
    /// The option is for Kubernetes only.
    #[error(
        "--namespace, --kubeconfig, --agent-port and flags about pods and drains are for --kubernetes only"
    )]
    NotKubernetes,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    store: Option<PathBuf>,
    kubernetes: Option<KubernetesTable>,
    listen: Option<Listen>,
    forward_listen: Option<Listen>,
    tls_listen: Option<SocketAddr>,
    csi_listen: Option<Listen>,
    metrics_listen: Option<String>,
    log: Option<String>,
    log_format: Option<LogFormat>,
    replica_replace_after_s: Option<u64>,
    storage_over_provisioning_percentage: Option<u32>,
    storage_minimal_available_percentage: Option<u32>,
    allow_volume_creation_with_degraded_availability: Option<bool>,
    concurrent_replica_rebuild_per_node_limit: Option<NonZeroU32>,
    disable_scheduling_on_cordoned_node: Option<bool>,
    #[serde(default)]
    nodes: BTreeMap<NodeName, ServerUrl>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct KubernetesTable {
    namespace: Option<String>,
    kubeconfig: Option<PathBuf>,
    agent_port: Option<NonZeroU16>,
    pods_of_lost_nodes: Option<PodsOfLostNodes>,
    auto_delete_pod_when_volume_detached_unexpectedly: Option<bool>,
    node_drain_policy: Option<NodeDrainPolicy>,
    guard_image: Option<String>,
}

/// The storage of the volumes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreConfig {
    /// In a database file.
    File(PathBuf),
    /// The volumes are custom resources.
    Kubernetes(KubernetesConfig),
}

impl std::fmt::Display for StoreConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            StoreConfig::File(path) => write!(f, "{}", path.display()),
            StoreConfig::Kubernetes(config) => write!(f, "namespace {}", config.namespace),
        }
    }
}

/// The configuration that results.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The storage of the volumes.
    pub store: StoreConfig,
    /// The address of the API.
    pub listen: Listen,
    /// The additional address of the API; none if it has none.
    pub forward_listen: Option<Listen>,
    /// The address of the API with mutual TLS; none if it is not served.
    pub tls_listen: Option<SocketAddr>,
    /// The socket of CSI in the file system; none if CSI is not served.
    pub csi_listen: Option<Listen>,
    /// The address of metrics and health.
    pub metrics_listen: MetricsListen,
    /// The filter of the log.
    pub log: String,
    /// Text or JSON.
    pub log_format: LogFormat,
    /// The settings for all volumes.
    pub settings: Settings,
    /// The agents.
    pub nodes: BTreeMap<NodeName, ServerUrl>,
}

impl Config {
    /// Returns the configuration of these flags and the file that they name.
    ///
    /// # Errors
    /// [`ConfigError`] has the correction.
    pub fn load(mut args: ServeArgs) -> Result<Config, ConfigError> {
        let mut file = args.config.as_deref().map_or_else(|| Ok(File::default()), read)?;
        let store = store(&args, &mut file)?;
        let nodes = nodes(std::mem::take(&mut args.nodes), std::mem::take(&mut file.nodes))?;
        let settings = settings(&args, &file)?;
        let listen = match args.listen.or(file.listen) {
            Some(listen) => listen,
            None => DEFAULT_SERVER.parse()?,
        };
        Ok(Config {
            store,
            forward_listen: args.forward_listen.or(file.forward_listen),
            tls_listen: args.tls.tls_listen.or(file.tls_listen),
            csi_listen: check_csi(args.csi_listen.or(file.csi_listen), &listen)?,
            listen,
            metrics_listen: match (args.metrics_listen, file.metrics_listen) {
                (Some(given), _) => given,
                (None, Some(text)) => text.parse()?,
                (None, None) => DEFAULT_METRICS,
            },
            settings,
            log_format: args.log_format.or(file.log_format).unwrap_or_default(),
            log: log_level(&args.log.or(file.log).unwrap_or_else(|| DEFAULT_LOG.to_owned()))
                .map_err(ConfigError::Log)?,
            nodes,
        })
    }
}

/// Returns the nodes of the flags and of the file together.
fn nodes(
    flags: Vec<NodeFlag>,
    mut nodes: BTreeMap<NodeName, ServerUrl>,
) -> Result<BTreeMap<NodeName, ServerUrl>, ConfigError> {
    for NodeFlag { name, url } in flags {
        match nodes.insert(name.clone(), url.clone()) {
            Some(other) if other != url => return Err(ConfigError::NodeTwice(name)),
            _ => {}
        }
    }
    Ok(nodes)
}

/// Returns the settings for all volumes.
fn settings(args: &ServeArgs, file: &File) -> Result<Settings, ConfigError> {
    let default = SchedulingLimits::default();
    let scheduling = SchedulingLimits {
        storage_over_provisioning_percentage: args
            .storage_over_provisioning_percentage
            .or(file.storage_over_provisioning_percentage)
            .unwrap_or(default.storage_over_provisioning_percentage),
        storage_minimal_available_percentage: args
            .storage_minimal_available_percentage
            .or(file.storage_minimal_available_percentage)
            .unwrap_or(default.storage_minimal_available_percentage),
        disable_scheduling_on_cordoned_node: args
            .disable_scheduling_on_cordoned_node
            .or(file.disable_scheduling_on_cordoned_node)
            .unwrap_or(default.disable_scheduling_on_cordoned_node),
    };
    check(scheduling)?;
    Ok(Settings {
        scheduling,
        replica_replace_after: args
            .replica_replace_after_s
            .or(file.replica_replace_after_s)
            .map_or(REPLICA_REPLACE_AFTER, Duration::from_secs),
        degraded_creation: args
            .allow_volume_creation_with_degraded_availability
            .or(file.allow_volume_creation_with_degraded_availability)
            .unwrap_or(true),
        rebuilds_per_node: args
            .concurrent_replica_rebuild_per_node_limit
            .or_else(|| file.concurrent_replica_rebuild_per_node_limit.map(NonZeroU32::get))
            .unwrap_or(REBUILDS_PER_NODE),
    })
}

fn check_csi(csi: Option<Listen>, listen: &Listen) -> Result<Option<Listen>, ConfigError> {
    match csi {
        Some(csi) if csi == *listen => Err(ConfigError::SameListen(csi)),
        Some(csi @ Listen::Tcp(_)) => Err(ConfigError::CsiListen(csi)),
        csi => Ok(csi),
    }
}

fn store(args: &ServeArgs, file: &mut File) -> Result<StoreConfig, ConfigError> {
    let table = file.kubernetes.take();
    if let (Some(_), Some(_), Some(path)) = (&table, &file.store, &args.config) {
        return Err(ConfigError::TwoStores(path.clone()));
    }
    let path = args.store.clone().or_else(|| file.store.take().filter(|_| !args.kubernetes));
    if (args.kubernetes || table.is_some()) && args.store.is_none() {
        let table = table.unwrap_or_default();
        let namespace = args.namespace.clone().or(table.namespace);
        return Ok(StoreConfig::Kubernetes(KubernetesConfig {
            namespace: namespace.unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned()),
            kubeconfig: args.kubeconfig.clone().or(table.kubeconfig),
            agent_port: args
                .agent_port
                .or_else(|| table.agent_port.map(NonZeroU16::get))
                .unwrap_or(DEFAULT_AGENT_PORT),
            pods_of_lost_nodes: args.pods_of_lost_nodes.or(table.pods_of_lost_nodes).unwrap_or_default(),
            ends_pods_without_device: args
                .auto_delete_pod_when_volume_detached_unexpectedly
                .or(table.auto_delete_pod_when_volume_detached_unexpectedly)
                .unwrap_or(true),
            node_drain_policy: args.node_drain_policy.or(table.node_drain_policy).unwrap_or_default(),
            guard_image: args.guard_image.clone().or(table.guard_image),
        }));
    }
    let is_for_kubernetes = args.namespace.is_some()
        || args.kubeconfig.is_some()
        || args.agent_port.is_some()
        || args.pods_of_lost_nodes.is_some()
        || args.auto_delete_pod_when_volume_detached_unexpectedly.is_some()
        || args.node_drain_policy.is_some()
        || args.guard_image.is_some();
    if is_for_kubernetes {
        return Err(ConfigError::NotKubernetes);
    }
    path.map(StoreConfig::File).ok_or(ConfigError::NoStore)
}

/// Flags are checked already; the file is not.
fn check(limits: SchedulingLimits) -> Result<(), ConfigError> {
    let over = limits.storage_over_provisioning_percentage;
    let minimal = limits.storage_minimal_available_percentage;
    if over == 0 {
        return Err(ConfigError::Percentage("storage_over_provisioning_percentage", over, "at least 1"));
    }
    if minimal >= 100 {
        return Err(ConfigError::Percentage("storage_minimal_available_percentage", minimal, "at most 99"));
    }
    Ok(())
}

fn read(path: &Path) -> Result<File, ConfigError> {
    let text = std::fs::read_to_string(path).map_err(|error| ConfigError::Read(path.to_owned(), error))?;
    toml::from_str(&text).map_err(|error| ConfigError::Parse(path.to_owned(), Box::new(error)))
}

#[cfg(test)]
mod maintenance_tests;
#[cfg(test)]
mod reference_tests;

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    pub(super) fn load(text: &str, flags: &[&str]) -> Result<Config, ConfigError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("controller.toml");
        std::fs::write(&path, text).unwrap();
        let mut words = vec!["shorthorn-controller", "serve", "--config", path.to_str().unwrap()];
        words.extend(flags);
        let ControllerCommand::Serve(args) = Cli::parse_from(words).command else { unreachable!() };
        Config::load(*args)
    }

    #[test]
    fn volumes_are_kept_in_one_place() {
        let kubernetes = |namespace: &str, kubeconfig: Option<&str>| {
            let (namespace, kubeconfig) = (namespace.to_owned(), kubeconfig.map(PathBuf::from));
            StoreConfig::Kubernetes(KubernetesConfig {
                namespace,
                kubeconfig,
                agent_port: DEFAULT_AGENT_PORT,
                pods_of_lost_nodes: PodsOfLostNodes::Delete,
                ends_pods_without_device: true,
                node_drain_policy: NodeDrainPolicy::BlockIfContainsLastReplica,
                guard_image: None,
            })
        };
        assert_eq!(load("", &["--kubernetes"]).unwrap().store, kubernetes("shorthorn-system", None));
        let table = "[kubernetes]\nnamespace = \"a\"\nkubeconfig = \"/k\"\n";
        assert_eq!(load(table, &[]).unwrap().store, kubernetes("a", Some("/k")));
        assert_eq!(load(table, &["--namespace", "b"]).unwrap().store, kubernetes("b", Some("/k")));
        assert_eq!(load(table, &["--store", "/b"]).unwrap().store, StoreConfig::File("/b".into()));
        assert_eq!(
            load("store = \"/a\"\n", &["--kubernetes"]).unwrap().store,
            kubernetes("shorthorn-system", None)
        );
        let both = load(&format!("store = \"/a\"\n{table}"), &[]).unwrap_err();
        assert!(matches!(both, ConfigError::TwoStores(_)), "{both}");
        for flag in ["--namespace=b", "--agent-port=1", "--pods-of-lost-nodes=keep", "--guard-image=i"] {
            assert!(matches!(load("", &["--store", "/a", flag]), Err(ConfigError::NotKubernetes)));
        }
        let port = |text: &str, flags: &[&str]| match load(text, flags).unwrap().store {
            StoreConfig::Kubernetes(config) => config.agent_port,
            StoreConfig::File(_) => unreachable!(),
        };
        assert_eq!(port("[kubernetes]\nagent_port = 7\n", &[]), 7);
        assert_eq!(port("[kubernetes]\nagent_port = 7\n", &["--agent-port", "8"]), 8);
        let pods = |text: &str, flags: &[&str]| match load(text, flags).unwrap().store {
            StoreConfig::Kubernetes(config) => config.pods_of_lost_nodes,
            StoreConfig::File(_) => unreachable!(),
        };
        let keep = "[kubernetes]\npods_of_lost_nodes = \"keep\"\n";
        assert_eq!(pods(keep, &[]), PodsOfLostNodes::Keep);
        assert_eq!(pods(keep, &["--pods-of-lost-nodes", "delete"]), PodsOfLostNodes::Delete);
        let zero = load("[kubernetes]\nagent_port = 0\n", &[]).unwrap_err().to_string();
        assert!(zero.contains("line 2"), "{zero}");
    }

    #[test]
    fn flags_win_over_the_file_and_nodes_add_up() {
        let text = "store = \"/a\"\nlog = \"debug\"\n[nodes]\na = \"http://127.0.0.1:1\"\n";
        let config = load(text, &["--store", "/b", "--node", "b=unix:///run/b.sock"]).unwrap();
        assert_eq!(config.store, StoreConfig::File("/b".into()));
        assert_eq!((config.log.as_str(), config.log_format), ("debug", LogFormat::Text));
        let error = load("store = \"/a\"\nlog = \"loud\"\n", &[]).unwrap_err().to_string();
        assert!(error.contains("log: \"loud\" is not a log level"), "{error}");
        let json = load("store = \"/a\"\nlog_format = \"json\"\n", &[]).unwrap();
        assert_eq!(json.log_format, LogFormat::Json);
        assert_eq!(config.settings, Settings::default());
        assert_eq!(config.listen.to_string(), DEFAULT_SERVER);
        assert_eq!(config.nodes.keys().map(NodeName::as_str).collect::<Vec<_>>(), ["a", "b"]);
    }

    #[test]
    fn the_time_after_which_replicas_are_replaced_can_be_set() {
        let after =
            |text: &str, flags: &[&str]| load(text, flags).unwrap().settings.replica_replace_after.as_secs();
        let text = "store = \"/a\"\nreplica_replace_after_s = 5\n";
        assert_eq!(after(text, &[]), 5);
        assert_eq!(after(text, &["--replica-replace-after-s", "7"]), 7);
    }

    #[test]
    fn degraded_creation_and_rebuilds_at_a_time_can_be_set() {
        let settings = |text: &str, flags: &[&str]| {
            let settings = load(&format!("store = \"/a\"\n{text}"), flags).unwrap().settings;
            (settings.degraded_creation, settings.rebuilds_per_node)
        };
        assert_eq!(settings("", &[]), (true, 5));
        let text = "allow_volume_creation_with_degraded_availability = false\n\
                    concurrent_replica_rebuild_per_node_limit = 2\n";
        assert_eq!(settings(text, &[]), (false, 2));
        let flags = [
            "--allow-volume-creation-with-degraded-availability=true",
            "--concurrent-replica-rebuild-per-node-limit=9",
        ];
        assert_eq!(settings(text, &flags), (true, 9));
        assert!(load("store = \"/a\"\nconcurrent_replica_rebuild_per_node_limit = 0\n", &[]).is_err());
    }

    #[test]
    fn the_limits_of_the_use_of_disks_can_be_set() {
        let limits = |text: &str, flags: &[&str]| {
            let limits = load(text, flags).unwrap().settings.scheduling;
            (limits.storage_over_provisioning_percentage, limits.storage_minimal_available_percentage)
        };
        assert_eq!(limits("store = \"/a\"\n", &[]), (100, 10));
        let text = "store = \"/a\"\nstorage_over_provisioning_percentage = 200\n\
                    storage_minimal_available_percentage = 25\n";
        assert_eq!(limits(text, &[]), (200, 25));
        assert_eq!(limits(text, &["--storage-minimal-available-percentage", "0"]), (200, 0));
        for wrong in
            ["storage_over_provisioning_percentage = 0", "storage_minimal_available_percentage = 100"]
        {
            let error = load(&format!("store = \"/a\"\n{wrong}\n"), &[]).unwrap_err().to_string();
            assert!(error.contains(wrong), "{error}");
        }
    }

    #[test]
    fn csi_is_served_on_a_socket_of_its_own_or_nowhere() {
        let csi = |text: &str, flags: &[&str]| {
            load(&format!("store = \"/a\"\n{text}"), flags).map(|config| config.csi_listen)
        };
        assert_eq!(csi("", &[]).unwrap(), None);
        let path = |path: &str| Some(Listen::Unix(path.into()));
        let text = "csi_listen = \"unix:///run/csi.sock\"\n";
        assert_eq!(csi(text, &[]).unwrap(), path("/run/csi.sock"));
        assert_eq!(csi(text, &["--csi-listen", "unix:///b.sock"]).unwrap(), path("/b.sock"));
        let error = csi("csi_listen = \"127.0.0.1:1\"\n", &[]).unwrap_err().to_string();
        assert!(error.contains("unix:///"), "{error}");
        let error = csi(text, &["--listen", "unix:///run/csi.sock"]).unwrap_err().to_string();
        assert!(error.contains("different addresses"), "{error}");
    }

    #[test]
    fn metrics_are_served_at_the_configured_address() {
        let metrics = |text: &str, flags: &[&str]| {
            load(&format!("store = \"/a\"\n{text}"), flags).map(|config| config.metrics_listen)
        };
        assert_eq!(metrics("", &[]).unwrap(), DEFAULT_METRICS);
        let at = |text: &str| text.parse().unwrap();
        assert_eq!(metrics("metrics_listen = \"[::]:1\"\n", &[]).unwrap(), at("[::]:1"));
        let both = metrics("metrics_listen = \"[::]:1\"\n", &["--metrics-listen", "127.0.0.2:3"]);
        assert_eq!(both.unwrap(), at("127.0.0.2:3"));
        assert_eq!(metrics("", &["--metrics-listen", "off"]).unwrap(), MetricsListen::Off);
        let error = metrics("metrics_listen = \"9510\"\n", &[]).unwrap_err().to_string();
        assert!(error.contains("metrics_listen") && error.contains("ADDRESS:PORT"), "{error}");
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        let message = load("store = \"/a\"\nstroe = \"/b\"\n", &[]).unwrap_err().to_string();
        assert!(message.contains("line 2") && message.contains("stroe"), "{message}");
        let message = load("", &[]).unwrap_err().to_string();
        assert!(message.contains("--store"), "{message}");
        let twice = load(
            "store = \"/a\"\n[nodes]\na = \"http://127.0.0.1:1\"\n",
            &["--node", "a=http://127.0.0.1:2"],
        );
        assert!(twice.unwrap_err().to_string().contains("twice"));
        assert!("a".parse::<NodeFlag>().is_err());
    }
}
