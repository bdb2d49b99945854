//! A connection to a replica before it is given to a queue: blocking, with time limits.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nix::sys::socket::{setsockopt, sockopt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use shorthorn_control::Secret;
use shorthorn_types::{Errno, Generation, View};
use shorthorn_wire::{
    Challenge, FrameError, HEADER_BYTES, Header, Hello, Opcode, Refusal, ReplicaReport, ViewMessage, Welcome,
    decode_text, encode_text, proof,
};
use thiserror::Error;

/// Room for whole requests in the socket, so that large ones are not sent piecemeal; the system may give less.
const SOCKET_BUFFER_BYTES: usize = 4 << 20;

/// Why a replica could not be opened.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// The address is none.
    #[error("{0:?} is no address: use unix:<path> or tcp:<ip>:<port>")]
    Address(String),
    /// The connection cannot be made or broke.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The peer does not speak the protocol.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The peer speaks the protocol, but not now.
    #[error("unexpected {0}")]
    Unexpected(Header),
    /// A newer engine holds the replica.
    #[error("{message}")]
    Deposed {
        /// Of the newer engine.
        holder: Generation,
        /// What the replica says.
        message: String,
    },
    /// The replica does not take this engine.
    #[error("{message} ({errno})")]
    Refused {
        /// What the replica says.
        message: String,
        /// As a number.
        errno: Errno,
    },
}

/// A blocking connection.
#[derive(Debug)]
pub enum Connection {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Connection {
    /// Connects to `unix:<path>` or `tcp:<ip>:<port>`; `timeout` holds for this and every later step.
    pub fn open(address: &str, timeout: Duration) -> Result<Connection, ConnectError> {
        if let Some(path) = address.strip_prefix("unix:") {
            let stream = UnixStream::connect(path)?;
            stream.set_read_timeout(Some(timeout))?;
            stream.set_write_timeout(Some(timeout))?;
            // The system's limit may be lower: then requests are sent in more pieces.
            let _ = setsockopt(&stream, sockopt::SndBuf, &SOCKET_BUFFER_BYTES);
            return Ok(Connection::Unix(stream));
        }
        let tcp: Option<SocketAddr> = address.strip_prefix("tcp:").and_then(|rest| rest.parse().ok());
        let socket = tcp.ok_or_else(|| ConnectError::Address(address.to_owned()))?;
        let stream = TcpStream::connect_timeout(&socket, timeout)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        stream.set_nodelay(true)?;
        Ok(Connection::Tcp(stream))
    }

    /// Says who we are; the replica has fenced every older engine when it answers.
    pub fn greet(&mut self, mut hello: Hello, secret: &Secret) -> Result<Welcome, ConnectError> {
        let challenge: Challenge = self.receive(Opcode::Challenge)?;
        hello.proof = proof(secret.bytes(), &challenge.nonce, &hello);
        self.send(Opcode::Hello, &hello)?;
        self.receive(Opcode::Hello)
    }

    /// Has the replica store a proposed view.
    pub fn propose(&mut self, view: View, honoured: &ReplicaReport) -> Result<(), ConnectError> {
        self.send(Opcode::Propose, &ViewMessage { view, basis: honoured.clone() })?;
        self.receive_plain(Opcode::Propose)
    }

    /// Has the replica mark a view as committed.
    pub fn commit(&mut self, view: View, honoured: &ReplicaReport) -> Result<(), ConnectError> {
        self.send(Opcode::Commit, &ViewMessage { view, basis: honoured.clone() })?;
        self.receive_plain(Opcode::Commit)
    }

    /// The socket, ready for a ring.
    pub fn into_socket(self) -> io::Result<OwnedFd> {
        match self {
            Connection::Unix(stream) => {
                stream.set_read_timeout(None)?;
                stream.set_write_timeout(None)?;
                Ok(stream.into())
            }
            Connection::Tcp(stream) => {
                stream.set_read_timeout(None)?;
                stream.set_write_timeout(None)?;
                Ok(stream.into())
            }
        }
    }

    fn send<T: Serialize>(&mut self, opcode: Opcode, text: &T) -> Result<(), ConnectError> {
        let (header, bytes) = encode_text(Header::request(opcode, 0, 0, 0), text);
        self.write_all(&[&header.encode()[..], &bytes].concat())?;
        Ok(())
    }

    fn receive<T: DeserializeOwned>(&mut self, opcode: Opcode) -> Result<T, ConnectError> {
        let (header, bytes) = self.receive_frame(opcode)?;
        Ok(decode_text(&header, &bytes)?)
    }

    fn receive_plain(&mut self, opcode: Opcode) -> Result<(), ConnectError> {
        self.receive_frame(opcode).map(drop)
    }

    fn receive_frame(&mut self, opcode: Opcode) -> Result<(Header, Vec<u8>), ConnectError> {
        let mut bytes = [0; HEADER_BYTES];
        self.read_exact(&mut bytes)?;
        let header = Header::decode(&bytes)?;
        if header.opcode != opcode || !header.opcode.is_control() {
            return Err(ConnectError::Unexpected(header));
        }
        let mut text = vec![0; header.data_bytes() as usize];
        self.read_exact(&mut text)?;
        match header.outcome() {
            Ok(()) => Ok((header, text)),
            Err(errno) => Err(refusal(&header, &text, errno)),
        }
    }
}

/// What a refusal says, in either form: with or without a text.
pub fn refusal(header: &Header, text: &[u8], errno: Errno) -> ConnectError {
    match decode_text::<Refusal>(header, text) {
        Ok(Refusal { message, holder: Some(holder) }) => ConnectError::Deposed { holder, message },
        Ok(Refusal { message, holder: None }) => ConnectError::Refused { message, errno },
        Err(_) => ConnectError::Refused { message: "the replica refuses".to_owned(), errno },
    }
}

impl Read for Connection {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Connection::Unix(stream) => stream.read(buf),
            Connection::Tcp(stream) => stream.read(buf),
        }
    }
}

impl Write for Connection {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Connection::Unix(stream) => stream.write(buf),
            Connection::Tcp(stream) => stream.write(buf),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
