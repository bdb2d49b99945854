//! Metrics of the controller at `/metrics`, and `/readyz`. docs/metrics.md explains every metric.
//!
//! Events are counted when they happen. Objects are counted at each request, under the locks that a decision
//! takes too, for as long as the counting takes.

mod objects;
mod readiness;
mod store;

use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use shorthorn_metrics::{MetricsPage, MetricsSource};

use crate::agents::Fleet;
use crate::queue::WorkQueue;
use crate::store::ObjectStore;
use crate::tls::Tls;

pub use crate::counters::Metrics;
pub use readiness::{Readiness, ReadinessPhase};
pub use store::Metered;

/// The sources of metrics once the store is open.
struct MetricsInputs {
    store: Arc<dyn ObjectStore>,
    fleet: Arc<Fleet>,
    queue: Arc<WorkQueue>,
}

/// The health and the metrics of the controller.
pub struct ControllerMetrics {
    metrics: Metrics,
    readiness: Arc<Readiness>,
    shown: OnceLock<MetricsInputs>,
    tls: OnceLock<Arc<Tls>>,
}

impl std::fmt::Debug for ControllerMetrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ControllerMetrics").field("readiness", &self.readiness).finish_non_exhaustive()
    }
}

impl ControllerMetrics {
    /// Returns the metrics of a controller that has not opened its store.
    #[must_use]
    pub fn new(metrics: Metrics, readiness: Arc<Readiness>) -> Arc<ControllerMetrics> {
        Arc::new(ControllerMetrics { metrics, readiness, shown: OnceLock::new(), tls: OnceLock::new() })
    }

    /// Returns the counters.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Returns the state behind `/readyz`.
    #[must_use]
    pub fn readiness(&self) -> &Arc<Readiness> {
        &self.readiness
    }

    /// Sets the CA whose end is shown.
    pub fn show_tls(&self, tls: Arc<Tls>) {
        // It is called once.
        let _ = self.tls.set(tls);
    }

    /// Sets the sources of the metrics: objects, agents and a queue.
    pub fn show(&self, store: Arc<dyn ObjectStore>, fleet: Arc<Fleet>, queue: Arc<WorkQueue>) {
        // It is called once.
        let _ = self.shown.set(MetricsInputs { store, fleet, queue });
    }
}

#[async_trait]
impl MetricsSource for ControllerMetrics {
    fn program(&self) -> (&'static str, &'static str) {
        ("controller", env!("CARGO_PKG_VERSION"))
    }

    fn ready(&self) -> Result<(), String> {
        self.readiness.check()
    }

    async fn fill(&self, page: &mut MetricsPage) {
        show_leader(self.readiness.is_leading(), page);
        if let Some(tls) = self.tls.get() {
            show_expiry(tls.expiry_s(), page);
        }
        let Some(MetricsInputs { store, fleet, queue }) = self.shown.get() else { return };
        objects::show(&store.state(), page);
        objects::show_agents(&fleet.agents(), page);
        let waiting = queue.depth();
        show_queue([("ready", waiting.ready), ("active", waiting.active), ("timed", waiting.timed)], page);
        self.metrics.show(page);
    }
}

fn show_leader(is_leading: bool, page: &mut MetricsPage) {
    let leader = page.gauges(
        "shorthorn_controller_leader",
        "1 if this controller leads, otherwise 0. A controller that does not lead exports only \
         this metric and the expiry of certificates",
    );
    leader.set(&[], u64::from(is_leading));
}

/// Shows when the certificates of the CA and of this controller expire.
fn show_expiry((authority_s, own_s): (u64, u64), page: &mut MetricsPage) {
    let expiry = page.gauges(
        "shorthorn_controller_certificate_expiry_seconds",
        "Seconds since 1970 at which the certificate of the CA (ca) or of this controller (controller) \
         expires",
    );
    expiry.set(&[("certificate", "ca")], authority_s);
    expiry.set(&[("certificate", "controller")], own_s);
}

fn show_queue(numbers: [(&'static str, usize); 3], page: &mut MetricsPage) {
    let depth = page.gauges(
        "shorthorn_controller_queue_depth",
        "Objects that wait for a worker (ready), are being reconciled (active), or are reconciled again at a \
         known time (timed)",
    );
    for (state, number) in numbers {
        depth.set(&[("state", state)], u64::try_from(number).unwrap_or(u64::MAX));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use shorthorn_controller_core::ClusterState;
    use shorthorn_controller_core::objects::Kind;
    use shorthorn_controller_core::observed::Agents;
    use shorthorn_testkit::docs::check_generated;
    use shorthorn_testkit::metrics::documented;

    use super::*;

    #[test]
    fn the_documentation_has_every_metric() {
        let (mut page, metrics, took) =
            (MetricsPage::default(), Metrics::default(), Duration::from_millis(1));
        metrics.reconciled(Kind::Volume, true, took);
        metrics.wrote(Kind::Volume, "update", "ok", took);
        metrics.called_agent("StartEngine", "Ok", took);
        metrics.answered_csi("CreateVolume", "Ok", took);
        metrics.force_deleted("pod", true);
        show_leader(true, &mut page);
        show_expiry((1, 1), &mut page);
        objects::show(&ClusterState::default(), &mut page);
        objects::show_agents(&Agents::default(), &mut page);
        show_queue([("ready", 1), ("active", 0), ("timed", 0)], &mut page);
        metrics.show(&mut page);
        check_generated("docs/metrics.md", "controller", &documented(&page.text().unwrap()));
    }
}
