//! What an engine remembers from one process to the next, on the host where it runs.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, Flock, FlockArg, RenameFlags, renameat2};
use serde::{Deserialize, Serialize};
use shorthorn_frontend::DeviceRecord;
use shorthorn_types::{Generation, View};

use crate::EngineError;

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    /// The generation that was used last.
    generation: Generation,
    /// The device, from before it goes live until it is gone.
    device: Option<DeviceRecord>,
    /// The newest view that the arbiter has granted, as far as this host was told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    granted: Option<View>,
}

/// The state file, locked: no two processes use one generation. Where it is lost, the nonce sees to that.
#[derive(Debug)]
pub struct EngineState {
    path: PathBuf,
    content: Content,
    /// The last generation of the process before this one, where that was of the same attachment.
    predecessor: Option<Generation>,
    _lock: Flock<File>,
}

impl EngineState {
    /// Locks and reads the state file, and takes the next generation of attachment `attach`.
    ///
    /// # Errors
    /// The file is in use, or newer than the spec, or cannot be read or written.
    pub fn open(path: &Path, attach: u64) -> Result<EngineState, EngineError> {
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
        let predecessor = Some(content.generation).filter(|last| last.attach == attach);
        let mut state = EngineState { path: path.to_owned(), content, predecessor, _lock: lock };
        if attach > known {
            state.content.generation = drawn(Generation::new(attach, 0))?;
            // The volume may have been attached elsewhere since: what an old device still holds back must
            // never be written now.
            state.content.device = None;
            state.store()?;
        } else {
            state.next_generation()?;
        }
        Ok(state)
    }

    /// The generation of this process.
    pub fn generation(&self) -> Generation {
        self.content.generation
    }

    /// The last generation of the process before this one; none where this is the first of its attachment. What another
    /// one has handed over is not for this process.
    pub fn predecessor(&self) -> Option<Generation> {
        self.predecessor
    }

    /// Takes the next generation: durable before it is used.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn next_generation(&mut self) -> Result<Generation, EngineError> {
        let Generation { attach, restart, .. } = self.content.generation;
        self.content.generation = drawn(Generation::new(attach, restart + 1))?;
        self.store()?;
        Ok(self.content.generation)
    }

    /// The device that an earlier process has left.
    pub fn device(&self) -> Option<&DeviceRecord> {
        self.content.device.as_ref()
    }

    /// Remembers the device, or that there is none.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn set_device(&mut self, device: Option<DeviceRecord>) -> Result<(), EngineError> {
        self.content.device = device;
        self.store()
    }

    /// The newest view that the arbiter has granted, as far as this host was told.
    pub fn granted(&self) -> Option<View> {
        self.content.granted
    }

    /// Remembers what the arbiter has granted, durably, unless something newer is known.
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

    fn store(&self) -> Result<(), EngineError> {
        self.write().map_err(|source| EngineError::State { path: self.path.clone(), source })
    }

    /// Whole or not at all, durably. The file of the last time is kept as the next one to be written over and
    /// exchanged, so that this needs no space: an engine has to start and to stop on a full disk too.
    fn write(&self) -> io::Result<()> {
        let temporary = self.path.with_extension("tmp");
        let bytes = serde_json::to_vec_pretty(&self.content)?;
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&temporary)?;
        file.write_all(&bytes)?;
        file.set_len(bytes.len() as u64)?;
        file.sync_all()?;
        match renameat2(AT_FDCWD, &temporary, AT_FDCWD, &self.path, RenameFlags::RENAME_EXCHANGE) {
            Ok(()) => {}
            // There is none yet, or this file system cannot exchange names.
            Err(Errno::ENOENT | Errno::EINVAL) => fs::rename(&temporary, &self.path)?,
            Err(errno) => return Err(errno.into()),
        }
        File::open(self.path.parent().unwrap_or_else(|| Path::new("/")))?.sync_all()
    }
}

/// With a nonce of its own: a process that has lost this file, or was given an attachment that was used before, is
/// not the one that had the same numbers.
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
    use shorthorn_types::{Members, ReplicaId, ViewId};

    use super::*;

    #[test]
    fn every_process_has_a_generation_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v1.state");
        let open = |attach| EngineState::open(&path, attach).map(|state| pair(state.generation()));
        assert_eq!(open(1).unwrap(), Generation::new(1, 0));
        assert_eq!(open(1).unwrap(), Generation::new(1, 1));
        assert_eq!(open(5).unwrap(), Generation::new(5, 0));
        assert!(matches!(open(4), Err(EngineError::Outdated { asked: 4, known: 5 })));
        let held = EngineState::open(&path, 5).unwrap();
        assert_eq!(pair(held.generation()), Generation::new(5, 1));
        assert!(matches!(open(5), Err(EngineError::Running { .. })));
    }

    #[test]
    fn a_process_that_has_lost_its_file_has_a_generation_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v1.state");
        let open = || EngineState::open(&path, 7).unwrap().generation();
        let before = open();
        fs::remove_file(&path).unwrap();
        let after = open();
        assert_eq!(pair(before), pair(after));
        assert_ne!(before, after, "it would be taken for the process before");
        assert_ne!(open().nonce, after.nonce, "drawn anew each time");
    }

    #[test]
    fn reads_a_file_from_before_there_was_a_nonce() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v1.state");
        fs::write(&path, r#"{"generation":{"attach":3,"restart":4},"device":null}"#).unwrap();
        let state = EngineState::open(&path, 3).unwrap();
        assert_eq!(state.predecessor(), Some(Generation::new(3, 4)));
        assert_eq!(pair(state.generation()), Generation::new(3, 5));
    }

    /// Without its nonce.
    fn pair(generation: Generation) -> Generation {
        generation.of_nonce(0)
    }

    #[test]
    fn knows_whose_sockets_are_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v1.state");
        let open = |attach| EngineState::open(&path, attach).unwrap();
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
        EngineState::open(&path, 1).unwrap().keep_grant(view(1, 2)).unwrap();
        let mut state = EngineState::open(&path, 2).unwrap();
        assert_eq!(state.granted(), Some(view(1, 2)));
        state.keep_grant(view(1, 1)).unwrap();
        assert_eq!(state.granted(), Some(view(1, 2)));
        state.keep_grant(view(2, 1)).unwrap();
        drop(state);
        assert_eq!(EngineState::open(&path, 2).unwrap().granted(), Some(view(2, 1)));
    }

    #[test]
    fn a_damaged_file_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v1.state");
        fs::write(&path, "{").unwrap();
        assert!(EngineState::open(&path, 1).unwrap_err().to_string().contains("v1.state"));
    }
}
