//! The verifiers that rustls asks during a handshake.

use std::fmt;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, PeerIncompatible,
    SignatureScheme,
};

use crate::trust::TrustError;

/// A rule about the certificate of the peer.
pub(crate) trait PeerRule: fmt::Debug + Send + Sync {
    /// Returns an error unless the certificate `leaf` is accepted. `sent` are those that came with it.
    fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        sent: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), TrustError>;
}

/// Accepts servers by a rule.
#[derive(Debug)]
pub(crate) struct ServerVerifier<R>(pub(crate) R);

/// Accepts clients by a rule.
#[derive(Debug)]
pub(crate) struct ClientVerifier<R> {
    pub(crate) rule: R,
    /// True if a client without a certificate gets no connection.
    pub(crate) is_mandatory: bool,
}

/// The error of rustls whose alert lets the peer name the reason in its log.
fn tls_error(error: TrustError) -> Error {
    let known = match error {
        TrustError::Chain(webpki::Error::CertExpired { time, not_after }) => {
            CertificateError::ExpiredContext { time, not_after }
        }
        TrustError::Chain(webpki::Error::CertNotValidYet { time, not_before }) => {
            CertificateError::NotValidYetContext { time, not_before }
        }
        TrustError::Chain(webpki::Error::UnknownIssuer) => CertificateError::UnknownIssuer,
        TrustError::Revoked(_) => CertificateError::Revoked,
        // rustls shows the text of this one as it is.
        error => return Error::Other(OtherError(Arc::new(error))),
    };
    Error::InvalidCertificate(known)
}

fn algorithms() -> WebPkiSupportedAlgorithms {
    rustls::crypto::ring::default_provider().signature_verification_algorithms
}

/// The methods about signatures, which both traits of rustls have. Only TLS 1.3 is configured.
macro_rules! tls13_signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Err(Error::PeerIncompatible(PeerIncompatible::Tls13RequiredForQuic))
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
    };
}

impl<R: PeerRule> ServerCertVerifier for ServerVerifier<R> {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        sent: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let verified = self.0.verify(leaf, sent, now);
        verified.map(|()| ServerCertVerified::assertion()).map_err(tls_error)
    }

    tls13_signatures!();
}

impl<R: PeerRule> ClientCertVerifier for ClientVerifier<R> {
    fn client_auth_mandatory(&self) -> bool {
        self.is_mandatory
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        sent: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.rule.verify(leaf, sent, now);
        verified.map(|()| ClientCertVerified::assertion()).map_err(tls_error)
    }

    tls13_signatures!();
}
