//! Key pairs of both ends, and the settings of rustls with them.

use std::sync::Arc;

use ring::hkdf::{HKDF_SHA256, Salt};
use ring::hmac;
use ring::signature::{Ed25519KeyPair, KeyPair};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use rustls::crypto::ring::{cipher_suite, default_provider, kx_group, sign};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, ServerConfig,
    SignatureScheme,
};
use shorthorn_types::{SECRET_BYTES, Secret};

use crate::TlsError;

/// The bytes before the seed in an Ed25519 private key (RFC 8410, section 7).
const PKCS8_HEADER: [u8; 16] = [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
/// The bytes before the key in an Ed25519 public key (RFC 8410, section 4).
const SPKI_HEADER: [u8; 12] = [0x30, 0x2a, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 3, 0x21, 0];

/// An end of a connection. Each has a key pair of its own, so that neither can pass for the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Engine,
    Replica,
}

impl End {
    /// Returns the label of its key pair. Both ends must agree on it: it must not change.
    const fn label(self) -> &'static [u8] {
        match self {
            End::Engine => b"shorthorn-2 tls engine",
            End::Replica => b"shorthorn-2 tls replica",
        }
    }
}

/// Returns the secret that both ends of the connections of a volume prove, and derive their keys from.
///
/// A volume that encrypts has another one than a plain volume, on Unix sockets too. So an engine that does
/// not know of encryption reads nothing from a replica of such a volume, and copies nothing in clear
/// elsewhere.
#[must_use]
pub fn connection_secret(secret: &Secret, encrypted: bool) -> Secret {
    if !encrypted {
        return secret.clone();
    }
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret.bytes());
    let mut derived = [0; SECRET_BYTES];
    // Both ends must agree on it: it must not change.
    derived.copy_from_slice(hmac::sign(&key, b"shorthorn-2 encrypted connections").as_ref());
    Secret::new(derived)
}

/// Returns the seed of an end's key pair: HKDF-SHA-256 (RFC 5869) of the volume's secret.
pub(crate) fn seed(secret: &Secret, end: End) -> Result<[u8; SECRET_BYTES], TlsError> {
    let mut seed = [0; SECRET_BYTES];
    let key = Salt::new(HKDF_SHA256, b"").extract(secret.bytes());
    key.expand(&[end.label()], HKDF_SHA256)
        .and_then(|output| output.fill(&mut seed))
        .map_err(|_| TlsError::Derivation)?;
    Ok(seed)
}

/// Returns the public key of an end (SubjectPublicKeyInfo), and its private key (PKCS #8).
fn key_pair(secret: &Secret, end: End) -> Result<(Vec<u8>, PrivatePkcs8KeyDer<'static>), TlsError> {
    let seed = seed(secret, end)?;
    let pair = Ed25519KeyPair::from_seed_unchecked(&seed).map_err(|_| TlsError::Derivation)?;
    let public = [&SPKI_HEADER[..], pair.public_key().as_ref()].concat();
    Ok((public, [&PKCS8_HEADER[..], &seed].concat().into()))
}

pub(crate) fn certified(secret: &Secret, end: End) -> Result<Arc<CertifiedKey>, TlsError> {
    let (public, private) = key_pair(secret, end)?;
    let key = sign::any_eddsa_type(&private)?;
    Ok(Arc::new(CertifiedKey::new(vec![public.into()], key)))
}

/// Returns the cryptography: a single cipher and key exchange of TLS 1.3.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(CryptoProvider {
        cipher_suites: vec![cipher_suite::TLS13_CHACHA20_POLY1305_SHA256],
        kx_groups: vec![kx_group::X25519],
        ..default_provider()
    })
}

/// Returns the settings of an engine. No connection continues an earlier one, and no data comes early.
pub(crate) fn client_config(secret: &Secret) -> Result<ClientConfig, TlsError> {
    let provider = provider();
    let verifier = OnlyKey::new(secret, End::Replica, &provider)?;
    let own = AlwaysResolvesClientRawPublicKeys::new(certified(secret, End::Engine)?);
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_client_cert_resolver(Arc::new(own));
    config.resumption = Resumption::disabled();
    config.enable_sni = false;
    config.enable_early_data = false;
    config.enable_secret_extraction = true;
    Ok(config)
}

/// Returns the settings of a replica. It gives no tickets: after the handshake, only frames follow.
pub(crate) fn server_config(secret: &Secret) -> Result<ServerConfig, TlsError> {
    let provider = provider();
    let verifier = OnlyKey::new(secret, End::Engine, &provider)?;
    let own = AlwaysResolvesServerRawPublicKeys::new(certified(secret, End::Replica)?);
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(Arc::new(own));
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.max_early_data_size = 0;
    config.enable_secret_extraction = true;
    Ok(config)
}

/// Accepts one public key and its signatures.
#[derive(Debug)]
struct OnlyKey {
    public: Vec<u8>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl OnlyKey {
    fn new(secret: &Secret, end: End, provider: &CryptoProvider) -> Result<Arc<OnlyKey>, TlsError> {
        let (public, _) = key_pair(secret, end)?;
        Ok(Arc::new(OnlyKey { public, algorithms: provider.signature_verification_algorithms }))
    }

    fn check(&self, key: &CertificateDer<'_>, more: &[CertificateDer<'_>]) -> Result<(), Error> {
        if key.as_ref() == self.public && more.is_empty() {
            return Ok(());
        }
        Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
    }

    fn verify(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check(key, &[])?;
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signed, &self.algorithms)
    }
}

/// The methods about signatures, which both traits of rustls have. TLS 1.2 is never negotiated.
macro_rules! signatures_of_the_key {
    () => {
        fn verify_tls12_signature(
            &self,
            _message: &[u8],
            _cert: &CertificateDer<'_>,
            _signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Err(Error::General("TLS 1.2 is not permitted".to_owned()))
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.verify(message, cert, signed)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            vec![SignatureScheme::ED25519]
        }

        fn requires_raw_public_keys(&self) -> bool {
            true
        }
    };
}

impl ServerCertVerifier for OnlyKey {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(end_entity, intermediates).map(|()| ServerCertVerified::assertion())
    }

    signatures_of_the_key!();
}

impl ClientCertVerifier for OnlyKey {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(end_entity, intermediates).map(|()| ClientCertVerified::assertion())
    }

    signatures_of_the_key!();
}
