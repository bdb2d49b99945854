//! The block devices of this host, for the node API.

use std::time::Duration;

use shorthorn_api::v1;
use tokio::sync::Mutex;
use tokio::task::JoinHandle;

use crate::serve::error::NodeError;

/// The time limit for the examination of all devices. One may hang. A disk that spins up takes less than
/// that.
const LIMIT: Duration = Duration::from_secs(30);

type DiscoveryResult = anyhow::Result<Vec<v1::DiscoveredDevice>>;

/// The examination of block devices. At most one runs, and an abandoned one is not repeated beside it.
#[derive(Debug)]
pub struct Discovery {
    look: fn() -> DiscoveryResult,
    running: Mutex<Option<JoinHandle<DiscoveryResult>>>,
}

impl Discovery {
    /// Returns the examination that calls `look`.
    pub fn new(look: fn() -> DiscoveryResult) -> Discovery {
        Discovery { look, running: Mutex::default() }
    }

    /// Returns the devices.
    ///
    /// # Errors
    /// [`NodeError::Unavailable`] if a device does not answer, or sysfs cannot be read.
    pub async fn devices(&self) -> Result<Vec<v1::DiscoveredDevice>, NodeError> {
        self.devices_from(self.look, LIMIT).await
    }

    async fn devices_from(
        &self,
        look: impl FnOnce() -> DiscoveryResult + Send + 'static,
        limit: Duration,
    ) -> Result<Vec<v1::DiscoveredDevice>, NodeError> {
        let busy = |_| NodeError::Unavailable("the devices are being examined: try again".to_owned());
        let mut running = self.running.try_lock().map_err(busy)?;
        // A result that no caller has waited for may be old.
        running.take_if(|look| look.is_finished());
        let look = running.get_or_insert_with(|| tokio::task::spawn_blocking(look));
        let Ok(ended) = tokio::time::timeout(limit, look).await else {
            return Err(NodeError::Unavailable(format!(
                "the examination of the devices does not end within {limit:?}: one may hang; run \
                 shorthorn-agent disk discover DEVICE on the host"
            )));
        };
        *running = None;
        let found = ended.map_err(NodeError::lost)?;
        found.map_err(|error| NodeError::Unavailable(format!("{error:#}")))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn a_device_that_hangs_holds_up_one_examination_only() {
        let (release, held) = mpsc::channel::<()>();
        let discovery = Discovery::new(|| Ok(Vec::new()));
        let look = move || {
            let _ = held.recv();
            Ok(Vec::new())
        };
        let soon = Duration::from_millis(20);
        let refused = discovery.devices_from(look, soon).await.unwrap_err();
        assert!(refused.to_string().contains("does not end within 20ms"), "{refused}");
        let again = discovery.devices_from(|| panic!("a second one runs beside it"), soon).await;
        assert!(again.is_err());
        drop(release);
        assert!(discovery.devices_from(|| Ok(Vec::new()), LIMIT).await.is_ok());
    }

    #[tokio::test]
    async fn an_examination_that_was_given_up_leaves_no_result() {
        let discovery = Discovery::new(|| Ok(Vec::new()));
        let old = tokio::task::spawn_blocking(|| anyhow::bail!("an old result"));
        while !old.is_finished() {
            tokio::task::yield_now().await;
        }
        *discovery.running.lock().await = Some(old);
        assert!(discovery.devices_from(|| Ok(Vec::new()), LIMIT).await.is_ok());
    }
}
