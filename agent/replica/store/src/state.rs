//! The state that Shorthorn keeps beside the volume: bytes that the caller understands, in a file that
//! Longhorn ignores.
//!
//! The file is one line of JSON (format, epoch, length and checksum of the rest) and the bytes.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::directory::Directory;
use crate::error::StoreError;

pub(crate) const STATE_FILE: &str = "shorthorn.state";
const FORMAT: u32 = 1;

/// The content of `shorthorn.state`, and whether it counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SavedState {
    /// The state was never saved.
    None,
    /// The state belongs to the current volume.
    Current(Vec<u8>),
    /// Another program has had the directory open since, or it was copied: statements of the state about the
    /// volume's content may be wrong.
    Outdated(Vec<u8>),
}

impl SavedState {
    /// Returns the saved bytes, valid or not.
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

/// A writer of state for any thread. Durable when `save` returns; a crash leaves the old state or the new
/// one. Saves take turns: hold one writer at a time.
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

/// Reads the state, which is current if it has the epoch `trusted`.
pub(crate) fn load(directory: &Directory, trusted: Option<u64>) -> Result<SavedState, StoreError> {
    let Some(bytes) = directory.read(STATE_FILE)? else { return Ok(SavedState::None) };
    let damaged = |reason: String| StoreError::StateDamaged { path: directory.path_of(STATE_FILE), reason };
    parse(bytes, trusted).map_err(damaged)
}

/// Parses the content of the file. The error is a description of the problem.
fn parse(mut bytes: Vec<u8>, trusted: Option<u64>) -> Result<SavedState, String> {
    let end = bytes.iter().position(|byte| *byte == b'\n').ok_or("the first line is missing")?;
    let header: Header =
        serde_json::from_slice(&bytes[..end]).map_err(|error| format!("the first line: {error}"))?;
    if header.format != FORMAT {
        return Err(format!("the format is {}, this program knows {FORMAT}", header.format));
    }
    let payload = bytes.split_off(end + 1);
    if payload.len() != header.length_bytes {
        return Err(format!("the file has {} bytes of {}", payload.len(), header.length_bytes));
    }
    if crc32c::crc32c(&payload) != header.crc32c {
        return Err("the checksum is wrong".to_owned());
    }
    let is_current = trusted == Some(header.epoch);
    Ok(if is_current { SavedState::Current(payload) } else { SavedState::Outdated(payload) })
}

#[cfg(shorthorn_fuzzing)]
pub(crate) mod fuzzing {
    use super::*;

    /// A state that is accepted is the rest of the file.
    pub fn check(bytes: &[u8]) {
        for trusted in [None, Some(7)] {
            if let Ok(found) = parse(bytes.to_vec(), trusted) {
                assert!(found.bytes().is_some_and(|payload| bytes.ends_with(payload)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const EPOCH: u64 = 7;
    const TRUSTED: Option<u64> = Some(EPOCH);

    fn file(payload: &[u8]) -> Vec<u8> {
        let crc32c = crc32c::crc32c(payload);
        let header = Header { format: FORMAT, epoch: EPOCH, length_bytes: payload.len(), crc32c };
        [serde_json::to_vec(&header).unwrap(), b"\n".to_vec(), payload.to_vec()].concat()
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_the_state(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let found = parse(bytes.clone(), TRUSTED);
            prop_assert!(found.is_err() || bytes.first() == Some(&b'{'), "{found:?}");
        }

        /// Checks that a changed file is either refused or has the saved payload. No check covers the epoch
        /// of the first line.
        #[test]
        fn a_changed_file_is_refused_or_says_the_same(
            payload in prop::collection::vec(any::<u8>(), 0..60),
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
            cut in prop::option::of(any::<prop::sample::Index>()),
        ) {
            let whole = file(&payload);
            prop_assert_eq!(parse(whole.clone(), TRUSTED), Ok(SavedState::Current(payload.clone())));
            let mut changed = whole;
            let at = at.index(changed.len());
            changed[at] = byte;
            if let Some(cut) = cut {
                changed.truncate(cut.index(changed.len()));
            }
            if let Ok(found) = parse(changed, TRUSTED) {
                prop_assert_eq!(found.bytes(), Some(&payload[..]));
            }
        }
    }
}
