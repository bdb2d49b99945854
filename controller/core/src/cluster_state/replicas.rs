use std::collections::BTreeMap;
use std::ops::Deref;

use crate::NodeName;
use crate::objects::Replica;

/// All replicas by name, and their scheduled bytes on each disk. Every change keeps these up to date: the
/// scheduler needs them at each placement, and counting would take longer with every replica.
///
/// A replica that is about to be stored has its space reserved before: others may look for places while the
/// store writes it.
#[derive(Clone, Debug, Default)]
pub struct Replicas {
    by_name: BTreeMap<String, Replica>,
    /// About to be stored.
    coming: BTreeMap<String, Replica>,
    scheduled: BTreeMap<NodeName, BTreeMap<String, ScheduledBytes>>,
}

/// The scheduled bytes of the replicas on a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScheduledBytes {
    /// The sum of their sizes. No number of volumes that a store can hold makes it overflow.
    pub bytes: u128,
    /// Replicas in the sum, with those that are about to be stored.
    pub replicas: u32,
}

impl Replicas {
    /// Returns the scheduled bytes on the disks of that node, by path.
    #[must_use]
    pub fn scheduled_on(&self, node: &str) -> Option<&BTreeMap<String, ScheduledBytes>> {
        self.scheduled.get(node)
    }

    /// Returns the scheduled bytes on the disks of all nodes.
    pub(crate) const fn scheduled(&self) -> &BTreeMap<NodeName, BTreeMap<String, ScheduledBytes>> {
        &self.scheduled
    }

    /// Returns the replicas that are about to be stored.
    pub fn coming(&self) -> impl Iterator<Item = &Replica> {
        self.coming.values()
    }

    /// Reserves the place of `replica`, which is about to be stored.
    pub(super) fn reserve(&mut self, replica: Replica) {
        self.forget_reservation(&replica.metadata.name);
        if !self.by_name.contains_key(&replica.metadata.name) {
            self.count(&replica);
            self.coming.insert(replica.metadata.name.clone(), replica);
        }
    }

    /// Drops the reservation of a replica that is stored, or will not be.
    pub(super) fn forget_reservation(&mut self, name: &str) {
        if let Some(replica) = self.coming.remove(name) {
            self.discount(&replica);
        }
    }

    /// Puts `replica` in place of the one with its name.
    pub(super) fn insert(&mut self, replica: Replica) {
        self.remove(&replica.metadata.name);
        self.forget_reservation(&replica.metadata.name);
        self.count(&replica);
        self.by_name.insert(replica.metadata.name.clone(), replica);
    }

    /// Takes out the one of that name.
    pub(super) fn remove(&mut self, name: &str) {
        if let Some(old) = self.by_name.remove(name) {
            self.discount(&old);
        }
    }

    fn count(&mut self, replica: &Replica) {
        let disks = self.scheduled.entry(replica.spec.node_id.clone()).or_default();
        let scheduled = disks.entry(replica.spec.disk_path.clone()).or_default();
        scheduled.bytes += u128::from(replica.spec.volume_size);
        scheduled.replicas += 1;
    }

    fn discount(&mut self, old: &Replica) {
        let Some(disks) = self.scheduled.get_mut(&old.spec.node_id) else { return };
        if let Some(scheduled) = disks.get_mut(&old.spec.disk_path) {
            scheduled.bytes -= u128::from(old.spec.volume_size);
            scheduled.replicas -= 1;
            if scheduled.replicas == 0 {
                disks.remove(&old.spec.disk_path);
            }
        }
        if disks.is_empty() {
            self.scheduled.remove(&old.spec.node_id);
        }
    }
}

impl Deref for Replicas {
    type Target = BTreeMap<String, Replica>;
    fn deref(&self) -> &BTreeMap<String, Replica> {
        &self.by_name
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use shorthorn_types::{ReplicaId, VolumeName};

    use super::*;
    use crate::Timestamp;
    use crate::objects::{DesireState, Metadata, ReplicaSpec, StoredReplicaStatus};

    fn replica(name: u8, node: u8, disk: u8, size: u32) -> Replica {
        Replica {
            metadata: Metadata::new(format!("v-{name}"), Timestamp::UNIX_EPOCH),
            spec: ReplicaSpec {
                volume_name: VolumeName::new("v").unwrap(),
                volume_size: size.into(),
                replica_id: ReplicaId::from_random(name.into()),
                node_id: NodeName::new(&format!("n{node}")).unwrap(),
                disk_path: format!("/{disk}"),
                disk_id: String::new(),
                desire_state: DesireState::Stopped,
                eviction_requested: false,
            },
            status: StoredReplicaStatus::default(),
        }
    }

    fn recounted(replicas: &Replicas) -> BTreeMap<NodeName, BTreeMap<String, ScheduledBytes>> {
        let mut all: BTreeMap<NodeName, BTreeMap<String, ScheduledBytes>> = BTreeMap::new();
        for Replica { spec, .. } in replicas.values().chain(replicas.coming()) {
            let disk =
                all.entry(spec.node_id.clone()).or_default().entry(spec.disk_path.clone()).or_default();
            disk.bytes += u128::from(spec.volume_size);
            disk.replicas += 1;
        }
        all
    }

    proptest! {
        #[test]
        fn scheduled_bytes_equal_a_full_recount(
            steps in prop::collection::vec((0u8..4, 0u8..6, 0u8..3, 0u8..3, any::<u32>()), 0..60),
        ) {
            let mut replicas = Replicas::default();
            for (step, name, node, disk, size) in steps {
                match step {
                    0 => replicas.insert(replica(name, node, disk, size)),
                    1 => replicas.remove(&format!("v-{name}")),
                    2 => replicas.reserve(replica(name, node, disk, size)),
                    _ => replicas.forget_reservation(&format!("v-{name}")),
                }
                prop_assert!(replicas.coming().all(|coming| !replicas.contains_key(&coming.metadata.name)));
                prop_assert_eq!(&replicas.scheduled, &recounted(&replicas));
            }
        }
    }
}
