//! Copies of the replica: what a source tells, and how this one becomes a copy.

use shorthorn_store::{CopyLayer, ImageName};
use shorthorn_types::{ReplicaId, ReplicaReport};
use shorthorn_wire::{CopyEnd, CopyState, Extent, ExtentsPage, ExtentsQuery, Header, LayerList, WireLayer};

use super::Server;
use crate::error::ReplicaError;

impl Server {
    /// Tells which layers there are.
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
        let layers =
            self.executor.copy_layers()?.into_iter().map(layer).collect::<Result<_, ReplicaError>>()?;
        Ok(LayerList { layers })
    }

    /// Tells where a layer has data.
    pub(super) fn take_extents(&mut self, index: u16, slot: u16, header: &Header) {
        let Some(query) = self.text::<ExtentsQuery>(index, slot, header) else { return };
        let found =
            self.executor.layer_extents(query.layer as usize, query.from_bytes, ExtentsPage::EXTENTS_MAX);
        match found {
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

    /// Makes this replica anew, with the layers that another one has.
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
        let (report, me) = (self.state.views().report(), self.state.replica());
        if !may_be_made_anew(report, me, self.executor.is_rebuilding(), self.executor.holds_data()?) {
            return Err(ReplicaError::IsMember(me));
        }
        let layer = |layer: WireLayer| {
            let image = ImageName::parse(&layer.image).ok_or(ReplicaError::NoLayer(layer.image))?;
            Ok(CopyLayer { image, meta: layer.meta.into_bytes(), size_bytes: layer.size_bytes })
        };
        let layers = list.layers.into_iter().map(layer).collect::<Result<_, ReplicaError>>()?;
        self.executor.begin_copy(layers)
    }

    /// A layer, or everything, is copied.
    pub(super) fn take_copy_end(&mut self, index: u16, slot: u16, header: &Header) {
        let Some(end) = self.text::<CopyEnd>(index, slot, header) else { return };
        let ended = match end.layer {
            Some(layer) => self.executor.copy_done(layer as usize),
            None => self.executor.end_copy(),
        };
        match ended {
            Ok(()) => self.respond(slot, Ok(())),
            Err(error) => self.refuse_text(slot, header, &error.into()),
        }
    }
}

/// Whether what the replica `me` holds may be thrown away: only where no view that may count has it as a member, or
/// nothing is there to lose. What is being rebuilt lacks data, and is asked to be a member only afterwards.
fn may_be_made_anew(report: &ReplicaReport, me: ReplicaId, is_rebuilding: bool, holds_data: bool) -> bool {
    let views = || report.views();
    is_rebuilding || !holds_data || !views().any(|view| view.members.contains(me))
}

#[cfg(test)]
mod tests {
    use shorthorn_types::{Generation, Members, View, ViewId};

    use super::*;

    #[test]
    fn a_member_with_data_is_never_made_anew() {
        let me = ReplicaId::from_random(1);
        let view = |members: &[u64]| View {
            id: ViewId { generation: Generation::NEVER, number: 0 },
            members: Members::new(members.iter().map(|n| ReplicaId::from_random(*n))).unwrap(),
        };
        let report = |committed: &[u64], proposed: &[&[u64]]| ReplicaReport {
            committed: view(committed),
            proposed: proposed.iter().map(|members| view(members)).collect(),
        };
        assert!(!may_be_made_anew(&report(&[1, 2], &[]), me, false, true));
        assert!(!may_be_made_anew(&report(&[2], &[&[1, 2]]), me, false, true), "it may have joined");
        assert!(!may_be_made_anew(&report(&[1, 2], &[&[2]]), me, false, true), "it may not have left");
        assert!(may_be_made_anew(&report(&[2], &[&[2, 3]]), me, false, true));
        assert!(may_be_made_anew(&report(&[1, 2], &[]), me, true, true));
        assert!(may_be_made_anew(&report(&[1, 2], &[]), me, false, false));
    }
}
