//! Expansions of the served volume: see [`ExpansionTask`].

use std::sync::Arc;

use shorthorn_control::ExpansionStatus;
use shorthorn_types::limits::{BLOCK_BYTES, MAX_VOLUME_BYTES};

use super::Serving;
use crate::error::EngineError;
use crate::events::ExpansionProgress;
use crate::expansion::ExpansionTask;

impl Serving<'_> {
    pub(super) fn expand(&mut self, size_bytes: u64) -> Result<(), EngineError> {
        let has_bytes = self.spec.size_bytes;
        if !size_bytes.is_multiple_of(BLOCK_BYTES) || size_bytes > MAX_VOLUME_BYTES {
            let limits = format!("a multiple of {BLOCK_BYTES}, at most {MAX_VOLUME_BYTES}");
            self.ignore("expand", &format!("size_bytes {size_bytes}: {limits}"));
            return Ok(());
        }
        if size_bytes <= has_bytes {
            if size_bytes < has_bytes {
                self.ignore(
                    "expand",
                    &format!("the volume has {has_bytes} bytes, and {size_bytes} are fewer"),
                );
            }
            return Ok(());
        }
        tracing::info!(
            volume = %self.spec.volume, from_bytes = has_bytes, to_bytes = size_bytes, "expanding"
        );
        self.spec.size_bytes = size_bytes;
        self.context().connector.set_size(size_bytes);
        self.show_expansion(None, false);
        self.expansion = Some(ExpansionTask::grow_replicas(Arc::clone(self.rebuild_tasks.context()))?);
        // A formerly too large replica may be accepted.
        self.rebuild_tasks.retry_now();
        Ok(())
    }

    fn show_expansion(&self, message: Option<String>, next_attach: bool) {
        let size_bytes = self.spec.size_bytes;
        self.publish(|engine| {
            engine.expansion = Some(ExpansionStatus { size_bytes, message, next_attach });
        });
    }

    /// Completes an expansion, after every replica and the core have grown.
    pub(super) fn expanded(&mut self, size_bytes: u64) -> Result<(), EngineError> {
        // A smaller size is of an older command.
        if size_bytes >= self.spec.size_bytes { self.resize_device() } else { Ok(()) }
    }

    pub(super) fn resize_device(&mut self) -> Result<(), EngineError> {
        let size_bytes = self.spec.size_bytes;
        self.show_expansion(None, false);
        let (context, device) = (Arc::clone(self.rebuild_tasks.context()), Arc::clone(&self.device));
        self.expansion = Some(ExpansionTask::resize(context, device, size_bytes)?);
        Ok(())
    }

    pub(super) fn expansion_progress(&self, progress: ExpansionProgress) {
        let volume = &self.spec.volume;
        match progress {
            ExpansionProgress::Waiting(message) => self.show_expansion(Some(message), false),
            ExpansionProgress::NextAttach(message) => {
                tracing::warn!(
                    %volume, message, "the device keeps its size until the volume is attached again"
                );
                self.show_expansion(Some(message), true);
            }
            ExpansionProgress::Resized { size_bytes } => {
                tracing::info!(%volume, size_bytes, "expanded");
                let is_all = size_bytes >= self.spec.size_bytes;
                self.publish(|engine| {
                    engine.size_bytes = size_bytes;
                    if is_all {
                        engine.expansion = None;
                    }
                });
            }
        }
    }
}
