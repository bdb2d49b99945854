//! Keeps the trash of all disks within its limits.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::Disks;
use crate::serve::blocking;
use crate::serve::trash::{TrashLimits, now_ms, sweep};

/// The interval of checking the trash. A disk does not fill the reserved share in that time.
const SWEEP_EVERY: Duration = Duration::from_secs(10);

/// Sweeps the trash of all disks now and then, until the agent stops.
pub async fn keep_swept(disks: Arc<Disks>, limits: TrashLimits, mut stopping: watch::Receiver<bool>) {
    loop {
        let all = Arc::clone(&disks);
        let swept = blocking(move || {
            all.paths().iter().for_each(|disk| sweep(disk, limits, now_ms()));
            Ok(())
        });
        if let Err(error) = swept.await {
            tracing::warn!("cannot clean up the trash: {error}");
        }
        tokio::select! {
            () = tokio::time::sleep(SWEEP_EVERY) => {}
            _ = stopping.wait_for(|stopping| *stopping) => return,
        }
    }
}
