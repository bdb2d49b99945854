//! The first contact of a node: it has a join token with the pin of the CA, and no trust list yet.

use std::sync::Arc;

use rustls::client::Resumption;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::version::TLS13;
use rustls::{ClientConfig, Error};
use webpki::anchor_from_trusted_cert;

use crate::certificate::Certificate;
use crate::credentials::{ALPN, provider};
use crate::role::Role;
use crate::trust::{Pin, TrustError, Usage, verify_chain};
use crate::verifiers::{PeerRule, ServerVerifier};

/// Accepts a controller whose CA has this pin.
#[derive(Debug)]
struct PinnedRule(Pin);

impl PeerRule for PinnedRule {
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

/// The configuration of a client without a certificate, which accepts a controller whose CA has this pin.
///
/// # Errors
/// [`rustls::Error`] never happens with ring.
pub fn enrolment_config(pin: Pin) -> Result<Arc<ClientConfig>, Error> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(ServerVerifier(PinnedRule(pin))))
        .with_no_client_auth();
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.resumption = Resumption::disabled();
    config.enable_sni = false;
    Ok(Arc::new(config))
}
