//! The packages for Debian in a virtual machine: installed, upgraded and downgraded under a load, removed and
//! purged.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use shorthorn_tests::{NODE, VmHost, build_packages, until};
use shorthorn_vmkit::{Kernel, Vm};

const LIMIT: Duration = Duration::from_secs(120);
const OLD: &str = "0.0.1";
const NEW: &str = "0.0.2";

#[test]
fn a_host_has_the_packages_from_installation_to_purge() -> Result<()> {
    let folder = tempfile::tempdir()?;
    build_packages(folder.path(), &["--version", OLD, "--format", "deb"])?;
    let upgrade = ["--version", NEW, "--format", "deb", "--package", "shorthorn-agent"];
    build_packages(folder.path(), &upgrade)?;
    // Not with VmHost::start, which installs the files by itself.
    let host = VmHost { vm: Vm::start(VmHost::options(Kernel::Ublk))? };
    host.vm.push(&[(folder.path(), "/root/packages", 0o644)])?;
    installed(&host)?;
    configured(&host)?;
    host.ctl("volume create v1 --size 32MiB --replicas 2 --soft-anti-affinity")?;
    host.ctl(&format!("volume attach v1 --node {NODE}"))?;
    only_volumes_are_marked(&host)?;
    upgraded_under_load(&host)?;
    removal_is_refused(&host)?;
    removed(&host)?;
    purged(&host)
}

/// Runs dpkg, without a flush to the disk for each file.
fn dpkg(arguments: &str) -> String {
    format!("cd /root/packages && dpkg --force-unsafe-io {arguments} 2>&1")
}

fn installed(host: &VmHost) -> Result<()> {
    host.sh(&dpkg(&format!(
        "--install shorthorn-agent_{OLD}-1_*.deb shorthorn-controller_*.deb shorthornctl_*.deb"
    )))?;
    let units = "shorthorn-agent.service shorthorn-controller.service";
    let sockets = "shorthorn-agent-csi.socket shorthorn-agent-registration.socket";
    host.sh(&format!("systemctl is-active {units} && systemctl is-enabled {units} {sockets}"))?;
    Ok(())
}

/// Changes the files like an administrator: upgrades must keep the changes.
fn configured(host: &VmHost) -> Result<()> {
    // Emulated processors are slow: a replica that needs longer than the default is not dead there.
    host.sh(&format!(
        "sed -i '1i node_name = \"{NODE}\"\\nreplica_timeout_ms = 60000' /etc/shorthorn/agent.toml && \
         echo 'SHORTHORN_CONTROLLER_ARGS=--node {NODE}=unix:///run/shorthorn/agent.sock' \
         >> /etc/shorthorn/controller.env && systemctl restart shorthorn-agent shorthorn-controller"
    ))?;
    // The controller is ready before it has heard of the agent.
    until("disk", LIMIT, || host.ctl(&format!("disk add {NODE} /var/lib/longhorn")).map(Some)).map(drop)
}

/// Checks that the rules of udev apply to disks of volumes, and to no other ublk disk: one without a mark is
/// like one of another program.
fn only_volumes_are_marked(host: &VmHost) -> Result<()> {
    let is_marked =
        "udevadm info --query=property /sys/block/ublkb0 | grep -c '^SHORTHORN_VOLUME=1\\|^UDISKS_IGNORE=1'";
    ensure!(host.sh(is_marked)? == "2", "udev did not mark the disk of a volume");
    host.sh("mv /dev/longhorn/.ublkb0 /root/mark && udevadm test /sys/block/ublkb0 2>&1 | tee /root/udev | \
             { ! grep SHORTHORN_VOLUME=1; } && grep -q ^DEVNAME=/dev/ublkb0 /root/udev && \
             mv /root/mark /dev/longhorn/.ublkb0 && udevadm trigger --settle /sys/block/ublkb0")
        .map(drop)
}

fn upgraded_under_load(host: &VmHost) -> Result<()> {
    // One short run after the other, so that the load ends soon after its stop.
    let load = host.spawn(
        "while test ! -e /root/enough; do \
         fio --name=load --filename=/dev/longhorn/v1 --size=8m --rw=randwrite --bs=16k --direct=1 \
         --ioengine=libaio --iodepth=8 --verify=crc32c --verify_fatal=1 --do_verify=1 --output=/root/fio || \
         { cat /root/fio; exit 1; }; \
         echo run >> /root/runs; done",
    )?;
    whole_run(host)?;
    let before = pids(host)?;
    for version in [NEW, OLD] {
        let agent = pid(host, "shorthorn-agent")?;
        host.sh(&dpkg(&format!("--install shorthorn-agent_{version}-1_*.deb")))?;
        host.sh(&format!(
            "dpkg-query --show --showformat='${{Version}}' shorthorn-agent | grep -qx {version}-1 && \
             systemctl is-active shorthorn-agent && \
             grep -q '^node_name = \"{NODE}\"' /etc/shorthorn/agent.toml"
        ))?;
        ensure!(pid(host, "shorthorn-agent")? != agent, "the agent is still that of the last version");
        ensure!(pids(host)? == before, "{version} has restarted an engine or a replica");
    }
    whole_run(host)?;
    // The engine is still the program that the first upgrade deleted, until it hands over.
    let program = "readlink /proc/$(systemctl show --property MainPID --value shorthorn-engine@v1)/exe";
    host.sh(&format!("{program} | grep ' (deleted)$'"))?;
    host.ctl("volume upgrade-engine v1")?;
    host.sh(&format!("{program} | grep -x /usr/bin/shorthorn-agent"))?;
    whole_run(host)?;
    host.sh("touch /root/enough")?;
    host.finish(load, LIMIT).context("fio saw an error").map(drop)
}

fn removal_is_refused(host: &VmHost) -> Result<()> {
    let refused = host.vm.run(&dpkg("--remove shorthorn-agent"))?;
    ensure!(!refused.success(), "the agent was removed under a volume: {}", refused.text());
    let text = refused.text();
    ensure!(text.contains("volumes are attached to this host: v1"), "{text}");
    host.sh("systemctl is-active shorthorn-agent && \
             dd if=/dev/longhorn/v1 of=/dev/null bs=4k count=1 iflag=direct && \
             dpkg-query --show --showformat='${db:Status-Status}' shorthorn-agent | grep -qx installed")
        .map(drop)
}

/// Lists the files of replicas with change time, size and blocks. Reading the content takes long in
/// emulation.
const DATA: &str = "find /var/lib/longhorn -type f -printf '%C@ %s %b %p\\n' | sort | \
     tee /root/data.new | grep -c '[.]img$'";

fn removed(host: &VmHost) -> Result<()> {
    host.ctl("volume detach v1")?;
    until("replicas that have stopped", LIMIT, || {
        Ok(host.sh("ls /var/lib/shorthorn/instances/replica")?.is_empty().then_some(()))
    })?;
    host.sh(&format!("{DATA} && mv /root/data.new /root/data"))?;
    host.sh(&dpkg("--remove shorthorn-agent shorthorn-controller"))?;
    host.sh(
        "test ! -e /usr/bin/shorthorn-agent && ! systemctl is-active shorthorn-agent shorthorn-controller && \
             test -e /etc/shorthorn/agent.toml && test -e /var/lib/shorthorn/disks.json",
    )
    .map(drop)
}

fn purged(host: &VmHost) -> Result<()> {
    host.sh(&dpkg("--purge shorthorn-agent shorthorn-controller shorthornctl"))?;
    let left =
        host.sh("ls -A /var/lib/shorthorn; ls -d /etc/shorthorn /usr/bin/shorthorn* 2>/dev/null || true")?;
    ensure!(left == "controller.redb", "left after the purge: {left}");
    host.sh(&format!("{DATA} && cmp /root/data /root/data.new")).map(drop)
}

/// Returns the processes of the engine and the replicas.
fn pids(host: &VmHost) -> Result<String> {
    let units = "'shorthorn-engine@*' 'shorthorn-replica@*'";
    let pids = host.sh(&format!("systemctl show --property MainPID --value {units} | grep . | sort"))?;
    ensure!(pids.lines().count() == 3 && pids.lines().all(|pid| pid != "0"), "{pids}");
    Ok(pids)
}

fn pid(host: &VmHost, unit: &str) -> Result<String> {
    host.sh(&format!("systemctl show --property MainPID --value {unit}"))
}

/// Waits for a run of fio that begins after now; all have been without an error.
fn whole_run(host: &VmHost) -> Result<()> {
    let count = || -> Result<usize> { Ok(host.sh("cat /root/runs 2>/dev/null || true")?.lines().count()) };
    let enough = count()? + 2;
    until("whole run of fio", LIMIT, || Ok((count()? >= enough).then_some(())))
        .with_context(|| host.journal())
}
