//! Operates the arbiter: half of a view continues only with its grant.

use std::collections::BTreeSet;

use super::VolumeReconciler;
use crate::objects::{ConditionType, Finding, MemberMode, Replica};
use crate::reconcile::{GRANT_CHECK, START_CHECK, remaining};
use crate::{AgentCall, NodeName};

const WAITING: &str = "WaitingForArbiter";

impl VolumeReconciler<'_> {
    /// Answers the engine of the current attachment if it waits for the arbiter. The answer is stored before
    /// the engine gets it. Any answer may be lost. The reconciler therefore repeats it as long as the engine
    /// reports that it waits. It does so after [`GRANT_CHECK`] or [`START_CHECK`], and after growing pauses
    /// if the agent cannot be called.
    pub(super) fn arbitrate(&mut self) {
        let (Some((node, wanted)), Some(attach)) = (self.objects.grant_wanted(), self.stored.status.attach)
        else {
            if self.stored.status.conditions.get(ConditionType::Granted).is_some() {
                self.record_grant(Finding::Well);
            }
            return;
        };
        let arbiter = &self.stored.status.arbiter;
        match arbiter.ask(attach, wanted.view, &wanted.honoured, &wanted.stored) {
            Ok(granted) => {
                let view = wanted.view;
                if granted != *arbiter {
                    let message = format!(
                        "view {view} is granted: the volume continues with \
                     {}",
                        view.members
                    );
                    self.actions.emit(true, "Granted", message);
                    self.status.grant(granted);
                }
                let message = format!("Frozen: waiting for the arbiter, which has granted view {view}");
                self.record_grant(Finding::wrong(WAITING, message));
                self.send_grant(node.clone(), attach, view);
                self.actions.again_after(GRANT_CHECK);
            }
            Err(refused) => {
                let message = format!("Frozen: waiting for the arbiter, which does not grant it: {refused}");
                let recorded = self.stored.status.conditions.get(ConditionType::Granted);
                if recorded.is_none_or(|recorded| recorded.status || recorded.message != message) {
                    self.actions.emit(true, "NotGranted", message.clone());
                }
                if let Some(granted) = refused.granted() {
                    // It has to honour that: a start does at once, and of an engine that serves the next
                    // process does. The controller repeats it for as long as the engine asks. Nothing else
                    // shows that an answer was lost, and a start without it waits for ever.
                    self.send_grant(node.clone(), attach, granted);
                }
                self.record_grant(Finding::wrong("NotGranted", message));
                self.actions.again_after(START_CHECK);
            }
        }
    }

    /// Counts the grant as reported once the stored status of every member is as new as the granted view.
    pub(super) fn record_reported_grant(&mut self) {
        let status = &self.stored.status;
        let (Some(granted), true) = (status.arbiter.granted(), status.grant_unreported) else { return };
        let (Some(served), Some(engine)) = (self.objects.served_view(), self.objects.engine()) else {
            return;
        };
        let members = engine.status.replica_mode_map.iter();
        let members = members.filter(|(_, member)| member.mode == MemberMode::Member).map(|(id, _)| *id);
        let is_stored = members.collect::<BTreeSet<_>>() == served.members.iter().collect()
            && self.context.cluster.unknown_replica_of(&self.stored.metadata.name).is_none();
        // Without the engine, the replicas alone show the view.
        let has_left = |replica: &&Replica| {
            served.members.contains(replica.spec.replica_id) || replica.status.failed_at.is_some()
        };
        if served.id >= granted.id && is_stored && self.objects.replicas().iter().all(has_left) {
            self.status.set_grant_reported();
        }
    }

    /// Returns true if the engine is just getting a grant, or continues with one. A volume that continues at
    /// once is not reported as frozen. The reconciler looks again when the engine should have continued.
    pub(super) fn is_being_granted(&mut self) -> bool {
        let recorded = self.status.condition(ConditionType::Granted);
        let recorded = recorded.filter(|recorded| recorded.status || recorded.reason == WAITING);
        let left =
            recorded.map(|recorded| remaining(recorded.last_transition_time, START_CHECK, self.context.now));
        let left = left.filter(|left| !left.is_zero());
        if let Some(left) = left {
            self.actions.again_after(left);
        }
        left.is_some()
    }

    fn send_grant(&mut self, node: NodeName, attach: u64, view: shorthorn_types::View) {
        let volume = self.stored.spec.volume_name.clone();
        self.actions.call_after_store(node, AgentCall::Grant { volume, attach, view: Box::new(view) });
    }

    fn record_grant(&mut self, finding: Finding) {
        self.status.set(ConditionType::Granted, finding);
    }
}
