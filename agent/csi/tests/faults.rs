//! Tests that other faults do not harm volumes: foreign data, reboots, wrong devices, simultaneous calls.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::path::Path;
use std::sync::Arc;

use common::*;
use shorthorn_api::csi::v1::volume_capability::{AccessType, MountVolume, access_mode::Mode};
use shorthorn_csi_node::{DeadMount, NodeVolume, NodeVolumes, VolumeHealth, VolumesError};
use shorthorn_types::VolumeName;
use tokio::sync::Semaphore;
use tonic::Code;

/// Returns every byte of a small device.
fn all_of(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap()
}

#[tokio::test]
async fn data_of_others_is_never_formatted() {
    const SMALL: u64 = 64 << 20;
    let mut node = Node::new();
    let mut client = node.serve().await;
    let staging = node.staging("v");
    type Make = fn(&Loop);
    let path = |made: &Loop| made.path.to_str().unwrap().to_owned();
    let cases: [(&str, Make); 8] = [
        ("unknown data in the first sector", |made| made.write(0, &[7; 512])),
        ("unknown data in the first MiB", |made| made.write((1 << 20) - 1, &[7])),
        ("unknown data in the last MiB", |made| made.write(SMALL - (1 << 20), &[7])),
        ("a partition table", |made| {
            // One Linux partition, from sector 2048 on.
            let mut entry = [0; 16];
            (entry[4], entry[9], entry[13]) = (0x83, 8, 8);
            made.write(446, &entry);
            made.write(510, &[0x55, 0xaa]);
        }),
        ("another file system", |made| drop(run("mkfs.ext2", &["-q", made.path.to_str().unwrap()]))),
        ("swap space", |made| drop(run("mkswap", &[made.path.to_str().unwrap()]))),
        ("two signatures", |made| {
            run("mkfs.ext4", &["-q", made.path.to_str().unwrap()]);
            // The magic of btrfs where btrfs has it.
            made.write((64 << 10) + 64, b"_BHRfS_M");
        }),
        ("an encrypted container", |made| made.write(0, b"LUKS\xba\xbe\x00\x02")),
    ];
    for (at, (what, make)) in cases.iter().enumerate() {
        let name = format!("v{at}");
        let made = node.volume_of(&name, SMALL);
        make(made);
        let (device, before) = (path(made), all_of(&made.path));
        for wanted in ["ext4", ""] {
            let answer = client.stage(stage(&name, &staging, file_system(wanted))).await;
            refused(answer, Code::FailedPrecondition, &format!("{device} holds "));
        }
        let answer = client.publish(publish(&name, &staging, &node.target("p"), file_system("ext4"))).await;
        refused(answer, Code::FailedPrecondition, "holds");
        assert!(all_of(Path::new(&device)) == before, "{what} was changed");
        assert_eq!((mounts_at(&staging), node.target("p").exists()), (0, false), "{what}");
    }
}

#[tokio::test]
async fn a_format_that_was_interrupted_is_done_again() {
    let mut node = Node::new();
    let mut client = node.serve().await;
    // The state after a power cut after mkfs and before the removal of the label.
    for (name, mkfs, wanted) in
        [("v1", "mkfs.ext4", "ext4"), ("v2", "mkfs.xfs", "xfs"), ("v3", "mkfs.xfs", "ext4")]
    {
        let device = node.volume(name).path.display().to_string();
        run(mkfs, &["-q", "-L", "shorthorn-mk", &device]);
        let before = run("blkid", &["-p", "-s", "UUID", "-o", "value", &device]);
        let staging = node.staging(name);
        client.stage(stage(name, &staging, file_system(wanted))).await.unwrap();
        let after = run("blkid", &["-p", "-o", "export", &device]);
        assert!(!after.contains(before.trim()) && after.contains(&format!("TYPE={wanted}\n")), "{after}");
        assert!(!after.contains("LABEL"), "the label is gone: {after}");
        assert!(put(&staging.join("x"), ""));
    }
}

#[tokio::test]
async fn another_file_system_than_asked_for_stays() {
    let mut node = Node::new();
    let device = node.volume("v1").path.display().to_string();
    run("mkfs.xfs", &["-q", &device]);
    let mut client = node.serve().await;
    let staging = node.staging("v1");
    let answer = client.stage(stage("v1", &staging, file_system("ext4"))).await;
    refused(answer, Code::FailedPrecondition, "has xfs");
    // A request without a file system gets the existing one.
    client.stage(stage("v1", &staging, file_system(""))).await.unwrap();
    assert_eq!(run("findmnt", &["-n", "-o", "FSTYPE", staging.to_str().unwrap()]).trim(), "xfs");
    let answer = client.stage(stage("v1", &staging, file_system("ext4"))).await;
    refused(answer, Code::AlreadyExists, "its file system differs");
}

#[tokio::test]
async fn after_a_reboot_publishing_stages_again() {
    let mut node = Node::new();
    node.volume("v1");
    let mut client = node.serve().await;
    let (staging, target) = (node.staging("v1"), node.target("p1"));
    let wanted = || publish("v1", &staging, &target, file_system("ext4"));
    client.stage(stage("v1", &staging, file_system("ext4"))).await.unwrap();
    client.publish(wanted()).await.unwrap();
    assert!(put(&target.join("file"), "data"));
    // A reboot takes the mounts; the directories stay.
    run("umount", &[target.to_str().unwrap()]);
    run("umount", &[staging.to_str().unwrap()]);
    assert!(target.is_dir() && !target.join("file").exists());
    client.publish(wanted()).await.unwrap();
    assert_eq!(text_at(&target.join("file")), "data");
    assert_eq!((mounts_at(&staging), mounts_at(&target)), (1, 1));
    // Only the target.
    run("umount", &[target.to_str().unwrap()]);
    client.publish(wanted()).await.unwrap();
    assert_eq!(text_at(&target.join("file")), "data");
    // Even the directory of the staging path is gone.
    run("umount", &[target.to_str().unwrap()]);
    run("umount", &[staging.to_str().unwrap()]);
    fs::remove_dir(&staging).unwrap();
    client.publish(wanted()).await.unwrap();
    assert_eq!(text_at(&target.join("file")), "data");
    // Undone in any order of the calls that kubelet may have missed.
    client.unpublish("v1", &target).await.unwrap();
    run("umount", &[staging.to_str().unwrap()]);
    client.unstage("v1", &staging).await.unwrap();
}

#[tokio::test]
async fn another_volume_under_the_paths_is_neither_taken_nor_touched() {
    let mut node = Node::new();
    node.volume("v1");
    let other = node.volume("v2").path.display().to_string();
    run("mkfs.ext4", &["-q", &other]);
    let mut client = node.serve().await;
    let (staging, target) = (node.staging("v1"), node.target("p1"));
    run("mount", &[&other, staging.to_str().unwrap()]);
    let answer = client.stage(stage("v1", &staging, file_system("ext4"))).await;
    refused(answer, Code::AlreadyExists, "is not this volume");
    let answer = client.publish(publish("v1", &staging, &target, file_system("ext4"))).await;
    refused(answer, Code::AlreadyExists, "is not this volume");
    assert!(!target.exists() && mounts_at(&staging) == 1);
    run("umount", &[staging.to_str().unwrap()]);
    fs::create_dir(&target).unwrap();
    run("mount", &[&other, target.to_str().unwrap()]);
    let answer = client.publish(publish("v1", &staging, &target, file_system("ext4"))).await;
    refused(answer, Code::AlreadyExists, "is not this volume");
    assert_eq!((mounts_at(&staging), mounts_at(&target)), (0, 1), "nothing was staged for it");
    let (code, _) = client.stats("v1", &target).await.unwrap_err();
    assert_eq!(code, Code::NotFound);
}

#[tokio::test]
async fn a_device_that_is_not_the_volumes_is_not_touched() {
    let mut node = Node::new();
    node.volume("v1");
    node.volume("v2");
    let mut client = node.serve().await;
    let (staging, right, wrong) = (node.staging("v1"), node.device("v1"), node.device("v2"));
    let before = all_of(&wrong.path);
    // The node of the volume leads to another device now.
    node.set("v1", |volume| volume.device.as_mut().unwrap().path = wrong.path.clone());
    let answer = client.stage(stage("v1", &staging, file_system("ext4"))).await;
    refused(answer, Code::Unavailable, "leads to");
    let mut smaller = right.clone();
    smaller.size_bytes -= 4096;
    node.set("v1", |volume| volume.device = Some(smaller));
    let answer = client.stage(stage("v1", &staging, file_system("ext4"))).await;
    refused(answer, Code::Unavailable, "bytes");
    let answer = client.publish(publish("v1", &staging, &node.target("p"), block())).await;
    refused(answer, Code::Unavailable, "bytes");
    node.set("v1", |volume| volume.device = None);
    let answer = client.stage(stage("v1", &staging, file_system("ext4"))).await;
    refused(answer, Code::Unavailable, "no device");
    assert!(all_of(&wrong.path) == before && all_of(&right.path).iter().all(|byte| *byte == 0));
    assert_eq!(mounts_at(&staging), 0);
}

#[tokio::test]
async fn mounts_of_a_lost_device_are_replaced() {
    let mut node = Node::new();
    node.volume("old");
    node.volume("new");
    let (old, new) = (node.device("old"), node.device("new"));
    node.set("v1", |volume| volume.device = Some(old.clone()));
    let mut client = node.serve().await;
    let pod_uid = "0b9f7f3e-1c39-4a4c-8f43-1b0e8d3f6a11";
    let (staging, target) = (node.staging("v1"), node.target(pod_uid));
    let wanted = || publish("v1", &staging, &target, file_system("ext4"));
    client.publish(wanted()).await.unwrap();
    client.stats("v1", &target).await.unwrap();
    assert_eq!(node.dead_mounts.all(), []);
    // Its engine is gone: the device exists like an nbd device without a server, with a size of 0.
    node.loops_grow("old", 0);
    let answer = client.stats("v1", &target).await.unwrap();
    let condition = answer.volume_condition.unwrap();
    assert!(condition.abnormal && condition.message.contains("gone"), "{condition:?}");
    let dead = DeadMount { volume: VolumeName::new("v1").unwrap(), pod_uid: pod_uid.to_owned() };
    assert_eq!(node.dead_mounts.all(), [dead]);
    // The engine is gone for good, too: users of the mount have to learn of that.
    node.forget("v1");
    let condition = client.stats("v1", &target).await.unwrap().volume_condition.unwrap();
    let words = ["not attached to this node", &old.number.to_string(), "delete the pods"];
    let says = words.iter().all(|word| condition.message.contains(word));
    assert!(condition.abnormal && says, "{condition:?}");
    let (code, _) = client.stats("v1", &node.target("p2")).await.unwrap_err();
    assert_eq!(code, Code::NotFound);
    node.set("v1", |volume| volume.device = Some(new.clone()));
    let condition = client.stats("v1", &target).await.unwrap().volume_condition.unwrap();
    assert!(condition.abnormal && condition.message.contains("gone"), "{condition:?}");
    assert_eq!(node.dead_mounts.all().len(), 1);
    client.publish(wanted()).await.unwrap();
    assert_eq!(node.dead_mounts.all(), [], "it was staged again");
    assert_eq!((mounts_at(&staging), mounts_at(&target)), (1, 1));
    let number = new.number.to_string();
    assert!(mounts().contains(&(number, target.clone())), "{:?}", mounts());
    assert!(put(&target.join("x"), ""));
}

#[tokio::test]
async fn leftovers_at_the_target() {
    let mut node = Node::new();
    node.volume("v1");
    let mut client = node.serve().await;
    let (staging, target) = (node.staging("v1"), node.target("p1"));
    let wanted = || publish("v1", &staging, &target, file_system("ext4"));
    fs::create_dir(&target).unwrap();
    client.publish(wanted()).await.unwrap();
    client.unpublish("v1", &target).await.unwrap();
    // From another life of the path, as a device.
    fs::write(&target, "").unwrap();
    client.publish(wanted()).await.unwrap();
    client.unpublish("v1", &target).await.unwrap();
    // A file was written there while no volume was mounted: it is neither hidden nor deleted.
    fs::create_dir(&target).unwrap();
    fs::write(target.join("precious"), "data").unwrap();
    refused(client.publish(wanted()).await, Code::FailedPrecondition, "not empty");
    refused(client.unpublish("v1", &target).await, Code::FailedPrecondition, "not empty");
    assert_eq!(fs::read(target.join("precious")).unwrap(), b"data");
    fs::remove_dir_all(&target).unwrap();
    client.unpublish("v1", &target).await.unwrap();
}

#[tokio::test]
async fn a_volume_that_is_not_here_any_more_is_cleaned_up() {
    let mut node = Node::new();
    node.volume("v1");
    let mut client = node.serve().await;
    let (staging, target) = (node.staging("v1"), node.target("p1"));
    client.publish(publish("v1", &staging, &target, file_system("ext4"))).await.unwrap();
    node.forget("v1");
    let (code, _) = client.stats("v1", &target).await.unwrap_err();
    assert_eq!(code, Code::NotFound);
    for _ in 0..2 {
        client.unpublish("v1", &target).await.unwrap();
        client.unstage("v1", &staging).await.unwrap();
    }
    assert!(!target.exists() && mounts_at(&staging) == 0);
    // Mounts outside the directories of the caller were not made for it.
    let outside = node.root.parent().unwrap().join("mine");
    fs::create_dir(&outside).unwrap();
    run("mount", &["-t", "tmpfs", "none", outside.to_str().unwrap()]);
    refused(client.unpublish("v1", &outside).await, Code::FailedPrecondition, "left alone");
    refused(client.unstage("v1", &outside).await, Code::FailedPrecondition, "left alone");
    assert_eq!(mounts_at(&outside), 1);
}

#[tokio::test]
async fn a_call_that_fails_leaves_nothing() {
    let mut node = Node::new();
    node.volume("v1");
    let mut client = node.serve().await;
    let (staging, target) = (node.staging("v1"), node.target("p1"));
    let flags = MountVolume {
        fs_type: "ext4".into(),
        mount_flags: vec!["no-such-option".into()],
        ..MountVolume::default()
    };
    let wanted = || capability(AccessType::Mount(flags.clone()), Mode::SingleNodeWriter);
    refused(client.stage(stage("v1", &staging, wanted())).await, Code::Internal, "mount failed");
    refused(client.publish(publish("v1", &staging, &target, wanted())).await, Code::Internal, "mount failed");
    assert_eq!((mounts_at(&staging), target.exists()), (0, false));
    let nowhere = node.root.join("no/such/place");
    let answer = client.publish(publish("v1", &staging, &nowhere, file_system("ext4"))).await;
    refused(answer, Code::FailedPrecondition, "does not exist");
    assert_eq!(mounts_at(&staging), 0);
}

#[tokio::test]
async fn a_damaged_file_system_is_not_mounted() {
    let mut node = Node::new();
    let device = node.volume("v1").path.display().to_string();
    run("mkfs.ext4", &["-q", &device]);
    // The root directory is not a directory any more: nothing that -p may repair.
    run("debugfs", &["-w", "-R", "clri <2>", &device]);
    run("debugfs", &["-w", "-R", "set_super_value state 0", &device]);
    let mut client = node.serve().await;
    let staging = node.staging("v1");
    let answer = client.stage(stage("v1", &staging, file_system("ext4"))).await;
    refused(answer, Code::Internal, "fsck.ext4");
    assert_eq!(mounts_at(&staging), 0);
}

#[tokio::test]
async fn after_a_power_cut_the_journal_is_replayed() {
    for fs_type in ["ext4", "xfs"] {
        let mut node = Node::new();
        node.volume("v1");
        let mut client = node.serve().await;
        let staging = node.staging("v1");
        client.stage(stage("v1", &staging, file_system(fs_type))).await.unwrap();
        assert!(put(&staging.join("file"), "data"));
        run("sync", &[staging.join("file").to_str().unwrap()]);
        // A copy of the mounted disk at this moment becomes the disk of another volume, like a clone beside
        // its origin.
        let copy = node.volume("v2").path.clone();
        run(
            "dd",
            &[
                &format!("if={}", node.device("v1").path.display()),
                &format!("of={}", copy.display()),
                "bs=1M",
                "conv=sparse,notrunc,fsync",
                "status=none",
            ],
        );
        let beside = node.staging("v2");
        client.stage(stage("v2", &beside, file_system(fs_type))).await.unwrap();
        assert_eq!(text_at(&beside.join("file")), "data", "{fs_type}");
    }
}

/// Volumes whose answers wait until the gate opens.
struct Slow {
    asked: Semaphore,
    open: Semaphore,
    volume: NodeVolume,
}

#[tonic::async_trait]
impl NodeVolumes for Slow {
    async fn find(&self, _: &VolumeName) -> Result<NodeVolume, VolumesError> {
        self.asked.add_permits(1);
        let _open = self.open.acquire().await.unwrap();
        Ok(self.volume.clone())
    }
}

/// Waits until the given number of calls are inside.
async fn asked(slow: &Slow, calls: u32) {
    tokio::time::timeout(LIMIT / 4, slow.asked.acquire_many(calls)).await.unwrap().unwrap().forget();
}

#[tokio::test]
async fn one_call_at_a_time_for_a_volume() {
    let mut node = Node::new();
    node.volume("v1");
    let volume =
        NodeVolume { device: Some(node.device("v1")), read_only: false, condition: VolumeHealth::Healthy };
    let slow = Arc::new(Slow { asked: Semaphore::new(0), open: Semaphore::new(0), volume });
    let mut client = node.serve_with(Arc::clone(&slow) as Arc<dyn NodeVolumes>).await;
    let (staging, target) = (node.staging("v1"), node.target("p1"));
    let wanted = stage("v1", &staging, file_system("ext4"));
    let mut first_client = client.clone();
    let request = wanted.clone();
    let first = tokio::spawn(async move { first_client.stage(request).await });
    asked(&slow, 1).await;
    let text = "another call for volume v1 is under way";
    refused(client.stage(wanted.clone()).await, Code::Aborted, text);
    refused(client.publish(publish("v1", &staging, &target, block())).await, Code::Aborted, text);
    refused(client.unpublish("v1", &target).await, Code::Aborted, text);
    refused(client.unstage("v1", &staging).await, Code::Aborted, text);
    assert_eq!(client.expand("v1", &staging, 1).await.unwrap_err().0, Code::Aborted);
    // Neither another volume nor the statistics wait for it; they wait for the table as it does.
    let (mut other, mut stats) = (client.clone(), client.clone());
    let request = stage("v2", &node.staging("v2"), block());
    let other = tokio::spawn(async move { other.stage(request).await });
    let path = staging.clone();
    let stats = tokio::spawn(async move { stats.stats("v1", &path).await });
    asked(&slow, 2).await;
    slow.open.add_permits(Semaphore::MAX_PERMITS / 2);
    first.await.unwrap().unwrap();
    other.await.unwrap().unwrap();
    let _ = stats.await.unwrap();
    client.stage(wanted).await.unwrap();
    client.unstage("v1", &staging).await.unwrap();
}

/// A file system on which everything hangs, until this is dropped.
struct Frozen<'a>(&'a Path);

impl<'a> Frozen<'a> {
    fn at(path: &'a Path) -> Frozen<'a> {
        run("fsfreeze", &["-f", path.to_str().unwrap()]);
        Frozen(path)
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        run("fsfreeze", &["-u", self.0.to_str().unwrap()]);
    }
}

/// Returns true if a program runs with that argument.
fn runs(program: &str, argument: &Path) -> bool {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let mut lines = processes.filter_map(|process| fs::read(process.path().join("cmdline")).ok());
    lines.any(|line| {
        let line = String::from_utf8_lossy(&line);
        line.contains(program) && line.split('\0').any(|word| Path::new(word) == argument)
    })
}

#[tokio::test]
async fn a_cancelled_call_leaves_its_work_and_its_gate() {
    let mut node = Node::new();
    node.volume("v1");
    let mut client = node.serve().await;
    let staging = node.staging("v1");
    client.stage(stage("v1", &staging, file_system("xfs"))).await.unwrap();
    node.loops_grow("v1", SIZE + (64 << 20));
    let frozen = Frozen::at(&staging);
    let (mut gone, path) = (client.clone(), staging.clone());
    let call = tokio::spawn(async move { gone.expand("v1", &path, 1).await });
    let hangs = async {
        while !runs("xfs_growfs", &staging) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LIMIT / 4, hangs).await.unwrap();
    call.abort();
    assert!(call.await.unwrap_err().is_cancelled());
    for _ in 0..10 {
        assert_eq!(client.expand("v1", &staging, 1).await.unwrap_err().0, Code::Aborted);
    }
    drop(frozen);
    let done = async {
        loop {
            match client.expand("v1", &staging, 1).await {
                Err((Code::Aborted, _)) => tokio::task::yield_now().await,
                other => return other,
            }
        }
    };
    tokio::time::timeout(LIMIT / 4, done).await.unwrap().unwrap();
}

#[tokio::test]
async fn an_interrupted_format_without_its_superblock_is_not_taken_for_empty() {
    let mut node = Node::new();
    let made = node.volume("v1");
    run("mkfs.ext4", &["-q", "-L", "shorthorn-mk", made.path.to_str().unwrap()]);
    // Its first block never reached the disk.
    made.write(0, &[0; 4096]);
    let mut client = node.serve().await;
    let answer = client.stage(stage("v1", &node.staging("v1"), file_system("ext4"))).await;
    refused(answer, Code::FailedPrecondition, "data of an unknown format");
}
