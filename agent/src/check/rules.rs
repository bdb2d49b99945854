//! Judges the facts about a host. Every function returns the findings of one check.
//!
//! Each line of a remedy is a command that can be copied. Advice follows a `#`. Several lines are
//! alternatives, of which a person chooses one.

use std::net::SocketAddr;
use std::path::Path;

use shorthorn_frontend::{IscsidState, NBD_PARTITIONS_REMEDY};

use crate::check::facts::{DataFacts, DiskFacts, Facts, Kubelet, Ports};
use crate::check::finding::{HostFinding, failed, passed, warned};
use crate::check::lvm;

/// File systems on which replicas are tested.
const TESTED_FILESYSTEMS: [&str; 3] = ["xfs", "ext4", "btrfs"];
/// File systems that keep no data over a restart, or that several hosts can write to.
const UNFIT_FILESYSTEMS: [&str; 7] = ["tmpfs", "ramfs", "overlay", "nfs", "nfs4", "cifs", "fuse"];
/// The oldest kernel with everything that the NBD frontend uses.
const OLDEST_KERNEL: [u32; 2] = [6, 1];
/// The settings that keep multipathd off the devices of volumes.
const MULTIPATH_SETTINGS: &str = include_str!("../../../packaging/etc/multipath.conf");
/// The property and the vendor by which those settings know devices of volumes. The property alone does not
/// keep multipathd off disks of iSCSI.
const MULTIPATH_WORDS: [&str; 2] = ["SHORTHORN_VOLUME", "SHRTHORN"];
/// The smallest MTU of IPv6. Less makes no sense for data.
const MTU_MIN_BYTES: u32 = 1280;

/// The name of the frontend iSCSI.
const ISCSI: &str = "iscsi";
/// The loopback interface.
const LOOPBACK: &str = "lo";
/// The check warns if sockets of other programs are on one part in this number of the ports of replicas.
const FOREIGN_PORTS_PART: usize = 10;

/// Runs all checks.
pub fn examine(facts: &Facts) -> Vec<HostFinding> {
    let checks = [
        kernel(facts),
        frontends(facts),
        partitions(facts.nbd_partitions_max),
        multipath(facts),
        udev(facts),
        lvm::judge(facts),
        kubelet(&facts.kubelet),
        disks(facts),
        ports(facts),
        time(facts),
        network(facts),
        tls(facts),
        encryption(facts),
        instances(facts),
        longhorn(facts),
    ];
    checks.into_iter().flatten().collect()
}

/// Returns the finding for a configuration that cannot be used. Nothing else can be checked then.
pub fn of_configuration(error: &str) -> HostFinding {
    let remedy = "shorthorn-agent serve --check  # and correct /etc/shorthorn/agent.toml";
    failed("config", error.to_owned(), remedy.to_owned())
}

/// Returns the finding for a host whose facts cannot be read.
pub fn of_host(error: &str) -> HostFinding {
    let message = format!("this host cannot be checked: {error}");
    failed("host", message, "sudo shorthorn-agent check".to_owned())
}

/// Returns the findings, or one that the check has passed.
fn or_passed(check: &'static str, findings: Vec<HostFinding>, message: String) -> Vec<HostFinding> {
    if findings.is_empty() { vec![passed(check, message)] } else { findings }
}

/// Returns the path as a word of a shell.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:@%".contains(c);
    if text.chars().all(is_plain) { text } else { format!("'{}'", text.replace('\'', "'\\''")) }
}

fn kernel(facts: &Facts) -> Vec<HostFinding> {
    let release = &facts.kernel;
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse::<u32>().ok());
    let version: [Option<u32>; 2] = std::array::from_fn(|_| numbers.next().flatten());
    let [Some(major), Some(minor)] = version else {
        let message = format!("the kernel release {release:?} has no version number");
        let remedy = "uname -r  # compare it with the requirements in docs/install.md";
        return vec![warned("kernel", message, remedy.to_owned())];
    };
    let [oldest_major, oldest_minor] = OLDEST_KERNEL;
    if [major, minor] < OLDEST_KERNEL {
        let message = format!("kernel {release} is older than {oldest_major}.{oldest_minor}");
        let remedy = "apt-cache search --names-only '^linux-image-'  # install the latest, and reboot\n\
                      dnf upgrade kernel && reboot";
        return vec![failed("kernel", message, remedy.to_owned())];
    }
    vec![passed("kernel", format!("kernel {release}"))]
}

fn frontends(facts: &Facts) -> Vec<HostFinding> {
    let usable: Vec<&str> =
        facts.frontends.iter().filter(|(_, usable, _)| *usable).map(|(name, ..)| name.as_str()).collect();
    let mut findings = Vec::new();
    for (name, is_usable, reason) in &facts.frontends {
        if *is_usable {
            findings.push(passed("frontend", format!("{name}: {reason}")));
            continue;
        }
        let remedy = match name.as_str() {
            "ublk" => "modprobe ublk_drv",
            ISCSI => "apt install tgt open-iscsi\ndnf install scsi-target-utils iscsi-initiator-utils",
            _ => "modprobe nbd",
        };
        let remedy = remedy.to_owned();
        let message = format!("{name}: {reason}");
        findings.push(match (usable.is_empty(), name.as_str()) {
            (true, _) => failed("frontend", message, remedy),
            // NBD makes devices too, but it is slower.
            (false, "ublk") => warned("frontend", message, remedy),
            (false, _) => passed("frontend", format!("{message}; it is not needed beside {}", usable[0])),
        });
    }
    if usable == [ISCSI] {
        findings.push(iscsid(facts.iscsid));
    }
    findings
}

/// Judges the daemon that a host with iSCSI alone depends on.
fn iscsid(state: IscsidState) -> HostFinding {
    match state {
        IscsidState::Runs => passed("iscsi", "iscsid runs".to_owned()),
        IscsidState::OnDemand => passed("iscsi", "systemd starts iscsid on demand".to_owned()),
        IscsidState::Dead => {
            let message =
                "iscsid does not run: volumes get no disk, and none reconnects after an interruption";
            failed("iscsi", message.to_owned(), "systemctl enable --now iscsid".to_owned())
        }
    }
}

/// Judges the driver NBD: a guest can write any partition table into its volume.
fn partitions(nbd_partitions_max: Option<u32>) -> Vec<HostFinding> {
    vec![match nbd_partitions_max {
        None => passed("partitions", "the driver nbd is not loaded".to_owned()),
        Some(0) => passed("partitions", "the kernel reads no partition tables of NBD devices".to_owned()),
        Some(max) => {
            let message = format!(
                "the kernel reads partition tables of NBD devices (max_part of nbd is {max}): partitions \
                 inside volumes become devices of this host"
            );
            warned("partitions", message, NBD_PARTITIONS_REMEDY.to_owned())
        }
    }]
}

fn multipath(facts: &Facts) -> Vec<HostFinding> {
    let tools = &facts.block_tools;
    if !tools.multipathd_runs {
        return vec![passed("multipath", "multipathd does not run".to_owned())];
    }
    if MULTIPATH_WORDS.iter().all(|word| tools.multipath_config.contains(word)) {
        return vec![passed("multipath", "multipathd leaves the devices of volumes alone".to_owned())];
    }
    let message =
        "multipathd runs and is not configured to leave the devices of volumes alone: it may hold them";
    // multipath-tools do not make the directory.
    let lines = MULTIPATH_SETTINGS.lines().filter(|line| !line.trim_start().starts_with('#'));
    let settings: String = lines.map(|line| line.replace('\t', "\\t") + "\\n").collect();
    let remedy = format!(
        "mkdir -p /etc/multipath/conf.d && printf '{settings}' > /etc/multipath/conf.d/shorthorn.conf && \
         multipathd reconfigure"
    );
    vec![failed("multipath", message.to_owned(), remedy)]
}

fn udev(facts: &Facts) -> Vec<HostFinding> {
    let tools = &facts.block_tools;
    if !tools.udev_runs {
        return vec![passed("udev", "udev does not run: nothing scans new devices".to_owned())];
    }
    if tools.has_udev_rule {
        return vec![passed("udev", "udev keeps LVM and others off the devices of volumes".to_owned())];
    }
    let remedy = "apt install --reinstall shorthorn-agent\ndnf reinstall shorthorn-agent".to_owned();
    let message = "the udev rule 59-shorthorn.rules is not installed".to_owned();
    vec![if tools.has_lvm {
        let message = format!("{message}: LVM scans the devices of volumes and may hold them");
        failed("udev", message, remedy)
    } else {
        warned("udev", message, remedy)
    }]
}

fn kubelet(kubelet: &Kubelet) -> Vec<HostFinding> {
    let Some(root) = &kubelet.root else {
        let message = "this host has no directory of a kubelet".to_owned();
        if kubelet.is_wanted {
            let remedy = "systemctl enable --now kubelet  # or set kubelet_root or csi = \"off\" in \
                          /etc/shorthorn/agent.toml";
            return vec![failed("kubelet", message, remedy.to_owned())];
        }
        return vec![passed("kubelet", message)];
    };
    let quoted_root = quoted(root);
    let root = root.display();
    match &kubelet.mount {
        Some((_, true)) => vec![passed("kubelet", format!("mounts below {root} reach containers"))],
        Some((point, false)) => {
            let message = format!(
                "the mount {} of {root} is not shared: volumes that are mounted later do not reach \
                 containers",
                point.display()
            );
            vec![failed("kubelet", message, format!("mount --make-rshared {}", quoted(point)))]
        }
        None => {
            let message = format!("the mount propagation of {root} is not known");
            vec![warned("kubelet", message, format!("findmnt -o TARGET,PROPAGATION -T {quoted_root}"))]
        }
    }
}

fn disks(facts: &Facts) -> Vec<HostFinding> {
    if facts.disks.is_empty() {
        let message = "this node has no disk: it gets no replicas".to_owned();
        return vec![warned("disks", message, "shorthorn-agent disk discover".to_owned())];
    }
    facts.disks.iter().map(disk).collect()
}

fn disk(disk: &DiskFacts) -> HostFinding {
    let (path, quoted) = (disk.path.display(), quoted(&disk.path));
    if let Some(problem) = &disk.problem {
        let remedy =
            format!("findmnt -T {quoted}; journalctl -k -n 50  # repair the file system, or remove the disk");
        return failed("disks", format!("{path}: {problem}"), remedy);
    }
    let kind = disk.filesystem.as_str();
    // FUSE file systems have types like fuse.sshfs.
    if UNFIT_FILESYSTEMS.contains(&kind.split('.').next().unwrap_or(kind)) {
        let message = format!("{path} is on {kind}, which does not keep replicas safely");
        return failed("disks", message, "shorthorn-agent disk discover  # and use a local disk".to_owned());
    }
    let free_percent = disk.available_bytes.saturating_mul(100).checked_div(disk.total_bytes).unwrap_or(0);
    if free_percent < u64::from(disk.reserve_percent) {
        let message = format!(
            "{path} has {free_percent} percent free, less than the reserve of {} percent",
            disk.reserve_percent
        );
        let remedy = format!("du -xhd 2 {quoted} | sort -h | tail  # delete files or volumes, or add a disk");
        return warned("disks", message, remedy);
    }
    if disk.is_on_root {
        let message = format!("{path} is on the root file system: replicas can fill it");
        return warned(
            "disks",
            message,
            "shorthorn-agent disk discover  # and use a disk of its own".to_owned(),
        );
    }
    if !TESTED_FILESYSTEMS.contains(&kind) {
        let message = format!("{path} is on {kind}, on which replicas are not tested");
        let remedy = "shorthorn-agent disk discover  # and use xfs or ext4";
        return warned("disks", message, remedy.to_owned());
    }
    passed("disks", format!("{path}: {kind}, {free_percent} percent free"))
}

/// Returns true if a socket that listens on `listening` receives the connections to `wanted`.
fn serves(listening: &SocketAddr, wanted: &SocketAddr) -> bool {
    listening.port() == wanted.port()
        && (listening.ip() == wanted.ip() || listening.ip().is_unspecified() || wanted.ip().is_unspecified())
}

fn ports(facts: &Facts) -> Vec<HostFinding> {
    let ports = &facts.ports;
    let mut findings = Vec::new();
    for (key, address) in &ports.own {
        let is_listening = ports.listening.iter().any(|listening| serves(listening, address));
        let port = address.port();
        match (ports.agent_runs, is_listening) {
            (true, true) | (false, false) => {}
            // The agent serves the addresses with TLS once it has a certificate: see `tls`.
            (true, false) if *key == "listen" && facts.tls.is_some() => {}
            (true, false) => findings.push(failed(
                "ports",
                format!("the agent runs, and nothing listens on {address} ({key})"),
                "systemctl restart shorthorn-agent; journalctl -u shorthorn-agent".to_owned(),
            )),
            (false, true) => findings.push(failed(
                "ports",
                format!("another program listens on {address}, which is the agent's ({key})"),
                format!(
                    "ss -ltnp 'sport = :{port}'  # stop that program, or change {key} in \
                     /etc/shorthorn/agent.toml"
                ),
            )),
        }
    }
    findings.extend(data_ports(ports));
    or_passed("ports", findings, "the ports of agent and replicas are theirs".to_owned())
}

fn data_ports(ports: &Ports) -> Vec<HostFinding> {
    let mut findings = Vec::new();
    let Some(range) = &ports.data_ports else { return findings };
    let (first, last) = (range.start(), range.end());
    let is_foreign = |address: &&SocketAddr| {
        range.contains(&address.port()) && !ports.replica_ports.contains(&address.port())
    };
    let foreign = ports.listening.iter().filter(is_foreign).count();
    // Replicas pass over ports of others. kubelet and others of Kubernetes have some here on every host.
    if foreign * FOREIGN_PORTS_PART > range.len() {
        findings.push(warned(
            "ports",
            format!("{foreign} other sockets listen between {first} and {last}, the ports of replicas"),
            format!(
                "ss -ltn 'sport >= :{first} and sport <= :{last}'  # or change data_ports in \
                 /etc/shorthorn/agent.toml"
            ),
        ));
    }
    let is_reserved = ports.reserved.iter().any(|kept| kept.start() <= first && kept.end() >= last);
    if let Some(ephemeral) = &ports.ephemeral
        && ephemeral.start() <= last
        && first <= ephemeral.end()
        && !is_reserved
    {
        // A write replaces the whole list: those that are reserved for others stay in it.
        let kept = ports.reserved.iter().chain([range]);
        let kept: Vec<String> = kept.map(|kept| format!("{}-{}", kept.start(), kept.end())).collect();
        let kept = kept.join(",");
        findings.push(warned(
            "ports",
            format!("the kernel may give ports between {first} and {last} to outgoing connections"),
            format!(
                "echo net.ipv4.ip_local_reserved_ports={kept} >/etc/sysctl.d/60-shorthorn.conf && \
                 sysctl --system"
            ),
        ));
    }
    findings
}

fn time(facts: &Facts) -> Vec<HostFinding> {
    vec![match facts.is_clock_synchronised {
        Some(true) => passed("time", "the clock is synchronised".to_owned()),
        Some(false) => warned(
            "time",
            "the clock is not synchronised: certificates and logs of nodes may disagree".to_owned(),
            "timedatectl set-ntp true  # or start chronyd".to_owned(),
        ),
        None => warned(
            "time",
            "the kernel does not say whether the clock is synchronised".to_owned(),
            "timedatectl".to_owned(),
        ),
    }]
}

fn network(facts: &Facts) -> Vec<HostFinding> {
    let Some(data) = &facts.data else {
        let message = "other nodes do not reach replicas here: this node has no data address".to_owned();
        // Before the first key: the file may end with a table.
        let remedy = "sed -i '1i data_interface = \"eth1\"' /etc/shorthorn/agent.toml && systemctl restart \
                      shorthorn-agent  # with the interface that others reach, of ip -br address";
        return vec![warned("network", message, remedy.to_owned())];
    };
    let mut findings = Vec::new();
    if let Some(problem) = &data.choice.problem {
        findings.push(failed("network", problem.clone(), "ip -br address; ip -br link".to_owned()));
    }
    findings.extend(mtu(data));
    let text = data.choice.address.map_or_else(|| "none".to_owned(), |address| address.to_string());
    let interface = data.interface.as_ref().map(|(name, mtu)| format!(" on {name} with MTU {mtu}"));
    or_passed("network", findings, format!("data address {text}{}", interface.unwrap_or_default()))
}

fn mtu(data: &DataFacts) -> Vec<HostFinding> {
    let mut findings = Vec::new();
    let Some((interface, mtu)) = &data.interface else { return findings };
    // If a router announces an address of lo, packets leave through other interfaces with other MTUs.
    if interface == LOOPBACK {
        return findings;
    }
    if *mtu < MTU_MIN_BYTES {
        let message = format!("interface {interface} has an MTU of {mtu} bytes");
        findings.push(warned("network", message, format!("ip link set {interface} mtu 1500")));
    }
    for (peer, answers_small, answers_large) in &data.peers {
        if *answers_small && !*answers_large {
            findings.push(failed(
                "network",
                format!(
                    "packets of {mtu} bytes, the MTU of {interface}, do not reach {peer}: writes to its \
                     replicas hang"
                ),
                format!("ip link set {interface} mtu 1500  # or set the same MTU on all hosts and switches"),
            ));
        }
    }
    findings
}

fn tls(facts: &Facts) -> Vec<HostFinding> {
    let remedy = || "shorthorn-agent serve --check  # docs/security.md".to_owned();
    vec![match &facts.tls {
        None => passed("tls", "the certificate of this node is usable, or not needed".to_owned()),
        Some((true, problem)) => failed("tls", problem.clone(), remedy()),
        Some((false, problem)) => warned("tls", problem.clone(), remedy()),
    }]
}

fn encryption(facts: &Facts) -> Vec<HostFinding> {
    let Some(reason) = &facts.no_encryption else {
        return vec![passed("encryption", "the kernel encrypts volumes with encryptInTransit".to_owned())];
    };
    let message =
        format!("the kernel cannot encrypt ({reason}): volumes with encryptInTransit do not start here");
    let remedy = "modprobe tls && echo tls > /etc/modules-load.d/shorthorn-tls.conf".to_owned();
    vec![warned("encryption", message, remedy)]
}

fn instances(facts: &Facts) -> Vec<HostFinding> {
    let Some(problem) = facts.mortal_instances else {
        return vec![passed("instances", "engines and replicas continue without the agent".to_owned())];
    };
    let remedy = "sed -i 's/^ *instances *=.*/instances = \"auto\"/' /etc/shorthorn/agent.toml && \
                  systemctl restart shorthorn-agent  # detach the volumes of this node first";
    vec![warned("instances", problem.to_owned(), remedy.to_owned())]
}

fn longhorn(facts: &Facts) -> Vec<HostFinding> {
    let remedy = "kubectl get pods -A -o wide -l longhorn.io/component  # stop one of the two on this node: \
                  Longhorn, or systemctl disable --now shorthorn-agent";
    let warn = |text: &String| warned("longhorn", text.clone(), remedy.to_owned());
    let findings = facts.longhorn.iter().map(warn).collect();
    or_passed("longhorn", findings, "no Longhorn manages volumes here".to_owned())
}

#[cfg(test)]
mod tests;
