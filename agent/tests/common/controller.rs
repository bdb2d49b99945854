//! A stand-in for the controller's enrolment.

use std::sync::Mutex;

use shorthorn_api::v1;
use shorthorn_api::v1::controller_tls_server::{ControllerTls, ControllerTlsServer};
use shorthorn_pki::{
    AccessLayer, Authority, Bundle, CertificateRequest, ClientAuth, Credentials, Limits, incoming,
};
use tokio::net::TcpListener;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use super::tls::now;

struct Enrolment(Mutex<Authority>);

/// Serves enrolments until the runtime of the test ends; HOST:PORT.
pub async fn start(authority: Authority, own: Bundle) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let credentials = Credentials::new(own).unwrap();
    let accepted = incoming(listener, &credentials, ClientAuth::Optional, Limits::default()).unwrap();
    let server = Server::builder()
        .layer(AccessLayer)
        .add_service(ControllerTlsServer::new(Enrolment(Mutex::new(authority))));
    tokio::spawn(server.serve_with_incoming(accepted));
    address
}

type RpcResult<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl ControllerTls for Enrolment {
    async fn enroll(&self, request: Request<v1::EnrollRequest>) -> RpcResult<v1::Certificates> {
        let v1::EnrollRequest { token, node_name, csr } = request.into_inner();
        let mut authority = self.0.lock().unwrap();
        let csr = CertificateRequest::from_der(&csr).unwrap();
        let chain = authority.enrol(&token.parse().unwrap(), &node_name, &csr, now());
        let chain = chain.map_err(|error| Status::permission_denied(error.to_string()))?;
        let trust = authority.trust().unwrap();
        Ok(Response::new(v1::Certificates {
            chain: chain.iter().map(|der| der.to_vec()).collect(),
            trust: Some(v1::TrustList {
                cluster: trust.cluster().to_string(),
                version: trust.version(),
                authorities: trust.authorities().iter().map(|der| der.to_vec()).collect(),
                revoked: Vec::new(),
            }),
        }))
    }

    async fn create_join_token(
        &self,
        _: Request<v1::CreateJoinTokenRequest>,
    ) -> RpcResult<v1::JoinTokenResponse> {
        Err(Status::unimplemented("not here"))
    }

    async fn issue_admin_certificate(
        &self,
        _: Request<v1::IssueAdminCertificateRequest>,
    ) -> RpcResult<v1::Certificates> {
        Err(Status::unimplemented("not here"))
    }

    async fn get_tls(&self, _: Request<v1::GetTlsRequest>) -> RpcResult<v1::TlsState> {
        Err(Status::unimplemented("not here"))
    }

    async fn revoke_certificate(
        &self,
        _: Request<v1::RevokeCertificateRequest>,
    ) -> RpcResult<v1::RevokeCertificateResponse> {
        Err(Status::unimplemented("not here"))
    }

    async fn roll_over(&self, _: Request<v1::RollOverRequest>) -> RpcResult<v1::TlsState> {
        Err(Status::unimplemented("not here"))
    }
}
