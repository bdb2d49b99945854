//! Diagnostics of the controller itself.

use std::sync::Arc;

use shorthorn_api::v1;
use shorthorn_metrics::{Page, Vitals};
use tokio::sync::mpsc;
use tonic::Status;

use crate::metrics::ControllerVitals;

/// The most of a file in one message, far below what a message of gRPC holds.
const PART_MAX_BYTES: usize = 1 << 20;

/// Where it is asked.
#[derive(Clone, Debug)]
pub struct Diagnostics {
    /// What is shown as metrics.
    pub vitals: Arc<ControllerVitals>,
    /// How the controller is configured, for people.
    pub configuration: String,
}

impl Diagnostics {
    /// Sends everything, until nobody listens.
    pub(super) async fn send(self, sender: mpsc::Sender<Result<v1::DiagnosticsPart, Status>>) {
        let mut page = Page::default();
        self.vitals.fill(&mut page).await;
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
