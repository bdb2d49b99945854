//! Ways to reach the controller: at an address, or through the API server of Kubernetes at the pod that
//! leads.

mod forward;
mod leader;

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use kube::Client;
use shorthorn_kube::{DEFAULT_NAMESPACE, client_of};
use shorthorn_pki::address::{DEFAULT_SERVER, ServerUrl};
use shorthorn_pki::{Credentials, Role};
use tonic::transport::Channel;

use self::forward::{ForwardConnector, LastProblem, PodStreams};
use super::error::CtlError;
use super::output;

/// The longest that a connection may take to come about; one through Kubernetes takes several calls.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// The longest that a forwarded port may take to come about: kubelet and the API server open a stream each.
const FORWARD_LIMIT: Duration = Duration::from_secs(20);
/// The interval of probes of a silent connection through Kubernetes.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// The prefix of the program's name as a plugin of kubectl.
const PLUGIN: &str = "kubectl-";

/// The options that locate the controller.
#[derive(Clone, Debug, Default, Args)]
pub struct ReachArgs {
    /// URL of the controller: unix:///PATH, http://HOST:PORT, or https://HOST:PORT for TLS, on this host too.
    /// The default is unix:///run/shorthorn/controller.sock if a controller listens there, else the cluster
    /// of the kubeconfig. --kubeconfig and --context take precedence
    #[arg(long, global = true, value_name = "URL", env = "SHORTHORN_SERVER")]
    pub server: Option<ServerUrl>,
    /// Certificate for a controller on another host, from shorthornctl tls issue
    #[arg(long, global = true, value_name = "FILE", env = "SHORTHORN_TLS_IDENTITY")]
    pub tls_identity: Option<PathBuf>,
    /// Connects through the cluster of this kubeconfig to its leading controller, even with --server
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Connects through the cluster of this context of the kubeconfig
    #[arg(long, global = true, value_name = "NAME")]
    pub context: Option<String>,
    /// Namespace of the controller
    #[arg(long, global = true, value_name = "NAMESPACE", default_value = DEFAULT_NAMESPACE)]
    pub system_namespace: String,
}

/// The way that is taken.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Way {
    Address(String),
    Cluster,
}

/// The relevant parts of this host.
#[derive(Clone, Copy, Debug, Default)]
struct HostEnvironment {
    /// The program is a plugin of kubectl.
    is_plugin: bool,
    /// True if the default socket exists, so that a controller may listen there.
    has_socket: bool,
    /// True if an API server is configured.
    has_cluster: bool,
    /// The program runs in a pod.
    is_pod: bool,
}

impl HostEnvironment {
    fn detect() -> HostEnvironment {
        let path = DEFAULT_SERVER.trim_start_matches("unix://");
        let home = std::env::home_dir().map(|home| home.join(".kube/config"));
        let is_pod = std::env::var_os("KUBERNETES_SERVICE_HOST").is_some();
        let has_config = std::env::var_os("KUBECONFIG").is_some() || home.is_some_and(|file| file.exists());
        let program = std::env::args_os().next();
        HostEnvironment {
            is_plugin: program.is_some_and(|program| is_plugin(Path::new(&program))),
            has_socket: std::os::unix::net::UnixStream::connect(path).is_ok(),
            has_cluster: is_pod || has_config,
            is_pod,
        }
    }
}

/// Returns true if a program of that name was started by `kubectl shorthorn`.
pub(super) fn is_plugin(program: &Path) -> bool {
    program.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PLUGIN))
}

fn way(args: &ReachArgs, found: HostEnvironment) -> Way {
    if args.kubeconfig.is_some() || args.context.is_some() {
        return Way::Cluster;
    }
    if let Some(server) = &args.server {
        return Way::Address(server.to_string());
    }
    if found.is_plugin || (found.has_cluster && !found.has_socket) {
        return Way::Cluster;
    }
    Way::Address(DEFAULT_SERVER.to_owned())
}

/// The way to a controller.
pub(super) struct ReachedController {
    /// Connects when it is used first, and again when it broke.
    pub(super) channel: Channel,
    /// The name in messages.
    pub(super) name: String,
    /// The cluster that it is reached through, if it is.
    pub(super) cluster: Option<ClusterAccess>,
}

/// A cluster that the controller runs in.
#[derive(Clone)]
pub(super) struct ClusterAccess {
    pub(super) client: Client,
    pub(super) namespace: String,
    problem: LastProblem,
}

impl ClusterAccess {
    /// Returns the error of the last connection; none if unknown.
    pub(super) fn problem(&self) -> Option<String> {
        self.problem.last()
    }
}

/// Finds the way to the controller. Nothing is connected yet.
pub(super) async fn reach(args: &ReachArgs) -> Result<ReachedController, CtlError> {
    let found = HostEnvironment::detect();
    let way = way(args, found);
    if way == Way::Cluster && found.is_pod && args.kubeconfig.is_none() && args.context.is_none() {
        output::complain("no controller serves in this pod: connecting to the leading pod")?;
    }
    match way {
        Way::Address(address) => {
            let unreachable = |reason: String| CtlError::Unreachable { server: address.clone(), reason };
            let url = address.parse::<ServerUrl>().map_err(|error| unreachable(error.to_string()))?;
            let endpoint = url.endpoint().map_err(|error| unreachable(error.to_string()))?;
            let credentials = args.tls_identity.as_deref().map(identity).transpose()?;
            let endpoint = endpoint.connect_timeout(CONNECT_LIMIT);
            let channel = url.connect(&endpoint, credentials.as_ref(), Role::Controller);
            let channel = channel.map_err(|error| unreachable(error.to_string()))?;
            Ok(ReachedController { channel, name: address, cluster: None })
        }
        Way::Cluster => through_cluster(args).await,
    }
}

/// The certificate in this file.
fn identity(path: &Path) -> Result<Credentials, CtlError> {
    let failed = |reason: String| CtlError::Refused(format!("--tls-identity: {reason}"));
    let bundle = shorthorn_pki::load(path).map_err(|error| failed(error.to_string()))?;
    let bundle = bundle.ok_or_else(|| failed(format!("{} does not exist", path.display())))?;
    Credentials::new(bundle).map_err(|error| failed(error.to_string()))
}

async fn through_cluster(args: &ReachArgs) -> Result<ReachedController, CtlError> {
    let namespace = args.system_namespace.clone();
    let name = format!("the leading pod in namespace {namespace}");
    let unreachable = |reason: String| CtlError::Unreachable { server: name.clone(), reason };
    let client = client_of(args.kubeconfig.as_deref(), args.context.as_deref()).await;
    let client = client.map_err(|error| unreachable(error.to_string()))?;
    let problem = LastProblem::default();
    let streams = PodStreams::new(client.clone(), namespace.clone(), problem.clone());
    let endpoint = forward::endpoint().map_err(|error| unreachable(error.to_string()))?;
    let endpoint = endpoint.connect_timeout(FORWARD_LIMIT);
    let endpoint = endpoint.http2_keep_alive_interval(KEEP_ALIVE).keep_alive_timeout(KEEP_ALIVE);
    let channel = endpoint.connect_with_connector_lazy(ForwardConnector::new(streams));
    Ok(ReachedController { channel, name, cluster: Some(ClusterAccess { client, namespace, problem }) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_win_over_the_discovered_server() {
        let said = ReachArgs { server: Some("http://h:1".parse().unwrap()), ..ReachArgs::default() };
        let all = HostEnvironment { is_plugin: true, has_socket: true, has_cluster: true, is_pod: true };
        assert_eq!(way(&said, all), Way::Address("http://h:1".to_owned()));
        // The address may be one of the environment.
        let named = ReachArgs { context: Some("c".to_owned()), ..said };
        assert_eq!(
            way(&named, HostEnvironment { has_socket: true, ..HostEnvironment::default() }),
            Way::Cluster
        );
    }

    #[test]
    fn a_local_socket_is_used_first_and_otherwise_the_cluster() {
        let args = ReachArgs::default();
        let socket = Way::Address(DEFAULT_SERVER.to_owned());
        let found = |is_plugin, has_socket, has_cluster| HostEnvironment {
            is_plugin,
            has_socket,
            has_cluster,
            is_pod: false,
        };
        assert_eq!(way(&args, found(false, true, true)), socket, "the pod that leads");
        assert_eq!(way(&args, found(false, false, true)), Way::Cluster, "a laptop, the pod that stands by");
        assert_eq!(way(&args, found(false, false, false)), socket, "a host whose controller is away");
        assert_eq!(way(&args, found(true, true, true)), Way::Cluster, "kubectl shorthorn");
    }

    #[test]
    fn the_plugin_is_known_by_its_name() {
        for (program, is) in [
            ("/usr/local/bin/kubectl-shorthorn", true),
            ("kubectl-shorthorn", true),
            ("/usr/bin/shorthornctl", false),
            ("/opt/kubectl-plugins/shorthornctl", false),
        ] {
            assert_eq!(is_plugin(Path::new(program)), is, "{program}");
        }
    }
}
