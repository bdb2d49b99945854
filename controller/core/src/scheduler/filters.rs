//! The filters, each of which says why.

use std::fmt;

use super::{DiskCandidate, NodeCandidate, Request};

type NodeFilter = fn(&Request, &NodeCandidate) -> Result<(), String>;
type DiskFilter = fn(&Request, &DiskCandidate) -> Result<(), String>;

const NODE_FILTERS: &[NodeFilter] = &[node_usable, node_anti_affinity, node_has_disks];
const DISK_FILTERS: &[DiskFilter] = &[disk_usable, disk_capacity];

pub(super) fn node(request: &Request, node: &NodeCandidate) -> Result<(), String> {
    NODE_FILTERS.iter().try_for_each(|filter| filter(request, node))
}

pub(super) fn disk(request: &Request, disk: &DiskCandidate) -> Result<(), String> {
    DISK_FILTERS.iter().try_for_each(|filter| filter(request, disk))
}

/// Why `node` takes no replica.
pub(super) fn explain(request: &Request, node: &NodeCandidate) -> String {
    if let Err(reason) = self::node(request, node) {
        return reason;
    }
    let reason = |disk: &DiskCandidate| {
        self::disk(request, disk).err().map(|reason| format!("disk {} {reason}", disk.path))
    };
    node.disks.iter().filter_map(reason).collect::<Vec<_>>().join(", ")
}

fn node_usable(_: &Request, node: &NodeCandidate) -> Result<(), String> {
    node.refusal.clone().map_or(Ok(()), Err)
}

fn node_anti_affinity(request: &Request, node: &NodeCandidate) -> Result<(), String> {
    if request.soft_anti_affinity || node.same_volume() <= node.excused {
        return Ok(());
    }
    Err("it has a replica of this volume already (allow more with --soft-anti-affinity)".to_owned())
}

fn node_has_disks(_: &Request, node: &NodeCandidate) -> Result<(), String> {
    if node.disks.is_empty() {
        return Err(format!("it has no disk: run shorthornctl disk add {} PATH", node.name));
    }
    Ok(())
}

fn disk_usable(_: &Request, disk: &DiskCandidate) -> Result<(), String> {
    disk.refusal.as_ref().map_or(Ok(()), |reason| Err(format!("is not usable: {reason}")))
}

fn disk_capacity(request: &Request, disk: &DiskCandidate) -> Result<(), String> {
    if request.size_bytes <= disk.free_bytes() {
        return Ok(());
    }
    Err(format!(
        "can promise {} more, {} are needed (size {}, reserved {}, promised {})",
        Gib(disk.free_bytes()),
        Gib(request.size_bytes),
        Gib(disk.total_bytes),
        Gib(disk.reserved_bytes),
        Gib(disk.scheduled_bytes),
    ))
}

/// Bytes as GiB with one decimal, cut off.
struct Gib(u64);

impl fmt::Display for Gib {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tenths = u128::from(self.0) * 10 / (1 << 30);
        write!(f, "{}.{} GiB", tenths / 10, tenths % 10)
    }
}
