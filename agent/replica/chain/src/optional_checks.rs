//! The checks of a directory that its owner may skip.

use std::collections::BTreeMap;

use crate::names::ImageName;

/// The checks that may be skipped.
#[derive(Clone, Debug, Default)]
pub struct Checks {
    /// Take a replica whose rebuild did not finish.
    pub accept_rebuilding: bool,
    /// Take layers that are smaller than the one above them without an expansion that explains it.
    pub accept_short_layers: bool,
    /// Sizes of such layers that were accepted before.
    pub known_sizes: BTreeMap<String, u64>,
}

impl Checks {
    pub(crate) fn accepts(&self, image: &ImageName, size_bytes: u64) -> bool {
        self.accept_short_layers || self.known_sizes.get(image.as_str()) == Some(&size_bytes)
    }
}
