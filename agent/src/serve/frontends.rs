//! Frontends that work on this host.

use std::time::{Duration, Instant};

use shorthorn_frontend::probe::{FrontendReport, probe};
use tokio::sync::Mutex;

use crate::serve::blocking;
use crate::serve::error::NodeError;

/// The age up to which a probe counts. Probing loads modules and asks drivers, so it is not done at every
/// call. An administrator may install a module, so it is repeated.
const FRESH: Duration = Duration::from_secs(60);

/// The result of the last probe.
#[derive(Debug, Default)]
pub struct Frontends(Mutex<Option<(Instant, Vec<FrontendReport>)>>);

impl Frontends {
    /// Returns all frontends, in the order in which they are preferred.
    ///
    /// # Errors
    /// The agent is stopping.
    pub async fn get(&self) -> Result<Vec<FrontendReport>, NodeError> {
        let mut found = self.0.lock().await;
        if let Some((at, reports)) = &*found
            && at.elapsed() < FRESH
        {
            return Ok(reports.clone());
        }
        let reports = blocking(|| Ok(probe())).await?;
        *found = Some((Instant::now(), reports.clone()));
        Ok(reports)
    }
}
