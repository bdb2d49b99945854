//! The status of a replica process as the messages of both interfaces.

use shorthorn_types::Generation;
use shorthorn_types::status::{ObservedReplica, ReplicaStatus};

use super::{nonempty, report};
use crate::v1;

impl From<&ReplicaStatus> for v1::ReplicaStatus {
    fn from(status: &ReplicaStatus) -> v1::ReplicaStatus {
        let generation = status.generation;
        v1::ReplicaStatus {
            volume: status.volume.to_string(),
            replica_id: status.replica.to_string(),
            addresses: status.addresses.clone(),
            size_bytes: status.size_bytes,
            allocated_bytes: status.allocated_bytes,
            generation: generation.map(Into::into),
            generation_text: generation.unwrap_or(Generation::NEVER).to_string(),
            directory: status.directory.display().to_string(),
            committed: status.views.as_ref().map(|views| (&views.committed).into()),
            proposed: status.views.iter().flat_map(|views| &views.proposed).map(Into::into).collect(),
            failures: status.failures,
        }
    }
}

impl From<v1::ReplicaStatus> for ObservedReplica {
    fn from(status: v1::ReplicaStatus) -> ObservedReplica {
        ObservedReplica {
            attach: status.known_generation().map(|generation| generation.attach),
            addresses: status.addresses,
            allocated_bytes: status.allocated_bytes,
            directory: nonempty(status.directory),
            views: report(status.committed, status.proposed).ok().map(Box::new),
        }
    }
}

impl v1::Replica {
    /// Returns the message with the status that the agent of the replica shows.
    #[must_use]
    pub fn with_observed(mut self, observed: &ObservedReplica) -> Self {
        // All fields: the compiler finds one that is forgotten. InspectReplicas shows generation and views.
        let ObservedReplica { addresses, allocated_bytes, directory, attach: _, views: _ } = observed.clone();
        self.allocated_bytes = allocated_bytes;
        let directory = directory.unwrap_or_default();
        self.status = Some(v1::ReplicaStatus { addresses, directory, ..v1::ReplicaStatus::default() });
        self
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_types::status::ReplicaPhase;
    use shorthorn_types::{Members, ReplicaId, ReplicaReport, View, ViewId};

    use super::*;

    fn reported() -> ReplicaStatus {
        let replica = ReplicaId::from_random(1);
        let id = ViewId { generation: Generation::new(3, 1), number: 5 };
        let committed = View { id, members: Members::new([replica]).unwrap() };
        ReplicaStatus {
            volume: "v1".parse().unwrap(),
            replica,
            pid: 7,
            phase: ReplicaPhase::Serving,
            failures: 2,
            message: String::new(),
            addresses: vec!["unix:/r".to_owned()],
            size_bytes: 8192,
            allocated_bytes: 4096,
            generation: Some(Generation::new(3, 1)),
            views: Some(ReplicaReport { committed, proposed: vec![committed] }),
            directory: "/d/v1".into(),
        }
    }

    #[test]
    fn a_controller_observes_the_status_that_a_replica_has_reported() {
        let status = reported();
        let observed = ObservedReplica::from(v1::ReplicaStatus::from(&status));
        assert_eq!((observed.attach, observed.allocated_bytes), (Some(3), 4096));
        assert_eq!((observed.addresses, observed.directory.as_deref()), (status.addresses, Some("/d/v1")));
        assert_eq!(observed.views.map(|views| *views), status.views);
        let nothing = ObservedReplica::from(v1::ReplicaStatus::default());
        assert_eq!(nothing, ObservedReplica::default());
    }

    #[test]
    fn a_replica_is_shown_with_its_observed_status() {
        let observed = ObservedReplica::from(v1::ReplicaStatus::from(&reported()));
        let shown = v1::Replica::default().with_observed(&observed);
        assert_eq!(shown.allocated_bytes, 4096);
        let status = shown.status.unwrap();
        assert_eq!((status.directory.as_str(), status.addresses.len()), ("/d/v1", 1));
    }
}
