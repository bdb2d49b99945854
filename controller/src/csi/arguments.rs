//! Checks the arguments of a request before anything else happens.

use std::collections::HashMap;

use shorthorn_api::csi::v1;
use shorthorn_controller_core::requests::CreateVolume;
use shorthorn_controller_core::{ClusterState, csi};
use shorthorn_csi::{Capability, CsiError, TOPOLOGY_NODE, TOPOLOGY_ZONE, capability};
use shorthorn_types::VolumeName;

/// The longest of most strings.
const STRING_MAX_BYTES: usize = 128;
/// The longest name of a node.
const NODE_ID_MAX_BYTES: usize = 256;

fn text(field: &str, text: &str, max_bytes: usize) -> Result<(), CsiError> {
    if text.is_empty() {
        return Err(CsiError::Invalid(format!("{field} is missing")));
    }
    if text.len() > max_bytes {
        let message = format!("{field} has {} bytes, and the maximum is {max_bytes}", text.len());
        return Err(CsiError::Invalid(message));
    }
    Ok(())
}

/// Returns the volume; none if no volume can have that id.
pub(super) fn volume_id(id: &str) -> Result<Option<VolumeName>, CsiError> {
    text("volume_id", id, STRING_MAX_BYTES)?;
    Ok(VolumeName::new(id).ok())
}

/// Returns the volume, which has to exist.
pub(super) fn existing_volume_id(id: &str) -> Result<VolumeName, CsiError> {
    volume_id(id)?.ok_or_else(|| CsiError::NotFound(format!("no volume {id:?}")))
}

/// Checks the name of the node, and not its existence.
pub(super) fn node_id(id: &str) -> Result<(), CsiError> {
    text("node_id", id, NODE_ID_MAX_BYTES)
}

/// Returns the use of a volume, which cannot be on several nodes.
pub(super) fn usable(wanted: Option<v1::VolumeCapability>) -> Result<Capability, CsiError> {
    let capability = capability(wanted)?;
    if capability.is_multi_node() {
        let message =
            "a volume can be on one node at a time: use an access mode SINGLE_NODE_* (ReadWriteOnce)";
        return Err(CsiError::Invalid(message.into()));
    }
    Ok(capability)
}

/// Checks several ways to use a volume and returns them all. At least one must be given.
pub(super) fn all_usable(wanted: Vec<v1::VolumeCapability>) -> Result<Vec<Capability>, CsiError> {
    if wanted.is_empty() {
        return Err(CsiError::Invalid("volume_capabilities is missing".into()));
    }
    wanted.into_iter().map(|wanted| usable(Some(wanted))).collect()
}

/// Parses the parameters of a StorageClass. Mutable ones are not supported.
pub(super) fn parameters(
    parameters: &HashMap<String, String>,
    mutable: &HashMap<String, String>,
) -> Result<CreateVolume, CsiError> {
    if let Some(key) = mutable.keys().min() {
        let message = format!("mutable parameter {key:?}: no parameter can be changed later");
        return Err(CsiError::Invalid(message));
    }
    let pairs = parameters.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    csi::parameters(pairs).map_err(|error| CsiError::Invalid(error.to_string()))
}

/// A part of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Segment {
    /// The one node.
    pub(super) node: Option<String>,
    /// Zone in the topology of a call; absent if the topology has only a node.
    pub(super) zone: Option<String>,
}

impl Segment {
    /// Returns true if a node of the cluster is in the segment.
    pub(super) fn has_node(&self, cluster: &ClusterState) -> bool {
        csi::has_node(cluster, self.node.as_deref(), self.zone.as_deref())
    }
}

/// Returns the part in a topology.
pub(super) fn segment(topology: &v1::Topology) -> Result<Segment, CsiError> {
    let mut segment = Segment::default();
    for (key, value) in &topology.segments {
        let place = match key.as_str() {
            TOPOLOGY_NODE => &mut segment.node,
            TOPOLOGY_ZONE => &mut segment.zone,
            _ => {
                let message =
                    format!("topology key {key:?} is not known: use {TOPOLOGY_NODE} or {TOPOLOGY_ZONE}");
                return Err(CsiError::Invalid(message));
            }
        };
        *place = Some(value.clone());
    }
    Ok(segment)
}
