//! The signer `shorthorn.io/agent` for CertificateSigningRequests of Kubernetes. The API server notes the
//! maker of a request. A request that the kubelet of a node made proves that its maker is root there.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestCondition, CertificateSigningRequestSpec,
};
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::json;
use shorthorn_pki::{Request, Role, SIGNER_NAME, chain_to_pem};

use super::{Tls, TlsError, now};
use crate::store::kubernetes::{CallError, bounded, is_code};

/// The time between two looks at the requests.
const EVERY: Duration = Duration::from_secs(5);
/// Requests of one answer of the API server; the next answer has more.
const PAGE_MAX: u32 = 200;
const KUBELET_PREFIX: &str = "system:node:";
const KUBELET_GROUP: &str = "system:nodes";
/// The usages that a request may ask for. The certificate has its own.
const USAGES: &[&str] = &["digital signature", "key encipherment", "server auth"];

/// The decision about one request.
#[derive(Debug)]
enum Verdict {
    /// Sign it for this node.
    Sign { node: String, request: Box<Request> },
    /// Deny it for this reason.
    Deny(String),
    /// The request is already signed or denied.
    Done,
}

/// Signs requests of agents, until it is dropped.
pub async fn run(client: kube::Client, tls: Arc<Tls>) {
    let api: Api<CertificateSigningRequest> = Api::all(client);
    let mut was_well = true;
    loop {
        let looked = look(&api, &tls).await;
        if let Err(error) = &looked
            && was_well
        {
            tracing::warn!(%error, "certificate signing requests cannot be signed; is rbac.yaml applied?");
        }
        was_well = looked.is_ok();
        tokio::time::sleep(EVERY).await;
    }
}

/// Looks at all requests, also at those behind many that are decided: Kubernetes keeps these for an hour.
async fn look(api: &Api<CertificateSigningRequest>, tls: &Tls) -> Result<(), SignError> {
    let mut of_ours = ListParams::default().fields(&format!("spec.signerName={SIGNER_NAME}")).limit(PAGE_MAX);
    loop {
        let page = bounded(api.list(&of_ours)).await?;
        for found in &page.items {
            match handle(api, tls, found).await {
                // One node does not hold up the others.
                Err(SignError::Tls(error)) => {
                    tracing::error!(request = found.metadata.name, %error, "a request is not signed");
                }
                // It was removed or decided meanwhile, or this one is not acceptable.
                Err(SignError::Call(error)) if [404, 409, 422].iter().any(|code| is_code(&error, *code)) => {
                    tracing::warn!(request = found.metadata.name, %error, "a request is not decided");
                }
                handled => handled?,
            }
        }
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => of_ours = of_ours.continue_token(&token),
            None => return Ok(()),
        }
    }
}

async fn handle(
    api: &Api<CertificateSigningRequest>,
    tls: &Tls,
    found: &CertificateSigningRequest,
) -> Result<(), SignError> {
    let name = found.metadata.name.clone().unwrap_or_default();
    match judge(found) {
        Verdict::Done => {}
        Verdict::Deny(reason) => {
            tracing::warn!(request = name, reason, "a certificate signing request is denied");
            decide(api, found, "Denied", &reason).await?;
        }
        Verdict::Sign { node, request } => {
            if !has_condition(found, "Approved") {
                decide(api, found, "Approved", "the kubelet of the node made the request").await?;
            }
            sign(api, tls, &name, &node, &request).await?;
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
    Tls(#[from] TlsError),
}

async fn sign(
    api: &Api<CertificateSigningRequest>,
    tls: &Tls,
    name: &str,
    node: &str,
    request: &Request,
) -> Result<(), SignError> {
    let role = Role::Node(node.to_owned());
    let signed = tls.change(|authority| {
        // It may have enrolled anew, and then trusts the CA that signs and no other.
        tls.seen().remove(node);
        authority.sign(request, &role, now())
    });
    let chain = signed.await?;
    let certificate = ByteString(chain_to_pem(&chain).into_bytes());
    let change = json!({ "status": { "certificate": certificate } });
    bounded(api.patch_status(name, &PatchParams::default(), &Patch::Merge(change))).await?;
    tracing::info!(request = name, node, "a node has joined by its kubelet");
    Ok(())
}

async fn decide(
    api: &Api<CertificateSigningRequest>,
    found: &CertificateSigningRequest,
    verdict: &str,
    message: &str,
) -> Result<(), CallError> {
    let condition = CertificateSigningRequestCondition {
        type_: verdict.to_owned(),
        status: "True".to_owned(),
        reason: Some("ShorthornSigner".to_owned()),
        message: Some(message.to_owned()),
        ..CertificateSigningRequestCondition::default()
    };
    let name = found.metadata.name.clone().unwrap_or_default();
    let change = json!({
        "metadata": { "resourceVersion": found.metadata.resource_version },
        "status": { "conditions": [condition] },
    });
    bounded(api.patch_approval(&name, &PatchParams::default(), &Patch::Merge(change))).await.map(drop)
}

fn has_condition(found: &CertificateSigningRequest, verdict: &str) -> bool {
    let conditions = found.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.is_some_and(|all| all.iter().any(|condition| condition.type_ == verdict))
}

fn judge(found: &CertificateSigningRequest) -> Verdict {
    let is_signed = found.status.as_ref().is_some_and(|status| status.certificate.is_some());
    if is_signed || has_condition(found, "Denied") || has_condition(found, "Failed") {
        return Verdict::Done;
    }
    match check(&found.spec) {
        Ok((node, request)) => Verdict::Sign { node, request: Box::new(request) },
        // An administrator's approval does not replace the proof.
        Err(_) if has_condition(found, "Approved") => Verdict::Done,
        Err(reason) => Verdict::Deny(reason),
    }
}

/// The node that the request is for, if its maker is the kubelet of that node.
fn check(spec: &CertificateSigningRequestSpec) -> Result<(String, Request), String> {
    if spec.signer_name != SIGNER_NAME {
        return Err(format!("the request is for another signer than {SIGNER_NAME}"));
    }
    let user = spec.username.as_deref().unwrap_or_default();
    let groups = spec.groups.as_deref().unwrap_or_default();
    let node =
        user.strip_prefix(KUBELET_PREFIX).filter(|_| groups.iter().any(|group| group == KUBELET_GROUP));
    let node = node.ok_or_else(|| format!("{user:?} is not the kubelet of a node"))?;
    Role::node(node).map_err(|error| error.to_string())?;
    let usages = spec.usages.as_deref().unwrap_or_default();
    if let Some(other) = usages.iter().find(|usage| !USAGES.contains(&usage.as_str())) {
        return Err(format!("usage {other:?} is not given; use \"digital signature\" and \"server auth\""));
    }
    let request = Request::from_pem(&spec.request.0).map_err(|error| error.to_string())?;
    request.check_names(node).map_err(|error| error.to_string())?;
    Ok((node.to_owned(), request))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::certificates::v1::CertificateSigningRequestStatus;
    use shorthorn_pki::{Key, request_to_pem};

    use super::*;

    fn pem(common_name: &str) -> Vec<u8> {
        request_to_pem(&Key::generate().unwrap().request(common_name).unwrap()).into_bytes()
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
            Verdict::Deny(reason) => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn only_the_kubelet_of_a_node_gets_its_certificate() {
        let good = request("system:node:a", "a");
        assert!(matches!(judge(&good), Verdict::Sign { node, .. } if node == "a"));
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
        let with = |verdict: &str, mut found: CertificateSigningRequest| {
            let condition = CertificateSigningRequestCondition {
                type_: verdict.to_owned(),
                ..CertificateSigningRequestCondition::default()
            };
            found.status = Some(CertificateSigningRequestStatus {
                conditions: Some(vec![condition]),
                ..CertificateSigningRequestStatus::default()
            });
            found
        };
        assert!(matches!(judge(&with("Denied", request("system:node:a", "a"))), Verdict::Done));
        assert!(matches!(judge(&with("Approved", request("system:node:a", "a"))), Verdict::Sign { .. }));
        assert!(matches!(judge(&with("Approved", request("mallory", "a"))), Verdict::Done));
        let mut signed = with("Approved", request("system:node:a", "a"));
        signed.status.as_mut().unwrap().certificate = Some(ByteString(b"x".to_vec()));
        assert!(matches!(judge(&signed), Verdict::Done));
    }
}
