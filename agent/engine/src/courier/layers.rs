//! Copying the snapshot layers of a member to a new replica. They never change, so nobody has to wait for that.

use std::time::{Duration, Instant};

use shorthorn_recovery::{Address, LinkError, SOURCE_HAS_LEFT, Source};
use shorthorn_wire::{CopyState, Extent, ExtentsQuery, Flags, LayerList};

use crate::courier::{Courier, Told, Trouble};
use crate::pacer::{Pacer, piece_bytes};

/// How often the progress is told.
const TELL_INTERVAL: Duration = Duration::from_secs(1);

impl Courier {
    /// Copies the data of every snapshot layer that is not whole yet; all layers but the last are snapshots.
    pub(super) fn copy_layers(
        &self,
        target: Address,
        source: Source,
        layers: &LayerList,
        state: &CopyState,
    ) -> Result<(), Trouble> {
        let snapshots = layers.layers.len().saturating_sub(1);
        let is_done = |layer: &u32| state.done.get(*layer as usize).copied().unwrap_or(false);
        let missing: Vec<u32> = (0..).take(snapshots).filter(|layer| !is_done(layer)).collect();
        let mut total_bytes = 0;
        for layer in &missing {
            self.for_each_extent(source, *layer, |extent| {
                total_bytes += extent.length_bytes;
                Ok(())
            })?;
        }
        let mut progress = Progress { total_bytes, left_bytes: total_bytes, rotten_bytes: 0, told: None };
        let mut pacer = Pacer::new(Instant::now());
        let mut buffer = Vec::new();
        for layer in missing {
            self.for_each_extent(source, layer, |extent| {
                self.copy_extent((target, source), layer, extent, &mut buffer, &mut pacer, &mut progress)
            })?;
            // Once the layer counts as whole, no later attempt copies it again.
            if !self.desk.shared.look(|core| source.has_stayed(core)) {
                return Err(Trouble::NotYet(SOURCE_HAS_LEFT));
            }
            self.desk
                .with_line(target, |line| line.layer_copy_end(layer))
                .map_err(Trouble::while_doing("ending the copy of a layer"))?;
        }
        if progress.rotten_bytes > 0 {
            let (volume, replica) = (&self.desk.greeter.volume, source.address.replica);
            let rotten_bytes = progress.rotten_bytes;
            let told = "snapshots with rot were copied as they are, as no other member could be read; the source \
                        has logged which blocks are damaged";
            tracing::error!(%volume, source = %replica, rotten_bytes, "{told}");
        }
        Ok(())
    }

    fn for_each_extent(
        &self,
        source: Source,
        layer: u32,
        mut act: impl FnMut(Extent) -> Result<(), Trouble>,
    ) -> Result<(), Trouble> {
        let mut from = Some(0);
        while let Some(from_bytes) = from {
            self.look_up()?;
            let query = ExtentsQuery { layer, from_bytes };
            let page = self.desk.with_line(source.address, |line| line.list_extents(query));
            let page =
                page.map_err(Trouble::while_reading(source, "asking a member where a layer has data"))?;
            for extent in page.extents {
                act(extent)?;
            }
            from = page.next_bytes.filter(|next| *next > from_bytes);
        }
        Ok(())
    }

    fn copy_extent(
        &self,
        (target, source): (Address, Source),
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
            progress.rotten_bytes += self.read_layer(source, layer, at, buffer)?;
            self.desk
                .with_line(target, |line| line.write_layer(layer, at, buffer))
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

    /// Fills `buffer` from a layer of the source; returns how much of it holds rot. Rot fails the copy: it is
    /// made of another member then, if one can be read.
    fn read_layer(&self, source: Source, layer: u32, at: u64, buffer: &mut [u8]) -> Result<u64, Trouble> {
        let mut read =
            |flags| self.desk.with_line(source.address, |line| line.read_layer(layer, at, buffer, flags));
        let (read, is_rotten) = match read(Flags::CHECKED) {
            Err(error) if error.is_rot() && source.is_rotten => (read(Flags::NONE), true),
            checked => (checked, false),
        };
        read.map_err(Trouble::while_reading(source, "reading a layer of a member"))?;
        Ok(if is_rotten { buffer.len() as u64 } else { 0 })
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
    /// In pieces of which the source has said that they hold rot.
    rotten_bytes: u64,
    told: Option<Instant>,
}
