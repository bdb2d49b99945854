//! Copying the snapshot layers of a member to a new replica. They never change, so nobody has to wait for that.

use std::time::{Duration, Instant};

use shorthorn_core::PeerIndex;
use shorthorn_types::{ByteRange, RegionSet, Regions, RegionsOf};
use shorthorn_wire::{CopyState, Extent, ExtentsQuery, LayerList};

use crate::courier::{Courier, Told, Trouble};
use crate::pacer::{Pacer, piece_bytes};

/// How often the progress is told.
const TELL_INTERVAL: Duration = Duration::from_secs(1);

impl Courier {
    /// Copies the data of every snapshot layer that is not whole yet; all layers but the last are snapshots.
    pub(super) fn copy_snapshots(
        &mut self,
        source: PeerIndex,
        layers: &LayerList,
        state: &CopyState,
    ) -> Result<(), Trouble> {
        let snapshots = layers.layers.len().saturating_sub(1);
        let is_done = |layer: &u32| state.done.get(*layer as usize).copied().unwrap_or(false);
        let missing: Vec<u32> = (0..).take(snapshots).filter(|layer| !is_done(layer)).collect();
        let mut total_bytes = 0;
        for layer in &missing {
            self.for_each_extent(source, *layer, |_, extent| {
                total_bytes += extent.length_bytes;
                Ok(())
            })?;
        }
        let mut progress = Progress { total_bytes, left_bytes: total_bytes, told: None };
        let mut pacer = Pacer::new(Instant::now());
        let mut buffer = Vec::new();
        for layer in missing {
            self.for_each_extent(source, layer, |courier, extent| {
                courier.copy_extent(source, layer, extent, &mut buffer, &mut pacer, &mut progress)
            })?;
            self.desk
                .with_line(self.peer, |line| line.copy_end(Some(layer)))
                .map_err(Trouble::while_doing("ending the copy of a layer"))?;
        }
        Ok(())
    }

    /// Where the head of the source has data; everything else it shares with the snapshots, which are there.
    pub(super) fn find_data(
        &mut self,
        source: PeerIndex,
        layers: &LayerList,
        regions: Regions,
    ) -> Result<RegionSet, Trouble> {
        let Some(head) = layers.layers.len().checked_sub(1).filter(|head| *head > 0) else {
            let allocated = self.desk.with_line(source, |line| line.regions(RegionsOf::Allocated, regions));
            let allocated = allocated.map_err(Trouble::while_doing("asking a member where it has data"))?;
            return Ok(allocated.map_or_else(|| RegionSet::full(regions.count()), |(set, _)| set));
        };
        let mut data = RegionSet::empty(regions.count());
        self.for_each_extent(source, u32::try_from(head).unwrap_or(u32::MAX), |_, extent| {
            if let Ok(range) = ByteRange::new(extent.offset_bytes, extent.length_bytes) {
                data.insert_run(regions.touched(range));
            }
            Ok(())
        })?;
        Ok(data)
    }

    fn for_each_extent(
        &mut self,
        source: PeerIndex,
        layer: u32,
        mut act: impl FnMut(&mut Courier, Extent) -> Result<(), Trouble>,
    ) -> Result<(), Trouble> {
        let mut from = Some(0);
        while let Some(from_bytes) = from {
            self.look_up()?;
            let query = ExtentsQuery { layer, from_bytes };
            let page = self.desk.with_line(source, |line| line.extents(query));
            let page = page.map_err(Trouble::while_doing("asking a member where a layer has data"))?;
            for extent in page.extents {
                act(self, extent)?;
            }
            from = page.next_bytes.filter(|next| *next > from_bytes);
        }
        Ok(())
    }

    fn copy_extent(
        &mut self,
        source: PeerIndex,
        layer: u32,
        extent: Extent,
        buffer: &mut Vec<u8>,
        pacer: &mut Pacer,
        progress: &mut Progress,
    ) -> Result<(), Trouble> {
        let end = extent.offset_bytes.saturating_add(extent.length_bytes);
        let mut at = extent.offset_bytes;
        while at < end {
            self.look_up()?;
            let rate = self.desk.bytes_per_s();
            let piece = piece_bytes(rate).min(end - at);
            buffer.resize(usize::try_from(piece).unwrap_or(0), 0);
            self.desk
                .with_line(source, |line| line.read_layer(layer, at, buffer))
                .map_err(Trouble::while_doing("reading a layer"))?;
            self.desk
                .with_line(self.peer, |line| line.write_layer(layer, at, buffer))
                .map_err(Trouble::while_doing("writing a layer"))?;
            at += piece;
            progress.left_bytes = progress.left_bytes.saturating_sub(piece);
            self.show(progress);
            let pause = pacer.pause(rate, piece, Instant::now());
            if !pause.is_zero() {
                self.rest(pause)?;
            }
        }
        Ok(())
    }

    fn show(&self, progress: &mut Progress) {
        if progress.told.is_none_or(|told| told.elapsed() >= TELL_INTERVAL) {
            progress.told = Some(Instant::now());
            let Progress { total_bytes, left_bytes, .. } = *progress;
            self.tell(Told::Copying { total_bytes, left_bytes });
        }
    }
}

#[derive(Debug)]
struct Progress {
    total_bytes: u64,
    left_bytes: u64,
    told: Option<Instant>,
}
