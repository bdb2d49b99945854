use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use std::{fs, thread};

use serde::Serialize;

use crate::status::{IoCounters, ProcessCommand, ProcessStatus};

/// The most clients at once; more are turned away.
const CLIENTS_MAX: usize = 16;
/// The longest line that a client may send.
const LINE_MAX_BYTES: u64 = 32 << 10;
/// The time after which a client that does not take its status is disconnected. A status fits the buffer of
/// the socket, so only a client that hangs makes the process wait.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// Handles the commands of clients to the process.
type OnCommand = dyn Fn(ProcessCommand) + Send + Sync;
/// Returns the counters of the requests of the device's user.
type Count = dyn Fn() -> IoCounters + Send + Sync;

/// The publisher of the process's status; cheap to clone.
#[derive(Clone, Debug)]
pub struct Publisher(Arc<PublishedState>);

struct PublishedState {
    newest: Mutex<(u64, ProcessStatus)>,
    /// The source of the counters, once it is set.
    count: OnceLock<Box<Count>>,
    changed: Condvar,
    clients: AtomicUsize,
}

impl std::fmt::Debug for PublishedState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PublishedState").field("newest", &self.newest).finish_non_exhaustive()
    }
}

impl PublishedState {
    fn lock(&self) -> MutexGuard<'_, (u64, ProcessStatus)> {
        // A status is replaced whole, so a panic elsewhere leaves nothing half-written.
        self.newest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Publisher {
    /// Changes the status, and sends it to all watchers if it differs.
    pub fn update(&self, change: impl FnOnce(&mut ProcessStatus)) {
        let mut newest = self.0.lock();
        let before = newest.1.clone();
        change(&mut newest.1);
        if newest.1 != before {
            newest.0 += 1;
            self.0.changed.notify_all();
        }
    }

    /// Sets `count` as the source of the counters. Only the first call counts.
    pub fn count_with(&self, count: impl Fn() -> IoCounters + Send + Sync + 'static) {
        let _ = self.0.count.set(Box::new(count));
    }

    fn counters(&self) -> IoCounters {
        self.0.count.get().map(|count| count()).unwrap_or_default()
    }

    /// Returns the newest status.
    #[must_use]
    pub fn status(&self) -> ProcessStatus {
        self.0.lock().1.clone()
    }
}

/// A control socket. It is removed when the server is dropped.
#[derive(Debug)]
pub struct ControlServer {
    path: PathBuf,
}

impl ControlServer {
    /// Binds the socket at `path` (mode 0600), in place of that of an earlier process, and serves it on its
    /// own threads. `on_command` is called with the commands of clients.
    ///
    /// # Errors
    /// The error of bind, for instance for a path of more than 107 bytes.
    pub fn start(
        path: &Path,
        first: ProcessStatus,
        on_command: impl Fn(ProcessCommand) + Send + Sync + 'static,
    ) -> io::Result<(ControlServer, Publisher)> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        let shared = PublishedState {
            newest: Mutex::new((0, first)),
            count: OnceLock::new(),
            changed: Condvar::new(),
            clients: AtomicUsize::new(0),
        };
        let publisher = Publisher(Arc::new(shared));
        let served = publisher.clone();
        let on_command: Arc<OnCommand> = Arc::new(on_command);
        thread::Builder::new()
            .name("control".into())
            .stack_size(128 << 10)
            .spawn(move || accept(&listener, &served, &on_command))?;
        Ok((ControlServer { path: path.to_owned() }, publisher))
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        // Another process may have removed it before: then nothing is left to do.
        let _ = fs::remove_file(&self.path);
    }
}

fn accept(listener: &UnixListener, publisher: &Publisher, on_command: &Arc<OnCommand>) {
    for client in listener.incoming() {
        let client = match client {
            Ok(client) => client,
            Err(error) => {
                tracing::warn!(%error, "control socket: accept failed");
                thread::sleep(Duration::from_millis(100)); // out of descriptors: do not spin
                continue;
            }
        };
        if publisher.0.clients.fetch_add(1, Ordering::Relaxed) >= CLIENTS_MAX {
            publisher.0.clients.fetch_sub(1, Ordering::Relaxed);
            continue;
        }
        let (publisher, on_command) = (publisher.clone(), Arc::clone(on_command));
        let shared = Arc::clone(&publisher.0);
        let spawned =
            thread::Builder::new().name("control-client".into()).stack_size(128 << 10).spawn(move || {
                // A client that disconnects ends its thread with an error that does not matter.
                let _ = serve(client, &publisher, on_command.as_ref());
                publisher.0.clients.fetch_sub(1, Ordering::Relaxed);
            });
        if let Err(error) = spawned {
            shared.clients.fetch_sub(1, Ordering::Relaxed);
            tracing::warn!(%error, "control socket: cannot start a thread for a client");
        }
    }
}

fn serve(client: UnixStream, publisher: &Publisher, on_command: &OnCommand) -> io::Result<()> {
    client.set_write_timeout(Some(WRITE_TIMEOUT))?;
    let mut lines = BufReader::new(client.try_clone()?);
    let mut line = String::new();
    while lines.by_ref().take(LINE_MAX_BYTES).read_line(&mut line)? > 0 {
        match serde_json::from_str(&line)? {
            ProcessCommand::Status => send(&client, &publisher.status())?,
            ProcessCommand::Watch => return watch(&client, publisher),
            ProcessCommand::Io => send(&client, &publisher.counters())?,
            other => on_command(other),
        }
        line.clear();
    }
    Ok(())
}

fn send(mut client: &UnixStream, answer: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(answer)?;
    line.push(b'\n');
    client.write_all(&line)
}

fn watch(client: &UnixStream, publisher: &Publisher) -> io::Result<()> {
    let mut seen = None;
    loop {
        let status = {
            let mut newest = publisher.0.lock();
            while seen == Some(newest.0) {
                let (guard, timeout) = publisher
                    .0
                    .changed
                    .wait_timeout(newest, WRITE_TIMEOUT)
                    .unwrap_or_else(PoisonError::into_inner);
                newest = guard;
                if timeout.timed_out() && has_gone(client) {
                    return Ok(());
                }
            }
            seen = Some(newest.0);
            newest.1.clone()
        };
        send(client, &status)?;
    }
}

/// Returns true if the client has closed its end; it never sends anything after `watch`.
fn has_gone(mut client: &UnixStream) -> bool {
    let gone = client.set_nonblocking(true).is_err() || matches!(client.read(&mut [0]), Ok(0));
    gone || client.set_nonblocking(false).is_err()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use shorthorn_types::ReplicaId;

    use super::*;
    use crate::{ControlClient, IoCounter, ReplicaPhase, ReplicaStatus};

    fn status() -> ProcessStatus {
        ProcessStatus::Replica(ReplicaStatus {
            volume: "v1".parse().unwrap(),
            replica: ReplicaId::from_random(1),
            pid: 1,
            phase: ReplicaPhase::Closed,
            failures: 0,
            message: String::new(),
            addresses: vec![],
            size_bytes: 4096,
            allocated_bytes: 0,
            generation: None,
            views: None,
            directory: "/d".into(),
        })
    }

    #[test]
    fn reports_its_status_and_every_change() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control");
        let (server, publisher) = ControlServer::start(&path, status(), |_| ()).unwrap();
        let client = ControlClient::connect(&path).unwrap();
        assert_eq!(client.status().unwrap(), status());
        let mut changes = ControlClient::connect(&path).unwrap().watch().unwrap();
        assert_eq!(changes.next().unwrap().unwrap(), status());
        publisher.update(|status| {
            if let ProcessStatus::Replica(replica) = status {
                replica.phase = ReplicaPhase::Serving;
            }
        });
        let serves = |status| match status {
            ProcessStatus::Replica(replica) => replica.phase == ReplicaPhase::Serving,
            ProcessStatus::Engine(_) => false,
        };
        assert!(serves(changes.next().unwrap().unwrap()));
        drop(server);
        assert!(!path.exists());
    }

    #[test]
    fn reports_io_counters() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control");
        let (_server, publisher) = ControlServer::start(&path, status(), |_| ()).unwrap();
        let ask = || {
            let mut stream = UnixStream::connect(&path).unwrap();
            stream.write_all(b"\"io\"\n").unwrap();
            let mut line = String::new();
            BufReader::new(stream).read_line(&mut line).unwrap();
            serde_json::from_str::<IoCounters>(&line).unwrap()
        };
        assert_eq!(ask(), IoCounters::default());
        let write = IoCounter { operations: 2, bytes: 8192, failed: 0, duration_us: 7 };
        publisher.count_with(move || IoCounters { write, ..IoCounters::default() });
        assert_eq!(ask().write, write);
    }

    #[test]
    fn passes_orders_on() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control");
        let (sender, stopped) = mpsc::channel();
        let (_server, _) =
            ControlServer::start(&path, status(), move |command| sender.send(command).unwrap()).unwrap();
        let client = ControlClient::connect(&path).unwrap();
        client.request(&ProcessCommand::Handover).unwrap();
        client.request(&ProcessCommand::Stop).unwrap();
        let next = || stopped.recv_timeout(Duration::from_secs(10)).unwrap();
        assert_eq!([next(), next()], [ProcessCommand::Handover, ProcessCommand::Stop]);
    }

    #[test]
    fn nonsense_ends_the_connection_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control");
        let (_server, _) = ControlServer::start(&path, status(), |_| ()).unwrap();
        let mut raw = UnixStream::connect(&path).unwrap();
        raw.write_all(b"nonsense\n").unwrap();
        assert_eq!(raw.read(&mut [0; 10]).unwrap(), 0);
        assert!(ControlClient::connect(&path).unwrap().status().is_ok());
    }
}
