//! The layout of a directory: the volume, its layers, and the chain from the head to the root.

use std::collections::BTreeMap;

use shorthorn_types::limits::BLOCK_BYTES;

use crate::directory_facts::ImageFacts;
use crate::document::{DiskMeta, VolumeMeta};
use crate::error::ChainError;
use crate::limits::MAX_LAYERS;
use crate::names::{ImageName, VOLUME_META};
use crate::optional_checks::Checks;

/// The label of the snapshot that an expansion by Longhorn leaves; its value is the new size.
const EXPANSION_LABEL: &str = "replica-expansion";

/// A layer: an image and its document.
#[derive(Clone, Debug, PartialEq)]
pub struct ChainLayer {
    /// The document.
    pub meta: DiskMeta,
    /// The apparent size of the image.
    pub size_bytes: u64,
    /// The inode of the image.
    pub inode: u64,
}

/// A directory that makes sense.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    pub(crate) volume: VolumeMeta,
    pub(crate) disks: BTreeMap<ImageName, ChainLayer>,
    pub(crate) chain: Vec<ImageName>,
    pub(crate) size_bytes: u64,
}

impl Layout {
    /// Checks that the documents and images make a volume, and follows its chain.
    pub(crate) fn new(
        mut volume: VolumeMeta,
        images: &BTreeMap<ImageName, ImageFacts>,
        mut metas: BTreeMap<ImageName, DiskMeta>,
        checks: &Checks,
    ) -> Result<Layout, ChainError> {
        let size_bytes = check_volume(&volume, checks)?;
        let head = head_of(&volume)?;
        let chain = follow(&head, VOLUME_META, &metas, images)?;
        let mut disks = BTreeMap::new();
        for (name, image) in images {
            if let Some(meta) = metas.remove(name) {
                let disk = ChainLayer { meta, size_bytes: image.size_bytes, inode: image.inode };
                disks.insert(name.clone(), disk);
            }
        }
        // The head's own document counts, as for Longhorn; volume.meta only repeats it.
        volume.parent = disks[&head].meta.parent.clone();
        let layout = Layout { volume, disks, chain, size_bytes };
        layout.check_head()?;
        layout.check_sizes(&layout.chain, checks)?;
        Ok(layout)
    }

    /// Returns the volume's document.
    #[must_use]
    pub fn volume(&self) -> &VolumeMeta {
        &self.volume
    }

    /// Returns the volume's document, to change its flags; head, parent and size are the operations'
    /// business.
    pub fn volume_mut(&mut self) -> &mut VolumeMeta {
        &mut self.volume
    }

    /// Returns the size of the volume.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Returns the layers from the head to the root.
    #[must_use]
    pub fn chain(&self) -> &[ImageName] {
        &self.chain
    }

    /// Returns the image that receives all writes, the last of the chain.
    #[must_use]
    pub fn head(&self) -> &ImageName {
        &self.chain[0]
    }

    /// Returns all layers, those on side branches too.
    #[must_use]
    pub fn disks(&self) -> &BTreeMap<ImageName, ChainLayer> {
        &self.disks
    }

    /// Returns true if `other` has the same documents, with any inodes.
    #[must_use]
    pub fn same_documents(&self, other: &Layout) -> bool {
        let metas = |layout: &Layout| {
            layout
                .disks
                .iter()
                .map(|(name, disk)| (name.clone(), disk.meta.parent.clone(), disk.meta.removed))
                .collect::<Vec<_>>()
        };
        self.volume.head == other.volume.head
            && self.size_bytes == other.size_bytes
            && metas(self) == metas(other)
    }

    /// Sets the inode of an image that an operation has made.
    pub fn set_inode(&mut self, image: &ImageName, inode: u64) {
        if let Some(disk) = self.disks.get_mut(image) {
            disk.inode = inode;
        }
    }

    /// Returns the layers that build on `image`.
    pub fn children<'a>(&'a self, image: &'a ImageName) -> impl Iterator<Item = &'a ImageName> {
        self.disks.iter().filter(|(_, disk)| disk.meta.parent == image.as_str()).map(|(name, _)| name)
    }

    /// Returns the image and the layer of a snapshot.
    ///
    /// # Errors
    /// [`ChainError::NoSnapshot`].
    pub fn snapshot(&self, name: &str) -> Result<(&ImageName, &ChainLayer), ChainError> {
        self.disks
            .iter()
            .find(|(image, _)| image.snapshot_name() == Some(name))
            .ok_or_else(|| ChainError::NoSnapshot(name.to_owned()))
    }

    /// Returns the layers that a snapshot shows, itself first; it may lie on a side branch.
    ///
    /// # Errors
    /// The snapshot is missing or removed, or its chain is broken.
    pub fn chain_of_snapshot(&self, name: &str, checks: &Checks) -> Result<Vec<ImageName>, ChainError> {
        let (image, disk) = self.snapshot(name)?;
        if disk.meta.removed {
            return Err(ChainError::SnapshotRemoved(name.to_owned()));
        }
        let chain = follow_disks(image, &self.disks)?;
        self.check_sizes(&chain, checks)?;
        Ok(chain)
    }

    fn check_head(&self) -> Result<(), ChainError> {
        let head = &self.disks[self.head()];
        if head.size_bytes != self.size_bytes {
            let (image, size_bytes) = (self.head().to_string(), head.size_bytes);
            return Err(ChainError::HeadSize { image, size_bytes, volume_bytes: self.size_bytes });
        }
        match self.chain[1..].iter().find(|image| self.disks[*image].inode == head.inode) {
            Some(image) => {
                Err(ChainError::SnapshotIsHead { image: image.to_string(), head: self.head().to_string() })
            }
            None => Ok(()),
        }
    }

    /// Checks that layers get no smaller towards the head, because volumes only grow. If one does get larger,
    /// an expansion must have been there: one of Shorthorn, which the larger layer has, or one of Longhorn.
    fn check_sizes(&self, chain: &[ImageName], checks: &Checks) -> Result<(), ChainError> {
        for image in chain {
            let size_bytes = self.disks[image].size_bytes;
            if size_bytes == 0 || !size_bytes.is_multiple_of(BLOCK_BYTES) {
                return Err(ChainError::RaggedImage { image: image.to_string(), size_bytes });
            }
        }
        let pairs = || chain.windows(2).map(|pair| (&pair[0], &pair[1]));
        let size = |image: &ImageName| self.disks[image].size_bytes;
        if let Some((child, image)) = pairs().find(|(child, image)| size(image) > size(child)) {
            return Err(ChainError::LayerShrinks {
                image: image.to_string(),
                size_bytes: size(image),
                child: child.to_string(),
                child_bytes: size(child),
            });
        }
        let unexplained = |child: &ImageName, image: &ImageName| {
            size(image) < size(child)
                && !checks.accepts(image, size(image))
                && self.disks[child].meta.below_bytes() != Some(size(image))
                && !self.grew_above(image, size(child), checks)
        };
        match pairs().find(|(child, image)| unexplained(child, image)) {
            Some((child, image)) => Err(ChainError::ShortLayer {
                image: image.to_string(),
                size_bytes: size(image),
                child: child.to_string(),
                child_bytes: size(child),
            }),
            None => Ok(()),
        }
    }

    /// Returns true if Longhorn has expanded the volume to `size_bytes` at `image` or later: the snapshot of
    /// that expansion is `image` or builds on it. (If it only builds on it, the volume was reverted since.)
    fn grew_above(&self, image: &ImageName, size_bytes: u64, checks: &Checks) -> bool {
        self.disks.iter().any(|(name, disk)| {
            if disk.size_bytes >= size_bytes || !is_expansion(name, disk, size_bytes) {
                return false;
            }
            let Ok(chain) = follow_disks(name, &self.disks) else { return false };
            let position = chain.iter().position(|layer| layer == image);
            position.is_some_and(|position| self.check_sizes(&chain[..=position], checks).is_ok())
        })
    }

    /// Returns the sizes of all layers that are shorter than a layer that builds on them.
    #[must_use]
    pub fn short_layers(&self) -> BTreeMap<String, u64> {
        let shorter = self.disks.values().filter_map(|child| {
            let (name, parent) = self.disks.get_key_value(&ImageName::parse(&child.meta.parent)?)?;
            (parent.size_bytes < child.size_bytes).then(|| (name.to_string(), parent.size_bytes))
        });
        shorter.collect()
    }
}

/// Returns true if a layer is the snapshot that an expansion by Longhorn to `size_bytes` left.
fn is_expansion(image: &ImageName, disk: &ChainLayer, size_bytes: u64) -> bool {
    let label = disk.meta.labels.as_ref().and_then(|labels| labels.get(EXPANSION_LABEL));
    label.is_some_and(|label| *label == size_bytes.to_string())
        || image.snapshot_name() == Some(format!("expand-{size_bytes}").as_str())
}

/// Returns the head that `volume.meta` names.
pub(crate) fn head_of(volume: &VolumeMeta) -> Result<ImageName, ChainError> {
    ImageName::parse(&volume.head).filter(ImageName::is_head).ok_or_else(|| ChainError::Value {
        name: VOLUME_META.to_owned(),
        field: "Head",
        value: format!("'{}'", volume.head),
        rule: "must name a file volume-head-NNN.img",
    })
}

/// Returns the size of a volume as a valid number of bytes.
pub(crate) fn check_size(size_bytes: u64) -> Result<i64, ChainError> {
    match i64::try_from(size_bytes) {
        Ok(size) if size > 0 && size_bytes.is_multiple_of(BLOCK_BYTES) => Ok(size),
        _ => Err(ChainError::BadSize(size_bytes)),
    }
}

fn check_volume(volume: &VolumeMeta, checks: &Checks) -> Result<u64, ChainError> {
    let size = u64::try_from(volume.size).ok().filter(|size| *size > 0 && size.is_multiple_of(BLOCK_BYTES));
    let Some(size_bytes) = size else {
        return Err(ChainError::Value {
            name: VOLUME_META.to_owned(),
            field: "Size",
            value: volume.size.to_string(),
            rule: "must be a multiple of 4096 above 0",
        });
    };
    let unsupported = |field, value: String, what| Err(ChainError::Unsupported { field, value, what });
    if !volume.backing_file_path.is_empty() {
        return unsupported("BackingFilePath", format!("'{}'", volume.backing_file_path), "a backing image");
    }
    if volume.encrypted {
        return unsupported("Encrypted", "true".to_owned(), "an encrypted volume");
    }
    // Files of old versions have no SectorSize; it reads as 0.
    if !matches!(volume.sector_size, 0 | 512) {
        return unsupported("SectorSize", volume.sector_size.to_string(), "a sector other than 512 bytes");
    }
    if volume.is_rebuilding() && !checks.accept_rebuilding {
        return Err(ChainError::Rebuilding);
    }
    Ok(size_bytes)
}

/// Follows the parents from `start`, which `named_by` names, to the root.
fn follow(
    start: &ImageName,
    named_by: &str,
    metas: &BTreeMap<ImageName, DiskMeta>,
    images: &BTreeMap<ImageName, ImageFacts>,
) -> Result<Vec<ImageName>, ChainError> {
    let mut chain: Vec<ImageName> = Vec::new();
    let mut current = start.clone();
    loop {
        let needed_by = || chain.last().map_or(named_by, ImageName::as_str).to_owned();
        if chain.contains(&current) {
            return Err(ChainError::Cycle { image: current.to_string() });
        }
        if chain.len() == MAX_LAYERS {
            return Err(ChainError::TooManyLayers);
        }
        if !images.contains_key(&current) {
            return Err(missing_image(&current, needed_by(), metas, images));
        }
        let Some(meta) = metas.get(&current) else {
            return Err(ChainError::MissingMeta { meta: current.meta_name(), needed_by: needed_by() });
        };
        chain.push(current);
        if meta.parent.is_empty() {
            return Ok(chain);
        }
        current = parent_of(chain.last().unwrap_or(start), meta)?;
    }
}

/// Returns the same among layers that are known to be whole.
fn follow_disks(
    start: &ImageName,
    disks: &BTreeMap<ImageName, ChainLayer>,
) -> Result<Vec<ImageName>, ChainError> {
    let mut images = BTreeMap::new();
    let mut metas = BTreeMap::new();
    for (name, disk) in disks {
        let facts = ImageFacts { size_bytes: disk.size_bytes, inode: disk.inode, holds_data: true };
        images.insert(name.clone(), facts);
        metas.insert(name.clone(), disk.meta.clone());
    }
    follow(start, start.as_str(), &metas, &images)
}

fn parent_of(image: &ImageName, meta: &DiskMeta) -> Result<ImageName, ChainError> {
    ImageName::parse(&meta.parent).filter(|parent| !parent.is_head()).ok_or_else(|| ChainError::Value {
        name: image.meta_name(),
        field: "Parent",
        value: format!("'{}'", meta.parent),
        rule: "must be empty or name a file volume-snap-<name>.img",
    })
}

fn missing_image(
    image: &ImageName,
    needed_by: String,
    metas: &BTreeMap<ImageName, DiskMeta>,
    images: &BTreeMap<ImageName, ImageFacts>,
) -> ChainError {
    let parent = metas.get(image).and_then(|meta| ImageName::parse(&meta.parent));
    let removed = parent
        .filter(|parent| images.contains_key(parent) && metas.get(parent).is_some_and(|meta| meta.removed));
    let image = image.to_string();
    match removed {
        Some(parent) => ChainError::AmbiguousFold { image, needed_by, parent: parent.to_string() },
        None => ChainError::MissingImage { image, needed_by },
    }
}
