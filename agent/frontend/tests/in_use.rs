//! Tests the users of a block device: loop devices stand for those of volumes.
#![allow(clippy::unwrap_used, reason = "a test ends if an assumption of it is wrong")]

use std::fs;
use std::path::Path;

use shorthorn_frontend::node::in_use;
use shorthorn_testkit::devices::{BindMount, LoopDevice, run};

/// Returns a loop device. Without one nothing is tested, and the test fails.
fn device() -> (LoopDevice, tempfile::TempDir) {
    let control = fs::OpenOptions::new().write(true).open("/dev/loop-control");
    assert!(control.is_ok(), "root and loop devices are needed: {control:?}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("disk");
    fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
    (LoopDevice::of(&file), folder)
}

#[test]
fn a_process_that_has_it_open_is_named() {
    let (device, _folder) = device();
    assert_eq!(in_use(device.path()), None);
    let opened = fs::File::open(device.path()).unwrap();
    let said = in_use(device.path()).unwrap();
    let own = format!("opened by process {} (", std::process::id());
    assert!(said.contains(&own), "{said}");
    drop(opened);
    assert_eq!(in_use(device.path()), None);
}

#[test]
fn a_loop_device_is_named_even_if_its_path_was_removed() {
    let (device, folder) = device();
    // As kubelet does: the node under another path, which is removed while the loop device stays.
    let node = folder.path().join("node");
    run("cp", &[Path::new("--archive"), device.path(), &node]);
    let holder = LoopDevice::of(&node);
    fs::remove_file(&node).unwrap();
    let said = in_use(device.path()).unwrap();
    assert!(said.contains(&format!("held by the loop device {}", holder.name())), "{said}");
    drop(holder);
    assert_eq!(in_use(device.path()), None);
}

#[test]
fn a_mount_of_its_node_is_named() {
    let (device, folder) = device();
    let target = folder.path().join("target");
    fs::File::create(&target).unwrap();
    let bound = BindMount::new(device.path(), &target);
    let said = in_use(device.path()).unwrap();
    assert!(said.contains(&format!("the device node is mounted at {}", bound.target().display())), "{said}");
    drop(bound);
    assert_eq!(in_use(device.path()), None);
}
