//! Tests the whole story on a real kernel with systemd: create, attach, file systems, kills under load,
//! detach, attach again, compare, delete. Two kernels have ublk, and one has only NBD.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use shorthorn_tests::{FioRuns, NODE, VmHost, until};
use shorthorn_vmkit::Kernel;

const LIMIT: Duration = Duration::from_secs(120);
const LOAD_LIMIT: Duration = Duration::from_secs(300);
/// The size of the volume until it grows. Emulated processors need 15 s to read 300 MiB from it.
const SIZE_MIB: u32 = 32;
/// The size of the volume after that: mkfs.xfs wants 300 MiB at least.
const GROWN_MIB: u32 = 320;
/// Makes few inodes. The kernel writes their empty tables beside the load, and more when the volume grows.
const MKFS_EXT4: &str = "mkfs.ext4 -q -i 65536";
/// Keeps a copy of the whole device in memory. Emulated processors compare it in a fraction of the time of a
/// sum.
const KEEP: &str = "dd if=/dev/longhorn/v1 of=/dev/shm/v1 bs=1M iflag=direct conv=sparse status=none";
const COMPARE: &str = "dd if=/dev/longhorn/v1 bs=1M iflag=direct status=none | cmp - /dev/shm/v1";
/// Compares a file on the volume with the file that was copied to it.
const FILE_IS_THERE: &str = "cmp /root/file /mnt/v1/file";

#[test]
fn a_volume_lives_through_kills_on_ublk() -> Result<()> {
    story(Kernel::Ublk, "ublk")
}

#[test]
fn a_volume_lives_through_kills_on_ublk_of_the_newest_kernel() -> Result<()> {
    story(Kernel::Newest, "ublk")
}

#[test]
fn a_volume_survives_kills_on_nbd_without_ublk() -> Result<()> {
    story(Kernel::Nbd, "nbd")
}

fn story(kernel: Kernel, frontend: &str) -> Result<()> {
    let host = VmHost::start(VmHost::options(kernel))?;
    host.ctl(&format!("volume create v1 --size {SIZE_MIB}MiB --replicas 3 --soft-anti-affinity"))?;
    host.ctl(&format!("volume attach v1 --node {NODE}"))?;
    let volume = host.inspect("v1")?;
    ensure!(volume["state"] == "attached" && volume["robustness"] == "healthy", "{volume}");
    ensure!(volume["engine"]["frontend"] == frontend, "auto took {}", volume["engine"]["frontend"]);
    host.sh("test -b /dev/longhorn/v1")?;
    has_mib(&host, SIZE_MIB)?;
    host.sh("test $(blockdev --getss /dev/longhorn/v1) = 512")?;
    // The node is made by mknod: udev's record of the device is found by its number.
    host.sh("number=$(stat --format '%Hr:%Lr' /dev/longhorn/v1); udevadm settle --timeout 60; \
         grep -q SHORTHORN_VOLUME=1 /run/udev/data/b$number")?;

    file_system(&host, "ext4", MKFS_EXT4)?;
    kills_under_load(&host)?;
    host.sh(KEEP)?;
    host.ctl("volume detach v1")?;
    host.sh("test ! -e /dev/longhorn/v1 && test -z \"$(ls /sys/block | grep ublkb)\"")?;
    host.ctl(&format!("volume attach v1 --node {NODE}"))?;
    host.sh(&format!("{COMPARE} && rm /dev/shm/v1"))?;

    grows(&host, kernel != Kernel::Ublk)?;
    // mkfs.xfs is slow on emulated processors: it runs on one kernel.
    if kernel == Kernel::Ublk {
        file_system(&host, "xfs", "mkfs.xfs -q -f")?;
    }
    a_mounted_device_stays(&host)?;
    host.ctl("volume detach v1")?;
    host.ctl("volume delete v1 --yes")?;
    nothing_is_left(&host)
}

fn file_system(host: &VmHost, name: &str, mkfs: &str) -> Result<()> {
    host.sh(&format!("{mkfs} /dev/longhorn/v1 && mkdir -p /mnt/v1 && mount /dev/longhorn/v1 /mnt/v1"))
        .with_context(|| format!("{name} on the volume"))?;
    host.sh("head -c 8M /dev/urandom > /root/file && cp /root/file /mnt/v1/file && sync")?;
    host.sh(&format!("umount /mnt/v1 && mount /dev/longhorn/v1 /mnt/v1 && {FILE_IS_THERE}"))?;
    host.sh(&format!("fstrim /mnt/v1 && {FILE_IS_THERE} && umount /mnt/v1")).map(drop)
}

/// Kills a replica, the agent, and the engine twice with SIGKILL, under a verified load on a mounted file
/// system.
fn kills_under_load(host: &VmHost) -> Result<()> {
    host.sh("mount /dev/longhorn/v1 /mnt/v1")?;
    let load = FioRuns::start_nice(
        host,
        "--directory=/mnt/v1 --size=2m --rw=randwrite --bsrange=512-64k --bs_unaligned=0 --blockalign=512 \
         --iodepth=16 --fsync=64",
    )?;
    load.wait_for(1, LOAD_LIMIT)?;
    let replicas = host.replica_units("v1")?;
    ensure!(replicas.len() == 3, "{replicas:?}");
    kill_under_requests(host, &replicas[0])?;
    until("volume that is degraded", LIMIT, || {
        Ok((host.inspect("v1")?["robustness"] == "degraded").then_some(()))
    })?;
    kill_under_requests(host, "shorthorn-agent.service")?;
    for _ in 0..2 {
        let before = engine_pid(host)?;
        kill_under_requests(host, "shorthorn-engine@v1.service")?;
        until("new engine", LIMIT, || {
            Ok((engine_pid(host)? != before && phase_is_serving(host)?).then_some(()))
        })?;
    }
    load.wait_for(1, LOAD_LIMIT)?;
    load.finish(LOAD_LIMIT)?;
    host.sh(&format!("{FILE_IS_THERE} && umount /mnt/v1")).map(drop)
}

/// Kills the main process of a unit when requests to the device are not answered yet.
fn kill_under_requests(host: &VmHost, unit: &str) -> Result<()> {
    host.sh(&format!(
        "pid=$(systemctl show --property MainPID --value '{unit}'); test \"$pid\" -gt 1; \
         inflight=/sys/dev/block/$(stat --format %Hr:%Lr /dev/longhorn/v1)/inflight; for n in $(seq 1200); \
         do read reads writes <$inflight; if ((reads + writes)); then kill -9 \"$pid\"; exit; fi; sleep \
         0.05; done; exit 1"
    ))
    .with_context(|| format!("no request is in flight, or {unit} does not run"))
    .map(drop)
}

/// Tests that a mounted ext4 gets more room: at once if the device can follow, else after the next attach,
/// and that is reported.
fn grows(host: &VmHost, in_use: bool) -> Result<()> {
    host.sh("mount /dev/longhorn/v1 /mnt/v1")?;
    let outcome = host.vm.run(&format!("shorthornctl volume expand v1 {GROWN_MIB}MiB --wait"))?;
    if in_use {
        ensure!(outcome.status == 0, "{outcome}");
    } else {
        // The driver of Linux 6.12 cannot change the size of a device.
        ensure!(outcome.status != 0 && outcome.to_string().contains("attached again"), "{outcome}");
        has_mib(host, SIZE_MIB)?;
        host.sh("umount /mnt/v1")?;
        host.ctl("volume detach v1")?;
        host.ctl(&format!("volume attach v1 --node {NODE}"))?;
        host.sh("mount /dev/longhorn/v1 /mnt/v1")?;
    }
    has_mib(host, GROWN_MIB)?;
    host.sh(&format!(
        "resize2fs /dev/longhorn/v1 && test $(df --block-size=1M --output=size /mnt/v1 | tail -1) -gt {}",
        GROWN_MIB - 32
    ))?;
    host.sh(&format!("{FILE_IS_THERE} && umount /mnt/v1 && e2fsck -fn /dev/longhorn/v1")).map(drop)
}

fn has_mib(host: &VmHost, mib: u32) -> Result<()> {
    host.sh(&format!("test $(blockdev --getsize64 /dev/longhorn/v1) = $(({mib} << 20))")).map(drop)
}

fn engine_pid(host: &VmHost) -> Result<String> {
    host.sh("systemctl show --property MainPID --value shorthorn-engine@v1.service")
}

fn phase_is_serving(host: &VmHost) -> Result<bool> {
    Ok(host.inspect("v1")?["engine"]["phase"] == "serving")
}

/// Tests that a device in use is not removed; the detach is pending, and happens when the device is free.
fn a_mounted_device_stays(host: &VmHost) -> Result<()> {
    host.sh("mount /dev/longhorn/v1 /mnt/v1")?;
    let refused = host.vm.run("shorthornctl volume detach v1 --timeout 3")?;
    ensure!(refused.status == 4, "a mounted volume was detached: {refused}");
    host.sh("touch /mnt/v1/still-there && sync && test -b /dev/longhorn/v1 && umount /mnt/v1").map(drop)
}

fn nothing_is_left(host: &VmHost) -> Result<()> {
    host.sh("test -z \"$(ls /var/lib/longhorn/replicas)\"")?;
    host.sh("test -z \"$(ls -A /dev/longhorn)\"")?;
    let units =
        host.sh("systemctl list-units --plain --no-legend 'shorthorn-engine@*' 'shorthorn-replica@*'")?;
    ensure!(units.trim().is_empty(), "{units}");
    Ok(())
}
