use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use nix::sys::signalfd::SignalFd;
use shorthorn_control::{
    EngineSpec, FrontendChoice, ProcessCommand, ProcessStatus, RebuildLimits, ReplicaEndpoint, ReplicaSpec,
    Unknown, load_spec, store_spec, update_spec,
};
use shorthorn_types::status::Frontend;
use shorthorn_types::{Members, ReplicaId};

use crate::cli::RunArgs;
use crate::roles::STOPPED;
use crate::run::announce::{Pids, ReadyAnnouncement, ReadyReplica, nbd_uri};
use crate::run::events::{self, SupervisorEvent};
use crate::run::process::{ProcessRole, VolumeProcess};
use crate::run::runtime::RuntimeDir;
use crate::run::volume::{VolumeDir, private_dir};
use crate::run::{RunError, dies_with_supervisor};

/// The number of failures after which a volume that was ready before does not wait for a replica any longer.
/// The engine can do without it.
const REPLICA_TRIES: u32 = 2;

/// All processes of a volume; the engine is the last.
#[derive(Debug)]
pub struct Supervisor {
    volume: VolumeDir,
    processes: Vec<VolumeProcess>,
    events: Receiver<SupervisorEvent>,
    ready_limit: Duration,
    announced: bool,
}

impl Supervisor {
    /// Writes the specs of all processes; starts none.
    pub fn new(
        args: &RunArgs,
        volume: VolumeDir,
        runtime: RuntimeDir,
        signals: SignalFd,
    ) -> Result<Supervisor, RunError> {
        let (sender, events) = sync_channel(events::QUEUE);
        events::forward_signals(signals, sender.clone())?;
        private_dir(&volume.path().join("replicas"))?;
        let with_parent = dies_with_supervisor(args.frontend.into());
        let mut processes = Vec::new();
        for (index, id) in volume.file().replicas.iter().copied().enumerate() {
            let files = runtime.replica(id);
            let process =
                VolumeProcess::new(ProcessRole::Replica(id), index, files, with_parent, sender.clone());
            store_spec(&process.files.spec, &replica_spec(args, &volume, &process, id)?)?;
            processes.push(process);
        }
        let index = processes.len();
        let engine = VolumeProcess::new(ProcessRole::Engine, index, runtime.engine(), with_parent, sender);
        store_spec(&engine.files.spec, &engine_spec(args, &volume, &engine, &processes))?;
        processes.push(engine);
        let ready_limit = Duration::from_secs(args.ready_timeout);
        Ok(Supervisor { volume, processes, events, ready_limit, announced: false })
    }

    /// Runs all processes until they are stopped, or cannot continue.
    pub fn run(mut self) -> Result<(), RunError> {
        let served = self.serve();
        let stopped = self.stop();
        served.and(stopped)
    }

    fn serve(&mut self) -> Result<(), RunError> {
        let deadline = Instant::now() + self.ready_limit;
        let (engine, replicas) = self.processes.split_last_mut().expect("the engine is always there");
        debug_assert_eq!(engine.role, ProcessRole::Engine);
        for replica in replicas {
            replica.start()?;
        }
        loop {
            match self.next_event(deadline)? {
                Some(SupervisorEvent::Stop) => return Ok(()),
                Some(SupervisorEvent::Handover) => self.hand_over(),
                Some(SupervisorEvent::Child) => self.reap()?,
                Some(SupervisorEvent::Status(process, start, status)) => {
                    self.processes[process].take(start, *status)
                }
                None => {}
            }
            self.start_due_processes()?;
            self.announce_if_ready()?;
            if !self.announced && Instant::now() >= deadline {
                return Err(self.not_ready());
            }
        }
    }

    /// Returns the next event; none if an action has become due instead.
    fn next_event(&self, deadline: Instant) -> Result<Option<SupervisorEvent>, RunError> {
        let due = self.processes.iter().filter_map(VolumeProcess::deadline);
        let due = due.chain((!self.announced).then_some(deadline)).min();
        let received = match due {
            None => self.events.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(due) => self.events.recv_timeout(due.saturating_duration_since(Instant::now())),
        };
        match received {
            Ok(event) => Ok(Some(event)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            // Each process has a sender of its own.
            Err(RecvTimeoutError::Disconnected) => unreachable!("the channel of events is closed"),
        }
    }

    fn reap(&mut self) -> Result<(), RunError> {
        let may_lose_replicas = self.volume.file().initialised;
        for process in &mut self.processes {
            let Some((_, message)) = process.ended()? else { continue };
            let replaceable = may_lose_replicas && process.role != ProcessRole::Engine;
            if !self.announced && !replaceable {
                return Err(RunError::Ended { role: process.role.to_string(), message });
            }
            tracing::warn!(
                role = %process.role,
                failures = process.failures(),
                "ended, starting it again: {message}"
            );
        }
        Ok(())
    }

    /// Has the engine leave its device to a new process, which is started when it has ended. An engine that
    /// does not take the request continues to serve, and gets no signal.
    fn hand_over(&self) {
        let Some(engine) = self.processes.last() else { return };
        tracing::info!("a new process replaces the engine");
        if let Err(error) = engine.request(&ProcessCommand::Handover) {
            tracing::warn!("cannot send a command to the engine: {error}");
        }
    }

    fn start_due_processes(&mut self) -> Result<(), RunError> {
        for process in &mut self.processes {
            process.act_if_due()?;
        }
        let (engine, replicas) = self.processes.split_last_mut().expect("the engine is always there");
        let is_final = |replica: &VolumeProcess| replica.serves() || replica.failures() >= REPLICA_TRIES;
        if !engine.is_idle() || !replicas.iter().all(is_final) {
            return Ok(());
        }
        if !replicas.iter().any(VolumeProcess::serves) {
            return Err(RunError::NoReplica(troubles(replicas)));
        }
        let opened_for = replicas.iter().filter_map(|replica| match &replica.status {
            Some(ProcessStatus::Replica(status)) => status.generation.map(|generation| generation.attach),
            _ => None,
        });
        if self.volume.raise_attach_above(opened_for.max().unwrap_or_default())? {
            let attach = self.volume.file().attach;
            tracing::warn!(
                attach,
                "volume.json is older than the replicas: the next attachment is above theirs"
            );
            update_spec(&engine.files.spec, &EngineSpec { attach, ..load_spec(&engine.files.spec)? })?;
        }
        engine.start()
    }

    fn announce_if_ready(&mut self) -> Result<(), RunError> {
        let (engine, replicas) = self.processes.split_last().expect("the engine is always there");
        if self.announced || !engine.serves() {
            return Ok(());
        }
        let Some(ProcessStatus::Engine(status)) = &engine.status else { return Ok(()) };
        let (frontend, endpoint) = (status.frontend, status.endpoint.clone());
        let is_socket = frontend == Some(Frontend::Socket);
        let socket = endpoint.clone().filter(|_| is_socket);
        let name = self.volume.file().name.clone();
        let ready = ReadyAnnouncement {
            device: endpoint.filter(|_| !is_socket),
            uri: socket.as_deref().map(|socket| nbd_uri(&name, socket)),
            socket,
            pids: Pids {
                supervisor: std::process::id(),
                engine: engine.pid(),
                replicas: replicas.iter().filter_map(VolumeProcess::pid).collect(),
            },
            frontend: frontend.map(Frontend::as_str).unwrap_or_default(),
            size_bytes: status.size_bytes,
            generation: status.generation.to_string(),
            replicas: replicas.iter().filter_map(|replica| self.ready_replica(replica)).collect(),
            name,
        };
        self.volume.set_initialised()?;
        self.announced = true;
        tracing::info!(frontend = ready.frontend, generation = ready.generation, "ready");
        ready.print();
        Ok(())
    }

    fn ready_replica(&self, process: &VolumeProcess) -> Option<ReadyReplica> {
        let ProcessRole::Replica(id) = process.role else { return None };
        Some(ReadyReplica { id, directory: self.volume.replica_dir(id), pid: process.pid() })
    }

    fn not_ready(&self) -> RunError {
        RunError::NotReady { seconds: self.ready_limit.as_secs(), message: troubles(&self.processes) }
    }

    /// Stops the engine, then the replicas; every step is tried even if others fail.
    fn stop(&mut self) -> Result<(), RunError> {
        let replicas = self.processes.len() - 1;
        let engine = self.stop_group(replicas..replicas + 1);
        let replicas = self.stop_group(0..replicas);
        engine.and(replicas)
    }

    fn stop_group(&mut self, group: std::ops::Range<usize>) -> Result<(), RunError> {
        let processes = &mut self.processes[group];
        let mut unclean = None;
        for process in &mut *processes {
            process.stop()?;
        }
        loop {
            for process in &mut *processes {
                if let Some((status, message)) = process.ended()? {
                    tracing::debug!(role = %process.role, "stopped");
                    let stopped = process.role == ProcessRole::Engine && status.code() == Some(STOPPED);
                    if !status.success() && !stopped {
                        unclean = Some(RunError::Unclean { role: process.role.to_string(), message });
                    }
                }
                process.act_if_due()?;
            }
            let Some(deadline) = processes.iter().filter_map(VolumeProcess::deadline).min() else {
                return unclean.map_or(Ok(()), Err);
            };
            let wait = deadline.saturating_duration_since(Instant::now());
            // A second request to stop: the caller does not want to wait.
            if let Ok(SupervisorEvent::Stop) = self.events.recv_timeout(wait) {
                for process in &mut *processes {
                    process.stop()?;
                }
            }
        }
    }
}

/// Returns the reasons why the volume is not ready, for people.
fn troubles(processes: &[VolumeProcess]) -> String {
    let waiting = processes.iter().filter(|process| !process.serves());
    waiting.map(VolumeProcess::trouble).collect::<Vec<_>>().join("; ")
}

fn replica_spec(
    args: &RunArgs,
    volume: &VolumeDir,
    process: &VolumeProcess,
    id: ReplicaId,
) -> Result<ReplicaSpec, RunError> {
    let file = volume.file();
    let first_members = Members::new(file.replicas.iter().copied());
    Ok(ReplicaSpec {
        volume: file.name.clone(),
        replica: id,
        directory: volume.replica_dir(id),
        size_bytes: file.size_bytes,
        create: !file.initialised,
        create_once: false,
        first_members: first_members.map_err(|error| {
            let source = std::io::Error::new(std::io::ErrorKind::InvalidData, error);
            RunError::Io { path: volume.path().join("volume.json"), source }
        })?,
        secret: file.secret.clone(),
        data_socket: process.files.data.clone(),
        data_address: None,
        control_socket: process.files.control.clone(),
        sum_bytes_per_s: Some(u64::from(args.sum_mib_per_s) << 20).filter(|rate| *rate > 0),
        encrypt_in_transit: false,
        unknown: Unknown::default(),
    })
}

fn engine_spec(
    args: &RunArgs,
    volume: &VolumeDir,
    engine: &VolumeProcess,
    replicas: &[VolumeProcess],
) -> EngineSpec {
    let file = volume.file();
    let endpoint = |(process, id): (&VolumeProcess, &ReplicaId)| ReplicaEndpoint {
        replica: *id,
        addresses: vec![format!("unix:{}", process.files.data.display())],
        local: true,
    };
    EngineSpec {
        volume: file.name.clone(),
        size_bytes: file.size_bytes,
        attach: file.attach,
        replicas: replicas.iter().zip(&file.replicas).map(endpoint).collect(),
        frontend: FrontendChoice::from(args.frontend),
        secret: file.secret.clone(),
        state_file: volume.path().join("engine.json"),
        control_socket: engine.files.control.clone(),
        frontend_socket: engine.files.data.clone(),
        device_dir: PathBuf::clone(&args.device_dir),
        queues: args.queues,
        depth: args.queue_depth,
        replica_timeout_ms: args.replica_timeout_ms,
        granted: None,
        rebuild: RebuildLimits::default(),
        intent_clear_after_ms: Some(args.intent_clear_after_ms).filter(|after_ms| *after_ms > 0),
        verify_reads: args.verify_reads,
        continues: None,
        encrypt_in_transit: false,
        unknown: Unknown::default(),
    }
}
