//! The manifests of packaging/deploy, against the types of the Kubernetes API.

use std::path::Path;

use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding};
use k8s_openapi::api::storage::v1::{CSIDriver, StorageClass};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::leader_pod::LEADER_LABEL;
use crate::config::Cli;

/// The files that this test leaves out. `crds.yaml` has its own test, and `kustomization.yaml` only lists
/// the other files.
const LEFT_OUT: [&str; 2] = ["crds.yaml", "kustomization.yaml"];

fn documents() -> Vec<Value> {
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/deploy");
    let folders = [deploy.join("agent"), deploy];
    let files = folders.iter().flat_map(|folder| std::fs::read_dir(folder).unwrap());
    let files = files.map(|entry| entry.unwrap().path()).filter(|path| path.is_file());
    let files = files.filter(|path| !LEFT_OUT.iter().any(|name| path.ends_with(name)));
    let texts = files.map(|path| std::fs::read_to_string(path).unwrap());
    texts.flat_map(|text| serde_saphyr::from_multiple::<Value>(&text).unwrap()).collect()
}

/// Types drop the fields that they do not know.
fn check<T: Serialize + DeserializeOwned>(document: &Value) {
    let typed: T =
        serde_json::from_value(document.clone()).unwrap_or_else(|error| panic!("{error}: {document}"));
    assert_eq!(&serde_json::to_value(&typed).unwrap(), document);
}

#[test]
fn the_manifests_have_only_fields_that_the_api_has() {
    let all = documents();
    assert!(all.len() > 20, "{} documents", all.len());
    for document in &all {
        match document["kind"].as_str().unwrap() {
            "Namespace" => check::<Namespace>(document),
            "ServiceAccount" => check::<ServiceAccount>(document),
            "Service" => check::<Service>(document),
            "Role" => check::<Role>(document),
            "RoleBinding" => check::<RoleBinding>(document),
            "ClusterRole" => check::<ClusterRole>(document),
            "ClusterRoleBinding" => check::<ClusterRoleBinding>(document),
            "Deployment" => check::<Deployment>(document),
            "DaemonSet" => check::<DaemonSet>(document),
            "ConfigMap" => check::<ConfigMap>(document),
            "PodDisruptionBudget" => check::<PodDisruptionBudget>(document),
            "NetworkPolicy" => check::<NetworkPolicy>(document),
            "StorageClass" => check::<StorageClass>(document),
            "CSIDriver" => check::<CSIDriver>(document),
            "ValidatingAdmissionPolicy" => check::<ValidatingAdmissionPolicy>(document),
            "ValidatingAdmissionPolicyBinding" => check::<ValidatingAdmissionPolicyBinding>(document),
            other => panic!("no type for {other}: {document}"),
        }
    }
}

/// The flags of the pod are flags of this release.
#[test]
fn the_controller_takes_its_arguments() {
    use clap::Parser;
    let all = documents();
    let deployment = all.iter().find(|document| document["kind"] == "Deployment").unwrap();
    let container = &deployment["spec"]["template"]["spec"]["containers"][0];
    let words =
        [&container["command"], &container["args"]].map(|list| list.as_array().unwrap().clone()).concat();
    // The kubelet replaces the names of variables by their values.
    let words = words.iter().map(|word| word.as_str().unwrap().replace("$(", "").replace(')', ""));
    Cli::try_parse_from(words).unwrap();
}

/// A standby controller is ready, and does not serve the API with TLS.
#[test]
fn the_service_of_the_api_selects_the_pod_that_leads() {
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/chart/templates/service.yaml");
    let text = std::fs::read_to_string(chart).unwrap();
    let (metrics, tls) = text.split_once("# The API with mutual TLS.").unwrap();
    let selected = format!("{LEADER_LABEL}: \"true\"");
    assert!(tls.contains(&selected) && !metrics.contains(&selected), "{text}");
    // The controller may set the label.
    let may = |rule: &Value| {
        let has = |list: &str, word: &str| {
            rule[list].as_array().is_some_and(|words| words.iter().any(|found| found == word))
        };
        has("resources", "pods") && has("verbs", "patch") && has("verbs", "list")
    };
    let all = documents();
    let role = all.iter().find(|document| document["kind"] == "Role").unwrap();
    assert!(role["rules"].as_array().unwrap().iter().any(may), "{role}");
}
