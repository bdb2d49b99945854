//! The listening sockets of the controller, and the servers behind them.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use shorthorn_api::v1::controller_server::ControllerServer;
use shorthorn_csi::{DRIVER_NAME, IdentityService};
use shorthorn_pki::address::Listen;
use shorthorn_pki::{AccessLayer, ClientAuth, Limits};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tonic::transport::Server;
use tonic::transport::server::Router;

use super::ServeError;
use crate::api::Api;
use crate::csi::{CsiController, CsiStandby};
use crate::tls::{Tls, TlsApi};

/// The time limit for running calls after the controller was stopped. Watches never end by themselves, and
/// other calls are safe to repeat.
const STOP_LIMIT: Duration = Duration::from_secs(5);
/// The interval of probes of a silent connection, and the time limit of the answer. A client that has lost
/// power is noticed within twice this.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// The most calls of one sidecar at once; more wait.
const CSI_CALLS_MAX: usize = 256;
/// The most calls of one connection with TLS at once; more wait. A client without a certificate may send
/// requests of 64 KiB.
const TLS_CALLS_MAX: usize = 64;

type ServerEnd = Result<(), tonic::transport::Error>;

/// The running servers. They end with this value.
pub(super) struct Servers {
    running: JoinSet<ServerEnd>,
    stop: watch::Sender<bool>,
    /// The sockets in the file system that were made.
    sockets: Vec<PathBuf>,
    csi: CsiStandby,
    /// True once CSI has its socket.
    has_csi: bool,
}

impl Servers {
    pub(super) fn new() -> Servers {
        Servers {
            running: JoinSet::new(),
            stop: watch::Sender::new(false),
            sockets: Vec::new(),
            csi: CsiStandby::default(),
            has_csi: false,
        }
    }

    /// Returns a signal that becomes true once the servers stop.
    pub(super) fn stopping(&self) -> watch::Receiver<bool> {
        self.stop.subscribe()
    }

    fn stopped(&self) -> impl Future<Output = ()> + use<> {
        let mut stopping = self.stopping();
        async move {
            // An error means that the sender is gone, and with it the controller.
            let _ = stopping.wait_for(|stopping| *stopping).await;
        }
    }

    /// Binds the address, and serves the API without TLS there.
    pub(super) async fn serve_api(
        &mut self,
        address: &Listen,
        api: &Api,
        tls: &Arc<Tls>,
    ) -> Result<(), ServeError> {
        let tls_api = TlsApi::new(Arc::clone(tls)).server();
        let router = server().add_service(ControllerServer::new(api.clone())).add_service(tls_api);
        self.listen(address, router).await
    }

    /// Binds the address unless CSI has its socket already, and serves CSI there. Calls are refused before
    /// [`Servers::open_csi`].
    pub(super) async fn serve_csi(&mut self, address: &Listen) -> Result<(), ServeError> {
        if self.has_csi {
            return Ok(());
        }
        let identity = IdentityService::new(DRIVER_NAME, env!("CARGO_PKG_VERSION"));
        let identity = identity.ready_while(self.csi.ready());
        let mut server = server().concurrency_limit_per_connection(CSI_CALLS_MAX);
        let router = server.add_service(identity.server()).add_service(self.csi.clone());
        self.listen(address, router).await?;
        self.has_csi = true;
        Ok(())
    }

    /// Lets calls of CSI through to `controller` from now on.
    pub(super) fn open_csi(&self, controller: CsiController) {
        self.csi.open(controller);
    }

    async fn listen(&mut self, address: &Listen, router: Router) -> Result<(), ServeError> {
        let stopped = self.stopped();
        match address {
            Listen::Unix(path) => {
                let incoming = UnixListenerStream::new(bind(path).await?);
                self.sockets.push(path.clone());
                self.running.spawn(router.serve_with_incoming_shutdown(incoming, stopped));
            }
            Listen::Tcp(tcp) => {
                let listener = TcpListener::bind(tcp).await;
                let listener = listener.map_err(|error| ServeError::Listen(address.clone(), error))?;
                let incoming = TcpListenerStream::new(listener);
                self.running.spawn(router.serve_with_incoming_shutdown(incoming, stopped));
            }
        }
        Ok(())
    }

    /// Serves the API with mutual TLS. The layer refuses each method that the role of the caller may not
    /// call.
    pub(super) async fn serve_tls(
        &mut self,
        address: SocketAddr,
        api: Api,
        tls: &Arc<Tls>,
    ) -> Result<(), ServeError> {
        let failed = |error| ServeError::TlsListen(address, error);
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let (auth, limits) = (ClientAuth::Optional, Limits::default());
        let incoming = shorthorn_pki::incoming(listener, tls.credentials(), auth, limits);
        let incoming = incoming.map_err(|error| failed(io::Error::other(error)))?;
        let router = server()
            .concurrency_limit_per_connection(TLS_CALLS_MAX)
            .layer(AccessLayer)
            .add_service(ControllerServer::new(api))
            .add_service(TlsApi::new(Arc::clone(tls)).server());
        tracing::info!(%address, "the API is served with TLS");
        let stopped = self.stopped();
        self.running.spawn(router.serve_with_incoming_shutdown(incoming, stopped));
        Ok(())
    }

    /// Waits until a server ends because of an error; none without servers.
    pub(super) async fn ended(&mut self) -> Option<Result<(), ServeError>> {
        let ended = self.running.join_next().await?;
        Some(ended.unwrap_or(Ok(())).map_err(ServeError::Api))
    }

    /// Ends the servers once their calls have ended, or a time limit has passed, and removes their sockets.
    pub(super) async fn stop(&mut self) {
        let _ = self.stop.send(true);
        let ended = async { while self.running.join_next().await.is_some() {} };
        if tokio::time::timeout(STOP_LIMIT, ended).await.is_err() {
            tracing::warn!("clients keep their connections open; exiting anyway");
        }
        self.remove_sockets();
    }

    /// Ends the calls that are left.
    pub(super) async fn shutdown(mut self) {
        self.running.shutdown().await;
    }

    pub(super) fn remove_sockets(&self) {
        for path in &self.sockets {
            let _ = std::fs::remove_file(path);
        }
    }
}

fn server() -> Server {
    Server::builder().http2_keepalive_interval(Some(KEEPALIVE)).http2_keepalive_timeout(Some(KEEPALIVE))
}

/// Listens on a socket in the file system; takes over one that a killed controller left.
async fn bind(path: &Path) -> Result<UnixListener, ServeError> {
    let failed = |error| ServeError::Listen(Listen::Unix(path.to_owned()), error);
    if UnixStream::connect(path).await.is_ok() {
        return Err(ServeError::ListenTaken(path.to_owned()));
    }
    if std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket()) {
        std::fs::remove_file(path).map_err(failed)?;
    }
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(failed)?;
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn csi(directory: &tempfile::TempDir) -> PathBuf {
        directory.path().join("csi.sock")
    }

    #[tokio::test]
    async fn a_socket_that_was_left_over_is_taken_and_one_in_use_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = csi(&directory);
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let mut servers = Servers::new();
        servers.serve_csi(&Listen::Unix(path.clone())).await.unwrap();
        let taken = Servers::new().serve_csi(&Listen::Unix(path.clone())).await;
        assert!(matches!(taken, Err(ServeError::ListenTaken(taken)) if taken == path));
        servers.serve_csi(&Listen::Unix(path.clone())).await.expect("the socket of a standby stays");
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[tokio::test]
    async fn a_stop_is_signalled_and_removes_the_sockets_that_were_made() {
        let directory = tempfile::tempdir().unwrap();
        let (path, other) = (csi(&directory), directory.path().join("other"));
        std::fs::write(&other, "a file of another program").unwrap();
        let mut servers = Servers::new();
        servers.serve_csi(&Listen::Unix(path.clone())).await.unwrap();
        let taken =
            servers.listen(&Listen::Unix(other.clone()), server().add_service(CsiStandby::default())).await;
        assert!(taken.is_err());
        let stopping = servers.stopping();
        assert!(path.exists() && !*stopping.borrow());
        servers.stop().await;
        assert!(*stopping.borrow() && !path.exists() && other.exists());
        assert!(servers.ended().await.is_none());
    }
}
