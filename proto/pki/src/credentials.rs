//! A bundle in use. Replacing it changes later handshakes, and ends connections whose peer is trusted no
//! more.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::SystemTime;

use rustls::client::{ResolvesClientCert, Resumption};
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{ClientConfig, ServerConfig, SignatureScheme};

use crate::bundle::{Bundle, BundleError};
use crate::certificate::Certificate;
use crate::role::Role;
use crate::trust::{TrustError, Usage};
use crate::verifiers::{ClientVerifier, PeerRule, ServerVerifier};

/// The protocol of gRPC.
pub(crate) const ALPN: &[u8] = b"h2";

/// The rule of a server for clients without a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientAuth {
    /// A client without a certificate gets no connection.
    Required,
    /// A client without a certificate may call the methods for [`RoleKind::Anyone`](crate::RoleKind::Anyone).
    Optional,
}

/// The bundle of this process. Clones share it.
#[derive(Clone)]
pub struct Credentials(Arc<CredentialState>);

struct CredentialState {
    current: RwLock<Arc<Bundle>>,
    /// Counts replacements.
    generation: AtomicU64,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Credentials").field(&self.current()).finish()
    }
}

impl Credentials {
    /// Uses `bundle` from now on.
    ///
    /// # Errors
    /// [`BundleError::Cluster`] if its parts do not belong together.
    pub fn new(bundle: Bundle) -> Result<Credentials, BundleError> {
        bundle.check()?;
        let current = RwLock::new(Arc::new(bundle));
        Ok(Credentials(Arc::new(CredentialState { current, generation: AtomicU64::new(1) })))
    }

    /// The bundle in use.
    #[must_use]
    pub fn current(&self) -> Arc<Bundle> {
        Arc::clone(&self.0.current.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Uses `bundle` from now on. Store it first. Open connections are checked again when they receive data.
    ///
    /// # Errors
    /// [`BundleError::Cluster`] if its parts do not belong together; the former bundle stays.
    pub fn replace(&self, bundle: Bundle) -> Result<(), BundleError> {
        bundle.check()?;
        *self.0.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(bundle);
        self.0.generation.fetch_add(1, Ordering::Release);
        Ok(())
    }

    pub(crate) fn generation(&self) -> u64 {
        self.0.generation.load(Ordering::Acquire)
    }

    pub(crate) fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        usage: Usage,
        expected: Option<&Role>,
        now: UnixTime,
    ) -> Result<Certificate, TrustError> {
        self.current().trust.verify(leaf, usage, expected, now)
    }

    /// The configuration of a server: TLS 1.3, no resumption, so that each connection is checked.
    ///
    /// # Errors
    /// [`rustls::Error`] never happens with ring.
    pub fn server_config(&self, auth: ClientAuth) -> Result<Arc<ServerConfig>, rustls::Error> {
        let is_mandatory = auth == ClientAuth::Required;
        let verifier = ClientVerifier { rule: AnyClient(self.clone()), is_mandatory };
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(Arc::new(verifier))
            .with_cert_resolver(Arc::new(Resolver(self.clone())));
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }

    /// The configuration of a client that accepts the role `expected` only.
    ///
    /// # Errors
    /// [`rustls::Error`] never happens with ring.
    pub fn client_config(&self, expected: Role) -> Result<Arc<ClientConfig>, rustls::Error> {
        let verifier = ServerVerifier(ServerOfRole { credentials: self.clone(), expected });
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_cert_resolver(Arc::new(Resolver(self.clone())));
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.resumption = Resumption::disabled();
        config.enable_sni = false;
        Ok(Arc::new(config))
    }
}

pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(default_provider())
}

/// The time of this host. A clock before 1970 makes every certificate invalid.
pub(crate) fn now() -> UnixTime {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    UnixTime::since_unix_epoch(since.unwrap_or_default())
}

/// Accepts servers of one role.
#[derive(Debug)]
struct ServerOfRole {
    credentials: Credentials,
    expected: Role,
}

impl PeerRule for ServerOfRole {
    fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), TrustError> {
        // The name in the certificate is that of the node: addresses change, and DNS is not trusted.
        self.credentials.verify(leaf, Usage::Server, Some(&self.expected), now).map(drop)
    }
}

/// Accepts all clients of the cluster.
#[derive(Debug)]
struct AnyClient(Credentials);

impl PeerRule for AnyClient {
    fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), TrustError> {
        self.0.verify(leaf, Usage::Client, None, now).map(drop)
    }
}

/// Presents the certificate of the moment.
#[derive(Debug)]
struct Resolver(Credentials);

impl Resolver {
    fn certified(&self) -> Option<Arc<CertifiedKey>> {
        self.0.current().identity.as_ref().map(|identity| Arc::clone(&identity.certified))
    }
}

impl ResolvesServerCert for Resolver {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.certified()
    }
}

impl ResolvesClientCert for Resolver {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.certified()
    }

    fn has_certs(&self) -> bool {
        self.certified().is_some()
    }
}
