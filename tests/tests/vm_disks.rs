//! An empty device of a virtual machine becomes a disk. `disk init` has systemd mount it, at once and at each
//! later boot before its replicas start.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use shorthorn_tests::{NODE, VmHost, project, until};
use shorthorn_vmkit::{DataDisk, Kernel};

const LIMIT: Duration = Duration::from_secs(120);
/// The time limit of a shutdown: systemd waits for 90 s and more for hanging units.
const DOWN_LIMIT: Duration = Duration::from_secs(80);
const GENERATOR: &str = "system-generators/shorthorn-generator";
const PLAN: &str = "/root/disks.toml";
/// Prints a sum of the whole device.
const SUM: &str = "dd if=/dev/longhorn/v1 bs=1M iflag=direct status=none | md5sum";

#[test]
fn a_disk_is_mounted_by_its_unit_before_its_replicas_start() -> Result<()> {
    let mut host = VmHost::bare(VmHost::options(Kernel::Ublk).data_disk(DataDisk::blank(2048)))?;
    started(&host)?;
    let mount = initialised(&host)?;
    host.ctl("volume create v1 --size 32MiB --replicas 1")?;
    host.ctl(&format!("volume attach v1 --node {NODE}"))?;
    host.sh("dd if=/dev/urandom of=/dev/longhorn/v1 bs=1M count=32 oflag=direct status=none")?;
    let (sum, replica) = (host.sh(SUM)?, replica(&host)?);
    comes_after(&host, &replica, &mount)?;

    host.vm.orderly_reboot(DOWN_LIMIT)?;
    until("volume after the boot", LIMIT, || {
        Ok(host.vm.run("test -b /dev/longhorn/v1")?.success().then_some(()))
    })
    .with_context(|| host.journal())?;
    is_mounted(&host, &mount)?;
    comes_after(&host, &replica, &mount)?;
    ensure!(host.sh(SUM)? == sum, "the volume has other data after the boot");
    Ok(())
}

/// Starts agent and controller, now and at each boot, with the order of mounts and replicas that the package
/// has.
fn started(host: &VmHost) -> Result<()> {
    let generator = project().join("systemd").join(GENERATOR);
    host.vm.push(&[(generator.as_path(), format!("/usr/lib/systemd/{GENERATOR}").as_str(), 0o755)])?;
    // Emulated processors are slow: a replica that needs longer than the default is not dead there.
    host.sh(&format!(
        "mkdir -p /etc/shorthorn && printf 'node_name = \"{NODE}\"\\nreplica_timeout_ms = 60000\\n' \
         > /etc/shorthorn/agent.toml && \
         echo 'SHORTHORN_CONTROLLER_ARGS=--node {NODE}=unix:///run/shorthorn/agent.sock' \
         > /etc/shorthorn/controller.env && \
         systemd-tmpfiles --create shorthorn.conf && systemctl daemon-reload && udevadm control --reload && \
         systemctl enable --now shorthorn-agent shorthorn-controller"
    ))
    .map(drop)
}

/// Makes the device a disk as an operator does; the unit of its mount.
fn initialised(host: &VmHost) -> Result<String> {
    let device = DataDisk::guest_path();
    host.sh(&format!(
        "shorthorn-agent disk discover {device} --file {PLAN} && sed -i 's/^init = false/init = true/' {PLAN}"
    ))?;
    let printed = host.sh(&format!("shorthorn-agent disk init {PLAN}"))?;
    ensure!(printed.contains("is a disk of this node"), "{printed}");
    let point = host.sh(&format!("findmnt --noheadings --output TARGET --source {device}"))?;
    ensure!(printed.contains(&format!("is mounted at {point}")), "{printed}");
    let mount = host.sh(&format!("systemd-escape --path --suffix=mount {point}"))?;
    ensure!(host.sh(&format!("systemctl is-enabled '{mount}'"))? == "enabled", "{mount} is not enabled");
    is_mounted(host, &mount)?;
    until("disk of the node", LIMIT, || {
        let disks = host.ctl("disk list")?;
        ensure!(disks.contains(&point), "{disks}");
        Ok(Some(()))
    })?;
    // Once more changes nothing.
    let printed = host.sh(&format!("shorthorn-agent disk init {PLAN}"))?;
    ensure!(printed.contains("is mounted at") && printed.contains("already"), "{printed}");
    Ok(mount)
}

/// Checks that systemd has mounted a unit, and its file system is the one of the reviewed file.
fn is_mounted(host: &VmHost, mount: &str) -> Result<()> {
    host.sh(&format!("systemctl is-active --quiet '{mount}'"))?;
    let point = property(host, mount, "Where")?;
    let fragment = property(host, mount, "FragmentPath")?;
    ensure!(Path::new(&fragment).starts_with("/etc/systemd/system"), "{fragment}");
    let uuid = host.sh(&format!("findmnt --noheadings --output UUID --mountpoint {point}"))?;
    host.sh(&format!("grep -qx 'uuid = \"{uuid}\"' {PLAN} && test -e {point}/longhorn-disk.cfg")).map(drop)
}

/// Checks that a replica is ordered after the mount, and began after it.
fn comes_after(host: &VmHost, replica: &str, mount: &str) -> Result<()> {
    let after = property(host, replica, "After")?;
    // systemctl quotes a name with backslashes.
    let name = |unit: &str| unit.trim_matches('"').replace("\\\\", "\\");
    ensure!(
        after.split(' ').any(|unit| name(unit) == mount),
        "{replica} is not ordered after {mount}: {after}"
    );
    let time_us = |unit: &str, name: &str| -> Result<u64> { Ok(property(host, unit, name)?.parse()?) };
    let mounted_us = time_us(mount, "ActiveEnterTimestampMonotonic")?;
    let began_us = time_us(replica, "InactiveExitTimestampMonotonic")?;
    ensure!(0 < mounted_us && mounted_us < began_us, "mounted at {mounted_us} us, replica at {began_us} us");
    Ok(())
}

/// Returns the unit of the only replica.
fn replica(host: &VmHost) -> Result<String> {
    let units = host.replica_units("v1")?;
    ensure!(units.len() == 1, "{units:?}");
    Ok(units[0].clone())
}

fn property(host: &VmHost, unit: &str, name: &str) -> Result<String> {
    host.sh(&format!("systemctl show --property {name} --value '{unit}'"))
}
