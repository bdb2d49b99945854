//! Expands a volume that is served: first the replicas, each durably, then the core, then the device. Until
//! the last step the user of the device sees the old size, and sends no request beyond it.
//!
//! After any end in between, the next attempts complete the expansion. The size is in the spec before
//! anything grows, so the next engine starts with it. A replica grows in its handshake, if it was absent,
//! is new, or was not reached by this process. A replica is therefore never larger than the size of its
//! engine, and never used while it is smaller.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use shorthorn_frontend::{Device, FrontendError};
use shorthorn_recovery::{LinkError, NotGrown};

use crate::connection::finish;
use crate::context::EngineContext;
use crate::error::EngineError;
use crate::events::{ExpansionProgress, MainEvent};
use crate::shared_core::lock;

/// Between two attempts: doubled after every failure.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause: a user waits for the new size.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
const STACK_BYTES: usize = 256 << 10;

/// The device, which is resized on a thread of its own: the kernel may wait for requests, and those for us.
pub type SharedDevice = Arc<Mutex<Box<dyn Device>>>;

/// A step of an expansion that is under way on a thread of its own. It stops soon after this is dropped.
#[derive(Debug)]
pub struct ExpansionTask {
    _stop: Sender<()>,
}

impl ExpansionTask {
    /// Has every replica that is connected grow to the size that the connector knows, and then the core.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn grow_replicas(context: Arc<EngineContext>) -> Result<ExpansionTask, EngineError> {
        ExpansionTask::start(Arc::clone(&context), move || match grow_replicas(&context) {
            Ok(()) => ExpansionAttempt::Done,
            Err(reason) => ExpansionAttempt::Again(reason),
        })
    }

    /// Has the device grow.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn resize(
        context: Arc<EngineContext>,
        device: SharedDevice,
        size_bytes: u64,
    ) -> Result<ExpansionTask, EngineError> {
        ExpansionTask::start(Arc::clone(&context), move || {
            let mut device = lock(&device);
            let progress = match device.resize(size_bytes) {
                Ok(()) => ExpansionProgress::Resized { size_bytes },
                Err(error @ FrontendError::Unsupported { .. }) => {
                    ExpansionProgress::NextAttach(error.to_string())
                }
                Err(error) => return ExpansionAttempt::Again(error.to_string()),
            };
            context.shared.send_event(MainEvent::Expansion(progress));
            ExpansionAttempt::Done
        })
    }

    fn start(
        context: Arc<EngineContext>,
        attempt: impl FnMut() -> ExpansionAttempt + Send + 'static,
    ) -> Result<ExpansionTask, EngineError> {
        let (stop, stopped) = mpsc::channel();
        thread::Builder::new()
            .name("expansion".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || patiently(&context, &stopped, attempt))
            .map_err(EngineError::system("starting a thread"))?;
        Ok(ExpansionTask { _stop: stop })
    }
}

enum ExpansionAttempt {
    Done,
    Again(String),
}

fn patiently(context: &EngineContext, stopped: &Receiver<()>, mut attempt: impl FnMut() -> ExpansionAttempt) {
    let (mut pause, mut reported) = (FIRST_PAUSE, String::new());
    while let ExpansionAttempt::Again(reason) = attempt() {
        if reason != reported {
            tracing::warn!(volume = %context.connector.volume, "the expansion waits: {reason}");
            reported.clone_from(&reason);
            context.shared.send_event(MainEvent::Expansion(ExpansionProgress::Waiting(reason)));
        }
        // A message never comes: the end of the channel is the word to stop.
        if stopped.recv_timeout(pause) != Err(RecvTimeoutError::Timeout) {
            return;
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

fn grow_replicas(context: &EngineContext) -> Result<(), String> {
    let Err(NotGrown { replica, error }) = finish(shorthorn_recovery::grow_replicas(context)) else {
        return Ok(());
    };
    if let Some(holder) = error.deposed_by() {
        context.shared.send_event(MainEvent::Deposed { holder });
    }
    Err(format!("replica {replica} does not grow: {error}"))
}
