//! The service NodeTls: the controller renews the certificate and the list of CAs.

use std::sync::Arc;

use shorthorn_api::v1;
use shorthorn_api::v1::node_tls_server;
use shorthorn_pki::{CertificateDer, ClusterId, Pin, Serial, Trust};
use tonic::{Request, Response};

use crate::serve::blocking;
use crate::serve::error::{NodeError, RpcResult};
use crate::serve::tls::{NodeCertificateError, NodeTls};

/// The longest certificate that is taken, and the most of them.
const CERTIFICATE_MAX_BYTES: usize = 16 << 10;
const CHAIN_MAX: usize = 4;

/// Serves the certificate calls of the controller.
#[derive(Clone, Debug)]
pub struct TlsService(pub Arc<NodeTls>);

impl From<NodeCertificateError> for NodeError {
    fn from(error: NodeCertificateError) -> NodeError {
        let message = error.to_string();
        match error {
            NodeCertificateError::Store(_) | NodeCertificateError::Directory { .. } => {
                NodeError::Unavailable(message)
            }
            _ => NodeError::Precondition(message),
        }
    }
}

#[tonic::async_trait]
impl node_tls_server::NodeTls for TlsService {
    async fn get_node_tls(&self, _: Request<v1::GetNodeTlsRequest>) -> RpcResult<v1::NodeTlsState> {
        Ok(Response::new(state(&self.0)))
    }

    async fn create_certificate_request(
        &self,
        _: Request<v1::CreateCertificateRequestRequest>,
    ) -> RpcResult<v1::CertificateRequest> {
        let request = self.0.request().map_err(|error| NodeError::Unavailable(error.to_string()))?;
        Ok(Response::new(v1::CertificateRequest { csr: request }))
    }

    async fn set_certificate(
        &self,
        request: Request<v1::SetCertificateRequest>,
    ) -> RpcResult<v1::NodeTlsState> {
        let (tls, chain) = (Arc::clone(&self.0), request.into_inner().chain);
        let is_long = chain.iter().any(|der| der.len() > CERTIFICATE_MAX_BYTES);
        if chain.len() > CHAIN_MAX || is_long {
            return Err(NodeError::Invalid(format!(
                "a chain has at most {CHAIN_MAX} certificates, of at most {CERTIFICATE_MAX_BYTES} bytes each"
            ))
            .into());
        }
        let chain = chain.into_iter().map(CertificateDer::from).collect();
        let set = move || {
            tls.set_certificate(chain)?;
            Ok(state(&tls))
        };
        Ok(Response::new(blocking(set).await?))
    }

    async fn set_trust(&self, request: Request<v1::TrustList>) -> RpcResult<v1::NodeTlsState> {
        let (tls, trust) = (Arc::clone(&self.0), trust(request.into_inner())?);
        let set = move || {
            tls.set_trust(trust)?;
            Ok(state(&tls))
        };
        Ok(Response::new(blocking(set).await?))
    }
}

/// The list of CAs of a message.
///
/// # Errors
/// [`NodeError::Invalid`] names the part that is wrong.
pub fn trust(list: v1::TrustList) -> Result<Trust, NodeError> {
    let invalid = |error: &dyn std::fmt::Display| NodeError::Invalid(error.to_string());
    let cluster = ClusterId::new(&list.cluster).map_err(|error| invalid(&error))?;
    let revoked = list.revoked.iter().map(|serial| serial.parse::<Serial>()).collect::<Result<Vec<_>, _>>();
    let revoked = revoked.map_err(|error| invalid(&error))?;
    Trust::new(cluster, list.version, list.authorities, revoked).map_err(|error| invalid(&error))
}

fn state(tls: &NodeTls) -> v1::NodeTlsState {
    let Some(credentials) = tls.credentials() else { return v1::NodeTlsState::default() };
    let bundle = credentials.current();
    let mut state = v1::NodeTlsState {
        trust_version: bundle.trust.version(),
        trusted_pins: bundle.trust.pins().iter().map(ToString::to_string).collect(),
        ..v1::NodeTlsState::default()
    };
    if let Some(identity) = &bundle.identity {
        let certificate = identity.certificate();
        state.serial = certificate.serial.to_string();
        (state.not_before_s, state.not_after_s) = (certificate.not_before, certificate.not_after);
        state.signer_pin = identity.chain().get(1).map(|der| Pin::of(der).to_string()).unwrap_or_default();
    }
    state
}
