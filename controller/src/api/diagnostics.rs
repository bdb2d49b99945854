//! Diagnostics of the controller itself.

use std::sync::Arc;

use shorthorn_api::v1;
use shorthorn_metrics::{MetricsPage, MetricsSource};
use tokio::sync::mpsc;
use tonic::Status;

use crate::metrics::ControllerMetrics;

/// The maximum part of a file in one message, far below the limit of gRPC.
const PART_MAX_BYTES: usize = 1 << 20;

/// The sources of the diagnostics.
#[derive(Clone, Debug)]
pub struct Diagnostics {
    /// Metrics of the whole process.
    pub source: Arc<ControllerMetrics>,
    /// The configuration of the controller, for people.
    pub configuration: String,
}

impl Diagnostics {
    /// Sends all parts, until the receiver is gone.
    pub(super) async fn send(self, sender: mpsc::Sender<Result<v1::DiagnosticsPart, Status>>) {
        let mut page = MetricsPage::default();
        self.source.fill(&mut page).await;
        let metrics =
            page.text().unwrap_or_else(|error| format!("# the metrics cannot be written: {error}\n"));
        for (file, text) in [("configuration.txt", self.configuration), ("metrics.txt", metrics)] {
            for part in text.as_bytes().chunks(PART_MAX_BYTES) {
                let part = v1::DiagnosticsPart { file: file.to_owned(), data: part.to_vec() };
                if sender.send(Ok(part)).await.is_err() {
                    return;
                }
            }
        }
    }
}
