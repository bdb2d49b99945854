//! Finds the leading pod and its API port.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, ResourceExt};
use shorthorn_kube::{API_PORT, CallError, LEASE_NAME, bounded};
use thiserror::Error;

/// The name of the port in the pod.
const PORT_NAME: &str = "api";
/// The number of characters of an identity after the name of its host and a dash.
const RANDOM_CHARS: usize = 8;

/// The address of the leading controller's API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Leader {
    pub(super) pod: String,
    pub(super) port: u16,
}

/// The reason why the leader cannot be reached.
#[derive(Debug, Error)]
pub(super) enum LeaderError {
    #[error("cannot read the Lease of the leader from the API server: {0}")]
    Call(#[from] CallError),
    #[error(
        "Lease {LEASE_NAME} does not exist in namespace {0}: is Shorthorn installed in this cluster? \
         --system-namespace names another namespace"
    )]
    NoLease(String),
    #[error("no controller leads: see kubectl get pods -n {0}")]
    NoLeader(String),
    #[error(
        "{holder} leads, which is not a pod in namespace {namespace}: run shorthornctl on that host, or give \
         its address with --server"
    )]
    NoPod { holder: String, namespace: String },
}

/// Asks the API server for the leader.
pub(super) async fn find(client: &Client, namespace: &str) -> Result<Leader, LeaderError> {
    let leases: Api<Lease> = Api::namespaced(client.clone(), namespace);
    let lease = bounded(leases.get_opt(LEASE_NAME)).await?;
    let lease = lease.ok_or_else(|| LeaderError::NoLease(namespace.to_owned()))?;
    let holder = lease.spec.and_then(|spec| spec.holder_identity).unwrap_or_default();
    if holder.is_empty() {
        return Err(LeaderError::NoLeader(namespace.to_owned()));
    }
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let missing = || LeaderError::NoPod { holder: holder.clone(), namespace: namespace.to_owned() };
    let host = host_of(&holder).ok_or_else(missing)?;
    let pod = bounded(pods.get_opt(host)).await?.ok_or_else(missing)?;
    Ok(Leader { port: port_of(&pod), pod: pod.name_any() })
}

/// Returns the host of a controller, by its identity in the lease.
fn host_of(identity: &str) -> Option<&str> {
    let (host, random) = identity.rsplit_once('-')?;
    let is_random = random.len() == RANDOM_CHARS && random.bytes().all(|byte| byte.is_ascii_hexdigit());
    (is_random && !host.is_empty()).then_some(host)
}

/// Returns the port of the API in the pod: the declared one, else the default.
fn port_of(pod: &Pod) -> u16 {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let mut ports = containers.flat_map(|container| container.ports.iter().flatten());
    let named = ports.find(|port| port.name.as_deref() == Some(PORT_NAME));
    named.and_then(|port| u16::try_from(port.container_port).ok()).unwrap_or(API_PORT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_found_by_the_identity_of_its_controller() {
        assert_eq!(
            host_of("shorthorn-controller-5d4f-x2x7k-0a1b2c3d"),
            Some("shorthorn-controller-5d4f-x2x7k")
        );
        for other in ["", "pod", "pod-0a1b2c", "-0a1b2c3d", "pod-0a1b2c3g"] {
            assert_eq!(host_of(other), None, "{other}");
        }
    }

    #[test]
    fn the_port_is_the_one_that_the_pod_names() {
        let pod = |port: serde_json::Value| -> Pod {
            let container = serde_json::json!({ "name": "controller", "ports": [port] });
            serde_json::from_value(serde_json::json!({ "spec": { "containers": [container] } })).unwrap()
        };
        assert_eq!(port_of(&pod(serde_json::json!({ "name": "api", "containerPort": 9999 }))), 9999);
        assert_eq!(port_of(&pod(serde_json::json!({ "name": "metrics", "containerPort": 9510 }))), API_PORT);
        assert_eq!(port_of(&Pod::default()), API_PORT);
    }
}
