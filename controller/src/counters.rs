//! Counters and durations of the events of the controller: runs, writes, calls.

use std::time::Duration;

use shorthorn_controller_core::objects::Kind;
use shorthorn_metrics::{Counters, Histograms, MetricsPage};

/// The counters for the life of the controller; cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    pub(crate) reconciles: Counters,
    reconcile_durations: Histograms,
    pub(crate) store_writes: Counters,
    store_write_durations: Histograms,
    agent_calls: Counters,
    agent_call_durations: Histograms,
    csi_calls: Counters,
    force_deletions: Counters,
    csi_call_durations: Histograms,
}

impl Metrics {
    /// Counts a run over an object.
    pub fn reconciled(&self, kind: Kind, is_ok: bool, took: Duration) {
        self.reconciles.count(&[("kind", kind.as_str()), ("result", if is_ok { "ok" } else { "error" })]);
        self.reconcile_durations.observe(&[("kind", kind.as_str())], took);
    }

    /// Counts an answer of an agent, or the lack of one.
    pub fn called_agent(&self, method: &'static str, code: &str, took: Duration) {
        self.agent_calls.count(&[("method", method), ("code", code)]);
        self.agent_call_durations.observe(&[("method", method)], took);
    }

    /// Counts a call over CSI.
    pub fn answered_csi(&self, method: &'static str, code: &str, took: Duration) {
        self.csi_calls.count(&[("method", method), ("code", code)]);
        self.csi_call_durations.observe(&[("method", method)], took);
    }

    /// Counts the deletion of a pod of a lost node or of its attachment, or the failure of one.
    pub fn force_deleted(&self, object: &'static str, is_ok: bool) {
        self.force_deletions.count(&[("object", object), ("result", if is_ok { "ok" } else { "error" })]);
    }

    /// Counts a write of an object.
    pub(crate) fn wrote(&self, kind: Kind, operation: &'static str, result: &'static str, took: Duration) {
        let labels = [("kind", kind.as_str()), ("operation", operation), ("result", result)];
        self.store_writes.count(&labels);
        self.store_write_durations.observe(&[], took);
    }

    /// Adds all counters and durations to the page.
    pub(crate) fn show(&self, page: &mut MetricsPage) {
        let counters = [
            (
                "shorthorn_controller_reconciles",
                "Runs of reconcilers, ok or error; a conflict counts as error and is retried",
                &self.reconciles,
            ),
            (
                "shorthorn_controller_store_writes",
                "Writes of objects: ok, conflict, unavailable, refused or failed. With Kubernetes a write is \
                 one or two API calls, because spec and status are written separately",
                &self.store_writes,
            ),
            ("shorthorn_controller_agent_calls", "Calls to agents, by gRPC code", &self.agent_calls),
            (
                "shorthorn_controller_csi_calls",
                "CSI calls, by gRPC code; Cancelled: the caller disconnected",
                &self.csi_calls,
            ),
            (
                "shorthorn_controller_lost_node_deletions",
                "Deletions of objects (pod, attachment) of lost nodes, ok or error; an object that was gone \
                 already counts as ok",
                &self.force_deletions,
            ),
        ];
        for (name, help, counters) in counters {
            page.show_counters(name, help, counters);
        }
        let durations = [
            (
                "reconcile",
                "Duration of runs of reconcilers, including their calls and writes",
                &self.reconcile_durations,
            ),
            ("store_write", "Duration of writes to the store", &self.store_write_durations),
            ("agent_call", "Duration of calls to agents", &self.agent_call_durations),
            ("csi_call", "Duration of CSI calls", &self.csi_call_durations),
        ];
        for (what, help, histograms) in durations {
            page.show_histograms(&format!("shorthorn_controller_{what}_duration_seconds"), help, histograms);
        }
    }
}
