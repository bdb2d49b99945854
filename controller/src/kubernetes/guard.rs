//! The admission policies that refuse deletions by mistake, for API servers since 1.30. Without such
//! policies, the controller itself delays the deletion of a volume that a PersistentVolume needs; but it
//! cannot protect an object, the definitions or its own namespace.
//!
//! A policy sees the object to delete and, one at a time, its parameters. So its criteria are in the object's
//! status, or every object that is a parameter makes a refusal: each volume refuses the deletion of the
//! definitions.

use serde_json::{Value, json};
use shorthorn_controller_core::objects::Kind;

use super::crds::ORDER;
use super::{GROUP, VERSION, kind_name, plural};

const ADMISSION: &str = "admissionregistration.k8s.io/v1";
/// The policy for volumes.
const VOLUMES: &str = "volumes.shorthorn.io";
/// The policy for the definitions and the namespace.
const INSTALLATION: &str = "installation.shorthorn.io";
/// The service account of the controller, which checks by itself.
const SERVICE_ACCOUNT: &str = "shorthorn-controller";

/// Returns the policies and their bindings, for an installation in `namespace`.
#[must_use]
pub fn documents(namespace: &str) -> Vec<Value> {
    vec![
        policy(VOLUMES, None, rule(GROUP, "volumes"), &not_the_controller(namespace), &volume_rules()),
        binding(VOLUMES, None),
        policy(
            INSTALLATION,
            Some(Kind::Volume),
            json!([
                { "apiGroups": ["apiextensions.k8s.io"], "apiVersions": ["*"], "operations": ["DELETE"],
                  "resources": ["customresourcedefinitions"] },
                { "apiGroups": [""], "apiVersions": ["*"], "operations": ["DELETE"], "resources": ["namespaces"] },
            ]),
            &is_ours(namespace),
            &json!([{
                "expression": "false",
                "messageExpression": "'volume ' + params.metadata.name + ' is there, and would go with all its data: delete the \
                                      volumes first, each by its claim or with shorthornctl volume delete'",
                "reason": "Forbidden",
            }]),
        ),
        binding(INSTALLATION, Some(namespace)),
    ]
}

/// Returns the same as a file of YAML documents.
///
/// # Errors
/// The YAML library cannot write it.
pub fn yaml(namespace: &str) -> Result<String, serde_saphyr::ser::Error> {
    let mut text = "# Refuses deletions of volumes by mistake. Kubernetes 1.30 or later. Made by shorthorn-controller deletion-guard.\n"
        .to_owned();
    for document in documents(namespace) {
        text.push_str("---\n");
        text.push_str(&serde_saphyr::to_string(&document)?);
    }
    Ok(text)
}

fn volume_rules() -> Value {
    json!([
        {
            "expression": "!has(oldObject.status) || !has(oldObject.status.persistentVolume)",
            "messageExpression": "'volume ' + oldObject.metadata.name + ' is PersistentVolume ' + \
                                  oldObject.status.persistentVolume + ': delete its claim, or that PersistentVolume if it is \
                                  released and kept'",
            "reason": "Forbidden",
        },
        {
            "expression": "!has(oldObject.spec.nodeID) && \
                           (!has(oldObject.status) || !has(oldObject.status.currentNodeID))",
            "messageExpression": "'volume ' + oldObject.metadata.name + ' is attached: detach it first'",
            "reason": "Forbidden",
        },
    ])
}

fn not_the_controller(namespace: &str) -> Value {
    let user = format!("system:serviceaccount:{namespace}:{SERVICE_ACCOUNT}");
    json!([{ "name": "not-the-controller", "expression": format!("request.userInfo.username != '{user}'") }])
}

/// Returns the definitions of Shorthorn's kinds, and the namespace.
fn is_ours(namespace: &str) -> Value {
    let definitions: Vec<String> = ORDER.iter().map(|kind| format!("'{}.{GROUP}'", plural(*kind))).collect();
    let expression = format!(
        "request.resource.resource == 'namespaces' ? oldObject.metadata.name == '{namespace}' : \
         oldObject.metadata.name in [{}]",
        definitions.join(", ")
    );
    json!([{ "name": "ours", "expression": expression }])
}

fn rule(group: &str, resource: &str) -> Value {
    json!([{ "apiGroups": [group], "apiVersions": ["*"], "operations": ["DELETE"], "resources": [resource] }])
}

fn policy(
    name: &str,
    parameter: Option<Kind>,
    rules: Value,
    conditions: &Value,
    validations: &Value,
) -> Value {
    let mut policy = json!({
        "apiVersion": ADMISSION,
        "kind": "ValidatingAdmissionPolicy",
        "metadata": { "name": name },
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": { "resourceRules": rules },
            "matchConditions": conditions,
            "validations": validations,
        },
    });
    if let Some(kind) = parameter {
        policy["spec"]["paramKind"] =
            json!({ "apiVersion": format!("{GROUP}/{VERSION}"), "kind": kind_name(kind) });
    }
    policy
}

/// Makes a binding. With `parameters`, every parameter object of the policy in that namespace makes it
/// refuse. Without such an object it refuses nothing.
fn binding(policy: &str, parameters: Option<&str>) -> Value {
    let mut binding = json!({
        "apiVersion": ADMISSION,
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": { "name": policy },
        "spec": { "policyName": policy, "validationActions": ["Deny"] },
    });
    if let Some(namespace) = parameters {
        binding["spec"]["paramRef"] =
            json!({ "namespace": namespace, "selector": {}, "parameterNotFoundAction": "Allow" });
    }
    binding
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use k8s_openapi::api::admissionregistration::v1::{
        ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
    };
    use kube_cel::{VapEvaluator, VapExpression};

    use super::*;
    use crate::kubernetes::crds::{Rules, definition};

    const NAMESPACE: &str = "shorthorn-system";

    #[test]
    fn the_file_is_what_is_printed() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/chart/files/deletion-guard.yaml");
        let made = yaml(NAMESPACE).unwrap();
        if std::env::var_os("SHORTHORN_WRITE_CRDS").is_some() {
            std::fs::write(&path, &made).unwrap();
        }
        let found = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            found == made,
            "{} is old: SHORTHORN_WRITE_CRDS=1 cargo test -p shorthorn-controller guard",
            path.display()
        );
    }

    #[test]
    fn each_policy_is_bound_and_has_only_fields_that_the_api_has() {
        let all = documents(NAMESPACE);
        for pair in all.chunks(2) {
            let policy: ValidatingAdmissionPolicy = serde_json::from_value(pair[0].clone()).unwrap();
            let binding: ValidatingAdmissionPolicyBinding = serde_json::from_value(pair[1].clone()).unwrap();
            // The types drop unknown fields.
            assert_eq!(serde_json::to_value(&policy).unwrap(), pair[0]);
            assert_eq!(serde_json::to_value(&binding).unwrap(), pair[1]);
            let (spec, bound) = (policy.spec.unwrap(), binding.spec.unwrap());
            assert_eq!(bound.policy_name, policy.metadata.name);
            assert_eq!(spec.param_kind.is_some(), bound.param_ref.is_some());
        }
    }

    /// Returns the refusals of a policy for the deletion of `object` if `params` exists, evaluated by kube's
    /// own library.
    fn refusals(policy: &str, object: &Value, params: Option<&Value>) -> Vec<String> {
        let all = documents(NAMESPACE);
        let found = all.iter().find(|document| document["metadata"]["name"] == policy).unwrap();
        let validations: Vec<VapExpression> =
            serde_json::from_value(found["spec"]["validations"].clone()).unwrap();
        let mut evaluator = VapEvaluator::builder().object(Value::Null).old_object(object.clone());
        if let Some(params) = params {
            evaluator = evaluator.params(params.clone());
        }
        let results = evaluator.build().evaluate(&validations);
        results
            .into_iter()
            .filter(|result| !result.passed)
            .map(|result| result.message.unwrap_or_default())
            .collect()
    }

    #[test]
    fn a_volume_that_kubernetes_needs_or_that_is_attached_is_not_deleted() {
        let volume = |spec: Value, status: Value| json!({ "metadata": { "name": "v" }, "spec": spec, "status": status });
        let none = Vec::<String>::new();
        assert_eq!(refusals(VOLUMES, &json!({ "metadata": { "name": "v" }, "spec": {} }), None), none);
        assert_eq!(refusals(VOLUMES, &volume(json!({}), json!({ "state": "detached" })), None), none);
        let kept = refusals(VOLUMES, &volume(json!({}), json!({ "persistentVolume": "pvc-1" })), None);
        assert!(
            kept.len() == 1 && kept[0].contains("volume v is PersistentVolume pvc-1: delete its claim"),
            "{kept:?}"
        );
        for attached in
            [volume(json!({ "nodeID": "a" }), json!({})), volume(json!({}), json!({ "currentNodeID": "a" }))]
        {
            let refused = refusals(VOLUMES, &attached, None);
            assert!(refused.len() == 1 && refused[0].contains("volume v is attached"), "{refused:?}");
        }
    }

    #[test]
    fn what_the_policy_for_volumes_reads_is_in_their_definition() {
        let definition = definition(Kind::Volume, Rules::Included);
        let properties = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"];
        for (part, field) in [("spec", "nodeID"), ("status", "currentNodeID"), ("status", "persistentVolume")]
        {
            assert!(properties[part]["properties"][field].is_object(), "{part}.{field}");
        }
    }

    #[test]
    fn every_volume_refuses_the_end_of_the_installation() {
        let definition = json!({ "metadata": { "name": "volumes.shorthorn.io" } });
        let volume = json!({ "metadata": { "name": "v" } });
        let refused = refusals(INSTALLATION, &definition, Some(&volume));
        assert!(refused.len() == 1 && refused[0].contains("volume v is there"), "{refused:?}");
    }

    #[test]
    fn the_conditions_name_the_controller_and_what_is_ours() {
        use kube_cel::{AdmissionRequest, GroupVersionResource};
        let all = documents(NAMESPACE);
        let condition = |policy: usize| all[policy]["spec"]["matchConditions"][0]["expression"].clone();
        assert_eq!(
            condition(0),
            "request.userInfo.username != 'system:serviceaccount:shorthorn-system:shorthorn-controller'"
        );
        let matches = |resource: &str, name: &str| {
            let resource = GroupVersionResource { resource: resource.to_owned(), ..Default::default() };
            let request = AdmissionRequest { resource, ..AdmissionRequest::default() };
            let object = json!({ "metadata": { "name": name } });
            let evaluator =
                VapEvaluator::builder().object(Value::Null).old_object(object).request(request).build();
            let expression = condition(2).as_str().unwrap().to_owned();
            let rule = VapExpression { expression, message: None, message_expression: None };
            evaluator.evaluate(&[rule])[0].passed
        };
        assert!(matches("namespaces", NAMESPACE) && !matches("namespaces", "default"));
        for kind in ORDER {
            assert!(matches("customresourcedefinitions", &format!("{}.{GROUP}", plural(kind))));
        }
        assert!(!matches("customresourcedefinitions", "volumes.longhorn.io"));
    }
}
