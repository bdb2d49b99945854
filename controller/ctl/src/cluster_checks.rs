//! Checks the installation in Kubernetes, with the rights of the caller.

use std::time::Duration;

use kube::api::{ApiResource, DynamicObject, ListParams};
use kube::{Api, ResourceExt};
use serde_json::Value;
use shorthorn_csi::DRIVER_NAME;
use shorthorn_kube::LEASE_NAME;
use shorthorn_kube::crds::{self, definition_name};
use shorthorn_types::status::CheckOutcome;

use super::doctor::CheckOutput;
use super::reach::ClusterAccess;

/// The longest that one question may take. A check of a sick cluster must end although an answer does not
/// come.
const LIMIT: Duration = Duration::from_secs(10);
/// The label of the pods of controllers.
const POD_LABEL: &str = "app.kubernetes.io/name=shorthorn-controller";
/// The wanted number of pods: one leads, and another one takes over.
const PODS_WANTED: usize = 2;
/// The policies that keep volumes from being deleted, or detached from pods, by mistake.
const POLICIES: [&str; 3] = ["volumes.shorthorn.io", "attachments.shorthorn.io", "installation.shorthorn.io"];

/// The remedy if something of the installation is missing.
const INSTALL: &str =
    "helm upgrade --install shorthorn packaging/chart, or kubectl apply -k packaging/deploy";

/// A finding: severity, message, and remedy.
type CheckFinding = Option<(CheckOutcome, String, String)>;

/// Runs all checks.
pub(super) async fn examine(cluster: &ClusterAccess) -> Vec<CheckOutput> {
    let checks = [
        ("lease", "a controller leads", lease(cluster).await),
        ("pods", "another controller can take over", pods(cluster).await),
        ("definitions", "the CRDs keep all stored fields", definitions(cluster).await),
        ("driver", "Kubernetes knows the driver", driver(cluster).await),
        ("storage-class", "a StorageClass uses the driver", storage_class(cluster).await),
        ("deletion-guard", "the deletion guard is installed", deletion_guard(cluster).await),
    ];
    let checks = checks.into_iter().map(|(name, title, found)| {
        let found = found.unwrap_or_else(|why| {
            let fix = "run it as a user with these rights".to_owned();
            Some((CheckOutcome::Warned, format!("Kubernetes refuses the request: {why}"), fix))
        });
        CheckOutput::new(name, title, found)
    });
    checks.collect()
}

fn resource(group: &str, version: &str, kind: &str, plural: &str) -> ApiResource {
    let api_version = if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
    let [group, version, kind, plural] = [group, version, kind, plural].map(str::to_owned);
    ApiResource { group, version, api_version, kind, plural }
}

async fn bounded<T>(call: impl Future<Output = kube::Result<T>>) -> Result<T, String> {
    match tokio::time::timeout(LIMIT, call).await {
        Ok(answer) => answer.map_err(|error| error.to_string()),
        Err(_) => Err(format!("no answer within {} s", LIMIT.as_secs())),
    }
}

async fn get(
    cluster: &ClusterAccess,
    resource: &ApiResource,
    name: &str,
) -> Result<Option<DynamicObject>, String> {
    let api: Api<DynamicObject> = Api::all_with(cluster.client.clone(), resource);
    bounded(api.get_opt(name)).await
}

async fn lease(cluster: &ClusterAccess) -> Result<CheckFinding, String> {
    let leases = resource("coordination.k8s.io", "v1", "Lease", "leases");
    let api: Api<DynamicObject> = Api::namespaced_with(cluster.client.clone(), &cluster.namespace, &leases);
    let lease = bounded(api.get_opt(LEASE_NAME)).await?;
    let holder = lease.as_ref().and_then(|lease| lease.data["spec"]["holderIdentity"].as_str());
    let is_held = holder.is_some_and(|holder| !holder.is_empty());
    let namespace = &cluster.namespace;
    Ok((!is_held).then(|| {
        let message = format!("the Lease {LEASE_NAME} in namespace {namespace} has no holder");
        (CheckOutcome::Failed, message, format!("kubectl get pods -n {namespace}; {INSTALL}"))
    }))
}

async fn pods(cluster: &ClusterAccess) -> Result<CheckFinding, String> {
    let pods = resource("", "v1", "Pod", "pods");
    let api: Api<DynamicObject> = Api::namespaced_with(cluster.client.clone(), &cluster.namespace, &pods);
    let list = bounded(api.list(&ListParams::default().labels(POD_LABEL))).await?;
    let ready = list.items.iter().filter(|pod| is_ready(&pod.data)).count();
    let namespace = &cluster.namespace;
    Ok((ready < PODS_WANTED).then(|| {
        let message = format!("{ready} pods of controllers are ready, and {PODS_WANTED} should be");
        (CheckOutcome::Warned, message, format!("kubectl describe pods -n {namespace} -l {POD_LABEL}"))
    }))
}

fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    conditions.is_some_and(|conditions| {
        conditions.iter().any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
    })
}

async fn definitions(cluster: &ClusterAccess) -> Result<CheckFinding, String> {
    let definitions =
        resource("apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions");
    let mut lacking = Vec::new();
    for kind in crds::ORDER {
        let name = definition_name(kind);
        match get(cluster, &definitions, &name).await? {
            None => lacking.push(format!("the CRD {name}")),
            Some(found) => {
                let found = serde_json::to_value(found).map_err(|error| error.to_string())?;
                lacking.extend(crds::lacking(kind, &found));
            }
        }
    }
    Ok((!lacking.is_empty()).then(|| {
        let message = format!("Kubernetes lacks {}", lacking.join(", "));
        (CheckOutcome::Failed, message, "shorthorn-controller crds | kubectl apply -f -".to_owned())
    }))
}

async fn driver(cluster: &ClusterAccess) -> Result<CheckFinding, String> {
    let drivers = resource("storage.k8s.io", "v1", "CSIDriver", "csidrivers");
    let is_missing = get(cluster, &drivers, DRIVER_NAME).await?.is_none();
    Ok(is_missing.then(|| {
        let message = format!("CSIDriver {DRIVER_NAME} does not exist: no volume can be attached");
        (CheckOutcome::Failed, message, INSTALL.to_owned())
    }))
}

async fn storage_class(cluster: &ClusterAccess) -> Result<CheckFinding, String> {
    let classes = resource("storage.k8s.io", "v1", "StorageClass", "storageclasses");
    let api: Api<DynamicObject> = Api::all_with(cluster.client.clone(), &classes);
    let list = bounded(api.list(&ListParams::default())).await?;
    let ours = list.items.iter().filter(|class| class.data["provisioner"] == DRIVER_NAME);
    let names: Vec<String> = ours.map(ResourceExt::name_any).collect();
    Ok(names.is_empty().then(|| {
        let message = format!("no StorageClass has the provisioner {DRIVER_NAME}");
        (CheckOutcome::Warned, message, INSTALL.to_owned())
    }))
}

async fn deletion_guard(cluster: &ClusterAccess) -> Result<CheckFinding, String> {
    let policies = resource(
        "admissionregistration.k8s.io",
        "v1",
        "ValidatingAdmissionPolicy",
        "validatingadmissionpolicies",
    );
    for name in POLICIES {
        if get(cluster, &policies, name).await?.is_none() {
            let message = format!(
                "ValidatingAdmissionPolicy {name} does not exist: kubectl may delete or detach volumes"
            );
            let fix = "shorthorn-controller deletion-guard | kubectl apply -f - (Kubernetes 1.30 or later)";
            return Ok(Some((CheckOutcome::Warned, message, fix.to_owned())));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_policy_of_the_deletion_guard_is_checked() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/deploy/deletion-guard.yaml");
        let guard = std::fs::read_to_string(path).unwrap();
        let policies = guard.split("\n---").filter(|text| text.contains("kind: ValidatingAdmissionPolicy\n"));
        let name = |text: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix("  name: "));
            line.unwrap_or_default().to_owned()
        };
        assert_eq!(policies.map(name).collect::<Vec<_>>(), POLICIES);
    }

    #[test]
    fn a_pod_is_ready_by_its_condition() {
        let pod =
            |status: &str| json!({ "status": { "conditions": [{ "type": "Ready", "status": status }] } });
        assert!(is_ready(&pod("True")) && !is_ready(&pod("False")) && !is_ready(&json!({})));
    }
}
