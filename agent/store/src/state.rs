//! What we keep beside the volume: bytes that the caller understands, in a file that Longhorn ignores.
//!
//! The file is one line of JSON (format, epoch, length and checksum of what follows) and the bytes.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::directory::Directory;
use crate::error::StoreError;

pub(crate) const STATE_FILE: &str = "shorthorn.state";
const FORMAT: u32 = 1;

/// What was saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SavedState {
    /// Nothing, ever.
    None,
    /// The state belongs to the volume as it is.
    Current(Vec<u8>),
    /// Somebody else has had the directory open since, or it was copied: whatever the state says
    /// about the volume's content may be wrong.
    Outdated(Vec<u8>),
}

impl SavedState {
    /// What was saved, whatever it is worth.
    #[must_use]
    pub fn bytes(&self) -> Option<&[u8]> {
        match self {
            SavedState::None => None,
            SavedState::Current(bytes) | SavedState::Outdated(bytes) => Some(bytes),
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Header {
    format: u32,
    epoch: u64,
    length_bytes: usize,
    crc32c: u32,
}

/// Saves state, on whatever thread. Durable when `save` returns; a crash leaves the old state or
/// the new one. Saves take turns: hold one writer at a time.
#[derive(Debug)]
pub struct StateWriter {
    directory: Arc<Directory>,
    epoch: u64,
}

impl StateWriter {
    pub(crate) fn new(directory: Arc<Directory>, epoch: u64) -> StateWriter {
        StateWriter { directory, epoch }
    }

    /// Replaces the state.
    ///
    /// # Errors
    /// [`StoreError::Io`]; the old state is then still there.
    pub fn save(&mut self, payload: &[u8]) -> Result<(), StoreError> {
        let crc32c = crc32c::crc32c(payload);
        let header = Header { format: FORMAT, epoch: self.epoch, length_bytes: payload.len(), crc32c };
        let mut bytes = serde_json::to_vec(&header)
            .map_err(|error| StoreError::io("write", self.directory.path_of(STATE_FILE), error))?;
        bytes.push(b'\n');
        bytes.extend_from_slice(payload);
        self.directory.replace(STATE_FILE, &bytes)
    }
}

/// Reads the state; `epoch` is the one that counts.
pub(crate) fn load(directory: &Directory, epoch: u64) -> Result<SavedState, StoreError> {
    let Some(mut bytes) = directory.read(STATE_FILE)? else { return Ok(SavedState::None) };
    let damaged = |reason: String| StoreError::StateDamaged { path: directory.path_of(STATE_FILE), reason };
    let end = bytes
        .iter()
        .position(|byte| *byte == b'\n')
        .ok_or_else(|| damaged("it has no first line".to_owned()))?;
    let header: Header =
        serde_json::from_slice(&bytes[..end]).map_err(|error| damaged(format!("its first line: {error}")))?;
    if header.format != FORMAT {
        return Err(damaged(format!("its format is {}, this program knows {FORMAT}", header.format)));
    }
    let payload = bytes.split_off(end + 1);
    if payload.len() != header.length_bytes {
        return Err(damaged(format!("it has {} bytes of {}", payload.len(), header.length_bytes)));
    }
    if crc32c::crc32c(&payload) != header.crc32c {
        return Err(damaged("its checksum is wrong".to_owned()));
    }
    Ok(if header.epoch == epoch { SavedState::Current(payload) } else { SavedState::Outdated(payload) })
}
