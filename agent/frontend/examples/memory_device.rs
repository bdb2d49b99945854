//! A volume in one sparse file, served by a frontend: to try a frontend without replicas, and for its tests.
//!
//! ```text
//! memory_device --frontend ublk|nbd|iscsi|socket|auto --backing FILE --size BYTES --state FILE
//!               [--volume NAME] [--queues N] [--depth N] [--socket FILE] [--device-dir DIR]
//!               [--fault killed|mapped|stalled] [--task-work cooperative] [--delay-ms N]
//! ```
//!
//! Put the backing file on tmpfs, and its content survives `kill -9`. The state file has the data with which
//! the same command takes the device over after that. A line of JSON on standard output says that the device
//! is ready. SIGTERM removes the device and ends. SIGHUP leaves it to the next process. SIGUSR1 makes the
//! volume 64 MiB larger. SIGUSR2 prints the users of the device. A delay keeps every request for that time
//! before it is served, so that a load takes every tag. Warnings of the frontends are on standard error.
#![allow(clippy::print_stderr, reason = "a program for the command line")]

use std::collections::VecDeque;
use std::error::Error;
use std::fs::{self, File};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal, raise};
use shorthorn_core::{Operation, Request};
use shorthorn_frontend::{
    DeviceRecord, FrontendError, FrontendKind, FrontendSpec, IscsiIdentity, Prepared, QueueFrontend, QueueIo,
    SOURCE, prepare_iscsi, prepare_nbd, prepare_socket, prepare_ublk, probe,
};
use shorthorn_ring::{Arena, Completion, Ring, TaskWork, Token, WakeReceiver, Waker, protect_thread};
use shorthorn_types::limits::MAX_IO_BYTES;
use shorthorn_types::{Errno, VolumeName};

type Anything = Box<dyn Error + Send + Sync>;

const FILE_SOURCE: u8 = 2;
const WAKE_SOURCE: u8 = 3;
const GROW_BYTES: u64 = 64 << 20;
const SIGNALS: [Signal; 5] =
    [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGUSR1, Signal::SIGUSR2];

struct Options {
    frontend: Option<FrontendKind>,
    backing: PathBuf,
    state: PathBuf,
    spec: FrontendSpec,
    /// The task work to use in place of the frontend's choice for this kernel.
    task_work: Option<TaskWork>,
    delay: Duration,
    fault: Fault,
}

/// A fault between preparing the device and serving it.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// The process dies.
    Killed,
    /// The process dies when a queue has mapped its descriptors, before it has fetched a tag.
    Mapped,
    /// The queues never start.
    Stalled,
}

fn main() -> Result<(), Anything> {
    let options = parse(std::env::args().skip(1))?;
    let log = tracing_subscriber::fmt().with_max_level(tracing::Level::WARN);
    log.with_writer(io::stderr).with_ansi(false).init();
    let signals = SigSet::from_iter(SIGNALS);
    signals.thread_block()?;
    let backing = Arc::new(open_backing(&options)?);
    let kind = choose(&options)?;
    let Prepared { queues, mut device } = prepare(kind, &options.spec)?;
    let record = device.record();
    store(&options.state, &record)?;
    if options.fault == Fault::Killed {
        raise(Signal::SIGKILL)?;
    }
    let stopping = Arc::new(AtomicBool::new(false));
    let mut threads = Vec::new();
    for queue in queues.into_iter().filter(|_| options.fault != Fault::Stalled) {
        let task_work = options.task_work.unwrap_or_else(|| queue.task_work());
        let how = How { depth: record.depth, task_work, delay: options.delay, fault: options.fault };
        threads.push(serve_on_thread(queue, how, &backing, &stopping)?);
    }
    let path = device.go_live()?;
    let record = device.record(); // an NBD device has its number only now
    store(&options.state, &record)?;
    let ready = serde_json::json!({ "device": path, "kernel_id": record.kernel_id, "queues": record.queues });
    println!("{ready}");
    let mut size_bytes = options.spec.size_bytes;
    let is_left = loop {
        match signals.wait()? {
            Signal::SIGUSR1 => {
                backing.set_len(size_bytes + GROW_BYTES)?;
                match device.resize(size_bytes + GROW_BYTES) {
                    Ok(()) => size_bytes += GROW_BYTES,
                    Err(error) => eprintln!("{error}"),
                }
                eprintln!("the volume has {size_bytes} bytes");
            }
            Signal::SIGUSR2 => {
                eprintln!("used: {}", device.in_use().unwrap_or_else(|| "by no process".into()))
            }
            signal => break signal == Signal::SIGHUP,
        }
    };
    if !is_left {
        device.stop()?;
    }
    stopping.store(true, Ordering::Release);
    for (thread, waker) in threads {
        waker.wake();
        thread.join().map_err(|_| "a queue has panicked")??;
    }
    if !is_left {
        fs::remove_file(&options.state)?;
    }
    Ok(())
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Options, Anything> {
    let mut options = Options {
        frontend: None,
        backing: PathBuf::new(),
        state: PathBuf::new(),
        spec: FrontendSpec {
            volume: VolumeName::new("memory")?,
            size_bytes: 1 << 30,
            queues: 2,
            depth: 128,
            socket_path: "/tmp/memory.sock".into(),
            device_dir: "/dev/longhorn".into(),
            previous: None,
            refuses_requests: false,
        },
        task_work: None,
        delay: Duration::ZERO,
        fault: Fault::None,
    };
    while let Some(name) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{name} needs a value"))?;
        match name.as_str() {
            "--frontend" if value == "auto" => options.frontend = None,
            "--frontend" => options.frontend = Some(serde_json::from_value(value.into())?),
            "--backing" => options.backing = value.into(),
            "--state" => options.state = value.into(),
            "--size" => options.spec.size_bytes = value.parse()?,
            "--volume" => options.spec.volume = VolumeName::new(&value)?,
            "--queues" => options.spec.queues = value.parse()?,
            "--depth" => options.spec.depth = value.parse()?,
            "--socket" => options.spec.socket_path = value.into(),
            "--device-dir" => options.spec.device_dir = value.into(),
            "--task-work" if value == "cooperative" => options.task_work = Some(TaskWork::Cooperative),
            "--delay-ms" => options.delay = Duration::from_millis(value.parse()?),
            "--fault" if value == "killed" => options.fault = Fault::Killed,
            "--fault" if value == "mapped" => options.fault = Fault::Mapped,
            "--fault" if value == "stalled" => options.fault = Fault::Stalled,
            _ => return Err(format!("unknown option {name} {value}").into()),
        }
    }
    match fs::read(&options.state) {
        Ok(json) => options.spec.previous = Some(serde_json::from_slice(&json)?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error.into()),
    }
    Ok(options)
}

fn open_backing(options: &Options) -> io::Result<File> {
    let file = File::options().read(true).write(true).create(true).truncate(false).open(&options.backing)?;
    if file.metadata()?.len() < options.spec.size_bytes {
        file.set_len(options.spec.size_bytes)?;
    }
    Ok(file)
}

fn choose(options: &Options) -> Result<FrontendKind, FrontendError> {
    // An existing device is taken over by its own frontend, even if another one would be chosen today.
    if let Some(record) = &options.spec.previous {
        return Ok(record.kind);
    }
    let reports = probe::probe();
    for report in &reports {
        eprintln!(
            "{}: {}: {}",
            report.kind,
            if report.usable { "works" } else { "does not work" },
            report.reason
        );
    }
    probe::choose(options.frontend, &reports)
}

fn prepare(kind: FrontendKind, spec: &FrontendSpec) -> Result<Prepared, FrontendError> {
    match kind {
        FrontendKind::Ublk => prepare_ublk(spec),
        FrontendKind::Socket => prepare_socket(spec),
        FrontendKind::Nbd => prepare_nbd(spec, Vec::new()),
        FrontendKind::Iscsi => {
            let identity = IscsiIdentity {
                password: "0123456789abcdef".into(),
                target_password: "fedcba9876543210".into(),
                disk_id: "5ba".into(),
            };
            prepare_iscsi(spec, identity, Vec::new())
        }
    }
}

/// Stores the state: the old one or the new one stays, whenever the process dies.
fn store(path: &Path, record: &DeviceRecord) -> Result<(), Anything> {
    let new = path.with_extension("new");
    fs::write(&new, serde_json::to_vec(record)?)?;
    Ok(fs::rename(new, path)?)
}

/// The settings of a served queue.
#[derive(Clone, Copy)]
struct How {
    depth: u16,
    task_work: TaskWork,
    /// The time for which a request is kept before it is served.
    delay: Duration,
    fault: Fault,
}

fn serve_on_thread(
    frontend: Box<dyn QueueFrontend>,
    how: How,
    file: &Arc<File>,
    stopping: &Arc<AtomicBool>,
) -> Result<(JoinHandle<io::Result<()>>, Waker), Anything> {
    let (wake, waker) = WakeReceiver::new()?;
    let (file, stopping) = (Arc::clone(file), Arc::clone(stopping));
    let thread = thread::Builder::new().name("queue".into()).spawn(move || {
        let served = serve(frontend, how, &file, &wake, &stopping);
        if let Err(error) = &served {
            eprintln!("a queue has failed: {error}");
        }
        served
    })?;
    Ok((thread, waker))
}

fn serve(
    mut frontend: Box<dyn QueueFrontend>,
    How { depth, task_work, delay, fault }: How,
    file: &File,
    wake: &WakeReceiver,
    stopping: &AtomicBool,
) -> io::Result<()> {
    // Missing protections of this machine are logged by the real engine.
    let _ = protect_thread();
    // The kernel closes it: see Ring::leave_open. Of a device that was stopped it holds nothing.
    let mut ring = ManuallyDrop::new(Ring::with(u32::from(depth) * 2, task_work)?);
    let arena = Arena::new(usize::from(depth), MAX_IO_BYTES as usize)?;
    let mut requests = Vec::with_capacity(usize::from(depth));
    let mut refusals = Vec::with_capacity(usize::from(depth));
    // The requests that are kept, each with the time at which it is served.
    let mut kept: VecDeque<(Instant, Request)> = VecDeque::with_capacity(usize::from(depth));
    let mut completions: Vec<Completion> = Vec::with_capacity(usize::from(depth) * 8);
    let wake_token = Token { source: WAKE_SOURCE, kind: 0, index: 0, tag: 0 };
    wake.arm(&mut ring, wake_token);
    frontend.start(&mut QueueIo {
        ring: &mut ring,
        arena: &arena,
        requests: &mut requests,
        refusals: &mut refusals,
    })?;
    if fault == Fault::Mapped {
        // The kernel has not seen the submissions to the ring yet.
        raise(Signal::SIGKILL)?;
    }
    while !stopping.load(Ordering::Acquire) {
        refusals.clear();
        let now = Instant::now();
        kept.extend(requests.drain(..).map(|request| (now + delay, request)));
        while let Some((_, request)) = kept.pop_front_if(|(due, _)| *due <= now) {
            submit(&mut ring, &arena, file, request);
        }
        frontend.flush(&mut QueueIo {
            ring: &mut ring,
            arena: &arena,
            requests: &mut requests,
            refusals: &mut refusals,
        });
        let pause = kept.front().map(|(due, _)| due.saturating_duration_since(now));
        ring.wait(pause, &mut completions)?;
        for completion in completions.drain(..) {
            let mut io =
                QueueIo { ring: &mut ring, arena: &arena, requests: &mut requests, refusals: &mut refusals };
            match completion.token.source {
                SOURCE => frontend.on_completion(&mut io, completion)?,
                FILE_SOURCE => frontend.complete(&mut io, completion.token.index, outcome(completion)),
                _ => wake.arm(&mut ring, wake_token),
            }
        }
    }
    Ok(())
}

fn submit(ring: &mut Ring, arena: &Arena, file: &File, request: Request) {
    let (fd, start, length) = (file.as_raw_fd(), request.range.offset(), request.range.length());
    let data_bytes = u32::try_from(length).unwrap_or(u32::MAX);
    let token = |tag| Token { source: FILE_SOURCE, kind: 0, index: request.slot, tag };
    let buf = |bytes: u32| arena.buf(usize::from(request.slot)).part(0, bytes as usize);
    match request.operation {
        Operation::Read => ring.read(fd, buf(data_bytes), start, token(data_bytes)),
        Operation::Write { fua } => ring.write(fd, buf(data_bytes), start, fua, token(data_bytes)),
        Operation::Flush => ring.fdatasync(fd, token(0)),
        Operation::Discard | Operation::WriteZeroes { .. } => {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            ring.fallocate(fd, mode, start, length, token(0));
        }
        Operation::Verify | Operation::CheckedRead | Operation::WriteRot => {
            unreachable!("no frontend asks for it")
        }
    }
}

/// Returns the outcome by the tag, which holds the requested bytes.
fn outcome(completion: Completion) -> Result<(), Errno> {
    match completion.count() {
        Ok(count) if u32::try_from(count).is_ok_and(|count| count == completion.token.tag) => Ok(()),
        Ok(_) => Err(Errno::IO),
        Err(error) => Err(Errno::of(&error)),
    }
}
