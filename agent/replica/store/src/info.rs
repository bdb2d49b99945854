//! Facts about an open store.

use std::collections::BTreeMap;

use serde::Serialize;
use shorthorn_chain::{ChainLayer, FileIndex, ImageName, Layout, MapUsage};

/// The possibility that another program has changed the volume since Shorthorn last had it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Provenance {
    /// No other program had it: the files that Shorthorn keeps beside the volume belong to it.
    Ours,
    /// Another program may have had it.
    Foreign {
        /// The evidence.
        why: String,
    },
}

/// The findings at the opening, and the current state.
#[derive(Clone, Debug)]
pub struct StoreInfo {
    /// The size of the volume.
    pub size_bytes: u64,
    /// The head's file.
    pub head: ImageName,
    /// True if the directory had not been closed cleanly.
    pub was_dirty: bool,
    /// True if the replica is being rebuilt.
    pub rebuilding: bool,
    /// True if the replica is marked as one that has left its view.
    pub has_left: bool,
    /// True if the host was restarted or the disk has failed while data was not durable, and a rebuild has
    /// not made up for it.
    pub lost_cache: bool,
    /// The number of failures in a row according to the last record.
    pub failures: u32,
    /// The last user of the directory.
    pub provenance: Provenance,
    /// The epoch, which rises whenever another program may have changed the volume.
    pub epoch: u64,
    /// The remains of a crash, and their repairs.
    pub repairs: Vec<String>,
    /// The memory of the block map.
    pub map: MapUsage,
}

/// A layer of the chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerInfo {
    /// The index of the open file.
    pub index: FileIndex,
    /// The name of the layer's file.
    pub image: ImageName,
    /// The apparent size of the file in bytes.
    pub size_bytes: u64,
    /// The snapshot's name; the head has none.
    pub snapshot: Option<String>,
    /// True if it is marked as removed.
    pub removed: bool,
}

/// A snapshot, in the chain or on a side branch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SnapshotInfo {
    /// The name without `volume-snap-` and `.img`.
    pub name: String,
    /// The snapshot below it.
    pub parent: Option<String>,
    /// The layers that build on it: names of snapshots, and the head's file name.
    pub children: Vec<String>,
    /// True if a user took it.
    pub user_created: bool,
    /// True if it is marked as removed.
    pub removed: bool,
    /// The time of creation, RFC 3339.
    pub created: String,
    /// Read from the document of the image; empty if it has none.
    pub labels: BTreeMap<String, String>,
    /// The size of the volume that it shows.
    pub size_bytes: u64,
    /// True if the head builds on it.
    pub in_chain: bool,
}

/// Returns all snapshots: the chain's from the oldest to the newest, then those on side branches by name.
pub(crate) fn snapshots(layout: &Layout) -> Vec<SnapshotInfo> {
    let chain = layout.chain().iter().rev();
    let side = layout.disks().keys().filter(|image| !layout.chain().contains(image));
    chain.chain(side).filter_map(|image| snapshot(layout, image, layout.disks().get(image)?)).collect()
}

fn snapshot(layout: &Layout, image: &ImageName, disk: &ChainLayer) -> Option<SnapshotInfo> {
    let plain = |image: &ImageName| image.snapshot_name().unwrap_or(image.as_str()).to_owned();
    Some(SnapshotInfo {
        name: image.snapshot_name()?.to_owned(),
        parent: ImageName::parse(&disk.meta.parent).as_ref().map(plain),
        children: layout.children(image).map(plain).collect(),
        user_created: disk.meta.user_created,
        removed: disk.meta.removed,
        created: disk.meta.created.clone(),
        labels: disk.meta.labels.clone().unwrap_or_default(),
        size_bytes: disk.size_bytes,
        in_chain: layout.chain().contains(image),
    })
}
