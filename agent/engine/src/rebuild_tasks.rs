//! Rebuild tasks: one thread for each replica outside the view, which rebuilds it.
//!
//! A rebuild task ([`task`]) connects to its replica, has it store a pending view, and copies the snapshot
//! layers to a new replica ([`layers`]). In the end it gives the connections to the queues and the replica to
//! the core, which copies the rest ([`serving_engine`]). All that uses control connections, which carry no
//! request of a frontend. The order of the steps is in `shorthorn_recovery::rebuild`.

mod layers;
mod serving_engine;
mod task;

use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread;

use shorthorn_core::PeerIndex;
use shorthorn_recovery::RebuildDelay;
use shorthorn_types::ReplicaId;
use shorthorn_types::limits::MAX_MEMBERS;

use crate::connection::finish;
use crate::context::EngineContext;
use crate::error::EngineError;
use task::{RebuildTask, TaskCommand};

const STACK_BYTES: usize = 256 << 10;

/// Starts rebuild tasks and talks to them; on the main thread.
#[derive(Debug)]
pub struct RebuildTasks {
    context: Arc<EngineContext>,
    commands: Vec<Option<Sender<TaskCommand>>>,
}

impl RebuildTasks {
    pub fn new(context: Arc<EngineContext>) -> RebuildTasks {
        RebuildTasks { context, commands: (0..MAX_MEMBERS).map(|_| None).collect() }
    }

    /// Returns the state that the rebuild tasks share.
    pub fn context(&self) -> &Arc<EngineContext> {
        &self.context
    }

    /// Brings replica number `peer` back after `delay`.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn start(&mut self, peer: PeerIndex, delay: RebuildDelay) -> Result<(), EngineError> {
        let entry = &mut self.commands[usize::from(peer)];
        if let Some(commands) = entry
            && commands.send(TaskCommand::Start(delay)).is_ok()
        {
            return Ok(());
        }
        let (sender, commands) = mpsc::channel();
        // The receiver is in our hands: it cannot be gone.
        let _ = sender.send(TaskCommand::Start(delay));
        *entry = Some(sender);
        let rebuild_task = RebuildTask::new(peer, Arc::clone(&self.context), commands);
        self.context.set_running(peer, true);
        let context = Arc::clone(&self.context);
        let spawned = spawn(format!("rebuild-{peer}"), move || {
            rebuild_task.run();
            context.set_running(peer, false);
        });
        spawned.inspect_err(|_| self.context.set_running(peer, false))
    }

    /// Lets all rebuild tasks try at once after a change.
    pub fn retry_now(&self) {
        for commands in self.commands.iter().flatten() {
            // A rebuild task that has ended needs no message.
            let _ = commands.send(TaskCommand::RetryNow);
        }
    }

    /// Lets replica number `peer` come back at once, however often it was dropped.
    pub fn end_delay(&self, peer: PeerIndex) {
        if let Some(Some(commands)) = self.commands.get(usize::from(peer)) {
            let _ = commands.send(TaskCommand::EndDelay);
        }
    }

    /// Gives replica number `peer` up: ends its rebuild task, and makes the members forget its out-of-sync
    /// set.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn give_up(&mut self, peer: PeerIndex, replica: ReplicaId) -> Result<(), EngineError> {
        if let Some(commands) = self.commands[usize::from(peer)].take() {
            // It may have ended by itself.
            let _ = commands.send(TaskCommand::End);
        }
        self.context.set(peer, None);
        let context = Arc::clone(&self.context);
        spawn("forget".to_owned(), move || forget(&context, replica))
    }
}

fn spawn(name: String, body: impl FnOnce() + Send + 'static) -> Result<(), EngineError> {
    let builder = thread::Builder::new().name(name).stack_size(STACK_BYTES);
    builder.spawn(body).map(drop).map_err(EngineError::system("starting a thread"))
}

/// Makes the members forget the out-of-sync set of a replica that is given up.
fn forget(context: &EngineContext, replica: ReplicaId) {
    for (member, error) in finish(shorthorn_recovery::give_up(context)) {
        tracing::warn!(volume = %context.connector.volume, %replica, %member, %error, "a member still has \
                                                                                       the out-of-sync set \
                                                                                       of a removed replica");
    }
}
