//! Commands in the guest, through its agent (`tests/vm/guest/agent`, where the
//! protocol is written down).

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, BufReader, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpStream};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};

use crate::console::ConsoleLog;

/// The time that the first attempt waits for the first answer of the agent. A guest that is still booting
/// swallows connections, so attempts are given up. Each waits twice as long as the one before, so that a slow
/// guest is reached as well.
const FIRST_ATTEMPT: Duration = Duration::from_millis(500);
const LONGEST_ATTEMPT: Duration = Duration::from_secs(4);

/// Pause after a connection that was refused.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// The time after which a guest that takes no input is dead.
const WRITE_LIMIT: Duration = Duration::from_secs(60);

const FRAME_LIMIT: u32 = 16 * 1024 * 1024;
const INPUT_CHUNK: usize = 256 * 1024;

/// The two outputs of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// The results of a finished command.
#[derive(Debug, Clone, Default)]
pub struct Output {
    /// The exit status; 128 and the signal's number if a signal ended the command.
    pub status: i32,
    /// All of standard output.
    pub stdout: Vec<u8>,
    /// All of standard error.
    pub stderr: Vec<u8>,
}

impl Output {
    /// Returns true if the exit status is 0.
    pub fn success(&self) -> bool {
        self.status == 0
    }

    /// Returns standard output as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "exit status {}", self.status)?;
        for (name, bytes) in [("stdout", &self.stdout), ("stderr", &self.stderr)] {
            let text = String::from_utf8_lossy(bytes);
            if text.trim().is_empty() {
                write!(f, "; no {name}")?;
            } else {
                write!(f, "\n--- {name}\n{}", text.trim_end())?;
            }
        }
        Ok(())
    }
}

/// The way into one guest.
#[derive(Debug, Clone)]
pub struct Agent {
    /// None while the machine is off: its port may be another one's by now.
    port: Option<u16>,
    console: Arc<ConsoleLog>,
    connections: Arc<Mutex<Vec<Weak<TcpStream>>>>,
}

impl Agent {
    pub fn new(port: u16, console: Arc<ConsoleLog>) -> Self {
        Self { port: Some(port), console, connections: Arc::default() }
    }

    /// Returns the way into a machine that is off: every use of it fails.
    pub fn off(console: Arc<ConsoleLog>) -> Self {
        Self { port: None, console, connections: Arc::default() }
    }

    /// Waits until the agent answers.
    pub fn wait_ready(&self, deadline: Instant) -> Result<()> {
        self.connect(deadline).map(drop)
    }

    /// Ends all commands from this side: the guest was reset or is gone.
    pub fn disconnect_all(&self) {
        for stream in self.connections().drain(..).filter_map(|weak| weak.upgrade()) {
            // Already closed is as good.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Sends a request other than a command and waits for its success.
    pub fn request(&self, request: &Value, limit: Duration) -> Result<()> {
        let output = self.start(request, limit, None)?.wait(limit)?;
        if !output.success() {
            bail!("the guest could not {}: {output}", request["op"]);
        }
        Ok(())
    }

    pub fn start(
        &self,
        request: &Value,
        connect_limit: Duration,
        sink: Option<Sink>,
    ) -> Result<RunningCommand> {
        let stream = self.connect(Instant::now() + connect_limit)?;
        write_frame(&mut &*stream, b'q', request.to_string().as_bytes())
            .context("cannot send a request to the guest")?;
        let what = match &request["argv"] {
            Value::Array(argv) => argv.last().unwrap_or(&Value::Null).to_string(),
            _ => request["op"].to_string(),
        };
        Ok(RunningCommand::new(stream, what, Arc::clone(&self.console), sink))
    }

    fn connections(&self) -> MutexGuard<'_, Vec<Weak<TcpStream>>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connect(&self, deadline: Instant) -> Result<Arc<TcpStream>> {
        let Some(port) = self.port else { bail!("the VM is off") };
        let mut attempt_limit = FIRST_ATTEMPT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("the guest's agent does not answer; {}", self.console.failure());
            }
            match try_connect(port, attempt_limit.min(left)) {
                Ok(stream) => {
                    let stream = Arc::new(stream);
                    let mut connections = self.connections();
                    connections.retain(|weak| weak.strong_count() > 0);
                    connections.push(Arc::downgrade(&stream));
                    return Ok(stream);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    attempt_limit = (attempt_limit * 2).min(LONGEST_ATTEMPT);
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    bail!("QEMU has ended; {}", self.console.failure());
                }
                Err(_) => thread::sleep(RETRY_PAUSE),
            }
        }
    }
}

fn try_connect(port: u16, limit: Duration) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(WRITE_LIMIT))?;
    stream.set_read_timeout(Some(limit))?;
    let (kind, _) = read_frame(&mut stream)?;
    if kind != b'r' {
        return Err(io::Error::other("not the agent of a test VM"));
    }
    stream.set_read_timeout(None)?;
    Ok(stream)
}

/// Takes a command's output as it comes, in place of keeping it.
pub type Sink = Box<dyn FnMut(Stream, &[u8]) + Send>;

/// A command to run in the guest.
#[derive(Debug)]
#[must_use = "a command does nothing until it is run"]
pub struct GuestCommand {
    agent: Agent,
    argv: Vec<String>,
    environment: BTreeMap<String, String>,
    stdin: Vec<u8>,
    limit: Duration,
}

impl GuestCommand {
    pub(crate) fn new(agent: Agent, argv: &[&str], limit: Duration) -> Self {
        Self {
            agent,
            argv: argv.iter().map(|&word| word.to_owned()).collect(),
            environment: BTreeMap::new(),
            stdin: Vec::new(),
            limit,
        }
    }

    /// Kills the command and fails after that time.
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Sets a variable of its environment.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.insert(name.to_owned(), value.to_owned());
        self
    }

    /// Sets the bytes of its standard input; empty by default.
    pub fn stdin(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.stdin = bytes.into();
        self
    }

    /// Runs it to its end.
    pub fn run(self) -> Result<Output> {
        let limit = self.limit;
        self.spawn()?.wait(limit)
    }

    /// Runs it to its end and passes its output on as it comes.
    pub fn run_streaming(self, sink: impl FnMut(Stream, &[u8]) + Send + 'static) -> Result<Output> {
        let limit = self.limit;
        self.start(Some(Box::new(sink)))?.wait(limit)
    }

    /// Starts it in the background.
    pub fn spawn(self) -> Result<RunningCommand> {
        self.start(None)
    }

    fn start(self, sink: Option<Sink>) -> Result<RunningCommand> {
        let request = json!({ "op": "run", "argv": self.argv, "env": self.environment });
        let running = self.agent.start(&request, self.limit, sink)?;
        for chunk in self.stdin.chunks(INPUT_CHUNK) {
            running.send(b'i', chunk)?;
        }
        running.send(b'i', &[])?;
        Ok(running)
    }
}

/// A command that runs in the guest. Dropping this kills the processes of its group; services that it has
/// started continue.
#[derive(Debug)]
pub struct RunningCommand {
    stream: Arc<TcpStream>,
    what: String,
    console: Arc<ConsoleLog>,
    collected: Arc<Mutex<Output>>,
    ended: Receiver<io::Result<i32>>,
}

impl RunningCommand {
    fn new(stream: Arc<TcpStream>, what: String, console: Arc<ConsoleLog>, sink: Option<Sink>) -> Self {
        let collected = Arc::new(Mutex::new(Output::default()));
        let (sender, ended) = mpsc::channel();
        let sink = sink.unwrap_or_else(|| {
            let collected = Arc::clone(&collected);
            Box::new(move |stream, bytes| {
                let mut output = collected.lock().unwrap_or_else(PoisonError::into_inner);
                match stream {
                    Stream::Stdout => output.stdout.extend_from_slice(bytes),
                    Stream::Stderr => output.stderr.extend_from_slice(bytes),
                }
            })
        });
        let reader = Arc::clone(&stream);
        // Reads all the time: a full pipe would stop the command in the guest.
        thread::spawn(move || {
            // The waiting receiver is gone if the value was dropped.
            let _ = sender.send(receive(&reader, sink));
        });
        Self { stream, what, console, collected, ended }
    }

    /// Waits for its end. At the limit it is killed, and the error has its output.
    pub fn wait(self, limit: Duration) -> Result<Output> {
        match self.ended.recv_timeout(limit) {
            Ok(ended) => self.finish(ended),
            Err(RecvTimeoutError::Timeout) => Err(self.failure(&format!("no end after {limit:?}"))),
            Err(RecvTimeoutError::Disconnected) => Err(self.failure("the reader panicked")),
        }
    }

    /// Copies the output that has arrived until now, without waiting.
    pub fn output_so_far(&self) -> Output {
        self.collected.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Kills the command by closing the connection to its agent.
    pub fn kill(self) {}

    pub(crate) fn send(&self, kind: u8, payload: &[u8]) -> Result<()> {
        write_frame(&mut &*self.stream, kind, payload)
            .with_context(|| format!("cannot send input to {} in the guest", self.what))
    }

    /// Returns a second handle to send frames with, from another thread.
    pub(crate) fn sender(&self) -> Arc<TcpStream> {
        Arc::clone(&self.stream)
    }

    fn finish(self, ended: io::Result<i32>) -> Result<Output> {
        match ended {
            Ok(status) => Ok(Output { status, ..self.output_so_far() }),
            Err(error) => Err(self.failure(&format!("the guest has ended ({error})"))),
        }
    }

    fn failure(&self, why: &str) -> anyhow::Error {
        let output = self.output_so_far();
        anyhow!("{} in the guest: {why}; so far {output}\n{}", self.what, self.console.failure())
    }
}

impl Drop for RunningCommand {
    fn drop(&mut self) {
        // The agent kills the command of a closed connection.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// Passes output on until the exit status comes.
fn receive(stream: &TcpStream, mut sink: Sink) -> io::Result<i32> {
    let mut reader = BufReader::with_capacity(64 * 1024, stream);
    loop {
        let (kind, payload) = read_frame(&mut reader)?;
        match kind {
            b'o' => sink(Stream::Stdout, &payload),
            b'e' => sink(Stream::Stderr, &payload),
            b'x' => {
                return str::from_utf8(&payload)
                    .ok()
                    .and_then(|text| text.parse().ok())
                    .ok_or_else(|| io::Error::other("the agent sent no exit status"));
            }
            _ => return Err(io::Error::other("the agent sent an unknown frame")),
        }
    }
}

fn read_frame(reader: &mut impl Read) -> io::Result<(u8, Vec<u8>)> {
    let mut header = [0; 5];
    reader.read_exact(&mut header)?;
    let [kind, length @ ..] = header;
    let length = u32::from_be_bytes(length);
    if length > FRAME_LIMIT {
        return Err(io::Error::other(format!("the agent sent a frame of {length} bytes")));
    }
    let mut payload = vec![0; length as usize];
    reader.read_exact(&mut payload)?;
    Ok((kind, payload))
}

/// Sends one frame to the agent.
pub fn write_frame(writer: &mut impl Write, kind: u8, payload: &[u8]) -> io::Result<()> {
    let length = u32::try_from(payload.len())
        .ok()
        .filter(|&length| length <= FRAME_LIMIT)
        .ok_or_else(|| io::Error::other("too much for one frame"))?;
    let mut frame = Vec::with_capacity(payload.len() + 5);
    frame.push(kind);
    frame.extend_from_slice(&length.to_be_bytes());
    frame.extend_from_slice(payload);
    writer.write_all(&frame)
}
