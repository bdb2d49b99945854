//! The new status of a volume, while a run decides on it.

use shorthorn_types::ReplicaId;
use shorthorn_views::Arbiter;

use crate::objects::{
    Condition, ConditionType, Display, Finding, Robustness, Volume, VolumeState, VolumeStatus,
};
use crate::{NodeName, Timestamp};

/// The status that a run gives its volume. It begins with the stored status. Each method keeps one rule of a
/// field, for example that the number of the attachment only rises.
pub(super) struct StatusUpdate<'a> {
    stored: &'a Volume,
    next: VolumeStatus,
    now: Timestamp,
}

impl<'a> StatusUpdate<'a> {
    /// Begins with the stored status. All changes are of the time `now`.
    pub(super) fn new(stored: &'a Volume, now: Timestamp) -> StatusUpdate<'a> {
        StatusUpdate { stored, next: stored.status.clone(), now }
    }

    /// Returns the status as decided so far.
    pub(super) fn decided(&self) -> &VolumeStatus {
        &self.next
    }

    /// Returns the condition as decided so far, if it was ever set.
    pub(super) fn condition(&self, kind: ConditionType) -> Option<&Condition> {
        self.next.conditions.get(kind)
    }

    /// Records the finding for a condition.
    pub(super) fn set(&mut self, kind: ConditionType, finding: Finding) {
        self.next.conditions.set(kind, finding, self.now);
    }

    /// Enters the state. Returns false if the volume is in it already.
    pub(super) fn enter(&mut self, state: VolumeState) -> bool {
        let is_new = self.next.state != state;
        self.next.state = state;
        is_new
    }

    /// Records the robustness. Returns false if the volume has it already.
    pub(super) fn set_robustness(&mut self, robustness: Robustness) -> bool {
        let is_new = self.next.robustness != robustness;
        self.next.robustness = robustness;
        is_new
    }

    /// Draws the number of the next attachment and returns it. It is above the volume's own, and above
    /// `known`, the newest one that any process knows.
    pub(super) fn draw_attach(&mut self, known: Option<u64>) -> u64 {
        let drawn = self.next.attach.max(known).unwrap_or_default().saturating_add(1);
        self.next.attach = Some(drawn);
        self.next.attach_started_at = Some(self.now);
        drawn
    }

    /// Takes the volume to a node for the next attachment.
    pub(super) fn set_node(&mut self, node: NodeName) {
        self.next.current_node_id = Some(node);
    }

    /// Takes the volume off its node.
    pub(super) fn leave_node(&mut self) {
        self.next.current_node_id = None;
    }

    /// Records that the drawn attachment is the first one on its node: no device of an older one is carried
    /// over.
    pub(super) fn begin_stay(&mut self) {
        self.next.attached_since = self.next.attach;
    }

    /// Records that no device of an older attachment than `attach` is carried over.
    pub(super) fn attached_since_at_least(&mut self, attach: u64) {
        self.next.attached_since = self.next.attached_since.max(Some(attach));
    }

    /// Records that engines up to this attachment can acknowledge no write any more.
    pub(super) fn set_fenced(&mut self, attach: Option<u64>) {
        self.next.fenced_attach = attach;
    }

    /// Records that engines up to this attachment are not waited for.
    pub(super) fn set_abandoned(&mut self, attach: Option<u64>) {
        self.next.abandoned_attach = attach;
    }

    /// Records a new grant of the arbiter, which no process has reported yet.
    pub(super) fn grant(&mut self, granted: Arbiter) {
        self.next.arbiter = granted;
        self.next.grant_unreported = true;
    }

    /// Records that the members have reported the last grant or a newer view.
    pub(super) fn set_grant_reported(&mut self) {
        self.next.grant_unreported = false;
    }

    /// Marks the arbiter's record as older than the volume, since the attachment `drawn`.
    pub(super) fn mark_arbiter_stale(&mut self, drawn: u64) {
        self.next.arbiter = self.next.arbiter.stale(drawn);
    }

    /// Replaces a stale record of the arbiter.
    pub(super) fn renew_arbiter(&mut self, renewed: Arbiter) {
        self.next.arbiter = renewed;
    }

    /// Records that the chosen replica has the decision of the pending salvage.
    pub(super) fn complete_salvage(&mut self) {
        if let Some(salvage) = &mut self.next.salvage {
            salvage.done = true;
        }
    }

    /// Records the members of the first view. From now on this list is a fact of the volume's history, even
    /// if its replicas change.
    pub(super) fn set_first_members(&mut self, members: Vec<ReplicaId>) {
        self.next.first_members = members;
    }

    /// Records the size that the volume really has. Returns false if that is stored already.
    pub(super) fn set_current_size(&mut self, bytes: u64) -> bool {
        let is_new = self.next.current_size != Some(bytes);
        self.next.current_size = Some(bytes);
        is_new
    }

    /// Records the allocated bytes of the largest replica; 0 if it has none.
    pub(super) fn set_actual_size(&mut self, bytes: u64) {
        self.next.actual_size = Some(bytes).filter(|bytes| *bytes > 0);
    }

    /// Records the columns for people.
    pub(super) fn set_display(&mut self, display: Display) {
        self.next.display = display;
    }

    /// Records that all conditions are about the stored generation of the spec.
    pub(super) fn observe_generation(&mut self) {
        self.next.conditions.observe(self.stored.metadata.generation);
    }

    /// Returns to the stored status, because the volume is removed.
    pub(super) fn discard(&mut self) {
        self.next = self.stored.status.clone();
    }

    /// Returns the volume with its new status, unless that equals the stored one.
    pub(super) fn finish(self) -> Option<Volume> {
        (self.next != self.stored.status).then(|| Volume { status: self.next, ..self.stored.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example::{Example, now};

    fn volume() -> Volume {
        Example::new().volume().clone()
    }

    #[test]
    fn a_run_without_a_change_writes_nothing() {
        let stored = volume();
        let mut status = StatusUpdate::new(&stored, now());
        assert!(!status.enter(stored.status.state) && !status.set_robustness(stored.status.robustness));
        status.set(ConditionType::Healthy, Finding::Well);
        assert_eq!(status.finish(), None);
    }

    #[test]
    fn a_change_leaves_the_spec_and_the_metadata_alone() {
        let stored = volume();
        let mut status = StatusUpdate::new(&stored, now());
        assert!(status.enter(VolumeState::Detaching));
        let changed = status.finish().unwrap();
        assert_eq!((&changed.metadata, &changed.spec), (&stored.metadata, &stored.spec));
        assert_eq!(changed.status.state, VolumeState::Detaching);
    }

    #[test]
    fn a_removed_volume_is_not_written() {
        let stored = volume();
        let mut status = StatusUpdate::new(&stored, now());
        status.enter(VolumeState::Deleting);
        status.leave_node();
        status.discard();
        assert_eq!(status.finish(), None);
    }

    #[test]
    fn the_number_of_the_attachment_only_rises() {
        let mut stored = volume();
        stored.status.attach = Some(5);
        let mut status = StatusUpdate::new(&stored, now());
        for (known, drawn) in [(None, 6), (Some(3), 7), (Some(9), 10), (Some(10), 11)] {
            assert_eq!(status.draw_attach(known), drawn, "a process knows {known:?}");
            assert_eq!(status.decided().attach, Some(drawn));
        }
        assert_eq!(status.decided().attach_started_at, Some(now()));
        status.begin_stay();
        assert_eq!(status.decided().attached_since, Some(11));
    }

    #[test]
    fn the_first_attachment_has_the_number_one() {
        let mut stored = volume();
        stored.status.attach = None;
        assert_eq!(StatusUpdate::new(&stored, now()).draw_attach(None), 1);
        assert_eq!(StatusUpdate::new(&stored, now()).draw_attach(Some(4)), 5, "a process knows 4");
    }

    #[test]
    fn a_stale_arbiter_counts_from_the_drawn_attachment() {
        let stored = volume();
        let mut status = StatusUpdate::new(&stored, now());
        let drawn = status.draw_attach(Some(41));
        status.mark_arbiter_stale(drawn);
        assert_eq!(status.decided().arbiter.stale_since(), Some(42));
    }

    #[test]
    fn an_actual_size_of_zero_is_not_known() {
        let stored = volume();
        let mut status = StatusUpdate::new(&stored, now());
        status.set_actual_size(4096);
        assert_eq!(status.decided().actual_size, Some(4096));
        status.set_actual_size(0);
        assert_eq!(status.decided().actual_size, None);
    }
}
