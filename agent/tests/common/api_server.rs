//! A stand-in for the API server of Kubernetes and for the controller that signs: HTTPS with client
//! certificates, and CertificateSigningRequests.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use serde_json::{Value, json};
use shorthorn_pki::{Authority, Role, chain_to_pem};
use shorthorn_testkit::waiting::wait_for_async;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::LIMIT;
use super::tls::now;

const PATH: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";

/// The decision about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The request waits.
    None,
    /// The request is signed for the node that it names.
    Sign,
    /// The request is signed for another node.
    SignForAnother,
    /// The request is denied.
    Deny,
}

/// The server; it ends with the runtime of the test.
pub struct ApiServer {
    pub kubeconfig: PathBuf,
    state: Arc<Mutex<ApiServerState>>,
}

struct ApiServerState {
    authority: Authority,
    decision: Decision,
    requests: Vec<Value>,
}

fn der_of(key: &KeyPair) -> PrivateKeyDer<'static> {
    PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()))
}

fn pem_of(key: &KeyPair) -> String {
    let text = BASE64_STANDARD.encode(key.serialize_der());
    format!("-----BEGIN PRIVATE KEY-----\n{text}\n-----END PRIVATE KEY-----\n")
}

fn issuer() -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, "kubernetes");
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

impl ApiServer {
    /// Starts one. `dir` gets the files of a kubelet of node n1.
    pub async fn start(dir: &Path, authority: Authority, decision: Decision) -> ApiServer {
        let cluster = issuer();
        let (server_key, kubelet_key) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
        let server = CertificateParams::new(["127.0.0.1".to_owned()]).unwrap();
        let server = server.signed_by(&server_key, &cluster).unwrap();
        let mut kubelet = CertificateParams::default();
        kubelet.distinguished_name.push(DnType::CommonName, "system:node:n1");
        kubelet.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
        let kubelet = kubelet.signed_by(&kubelet_key, &cluster).unwrap();

        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        roots.add(cluster.der().clone()).unwrap();
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider)).build();
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(verifier.unwrap())
            .with_single_cert(vec![server.der().clone()], der_of(&server_key))
            .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(Mutex::new(ApiServerState { authority, decision, requests: Vec::new() }));
        let kubeconfig = write_kubelet(dir, address, cluster.der(), kubelet.der(), &kubelet_key);
        tokio::spawn(serve(listener, TlsAcceptor::from(Arc::new(config)), Arc::clone(&state)));
        ApiServer { kubeconfig, state }
    }

    pub fn decide(&self, decision: Decision) {
        self.state.lock().unwrap().decision = decision;
    }

    pub fn requests(&self) -> Vec<Value> {
        self.state.lock().unwrap().requests.clone()
    }

    /// Waits until `count` requests were made.
    pub async fn wait_for_requests(&self, count: usize) {
        wait_for_async("the requests are made", LIMIT, async || {
            let made = self.requests().len();
            if made >= count { Ok(()) } else { Err(made) }
        })
        .await;
    }
}

fn write_kubelet(
    dir: &Path,
    address: SocketAddr,
    authority: &CertificateDer<'_>,
    certificate: &CertificateDer<'_>,
    key: &KeyPair,
) -> PathBuf {
    let authority = chain_to_pem(std::slice::from_ref(authority));
    fs::write(dir.join("kubelet.pem"), chain_to_pem(std::slice::from_ref(certificate)) + &pem_of(key))
        .unwrap();
    let config = format!(
        "apiVersion: v1\nkind: Config\nclusters:\n\
         - name: k\n  cluster:\n    server: https://{address}\n    certificate-authority-data: {}\nusers:\n\
         - name: u\n  user:\n    client-certificate: kubelet.pem\n    client-key: kubelet.pem\ncontexts:\n\
         - name: c\n  context:\n    cluster: k\n    user: u\ncurrent-context: c\n",
        BASE64_STANDARD.encode(authority)
    );
    let path = dir.join("kubelet.conf");
    fs::write(&path, config).unwrap();
    path
}

async fn serve(listener: TcpListener, acceptor: TlsAcceptor, state: Arc<Mutex<ApiServerState>>) {
    loop {
        let (tcp, _) = listener.accept().await.unwrap();
        let (acceptor, state) = (acceptor.clone(), Arc::clone(&state));
        tokio::spawn(async move {
            let Ok(tls) = acceptor.accept(tcp).await else { return };
            let answer = service_fn(move |request| answer(request, Arc::clone(&state)));
            let _ =
                hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(tls), answer).await;
        });
    }
}

async fn answer(
    request: Request<Incoming>,
    state: Arc<Mutex<ApiServerState>>,
) -> Result<Response<Full<Bytes>>, hyper::Error> {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let body = request.into_body().collect().await?.to_bytes();
    let (status, document) = state.lock().unwrap().answer(&method, &path, &body);
    let body = Full::new(Bytes::from(document.to_string()));
    Ok(Response::builder().status(status).body(body).unwrap())
}

impl ApiServerState {
    fn answer(&mut self, method: &Method, path: &str, body: &[u8]) -> (StatusCode, Value) {
        if *method == Method::POST && path == PATH {
            let mut csr: Value = serde_json::from_slice(body).unwrap();
            csr["metadata"] = json!({ "name": format!("shorthorn-agent-{}", self.requests.len()) });
            self.requests.push(csr.clone());
            return (StatusCode::CREATED, csr);
        }
        let number = path.strip_prefix(PATH).and_then(|path| path.strip_prefix("/shorthorn-agent-"));
        let Some(mut csr) =
            number.and_then(|number| self.requests.get(number.parse::<usize>().ok()?).cloned())
        else {
            return (StatusCode::NOT_FOUND, json!({ "message": "not found" }));
        };
        csr["status"] = match self.decision {
            Decision::None => json!({}),
            Decision::Sign => self.signed(&csr, "n1"),
            Decision::SignForAnother => self.signed(&csr, "n2"),
            Decision::Deny => json!({ "conditions": [
                { "type": "Denied", "status": "True", "reason": "Policy", "message": "not this node" }
            ] }),
        };
        (StatusCode::OK, csr)
    }

    fn signed(&mut self, csr: &Value, node: &str) -> Value {
        let text = BASE64_STANDARD.decode(csr["spec"]["request"].as_str().unwrap()).unwrap();
        let request = shorthorn_pki::CertificateRequest::from_pem(&text).unwrap();
        let chain = self.authority.sign(&request, &Role::node(node).unwrap(), now()).unwrap();
        json!({ "certificate": BASE64_STANDARD.encode(chain_to_pem(&chain)) })
    }
}
