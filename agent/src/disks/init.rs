//! Makes file systems on the devices of a reviewed file, and mounts them.
//!
//! Nothing is written to a device before the file names it by its identity. A last look, immediately before
//! mkfs, must also find it empty and unused. The file has the UUID of each file system to be made, so that a
//! repeated run continues if an earlier one was interrupted.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail, ensure};
use nix::fcntl::{Flock, FlockArg};
use shorthorn_linux::mounts::MountTable;

use crate::disks::collect::{device_at, open_exclusively};
use crate::disks::device::{BlockDevice, difference, obstacles};
use crate::disks::plan::PlannedDisk;
use crate::serve::missing_mount;

/// The way to mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mounts {
    /// A unit of systemd mounts now and after each start of the host.
    Systemd,
    /// This process mounts; the unit is written for later.
    Direct,
}

/// The options of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct InitOptions {
    /// True if the host was not restarted since the file was written.
    pub same_boot: bool,
    /// True if file systems of this file that an interrupted mkfs has not completed are made again.
    pub redo: bool,
}

/// Makes the file system of `disk`, unless that was done before, and mounts it. Returns a line about it.
///
/// # Errors
/// The device must not be used, with the reason; nothing was written to it then. Or a later step has failed.
pub fn init(
    disk: &PlannedDisk,
    options: InitOptions,
    units: &Path,
    mounts: &Mounts,
) -> anyhow::Result<String> {
    let shown = disk.device.display();
    let device = find(disk, options.same_boot)?;
    check_mount_point(&disk.mount_point, &device, missing_mount(&disk.mount_point))?;
    if is_made(disk, &device) && device.is_incomplete {
        make(disk, options)?;
    } else if is_made(disk, &device) {
        if device.mount_points.contains(&disk.mount_point) {
            write_unit(disk, units)?;
            return Ok(format!("{shown} is mounted at {} already", disk.mount_point.display()));
        }
    } else {
        make(disk, options)?;
    }
    fs::create_dir_all(&disk.mount_point).with_context(|| disk.mount_point.display().to_string())?;
    let unit = write_unit(disk, units)?;
    mount(disk, &unit, mounts)?;
    let kind = disk.filesystem.as_str();
    Ok(format!("{shown} has {kind} {} and is mounted at {}", disk.uuid, disk.mount_point.display()))
}

/// Checks without a change whether [`init`] would begin.
///
/// # Errors
/// The reason why not.
pub fn check(disk: &PlannedDisk, options: InitOptions) -> anyhow::Result<()> {
    let device = find(disk, options.same_boot)?;
    check_mount_point(&disk.mount_point, &device, missing_mount(&disk.mount_point))?;
    match is_made(disk, &device) {
        true if device.is_incomplete => refuse_incomplete(disk, &device, options).map(drop),
        true => Ok(()),
        false => refuse(disk, &device),
    }
}

/// Refuses to repeat an interrupted mkfs, unless the operator has requested that and the device has no other
/// obstacle. Returns the device without that file system.
fn refuse_incomplete(
    disk: &PlannedDisk,
    device: &BlockDevice,
    options: InitOptions,
) -> anyhow::Result<BlockDevice> {
    ensure!(
        options.redo,
        "{} is left alone: an mkfs was interrupted before it had completed the file system; --redo makes it \
         again",
        disk.device.display()
    );
    let without = BlockDevice { signatures: Vec::new(), has_data: false, ..device.clone() };
    refuse(disk, &without)?;
    Ok(without)
}

/// Returns the device that the file names.
fn find(disk: &PlannedDisk, same_boot: bool) -> anyhow::Result<BlockDevice> {
    let device = device_at(&disk.device)?;
    if let Some(difference) = difference(&disk.identity(), &device.identity, same_boot) {
        bail!(
            "{} is another device than the file names: {difference}; run disk discover again",
            disk.device.display()
        );
    }
    Ok(device)
}

/// Returns true if an earlier run has made the file system.
fn is_made(disk: &PlannedDisk, device: &BlockDevice) -> bool {
    let is_ours =
        |kind: &str, uuid: Option<&str>| kind == disk.filesystem.as_str() && uuid == Some(disk.uuid.as_str());
    !device.signatures.is_empty()
        && device.signatures.iter().all(|signature| is_ours(&signature.kind, signature.uuid.as_deref()))
}

fn refuse(disk: &PlannedDisk, device: &BlockDevice) -> anyhow::Result<()> {
    let reasons = obstacles(device, disk.accept_data);
    ensure!(reasons.is_empty(), "{} is left alone: {}", disk.device.display(), reasons.join("; "));
    Ok(())
}

fn make(disk: &PlannedDisk, options: InitOptions) -> anyhow::Result<()> {
    let shown = disk.device.display();
    // udev and others that obey https://systemd.io/BLOCK_DEVICE_LOCKING keep off until this is closed.
    let file = File::open(&disk.device).with_context(|| shown.to_string())?;
    let _lock = Flock::lock(file, FlockArg::LockExclusiveNonblock)
        .map_err(|(_, error)| error)
        .with_context(|| format!("{shown} is locked by another program: try again when that has ended"))?;
    let device = find(disk, options.same_boot)?;
    let is_incomplete = is_made(disk, &device) && device.is_incomplete;
    if is_incomplete {
        refuse_incomplete(disk, &device, options)?;
    } else {
        refuse(disk, &device)?;
    }
    let path = Path::new("/dev").join(&device.name);
    drop(open_exclusively(&path).with_context(|| format!("{shown} is in use"))?);
    if is_incomplete {
        // mkfs overwrites no file system; after an interruption here, the file needs accept_data.
        run(Command::new("wipefs").args(["--all", "--types", disk.filesystem.as_str()]).arg(&path))?;
    }
    let (program, arguments) = disk.filesystem.make(&disk.uuid, &path);
    run(Command::new(program).args(&arguments))
        .with_context(|| format!("{shown}: no file system was created"))
}

/// Checks that a mount hides nothing. The device may be mounted there already. `missing`: the mount of
/// /etc/fstab at or above the path that is not there. A unit would take precedence over it, or the directory
/// would be made below it.
fn check_mount_point(path: &Path, device: &BlockDevice, missing: Option<String>) -> anyhow::Result<()> {
    let shown = path.display();
    if device.mount_points.iter().any(|point| point == path) {
        return Ok(());
    }
    if let Some(point) = missing {
        bail!("{point} of /etc/fstab is not mounted: mount it, or choose another mount_point than {shown}");
    }
    // systemd mounts on no such path, and the node adds none.
    let above = path.ancestors().find_map(|above| Some((above, fs::canonicalize(above).ok()?)));
    if let Some((above, real)) = above.filter(|(above, real)| above != real) {
        bail!("{} of mount_point {shown} leads to {}: use that path", above.display(), real.display());
    }
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| shown.to_string()),
        Ok(metadata) => ensure!(metadata.is_dir(), "mount_point {shown} is not a directory"),
    }
    let is_mount = MountTable::read().context("/proc/self/mountinfo")?.at(path).is_some();
    ensure!(!is_mount, "another file system is mounted at mount_point {shown}");
    let is_empty = fs::read_dir(path).with_context(|| shown.to_string())?.next().is_none();
    ensure!(is_empty, "mount_point {shown} is not empty: a mount would hide its content");
    Ok(())
}

/// Returns the name of the unit for a mount point (systemd.unit(5), "String escaping").
fn unit_name(mount_point: &Path) -> String {
    let text = mount_point.to_string_lossy();
    let mut name = String::new();
    for (at, byte) in text.trim_matches('/').bytes().enumerate() {
        match byte {
            b'/' => name.push('-'),
            b'.' if at == 0 => name.push_str("\\x2e"),
            b':' | b'_' | b'.' => name.push(char::from(byte)),
            byte if byte.is_ascii_alphanumeric() => name.push(char::from(byte)),
            byte => name.push_str(&format!("\\x{byte:02x}")),
        }
    }
    format!("{name}.mount")
}

/// Returns the text of the unit. A host starts without the disk, because local-fs.target only wants it.
fn unit_text(disk: &PlannedDisk) -> String {
    // Values of units have % and \ as special characters.
    let place = disk.mount_point.to_string_lossy().replace('%', "%%").replace('\\', "\\\\");
    format!(
        "# Written by shorthorn-agent disk init.\n[Unit]\nDescription=Disk of Shorthorn\n\
         Before=local-fs.target\n\n[Mount]\nWhat=/dev/disk/by-uuid/{}\nWhere={place}\nType={}\n\
         Options=noatime\n\n[Install]\nWantedBy=local-fs.target\n",
        disk.uuid,
        disk.filesystem.as_str()
    )
}

fn write_unit(disk: &PlannedDisk, units: &Path) -> anyhow::Result<PathBuf> {
    let path = units.join(unit_name(&disk.mount_point));
    let text = unit_text(disk);
    match fs::read_to_string(&path) {
        Ok(there) if there == text => return Ok(path),
        Ok(_) => bail!(
            "{} exists and is not the unit of this disk: remove it, or choose another mount_point",
            path.display()
        ),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(|| path.display().to_string()),
    }
    fs::create_dir_all(units).with_context(|| units.display().to_string())?;
    fs::write(&path, text).with_context(|| path.display().to_string())?;
    File::open(&path)?.sync_all()?;
    Ok(path)
}

/// Has systemd run its generators again. shorthorn-generator orders replicas after the mounts of the disks
/// that it finds, so it has to run after a disk was added.
pub fn reload(mounts: &Mounts) -> anyhow::Result<()> {
    match mounts {
        Mounts::Systemd => run(Command::new("systemctl").arg("daemon-reload")),
        Mounts::Direct => Ok(()),
    }
}

fn mount(disk: &PlannedDisk, unit: &Path, mounts: &Mounts) -> anyhow::Result<()> {
    match mounts {
        Mounts::Systemd => {
            let name = unit.file_name().context("a unit without a name")?;
            reload(mounts)?;
            // The link by UUID is made by udev after mkfs has closed the device; the unit waits for it.
            run(Command::new("systemctl").args(["enable", "--now", "--"]).arg(name))
        }
        Mounts::Direct => {
            let mut mount = Command::new("mount");
            mount.args(["-t", disk.filesystem.as_str(), "-o", "noatime", "--"]);
            run(mount.arg(&disk.device).arg(&disk.mount_point))
        }
    }
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("starting {program}"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} has ended with {}: {}", output.status, text.trim());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disks::device::Signature;
    use crate::filesystem::Filesystem;

    fn planned(mount_point: &str) -> PlannedDisk {
        PlannedDisk {
            init: true,
            accept_data: false,
            device: "/dev/disk/by-id/ata-X".into(),
            size_bytes: 1 << 40,
            serial: None,
            wwn: None,
            diskseq: Some(1),
            filesystem: Filesystem::Xfs,
            uuid: "0f8fad5b-d9cb-469f-a165-70867728950e".to_owned(),
            mount_point: mount_point.into(),
        }
    }

    #[test]
    fn units_have_the_names_of_systemd() {
        for (path, name) in [
            ("/var/lib/shorthorn/disks/ata-X_1", "var-lib-shorthorn-disks-ata\\x2dX_1.mount"),
            ("/data", "data.mount"),
            ("/.data/a.b", "\\x2edata-a.b.mount"),
            ("/data/ä", "data-\\xc3\\xa4.mount"),
        ] {
            assert_eq!(unit_name(Path::new(path)), name);
        }
        let text = unit_text(&planned("/data/100%"));
        assert!(text.contains("Where=/data/100%%\n") && text.contains("Type=xfs\n"), "{text}");
    }

    #[test]
    fn another_unit_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let disk = planned("/data/a");
        let path = write_unit(&disk, folder.path()).unwrap();
        assert_eq!(write_unit(&disk, folder.path()).unwrap(), path);
        fs::write(&path, "[Mount]\n").unwrap();
        assert!(
            write_unit(&disk, folder.path()).unwrap_err().to_string().contains("not the unit of this disk")
        );
    }

    #[test]
    fn only_the_file_system_of_the_file_counts_as_made() {
        let disk = planned("/data/a");
        let signature =
            |kind: &str, uuid: &str| Signature { kind: kind.to_owned(), uuid: Some(uuid.to_owned()) };
        let made = |signatures: Vec<Signature>| {
            is_made(&disk, &BlockDevice { signatures, ..BlockDevice::default() })
        };
        assert!(made(vec![signature("xfs", &disk.uuid)]));
        for signatures in [
            vec![],
            vec![signature("ext4", &disk.uuid)],
            vec![signature("xfs", "other")],
            vec![signature("xfs", &disk.uuid), Signature { kind: "dos".to_owned(), uuid: None }],
        ] {
            assert!(!made(signatures.clone()), "{signatures:?}");
        }
    }

    #[test]
    fn a_mount_point_must_not_hide_files() {
        let folder = tempfile::tempdir().unwrap();
        let device = BlockDevice::default();
        let check = |path: &Path| check_mount_point(path, &device, None);
        check(&folder.path().join("new")).unwrap();
        check(folder.path()).unwrap();
        fs::write(folder.path().join("file"), "x").unwrap();
        assert!(check(folder.path()).is_err());
        assert!(check(&folder.path().join("file")).is_err());
        assert!(check(Path::new("/proc")).is_err(), "something else is mounted there");
        let mounted = BlockDevice { mount_points: vec!["/proc".into()], ..BlockDevice::default() };
        check_mount_point(Path::new("/proc"), &mounted, None).unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("/usr", &link).unwrap();
        assert!(check(&link.join("new")).unwrap_err().to_string().contains("leads to /usr"));
        // fstab has another file system for the place, whose disk is not there now.
        let new = folder.path().join("new");
        let refused = check_mount_point(&new, &device, Some("/data".to_owned())).unwrap_err();
        assert!(refused.to_string().contains("/data of /etc/fstab is not mounted"), "{refused}");
    }
}
