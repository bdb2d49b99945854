//! The filters of the scheduler. Each one explains its decision.

use std::fmt;

use shorthorn_types::HumanGib;

use super::request::{DiskCandidate, NodeCandidate, PlacementRequest, Zone};
use crate::{Label, Labels};

/// A rule that can remove a node, or a disk of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Filter {
    /// The administrator has cordoned the node or disk.
    Cordon,
    /// The agent has to answer.
    Ready,
    /// The node must not exceed its limit of rebuilds.
    Rebuilds,
    /// The node has to have the tags that the volume asks for.
    NodeTags,
    /// Replicas are in several zones.
    ZoneAntiAffinity,
    /// Replicas are on several nodes.
    NodeAntiAffinity,
    /// The node has to have a disk.
    HasDisk,
    /// A disk without a [refusal](DiskCandidate::refusal).
    DiskUsable,
    /// The disk has to have the tags that the volume asks for.
    DiskTags,
    /// Replicas are on several disks.
    DiskAntiAffinity,
    /// The disk has to keep its minimum of free space.
    MinimalAvailable,
    /// The disk has to have unscheduled capacity.
    Capacity,
}

struct NodeFilter {
    filter: Filter,
    takes: fn(&PlacementRequest, &NodeCandidate, &Zone) -> bool,
    /// The reason why the node does not pass.
    reason: fn(&PlacementRequest, &NodeCandidate) -> String,
}

struct DiskFilter {
    filter: Filter,
    takes: fn(&PlacementRequest, &DiskCandidate) -> bool,
    /// The reason why the disk does not pass.
    reason: fn(&PlacementRequest, &DiskCandidate) -> String,
}

const NODE_FILTERS: &[NodeFilter] = &[
    NodeFilter {
        filter: Filter::Cordon,
        takes: |request, node, _| {
            let heeded = request.limits.disable_scheduling_on_cordoned_node;
            !(node.cordoned || node.machine_cordoned && heeded)
        },
        reason: |_, node| {
            if node.cordoned {
                format!("cordoned: shorthornctl node uncordon {}", node.name)
            } else {
                "cordoned in Kubernetes: kubectl uncordon".to_owned()
            }
        },
    },
    NodeFilter {
        filter: Filter::Ready,
        takes: |_, node, _| node.not_ready.is_none(),
        reason: |_, node| node.not_ready.clone().unwrap_or_default(),
    },
    NodeFilter {
        filter: Filter::NodeTags,
        takes: |request, node, _| request.node_selector.is_subset(&node.tags),
        reason: |request, node| format!("lacks {}", Missing(&request.node_selector, &node.tags)),
    },
    NodeFilter {
        filter: Filter::ZoneAntiAffinity,
        takes: |request, _, zone| request.zone_soft_anti_affinity || zone.same_volume <= zone.excused,
        reason: |_, node| match &node.zone {
            Some(zone) => format!("zone {zone} already has a replica of this volume"),
            None => "node without a zone, and another such node already has a replica of this \
             volume"
                .to_owned(),
        },
    },
    NodeFilter {
        filter: Filter::NodeAntiAffinity,
        takes: |request, node, _| request.soft_anti_affinity || node.same_volume() <= node.excused(),
        reason: |_, _| {
            "node already has a replica of this volume (replicaSoftAntiAffinity allows more)".to_owned()
        },
    },
    NodeFilter {
        filter: Filter::Rebuilds,
        takes: |_, node, _| !node.is_busy,
        reason: |_, _| "node has reached the limit of concurrent rebuilds".to_owned(),
    },
    NodeFilter {
        filter: Filter::HasDisk,
        takes: |_, node, _| !node.disks.is_empty(),
        reason: |_, node| format!("node without a disk: run shorthornctl disk add {} PATH", node.name),
    },
];

const DISK_FILTERS: &[DiskFilter] = &[
    DiskFilter {
        filter: Filter::DiskUsable,
        takes: |_, disk| disk.refusal.is_none(),
        reason: |_, disk| format!("is not usable: {}", disk.refusal.as_deref().unwrap_or_default()),
    },
    DiskFilter {
        filter: Filter::DiskTags,
        takes: |request, disk| request.disk_selector.is_subset(&disk.tags),
        reason: |request, disk| format!("lacks {}", Missing(&request.disk_selector, &disk.tags)),
    },
    DiskFilter {
        filter: Filter::DiskAntiAffinity,
        takes: |request, disk| request.disk_soft_anti_affinity || disk.same_volume <= disk.excused,
        reason: |_, _| "has a replica of this volume already".to_owned(),
    },
    DiskFilter { filter: Filter::MinimalAvailable, takes: stays_free, reason: too_full },
    DiskFilter {
        filter: Filter::Capacity,
        takes: |request, disk| request.size_bytes <= disk.room_bytes(request.limits),
        reason: too_small,
    },
];

/// Returns true if that node can have the replica at all.
pub(super) fn takes(request: &PlacementRequest, node: &NodeCandidate, zone: &Zone) -> bool {
    NODE_FILTERS.iter().all(|filter| (filter.takes)(request, node, zone))
}

/// Returns true if that disk can have the replica, provided that its node can.
pub(super) fn takes_on(request: &PlacementRequest, disk: &DiskCandidate) -> bool {
    DISK_FILTERS.iter().all(|filter| (filter.takes)(request, disk))
}

/// Returns the filter that removes the node, and the reason for people. If all of its disks are removed, this
/// is the filter that the most suitable disk has failed: that is the missing condition.
pub(super) fn explain(
    request: &PlacementRequest,
    node: &NodeCandidate,
    zone: &Zone,
) -> Option<(Filter, String)> {
    if let Some(failed) = NODE_FILTERS.iter().find(|filter| !(filter.takes)(request, node, zone)) {
        return Some((failed.filter, (failed.reason)(request, node)));
    }
    let failed = |disk| Some((disk, DISK_FILTERS.iter().find(|filter| !(filter.takes)(request, disk))?));
    let failed: Vec<_> = node.disks.iter().map(failed).collect::<Option<_>>()?;
    let furthest = failed.iter().map(|(_, filter)| filter.filter).max()?;
    let reasons =
        failed.iter().map(|(disk, filter)| format!("disk {} {}", disk.path, (filter.reason)(request, disk)));
    Some((furthest, reasons.collect::<Vec<_>>().join(", ")))
}

/// Returns the reason why a disk has no room for `request.size_bytes` more.
pub(super) fn lacks_room(request: &PlacementRequest, disk: &DiskCandidate) -> Option<(Filter, String)> {
    let has_room = request.size_bytes <= disk.room_bytes(request.limits);
    (!has_room).then(|| (Filter::Capacity, too_small(request, disk)))
}

fn stays_free(request: &PlacementRequest, disk: &DiskCandidate) -> bool {
    let left = disk.available_bytes.checked_sub(disk.coming_bytes.saturating_add(request.used_bytes));
    left.is_some_and(|left| left >= disk.minimal_available_bytes(request.limits))
}

fn too_full(request: &PlacementRequest, disk: &DiskCandidate) -> String {
    let coming = match disk.coming_bytes {
        0 => String::new(),
        bytes => format!(", of which rebuilds in progress will take {}", HumanGib(bytes)),
    };
    format!(
        "has {} free{coming}, and {} ({} %) have to stay free",
        HumanGib(disk.available_bytes),
        HumanGib(disk.minimal_available_bytes(request.limits)),
        request.limits.storage_minimal_available_percentage,
    )
}

fn too_small(request: &PlacementRequest, disk: &DiskCandidate) -> String {
    format!(
        "can schedule {} more, {} are needed (size {}, reserved {}, scheduled {})",
        HumanGib(disk.room_bytes(request.limits)),
        HumanGib(request.size_bytes),
        HumanGib(disk.total_bytes),
        HumanGib(disk.reserved_bytes),
        HumanGib(disk.scheduled_bytes),
    )
}

impl Filter {
    /// Returns the reason for which the filter removes `count` nodes, in words that follow the number.
    pub(super) fn of_nodes(self, request: &PlacementRequest, count: usize) -> String {
        let (is, has, lacks) = if count == 1 { ("is", "has", "lacks") } else { ("are", "have", "lack") };
        match self {
            Filter::Cordon => format!("{is} cordoned"),
            Filter::Ready => format!("{is} not ready"),
            Filter::Rebuilds => format!("{is} rebuilding as many replicas as allowed"),
            Filter::NodeTags => format!("{lacks} {}", Tags(&request.node_selector)),
            Filter::ZoneAntiAffinity => format!("{is} in a zone that has a replica of this volume"),
            Filter::NodeAntiAffinity => format!("{has} a replica of this volume already"),
            Filter::HasDisk => format!("{has} no disk"),
            Filter::DiskUsable => format!("{has} no usable disk"),
            Filter::DiskTags => format!("{has} no disk with {}", Tags(&request.disk_selector)),
            Filter::DiskAntiAffinity => format!("{has} no disk without a replica of this volume"),
            Filter::MinimalAvailable => format!("{has} too little free space"),
            Filter::Capacity => {
                format!("{has} no disk that can schedule {} more", HumanGib(request.size_bytes))
            }
        }
    }
}

/// A list of tags, in words.
struct Tags<'a>(&'a Labels);

impl fmt::Display for Tags<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tags: Vec<&str> = self.0.iter().map(Label::as_str).collect();
        write!(f, "{} {}", if tags.len() == 1 { "tag" } else { "tags" }, tags.join(", "))
    }
}

/// The tags of the first that the second has not, in words.
struct Missing<'a>(&'a Labels, &'a Labels);

impl fmt::Display for Missing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Tags(&self.0.difference(self.1).cloned().collect()).fmt(f)
    }
}
