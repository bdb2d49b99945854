//! The packages for Debian in a virtual machine: apt installs them, upgrades them under a load, removes and
//! purges them. dpkg downgrades them under the load.
//!
//! The machine becomes a node by the commands of the documentation, and by no others.

use std::collections::VecDeque;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use shorthorn_testkit::docs::lines_run_by;
use shorthorn_tests::{FioRuns, NODE, VmHost, build_packages, build_packages_of, other_build, until};
use shorthorn_vmkit::{Kernel, Vm};

const TEST: &str = "tests/tests/vm_packages.rs";
const LIMIT: Duration = Duration::from_secs(120);
/// The longest that apt takes for all packages, beside a load on a busy machine.
const APT_LIMIT: Duration = Duration::from_secs(600);
const OLD: &str = "0.0.1";
const NEW: &str = "0.0.2";

const PACKAGES: [&str; 3] = ["shorthorn-agent", "shorthorn-controller", "shorthornctl"];
/// The repository in the machine: apt reads it as a user of its own. Each version has a folder.
const REPOSITORY: &str = "/srv/packages";
/// The commands that lead from the packages to a node of the controller: two on the node, one in the cluster.
const COMMANDS: [&str; 3] =
    ["apt install ./shorthorn-agent_", "shorthorn-agent setup ", "shorthornctl node add "];
/// The exit codes of a setup: 1 if a check warns, as of the clock, which nothing synchronises here.
const SET_UP: &[i32] = &[0, 1];
/// The exit codes of `systemctl status`: 3 if a unit does not run, as the sockets of CSI on a host without
/// kubelet.
const STATUS: &[i32] = &[0, 3];

#[test]
fn a_host_has_the_packages_from_installation_to_purge() -> Result<()> {
    let folder = tempfile::tempdir()?;
    repository(folder.path())?;
    // Not with VmHost::start, which installs the files by itself.
    let options = VmHost::options(Kernel::Ublk).command_limit(APT_LIMIT);
    let host = VmHost { vm: Vm::start(options)? };
    host.vm.push(&[(folder.path(), REPOSITORY, 0o755)])?;
    surroundings(&host)?;
    installed(&host)?;
    first_volume(&host)?;
    set_up_again(&host)?;
    configured(&host)?;
    host.ctl("volume create v1 --size 32MiB --replicas 2 --soft-anti-affinity")?;
    host.ctl(&format!("volume attach v1 --node {NODE}"))?;
    only_volumes_are_marked(&host)?;
    upgraded_under_load(&host)?;
    removal_is_refused(&host)?;
    removed(&host)?;
    purged(&host)
}

/// Makes a repository with two versions of the packages. The programs of the new one are another build.
fn repository(folder: &Path) -> Result<()> {
    build_packages(&folder.join(OLD), &["--version", OLD, "--format", "deb"])?;
    let programs = tempfile::tempdir()?;
    let programs = other_build(programs.path())?;
    build_packages_of(&programs, &folder.join(NEW), &["--version", NEW, "--format", "deb"])?;
    let index = Command::new("dpkg-scanpackages").args(["--multiversion", "."]).current_dir(folder).output();
    let index = index.context("running dpkg-scanpackages: install the package dpkg-dev")?;
    ensure!(index.status.success(), "{}", String::from_utf8_lossy(&index.stderr));
    Ok(fs::write(folder.join("Packages"), index.stdout)?)
}

/// Runs apt-get. The machine has no network to download from.
fn apt(arguments: &str) -> String {
    format!("DEBIAN_FRONTEND=noninteractive apt-get --yes -o Dpkg::Use-Pty=0 {arguments} 2>&1")
}

/// The commands of a page for this test, in their order.
struct Page<'a> {
    host: &'a VmHost,
    name: &'static str,
    lines: VecDeque<String>,
}

impl<'a> Page<'a> {
    fn read(host: &'a VmHost, name: &'static str) -> Result<Page<'a>> {
        Ok(Page { host, name, lines: lines_run_by(name, TEST)?.into() })
    }

    /// Replaces a word of the page.
    fn set(&mut self, word: &str, value: &str) {
        self.lines.iter_mut().for_each(|line| *line = line.replace(word, value));
    }

    /// Takes the next command, which has to begin with `start`.
    fn next(&mut self, start: &str) -> Result<String> {
        let line = self.lines.pop_front().with_context(|| format!("{} lacks {start:?}", self.name))?;
        ensure!(line.starts_with(start), "{} has {line:?}, and {start:?} is tried next", self.name);
        println!("{}: {line}", self.name);
        Ok(line)
    }

    /// Runs the next command in the folder of the packages. It has to succeed. Returns both of its outputs.
    fn run(&mut self, start: &str) -> Result<String> {
        self.run_ending(start, &[0])
    }

    /// Runs the next command, which ends with one of these codes.
    fn run_ending(&mut self, start: &str, codes: &[i32]) -> Result<String> {
        let line = self.next(start)?;
        let output = self.host.vm.run(&format!("cd {REPOSITORY}/{OLD}\n{{ {line}\n}} 2>&1"))?;
        ensure!(codes.contains(&output.status), "{line}: {output}\n{}", self.host.journal());
        Ok(output.text())
    }

    /// Runs the next command at a terminal.
    fn run_at_terminal(&mut self, start: &str) -> Result<()> {
        let line = self.next(start)?;
        self.host
            .sh(&format!(
                "cat >/root/line <<'END'\n{line}\nEND\n\
                 script --quiet --return --command 'bash -e /root/line' /dev/null </dev/null"
            ))
            .map(drop)
    }

    /// Ends the page, whose commands have to be used up.
    fn finish(self) -> Result<()> {
        ensure!(self.lines.is_empty(), "{} has more: {:?}", self.name, self.lines);
        Ok(())
    }
}

/// Checks that a text has all these words.
fn has(told: &str, words: &[&str]) -> Result<()> {
    let missing = words.iter().find(|word| !told.contains(**word));
    ensure!(missing.is_none(), "{missing:?} is not in:\n{told}");
    Ok(())
}

/// Gives the machine a default route, and a repository from which apt would take further packages.
fn surroundings(host: &VmHost) -> Result<()> {
    host.sh(&format!(
        "ip route add default via 10.0.2.2\n\
         echo force-unsafe-io >/etc/dpkg/dpkg.cfg.d/no-flush-of-each-file\n\
         echo 'deb [trusted=yes] file:{REPOSITORY} ./' >/etc/apt/sources.list\n\
         apt-get update 2>&1"
    ))?;
    let plan = host.sh(&apt("install --simulate --install-recommends shorthorn-agent"))?;
    for package in ["shorthorn-agent", "shorthornctl"] {
        has(&plan, &[&format!("Inst {package} ({NEW}-1 ")])?;
    }
    Ok(())
}

/// Makes the machine a node as the page says.
fn installed(host: &VmHost) -> Result<()> {
    let mut page = Page::read(host, "docs/install-hosts.md")?;
    let checks = page.lines.iter().position(|line| line.starts_with("shorthornctl node list"));
    ensure!(checks == Some(COMMANDS.len()), "not only {COMMANDS:?}: {:?}", page.lines);
    let [packages, setup, node] = COMMANDS;
    page.run(packages)?;
    let told = page.run_ending(setup, SET_UP)?;
    has(&told, &["wrote /etc/shorthorn/agent.toml", "enabled and started"])?;
    page.run(node)?;
    until_ready(host)?;
    has(&page.run("shorthornctl node list")?, &[NODE, "ublk", "/var/lib/longhorn"])?;
    has(&page.run("shorthornctl doctor")?, &["passed  agents answer"])?;
    page.finish()?;

    has_version(host, OLD)?;
    let units = "shorthorn-agent.service shorthorn-controller.service";
    let sockets = "shorthorn-agent-csi.socket shorthorn-agent-registration.socket";
    host.sh(&format!("systemctl is-active {units} && systemctl is-enabled {units} {sockets}"))?;
    Ok(())
}

/// Waits until the controller knows the agent and its disk.
fn until_ready(host: &VmHost) -> Result<()> {
    until("ready node", LIMIT, || {
        let list: Value = serde_json::from_str(&host.ctl("node list -o json")?)?;
        let conditions = list[0]["conditions"].as_array().context("no node")?;
        let is_ready = conditions.iter().any(|one| one["type"] == "Ready" && one["status"] == true);
        ensure!(is_ready && list.to_string().contains("/var/lib/longhorn"), "{list:#}");
        Ok(Some(()))
    })
}

/// Has a file on a replicated volume, as the page says: through the death of the engine and an expansion.
fn first_volume(host: &VmHost) -> Result<()> {
    let mut page = Page::read(host, "docs/first-volume.md")?;
    has(&page.run("shorthornctl node list")?, &[NODE])?;
    page.run("shorthornctl volume create v1")?;
    page.run("shorthornctl volume attach v1")?;
    page.run("mkfs.ext4 /dev/longhorn/v1 && mount")?;
    host.sh("echo kept >/mnt/file && sync")?;
    let told = page.run("shorthornctl volume inspect v1")?;
    has(&told, &["State", "attached", "Robustness", "healthy", "View", "REPLICA"])?;
    let replicas = host.replica_units("v1")?;
    ensure!(replicas.len() == 3, "three replicas, all on this node: {replicas:?}");
    has(&page.run("systemctl status")?, &["shorthorn-engine@v1.service", replicas[0].as_str()])?;
    units_and_logs(host, &replicas[0])?;

    page.run("systemctl kill")?;
    host.sh("dd if=/dev/longhorn/v1 of=/dev/null bs=4k count=1 iflag=direct && grep -qx kept /mnt/file")?;
    let why = page.next("shorthornctl volume why v1")?;
    until("healthy volume", LIMIT, || has(&host.vm.sh(&why)?, &["Volume v1 is healthy"]).map(Some))?;
    page.run("umount")?;
    page.run("shorthornctl volume detach v1")?;
    page.run("shorthornctl volume expand v1 1GiB")?;
    page.run("shorthornctl volume attach v1")?;
    page.run_at_terminal("e2fsck -f /dev/longhorn/v1 && resize2fs")?;
    host.sh("mount /dev/longhorn/v1 /mnt && grep -qx kept /mnt/file && umount /mnt && \
             test $(blockdev --getsize64 /dev/longhorn/v1) = $((1 << 30))")?;
    page.run("shorthornctl volume detach v1")?;
    page.run("shorthornctl volume delete v1 --yes")?;
    page.finish()
}

/// Runs the commands of pages about units and their logs.
fn units_and_logs(host: &VmHost, replica: &str) -> Result<()> {
    let mut page = Page::read(host, "docs/troubleshooting.md")?;
    let replica = replica.trim_start_matches("shorthorn-replica@").trim_end_matches(".service");
    page.set("NAME-ID", replica);
    page.set("NAME", "v1");
    for unit in ["shorthorn-engine@v1", "shorthorn-replica@v1", "shorthorn-agent"] {
        let told = page.run(&format!("journalctl -u {unit}"))?;
        ensure!(told.lines().count() > 1 && !told.contains("No entries"), "{unit}: {told}");
    }
    let status = page.run_ending("systemctl status shorthorn-agent", STATUS)?;
    has(&status, &["Active: active (running)"])?;
    page.run("systemctl enable --now shorthorn-agent-csi.socket")?;
    page.run("systemctl restart shorthorn-agent")?;
    page.finish()?;
    let mut page = Page::read(host, "docs/daily.md")?;
    page.run("journalctl -u shorthorn-agent -u")?;
    host.sh(&format!("test -s {REPOSITORY}/{OLD}/NODE.log"))?;
    page.finish()
}

/// Repeats the two commands of a node of a cluster, which find everything done.
fn set_up_again(host: &VmHost) -> Result<()> {
    let mut page = Page::read(host, "docs/install.md")?;
    has(&page.run("apt install ./shorthorn-agent_")?, &["0 newly installed"])?;
    let told = page.run_ending("shorthorn-agent setup", SET_UP)?;
    has(&told, &["has these settings already", "enabled and started"])?;
    page.finish()
}

/// Changes the files like an administrator: upgrades must keep the changes.
fn configured(host: &VmHost) -> Result<()> {
    // Emulated processors are slow: a replica that needs longer than the default is not dead there.
    host.sh(&format!(
        "sed -i '1i replica_timeout_ms = 60000' /etc/shorthorn/agent.toml && \
         echo 'SHORTHORN_CONTROLLER_ARGS=--node {NODE}=unix:///run/shorthorn/agent.sock' \
         >> /etc/shorthorn/controller.env && systemctl restart shorthorn-agent shorthorn-controller"
    ))?;
    until_ready(host)
}

/// Checks that the rules of udev apply to disks of volumes, and to no other ublk disk. A disk without a mark
/// stands for another program's.
fn only_volumes_are_marked(host: &VmHost) -> Result<()> {
    let is_marked =
        "udevadm info --query=property /sys/block/ublkb0 | grep -c '^SHORTHORN_VOLUME=1\\|^UDISKS_IGNORE=1'";
    ensure!(host.sh(is_marked)? == "2", "udev did not mark the disk of a volume");
    host.sh("mv /dev/longhorn/.ublkb0 /root/mark && udevadm test /sys/block/ublkb0 2>&1 | tee /root/udev | \
             { ! grep SHORTHORN_VOLUME=1; } && grep -q ^DEVNAME=/dev/ublkb0 /root/udev && \
             mv /root/mark /dev/longhorn/.ublkb0 && udevadm trigger --settle /sys/block/ublkb0")
        .map(drop)
}

/// Upgrades the packages, lets the engine hand over to the new program, and downgrades them.
fn upgraded_under_load(host: &VmHost) -> Result<()> {
    // Without a rate it takes the processors that apt needs.
    let load = FioRuns::start(
        host,
        "--filename=/dev/longhorn/v1 --size=2m --rw=randwrite --bs=16k --iodepth=8 --rate_iops=20",
    )?;
    whole_run(&load)?;
    changed_under_load(host, NEW, &apt("upgrade"))?;
    whole_run(&load)?;
    // The engine is still the program that the upgrade deleted, until it hands over.
    let program = "readlink /proc/$(systemctl show --property MainPID --value shorthorn-engine@v1)/exe";
    host.sh(&format!("{program} | grep ' (deleted)$'"))?;
    let replaced = host.ctl("upgrade engines")?;
    ensure!(replaced.contains("engines that are replaced: 1"), "{replaced}");
    host.sh(&format!("{program} | grep -x /usr/bin/shorthorn-agent"))?;
    ensure!(needs_upgrade(host)? == false, "the engine is replaced and needs an upgrade");
    whole_run(&load)?;
    // Without apt, whose own work is that of the upgrade.
    changed_under_load(host, OLD, &format!("dpkg --install {REPOSITORY}/{OLD}/*.deb"))?;
    whole_run(&load)?;
    load.finish(LIMIT)
}

/// Runs the command that leads to this version. It restarts the daemons, but no engine and no replica.
fn changed_under_load(host: &VmHost, version: &str, command: &str) -> Result<()> {
    let daemons = ["shorthorn-agent", "shorthorn-controller"];
    let before = pids(host)?;
    let old = daemons.map(|daemon| pid(host, daemon).unwrap_or_default());
    host.sh(command)?;
    has_version(host, version)?;
    settings_are_kept(host)?;
    for (daemon, old) in daemons.into_iter().zip(old) {
        ensure!(pid(host, daemon)? != old, "{daemon} is still that of the last version");
    }
    ensure!(pids(host)? == before, "{version} has restarted an engine or a replica");
    until("comparison of the programs", LIMIT, || {
        ensure!(needs_upgrade(host)? == true, "the engine is not known to run another program");
        Ok(Some(()))
    })
}

/// Checks that all packages have a version, and that both daemons run.
fn has_version(host: &VmHost, version: &str) -> Result<()> {
    let shown = "dpkg-query --show --showformat='${Version} ${db:Status-Status}\\n'";
    let versions = host.sh(&format!("{shown} {}", PACKAGES.join(" ")))?;
    let expected = format!("{version}-1 installed");
    ensure!(versions.lines().count() == 3 && versions.lines().all(|line| line == expected), "{versions}");
    host.sh("systemctl is-active shorthorn-agent shorthorn-controller").map(drop)
}

fn settings_are_kept(host: &VmHost) -> Result<()> {
    host.sh(&format!(
        "grep -q '^node_name = \"{NODE}\"' /etc/shorthorn/agent.toml && \
         grep -q '^replica_timeout_ms = 60000' /etc/shorthorn/agent.toml && \
         grep -q '^SHORTHORN_CONTROLLER_ARGS=' /etc/shorthorn/controller.env"
    ))
    .map(drop)
}

/// Returns whether the engine of the volume runs another program than the installed one; null before it is
/// compared.
fn needs_upgrade(host: &VmHost) -> Result<Value> {
    Ok(host.inspect("v1")?["engine"]["needsUpgrade"].clone())
}

fn removal_is_refused(host: &VmHost) -> Result<()> {
    let refused = host.vm.run(&apt("remove shorthorn-agent"))?;
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
    host.sh(&apt("remove shorthorn-agent shorthorn-controller"))?;
    host.sh(
        "test ! -e /usr/bin/shorthorn-agent && ! systemctl is-active shorthorn-agent shorthorn-controller && \
             test -e /etc/shorthorn/agent.toml && test -e /var/lib/shorthorn/disks.json",
    )
    .map(drop)
}

fn purged(host: &VmHost) -> Result<()> {
    host.sh(&apt("purge shorthorn-agent shorthorn-controller shorthornctl"))?;
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
fn whole_run(load: &FioRuns<'_>) -> Result<()> {
    load.wait_for(2, LIMIT)
}
