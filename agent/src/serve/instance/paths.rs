//! Paths of the files of an instance.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use shorthorn_api::v1::InstanceKind;
use shorthorn_control::{EngineSpec, load_spec};
use shorthorn_types::{Secret, VolumeName};
use shorthorn_wire::fingerprint;

use crate::pid_file::is_held;
use crate::serve::error::NodeError;
use crate::serve::instance::InstanceId;

/// The longest path that `sockaddr_un` takes, which also needs a NUL.
const SOCKET_PATH_MAX_BYTES: usize = 107;
/// The time for which the state of an engine is kept after its last change. It is far longer than a call to
/// an agent can be in flight.
const ENGINE_STATE_KEPT: Duration = Duration::from_hours(24);

/// The directories of the agent.
#[derive(Clone, Debug)]
pub struct InstancePaths {
    state: PathBuf,
    runtime: PathBuf,
}

impl InstancePaths {
    /// Makes all directories that are missing.
    ///
    /// # Errors
    /// Names the directory.
    pub fn prepare(state: &Path, runtime: &Path) -> io::Result<InstancePaths> {
        let paths = InstancePaths { state: state.to_owned(), runtime: runtime.to_owned() };
        let mut needed = vec![paths.engine_states()];
        for kind in [InstanceKind::Engine, InstanceKind::Replica] {
            needed.push(paths.specs(kind));
            needed.push(runtime.join(folder(kind)));
        }
        for path in needed {
            let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&path);
            made.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))?;
        }
        Ok(paths)
    }

    /// Returns the directory of the spec files of a kind. Every instance with a spec file should run.
    pub fn specs(&self, kind: InstanceKind) -> PathBuf {
        self.state.join("instances").join(folder(kind))
    }

    /// Returns the spec file of an instance. Its unit reads the same.
    pub fn spec(&self, id: &InstanceId) -> PathBuf {
        self.specs(id.kind()).join(format!("{}.json", id.name()))
    }

    /// Returns the state file of the engine of an attached volume. A volume that is made again under the name
    /// has another file. Its attachments start over, and grants of the former volume mean nothing to it.
    pub fn engine_state(&self, volume: &VolumeName, secret: &Secret) -> PathBuf {
        self.engine_states().join(format!("{volume}-{}.json", fingerprint(secret.bytes())))
    }

    fn engine_states(&self) -> PathBuf {
        self.state.join("engines")
    }

    /// Removes the state of engines that have no spec, and had none for so long that no call about one is
    /// under way any more. The caller ensures that no engine is being started: none may be about to open its
    /// state.
    ///
    /// # Errors
    /// Names the file.
    pub fn remove_old_engine_states(&self, now: SystemTime) -> io::Result<()> {
        let mut wanted = BTreeSet::new();
        for entry in fs::read_dir(self.specs(InstanceKind::Engine))? {
            let path = entry?.path();
            match load_spec::<EngineSpec>(&path) {
                Ok(spec) => drop(wanted.insert(spec.state_file)),
                // Whose state that is cannot be said.
                Err(error) => {
                    tracing::warn!("{}: {error}; no state of engines is removed", path.display());
                    return Ok(());
                }
            }
        }
        for entry in fs::read_dir(self.engine_states())? {
            let entry = entry?;
            let path = entry.path();
            if is_old(&entry, now)? && !wanted.contains(&path.with_extension("json")) {
                fs::remove_file(&path)
                    .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))?;
            }
        }
        Ok(())
    }

    /// Returns the volumes whose engines have left a state that old.
    ///
    /// # Errors
    /// Names the directory.
    pub fn old_engine_states(&self, now: SystemTime) -> io::Result<BTreeSet<VolumeName>> {
        let dir = self.engine_states();
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", dir.display()));
        let mut volumes = BTreeSet::new();
        for entry in fs::read_dir(&dir).map_err(named)? {
            let entry = entry.map_err(named)?;
            if is_old(&entry, now).map_err(named)? {
                volumes.extend(volume_of(&entry.path()));
            }
        }
        Ok(volumes)
    }

    /// Removes the old state of engines of a volume unless it has a spec. Only while no engine of it is
    /// started.
    ///
    /// # Errors
    /// Names the file.
    pub fn remove_old_engine_state(&self, volume: &VolumeName, now: SystemTime) -> io::Result<()> {
        if self.spec(&InstanceId::Engine(volume.clone())).try_exists()? {
            return Ok(());
        }
        for entry in fs::read_dir(self.engine_states())? {
            let entry = entry?;
            let path = entry.path();
            if volume_of(&path).as_ref() == Some(volume) && is_old(&entry, now)? {
                fs::remove_file(&path)
                    .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))?;
            }
        }
        Ok(())
    }

    /// Returns the file with the last error of an instance. Its unit has the same path.
    pub fn error(&self, id: &InstanceId) -> PathBuf {
        self.runtime_file(id, "error")
    }

    /// Returns the pid file of an instance that is not a unit.
    pub fn pid(&self, id: &InstanceId) -> PathBuf {
        self.runtime_file(id, "pid")
    }

    /// Returns the socket on which an engine that is not a unit gives its sockets to the agent. The path is
    /// shorter than that of the control socket.
    pub fn notify(&self, id: &InstanceId) -> PathBuf {
        self.runtime_file(id, "notify")
    }

    /// Removes the possible remains of the process of a stopped instance.
    pub fn remove_runtime_files(&self, id: &InstanceId) {
        for extension in ["pid", "error", "control", "nbd", "data", "notify"] {
            let path = self.runtime_file(id, extension);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!("{}: {error}", path.display());
                }
                _ => {}
            }
        }
    }

    /// Removes the record that the process of a replica has made its directory.
    pub fn remove_creation_record(&self, id: &InstanceId) {
        let path = self.runtime_file(id, "created");
        if let Err(error) = fs::remove_file(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!("{}: {error}", path.display());
        }
    }

    /// Removes the pid files that no process holds.
    ///
    /// # Errors
    /// Names the file.
    pub fn remove_pid_files(&self) -> io::Result<()> {
        for kind in [InstanceKind::Engine, InstanceKind::Replica] {
            for entry in fs::read_dir(self.runtime.join(folder(kind)))? {
                let path = entry?.path();
                let is_pid_file = path.extension().is_some_and(|extension| extension == "pid");
                if is_pid_file && !is_held(&path)? {
                    fs::remove_file(&path)?;
                }
            }
        }
        Ok(())
    }

    /// Returns the boot of the host that the pid files are of.
    pub fn boot_id(&self) -> PathBuf {
        self.runtime.join("boot-id")
    }

    /// Returns the control socket of an instance.
    ///
    /// # Errors
    /// [`NodeError::Invalid`] if its path is too long.
    pub fn control(&self, id: &InstanceId) -> Result<PathBuf, NodeError> {
        self.socket(id, "control")
    }

    /// Returns the data socket of a replica; the socket for NBD clients of an engine.
    ///
    /// # Errors
    /// [`NodeError::Invalid`] if its path is too long.
    pub fn data(&self, id: &InstanceId) -> Result<PathBuf, NodeError> {
        self.socket(id, if id.kind() == InstanceKind::Engine { "nbd" } else { "data" })
    }

    fn socket(&self, id: &InstanceId, extension: &str) -> Result<PathBuf, NodeError> {
        let path = self.runtime_file(id, extension);
        let length = path.as_os_str().len();
        if length <= SOCKET_PATH_MAX_BYTES {
            return Ok(path);
        }
        Err(NodeError::Invalid(format!(
            "{} has {length} bytes, and the path of a Unix socket at most {SOCKET_PATH_MAX_BYTES}: use a \
             shorter runtime_dir, or a shorter name",
            path.display()
        )))
    }

    fn runtime_file(&self, id: &InstanceId, extension: &str) -> PathBuf {
        self.runtime.join(folder(id.kind())).join(format!("{}.{extension}", id.name()))
    }
}

fn is_old(entry: &fs::DirEntry, now: SystemTime) -> io::Result<bool> {
    let age = now.duration_since(entry.metadata()?.modified()?).unwrap_or_default();
    Ok(age >= ENGINE_STATE_KEPT)
}

/// Returns the volume of a state file: VOLUME-FINGERPRINT and an extension.
fn volume_of(path: &Path) -> Option<VolumeName> {
    let (volume, _) = path.file_stem()?.to_str()?.rsplit_once('-')?;
    VolumeName::new(volume).ok()
}

fn folder(kind: InstanceKind) -> &'static str {
    if kind == InstanceKind::Engine { "engine" } else { "replica" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_directory_has_room_for_the_longest_name() {
        let paths = InstancePaths { state: "/var/lib/shorthorn".into(), runtime: "/run/shorthorn".into() };
        let volume = "v".repeat(63);
        let ids = [
            InstanceId::parse(InstanceKind::Engine, &volume).unwrap(),
            InstanceId::parse(InstanceKind::Replica, &format!("{volume}-01234567")).unwrap(),
        ];
        for id in ids {
            assert!(paths.control(&id).is_ok() && paths.data(&id).is_ok(), "{id}");
        }
    }

    #[test]
    fn the_state_of_an_engine_is_kept_for_a_day_and_only_for_its_own_volume() {
        let dir = tempfile::tempdir().unwrap();
        let paths = InstancePaths::prepare(&dir.path().join("state"), &dir.path().join("run")).unwrap();
        let volume = |name: &str| VolumeName::new(name).unwrap();
        let state = |name: &str, secret: u8| paths.engine_state(&volume(name), &Secret::new([secret; 32]));
        assert_ne!(state("v", 1), state("v", 2));
        let (kept, gone) = (state("kept", 1), state("gone", 1));
        for path in [&kept, &gone] {
            for extension in ["json", "lock", "tmp"] {
                fs::write(path.with_extension(extension), "{}").unwrap();
            }
        }
        let count = || fs::read_dir(paths.engine_states()).unwrap().count();
        let id = InstanceId::Engine(volume("kept"));
        let spec = serde_json::json!({
            "volume": "kept", "size_bytes": 4096, "attach": 1, "replicas": [], "frontend": "socket",
            "secret": "01".repeat(32), "state_file": kept, "control_socket": "/c", "frontend_socket": "/f",
            "device_dir": "/d", "queues": 1, "depth": 1, "replica_timeout_ms": 100
        });
        fs::write(paths.spec(&id), spec.to_string()).unwrap();
        load_spec::<EngineSpec>(&paths.spec(&id)).unwrap();
        paths.remove_old_engine_states(SystemTime::now()).unwrap();
        assert_eq!(count(), 6, "too young");
        let later = SystemTime::now() + ENGINE_STATE_KEPT;
        paths.remove_old_engine_states(later).unwrap();
        assert_eq!(count(), 3);
        assert!(kept.exists() && !gone.exists());
        fs::write(paths.specs(InstanceKind::Engine).join("broken.json"), "{").unwrap();
        fs::remove_file(paths.spec(&id)).unwrap();
        paths.remove_old_engine_states(later).unwrap();
        assert_eq!(count(), 3, "the owner of the state is unknown");
    }

    #[test]
    fn the_state_of_an_engine_is_removed_unless_it_is_wanted_or_young() {
        let dir = tempfile::tempdir().unwrap();
        let paths = InstancePaths::prepare(&dir.path().join("state"), &dir.path().join("run")).unwrap();
        let volume = |name: &str| VolumeName::new(name).unwrap();
        for name in ["pvc-1", "pvc-1-a"] {
            let state = paths.engine_state(&volume(name), &Secret::new([1; 32]));
            for extension in ["json", "lock"] {
                fs::write(state.with_extension(extension), "{}").unwrap();
            }
        }
        let left = || fs::read_dir(paths.engine_states()).unwrap().count();
        let (now, later) = (SystemTime::now(), SystemTime::now() + ENGINE_STATE_KEPT);
        assert!(paths.old_engine_states(now).unwrap().is_empty());
        let names: Vec<String> =
            paths.old_engine_states(later).unwrap().iter().map(ToString::to_string).collect();
        assert_eq!(names, ["pvc-1", "pvc-1-a"]);
        paths.remove_old_engine_state(&volume("pvc-1"), now).unwrap();
        assert_eq!(left(), 4, "too young");
        let spec = paths.spec(&InstanceId::Engine(volume("pvc-1")));
        fs::write(&spec, "{").unwrap();
        paths.remove_old_engine_state(&volume("pvc-1"), later).unwrap();
        assert_eq!(left(), 4, "it is wanted");
        fs::remove_file(&spec).unwrap();
        paths.remove_old_engine_state(&volume("pvc-1"), later).unwrap();
        assert_eq!(left(), 2, "those of the other volume stay");
    }

    #[test]
    fn a_path_that_is_too_long_is_refused_in_words() {
        let paths = InstancePaths { state: "/s".into(), runtime: format!("/{}", "r".repeat(100)).into() };
        let id = InstanceId::parse(InstanceKind::Engine, "v1").unwrap();
        let text = paths.control(&id).unwrap_err().to_string();
        assert!(text.contains("shorter runtime_dir"), "{text}");
    }
}
