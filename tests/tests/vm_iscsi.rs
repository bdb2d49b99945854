//! Tests iSCSI on a real kernel that has neither ublk nor NBD: both modules are on the kernel's command line
//! as not to be loaded. multipathd runs beside the volume. These tests fail if VMs cannot run.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use shorthorn_tests::{FioRuns, NODE, VmHost, project, until};
use shorthorn_vmkit::Kernel;

const LIMIT: Duration = Duration::from_secs(120);
const LOAD_LIMIT: Duration = Duration::from_secs(300);
const ENGINE: &str = "shorthorn-engine@v1.service";
/// Flushes the device, through a descriptor that has written nothing.
const FLUSH: &str = "python3 -c 'import os; os.fsync(os.open(\"/dev/longhorn/v1\", os.O_RDWR))'";
/// The settings of multipathd about volumes, at the path of the package.
const MULTIPATH_SNIPPET: &str = "/etc/multipath/conf.d/shorthorn.conf";
/// Settings of a host on which multipathd takes every SCSI disk, except for the machine's own.
const MULTIPATH_CONFIG: &str = "defaults {\n\tfind_multipaths greedy\n}\n\
     blacklist {\n\tdevice {\n\t\tvendor \"^QEMU\"\n\t\tproduct \".\"\n\t}\n}\n";

#[test]
fn a_volume_lives_through_kills_on_iscsi() -> Result<()> {
    let host = VmHost::start(VmHost::options(Kernel::Iscsi))?;
    host.ctl("volume create v1 --size 128MiB --replicas 2 --soft-anti-affinity")?;
    start_multipathd(&host)?;
    attach(&host)?;
    the_disk_has_its_attributes(&host)?;
    a_flush_is_one_of_all_replicas(&host)?;
    a_discard_frees_space(&host)?;
    multipathd_is_kept_away(&host)?;

    host.sh("mkfs.ext4 -q /dev/longhorn/v1 && mkdir /mnt/v1 && mount /dev/longhorn/v1 /mnt/v1")?;
    let load = FioRuns::start(
        &host,
        "--directory=/mnt/v1 --size=2m --rw=randwrite --bsrange=512-64k --bs_unaligned=0 --blockalign=512 \
         --iodepth=16 --fsync=64",
    )?;
    a_restart_keeps_the_session(&host, &load)?;
    kills(&host, &load)?;
    grows_in_use(&host, &load)?;
    load.finish(LOAD_LIMIT)?;
    host.sh("umount /mnt/v1 && e2fsck -fn /dev/longhorn/v1")?;

    host.ctl("volume detach v1")?;
    nothing_is_left(&host)?;
    // Later, a request of a reader fails, because its engine never comes back.
    no_complaints(&host, "i/o error|medium error|")?;
    a_dead_engine_leaves_nothing(&host)?;
    an_engine_in_a_container_uses_the_host(&host)?;
    no_complaints(&host, "")
}

/// Checks that the kernel has logged neither a fault of its own nor one of the `other` patterns.
fn no_complaints(host: &VmHost, other: &str) -> Result<()> {
    let complaints = host.sh(&format!("dmesg | grep -iE '{other}oops:|bug:|call trace' || true"))?;
    ensure!(complaints.is_empty(), "the kernel complains:\n{complaints}");
    Ok(())
}

fn attach(host: &VmHost) -> Result<()> {
    host.ctl(&format!("volume attach v1 --node {NODE}"))?;
    let volume = host.inspect("v1")?;
    let frontend = &volume["engine"]["frontend"];
    ensure!(frontend == "iscsi", "auto took {frontend}");
    Ok(())
}

/// Returns a command that finds the name of the volume's disk in /sys/block.
const DISK: &str = "disk=$(basename $(readlink /sys/dev/block/$(stat --format '%Hr:%Lr' /dev/longhorn/v1)))";

fn the_disk_has_its_attributes(host: &VmHost) -> Result<()> {
    host.sh("test $(blockdev --getsize64 /dev/longhorn/v1) = $((128 << 20))")?;
    for (file, expected) in [
        ("queue/write_cache", "write back"),
        ("queue/fua", "1"),
        ("queue/logical_block_size", "512"),
        ("queue/physical_block_size", "4096"),
        ("device/vendor", "SHRTHORN"),
        ("device/timeout", "604800"),
    ] {
        let found = host.sh(&format!("{DISK}; cat /sys/block/$disk/{file}"))?;
        ensure!(found.trim_end() == expected, "{file} is {found}, not {expected}");
    }
    host.sh("udevadm settle --timeout 60; number=$(stat --format '%Hr:%Lr' /dev/longhorn/v1); \
         data=/run/udev/data/b$number; grep -q SHORTHORN_VOLUME=1 $data && ! grep -q S:disk/by-id $data")?;
    // No other program can reach the target: its port is on a loopback address, and needs a password.
    let listening =
        host.sh("ss --listening --tcp --numeric --no-header | awk '{ print $4 }' | grep :1326")?;
    ensure!(listening.lines().count() == 1 && listening.starts_with("127.83."), "{listening}");
    let stored = host.sh("grep --recursive --no-filename . /etc/iscsi/nodes")?;
    ensure!(stored.contains("authmethod = CHAP") && stored.contains("node.startup = manual"), "{stored}");
    ensure!(stored.contains("username_in = v1.target"), "the target need not prove itself: {stored}");
    let anonymous = format!(
        "name=$(cat /sys/class/iscsi_session/*/targetname); \
         node=\"iscsiadm -m node -T $name -p {portal} -I thief --op\"; \
         iscsiadm -m iface -I thief --op new && $node new && \
         $node update -n node.session.auth.authmethod -v None && \
         $node update -n node.session.initial_login_retry_max -v 1 && \
         iscsiadm -m node -T $name -p {portal} -I thief --login; status=$?; \
         $node delete; iscsiadm -m iface -I thief --op delete; exit $status",
        portal = listening.trim_end()
    );
    let output = host.vm.run(&anonymous)?;
    ensure!(output.status == 24, "a login without a password: {output}");
    Ok(())
}

/// Starts multipathd, with the udev rules of its packages, as on a host with the package of the agent.
fn start_multipathd(host: &VmHost) -> Result<()> {
    let snippet = fs::read_to_string(project().join("packaging/etc/multipath.conf"))?;
    // The image switches the rules off by links to /dev/null.
    host.sh(&format!(
        "mkdir -p $(dirname {MULTIPATH_SNIPPET})\ncat >/etc/multipath.conf <<'END'\n{MULTIPATH_CONFIG}END\n\
         cat >{MULTIPATH_SNIPPET} <<'END'\n{snippet}END\n\
         find /etc/udev/rules.d /etc/modules-load.d -lname /dev/null -delete\n\
         udevadm control --reload\nsystemctl start multipathd.service"
    ))
    .map(drop)
}

/// Tests that multipathd makes no map of the disk, because of the settings of the package. Without them it
/// holds the disk, until the remedy of `check` has been run.
fn multipathd_is_kept_away(host: &VmHost) -> Result<()> {
    // multipathd may answer ok if it has no maps.
    let maps = || {
        host.sh("{ multipathd show maps raw format %n | grep --invert-match '^ok$' || true; }; multipath -ll")
    };
    let holders = || host.sh(&format!("{DISK}; ls /sys/block/$disk/holders"));
    // Unlike the events of udev, this order is answered after multipathd has looked at the disk.
    let is_refused = || -> Result<()> {
        let answer = host.sh(&format!("{DISK}; multipathd add path $disk"))?;
        let held = maps()? + &holders()?;
        ensure!(answer == "blacklisted" && held.is_empty(), "multipathd answers {answer}, and has {held}");
        let wait_s = host.sh("cat /sys/class/iscsi_session/*/recovery_tmo")?;
        ensure!(wait_s == "604800", "requests wait for the target for {wait_s} s");
        Ok(())
    };
    is_refused().context("beside the settings of the package")?;

    host.sh(&format!("rm {MULTIPATH_SNIPPET} && multipathd reconfigure"))?;
    until("map of a disk that no settings protect", LIMIT, || Ok((!holders()?.is_empty()).then_some(())))?;
    ensure!(maps()?.contains("SHRTHORN"), "the map is not of the disk: {}", maps()?);
    let remedy = host.sh("shorthorn-agent check --output json >/root/check || true; \
         jq --raw-output '.[] | select(.check == \"multipath\") | .remedy' /root/check; udevadm settle")?;
    // The map stays while udev reads it.
    until("disk without a map", LIMIT, || {
        host.sh(&remedy)?;
        Ok(holders()?.is_empty().then_some(()))
    })
    .with_context(|| format!("after the remedy {remedy}"))?;
    // multipathd has shortened the wait of this session for its target.
    host.ctl("volume detach v1")?;
    attach(host)?;
    is_refused().context("after the remedy, in a new session")?;
    host.sh("systemctl stop multipathd.service").map(drop)
}

/// Returns a counter of the requests that the engine has served.
fn served(host: &VmHost, operation: &str) -> Result<u64> {
    let text = host.sh("echo '\"io\"' | socat -t 5 - UNIX-CONNECT:/run/shorthorn/engine/v1.control")?;
    let counters: Value = serde_json::from_str(text.lines().next().unwrap_or_default())
        .with_context(|| format!("reading {text}"))?;
    counters[operation]["operations"].as_u64().with_context(|| format!("no {operation} in {text}"))
}

/// Tests that a fsync of the disk waits for the flush of the replicas.
fn a_flush_is_one_of_all_replicas(host: &VmHost) -> Result<()> {
    let before = served(host, "flush")?;
    host.sh(FLUSH)?;
    ensure!(served(host, "flush")? > before, "a fsync of the disk is not a flush of the volume");
    let units = host.replica_units("v1")?;
    let pids = host.sh(&format!("systemctl show --property MainPID --value {}", units.join(" ")))?;
    let pids = pids.split_whitespace().collect::<Vec<_>>().join(" ");
    host.sh(&format!("kill -STOP {pids}"))?;
    let waiting = host.spawn(&format!("{FLUSH} && touch /root/flushed"))?;
    // An early answer would come within 3 s.
    let early = host.vm.run("sleep 3; test -e /root/flushed");
    host.sh(&format!("kill -CONT {pids}"))?;
    host.finish(waiting, LIMIT)?;
    ensure!(!early?.success(), "a fsync was answered before the replicas had flushed");
    Ok(())
}

/// Tests that a discard reaches the replicas, and that the range reads as zeroes.
fn a_discard_frees_space(host: &VmHost) -> Result<()> {
    let allocated = || -> Result<u64> {
        Ok(host.sh("du --summarize --block-size=1 /var/lib/longhorn/replicas | cut -f1")?.trim().parse()?)
    };
    host.sh("dd if=/dev/urandom of=/dev/longhorn/v1 bs=1M count=16 oflag=direct conv=fsync status=none")?;
    let before = allocated()?;
    host.sh("blkdiscard --offset 0 --length 16MiB /dev/longhorn/v1")?;
    host.sh("cmp --bytes=16777216 /dev/longhorn/v1 /dev/zero")?;
    let freed = before.saturating_sub(allocated()?);
    ensure!(freed >= 30 << 20, "two replicas have freed {freed} bytes");
    Ok(())
}

fn engine_pid(host: &VmHost) -> Result<String> {
    host.sh(&format!("systemctl show --property MainPID --value {ENGINE}"))
}

fn lost_connections(host: &VmHost) -> Result<usize> {
    Ok(host.sh("dmesg | grep -c 'detected conn error' || true")?.trim().parse()?)
}

/// Waits until the load continues at another process than `before`.
fn serves_again(host: &VmHost, load: &FioRuns<'_>, before: &str) -> Result<()> {
    until("a new engine", LIMIT, || {
        let is_new = engine_pid(host)? != before;
        Ok((is_new && host.inspect("v1")?["engine"]["phase"] == "serving").then_some(()))
    })?;
    load.wait_for(1, LOAD_LIMIT)
}

/// Tests that an engine that ends in order hands the file over: the initiator notices nothing.
fn a_restart_keeps_the_session(host: &VmHost, load: &FioRuns<'_>) -> Result<()> {
    load.wait_for(1, LOAD_LIMIT)?;
    let (before, lost) = (engine_pid(host)?, lost_connections(host)?);
    host.sh(&format!("systemctl restart {ENGINE}"))?;
    serves_again(host, load, &before)?;
    ensure!(lost_connections(host)? == lost, "the session has lost its connection at a restart");
    Ok(())
}

/// Kills the engine, and then tgtd.
fn kills(host: &VmHost, load: &FioRuns<'_>) -> Result<()> {
    let (before, begin) = (engine_pid(host)?, Instant::now());
    host.kill(ENGINE)?;
    serves_again(host, load, &before)?;
    println!("the load continues {:.1} s after a kill of the engine", begin.elapsed().as_secs_f32());
    ensure!(lost_connections(host)? > 0, "the kill has cut no connection: the test shows nothing");
    let lost = lost_connections(host)?;
    host.sh("kill -9 $(pgrep --exact tgtd)")?;
    until("a lost connection", LIMIT, || Ok((lost_connections(host)? > lost).then_some(())))?;
    load.wait_for(1, LOAD_LIMIT)
}

fn grows_in_use(host: &VmHost, load: &FioRuns<'_>) -> Result<()> {
    host.ctl("volume expand v1 192MiB --wait")?;
    host.sh("test $(blockdev --getsize64 /dev/longhorn/v1) = $((192 << 20)) && resize2fs /dev/longhorn/v1")?;
    load.wait_for(1, LOAD_LIMIT)
}

fn nothing_is_left(host: &VmHost) -> Result<()> {
    // Joined by &&: `set -e` ignores a command that begins with an exclamation mark.
    host.sh("test ! -e /dev/longhorn/v1 && test -z \"$(ls /sys/class/iscsi_session)\" && \
         ! pgrep --exact tgtd && ! grep fuse.shorthorn /proc/mounts && test -z \"$(ls /etc/iscsi/nodes)\" && \
         test -z \"$(ls -d /run/shorthorn/engine/*.iscsi 2>/dev/null)\"")
        .map(drop)
        .context("the detached volume has left something behind")
}

/// Tests that the disk of an engine that cannot start again is removed, with its target and its session.
fn a_dead_engine_leaves_nothing(host: &VmHost) -> Result<()> {
    attach(host)?;
    let units = host.replica_units("v1")?.join(" ");
    host.sh(&format!("systemctl kill --signal STOP {units}"))?;
    let before = engine_pid(host)?;
    host.kill(ENGINE)?;
    until("another engine", LIMIT, || {
        let pid = engine_pid(host)?;
        Ok((pid != before && pid.trim() != "0").then_some(()))
    })?;
    let detach = host.spawn("shorthornctl volume detach v1 --timeout 100")?;
    until("the end of the session", LIMIT, || {
        Ok(host.vm.run("test -z \"$(ls /sys/class/iscsi_session)\"")?.success().then_some(()))
    })?;
    // The detachment stops them too, perhaps before this.
    host.sh(&format!(
        "for unit in {units}; do \
             systemctl kill --signal CONT $unit || ! systemctl is-active --quiet $unit || exit 1; \
         done"
    ))?;
    host.finish(detach, LIMIT)?;
    nothing_is_left(host)
}

/// Tests an engine in a mount namespace of its own, in which the programs of iSCSI cannot run.
fn an_engine_in_a_container_uses_the_host(host: &VmHost) -> Result<()> {
    let pid = host.sh("unshare --mount --propagation unchanged sh -c 'mount --make-private / && \
         for program in tgtd tgtadm iscsiadm; do \
             mount --bind /dev/null $(command -v $program) || exit 1; \
         done; \
         exec shorthorn-agent run c1 --dir /var/lib/longhorn/c1 --size 64MiB --replicas 1 --frontend iscsi' \
         </dev/null >/root/run.log 2>&1 & echo $!")?;
    let ended = || host.vm.run(&format!("cat /root/run.log; test -e /proc/{pid}", pid = pid.trim()));
    until("the device of the container", LIMIT, || {
        let output = ended()?;
        ensure!(output.success(), "{output}");
        Ok(host.vm.run("test -b /dev/longhorn/c1")?.success().then_some(()))
    })?;
    host.sh("grep -q shorthorn:c1 /proc/1/mounts && mkfs.ext4 -q /dev/longhorn/c1 && \
         mount /dev/longhorn/c1 /mnt/v1 && touch /mnt/v1/file && sync && umount /mnt/v1")?;
    host.sh(&format!("kill -TERM {}", pid.trim()))?;
    until("the end of the container", LIMIT, || Ok((!ended()?.success()).then_some(())))?;
    host.sh(
        "test ! -e /dev/longhorn/c1 && test -z \"$(ls /sys/class/iscsi_session)\" && ! pgrep --exact tgtd",
    )
    .map(drop)
}
