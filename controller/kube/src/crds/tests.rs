use std::path::{Path, PathBuf};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube_cel::Validator;

use super::*;

fn file(kind: Kind) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../crds").join(format!("{}.yaml", plural(kind)))
}

fn schema(kind: Kind) -> Value {
    definition(kind, Rules::Included)["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone()
}

#[test]
fn the_files_match_the_types() {
    for kind in ORDER {
        let (path, made) = (file(kind), yaml(kind, Rules::Included).unwrap());
        if std::env::var_os("SHORTHORN_WRITE_CRDS").is_some() {
            std::fs::write(&path, &made).unwrap();
        }
        let found = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            found == made,
            "{} is old: SHORTHORN_WRITE_CRDS=1 cargo test -p shorthorn-kube crds",
            path.display()
        );
    }
}

#[test]
fn definitions_are_structural() {
    fn check(at: &str, schema: &Value) {
        let fields = schema.as_object().unwrap_or_else(|| panic!("{at} is not a schema: {schema}"));
        let kind = fields.get("type").unwrap_or_else(|| panic!("{at} has no type: {schema}"));
        assert!(kind.is_string(), "{at} has the types {kind}");
        for word in ["oneOf", "anyOf", "allOf", "$ref", "$schema", "const", "nullable", "title"] {
            assert!(!fields.contains_key(word), "{at} has {word}");
        }
        if let Some(format) = fields.get("format").and_then(Value::as_str) {
            assert!(["int32", "int64", "date-time"].contains(&format), "{at} has the format {format}");
        }
        for (name, property) in fields.get("properties").and_then(Value::as_object).into_iter().flatten() {
            check(&format!("{at}.{name}"), property);
        }
        for inner in ["items", "additionalProperties"] {
            if let Some(inner) = fields.get(inner) {
                check(&format!("{at}[]"), inner);
            }
        }
    }
    for kind in ORDER {
        check(kind.as_str(), &schema(kind));
        let typed: CustomResourceDefinition =
            serde_json::from_value(definition(kind, Rules::Included)).unwrap();
        assert_eq!(typed.spec.names.plural, plural(kind));
        let without = definition(kind, Rules::LeftOut).to_string();
        assert!(!without.contains(RULES) && without.contains("openAPIV3Schema"), "{without}");
    }
}

#[test]
fn kubectl_shows_the_main_columns_of_a_volume() {
    let columns = |wide: bool| {
        let definition = definition(Kind::Volume, Rules::Included);
        let columns = definition["spec"]["versions"][0]["additionalPrinterColumns"].as_array().unwrap();
        let shown = columns.iter().filter(|column| wide || column.get("priority").is_none());
        shown.map(|column| column["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(columns(false), ["State", "Robustness", "Replicas", "Size", "Node", "Age"]);
    for name in ["Actual size", "Claim", "Reason"] {
        assert!(columns(true).contains(&name.to_owned()), "{name}");
    }
}

#[test]
fn secrets_have_no_place_in_a_volume() {
    let text = schema(Kind::Volume).to_string();
    assert!(!text.contains("secret"), "{text}");
}

fn volume(name: &str, change: impl FnOnce(&mut Value)) -> Value {
    let mut spec = json!({ "size": "8192", "numberOfReplicas": 3, "frontend": "auto" });
    change(&mut spec);
    json!({ "metadata": { "name": name }, "spec": spec })
}

/// Returns the refusals of the CEL rules for a new or changed volume, evaluated by kube's own library.
fn refusals(new: &Value, old: Option<&Value>) -> Vec<String> {
    match Validator::new().validate(&schema(Kind::Volume), new, old) {
        Ok(()) => Vec::new(),
        Err(errors) => errors.into_vec().iter().map(ToString::to_string).collect(),
    }
}

#[test]
fn the_rules_refuse_the_volumes_that_the_api_refuses() {
    let good = volume("pvc-1", |_| {});
    assert_eq!(refusals(&good, None), Vec::<String>::new());
    assert_eq!(refusals(&volume("a", |spec| spec["volumeName"] = "a".into()), None), Vec::<String>::new());
    for (what, bad) in [
        ("multiple of 4096", volume("a", |spec| spec["size"] = "4097".into())),
        ("multiple of 4096", volume("a", |spec| spec["size"] = "0".into())),
        ("multiple of 4096", volume("a", |spec| spec["size"] = "17592186048512".into())),
        ("volumeName", volume("a", |spec| spec["volumeName"] = "b".into())),
        ("lower-case", volume("a.b", |_| {})),
        ("at most 63", volume(&"a".repeat(64), |_| {})),
    ] {
        let refused = refusals(&bad, None);
        assert!(refused.len() == 1 && refused[0].contains(what), "{bad}: {refused:?}");
    }
}

#[test]
fn the_rules_refuse_changes_that_nothing_follows() {
    let good = volume("a", |_| {});
    assert_eq!(
        refusals(&volume("a", |spec| spec["numberOfReplicas"] = 4.into()), Some(&good)),
        Vec::<String>::new()
    );
    assert_eq!(
        refusals(&volume("a", |spec| spec["numberOfReplicas"] = 1.into()), Some(&good)),
        Vec::<String>::new()
    );
    assert_eq!(refusals(&volume("a", |spec| spec["nodeID"] = "n".into()), Some(&good)), Vec::<String>::new());
    let grown = volume("a", |spec| spec["size"] = "12288".into());
    assert_eq!(refusals(&grown, Some(&good)), Vec::<String>::new());
    let plain = volume("a", |spec| spec["encryptInTransit"] = false.into());
    assert_eq!(refusals(&plain, Some(&good)), Vec::<String>::new());
    let encrypted = volume("a", |spec| spec["encryptInTransit"] = true.into());
    assert_eq!(refusals(&encrypted, Some(&encrypted)), Vec::<String>::new());
    assert_eq!(refusals(&good, Some(&encrypted)).len(), 1);
    for (what, bad) in [
        ("not shrink", volume("a", |spec| spec["size"] = "4096".into())),
        ("frontend", volume("a", |spec| spec["frontend"] = "nbd".into())),
        ("encryptInTransit", volume("a", |spec| spec["encryptInTransit"] = true.into())),
    ] {
        let refused = refusals(&bad, Some(&good));
        assert!(refused.len() == 1 && refused[0].contains(what), "{bad}: {refused:?}");
    }
}

#[test]
fn a_definition_that_would_drop_a_field_is_found() {
    for kind in ORDER {
        assert!(lacking(kind, &definition(kind, Rules::Included)).is_empty());
        // Of a release without hashes, and of a later one.
        let mut same = definition(kind, Rules::LeftOut);
        same["metadata"]["annotations"] = Value::Null;
        let version = "/spec/versions/0/schema/openAPIV3Schema";
        let status = same.pointer_mut(&format!("{version}/properties/status/properties")).unwrap();
        status["levitation"] = json!({ "type": "string" });
        assert_eq!(lacking(kind, &same), Vec::<String>::new());
    }
    let mut old = definition(Kind::Volume, Rules::Included);
    old["metadata"]["annotations"][HASH_ANNOTATION] = "0".into();
    let status = "/spec/versions/0/schema/openAPIV3Schema/properties/status/properties";
    old.pointer_mut(status).unwrap().as_object_mut().unwrap().remove("fencedAttach");
    let words = old.pointer_mut(&format!("{status}/state/enum")).unwrap().as_array_mut().unwrap();
    words.retain(|word| word != "detaching");
    assert_eq!(
        lacking(Kind::Volume, &old),
        ["the field volume.status.fencedAttach", "the value \"detaching\" of volume.status.state"]
    );
}
