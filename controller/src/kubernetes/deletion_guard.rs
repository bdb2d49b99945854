//! The admission policies that refuse deletions and detachments by mistake, for API servers since 1.30.
//! Without such policies, the controller itself delays the deletion of the data of a volume that a
//! PersistentVolume needs. But it cannot protect an object, the definitions or its own namespace, nor refuse
//! a change of `spec.nodeID`.
//!
//! The last complete replica of a volume needs no policy. The controller treats the deletion of a Replica
//! object as an eviction, and keeps the data until others have it.
//!
//! A policy sees the object to delete and, one at a time, its parameters. So its criteria are in the object's
//! status, or every object that is a parameter makes a refusal. For example, each volume refuses the deletion
//! of the definitions.

use serde_json::{Value, json};
use shorthorn_controller_core::objects::Kind;

use super::crds::ORDER;
use super::{FIELD_MANAGER, GROUP, VERSION, kind_name, plural};

const ADMISSION: &str = "admissionregistration.k8s.io/v1";
/// The policy for volumes.
const VOLUMES: &str = "volumes.shorthorn.io";
/// The policy for the attachment of volumes.
const ATTACHMENTS: &str = "attachments.shorthorn.io";
/// The policy for the definitions and the namespace.
const INSTALLATION: &str = "installation.shorthorn.io";
/// The service account of the controller, which checks deletions itself.
const SERVICE_ACCOUNT: &str = "shorthorn-controller";

/// Returns the policies and their bindings, for an installation in `namespace`.
#[must_use]
pub fn documents(namespace: &str) -> Vec<Value> {
    vec![
        policy(VOLUMES, None, rule("DELETE"), &not_the_controller(namespace), &volume_rules()),
        binding(VOLUMES, None),
        policy(ATTACHMENTS, None, rule("UPDATE"), &not_a_controller(namespace), &attachment_rules()),
        binding(ATTACHMENTS, None),
        policy(
            INSTALLATION,
            Some(Kind::Volume),
            json!([
                { "apiGroups": ["apiextensions.k8s.io"], "apiVersions": ["*"], "operations": ["DELETE"],
                  "resources": ["customresourcedefinitions"] },
                {
                    "apiGroups": [""], "apiVersions": ["*"], "operations": ["DELETE"],
                    "resources": ["namespaces"]
                },
            ]),
            &own_kinds(namespace),
            &json!([{
                "expression": "false",
                "messageExpression": "'volume ' + params.metadata.name + ' exists, and this deletion \
                                      would delete its data: delete the volumes first, each by its claim or \
                                      with shorthornctl volume delete'",
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
    let mut text =
        "# Refuses deletions and detachments of volumes by mistake. Kubernetes 1.30 or later. Made by \
         shorthorn-controller deletion-guard.\n"
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
                                  oldObject.status.persistentVolume + ': delete its claim, or that \
                                  PersistentVolume if it is released and kept'",
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

/// A volume with a PersistentVolume is attached by CSI calls, which the sidecars make to the controller. Only
/// the controller changes the node then.
fn attachment_rules() -> Value {
    json!([{
        "expression": "!has(oldObject.spec.nodeID) || \
                       !has(oldObject.status) || !has(oldObject.status.persistentVolume) || \
                       (has(object.spec.nodeID) && object.spec.nodeID == oldObject.spec.nodeID)",
        "messageExpression": "'volume ' + oldObject.metadata.name + ' is PersistentVolume ' + \
                              oldObject.status.persistentVolume + ', which is attached to node ' + \
                              oldObject.spec.nodeID + ': delete the pods that use it; shorthornctl volume \
                              detach --force detaches it anyway'",
        "reason": "Forbidden",
    }])
}

fn not_the_controller(namespace: &str) -> Value {
    let user = format!("system:serviceaccount:{namespace}:{SERVICE_ACCOUNT}");
    json!([{ "name": "not-the-controller", "expression": format!("request.userInfo.username != '{user}'") }])
}

/// The same for changes, which name their client. A controller outside of the cluster has another user.
fn not_a_controller(namespace: &str) -> Value {
    let mut conditions = not_the_controller(namespace);
    let manager = FIELD_MANAGER;
    let expression = format!(
        "!has(request.options) || !has(request.options.fieldManager) || request.options.fieldManager != \
         '{manager}'"
    );
    if let Some(all) = conditions.as_array_mut() {
        all.push(json!({ "name": "not-a-controller-elsewhere", "expression": expression }));
    }
    conditions
}

/// Returns the definitions of Shorthorn's kinds, and the namespace.
fn own_kinds(namespace: &str) -> Value {
    let definitions: Vec<String> = ORDER.iter().map(|kind| format!("'{}.{GROUP}'", plural(*kind))).collect();
    let expression = format!(
        "request.resource.resource == 'namespaces' ? oldObject.metadata.name == '{namespace}' : \
         oldObject.metadata.name in [{}]",
        definitions.join(", ")
    );
    json!([{ "name": "ours", "expression": expression }])
}

fn rule(operation: &str) -> Value {
    json!(
        [{ "apiGroups": [GROUP], "apiVersions": ["*"], "operations": [operation], "resources": ["volumes"] }]
    )
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
    use kube_cel::{
        AdmissionRequest, GroupVersionResource, VapEvaluator, VapEvaluatorBuilder, VapExpression,
    };

    use super::*;
    use crate::kubernetes::crds::{Rules, definition};

    const NAMESPACE: &str = "shorthorn-system";

    #[test]
    fn the_file_matches_the_printed_guard() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/chart/files/deletion-guard.yaml");
        let made = yaml(NAMESPACE).unwrap();
        if std::env::var_os("SHORTHORN_WRITE_CRDS").is_some() {
            std::fs::write(&path, &made).unwrap();
        }
        let found = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            found == made,
            "{} is old: SHORTHORN_WRITE_CRDS=1 cargo test -p shorthorn-controller deletion_guard",
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

    /// A request as an API server has it for its policies.
    struct Asked<'a> {
        user: &'a str,
        operation: &'a str,
        group: &'a str,
        resource: &'a str,
        old: &'a Value,
        new: Value,
    }

    const CONTROLLER: &str = "system:serviceaccount:shorthorn-system:shorthorn-controller";

    /// Returns the refusals of all policies, in the steps of an API server. These are the resources of a
    /// policy, its conditions, then its rules for each parameter. A library evaluates the expressions, not
    /// the steps.
    fn refusals(asked: &Asked<'_>, parameters: &[Value]) -> Vec<String> {
        let all = documents(NAMESPACE);
        all.chunks(2)
            .flat_map(|pair| refusals_of(&pair[0]["spec"], &pair[1]["spec"], asked, parameters))
            .collect()
    }

    fn refusals_of(policy: &Value, binding: &Value, asked: &Asked<'_>, parameters: &[Value]) -> Vec<String> {
        let has = |list: &Value, wanted: &str| list.as_array().unwrap().iter().any(|one| one == wanted);
        let mut rules = policy["matchConstraints"]["resourceRules"].as_array().unwrap().iter();
        let is_meant = rules.any(|rule| {
            has(&rule["apiGroups"], asked.group)
                && has(&rule["operations"], asked.operation)
                && has(&rule["resources"], asked.resource)
        });
        let conditions = policy["matchConditions"].as_array().unwrap();
        let rule = |condition: &Value| VapExpression {
            expression: condition["expression"].as_str().unwrap().to_owned(),
            message: None,
            message_expression: None,
        };
        let conditions: Vec<VapExpression> = conditions.iter().map(rule).collect();
        let matches = evaluator(asked).build().evaluate(&conditions).iter().all(|result| result.passed);
        if !is_meant || !matches {
            return Vec::new();
        }
        let parameters: Vec<Option<Value>> = if policy["paramKind"].is_null() {
            vec![None]
        } else {
            assert_eq!(binding["paramRef"]["parameterNotFoundAction"], "Allow");
            parameters.iter().cloned().map(Some).collect()
        };
        let validations: Vec<VapExpression> = serde_json::from_value(policy["validations"].clone()).unwrap();
        let results = parameters.into_iter().flat_map(|parameter| {
            let evaluator = evaluator(asked);
            let evaluator = match parameter {
                Some(parameter) => evaluator.params(parameter),
                None => evaluator,
            };
            evaluator.build().evaluate(&validations)
        });
        results.filter(|result| !result.passed).map(|result| result.message.unwrap_or_default()).collect()
    }

    fn evaluator(asked: &Asked<'_>) -> VapEvaluatorBuilder {
        let resource = GroupVersionResource { resource: asked.resource.to_owned(), ..Default::default() };
        let (username, operation) = (asked.user.to_owned(), asked.operation.to_owned());
        let request = AdmissionRequest { resource, username, operation, ..AdmissionRequest::default() };
        let evaluator = VapEvaluator::builder().object(asked.new.clone());
        evaluator.old_object(asked.old.clone()).request(request)
    }

    fn delete<'a>(user: &'a str, resource: &'a str, old: &'a Value) -> Asked<'a> {
        let group = match resource {
            "volumes" => GROUP,
            "customresourcedefinitions" => "apiextensions.k8s.io",
            _ => "",
        };
        Asked { user, operation: "DELETE", group, resource, old, new: Value::Null }
    }

    #[test]
    fn a_volume_that_kubernetes_needs_or_that_is_attached_is_not_deleted() {
        let volume = |spec: Value, status: Value| {
            json!(
                { "metadata": { "name": "v" }, "spec": spec, "status": status }
            )
        };
        let deleted = |user, object: &Value| refusals(&delete(user, "volumes", object), &[]);
        let none = Vec::<String>::new();
        assert_eq!(deleted("ann", &json!({ "metadata": { "name": "v" }, "spec": {} })), none);
        assert_eq!(deleted("ann", &volume(json!({}), json!({ "state": "detached" }))), none);
        let needed = volume(json!({}), json!({ "persistentVolume": "pvc-1" }));
        let kept = deleted("ann", &needed);
        assert!(
            kept.len() == 1 && kept[0].contains("volume v is PersistentVolume pvc-1: delete its claim"),
            "{kept:?}"
        );
        assert_eq!(deleted(CONTROLLER, &needed), none, "the controller checks by itself");
        for attached in
            [volume(json!({ "nodeID": "a" }), json!({})), volume(json!({}), json!({ "currentNodeID": "a" }))]
        {
            let refused = deleted("ann", &attached);
            assert!(refused.len() == 1 && refused[0].contains("volume v is attached"), "{refused:?}");
        }
    }

    #[test]
    fn a_volume_in_use_by_kubernetes_stays_on_its_node() {
        let volume = |node: Option<&str>, status: Value| {
            let spec =
                node.map_or_else(|| json!({ "size": "1" }), |node| json!({ "size": "1", "nodeID": node }));
            json!({ "metadata": { "name": "v" }, "spec": spec, "status": status })
        };
        let changed = |user, from: Option<&str>, to: Option<&str>, status: Value| {
            let (old, new) = (volume(from, status.clone()), volume(to, status));
            let asked =
                Asked { user, operation: "UPDATE", group: GROUP, resource: "volumes", old: &old, new };
            refusals(&asked, &[])
        };
        let used = || json!({ "persistentVolume": "pvc-1", "currentNodeID": "a" });
        // Between the attach and the staging, too: the status has no node yet.
        let published = || json!({ "persistentVolume": "pvc-1" });
        for status in [used(), published()] {
            for to in [None, Some("b")] {
                let refused = changed("ann", Some("a"), to, status.clone());
                assert!(
                    refused.len() == 1
                        && refused[0].contains("volume v is PersistentVolume pvc-1")
                        && refused[0].contains("attached to node a")
                        && refused[0].contains("volume detach --force"),
                    "{to:?}: {refused:?}"
                );
                assert_eq!(changed(CONTROLLER, Some("a"), to, status.clone()), Vec::<String>::new());
            }
            assert_eq!(changed("ann", Some("a"), Some("a"), status.clone()), Vec::<String>::new());
            assert_eq!(changed("ann", None, Some("a"), status), Vec::<String>::new());
        }
        // Without a PersistentVolume, kubectl attaches and detaches.
        for status in [Value::Null, json!({}), json!({ "currentNodeID": "a" })] {
            let mut old = volume(Some("a"), status);
            if old["status"].is_null() {
                old.as_object_mut().unwrap().remove("status");
            }
            let new = volume(None, json!({}));
            let asked =
                Asked { user: "ann", operation: "UPDATE", group: GROUP, resource: "volumes", old: &old, new };
            assert_eq!(refusals(&asked, &[]), Vec::<String>::new());
        }
    }

    #[test]
    fn the_definition_has_the_fields_that_the_policy_for_volumes_reads() {
        let definition = definition(Kind::Volume, Rules::Included);
        let properties = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"];
        for (part, field) in [("spec", "nodeID"), ("status", "currentNodeID"), ("status", "persistentVolume")]
        {
            assert!(properties[part]["properties"][field].is_object(), "{part}.{field}");
        }
    }

    #[test]
    fn every_volume_refuses_the_end_of_the_installation() {
        let volumes = [json!({ "metadata": { "name": "v" } }), json!({ "metadata": { "name": "w" } })];
        let named = |name: &str| json!({ "metadata": { "name": name } });
        let deleted = |resource, name: &str, volumes: &[Value]| {
            refusals(&delete("ann", resource, &named(name)), volumes)
        };
        let ours =
            ORDER.iter().map(|kind| ("customresourcedefinitions", format!("{}.{GROUP}", plural(*kind))));
        for (resource, name) in ours.chain([("namespaces", NAMESPACE.to_owned())]) {
            let refused = deleted(resource, &name, &volumes);
            assert!(
                refused.len() == 2
                    && refused[0].contains("volume v exists")
                    && refused[1].contains("volume w exists"),
                "{name}: {refused:?}"
            );
            assert_eq!(deleted(resource, &name, &[]), Vec::<String>::new(), "{name} without volumes");
        }
        for (resource, name) in
            [("customresourcedefinitions", "volumes.longhorn.io"), ("namespaces", "default")]
        {
            assert_eq!(deleted(resource, name, &volumes), Vec::<String>::new(), "{name}");
        }
    }
}
