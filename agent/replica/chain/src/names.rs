//! The names of files in a replica directory.

use std::fmt;

use shorthorn_types::limits::MAX_IMAGE_NAME_BYTES;
use shorthorn_types::{HEAD_PREFIX, IMAGE_SUFFIX, ImageKind, SNAPSHOT_PREFIX};

use crate::error::ChainError;

/// The document that names the head and the size.
pub const VOLUME_META: &str = "volume.meta";
/// The suffix of the document of an image. Longhorn parses every such file, so no file of Shorthorn may have
/// it.
pub const META_SUFFIX: &str = ".meta";
/// The suffix of a document that is being written.
pub const TEMP_SUFFIX: &str = ".tmp";
/// The suffix of Longhorn's integrity record of an image.
pub const CHECKSUM_SUFFIX: &str = ".checksum";
/// The prefix of every file of Shorthorn. Longhorn ignores such files: they neither end in `.meta` nor
/// contain `volume-head`.
pub const OWN_PREFIX: &str = "shorthorn.";
/// Our intent file of the operation in progress, there only while it runs.
pub const INTENT_FILE: &str = "shorthorn.operation";

/// Longhorn's count of revisions of a replica.
pub const REVISION_FILE: &str = "revision.counter";

const SNAPSHOT_NAME_MAX_BYTES: usize = 200;
const _: () = assert!(255 - META_SUFFIX.len() - TEMP_SUFFIX.len() == MAX_IMAGE_NAME_BYTES);
const HEAD_NUMBERS: u32 = 1000;

/// Returns the temporary name beside `name`.
#[must_use]
pub fn temp_name(name: &str) -> String {
    format!("{name}{TEMP_SUFFIX}")
}

/// The name of an image file: `volume-head-NNN.img` or `volume-snap-<name>.img`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImageName(String);

impl ImageName {
    /// Takes `name` if it has the form of an image's name: see [`ImageKind::of`].
    #[must_use]
    pub fn parse(name: &str) -> Option<ImageName> {
        ImageKind::of(name).map(|_| ImageName(name.to_owned()))
    }

    /// Returns `volume-head-NUMBER.img`, with three digits at least.
    #[must_use]
    pub fn head(number: u32) -> ImageName {
        ImageName(format!("{HEAD_PREFIX}{number:03}{IMAGE_SUFFIX}"))
    }

    /// Returns `volume-snap-NAME.img`.
    #[must_use]
    pub fn snapshot(name: &SnapshotName) -> ImageName {
        ImageName(format!("{SNAPSHOT_PREFIX}{}{IMAGE_SUFFIX}", name.as_str()))
    }

    /// Returns the head that follows this one: the next number, back to 000 after 999, that is not `taken`.
    ///
    /// Longhorn counts on from the last digit alone (010 is followed by 001), so a number says
    /// nothing about age. All that matters is that it is free.
    #[must_use]
    pub fn next_head(&self, taken: impl Fn(&ImageName) -> bool) -> Option<ImageName> {
        let number = self.0.strip_prefix(HEAD_PREFIX)?.strip_suffix(IMAGE_SUFFIX)?;
        let current = number.parse::<u32>().map_or(0, |number| number % HEAD_NUMBERS);
        (1..HEAD_NUMBERS)
            .map(|step| ImageName::head((current + step) % HEAD_NUMBERS))
            .find(|name| !taken(name))
    }

    /// Returns the file name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns true if this names a head.
    #[must_use]
    pub fn is_head(&self) -> bool {
        self.0.starts_with(HEAD_PREFIX)
    }

    /// Returns the snapshot's name, if this is the image of one.
    #[must_use]
    pub fn snapshot_name(&self) -> Option<&str> {
        self.0.strip_prefix(SNAPSHOT_PREFIX)?.strip_suffix(IMAGE_SUFFIX)
    }

    /// Returns the name of the document beside the image.
    #[must_use]
    pub fn meta_name(&self) -> String {
        format!("{}{META_SUFFIX}", self.0)
    }

    /// Returns the name of Longhorn's integrity record of the image.
    #[must_use]
    pub fn checksum_name(&self) -> String {
        format!("{}{CHECKSUM_SUFFIX}", self.0)
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A snapshot's name as we give them: letters, digits, `.`, `_` and `-`, beginning with a letter or
/// a digit, at most 200 bytes. (Existing snapshots may have any name that can be a file's.)
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotName(String);

impl SnapshotName {
    /// Checks `name`.
    ///
    /// # Errors
    /// [`ChainError::SnapshotName`] says which rule it breaks.
    pub fn new(name: &str) -> Result<SnapshotName, ChainError> {
        let refuse = |rule: &'static str| Err(ChainError::SnapshotName { name: name.to_owned(), rule });
        if name.is_empty() {
            return refuse("the name is empty");
        }
        if name.len() > SNAPSHOT_NAME_MAX_BYTES {
            return refuse("the name is longer than 200 bytes");
        }
        if !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-')) {
            return refuse("only letters, digits, '.', '_' and '-' are allowed");
        }
        if !name.as_bytes()[0].is_ascii_alphanumeric() {
            return refuse("the name does not begin with a letter or a digit");
        }
        // Longhorn takes any file whose name contains this for a head when it rebuilds volume.meta.
        if name.contains("volume-head") {
            return refuse("the name contains 'volume-head'");
        }
        Ok(SnapshotName(name.to_owned()))
    }

    /// Returns the name without the prefix and the suffix of its image.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The kind of a file in a replica directory, by its name.
#[derive(Debug, PartialEq, Eq)]
pub enum DirectoryEntry {
    /// The file `volume.meta`.
    VolumeMeta,
    /// An image of a head or of a snapshot.
    Image(ImageName),
    /// The document of an image.
    Meta(ImageName),
    /// A file that ends in `.meta` and belongs to no image: Longhorn would take it for a layer.
    ForeignMeta,
    /// A document that was being written when its writer crashed.
    Temp,
    /// [`INTENT_FILE`].
    Intent,
    /// Anything else; left alone.
    Other,
}

/// Returns the kind of a file named `name`.
#[must_use]
pub fn classify(name: &str) -> DirectoryEntry {
    if name == VOLUME_META {
        return DirectoryEntry::VolumeMeta;
    }
    if name == INTENT_FILE {
        return DirectoryEntry::Intent;
    }
    if let Some(image) = ImageName::parse(name) {
        return DirectoryEntry::Image(image);
    }
    if let Some(stem) = name.strip_suffix(META_SUFFIX) {
        return ImageName::parse(stem).map_or(DirectoryEntry::ForeignMeta, DirectoryEntry::Meta);
    }
    let is_document = |stem: &str| {
        stem == VOLUME_META
            || stem == REVISION_FILE
            || stem.starts_with(OWN_PREFIX)
            || stem.strip_suffix(META_SUFFIX).is_some_and(|image| ImageName::parse(image).is_some())
    };
    match name.strip_suffix(TEMP_SUFFIX) {
        Some(stem) if is_document(stem) => DirectoryEntry::Temp,
        _ => DirectoryEntry::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_take_any_number_and_count_on() {
        let head = ImageName::parse("volume-head-010.img").unwrap();
        assert!(head.is_head());
        assert_eq!(head.next_head(|_| false), Some(ImageName::head(11)));
        assert_eq!(head.next_head(|name| *name == ImageName::head(11)), Some(ImageName::head(12)));
        assert_eq!(ImageName::head(999).next_head(|_| false), Some(ImageName::head(0)));
        assert_eq!(ImageName::head(7).next_head(|_| true), None);
        let long = ImageName::parse("volume-head-12345678901234.img").unwrap();
        assert_eq!(long.next_head(|_| false), Some(ImageName::head(1)));
        assert_eq!(ImageName::parse("volume-head-.img"), None);
        assert_eq!(ImageName::parse("volume-head-1a.img"), None);
    }

    #[test]
    fn files_are_distinguished_by_name() {
        use DirectoryEntry::*;
        let snapshot = ImageName::parse("volume-snap-a.b.img").unwrap();
        assert_eq!(snapshot.snapshot_name(), Some("a.b"));
        assert_eq!(classify("volume.meta"), VolumeMeta);
        assert_eq!(classify("volume-snap-a.b.img"), Image(snapshot.clone()));
        assert_eq!(classify("volume-snap-a.b.img.meta"), Meta(snapshot));
        assert_eq!(classify("volume.meta.tmp"), Temp);
        assert_eq!(classify("volume-snap-a.img.meta.tmp"), Temp);
        assert_eq!(classify("shorthorn.state.tmp"), Temp);
        assert_eq!(classify("revision.counter.tmp"), Temp);
        assert_eq!(classify("other.meta"), ForeignMeta);
        for name in [
            "notes.tmp",
            "revision.counter",
            "volume-snap-a.img.checksum",
            "volume-delta-b.img",
            "lost+found",
        ] {
            assert_eq!(classify(name), Other, "{name}");
        }
    }

    #[test]
    fn names_of_new_snapshots_are_safe() {
        for good in ["s1", "6f3a2c1e-9d0b-4c55", "expand-1048576", "A_b.c"] {
            assert!(SnapshotName::new(good).is_ok(), "{good}");
        }
        let long = "a".repeat(201);
        for bad in ["", ".", "..", "-x", "a/b", "a b", "a\0", "xvolume-headx", "ä", long.as_str()] {
            assert!(SnapshotName::new(bad).is_err(), "{bad}");
        }
    }
}
