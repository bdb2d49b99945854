//! Tests the configuration of maintenance.

use super::StoreConfig;
use super::tests::load;

#[test]
fn guard_pods_need_an_image_and_a_policy_that_uses_them() {
    let image_of = |text: &str, flags: &[&str]| {
        let config = load(&format!("[kubernetes]\n{text}"), flags).unwrap();
        match config.store {
            StoreConfig::Kubernetes(config) => config.guard_pod_image().map(str::to_owned),
            StoreConfig::File(_) => unreachable!(),
        }
    };
    let image = "guard_image = \"i:1\"\n";
    assert_eq!(image_of("", &[]), None);
    assert_eq!(image_of(image, &[]).as_deref(), Some("i:1"));
    assert_eq!(image_of(image, &["--guard-image", "i:2"]).as_deref(), Some("i:2"));
    let allow = format!("{image}node_drain_policy = \"always-allow\"\n");
    assert_eq!(image_of(&allow, &[]), None);
    let block = ["--node-drain-policy", "block-if-contains-last-replica"];
    assert_eq!(image_of(&allow, &block).as_deref(), Some("i:1"));
}

#[test]
fn replicas_on_cordoned_machines_can_be_allowed() {
    let heeded = |text: &str, flags: &[&str]| {
        let settings = load(&format!("store = \"/a\"\n{text}"), flags).unwrap().settings;
        settings.scheduling.disable_scheduling_on_cordoned_node
    };
    assert!(heeded("", &[]));
    let text = "disable_scheduling_on_cordoned_node = false\n";
    assert!(!heeded(text, &[]));
    assert!(heeded(text, &["--disable-scheduling-on-cordoned-node=true"]));
}

#[test]
fn pods_without_a_device_are_ended_unless_that_is_not_wanted() {
    let ends = |text: &str, flags: &[&str]| {
        let config = load(&format!("[kubernetes]\n{text}"), flags).unwrap();
        match config.store {
            StoreConfig::Kubernetes(config) => config.ends_pods_without_device,
            StoreConfig::File(_) => unreachable!(),
        }
    };
    assert!(ends("", &[]));
    let text = "auto_delete_pod_when_volume_detached_unexpectedly = false\n";
    assert!(!ends(text, &[]));
    assert!(ends(text, &["--auto-delete-pod-when-volume-detached-unexpectedly=true"]));
}
