//! The files of the package that a host needs at run time, in the places that a boot empties.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, ensure};

/// The time between two attempts to run a program that a forked process still has open. Between fork and exec
/// are milliseconds; under load two seconds are enough.
const BUSY_PAUSE: Duration = Duration::from_millis(20);
const BUSY_ATTEMPTS_MAX: u32 = 100;

/// The program in the units of the package.
const PROGRAM_OF_UNITS: &str = "/usr/bin/shorthorn-agent";

/// A file of the package: its path in a directory, and its content.
type Packaged = (&'static str, &'static str);

/// The target that the agent starts before any instance. The target activates those of the order, as the unit
/// of the agent does on a host with the package. systemd refuses to start those by their names.
pub const ORDER_TARGET: &str = "shorthorn-order.target";
const ORDER: &str = "[Unit]
Description=Shorthorn: the targets that order engines and replicas
After=shorthorn-replicas.target remote-fs-pre.target
Wants=shorthorn-replicas.target remote-fs-pre.target
";

/// The units of instances, and the order of a boot and a shutdown, in /run/systemd/system. The agent itself
/// is not a unit, and makes its CSI sockets by itself.
const UNITS: [Packaged; 7] = [
    (ORDER_TARGET, ORDER),
    ("shorthorn-engine@.service", include_str!("../../../systemd/system/shorthorn-engine@.service")),
    ("shorthorn-replica@.service", include_str!("../../../systemd/system/shorthorn-replica@.service")),
    ("shorthorn-replicas.target", include_str!("../../../systemd/system/shorthorn-replicas.target")),
    ("shorthorn.slice", include_str!("../../../systemd/system/shorthorn.slice")),
    (
        "kubepods.slice.d/shorthorn.conf",
        include_str!("../../../systemd/system/kubepods.slice.d/shorthorn.conf"),
    ),
    (
        "var-lib-kubelet-pods-.mount.d/shorthorn.conf",
        include_str!("../../../systemd/system/var-lib-kubelet-pods-.mount.d/shorthorn.conf"),
    ),
];

/// The program that orders replicas and the mounts of their disks, at each reload of systemd. /run may forbid
/// programs: a link there leads to the directory of the agent's copy.
const GENERATOR: Packaged =
    ("shorthorn-generator", include_str!("../../../systemd/system-generators/shorthorn-generator"));
const GENERATORS: &str = "run/systemd/system-generators";
/// The settings that the generator of the package reads.
const PACKAGED_SETTINGS: &str = "etc/shorthorn/agent.toml";

/// Options of the drivers, and the rule that keeps other programs off the disks of volumes. modprobe and udev
/// notice them by themselves.
const RULES: [Packaged; 2] = [
    ("run/modprobe.d/shorthorn.conf", include_str!("../../../systemd/modprobe.d/shorthorn.conf")),
    ("run/udev/rules.d/59-shorthorn.rules", include_str!("../../../systemd/udev/rules.d/59-shorthorn.rules")),
];

/// The directory that udev makes at its start.
const UDEV: &str = "run/udev";

/// The directories of shorthorn.conf of tmpfiles.d, with their modes. Other disks have to exist.
const DIRECTORIES: [(&str, u32); 4] = [
    ("run/shorthorn", 0o700),
    ("dev/longhorn", 0o755),
    ("var/lib/shorthorn", 0o700),
    ("var/lib/longhorn", 0o700),
];

/// The files that the agent's pod copies to its host.
#[derive(Debug)]
pub struct HostFiles<'a> {
    root: &'a Path,
}

impl HostFiles<'_> {
    /// Returns the files of the host whose root directory is `root`.
    pub fn in_root(root: &Path) -> HostFiles<'_> {
        HostFiles { root }
    }

    pub fn make_directories(&self) -> anyhow::Result<()> {
        DIRECTORIES.iter().try_for_each(|(path, mode)| make_directory(&self.root.join(path), *mode))
    }

    /// Writes the files that are read without systemd. A program takes udev for running if its directory
    /// exists.
    pub fn put_rules(&self) -> anyhow::Result<()> {
        let has_udev = self.root.join(UDEV).is_dir();
        let mut wanted = RULES.iter().filter(|(path, _)| has_udev || !path.starts_with(UDEV));
        wanted.try_for_each(|(path, content)| put(&self.root.join(path), content.as_bytes(), 0o644))
    }

    /// Writes the units, which run `program`.
    pub fn put_units(&self, program: &Path) -> anyhow::Result<()> {
        let program = program.to_str().filter(|path| is_plain(path));
        let program = program.context("--programs: use letters, digits, '/', '-', '_' and '.' only")?;
        let folder = self.root.join("run/systemd/system");
        UNITS.iter().try_for_each(|(name, content)| {
            put(&folder.join(name), content.replace(PROGRAM_OF_UNITS, program).as_bytes(), 0o644)
        })
    }

    /// Writes the generator beside the copy `program`, for the file `settings` below the root.
    pub fn put_generator(&self, program: &Path, settings: &str) -> anyhow::Result<()> {
        let (name, content) = GENERATOR;
        let file = program.with_file_name(name);
        put(&file, content.replace(PACKAGED_SETTINGS, settings).as_bytes(), 0o755)?;
        let link = self.root.join(GENERATORS).join(name);
        make_directory(&self.root.join(GENERATORS), 0o755)?;
        let new = link.with_added_extension("new");
        match fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => symlink(&file, &new),
        }
        .with_context(|| new.display().to_string())?;
        rename(&new, &link)
    }
}

/// Returns true if a unit takes the path as it is.
fn is_plain(path: &str) -> bool {
    path.chars().all(|c| c.is_ascii_alphanumeric() || "/-_.".contains(c))
}

/// Installs the program, after a test that it runs on this host. Processes of an earlier copy continue.
pub fn put_program(path: &Path, content: &[u8]) -> anyhow::Result<()> {
    if fs::read(path).is_ok_and(|found| found == content) {
        return Ok(());
    }
    let new = write_beside(path, content, 0o755)?;
    let output = run_version(&new);
    let hint = "the host needs the C library of the image or a later one, and must allow programs there";
    let output = output.with_context(|| format!("{}: {hint}", new.display()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {}: {hint}", new.display(), said.trim());
    rename(&new, path)
}

/// Runs `--version` of a program that was just written. A process that another thread forked meanwhile keeps
/// the file open for writing until its exec.
fn run_version(program: &Path) -> io::Result<Output> {
    let mut attempts = 1;
    loop {
        match Command::new(program).arg("--version").stdin(Stdio::null()).output() {
            Err(error)
                if error.kind() == io::ErrorKind::ExecutableFileBusy && attempts < BUSY_ATTEMPTS_MAX =>
            {
                attempts += 1;
                thread::sleep(BUSY_PAUSE);
            }
            output => return output,
        }
    }
}

/// Writes a file as a whole: readers find the former content or this one.
pub fn put(path: &Path, content: &[u8], mode: u32) -> anyhow::Result<()> {
    let new = write_beside(path, content, mode)?;
    rename(&new, path)
}

/// Writes the content to a file that is to be renamed, and returns its path.
fn write_beside(path: &Path, content: &[u8], mode: u32) -> anyhow::Result<PathBuf> {
    let new = path.with_added_extension("new");
    let write = || -> io::Result<()> {
        let mut file =
            fs::OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&new)?;
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        file.write_all(content)?;
        file.sync_all()
    };
    if let Some(folder) = path.parent() {
        make_directory(folder, 0o755)?;
    }
    write().with_context(|| new.display().to_string())?;
    Ok(new)
}

fn rename(from: &Path, to: &Path) -> anyhow::Result<()> {
    fs::rename(from, to).with_context(|| to.display().to_string())
}

/// Makes a directory with those above it. The umask does not apply to its own mode.
fn make_directory(path: &Path, mode: u32) -> anyhow::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let made = fs::DirBuilder::new().recursive(true).mode(mode).create(path);
    let made = made.and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(mode)));
    made.with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_run_the_copy() {
        let root = tempfile::tempdir().unwrap();
        let files = HostFiles::in_root(root.path());
        files.put_units(Path::new("/opt/s/shorthorn-agent")).unwrap();
        let folder = root.path().join("run/systemd/system");
        let mut starts = 0;
        for (name, _) in UNITS {
            let text = fs::read_to_string(folder.join(name)).unwrap();
            assert!(!text.contains(PROGRAM_OF_UNITS), "{name}");
            starts += text.matches("\nExecStart=/opt/s/shorthorn-agent ").count();
        }
        assert_eq!(starts, 2, "engine and replica");
        for path in ["/opt/a b/shorthorn-agent", "/opt/%n/shorthorn-agent"] {
            assert!(files.put_units(Path::new(path)).is_err(), "{path}");
        }
    }

    #[test]
    fn the_package_removes_each_file_that_would_replace_its_own() {
        let script = include_str!("../../../packaging/packages/runtime-copies.sh");
        let units = UNITS.iter().map(|(name, _)| format!("$units/{name}"));
        let rules = RULES.iter().map(|(path, _)| format!("/{path}"));
        let generator = format!("/{GENERATORS}/{}", GENERATOR.0);
        for path in units.chain(rules).chain([generator]) {
            assert!(script.split_whitespace().any(|word| word == path), "{path}");
        }
    }

    #[test]
    fn the_order_has_the_targets_of_the_agents_unit() {
        let agent = include_str!("../../../systemd/system/shorthorn-agent.service");
        let targets = "shorthorn-replicas.target remote-fs-pre.target";
        for line in [format!("After={targets}\n"), format!("Wants={targets}\n")] {
            assert!(agent.contains(&line) && ORDER.contains(&line), "{line}");
        }
    }

    #[test]
    fn the_generator_reads_the_settings_of_the_copy() {
        let root = tempfile::tempdir().unwrap();
        let files = HostFiles::in_root(root.path());
        let program = root.path().join("opt/s/shorthorn-agent");
        for _ in 0..2 {
            files.put_generator(&program, "run/shorthorn/agent.toml").unwrap();
        }
        let link = root.path().join("run/systemd/system-generators/shorthorn-generator");
        assert_eq!(fs::read_link(&link).unwrap(), root.path().join("opt/s/shorthorn-generator"));
        assert_eq!(fs::metadata(&link).unwrap().permissions().mode() & 0o777, 0o755);
        let text = fs::read_to_string(&link).unwrap();
        assert!(text.contains("config=$root/run/shorthorn/agent.toml\n"), "{text}");
        assert!(!text.contains(PACKAGED_SETTINGS), "{text}");
        assert_eq!(fs::read_dir(link.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn a_host_without_udev_gets_no_directory_of_udev() {
        let root = tempfile::tempdir().unwrap();
        let files = HostFiles::in_root(root.path());
        files.put_rules().unwrap();
        assert!(root.path().join("run/modprobe.d/shorthorn.conf").exists());
        assert!(!root.path().join(UDEV).exists());
        fs::create_dir_all(root.path().join(UDEV)).unwrap();
        files.put_rules().unwrap();
        assert!(root.path().join("run/udev/rules.d/59-shorthorn.rules").exists());
    }

    #[test]
    fn a_program_that_does_not_run_here_replaces_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bin/shorthorn-agent");
        put_program(&path, &fs::read("/bin/true").unwrap()).unwrap();
        let error = put_program(&path, &fs::read("/bin/false").unwrap()).unwrap_err().to_string();
        assert!(error.contains("C library"), "{error}");
        assert!(put_program(&path, b"\x7fELF").is_err());
        assert_eq!(fs::read(&path).unwrap(), fs::read("/bin/true").unwrap());
    }

    #[test]
    fn a_file_is_replaced_with_its_mode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/file");
        for (content, mode) in [("one", 0o644), ("two", 0o600)] {
            put(&path, content.as_bytes(), mode).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, mode);
        }
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn the_directories_are_those_of_the_package() {
        let text = include_str!("../../../systemd/tmpfiles.d/shorthorn.conf");
        for (path, mode) in DIRECTORIES {
            assert!(text.contains(&format!("d /{path} {mode:04o} root root -")), "{path}");
        }
    }
}
