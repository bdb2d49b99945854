//! The signer `shorthorn.io/agent` for CertificateSigningRequests of Kubernetes. The API server records the
//! maker of a request. A request that the kubelet of a node made proves that its maker is root there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestCondition, CertificateSigningRequestSpec,
};
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::json;
use shorthorn_controller_core::NodeName;
use shorthorn_kube::{CallError, bounded, is_code};
use shorthorn_pki::{CertificateDer, CertificateRequest, Role, SIGNER_NAME, chain_to_pem};
use tokio::time::Instant;

use super::list_watch::Pages;
use crate::tls::{CaError, Tls, now};

/// The interval of checking the requests.
const EVERY: Duration = Duration::from_secs(5);
/// Requests of one answer of the API server; the next answer has more.
const PAGE_MAX: u32 = 200;
/// The longest time between two looks while the API server or the store of the CA fails.
const LOOK_PAUSE_MAX: Duration = Duration::from_mins(1);
/// Attempts to sign one request that the API server refuses, with growing pauses. Then it has failed for
/// good.
const ATTEMPTS_MAX: u32 = 8;
/// The longest pause between two of these attempts.
const ATTEMPT_PAUSE_MAX: Duration = Duration::from_mins(5);
const KUBELET_PREFIX: &str = "system:node:";
const KUBELET_GROUP: &str = "system:nodes";
/// The usages that a request may ask for. The certificate has its own.
const USAGES: &[&str] = &["digital signature", "key encipherment", "server auth"];

/// The decision about one request.
#[derive(Debug)]
enum RequestDecision {
    /// Approve and sign the request, which the kubelet of the node made.
    Sign { node: NodeName, request: Box<CertificateRequest> },
    /// Deny it for this reason.
    Deny(String),
    /// The request is already signed or denied.
    Done,
}

/// The attempts of one request that is not signed yet.
#[derive(Debug, Default)]
struct Attempts {
    /// The certificate, if only its storing has failed. No further one is signed.
    chain: Option<Vec<CertificateDer<'static>>>,
    failures: u32,
    /// The time of the next attempt.
    next: Option<Instant>,
    /// The last error.
    error: String,
}

impl Attempts {
    fn is_waiting(&self) -> bool {
        self.next.is_some_and(|next| Instant::now() < next)
    }

    fn failed(&mut self, error: &SignError) {
        self.failures = self.failures.saturating_add(1);
        self.next = Some(Instant::now() + pause(self.failures).min(ATTEMPT_PAUSE_MAX));
        self.error = error.to_string();
    }
}

/// Returns the pause after that many failures in a row.
fn pause(failures: u32) -> Duration {
    let factor = 1_u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
    EVERY.saturating_mul(factor)
}

/// The attempts by the uid of the request. Only listed requests have some.
type AllAttempts = BTreeMap<String, Attempts>;

/// Signs requests of agents, until it is dropped.
pub async fn run(client: kube::Client, tls: Arc<Tls>) {
    let api: Api<CertificateSigningRequest> = Api::all(client);
    let (mut failures, mut attempts) = (0_u32, AllAttempts::new());
    loop {
        match decide_requests(&api, &tls, &mut attempts).await {
            Ok(()) => failures = 0,
            Err(error) => {
                if failures == 0 {
                    tracing::warn!(
                        %error,
                        "certificate signing requests cannot be signed; trying again; check that rbac.yaml \
                         is applied"
                    );
                }
                failures = failures.saturating_add(1);
            }
        }
        tokio::time::sleep(pause(failures).min(LOOK_PAUSE_MAX)).await;
    }
}

/// Looks at all requests, also at those behind many that are decided: Kubernetes keeps these for an hour.
async fn decide_requests(
    api: &Api<CertificateSigningRequest>,
    tls: &Tls,
    attempts: &mut AllAttempts,
) -> Result<(), SignError> {
    let of_ours = ListParams::default().fields(&format!("spec.signerName={SIGNER_NAME}")).limit(PAGE_MAX);
    let (mut pages, mut listed) = (Pages::new(api, of_ours), BTreeSet::new());
    while let Some(page) = pages.next().await? {
        for found in &page {
            let uid = found.metadata.uid.clone().unwrap_or_default();
            listed.insert(uid.clone());
            handle_one(api, tls, found, attempts.entry(uid).or_default()).await?;
        }
    }
    attempts.retain(|uid, attempt| listed.contains(uid) && attempt.failures > 0);
    Ok(())
}

/// Handles a request. One that fails does not hold up the others.
async fn handle_one(
    api: &Api<CertificateSigningRequest>,
    tls: &Tls,
    found: &CertificateSigningRequest,
    attempts: &mut Attempts,
) -> Result<(), SignError> {
    if attempts.is_waiting() {
        return Ok(());
    }
    let Err(error) = handle(api, tls, found, attempts).await else {
        *attempts = Attempts::default();
        return Ok(());
    };
    match &error {
        SignError::Tls(CaError::Authority(error)) => {
            tracing::error!(request = found.metadata.name, %error, "a request is not signed");
        }
        // It was removed or decided meanwhile, or this one is not acceptable.
        SignError::Call(call) if [404, 409, 422].iter().any(|code| is_code(call, *code)) => {
            tracing::warn!(request = found.metadata.name, error = %call, "a request is not decided");
        }
        // All other requests would fail too, for a reason that has nothing to do with them.
        SignError::Tls(_) | SignError::Call(_) => return Err(error),
    }
    attempts.failed(&error);
    Ok(())
}

async fn handle(
    api: &Api<CertificateSigningRequest>,
    tls: &Tls,
    found: &CertificateSigningRequest,
    attempts: &mut Attempts,
) -> Result<(), SignError> {
    let name = found.metadata.name.clone().unwrap_or_default();
    match judge(found) {
        RequestDecision::Done => {}
        RequestDecision::Deny(reason) => {
            tracing::warn!(request = name, reason, "a certificate signing request is denied");
            decide(api, found, "Denied", &reason).await?;
        }
        RequestDecision::Sign { .. } if attempts.failures >= ATTEMPTS_MAX => {
            let reason = format!("{ATTEMPTS_MAX} attempts to sign it have failed: {}", attempts.error);
            tracing::error!(request = name, reason, "a certificate signing request has failed");
            fail(api, found, &reason).await?;
        }
        RequestDecision::Sign { node, request } => {
            if !has_condition(found, "Approved") {
                decide(api, found, "Approved", "the kubelet of the node made the request").await?;
            }
            sign(api, tls, &name, &node, &request, attempts).await?;
        }
    }
    Ok(())
}

/// A request cannot be handled now.
#[derive(Debug, thiserror::Error)]
enum SignError {
    #[error(transparent)]
    Call(#[from] CallError),
    #[error(transparent)]
    Tls(#[from] CaError),
}

async fn sign(
    api: &Api<CertificateSigningRequest>,
    tls: &Tls,
    name: &str,
    node: &NodeName,
    request: &CertificateRequest,
    attempts: &mut Attempts,
) -> Result<(), SignError> {
    let role = Role::Node(node.clone());
    let chain = match attempts.chain.take() {
        Some(chain) => chain,
        None => {
            let signed = tls.change(|authority| {
                // It may have enrolled again, and then trusts the CA that signs and no other.
                tls.seen().remove(node);
                authority.sign(request, &role, now())
            });
            signed.await?
        }
    };
    let certificate = ByteString(chain_to_pem(attempts.chain.insert(chain)).into_bytes());
    let change = json!({ "status": { "certificate": certificate } });
    bounded(api.patch_status(name, &PatchParams::default(), &Patch::Merge(change))).await?;
    tracing::info!(request = name, node = node.as_str(), "a node has joined by its kubelet");
    Ok(())
}

/// Marks the request as failed: its agent makes another one, and this one is not tried any more.
async fn fail(
    api: &Api<CertificateSigningRequest>,
    found: &CertificateSigningRequest,
    message: &str,
) -> Result<(), CallError> {
    let status = found.status.as_ref();
    let mut conditions = status.and_then(|status| status.conditions.clone()).unwrap_or_default();
    conditions.push(condition("Failed", message));
    let name = found.metadata.name.clone().unwrap_or_default();
    let change = json!({
        "metadata": { "resourceVersion": found.metadata.resource_version },
        "status": { "conditions": conditions },
    });
    bounded(api.patch_status(&name, &PatchParams::default(), &Patch::Merge(change))).await.map(drop)
}

fn condition(condition_type: &str, message: &str) -> CertificateSigningRequestCondition {
    CertificateSigningRequestCondition {
        type_: condition_type.to_owned(),
        status: "True".to_owned(),
        reason: Some("ShorthornSigner".to_owned()),
        message: Some(message.to_owned()),
        ..CertificateSigningRequestCondition::default()
    }
}

async fn decide(
    api: &Api<CertificateSigningRequest>,
    found: &CertificateSigningRequest,
    condition_type: &str,
    message: &str,
) -> Result<(), CallError> {
    let condition = condition(condition_type, message);
    let name = found.metadata.name.clone().unwrap_or_default();
    let change = json!({
        "metadata": { "resourceVersion": found.metadata.resource_version },
        "status": { "conditions": [condition] },
    });
    bounded(api.patch_approval(&name, &PatchParams::default(), &Patch::Merge(change))).await.map(drop)
}

fn has_condition(found: &CertificateSigningRequest, condition_type: &str) -> bool {
    let conditions = found.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.is_some_and(|all| all.iter().any(|condition| condition.type_ == condition_type))
}

fn judge(found: &CertificateSigningRequest) -> RequestDecision {
    let is_signed = found.status.as_ref().is_some_and(|status| status.certificate.is_some());
    if is_signed || has_condition(found, "Denied") || has_condition(found, "Failed") {
        return RequestDecision::Done;
    }
    match check(&found.spec) {
        Ok((node, request)) => RequestDecision::Sign { node, request: Box::new(request) },
        // An administrator's approval does not replace the proof.
        Err(_) if has_condition(found, "Approved") => RequestDecision::Done,
        Err(reason) => RequestDecision::Deny(reason),
    }
}

/// The node that the request is for, if its maker is the kubelet of that node.
fn check(spec: &CertificateSigningRequestSpec) -> Result<(NodeName, CertificateRequest), String> {
    if spec.signer_name != SIGNER_NAME {
        return Err(format!("the request is for another signer than {SIGNER_NAME}"));
    }
    let user = spec.username.as_deref().unwrap_or_default();
    let groups = spec.groups.as_deref().unwrap_or_default();
    let node =
        user.strip_prefix(KUBELET_PREFIX).filter(|_| groups.iter().any(|group| group == KUBELET_GROUP));
    let node = node.ok_or_else(|| format!("{user:?} is not the kubelet of a node"))?;
    let node = NodeName::new(node).map_err(|error| error.to_string())?;
    let usages = spec.usages.as_deref().unwrap_or_default();
    if let Some(other) = usages.iter().find(|usage| !USAGES.contains(&usage.as_str())) {
        return Err(format!("usage {other:?} is not given; use \"digital signature\" and \"server auth\""));
    }
    let request = CertificateRequest::from_pem(&spec.request.0).map_err(|error| error.to_string())?;
    request.check_names(node.as_str()).map_err(|error| error.to_string())?;
    Ok((node, request))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::certificates::v1::CertificateSigningRequestStatus;
    use shorthorn_pki::{PrivateKey, request_to_pem};

    use super::*;
    use crate::kubernetes::fake_api::{FakeApi, fake_client};

    fn pem(common_name: &str) -> Vec<u8> {
        request_to_pem(&PrivateKey::generate().unwrap().request(common_name).unwrap()).into_bytes()
    }

    fn request(user: &str, common_name: &str) -> CertificateSigningRequest {
        CertificateSigningRequest {
            spec: CertificateSigningRequestSpec {
                request: ByteString(pem(common_name)),
                signer_name: SIGNER_NAME.to_owned(),
                username: Some(user.to_owned()),
                groups: Some(vec!["system:nodes".to_owned(), "system:authenticated".to_owned()]),
                usages: Some(vec!["digital signature".to_owned(), "server auth".to_owned()]),
                ..CertificateSigningRequestSpec::default()
            },
            ..CertificateSigningRequest::default()
        }
    }

    fn denial(found: &CertificateSigningRequest) -> String {
        match judge(found) {
            RequestDecision::Deny(reason) => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn only_the_kubelet_of_a_node_gets_its_certificate() {
        let good = request("system:node:a", "a");
        assert!(matches!(judge(&good), RequestDecision::Sign { node, .. } if node.as_str() == "a"));
        assert!(denial(&request("system:node:a", "b")).contains("names"));
        assert!(denial(&request("system:serviceaccount:x:y", "a")).contains("kubelet"));
        let mut without_group = good.clone();
        without_group.spec.groups = Some(vec!["system:authenticated".to_owned()]);
        assert!(denial(&without_group).contains("kubelet"));
        let mut client = good.clone();
        client.spec.usages = Some(vec!["client auth".to_owned()]);
        assert!(denial(&client).contains("client auth"));
        let mut text = good;
        text.spec.request = ByteString(b"text".to_vec());
        assert!(denial(&text).contains("cannot be read"));
    }

    #[test]
    fn a_request_is_decided_once_and_an_approval_by_hand_proves_nothing() {
        let with = |condition_type: &str, mut found: CertificateSigningRequest| {
            let condition = CertificateSigningRequestCondition {
                type_: condition_type.to_owned(),
                ..CertificateSigningRequestCondition::default()
            };
            found.status = Some(CertificateSigningRequestStatus {
                conditions: Some(vec![condition]),
                ..CertificateSigningRequestStatus::default()
            });
            found
        };
        assert!(matches!(judge(&with("Denied", request("system:node:a", "a"))), RequestDecision::Done));
        assert!(matches!(
            judge(&with("Approved", request("system:node:a", "a"))),
            RequestDecision::Sign { .. }
        ));
        assert!(matches!(judge(&with("Approved", request("mallory", "a"))), RequestDecision::Done));
        let mut signed = with("Approved", request("system:node:a", "a"));
        signed.status.as_mut().unwrap().certificate = Some(ByteString(b"x".to_vec()));
        assert!(matches!(judge(&signed), RequestDecision::Done));
    }

    /// Keeps the CA in memory, and refuses to store it on request.
    #[derive(Default)]
    struct Memory {
        stored: std::sync::Mutex<Option<Vec<u8>>>,
        is_full: std::sync::atomic::AtomicBool,
        saves: std::sync::atomic::AtomicU32,
    }

    #[async_trait::async_trait]
    impl crate::ca_storage::CaStorage for Memory {
        async fn load(&self) -> Result<Option<Vec<u8>>, crate::ca_storage::CaStorageError> {
            Ok(self.stored.lock().unwrap().clone())
        }

        async fn save(&self, state: Vec<u8>) -> Result<(), crate::ca_storage::CaStorageError> {
            self.saves.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            if self.is_full.load(std::sync::atomic::Ordering::SeqCst) {
                return Err(crate::ca_storage::CaStorageError("full".to_owned()));
            }
            *self.stored.lock().unwrap() = Some(state);
            Ok(())
        }
    }

    /// An API server with one request, whose status it refuses on request.
    struct OneRequest {
        found: std::sync::Mutex<serde_json::Value>,
        refuses: std::sync::atomic::AtomicBool,
    }

    impl OneRequest {
        fn new(refuses: bool) -> Arc<OneRequest> {
            let mut found = serde_json::to_value(request("system:node:a", "a")).unwrap();
            found["metadata"] = json!({ "name": "r", "uid": "u", "resourceVersion": "1" });
            Arc::new(OneRequest { found: found.into(), refuses: refuses.into() })
        }

        fn is_signed(&self) -> bool {
            !self.found.lock().unwrap()["status"]["certificate"].is_null()
        }

        fn conditions(&self) -> Vec<String> {
            let found = self.found.lock().unwrap();
            let conditions = found["status"]["conditions"].as_array().cloned().unwrap_or_default();
            conditions.iter().map(|condition| condition["type"].as_str().unwrap().to_owned()).collect()
        }
    }

    impl FakeApi for OneRequest {
        async fn answer(&self, head: &http::request::Parts, body: &[u8]) -> (u16, serde_json::Value) {
            let mut found = self.found.lock().unwrap();
            if body.is_empty() {
                let (kind, version) = ("CertificateSigningRequestList", "certificates.k8s.io/v1");
                return (
                    200,
                    json!({ "kind": kind, "apiVersion": version, "metadata": {}, "items": [*found] }),
                );
            }
            let change: serde_json::Value = serde_json::from_slice(body).unwrap();
            let is_certificate = !change["status"]["certificate"].is_null();
            if head.uri.path().ends_with("/status")
                && is_certificate
                && self.refuses.load(std::sync::atomic::Ordering::SeqCst)
            {
                return (422, json!({ "kind": "Status", "status": "Failure", "message": "no", "code": 422 }));
            }
            for (name, value) in change["status"].as_object().unwrap() {
                found["status"][name] = value.clone();
            }
            (200, found.clone())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_fails_is_signed_once_and_not_tried_for_ever() {
        let tls = Tls::open(Arc::<Memory>::default(), "c0ffee").await.unwrap();
        let api = OneRequest::new(true);
        let signing = tokio::spawn(run(fake_client(&api), Arc::clone(&tls)));
        let mut seconds = 0;
        while api.conditions() != ["Approved", "Failed"] {
            tokio::time::sleep(Duration::from_secs(1)).await;
            seconds += 1;
            assert!(seconds < 3600, "it is tried for ever: {:?}", api.conditions());
        }
        assert!(seconds > 600, "it is given up after {seconds} s");
        signing.abort();
        assert_eq!(
            tls.read_authority(|authority| authority.issued().len()).await,
            1,
            "one certificate is signed"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_fails_for_long_fails_no_request() {
        use std::sync::atomic::Ordering;
        let ca_storage = Arc::<Memory>::default();
        let kept: Arc<dyn crate::ca_storage::CaStorage> = Arc::<Memory>::clone(&ca_storage);
        let tls = Tls::open(kept, "c0ffee").await.unwrap();
        ca_storage.is_full.store(true, Ordering::SeqCst);
        let api = OneRequest::new(false);
        let signing = tokio::spawn(run(fake_client(&api), Arc::clone(&tls)));
        let before = ca_storage.saves.load(Ordering::SeqCst);
        tokio::time::sleep(Duration::from_mins(50)).await;
        assert_eq!(api.conditions(), ["Approved"]);
        let saves = ca_storage.saves.load(Ordering::SeqCst) - before;
        assert!((40..60).contains(&saves), "the pauses do not grow, or grow too much: {saves} attempts");
        ca_storage.is_full.store(false, Ordering::SeqCst);
        tokio::time::sleep(LOOK_PAUSE_MAX).await;
        signing.abort();
        assert!(api.is_signed(), "it is not signed soon after the store works again");
        assert_eq!(tls.read_authority(|authority| authority.issued().len()).await, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_certificate_that_could_not_be_stored_is_stored_later() {
        use std::sync::atomic::Ordering;
        let tls = Tls::open(Arc::<Memory>::default(), "c0ffee").await.unwrap();
        let api = OneRequest::new(true);
        let signing = tokio::spawn(run(fake_client(&api), Arc::clone(&tls)));
        tokio::time::sleep(Duration::from_secs(12)).await;
        api.refuses.store(false, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_secs(60)).await;
        signing.abort();
        assert!(api.is_signed());
        assert_eq!(tls.read_authority(|authority| authority.issued().len()).await, 1);
    }
}
