use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use shorthorn_types::status::{DataLocality, Frontend, Robustness, VolumeState};
use shorthorn_types::{ReplicaId, VolumeName};
use shorthorn_views::Arbiter;

use super::{Conditions, Metadata, Secret};
use crate::{Labels, NodeName, Timestamp, schema};

/// The default number of replicas.
pub const DEFAULT_REPLICAS: u32 = 3;

/// A volume: one engine on the node of the attachment, and some replicas.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Volume {
    /// Name, version and dates.
    pub metadata: Metadata,
    /// The desired state, set by the owner.
    pub spec: VolumeSpec,
    /// The observed state, written by the reconcilers.
    #[serde(default)]
    pub status: VolumeStatus,
}

/// The desired state of a volume, set by its owner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    { "rule": "self.frontend == oldSelf.frontend", "message": "the frontend of a volume cannot be changed" },
    { "rule": "int(self.size) >= int(oldSelf.size)", "message": "a volume can grow, not shrink" },
    {
        "rule": "(has(self.encryptInTransit) && self.encryptInTransit) == \
                 (has(oldSelf.encryptInTransit) && oldSelf.encryptInTransit)",
        "message": "encryptInTransit of a volume cannot be changed",
    },
]))]
pub struct VolumeSpec {
    /// The name of the object, which is also the name of the engine and of the device. It never changes.
    #[schemars(with = "Option<schema::VolumeName>")]
    pub volume_name: VolumeName,
    /// The size in bytes, a multiple of 4096, at most 16 TiB.
    #[serde(with = "super::quoted")]
    #[schemars(extend("x-kubernetes-validations" = [{
        "rule": "int(self) >= 4096 && int(self) <= 17592186044416 && int(self) % 4096 == 0",
        "message": "the size must be a multiple of 4096, from 4096 to 17592186044416",
    }]))]
    #[schemars(with = "schema::Quoted")]
    pub size: u64,
    /// The wanted number of replicas.
    #[serde(default = "default_replicas")]
    #[schemars(range(min = 1, max = 8))]
    pub number_of_replicas: u32,
    /// The choice of the frontend.
    #[serde(default, deserialize_with = "super::unknown_words::word")]
    #[schemars(with = "schema::Frontend")]
    pub frontend: Frontend,
    /// The node to attach the volume to; none to detach it.
    #[serde(rename = "nodeID", default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<schema::NodeName>")]
    pub node_id: Option<NodeName>,
    /// The newest attachment that was detached by force. Its engine is stopped although its device is in use,
    /// once the engine has not served for a minute. 0: none.
    #[serde(default, with = "shorthorn_types::optional::number", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u64")]
    pub forced_detach: Option<u64>,
    /// True if several replicas may be on one node.
    #[serde(default)]
    pub replica_soft_anti_affinity: bool,
    /// True if several replicas may be in one zone.
    #[serde(default = "yes")]
    pub replica_zone_soft_anti_affinity: bool,
    /// True if several replicas that are on one node may be on one disk.
    #[serde(default = "yes")]
    pub replica_disk_soft_anti_affinity: bool,
    /// The tags that a node must have to get a replica.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    #[schemars(with = "Vec<schema::Label>")]
    pub node_selector: Labels,
    /// The tags that a disk must have to get a replica.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    #[schemars(with = "Vec<schema::Label>")]
    pub disk_selector: Labels,
    /// The rule for a replica on the node of the engine.
    #[serde(default, deserialize_with = "super::unknown_words::word")]
    #[schemars(with = "schema::DataLocality")]
    pub data_locality: DataLocality,
    /// True if replicas compare every read with the sums of its blocks, so that another replica answers a
    /// read of rot. A change takes effect with the next attachment.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub verify_reads: bool,
    /// True if connections between the engine and replicas on other nodes are encrypted by TLS. It cannot be
    /// changed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub encrypt_in_transit: bool,
    /// The share of its speed that copies may take.
    #[serde(default)]
    pub rebuild: RebuildLimits,
    /// The name in the CSI call that created the volume; none if it was created otherwise. The name of the
    /// volume is derived from it.
    #[serde(rename = "csiName", default, skip_serializing_if = "Option::is_none")]
    pub csi_name: Option<String>,
    /// The node of the expected first attachment: as good a place for a replica as the node of the engine.
    #[serde(rename = "preferredNodeID", default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<schema::NodeName>")]
    pub preferred_node_id: Option<NodeName>,
    /// The key that the engine and the replicas prove to each other.
    #[schemars(skip)]
    pub secret: Secret,
}

impl VolumeSpec {
    /// Returns true if that attachment was detached by force. Attachments that follow it were not.
    #[must_use]
    pub fn is_detached_by_force(&self, attach: Option<u64>) -> bool {
        attach.is_some() && attach <= self.forced_detach
    }
}

fn yes() -> bool {
    true
}

fn default_replicas() -> u32 {
    DEFAULT_REPLICAS
}

/// The observed state of a volume, written by the reconcilers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VolumeStatus {
    /// The stage of the volume's life.
    #[serde(deserialize_with = "super::unknown_words::word")]
    #[schemars(with = "schema::VolumeState")]
    pub state: VolumeState,
    /// The robustness: whether the volume has all of its members.
    #[serde(deserialize_with = "super::unknown_words::word")]
    #[schemars(with = "schema::Robustness")]
    pub robustness: Robustness,
    /// The node of the volume, or the one that it is being attached to or detached from.
    #[serde(rename = "currentNodeID", default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<schema::NodeName>")]
    pub current_node_id: Option<NodeName>,
    /// Number of the newest attachment: the first half of the generation that fences older engines.
    /// Only ever rises, and is stored before an engine is started with it.
    // None: the volume was never attached. It is stored as 0.
    #[serde(with = "shorthorn_types::optional::number")]
    #[schemars(with = "u64")]
    pub attach: Option<u64>,
    /// The time at which that number was drawn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<schema::Time>")]
    pub attach_started_at: Option<Timestamp>,
    /// The first attachment since which the volume has been on its node without a break. The device of an
    /// engine of this one or a later one may be carried over to the next. 0: not known.
    #[serde(default, with = "shorthorn_types::optional::number")]
    #[schemars(with = "u64")]
    pub attached_since: Option<u64>,
    /// The newest attachment that is fenced: enough replicas refuse its engine, and those of older ones, so
    /// that they can acknowledge no write. 0: no engine was fenced.
    #[serde(default, with = "shorthorn_types::optional::number")]
    #[schemars(with = "u64")]
    pub fenced_attach: Option<u64>,
    /// The attachment up to which engines are not waited for: the volume is deleted, and the node was given
    /// up. Such an engine is not fenced, and is stopped if its node comes back. 0: none.
    #[serde(default, with = "shorthorn_types::optional::number", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u64")]
    pub abandoned_attach: Option<u64>,
    /// The arbiter's record of its last grant. It is part of the volume, so that the compare-and-swap which
    /// stores a grant fails if another attachment was drawn meanwhile.
    #[serde(default)]
    #[schemars(with = "schema::Opaque")]
    pub arbiter: Arbiter,
    /// The last salvage of the volume, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub salvage: Option<Salvage>,
    /// The size that the volume really has: that of all replicas, and of the attached device; 0: as it was
    /// created (spec.size). For a detached volume it is the size of the next attachment, because its replicas
    /// grow before anything is served.
    #[serde(with = "super::quoted::or_zero", default)]
    #[schemars(with = "schema::Quoted")]
    pub current_size: Option<u64>,
    /// The replicas that the volume was created with, which are the members of its first view.
    #[serde(default)]
    #[schemars(with = "Vec<schema::ReplicaId>")]
    pub first_members: Vec<ReplicaId>,
    /// The PersistentVolume of Kubernetes that the volume is, as long as that keeps it: the data is not
    /// deleted before it is gone or released. Only the controller writes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent_volume: Option<String>,
    /// The claim that this PersistentVolume is bound to, or was last, as NAMESPACE/NAME.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<String>,
    /// The allocated bytes of its largest replica, to a few percent; 0 if not known yet.
    #[serde(with = "super::quoted::or_zero", default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "schema::Quoted")]
    pub actual_size: Option<u64>,
    /// The columns of kubectl.
    #[serde(default, skip_serializing_if = "Display::is_empty")]
    pub display: Display,
    /// True if neither a replica nor an engine has reported the view that the arbiter has granted last. The
    /// members of that view then count in addition to the known ones.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub grant_unreported: bool,
    /// Conditions of the volume: the status of each, and the reason for it.
    #[serde(default)]
    pub conditions: Conditions,
}

impl VolumeStatus {
    /// Returns true if no engine of that attachment, or of an older one, can acknowledge a write any more.
    /// None is an engine that was never attached.
    #[must_use]
    pub fn is_fenced(&self, attach: Option<u64>) -> bool {
        attach <= self.fenced_attach
    }

    /// Returns true if engines of that attachment, and of older ones, are not waited for.
    #[must_use]
    pub fn is_abandoned(&self, attach: Option<u64>) -> bool {
        attach <= self.abandoned_attach
    }
}

/// The columns of a volume for people. Only the reconciler writes them, and no decision depends on them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Display {
    /// The size that its owner wants, like 10Gi.
    pub size: String,
    /// The allocated size of its largest replica, like 1.5Gi.
    pub actual_size: String,
    /// The number of members of the wanted number, like 2/3; the wanted number alone if the volume is not
    /// served.
    pub replicas: String,
    /// The reason of the most important condition that does not hold.
    pub reason: String,
}

impl Display {
    fn is_empty(&self) -> bool {
        *self == Display::default()
    }
}

/// The share of a volume's speed that copies may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct RebuildLimits {
    /// The maximum number of bytes copied per second; 0: no limit.
    #[serde(with = "super::quoted::or_zero")]
    #[schemars(with = "schema::Quoted")]
    pub bytes_per_s: Option<u64>,
    /// The most that copying takes of the bytes that move while the volume is busy, 1 to 100.
    #[schemars(range(min = 1, max = 100))]
    pub share_percent: u32,
}

impl Default for RebuildLimits {
    fn default() -> RebuildLimits {
        RebuildLimits { bytes_per_s: None, share_percent: 30 }
    }
}

/// The decision to start a volume from the data of one replica, whatever the data of the others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Salvage {
    /// The chosen replica.
    #[serde(rename = "replicaID")]
    #[schemars(with = "schema::ReplicaId")]
    pub replica_id: ReplicaId,
    /// The number that was drawn for it: the replica's view gets it.
    pub attach: u64,
    /// The time of the decision.
    #[schemars(with = "schema::Time")]
    pub decided_at: Timestamp,
    /// The person or program that has decided.
    pub by: String,
    /// The reason, in the operator's words.
    pub reason: String,
    /// The losses that were known at the decision.
    pub losses: String,
    /// True if the replica has got the decision. Nothing is started before.
    pub done: bool,
}

impl Volume {
    /// Returns the size that it really has, in bytes.
    #[must_use]
    pub const fn current_size_bytes(&self) -> u64 {
        match self.status.current_size {
            Some(size_bytes) => size_bytes,
            None => self.spec.size,
        }
    }

    /// Returns true if the volume is to be deleted with all its data: its deletion was requested, and nothing
    /// keeps it. A volume whose data is being deleted does not come back.
    #[must_use]
    pub fn is_deleting(&self) -> bool {
        let has_begun = self.status.state == VolumeState::Deleting;
        self.metadata.is_deleting() && (has_begun || self.status.persistent_volume.is_none())
    }

    /// Returns the PersistentVolume that a deletion waits for, which was requested in spite of it: by
    /// kubectl, if no admission policy has refused that.
    #[must_use]
    pub fn deletion_waits_for(&self) -> Option<&str> {
        let persistent_volume = self.status.persistent_volume.as_deref();
        persistent_volume.filter(|_| self.metadata.is_deleting() && !self.is_deleting())
    }

    /// Returns true if the volume has not reached its wanted size yet.
    #[must_use]
    pub const fn is_expanding(&self) -> bool {
        self.current_size_bytes() < self.spec.size
    }
}

impl VolumeStatus {
    /// Returns the salvage that is still to be carried out.
    #[must_use]
    pub fn pending_salvage(&self) -> Option<&Salvage> {
        self.salvage.as_ref().filter(|salvage| !salvage.done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_no_attachment_is_stored_as_zero() {
        let text = r#"{"state":"detached","robustness":"unknown","attach":0}"#;
        let status: VolumeStatus = serde_json::from_str(text).unwrap();
        assert_eq!(status.attach, None);
        assert_eq!(serde_json::to_value(&status).unwrap()["attach"], 0);
        let status = VolumeStatus { attach: Some(7), ..status };
        let written = serde_json::to_value(&status).unwrap();
        assert_eq!(written["attach"], 7);
        assert_eq!(serde_json::from_value::<VolumeStatus>(written).unwrap(), status);
    }

    #[test]
    fn an_engine_is_fenced_with_all_older_ones_and_if_it_was_never_attached() {
        let status = VolumeStatus { fenced_attach: Some(4), ..VolumeStatus::default() };
        let fenced = [None, Some(3), Some(4), Some(5)].map(|attach| status.is_fenced(attach));
        assert_eq!(fenced, [true, true, true, false]);
        let new = VolumeStatus::default();
        assert_eq!((new.is_fenced(None), new.is_fenced(Some(1))), (true, false));
        assert_eq!((new.is_abandoned(None), new.is_abandoned(Some(1))), (true, false));
    }
}
