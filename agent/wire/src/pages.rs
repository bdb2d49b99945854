//! Checks that the pages of a replica's answer are plausible, before any of them is used.

use std::collections::BTreeSet;

use shorthorn_types::limits::{BLOCK_BYTES, MAX_IMAGE_NAME_BYTES, MAX_LAYERS, MAX_PROPOSED_VIEWS};
use shorthorn_types::{ImageKind, RUNS_PER_MARK_MAX, Regions, RegionsOf};
use thiserror::Error;

use crate::{
    ExtentsPage, ExtentsQuery, LayerCheck, LayerList, RegionsPage, RegionsQuery, SUM_PIECE_BYTES, Welcome,
    WireLayer,
};

/// The reason why an answer, or a page of one, is not plausible.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("the replica has answered with {0}: it breaks the protocol, or its memory is faulty")]
pub struct BadPage(String);

impl ExtentsPage {
    /// Returns an error unless this page can answer `query` about a layer of `layer_bytes`. A page has whole
    /// blocks of the layer in order, and none before the start of the page. It has a next page only if it is
    /// full.
    ///
    /// # Errors
    /// [`BadPage`].
    pub fn check(&self, query: &ExtentsQuery, layer_bytes: u64) -> Result<(), BadPage> {
        let from_bytes = query.from_bytes / BLOCK_BYTES * BLOCK_BYTES;
        if self.extents.len() > ExtentsPage::EXTENTS_MAX {
            return Err(BadPage(format!(
                "{} extents in one page, more than {}",
                self.extents.len(),
                ExtentsPage::EXTENTS_MAX
            )));
        }
        let mut last_end_bytes = from_bytes;
        for extent in &self.extents {
            let end_bytes = extent.offset_bytes.checked_add(extent.length_bytes);
            let end_bytes = end_bytes.filter(|end| *end <= layer_bytes);
            let is_whole = extent.offset_bytes.is_multiple_of(BLOCK_BYTES)
                && extent.length_bytes.is_multiple_of(BLOCK_BYTES);
            match end_bytes {
                Some(end) if is_whole && extent.length_bytes > 0 && extent.offset_bytes >= last_end_bytes => {
                    last_end_bytes = end;
                }
                _ => {
                    return Err(BadPage(format!(
                        "an extent of {} bytes at {}, after {last_end_bytes}, in a layer of {layer_bytes} \
                         bytes",
                        extent.length_bytes, extent.offset_bytes
                    )));
                }
            }
        }
        match self.next_bytes {
            Some(next) if self.extents.len() < ExtentsPage::EXTENTS_MAX || next < last_end_bytes => {
                let extents = self.extents.len();
                Err(BadPage(format!("a next page at {next} after {extents} extents up to {last_end_bytes}")))
            }
            _ => Ok(()),
        }
    }
}

impl LayerList {
    /// Returns an error unless these can be the layers of a replica of a volume of `volume_bytes`. They have
    /// names of images, each another one, and the head is last. The sizes are whole blocks, and no layer is
    /// larger than the one above it. A replica that has not followed an expansion yet is smaller than the
    /// volume.
    ///
    /// # Errors
    /// [`BadPage`].
    pub fn check(&self, volume_bytes: u64) -> Result<(), BadPage> {
        if self.layers.is_empty() || self.layers.len() > MAX_LAYERS {
            return Err(BadPage(format!("{} layers, not 1 to {MAX_LAYERS}", self.layers.len())));
        }
        let (mut seen, mut below_bytes) = (BTreeSet::new(), BLOCK_BYTES);
        for (number, WireLayer { image, size_bytes, .. }) in (1..).zip(&self.layers) {
            let is_last = number == self.layers.len();
            let kind = if is_last { ImageKind::Head } else { ImageKind::Snapshot };
            if ImageKind::of(image) != Some(kind) || image.len() > MAX_IMAGE_NAME_BYTES {
                let shown: String = image.chars().take(MAX_IMAGE_NAME_BYTES).collect();
                return Err(BadPage(format!(
                    "the name {shown:?} of layer {number} of {}",
                    self.layers.len()
                )));
            }
            if !seen.insert(image) {
                return Err(BadPage(format!("the layer {image} twice")));
            }
            if *size_bytes < below_bytes
                || *size_bytes > volume_bytes
                || !size_bytes.is_multiple_of(BLOCK_BYTES)
            {
                return Err(BadPage(format!(
                    "a layer {image} of {size_bytes} bytes above one of {below_bytes}, in a volume of \
                     {volume_bytes}"
                )));
            }
            below_bytes = *size_bytes;
        }
        Ok(())
    }
}

impl LayerCheck {
    /// Returns an error unless these can be the checks of a piece. No sum is 0, which stands for none, and
    /// the next piece begins where pieces do. Another place would make all other members refuse the next
    /// question.
    ///
    /// # Errors
    /// [`BadPage`].
    pub fn check(&self) -> Result<(), BadPage> {
        if let Some(next) = self.next_bytes.filter(|next| !next.is_multiple_of(SUM_PIECE_BYTES)) {
            return Err(BadPage(format!("a next piece at {next}, where none begins")));
        }
        match [self.sum, self.kept].contains(&Some(0)) {
            true => Err(BadPage("a sum that no piece has".to_owned())),
            false => Ok(()),
        }
    }
}

impl Welcome {
    /// Returns an error if the replica reports more proposed views than any keeps: the others would have to
    /// store these too, and refuse.
    ///
    /// # Errors
    /// [`BadPage`].
    pub fn check(&self) -> Result<(), BadPage> {
        let count = self.report.proposed.len();
        match count <= MAX_PROPOSED_VIEWS {
            true => Ok(()),
            false => Err(BadPage(format!("{count} proposed views, more than {MAX_PROPOSED_VIEWS}"))),
        }
    }
}

impl RegionsPage {
    /// Returns an error unless this page can answer `query`, which has the regions of the question. The runs
    /// are in order within the volume, and a next page follows only a full one. For allocated regions, which
    /// take time to find, it may follow any page with a run.
    ///
    /// # Errors
    /// [`BadPage`].
    pub fn check(&self, query: &RegionsQuery) -> Result<(), BadPage> {
        let count = query.size_bytes.map_or(0, |size_bytes| Regions::of(size_bytes).count());
        if self.runs.len() > RUNS_PER_MARK_MAX {
            return Err(BadPage(format!(
                "{} runs in one page, more than {RUNS_PER_MARK_MAX}",
                self.runs.len()
            )));
        }
        let mut last_end = query.from;
        for (start, length) in &self.runs {
            match start.checked_add(*length).filter(|end| *end <= count) {
                Some(end) if *length > 0 && *start >= last_end => last_end = end,
                _ => {
                    return Err(BadPage(format!(
                        "{length} regions from {start} on, after {last_end}, of {count}"
                    )));
                }
            }
        }
        let full = if query.of == RegionsOf::Allocated { 1 } else { RUNS_PER_MARK_MAX };
        match self.next {
            Some(next) if self.runs.len() < full || next < last_end => {
                Err(BadPage(format!("a next page at {next} after {} runs up to {last_end}", self.runs.len())))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use shorthorn_types::{Generation, Members, ReplicaReport, View, ViewId};

    use super::*;
    use crate::Extent;

    const LAYER_BYTES: u64 = 2 << 30;

    fn page_of(list: &[(u64, u64)], next_bytes: Option<u64>) -> ExtentsPage {
        let extents =
            list.iter().map(|(start, length)| Extent { offset_bytes: *start, length_bytes: *length });
        ExtentsPage { extents: extents.collect(), next_bytes }
    }

    fn extents(list: &[(u64, u64)], next_bytes: Option<u64>) -> Result<(), BadPage> {
        page_of(list, next_bytes).check(&ExtentsQuery { layer: 0, from_bytes: 8292 }, LAYER_BYTES)
    }

    #[test]
    fn extents_are_whole_blocks_in_order() {
        extents(&[], None).unwrap();
        extents(&[(8192, 4096), (12288, 8192), (1 << 30, 1 << 30)], None).unwrap();
        let full: Vec<_> = (2..202).map(|block| (block * 8192, 4096)).collect();
        extents(&full, Some(202 * 8192)).unwrap();
        for (bad, next_bytes) in [
            (&[(8192, 512)][..], None),
            (&[(8704, 4096)], None),
            (&[(8192, 0)], None),
            (&[(4096, 4096)], None),
            (&[(8192, 8192), (12288, 4096)], None),
            (&[(16384, 4096), (8192, 4096)], None),
            (&[(u64::MAX - 4095, 4096)], None),
            (&[(8192, LAYER_BYTES)], None),
            (&[(LAYER_BYTES, 4096)], None),
            (&[(8192, 4096)], Some(12288)),
            (&[], Some(1 << 20)),
            (&full, Some(8192)),
            (&[&full[..], &[(1 << 30, 4096)]].concat(), None),
        ] {
            let error = extents(bad, next_bytes).unwrap_err().to_string();
            assert!(error.contains("the replica has answered with"), "{error}");
        }
    }

    fn layers(list: &[(&str, u64)]) -> LayerList {
        let layer = |(image, size_bytes): &(&str, u64)| WireLayer {
            image: (*image).to_owned(),
            meta: String::new(),
            size_bytes: *size_bytes,
        };
        LayerList { layers: list.iter().map(layer).collect() }
    }

    #[test]
    fn layers_are_images_of_rising_sizes_with_the_head_last() {
        let (a, b, head) = ("volume-snap-a.img", "volume-snap-b.img", "volume-head-002.img");
        let longest = format!("volume-snap-{}.img", "x".repeat(MAX_IMAGE_NAME_BYTES - 16));
        let too_long = format!("volume-snap-{}.img", "x".repeat(MAX_IMAGE_NAME_BYTES - 15));
        for good in [
            &[(head, 8192)][..],
            &[(head, 4096)], // it has not grown yet
            &[(a, 8192), (b, 8192), (head, 8192)],
            &[(a, 4096), (b, 8192), (head, 8192)], // the volume has grown since a
            &[(&longest, 4096), (head, 8192)],
        ] {
            layers(good).check(8192).unwrap();
        }
        for bad in [
            &[][..],
            &[(a, 8192)],
            &[(head, 8192), (a, 8192)],
            &[(head, 8192), ("volume-head-003.img", 8192)],
            &[(a, 8192), (a, 8192), (head, 8192)],
            &[(a, 1 << 62), (head, 8192)],
            &[(a, 1 << 62), (head, 1 << 62)],
            &[(a, 12288), (head, 8192)],
            &[(a, 8192), (b, 4096), (head, 8192)],
            &[(a, 0), (head, 8192)],
            &[(a, 512), (head, 8192)],
            &[(head, 12288)],
            &[("volume-snap-/../../../etc/x.img", 4096), (head, 8192)],
            &[("../volume-snap-a.img", 4096), (head, 8192)],
            &[("..", 4096), (head, 8192)],
            &[("", 4096), (head, 8192)],
            &[("shorthorn.state", 4096), (head, 8192)],
            &[(&too_long, 4096), (head, 8192)],
        ] {
            let error = layers(bad).check(8192).unwrap_err().to_string();
            assert!(error.contains("the replica has answered with"), "{error}");
        }
        let names: Vec<String> = (0..MAX_LAYERS).map(|n| format!("volume-snap-{n}.img")).collect();
        let mut many: Vec<(&str, u64)> = names.iter().map(|name| (name.as_str(), 4096)).collect();
        many.push((head, 8192));
        layers(&many).check(8192).unwrap_err();
        layers(&many[1..]).check(8192).unwrap();
    }

    #[test]
    fn checks_of_a_piece_have_sums_and_a_next_piece() {
        let check = |sum, kept, next_bytes| LayerCheck { sum, kept, next_bytes }.check().is_ok();
        assert!(check(None, None, None) && check(Some(1), Some(u32::MAX), Some(SUM_PIECE_BYTES)));
        assert!(!check(Some(0), None, None) && !check(None, Some(0), None));
        assert!(!check(None, None, Some(4096)) && !check(None, None, Some(u64::MAX)));
    }

    #[test]
    fn a_welcome_has_no_more_views_than_a_replica_keeps() {
        let id = ViewId { generation: Generation::NEVER, number: 0 };
        let view = View { id, members: Members::NONE };
        let welcome = |count| Welcome {
            run: 1,
            size_bytes: 4096,
            report: ReplicaReport { committed: view, proposed: vec![view; count] },
            lost_cache: false,
            rebuilding: false,
            tracks: Members::NONE,
            stamp: None,
        };
        welcome(MAX_PROPOSED_VIEWS).check().unwrap();
        welcome(MAX_PROPOSED_VIEWS + 1).check().unwrap_err();
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]

        #[test]
        fn extents_that_pass_lie_in_the_layer(
            list in prop::collection::vec((0u64..8, 0u64..4), 0..4),
            odd in prop::option::of(
                (0usize..4, prop::sample::select(vec![512, 1 << 40, u64::MAX - 4095, u64::MAX]))
            ),
            next_bytes in prop::option::of(0u64..100_000),
            layer_blocks in 0u64..8,
        ) {
            let mut list: Vec<_> = list.iter().map(|(at, length)| (at * 4096, length * 4096)).collect();
            if let Some((at, odd)) = odd && let Some(extent) = list.get_mut(at) {
                extent.0 = odd;
            }
            let page = page_of(&list, next_bytes);
            if page.check(&ExtentsQuery { layer: 0, from_bytes: 4096 }, layer_blocks * 4096).is_ok() {
                let mut last = 4096;
                for Extent { offset_bytes, length_bytes } in &page.extents {
                    prop_assert!(*offset_bytes >= last && *length_bytes > 0 && length_bytes % 4096 == 0);
                    last = offset_bytes + length_bytes;
                }
                prop_assert!(page.extents.is_empty() || last <= layer_blocks * 4096);
                prop_assert_eq!(page.next_bytes, None);
            }
        }

        #[test]
        fn layers_that_pass_are_those_of_a_directory(
            list in prop::collection::vec((0usize..6, 0usize..6), 0..4),
            volume_blocks in 0u64..4,
        ) {
            const NAMES: [&str; 6] = [
                "volume-snap-a.img", "volume-snap-b.img", "volume-head-000.img", "volume-head-001.img",
                "volume-snap-/x.img", "..",
            ];
            const SIZES: [u64; 6] = [4096, 8192, 12288, 0, 512, 1 << 62];
            let list: Vec<_> = list.iter().map(|(name, size)| (NAMES[*name], SIZES[*size])).collect();
            if layers(&list).check(volume_blocks * 4096).is_ok() {
                prop_assert!(list.is_sorted_by_key(|(_, size_bytes)| *size_bytes));
                prop_assert!(list.iter().all(|(_, size_bytes)| size_bytes % 4096 == 0 && *size_bytes > 0));
                let (head, snapshots) = list.split_last().unwrap();
                prop_assert!(head.1 <= volume_blocks * 4096 && head.0.starts_with("volume-head"));
                prop_assert!(snapshots.iter().all(|(name, _)| NAMES[..2].contains(name)));
            }
        }
    }

    fn runs(of: RegionsOf, runs: &[(u32, u32)], next: Option<u32>) -> Result<(), BadPage> {
        let page = RegionsPage { kept: true, runs: runs.to_vec(), next, stamp: 0 };
        page.check(&RegionsQuery { of, from: 10, size_bytes: Some(1 << 30) })
    }

    #[test]
    fn runs_are_in_order_within_the_volume() {
        let count = Regions::of(1 << 30).count();
        let full: Vec<_> = (5..805).map(|run| (run * 2, 1)).collect();
        for of in [RegionsOf::Intent, RegionsOf::Allocated] {
            runs(of, &[], None).unwrap();
            runs(of, &[(10, 1), (11, 5), (count - 1, 1)], None).unwrap();
            runs(of, &full, Some(1610)).unwrap();
            for (bad, next) in [
                (&[(9, 1)][..], None),
                (&[(10, 0)], None),
                (&[(10, 2), (11, 1)], None),
                (&[(count, 1)], None),
                (&[(10, u32::MAX)], None),
                (&[], Some(11)),
                (&full, Some(1608)),
                (&[&full[..], &[(2000, 1)]].concat(), None),
            ] {
                runs(of, bad, next).unwrap_err();
            }
        }
        runs(RegionsOf::Allocated, &[(10, 1)], Some(11)).unwrap();
        runs(RegionsOf::Intent, &[(10, 1)], Some(11)).unwrap_err();
    }
}
