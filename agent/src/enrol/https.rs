//! Requests to the API server of Kubernetes with the kubelet's certificate. A few of them are made in the
//! life of a node, so each has a connection of its own.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::{Method, Request, StatusCode, Uri, header};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use thiserror::Error;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::enrol::kubeconfig::KubeletIdentity;

/// The longest that a request may take, with its connection. An API server under load answers after seconds,
/// and the agent tries again.
const REQUEST_LIMIT: Duration = Duration::from_secs(30);
/// The longest answer.
const ANSWER_MAX_BYTES: usize = 1 << 20;
const HTTPS_PORT: u16 = 443;

/// A request to the API server cannot be made, or fails.
#[derive(Debug, Error)]
pub enum HttpsError {
    /// The kubeconfig names no address.
    #[error("{0:?} is not an address of an API server")]
    Address(String),
    /// The kubeconfig has certificates or a key that cannot be used.
    #[error("the {what} of {file} cannot be used: {reason}")]
    Identity {
        /// The part that cannot be used.
        what: &'static str,
        /// Path of the kubeconfig.
        file: String,
        /// The reason why that part cannot be used.
        reason: String,
    },
    /// No connection.
    #[error("cannot connect to {server}: {source}")]
    Connect {
        server: String,
        /// The error of the system, or of TLS.
        source: io::Error,
    },
    /// The request failed.
    #[error("{server} does not answer: {reason}")]
    Request { server: String, reason: String },
    /// The API server does not answer in time.
    #[error("{0} does not answer within {limit} s", limit = REQUEST_LIMIT.as_secs())]
    Late(String),
}

/// An API server.
pub struct ApiServer {
    server: String,
    host: String,
    port: u16,
    name: ServerName<'static>,
    config: Arc<ClientConfig>,
}

impl std::fmt::Debug for ApiServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ApiServer").field("server", &self.server).finish_non_exhaustive()
    }
}

impl ApiServer {
    /// The API server of a kubelet.
    ///
    /// # Errors
    /// [`HttpsError::Address`] and [`HttpsError::Identity`].
    pub fn new(identity: &KubeletIdentity) -> Result<ApiServer, HttpsError> {
        let address = || HttpsError::Address(identity.server.clone());
        let uri: Uri = identity.server.parse().map_err(|_| address())?;
        let host = uri.host().ok_or_else(address)?.trim_matches(['[', ']']).to_owned();
        let name = identity.server_name.clone().unwrap_or_else(|| host.clone());
        let name = ServerName::try_from(name).map_err(|_| address())?;
        let port = uri.port_u16().unwrap_or(HTTPS_PORT);
        Ok(ApiServer { server: identity.server.clone(), host, port, name, config: config(identity)? })
    }

    /// Makes a request with a document in JSON, and returns status and answer.
    ///
    /// # Errors
    /// [`HttpsError`]; a status other than success is not an error.
    pub async fn request(
        &self,
        method: Method,
        path: &str,
        document: Vec<u8>,
    ) -> Result<(StatusCode, Bytes), HttpsError> {
        let answer = timeout(REQUEST_LIMIT, self.request_now(method, path, document)).await;
        answer.map_err(|_| HttpsError::Late(self.server.clone()))?
    }

    async fn request_now(
        &self,
        method: Method,
        path: &str,
        document: Vec<u8>,
    ) -> Result<(StatusCode, Bytes), HttpsError> {
        let failed = |source| HttpsError::Connect { server: self.server.clone(), source };
        let tcp = TcpStream::connect((self.host.as_str(), self.port)).await.map_err(failed)?;
        let connector = TlsConnector::from(Arc::clone(&self.config));
        let tls = connector.connect(self.name.clone(), tcp).await.map_err(failed)?;
        let broken = |error: &dyn std::fmt::Display| HttpsError::Request {
            server: self.server.clone(),
            reason: error.to_string(),
        };
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(tls)).await.map_err(|error| broken(&error))?;
        let connection = tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, format!("{}:{}", self.host, self.port))
            .header(header::ACCEPT, "application/json")
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::USER_AGENT, concat!("shorthorn-agent/", env!("CARGO_PKG_VERSION")))
            .body(Full::new(Bytes::from(document)))
            .map_err(|error| broken(&error))?;
        let answered = async {
            let answer = sender.send_request(request).await.map_err(|error| broken(&error))?;
            let status = answer.status();
            let body = Limited::new(answer.into_body(), ANSWER_MAX_BYTES).collect().await;
            Ok((status, body.map_err(|error| broken(&error))?.to_bytes()))
        };
        let answered = answered.await;
        connection.abort();
        answered
    }
}

fn config(identity: &KubeletIdentity) -> Result<Arc<ClientConfig>, HttpsError> {
    let wrong = |what, error: &dyn std::fmt::Display| HttpsError::Identity {
        what,
        file: identity.file.display().to_string(),
        reason: error.to_string(),
    };
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&identity.authority) {
        let certificate = certificate.map_err(|error| wrong("certificate authority", &error))?;
        roots.add(certificate).map_err(|error| wrong("certificate authority", &error))?;
    }
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(&identity.certificate)
        .collect::<Result<_, _>>()
        .map_err(|error| wrong("client certificate", &error))?;
    let key = PrivateKeyDer::from_pem_slice(&identity.key).map_err(|error| wrong("client key", &error))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| wrong("TLS configuration", &error))?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)
        .map_err(|error| wrong("client certificate", &error))?;
    Ok(Arc::new(config))
}
