//! A client of NBD on a Unix socket. It has the negotiation and the frames, for clients of every kind, and
//! [`Nbd`], which asks for one thing at a time. The protocol: doc/proto.md of the NBD project.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const SERVER_MAGIC: u64 = 0x4e42_444d_4147_4943;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
/// The magic number of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// The length of a simple reply, without the data of a read.
pub const REPLY_BYTES: usize = 16;
/// Fixed newstyle, and no zeroes after the export's information.
const CLIENT_FLAGS: u32 = 3;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const INFO_EXPORT: u16 = 0;
/// The longest reply to an option that is taken.
const OPTION_REPLY_MAX_BYTES: u32 = 64 << 10;

/// Command numbers.
pub mod command {
    #![allow(missing_docs)] // they are what they are called
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISCONNECT: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const WRITE_ZEROES: u16 = 6;
}

/// Durable when answered.
pub const FLAG_FUA: u16 = 1;

/// The time limit of every wait, far above the duration of any answer: reaching it is a bug.
const LIMIT: Duration = Duration::from_secs(60);

/// Negotiates fixed newstyle with GO. Returns a blocking stream in the transmission phase, and the size of
/// the export in bytes.
///
/// # Errors
/// No server listens there, or answers within `limit`, or has the export.
pub fn negotiate(socket: &Path, export: &str, limit: Duration) -> io::Result<(UnixStream, u64)> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    let greeting: [u8; 18] = receive(&mut stream)?;
    if be64(&greeting) != SERVER_MAGIC || be64(&greeting[8..]) != OPTION_MAGIC {
        return Err(io::Error::other(format!("no NBD server: {greeting:?}")));
    }
    stream.write_all(&go_option(export))?;
    let mut size_bytes = None;
    loop {
        let header: [u8; 20] = receive(&mut stream)?;
        let (kind, length) = (be32(&header[12..]), be32(&header[16..]));
        if be64(&header) != OPTION_REPLY_MAGIC || length > OPTION_REPLY_MAX_BYTES {
            return Err(io::Error::other(format!("no reply to an NBD option: {header:?}")));
        }
        let mut data = vec![0; length as usize];
        stream.read_exact(&mut data)?;
        match kind {
            REPLY_INFO if data.len() >= 10 && data[..2] == INFO_EXPORT.to_be_bytes() => {
                size_bytes = Some(be64(&data[2..]));
            }
            REPLY_INFO => {}
            REPLY_ACK => break,
            refused => {
                let why = String::from_utf8_lossy(&data);
                return Err(io::Error::other(format!("export {export} is refused with {refused:#x}: {why}")));
            }
        }
    }
    let size_bytes = size_bytes.ok_or_else(|| io::Error::other("the NBD server has not sent the size"))?;
    Ok((stream, size_bytes))
}

fn go_option(export: &str) -> Vec<u8> {
    let name_bytes = u32::try_from(export.len()).unwrap_or(u32::MAX);
    let mut message = CLIENT_FLAGS.to_be_bytes().to_vec();
    message.extend(OPTION_MAGIC.to_be_bytes());
    message.extend(OPTION_GO.to_be_bytes());
    message.extend(name_bytes.saturating_add(6).to_be_bytes());
    message.extend(name_bytes.to_be_bytes());
    message.extend(export.as_bytes());
    message.extend(0u16.to_be_bytes()); // no more information than there is anyway
    message
}

/// Returns the head of a request; the data of a write follow it.
#[must_use]
pub fn request_head(command: u16, flags: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    let mut head = REQUEST_MAGIC.to_be_bytes().to_vec();
    head.extend(flags.to_be_bytes());
    head.extend(command.to_be_bytes());
    head.extend(cookie.to_be_bytes());
    head.extend(offset.to_be_bytes());
    head.extend(length.to_be_bytes());
    head
}

fn receive<const N: usize>(stream: &mut UnixStream) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Returns the number in the first four bytes.
///
/// # Panics
/// The slice is shorter.
#[must_use]
pub fn be32(bytes: &[u8]) -> u32 {
    u32::from_be_bytes(*bytes.first_chunk().expect("four bytes"))
}

/// Returns the number in the first eight bytes.
///
/// # Panics
/// The slice is shorter.
#[must_use]
pub fn be64(bytes: &[u8]) -> u64 {
    u64::from_be_bytes(*bytes.first_chunk().expect("eight bytes"))
}

/// A client that asks for one thing at a time and waits for it.
#[derive(Debug)]
pub struct Nbd {
    stream: UnixStream,
    /// Size of the export.
    pub size_bytes: u64,
}

/// The cookie of every request, because requests are made one at a time.
const COOKIE: u64 = 7;

impl Nbd {
    /// Connects to the export `export` behind `socket`.
    ///
    /// # Errors
    /// As of [`negotiate`].
    pub fn connect(socket: &Path, export: &str) -> io::Result<Nbd> {
        let (stream, size_bytes) = negotiate(socket, export, LIMIT)?;
        Ok(Nbd { stream, size_bytes })
    }

    /// Writes `data`, durably.
    ///
    /// # Errors
    /// The server has gone, or has answered with an error.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.begin_write(offset, data.len())?;
        self.stream.write_all(data)?;
        self.end_write()
    }

    /// Writes `data`, which need not be durable before the next flush.
    ///
    /// # Errors
    /// The server has gone, or has answered with an error.
    pub fn write_volatile(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.ask(command::WRITE, 0, offset, data.len())?;
        self.stream.write_all(data)?;
        self.take_reply()
    }

    /// Has all that was written made durable.
    ///
    /// # Errors
    /// The server has gone, or has answered with an error.
    pub fn flush(&mut self) -> io::Result<()> {
        self.ask(command::FLUSH, 0, 0, 0)?;
        self.take_reply()
    }

    /// Announces a write of `length` bytes, which the caller sends on [`Nbd::stream`].
    ///
    /// # Errors
    /// The server has gone.
    pub fn begin_write(&mut self, offset: u64, length: usize) -> io::Result<()> {
        self.ask(command::WRITE, FLAG_FUA, offset, length)
    }

    /// Takes the answer to a write.
    ///
    /// # Errors
    /// The server has gone, or has answered with an error.
    pub fn end_write(&mut self) -> io::Result<()> {
        self.take_reply()
    }

    fn take_reply(&mut self) -> io::Result<()> {
        let reply: [u8; REPLY_BYTES] = receive(&mut self.stream)?;
        let (magic, error, cookie) = (be32(&reply), be32(&reply[4..]), be64(&reply[8..]));
        match (magic, error, cookie) {
            (SIMPLE_REPLY_MAGIC, 0, COOKIE) => Ok(()),
            (SIMPLE_REPLY_MAGIC, error, COOKIE) => {
                Err(io::Error::from_raw_os_error(i32::try_from(error).unwrap_or(i32::MAX)))
            }
            _ => Err(io::Error::other(format!("no reply to the NBD request: {reply:?}"))),
        }
    }

    /// Reads a range.
    ///
    /// # Errors
    /// The server has gone, or has answered with an error.
    pub fn read(&mut self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        self.begin_read(offset, length)?;
        self.end_read(length)
    }

    /// Asks for data, and takes no answer yet.
    ///
    /// # Errors
    /// The server has gone.
    pub fn begin_read(&mut self, offset: u64, length: usize) -> io::Result<()> {
        self.ask(command::READ, 0, offset, length)
    }

    /// Takes the answer to a read of `length` bytes.
    ///
    /// # Errors
    /// The server has gone, or has answered with an error.
    pub fn end_read(&mut self, length: usize) -> io::Result<Vec<u8>> {
        self.take_reply()?;
        let mut data = vec![0; length];
        self.stream.read_exact(&mut data)?;
        Ok(data)
    }

    /// Returns the connection.
    pub fn stream(&mut self) -> &mut UnixStream {
        &mut self.stream
    }

    fn ask(&mut self, command: u16, flags: u16, offset: u64, length: usize) -> io::Result<()> {
        let length = u32::try_from(length).map_err(io::Error::other)?;
        self.stream.write_all(&request_head(command, flags, COOKIE, offset, length))
    }
}

impl Drop for Nbd {
    fn drop(&mut self) {
        // The server may have gone.
        let _ = self.ask(command::DISCONNECT, 0, 0, 0);
    }
}
