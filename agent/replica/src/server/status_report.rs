use shorthorn_control::{ProcessStatus, Publisher, ReplicaPhase, ReplicaStatus};
use shorthorn_replica_core::ReplicaFailure;
use shorthorn_views::ReplicaViews;

/// The part of the published status that the data thread knows.
#[derive(Debug)]
pub(super) struct StatusReport {
    publisher: Publisher,
}

impl StatusReport {
    pub fn new(publisher: Publisher) -> StatusReport {
        StatusReport { publisher }
    }

    fn update(&self, change: impl FnOnce(&mut ReplicaStatus)) {
        self.publisher.update(|status| {
            if let ProcessStatus::Replica(replica) = status {
                change(replica);
            }
        });
    }

    /// Publishes the engine that holds the replica, and the known views.
    pub fn views(&self, views: &ReplicaViews) {
        self.update(|replica| {
            replica.generation = views.generation().of_engine();
            replica.views = Some(views.report().clone());
        });
    }

    /// Publishes the size of the volume after an expansion.
    pub fn size(&self, size_bytes: u64) {
        self.update(|replica| replica.size_bytes = size_bytes);
    }

    /// Publishes the failure after which the replica does not serve any more.
    pub fn failure(&self, failure: &ReplicaFailure) {
        let (failures, message) = (failure.in_a_row, failure.outlook());
        self.update(|replica| {
            replica.phase = ReplicaPhase::Failed;
            (replica.failures, replica.message) = (failures, message);
        });
    }

    /// Publishes that earlier failures do not count any more.
    pub fn forgiven(&self) {
        self.update(|replica| replica.failures = 0);
    }
}
