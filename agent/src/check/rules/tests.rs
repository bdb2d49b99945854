use super::*;
use crate::check::Level;
use crate::check::facts::{BlockTools, LvmSettings};
use crate::serve::config::InstancesChoice;
use crate::serve::network::Choice;

/// A host on which every check passes.
fn well() -> Facts {
    let disk = DiskFacts {
        path: "/data/a".into(),
        problem: None,
        filesystem: "xfs".to_owned(),
        total_bytes: 1000,
        available_bytes: 500,
        reserve_percent: 10,
        is_on_root: false,
    };
    Facts {
        kernel: "6.18.44-generic".to_owned(),
        frontends: vec![
            ("ublk".to_owned(), true, "features".to_owned()),
            ("nbd".to_owned(), false, "no module".to_owned()),
        ],
        nbd_partitions_max: Some(0),
        iscsid: IscsidState::Runs,
        block_tools: BlockTools {
            multipathd_runs: true,
            multipath_config: MULTIPATH_SETTINGS.to_owned(),
            has_lvm: true,
            has_udev_rule: true,
            udev_runs: true,
            lvm: Some(LvmSettings {
                global_filter: "[\"r|^/dev/longhorn/|\"]".to_owned(),
                ..LvmSettings::default()
            }),
        },
        kubelet: Kubelet {
            is_wanted: true,
            root: Some("/var/lib/kubelet".into()),
            mount: Some(("/".into(), true)),
        },
        disks: vec![disk],
        ports: Ports {
            agent_runs: true,
            own: vec![("listen", "192.0.2.1:9501".parse().unwrap())],
            listening: vec!["192.0.2.1:9501".parse().unwrap(), "192.0.2.1:10000".parse().unwrap()],
            data_ports: Some(10000..=14999),
            replica_ports: vec![10000],
            ephemeral: Some(32768..=60999),
            reserved: Vec::new(),
        },
        is_clock_synchronised: Some(true),
        data: Some(DataFacts {
            choice: Choice { address: Some("192.0.2.1".parse().unwrap()), problem: None },
            interface: Some(("eth1".to_owned(), 9000)),
            peers: vec![("192.0.2.2".parse().unwrap(), true, true)],
        }),
        tls: None,
        no_encryption: None,
        mortal_instances: None,
        longhorn: Vec::new(),
    }
}

/// The programs of all remedies.
const COMMANDS: [&str; 20] = [
    "apt",
    "apt-cache",
    "dnf",
    "du",
    "echo",
    "findmnt",
    "ip",
    "kubectl",
    "lvmconfig",
    "mkdir",
    "modprobe",
    "mount",
    "printf",
    "sed",
    "shorthorn-agent",
    "ss",
    "sudo",
    "systemctl",
    "timedatectl",
    "uname",
];

/// Asserts that each line of the remedy is a command, which a shell can parse.
fn assert_commands(finding: &HostFinding) {
    assert!(!finding.remedy.is_empty(), "{finding:?}");
    for line in finding.remedy.lines() {
        let program = line.split(' ').next().unwrap_or_default();
        assert!(COMMANDS.contains(&program), "{program:?} begins {line:?}");
        let parsed = std::process::Command::new("sh").args(["-n", "-c", line]).output().unwrap();
        assert!(parsed.status.success(), "{line:?}: {parsed:?}");
    }
}

/// Asserts that a change leads to exactly one finding that is not well.
fn assert_ill(change: impl FnOnce(&mut Facts), check: &str, level: Level, message: &str, remedy: &str) {
    let mut facts = well();
    change(&mut facts);
    let findings: Vec<HostFinding> =
        examine(&facts).into_iter().filter(|finding| finding.level != Level::Passed).collect();
    let [found] = findings.as_slice() else { panic!("not one finding: {findings:?}") };
    assert_eq!((found.check, found.level), (check, level), "{found:?}");
    assert!(found.message.contains(message) && found.remedy.contains(remedy), "{found:?}");
    assert_commands(found);
}

#[test]
fn a_host_that_is_well_passes_every_check() {
    let findings = examine(&well());
    assert!(findings.iter().all(|finding| finding.level == Level::Passed), "{findings:?}");
    assert!(findings.iter().all(|finding| finding.remedy.is_empty()), "{findings:?}");
    let mut names: Vec<&str> = findings.iter().map(|finding| finding.check).collect();
    names.dedup();
    let all = [
        "kernel",
        "frontend",
        "partitions",
        "multipath",
        "udev",
        "lvm",
        "kubelet",
        "disks",
        "ports",
        "time",
        "network",
        "tls",
        "encryption",
        "instances",
        "longhorn",
    ];
    assert_eq!(names, all);
}

#[test]
fn kernels_and_drivers() {
    use Level::{Failed, Warned};
    assert_ill(|facts| facts.kernel = "5.15.0-1".to_owned(), "kernel", Failed, "older than 6.1", "reboot");
    assert_ill(|facts| facts.kernel = "custom".to_owned(), "kernel", Warned, "custom", "install.md");
    let swap = |facts: &mut Facts| {
        facts.frontends[0].1 = false;
        facts.frontends[1].1 = true;
    };
    assert_ill(swap, "frontend", Warned, "ublk: features", "modprobe ublk_drv");
    let mut facts = well();
    facts.frontends[0].1 = false;
    let failures = frontends(&facts);
    failures.iter().for_each(assert_commands);
    assert!(failures.len() == 2 && failures.iter().all(|finding| finding.level == Failed), "{failures:?}");
}

#[test]
fn a_host_with_iscsi_alone_needs_iscsid() {
    let mut facts = well();
    facts.frontends = vec![("iscsi".to_owned(), true, "tgt 1.0.97".to_owned())];
    let levels = |facts: &Facts| frontends(facts).iter().map(|finding| finding.level).collect::<Vec<_>>();
    assert_eq!(levels(&facts), [Level::Passed; 2]);
    facts.iscsid = IscsidState::Dead;
    let found = frontends(&facts);
    assert_eq!((found[1].check, found[1].level), ("iscsi", Level::Failed));
    assert_commands(&found[1]);
    // Beside another driver nothing needs it.
    facts.frontends.push(("nbd".to_owned(), true, "netlink".to_owned()));
    assert_eq!(levels(&facts), [Level::Passed; 2]);
    facts.frontends = vec![("iscsi".to_owned(), false, "the host has no tgtd".to_owned())];
    assert!(frontends(&facts)[0].remedy.contains("apt install tgt open-iscsi"));
    assert_commands(&frontends(&facts)[0]);
}

#[test]
fn a_driver_that_reads_partition_tables_is_a_warning() {
    let reads = |facts: &mut Facts| facts.nbd_partitions_max = Some(16);
    assert_ill(reads, "partitions", Level::Warned, "max_part of nbd is 16", "modprobe nbd max_part=0");
    assert_eq!(partitions(None)[0].level, Level::Passed);
}

#[test]
fn a_kernel_without_tls_is_a_warning() {
    let lacks = |facts: &mut Facts| facts.no_encryption = Some("no such file".to_owned());
    assert_ill(lacks, "encryption", Level::Warned, "encryptInTransit", "modprobe tls");
}

#[test]
fn tools_that_hold_devices() {
    let multipath = |facts: &mut Facts| facts.block_tools.multipath_config.clear();
    assert_ill(multipath, "multipath", Level::Failed, "multipathd runs", "multipathd reconfigure");
    let only_property = |facts: &mut Facts| {
        facts.block_tools.multipath_config = "blacklist {\n\tproperty \"^SHORTHORN_VOLUME$\"\n}\n".to_owned();
    };
    assert_ill(only_property, "multipath", Level::Failed, "multipathd runs", "SHRTHORN");
    let rule = |facts: &mut Facts| facts.block_tools.has_udev_rule = false;
    assert_ill(rule, "udev", Level::Failed, "LVM scans", "reinstall");
    let without_lvm = |facts: &mut Facts| {
        facts.block_tools.has_udev_rule = false;
        facts.block_tools.has_lvm = false;
    };
    assert_ill(without_lvm, "udev", Level::Warned, "59-shorthorn.rules", "reinstall");
    let mut quiet = well();
    quiet.block_tools = BlockTools::default();
    assert!(examine(&quiet).iter().all(|finding| finding.level == Level::Passed));
}

#[test]
fn lvm_that_reads_devices_is_a_warning() {
    let accepts = |facts: &mut Facts| facts.block_tools.lvm = Some(LvmSettings::default());
    assert_ill(accepts, "lvm", Level::Warned, "/dev/ublkb*", "global_filter");
}

#[test]
fn paths_are_words_of_a_shell() {
    assert_eq!(quoted(Path::new("/data/a-1")), "/data/a-1");
    assert_eq!(quoted(Path::new("/data/o'neil b")), "'/data/o'\\''neil b'");
    let problem = |facts: &mut Facts| {
        facts.disks[0].path = "/data/a b".into();
        facts.disks[0].problem = Some("mounted read-only".to_owned());
    };
    assert_ill(problem, "disks", Level::Failed, "/data/a b: mounted", "findmnt -T '/data/a b'");
}

#[test]
fn a_kubelet_needs_a_shared_mount() {
    let private = |facts: &mut Facts| facts.kubelet.mount = Some(("/var".into(), false));
    assert_ill(
        private,
        "kubelet",
        Level::Failed,
        "/var of /var/lib/kubelet is not shared",
        "make-rshared /var",
    );
    let unknown = |facts: &mut Facts| facts.kubelet.mount = None;
    assert_ill(unknown, "kubelet", Level::Warned, "not known", "findmnt");
    let missing = |facts: &mut Facts| facts.kubelet.root = None;
    assert_ill(missing, "kubelet", Level::Failed, "no directory of a kubelet", "kubelet_root");
    let mut without = well();
    without.kubelet = Kubelet::default();
    assert!(examine(&without).iter().all(|finding| finding.level == Level::Passed));
}

#[test]
fn disks_have_to_keep_replicas() {
    use Level::{Failed, Warned};
    assert_ill(|facts| facts.disks.clear(), "disks", Warned, "no disk", "disk discover");
    let problem = |facts: &mut Facts| facts.disks[0].problem = Some("mounted read-only".to_owned());
    assert_ill(problem, "disks", Failed, "/data/a: mounted read-only", "repair the file system");
    for (kind, level, message) in [
        ("tmpfs", Failed, "does not keep replicas"),
        ("fuse.sshfs", Failed, "does not keep replicas"),
        ("nfs4", Failed, "does not keep replicas"),
        ("zfs", Warned, "not tested"),
    ] {
        assert_ill(|facts| facts.disks[0].filesystem = kind.to_owned(), "disks", level, message, "");
    }
    let full = |facts: &mut Facts| facts.disks[0].available_bytes = 99;
    assert_ill(full, "disks", Warned, "9 percent free, less than the reserve of 10", "du -xhd 2 /data/a ");
    assert_ill(|facts| facts.disks[0].is_on_root = true, "disks", Warned, "root file system", "discover");
    // A disk whose size is unknown has nothing free.
    let unknown = |facts: &mut Facts| facts.disks[0].total_bytes = 0;
    assert_ill(unknown, "disks", Warned, "0 percent free", "add a disk");
}

#[test]
fn ports_have_one_owner() {
    let silent = |facts: &mut Facts| facts.ports.listening.retain(|address| address.port() != 9501);
    assert_ill(silent, "ports", Level::Failed, "nothing listens on 192.0.2.1:9501", "systemctl restart");
    let mut without_certificate = well();
    silent(&mut without_certificate);
    without_certificate.tls = Some((false, "this node has no certificate yet".to_owned()));
    let findings = ports(&without_certificate);
    assert!(findings.iter().all(|finding| finding.level == Level::Passed), "{findings:?}");
    let taken = |facts: &mut Facts| facts.ports.agent_runs = false;
    assert_ill(taken, "ports", Level::Failed, "another program listens", "ss -ltnp 'sport = :9501'");
    // A socket on the wildcard address takes the port as well.
    let wildcard = |facts: &mut Facts| {
        facts.ports.agent_runs = false;
        facts.ports.listening[0] = "[::]:9501".parse().unwrap();
    };
    assert_ill(wildcard, "ports", Level::Failed, "another program listens", "ss");
    let foreign = |facts: &mut Facts| {
        facts.ports.listening.extend((14000..=14500).map(|port| SocketAddr::from(([192, 0, 2, 1], port))));
    };
    assert_ill(foreign, "ports", Level::Warned, "501 other sockets listen between 10000 and 14999", "ss");
    // Each host of Kubernetes has kubelet there, whose port replicas pass over.
    let mut kubelet = well();
    kubelet.ports.listening.push("[::]:10250".parse().unwrap());
    assert!(examine(&kubelet).iter().all(|finding| finding.level == Level::Passed));
    let ephemeral = |facts: &mut Facts| facts.ports.ephemeral = Some(1024..=65535);
    assert_ill(
        ephemeral,
        "ports",
        Level::Warned,
        "outgoing connections",
        "ip_local_reserved_ports=10000-14999",
    );
    // The list has those of others as well, and a write replaces it.
    let of_others = |facts: &mut Facts| {
        facts.ports.ephemeral = Some(1024..=65535);
        facts.ports.reserved = vec![8080..=8080, 30000..=32767];
    };
    let remedy = "ip_local_reserved_ports=8080-8080,30000-32767,10000-14999";
    assert_ill(of_others, "ports", Level::Warned, "outgoing connections", remedy);
    let mut reserved = well();
    reserved.ports.ephemeral = Some(1024..=65535);
    reserved.ports.reserved = vec![9000..=14999];
    assert!(examine(&reserved).iter().all(|finding| finding.level == Level::Passed));
}

#[test]
fn clocks_networks_and_certificates() {
    use Level::{Failed, Warned};
    let clock = |facts: &mut Facts| facts.is_clock_synchronised = Some(false);
    assert_ill(clock, "time", Warned, "not synchronised", "timedatectl");
    assert_ill(|facts| facts.is_clock_synchronised = None, "time", Warned, "does not say", "timedatectl");
    assert_ill(|facts| facts.data = None, "network", Warned, "no data address", "data_interface");
    let down =
        |facts: &mut Facts| facts.data.as_mut().unwrap().choice.problem = Some("eth1 is down".to_owned());
    assert_ill(down, "network", Failed, "eth1 is down", "ip -br link");
    let lost = |facts: &mut Facts| facts.data.as_mut().unwrap().peers[0].2 = false;
    assert_ill(
        lost,
        "network",
        Failed,
        "packets of 9000 bytes, the MTU of eth1, do not reach 192.0.2.2",
        "mtu 1500",
    );
    let small = |facts: &mut Facts| facts.data.as_mut().unwrap().interface = Some(("eth1".to_owned(), 576));
    assert_ill(small, "network", Warned, "MTU of 576", "ip link set eth1 mtu 1500");
    // A host that answers no ping at all says nothing about the MTU.
    let mut filtered = well();
    filtered.data.as_mut().unwrap().peers[0] = ("192.0.2.2".parse().unwrap(), false, false);
    assert!(examine(&filtered).iter().all(|finding| finding.level == Level::Passed));
    // Nor does the MTU of lo, which has the addresses that a routing daemon announces.
    let mut announced = well();
    let data = announced.data.as_mut().unwrap();
    (data.interface, data.peers[0].2) = (Some(("lo".to_owned(), 65536)), false);
    assert!(examine(&announced).iter().all(|finding| finding.level == Level::Passed));
    let expired = |facts: &mut Facts| facts.tls = Some((true, "the certificate is expired".to_owned()));
    assert_ill(expired, "tls", Failed, "expired", "serve --check");
    let missing = |facts: &mut Facts| facts.tls = Some((false, "no certificate yet".to_owned()));
    assert_ill(missing, "tls", Warned, "no certificate yet", "security.md");
    let both = |facts: &mut Facts| facts.longhorn.push("longhorn-manager runs on this host".to_owned());
    assert_ill(both, "longhorn", Warned, "longhorn-manager", "stop one");
    assert_commands(&of_configuration("colour is unknown"));
    assert_commands(&of_host("no permission"));
}

#[test]
fn instances_that_end_with_the_agent_are_a_warning() {
    let problem = |choice, has_systemd| crate::serve::children_end(choice, has_systemd);
    let children = |facts: &mut Facts| facts.mortal_instances = problem(InstancesChoice::Children, true);
    assert_ill(children, "instances", Level::Warned, "instances is \"children\"", "instances = \"auto\"");
    for (choice, has_systemd) in [
        (InstancesChoice::Children, false),
        (InstancesChoice::Auto, true),
        (InstancesChoice::Auto, false),
        (InstancesChoice::Systemd, true),
    ] {
        assert_eq!(problem(choice, has_systemd), None, "{choice:?} {has_systemd}");
    }
}
