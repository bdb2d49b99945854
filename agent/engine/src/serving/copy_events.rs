//! Copies: their status, their progress and their end.

use std::time::Instant;

use shorthorn_control::{CopyStatus, MemberMode, MemberStatus};
use shorthorn_core::PeerIndex;
use shorthorn_recovery::{RebuildFailure, RebuildFailures};
use shorthorn_types::ReplicaId;

use super::Serving;
use crate::events::RebuildProgress;

impl Serving<'_> {
    pub(super) fn rebuilt(&mut self, peer: PeerIndex) {
        self.moves.end(peer);
        let meter = self.copies.end_rebuild(peer);
        self.rebuild_failures[usize::from(peer)] = RebuildFailures::default();
        let Some(replica) = self.replica(peer) else { return };
        let seconds = meter.as_ref().map_or(0.0, |meter| meter.elapsed().as_secs_f64());
        let bytes = meter.map_or(0, |meter| meter.total_bytes());
        tracing::info!(volume = %self.spec.volume, %replica, bytes, seconds, "a replica is a member again");
        self.publish_member(replica, MemberStatus::rebuilt);
    }

    pub(super) fn resynced(&mut self) {
        let Some(meter) = self.copies.end_resync() else { return };
        let (bytes, seconds) = (meter.total_bytes(), meter.elapsed().as_secs_f64());
        tracing::info!(volume = %self.spec.volume, bytes, seconds, "resync complete: the members are equal");
        self.publish(|engine| engine.resync = None);
    }

    pub(super) fn rebuild_progress(&mut self, peer: PeerIndex, progress: RebuildProgress) {
        let Some(replica) = self.replica(peer) else { return };
        if self.view.members.contains(replica) {
            return; // the report came before the replica is a member
        }
        let now = Instant::now();
        match progress {
            RebuildProgress::Waiting { reason, is_of_replica } => {
                self.copies.end_rebuild(peer);
                let mut failures = self.rebuild_failures[usize::from(peer)];
                self.publish_member(replica, |member| {
                    member.rebuild_waits(reason);
                    if is_of_replica {
                        failures.add(RebuildFailure::Disk);
                    }
                    member.rebuild_failed = failures.any();
                });
                self.rebuild_failures[usize::from(peer)] = failures;
            }
            RebuildProgress::Copying { total_bytes, left_bytes } => {
                let (shown, is_first) = self.copies.update_snapshots(peer, (total_bytes, left_bytes), now);
                self.rebuild_runs(peer, replica, now);
                if is_first {
                    let volume = &self.spec.volume;
                    tracing::info!(%volume, %replica, bytes = total_bytes, "copying snapshots to a replica");
                }
                self.show_copy(replica, shown, "copying its snapshots");
            }
            RebuildProgress::Rebuilding { missing_bytes, is_copy } => {
                let volume = &self.spec.volume;
                tracing::info!(%volume, %replica, bytes = missing_bytes, is_copy, "rebuilding a replica");
                let shown = self.copies.begin_rebuild(peer, missing_bytes, now);
                self.show_copy(replica, shown, "copying its out-of-sync regions");
            }
        }
    }

    /// A rebuild of the replica is at work.
    fn rebuild_runs(&mut self, peer: PeerIndex, replica: ReplicaId, now: Instant) {
        let failures = &mut self.rebuild_failures[usize::from(peer)];
        if failures.any() {
            failures.runs_for(self.copies.rebuild_time(peer, now));
            let any = failures.any();
            self.publish_member(replica, |member| member.rebuild_failed = any);
        }
    }

    fn show_copy(&self, replica: ReplicaId, shown: CopyStatus, message: &str) {
        self.publish_member(replica, |member| {
            member.mode = MemberMode::Rebuilding;
            message.clone_into(&mut member.message);
            member.copy = Some(shown);
        });
    }

    /// Updates the progress of copies, resyncs and scrubs.
    pub(super) fn poll(&mut self) {
        let progress = self.shared().read_core(|core| core.copy_progress());
        let now = Instant::now();
        let is_time_to_log = self.copies.begin_log(now);
        if let Some(shown) = self.copies.update_resync(progress.resync_left_bytes, now) {
            self.publish(|engine| engine.resync = Some(shown));
        }
        for (peer, left_bytes) in progress.rebuilds {
            let Some(replica) = self.replica(peer) else { continue };
            let Some(shown) = self.copies.update_rebuild(peer, left_bytes, now) else { continue };
            self.rebuild_runs(peer, replica, now);
            self.publish_member(replica, |member| member.copy = Some(shown));
            if is_time_to_log {
                let (volume, percent) = (&self.spec.volume, shown.percent());
                tracing::info!(
                    %volume, %replica, percent, bytes_per_s = shown.bytes_per_s, "a replica is being rebuilt"
                );
            }
        }
        if let Some(at_bytes) = progress.scrub_at_bytes {
            self.publish_scrub(|scrub| scrub.at_bytes = at_bytes);
        }
        let due = self.scrubs.take_due(now);
        self.log_differences(due);
    }
}
