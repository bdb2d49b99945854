//! Files of a directory, as the caller found them.

use std::collections::BTreeMap;

use crate::names::ImageName;

/// An image file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageFacts {
    /// The apparent size in bytes.
    pub size_bytes: u64,
    /// The inode number: two names of one file have the same.
    pub inode: u64,
    /// True if it has a data extent. Looked at for heads only.
    pub holds_data: bool,
}

/// The document of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetaFacts {
    /// Inode of the document; another one means that the file was replaced.
    pub inode: u64,
    /// The content of the file.
    pub bytes: Vec<u8>,
}

/// The relevant facts about a directory.
#[derive(Clone, Debug, Default)]
pub struct DirectoryFacts {
    /// The content of `volume.meta`.
    pub volume_meta: Option<Vec<u8>>,
    /// Every image file by its name, in the chain or not.
    pub images: BTreeMap<ImageName, ImageFacts>,
    /// Every document, by the name of the image that it describes.
    pub metas: BTreeMap<ImageName, MetaFacts>,
    /// Names of documents that were being written.
    pub temps: Vec<String>,
    /// Names of files that end in `.meta` and belong to no image.
    pub foreign_metas: Vec<String>,
    /// The content of our intent file of the operation in progress.
    pub intent: Option<Vec<u8>>,
}
