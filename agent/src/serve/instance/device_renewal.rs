//! The renewal of a device that could not grow while it was in use.

use std::sync::Arc;
use std::time::Duration;

use shorthorn_api::v1::{self, instance::Detail};
use shorthorn_types::VolumeName;
use tokio::time::timeout;

use crate::serve::error::NodeError;
use crate::serve::instance::hub::finish;
use crate::serve::instance::upgrade::is_serving;
use crate::serve::instance::{Hub, InstanceId, InstanceProcess, InstanceWatch, ProcessPhase, Spec};

/// The longest that an engine may take to serve the device that was recreated. The engine starts again for
/// that, and waits up to 30 s for its replicas.
const RENEW_LIMIT: Duration = Duration::from_secs(60);

impl Hub {
    /// Replaces the device of an engine, if it could not grow while it was in use and has no user now. The
    /// new one has the size of the volume. Returns when it serves.
    ///
    /// # Errors
    /// [`NodeError`] has the obstacle. The engine is started in any case.
    pub async fn renew_device(self: &Arc<Hub>, volume: VolumeName) -> Result<(), NodeError> {
        let hub = Arc::clone(self);
        // A task of its own: a disconnected caller must not leave an engine stopped.
        finish(tokio::spawn(async move { hub.renew_now(InstanceId::Engine(volume)).await })).await
    }

    async fn renew_now(&self, id: InstanceId) -> Result<(), NodeError> {
        let mut watch = {
            let gate = self.gate(&id);
            let _open = gate.lock().await;
            let Some((Spec::Engine(spec), process)) = self.table().known(&id) else { return Ok(()) };
            let keeps_size = self.table().published(&id).is_some_and(|shown| keeps_size(&shown));
            if process.phase == ProcessPhase::Stopped || !keeps_size {
                return Ok(());
            }
            self.refuse_in_use(&spec).await?;
            let watch = self.table().watch();
            tracing::info!(instance = %id, "recreating the device with the size of the volume");
            self.table().set_process(&id, InstanceProcess { phase: ProcessPhase::Stopping, ..process });
            // The engine removes its device. For the controller it stays the same engine, which never
            // stopped.
            let stopped = self.backend().stop(&id).await;
            self.table().set_process(&id, InstanceProcess::only(ProcessPhase::Starting));
            if let Err(error) = self.backend().start(&id).await {
                self.table().set_process(&id, InstanceProcess::failed(error.to_string()));
                return Err(error.into());
            }
            stopped?;
            watch
        };
        let name = id.name();
        let late = |_| {
            NodeError::Unavailable(format!(
                "the {id} does not serve its new device within {} s and keeps trying; see its log",
                RENEW_LIMIT.as_secs()
            ))
        };
        timeout(RENEW_LIMIT, serves(&mut watch, &name)).await.map_err(late)?
    }
}

/// Returns true if the device of an engine has its new size only once it is recreated.
fn keeps_size(instance: &v1::Instance) -> bool {
    let Some(Detail::Engine(engine)) = &instance.detail else { return false };
    is_serving(instance) && engine.expansion.as_ref().is_some_and(|expansion| expansion.next_attach)
}

/// Waits until an engine serves whose device needs not be recreated.
async fn serves(watch: &mut InstanceWatch, name: &str) -> Result<(), NodeError> {
    loop {
        let changed = watch.changes.recv().await.map_err(NodeError::lost)?;
        let is_it = |instance: &v1::Instance| {
            instance.kind() == v1::InstanceKind::Engine && instance.name == name && is_serving(instance)
        };
        if changed.instance.is_some_and(|instance| is_it(&instance) && !keeps_size(&instance)) {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_control::EnginePhase;
    use tokio::sync::broadcast;

    use super::*;
    use crate::serve::instance::upgrade::tests::shown;

    fn with_expansion(phase: EnginePhase, next_attach: bool) -> v1::InstanceEvent {
        let mut event = shown(1, Some(phase));
        if let Some(Detail::Engine(engine)) = event.instance.as_mut().and_then(|shown| shown.detail.as_mut())
        {
            let (size_bytes, message) = (2 << 30, "the driver cannot".to_owned());
            engine.expansion = Some(v1::Expansion { size_bytes, message, next_attach });
        }
        event
    }

    #[test]
    fn only_a_device_that_cannot_grow_in_use_is_recreated() {
        let keeps = |event: v1::InstanceEvent| keeps_size(&event.instance.unwrap());
        assert!(keeps(with_expansion(EnginePhase::Serving, true)));
        // A running expansion ends by itself, and an engine that starts or is frozen has no size to take.
        for event in [
            with_expansion(EnginePhase::Serving, false),
            with_expansion(EnginePhase::Starting, true),
            shown(1, Some(EnginePhase::Serving)),
        ] {
            assert!(!keeps(event));
        }
    }

    #[tokio::test]
    async fn a_device_is_recreated_once_an_engine_serves_it() {
        let (sent, changes) = broadcast::channel(16);
        let mut watch = InstanceWatch { now: Vec::new(), changes };
        for event in [
            with_expansion(EnginePhase::Serving, true),
            shown(0, None),
            shown(2, Some(EnginePhase::Starting)),
            shown(2, Some(EnginePhase::Serving)),
        ] {
            sent.send(event).unwrap();
        }
        serves(&mut watch, "v1").await.unwrap();
        assert!(watch.changes.is_empty(), "not before the last of them");
    }
}
