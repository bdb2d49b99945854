//! The way to the API server.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use thiserror::Error;

/// The longest that a connection to the API server may take to come about. It is in the same network; the
/// next attempt may reach another API server.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// The longest silence on a connection; longer than that of a watch.
const READ_LIMIT: Duration = Duration::from_secs(180);

/// The reason why the API server cannot be reached.
#[derive(Debug, Error)]
pub enum ApiServerError {
    /// The file is not a kubeconfig.
    #[error("the kubeconfig {0} cannot be used: {1}")]
    Kubeconfig(PathBuf, kube::config::KubeconfigError),
    /// The context does not exist.
    #[error("the context {0} cannot be used: {1}")]
    Context(String, kube::config::KubeconfigError),
    /// The API server is configured nowhere.
    #[error("cannot find an API server: {0}; give --kubeconfig FILE")]
    Infer(kube::config::InferConfigError),
    /// The certificates or the like cannot be used.
    #[error("cannot configure the connection to the API server: {0}")]
    Client(kube::Error),
}

/// Returns a client of the controller, whose connections may be silent as long as a watch; nothing is
/// connected yet. Without a kubeconfig, it connects like a pod, or else like kubectl.
///
/// # Errors
/// [`ApiServerError`].
pub async fn client_of_controller(kubeconfig: Option<&Path>) -> Result<Client, ApiServerError> {
    let mut found = find(kubeconfig, None).await?;
    found.connect_timeout = Some(CONNECT_LIMIT);
    found.read_timeout = Some(READ_LIMIT);
    Client::try_from(found).map_err(ApiServerError::Client)
}

/// Returns a client for a command, whose connections may be silent for long.
///
/// # Errors
/// [`ApiServerError`].
pub async fn client_of(kubeconfig: Option<&Path>, context: Option<&str>) -> Result<Client, ApiServerError> {
    let mut found = find(kubeconfig, context).await?;
    found.connect_timeout = Some(CONNECT_LIMIT);
    found.read_timeout = None;
    Client::try_from(found).map_err(ApiServerError::Client)
}

/// Returns the API server of that context, of the current one, or of the pod that this runs in.
async fn find(kubeconfig: Option<&Path>, context: Option<&str>) -> Result<Config, ApiServerError> {
    let options = KubeConfigOptions { context: context.map(str::to_owned), ..KubeConfigOptions::default() };
    match (kubeconfig, context) {
        (Some(path), _) => {
            let refused = |error| ApiServerError::Kubeconfig(path.to_owned(), error);
            let kubeconfig = Kubeconfig::read_from(path).map_err(refused)?;
            Config::from_custom_kubeconfig(kubeconfig, &options).await.map_err(refused)
        }
        (None, Some(context)) => {
            let refused = |error| ApiServerError::Context(context.to_owned(), error);
            Config::from_kubeconfig(&options).await.map_err(refused)
        }
        (None, None) => Config::infer().await.map_err(ApiServerError::Infer),
    }
}
