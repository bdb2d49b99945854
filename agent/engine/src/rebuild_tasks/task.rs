//! The thread that rebuilds one replica: its attempts, and the pauses between them.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use shorthorn_core::{DropCause, PeerIndex, PeerState};
use shorthorn_recovery::{BadSources, DropHistory, RebuildDelay, rebuild};

use crate::connection::{ConnectError, finish};
use crate::context::EngineContext;
use crate::events::{MainEvent, RebuildProgress};

/// The pause between two attempts, doubled after every failure.
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

/// A message from the main thread to a rebuild task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TaskCommand {
    /// The replica is not in the view: rebuild it after the delay.
    Start(RebuildDelay),
    /// The reason for a pause is gone.
    EndDelay,
    /// The replica may be reachable again: try at once.
    RetryNow,
    /// The replica is given up.
    End,
}

/// The reason why an attempt to rebuild the replica failed.
pub(super) type RebuildError = shorthorn_recovery::RebuildError<ConnectError>;

/// The thread of one replica.
#[derive(Debug)]
pub(super) struct RebuildTask {
    pub(super) peer: PeerIndex,
    pub(super) context: Arc<EngineContext>,
    commands: Receiver<TaskCommand>,
    pause: Duration,
    /// The cause of the last failure, so that it is logged once.
    cause: Option<String>,
    /// A delay that was requested during an attempt: it begins when the attempt has failed.
    later: Cell<Option<RebuildDelay>>,
    /// Members that could not be read for the rebuild.
    bad_sources: BadSources,
    /// The number of attempts in a row in which no member could give a block of a snapshot.
    unread: u32,
    /// The recent errors and nonsense in answers of the replica.
    drop_history: DropHistory,
    /// True if the current attempt has begun to copy.
    has_copied: Cell<bool>,
}

impl RebuildTask {
    pub fn new(peer: PeerIndex, context: Arc<EngineContext>, commands: Receiver<TaskCommand>) -> RebuildTask {
        RebuildTask {
            peer,
            context,
            commands,
            pause: FIRST_PAUSE,
            cause: None,
            later: Cell::default(),
            bad_sources: BadSources::default(),
            unread: 0,
            drop_history: DropHistory::default(),
            has_copied: Cell::default(),
        }
    }

    /// Runs until the replica is given up or the process ends.
    pub fn run(mut self) {
        while let Ok(command) = self.commands.recv() {
            let goes_on = match command {
                TaskCommand::Start(delay) => {
                    !self.is_away() || self.wait_for_delay(delay) && self.rebuild_until_done()
                }
                TaskCommand::RetryNow | TaskCommand::EndDelay => true,
                TaskCommand::End => false,
            };
            if !goes_on {
                return;
            }
        }
    }

    /// Returns true if the core does not have the replica. An attempt that closes its connections causes a
    /// command to start, and the next attempt may have succeeded before that command arrives.
    fn is_away(&self) -> bool {
        self.context.shared.read_core(|core| core.membership().state(self.peer) == PeerState::Failed)
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

    /// Tries to rebuild the replica until the core has it; false if the rebuild task has to end.
    fn rebuild_until_done(&mut self) -> bool {
        (self.pause, self.cause) = (FIRST_PAUSE, None);
        loop {
            self.has_copied.set(false);
            let mut bad_sources = std::mem::take(&mut self.bad_sources);
            let rebuilt = finish(rebuild(&*self, &mut bad_sources));
            self.bad_sources = bad_sources;
            let Err(trouble) = rebuilt else {
                self.unread = 0;
                match self.later.take() {
                    // It was dropped again meanwhile.
                    Some(delay) if self.is_away() => {
                        if self.wait_for_delay(delay) {
                            continue;
                        }
                        return false;
                    }
                    // That was about a drop before this attempt.
                    _ => return true,
                }
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
                // An attempt that closes connections without a use of them drops the replica too. The
                // pause after the attempt continues.
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
                self.report(RebuildProgress::Waiting { reason: why.to_owned(), is_of_replica: false });
                self.next_pause()
            }
            RebuildError::Failed { error: ConnectError::Deposed { holder, .. }, .. }
            | RebuildError::SourceFailed { error: ConnectError::Deposed { holder, .. }, .. } => {
                self.context.shared.send_event(MainEvent::Deposed { holder });
                return None;
            }
            RebuildError::Failed { doing, error } => {
                let is_of_replica = error.is_of_replica();
                self.failed(&format!("{doing}: {error}"), is_of_replica && self.has_copied.get());
                let pause = if error.is_lasting() { LASTING_PAUSE } else { self.next_pause() };
                if is_of_replica { pause.max(self.delay_of_offender()) } else { pause }
            }
            // The next attempt reads another member, if there is one.
            RebuildError::SourceFailed { source, doing, error } => {
                self.failed(&format!("{doing}: {source}: {error}"), false);
                self.next_pause()
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

    /// Shows a failure, and logs it once for each cause.
    fn failed(&mut self, reason: &str, is_of_replica: bool) {
        // The progress of the attempt has taken the place of the last message.
        self.report(RebuildProgress::Waiting { reason: reason.to_owned(), is_of_replica });
        if self.cause.as_deref() != Some(reason) {
            let (volume, replica) = (&self.context.connector.volume, self.replica());
            tracing::warn!(%volume, replica, "a replica is not rebuilt yet: {reason}");
            self.cause = Some(reason.to_owned());
        }
    }

    /// Returns the pause for a replica that has answered with an error or nonsense. It grows each time, even
    /// if the rebuild task is sent again meanwhile.
    fn delay_of_offender(&mut self) -> Duration {
        // Starts long before the start of the process, so that the first error does not seem to follow
        // another one.
        let now = self.context.age() + Duration::from_secs(1 << 20);
        match self.drop_history.dropped(DropCause::Broken, now, false) {
            RebuildDelay::For(pause) => pause,
            RebuildDelay::Out => LASTING_PAUSE,
        }
    }

    fn next_pause(&mut self) -> Duration {
        let next = (self.pause * 2).min(LONGEST_PAUSE);
        std::mem::replace(&mut self.pause, next)
    }

    pub(super) fn replica(&self) -> String {
        self.context.known_peer(self.peer).map(|peer| peer.endpoint.replica.to_string()).unwrap_or_default()
    }

    pub(super) fn report(&self, progress: RebuildProgress) {
        if matches!(progress, RebuildProgress::Copying { .. } | RebuildProgress::Rebuilding { .. }) {
            self.has_copied.set(true);
        }
        self.context.shared.send_event(MainEvent::Rebuild { peer: self.peer, progress });
    }

    /// Checks between two steps whether the replica was given up meanwhile.
    pub(super) fn check_commands(&self) -> Result<(), RebuildError> {
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
    pub(super) fn rest(&self, pause: Duration) -> Result<(), RebuildError> {
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

/// Returns the pause after `attempts` in a row in which no member could give a block.
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
