//! Copies of the replica: answers as a source, and becomes a copy as a target.

use shorthorn_store::{CopyLayer, ImageName};
use shorthorn_wire::{CopyEnd, CopyState, Extent, ExtentsPage, ExtentsQuery, Header, LayerList, WireLayer};

use super::Server;
use crate::error::ReplicaError;

impl Server {
    /// Answers with the list of layers.
    pub(super) fn take_layers(&mut self, slot: u16, header: &Header) {
        match self.layers() {
            Ok(list) => self.respond_text(slot, header, &list),
            Err(error) => self.refuse_text(slot, header, &error),
        }
    }

    fn layers(&self) -> Result<LayerList, ReplicaError> {
        let layer = |layer: CopyLayer| {
            let image = layer.image.to_string();
            let meta = String::from_utf8(layer.meta).map_err(|_| ReplicaError::NoText(image.clone()))?;
            Ok(WireLayer { image, meta, size_bytes: layer.size_bytes })
        };
        let layers = self.executor.copy_layers()?.into_iter().map(layer);
        Ok(LayerList { layers: layers.collect::<Result<_, ReplicaError>>()? })
    }

    /// Answers with the extents of a layer.
    pub(super) fn take_extents(&mut self, index: u16, slot: u16, header: &Header) {
        let Some(query) = self.text::<ExtentsQuery>(index, slot, header) else { return };
        let layer = query.layer as usize;
        match self.executor.layer_extents(layer, query.from_bytes, ExtentsPage::EXTENTS_MAX) {
            Ok((extents, next_bytes)) => {
                let extent = |range: &shorthorn_types::ByteRange| Extent {
                    offset_bytes: range.offset(),
                    length_bytes: range.length(),
                };
                let extents = extents.iter().map(extent).collect();
                self.respond_text(slot, header, &ExtentsPage { extents, next_bytes });
            }
            Err(error) => self.refuse_text(slot, header, &error.into()),
        }
    }

    /// Recreates this replica with the layers that another one has.
    pub(super) fn take_copy_begin(&mut self, index: u16, slot: u16, header: &Header) {
        let Some(list) = self.text::<LayerList>(index, slot, header) else { return };
        match self.begin_copy(list) {
            Ok(done) => {
                let whole = done.iter().filter(|done| **done).count();
                tracing::info!(layers = done.len(), whole, "becoming a copy of another replica");
                self.respond_text(slot, header, &CopyState { done });
            }
            Err(error) => self.refuse_text(slot, header, &error),
        }
    }

    fn begin_copy(&mut self, list: LayerList) -> Result<Vec<bool>, ReplicaError> {
        self.executor.check_may_become_copy()?;
        let layer = |layer: WireLayer| {
            let image = ImageName::parse(&layer.image).ok_or(ReplicaError::NoLayer(layer.image))?;
            Ok(CopyLayer { image, meta: layer.meta.into_bytes(), size_bytes: layer.size_bytes })
        };
        let layers = list.layers.into_iter().map(layer).collect::<Result<_, ReplicaError>>()?;
        self.executor.begin_copy(layers)
    }

    /// Ends the copy of a layer, or of everything.
    pub(super) fn take_copy_end(&mut self, index: u16, slot: u16, header: &Header) {
        let Some(end) = self.text::<CopyEnd>(index, slot, header) else { return };
        let ended = match end.layer {
            Some(layer) => self.executor.copy_done(layer as usize),
            None => self.executor.end_copy(),
        };
        match ended {
            Ok(()) => self.respond(slot, Ok(())),
            Err(error) => self.refuse_text(slot, header, &error),
        }
    }
}
