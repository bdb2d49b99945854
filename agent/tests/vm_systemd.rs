//! The agent with instances as units of systemd, on a real kernel, in a virtual machine. This test fails
//! if VMs cannot run.
//!
//! The program in the machine is a copy of this test binary.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use common::node::{
    self, REPLICAS, connect, endpoint, list, pid, replica, running, start_volume, stop, wait_for,
};
use common::{lives, signal_to, wait_for_end};
use nix::sys::signal::Signal;
use shorthorn_api::v1::instance::Detail;
use shorthorn_api::v1::node_client::NodeClient;
use shorthorn_api::v1::{self, InstanceKind, InstanceState, MemberMode};
use shorthorn_vmkit::{Kernel, Vm, VmOptions};
use tonic::Code;
use tonic::transport::Channel;

const INSIDE: &str = "SHORTHORN_TEST_IN_VM";
const DISK: &str = "/var/lib/longhorn";
const DEVICE: &str = "/dev/longhorn/v1";
/// The number of attachment of an engine on another node.
const NEXT_ATTACH: u64 = 9;
const UNITS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../systemd");
/// The largest exposure of each service by `systemd-analyze security` of Debian 12, in tenths: 0 is the best,
/// 100 the worst. The agent and its instances get no mount namespace, which costs most of their points.
const EXPOSURE_MAX_TENTHS: [(&str, u32); 5] = [
    ("shorthorn-agent.service", 65),
    ("shorthorn-controller.service", 18),
    ("shorthorn-engine@.service", 58),
    ("shorthorn-pods.service", 31),
    ("shorthorn-replica@.service", 41),
];

#[test]
fn units_of_systemd() -> anyhow::Result<()> {
    let vm = Vm::start(VmOptions::new(Kernel::Ublk).name("units"))?;
    let source = |path: &str| Path::new(UNITS).join(path);
    let this = std::env::current_exe()?;
    let (lib, usr) = ("/usr/lib/systemd/system", "/usr/lib");
    let mut files = vec![
        (
            Path::new(env!("CARGO_BIN_EXE_shorthorn-agent")).to_owned(),
            "/usr/bin/shorthorn-agent".to_owned(),
            0o755,
        ),
        (this, "/root/test".to_owned(), 0o755),
    ];
    for unit in ["shorthorn-agent.service", "shorthorn-engine@.service", "shorthorn-replica@.service"] {
        files.push((source(&format!("system/{unit}")), format!("{lib}/{unit}"), 0o644));
    }
    for unit in ["shorthorn.slice", "shorthorn-replicas.target"] {
        files.push((source(&format!("system/{unit}")), format!("{lib}/{unit}"), 0o644));
    }
    for file in ["tmpfiles.d/shorthorn.conf", "udev/rules.d/59-shorthorn.rules"] {
        files.push((source(file), format!("{usr}/{file}"), 0o644));
    }
    let files: Vec<_> = files.iter().map(|(from, to, mode)| (from, to.as_str(), *mode)).collect();
    vm.push(&files)?;
    vm.sh("systemd-analyze verify --man=no /usr/lib/systemd/system/shorthorn*")?;
    exposure_is_limited(&vm)?;
    vm.sh("systemd-tmpfiles --create shorthorn.conf && udevadm control --reload")?;
    // The machine is slow: 20 starts take it longer than a minute.
    let limit = "/run/systemd/system/shorthorn-replica@v1-0000000c.service.d/limit.conf";
    vm.sh(&format!("mkdir -p $(dirname {limit}) && printf '[Unit]\\nStartLimitBurst=3\\n' > {limit}"))?;
    // The kernel grants a queue for each of its two processors.
    vm.sh("mkdir -p /etc/shorthorn && echo 'queues = 4' > /etc/shorthorn/agent.toml")?;
    vm.sh("systemctl daemon-reload && systemctl start shorthorn-agent")?;
    let test = format!("{INSIDE}=1 /root/test --exact inside --nocapture");
    let done = vm.command(&test).limit(Duration::from_secs(300)).run()?;
    let journal = || vm.sh("journalctl -o cat -u 'shorthorn*'").unwrap_or_default();
    let errors = String::from_utf8_lossy(&done.stderr);
    anyhow::ensure!(done.success(), "{}\n{errors}\n{}", done.text(), journal());
    vm.sh("! systemctl list-units --all --plain --no-legend 'shorthorn-engine@*' 'shorthorn-replica@*' | \
           grep .")?;
    Ok(())
}

/// Checks that no service has more rights than it needs, and prints the figures.
fn exposure_is_limited(vm: &Vm) -> anyhow::Result<()> {
    let is_service = |name: &String| name.ends_with(".service");
    let names = fs::read_dir(Path::new(UNITS).join("system"))?;
    let mut names: Vec<String> =
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).filter(is_service).collect();
    names.sort();
    let limited = EXPOSURE_MAX_TENTHS.map(|(name, _)| name);
    anyhow::ensure!(names == limited, "services {names:?}, limits for {limited:?}");
    for (name, limit) in EXPOSURE_MAX_TENTHS {
        let unit = format!("/root/security/{name}");
        vm.push(&[(Path::new(UNITS).join("system").join(name), unit.as_str(), 0o644)])?;
        let analyze = "systemd-analyze security --offline=true --no-pager";
        let analysed = vm.run(&format!("{analyze} --threshold={limit} '{unit}'"))?;
        let text = analysed.text();
        let figure = text.lines().find(|line| line.contains("Overall exposure level"));
        println!("{}", figure.unwrap_or("no figure"));
        anyhow::ensure!(analysed.success() && figure.is_some(), "{name} has more than {limit}/100: {text}");
    }
    Ok(())
}

/// Runs in the machine, and is not a test of its own.
#[tokio::test]
async fn inside() {
    if std::env::var_os(INSIDE).is_none() {
        return;
    }
    let socket = Path::new("/run/shorthorn/agent.sock");
    let mut client = connect(socket).await.unwrap();
    let first = start_volume(Path::new(DISK), "auto", &mut client).await;
    assert_eq!(endpoint(&first), Path::new(DEVICE));
    fs::write("/root/random", vec![0xa5; 1 << 20]).unwrap();
    sh("dd if=/root/random of=/dev/longhorn/v1 bs=64k oflag=direct status=none");
    instances_have_the_settings_of_the_units(&list(&mut client).await);
    lose_a_replica(&mut client).await;
    let mut client = kill_the_agent(socket, client).await;
    let second = kill_the_engine(&first, &mut client).await;
    refuse_while_in_use(&second, &mut client).await;
    give_up_and_continue(&mut client).await;
    attach_anew_in_use(&second, &mut client).await;
    depose_the_engine(&mut client).await;
    stop_all(&mut client).await;
}

fn sh(script: &str) {
    let status = Command::new("sh").args(["-ec", script]).status().unwrap();
    assert!(status.success(), "{script}: {status}");
}

fn instances_have_the_settings_of_the_units(instances: &[v1::Instance]) {
    assert_eq!(instances.len(), 3);
    for instance in instances {
        let proc = Path::new("/proc").join(instance.pid.to_string());
        let namespace = |proc: &Path| fs::read_link(proc.join("ns/mnt")).unwrap();
        assert_eq!(
            namespace(&proc),
            namespace(Path::new("/proc/1")),
            "{} has mounts of its own",
            instance.name
        );
        assert_eq!(fs::read_to_string(proc.join("oom_score_adj")).unwrap().trim(), "-900");
        let limits = fs::read_to_string(proc.join("limits")).unwrap();
        let memlock = limits.lines().find(|line| line.starts_with("Max locked memory")).unwrap();
        assert!(memlock.contains("unlimited"), "{memlock}");
        assert!(fs::read_to_string(proc.join("cgroup")).unwrap().contains("/shorthorn.slice/"));
    }
    sh("udevadm info --query=property $(readlink -f /sys/dev/block/$(stat -c %Hr:%Lr /dev/longhorn/v1)) \
        | grep -qx UDISKS_IGNORE=1");
}

/// Tests a replica that comes back to the first engine, whose device has fewer queues than were requested.
async fn lose_a_replica(client: &mut NodeClient<Channel>) {
    sh("test $(ls /sys/block/ublkb0/mq | wc -l) = 2");
    let replica = wait_for(client, "v1-0000000b", running).await;
    signal_to(pid(&replica), Signal::SIGKILL);
    // The write waits until the engine continues without it.
    sh("dd if=/root/random of=/dev/longhorn/v1 bs=64k oflag=direct status=none");
    let has_both = |engine: &v1::Instance| match &engine.detail {
        Some(Detail::Engine(engine)) => {
            engine.members.len() == 2
                && engine.members.iter().all(|member| member.mode() == MemberMode::Member)
        }
        _ => false,
    };
    wait_for(client, "v1", has_both).await;
}

async fn kill_the_agent(socket: &Path, mut client: NodeClient<Channel>) -> NodeClient<Channel> {
    let before: Vec<u32> = list(&mut client).await.iter().map(pid).collect();
    sh("systemctl kill --signal=KILL shorthorn-agent");
    // Answers when the agent is ready again.
    sh("systemctl restart shorthorn-agent");
    let mut client = connect(socket).await.unwrap();
    for name in ["v1", "v1-0000000a", "v1-0000000b"] {
        wait_for(&mut client, name, running).await;
    }
    let after: Vec<u32> = list(&mut client).await.iter().map(pid).collect();
    assert_eq!(after, before);
    client
}

async fn kill_the_engine(engine: &v1::Instance, client: &mut NodeClient<Channel>) -> v1::Instance {
    signal_to(pid(engine), Signal::SIGKILL);
    sh("dd if=/dev/longhorn/v1 of=/root/read bs=64k count=16 iflag=direct status=none && cmp /root/random \
        /root/read");
    let again = wait_for(client, "v1", |again| running(again) && again.pid != engine.pid).await;
    assert_eq!(endpoint(&again), Path::new(DEVICE));
    again
}

async fn refuse_while_in_use(engine: &v1::Instance, client: &mut NodeClient<Channel>) {
    sh("mkfs.ext4 -q /dev/longhorn/v1 && mount /dev/longhorn/v1 /mnt");
    let refused = client.stop_instance(stop(InstanceKind::Engine, "v1", 0)).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains("/mnt"), "{}", refused.message());
    assert!(lives(pid(engine)));
    sh("umount /mnt");
    let devices = client.list_devices(v1::ListDevicesRequest {}).await.unwrap().into_inner().devices;
    assert_eq!((devices.len(), devices[0].shown_state()), (1, "live"), "{devices:?}");
    assert!(Path::new(&devices[0].kernel_path).exists(), "{devices:?}");
}

/// Tests a replica that cannot start: systemd gives it up, the agent does not; stopping it ends that.
async fn give_up_and_continue(client: &mut NodeClient<Channel>) {
    let missing = v1::StartReplicaRequest { create: false, ..replica(Path::new(DISK), "0000000c") };
    client.start_replica(missing).await.unwrap();
    let name = "v1-0000000c";
    let says_why = |replica: &v1::Instance| {
        replica.state() == InstanceState::Error && replica.message.contains("holds no replica")
    };
    wait_for(client, name, says_why).await;
    sh("until systemctl is-failed --quiet shorthorn-replica@v1-0000000c; do sleep 0.2; done");
    sh("while systemctl is-failed --quiet shorthorn-replica@v1-0000000c; do sleep 0.2; done");
    client.stop_instance(stop(InstanceKind::Replica, name, 0)).await.unwrap();
    assert_eq!(list(client).await.len(), 3);
}

/// Tests a number of attachment that was drawn although the volume was nowhere else: the mounted device
/// continues with the next engine.
async fn attach_anew_in_use(engine: &v1::Instance, client: &mut NodeClient<Channel>) {
    sh("mount /dev/longhorn/v1 /mnt && echo before > /mnt/before && sync");
    let device = fs::read_link("/sys/block/ublkb0").unwrap();
    let all = list(client).await;
    let replicas: Vec<v1::Instance> =
        all.into_iter().filter(|instance| instance.kind() == InstanceKind::Replica).collect();
    let next = v1::StartEngineRequest { continues: 1, ..node::engine(2, &replicas, "auto") };
    client.start_engine(next).await.unwrap();
    let again = wait_for(client, "v1", |again| running(again) && again.pid != engine.pid).await;
    assert_eq!(endpoint(&again), Path::new(DEVICE));
    sh("echo after > /mnt/after && sync --data /mnt/after && echo 3 > /proc/sys/vm/drop_caches && \
        grep -qx before /mnt/before && umount /mnt && e2fsck -fn /dev/longhorn/v1");
    assert_eq!(fs::read_link("/sys/block/ublkb0").unwrap(), device, "the device was made anew");
}

/// Tests a volume that is wanted elsewhere, and whose replicas refuse the engine here. The user of the device
/// gets errors, because waiting would never end.
async fn depose_the_engine(client: &mut NodeClient<Channel>) {
    sh("mount /dev/longhorn/v1 /mnt && echo data > /mnt/file && sync");
    for id in REPLICAS {
        let request =
            v1::FenceReplicaRequest { volume: "v1".into(), replica_id: id.into(), attach: NEXT_ATTACH };
        client.fence_replica(request).await.unwrap();
    }
    sh("timeout 60 sh -c 'while test -e /dev/longhorn/v1; do sleep 0.2; done'");
    sh("if echo lost > /mnt/file && sync --data /mnt/file; then exit 1; fi");
    sh("umount /mnt && ! ls /sys/block | grep ublkb");
}

async fn stop_all(client: &mut NodeClient<Channel>) {
    let pids: Vec<u32> = list(client).await.iter().map(pid).filter(|pid| *pid != 0).collect();
    client.stop_instance(stop(InstanceKind::Engine, "v1", 2)).await.unwrap();
    assert!(!Path::new(DEVICE).exists());
    for id in REPLICAS {
        client.stop_instance(stop(InstanceKind::Replica, &format!("v1-{id}"), 0)).await.unwrap();
    }
    assert!(pids.into_iter().all(wait_for_end));
    assert!(list(client).await.is_empty());
    assert_eq!(fs::read_dir("/var/lib/shorthorn/instances/engine").unwrap().count(), 0);
}
