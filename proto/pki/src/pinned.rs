//! The first contact of a node: it has a join token with the pin of the CA, and no trust list yet.

use std::sync::Arc;

use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::verify_tls13_signature;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::version::TLS13;
use rustls::{ClientConfig, DigitallySignedStruct, Error, SignatureScheme};
use webpki::anchor_from_trusted_cert;

use crate::certificate::Certificate;
use crate::credentials::{ALPN, provider};
use crate::role::Role;
use crate::trust::{Pin, TrustError, Usage, verify_chain};
use crate::verifiers::{algorithms, no_tls12, tls_error};

/// Accepts a controller whose CA has this pin.
#[derive(Debug)]
struct PinnedVerifier(Pin);

impl PinnedVerifier {
    fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        sent: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), TrustError> {
        let last = sent.last().ok_or(TrustError::NoAuthority)?;
        let found = Pin::of(last);
        if found != self.0 {
            return Err(TrustError::Pin { found, expected: self.0 });
        }
        let anchor = anchor_from_trusted_cert(last).map_err(|_| TrustError::Authority(1))?;
        verify_chain(leaf, &[anchor], Usage::Server, now)?;
        let found = Certificate::from_der(leaf)?.name.role;
        if found != Role::Controller {
            return Err(TrustError::Role { found, expected: Role::Controller });
        }
        Ok(())
    }
}

impl ServerCertVerifier for PinnedVerifier {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        sent: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.verify(leaf, sent, now).map(|()| ServerCertVerified::assertion()).map_err(tls_error)
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        no_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, leaf, signature, &algorithms())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        algorithms().supported_schemes()
    }
}

/// The configuration of a client without a certificate, which accepts a controller whose CA has this pin.
///
/// # Errors
/// [`rustls::Error`] never happens with ring.
pub fn enrolment_config(pin: Pin) -> Result<Arc<ClientConfig>, Error> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(PinnedVerifier(pin)))
        .with_no_client_auth();
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.resumption = Resumption::disabled();
    config.enable_sni = false;
    Ok(Arc::new(config))
}
