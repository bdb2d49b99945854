//! Runs the main thread while the volume is served. It reports events, executes commands of the control
//! socket, and starts rebuild tasks for replicas outside the view.

mod commands;
mod copies;
mod copy_events;
mod expansion;
mod members;
mod moves;
mod rot_log;
mod scrub_events;
mod scrubs;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use shorthorn_control::{EnginePhase, EngineSpec, EngineStatus, GrantWanted, MemberStatus, Publisher};
use shorthorn_core::{Cause, Event, FailedRequest, PeerIndex};
use shorthorn_frontend::RefusedRequest;
use shorthorn_recovery::{DropHistory, RebuildDelay, RebuildFailures};
use shorthorn_types::limits::MAX_MEMBERS;
use shorthorn_types::{ReplicaId, View};

use crate::context::{EngineContext, PeerContext};
use crate::error::EngineError;
use crate::events::{Ending, MainEvent};
use crate::expansion::{ExpansionTask, SharedDevice};
use crate::failures::{self, DeviceError};
use crate::open::OpenedVolume;
use crate::rebuild_tasks::RebuildTasks;
use crate::scrubber::Scrubbing;
use crate::shared_core::{SharedCore, lock};
use crate::state::EngineState;
use crate::status;
use copies::Copies;
use moves::Moves;
use rot_log::RotLog;
use scrubs::Scrubs;

/// The interval of reading the progress of running copies from the core. Reading takes the core's lock, and
/// only people read the result.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The interval of checking the members that wait for a move to new addresses. Requests do not wait for a
/// move, but an old address may be removed from the host soon.
const MOVES_INTERVAL: Duration = Duration::from_millis(200);

const NO_DELAY: RebuildDelay = RebuildDelay::For(Duration::ZERO);

/// See the module.
pub struct Serving<'a> {
    spec: &'a mut EngineSpec,
    state: &'a mut EngineState,
    publisher: &'a Publisher,
    rebuild_tasks: RebuildTasks,
    device: SharedDevice,
    /// The current step of an expansion, or the last one.
    expansion: Option<ExpansionTask>,
    view: View,
    /// The view that the arbiter was asked for.
    asked: Option<View>,
    copies: Copies,
    /// For each replica, its recent drops.
    drop_histories: [DropHistory; MAX_MEMBERS],
    /// For each replica, the rebuilds that it has ended itself since it left.
    rebuild_failures: [RebuildFailures; MAX_MEMBERS],
    begun: Instant,
    /// The members whose addresses have changed.
    moves: Moves,
    scrubs: Scrubs<Scrubbing>,
    /// For each replica, the lines about rot that copies repair.
    rot_logs: [RotLog; MAX_MEMBERS],
}

impl<'a> Serving<'a> {
    /// Starts rebuild tasks for all replicas that are not in the view.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn new(
        spec: &'a mut EngineSpec,
        state: &'a mut EngineState,
        publisher: &'a Publisher,
        rebuild_tasks: RebuildTasks,
        opened: &OpenedVolume,
        device: &SharedDevice,
    ) -> Result<Serving<'a>, EngineError> {
        let now = Instant::now();
        let mut serving = Serving {
            spec,
            state,
            publisher,
            rebuild_tasks,
            device: Arc::clone(device),
            expansion: None,
            view: opened.volume.view,
            asked: None,
            copies: Copies::new(opened.unequal_bytes(), now),
            drop_histories: Default::default(),
            rebuild_failures: Default::default(),
            begun: now,
            moves: Moves::default(),
            scrubs: Scrubs::new(),
            rot_logs: Default::default(),
        };
        if let Some(bytes) = opened.unequal_bytes() {
            tracing::info!(volume = %serving.spec.volume, bytes, "resyncing the members in dirty regions");
        }
        for (index, peer) in serving.context().known_peers() {
            if !serving.view.members.contains(peer.endpoint.replica) {
                serving.rebuild_tasks.start(index, NO_DELAY)?;
            }
        }
        let device_bytes = lock(device).size_bytes();
        if device_bytes < serving.spec.size_bytes {
            // It was taken over from an earlier process.
            serving.resize_device()?;
        }
        Ok(serving)
    }

    /// Runs until the engine has to end.
    ///
    /// # Errors
    /// The reason why it cannot continue.
    pub fn run(&mut self, events: &Receiver<MainEvent>) -> Result<Ending, EngineError> {
        let ended = self.serve(events);
        self.log_all_differences();
        ended
    }

    fn serve(&mut self, events: &Receiver<MainEvent>) -> Result<Ending, EngineError> {
        let mut polled = Instant::now();
        loop {
            let has_to_poll = self.is_copying() || self.has_waiting();
            let limit = has_to_poll.then(|| POLL_INTERVAL.saturating_sub(polled.elapsed())).into_iter();
            let limit = limit.chain((!self.moves.is_idle()).then_some(MOVES_INTERVAL)).min();
            let item = match limit {
                Some(limit) => events.recv_timeout(limit),
                None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match item {
                Ok(item) => {
                    if let Some(ending) = self.take(item)? {
                        return Ok(ending);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                // The signals' thread has a sender for as long as the process lives.
                Err(RecvTimeoutError::Disconnected) => return Ok(Ending::Terminate),
            }
            if polled.elapsed() >= POLL_INTERVAL {
                polled = Instant::now();
                self.poll();
                self.add_waiting()?;
            }
            self.move_members();
        }
    }

    /// Removes the record of the device, which is gone.
    ///
    /// # Errors
    /// The state file cannot be written.
    pub fn forget_device(&mut self) -> Result<(), EngineError> {
        self.state.set_device(None)
    }

    /// Flushes every member and clears the write intent of regions that are not modified meanwhile, within
    /// `limit`. Requests continue. Returns how serving ends now, and whether it is done: another command to
    /// end that comes meanwhile ends it at once.
    ///
    /// # Errors
    /// The reason why the engine cannot continue.
    pub fn clear_all(
        &mut self,
        events: &Receiver<MainEvent>,
        ending: Ending,
        limit: Duration,
    ) -> Result<(Ending, bool), EngineError> {
        let cleared = self.wait_until_cleared(events, ending, limit);
        self.log_all_differences();
        cleared
    }

    fn wait_until_cleared(
        &mut self,
        events: &Receiver<MainEvent>,
        ending: Ending,
        limit: Duration,
    ) -> Result<(Ending, bool), EngineError> {
        if self.asked.is_some() {
            return Ok((ending, false)); // a change of the view may take long
        }
        let begin = Instant::now();
        self.shared().send_to_core(Event::ClearAll);
        let is_done = loop {
            match events.recv_timeout(limit.saturating_sub(begin.elapsed())) {
                Ok(MainEvent::ClearedAll) => break true,
                Ok(MainEvent::AskGrant { .. }) | Err(_) => break false,
                Ok(item) => match self.take(item)? {
                    None => {}
                    Some(Ending::Stop) => return Ok((Ending::Stop, false)),
                    Some(Ending::Terminate) => return Ok((ending, false)),
                },
            }
        };
        self.log_cleared(is_done, begin.elapsed());
        Ok((ending, is_done))
    }

    fn log_cleared(&self, is_done: bool, took: Duration) {
        let dirty_bytes = self.dirty_bytes();
        let (volume, took_ms) = (&self.spec.volume, took.as_millis());
        if is_done {
            tracing::info!(%volume, took_ms, dirty_bytes, "every member has flushed all writes");
        } else {
            tracing::warn!(%volume, took_ms, dirty_bytes, "not every member has flushed in time: the next \
             start resyncs dirty regions");
        }
    }

    /// Returns the bytes of the volume that may differ between members if this process ends now.
    pub fn dirty_bytes(&self) -> u64 {
        self.shared().read_core(|core| core.copy_progress().dirty_bytes)
    }

    fn is_copying(&self) -> bool {
        self.copies.is_running() || self.scrubs.is_running()
    }

    fn context(&self) -> &EngineContext {
        self.rebuild_tasks.context()
    }

    fn shared(&self) -> &SharedCore {
        &self.context().shared
    }

    fn publish(&self, change: impl FnOnce(&mut EngineStatus)) {
        status::publish(self.publisher, change);
    }

    fn publish_member(&self, replica: ReplicaId, change: impl FnOnce(&mut MemberStatus)) {
        self.publish(|engine| {
            if let Some(member) = engine.members.iter_mut().find(|member| member.replica == replica) {
                change(member);
            }
        });
    }

    fn replica(&self, peer: PeerIndex) -> Option<ReplicaId> {
        self.context().known_peer(peer).map(|peer| peer.endpoint.replica)
    }

    fn take(&mut self, events: MainEvent) -> Result<Option<Ending>, EngineError> {
        match events {
            MainEvent::Terminate => return Ok(Some(Ending::Terminate)),
            MainEvent::ControlCommand(command) => return self.execute(command),
            MainEvent::Proposed => self.rebuild_tasks.retry_now(),
            MainEvent::View(view) => self.view_changed(view)?,
            MainEvent::Dropped { peer, reason, cause } => self.dropped(peer, reason, cause)?,
            MainEvent::Awaited { peer, late_ms, is_silent } => self.awaited(peer, late_ms, is_silent),
            MainEvent::Prompt { peer } => self.prompt(peer),
            MainEvent::AskGrant { wanted } => self.ask_grant(*wanted),
            MainEvent::Rebuilt { peer } => self.rebuilt(peer),
            MainEvent::Resynced => self.resynced(),
            MainEvent::ScrubFound { range, odd, repaired } => self.scrub_found(range, &odd, repaired),
            MainEvent::RotFound { peer, range, is_copied } => self.rot_found(peer, range, is_copied),
            MainEvent::ScrubDone => self.scrub_done(),
            MainEvent::Snapshots { scrub, progress } => self.scrub_progress(scrub, progress),
            MainEvent::Rebuild { peer, progress } => self.rebuild_progress(peer, progress),
            MainEvent::Frozen(reason) => return Err(EngineError::Frozen(reason)),
            MainEvent::Deposed { holder } => {
                return Err(EngineError::Deposed { generation: self.state.generation(), holder });
            }
            MainEvent::QueueFailed { queue, reason } => {
                let source = std::io::Error::other(format!("queue {queue}: {reason}"));
                return Err(EngineError::System { action: "serving", source });
            }
            MainEvent::DeviceError(error) => self.log(error),
            MainEvent::Expanded { size_bytes } => self.expanded(size_bytes)?,
            MainEvent::Expansion(progress) => self.expansion_progress(progress),
            MainEvent::ClearedAll | MainEvent::Drained { .. } => {}
        }
        Ok(None)
    }

    /// Logs an error that the user of the device received.
    pub fn log(&self, error: DeviceError) {
        let volume = &self.spec.volume;
        match error {
            DeviceError::Failed(FailedRequest { operation, range, errno, cause, .. }) => {
                let (operation, reason) = (failures::name(operation), failures::reason(cause, errno));
                let replicas = self.names(cause);
                let (offset_bytes, length_bytes) = (range.offset(), range.length());
                tracing::error!(
                    %volume, replicas, operation, offset_bytes, length_bytes, %errno, reason,
                    "a request has failed: the user of the volume gets the error"
                );
            }
            DeviceError::Refused(RefusedRequest { operation, offset_bytes, length_bytes, errno }) => {
                let operation = operation.map_or("unknown operation", failures::name);
                tracing::warn!(
                    %volume, operation, offset_bytes, length_bytes, %errno,
                    "a request is refused: no volume of this size can do it"
                );
            }
            DeviceError::More { count } => {
                tracing::error!(
                    %volume, count, "more requests have failed or were refused than are logged one by one"
                );
            }
        }
    }

    fn names(&self, cause: Cause) -> String {
        let (Cause::Replicas(blamed) | Cause::Rot(blamed)) = cause else { return String::new() };
        let names = blamed.iter().filter_map(|peer| self.replica(peer));
        names.map(|replica| replica.to_string()).collect::<Vec<_>>().join(" ")
    }

    /// Logs the errors that still wait to be logged: the process ends.
    pub fn log_rest(&self, events: &Receiver<MainEvent>) {
        for item in events.try_iter() {
            if let MainEvent::DeviceError(error) = item {
                self.log(error);
            }
        }
    }

    fn view_changed(&mut self, view: View) -> Result<(), EngineError> {
        tracing::info!(volume = %self.spec.volume, %view, "the view has changed");
        let before = std::mem::replace(&mut self.view, view);
        self.asked = None;
        let message = status::of_serving(self.state.lost_writes());
        self.publish(|engine| {
            engine.view = Some(view);
            engine.grant_wanted = None;
            if engine.phase == EnginePhase::Frozen {
                engine.phase = EnginePhase::Serving;
                message.clone_into(&mut engine.message);
            }
        });
        for (index, _) in self.context().known_peers().iter().filter(|(_, peer)| self.is_in_view(peer)) {
            self.context().update(*index, |peer| peer.was_in_view = true);
        }
        // Too few may be left to reject members that were absent before.
        let was_away = |peer: &PeerContext| !before.members.contains(peer.endpoint.replica);
        let away = self.context().known_peers().into_iter().filter(|(_, peer)| was_away(peer));
        let needed = away.filter(|(index, _)| self.needed_beside(view.members.len(), *index));
        needed.for_each(|(index, _)| self.rebuild_tasks.end_delay(index));
        self.rebuild_tasks.retry_now();
        self.give_up_unwanted()
    }

    fn is_in_view(&self, peer: &PeerContext) -> bool {
        self.view.members.contains(peer.endpoint.replica)
    }

    fn ask_grant(&mut self, wanted: GrantWanted) {
        let view = wanted.view;
        let message =
            format!("requests wait for the arbiter's grant of view {view}, or for a replica to come back");
        tracing::warn!(
            volume = %self.spec.volume, %view,
            "only half of the replicas are left: frozen until the arbiter grants the view or another is back"
        );
        self.asked = Some(view);
        // One of the others can complete the change of the view without the arbiter, however often it was
        // late.
        self.context().known_peers().iter().for_each(|(index, _)| self.rebuild_tasks.end_delay(*index));
        self.publish(|engine| {
            engine.phase = EnginePhase::Frozen;
            engine.message = message;
            engine.grant_wanted = Some(wanted);
        });
    }
}
