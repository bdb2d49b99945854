//! The kernel's side of the FUSE file: the mount, and the descriptor of /dev/fuse.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno as SystemErrno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use shorthorn_linux::mounts::{Mount, MountTable};
use shorthorn_ring::IoBuf;
use shorthorn_types::VolumeName;

use super::protocol::FILE_MODE;

/// The device of FUSE. Opening it loads the module.
pub(crate) const FUSE_DEVICE: &str = "/dev/fuse";
/// The type of the mount, in the list of mounts.
const TYPE: &str = "fuse.shorthorn";

/// The descriptor over which the kernel sends requests for one file.
#[derive(Debug)]
pub(super) struct Channel(OwnedFd);

impl Channel {
    /// Mounts the file of `volume` on `path`, which must be a regular file.
    pub(super) fn mount(volume: &VolumeName, path: &Path) -> io::Result<Channel> {
        let fuse =
            OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(FUSE_DEVICE)?;
        let options = format!("fd={},rootmode={FILE_MODE:o},user_id=0,group_id=0", fuse.as_raw_fd());
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC | MsFlags::MS_NOATIME;
        mount(Some(source(volume).as_str()), path, Some(TYPE), flags, Some(options.as_str()))?;
        Ok(Channel(fuse.into()))
    }

    /// Uses a descriptor that the last engine has handed over. None if its mount is gone.
    pub(super) fn adopt(fuse: OwnedFd) -> Option<Channel> {
        let mut state = [PollFd::new(fuse.as_fd(), PollFlags::POLLIN)];
        let polled = poll(&mut state, PollTimeout::ZERO);
        let is_dead = state[0].revents().is_none_or(|events| events.contains(PollFlags::POLLERR));
        (polled.is_ok() && !is_dead).then_some(Channel(fuse))
    }

    /// Returns another descriptor of the same mount.
    pub(super) fn share(&self) -> io::Result<OwnedFd> {
        self.0.try_clone()
    }

    /// Reads the next request to `memory` and returns its length. Does not wait: the error is
    /// [`io::ErrorKind::WouldBlock`].
    pub(super) fn receive(&self, memory: &mut [u8]) -> io::Result<usize> {
        Ok(nix::unistd::read(&self.0, memory)?)
    }

    /// Sends an answer and the data behind it.
    pub(super) fn send(&self, answer: &[u8], data: Option<IoBuf>) -> io::Result<()> {
        let (start, length) = data.map_or((std::ptr::null_mut(), 0), |data| (data.as_ptr(), data.len()));
        let parts = [
            libc::iovec { iov_base: answer.as_ptr().cast_mut().cast(), iov_len: answer.len() },
            libc::iovec { iov_base: start.cast(), iov_len: length },
        ];
        let used = if data.is_some() { 2 } else { 1 };
        // SAFETY: the kernel only reads the parts, during this call. Memory of an arena is never unmapped.
        let count = unsafe { libc::writev(self.0.as_raw_fd(), parts.as_ptr(), used) };
        if count < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Returns the name of the volume's file in the list of mounts.
fn source(volume: &VolumeName) -> String {
    format!("shorthorn:{volume}")
}

/// Returns the path on which the file of `volume` is mounted.
///
/// # Errors
/// The error of the file system.
pub(super) fn mounted(volume: &VolumeName) -> io::Result<Option<PathBuf>> {
    Ok(mounted_in(&MountTable::read()?, volume))
}

fn mounted_in(mounts: &MountTable, volume: &VolumeName) -> Option<PathBuf> {
    let source = source(volume);
    let is_it = |mount: &&Mount| mount.fs_type == TYPE && mount.source == Path::new(&source);
    mounts.iter().rev().find(is_it).map(|mount| mount.point.clone())
}

/// Fails all requests of the file on `path`, and unmounts it. A path without a mount is left alone.
///
/// # Errors
/// The error of the kernel.
pub(super) fn unmount(path: &Path) -> io::Result<()> {
    // The first call ends the requests, and fails while the file is open.
    let ended = umount2(path, MntFlags::MNT_FORCE | MntFlags::UMOUNT_NOFOLLOW);
    let unmounted = match ended {
        Err(SystemErrno::EBUSY) => umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW),
        ended => ended,
    };
    match unmounted {
        // It is not a mount, or does not exist.
        Err(SystemErrno::EINVAL | SystemErrno::ENOENT) => Ok(()),
        unmounted => Ok(unmounted?),
    }
}

/// Makes the empty file on which the volume's file is mounted, and its directory.
///
/// # Errors
/// The error of the file system.
pub(super) fn make_mount_point(path: &Path) -> io::Result<()> {
    if let Some(directory) = path.parent() {
        use std::os::unix::fs::DirBuilderExt;
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    }
    File::options().write(true).create(true).truncate(false).open(path).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(name: &str) -> VolumeName {
        VolumeName::new(name).unwrap()
    }

    #[test]
    fn the_mount_of_a_volume_is_found_by_its_name() {
        let mounts = "\
25 1 254:0 / / rw,noatime - ext4 /dev/root rw
60 25 0:48 / /run/a\\040b/v-1.iscsi/disk rw,nosuid - fuse.shorthorn shorthorn:v-1 rw,user_id=0,group_id=0
61 25 0:49 / /run/v-10.iscsi/disk rw,nosuid shared:3 - fuse.shorthorn shorthorn:v-10 rw,user_id=0,group_id=0
62 25 0:50 / /mnt rw - fuse.sshfs shorthorn:v-2 rw
";
        let mounts = &MountTable::readable(mounts.as_bytes());
        assert_eq!(mounted_in(mounts, &volume("v-1")), Some("/run/a b/v-1.iscsi/disk".into()));
        assert_eq!(mounted_in(mounts, &volume("v-10")), Some("/run/v-10.iscsi/disk".into()));
        assert_eq!(mounted_in(mounts, &volume("v-2")), None);
        assert_eq!(mounted_in(&MountTable::default(), &volume("v-1")), None);
    }

    #[test]
    fn a_path_without_a_mount_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v.iscsi/disk");
        make_mount_point(&path).unwrap();
        make_mount_point(&path).unwrap();
        if nix::unistd::geteuid().is_root() {
            unmount(&path).unwrap();
        }
        assert!(path.exists());
    }
}
