//! A connection to one replica, and the steps that are a few questions in a row over one.

use shorthorn_types::{Generation, MarkRegions, RegionSet, Regions, RegionsOf, ReplicaReport, View};
use shorthorn_wire::{CopyState, ExtentsPage, ExtentsQuery, LayerList, RegionsPage, RegionsQuery, Welcome};

/// The reason why a replica has not done a request.
pub trait LinkError: std::fmt::Display {
    /// Returns the generation of the newer engine that holds the replica, if that is the reason.
    fn deposed_by(&self) -> Option<Generation>;

    /// Returns true if the replica has answered, and refuses. The connection is as good as before.
    fn is_refusal(&self) -> bool;

    /// Returns true if the replica knows that its data is not the data that was stored.
    fn is_rot(&self) -> bool {
        false
    }

    /// Returns true if the replica has refused a request because its content makes no sense.
    fn is_invalid(&self) -> bool {
        false
    }
}

/// A connection to a replica that has taken this engine. Each function is one request and its answer.
pub trait ReplicaLink {
    /// The reason why a request has failed.
    type Error: LinkError;

    /// Has the replica store a proposed view.
    async fn propose(&mut self, view: View, honoured: &ReplicaReport) -> Result<(), Self::Error>;

    /// Has the replica mark a view as committed.
    async fn commit(&mut self, view: View, honoured: &ReplicaReport) -> Result<(), Self::Error>;

    /// Has the replica grow, durably, to `size_bytes`.
    async fn expand(&mut self, size_bytes: u64) -> Result<(), Self::Error>;

    /// Returns a page of one of the replica's sets of regions. All pages from the first one on have a time
    /// limit together.
    async fn regions_page(&mut self, query: RegionsQuery) -> Result<RegionsPage, Self::Error>;

    /// Changes one of the replica's sets of regions.
    async fn mark(&mut self, change: &MarkRegions) -> Result<(), Self::Error>;

    /// Returns the layers of the replica, which fit a volume of `volume_bytes`: see [`LayerList::check`]. The
    /// size is asked for after the answer has arrived, because the volume may grow meanwhile.
    async fn layers(&mut self, volume_bytes: impl FnOnce() -> u64) -> Result<LayerList, Self::Error>;

    /// Returns a page of the extents in which a layer has data, which lie in its `layer_bytes`: see
    /// [`ExtentsPage::check`]. The size is asked for after the answer has arrived.
    async fn extents(
        &mut self,
        query: ExtentsQuery,
        layer_bytes: impl FnOnce() -> u64,
    ) -> Result<ExtentsPage, Self::Error>;

    /// Makes the replica a copy of one with these layers, or continues that.
    async fn copy_begin(&mut self, layers: &LayerList) -> Result<CopyState, Self::Error>;

    /// Ends the copy of the whole replica, which no longer counts as being rebuilt.
    async fn copy_end(&mut self) -> Result<(), Self::Error>;
}

/// Returns one of the replica's sets, for a volume that is divided into `regions`, and the stamp that is kept
/// with it. None if the replica does not keep that set.
///
/// # Errors
/// A question has failed.
pub async fn regions<L: ReplicaLink>(
    link: &mut L,
    of: RegionsOf,
    regions: Regions,
) -> Result<Option<(RegionSet, u32)>, L::Error> {
    Ok(regions_unless(link, of, regions, &|| false).await?.flatten())
}

/// Returns the same as [`regions`], and asks `has_to_end` between the pages. The outer option is none if it
/// returns true.
pub(crate) async fn regions_unless<L: ReplicaLink>(
    link: &mut L,
    of: RegionsOf,
    regions: Regions,
    has_to_end: &impl Fn() -> bool,
) -> Result<Option<Option<(RegionSet, u32)>>, L::Error> {
    let (mut set, size_bytes) = (RegionSet::empty(regions.count()), Some(regions.size_bytes()));
    let mut stamp = 0;
    let mut from = Some(0);
    while let Some(next) = from {
        if next > 0 && has_to_end() {
            return Ok(None);
        }
        let page = link.regions_page(RegionsQuery { of, from: next, size_bytes }).await?;
        if !page.kept {
            return Ok(Some(None));
        }
        for (start, count) in page.runs {
            set.insert_run(start..start.saturating_add(count));
        }
        stamp = stamp.max(page.stamp);
        from = page.next.filter(|later| *later > next);
    }
    Ok(Some(Some((set, stamp))))
}

/// Returns the same as [`regions`], without the stamp. A set that the replica does not keep counts as full,
/// because the missing regions are not known.
pub(crate) async fn regions_or_all<L: ReplicaLink>(
    link: &mut L,
    of: RegionsOf,
    divided: Regions,
) -> Result<RegionSet, L::Error> {
    let set = regions(link, of, divided).await?;
    Ok(set.map_or_else(|| RegionSet::full(divided.count()), |(set, _)| set))
}

/// The reason why a replica does not have the size of the volume.
#[derive(Debug)]
pub enum SizeMismatch<E> {
    /// The replica is larger: this engine has not learned of an expansion yet.
    TooLarge {
        /// Size of the replica.
        has_bytes: u64,
    },
    /// The replica could not be asked to grow, or has not grown.
    NotGrown(E),
}

/// Gives a replica that has just welcomed the engine the size of the volume. It was away while the volume has
/// grown, or the volume was not attached then.
///
/// # Errors
/// [`SizeMismatch`]; the replica must not be used.
pub async fn fit<L: ReplicaLink>(
    link: &mut L,
    welcome: &mut Welcome,
    size_bytes: u64,
) -> Result<(), SizeMismatch<L::Error>> {
    if welcome.size_bytes > size_bytes {
        return Err(SizeMismatch::TooLarge { has_bytes: welcome.size_bytes });
    }
    if welcome.size_bytes < size_bytes {
        link.expand(size_bytes).await.map_err(SizeMismatch::NotGrown)?;
        welcome.size_bytes = size_bytes;
    }
    Ok(())
}
