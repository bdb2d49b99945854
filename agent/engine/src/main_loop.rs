//! The main thread of an engine process.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::Instant;

use nix::sys::signal::{SigSet, Signal};
use shorthorn_control::{
    EnginePhase, EngineSpec, EngineStatus, FrontendChoice, MemberMode, Publisher, Server, Status, load_spec,
};
use shorthorn_core::{CoreConfig, EngineCore, PeerConfig};
use shorthorn_frontend::probe::{choose, probe};
use shorthorn_frontend::{
    Device, FrontendKind, FrontendSpec, Prepared, prepare_nbd, prepare_socket, prepare_ublk,
};
use shorthorn_ring::{Arena, Wake};
use shorthorn_types::limits::{BLOCK_BYTES, MAX_IO_BYTES, MAX_MEMBERS, MAX_QUEUE_DEPTH, MAX_QUEUES};

use crate::error::EngineError;
use crate::link::{self, Link};
use crate::open::{self, OpenError, Opened};
use crate::queue::Queue;
use crate::shared::{News, Shared};
use crate::state::EngineState;

/// Runs the engine that `spec_file` describes until SIGTERM, SIGINT or a client of the control socket ends it.
///
/// # Errors
/// Why it cannot start or cannot go on; after [`EngineError::Frozen`] a new start waits for the replicas, after
/// [`EngineError::Deposed`] there must be none.
pub fn run(spec_file: &Path) -> Result<(), EngineError> {
    let mut spec: EngineSpec = load_spec(spec_file)?;
    check(&spec)?;
    let (sender, news) = mpsc::channel();
    watch_signals(sender.clone())?;
    let mut state = EngineState::open(&spec.state_file, spec.attach)?;
    if let Some(record) = state.device().filter(|record| record.kind != FrontendKind::Socket) {
        // A device that is recovered keeps its queues.
        (spec.queues, spec.depth) = (record.queues, record.depth);
    }
    let stop = sender.clone();
    let (_server, publisher) = Server::start(&spec.control_socket, first_status(&spec, &state), move || {
        // The receiver is gone when the process is ending already.
        let _ = stop.send(News::Stop);
    })
    .map_err(EngineError::system("binding the control socket"))?;
    let result = start(&spec, &mut state, &publisher, sender, &news);
    if let Err(error) = &result {
        let message = error.to_string();
        publisher.update(|status| {
            if let Status::Engine(engine) = status {
                let frozen = matches!(error, EngineError::Frozen(_));
                engine.phase = if frozen { EnginePhase::Frozen } else { EnginePhase::Stopped };
                engine.message = message;
            }
        });
    }
    result
}

fn check(spec: &EngineSpec) -> Result<(), EngineError> {
    let bad = |reason: String| Err(EngineError::BadSpec { volume: spec.volume.clone(), reason });
    if spec.size_bytes == 0 || !spec.size_bytes.is_multiple_of(BLOCK_BYTES) {
        return bad(format!("size_bytes {} is no multiple of {BLOCK_BYTES}", spec.size_bytes));
    }
    if spec.replicas.is_empty() || spec.replicas.len() > MAX_MEMBERS {
        return bad(format!("{} replicas: a volume has 1 to {MAX_MEMBERS}", spec.replicas.len()));
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

/// Signals are taken by a thread of their own, so that the main thread waits for one thing only.
fn watch_signals(news: Sender<News>) -> Result<(), EngineError> {
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
    let system =
        |errno: nix::errno::Errno| EngineError::System { action: "blocking signals", source: errno.into() };
    signals.thread_block().map_err(system)?;
    let wait = move || {
        while signals.wait().is_ok() {
            if news.send(News::Stop).is_err() {
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

fn first_status(spec: &EngineSpec, state: &EngineState) -> Status {
    Status::Engine(EngineStatus {
        volume: spec.volume.clone(),
        pid: std::process::id(),
        phase: EnginePhase::Starting,
        message: String::new(),
        generation: state.generation(),
        view: None,
        members: Vec::new(),
        frontend: None,
        endpoint: None,
        size_bytes: spec.size_bytes,
    })
}

fn start(
    spec: &EngineSpec,
    state: &mut EngineState,
    publisher: &Publisher,
    sender: Sender<News>,
    news: &Receiver<News>,
) -> Result<(), EngineError> {
    let Some(opened) = open_patiently(spec, state, publisher, news)? else { return Ok(()) };
    tracing::info!(volume = %spec.volume, view = %opened.view, "opened");
    publish(publisher, |engine| {
        engine.generation = opened.view.id.generation;
        engine.view = Some(opened.view);
        engine.members.clone_from(&opened.members);
        engine.message.clear();
    });
    let Prepared { queues, mut device } = prepare_frontend(spec, state)?;
    // What was made is remembered before anything can use it: a process that dies from here on is followed
    // by one that recovers the device.
    state.set_device(Some(device.record()))?;
    let (shared, threads) = start_queues(spec, opened, queues, &device.record(), sender)?;
    let endpoint = device.go_live()?;
    // Some kernels give the device its number only now.
    state.set_device(Some(device.record()))?;
    tracing::info!(volume = %spec.volume, endpoint = %endpoint.display(), "serving");
    publish(publisher, |engine| {
        engine.frontend = Some(format!("{:?}", device.record().kind).to_lowercase());
        engine.endpoint = Some(endpoint);
        engine.phase = EnginePhase::Serving;
    });
    if let Err(error) = sd_notify::notify(&[sd_notify::NotifyState::Ready]) {
        tracing::warn!(%error, "systemd cannot be told that the engine is ready");
    }
    watch(publisher, news, spec, state)?;
    publish(publisher, |engine| engine.phase = EnginePhase::Stopping);
    stop(device.as_mut(), state)?;
    shared.stop();
    for thread in threads {
        // A queue thread that panicked has taken the process with it.
        let _ = thread.join();
    }
    Ok(())
}

/// Opens the volume, and waits for replicas that are missing; nothing where the engine is stopped meanwhile.
fn open_patiently(
    spec: &EngineSpec,
    state: &mut EngineState,
    publisher: &Publisher,
    news: &Receiver<News>,
) -> Result<Option<Opened>, EngineError> {
    let begin = Instant::now();
    loop {
        let without_missing = begin.elapsed() > open::MISSING_LIMIT;
        match open::open(spec, state.generation(), without_missing) {
            Ok(opened) => return Ok(Some(opened)),
            Err(OpenError::Fatal(error)) => return Err(error),
            Err(OpenError::Missing { reason, members }) => {
                publish(publisher, |engine| {
                    engine.message = format!("waiting: {reason}");
                    engine.members = members;
                });
            }
            Err(OpenError::Torn(reason)) => {
                tracing::warn!(volume = %spec.volume, reason, "opening failed half-way, trying again");
                let generation = state.next_generation()?;
                publish(publisher, |engine| {
                    engine.message = reason;
                    engine.generation = generation;
                });
            }
        }
        if let Ok(News::Stop) = news.recv_timeout(open::RETRY_INTERVAL) {
            return Ok(None);
        }
    }
}

fn prepare_frontend(spec: &EngineSpec, state: &EngineState) -> Result<Prepared, EngineError> {
    let previous = state.device().cloned();
    let kind = match (&previous, spec.frontend) {
        (Some(record), _) if record.kind != FrontendKind::Socket => record.kind,
        (_, FrontendChoice::Socket) => FrontendKind::Socket,
        (_, FrontendChoice::Auto) => choose(None, &probe())?,
        (_, FrontendChoice::Ublk) => choose(Some(FrontendKind::Ublk), &probe())?,
        (_, FrontendChoice::Nbd) => choose(Some(FrontendKind::Nbd), &probe())?,
    };
    let frontend = FrontendSpec {
        volume: spec.volume.clone(),
        size_bytes: spec.size_bytes,
        queues: spec.queues,
        depth: spec.depth,
        socket_path: spec.frontend_socket.clone(),
        device_dir: spec.device_dir.clone(),
        previous: previous.filter(|record| record.kind == kind),
    };
    Ok(match kind {
        FrontendKind::Ublk => prepare_ublk(&frontend)?,
        FrontendKind::Nbd => prepare_nbd(&frontend)?,
        FrontendKind::Socket => prepare_socket(&frontend)?,
    })
}

type Threads = Vec<thread::JoinHandle<()>>;

fn start_queues(
    spec: &EngineSpec,
    opened: Opened,
    frontends: Vec<Box<dyn shorthorn_frontend::QueueFrontend>>,
    record: &shorthorn_frontend::DeviceRecord,
    news: Sender<News>,
) -> Result<(Arc<Shared>, Threads), EngineError> {
    let generation = opened.view.id.generation;
    let core = EngineCore::new(&CoreConfig {
        queues: record.queues,
        depth: record.depth,
        peers: spec
            .replicas
            .iter()
            .map(|peer| PeerConfig { replica: peer.replica, local: peer.local })
            .collect(),
        view: opened.view,
        replica_timeout_ms: u64::from(spec.replica_timeout_ms),
    });
    let pairs = frontends.iter().map(|_| Wake::new()).collect::<Result<Vec<_>, _>>();
    let (wakes, wakers): (Vec<Wake>, Vec<_>) =
        pairs.map_err(EngineError::system("eventfd"))?.into_iter().unzip();
    let shared = Arc::new(Shared::new(core, wakers, news));
    let mut connections: Vec<_> = opened.connections.into_iter().map(Vec::into_iter).collect();
    let mut threads = Vec::new();
    for ((frontend, wake), index) in frontends.into_iter().zip(wakes).zip(0u16..) {
        let links = connections.iter_mut().zip(0..).map(|(connections, peer)| {
            let socket = link::socket(connections.next())?;
            Ok(Link::new(peer, index, generation, record.depth, socket))
        });
        let queue = Queue {
            index,
            depth: record.depth,
            arena: Arena::new(usize::from(record.depth), MAX_IO_BYTES as usize)
                .map_err(EngineError::system("mmap"))?,
            wake,
            links: links
                .collect::<std::io::Result<_>>()
                .map_err(EngineError::system("taking over a connection"))?,
            frontend,
            shared: Arc::clone(&shared),
        };
        let builder = thread::Builder::new().name(format!("queue-{index}")).stack_size(256 << 10);
        threads.push(builder.spawn(move || queue.serve()).map_err(EngineError::system("starting a thread"))?);
    }
    Ok((shared, threads))
}

/// Publishes what the queues tell, until the engine has to end.
fn watch(
    publisher: &Publisher,
    news: &Receiver<News>,
    spec: &EngineSpec,
    state: &EngineState,
) -> Result<(), EngineError> {
    let volume = &spec.volume;
    for item in news {
        match item {
            News::Stop => return Ok(()),
            News::View(view) => {
                tracing::info!(%volume, %view, "the view has changed");
                publish(publisher, |engine| engine.view = Some(view));
            }
            News::Dropped { peer, reason } => {
                let replica = spec.replicas.get(usize::from(peer)).map(|endpoint| endpoint.replica);
                tracing::warn!(%volume, ?replica, reason, "a replica has failed");
                publish(publisher, |engine| {
                    if let Some(member) = engine.members.get_mut(usize::from(peer)) {
                        member.mode = MemberMode::Failed;
                        member.message = reason;
                    }
                });
            }
            News::Frozen(reason) => return Err(EngineError::Frozen(reason)),
            News::Deposed { holder } => {
                return Err(EngineError::Deposed { generation: state.generation(), holder });
            }
            News::QueueFailed { queue, reason } => {
                let source = std::io::Error::other(format!("queue {queue}: {reason}"));
                return Err(EngineError::System { action: "serving", source });
            }
        }
    }
    Ok(())
}

fn stop(device: &mut dyn Device, state: &mut EngineState) -> Result<(), EngineError> {
    device.stop()?;
    state.set_device(None)
}

fn publish(publisher: &Publisher, change: impl FnOnce(&mut EngineStatus)) {
    publisher.update(|status| {
        if let Status::Engine(engine) = status {
            change(engine);
        }
    });
}
