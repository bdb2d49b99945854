//! A node is shut down in order, with a pod on it that writes to its volume.
//!
//! The pod is in the state that kubelet and a container runtime leave. Mounts of the agent are marked with
//! _netdev, and kubelet's mount of a subPath is not: only its slice makes the container stop.

use std::time::Duration;

use anyhow::{Result, ensure};
use shorthorn_tests::{NODE, VmHost, until};
use shorthorn_vmkit::Kernel;

/// The time limit of a shutdown: systemd waits for 90 s and more for hanging units.
const DOWN_LIMIT: Duration = Duration::from_secs(80);
const LIMIT: Duration = Duration::from_secs(120);

const POD: &str = "
mkfs.ext4 -q /dev/longhorn/v1
pod=/var/lib/kubelet/pods/p1
mkdir -p /stage $pod/volumes/v1/mount $pod/volume-subpaths/v1/c/0
mount -o _netdev /dev/longhorn/v1 /stage
mount -o bind,_netdev /stage $pod/volumes/v1/mount
mkdir /stage/sub
mount --bind /stage/sub $pod/volume-subpaths/v1/c/0
# As libcontainer makes them: without the lines that stop a unit when the host shuts down.
printf '[Unit]\\nDefaultDependencies=no\\n' > /run/systemd/system/kubepods.slice
systemctl daemon-reload
systemd-run --quiet --unit=c1 --slice=kubepods.slice -p DefaultDependencies=no -p PrivateMounts=yes \\
    bash -c 'while date >> /stage/sub/log; do sync -f /stage; sleep 0.1; done'
";

#[test]
fn a_node_with_a_pod_shuts_down() -> Result<()> {
    let mut host = VmHost::start(VmHost::options(Kernel::Ublk))?;
    host.ctl("volume create v1 --size 128MiB --replicas 1")?;
    host.ctl(&format!("volume attach v1 --node {NODE}"))?;
    host.sh(&format!("systemctl enable shorthorn-agent shorthorn-controller\n{POD}"))?;
    until("container that writes", LIMIT, || {
        Ok(host.vm.run("test -s /stage/sub/log")?.success().then_some(()))
    })?;
    host.vm.orderly_reboot(DOWN_LIMIT)?;
    until("volume after the boot", LIMIT, || {
        Ok(host.vm.run("test -b /dev/longhorn/v1")?.success().then_some(()))
    })?;
    // It was unmounted: nothing had to be replayed.
    let state = host.sh("tune2fs -l /dev/longhorn/v1 | grep -E 'state|features'")?;
    ensure!(state.contains("clean") && !state.contains("needs_recovery"), "{state}");
    Ok(())
}
