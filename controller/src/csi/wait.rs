//! Waiting until the reconcilers have made it so.

use shorthorn_controller_core::objects::{Key, Kind};
use shorthorn_controller_core::{ClusterState, csi};
use shorthorn_csi::CsiError;
use shorthorn_types::VolumeName;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::Instant;

use super::CsiController;

impl CsiController {
    /// Waits for a result of `look`, which runs again whenever the volume or its engine changes, until
    /// `deadline`.
    pub(super) async fn wait<T>(
        &self,
        volume: &VolumeName,
        deadline: Instant,
        look: impl Fn(&ClusterState) -> Option<T>,
    ) -> Result<T, CsiError> {
        // Before the first look: no change is missed in between.
        let mut changes = self.store.changes();
        let mut stopping = self.stopping.clone();
        loop {
            let found = look(&self.store.state());
            if let Some(found) = found {
                return Ok(found);
            }
            let change = async {
                loop {
                    match changes.recv().await {
                        Ok(key) if !concerns(volume, &key) => {}
                        // For any number of missed changes, the next look shows the current state.
                        Ok(_) | Err(RecvError::Lagged(_)) => return true,
                        Err(RecvError::Closed) => return false,
                    }
                }
            };
            let goes_on = tokio::select! {
                there = change => there,
                // An error means that the sender is gone, and with it the controller.
                _ = stopping.wait_for(|stopping| *stopping) => false,
                () = tokio::time::sleep_until(deadline) => {
                    let state = csi::waits_for(&self.store.state(), volume.as_str());
                    return Err(CsiError::TooSlow(format!("still under way: {state}")));
                }
            };
            if !goes_on {
                return Err(CsiError::Unavailable("the controller is stopping; ask again".into()));
            }
        }
    }
}

fn concerns(volume: &VolumeName, key: &Key) -> bool {
    matches!(key.kind, Kind::Volume | Kind::Engine) && key.name == volume.as_str()
}
