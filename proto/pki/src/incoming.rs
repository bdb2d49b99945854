//! Accepts TLS connections. Handshakes run beside each other with limits, so that no client without a
//! certificate delays the others.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{AbortHandle, JoinSet};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;

use crate::certificate::Certificate;
use crate::certificate_check::{CertificateCheck, CheckedConnection, Limit, TlsPeer};
use crate::connection_slots::{CertifiedConnection, Sources, UncertifiedSlot, lock};
use crate::credentials::{ClientAuth, Credentials};
use crate::handshakes::{BegunHandshake, HandshakeOutcome, TlsHandshakes};
use crate::trust::Usage;

/// Connections that wait for the server.
const READY_MAX: usize = 16;
/// The pause after an accept that failed, as without free file descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Limits for clients that have not proved anything yet.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Handshakes in progress of addresses that have authenticated lately, and as many of others.
    pub handshakes_max: usize,
    /// Handshakes in progress of one address (of one /64 with IPv6). An address that has authenticated lately
    /// may have four times as many. A further one takes the place of the oldest that waits and is not young.
    pub handshakes_per_source_max: usize,
    /// The longest handshake.
    pub handshake_timeout: Duration,
    /// Open connections without a certificate.
    pub strangers_max: usize,
    /// Open connections without a certificate of one address (of one /64 with IPv6).
    pub strangers_per_source_max: usize,
    /// The longest connection without a certificate.
    pub stranger_limit: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            handshakes_max: 64,
            handshakes_per_source_max: 8,
            handshake_timeout: Duration::from_secs(10),
            strangers_max: 64,
            strangers_per_source_max: 4,
            stranger_limit: Duration::from_secs(60),
        }
    }
}

/// Connections that have passed the handshake, for `serve_with_incoming` of tonic. Ends when it is dropped.
pub type CheckedIncoming = ReceiverStream<io::Result<CheckedConnection<TlsStream<TcpStream>>>>;

/// Accepts connections on `listener`, until the stream is dropped.
///
/// # Errors
/// [`rustls::Error`] never happens with ring.
pub fn incoming(
    listener: TcpListener,
    credentials: &Credentials,
    auth: ClientAuth,
    limits: Limits,
) -> Result<CheckedIncoming, rustls::Error> {
    let acceptor = TlsAcceptor::from(credentials.server_config(auth)?);
    let (sender, ready) = mpsc::channel(READY_MAX);
    let door = Door {
        acceptor,
        credentials: credentials.clone(),
        limits,
        handshakes: Arc::new(Mutex::new(TlsHandshakes::new(
            limits.handshakes_max,
            limits.handshakes_per_source_max,
        ))),
        stranger_sources: Sources::default(),
        strangers: Arc::new(Semaphore::new(limits.strangers_max)),
    };
    tokio::spawn(accept(listener, Arc::new(door), sender));
    Ok(ReceiverStream::new(ready))
}

struct Door {
    acceptor: TlsAcceptor,
    credentials: Credentials,
    limits: Limits,
    handshakes: Arc<Mutex<TlsHandshakes>>,
    stranger_sources: Sources,
    strangers: Arc<Semaphore>,
}

type AcceptedSender = mpsc::Sender<io::Result<CheckedConnection<TlsStream<TcpStream>>>>;

async fn accept(listener: TcpListener, door: Arc<Door>, ready: AcceptedSender) {
    let mut running = JoinSet::new();
    // Of the handshakes, by their numbers.
    let mut handles: HashMap<u64, AbortHandle> = HashMap::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = ready.closed() => return,
        };
        while running.try_join_next().is_some() {}
        handles.retain(|_, handle| !handle.is_finished());
        match accepted {
            Ok((stream, address)) => {
                let Some(shaking) = door.begin(address) else {
                    door.log(address, &"too many handshakes, all of them young, or too many that failed");
                    continue;
                };
                let BegunHandshake { id, displaced, .. } = shaking.begun;
                if let Some(handle) = displaced.and_then(|displaced| handles.remove(&displaced)) {
                    handle.abort();
                    door.log(address, &"a newer handshake has taken the place of one that waited");
                }
                let shaken = handshake(Arc::clone(&door), stream, address, ready.clone(), shaking);
                handles.insert(id, running.spawn(shaken));
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

async fn handshake(
    door: Arc<Door>,
    stream: TcpStream,
    address: SocketAddr,
    ready: AcceptedSender,
    mut shaking: Shaking,
) {
    let shake = async {
        // Nothing is signed for a client that sends nothing. `readable` may return before anything is there.
        stream.peek(&mut [0]).await?;
        shaking.hear();
        door.shake(stream, address).await
    };
    let shaken = tokio::time::timeout(door.limits.handshake_timeout, shake).await;
    match &shaken {
        Ok(Ok(connection)) if connection.peer().certificate.is_some() => {
            shaking.outcome = HandshakeOutcome::Authenticated;
            if !lock(&door.handshakes).keep(shaking.begun) {
                return; // at this moment, a newer one has taken its place
            }
        }
        Ok(Ok(_)) => shaking.outcome = HandshakeOutcome::Anonymous,
        _ => {}
    }
    match shaken {
        Ok(Ok(connection)) => drop(ready.send(Ok(connection)).await),
        Ok(Err(error)) => door.log(address, &error),
        Err(_) => door.log(address, &"not done in time"),
    }
    // Until the server has the connection: one that is slow to take them holds up later handshakes.
    drop(shaking);
}

impl Door {
    fn begin(&self, address: SocketAddr) -> Option<Shaking> {
        let begun = lock(&self.handshakes).begin(address.ip(), Instant::now())?;
        Some(Shaking { handshakes: Arc::clone(&self.handshakes), begun, outcome: HandshakeOutcome::Silent })
    }

    /// Scanners and health checks fail too: no warning, and not each of them.
    fn log(&self, address: SocketAddr, reason: &(dyn std::fmt::Display + Sync)) {
        if let Some(not_logged) = lock(&self.handshakes).log(Instant::now()) {
            tracing::info!(%address, not_logged, "TLS handshake failed: {reason}");
        }
    }

    fn admit_stranger(&self, address: SocketAddr) -> Option<UncertifiedSlot> {
        let permit = Arc::clone(&self.strangers).try_acquire_owned().ok()?;
        self.stranger_sources.admit(permit, address, self.limits.strangers_per_source_max)
    }

    async fn shake(
        &self,
        stream: TcpStream,
        address: SocketAddr,
    ) -> io::Result<CheckedConnection<TlsStream<TcpStream>>> {
        stream.set_nodelay(true)?;
        let stream = self.acceptor.accept(stream).await?;
        let leaf = stream.get_ref().1.peer_certificates().and_then(<[_]>::first).cloned();
        let Some(leaf) = leaf else {
            let held = self.admit_stranger(address);
            let held = held.ok_or_else(|| io::Error::other("too many connections without a certificate"))?;
            let until = Instant::now() + self.limits.stranger_limit;
            let timer = Box::pin(tokio::time::sleep(self.limits.stranger_limit));
            let peer = TlsPeer { address, certificate: None };
            return Ok(CheckedConnection {
                stream,
                limit: Limit::Stranger { until, timer, _held: held },
                peer,
            });
        };
        let certificate = Certificate::from_der(&leaf).map_err(io::Error::other)?;
        let check = CertificateCheck {
            credentials: self.credentials.clone(),
            leaf: leaf.into_owned(),
            usage: Usage::Client,
            expected: None,
            not_after: certificate.not_after,
            generation: None,
            _friend: Some(CertifiedConnection::connect(&self.handshakes, address)),
        };
        let peer = TlsPeer { address, certificate: Some(Arc::new(certificate)) };
        Ok(CheckedConnection { stream, limit: Limit::Certificate(Box::new(check)), peer })
    }
}

/// A handshake in progress, which ends when this is dropped.
struct Shaking {
    handshakes: Arc<Mutex<TlsHandshakes>>,
    begun: BegunHandshake,
    outcome: HandshakeOutcome,
}

impl Shaking {
    fn hear(&mut self) {
        self.outcome = HandshakeOutcome::Failed; // unless it ends otherwise
        lock(&self.handshakes).hear(self.begun);
    }
}

impl Drop for Shaking {
    fn drop(&mut self) {
        lock(&self.handshakes).end(self.begun, self.outcome, Instant::now());
    }
}
