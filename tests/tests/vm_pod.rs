//! Tests the agent in a container of a host that has nothing of Shorthorn, on a kernel without ublk and NBD.
//! These tests fail if VMs cannot run.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use shorthorn_api::csi::v1;
use shorthorn_api::csi::v1::node_client::NodeClient;
use shorthorn_api::csi::v1::volume_capability::{AccessMode, AccessType, MountVolume, access_mode};
use shorthorn_testkit::free_port;
use shorthorn_tests::{
    Caller, FioRuns, NODE, VmHost, kill_agent_pod, push_agent_image, start_agent_pod, until,
};
use shorthorn_vmkit::{HOST_SIDE, Kernel};

const LIMIT: Duration = Duration::from_secs(120);
const LOAD_LIMIT: Duration = Duration::from_secs(300);
const CSI_PORT: u16 = 9502;
const CSI: &str = "/var/lib/kubelet/plugins/csi.shorthorn.io/csi.sock";
const STAGING: &str = "/var/lib/kubelet/plugins/kubernetes.io/csi/csi.shorthorn.io/1/globalmount";
const TARGET: &str = "/var/lib/kubelet/pods/1/volumes/kubernetes.io~csi/v1/mount";
const ENGINE: &str = "shorthorn-engine@v1.service";
/// The settings of all pods. No other node reads the replicas. Emulated processors are slow: a replica that
/// needs longer than the default is not dead there.
const SETTINGS: &str = "disks = [\"/var/lib/longhorn\"]\ndata_address = \"\"\nreplica_timeout_ms = 60000\n";
/// The files with which a package would make this host a node.
const PACKAGED: &str = "/usr/bin/shorthorn-agent /usr/lib/systemd/system/shorthorn* \
     /usr/lib/systemd/system/kubepods.slice.d /usr/lib/systemd/system/var-lib-kubelet-pods-.mount.d \
     /usr/lib/tmpfiles.d/shorthorn.conf /usr/lib/modules-load.d/shorthorn.conf \
     /usr/lib/modprobe.d/shorthorn.conf /usr/lib/udev/rules.d/59-shorthorn.rules";

#[test]
fn a_volume_outlives_the_container_of_its_agent() -> Result<()> {
    let host = VmHost::bare(VmHost::options(Kernel::Iscsi).command_limit(LOAD_LIMIT))?;
    host.sh(&format!("rm -rf {PACKAGED}; systemctl daemon-reload; udevadm control --reload"))?;
    host.sh("mkdir -p /var/lib/kubelet/plugins_registry /var/lib/kubelet/pods")?;
    push_agent_image(&host, SETTINGS)?;
    start_agent(&host, "pod-1")?;
    start_controller(&host)?;
    let kubelet = kubelet(&host)?;

    host.ctl("volume create v1 --size 128MiB --replicas 2 --soft-anti-affinity")?;
    host.ctl(&format!("volume attach v1 --node {NODE}"))?;
    let volume = host.inspect("v1")?;
    ensure!(volume["engine"]["frontend"] == "iscsi", "{volume}");
    publish(&kubelet)?;
    host.sh(&format!("findmnt --types ext4 {STAGING} && findmnt --types ext4 {TARGET}"))
        .context("the mounts are not those of the host")?;
    the_host_knows_the_disk(&host)?;

    let load = FioRuns::start(
        &host,
        &format!(
            "--directory={TARGET} --size=2m --rw=randwrite --bsrange=512-64k --bs_unaligned=0 \
             --blockalign=512 --iodepth=16 --fsync=64"
        ),
    )?;
    let engine = engine_pid(&host)?;
    load.wait_for(1, LOAD_LIMIT)?;
    kill_agent_pod(&host, "pod-1")?;
    load.wait_for(1, LOAD_LIMIT).context("without an agent")?;
    start_agent(&host, "pod-2")?;
    ensure!(engine_pid(&host)? == engine, "the engine was started again");
    load.wait_for(1, LOAD_LIMIT)?;
    load.finish(LOAD_LIMIT)?;

    unpublish(&kubelet)?;
    host.ctl("volume detach v1")?;
    nothing_is_left(&host)?;
    let complaints = host.sh("dmesg | grep -iE 'i/o error|oops:|bug:|call trace' || true")?;
    ensure!(complaints.is_empty(), "the kernel complains:\n{complaints}");
    a_host_with_the_package_is_left_alone(&host)
}

/// Starts a container of the agent, and waits until kubelet can call it.
fn start_agent(host: &VmHost, name: &str) -> Result<()> {
    start_agent_pod(host, name, NODE)?;
    let served = format!("journalctl --quiet --unit={name} --grep='CSI is served'");
    until("agent", LIMIT, || Ok(host.vm.run(&served)?.success().then_some(())))
        .with_context(|| host.journal())
}

fn start_controller(host: &VmHost) -> Result<()> {
    host.sh(&format!(
        "systemd-run --quiet --unit=controller --property=Type=notify shorthorn-controller serve \
         --store /root/controller.redb --node {NODE}=unix:///run/shorthorn/agent.sock"
    ))?;
    until("disk of the settings", LIMIT, || {
        let nodes = host.vm.run("shorthornctl node inspect node1")?;
        Ok(nodes.text().contains("/var/lib/longhorn").then_some(()))
    })
    .with_context(|| host.journal())
}

/// Returns a client of the CSI socket.
fn kubelet(host: &VmHost) -> Result<Caller> {
    host.sh(&format!(
        "systemd-run --quiet --unit=relay socat \
         TCP-LISTEN:{CSI_PORT},bind={HOST_SIDE},fork,reuseaddr UNIX-CONNECT:{CSI}"
    ))?;
    let port = free_port()?;
    host.vm.forward(port, CSI_PORT)?;
    host.sh(&format!("mkdir -p $(dirname {STAGING}) $(dirname {TARGET})"))?;
    Caller::tcp(port)
}

fn capability() -> v1::VolumeCapability {
    v1::VolumeCapability {
        access_type: Some(AccessType::Mount(MountVolume { fs_type: "ext4".into(), ..Default::default() })),
        access_mode: Some(AccessMode { mode: access_mode::Mode::SingleNodeWriter.into() }),
    }
}

fn publish(kubelet: &Caller) -> Result<()> {
    let stage = v1::NodeStageVolumeRequest {
        volume_id: "v1".into(),
        staging_target_path: STAGING.into(),
        volume_capability: Some(capability()),
        ..Default::default()
    };
    kubelet.call(stage, LIMIT, async |channel, request| {
        NodeClient::new(channel).node_stage_volume(request).await
    })?;
    let publish = v1::NodePublishVolumeRequest {
        volume_id: "v1".into(),
        staging_target_path: STAGING.into(),
        target_path: TARGET.into(),
        volume_capability: Some(capability()),
        ..Default::default()
    };
    kubelet
        .call(publish, LIMIT, async |channel, request| {
            NodeClient::new(channel).node_publish_volume(request).await
        })
        .map(drop)
}

fn unpublish(kubelet: &Caller) -> Result<()> {
    let unpublish = v1::NodeUnpublishVolumeRequest { volume_id: "v1".into(), target_path: TARGET.into() };
    kubelet.call(unpublish, LIMIT, async |channel, request| {
        NodeClient::new(channel).node_unpublish_volume(request).await
    })?;
    let unstage =
        v1::NodeUnstageVolumeRequest { volume_id: "v1".into(), staging_target_path: STAGING.into() };
    kubelet
        .call(unstage, LIMIT, async |channel, request| {
            NodeClient::new(channel).node_unstage_volume(request).await
        })
        .map(drop)
}

/// Tests that the rule of udev and the units work without the package.
fn the_host_knows_the_disk(host: &VmHost) -> Result<()> {
    host.sh("udevadm settle --timeout 60; number=$(stat --format '%Hr:%Lr' /dev/longhorn/v1); \
         grep -q SHORTHORN_VOLUME=1 /run/udev/data/b$number")?;
    let agents = host.sh("readlink /proc/$(pgrep --full 'shorthorn-agent serv[e]')/ns/mnt /proc/1/ns/mnt")?;
    let namespaces: Vec<_> = agents.lines().collect();
    ensure!(namespaces.len() == 2 && namespaces[0] == namespaces[1], "{agents}");
    let program = host.sh(&format!("readlink /proc/{}/exe", engine_pid(host)?.trim()))?;
    ensure!(program.trim() == "/var/lib/shorthorn/bin/shorthorn-agent", "{program}");
    // The generator runs at each reload of systemd.
    host.sh("systemctl is-active shorthorn-order.target remote-fs-pre.target && \
             grep -q After= /run/systemd/generator/shorthorn-replica@.service.d/disks.conf")
        .map(drop)
}

fn engine_pid(host: &VmHost) -> Result<String> {
    host.sh(&format!("systemctl show --property MainPID --value {ENGINE}"))
}

fn nothing_is_left(host: &VmHost) -> Result<()> {
    host.sh(&format!(
        "test ! -e /dev/longhorn/v1 && test -z \"$(ls /sys/class/iscsi_session)\" && \
         test -z \"$(pgrep --exact tgtd)\" && test -z \"$(ls /etc/iscsi/nodes)\" && \
         test -z \"$(grep -E 'fuse.shorthorn|{STAGING}|{TARGET}' /proc/mounts)\""
    ))
    .map(drop)
    .context("the detached volume has left something behind")
}

fn a_host_with_the_package_is_left_alone(host: &VmHost) -> Result<()> {
    kill_agent_pod(host, "pod-2")?;
    host.sh("ln -s /bin/true /usr/bin/shorthorn-agent")?;
    let refused = host.vm.run("python3 /root/run.py serve-on-host --address 127.0.0.1")?;
    ensure!(!refused.success() && refused.to_string().contains("remove the package"), "{refused}");
    let outside = host.vm.run("/root/image/usr/bin/shorthorn-agent serve-on-host --address 127.0.0.1")?;
    ensure!(!outside.success() && outside.to_string().contains("hostPID"), "{outside}");
    Ok(())
}
