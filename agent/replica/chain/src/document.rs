//! The JSON documents as Longhorn writes them: Go's field names in Go's order, one trailing newline.
//!
//! Fields that a newer Longhorn may add are kept in `unknown` and written back, so that opening a directory
//! here loses none of them.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::document_check::{with_check, without_check};
use crate::error::ChainError;
use crate::names::VOLUME_META;

/// The content of `volume.meta`, with the keys of Longhorn.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct VolumeMeta {
    /// The size of the volume in bytes.
    pub size: i64,
    /// The file name of the head.
    pub head: String,
    /// True if the replica is open, or was open when its process died.
    pub dirty: bool,
    /// True if Longhorn has to treat the replica as one that lacks data, because it is being rebuilt or has
    /// left its view.
    #[serde(rename = "Rebuilding")]
    pub rebuilding_to_longhorn: bool,
    /// The error that Longhorn last found.
    pub error: String,
    /// The file name of the head's parent, empty if it has none.
    pub parent: String,
    /// The logical block of the device, 512.
    pub sector_size: i64,
    /// The image below the oldest layer, or empty.
    pub backing_file_path: String,
    /// True if the volume is encrypted above us.
    pub encrypted: bool,
    /// Ours, and there only if the replica has left its view: whether it is being rebuilt too. Longhorn drops
    /// this when it writes the document.
    #[serde(rename = "ShorthornRebuilding", skip_serializing_if = "Option::is_none")]
    pub rebuilding_too: Option<bool>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub unknown: Map<String, Value>,
}

/// The document beside an image.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct DiskMeta {
    /// The file's name when the document was written. Longhorn leaves the head's old name in a snapshot's
    /// document and uses the file name instead; so does Shorthorn.
    pub name: String,
    /// The file name of the parent, empty for the oldest layer.
    pub parent: String,
    /// True if the snapshot was removed and waits to be folded.
    pub removed: bool,
    /// True if a user took the snapshot, rather than the system.
    pub user_created: bool,
    /// The time of creation, RFC 3339 in UTC.
    pub created: String,
    /// Labels; `null` in most.
    pub labels: Option<BTreeMap<String, String>>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub unknown: Map<String, Value>,
}

impl VolumeMeta {
    /// Returns true if the replica is being rebuilt, by Shorthorn or by Longhorn, and lacks data.
    #[must_use]
    pub fn is_rebuilding(&self) -> bool {
        self.rebuilding_to_longhorn && self.rebuilding_too.unwrap_or(true)
    }

    /// Returns true if the replica knows a view of its volume that it is not in. Longhorn has no views: in
    /// the document the replica is being rebuilt.
    #[must_use]
    pub fn has_left(&self) -> bool {
        self.rebuilding_to_longhorn && self.rebuilding_too.is_some()
    }

    /// Changes whether the replica is being rebuilt.
    pub fn set_rebuilding(&mut self, is_rebuilding: bool) {
        self.mark(is_rebuilding, self.has_left());
    }

    /// Changes whether the replica has left its view.
    pub fn set_left(&mut self, has_left: bool) {
        self.mark(self.is_rebuilding(), has_left);
    }

    fn mark(&mut self, is_rebuilding: bool, has_left: bool) {
        self.rebuilding_to_longhorn = is_rebuilding || has_left;
        self.rebuilding_too = has_left.then_some(is_rebuilding);
    }

    /// Reads `volume.meta`.
    ///
    /// # Errors
    /// [`ChainError::Document`] with the place of the damage.
    pub fn parse(bytes: &[u8]) -> Result<VolumeMeta, ChainError> {
        parse(VOLUME_META, bytes)
    }

    /// Returns the file's content.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        to_bytes(self)
    }
}

/// The label of a layer that is larger than the one below it because the volume was expanded: the size of
/// that one. A layer that was truncated since does not have it any more.
const BELOW_LABEL: &str = "replica-expansion-below";
/// The label of a snapshot that may lack data, because its replica was salvaged in the middle of a copy. Its
/// value differs between salvages.
const SALVAGED_LABEL: &str = "shorthorn-salvaged";

impl DiskMeta {
    /// Returns the size of the layer below, if an expansion made it smaller than this one.
    #[must_use]
    pub fn below_bytes(&self) -> Option<u64> {
        self.labels.as_ref()?.get(BELOW_LABEL)?.parse().ok()
    }

    /// Records the size of the layer below, if it is smaller than this one.
    pub(crate) fn set_bytes_below(&mut self, size_bytes: u64, below_bytes: Option<u64>) {
        let mut labels = self.labels.take().unwrap_or_default();
        match below_bytes.filter(|below_bytes| *below_bytes < size_bytes) {
            Some(below_bytes) => drop(labels.insert(BELOW_LABEL.to_owned(), below_bytes.to_string())),
            None => drop(labels.remove(BELOW_LABEL)),
        }
        self.labels = (!labels.is_empty()).then_some(labels);
    }

    /// Records that the layer may lack data since this salvage.
    pub(crate) fn set_salvaged(&mut self, salvage: &str) {
        let labels = self.labels.get_or_insert_default();
        labels.insert(SALVAGED_LABEL.to_owned(), salvage.to_owned());
    }

    /// Reads the document in the file `name`. Longhorn writes it without a check.
    ///
    /// # Errors
    /// [`ChainError::Document`] with the place of the damage, or [`ChainError::Check`].
    pub fn parse(name: &str, bytes: &[u8]) -> Result<DiskMeta, ChainError> {
        parse(name, &without_check(name, bytes)?)
    }

    /// Returns the file's content, with a check.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        with_check(to_bytes(self))
    }
}

fn parse<T: DeserializeOwned>(name: &str, bytes: &[u8]) -> Result<T, ChainError> {
    if bytes.is_empty() {
        return Err(ChainError::EmptyDocument { name: name.to_owned() });
    }
    serde_json::from_slice(bytes)
        .map_err(|error| ChainError::Document { name: name.to_owned(), reason: error.to_string() })
}

pub(crate) fn to_bytes<T: Serialize>(document: &T) -> Vec<u8> {
    let mut bytes =
        serde_json::to_vec(document).expect("strings, numbers and maps with string keys always serialise");
    bytes.push(b'\n');
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    // As in the fixtures, which a real Longhorn engine wrote.
    const VOLUME: &str = "{\"Size\":67108864,\"Head\":\"volume-head-002.img\",\"Dirty\":false,\"Rebuilding\":false,\
        \"Error\":\"\",\"Parent\":\"volume-snap-s2.img\",\"SectorSize\":512,\"BackingFilePath\":\"\",\"Encrypted\":false}\n";
    const DISK: &str = "{\"Name\":\"volume-head-001.img\",\"Parent\":\"volume-snap-s1.img\",\"Removed\":false,\
        \"UserCreated\":true,\"Created\":\"2026-11-20T23:36:34Z\",\"Labels\":null}\n";

    #[test]
    fn documents_read_back_byte_for_byte() {
        assert_eq!(VolumeMeta::parse(VOLUME.as_bytes()).unwrap().to_bytes(), VOLUME.as_bytes());
        let labelled = DISK.replace("null", "{\"a\":\"1\",\"b\":\"2\"}");
        for disk in [DISK, labelled.as_str()] {
            let bytes = DiskMeta::parse("x", disk.as_bytes()).unwrap().to_bytes();
            assert_eq!(without_check("x", &bytes).unwrap(), disk.as_bytes());
            assert_eq!(DiskMeta::parse("x", &bytes).unwrap().to_bytes(), bytes);
        }
    }

    #[test]
    fn a_flipped_bit_in_the_document_of_an_image_changes_nothing_unnoticed() {
        let disk = DiskMeta::parse("x", DISK.as_bytes()).unwrap();
        let bytes = disk.to_bytes();
        for bit in 0..bytes.len() * 8 {
            let mut rotten = bytes.clone();
            rotten[bit / 8] ^= 1 << (bit % 8);
            let Ok(mut read) = DiskMeta::parse("x", &rotten) else { continue };
            // Only the name of the check itself: then it counts as a field that we do not know.
            read.unknown.clear();
            assert_eq!(read, disk, "bit {bit}");
        }
    }

    #[test]
    fn unknown_fields_survive_and_missing_ones_default() {
        let newer = VOLUME.replace("}\n", ",\"Future\":{\"Deep\":[1,2]}}\n");
        assert_eq!(VolumeMeta::parse(newer.as_bytes()).unwrap().to_bytes(), newer.as_bytes());
        let older = VOLUME.replace(",\"Encrypted\":false", "");
        assert!(!VolumeMeta::parse(older.as_bytes()).unwrap().encrypted);
    }

    #[test]
    fn a_replica_that_has_left_its_view_is_rebuilding_only_for_longhorn() {
        let mut volume = VolumeMeta::parse(VOLUME.as_bytes()).unwrap();
        for (is_rebuilding, has_left) in [(false, true), (true, true), (true, false), (false, false)] {
            volume.set_rebuilding(is_rebuilding);
            volume.set_left(has_left);
            let text = String::from_utf8(volume.to_bytes()).unwrap();
            let says = format!("\"Rebuilding\":{}", is_rebuilding || has_left);
            assert!(text.contains(&says), "{text}");
            assert_eq!(text.contains("Shorthorn"), has_left, "{text}");
            let read = VolumeMeta::parse(text.as_bytes()).unwrap();
            assert_eq!((read.is_rebuilding(), read.has_left()), (is_rebuilding, has_left));
        }
        assert_eq!(volume.to_bytes(), VOLUME.as_bytes());
    }

    #[test]
    fn the_rebuilding_flag_of_longhorn_wins_over_ours() {
        let mut volume = VolumeMeta::parse(VOLUME.as_bytes()).unwrap();
        volume.set_left(true);
        let text = String::from_utf8(volume.to_bytes()).unwrap();
        let ended = text.replace("\"Rebuilding\":true", "\"Rebuilding\":false");
        let ended = VolumeMeta::parse(ended.as_bytes()).unwrap();
        assert!(!ended.is_rebuilding() && !ended.has_left());
        // It knows no field of ours, and writes none.
        let begun = VOLUME.replace("\"Rebuilding\":false", "\"Rebuilding\":true");
        let begun = VolumeMeta::parse(begun.as_bytes()).unwrap();
        assert!(begun.is_rebuilding() && !begun.has_left());
    }

    #[test]
    fn damage_is_named() {
        let broken = VolumeMeta::parse(&VOLUME.as_bytes()[..40]).unwrap_err().to_string();
        assert!(broken.contains("volume.meta") && broken.contains("column"), "{broken}");
        let empty = DiskMeta::parse("volume-snap-s1.img.meta", b"").unwrap_err().to_string();
        assert!(empty.contains("volume-snap-s1.img.meta is empty"), "{empty}");
        assert!(VolumeMeta::parse(VOLUME.replace("67108864", "\"big\"").as_bytes()).is_err());
    }
}
