//! Disks: directories on mounted file systems that hold replicas, as Longhorn keeps them.

mod deletion;
mod disk_state;
mod identity;
mod mounts;
mod sweeping;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use shorthorn_api::v1;
use shorthorn_control::{Unknown, load_spec, store_spec};

pub use self::deletion::delete_replica;
use self::deletion::remove_trash;
pub use self::disk_state::disk_state;
use self::disk_state::obstacle;
use self::identity::{IDENTITY_FILE, identify, read_identity};
pub use self::mounts::missing_mount;
pub use self::sweeping::keep_swept;
use crate::serve::directories::REPLICAS;
use crate::serve::error::NodeError;
use crate::serve::longhorn;
use crate::serve::paths::absolute;
use crate::serve::trash::{self, TrashLimits};

/// The disks of this node.
#[derive(Debug)]
pub struct Disks {
    /// From the configuration.
    configured: Vec<PathBuf>,
    /// The file that remembers the disks for the next agent.
    file: PathBuf,
    /// The folder of this host's processes.
    proc: PathBuf,
    stored: Mutex<StoredDisks>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct StoredDisks {
    /// The paths of disks that were added to those of the configuration.
    disks: Vec<PathBuf>,
    /// Disks of the configuration that have had an identity. Such a disk without an identity is most likely
    /// not mounted.
    #[serde(default)]
    prepared: BTreeSet<PathBuf>,
    /// Fields of a later version.
    #[serde(flatten)]
    unknown: Unknown,
}

impl Disks {
    /// Opens the disks of the configuration, and those that were added to an earlier agent.
    ///
    /// # Errors
    /// The file of those cannot be read.
    pub fn open(configured: &[PathBuf], state_dir: &Path) -> Result<Disks, NodeError> {
        let file = state_dir.join("disks.json");
        let stored = if file.try_exists().map_err(NodeError::at(&file))? {
            load_spec::<StoredDisks>(&file)?
        } else {
            StoredDisks::default()
        };
        let disks = Disks {
            configured: configured.to_vec(),
            file,
            proc: longhorn::PROC.into(),
            stored: Mutex::new(stored),
        };
        for disk in disks.paths() {
            remove_trash(&disk);
        }
        Ok(disks)
    }

    fn stored(&self) -> MutexGuard<'_, StoredDisks> {
        self.stored.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the directories of the configuration and those that were added since.
    pub fn paths(&self) -> BTreeSet<PathBuf> {
        self.configured.iter().chain(self.stored().disks.iter()).cloned().collect()
    }

    /// Returns all disks in their current state. A new one in the configuration is prepared first, so that
    /// the administrator need not add it as well.
    pub fn list(&self) -> Vec<v1::Disk> {
        self.prepare_new();
        self.look_at_all()
    }

    fn look_at_all(&self) -> Vec<v1::Disk> {
        self.paths().iter().map(|path| disk_state(path)).collect()
    }

    /// Prepares new disks. A failure is reported as the problem of the disk, until an attempt at a later look
    /// succeeds.
    pub fn prepare_new(&self) {
        let new: Vec<&PathBuf> = {
            let stored = self.stored();
            self.configured.iter().filter(|path| !stored.prepared.contains(*path)).collect()
        };
        for path in new {
            if let Some(point) = missing_mount(path) {
                tracing::debug!(
                    "{} is not a disk yet: {point} is in /etc/fstab and not mounted",
                    path.display()
                );
                continue;
            }
            match self.prepare(path) {
                Ok(uuid) => tracing::info!("{} is a disk: {uuid}", path.display()),
                Err(error) => tracing::debug!("{} is not a disk yet: {error}", path.display()),
            }
        }
    }

    /// Returns the content of the trash of all disks, and the reasons why that of some is unknown.
    pub fn trash(&self, limits: TrashLimits) -> v1::ListTrashResponse {
        let mut answer = v1::ListTrashResponse::default();
        for path in self.paths() {
            let listed = match read_identity(&path) {
                Ok(Some(identity)) => {
                    let listed = trash::list(&path, &identity.disk_uuid, limits);
                    listed.map_err(|error| error.to_string())
                }
                // A disk of the configuration that was never there.
                Ok(None) if !self.is_known(&path) => continue,
                Ok(None) => Err(format!("{} is not mounted", path.display())),
                Err(problem) => Err(problem),
            };
            match listed {
                Ok(replicas) => answer.replicas.extend(replicas),
                Err(problem) => {
                    answer
                        .problems
                        .push(format!("the trash of disk {} is not known: {problem}", path.display()));
                }
            }
        }
        answer
    }

    /// Checks that `path` is one of them and that it is mounted: something is read or written there only if
    /// the disk's identity is. `uuid` is the expected identity; empty: any.
    ///
    /// # Errors
    /// [`NodeError::NotFound`] if it is not a disk of this node, [`NodeError::Precondition`] if that disk is
    /// not mounted.
    pub fn check(&self, path: &Path, uuid: &str) -> Result<(), NodeError> {
        if !self.has(path) {
            let message = format!("{} is not a disk of this node: add it first", path.display());
            return Err(NodeError::NotFound(message));
        }
        let at = path.display();
        match read_identity(path) {
            Ok(Some(found)) if uuid.is_empty() || found.disk_uuid == uuid => Ok(()),
            Ok(Some(found)) => Err(NodeError::Precondition(format!(
                "{at} is disk {}, but disk {uuid} is expected: mount that disk there",
                found.disk_uuid
            ))),
            Ok(None) => Err(NodeError::Precondition(format!(
                "{at} has no {IDENTITY_FILE}: the disk is not mounted; mount it"
            ))),
            Err(problem) => Err(NodeError::Precondition(problem)),
        }
    }

    /// Returns true if `path` is one of them.
    pub fn has(&self, path: &Path) -> bool {
        self.paths().contains(path)
    }

    /// Prepares a directory as a disk, and remembers it.
    ///
    /// # Errors
    /// [`NodeError`] has the problem of the directory.
    pub fn add(&self, path: &str) -> Result<v1::Disk, NodeError> {
        let path = absolute(path.into()).map_err(|error| NodeError::Invalid(format!("path: {error}")))?;
        let real = fs::canonicalize(&path).map_err(|error| {
            NodeError::Precondition(format!(
                "{}: {error}: mount the disk and make the directory first",
                path.display()
            ))
        })?;
        if real != path {
            let message = format!("{} leads to {}: use that path", path.display(), real.display());
            return Err(NodeError::Invalid(message));
        }
        self.prepare(&path)?;
        Ok(disk_state(&path))
    }

    /// Removes the directory from the disks. Its content stays.
    ///
    /// # Errors
    /// [`NodeError::Precondition`] if it is a disk of the configuration.
    pub fn remove(&self, path: &Path) -> Result<(), NodeError> {
        if self.configured.iter().any(|known| known == path) {
            return Err(NodeError::Precondition(format!(
                "{} is a disk of the agent's configuration: remove it from the configuration, and restart \
                 the agent",
                path.display()
            )));
        }
        let mut stored = self.stored();
        let mut next = stored.clone();
        next.disks.retain(|known| known != path);
        if next.disks.len() < stored.disks.len() {
            store_spec(&self.file, &next)?;
            *stored = next;
        }
        Ok(())
    }

    /// Gives the directory the files of a disk and remembers it. Returns the identity.
    fn prepare(&self, path: &Path) -> Result<String, NodeError> {
        if let Some(problem) = obstacle(path) {
            return Err(NodeError::Precondition(format!("{}: {problem}", path.display())));
        }
        if !self.is_known(path)
            && read_identity(path).is_ok_and(|identity| identity.is_some())
            && let Some(objection) = longhorn::objection(&self.proc, path, IDENTITY_FILE)
        {
            return Err(NodeError::Precondition(objection));
        }
        let uuid = identify(path)?;
        let mut others = self.look_at_all().into_iter().filter(|disk| Path::new(&disk.path) != path);
        if let Some(twin) = others.find(|disk| disk.uuid == uuid) {
            let message = format!("{} and {} are the same disk, {uuid}", path.display(), twin.path);
            return Err(NodeError::Exists(message));
        }
        let replicas = path.join(REPLICAS);
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&replicas);
        made.map_err(NodeError::at(&replicas))?;
        self.remember(path)?;
        Ok(uuid)
    }

    /// Returns true if it was a disk of this node before.
    fn is_known(&self, path: &Path) -> bool {
        let stored = self.stored();
        stored.prepared.contains(path) || stored.disks.iter().any(|known| known == path)
    }

    fn remember(&self, path: &Path) -> Result<(), NodeError> {
        let mut stored = self.stored();
        let mut next = stored.clone();
        let is_new = if self.configured.iter().any(|known| known == path) {
            next.prepared.insert(path.to_owned())
        } else {
            let is_new = !next.disks.iter().any(|known| known == path);
            next.disks.extend(is_new.then(|| path.to_owned()));
            is_new
        };
        if is_new {
            store_spec(&self.file, &next)?;
            *stored = next;
        }
        Ok(())
    }
}

/// Returns the disks of a node. Reads only the configuration and the state, not the disks.
pub fn known_offline(configured: &[PathBuf], state_dir: &Path) -> BTreeSet<PathBuf> {
    let stored = load_spec::<StoredDisks>(&state_dir.join("disks.json")).unwrap_or_default();
    configured.iter().cloned().chain(stored.disks).collect()
}

/// Prepares a directory as a disk of an agent that does not run.
///
/// # Errors
/// [`NodeError`] has the problem of the directory.
pub fn add_offline(configured: &[PathBuf], state_dir: &Path, path: &Path) -> Result<(), NodeError> {
    let path = path.to_str().ok_or_else(|| NodeError::Invalid("the path is not UTF-8".into()))?;
    fs::create_dir_all(state_dir).map_err(NodeError::at(state_dir))?;
    Disks::open(configured, state_dir)?.add(path).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_TRASH: TrashLimits = TrashLimits { keep: std::time::Duration::ZERO, free_percent: 0 };

    fn disks(dir: &Path) -> Disks {
        Disks::open(&[], dir).unwrap()
    }

    #[test]
    fn a_disk_keeps_its_identity() {
        let dir = tempfile::tempdir().unwrap();
        let (state, disk) = (dir.path().join("state"), dir.path().join("disk"));
        fs::create_dir_all(&state).unwrap();
        fs::create_dir_all(disk.join("replicas/v1-0123abcd")).unwrap();
        let disks = disks(&state);
        let first = disks.add(disk.to_str().unwrap()).unwrap();
        assert!(first.is_usable() && first.uuid.len() == 36 && first.total_bytes > 0, "{first:?}");
        assert!(!first.filesystem.is_empty());
        assert_eq!(first.replicas, ["v1-0123abcd"]);
        assert_eq!(disks.add(disk.to_str().unwrap()).unwrap().uuid, first.uuid);
        let again = Disks::open(&[], &state).unwrap().list();
        assert_eq!((again.len(), &again[0].uuid), (1, &first.uuid));
        let identity: serde_json::Value =
            serde_json::from_slice(&fs::read(disk.join("longhorn-disk.cfg")).unwrap()).unwrap();
        let keys: Vec<&String> = identity.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["diskDriver", "diskName", "diskUUID", "state"]);
    }

    #[test]
    fn a_configured_disk_is_used_at_once_and_not_recreated_if_unmounted() {
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("disk");
        let configured = [disk.clone()];
        let disks = Disks::open(&configured, dir.path()).unwrap();
        assert!(disks.list()[0].problem.contains("no such directory"));
        fs::create_dir(&disk).unwrap();
        let found = disks.list().remove(0);
        assert!(found.is_usable() && found.uuid.len() == 36, "{found:?}");
        assert!(disk.join("replicas").is_dir());
        // The state when the mount is missing after a reboot.
        fs::rename(&disk, dir.path().join("elsewhere")).unwrap();
        fs::create_dir(&disk).unwrap();
        let disks = Disks::open(&configured, dir.path()).unwrap();
        let found = disks.list().remove(0);
        assert!(found.uuid.is_empty() && found.problem.contains("mount the disk"), "{found:?}");
        assert_eq!(fs::read_dir(&disk).unwrap().count(), 0);
        let added = disks.add(disk.to_str().unwrap()).unwrap();
        assert!(added.is_usable(), "{added:?}");
    }

    #[test]
    fn a_disk_that_is_not_mounted_or_is_another_one_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let (state, disk) = (dir.path().join("state"), dir.path().join("disk"));
        [&state, &disk].into_iter().for_each(|path| fs::create_dir(path).unwrap());
        let disks = disks(&state);
        let uuid = disks.add(disk.to_str().unwrap()).unwrap().uuid;
        disks.check(&disk, &uuid).unwrap();
        disks.check(&disk, "").unwrap();
        let refused = |uuid: &str| disks.check(&disk, uuid).unwrap_err();
        assert!(matches!(refused("u-2"), NodeError::Precondition(text) if text.contains("u-2 is expected")));
        assert!(disks.trash(NO_TRASH).problems.is_empty());
        // The state when it is unmounted.
        fs::remove_file(disk.join(IDENTITY_FILE)).unwrap();
        let problems = disks.trash(NO_TRASH).problems;
        assert!(problems.len() == 1 && problems[0].contains("not mounted"), "{problems:?}");
        for uuid in [uuid.as_str(), ""] {
            assert!(matches!(refused(uuid), NodeError::Precondition(text) if text.contains("not mounted")));
        }
        assert!(matches!(disks.check(&state, ""), Err(NodeError::NotFound(_))));
        // It does not come back. One of the configuration would, with the next start.
        (0..2).for_each(|_| disks.remove(&disk).unwrap());
        assert!(!disks.has(&disk) && !Disks::open(&[], &state).unwrap().has(&disk));
        let configured = Disks::open(std::slice::from_ref(&disk), &state).unwrap();
        assert!(matches!(configured.remove(&disk), Err(NodeError::Precondition(_))) && configured.has(&disk));
    }

    #[test]
    fn takes_the_identity_that_longhorn_gave() {
        let dir = tempfile::tempdir().unwrap();
        let cfg = r#"{"diskName":"d","diskUUID":"u-1","diskDriver":"","state":"","later":1}"#;
        fs::write(dir.path().join("longhorn-disk.cfg"), cfg).unwrap();
        let disk = disks(dir.path()).add(dir.path().to_str().unwrap()).unwrap();
        assert_eq!(disk.uuid, "u-1");
    }

    #[test]
    fn fields_of_an_earlier_or_a_later_agent_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("disks.json");
        // Of release 0.1.0.
        fs::write(&file, r#"{"disks":["/data/a"],"prepared":["/var/lib/longhorn"]}"#).unwrap();
        assert!(disks(dir.path()).has(Path::new("/data/a")));
        fs::write(&file, r#"{"disks":["/data/a"],"classes":{"/data/a":"fast"}}"#).unwrap();
        let disk = dir.path().join("disk");
        fs::create_dir(&disk).unwrap();
        disks(dir.path()).add(disk.to_str().unwrap()).unwrap();
        let kept: serde_json::Value = load_spec(&file).unwrap();
        assert_eq!(kept["classes"]["/data/a"], "fast");
        assert_eq!(kept["disks"].as_array().unwrap().len(), 2);
    }

    #[test]
    fn a_disk_that_longhorn_uses_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (disk, proc) = (dir.path().join("disk"), dir.path().join("proc"));
        fs::create_dir_all(&disk).unwrap();
        fs::create_dir_all(proc.join("5")).unwrap();
        let mut disks = disks(dir.path());
        disks.proc.clone_from(&proc);
        let add = |disks: &Disks| disks.add(disk.to_str().unwrap());
        fs::write(disk.join(IDENTITY_FILE), r#"{"diskUUID":"u-1"}"#).unwrap();
        fs::write(proc.join("5/cmdline"), "longhorn-manager\0daemon\0").unwrap();
        let refused = add(&disks).unwrap_err().to_string();
        assert!(refused.contains("orphans") && refused.contains("evict"), "{refused}");
        // As the message says: Longhorn does not know the disk then.
        fs::remove_file(disk.join(IDENTITY_FILE)).unwrap();
        let uuid = add(&disks).unwrap().uuid;
        // It is a disk of this node now.
        assert_eq!(add(&disks).unwrap().uuid, uuid);
    }

    #[test]
    fn unusable_paths_are_refused_with_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        let disks = disks(dir.path());
        let add = |path: &Path| disks.add(path.to_str().unwrap()).unwrap_err();
        assert!(matches!(add(&dir.path().join("missing")), NodeError::Precondition(_)));
        assert!(matches!(disks.add("relative"), Err(NodeError::Invalid(_))));
        assert!(matches!(add(&dir.path().join("../x")), NodeError::Invalid(_)));
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(add(&file).to_string().contains("not a directory"));
        let damaged = dir.path().join("damaged");
        fs::create_dir(&damaged).unwrap();
        fs::write(damaged.join("longhorn-disk.cfg"), "{").unwrap();
        assert!(add(&damaged).to_string().contains("damaged"));
        let configured = Disks::open(&[dir.path().join("gone")], dir.path()).unwrap();
        assert!(configured.list()[0].problem.contains("no such directory"));
    }

    #[test]
    fn one_disk_has_one_path() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        fs::create_dir(&one).unwrap();
        fs::create_dir(&two).unwrap();
        let disks = disks(dir.path());
        disks.add(one.to_str().unwrap()).unwrap();
        fs::copy(one.join("longhorn-disk.cfg"), two.join("longhorn-disk.cfg")).unwrap();
        assert!(matches!(disks.add(two.to_str().unwrap()), Err(NodeError::Exists(_))));
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&one, &link).unwrap();
        assert!(matches!(disks.add(link.to_str().unwrap()), Err(NodeError::Invalid(_))));
    }
}
