//! Addresses that are served by TLS, as soon as the node has a certificate.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use shorthorn_pki::{CheckedConnection, ClientAuth, Credentials, Limits};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};

use crate::serve::tls::NodeTls;

/// Connections that wait for the server, of all addresses.
const READY_MAX: usize = 16;
/// First pause after an address could not be bound, and the longest one. The host may get the address soon,
/// or never.
const BIND_PAUSE: Duration = Duration::from_secs(1);
const BIND_PAUSE_MAX: Duration = Duration::from_secs(30);

type Accepted = io::Result<CheckedConnection<TlsStream<TcpStream>>>;

/// Connections of clients that have shown a certificate of the cluster.
pub type TlsIncoming = Pin<Box<dyn Stream<Item = Accepted> + Send>>;

/// Serves `addresses` by TLS. They are bound at once if the node has a certificate, otherwise once it has
/// one.
///
/// # Errors
/// Names the address.
pub async fn bind(addresses: Vec<SocketAddr>, tls: &Arc<NodeTls>) -> io::Result<TlsIncoming> {
    let (sender, ready) = mpsc::channel(READY_MAX);
    for address in addresses {
        let bound = if tls.credentials().is_some() {
            let named = |error: io::Error| io::Error::new(error.kind(), format!("tls:{address}: {error}"));
            Some(TcpListener::bind(address).await.map_err(named)?)
        } else {
            tracing::warn!(%address, "not served: this node has no certificate yet");
            None
        };
        tokio::spawn(serve(address, bound, Arc::clone(tls), sender.clone()));
    }
    Ok(Box::pin(ReceiverStream::new(ready)))
}

async fn serve(
    address: SocketAddr,
    bound: Option<TcpListener>,
    tls: Arc<NodeTls>,
    ready: mpsc::Sender<Accepted>,
) {
    tokio::select! {
        () = ready.closed() => {}
        served = forward(address, bound, &tls, &ready) => {
            if let Err(error) = served {
                tracing::error!(%address, "not served: {error}");
            }
        }
    }
}

async fn forward(
    address: SocketAddr,
    bound: Option<TcpListener>,
    tls: &NodeTls,
    ready: &mpsc::Sender<Accepted>,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let credentials: Credentials = loop {
        let mut watch = tls.watch();
        if let Some(credentials) = watch.wait_for(Option::is_some).await?.clone() {
            break credentials;
        }
    };
    let listener = match bound {
        Some(listener) => listener,
        None => bind_until_it_succeeds(address).await,
    };
    tracing::info!(%address, "listening with TLS");
    let mut accepted =
        shorthorn_pki::incoming(listener, &credentials, ClientAuth::Required, Limits::default())?;
    while let Some(connection) = accepted.next().await {
        if ready.send(connection).await.is_err() {
            break;
        }
    }
    Ok(())
}

async fn bind_until_it_succeeds(address: SocketAddr) -> TcpListener {
    let mut pause = BIND_PAUSE;
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return listener,
            Err(error) => tracing::error!(%address, "cannot listen, trying again: {error}"),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(BIND_PAUSE_MAX);
    }
}
