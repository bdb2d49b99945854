//! An agent with TLS around the agent in memory: it joins by a token and keeps its certificate in a file.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use shorthorn_api::v1;
use shorthorn_api::v1::controller_tls_client::ControllerTlsClient;
use shorthorn_api::v1::node_server::NodeServer;
use shorthorn_api::v1::node_tls_server::{NodeTls, NodeTlsServer};
use shorthorn_pki::{
    AccessLayer, Bundle, CertificateDer, ClientAuth, ClusterId, Connector, Credentials, Identity, JoinToken,
    Limits, Pin, PrivateKey, Trust, UnixTime, incoming, store,
};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status};

use super::agent::FakeAgent;

/// Clones are the same agent.
#[derive(Clone)]
pub struct TlsAgent {
    pub fake: FakeAgent,
    pub credentials: Credentials,
    /// Says that its certificate is due.
    pub claims_to_be_due: Arc<AtomicBool>,
    path: PathBuf,
    pending: Arc<Mutex<Option<PrivateKey>>>,
}

pub fn trust(list: v1::TrustList) -> Trust {
    let revoked: Vec<_> = list.revoked.iter().map(|text| text.parse().unwrap()).collect();
    Trust::new(ClusterId::new(&list.cluster).unwrap(), list.version, list.authorities, revoked).unwrap()
}

/// Joins by `token` under the name `node`.
pub async fn enrol(
    controller: SocketAddr,
    token: &str,
    node: &str,
    key: &PrivateKey,
) -> Result<Bundle, Status> {
    let pin = token.parse::<JoinToken>().unwrap().pin();
    enrol_with_pin(controller, token, node, key, pin).await
}

pub async fn enrol_with_pin(
    controller: SocketAddr,
    token: &str,
    node: &str,
    key: &PrivateKey,
    pin: Pin,
) -> Result<Bundle, Status> {
    let endpoint = Endpoint::from_shared(format!("http://{controller}")).unwrap();
    let channel = endpoint.connect_with_connector_lazy(Connector::pinned(pin).unwrap());
    let csr = key.request(node).unwrap();
    let request = v1::EnrollRequest { token: token.to_owned(), node_name: node.to_owned(), csr };
    let answer = ControllerTlsClient::new(channel).enroll(request).await?.into_inner();
    let chain = answer.chain.into_iter().map(CertificateDer::from).collect();
    let identity = Identity::new(key, chain).unwrap();
    Ok(Bundle { identity: Some(identity), trust: trust(answer.trust.unwrap()) })
}

pub fn now() -> UnixTime {
    UnixTime::since_unix_epoch(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap())
}

impl TlsAgent {
    pub fn new(fake: FakeAgent, bundle: Bundle, path: PathBuf) -> TlsAgent {
        store(&path, &bundle).unwrap();
        let credentials = Credentials::new(bundle).unwrap();
        TlsAgent { fake, credentials, claims_to_be_due: Arc::default(), path, pending: Arc::default() }
    }

    /// Serves on `listener` until the task is aborted.
    pub fn serve(&self, listener: TcpListener) -> JoinHandle<()> {
        let incoming =
            incoming(listener, &self.credentials, ClientAuth::Required, Limits::default()).unwrap();
        let server = Server::builder()
            .http2_keepalive_interval(Some(Duration::from_secs(1)))
            .layer(AccessLayer)
            .add_service(NodeServer::new(self.fake.clone()))
            .add_service(NodeTlsServer::new(self.clone()));
        tokio::spawn(async move { server.serve_with_incoming(incoming).await.unwrap() })
    }

    pub fn serial(&self) -> String {
        self.state().serial
    }

    pub fn state(&self) -> v1::NodeTlsState {
        let current = self.credentials.current();
        let identity = current.identity.as_ref().unwrap();
        let certificate = identity.certificate();
        let is_due = self.claims_to_be_due.load(Ordering::SeqCst);
        v1::NodeTlsState {
            serial: certificate.serial.to_string(),
            not_before_s: if is_due { 0 } else { certificate.not_before },
            not_after_s: if is_due { 1 } else { certificate.not_after },
            signer_pin: Pin::of(&identity.chain()[1]).to_string(),
            trust_version: current.trust.version(),
            trusted_pins: current.trust.pins().iter().map(Pin::to_string).collect(),
        }
    }

    fn replace(&self, bundle: Bundle) {
        store(&self.path, &bundle).unwrap();
        self.credentials.replace(bundle).unwrap();
    }
}

#[tonic::async_trait]
impl NodeTls for TlsAgent {
    async fn get_node_tls(
        &self,
        _: Request<v1::GetNodeTlsRequest>,
    ) -> Result<Response<v1::NodeTlsState>, Status> {
        Ok(Response::new(self.state()))
    }

    async fn create_certificate_request(
        &self,
        _: Request<v1::CreateCertificateRequestRequest>,
    ) -> Result<Response<v1::CertificateRequest>, Status> {
        let key = PrivateKey::generate().unwrap();
        let csr = key.request(&self.fake.name).unwrap();
        *self.pending.lock().unwrap() = Some(key);
        Ok(Response::new(v1::CertificateRequest { csr }))
    }

    async fn set_certificate(
        &self,
        request: Request<v1::SetCertificateRequest>,
    ) -> Result<Response<v1::NodeTlsState>, Status> {
        let chain: Vec<CertificateDer<'static>> =
            request.into_inner().chain.into_iter().map(CertificateDer::from).collect();
        let key = self.pending.lock().unwrap().take();
        let key = key.ok_or_else(|| Status::failed_precondition("no request is open"))?;
        let current = self.credentials.current();
        current.trust.verify_server(&chain[0], now()).unwrap();
        let identity = Identity::new(&key, chain).unwrap();
        self.claims_to_be_due.store(false, Ordering::SeqCst);
        self.replace(Bundle { identity: Some(identity), trust: current.trust.clone() });
        Ok(Response::new(self.state()))
    }

    async fn set_trust(&self, request: Request<v1::TrustList>) -> Result<Response<v1::NodeTlsState>, Status> {
        let trust = trust(request.into_inner());
        let identity = self.credentials.current().identity.clone();
        trust.verify_server(&identity.as_ref().unwrap().chain()[0], now()).unwrap();
        self.replace(Bundle { identity, trust });
        Ok(Response::new(self.state()))
    }
}
