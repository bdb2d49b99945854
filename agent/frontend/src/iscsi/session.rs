//! Sessions of the kernel's initiator in sysfs.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use shorthorn_linux::block_device::size_in;
use shorthorn_types::VolumeName;

use super::commands::{LUN, WAIT_S, target_name};
use crate::{node, wait};

const SESSIONS: &str = "/sys/class/iscsi_session";
const CONNECTIONS: &str = "/sys/class/iscsi_connection";
/// The state of a session that has a connection.
const LOGGED_IN: &str = "LOGGED_IN";
/// The seconds that requests wait in a session that is to end.
const SHORT_WAIT_S: u32 = 1;

/// A session with the target of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct IscsiSession {
    folder: PathBuf,
}

impl IscsiSession {
    /// Returns the session of the volume, if it has one.
    ///
    /// # Errors
    /// The error of sysfs.
    pub(super) fn find(volume: &VolumeName) -> io::Result<Option<IscsiSession>> {
        IscsiSession::find_in(Path::new(SESSIONS), volume)
    }

    fn find_in(sessions: &Path, volume: &VolumeName) -> io::Result<Option<IscsiSession>> {
        let entries = match fs::read_dir(sessions) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            entries => entries?,
        };
        let name = target_name(volume);
        for entry in entries {
            let folder = entry?.path();
            if attribute(&folder, "targetname").as_deref() == Some(&name) {
                return Ok(Some(IscsiSession { folder }));
            }
        }
        Ok(None)
    }

    /// Returns true if the session has a connection to its target.
    pub(super) fn is_logged_in(&self) -> bool {
        attribute(&self.folder, "state").as_deref() == Some(LOGGED_IN)
    }

    /// Waits until the session has a connection to its target.
    ///
    /// # Errors
    /// It has none within `limit`.
    pub(super) fn wait(&self, limit: Duration) -> io::Result<()> {
        let looked = wait::until(limit, || Ok::<_, io::Error>(self.is_logged_in().then_some(())))?;
        looked.ok_or_else(|| wait::timed_out(limit))
    }

    /// Returns the name of the volume's disk (as in /sys/block); none while the kernel has not found it.
    pub(super) fn disk(&self) -> Option<String> {
        let unit = self.unit()?;
        let entry = fs::read_dir(unit.join("block")).ok()?.find_map(Result::ok)?;
        entry.file_name().into_string().ok()
    }

    /// Returns the size of the volume's disk in bytes; none while the kernel has not found it.
    ///
    /// # Errors
    /// The error of sysfs.
    pub(super) fn size_bytes(&self) -> io::Result<Option<u64>> {
        let Some(unit) = self.unit() else { return Ok(None) };
        let Some(disk) = self.disk() else { return Ok(None) };
        size_in(&unit.join("block").join(disk))
    }

    /// Returns the folder of the volume's unit: H:0:0:1.
    fn unit(&self) -> Option<PathBuf> {
        let suffix = format!(":0:0:{LUN}");
        let children = |folder: &Path| fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
        children(&self.folder.join("device"))
            .filter(|entry| entry.file_name().to_string_lossy().starts_with("target"))
            .flat_map(|target| children(&target.path()).collect::<Vec<_>>())
            .find(|unit| unit.file_name().to_string_lossy().ends_with(&suffix))
            .map(|unit| unit.path())
    }

    /// Lets requests fail soon that wait for the target, because it does not come back.
    ///
    /// # Errors
    /// The error of sysfs.
    pub(super) fn give_up(&self) -> io::Result<()> {
        given_up(fs::write(self.folder.join("recovery_tmo"), SHORT_WAIT_S.to_string()))
    }

    /// Lets a request of the disk wait for the engine for as long as one of NBD. The kernel's own limit of 30
    /// s would have it reset the disk again and again, and fail the request in the end.
    ///
    /// # Errors
    /// The error of sysfs.
    pub(super) fn let_requests_wait(&self) -> io::Result<()> {
        let unit = self.unit().ok_or(io::ErrorKind::NotFound)?;
        fs::write(unit.join("timeout"), WAIT_S.to_string())
    }

    /// Returns the attribute with the longest WRITE SAME, in blocks; 0 turns it off.
    pub(super) fn write_same_limit(&self) -> io::Result<PathBuf> {
        let unit = self.unit().ok_or(io::ErrorKind::NotFound)?;
        let entry = fs::read_dir(unit.join("scsi_disk"))?.next().ok_or(io::ErrorKind::NotFound)??;
        Ok(entry.path().join("max_write_same_blocks"))
    }

    /// Returns true if the kernel does not use WRITE SAME for zeroes.
    pub(super) fn has_no_write_same(&self) -> io::Result<bool> {
        Ok(fs::read_to_string(self.write_same_limit()?)?.trim_end() == "0")
    }

    /// Returns the attribute that has the kernel read the size of the disk again. The writer waits for the
    /// disk.
    pub(super) fn rescan(&self) -> io::Result<PathBuf> {
        let unit = self.unit().ok_or(io::ErrorKind::NotFound)?;
        Ok(unit.join("rescan"))
    }
}

/// Waits until the disk has been found, and returns its name.
///
/// # Errors
/// It is not found within `limit`.
pub(super) fn wait_for_disk(volume: &VolumeName, limit: Duration) -> io::Result<(IscsiSession, String)> {
    let found = wait::until(limit, || {
        let session = IscsiSession::find(volume)?;
        Ok::<_, io::Error>(session.and_then(|session| Some((session.clone(), session.disk()?))))
    })?;
    found.ok_or_else(|| wait::timed_out(limit))
}

/// Returns the addresses of all targets that have a session, also of those that do not listen at the moment.
///
/// # Errors
/// The error of sysfs.
pub(super) fn addresses() -> io::Result<Vec<String>> {
    addresses_in(Path::new(CONNECTIONS))
}

fn addresses_in(connections: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(connections) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut addresses = Vec::new();
    for entry in entries {
        addresses.extend(attribute(&entry?.path(), "persistent_address"));
    }
    Ok(addresses)
}

/// Returns the result of a write to `recovery_tmo`. The kernel refuses it for a session without a connection.
/// That session needs no limit: the removal of its disk fails the requests that wait.
fn given_up(written: io::Result<()>) -> io::Result<()> {
    match written {
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(()),
        written => written,
    }
}

/// Returns the content of an attribute without the line's end; none if it does not exist.
fn attribute(folder: &Path, name: &str) -> Option<String> {
    Some(fs::read_to_string(folder.join(name)).ok()?.trim_end().to_owned())
}

/// Returns true if the disk has `size_bytes`.
///
/// # Errors
/// The error of sysfs.
pub(super) fn has_size(disk: &str, size_bytes: u64) -> io::Result<bool> {
    Ok(node::disk_size(disk)? == Some(size_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes the attributes of a session as the kernel shows them.
    fn session(sessions: &Path, number: u32, target: &str, disk: Option<&str>) {
        let folder = sessions.join(format!("session{number}"));
        let unit = folder.join(format!("device/target{number}:0:0/{number}:0:0:1"));
        fs::create_dir_all(folder.join(format!("device/target{number}:0:0/{number}:0:0:0"))).unwrap();
        fs::create_dir_all(unit.join("block")).unwrap();
        fs::write(folder.join("targetname"), format!("{target}\n")).unwrap();
        fs::write(folder.join("state"), "LOGGED_IN\n").unwrap();
        if let Some(disk) = disk {
            fs::create_dir(unit.join("block").join(disk)).unwrap();
        }
    }

    #[test]
    fn the_session_and_disk_of_a_volume_are_found_by_its_target() {
        let dir = tempfile::tempdir().unwrap();
        session(dir.path(), 3, "iqn.2026-11.io.shorthorn:v-10", Some("sdc"));
        session(dir.path(), 7, "iqn.2026-11.io.shorthorn:v-1", Some("sda"));
        session(dir.path(), 8, "iqn.2003-01.org.other:v-2", Some("sdb"));
        session(dir.path(), 9, "iqn.2026-11.io.shorthorn:new", None);
        let find = |name: &str| IscsiSession::find_in(dir.path(), &VolumeName::new(name).unwrap()).unwrap();
        assert_eq!(find("v-1").unwrap().disk().as_deref(), Some("sda"));
        assert_eq!(find("v-10").unwrap().disk().as_deref(), Some("sdc"));
        assert_eq!(find("v-2"), None, "another target with the name");
        let attribute = dir.path().join("session3/device/target3:0:0/3:0:0:1/block/sdc/size");
        assert_eq!(find("v-10").unwrap().size_bytes().unwrap(), None, "the kernel has not read it yet");
        fs::write(attribute, "2048\n").unwrap();
        assert_eq!(find("v-10").unwrap().size_bytes().unwrap(), Some(1 << 20));
        let new = find("new").unwrap();
        assert_eq!(new.size_bytes().unwrap(), None);
        assert_eq!(new.disk(), None);
        assert!(new.is_logged_in());
        fs::write(new.folder.join("state"), "FAILED\n").unwrap();
        assert!(!new.is_logged_in() && new.wait(Duration::ZERO).is_err());
        assert_eq!(
            IscsiSession::find_in(&dir.path().join("none"), &VolumeName::new("v").unwrap()).unwrap(),
            None
        );
    }

    #[test]
    fn the_addresses_of_all_sessions_are_known() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(addresses_in(&dir.path().join("none")).unwrap(), Vec::<String>::new());
        for (connection, address) in [("connection1:0", Some("127.83.1.2")), ("connection2:0", None)] {
            let folder = dir.path().join(connection);
            fs::create_dir(&folder).unwrap();
            if let Some(address) = address {
                fs::write(folder.join("persistent_address"), format!("{address}\n")).unwrap();
            }
        }
        assert_eq!(addresses_in(dir.path()).unwrap(), ["127.83.1.2"]);
    }

    #[test]
    fn a_session_without_a_connection_is_given_up_too() {
        assert!(given_up(Ok(())).is_ok());
        assert!(given_up(Err(io::Error::from_raw_os_error(libc::EBUSY))).is_ok());
        assert!(given_up(Err(io::Error::from_raw_os_error(libc::EACCES))).is_err());
    }
}
