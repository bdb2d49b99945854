//! Collects the facts about this host. Nothing here judges them.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::libc;
use nix::sys::utsname::uname;
use shorthorn_api::{nonempty, v1};
use shorthorn_control::{EngineSpec, ReplicaSpec, load_spec};
use shorthorn_frontend::node::has_udev;
use shorthorn_frontend::probe::probe;
use shorthorn_frontend::{FrontendKind, iscsid, nbd_partitions_max};
use shorthorn_linux::mounts::MountTable;
use shorthorn_metrics::MetricsListen;
use shorthorn_tls::{TlsError, check_kernel};

use crate::check::bounded::Bounded;
use crate::check::facts::{BlockTools, DataFacts, DiskFacts, Facts, Kubelet, Ports};
use crate::check::lvm;
use crate::pid_file::is_held;
use crate::serve::config::{Config, CsiChoice};
use crate::serve::listen::ListenAddress;
use crate::serve::network::{self, Interfaces};
use crate::serve::{KubeletRoots, children_end, disk_state, has_systemd, known_disks, longhorn, tls};

/// The directories of the rule that hides devices of volumes, below the root. A file in an earlier one
/// replaces those of its name in later ones (udev(7)).
const UDEV_RULES: [&str; 5] = [
    "etc/udev/rules.d",
    "run/udev/rules.d",
    "usr/local/lib/udev/rules.d",
    "usr/lib/udev/rules.d",
    "lib/udev/rules.d",
];
const UDEV_RULE: &str = "59-shorthorn.rules";
/// The most addresses of other nodes that are probed, two seconds each at most.
const PEERS_MAX: usize = 16;
/// The headers of IP and ICMP in front of the data of a ping.
const PING_HEADER_BYTES: u32 = 28;
const PING6_HEADER_BYTES: u32 = 48;
const SMALL_PING_BYTES: u32 = 56;
/// The time limit for all disks together. A file system that hangs must not hold up the report about the
/// others.
const DISKS_LIMIT: Duration = Duration::from_secs(5);

/// Collects all facts. Loads the modules of frontends, as the agent does, and pings other nodes.
///
/// # Errors
/// The interfaces of this host cannot be read, or whether an agent runs: not every user may.
pub fn collect(config: &Config) -> anyhow::Result<Facts> {
    let pid_file = config.state_dir.join("agent.pid");
    let unknown = || format!("{}: whether the agent runs is unknown; check as root", pid_file.display());
    let agent_runs = is_held(&pid_file).with_context(unknown)?;
    let mut facts = collect_quietly(config, agent_runs)?;
    facts.disks = disks(config);
    facts.block_tools.lvm = lvm::settings();
    let devices = probe().into_iter().filter(|report| report.kind != FrontendKind::Socket);
    facts.frontends = devices.map(|report| (report.kind.to_string(), report.usable, report.reason)).collect();
    // The probe may have loaded the driver.
    facts.nbd_partitions_max = nbd_partitions_max();
    facts.no_encryption = match check_kernel() {
        Ok(()) => None,
        Err(TlsError::Kernel(error)) => Some(error.to_string()),
        Err(error) => Some(error.to_string()),
    };
    if let Some(data) = &mut facts.data
        && let Some((_, mtu)) = data.interface
    {
        data.peers = peers(config).into_iter().map(|peer| probe_peer(peer, mtu)).collect();
    }
    facts.tls = match tls::check(config) {
        Ok(None) => None,
        Ok(Some(remark)) => Some((false, remark)),
        Err(problem) => Some((true, problem)),
    };
    Ok(facts)
}

/// Collects the facts that only have to be read, and that no disk can delay.
///
/// The agent passes on that it runs. A process does not see its own record lock of the pid file, and loses
/// the lock when it closes the file (fcntl(2)).
///
/// # Errors
/// The interfaces of this host cannot be read.
pub fn collect_quietly(config: &Config, agent_runs: bool) -> anyhow::Result<Facts> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let interfaces = runtime.block_on(network::interfaces())?;
    Ok(Facts {
        kernel: uname()?.release().to_string_lossy().into_owned(),
        frontends: Vec::new(),
        nbd_partitions_max: nbd_partitions_max(),
        iscsid: iscsid(),
        block_tools: block_tools(),
        kubelet: kubelet(config),
        disks: Vec::new(),
        ports: ports(config, agent_runs),
        is_clock_synchronised: is_clock_synchronised(),
        data: data(config, &interfaces),
        tls: None,
        no_encryption: None,
        mortal_instances: children_end(config.instances, has_systemd()),
        longhorn: longhorn::warnings(
            Path::new(longhorn::PROC),
            &config.device_dir,
            &known_disks(&config.disks, &config.state_dir),
        ),
    })
}

fn block_tools() -> BlockTools {
    let mut files = vec![PathBuf::from("/etc/multipath.conf")];
    let drop_ins = fs::read_dir("/etc/multipath/conf.d").into_iter().flatten().flatten();
    files.extend(drop_ins.map(|entry| entry.path()));
    let is_there = |path: &str| Path::new(path).exists();
    BlockTools {
        multipathd_runs: runs("multipathd"),
        multipath_config: files.iter().filter_map(|file| fs::read_to_string(file).ok()).collect(),
        has_lvm: is_there("/usr/sbin/lvm") || is_there("/sbin/lvm"),
        has_udev_rule: has_udev_rule(Path::new("/")),
        udev_runs: has_udev(),
        lvm: None,
    }
}

/// Returns true if udev reads the rule below this root. An administrator switches a rule off with an empty
/// file or a link to /dev/null.
fn has_udev_rule(root: &Path) -> bool {
    let mut files = UDEV_RULES.iter().map(|folder| root.join(folder).join(UDEV_RULE));
    let first = files.find(|file| file.symlink_metadata().is_ok());
    first.and_then(|file| file.metadata().ok()).is_some_and(|file| file.is_file() && file.len() > 0)
}

/// Returns true if a process of that name runs.
fn runs(name: &str) -> bool {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut names = entries.filter_map(|entry| fs::read_to_string(entry.path().join("comm")).ok());
    names.any(|comm| comm.trim() == name)
}

fn kubelet(config: &Config) -> Kubelet {
    let root = match config.csi {
        CsiChoice::Off => None,
        CsiChoice::On | CsiChoice::Auto => KubeletRoots::new(config.kubelet_root.clone()).find(),
    };
    // The mounts of the host: the agent may have its own.
    let mounts = MountTable::of_both_namespaces(Path::new("/proc"));
    let above = |root: &PathBuf| mounts.iter().rev().find_map(|(_, mounts)| mounts.above(root));
    let mount = root.as_ref().and_then(above).map(|mount| (mount.point.clone(), mount.is_shared));
    Kubelet { is_wanted: config.csi == CsiChoice::On, root, mount }
}

fn disks(config: &Config) -> Vec<DiskFacts> {
    let mounts = MountTable::readable_in(Path::new("/proc/self/mountinfo"));
    // All at once: a dead NFS server holds up every call that concerns its file system.
    let looks = known_disks(&config.disks, &config.state_dir).into_iter().map(|path| {
        let looked = path.clone();
        (path, Bounded::start(move || disk_state(&looked)))
    });
    let looks: Vec<_> = looks.collect();
    let deadline = Instant::now() + DISKS_LIMIT;
    let facts = looks.into_iter().map(|(path, look)| {
        let silent = |problem| v1::Disk { problem, ..v1::Disk::default() };
        let disk = look.and_then(|look| look.wait_until(deadline)).unwrap_or_else(|error| {
            silent(format!("the file system does not answer ({error}): its server or its device may be dead"))
        });
        let is_on_root = mounts.above(&path).is_some_and(|mount| mount.point == Path::new("/"));
        DiskFacts {
            path,
            problem: nonempty(disk.problem),
            filesystem: disk.filesystem,
            total_bytes: disk.total_bytes,
            available_bytes: disk.available_bytes,
            reserve_percent: config.trash_free_percent,
            is_on_root,
        }
    });
    facts.collect()
}

fn ports(config: &Config, agent_runs: bool) -> Ports {
    let mut own: Vec<(&'static str, SocketAddr)> = Vec::new();
    for listen in &config.listen {
        if let ListenAddress::Tcp(address) | ListenAddress::Tls(address) = listen {
            own.push(("listen", *address));
        }
    }
    own.extend(metrics_address(config).map(|address| ("metrics_listen", address)));
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let mut listening = listening(&read("/proc/net/tcp"));
    listening.extend(self::listening(&read("/proc/net/tcp6")));
    let replica_ports = specs(config, "replica").into_iter().filter_map(|file| {
        let spec: ReplicaSpec = load_spec(&file).ok()?;
        spec.data_address.map(|address| address.port())
    });
    Ports {
        agent_runs,
        own,
        listening,
        data_ports: Some(config.data_ports.clone()),
        replica_ports: replica_ports.collect(),
        ephemeral: ranges(&read("/proc/sys/net/ipv4/ip_local_port_range").replace('\t', "-")).pop(),
        reserved: ranges(&read("/proc/sys/net/ipv4/ip_local_reserved_ports")),
    }
}

fn metrics_address(config: &Config) -> Option<SocketAddr> {
    match config.metrics_listen {
        MetricsListen::At(address) => Some(address),
        MetricsListen::Off => None,
    }
}

/// Parses ranges of ports like `1-2,5`.
fn ranges(text: &str) -> Vec<RangeInclusive<u16>> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    };
    text.trim().split(',').filter_map(range).collect()
}

/// Returns the addresses of listening sockets in the text of /proc/net/tcp or tcp6 (proc_net(5)).
fn listening(text: &str) -> Vec<SocketAddr> {
    const LISTEN: &str = "0A";
    let address = |line: &str| {
        let mut fields = line.split_whitespace().skip(1);
        let (local, state) = (fields.next()?, fields.nth(1)?);
        let (ip, port) = local.split_once(':').filter(|_| state == LISTEN)?;
        let port = u16::from_str_radix(port, 16).ok()?;
        Some(SocketAddr::new(ip_of_hex(ip)?, port))
    };
    text.lines().filter_map(address).collect()
}

/// Returns the address of the kernel's hexadecimal form: words of 32 bits in the order of the host.
fn ip_of_hex(text: &str) -> Option<IpAddr> {
    let mut bytes = Vec::new();
    for word in text.as_bytes().chunks(8) {
        let word = u32::from_str_radix(std::str::from_utf8(word).ok()?, 16).ok()?;
        bytes.extend(word.to_ne_bytes());
    }
    match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).ok().map(|bytes| Ipv4Addr::from(bytes).into()),
        16 => <[u8; 16]>::try_from(bytes).ok().map(|bytes| Ipv6Addr::from(bytes).into()),
        _ => None,
    }
}

/// Returns true if the kernel's clock is synchronised with another one (adjtimex(2)).
fn is_clock_synchronised() -> Option<bool> {
    let mut clock = std::mem::MaybeUninit::<libc::timex>::zeroed();
    // SAFETY: a timex of zeroes is valid and only asks: its modes are 0. The kernel writes to it alone.
    let state = unsafe { libc::adjtimex(clock.as_mut_ptr()) };
    if state < 0 {
        return None;
    }
    // SAFETY: it is initialised, with zeroes and then by the kernel.
    let clock = unsafe { clock.assume_init() };
    Some(clock.status & libc::STA_UNSYNC == 0)
}

fn data(config: &Config, interfaces: &Interfaces) -> Option<DataFacts> {
    let last = specs(config, "replica").into_iter().find_map(|file| {
        let spec: ReplicaSpec = load_spec(&file).ok()?;
        spec.data_address.map(|address| address.ip())
    });
    let choice = network::choice_of(&config.data, interfaces, last)?;
    let own = interfaces.addresses.iter().find(|own| Some(own.address) == choice.address);
    let interface = own.and_then(|own| {
        let mtu = fs::read_to_string(format!("/sys/class/net/{}/mtu", own.interface)).ok()?;
        Some((own.interface.clone(), mtu.trim().parse().ok()?))
    });
    Some(DataFacts { choice, interface, peers: Vec::new() })
}

/// Returns the spec files of instances.
fn specs(config: &Config, kind: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(config.state_dir.join("instances").join(kind));
    entries.into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

/// Returns the addresses of replicas on other nodes, as the engines of this one know them.
fn peers(config: &Config) -> Vec<IpAddr> {
    let mut peers = Vec::new();
    for file in specs(config, "engine") {
        let Ok(spec) = load_spec::<EngineSpec>(&file) else { continue };
        let remote = spec.replicas.into_iter().filter(|replica| !replica.local);
        for address in remote.flat_map(|replica| replica.addresses) {
            let address = address.strip_prefix("tcp:").and_then(|rest| rest.parse::<SocketAddr>().ok());
            peers.extend(address.map(|address| address.ip()));
        }
    }
    peers.sort();
    peers.dedup();
    peers.truncate(PEERS_MAX);
    peers
}

/// Returns whether a host answers a small packet, and one of the whole MTU that no router may divide.
fn probe_peer(peer: IpAddr, mtu: u32) -> (IpAddr, bool, bool) {
    let header_bytes = if peer.is_ipv4() { PING_HEADER_BYTES } else { PING6_HEADER_BYTES };
    let answers = |size_bytes: u32| {
        let mut ping = Command::new("ping");
        ping.args(["-n", "-c", "1", "-W", "1", "-M", "do", "-s"]).arg(size_bytes.to_string());
        ping.arg(peer.to_string()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        ping.status().is_ok_and(|status| status.success())
    };
    let answers_small = answers(SMALL_PING_BYTES);
    (peer, answers_small, answers_small && answers(mtu.saturating_sub(header_bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listening_sockets_are_read_from_the_kernel() {
        let text = "  sl  local_address rem_address   st tx_queue rx_queue\n\
             0: 0100007F:251D 00000000:0000 0A 00000000:00000000 00:00000000 00000000  0\n\
             1: 00000000:2710 00000000:0000 0A 00000000:00000000 00:00000000 00000000  0\n\
             2: 0100007F:9999 0100007F:251D 01 00000000:00000000 00:00000000 00000000  0\n";
        let wanted: Vec<SocketAddr> =
            ["127.0.0.1:9501", "0.0.0.0:10000"].map(|text| text.parse().unwrap()).into();
        assert_eq!(listening(text), wanted);
        let text = "   0: 000000FD000000000000000001000000:2710 00:0000 0A\n";
        assert_eq!(listening(text), ["[fd00::1]:10000".parse().unwrap()]);
    }

    #[test]
    fn the_udev_rule_counts_in_each_directory_unless_it_is_switched_off() {
        let root = tempfile::tempdir().unwrap();
        assert!(!has_udev_rule(root.path()));
        let file = |folder: &str| {
            let folder = root.path().join(folder);
            fs::create_dir_all(&folder).unwrap();
            folder.join(UDEV_RULE)
        };
        for folder in UDEV_RULES {
            fs::write(file(folder), "SUBSYSTEM==\"block\"").unwrap();
            assert!(has_udev_rule(root.path()), "{folder}");
            fs::remove_file(file(folder)).unwrap();
        }
        fs::write(file("usr/lib/udev/rules.d"), "SUBSYSTEM==\"block\"").unwrap();
        std::os::unix::fs::symlink("/dev/null", file("etc/udev/rules.d")).unwrap();
        assert!(!has_udev_rule(root.path()), "the link is first");
    }

    #[test]
    fn the_kernel_shows_a_socket_of_this_test() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let shown = listening(&fs::read_to_string("/proc/net/tcp").unwrap());
        assert!(shown.contains(&listener.local_addr().unwrap()), "{shown:?}");
        assert!(is_clock_synchronised().is_some());
    }

    #[test]
    fn ranges_of_ports_are_parsed() {
        assert_eq!(ranges("32768-60999\n"), [32768..=60999]);
        assert_eq!(ranges("10000-14999,20000\n"), [10000..=14999, 20000..=20000]);
        assert!(ranges("\n").is_empty());
    }
}
