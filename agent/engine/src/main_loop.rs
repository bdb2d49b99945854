//! The main thread of an engine process.

use std::path::Path;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};
use shorthorn_control::{
    ControlServer, EnginePhase, EngineSpec, FrontendChoice, ProcessCommand, Publisher, ReplicaEndpoint,
    load_spec,
};
use shorthorn_core::{CoreConfig, EngineCore, FlightLimits, PeerConfig, PeerIndex};
use shorthorn_frontend::probe::{choose, probe};
use shorthorn_frontend::{
    DeviceRecord, FrontendKind, FrontendSpec, IscsiIdentity, Prepared, QueueFrontend, QueueSocket, discard,
    prepare_iscsi, prepare_nbd, prepare_socket, prepare_ublk,
};
use shorthorn_ring::{Arena, WakeReceiver, protect_allocations};
use shorthorn_types::limits::{
    BLOCK_BYTES, ENGINE_FLIGHT_BYTES_MAX, ENGINE_FLIGHT_REQUESTS_MAX, MAX_IO_BYTES, MAX_MEMBERS,
    MAX_QUEUE_DEPTH, MAX_QUEUES, MAX_VOLUME_BYTES,
};
use shorthorn_types::{Generation, VolumeName};
use shorthorn_wire::{derived_password, fingerprint};

use crate::connection::ReplicaConnection;
use crate::connector::ReplicaConnector;
use crate::context::{EngineContext, PeerContext};
use crate::copy_limits::copy_limits;
use crate::counters::{self, QueueCounters, RequestMeter};
use crate::error::EngineError;
use crate::events::{Ending, MainEvent};
use crate::expansion::SharedDevice;
use crate::handover;
use crate::open::{OpenResult, OpenedVolume, Opener};
use crate::queue::Queue;
use crate::queue_link::{LinkSlots, QueueLink};
use crate::rebuild_tasks::RebuildTasks;
use crate::serving::Serving;
use crate::shared_core::{SharedCore, boot_time_ms, lock};
use crate::state::EngineState;
use crate::status::{self, Meter, publish};

/// Slots of queue 0 for copies and checks, each with a buffer of [`MAX_IO_BYTES`]. With this number in
/// flight, the latency of a replica across a network does not limit the speed of a copy.
pub(crate) const COPY_SLOTS: u16 = 8;
/// The amount that may always be left to resync after a crash: a few seconds' work. Requests for other
/// regions do not wait for it.
const INTENT_KEEP_BYTES: u64 = 1 << 30;
/// The time limit for replicas that do not answer PING, if the others cannot continue without them, and for
/// storing a view: see `shorthorn_core::replica_timeouts`. After that the next start may find other replicas.
const LATE_LIMIT_MS: u64 = 60_000;
/// The limits of the requests that a replica handles at once. More requests would wait in sockets, in front
/// of PINGs and proposals.
const FLIGHT_LIMITS: FlightLimits =
    FlightLimits { bytes: ENGINE_FLIGHT_BYTES_MAX, requests: ENGINE_FLIGHT_REQUESTS_MAX };
/// The time limit for answers to the requests in flight when the process ends. The next process answers
/// requests that wait for an unresponsive replica.
const DRAIN_LIMIT: Duration = Duration::from_secs(5);
/// The time limit for the flush of the members at the end of an engine. A flush usually takes less, and
/// callers that stop an engine wait longer.
const CLEAR_LIMIT: Duration = Duration::from_secs(5);
/// The same time limit while requests wait for the next process, which resyncs the regions that stay dirty.
const CLEAR_DRAINED_LIMIT: Duration = Duration::from_millis(50);
/// The maximum that the next process may have to resync: eight regions of a small volume.
const LEFT_DIRTY_MAX_BYTES: u64 = 512 << 10;

/// The way in which an engine process has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// A command stopped it for good: its device is gone.
    Stopped,
    /// The next process continues: the kernel still has the device, and its requests wait.
    LeftToNext,
}

/// Runs the engine that `spec_file` describes until a signal or a client of the control socket ends it.
/// SIGTERM and SIGINT leave a device of the kernel to the next process; a command to stop removes it.
///
/// # Errors
/// The reason why it cannot start or continue. After [`EngineError::Frozen`] a new start waits for the
/// replicas; after [`EngineError::Deposed`] the engine must not start again.
pub fn run(spec_file: &Path) -> Result<Ended, EngineError> {
    let begin = Instant::now();
    let mut spec: EngineSpec = load_spec(spec_file)?;
    check(&spec)?;
    // Lines logged on this thread without the field volume get it from here.
    let _in = tracing::info_span!("engine", volume = %spec.volume).entered();
    // Set before any thread is started: each thread takes part in serving the device, rebuild tasks too.
    if let Some(error) = protect_allocations() {
        tracing::warn!(
            volume = %spec.volume,
            %error,
            "PR_SET_IO_FLUSHER failed: the volume may stall when memory runs out"
        );
    }
    let (sender, events) = mpsc::channel();
    watch_signals(sender.clone())?;
    let state = EngineState::open(&spec.state_file, spec.attach, spec.continues)?;
    let sockets = handover::take_over(state.predecessor());
    if let Some(record) = state.device().filter(|record| record.kind != FrontendKind::Socket) {
        // A device that is recovered keeps its queues.
        (spec.queues, spec.depth) = (record.queues, record.depth);
    } else {
        spec.queues = queues_on(planned(spec.frontend), spec.queues);
    }
    let commands = sender.clone();
    let (_server, publisher) =
        ControlServer::start(&spec.control_socket, status::first(&spec, &state), move |command| {
            // The receiver is gone when the process is ending already.
            let _ = commands.send(MainEvent::ControlCommand(command));
        })
        .map_err(EngineError::system("binding the control socket"))?;
    let result = EngineProcess { begin, spec, state, sockets, publisher: &publisher, sender, events }.run();
    if let Err(error) = &result {
        publish(&publisher, |engine| {
            engine.phase = phase_after(error).unwrap_or(engine.phase);
            engine.message = error.to_string();
        });
    }
    result
}

/// Returns the phase in which a process ends with `error`. After an error without one, the service manager
/// starts the next process of this attachment, which continues with the device.
fn phase_after(error: &EngineError) -> Option<EnginePhase> {
    match error {
        EngineError::Frozen(_) => Some(EnginePhase::Frozen),
        EngineError::Deposed { .. } => Some(EnginePhase::Stopped),
        _ => None,
    }
}

fn check(spec: &EngineSpec) -> Result<(), EngineError> {
    let bad = |reason: String| Err(EngineError::BadSpec { volume: spec.volume.clone(), reason });
    if spec.size_bytes == 0 || !spec.size_bytes.is_multiple_of(BLOCK_BYTES) {
        return bad(format!("size_bytes {} is not a multiple of {BLOCK_BYTES}", spec.size_bytes));
    }
    if spec.size_bytes > MAX_VOLUME_BYTES {
        return bad(format!("size_bytes {}: at most {MAX_VOLUME_BYTES}", spec.size_bytes));
    }
    if let Err(reason) = status::check_replicas(&spec.replicas) {
        return bad(reason);
    }
    if spec.queues == 0 || spec.queues > MAX_QUEUES {
        return bad(format!("queues {}: 1 to {MAX_QUEUES}", spec.queues));
    }
    if spec.depth == 0 || spec.depth > MAX_QUEUE_DEPTH {
        return bad(format!("depth {}: 1 to {MAX_QUEUE_DEPTH}", spec.depth));
    }
    if spec.attach == 0 {
        return bad("attach 0: the first attachment has number 1".to_owned());
    }
    Ok(())
}

/// Returns the frontend of a new device, if one is possible.
fn planned(choice: FrontendChoice) -> Option<FrontendKind> {
    match choice {
        FrontendChoice::Socket => Some(FrontendKind::Socket),
        FrontendChoice::Ublk => Some(FrontendKind::Ublk),
        FrontendChoice::Nbd => Some(FrontendKind::Nbd),
        FrontendChoice::Iscsi => Some(FrontendKind::Iscsi),
        // If the host has no driver, making the device fails with that error.
        FrontendChoice::Auto => choose(None, &probe()).ok(),
    }
}

/// Returns the number of queues of a new device. NBD has one queue: with several sockets, the kernel closes a
/// socket whose requests take 15 s, and sends them over another one. The engine may read an old copy of a
/// write from the first one later, when a newer write is acknowledged already. iSCSI has one queue too,
/// because the file of its target has one descriptor.
fn queues_on(kind: Option<FrontendKind>, wanted: u16) -> u16 {
    match kind {
        Some(FrontendKind::Nbd | FrontendKind::Iscsi) => 1,
        _ => wanted,
    }
}

/// Signals are taken by a thread of their own, so that the main thread waits for one thing only.
fn watch_signals(events: Sender<MainEvent>) -> Result<(), EngineError> {
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
    let system =
        |errno: nix::errno::Errno| EngineError::System { action: "blocking signals", source: errno.into() };
    signals.thread_block().map_err(system)?;
    let wait = move || {
        while signals.wait().is_ok() {
            if events.send(MainEvent::Terminate).is_err() {
                return;
            }
        }
    };
    thread::Builder::new()
        .name("signals".into())
        .spawn(wait)
        .map(drop)
        .map_err(EngineError::system("starting a thread"))
}

/// An engine process from the reading of its spec to its end.
struct EngineProcess<'a> {
    begin: Instant,
    spec: EngineSpec,
    state: EngineState,
    /// Sockets from the previous process that the frontend has not taken yet.
    sockets: Vec<QueueSocket>,
    publisher: &'a Publisher,
    sender: Sender<MainEvent>,
    events: Receiver<MainEvent>,
}

impl EngineProcess<'_> {
    fn run(mut self) -> Result<Ended, EngineError> {
        let begun_ms = boot_time_ms();
        let mut opened = match self.open()? {
            Ok(opened) => *opened,
            Err(ended) => return Ok(ended),
        };
        self.show_opened(&opened);
        let opened_ms = self.begin.elapsed().as_millis();
        let Prepared { queues, mut device } =
            prepare_frontend(&self.spec, &self.state, &opened, std::mem::take(&mut self.sockets))?;
        // The device is recorded before it can be used: if this process dies from here on, the next one
        // recovers the device.
        self.state.record_live_device(device.record())?;
        let prepared_ms = self.begin.elapsed().as_millis();
        let record = device.record();
        // The kernel may grant fewer than were requested. Rebuild tasks connect each queue.
        (self.spec.queues, self.spec.depth) = (record.queues, record.depth);
        let counters: Vec<Arc<QueueCounters>> = queues.iter().map(|_| Arc::default()).collect();
        let (shared, threads) =
            start_queues(&self.spec, &mut opened, queues, &counters, &record, begun_ms, self.sender.clone())?;
        self.publisher.count_with(move || counters::sum(&counters));
        let endpoint = device.go_live()?;
        // Some kernels give the device its number only now.
        self.state.set_device(Some(device.record()))?;
        let (volume, live_ms) = (&self.spec.volume, self.begin.elapsed().as_millis());
        tracing::info!(%volume, endpoint = %endpoint.display(), opened_ms, prepared_ms, live_ms, "serving");
        publish(self.publisher, |engine| {
            engine.frontend = Some(record.kind.into());
            engine.endpoint = Some(endpoint);
            engine.device = device.number().map(|number| number.to_string());
            engine.size_bytes = device.size_bytes();
            engine.resync = opened.unequal_bytes().map(|bytes| Meter::new(bytes, self.begin).status());
            engine.phase = EnginePhase::Serving;
        });
        notify_systemd(sd_notify::NotifyState::Ready);
        self.serve_and_end(&opened, &Arc::new(Mutex::new(device)), &shared, threads)
    }

    /// Opens the volume. The inner error is the end of a process that has to end before that.
    fn open(&mut self) -> Result<Result<Box<OpenedVolume>, Ended>, EngineError> {
        let opener = Opener {
            spec: &mut self.spec,
            state: &mut self.state,
            publisher: self.publisher,
            events: &self.events,
            expand_to_bytes: None,
        };
        let opening = opener.run();
        if self.state.device().is_none() {
            self.sockets.clear(); // they are of a device that does not continue
        }
        if let Err(EngineError::Deposed { .. }) = &opening
            && let Err(error) = self.discard_device()
        {
            let volume = &self.spec.volume;
            tracing::warn!(%volume, %error, "cannot remove the device of a deposed engine");
        }
        let opened = match opening? {
            OpenResult::Open(opened) => opened,
            OpenResult::Ended(Ending::Stop) => {
                self.discard_device()?;
                return Ok(Err(Ended::Stopped));
            }
            OpenResult::Ended(Ending::Terminate) => {
                if self.spec.frontend == FrontendChoice::Socket {
                    self.discard_device()?;
                } else {
                    // No request was read from them: the next process can use them.
                    handover::hand_over(self.state.generation(), std::mem::take(&mut self.sockets));
                }
                return Ok(Err(Ended::LeftToNext));
            }
        };
        Ok(Ok(opened))
    }

    /// Shows the opened volume, and lets the main thread execute a command that had to wait for it.
    fn show_opened(&self, opened: &OpenedVolume) {
        publish(self.publisher, |engine| {
            engine.generation = opened.volume.view.id.generation;
            engine.view = Some(opened.volume.view);
            engine.members.clone_from(&opened.members);
            status::of_serving(opened.lost_writes).clone_into(&mut engine.message);
        });
        if let Some(size_bytes) = opened.expand_to_bytes {
            // The receiver is ours: it cannot be gone.
            let _ = self.sender.send(MainEvent::ControlCommand(ProcessCommand::Expand { size_bytes }));
        }
    }

    fn serve_and_end(
        mut self,
        opened: &OpenedVolume,
        device: &SharedDevice,
        shared: &Arc<SharedCore>,
        threads: Threads,
    ) -> Result<Ended, EngineError> {
        let context = context(&self.spec, opened, Arc::clone(shared));
        let may_be_left = self.spec.frontend != FrontendChoice::Socket;
        let (volume, generation) = (self.spec.volume.clone(), self.state.generation());
        let mut serving = Serving::new(
            &mut self.spec,
            &mut self.state,
            self.publisher,
            RebuildTasks::new(Arc::new(context)),
            opened,
            device,
        )?;
        let ending = serving.run(&self.events).inspect_err(|_| serving.log_rest(&self.events))?;
        notify_systemd(sd_notify::NotifyState::Stopping);
        publish(self.publisher, |engine| engine.phase = EnginePhase::Stopping);
        // Requests continue meanwhile: the next process finds little to resync, and no request waits for
        // that.
        let (ending, is_cleared) = serving.clear_all(&self.events, ending, CLEAR_LIMIT)?;
        if ending == Ending::Terminate && may_be_left && !lock(device).ends_with_host() {
            let sockets = drain(&serving, (&volume, generation), &self.events, shared, threads.len())?;
            // Much was written since: one more flush takes less time than requests would wait for copies.
            if is_cleared && serving.dirty_bytes() > LEFT_DIRTY_MAX_BYTES {
                serving.clear_all(&self.events, ending, CLEAR_DRAINED_LIMIT)?;
            }
            handover::hand_over(generation, sockets);
        } else {
            lock(device).stop()?;
            serving.forget_device()?;
            // No request modifies data any more, so the regions of the last modifications can be cleared too.
            if is_cleared && let Err(error) = serving.clear_all(&self.events, ending, CLEAR_LIMIT) {
                tracing::warn!(%volume, %error, "the members could not flush the last writes");
            }
        }
        shared.stop();
        for thread in threads {
            // A queue thread that panicked has taken the process with it.
            let _ = thread.join();
        }
        serving.log_rest(&self.events);
        let ended = if ending == Ending::Stop { Ended::Stopped } else { Ended::LeftToNext };
        tracing::info!(%volume, ?ended, "ended");
        Ok(ended)
    }

    /// Removes a device that an earlier process has left, if no other one follows.
    fn discard_device(&mut self) -> Result<(), EngineError> {
        let (volume, device_dir) = (&self.spec.volume, &self.spec.device_dir);
        match self.state.device().map(|record| record.kind) {
            Some(FrontendKind::Ublk | FrontendKind::Nbd | FrontendKind::Iscsi) => {
                discard(volume, device_dir)?
            }
            Some(FrontendKind::Socket) | None => return Ok(()),
        }
        self.state.set_device(None)
    }
}

/// Lets the queues answer the requests in flight that can be answered soon. The kernel gives the others, and
/// all later ones, to the next process. Returns the sockets that the next process can continue with.
fn drain(
    serving: &Serving<'_>,
    (volume, generation): (&VolumeName, Generation),
    events: &Receiver<MainEvent>,
    shared: &SharedCore,
    queues: usize,
) -> Result<Vec<QueueSocket>, EngineError> {
    let begin = Instant::now();
    shared.drain();
    let mut drained = 0;
    let mut sockets = Vec::new();
    while drained < queues {
        match events.recv_timeout(DRAIN_LIMIT.saturating_sub(begin.elapsed())) {
            Ok(MainEvent::Drained { queue, socket }) => {
                drained += 1;
                sockets.extend(socket.map(|socket| QueueSocket { queue, socket }));
            }
            Ok(MainEvent::Deposed { holder }) => {
                return Err(EngineError::Deposed { generation, holder });
            }
            Ok(MainEvent::QueueFailed { queue, reason }) => {
                tracing::warn!(
                    %volume,
                    queue,
                    reason,
                    "a queue has failed: its requests are left to the next process"
                );
                return Ok(sockets);
            }
            Ok(MainEvent::DeviceError(error)) => serving.log(error),
            Ok(_) => {}
            Err(_) => {
                tracing::warn!(%volume, "requests in flight are left to the next process");
                return Ok(sockets);
            }
        }
    }
    let drained_ms = begin.elapsed().as_millis();
    tracing::info!(%volume, drained_ms, "every request is answered, the device is left to the next process");
    Ok(sockets)
}

fn notify_systemd(state: sd_notify::NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "cannot report the engine's state to systemd");
    }
}

fn prepare_frontend(
    spec: &EngineSpec,
    state: &EngineState,
    opened: &OpenedVolume,
    sockets: Vec<QueueSocket>,
) -> Result<Prepared, EngineError> {
    let previous = state.device().cloned();
    let kind = match (&previous, spec.frontend) {
        (Some(record), _) if record.kind != FrontendKind::Socket => record.kind,
        (_, FrontendChoice::Socket) => FrontendKind::Socket,
        (_, FrontendChoice::Auto) => choose(None, &probe())?,
        (_, FrontendChoice::Ublk) => choose(Some(FrontendKind::Ublk), &probe())?,
        (_, FrontendChoice::Nbd) => choose(Some(FrontendKind::Nbd), &probe())?,
        (_, FrontendChoice::Iscsi) => choose(Some(FrontendKind::Iscsi), &probe())?,
    };
    let frontend = FrontendSpec {
        volume: spec.volume.clone(),
        size_bytes: spec.size_bytes,
        queues: spec.queues,
        depth: spec.depth,
        socket_path: spec.frontend_socket.clone(),
        device_dir: spec.device_dir.clone(),
        previous: previous.filter(|record| record.kind == kind),
        refuses_requests: opened.lost_writes,
    };
    Ok(match kind {
        FrontendKind::Ublk => prepare_ublk(&frontend)?,
        FrontendKind::Nbd => prepare_nbd(&frontend, sockets)?,
        FrontendKind::Iscsi => prepare_iscsi(&frontend, identity(spec), sockets)?,
        FrontendKind::Socket => prepare_socket(&frontend)?,
    })
}

/// Returns the names and the passwords of the volume's iSCSI target: the same for every engine of it.
fn identity(spec: &EngineSpec) -> IscsiIdentity {
    let secret = spec.secret.bytes();
    IscsiIdentity {
        password: derived_password(secret, "iscsi"),
        target_password: derived_password(secret, "iscsi-target"),
        disk_id: fingerprint(secret),
    }
}

type Threads = Vec<thread::JoinHandle<()>>;

fn start_queues(
    spec: &EngineSpec,
    opened: &mut OpenedVolume,
    frontends: Vec<Box<dyn QueueFrontend>>,
    counters: &[Arc<QueueCounters>],
    record: &DeviceRecord,
    begun_ms: u64,
    events: Sender<MainEvent>,
) -> Result<(Arc<SharedCore>, Threads), EngineError> {
    let mut core = EngineCore::new(&core_config(spec, opened, record));
    let unknown = (0..).zip(&opened.volume.is_out_of_sync_complete).filter(|(_, is_complete)| !**is_complete);
    unknown.for_each(|(peer, _)| core.distrust(peer));
    let pairs = frontends.iter().map(|_| WakeReceiver::new()).collect::<Result<Vec<_>, _>>();
    let (wakes, wakers): (Vec<WakeReceiver>, Vec<_>) =
        pairs.map_err(EngineError::system("eventfd"))?.into_iter().unzip();
    let shared = Arc::new(SharedCore::new(core, wakers, events, begun_ms));
    let mut connections: Vec<_> =
        std::mem::take(&mut opened.volume.connections).into_iter().map(Vec::into_iter).collect();
    let mut threads = Vec::new();
    for (((frontend, wake), counters), index) in frontends.into_iter().zip(wakes).zip(counters).zip(0u16..) {
        let slots = LinkSlots { depth: record.depth, copies: if index == 0 { COPY_SLOTS } else { 0 } };
        let mine = connections.iter_mut().map(Iterator::next).collect();
        let queue = Queue {
            index,
            depth: slots.depth,
            arena: Arena::new(usize::from(slots.depth + slots.copies), MAX_IO_BYTES as usize)
                .map_err(EngineError::system("mmap"))?,
            wake,
            links: links(&shared, index, opened.volume.view.id.generation, slots, mine)
                .map_err(EngineError::system("taking over a connection"))?,
            frontend,
            shared: Arc::clone(&shared),
            meter: RequestMeter::new(Arc::clone(counters), slots.depth),
        };
        let builder = thread::Builder::new().name(format!("queue-{index}")).stack_size(256 << 10);
        let span = tracing::Span::current();
        let serve = move || span.in_scope(|| queue.serve());
        threads.push(builder.spawn(serve).map_err(EngineError::system("starting a thread"))?);
    }
    Ok((shared, threads))
}

fn core_config(spec: &EngineSpec, opened: &OpenedVolume, record: &DeviceRecord) -> CoreConfig {
    let peer = |endpoint: &ReplicaEndpoint| PeerConfig { replica: endpoint.replica, local: endpoint.local };
    CoreConfig {
        queues: record.queues,
        depth: record.depth,
        peers: spec.replicas.iter().map(peer).collect(),
        view: opened.volume.view,
        replica_timeout_ms: u64::from(spec.replica_timeout_ms),
        late_limit_ms: LATE_LIMIT_MS,
        flight_limits: FLIGHT_LIMITS,
        size_bytes: spec.size_bytes,
        dirty: opened.volume.dirty.clone(),
        resync_sources: opened.volume.resync_sources.clone(),
        out_of_sync: opened.volume.out_of_sync.clone(),
        stamp: opened.volume.stamp,
        out_of_sync_stamps: opened.volume.out_of_sync_stamps.clone(),
        copy_slots: COPY_SLOTS,
        copy_limits: copy_limits(spec.rebuild),
        intent_interval_ms: spec.intent_clear_after_ms.map(u64::from),
        intent_keep_bytes: INTENT_KEEP_BYTES,
        verify_reads: spec.verify_reads,
        refuses_requests: opened.lost_writes,
    }
}

/// Returns the links of one queue, one for each of the [`MAX_MEMBERS`] places of replicas.
fn links(
    shared: &SharedCore,
    queue: u16,
    generation: Generation,
    slots: LinkSlots,
    connections: Vec<Option<ReplicaConnection>>,
) -> std::io::Result<Vec<QueueLink>> {
    let peers = (0..).take(MAX_MEMBERS).zip(connections.into_iter().chain(std::iter::repeat_with(|| None)));
    let link = |(peer, connection): (PeerIndex, Option<ReplicaConnection>)| {
        let mut link = QueueLink::new(peer, queue, generation, slots);
        if let Some(connection) = connection {
            link.connect(connection.into_ready()?);
            shared.set_connected(queue, peer, true);
        }
        Ok(link)
    };
    peers.map(link).collect()
}

/// Collects the shared state of the rebuild tasks.
fn context(spec: &EngineSpec, opened: &OpenedVolume, shared: Arc<SharedCore>) -> EngineContext {
    let complete = opened.volume.is_out_of_sync_complete.iter().copied().chain(std::iter::repeat(false));
    let runs = opened.volume.runs.iter().copied().chain(std::iter::repeat(None));
    let peer = |((endpoint, is_complete), run): ((&ReplicaEndpoint, bool), Option<u64>)| PeerContext {
        run,
        endpoint: endpoint.clone(),
        is_complete,
        was_in_view: true,
        last_view: Some(opened.volume.last_view).filter(|view| view.members.contains(endpoint.replica)),
    };
    let peers = spec.replicas.iter().zip(complete).zip(runs).map(peer).collect();
    let context = EngineContext::new(
        ReplicaConnector::new(spec, opened.volume.view.id.generation),
        spec.queues,
        shared,
        peers,
    );
    context.limit(copy_limits(spec.rebuild).bytes_per_s);
    context
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The controller attaches a stopped engine anew, by the next number.
    #[test]
    fn only_a_deposed_engine_ends_for_good() {
        let generation = Generation::new(1, 0);
        let deposed = EngineError::Deposed { generation, holder: Generation::new(2, 0) };
        assert_eq!(phase_after(&deposed), Some(EnginePhase::Stopped));
        assert_eq!(phase_after(&EngineError::Frozen(String::new())), Some(EnginePhase::Frozen));
        let passing = EngineError::system("starting a thread")(std::io::Error::other("EAGAIN"));
        assert_eq!(phase_after(&passing), None);
    }

    #[test]
    fn a_new_device_of_nbd_or_iscsi_has_one_queue() {
        let planned_queues = |choice| queues_on(planned(choice), 4);
        assert_eq!(planned_queues(FrontendChoice::Nbd), 1);
        assert_eq!(planned_queues(FrontendChoice::Iscsi), 1);
        assert_eq!(planned_queues(FrontendChoice::Ublk), 4);
        assert_eq!(planned_queues(FrontendChoice::Socket), 4);
    }
}
