//! The continuation of takeovers that an earlier agent has left in the middle.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use crate::serve::error::NodeError;
use crate::serve::instance::{Hub, InstanceId, control_watch, message};

/// The time limit for the status of an engine. The next round asks again.
const STATUS_LIMIT: Duration = Duration::from_secs(5);
/// The interval of the rounds.
const EVERY: Duration = Duration::from_secs(30);

impl Hub {
    /// Makes each engine hand over whose process is of an earlier attachment than its spec, now and every
    /// [`EVERY`]. The agent has stored the spec, and has ended before the restart, or the restart has failed.
    /// The controller does not repeat its call.
    pub(super) fn continue_takeovers(self: &Arc<Hub>) {
        let hub = Arc::downgrade(self);
        tokio::spawn(async move {
            while let Some(hub) = hub.upgrade() {
                for (id, _) in hub.table().engine_specs() {
                    // One that does not answer delays no other.
                    let hub = Arc::clone(&hub);
                    tokio::spawn(async move {
                        if let Err(error) = hub.continue_takeover(&id).await {
                            tracing::error!(instance = %id, "the takeover does not continue: {error}");
                        }
                    });
                }
                drop(hub);
                tokio::time::sleep(EVERY).await;
            }
        });
    }

    async fn continue_takeover(&self, id: &InstanceId) -> Result<(), NodeError> {
        let gate = self.gate(id);
        // Another command is under way: the next round looks again.
        let Ok(_open) = gate.try_lock() else { return Ok(()) };
        let Some((spec, _)) = self.table().known(id) else { return Ok(()) };
        let asked = timeout(STATUS_LIMIT, control_watch::status(&spec.control_socket())).await;
        // A process that does not answer yet has just read its spec.
        let Ok(Ok(status)) = asked else { return Ok(()) };
        if message::is_of_other_attachment(&spec, &status) {
            tracing::info!(instance = %id, "continuing a takeover that has begun");
            self.backend().restart(id).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_control::ProcessStatus;
    use tokio::io::AsyncWriteExt;
    use tokio::net::UnixListener;
    use tokio::sync::watch;

    use super::*;
    use crate::serve::instance::backend::tests::Commanded;
    use crate::serve::instance::message::tests::{serving, spec};
    use crate::serve::instance::{InstancePaths, Table};
    use crate::serve::network::Choice;

    /// Starts an agent that finds the spec of attachment 5 and a process with this status. Returns true if it
    /// makes the process hand over.
    async fn hands_over(status: &ProcessStatus) -> bool {
        let folder = tempfile::tempdir().unwrap();
        let paths = InstancePaths::prepare(&folder.path().join("s"), &folder.path().join("r")).unwrap();
        let spec = spec(&paths, 5);
        spec.store(&paths).unwrap();
        let socket = UnixListener::bind(spec.control_socket()).unwrap();
        let commanded = Commanded::default();
        let backend = Box::new(commanded.clone());
        let (_choice, address) = watch::channel(Choice::default());
        let hub = Hub::start(10000..=10009, address, paths, Table::new(), backend).await.unwrap();
        let Ok(asked) = timeout(STATUS_LIMIT, socket.accept()).await else { return false };
        let (mut process, _) = asked.unwrap();
        process.write_all(format!("{}\n", serde_json::to_string(status).unwrap()).as_bytes()).await.unwrap();
        // The gate opens once the status was compared.
        let gate = hub.gate(&spec.id());
        let _open = gate.lock().await;
        commanded.take() == ["restart"]
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_takeover_that_an_earlier_agent_has_begun_is_continued() {
        assert!(hands_over(&serving(4)).await);
        assert!(!hands_over(&serving(5)).await);
    }
}
