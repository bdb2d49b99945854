//! Tests the life of a volume on a node, on loop devices: staged, published, filled, grown, and removed
//! again.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::path::Path;

use common::*;
use shorthorn_api::csi::v1;
use shorthorn_api::csi::v1::volume_capability::access_mode::Mode;
use shorthorn_api::csi::v1::volume_capability::{AccessType, MountVolume};
use shorthorn_api::csi::v1::volume_usage::Unit;
use shorthorn_csi_node::VolumeHealth;
use shorthorn_vmkit::{DataDisk, FileSystem, Kernel, Vm, VmOptions};
use tonic::Code;

const INSIDE: &str = "SHORTHORN_TEST_IN_VM";

async fn whole_life(fs_type: &str) {
    let mut node = Node::new();
    node.volume("v1");
    let mut client = node.serve().await;
    let (staging, target) = (node.staging("v1"), node.target("p1"));
    let wanted = || file_system(fs_type);
    for round in 0..10 {
        client.stage(stage("v1", &staging, wanted())).await.unwrap();
        assert_eq!(mounts_at(&staging), 1, "round {round}");
    }
    for round in 0..10 {
        client.publish(publish("v1", &staging, &target, wanted())).await.unwrap();
        assert_eq!(mounts_at(&target), 1, "round {round}");
    }
    assert!(put(&target.join("file"), "data"));
    let answer = client.stats("v1", &target).await.unwrap();
    let units: Vec<i32> = answer.usage.iter().map(|usage| usage.unit).collect();
    assert_eq!(units, [i32::from(Unit::Bytes), i32::from(Unit::Inodes)]);
    assert!(answer.usage.iter().all(|usage| usage.total > 0 && usage.available > 0), "{answer:?}");
    assert!(!answer.volume_condition.unwrap().abnormal);
    let early = client.unstage("v1", &staging).await;
    refused(early, Code::FailedPrecondition, target.to_str().unwrap());
    for _ in 0..10 {
        client.unpublish("v1", &target).await.unwrap();
        assert!(!target.exists() && mounts_at(&target) == 0);
    }
    for _ in 0..10 {
        client.unstage("v1", &staging).await.unwrap();
        assert_eq!(mounts_at(&staging), 0);
    }
    // Another life has the same data: nothing is formatted twice.
    client.stage(stage("v1", &staging, wanted())).await.unwrap();
    assert_eq!(text_at(&staging.join("file")), "data");
    client.unstage("v1", &staging).await.unwrap();
}

#[tokio::test]
async fn an_ext4_volume_from_the_first_to_the_last_call() {
    whole_life("ext4").await;
}

#[tokio::test]
async fn an_xfs_volume_from_the_first_to_the_last_call() {
    whole_life("xfs").await;
}

#[tokio::test]
async fn a_volume_as_a_device_from_the_first_to_the_last_call() {
    let mut node = Node::new();
    node.volume("v1");
    let mut client = node.serve().await;
    let (staging, target) = (node.staging("v1"), node.target("p1"));
    for _ in 0..10 {
        client.stage(stage("v1", &staging, block())).await.unwrap();
    }
    for _ in 0..10 {
        client.publish(publish("v1", &staging, &target, block())).await.unwrap();
        assert!(is_block_device(&target) && mounts_at(&target) == 1);
    }
    assert!(takes_data(&target));
    // kubelet puts a loop device over it, as a lock.
    let lock = Loop::over(&target);
    assert_eq!(lock.device().size_bytes, SIZE);
    drop(lock);
    let answer = client.stats("v1", &target).await.unwrap();
    assert_eq!((answer.usage.len(), answer.usage[0].total), (1, i64::try_from(SIZE).unwrap()));
    assert!(!answer.volume_condition.unwrap().abnormal);
    let mixed = client.stage(stage("v1", &staging, file_system("ext4"))).await;
    refused(mixed, Code::FailedPrecondition, target.to_str().unwrap());
    for _ in 0..10 {
        client.unpublish("v1", &target).await.unwrap();
        assert!(!target.exists());
        client.unstage("v1", &staging).await.unwrap();
    }
}

#[tokio::test]
async fn a_volume_that_was_attached_for_reading_stays_unchanged() {
    let mut node = Node::new();
    node.volume("v1");
    let mut client = node.serve().await;
    let (staging, target) = (node.staging("v1"), node.target("p1"));
    node.set("v1", |volume| volume.read_only = true);
    let unformatted = client.stage(stage("v1", &staging, file_system("ext4"))).await;
    refused(unformatted, Code::FailedPrecondition, "read-only");
    assert_eq!(mounts_at(&staging), 0);
    run("mkfs.ext4", &["-q", node.device("v1").path.to_str().unwrap()]);
    client.stage(stage("v1", &staging, file_system("ext4"))).await.unwrap();
    assert!(options_at(&staging).0.starts_with("ro"), "{:?}", options_at(&staging));
    let writable = client.publish(publish("v1", &staging, &target, file_system("ext4"))).await;
    refused(writable, Code::FailedPrecondition, "for reading only");
    let mut request = publish("v1", &staging, &target, file_system("ext4"));
    request.readonly = true;
    client.publish(request).await.unwrap();
    assert!(!put(&target.join("x"), ""));
}

#[tokio::test]
async fn read_only_targets() {
    let mut node = Node::new();
    node.volume("v1");
    node.volume("v2");
    let mut client = node.serve().await;
    let (staging, target) = (node.staging("v1"), node.target("p1"));
    let read_only = |name: &str, target: &Path, wanted| {
        let mut request = publish(name, &node.staging(name), target, wanted);
        request.readonly = true;
        request
    };
    client.stage(stage("v1", &staging, file_system("ext4"))).await.unwrap();
    for _ in 0..2 {
        client.publish(read_only("v1", &target, file_system("ext4"))).await.unwrap();
    }
    assert!(!put(&target.join("x"), ""));
    assert!(put(&staging.join("x"), ""));
    let other = client.publish(publish("v1", &staging, &target, file_system("ext4"))).await;
    refused(other, Code::AlreadyExists, "read-only");

    // A mount flag says the same.
    client.unpublish("v1", &target).await.unwrap();
    client.unstage("v1", &staging).await.unwrap();
    let flags = MountVolume { mount_flags: vec!["noatime,ro".into()], ..MountVolume::default() };
    let wanted = || capability(AccessType::Mount(flags.clone()), Mode::SingleNodeWriter);
    for _ in 0..2 {
        client.stage(stage("v1", &staging, wanted())).await.unwrap();
        client.publish(publish("v1", &staging, &target, wanted())).await.unwrap();
        assert!(options_at(&target).0.starts_with("ro,noatime"), "{:?}", options_at(&target));
    }

    // A device: the kernel refuses writes, and allows them again after its last user.
    let many = || with_mode(block(), Mode::SingleNodeMultiWriter);
    let (reader, writer) = (node.target("p2"), node.target("p3"));
    for _ in 0..2 {
        client.publish(read_only("v2", &reader, many())).await.unwrap();
    }
    assert!(!takes_data(&reader));
    let other = client.publish(publish("v2", &node.staging("v2"), &reader, many())).await;
    refused(other, Code::AlreadyExists, "read-only");
    let other = client.publish(publish("v2", &node.staging("v2"), &writer, many())).await;
    refused(other, Code::FailedPrecondition, "read-only");
    assert!(!writer.exists(), "the refused call leaves nothing");
    client.unpublish("v2", &reader).await.unwrap();
    client.publish(publish("v2", &node.staging("v2"), &writer, many())).await.unwrap();
    assert!(takes_data(&writer));
}

/// Returns true if a device can be written to. Some kernels refuse to open it for that, others to write.
fn takes_data(path: &Path) -> bool {
    put(path, &"x".repeat(512))
}

async fn grows(fs_type: &str) {
    const LARGER: u64 = SIZE + (64 << 20);
    // Inode tables take their part.
    const GROWN_AT_LEAST: i64 = 48 << 20;
    let mut node = Node::new();
    node.volume("v1");
    let mut client = node.serve().await;
    let (staging, target) = (node.staging("v1"), node.target("p1"));
    client.stage(stage("v1", &staging, file_system(fs_type))).await.unwrap();
    client.publish(publish("v1", &staging, &target, file_system(fs_type))).await.unwrap();
    let total = |answer: shorthorn_api::csi::v1::NodeGetVolumeStatsResponse| answer.usage[0].total;
    let before = total(client.stats("v1", &target).await.unwrap());
    let (code, message) = client.expand("v1", &target, LARGER).await.unwrap_err();
    assert_eq!(code, Code::FailedPrecondition, "the device has not grown: {message}");
    let device = node.loops_grow("v1", LARGER);
    assert_eq!(device, LARGER);
    for _ in 0..2 {
        assert_eq!(client.expand("v1", &target, LARGER).await.unwrap(), i64::try_from(LARGER).unwrap());
    }
    let after = total(client.stats("v1", &target).await.unwrap());
    assert!(after >= before + GROWN_AT_LEAST, "{before} to {after}");
    // A volume that has grown while it was attached nowhere has its space from the next stage on.
    client.unpublish("v1", &target).await.unwrap();
    client.unstage("v1", &staging).await.unwrap();
    node.loops_grow("v1", LARGER + (64 << 20));
    client.stage(stage("v1", &staging, file_system(fs_type))).await.unwrap();
    let last = total(client.stats("v1", &staging).await.unwrap());
    assert!(last >= after + GROWN_AT_LEAST, "{after} to {last}");
}

#[tokio::test]
async fn an_ext4_volume_grows_in_use() {
    if may_resize_ext4() {
        return grows("ext4").await;
    }
    // A host that does not let it grow; the virtual machine below does.
    let mut node = Node::new();
    node.volume("v1");
    let mut client = node.serve().await;
    let staging = node.staging("v1");
    client.stage(stage("v1", &staging, file_system("ext4"))).await.unwrap();
    let larger = node.loops_grow("v1", SIZE + (64 << 20));
    refused(client.expand("v1", &staging, larger).await.map(drop), Code::Internal, "resize2fs");
}

/// The device cannot grow while it is in use: kubelet stages the volume again on the same node, with no
/// attachment in between.
#[tokio::test]
async fn a_volume_staged_again_has_the_size_that_its_device_refused_in_use() {
    for as_block in [false, true] {
        let mut node = Node::new();
        node.volume("v1");
        node.volume_of("larger", SIZE + (64 << 20));
        let mut client = node.serve().await;
        let (staging, target) = (node.staging("v1"), node.target("p1"));
        let wanted = || if as_block { block() } else { file_system("ext4") };
        client.publish(publish("v1", &staging, &target, wanted())).await.unwrap();
        let larger = node.device("larger");
        node.renewed("v1", larger.clone());
        // Nothing but staging has the device recreated.
        let path = if as_block { &target } else { &staging };
        let refusal = client.expand("v1", path, larger.size_bytes).await.map(drop);
        refused(refusal, Code::FailedPrecondition, "attach the volume again");
        client.unpublish("v1", &target).await.unwrap();
        client.unstage("v1", &staging).await.unwrap();
        client.stage(stage("v1", &staging, wanted())).await.unwrap();
        client.publish(publish("v1", &staging, &target, wanted())).await.unwrap();
        assert_eq!(node.device("v1"), larger);
        let usage = client.stats("v1", &target).await.unwrap().usage;
        assert!(u64::try_from(usage[0].total).unwrap() > SIZE * 3 / 4, "{usage:?}");
        client.unpublish("v1", &target).await.unwrap();
    }
}

/// All of these tests on a kernel that lets root do everything, with the tools of that system.
#[test]
fn in_a_virtual_machine() -> anyhow::Result<()> {
    if std::env::var_os(INSIDE).is_some() {
        return Ok(());
    }
    let disk = DataDisk::new(4096, FileSystem::Ext4);
    let vm = Vm::start(VmOptions::new(Kernel::Ublk).name("csi").data_disk(disk))?;
    vm.push(&[(&std::env::current_exe()?, "/root/test", 0o755)])?;
    let test = format!("modprobe loop; {INSIDE}=1 TMPDIR=/var/lib/longhorn /root/test --test-threads=2");
    let done = vm.command(&test).limit(LIMIT * 3).run()?;
    anyhow::ensure!(done.success(), "{}\n{}", done.text(), String::from_utf8_lossy(&done.stderr));
    Ok(())
}

#[tokio::test]
async fn an_xfs_volume_grows_in_use() {
    grows("xfs").await;
}

#[tokio::test]
async fn a_device_that_has_grown_needs_nothing_more() {
    let mut node = Node::new();
    node.volume("v1");
    let mut client = node.serve().await;
    let (staging, target) = (node.staging("v1"), node.target("p1"));
    client.publish(publish("v1", &staging, &target, block())).await.unwrap();
    let size = node.loops_grow("v1", SIZE * 2);
    assert_eq!(client.expand("v1", &target, size).await.unwrap(), i64::try_from(size).unwrap());
    // If a device is staged, only the capability shows the kind of the volume.
    let unclear = client.expand("v1", &staging, size).await.map(drop);
    refused(unclear, Code::NotFound, "not at volume_path");
    let request = v1::NodeExpandVolumeRequest {
        volume_id: "v1".into(),
        volume_path: staging.display().to_string(),
        volume_capability: Some(block()),
        ..v1::NodeExpandVolumeRequest::default()
    };
    let grown = client.node.node_expand_volume(request).await.unwrap().into_inner();
    assert_eq!(grown.capacity_bytes, i64::try_from(size).unwrap());
}

#[tokio::test]
async fn the_volume_condition_names_the_problem() {
    let mut node = Node::new();
    node.volume("v1");
    let mut client = node.serve().await;
    let staging = node.staging("v1");
    client.stage(stage("v1", &staging, file_system("ext4"))).await.unwrap();
    node.set("v1", |volume| volume.condition = VolumeHealth::Degraded("1 of 2 replicas".into()));
    let condition = client.stats("v1", &staging).await.unwrap().volume_condition.unwrap();
    assert!(condition.abnormal && condition.message.contains("1 of 2 replicas"), "{condition:?}");
    node.set("v1", |volume| volume.condition = VolumeHealth::Frozen("no quorum".into()));
    let condition = client.stats("v1", &staging).await.unwrap().volume_condition.unwrap();
    assert!(condition.abnormal && condition.message.contains("no quorum"), "{condition:?}");
    let frozen = client.publish(publish("v1", &staging, &node.target("p1"), file_system("ext4"))).await;
    refused(frozen, Code::Unavailable, "no quorum");
    node.set("v1", |volume| volume.condition = VolumeHealth::Healthy);
    assert!(!client.stats("v1", &staging).await.unwrap().volume_condition.unwrap().abnormal);
    // As after an error: the file system is read-only, and the mount is not.
    run("mount", &["-o", "remount,ro", staging.to_str().unwrap()]);
    run("mount", &["-o", "remount,bind,rw", staging.to_str().unwrap()]);
    let condition = client.stats("v1", &staging).await.unwrap().volume_condition.unwrap();
    assert!(condition.abnormal && condition.message.contains("read-only"), "{condition:?}");
    // The mount has no user: the next stage restores it.
    client.stage(stage("v1", &staging, file_system("ext4"))).await.unwrap();
    assert!(!client.stats("v1", &staging).await.unwrap().volume_condition.unwrap().abnormal);
    assert!(put(&staging.join("x"), ""));
}

#[tokio::test]
async fn a_target_for_each_writer_that_the_mode_allows() {
    let mut node = Node::new();
    node.volume("v1");
    node.volume("v2");
    let mut client = node.serve().await;
    let cases = [
        (Mode::SingleNodeSingleWriter, false),
        (Mode::SingleNodeWriter, false),
        (Mode::SingleNodeMultiWriter, true),
        (Mode::MultiNodeMultiWriter, true),
    ];
    for (volume, wanted) in [("v1", file_system("ext4")), ("v2", block())] {
        let staging = node.staging(volume);
        for (mode, allowed) in cases {
            let wanted = || with_mode(wanted.clone(), mode);
            let (first, second) = (node.target("first"), node.target("second"));
            client.stage(stage(volume, &staging, wanted())).await.unwrap();
            client.publish(publish(volume, &staging, &first, wanted())).await.unwrap();
            let answer = client.publish(publish(volume, &staging, &second, wanted())).await;
            if allowed {
                answer.unwrap();
                assert_eq!(mounts_at(&second), 1);
            } else {
                refused(answer, Code::FailedPrecondition, first.to_str().unwrap());
                assert!(!second.exists(), "the refused call leaves nothing");
            }
            client.publish(publish(volume, &staging, &first, wanted())).await.unwrap();
            client.unpublish(volume, &second).await.unwrap();
            client.unpublish(volume, &first).await.unwrap();
        }
        client.unstage(volume, &staging).await.unwrap();
    }
}
