//! The layers of the chain, to read: their list as a copy needs it, and the places where they have data.

use shorthorn_chain::{CopyLayer, FileIndex, ImageName};
use shorthorn_types::ByteRange;
use shorthorn_types::limits::BLOCK_BYTES;

use crate::error::StoreError;
use crate::image::Image;
use crate::medium::Medium;

type Result<T> = std::result::Result<T, StoreError>;

/// The layers of the chain. The oldest one has the number 0 in the calls that take a number.
#[derive(Clone, Copy, Debug)]
pub struct Chain<'a> {
    medium: &'a Medium,
    image: &'a Image,
}

impl<'a> Chain<'a> {
    pub(crate) fn new(medium: &'a Medium, image: &'a Image) -> Chain<'a> {
        Chain { medium, image }
    }

    /// Returns the indices of all open files.
    pub(crate) fn files(&self) -> Vec<FileIndex> {
        self.image.indices().collect()
    }

    /// Returns the first run of data of a layer that ends after `from_bytes`; it begins there or later.
    pub(crate) fn next_data(&self, file: FileIndex, from_bytes: u64) -> Result<Option<ByteRange>> {
        self.image.next_data_of(self.medium, file, from_bytes)
    }

    /// Returns the layers as a copy of this replica has to have them, the oldest first, the head last. Their
    /// places in this list are the numbers that the calls below take.
    ///
    /// # Errors
    /// An I/O error.
    pub fn copy_layers(&self) -> Result<Vec<CopyLayer>> {
        let layer = |image: &ImageName| {
            let size_bytes = self.image.layout().disks().get(image).map_or(0, |disk| disk.size_bytes);
            let meta = self.medium.directory().read(&image.meta_name())?.unwrap_or_default();
            Ok(CopyLayer { image: image.clone(), meta, size_bytes })
        };
        self.image.layout().chain().iter().rev().map(layer).collect()
    }

    /// Returns the index of the open file of a layer; none if it is not in the chain.
    #[must_use]
    pub fn layer_file(&self, layer: usize) -> Option<FileIndex> {
        let chain = self.image.layout().chain();
        self.image.find(chain.get(chain.len().checked_sub(layer + 1)?)?)
    }

    /// Returns the size of a layer.
    #[must_use]
    pub fn layer_bytes(&self, layer: usize) -> Option<u64> {
        let chain = self.image.layout().chain();
        let image = chain.get(chain.len().checked_sub(layer + 1)?)?;
        Some(self.image.layout().disks().get(image)?.size_bytes)
    }

    /// Returns up to `extents_max` runs of whole blocks from `from_bytes` on where a layer has data, and
    /// where to look for more.
    ///
    /// # Errors
    /// The layer does not exist, or an I/O error.
    pub fn layer_extents(
        &self,
        layer: usize,
        from_bytes: u64,
        extents_max: usize,
    ) -> Result<(Vec<ByteRange>, Option<u64>)> {
        let file = self.layer_file(layer).ok_or(StoreError::NoLayer(layer))?;
        let mut extents: Vec<ByteRange> = Vec::new();
        let mut at = from_bytes;
        while let Some(data) = self.next_data(file, at)? {
            if extents.len() == extents_max {
                return Ok((extents, Some(data.offset().max(at))));
            }
            let blocks = data.grown_to_blocks();
            let start = blocks.offset().max(from_bytes / BLOCK_BYTES * BLOCK_BYTES);
            let end = blocks.end().min(self.image.size_bytes());
            if end <= start {
                break;
            }
            extents.push(ByteRange::new(start, end - start)?);
            at = end;
        }
        Ok((extents, None))
    }

    /// Returns the next data of a layer at or after `from_bytes`.
    ///
    /// # Errors
    /// The error of the file system.
    pub fn next_layer_data(&self, file: FileIndex, from_bytes: u64) -> Result<Option<u64>> {
        Ok(self.next_data(file, from_bytes)?.map(ByteRange::offset))
    }

    /// Returns the runs of whole blocks inside `range` that a layer has, in order, each as long as can be.
    ///
    /// # Errors
    /// The error of the file system.
    pub fn layer_blocks(&self, file: FileIndex, range: ByteRange) -> Result<Vec<ByteRange>> {
        self.image.layer_blocks(self.medium, file, range)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{CreateOptions, Store};

    #[test]
    fn layers_are_numbered_from_the_oldest_to_the_head() {
        let temp = tempfile::tempdir().unwrap();
        let options = CreateOptions { size_bytes: 1 << 20, ..CreateOptions::default() };
        let mut store = Store::create(temp.path().join("replica"), options).unwrap();
        store.write_at(&[7; 4096], 4096, true).unwrap();
        store.snapshot("a", true, BTreeMap::new(), "2026-01-01T00:00:00Z").unwrap();
        let chain = store.chain();
        let layers = chain.copy_layers().unwrap();
        let images: Vec<&str> = layers.iter().map(|layer| layer.image.as_str()).collect();
        assert_eq!(images, ["volume-snap-a.img", "volume-head-001.img"]);
        let data = ByteRange::new(4096, 4096).unwrap();
        assert_eq!(chain.layer_extents(0, 0, 8).unwrap(), (vec![data], None));
        assert_eq!(chain.layer_extents(1, 0, 8).unwrap(), (vec![], None));
        let oldest = chain.layer_file(0).unwrap();
        assert_eq!(chain.next_layer_data(oldest, 0).unwrap(), Some(4096));
        assert_eq!(chain.layer_blocks(oldest, ByteRange::new(0, 1 << 20).unwrap()).unwrap(), [data]);
        assert_eq!((chain.layer_file(1), chain.layer_bytes(1)), (Some(store.head()), Some(1 << 20)));
        assert_eq!((chain.layer_file(2), chain.layer_bytes(2)), (None, None));
        assert!(matches!(chain.layer_extents(2, 0, 8), Err(StoreError::NoLayer(2))));
    }
}
