//! Enrolment in a Kubernetes cluster: a CertificateSigningRequest that the kubelet's certificate
//! authenticates. The API server records the name of the node in it, and the controller signs for that node.

use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use hyper::{Method, StatusCode};
use serde::Deserialize;
use serde_json::json;
use shorthorn_pki::{CertificateRequestError, PrivateKey, SIGNER_NAME, request_to_pem};
use thiserror::Error;
use tokio::time::{Instant, sleep};

use crate::enrol::https::{ApiServer, HttpsError};

const PATH: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";
/// The time after which the agent gives up a pending request and makes another one. Kubernetes removes the
/// request after a day. An administrator may have to approve it by hand.
const DECISION_LIMIT: Duration = Duration::from_hours(1);
/// First pause before the request is read again, and the longest one.
const POLL_FIRST: Duration = Duration::from_millis(500);
const POLL_MAX: Duration = Duration::from_secs(15);
/// Errors of the API server are shown up to this length.
const SHOWN_MAX_CHARS: usize = 300;

/// The node cannot get a certificate from Kubernetes.
#[derive(Debug, Error)]
pub enum CsrError {
    /// The API server does not answer.
    #[error(transparent)]
    Https(#[from] HttpsError),
    /// No key.
    #[error(transparent)]
    Key(#[from] CertificateRequestError),
    /// The API server refuses the call.
    #[error("the API server refuses to {action} a CertificateSigningRequest: {status} {message}")]
    Refused {
        /// The action that the API server refuses.
        action: &'static str,
        status: StatusCode,
        message: String,
    },
    /// The controller or a person has denied the request.
    #[error("the CertificateSigningRequest {name} was denied: {message}")]
    Denied {
        /// Name of the CertificateSigningRequest.
        name: String,
        message: String,
    },
    /// The request was not decided in time.
    #[error(
        "the CertificateSigningRequest {name} of signer {SIGNER_NAME} was not signed within {} s: check that \
         the controller runs", DECISION_LIMIT.as_secs()
    )]
    Late {
        /// Name of the CertificateSigningRequest.
        name: String,
    },
    /// The answer cannot be read.
    #[error("the API server's answer cannot be read: {0}")]
    Answer(String),
}

/// The signed certificates of a request, in PEM, and the key.
#[derive(Debug)]
pub struct Signed {
    pub key: PrivateKey,
    pub chain: Vec<u8>,
}

#[derive(Debug, Deserialize)]
struct Csr {
    metadata: Metadata,
    #[serde(default)]
    status: Status,
}

#[derive(Debug, Deserialize)]
struct Metadata {
    name: String,
}

#[derive(Debug, Default, Deserialize)]
struct Status {
    #[serde(default)]
    conditions: Vec<Condition>,
    #[serde(default)]
    certificate: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Condition {
    r#type: String,
    #[serde(default)]
    reason: String,
    #[serde(default)]
    message: String,
}

#[derive(Debug, Default, Deserialize)]
struct Failure {
    #[serde(default)]
    message: String,
}

/// Makes a key, has its certificate signed, and waits for that.
///
/// # Errors
/// [`CsrError`]; the key is gone then.
pub async fn request(server: &ApiServer, node_name: &str) -> Result<Signed, CsrError> {
    let key = PrivateKey::generate()?;
    let request = request_to_pem(&key.request(node_name)?);
    let document = json!({
        "apiVersion": "certificates.k8s.io/v1",
        "kind": "CertificateSigningRequest",
        "metadata": { "generateName": "shorthorn-agent-" },
        "spec": {
            "request": BASE64_STANDARD.encode(request),
            "signerName": SIGNER_NAME,
            "usages": ["digital signature", "server auth"],
        },
    });
    let made = server.request(Method::POST, PATH, document.to_string().into_bytes()).await?;
    let name = read("create", made)?.metadata.name;
    tracing::info!(name, "waiting for the signature of a CertificateSigningRequest");
    let deadline = Instant::now() + DECISION_LIMIT;
    let mut pause = POLL_FIRST;
    while Instant::now() < deadline {
        let answer = server.request(Method::GET, &format!("{PATH}/{name}"), Vec::new()).await;
        match answer.map(|answer| decided(answer, &name)) {
            Ok(decided) => {
                if let Some(chain) = decided? {
                    return Ok(Signed { key, chain });
                }
            }
            // It may be signed meanwhile.
            Err(error) => tracing::debug!("{error}"),
        }
        sleep(pause).await;
        pause = (pause * 2).min(POLL_MAX);
    }
    Err(CsrError::Late { name })
}

/// The certificates, if the request was signed.
fn decided(answer: (StatusCode, hyper::body::Bytes), name: &str) -> Result<Option<Vec<u8>>, CsrError> {
    if answer.0.is_server_error() || answer.0 == StatusCode::TOO_MANY_REQUESTS {
        return Ok(None);
    }
    let csr = read("read", answer)?;
    let is_over = |condition: &&Condition| matches!(condition.r#type.as_str(), "Denied" | "Failed");
    if let Some(condition) = csr.status.conditions.iter().find(is_over) {
        let message = shown(&format!("{}: {}", condition.reason, condition.message));
        return Err(CsrError::Denied { name: name.to_owned(), message });
    }
    match csr.status.certificate.filter(|certificate| !certificate.is_empty()) {
        Some(certificate) => {
            let chain = BASE64_STANDARD.decode(certificate);
            chain.map(Some).map_err(|error| CsrError::Answer(format!("status.certificate: {error}")))
        }
        None => Ok(None),
    }
}

fn read(action: &'static str, answer: (StatusCode, hyper::body::Bytes)) -> Result<Csr, CsrError> {
    let (status, body) = answer;
    if !status.is_success() {
        let failure: Failure = serde_json::from_slice(&body).unwrap_or_default();
        return Err(CsrError::Refused { action, status, message: shown(&failure.message) });
    }
    serde_json::from_slice(&body).map_err(|error| CsrError::Answer(error.to_string()))
}

fn shown(text: &str) -> String {
    text.chars().filter(|character| !character.is_control()).take(SHOWN_MAX_CHARS).collect()
}
