//! Each method of our interfaces has an entry in the access table, and each entry has a method.
#![allow(clippy::unwrap_used, reason = "a test ends if an assumption of it is wrong")]

use std::collections::BTreeSet;

use shorthorn_pki::Role;
use shorthorn_pki::access::{CallRefusal, RoleKind, TABLE, check};

#[test]
fn each_method_is_in_the_table_once() {
    let methods: BTreeSet<String> = shorthorn_api::method_paths().unwrap().into_iter().collect();
    assert!(methods.len() > 60, "the descriptors have the methods");
    let entries: BTreeSet<String> = TABLE.iter().map(|(path, _)| (*path).to_owned()).collect();
    assert_eq!(entries.len(), TABLE.len(), "no entry is there twice");
    let missing: Vec<&String> = methods.difference(&entries).collect();
    assert!(missing.is_empty(), "add these methods to proto/pki/src/access.rs: {missing:?}");
    let left: Vec<&String> = entries.difference(&methods).collect();
    assert!(left.is_empty(), "these methods do not exist: {left:?}");
}

#[test]
fn nodes_may_call_nothing_and_strangers_may_only_enrol() {
    let node = Role::node("a").unwrap();
    for (path, _) in TABLE {
        let is_open = *path == "/shorthorn.v1.ControllerTls/Enroll";
        assert_eq!(check(path, Some(&node)).is_ok(), is_open, "{path} as a node");
        assert_eq!(check(path, None).is_ok(), is_open, "{path} without a certificate");
    }
}

#[test]
fn agents_obey_the_controller_and_the_controller_obeys_administrators() {
    let admin = Role::admin("ann").unwrap();
    for (path, kinds) in TABLE {
        let of_node = path.starts_with("/shorthorn.v1.Node");
        assert_eq!(kinds.contains(&RoleKind::Controller), of_node, "{path}");
        let by_admin = check(path, Some(&admin));
        assert_eq!(by_admin.is_err(), of_node, "{path}: {by_admin:?}");
    }
    let unknown = check("/shorthorn.v1.Node/Format", Some(&Role::Controller));
    assert_eq!(unknown, Err(CallRefusal::UnknownMethod));
}
