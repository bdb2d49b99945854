//! Problems of this host, for the warnings of the node.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;

use crate::check;
use crate::serve::blocking;
use crate::serve::config::Config;
use crate::serve::error::NodeError;

/// The age up to which findings count. The controller asks every half minute, and hosts rarely change.
const FRESH: Duration = Duration::from_mins(10);

/// The findings of the last check.
#[derive(Debug, Default)]
pub struct HostWarnings(Mutex<Option<(Instant, Vec<String>)>>);

impl HostWarnings {
    /// Returns the findings of `shorthorn-agent check` that only have to be read.
    ///
    /// # Errors
    /// The agent is stopping.
    pub async fn get(&self, config: &Arc<Config>) -> Result<Vec<String>, NodeError> {
        let mut found = self.0.lock().await;
        if let Some((at, warnings)) = &*found
            && at.elapsed() < FRESH
        {
            return Ok(warnings.clone());
        }
        let config = Arc::clone(config);
        let warnings = blocking(move || Ok(check::warnings(&config))).await?;
        *found = Some((Instant::now(), warnings.clone()));
        Ok(warnings)
    }
}
