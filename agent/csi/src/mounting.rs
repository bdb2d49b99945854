//! Mounting and unmounting, with mount(8) and umount(8): they know the options of every file system, and keep
//! `_netdev` where systemd finds it. With it, systemd unmounts a volume before it stops the engine of its
//! device.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use shorthorn_csi::{CsiError, FsKind};
use shorthorn_linux::mounts::{Mount, MountTable};

use crate::command::Tool;

/// The time limit of mount and unmount: mounting replays the journal, and unmounting writes back dirty data.
/// Gigabytes of dirty data on slow disks take minutes.
const MOUNT_LIMIT: Duration = Duration::from_secs(30 * 60);
/// The time limit of a bind mount. The kernel changes a table in memory for that, but waits for other mounts.
const BIND_LIMIT: Duration = Duration::from_secs(60);
/// The maximum number of stacked mounts that are unmounted.
const STACKED_MAX: usize = 16;
const SELINUX: &str = "/sys/fs/selinux/enforce";

/// Mounts the file system on `device` at `point`.
pub(crate) fn mount(
    device: &Path,
    point: &Path,
    kind: FsKind,
    read_only: bool,
    flags: &[String],
) -> Result<(), CsiError> {
    Ok(mount_tool(device, point, kind, read_only, flags).succeed().map(drop)?)
}

fn mount_tool(device: &Path, point: &Path, kind: FsKind, read_only: bool, flags: &[String]) -> Tool {
    let mut options = vec!["_netdev".to_owned(), if read_only { "ro" } else { "rw" }.to_owned()];
    match kind {
        // A file system with errors is not written to any further, unless that is asked for.
        FsKind::Ext4 => options.push("errors=remount-ro".into()),
        // A clone has the identity of its origin, and both may be here.
        FsKind::Xfs => options.push("nouuid".into()),
    }
    // Last, so that they count.
    options.extend_from_slice(flags);
    if read_only {
        options.push("ro".into());
    }
    Tool::new("mount", MOUNT_LIMIT)
        .args(["-t", kind.name(), "-o", &options.join(","), "--"])
        .arg(device)
        .arg(point)
}

/// Makes the content at `from` appear at `to` as well.
pub(crate) fn bind(from: &Path, to: &Path, read_only: bool) -> Result<(), CsiError> {
    let options = if read_only { "bind,_netdev,ro" } else { "bind,_netdev" };
    let tool = Tool::new("mount", BIND_LIMIT).args(["-o", options, "--"]);
    Ok(tool.arg(from).arg(to).succeed().map(drop)?)
}

/// Unmounts everything that is mounted at `point` and for which `check_may_unmount` is true.
pub(crate) fn unmount_all(
    point: &Path,
    check_may_unmount: impl Fn(&Mount) -> Result<(), CsiError>,
) -> Result<(), CsiError> {
    for _ in 0..STACKED_MAX {
        let table = read_table()?;
        let Some(mount) = table.at(point) else { return Ok(()) };
        check_may_unmount(mount)?;
        // Not looked up on the way: a device that does not answer would hang that.
        let tool = Tool::new("umount", MOUNT_LIMIT).args(["--no-canonicalize", "--"]).arg(point);
        tool.succeed().map_err(|error| CsiError::Unavailable(format!("{}: {error}", point.display())))?;
    }
    Err(CsiError::Unavailable(format!(
        "{}: more than {STACKED_MAX} mounts on top of each other",
        point.display()
    )))
}

/// Returns the current mounts.
pub(crate) fn read_table() -> Result<MountTable, CsiError> {
    MountTable::read().map_err(CsiError::system("the table of mounts"))
}

/// Resolves a path, without following its last part. None if its directory does not exist.
pub(crate) fn resolve(path: &Path) -> Result<Option<PathBuf>, CsiError> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Ok(None) };
    match fs::canonicalize(parent) {
        Ok(parent) => Ok(Some(parent.join(name))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(CsiError::system(parent.display())(error)),
    }
}

/// The kind of a mount point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TargetKind {
    /// A directory, for a file system.
    Directory,
    /// A file, for a device node.
    File,
}

/// Makes a mount point, and returns whether it did not exist. An existing one must be empty: a mount would
/// hide its data, which was written while the volume was not mounted.
pub(crate) fn create_target(path: &Path, kind: TargetKind) -> Result<bool, CsiError> {
    let at = || CsiError::system(path.display());
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(at()(error)),
        Ok(meta) if meta.is_dir() == (kind == TargetKind::Directory) && !meta.is_symlink() => {
            return is_unused(path, &meta).and_then(|unused| match unused {
                true => Ok(false),
                false => Err(not_empty(path)),
            });
        }
        // The other kind of an empty place, from another life of this path.
        Ok(_) => remove_target(path)?,
    }
    match kind {
        TargetKind::Directory => fs::DirBuilder::new().mode(0o750).create(path).map_err(at())?,
        TargetKind::File => {
            let file =
                fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(at())?;
            file.set_permissions(fs::Permissions::from_mode(0o600)).map_err(at())?;
        }
    }
    Ok(true)
}

/// Removes an empty place. OK if it is gone.
pub(crate) fn remove_target(path: &Path) -> Result<(), CsiError> {
    let meta = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(CsiError::system(path.display()))?,
    };
    if !is_unused(path, &meta)? {
        return Err(not_empty(path));
    }
    let removed = if meta.is_dir() { fs::remove_dir(path) } else { fs::remove_file(path) };
    removed.map_err(CsiError::system(path.display()))
}

fn is_unused(path: &Path, meta: &fs::Metadata) -> Result<bool, CsiError> {
    if meta.is_dir() {
        return Ok(fs::read_dir(path).map_err(CsiError::system(path.display()))?.next().is_none());
    }
    Ok(meta.is_file() && meta.len() == 0)
}

fn not_empty(path: &Path) -> CsiError {
    let hint = "no volume is mounted there, but the directory has content: move the content away";
    CsiError::Precondition(format!("{} is not empty: {hint}", path.display()))
}

/// Returns true if files show as the mount flags want SELinux to see them.
pub(crate) fn has_context(mount: &Mount, flags: &[String]) -> bool {
    let wanted = flags.iter().find_map(|flag| context_of(flag));
    let found = context_of(&mount.super_options);
    match (wanted, found) {
        (wanted, Some(found)) => wanted.is_none_or(|wanted| wanted == found),
        (Some(_), None) => !Path::new(SELINUX).exists(),
        (None, None) => true,
    }
}

fn context_of(options: &str) -> Option<&str> {
    let options = shorthorn_csi::options(options)?;
    options.iter().find_map(|option| option.strip_prefix("context=")).map(|context| context.trim_matches('"'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTEXT: &str = r#"context="system_u:object_r:container_file_t:s0:c10,c20""#;

    fn options_of(tool: &Tool) -> String {
        let arguments = tool.arguments();
        let at = arguments.iter().position(|argument| argument == "-o").unwrap();
        arguments[at + 1].to_str().unwrap().to_owned()
    }

    #[test]
    fn an_selinux_context_reaches_mount_intact() {
        let flags = [CONTEXT.to_owned(), "noatime".to_owned()];
        let tool = mount_tool(Path::new("/dev/x"), Path::new("/m"), FsKind::Ext4, false, &flags);
        let options = options_of(&tool);
        let options = shorthorn_csi::options(&options).unwrap();
        assert_eq!(options, ["_netdev", "rw", "errors=remount-ro", CONTEXT, "noatime"]);
        assert_eq!(tool.arguments()[tool.arguments().len() - 3..], ["--", "/dev/x", "/m"]);
    }

    #[test]
    fn a_flag_cannot_make_a_read_only_mount_writable() {
        let tool = mount_tool(Path::new("/dev/x"), Path::new("/m"), FsKind::Xfs, true, &["rw".to_owned()]);
        assert!(options_of(&tool).ends_with(",rw,ro"), "{tool:?}");
    }

    #[test]
    fn contexts_are_compared() {
        let line = |options: &str| Mount {
            device: "1:2".parse().unwrap(),
            root: "/".into(),
            point: "/m".into(),
            options: "rw".into(),
            is_shared: false,
            source: "/dev/longhorn/v".into(),
            fs_type: "ext4".into(),
            super_options: options.into(),
        };
        let flags = [CONTEXT.to_owned()];
        assert!(has_context(&line(&format!("rw,{CONTEXT},seclabel")), &flags));
        assert!(!has_context(&line(&format!("rw,{}", CONTEXT.replace("c20", "c21"))), &flags));
        assert!(has_context(&line("rw"), &[]));
        assert!(has_context(&line(&format!("rw,{CONTEXT}")), &[]), "nothing is asked for");
    }

    #[test]
    fn targets_are_created_and_removed_but_never_with_data() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("target");
        assert!(create_target(&path, TargetKind::Directory).unwrap());
        assert!(!create_target(&path, TargetKind::Directory).unwrap());
        assert!(
            create_target(&path, TargetKind::File).unwrap(),
            "an empty leftover of the other kind is replaced"
        );
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        fs::write(&path, "data").unwrap();
        assert!(matches!(create_target(&path, TargetKind::File), Err(CsiError::Precondition(_))));
        assert!(matches!(create_target(&path, TargetKind::Directory), Err(CsiError::Precondition(_))));
        assert!(matches!(remove_target(&path), Err(CsiError::Precondition(_))));
        assert_eq!(fs::read(&path).unwrap(), b"data");
        fs::remove_file(&path).unwrap();
        fs::create_dir_all(path.join("below")).unwrap();
        assert!(matches!(remove_target(&path), Err(CsiError::Precondition(_))));
        fs::remove_dir(path.join("below")).unwrap();
        remove_target(&path).unwrap();
        remove_target(&path).unwrap();
        std::os::unix::fs::symlink("/etc", &path).unwrap();
        assert!(create_target(&path, TargetKind::Directory).is_err(), "a link is followed nowhere");
    }

    #[test]
    fn the_last_part_of_a_path_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let real = fs::canonicalize(dir.path()).unwrap();
        fs::create_dir(real.join("kubelet")).unwrap();
        std::os::unix::fs::symlink(real.join("kubelet"), real.join("link")).unwrap();
        assert_eq!(resolve(&real.join("link/x")).unwrap(), Some(real.join("kubelet/x")));
        assert_eq!(resolve(&real.join("link")).unwrap(), Some(real.join("link")));
        assert_eq!(resolve(&real.join("none/x")).unwrap(), None);
    }
}
