//! Recreates a replica as a copy of another one: the same layers, which are empty at first.

use std::collections::BTreeSet;

use shorthorn_types::limits::{BLOCK_BYTES, MAX_IMAGE_NAME_BYTES};

use crate::document::{DiskMeta, VolumeMeta};
use crate::error::ChainError;
use crate::limits::MAX_LAYERS;
use crate::names::{DirectoryEntry, INTENT_FILE, ImageName, VOLUME_META, classify};
use crate::operation::create_image;
use crate::step::{FileStep, document_steps};

/// A layer as another replica has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyLayer {
    /// Name of the image, which the copy gets too.
    pub image: ImageName,
    /// The content of the document beside the image, which is taken over unchanged.
    pub meta: Vec<u8>,
    /// The apparent size of the image.
    pub size_bytes: u64,
}

/// The layers of a replica from the oldest to the head, checked to be a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyList(Vec<CopyLayer>);

impl CopyList {
    /// Checks that the layers make a chain of a volume of `size_bytes`, which a directory can hold. A
    /// snapshot from before an expansion is smaller than the layers above it. No layer is larger than the one
    /// above it.
    ///
    /// # Errors
    /// [`ChainError::CopyList`] has the problem.
    pub fn new(layers: Vec<CopyLayer>, size_bytes: u64) -> Result<CopyList, ChainError> {
        let refuse = |reason: String| Err(ChainError::CopyList { reason });
        if layers.is_empty() || layers.len() > MAX_LAYERS {
            return refuse(format!("the list has {} layers, not 1 to {MAX_LAYERS}", layers.len()));
        }
        let (mut parent, mut below_bytes) = (String::new(), 0);
        let mut seen = BTreeSet::new();
        for (number, CopyLayer { image, meta, size_bytes: layer_bytes }) in (1..).zip(&layers) {
            let is_last = number == layers.len();
            let document = match DiskMeta::parse(&image.meta_name(), meta) {
                Ok(document) => document,
                Err(error) => return refuse(error.to_string()),
            };
            if document.parent != parent {
                return refuse(format!("{image} builds on '{}', but follows '{parent}'", document.parent));
            }
            if image.is_head() != is_last {
                return refuse(format!(
                    "{image} is layer {number} of {}, but the head is last",
                    layers.len()
                ));
            }
            if is_last && *layer_bytes != size_bytes {
                return refuse(format!("{image} has {layer_bytes} bytes, but the volume has {size_bytes}"));
            }
            if *layer_bytes == 0 || !layer_bytes.is_multiple_of(BLOCK_BYTES) || *layer_bytes < below_bytes {
                return refuse(format!("{image} has {layer_bytes} bytes, the layer below it {below_bytes}"));
            }
            if image.as_str().len() > MAX_IMAGE_NAME_BYTES {
                return refuse(format!("the name {image} is longer than {MAX_IMAGE_NAME_BYTES} bytes"));
            }
            if !seen.insert(image) {
                return refuse(format!("{image} is in it twice"));
            }
            (parent, below_bytes) = (image.to_string(), *layer_bytes);
        }
        Ok(CopyList(layers))
    }

    /// Returns the single layer of an empty volume of `size_bytes`. `created` is the time, RFC 3339 in UTC.
    ///
    /// # Errors
    /// [`ChainError::CopyList`]: no volume has this size.
    pub fn empty(size_bytes: u64, created: &str) -> Result<CopyList, ChainError> {
        let image = ImageName::head(0);
        let (name, created) = (image.to_string(), created.to_owned());
        let meta = DiskMeta { name, created, ..DiskMeta::default() }.to_bytes();
        CopyList::new(vec![CopyLayer { image, meta, size_bytes }], size_bytes)
    }

    /// Returns the layers, the oldest first, the head last.
    #[must_use]
    pub fn layers(&self) -> &[CopyLayer] {
        &self.0
    }

    /// Returns true if the snapshots in `other` are the same, so that snapshots copied from either replica
    /// can be kept. The heads may differ: they are always recreated. The data of a removed snapshot is not
    /// the same everywhere: each replica removes it by itself.
    #[must_use]
    pub fn has_snapshots_of(&self, other: &CopyList) -> bool {
        let snapshots = &self.0[..self.0.len() - 1];
        let is_removed = |layer: &CopyLayer| {
            DiskMeta::parse(&layer.image.meta_name(), &layer.meta).is_ok_and(|meta| meta.removed)
        };
        *snapshots == other.0[..other.0.len() - 1] && !snapshots.iter().any(is_removed)
    }

    /// Returns the steps after which a directory with the files `names` holds exactly these layers, all of
    /// them without data but those that are `done`. They can stop anywhere and be repeated from the start,
    /// with the files that exist then. Until they are complete, the directory has no valid layout.
    #[must_use]
    pub fn steps(&self, volume: &VolumeMeta, names: &[String], done: &[bool]) -> Vec<FileStep> {
        let done = |number: usize| done.get(number).copied().unwrap_or(false);
        let kept: BTreeSet<&ImageName> =
            (0..).zip(&self.0).filter(|(number, _)| done(*number)).map(|(_, layer)| &layer.image).collect();
        let is_removed = |name: &&String| match classify(name) {
            DirectoryEntry::Image(image) => !kept.contains(&image),
            DirectoryEntry::Meta(_) | DirectoryEntry::Intent => true,
            _ => name
                .strip_suffix(crate::CHECKSUM_SUFFIX)
                .is_some_and(|image| ImageName::parse(image).is_some()),
        };
        let mut steps: Vec<FileStep> =
            names.iter().filter(is_removed).map(|name| FileStep::Unlink { name: name.clone() }).collect();
        steps.push(FileStep::Unlink { name: INTENT_FILE.to_owned() });
        steps.push(FileStep::SyncDirectory);
        for layer in &self.0 {
            if !kept.contains(&layer.image) {
                steps.extend(create_image(&layer.image, layer.size_bytes));
            }
            steps.extend(document_steps(&layer.image.meta_name(), layer.meta.clone()));
        }
        steps.push(FileStep::SyncDirectory);
        steps.extend(document_steps(VOLUME_META, self.volume(volume).to_bytes()));
        steps.push(FileStep::SyncDirectory);
        steps
    }

    /// Returns the volume's document for the complete copy.
    fn volume(&self, volume: &VolumeMeta) -> VolumeMeta {
        let name = |layer: Option<&CopyLayer>| layer.map(|layer| layer.image.to_string()).unwrap_or_default();
        let mut layers = self.0.iter().rev();
        let mut volume =
            VolumeMeta { head: name(layers.next()), parent: name(layers.next()), ..volume.clone() };
        volume.set_rebuilding(true);
        volume
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn layer(image: &str, parent: &str) -> CopyLayer {
        let meta = DiskMeta { name: image.to_owned(), parent: parent.to_owned(), ..DiskMeta::default() };
        CopyLayer { image: ImageName::parse(image).unwrap(), meta: meta.to_bytes(), size_bytes: 8192 }
    }

    fn chain() -> Vec<CopyLayer> {
        vec![
            layer("volume-snap-a.img", ""),
            layer("volume-snap-b.img", "volume-snap-a.img"),
            layer("volume-head-002.img", "volume-snap-b.img"),
        ]
    }

    #[test]
    fn only_chains_are_taken() {
        assert!(CopyList::new(chain(), 8192).is_ok());
        let refused = |layers, words: &str| {
            let error = CopyList::new(layers, 8192).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        refused(vec![], "0 layers");
        refused(chain()[..2].to_vec(), "the head is last");
        refused(chain()[1..].to_vec(), "builds on 'volume-snap-a.img', but follows ''");
        let mut layers = chain();
        layers[2].size_bytes = 4096;
        refused(layers, "4096 bytes, but the volume has 8192");
        let mut layers = chain();
        layers[1].meta = b"{".to_vec();
        refused(layers, "damaged");
    }

    /// Each would be stored, and then no directory could hold it.
    #[test]
    fn layers_that_no_directory_can_hold_are_refused() {
        for (sizes, is_chain) in [
            ([4096, 4096, 8192], true),
            ([4096, 8192, 8192], true),
            ([1 << 62, 8192, 8192], false),
            ([12288, 8192, 8192], false),
            ([8192, 4096, 8192], false),
            ([8192, 16384, 8192], false),
            ([0, 8192, 8192], false),
            ([512, 8192, 8192], false),
        ] {
            let mut layers = chain();
            layers.iter_mut().zip(sizes).for_each(|(layer, size_bytes)| layer.size_bytes = size_bytes);
            assert_eq!(CopyList::new(layers, 8192).is_ok(), is_chain, "{sizes:?}");
        }
        for (length, is_chain) in [(MAX_IMAGE_NAME_BYTES, true), (MAX_IMAGE_NAME_BYTES + 1, false)] {
            let name = format!("volume-snap-{}.img", "x".repeat(length - "volume-snap-.img".len()));
            let layers = vec![layer(&name, ""), layer("volume-head-000.img", &name)];
            assert_eq!(CopyList::new(layers, 8192).is_ok(), is_chain, "{length}");
        }
    }

    #[test]
    fn an_empty_volume_has_a_head_alone() {
        let list = CopyList::empty(8192, "2026-11-26T06:00:00Z").unwrap();
        assert_eq!((list.layers().len(), list.layers()[0].size_bytes), (1, 8192));
        CopyList::empty(0, "").unwrap_err();
    }

    proptest! {
        /// A list with any sizes is refused, or its sizes rise to that of the volume.
        #[test]
        fn accepted_sizes_rise_to_that_of_the_volume(
            sizes in prop::array::uniform3(
                prop::sample::select(vec![0, 1, 4096, 8192, 12288, 1 << 62, u64::MAX])
            ),
            volume_bytes in prop::sample::select(vec![0, 4096, 8192, 12288]),
        ) {
            let mut layers = chain();
            layers.iter_mut().zip(sizes).for_each(|(layer, size_bytes)| layer.size_bytes = size_bytes);
            if CopyList::new(layers, volume_bytes).is_ok() {
                prop_assert!(sizes.is_sorted() && sizes[0] > 0 && sizes[2] == volume_bytes);
                prop_assert!(sizes.iter().all(|size_bytes| size_bytes % 4096 == 0));
            }
        }
    }

    #[test]
    fn the_heads_of_two_sources_may_differ() {
        let list = CopyList::new(chain(), 8192).unwrap();
        let mut layers = chain();
        layers[2] = layer("volume-head-005.img", "volume-snap-b.img");
        assert!(list.has_snapshots_of(&CopyList::new(layers.clone(), 8192).unwrap()));
        layers[0].size_bytes = 4096;
        assert!(!list.has_snapshots_of(&CopyList::new(layers, 8192).unwrap()));
    }

    #[test]
    fn removed_snapshots_of_two_sources_may_differ() {
        let mut layers = chain();
        let meta = DiskMeta { name: layers[0].image.to_string(), removed: true, ..DiskMeta::default() };
        layers[0].meta = meta.to_bytes();
        let list = CopyList::new(layers, 8192).unwrap();
        assert!(!list.has_snapshots_of(&list));
    }

    #[test]
    fn complete_layers_are_kept_and_other_files_removed() {
        let list = CopyList::new(chain(), 8192).unwrap();
        let names = [
            "shorthorn.state",
            "volume-head-000.img",
            "volume-head-000.img.meta",
            "volume-snap-a.img",
            "volume-snap-a.img.meta",
            "volume-snap-b.img",
            "volume-snap-b.img.checksum",
            "volume.meta",
        ];
        let steps = list.steps(&VolumeMeta::default(), &names.map(str::to_owned), &[true, false, false]);
        let named =
            |wanted: fn(&FileStep) -> Option<&String>| steps.iter().filter_map(wanted).collect::<Vec<_>>();
        let gone = named(|step| if let FileStep::Unlink { name } = step { Some(name) } else { None });
        assert_eq!(
            gone,
            [
                "volume-head-000.img",
                "volume-head-000.img.meta",
                "volume-snap-a.img.meta",
                "volume-snap-b.img",
                "volume-snap-b.img.checksum",
                "shorthorn.operation"
            ]
        );
        let made =
            named(|step| if let FileStep::CreateSparse { name, .. } = step { Some(name) } else { None });
        assert_eq!(made, ["volume-snap-b.img", "volume-head-002.img"]);
    }
}
