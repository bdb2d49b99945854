//! Runs a replica process: reads the spec, serves, and leaves a clean directory.

use std::fs;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, pthread_sigmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use shorthorn_control::{
    ControlServer, ProcessCommand, ProcessStatus, Publisher, ReplicaPhase, ReplicaSpec, ReplicaStatus,
    load_spec,
};
use shorthorn_ring::{ProtectionReport, protect_thread};
use shorthorn_store::{CreateOptions, OpenOptions, Store};
use shorthorn_tls::{ReplicaTls, connection_secret};
use shorthorn_views::ReplicaViews;
use shorthorn_wire::directory_fingerprint;
use tracing::Span;

use crate::accept::{Acceptor, Listeners, NextAddress};
use crate::error::ReplicaError;
use crate::executor::{Executor, Loaded};
use crate::handshake::ReplicaIdentity;
use crate::limits::STATUS_PERIOD;
use crate::mailbox::{Inbox, Mailbox, Message};
use crate::server::Server;
use crate::state::{Owner, load_views};

/// Serves the replica that the spec file describes, until SIGTERM, SIGINT or a `stop` on the control socket.
/// Blocks; the directory is clean when it returns without an error, unless the replica has failed before.
///
/// # Errors
/// [`ReplicaError`] has the problem, its place and the remedy. After [`ReplicaError::Failed`] the process has
/// to be started again. Other errors of single requests are answered to their engine and do not end the
/// process.
pub fn run(spec_file: &Path) -> Result<(), ReplicaError> {
    let spec: ReplicaSpec = load_spec(spec_file)?;
    let span = tracing::info_span!("replica", volume = %spec.volume, replica = %spec.replica);
    let _in = span.clone().entered();
    // Before there is a second thread: threads inherit the mask.
    let signals = block_signals()?;
    let mut store = open_store(&spec)?;
    let mut owner = Owner::of(&spec);
    let views = load_views(&mut store, &mut owner, &spec)?;
    // After the state is loaded, which shows whether the directory belongs to this replica.
    store.bind(&directory_fingerprint(spec.secret.bytes(), spec.encrypt_in_transit))?;
    let loaded = Loaded::load(&mut store, &owner, views, spec.sum_bytes_per_s)?;
    // Only the process that holds the lock of the directory may replace the sockets: another process may be
    // serving.
    let listeners = Listeners::bind(&spec.data_socket, spec.data_address)?;
    let woken = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK).map(Arc::new);
    let woken = woken.map_err(|errno| ReplicaError::system("make an eventfd", errno))?;
    let first = first_status(&spec, loaded.state().views(), &listeners, &store);
    // All large memory is mapped before any is locked. If the limit on locked memory is low, locking is
    // refused then, and no later mapping is. Threads inherit the rest of the protection.
    let executor = Executor::new(store, owner, loaded)
        .map_err(|source| ReplicaError::system("map memory for buffers", source))?;
    report_protection(&protect_thread());

    let (mailbox, inbox) =
        Mailbox::new().map_err(|source| ReplicaError::system("make an eventfd", source))?;
    let next_address = NextAddress::new()?;
    let (_control, publisher) = start_control(&spec, first, &woken, (mailbox.clone(), &next_address))?;
    let data = DataThread::start(executor, mailbox, inbox, &publisher, &span, &woken)?;
    let opened = (identity(&spec)?, data.mailbox.clone(), span);
    let acceptor = Acceptor::start(listeners, opened, next_address, publish_addresses(&publisher))?;
    publisher.update(|status| change(status, |replica| replica.phase = ReplicaPhase::Serving));
    notify(&[sd_notify::NotifyState::Ready]);
    tracing::info!(directory = %spec.directory.display(), "serving");

    wait(&signals, &woken, &data, || refresh(&spec, &publisher))?;
    notify(&[sd_notify::NotifyState::Stopping]);
    publisher.update(|status| {
        change(status, |replica| {
            if replica.phase != ReplicaPhase::Failed {
                replica.phase = ReplicaPhase::Closed;
                replica.message = "stopping".to_owned();
            }
        })
    });
    acceptor.stop();
    data.stop()?;
    tracing::info!("stopped; the directory is clean");
    Ok(())
}

fn block_signals() -> Result<SignalFd, ReplicaError> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    pthread_sigmask(SigmaskHow::SIG_BLOCK, Some(&signals), None)
        .and_then(|()| SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK))
        .map_err(|errno| ReplicaError::system("wait for signals", errno))
}

fn open_store(spec: &ReplicaSpec) -> Result<Store, ReplicaError> {
    let directory = &spec.directory;
    let there = directory.join("volume.meta").exists();
    let creation_record = spec.control_socket.with_extension("created");
    let was_created = spec.create_once && creation_record.exists();
    if !there && (!spec.create || was_created) {
        return Err(ReplicaError::Missing(directory.clone()));
    }
    // With systemd, sockets are in /run, which does not depend on the failing disk, and is cleared with the
    // boot of the host.
    let loss_record = Some(spec.control_socket.with_extension("lost"));
    let store = if there {
        // A replica that lacks data serves too: an engine has to rebuild it, and it reports its state.
        let options = OpenOptions { accept_rebuilding: true, loss_record, ..OpenOptions::default() };
        Store::open(directory, options)?
    } else {
        let size_bytes = spec.size_bytes;
        Store::create(directory, CreateOptions { size_bytes, loss_record, ..CreateOptions::default() })?
    };
    if spec.create && spec.create_once {
        let written = fs::write(&creation_record, "");
        written.map_err(|source| ReplicaError::system("record that the directory was made", source))?;
    }
    for repair in store.info().repairs {
        tracing::warn!("{repair}");
    }
    // An existing replica may have another size than the spec. An engine that knows of an expansion makes it
    // grow, and no engine accepts a replica that is larger than the volume.
    Ok(store)
}

fn identity(spec: &ReplicaSpec) -> Result<ReplicaIdentity, ReplicaError> {
    let secret = connection_secret(&spec.secret, spec.encrypt_in_transit);
    let tls = spec.encrypt_in_transit.then(|| ReplicaTls::new(&secret)).transpose()?;
    Ok(ReplicaIdentity { volume: spec.volume.clone(), replica: spec.replica, secret, tls })
}

fn first_status(
    spec: &ReplicaSpec,
    views: &ReplicaViews,
    listeners: &Listeners,
    store: &Store,
) -> ReplicaStatus {
    ReplicaStatus {
        volume: spec.volume.clone(),
        replica: spec.replica,
        pid: std::process::id(),
        phase: ReplicaPhase::Closed,
        failures: store.info().failures,
        message: String::new(),
        addresses: listeners.addresses(),
        size_bytes: store.size_bytes(),
        allocated_bytes: allocated_bytes(&spec.directory),
        generation: views.generation().of_engine(),
        views: Some(views.report().clone()),
        directory: spec.directory.clone(),
    }
}

fn start_control(
    spec: &ReplicaSpec,
    first: ReplicaStatus,
    woken: &Arc<EventFd>,
    (mailbox, next_address): (Mailbox, &Arc<NextAddress>),
) -> Result<(ControlServer, Publisher), ReplicaError> {
    let (woken, next_address) = (Arc::clone(woken), Arc::clone(next_address));
    let on_command = move |command| match command {
        // It fails only if the counter is full: then the process is being woken already.
        ProcessCommand::Stop | ProcessCommand::Handover => drop(woken.write(1)),
        // If the data thread is gone, no engine is served any more.
        ProcessCommand::Fence { generation } => drop(mailbox.send(Message::Fence(generation))),
        ProcessCommand::Listen { address } => next_address.set(address),
        _ => {}
    };
    ControlServer::start(&spec.control_socket, ProcessStatus::Replica(first), on_command).map_err(|source| {
        ReplicaError::Listen { address: format!("control socket {}", spec.control_socket.display()), source }
    })
}

fn publish_addresses(publisher: &Publisher) -> Box<dyn Fn(Vec<String>) + Send> {
    let publisher = publisher.clone();
    Box::new(move |addresses| {
        publisher.update(|status| change(status, |replica| replica.addresses = addresses));
    })
}

/// The data thread, with the handles to send it messages.
struct DataThread {
    thread: JoinHandle<Result<(), ReplicaError>>,
    mailbox: Mailbox,
}

impl DataThread {
    fn start(
        executor: Executor,
        mailbox: Mailbox,
        inbox: Inbox,
        publisher: &Publisher,
        span: &Span,
        woken: &Arc<EventFd>,
    ) -> Result<DataThread, ReplicaError> {
        let (publisher, span, woken) = (publisher.clone(), span.clone(), Arc::clone(woken));
        let serve = move || {
            let _in = span.enter();
            let served = Server::new(executor, inbox, publisher).and_then(Server::run);
            let _ = woken.write(1);
            served
        };
        let thread = thread::Builder::new().name("data".into()).spawn(serve);
        let thread = thread.map_err(|source| ReplicaError::system("start a thread", source))?;
        Ok(DataThread { thread, mailbox })
    }

    fn stop(self) -> Result<(), ReplicaError> {
        // The message is lost only if the thread has ended by itself, and then it reports the reason.
        let _ = self.mailbox.send(Message::Stop);
        self.thread.join().unwrap_or(Err(ReplicaError::ThreadEnded))
    }
}

/// Waits for a signal, a stop, or the end of the data thread; updates the status meanwhile.
fn wait(
    signals: &SignalFd,
    woken: &EventFd,
    data: &DataThread,
    refresh: impl Fn(),
) -> Result<(), ReplicaError> {
    let period = PollTimeout::try_from(STATUS_PERIOD).unwrap_or(PollTimeout::MAX);
    loop {
        let on = |fd| PollFd::new(fd, PollFlags::POLLIN);
        match poll(&mut [on(signals.as_fd()), on(woken.as_fd())], period) {
            Ok(0) if !data.thread.is_finished() => refresh(),
            Ok(_) => return Ok(()),
            Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(ReplicaError::system("wait for signals", errno)),
        }
    }
}

fn refresh(spec: &ReplicaSpec, publisher: &Publisher) {
    let allocated_bytes = allocated_bytes(&spec.directory);
    publisher.update(|status| change(status, |replica| replica.allocated_bytes = allocated_bytes));
}

/// Returns the allocated bytes of the directory's files. Unreadable files do not count.
fn allocated_bytes(directory: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let Ok(entries) = std::fs::read_dir(directory) else { return 0 };
    entries.filter_map(|entry| entry.ok()?.metadata().ok()).map(|metadata| metadata.blocks() * 512).sum()
}

fn change(status: &mut ProcessStatus, change: impl FnOnce(&mut ReplicaStatus)) {
    if let ProcessStatus::Replica(replica) = status {
        change(replica);
    }
}

/// Notifies systemd, if it has asked for that.
fn notify(state: &[sd_notify::NotifyState]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "cannot notify systemd");
    }
}

fn report_protection(report: &ProtectionReport) {
    if let Some(error) = &report.io_flusher {
        tracing::warn!(
            %error,
            "PR_SET_IO_FLUSHER failed: under memory pressure the volume may hang; run as root"
        );
    }
    if let Some(error) = &report.memory_lock {
        tracing::warn!(
            %error,
            "memory is not locked: under memory pressure the volume may hang; raise LimitMEMLOCK"
        );
    }
}
