//! Tests `disk discover` and `disk init` on loop devices: refusals, and a disk from an empty device.
#![allow(clippy::unwrap_used)] // an unexpected value fails the test

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Enough for XFS, sparse.
const SIZE_BYTES: u64 = 2 << 30;

/// A loop device with its file, and everything else that a test makes.
struct Host {
    folder: tempfile::TempDir,
    device: PathBuf,
}

fn output(program: &str, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).output().unwrap_or_else(|error| panic!("{program}: {error}"))
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = output(program, arguments);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {stderr}");
    String::from_utf8(output.stdout).unwrap()
}

impl Host {
    fn new() -> Host {
        assert!(nix::unistd::geteuid().is_root(), "loop devices need root");
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        let file = folder.path().join("device");
        File::create(&file).unwrap().set_len(SIZE_BYTES).unwrap();
        let device = run("losetup", &["--find", "--show", file.to_str().unwrap()]);
        let config = format!(
            "node_name = \"n1\"\nstate_dir = \"{0}/state\"\nlisten = [\"unix:{0}/sock\"]\ncsi = \"off\"\n",
            folder.path().display()
        );
        fs::write(folder.path().join("agent.toml"), config).unwrap();
        Host { device: device.trim().into(), folder }
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    fn agent(&self, arguments: &[&str]) -> Output {
        let config = self.path("agent.toml");
        output(env!("CARGO_BIN_EXE_shorthorn-agent"), &[arguments, &["--config", &config]].concat())
    }

    /// Returns the text that discover writes about the device.
    fn discover(&self, options: &[&str]) -> String {
        let device = self.device.to_str().unwrap();
        let output = self.agent(&[&["disk", "discover", device], options].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Stores the file as an operator has reviewed it, with a mount point of this test.
    fn review(&self, text: &str) -> String {
        let name = self.device.file_name().unwrap().to_str().unwrap();
        let place = format!("/var/lib/shorthorn/disks/{name}");
        let text = text.replace("init = false", "init = true").replace(&place, &self.path("mount"));
        let file = self.path("plan.toml");
        fs::write(&file, text).unwrap();
        file
    }

    fn init(&self, plan: &str) -> Output {
        self.agent(&["disk", "init", plan, "--units", &self.path("units")])
    }

    /// Asserts that init refuses with this message, and has changed no byte of the device.
    fn assert_refused(&self, plan: &str, message: &str) {
        let before = self.content();
        let output = self.init(plan);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && stderr.contains(message), "{message}: {stderr}");
        assert_eq!(self.content(), before, "the device has changed");
        assert!(!Path::new(&self.path("units")).exists());
    }

    /// Returns a check of the blocks of the backing file that have data.
    fn content(&self) -> String {
        run("sync", &[]);
        let file = self.path("device");
        run("sh", &["-c", &format!("head -c 8M {file} | sha256sum; tail -c 8M {file} | sha256sum")])
    }

    fn write(&self, at: u64, data: &[u8]) {
        OpenOptions::new().write(true).open(&self.device).unwrap().write_all_at(data, at).unwrap();
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = output("umount", &[&self.path("mount")]);
        let _ = output("umount", &[&self.path("elsewhere")]);
        let _ = output("losetup", &["--detach", self.device.to_str().unwrap()]);
    }
}

#[test]
fn an_empty_device_becomes_a_disk() {
    for filesystem in ["xfs", "ext4"] {
        let host = Host::new();
        let plan = host.review(&host.discover(&["--filesystem", filesystem]));
        let output = host.agent(&["disk", "init", &plan, "--dry-run"]);
        assert!(output.status.success(), "{output:?}");
        assert!(
            run("wipefs", &["--no-act", host.device.to_str().unwrap()]).is_empty(),
            "a dry run writes nothing"
        );
        let output = host.init(&plan);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let mount = host.path("mount");
        let shown = run("findmnt", &["--noheadings", "--output", "FSTYPE,UUID", &mount]);
        let text = fs::read_to_string(&plan).unwrap();
        let uuid = text.lines().find_map(|line| line.strip_prefix("uuid = ")).unwrap().trim_matches('"');
        assert_eq!(shown.split_whitespace().collect::<Vec<_>>(), [filesystem, uuid]);
        assert!(Path::new(&mount).join("longhorn-disk.cfg").exists(), "it is a disk");
        assert_eq!(nix::sys::statvfs::statvfs(mount.as_str()).unwrap().fragment_size(), 4096);
        let unit = fs::read_dir(host.path("units")).unwrap().next().unwrap().unwrap().path();
        let unit = fs::read_to_string(unit).unwrap();
        assert!(unit.contains(&format!("What=/dev/disk/by-uuid/{uuid}\nWhere={mount}\n")), "{unit}");
        let kept = fs::read_to_string(host.path("state/disks.json")).unwrap();
        assert!(kept.contains(&mount), "{kept}");
        // Once more changes nothing, as after an interruption between mkfs and mount.
        for unmount in [false, true] {
            if unmount {
                run("umount", &[&mount]);
            }
            let output = host.init(&plan);
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            assert!(Path::new(&mount).join("longhorn-disk.cfg").exists());
        }
        // And nothing else makes a file system on it.
        assert!(host.discover(&[]).contains("the device has a signature"), "{filesystem}");
    }
}

/// The name of a case, a change of the device, and the reason that init gives.
type Case = (&'static str, Box<dyn Fn(&Host)>, &'static str);

#[test]
fn a_device_that_has_something_is_left_alone() {
    let lvm = |host: &Host| {
        // The label of a physical volume in sector 1, with its checksum (lib/format_text/layout.h of LVM).
        let mut sector = [0_u8; 512];
        sector[..8].copy_from_slice(b"LABELONE");
        sector[8] = 1;
        sector[20..24].copy_from_slice(&32_u32.to_le_bytes());
        sector[24..32].copy_from_slice(b"LVM2 001");
        sector[32..64].copy_from_slice(b"0123456789abcdefghijklmnopqrstuv");
        let crc = lvm_crc(&sector[20..]);
        sector[16..20].copy_from_slice(&crc.to_le_bytes());
        host.write(512, &sector);
    };
    let tool = |program: &'static str, arguments: &'static [&'static str]| {
        move |host: &Host| drop(run(program, &[arguments, &[host.device.to_str().unwrap()]].concat()))
    };
    let cases: [Case; 6] = [
        ("ext4", Box::new(tool("mkfs.ext4", &["-q"])), "the device has a signature: ext4"),
        ("xfs", Box::new(tool("mkfs.xfs", &["-q"])), "the device has a signature: xfs"),
        ("swap", Box::new(tool("mkswap", &[])), "the device has a signature: swap"),
        (
            "partition table",
            Box::new(|host: &Host| {
                // An entry for Linux from sector 2048, and the mark of the table.
                let entry = [0, 0, 0, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0x10, 0];
                host.write(446, &entry);
                host.write(510, &[0x55, 0xaa]);
            }),
            "the device has a signature: dos",
        ),
        ("LVM", Box::new(lvm), "the device has a signature: LVM2_member"),
        (
            "unknown data",
            Box::new(|host: &Host| host.write(4096, b"data")),
            "the device has data without a known signature",
        ),
    ];
    for (name, change, message) in cases {
        let host = Host::new();
        let empty = host.discover(&[]);
        change(&host);
        let text = host.discover(&[]);
        assert!(
            text.contains(&format!("# {} (", host.device.display())) && text.contains(message),
            "{name}: {text}"
        );
        // The file was written when the device was empty: the last look finds the change.
        host.assert_refused(&host.review(&empty), message);
    }
}

/// The checksum of LVM's labels (calc_crc of lib/misc/crc.c).
fn lvm_crc(data: &[u8]) -> u32 {
    let mut crc = 0xf597_a6cf_u32;
    for byte in data {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 0 { crc >> 1 } else { (crc >> 1) ^ 0xedb8_8320 };
        }
    }
    crc
}

#[test]
fn a_mounted_device_is_left_alone() {
    let host = Host::new();
    let plan = host.review(&host.discover(&[]));
    let elsewhere = host.path("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    run("mkfs.ext4", &["-q", host.device.to_str().unwrap()]);
    // Without the journal, the mount itself writes nothing.
    run("mount", &["-o", "ro,noload", host.device.to_str().unwrap(), &elsewhere]);
    host.assert_refused(&plan, &format!("the device is mounted at {elsewhere}"));
}

#[test]
fn a_device_that_a_program_has_open_is_left_alone() {
    let host = Host::new();
    let plan = host.review(&host.discover(&[]));
    // As a virtual machine has its disk: open, but not exclusively.
    let device = File::open(&host.device).unwrap();
    let mut machine = Command::new("sleep").arg("600").stdin(device).spawn().unwrap();
    host.assert_refused(&plan, &format!("opened by process {} (sleep)", machine.id()));
    machine.kill().unwrap();
    machine.wait().unwrap();
    let output = host.agent(&["disk", "init", &plan, "--dry-run"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn another_device_of_the_same_name_is_left_alone() {
    let host = Host::new();
    let text = host.discover(&[]);
    let plan = host.review(&text);
    // Another disk takes the name: the kernel counts it.
    let device = host.device.to_str().unwrap();
    run("losetup", &["--detach", device]);
    run("losetup", &[device, &host.path("device")]);
    host.assert_refused(&plan, "the diskseq is");
    // After a start of the host, a name without a serial number means nothing.
    let text = host.discover(&[]);
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let plan = host.review(&text.replace(boot_id.trim(), "another-boot"));
    host.assert_refused(&plan, "the host was restarted");
    let plan = host.review(&text.replace(&SIZE_BYTES.to_string(), "4096"));
    host.assert_refused(&plan, "the size_bytes is");
}

#[test]
fn nothing_happens_unless_the_operator_wants_it() {
    let host = Host::new();
    let plan = host.path("plan.toml");
    let file = host.discover(&["--file", &plan]);
    assert!(file.contains("1 devices"), "{file}");
    host.assert_refused(&plan, "selects no device");
    // A file under review is not replaced, and one of another node is refused.
    let output = host.agent(&["disk", "discover", host.device.to_str().unwrap(), "--file", &plan]);
    assert!(!output.status.success());
    let text = fs::read_to_string(&plan).unwrap();
    let plan = host.review(&text.replace("node = \"n1\"", "node = \"n2\""));
    host.assert_refused(&plan, "for node \"n2\"");
    // A mount hides no files.
    let plan = host.review(&text);
    fs::create_dir(host.path("mount")).unwrap();
    fs::write(host.path("mount/file"), "x").unwrap();
    host.assert_refused(&plan, "is not empty");
}

#[test]
fn unknown_data_is_lost_only_with_consent() {
    let host = Host::new();
    host.write(4096, b"data");
    let text = host.discover(&[]);
    host.assert_refused(&host.review(&text), "accept_data");
    let output = host.init(&host.review(&text.replace("accept_data = false", "accept_data = true")));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn an_interrupted_mkfs_is_repeated_only_on_demand() {
    let host = Host::new();
    let text = host.discover(&[]);
    let plan = host.review(&text);
    let uuid =
        text.lines().find_map(|line| line.strip_prefix("uuid = ")).unwrap().trim_matches('"').to_owned();
    let device = host.device.to_str().unwrap();
    run("mkfs.xfs", &["-q", "-m", &format!("uuid={uuid}"), device]);
    // The state before the last write of mkfs.xfs.
    run("xfs_db", &["-x", "-c", "sb 0", "-c", "write -d inprogress 1", device]);
    host.assert_refused(&plan, "--redo makes it again");
    // Nothing else of the file system's owner is in the way, and another file does not own it.
    let other = host.review(&text.replace(&uuid, "0f8fad5b-d9cb-469f-a165-70867728950e"));
    let before = host.content();
    let output = host.agent(&["disk", "init", &other, "--redo", "--units", &host.path("units")]);
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("the device has a signature: xfs"),
        "{output:?}"
    );
    assert_eq!(host.content(), before);

    let plan = host.review(&text);
    let redo = || host.agent(&["disk", "init", &plan, "--redo", "--units", &host.path("units")]);
    let output = redo();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let file = host.path("mount/file");
    fs::write(&file, "data").unwrap();
    // A complete file system is never made again.
    run("umount", &[&host.path("mount")]);
    let output = redo();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(fs::read_to_string(&file).unwrap(), "data");
}
