//! Rebuild tasks: one thread for each replica outside the view, which rebuilds it.
//!
//! A rebuild task connects to its replica, has it store a pending view, and copies the snapshot layers to a
//! new replica. In the end it gives the connections to the queues and the replica to the core, which copies
//! the rest ([`serving_engine`]). All that uses control connections, which carry no request of a frontend.

mod layers;
mod serving_engine;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use shorthorn_core::{DropCause, PeerIndex};
use shorthorn_recovery::{BadSources, RebuildDelay, Standing, rebuild};
use shorthorn_types::ReplicaId;
use shorthorn_types::limits::MAX_MEMBERS;

use crate::connection::{ConnectError, finish};
use crate::context::EngineContext;
use crate::error::EngineError;
use crate::events::{MainEvent, RebuildProgress};

/// Between two attempts: doubled after every failure.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// The longest pause: the volume is degraded meanwhile, and an attempt costs little.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// The pause after a refusal that lasts until the operator changes something. The change is noticed soon
/// enough, and the log stays short.
const LASTING_PAUSE: Duration = Duration::from_secs(30);
/// The pause after an attempt in which no member could give a block of a snapshot; doubled with each further
/// one in a row. Each of them reads the layer with that block again.
const FIRST_UNREAD_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause. A disk that cannot read is not loaded with more reads.
const LONGEST_UNREAD_PAUSE: Duration = Duration::from_secs(300);
const STACK_BYTES: usize = 256 << 10;

/// A message from the main thread to a rebuild task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TaskCommand {
    /// The replica is not in the view: bring it back after the delay.
    Start(RebuildDelay),
    /// The reason for a pause is gone.
    EndDelay,
    /// The replica may be reachable again: try at once.
    RetryNow,
    /// The replica is given up.
    End,
}

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
        let rebuild_task = RebuildTask {
            peer,
            context: Arc::clone(&self.context),
            commands,
            pause: FIRST_PAUSE,
            cause: None,
            later: Cell::default(),
            bad_sources: BadSources::default(),
            unread: 0,
            standing: Standing::default(),
        };
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

/// The reason why an attempt did not bring the replica back.
type RebuildError = shorthorn_recovery::RebuildError<ConnectError>;

/// The thread of one replica.
#[derive(Debug)]
struct RebuildTask {
    peer: PeerIndex,
    context: Arc<EngineContext>,
    commands: Receiver<TaskCommand>,
    pause: Duration,
    /// The cause of the last failure, so that it is logged once.
    cause: Option<String>,
    /// A delay that was requested during an attempt: it begins when the attempt has failed.
    later: Cell<Option<RebuildDelay>>,
    /// Members that could not be read to bring the replica back.
    bad_sources: BadSources,
    /// The number of attempts in a row in which no member could give a block of a snapshot.
    unread: u32,
    /// The recent errors and nonsense in answers of the replica.
    standing: Standing,
}

impl RebuildTask {
    /// Runs until the replica is given up or the process ends.
    fn run(mut self) {
        while let Ok(command) = self.commands.recv() {
            let goes_on = match command {
                TaskCommand::Start(delay) => self.wait_for_delay(delay) && self.rebuild_until_done(),
                TaskCommand::RetryNow | TaskCommand::EndDelay => true,
                TaskCommand::End => false,
            };
            if !goes_on {
                return;
            }
        }
    }

    /// Waits until the replica may come back; false if the rebuild task has to end.
    fn wait_for_delay(&self, delay: RebuildDelay) -> bool {
        let until = match delay {
            RebuildDelay::For(Duration::ZERO) => return true,
            RebuildDelay::For(pause) => Instant::now().checked_add(pause),
            RebuildDelay::Out => None,
        };
        loop {
            let command = match until {
                Some(until) => self.commands.recv_timeout(until.saturating_duration_since(Instant::now())),
                None => self.commands.recv().map_err(RecvTimeoutError::from),
            };
            match command {
                Err(RecvTimeoutError::Timeout) | Ok(TaskCommand::EndDelay) => return true,
                Ok(TaskCommand::Start(_) | TaskCommand::RetryNow) => {}
                Ok(TaskCommand::End) | Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
    }

    /// Tries to bring the replica back until the core has it; false if the rebuild task has to end.
    fn rebuild_until_done(&mut self) -> bool {
        (self.pause, self.cause) = (FIRST_PAUSE, None);
        loop {
            let mut bad_sources = std::mem::take(&mut self.bad_sources);
            let rebuilt = finish(rebuild(&*self, &mut bad_sources));
            self.bad_sources = bad_sources;
            let Err(trouble) = rebuilt else {
                self.unread = 0;
                return true;
            };
            let Some(pause) = self.pause_after(trouble) else { return false };
            if let Some(delay) = self.later.take()
                && !self.wait_for_delay(delay)
            {
                return false;
            }
            if !self.wait_for_pause(pause) {
                return false;
            }
        }
    }

    /// Waits until the next attempt; false if the rebuild task has to end.
    fn wait_for_pause(&mut self, pause: Duration) -> bool {
        let until = Instant::now() + pause;
        loop {
            match self.commands.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Err(RecvTimeoutError::Timeout) => return true,
                Ok(TaskCommand::RetryNow | TaskCommand::EndDelay) => {
                    self.pause = FIRST_PAUSE;
                    return true;
                }
                // An attempt that closes connections without a use of them drops the replica too. That does not
                // end the pause after the attempt.
                Ok(TaskCommand::Start(RebuildDelay::For(Duration::ZERO))) => {}
                // It was dropped again, as a rebuilding replica.
                Ok(TaskCommand::Start(delay)) => {
                    self.pause = FIRST_PAUSE;
                    return self.wait_for_delay(delay);
                }
                Ok(TaskCommand::End) | Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
    }

    /// Shows why an attempt has failed. Returns the pause before the next one; none if the rebuild task has
    /// to end.
    fn pause_after(&mut self, trouble: RebuildError) -> Option<Duration> {
        let pause = match trouble {
            RebuildError::Ended => return None,
            RebuildError::NotYet(why) => {
                self.report(RebuildProgress::Waiting(why.to_owned()));
                self.next_pause()
            }
            RebuildError::Failed { error: ConnectError::Deposed { holder, .. }, .. }
            | RebuildError::SourceFailed { error: ConnectError::Deposed { holder, .. }, .. } => {
                self.context.shared.send_event(MainEvent::Deposed { holder });
                return None;
            }
            RebuildError::Failed { doing, error } => {
                let pause = self.failed(&format!("{doing}: {error}"), error.is_lasting());
                if error.is_of_replica() { pause.max(self.delay_of_offender()) } else { pause }
            }
            // The next attempt reads another member, if there is one.
            RebuildError::SourceFailed { source, doing, error } => {
                self.failed(&format!("{doing}: {source}: {error}"), false)
            }
            RebuildError::Unread { member, range, error } => {
                self.failed(
                    &format!(
                        "replica {member} cannot read {range} of a snapshot ({error}), and no other member \
                         has it sound. Check the disk of that replica, or restore the volume from a backup"
                    ),
                    false,
                );
                self.unread = self.unread.saturating_add(1);
                pause_after_unread(self.unread)
            }
        };
        Some(pause)
    }

    /// Shows a failure, and logs it once for each cause; returns the time to wait.
    fn failed(&mut self, message: &str, is_lasting: bool) -> Duration {
        // The progress of the attempt has taken the place of the last message.
        self.report(RebuildProgress::Waiting(message.to_owned()));
        if self.cause.as_deref() != Some(message) {
            let (volume, replica) = (&self.context.connector.volume, self.replica());
            tracing::warn!(%volume, replica, "a replica is not brought back yet: {message}");
            self.cause = Some(message.to_owned());
        }
        if is_lasting { LASTING_PAUSE } else { self.next_pause() }
    }

    /// Returns the pause for a replica that has answered with an error or nonsense. It grows each time, even
    /// if the rebuild task is sent again meanwhile.
    fn delay_of_offender(&mut self) -> Duration {
        // Starts long before the start of the process, so that the first error does not seem to follow
        // another one.
        let now = self.context.age() + Duration::from_secs(1 << 20);
        match self.standing.dropped(DropCause::Broken, now, false) {
            RebuildDelay::For(pause) => pause,
            RebuildDelay::Out => LASTING_PAUSE,
        }
    }

    fn next_pause(&mut self) -> Duration {
        let next = (self.pause * 2).min(LONGEST_PAUSE);
        std::mem::replace(&mut self.pause, next)
    }

    fn replica(&self) -> String {
        self.context.known_peer(self.peer).map(|peer| peer.endpoint.replica.to_string()).unwrap_or_default()
    }

    fn report(&self, progress: RebuildProgress) {
        self.context.shared.send_event(MainEvent::Rebuild { peer: self.peer, progress });
    }

    /// Checks between two steps whether the replica was given up meanwhile.
    fn check_commands(&self) -> Result<(), RebuildError> {
        while let Ok(command) = self.commands.try_recv() {
            match command {
                TaskCommand::End => return Err(RebuildError::Ended),
                TaskCommand::Start(delay) => self.later.set(Some(delay)),
                TaskCommand::RetryNow | TaskCommand::EndDelay => {}
            }
        }
        Ok(())
    }

    /// Does nothing for a while, unless the replica is given up.
    fn rest(&self, pause: Duration) -> Result<(), RebuildError> {
        let until = Instant::now() + pause;
        loop {
            match self.commands.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Err(RecvTimeoutError::Timeout) => return Ok(()),
                Ok(TaskCommand::End) | Err(RecvTimeoutError::Disconnected) => {
                    return Err(RebuildError::Ended);
                }
                Ok(TaskCommand::Start(delay)) => self.later.set(Some(delay)),
                Ok(TaskCommand::RetryNow | TaskCommand::EndDelay) => {}
            }
        }
    }
}

/// Returns the pause after so many attempts in a row in which no member could give a block.
fn pause_after_unread(attempts: u32) -> Duration {
    let doublings = attempts.saturating_sub(1).min(16);
    FIRST_UNREAD_PAUSE.saturating_mul(1 << doublings).min(LONGEST_UNREAD_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_after_blocks_that_no_member_can_read_grow_and_have_an_end() {
        let pauses = (1..12).map(|attempts| pause_after_unread(attempts).as_secs()).collect::<Vec<_>>();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
        assert_eq!(pause_after_unread(u32::MAX), LONGEST_UNREAD_PAUSE);
    }
}
