//! Copies the snapshot layers of a member to a new replica. Snapshots never change, so no request waits for
//! that.

use std::time::{Duration, Instant};

use shorthorn_recovery::{Address, BlockSearch, LinkError, SOURCE_HAS_LEFT, Source};
use shorthorn_types::ByteRange;
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_wire::{CopyState, Extent, ExtentsQuery, Flags, LayerList, WireLayer};

use super::task::{RebuildError, RebuildTask};
use crate::connection::{ConnectError, ReplicaConnection};
use crate::events::RebuildProgress;
use crate::pacer::{Pacer, piece_bytes};

/// The interval of progress reports, which only people read.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);
const BLOCK: usize = 4096;
const _: () = assert!(BLOCK as u64 == BLOCK_BYTES);

/// A layer that is being copied.
struct Layer<'a> {
    target: Address,
    source: Source,
    /// The other members.
    others: &'a [Source],
    number: u32,
    image: &'a str,
    size_bytes: u64,
}

impl RebuildTask {
    /// Copies the data of every snapshot layer that is not whole yet; all layers but the last are snapshots.
    pub(super) fn copy_layers(
        &self,
        target: Address,
        source: Source,
        others: &[Source],
        layers: &LayerList,
        state: &CopyState,
    ) -> Result<(), RebuildError> {
        let Some(_copying) = self.context.snapshot_use.copying() else {
            return Err(RebuildError::NotYet("a scrub is repairing a snapshot"));
        };
        let snapshots = layers.layers.len().saturating_sub(1);
        let is_done = |layer: &u32| state.done.get(*layer as usize).copied().unwrap_or(false);
        let layer = |(number, layer)| {
            let WireLayer { image, size_bytes, .. }: &WireLayer = layer;
            Layer { target, source, others, number, image, size_bytes: *size_bytes }
        };
        let all = (0..).zip(&layers.layers).take(snapshots).map(layer);
        let missing: Vec<Layer<'_>> = all.filter(|layer| !is_done(&layer.number)).collect();
        let mut total_bytes = 0;
        for layer in &missing {
            self.for_each_extent(layer, |extent| {
                total_bytes += extent.length_bytes;
                Ok(())
            })?;
        }
        let mut progress =
            Progress { total_bytes, left_bytes: total_bytes, lost_bytes: 0, unread: 0, reported: None };
        let mut pacer = Pacer::new(Instant::now());
        let mut buffer = Vec::new();
        for layer in missing {
            self.for_each_extent(&layer, |extent| {
                self.copy_extent(&layer, extent, &mut buffer, &mut pacer, &mut progress)
            })?;
            self.report_lost_blocks(&layer, &mut progress);
            // Once the layer counts as whole, no later attempt copies it again.
            if !self.context.shared.read_core(|core| source.has_stayed(core)) {
                return Err(RebuildError::NotYet(SOURCE_HAS_LEFT));
            }
            self.context
                .with_control(target, |control| control.layer_copy_end(layer.number))
                .map_err(RebuildError::while_doing("ending the copy of a layer"))?;
        }
        Ok(())
    }

    fn for_each_extent(
        &self,
        &Layer { source, number, size_bytes, .. }: &Layer<'_>,
        mut act: impl FnMut(Extent) -> Result<(), RebuildError>,
    ) -> Result<(), RebuildError> {
        let mut from = Some(0);
        while let Some(from_bytes) = from {
            self.check_commands()?;
            let query = ExtentsQuery { layer: number, from_bytes };
            let list = |control: &mut ReplicaConnection| control.list_extents(query, || size_bytes);
            let page = self.context.with_control(source.address, list);
            let page = page
                .map_err(RebuildError::while_reading(source, "asking a member for the extents of a layer"))?;
            for extent in page.extents {
                act(extent)?;
            }
            from = page.next_bytes.filter(|next| *next > from_bytes);
        }
        Ok(())
    }

    fn copy_extent(
        &self,
        layer: &Layer<'_>,
        extent: Extent,
        buffer: &mut Vec<u8>,
        pacer: &mut Pacer,
        progress: &mut Progress,
    ) -> Result<(), RebuildError> {
        let end = extent.offset_bytes.saturating_add(extent.length_bytes);
        let mut at = extent.offset_bytes;
        while at < end {
            self.check_commands()?;
            let rate = self.context.bytes_per_s();
            let piece = piece_bytes(rate).min(end - at);
            buffer.resize(usize::try_from(piece).unwrap_or(0), 0);
            match self.read_source(layer, at, buffer, Flags::CHECKED) {
                Ok(()) => self.write_layer(layer, at, buffer, Flags::NONE)?,
                Err(error) if error.is_refusal() => self.copy_blocks(layer, at, buffer, progress)?,
                Err(error) => return Err(of_source(layer, error)),
            }
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

    /// Fills `buffer` from a layer of the source.
    fn read_source(
        &self,
        layer: &Layer<'_>,
        at: u64,
        buffer: &mut [u8],
        flags: Flags,
    ) -> Result<(), ConnectError> {
        let address = layer.source.address;
        let read = |control: &mut ReplicaConnection| control.read_layer(layer.number, at, buffer, flags);
        self.context.with_control(address, read).map(drop)
    }

    fn write_layer(&self, layer: &Layer<'_>, at: u64, data: &[u8], flags: Flags) -> Result<(), RebuildError> {
        self.context
            .with_control(layer.target, |control| control.write_layer(layer.number, at, data, flags))
            .map_err(RebuildError::while_doing("writing a layer"))
    }

    /// Copies a piece block by block, because the source holds rot in it or cannot read it. If each member
    /// says that it has no sound copy of a block, the rot is copied, and the target knows that.
    fn copy_blocks(
        &self,
        layer: &Layer<'_>,
        at: u64,
        buffer: &mut [u8],
        progress: &mut Progress,
    ) -> Result<(), RebuildError> {
        let starts = (at..).step_by(BLOCK);
        for (at, block) in starts.zip(buffer.chunks_mut(BLOCK)) {
            self.check_commands()?;
            let is_sound = match self.read_source(layer, at, block, Flags::CHECKED) {
                Ok(()) => true,
                Err(error) => self.read_other(layer, at, block, error, &mut progress.unread)?,
            };
            if is_sound {
                self.write_layer(layer, at, block, Flags::NONE)?;
                continue;
            }
            self.read_source(layer, at, block, Flags::NONE).map_err(|error| of_source(layer, error))?;
            self.write_layer(layer, at, block, Flags::ROTTEN)?;
            progress.lost_bytes += block.len() as u64;
        }
        Ok(())
    }

    /// Fills `block`, which the source did not return because of `error`, from another member that has it
    /// sound. The data is that which a reader of the snapshot sees. Returns false if no member has.
    fn read_other(
        &self,
        layer: &Layer<'_>,
        at: u64,
        block: &mut [u8],
        error: ConnectError,
        unread: &mut u32,
    ) -> Result<bool, RebuildError> {
        let range = ByteRange::new(at, block.len() as u64).unwrap_or(ByteRange::EMPTY);
        let mut search = BlockSearch::after(layer.source, range, error, unread)?;
        for other in layer.others {
            let read = self.read_snapshot(*other, layer.image, at, block);
            let has_stayed = self.context.shared.read_core(|core| other.has_stayed(core));
            if search.answered(*other, has_stayed, read)? {
                return Ok(true);
            }
        }
        search.conclude().map(|()| false)
    }

    fn read_snapshot(
        &self,
        other: Source,
        image: &str,
        at: u64,
        block: &mut [u8],
    ) -> Result<bool, ConnectError> {
        let context = &self.context;
        let size_bytes = || context.connector.size_bytes();
        let list = context.with_control(other.address, |control| control.list_layers(size_bytes))?;
        let Some(number) = list.layers.iter().position(|layer| layer.image == image) else {
            return Ok(false);
        };
        // It may hold the same in another layer. If none has it, it is lost there, too.
        for (layer, WireLayer { size_bytes, .. }) in list.layers[..=number].iter().enumerate().rev() {
            let layer = u32::try_from(layer).unwrap_or(u32::MAX);
            let query = ExtentsQuery { layer, from_bytes: at };
            let ask = |control: &mut ReplicaConnection| control.list_extents(query, || *size_bytes);
            let page = context.with_control(other.address, ask)?;
            let has_block = |extent: &Extent| {
                extent.offset_bytes <= at && at < extent.offset_bytes.saturating_add(extent.length_bytes)
            };
            if page.extents.iter().any(has_block) {
                context.with_control(other.address, |control| {
                    control.read_layer(layer, at, block, Flags::CHECKED)
                })?;
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Logs the blocks that no member had sound, before the layer counts as whole: no later attempt reads it
    /// again.
    fn report_lost_blocks(&self, layer: &Layer<'_>, progress: &mut Progress) {
        let lost_bytes = std::mem::take(&mut progress.lost_bytes);
        if lost_bytes > 0 {
            let (volume, source, image) =
                (&self.context.connector.volume, layer.source.address.replica, layer.image);
            tracing::error!(
                %volume,
                %source,
                image,
                lost_bytes,
                "no member has a sound copy of some blocks of a snapshot: the new replica knows them as \
                 damaged; restore them from a backup"
            );
        }
    }

    fn show(&self, progress: &mut Progress) {
        if progress.reported.is_none_or(|reported| reported.elapsed() >= REPORT_INTERVAL) {
            progress.reported = Some(Instant::now());
            let Progress { total_bytes, left_bytes, .. } = *progress;
            self.report(RebuildProgress::Copying { total_bytes, left_bytes });
        }
    }
}

#[derive(Debug)]
struct Progress {
    total_bytes: u64,
    left_bytes: u64,
    /// The bytes of the layer being copied of which no member has sound data.
    lost_bytes: u64,
    /// The number of blocks that the source could not read.
    unread: u32,
    reported: Option<Instant>,
}

fn of_source(layer: &Layer<'_>, error: ConnectError) -> RebuildError {
    RebuildError::while_reading(layer.source, "reading a layer of a member")(error)
}
