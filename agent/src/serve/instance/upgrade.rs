//! The upgrade of an engine under I/O: a new process of the installed program replaces the running one.

use std::sync::Arc;
use std::time::Duration;

use shorthorn_api::v1::{self, instance::Detail};
use shorthorn_types::VolumeName;
use tokio::time::{Instant, timeout};

use crate::serve::blocking;
use crate::serve::error::NodeError;
use crate::serve::instance::hub::finish;
use crate::serve::instance::message::says_serving;
use crate::serve::instance::program::{self, Comparison};
use crate::serve::instance::{Hub, InstanceId, InstanceWatch};

/// The longest that the new process of an upgrade may take to serve. The last process may drain for 5 s, and
/// the new one waits up to 30 s for its replicas.
const UPGRADE_LIMIT: Duration = Duration::from_secs(60);

/// The result of an upgrade.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Upgraded {
    /// The time without service: from the moment when the old process had finished its requests, or was gone,
    /// until the new one served.
    pub pause: Duration,
    /// The process before.
    pub old_pid: i32,
    /// The process since; the same one if it was left alone.
    pub new_pid: i32,
}

impl Hub {
    /// Replaces the process of an engine under I/O; see the node API. With `only_outdated`, a process that
    /// runs the installed program is left alone.
    ///
    /// # Errors
    /// [`NodeError::Precondition`] if it does not serve, [`NodeError::Unavailable`] if the new one does not
    /// serve in time: it continues to try.
    pub async fn upgrade(
        self: &Arc<Hub>,
        volume: VolumeName,
        attach: Option<u64>,
        only_outdated: bool,
    ) -> Result<Upgraded, NodeError> {
        let (hub, id) = (Arc::clone(self), InstanceId::Engine(volume));
        finish(tokio::spawn(async move { hub.upgrade_now(id, attach, only_outdated).await })).await
    }

    async fn upgrade_now(
        &self,
        id: InstanceId,
        attach: Option<u64>,
        only_outdated: bool,
    ) -> Result<Upgraded, NodeError> {
        let gate = self.gate(&id);
        let _open = gate.lock().await;
        let (_, process) = self.engine_of(&id, attach)?;
        let shown = self.published(&id)?;
        let Some(old_pid) = process.pid.filter(|_| is_serving(&shown)) else {
            let message = format!("the {id} does not serve: it can be upgraded when it does");
            return Err(NodeError::Precondition(message));
        };
        // Behind the gate: of two callers, the second one meets the process that the first one has started.
        if only_outdated && !is_outdated(&shown, old_pid).await? {
            return Ok(Upgraded { pause: Duration::ZERO, old_pid, new_pid: old_pid });
        }
        let mut watch = self.table().watch();
        self.backend().restart(&id).await?;
        let name = id.name();
        let measured = measure(&mut watch, &name, old_pid);
        let late = |_| {
            NodeError::Unavailable(format!(
                "the new process of the {id} does not serve within {} s and keeps trying; see its log",
                UPGRADE_LIMIT.as_secs()
            ))
        };
        let upgraded = timeout(UPGRADE_LIMIT, measured).await.map_err(late)??;
        tracing::info!(instance = %id, ?upgraded, "upgraded");
        Ok(upgraded)
    }
}

pub(super) fn is_serving(instance: &v1::Instance) -> bool {
    instance.state() == v1::InstanceState::Running && says_serving(instance)
}

/// Returns true if the process of an engine runs another program than the installed one, or may do so.
async fn is_outdated(engine: &v1::Instance, pid: i32) -> Result<bool, NodeError> {
    let compared = blocking(move || Ok(program::differs(pid))).await?;
    let comparison = compared.map_or(Comparison::ByVersion, |differs| Comparison::Done { differs });
    let version = match &engine.detail {
        Some(Detail::Engine(engine)) => engine.known_version(),
        _ => None,
    };
    Ok(comparison.needs_upgrade(version).unwrap_or(true))
}

/// Waits for the end of one process and the start of the next one.
async fn measure(watch: &mut InstanceWatch, name: &str, old_pid: i32) -> Result<Upgraded, NodeError> {
    let mut quiet_since = None;
    loop {
        let changed = watch.changes.recv().await.map_err(NodeError::lost)?;
        let Some(instance) = changed
            .instance
            .filter(|instance| instance.kind() == v1::InstanceKind::Engine && instance.name == name)
        else {
            continue;
        };
        // A stopping engine continues to serve until everything is flushed.
        if instance.pid != old_pid || !says_serving(&instance) {
            quiet_since.get_or_insert_with(Instant::now);
        }
        if let Some(since) = quiet_since.filter(|_| instance.pid != old_pid && is_serving(&instance)) {
            return Ok(Upgraded { pause: since.elapsed(), old_pid, new_pid: instance.pid });
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use shorthorn_control::EnginePhase;
    use tokio::sync::broadcast;

    use super::*;

    /// Returns the event of an engine's process in a phase.
    pub(crate) fn shown(pid: i32, phase: Option<EnginePhase>) -> v1::InstanceEvent {
        let engine = v1::EngineStatus::default().with_phase(phase);
        let instance = v1::Instance {
            kind: v1::InstanceKind::Engine.into(),
            name: "v1".into(),
            state: v1::InstanceState::Running.into(),
            pid,
            detail: Some(Detail::Engine(engine)),
            ..v1::Instance::default()
        };
        v1::InstanceEvent { instance: Some(instance), ..v1::InstanceEvent::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn the_pause_is_from_the_end_of_one_to_the_service_of_the_next() {
        let (sent, changes) = broadcast::channel(16);
        let mut watch = InstanceWatch { now: Vec::new(), changes };
        let sender = async {
            // The old one still serves, then ends; the new one starts, then serves.
            for (wait_ms, pid, phase) in [
                (50, 1, Some(EnginePhase::Serving)),
                (10, 1, Some(EnginePhase::Stopping)),
                (20, 0, None),
                (30, 2, Some(EnginePhase::Starting)),
                (40, 2, Some(EnginePhase::Serving)),
            ] {
                tokio::time::sleep(Duration::from_millis(wait_ms)).await;
                sent.send(shown(pid, phase)).unwrap();
                tokio::task::yield_now().await;
            }
        };
        let (measured, ()) = tokio::join!(measure(&mut watch, "v1", 1), sender);
        let measured = measured.unwrap();
        assert_eq!((measured.old_pid, measured.new_pid), (1, 2));
        assert_eq!(measured.pause.as_millis(), 90);
    }
}
