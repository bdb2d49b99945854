use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use shorthorn_testkit::nbd::{
    FLAG_FUA, REPLY_BYTES, SIMPLE_REPLY_MAGIC, be32, be64, command, negotiate, request_head,
};

/// The time limit of a negotiation, which a listening engine answers soon; after that the client tries again.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// Between two attempts to connect.
const CONNECT_PAUSE: Duration = Duration::from_millis(10);

/// A request of a client. Offsets and lengths are in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdRequest {
    /// The answer has the data.
    Read {
        /// The first byte.
        offset: u64,
        /// The length in bytes.
        length: u32,
    },
    /// New data.
    Write {
        /// The first byte.
        offset: u64,
        /// The bytes to store.
        data: Vec<u8>,
        /// Durable when answered.
        fua: bool,
    },
    /// Makes all writes answered before durable.
    Flush,
    /// The data is of no more use.
    Trim {
        /// The first byte.
        offset: u64,
        /// The length in bytes.
        length: u32,
    },
    /// Reads as zeroes from now on.
    WriteZeroes {
        /// The first byte.
        offset: u64,
        /// The length in bytes.
        length: u32,
        /// Durable when answered.
        fua: bool,
    },
}

/// An answer.
#[derive(Clone, Debug)]
pub struct NbdCompletion {
    /// The cookie that [`NbdClient::submit`] returned.
    pub cookie: u64,
    /// The request that is answered.
    pub request: NbdRequest,
    /// The data of a read, or an errno value.
    pub outcome: Result<Vec<u8>, u32>,
}

/// A pipelined NBD client on a Unix socket that survives its server, like the kernel's. It connects again and
/// sends unanswered requests once more, in the order in which they were submitted.
#[derive(Debug)]
pub struct NbdClient {
    socket: PathBuf,
    export: String,
    size_bytes: u64,
    connection: Option<Connection>,
    outstanding: BTreeMap<u64, NbdRequest>,
    done: VecDeque<NbdCompletion>,
    next_cookie: u64,
    reconnections: u64,
}

#[derive(Debug)]
struct Connection {
    stream: UnixStream,
    /// The bytes to send.
    out: VecDeque<u8>,
    /// The received bytes of an incomplete answer.
    input: Vec<u8>,
}

impl NbdClient {
    /// Connects to the export `export` behind `socket`, trying for as long as `limit`.
    ///
    /// # Errors
    /// No server answers there in time.
    pub fn connect(socket: &Path, export: &str, limit: Duration) -> Result<NbdClient> {
        let mut client = NbdClient {
            socket: socket.to_owned(),
            export: export.to_owned(),
            size_bytes: 0,
            connection: None,
            outstanding: BTreeMap::new(),
            done: VecDeque::new(),
            next_cookie: 1,
            reconnections: 0,
        };
        let deadline = Instant::now() + limit;
        loop {
            match client.try_connect() {
                Ok(()) => return Ok(client),
                Err(error) if Instant::now() >= deadline => {
                    return Err(error.context(format!("no NBD server at {}", socket.display())));
                }
                // The server may not listen yet, and nothing notifies of that.
                Err(_) => std::thread::sleep(CONNECT_PAUSE),
            }
        }
    }

    /// Returns the size of the export.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Returns how often the client had to connect again.
    #[must_use]
    pub fn reconnections(&self) -> u64 {
        self.reconnections
    }

    /// Requests without an answer, by their cookies.
    #[must_use]
    pub fn outstanding(&self) -> &BTreeMap<u64, NbdRequest> {
        &self.outstanding
    }

    /// Gives a request to the server, now or as soon as there is one again.
    pub fn submit(&mut self, request: NbdRequest) -> u64 {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        if let Some(connection) = &mut self.connection {
            connection.queue(cookie, &request);
        }
        self.outstanding.insert(cookie, request);
        cookie
    }

    /// Waits for the next answer; none if `limit` passes before.
    ///
    /// # Errors
    /// The server breaks the protocol. A connection that ends is none: it is made again.
    pub fn wait(&mut self, limit: Duration) -> Result<Option<NbdCompletion>> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(completion) = self.done.pop_front() {
                return Ok(Some(completion));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let Some(connection) = &mut self.connection else {
                match self.try_connect() {
                    Ok(()) => self.reconnections += 1,
                    Err(_) if left.is_zero() => return Ok(None),
                    Err(_) => std::thread::sleep(CONNECT_PAUSE.min(left)),
                }
                continue;
            };
            connection.wait(left)?;
            if connection.exchange().is_err() {
                self.connection = None;
                continue;
            }
            self.take_answers()?;
            if self.done.is_empty() && left.is_zero() {
                return Ok(None);
            }
        }
    }

    /// Asks and waits for the answer; other answers that come meanwhile are kept.
    ///
    /// # Errors
    /// No answer within `limit`.
    pub fn call(&mut self, request: NbdRequest, limit: Duration) -> Result<Result<Vec<u8>, u32>> {
        let cookie = self.submit(request);
        let mut others = VecDeque::new();
        let deadline = Instant::now() + limit;
        let outcome = loop {
            match self.wait(deadline.saturating_duration_since(Instant::now()))? {
                Some(completion) if completion.cookie == cookie => break completion.outcome,
                Some(completion) => others.push_back(completion),
                None => bail!("no answer from {} within {limit:?}", self.socket.display()),
            }
        };
        others.append(&mut self.done);
        self.done = others;
        Ok(outcome)
    }

    fn try_connect(&mut self) -> Result<()> {
        let (stream, size_bytes) = negotiate(&self.socket, &self.export, HANDSHAKE_LIMIT)?;
        stream.set_nonblocking(true)?;
        let mut connection = Connection { stream, out: VecDeque::new(), input: Vec::new() };
        for (cookie, request) in &self.outstanding {
            connection.queue(*cookie, request);
        }
        self.size_bytes = size_bytes;
        self.connection = Some(connection);
        Ok(())
    }

    fn take_answers(&mut self) -> Result<()> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        let mut taken = 0;
        while let Some(header) = connection.input.get(taken..taken + REPLY_BYTES) {
            let (magic, error, cookie) = (be32(header), be32(&header[4..]), be64(&header[8..]));
            ensure!(magic == SIMPLE_REPLY_MAGIC, "an NBD reply begins with {magic:#x}");
            let request = self.outstanding.get(&cookie);
            let request = request.with_context(|| format!("an answer to the unknown request {cookie}"))?;
            let data_bytes = match request {
                NbdRequest::Read { length, .. } if error == 0 => usize::try_from(*length)?,
                _ => 0,
            };
            let data = taken + REPLY_BYTES..taken + REPLY_BYTES + data_bytes;
            let Some(data_here) = connection.input.get(data.clone()) else { break };
            let outcome = if error == 0 { Ok(data_here.to_vec()) } else { Err(error) };
            taken = data.end;
            if let Some(request) = self.outstanding.remove(&cookie) {
                self.done.push_back(NbdCompletion { cookie, request, outcome });
            }
        }
        connection.input.drain(..taken);
        Ok(())
    }
}

impl Connection {
    fn queue(&mut self, cookie: u64, request: &NbdRequest) {
        let fua_flag = |fua: &bool| if *fua { FLAG_FUA } else { 0 };
        let (kind, flags, offset, length): (u16, u16, u64, u32) = match request {
            NbdRequest::Read { offset, length } => (command::READ, 0, *offset, *length),
            NbdRequest::Write { offset, data, fua } => {
                let length = u32::try_from(data.len()).expect("requests are small");
                (command::WRITE, fua_flag(fua), *offset, length)
            }
            NbdRequest::Flush => (command::FLUSH, 0, 0, 0),
            NbdRequest::Trim { offset, length } => (command::TRIM, 0, *offset, *length),
            NbdRequest::WriteZeroes { offset, length, fua } => {
                (command::WRITE_ZEROES, fua_flag(fua), *offset, *length)
            }
        };
        self.out.extend(request_head(kind, flags, cookie, offset, length));
        if let NbdRequest::Write { data, .. } = request {
            self.out.extend(data);
        }
    }

    /// Waits until there is something to receive, or room to send.
    fn wait(&self, limit: Duration) -> Result<()> {
        let mut flags = PollFlags::POLLIN;
        flags.set(PollFlags::POLLOUT, !self.out.is_empty());
        // Rounded up: a wait of less than a millisecond is not a reason to spin.
        let limit = PollTimeout::try_from(limit.as_micros().div_ceil(1000)).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(self.stream.as_fd(), flags)], limit) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(error) => Err(error).context("polling an NBD connection"),
        }
    }

    /// Sends and receives without waiting; returns an error if the connection has ended.
    fn exchange(&mut self) -> io::Result<()> {
        while !self.out.is_empty() {
            match self.stream.write(self.out.as_slices().0) {
                Ok(sent) => drop(self.out.drain(..sent)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        let mut chunk = [0; 64 << 10];
        loop {
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(received) => self.input.extend(&chunk[..received]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }
}
