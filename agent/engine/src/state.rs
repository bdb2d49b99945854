//! The state file of an engine, which every process of the engine on this host continues.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, Flock, FlockArg, RenameFlags, renameat2};
use serde::{Deserialize, Serialize};
use shorthorn_control::Unknown;
use shorthorn_frontend::DeviceRecord;
use shorthorn_types::{Generation, ReplicaReport, View};

use crate::EngineError;

#[derive(Debug, Default, Serialize, Deserialize)]
struct Content {
    /// The generation that was used last.
    generation: Generation,
    /// The device, from before it is live until it is removed.
    device: Option<DeviceRecord>,
    /// The last attachment whose engine had the device live. Earlier versions have no device of an earlier
    /// attachment than the generation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    device_attach: Option<u64>,
    /// The newest view that the arbiter has granted, as far as this host knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    granted: Option<View>,
    /// The last boot of this host in which a device of this attachment was live; stored before the device is
    /// live.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    live_boot: Option<String>,
    /// True if writes that the user of that device believes stored may be lost.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    lost_writes: bool,
    /// Fields of a later version.
    #[serde(flatten)]
    unknown: Unknown,
}

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The state file, locked: no two processes use one generation. If the file is lost, the nonce ensures that.
#[derive(Debug)]
pub struct EngineState {
    path: PathBuf,
    content: Content,
    /// The last generation of the process before this one, if the volume has had its users since then.
    predecessor: Option<Generation>,
    /// This boot of the host, if the kernel reports it.
    boot: Option<String>,
    /// The content of the file, if the last write has succeeded.
    stored: Option<Vec<u8>>,
    _lock: Flock<File>,
}

impl EngineState {
    /// Locks and reads the state file, and takes the next generation of attachment `attach`. A user since
    /// attachment `continues` may still use the volume; none: the volume had no user before this one.
    ///
    /// # Errors
    /// The file is in use, or newer than the spec, or cannot be read or written.
    pub fn open(path: &Path, attach: u64, continues: Option<u64>) -> Result<EngineState, EngineError> {
        let state = |source| EngineError::State { path: path.to_owned(), source };
        let lock = lock(&path.with_extension("lock")).map_err(|source| match source.raw_os_error() {
            Some(raw) if Errno::from_raw(raw) == Errno::EWOULDBLOCK => {
                EngineError::Running { path: path.to_owned() }
            }
            _ => state(source),
        })?;
        let content = match fs::read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Content::default(),
            Err(error) => return Err(state(error)),
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| state(error.into()))?,
        };
        let known = content.generation.attach;
        if attach < known {
            return Err(EngineError::Outdated { asked: attach, known });
        }
        let boot = fs::read_to_string(BOOT_ID).ok().map(|text| text.trim().to_owned());
        let boot = boot.filter(|boot| !boot.is_empty());
        let (path, stored) = (path.to_owned(), None);
        let mut state = EngineState { path, content, predecessor: None, boot, stored, _lock: lock };
        state.content.device_attach.get_or_insert(known);
        let has_users = state.has_users(attach, continues);
        state.predecessor = Some(state.content.generation).filter(|_| has_users || attach == known);
        if !has_users {
            (state.content.live_boot, state.content.lost_writes) = (None, false);
        } else if state.content.live_boot.is_none() {
            state.content.live_boot = Some(String::new()); // an earlier version did not store which
        }
        if attach > known {
            state.content.generation = drawn(Generation::new(attach, 0))?;
            if !has_users {
                // The volume may have been attached elsewhere since: requests that an old device still holds
                // back must never be written now.
                state.content.device = None;
            }
            state.store()?;
        } else {
            state.next_generation()?;
        }
        Ok(state)
    }

    /// Returns the generation of this process.
    pub fn generation(&self) -> Generation {
        self.content.generation
    }

    /// Returns the last generation of the process before this one, or none if its device does not continue.
    /// Sockets handed over by other processes are not for this one.
    pub fn predecessor(&self) -> Option<Generation> {
        self.predecessor
    }

    /// Drops the record of a device, and of its user, if an engine of an attachment after that of the device
    /// has served. Then one of the views to `honour` is of that engine. Requests that the device still holds
    /// back are older, and must never be written. Otherwise the device is of this attachment from now on, so
    /// call this before the first view of this attachment is proposed. Returns true if it was dropped.
    ///
    /// Views of this attachment do not count. The arbiter may have granted one to an attempt that ended.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn confirm_device(&mut self, honour: &ReplicaReport) -> Result<bool, EngineError> {
        let Content { generation, device, device_attach, live_boot, .. } = &self.content;
        let own = generation.attach;
        if (device.is_none() && live_boot.is_none()) || *device_attach == Some(own) {
            return Ok(false);
        }
        let earlier = honour.views().map(|view| view.id.generation.attach).filter(|attach| *attach < own);
        let is_outdated = *device_attach < earlier.max();
        if is_outdated {
            (self.content.device, self.content.live_boot, self.content.lost_writes) = (None, None, false);
        } else {
            self.content.device_attach = Some(own);
        }
        self.store()?;
        Ok(is_outdated)
    }

    /// Takes the next generation: durable before it is used.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn next_generation(&mut self) -> Result<Generation, EngineError> {
        let Generation { attach, restart, .. } = self.content.generation;
        let next = restart.checked_add(1).ok_or_else(|| EngineError::State {
            path: self.path.clone(),
            source: io::Error::other("no restart number is left: detach and attach the volume"),
        })?;
        self.content.generation = drawn(Generation::new(attach, next))?;
        self.store()?;
        Ok(self.content.generation)
    }

    /// Returns the device that an earlier process has left.
    pub fn device(&self) -> Option<&DeviceRecord> {
        self.content.device.as_ref()
    }

    /// Stores the record of the device, or its absence.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn set_device(&mut self, device: Option<DeviceRecord>) -> Result<(), EngineError> {
        self.content.device = device;
        self.store()
    }

    /// Returns true if the volume may still have a user from before this process. No device outlives its
    /// host.
    fn has_users(&self, attach: u64, continues: Option<u64>) -> bool {
        let Content { generation, device, live_boot, .. } = &self.content;
        let is_known = continues.is_some_and(|since| since <= generation.attach);
        let same_users = attach == generation.attach || is_known;
        same_users
            && match live_boot {
                Some(boot) => boot.is_empty() || self.boot.as_ref().is_none_or(|now| now == boot),
                // Earlier versions have recorded devices alone.
                None => device.is_some(),
            }
    }

    /// Stores the record of the device, before the device can be used.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn record_live_device(&mut self, device: DeviceRecord) -> Result<(), EngineError> {
        self.content.live_boot = Some(self.boot.clone().unwrap_or_default());
        self.content.device_attach = Some(self.content.generation.attach);
        self.set_device(Some(device))
    }

    /// Returns true if a device of this attachment has been live since the host was started.
    pub fn was_live(&self) -> bool {
        self.content.live_boot.is_some()
    }

    /// Records that writes that the user of the device believes stored may be lost. Without a user, the call
    /// stores nothing.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn record_lost_writes(&mut self) -> Result<(), EngineError> {
        if !self.was_live() || self.content.lost_writes {
            return Ok(());
        }
        self.content.lost_writes = true;
        self.store()
    }

    /// Returns true if this attachment has lost writes. The engine reports that to the user for as long as
    /// the attachment lasts.
    pub fn lost_writes(&self) -> bool {
        self.content.lost_writes
    }

    /// Returns the newest view that the arbiter has granted, as far as this host knows.
    pub fn granted(&self) -> Option<View> {
        self.content.granted
    }

    /// Stores the granted view durably, unless a newer one is known.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn keep_grant(&mut self, view: View) -> Result<(), EngineError> {
        if self.content.granted.is_some_and(|known| known.id >= view.id) {
            return Ok(());
        }
        self.content.granted = Some(view);
        self.store()
    }

    /// Stores the content, unless the file has it already. A process that takes a device over thus saves a
    /// write for which the requests of the device would wait.
    fn store(&mut self) -> Result<(), EngineError> {
        self.write_changed().map_err(|source| EngineError::State { path: self.path.clone(), source })
    }

    fn write_changed(&mut self) -> io::Result<()> {
        let bytes = serde_json::to_vec_pretty(&self.content)?;
        if self.stored.as_ref() != Some(&bytes) {
            // The content of the file is unknown while a write has not succeeded.
            self.stored = None;
            self.write(&bytes)?;
            self.stored = Some(bytes);
        }
        Ok(())
    }

    /// Writes the file atomically and durably. The former file is kept: the next write overwrites it and
    /// exchanges the two. A write therefore needs no space, because an engine has to start and stop on a full
    /// disk too.
    fn write(&self, bytes: &[u8]) -> io::Result<()> {
        let temporary = self.path.with_extension("tmp");
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&temporary)?;
        file.write_all(bytes)?;
        file.set_len(bytes.len() as u64)?;
        file.sync_all()?;
        match renameat2(AT_FDCWD, &temporary, AT_FDCWD, &self.path, RenameFlags::RENAME_EXCHANGE) {
            Ok(()) => {}
            // The file does not exist yet, or this file system cannot exchange names.
            Err(Errno::ENOENT | Errno::EINVAL) => fs::rename(&temporary, &self.path)?,
            Err(errno) => return Err(errno.into()),
        }
        File::open(self.path.parent().unwrap_or_else(|| Path::new("/")))?.sync_all()
    }
}

/// Returns the generation with a nonce of its own. It differs from that of a process with the same numbers,
/// after a loss of this file or with an attachment that was used before.
fn drawn(pair: Generation) -> Result<Generation, EngineError> {
    let random =
        getrandom::u64().map_err(|error| EngineError::system("draw a nonce")(io::Error::other(error)))?;
    Ok(pair.with_nonce(random))
}

fn lock(path: &Path) -> io::Result<Flock<File>> {
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| errno.into())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use shorthorn_frontend::FrontendKind;
    use shorthorn_types::{Members, ReplicaId, ViewId};

    use super::*;

    #[test]
    fn every_process_has_a_generation_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v1.state");
        let open = |attach| EngineState::open(&path, attach, None).map(|state| pair(state.generation()));
        assert_eq!(open(1).unwrap(), Generation::new(1, 0));
        assert_eq!(open(1).unwrap(), Generation::new(1, 1));
        assert_eq!(open(5).unwrap(), Generation::new(5, 0));
        assert!(matches!(open(4), Err(EngineError::Outdated { asked: 4, known: 5 })));
        let held = EngineState::open(&path, 5, None).unwrap();
        assert_eq!(pair(held.generation()), Generation::new(5, 1));
        assert!(matches!(open(5), Err(EngineError::Running { .. })));
    }

    #[test]
    fn a_process_that_has_lost_its_file_has_a_generation_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v1.state");
        let open = || EngineState::open(&path, 7, None).unwrap().generation();
        let before = open();
        fs::remove_file(&path).unwrap();
        let after = open();
        assert_eq!(pair(before), pair(after));
        assert_ne!(before, after, "it would be taken for the process before");
        assert_ne!(open().nonce, after.nonce, "drawn again each time");
    }

    #[test]
    fn reads_a_file_without_a_nonce() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v1.state");
        fs::write(&path, r#"{"generation":{"attach":3,"restart":4},"device":null}"#).unwrap();
        let state = EngineState::open(&path, 3, None).unwrap();
        assert_eq!(state.predecessor(), Some(Generation::new(3, 4)));
        assert_eq!(pair(state.generation()), Generation::new(3, 5));
    }

    /// A later version was installed for a while: nothing that it has recorded is lost, and the volume
    /// starts.
    #[test]
    fn fields_of_a_later_version_are_tolerated_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v1.state");
        let later =
            r#"{"generation":{"attach":3,"restart":4,"epoch":9},"device":null,"tenants":{"a":[1,2]}}"#;
        fs::write(&path, later).unwrap();
        let mut state = EngineState::open(&path, 3, None).unwrap();
        state.record_live_device(record()).unwrap();
        drop(state);
        assert_eq!(pair(EngineState::open(&path, 3, None).unwrap().generation()), Generation::new(3, 6));
        let kept: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(kept["tenants"]["a"], serde_json::json!([1, 2]), "{kept}");
        assert_eq!(kept["device"]["queues"], 1);
    }

    /// Returns the generation without its nonce.
    fn pair(generation: Generation) -> Generation {
        generation.of_nonce(0)
    }

    #[test]
    fn accepts_only_sockets_of_the_previous_process_of_its_attachment() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v1.state");
        let open = |attach| EngineState::open(&path, attach, None).unwrap();
        let mut first = open(3);
        assert_eq!(first.predecessor(), None);
        let last = first.next_generation().unwrap();
        assert_eq!(pair(last), Generation::new(3, 1));
        drop(first);
        let second = open(3);
        assert_eq!(second.predecessor(), Some(last));
        let last = second.generation();
        drop(second);
        assert_eq!(open(3).predecessor(), Some(last), "of the one just before");
        assert_eq!(open(4).predecessor(), None, "the volume may have been elsewhere meanwhile");
    }

    #[test]
    fn the_newest_grant_outlives_processes_and_attachments() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v1.state");
        let view = |attach, number| View {
            id: ViewId { generation: Generation::new(attach, 0), number },
            members: Members::new([ReplicaId::from_random(1)]).unwrap(),
        };
        EngineState::open(&path, 1, None).unwrap().keep_grant(view(1, 2)).unwrap();
        let mut state = EngineState::open(&path, 2, None).unwrap();
        assert_eq!(state.granted(), Some(view(1, 2)));
        state.keep_grant(view(1, 1)).unwrap();
        assert_eq!(state.granted(), Some(view(1, 2)));
        state.keep_grant(view(2, 1)).unwrap();
        drop(state);
        assert_eq!(EngineState::open(&path, 2, None).unwrap().granted(), Some(view(2, 1)));
    }

    #[test]
    fn a_content_that_the_file_has_is_not_written_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v1.state");
        let mut first = EngineState::open(&path, 3, None).unwrap();
        first.record_live_device(record()).unwrap();
        drop(first);
        let mut next = EngineState::open(&path, 3, None).unwrap();
        // A write would make another file of that name.
        fs::remove_file(&path).unwrap();
        next.record_live_device(record()).unwrap();
        next.set_device(Some(record())).unwrap();
        assert!(!path.exists(), "the device is taken over as it was");
        next.set_device(None).unwrap();
        assert!(path.exists());
    }

    #[test]
    fn a_write_that_has_failed_is_repeated() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("folder/v1.state");
        fs::create_dir(dir.path().join("folder")).unwrap();
        let mut state = EngineState::open(&path, 3, None).unwrap();
        fs::rename(dir.path().join("folder"), dir.path().join("elsewhere")).unwrap();
        state.set_device(Some(record())).unwrap_err();
        fs::rename(dir.path().join("elsewhere"), dir.path().join("folder")).unwrap();
        state.set_device(Some(record())).unwrap();
        drop(state);
        assert_eq!(EngineState::open(&path, 3, None).unwrap().device(), Some(&record()));
    }

    fn record() -> DeviceRecord {
        DeviceRecord { kind: FrontendKind::Socket, kernel_id: None, queues: 1, depth: 16 }
    }

    /// Returns the state that a process of this attachment leaves if its device was live and it has found
    /// lost writes.
    fn lost(path: &Path) -> EngineState {
        let mut state = EngineState::open(path, 3, None).unwrap();
        state.record_live_device(record()).unwrap();
        state.record_lost_writes().unwrap();
        state
    }

    #[test]
    fn lost_writes_are_remembered_until_the_next_attachment() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v1.state");
        let open = |attach, continues| EngineState::open(&path, attach, continues).unwrap();
        let mut state = lost(&path);
        assert!(state.lost_writes());
        // As an engine with a socket does at its orderly end, whose clients come back to the next one.
        state.set_device(None).unwrap();
        drop(state);
        assert!(open(3, None).lost_writes() && open(3, None).was_live());
        assert!(open(4, Some(2)).lost_writes(), "another number, but the volume was not detached");
        assert!(!open(5, Some(5)).lost_writes() && !open(5, Some(5)).was_live());
    }

    #[test]
    fn a_device_continues_with_the_next_number_if_the_volume_was_attached_nowhere_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v1.state");
        let open = |attach, continues| EngineState::open(&path, attach, continues).unwrap();
        drop(lost(&path));
        let state = open(4, Some(2));
        assert_eq!((state.device(), state.predecessor().unwrap().attach), (Some(&record()), 3));
        drop(state);
        let state = open(7, Some(7));
        assert_eq!((state.device(), state.predecessor()), (None, None), "it was elsewhere meanwhile");
    }

    /// Returns the views to honour: the first is committed.
    fn views(attaches: &[u64]) -> ReplicaReport {
        let members = shorthorn_types::Members::NONE;
        let view = |attach: &u64| {
            let id = shorthorn_types::ViewId { generation: Generation::new(*attach, 0), number: 1 };
            View { id, members }
        };
        let mut all = attaches.iter().map(view);
        ReplicaReport { committed: all.next().unwrap(), proposed: all.collect() }
    }

    /// The store of the controller may be older than the volume, and the process may end after its attempt.
    #[test]
    fn a_device_never_continues_after_another_engine_has_served() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v1.state");
        let open = |attach, continues| EngineState::open(&path, attach, continues).unwrap();
        drop(lost(&path));
        drop(open(6, Some(2)));
        let mut again = open(6, Some(2));
        // The own view hides no other one.
        let honoured = views(&[3, 5, 6]);
        assert!(again.confirm_device(&honoured).unwrap() && !again.confirm_device(&honoured).unwrap());
        drop(again);
        let mut next = open(6, Some(2));
        assert!(next.device().is_none() && !next.was_live() && !next.lost_writes());
        next.record_live_device(record()).unwrap();
        assert!(!next.confirm_device(&honoured).unwrap(), "this one is of attachment 6");
    }

    #[test]
    fn a_device_continues_through_attempts_and_attachments_that_did_not_get_live() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v1.state");
        let open = |attach, continues| EngineState::open(&path, attach, continues).unwrap();
        drop(lost(&path));
        // The first attempt of number 5 got a grant and ended. The next one stores a view, which 7 honours.
        drop(open(5, Some(2)));
        assert!(!open(5, Some(2)).confirm_device(&views(&[3, 5])).unwrap());
        assert!(!open(5, Some(2)).confirm_device(&views(&[5])).unwrap());
        let mut next = open(7, Some(2));
        assert!(!next.confirm_device(&views(&[5])).unwrap() && next.device().is_some());
    }

    #[test]
    fn lost_writes_are_reported_only_if_a_device_was_live() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v1.state");
        let mut state = EngineState::open(&path, 3, None).unwrap();
        state.record_lost_writes().unwrap();
        assert!(!state.lost_writes(), "no device was live");
        drop(state);
        drop(lost(&path));
        let text = fs::read_to_string(&path).unwrap();
        let boot = fs::read_to_string(BOOT_ID).unwrap();
        fs::write(&path, text.replace(boot.trim(), "another boot")).unwrap();
        let mut state = EngineState::open(&path, 3, None).unwrap();
        assert!(!state.lost_writes() && !state.was_live(), "the device has ended with its host");
        state.record_live_device(record()).unwrap();
        assert!(!state.lost_writes());
        state.record_lost_writes().unwrap();
        assert!(state.lost_writes(), "this one is another device");
    }

    #[test]
    fn a_device_that_an_earlier_version_has_recorded_may_be_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v1.state");
        let old = r#"{"generation":{"attach":3,"restart":1},"device":{"kind":"ublk","kernel_id":0,"queues":1,"depth":128}}"#;
        fs::write(&path, old).unwrap();
        let mut state = EngineState::open(&path, 3, None).unwrap();
        state.record_lost_writes().unwrap();
        assert!(state.lost_writes());
    }

    #[test]
    fn a_damaged_file_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v1.state");
        fs::write(&path, "{").unwrap();
        assert!(EngineState::open(&path, 1, None).unwrap_err().to_string().contains("v1.state"));
    }

    const CONTENT: &str = r#"{"generation":{"attach":3,"restart":1,"nonce":7},"device":{"kind":"ublk","kernel_id":0,
        "queues":1,"depth":128},"granted":{"id":{"generation":{"attach":2,"restart":0},"number":1},
        "members":["000000a1"]},"live_boot":"a","lost_writes":true}"#;

    #[test]
    fn the_last_number_of_a_start_has_none_after_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v1.state");
        let with = |restart: u32| CONTENT.replace("\"restart\":1", &format!("\"restart\":{restart}"));
        fs::write(&path, with(u32::MAX)).unwrap();
        let error = EngineState::open(&path, 3, None).unwrap_err().to_string();
        assert!(error.contains("v1.state") && error.contains("detach and attach the volume"), "{error}");
        assert_eq!(pair(EngineState::open(&path, 4, None).unwrap().generation()), Generation::new(4, 0));
        fs::write(&path, with(1)).unwrap();
        assert_eq!(pair(EngineState::open(&path, 3, None).unwrap().generation()), Generation::new(3, 2));
    }

    proptest! {
        // Each writes files.
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_content_is_refused_by_name_or_has_a_next_generation(
            at in any::<prop::sample::Index>(),
            new in prop::sample::select(
                vec!["", "0", "-1", "18446744073709551615", "1e400", "\"", "{", "]", "null", "\0"]
            ),
            removed in 0usize..8,
        ) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("v1.state");
            let mut bytes = CONTENT.as_bytes().to_vec();
            let at = at.index(bytes.len());
            bytes.splice(at..(at + removed).min(bytes.len()), new.bytes());
            fs::write(&path, bytes).unwrap();
            match EngineState::open(&path, 3, None) {
                Ok(state) => prop_assert_eq!(state.generation().attach, 3),
                Err(EngineError::Outdated { known, .. }) => prop_assert!(known > 3),
                Err(error) => prop_assert!(error.to_string().contains("v1.state"), "{error}"),
            }
        }
    }
}
