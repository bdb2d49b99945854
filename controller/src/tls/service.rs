//! The gRPC service of the CA.

use std::sync::Arc;

use shorthorn_api::v1;
use shorthorn_api::v1::controller_tls_server::{ControllerTls, ControllerTlsServer};
use shorthorn_api::v1::revoke_certificate_request::Which;
use shorthorn_pki::{
    Authority, AuthorityError, CertificateDer, CertificateRequest, JoinToken, Role, Serial, TokenError,
};
use shorthorn_types::status::RollOverPhase;
use tonic::{Response, Status};

use super::{CaError, Tls, now, pin_texts, trust_message};

/// The largest request is a certificate signing request.
const REQUEST_MAX_BYTES: usize = 64 << 10;
/// The default life of a join token.
const TTL_SECONDS: u64 = 3600;
const TTL_MAX_SECONDS: u64 = 30 * 24 * 3600;

/// The service; clones are the same.
#[derive(Clone, Debug)]
pub struct TlsApi(Arc<Tls>);

impl TlsApi {
    /// The service of this CA.
    #[must_use]
    pub fn new(tls: Arc<Tls>) -> TlsApi {
        TlsApi(tls)
    }

    /// The service for a server.
    #[must_use]
    pub fn server(self) -> ControllerTlsServer<TlsApi> {
        ControllerTlsServer::new(self).max_decoding_message_size(REQUEST_MAX_BYTES)
    }

    async fn certificates(&self, chain: Vec<CertificateDer<'static>>) -> Result<v1::Certificates, Status> {
        let trust = self.0.read_authority(Authority::trust).await.map_err(|error| status(error.into()))?;
        let chain = chain.iter().map(|der| der.to_vec()).collect();
        Ok(v1::Certificates { chain, trust: Some(trust_message(&trust)) })
    }

    async fn state(&self) -> Result<v1::TlsState, Status> {
        let nodes_behind = self.0.nodes_behind().await;
        let state = self.0.read_authority(|authority| {
            let trust = authority.trust()?;
            let now_s = now().as_secs();
            let valid = authority.issued().iter().filter(|issued| issued.not_after >= now_s);
            let issued = valid.map(|issued| v1::IssuedCertificate {
                serial: issued.serial.to_string(),
                role: issued.role.to_string(),
                not_after_s: issued.not_after,
                revoked: authority.is_revoked(&issued.serial),
                signer_pin: issued.signer.to_string(),
            });
            Ok::<_, AuthorityError>(
                v1::TlsState {
                    cluster: authority.cluster().to_string(),
                    trust_version: trust.version(),
                    trusted_pins: pin_texts(&trust),
                    issued: issued.collect(),
                    nodes_behind,
                    ..v1::TlsState::default()
                }
                .with_phase(authority.phase()),
            )
        });
        state.await.map_err(|error| status(error.into()))
    }
}

fn status(error: CaError) -> Status {
    let text = error.to_string();
    match error {
        CaError::CaStorage(_) => Status::unavailable(text),
        CaError::Authority(AuthorityError::Token(_)) => Status::permission_denied(text),
        CaError::Authority(AuthorityError::Request(_) | AuthorityError::Name(_)) => {
            Status::invalid_argument(text)
        }
        CaError::Authority(AuthorityError::NothingToRevoke) => Status::not_found(text),
        _ => Status::failed_precondition(text),
    }
}

fn invalid(error: &dyn std::fmt::Display) -> Status {
    Status::invalid_argument(error.to_string())
}

#[tonic::async_trait]
impl ControllerTls for TlsApi {
    async fn enroll(
        &self,
        request: tonic::Request<v1::EnrollRequest>,
    ) -> Result<Response<v1::Certificates>, Status> {
        let v1::EnrollRequest { token, node_name, csr } = request.into_inner();
        let token: JoinToken = token.parse().map_err(|error| invalid(&error))?;
        Role::node(&node_name).map_err(|error| invalid(&error))?;
        let request = CertificateRequest::from_der(&csr).map_err(|error| invalid(&error))?;
        let enrolled = self.0.change(|authority| authority.enrol(&token, &node_name, &request, now())).await;
        let chain = enrolled.map_err(|error| {
            let (token, node) = (token.id(), &node_name);
            match error {
                // A client without a certificate must not fill the log.
                CaError::Authority(
                    AuthorityError::Token(TokenError::Unknown) | AuthorityError::Request(_),
                ) => tracing::debug!(token, node, %error, "a node may not join"),
                _ => tracing::warn!(token, node, %error, "a node may not join"),
            }
            status(error)
        })?;
        tracing::info!(token = token.id(), node = node_name, "a node has joined");
        Ok(Response::new(self.certificates(chain).await?))
    }

    async fn create_join_token(
        &self,
        request: tonic::Request<v1::CreateJoinTokenRequest>,
    ) -> Result<Response<v1::JoinTokenResponse>, Status> {
        let v1::CreateJoinTokenRequest { node_name, ttl_s } = request.into_inner();
        let ttl_s = if ttl_s == 0 { TTL_SECONDS } else { ttl_s };
        if ttl_s > TTL_MAX_SECONDS {
            return Err(Status::invalid_argument("a join token is valid for at most 30 days"));
        }
        let node = Some(node_name.as_str()).filter(|name| !name.is_empty());
        let created = self.0.change(|authority| authority.create_token(node, ttl_s, now())).await;
        let token = created.map_err(status)?;
        tracing::info!(token = token.id(), node, ttl_s, "a join token is created");
        Ok(Response::new(v1::JoinTokenResponse { token: token.reveal(), ttl_s }))
    }

    async fn issue_admin_certificate(
        &self,
        request: tonic::Request<v1::IssueAdminCertificateRequest>,
    ) -> Result<Response<v1::Certificates>, Status> {
        let v1::IssueAdminCertificateRequest { name, csr } = request.into_inner();
        let role = Role::admin(&name).map_err(|error| invalid(&error))?;
        let request = CertificateRequest::from_der(&csr).map_err(|error| invalid(&error))?;
        request.check_names(&name).map_err(|error| invalid(&error))?;
        let signed = self.0.change(|authority| authority.sign(&request, &role, now())).await;
        let chain = signed.map_err(status)?;
        tracing::info!(name, "a certificate for an administrator is issued");
        Ok(Response::new(self.certificates(chain).await?))
    }

    async fn get_tls(&self, _: tonic::Request<v1::GetTlsRequest>) -> Result<Response<v1::TlsState>, Status> {
        Ok(Response::new(self.state().await?))
    }

    async fn revoke_certificate(
        &self,
        request: tonic::Request<v1::RevokeCertificateRequest>,
    ) -> Result<Response<v1::RevokeCertificateResponse>, Status> {
        let which = request.into_inner().which;
        let which = which.ok_or_else(|| Status::invalid_argument("no certificate is named"))?;
        let revoked = match &which {
            Which::Serial(text) => {
                let serial: Serial = text.parse().map_err(Status::invalid_argument)?;
                self.0.change(|authority| authority.revoke(|issued| issued.serial == serial, now())).await
            }
            Which::Role(text) => {
                let role: Role = text.parse().map_err(|error| invalid(&error))?;
                self.0.change(|authority| authority.revoke(|issued| issued.role == role, now())).await
            }
        };
        let count = u32::try_from(revoked.map_err(status)?).unwrap_or(u32::MAX);
        tracing::warn!(?which, count, "certificates are revoked");
        let nodes_behind = self.0.nodes_behind().await;
        Ok(Response::new(v1::RevokeCertificateResponse { count, nodes_behind }))
    }

    async fn roll_over(
        &self,
        request: tonic::Request<v1::RollOverRequest>,
    ) -> Result<Response<v1::TlsState>, Status> {
        let force = request.into_inner().force;
        let stepped = self.0.change(|authority| match authority.phase() {
            RollOverPhase::Idle => authority.begin_roll_over(now()),
            RollOverPhase::Distributing => {
                // Under the same lock as the step: a node may enrol at any time.
                let behind = self.0.behind(authority);
                if !behind.is_empty() && !force {
                    return Err(AuthorityError::NotReady(format!(
                        "nodes without the new CA: {}; start their agents, or revoke their certificates",
                        behind.join(", ")
                    )));
                }
                authority.switch_signer()
            }
            RollOverPhase::Reissuing => authority.finish_roll_over(force, now()),
        });
        stepped.await.map_err(status)?;
        let state = self.state().await?;
        tracing::warn!(phase = state.shown_phase(), "the CA is rolled over");
        Ok(Response::new(state))
    }
}
