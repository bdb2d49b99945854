//! Members that fail, are late, and answer again.

use std::time::{Duration, Instant};

use shorthorn_control::{MemberMode, MemberStatus};
use shorthorn_core::{DropCause, PeerIndex, PeerState};
use shorthorn_recovery::{RebuildDelay, RebuildFailure};
use shorthorn_types::{ByteRange, ReplicaId};

use super::{NO_DELAY, Serving};
use crate::error::EngineError;
use crate::status;

impl Serving<'_> {
    /// Handles the failure of a member or of a replica that was being rebuilt.
    pub(super) fn dropped(
        &mut self,
        peer: PeerIndex,
        reason: String,
        cause: DropCause,
    ) -> Result<(), EngineError> {
        self.copies.end_rebuild(peer);
        let Some(replica) = self.replica(peer) else { return Ok(()) };
        tracing::warn!(volume = %self.spec.volume, %replica, reason, "a replica has failed");
        let view = self.view;
        let was_member = view.members.contains(replica);
        if was_member {
            // Members and core count all that it misses from here on.
            self.context().update(peer, |peer| {
                peer.is_complete = true;
                peer.last_view = Some(view);
            });
        }
        let failures = &mut self.rebuild_failures[usize::from(peer)];
        match cause {
            DropCause::Late if !was_member => failures.add(RebuildFailure::Late),
            DropCause::Full | DropCause::Failed if !was_member => failures.add(RebuildFailure::Disk),
            _ => {}
        }
        let has_failed = failures.any();
        let (delay, message) = self.delay_of(peer, cause);
        if delay != NO_DELAY {
            tracing::warn!(
                volume = %self.spec.volume,
                %replica,
                "a replica is left out for a while: {message}"
            );
        }
        self.publish_member(replica, |member| {
            member.end_wait();
            member.mode = MemberMode::Failed;
            member.message = format!("{reason}{message}");
            member.copy = None;
            member.rebuild_failed = has_failed;
            member.away_since_ms.get_or_insert_with(status::now_ms);
        });
        self.rebuild_tasks.start(peer, delay)
    }

    /// Returns the time for which the dropped replica stays out, and a description of it.
    fn delay_of(&mut self, peer: PeerIndex, cause: DropCause) -> (RebuildDelay, String) {
        let is_needed = self.needed_beside(self.members(), peer);
        let history = &mut self.drop_histories[usize::from(peer)];
        // Starts long before the start of the process, so that the first drop does not seem to follow another
        // one.
        let now = self.begun.elapsed() + Duration::from_secs(1 << 20);
        let delay = history.dropped(cause, now, is_needed);
        let times = history.times_late();
        let message = match delay {
            NO_DELAY => String::new(),
            RebuildDelay::For(pause) if cause == DropCause::Late => {
                format!("; late {times} times: stays out for {} s", pause.as_secs())
            }
            RebuildDelay::For(pause) if cause == DropCause::Full => {
                format!("; the disk is full: stays out for {} s", pause.as_secs())
            }
            RebuildDelay::For(pause) => {
                format!("; connections break often: stays out for {} ms", pause.as_millis())
            }
            RebuildDelay::Out => format!(
                "; late {times} times: stays out until a scrub is requested, half of the other replicas are \
                 lost, or the volume is attached again"
            ),
        };
        (delay, message)
    }

    /// Returns the number of members, which the core changes before this thread learns of a new view.
    fn members(&self) -> usize {
        let peers = self.context().known_peers();
        self.shared().read_core(|core| {
            let is_member = |index: PeerIndex| core.membership().state(index) == PeerState::Member;
            peers.iter().filter(|(index, _)| is_member(*index)).count()
        })
    }

    /// Returns true if the replica may not stay out, because only `members` are left. A replica that was in a
    /// view does not count those that never were: they are to take the place of others.
    pub(super) fn needed_beside(&self, members: usize, peer: PeerIndex) -> bool {
        let peers = self.context().known_peers();
        let counts_views = peers.iter().any(|(index, known)| *index == peer && known.was_in_view);
        let all = match counts_views {
            true => peers.iter().filter(|(_, known)| known.was_in_view).count(),
            false => self.spec.replicas.len(),
        };
        2 * members <= all
    }

    /// Reports a late member without which the others cannot continue.
    pub(super) fn awaited(&self, peer: PeerIndex, late_ms: u64, is_silent: bool) {
        let Some(replica) = self.replica(peer) else { return };
        let answers = if is_silent { "nothing, not even PING" } else { "PING, but not its requests" };
        let message = format!(
            "late for {late_ms} ms, answers {answers}; requests wait for this replica, because the others \
             cannot continue without it"
        );
        tracing::warn!(
            volume = %self.spec.volume,
            %replica,
            late_ms,
            is_silent,
            "requests wait for a member that is late"
        );
        // The core repeats it if the replica begins or ceases to answer PING.
        self.publish_member(replica, |member| member.begin_wait(message));
    }

    /// Reports that a member does not hold the data that was stored on it.
    pub(super) fn rot_found(&mut self, peer: PeerIndex, range: ByteRange, is_copied: bool) {
        let Some(replica) = self.replica(peer) else { return };
        if is_copied {
            self.log_loss(replica, range);
        } else {
            self.log_rot(peer, replica, range);
        }
        self.publish_member(replica, |member| {
            if is_copied {
                member.times_rot_copied += 1;
            } else {
                member.times_rotten += 1;
            }
        });
    }

    /// Logs rot that no replica has sound. Each range has a line: the operator restores it from a backup.
    fn log_loss(&self, replica: ReplicaId, range: ByteRange) {
        tracing::error!(
            volume = %self.spec.volume,
            %replica,
            %range,
            "data of the volume is damaged, and no replica has a sound copy: it is copied as it is; \
             restore it from a backup"
        );
    }

    /// Logs rot that another replica repairs, unless the replica has had a line just now.
    fn log_rot(&mut self, peer: PeerIndex, replica: ReplicaId, range: ByteRange) {
        let log = self.rot_logs.get_mut(usize::from(peer));
        let Some(unlogged) = log.and_then(|log| log.admit(Instant::now())) else { return };
        tracing::error!(
            volume = %self.spec.volume,
            %replica,
            %range,
            unlogged,
            "the disk of a replica has changed or lost data: it is copied from another replica"
        );
    }

    pub(super) fn prompt(&self, peer: PeerIndex) {
        let Some(replica) = self.replica(peer) else { return };
        tracing::info!(volume = %self.spec.volume, %replica, "a member that was late has answered");
        self.publish_member(replica, MemberStatus::end_wait);
    }
}
