//! Tests the users of a block device: loop devices stand for those of volumes.
#![allow(clippy::unwrap_used, reason = "a test ends where something it relies on is not so")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use shorthorn_frontend::node::in_use;

fn run(program: &str, arguments: &[&Path]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
}

/// A loop device that is detached when this is dropped.
struct Loop(PathBuf);

impl Loop {
    fn of(file: &Path) -> Loop {
        Loop(run("losetup", &[Path::new("--find"), Path::new("--show"), file]).into())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}

/// A mount that is removed when this is dropped.
struct Bound(PathBuf);

impl Drop for Bound {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

/// Returns a loop device. Without one nothing is tested, and the test fails.
fn device() -> (Loop, tempfile::TempDir) {
    let control = fs::OpenOptions::new().write(true).open("/dev/loop-control");
    assert!(control.is_ok(), "root and loop devices are needed: {control:?}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("disk");
    fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
    (Loop::of(&file), folder)
}

#[test]
fn a_process_that_has_it_open_is_named() {
    let (device, _folder) = device();
    assert_eq!(in_use(&device.0), None);
    let opened = fs::File::open(&device.0).unwrap();
    let said = in_use(&device.0).unwrap();
    let own = format!("opened by process {} (", std::process::id());
    assert!(said.contains(&own), "{said}");
    drop(opened);
    assert_eq!(in_use(&device.0), None);
}

#[test]
fn a_loop_device_on_it_is_named_whatever_became_of_its_path() {
    let (device, folder) = device();
    // As kubelet does: the node under another path, which goes while the loop device stays.
    let node = folder.path().join("node");
    run("cp", &[Path::new("--archive"), &device.0, &node]);
    let holder = Loop::of(&node);
    fs::remove_file(&node).unwrap();
    let said = in_use(&device.0).unwrap();
    let name = holder.0.file_name().unwrap().to_str().unwrap();
    assert!(said.contains(&format!("held by the loop device {name}")), "{said}");
    drop(holder);
    assert_eq!(in_use(&device.0), None);
}

#[test]
fn a_mount_of_its_node_is_named() {
    let (device, folder) = device();
    let target = folder.path().join("target");
    fs::File::create(&target).unwrap();
    run("mount", &[Path::new("--bind"), &device.0, &target]);
    let bound = Bound(target);
    let said = in_use(&device.0).unwrap();
    assert!(said.contains(&format!("its node is mounted at {}", bound.0.display())), "{said}");
    drop(bound);
    assert_eq!(in_use(&device.0), None);
}
