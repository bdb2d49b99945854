//! A connected stream socket on a ring: frames out, bytes in.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::ptr;

use io_uring::opcode;
use io_uring::types::Fd;

use crate::peer::is_encrypted;
use crate::{Completion, IoBuf, Ring, Token};

/// The longest header that a frame can have.
const HEADER_MAX_BYTES: usize = 64;
/// Segments in one sendmsg. More gain nothing: the socket buffer is full before.
const SEGMENTS: usize = 64;

/// The maximum buffers of a stream.
#[derive(Clone, Copy, Debug)]
pub struct StreamLimits {
    /// Frames that wait to be sent.
    pub frames: usize,
    /// Received bytes that wait to be consumed.
    pub receive_bytes: usize,
}

/// The result of a completed receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// New bytes are in [`Stream::bytes`].
    Bytes,
    /// The buffer given to [`Stream::receive_into`] is full.
    Payload,
    /// The buffer given to [`Stream::receive_into`] is not yet full.
    Part,
    /// The peer has closed.
    End,
}

/// A connected stream socket, driven by completions of a [`Ring`].
///
/// Sending: [`Stream::send`] queues a frame, [`Stream::flush`] starts one sendmsg over as many frames as fit,
/// [`Stream::on_sent`] takes its completion. Receiving: [`Stream::arm`] starts a receive,
/// [`Stream::on_received`] takes its completion. At most one of each is in flight. After
/// [`Stream::shutdown`] both come back soon; the stream may be dropped when [`Stream::is_idle`].
#[derive(Debug)]
pub struct Stream {
    fd: OwnedFd,
    /// The flags of sendmsg.
    send_flags: u32,
    send_token: Token,
    receive_token: Token,
    outgoing: Outgoing,
    incoming: ReceiveBuffer,
}

impl Stream {
    /// Takes a connected socket. The two tokens distinguish the completions.
    #[must_use]
    pub fn new(fd: OwnedFd, send_token: Token, receive_token: Token, limits: StreamLimits) -> Stream {
        // With MSG_WAITALL a send completes once. The kernel's TLS refuses the flag (tls_sw_sendmsg of
        // net/tls/tls_sw.c): there, a send may complete in parts.
        let whole = if is_encrypted(&fd) { 0 } else { libc::MSG_WAITALL };
        Stream {
            fd,
            send_flags: u32::try_from(libc::MSG_NOSIGNAL | whole).unwrap_or(0),
            send_token,
            receive_token,
            outgoing: Outgoing::new(limits.frames),
            incoming: ReceiveBuffer::new(limits.receive_bytes),
        }
    }

    /// Queues a frame: `header`, copied, and `payload`, which must not change before `owner` has come out of
    /// [`Stream::on_sent`].
    ///
    /// # Errors
    /// ENOBUFS if the stream holds as many frames as its limit, EINVAL for a header over 64 bytes.
    pub fn send(&mut self, header: &[u8], payload: Option<IoBuf>, owner: Option<u32>) -> io::Result<()> {
        self.outgoing.push(header, payload.map_or(Payload::None, Payload::Buf), owner)
    }

    /// Queues a frame whose payload the stream owns: for rare control frames.
    ///
    /// # Errors
    /// As [`Stream::send`].
    pub fn send_owned(&mut self, header: &[u8], payload: Vec<u8>) -> io::Result<()> {
        self.outgoing.push(header, Payload::Owned(payload.into_boxed_slice()), None)
    }

    /// Starts to send the queued data, unless a send is in flight already.
    pub fn flush(&mut self, ring: &mut Ring) {
        if self.outgoing.in_flight || !self.outgoing.gather() {
            return;
        }
        let entry =
            opcode::SendMsg::new(Fd(self.fd.as_raw_fd()), ptr::from_ref(&self.outgoing.message.header))
                .flags(self.send_flags)
                .build();
        self.outgoing.in_flight = true;
        // SAFETY: message and frames are boxed, are not touched while in flight, and outlive the request
        // (see Drop). Payload buffers are arena memory or owned by the frame.
        unsafe { ring.push(entry, self.send_token) }
    }

    /// Takes the completion of a send; the owners of frames that are out are appended to `finished`.
    ///
    /// # Errors
    /// The error of sendmsg: the connection is of no more use.
    pub fn on_sent(&mut self, completion: Completion, finished: &mut Vec<u32>) -> io::Result<()> {
        self.outgoing.in_flight = false;
        let mut count = match completion.count() {
            // Nothing was sent. A socket that encrypts waits for its lock, which task work interrupts.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => 0,
            counted => counted?,
        };
        while count > 0 {
            let Some(owner) = self.outgoing.advance(&mut count) else { break };
            finished.extend(owner);
        }
        Ok(())
    }

    /// Appends the owners of all frames that are not out: after the connection is given up.
    pub fn abandon(&mut self, finished: &mut Vec<u32>) {
        while self.outgoing.queued > 0 {
            finished.extend(self.outgoing.pop());
        }
    }

    /// Starts a receive, unless one is in flight or the buffer is full.
    pub fn arm(&mut self, ring: &mut Ring) {
        self.arm_at_most(ring, u32::MAX);
    }

    /// Arms a receive like [`Stream::arm`], for at most `bytes`; later bytes stay in the socket.
    pub fn arm_at_most(&mut self, ring: &mut Ring, bytes: u32) {
        if self.incoming.in_flight {
            return;
        }
        let (target, length) = self.incoming.target();
        let length = length.min(bytes);
        if length == 0 {
            return;
        }
        let entry = opcode::Recv::new(Fd(self.fd.as_raw_fd()), target, length).build();
        self.incoming.in_flight = true;
        // SAFETY: the target is arena memory or the boxed receive buffer, which outlives the request (see
        // Drop).
        unsafe { ring.push(entry, self.receive_token) }
    }

    /// Has the receive that is in flight come back, with or without bytes; the request for it completes with
    /// `token`.
    pub fn disarm(&mut self, ring: &mut Ring, token: Token) {
        if self.incoming.in_flight {
            ring.cancel(self.receive_token, token);
        }
    }

    /// Returns a descriptor of the socket for another process that continues with it.
    ///
    /// # Errors
    /// The error of dup.
    pub fn share(&self) -> io::Result<OwnedFd> {
        self.fd.try_clone()
    }

    /// Handles the completion of a receive. A receive without data is not an error.
    ///
    /// # Errors
    /// The error of recv: the connection is of no more use.
    pub fn on_received(&mut self, completion: Completion) -> io::Result<Received> {
        self.incoming.in_flight = false;
        let count = match completion.count() {
            Err(error)
                if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::ECANCELED)) =>
            {
                return Ok(if self.incoming.payload.is_some() { Received::Part } else { Received::Bytes });
            }
            other => other?,
        };
        Ok(self.incoming.take(count))
    }

    /// Returns the received bytes that were not consumed yet.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.incoming.buffer[self.incoming.start..self.incoming.end]
    }

    /// Drops the first `count` of [`Stream::bytes`].
    pub fn consume(&mut self, count: usize) {
        let ReceiveBuffer { start, end, .. } = &mut self.incoming;
        *start = (*start + count).min(*end);
    }

    /// Receives the next `buf.len()` bytes into `buf`: copies those already received, and receives the rest
    /// in place. Returns true if all bytes were already received.
    pub fn receive_into(&mut self, buf: IoBuf) -> bool {
        let here = self.bytes().len().min(buf.len());
        buf.copy_from(&self.bytes()[..here]);
        self.consume(here);
        if here == buf.len() {
            return true;
        }
        self.incoming.payload = Some(buf.part(here, buf.len() - here));
        false
    }

    /// Returns true if bytes for a payload are still missing.
    #[must_use]
    pub fn awaits_payload(&self) -> bool {
        self.incoming.payload.is_some()
    }

    /// Ends the connection both ways; requests in flight come back.
    pub fn shutdown(&self) {
        if let Ok(fd) = self.fd.try_clone() {
            // An error means that the socket is not connected any more, as wanted. The call is the same for
            // every kind of socket.
            let _ = UnixStream::from(fd).shutdown(Shutdown::Both);
        }
    }

    /// Returns true if nothing of this stream is in the ring.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        !self.outgoing.in_flight && !self.incoming.in_flight
    }

    /// Returns true if frames wait to be sent.
    #[must_use]
    pub fn is_sending(&self) -> bool {
        self.outgoing.queued > 0
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // The kernel may still write into these: leaking them is the safe end of a rare case.
        if self.outgoing.in_flight {
            std::mem::forget(std::mem::take(&mut self.outgoing.frames));
            std::mem::forget(std::mem::replace(&mut self.outgoing.message, SendmsgArguments::new()));
        }
        if self.incoming.in_flight {
            std::mem::forget(std::mem::take(&mut self.incoming.buffer));
        }
    }
}

#[derive(Debug, Default)]
enum Payload {
    #[default]
    None,
    Buf(IoBuf),
    Owned(Box<[u8]>),
}

#[derive(Debug)]
struct Frame {
    header: [u8; HEADER_MAX_BYTES],
    header_bytes: usize,
    payload: Payload,
    owner: Option<u32>,
}

impl Frame {
    const EMPTY: Frame =
        Frame { header: [0; HEADER_MAX_BYTES], header_bytes: 0, payload: Payload::None, owner: None };

    fn payload(&self) -> (*const u8, usize) {
        match &self.payload {
            Payload::None => (ptr::null(), 0),
            Payload::Buf(buf) => (buf.as_ptr(), buf.len()),
            Payload::Owned(bytes) => (bytes.as_ptr(), bytes.len()),
        }
    }

    fn length(&self) -> usize {
        self.header_bytes + self.payload().1
    }
}

/// The arguments of sendmsg, at a fixed address.
#[derive(Debug)]
struct SendmsgArguments {
    header: libc::msghdr,
    segments: [libc::iovec; SEGMENTS],
}

impl SendmsgArguments {
    fn new() -> Box<SendmsgArguments> {
        let empty = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };
        // SAFETY: msghdr is plain C data: all zeroes is its empty value.
        let header = unsafe { std::mem::zeroed() };
        let mut message = Box::new(SendmsgArguments { header, segments: [empty; SEGMENTS] });
        message.header.msg_iov = message.segments.as_mut_ptr();
        message
    }
}

/// A ring of frames; the first may be out in part.
#[derive(Debug)]
struct Outgoing {
    frames: Box<[Frame]>,
    first: usize,
    queued: usize,
    /// Bytes of the first frame that are out.
    sent_bytes: usize,
    message: Box<SendmsgArguments>,
    in_flight: bool,
}

// SAFETY: the raw pointers in the message point into memory that this struct owns, or into an arena.
unsafe impl Send for Outgoing {}

impl Outgoing {
    fn new(frames: usize) -> Outgoing {
        let frames = (0..frames).map(|_| Frame::EMPTY).collect();
        Outgoing {
            frames,
            first: 0,
            queued: 0,
            sent_bytes: 0,
            message: SendmsgArguments::new(),
            in_flight: false,
        }
    }

    fn push(&mut self, header: &[u8], payload: Payload, owner: Option<u32>) -> io::Result<()> {
        if self.queued == self.frames.len() {
            return Err(io::Error::from_raw_os_error(libc::ENOBUFS));
        }
        if header.len() > HEADER_MAX_BYTES {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let at = (self.first + self.queued) % self.frames.len();
        let frame = &mut self.frames[at];
        frame.header[..header.len()].copy_from_slice(header);
        frame.header_bytes = header.len();
        frame.payload = payload;
        frame.owner = owner;
        self.queued += 1;
        Ok(())
    }

    fn pop(&mut self) -> Option<u32> {
        let frame = &mut self.frames[self.first];
        frame.payload = Payload::None;
        let owner = frame.owner.take();
        self.first = (self.first + 1) % self.frames.len();
        self.queued -= 1;
        self.sent_bytes = 0;
        owner
    }

    /// Fills the message with the queued segments, as many as fit. Returns false if the queue is empty.
    fn gather(&mut self) -> bool {
        let mut used = 0;
        for n in 0..self.queued {
            if used + 2 > SEGMENTS {
                break;
            }
            let frame = &self.frames[(self.first + n) % self.frames.len()];
            let out = if n == 0 { self.sent_bytes } else { 0 };
            let (payload, payload_bytes) = frame.payload();
            let parts = [
                (frame.header.as_ptr(), frame.header_bytes, 0),
                (payload, payload_bytes, frame.header_bytes),
            ];
            for (base, length, before) in parts {
                let skip = out.saturating_sub(before).min(length);
                if length > skip {
                    let iov_base = base.wrapping_add(skip).cast_mut().cast();
                    self.message.segments[used] = libc::iovec { iov_base, iov_len: length - skip };
                    used += 1;
                }
            }
        }
        self.message.header.msg_iovlen = used;
        used > 0
    }

    /// Counts up to `count` bytes of the first frame as sent; returns its owner if it is completely sent.
    #[allow(clippy::option_option)] // outer: the frame is out; inner: it has an owner
    fn advance(&mut self, count: &mut usize) -> Option<Option<u32>> {
        if self.queued == 0 {
            return None;
        }
        let rest = self.frames[self.first].length() - self.sent_bytes;
        if *count < rest {
            self.sent_bytes += *count;
            *count = 0;
            return None;
        }
        *count -= rest;
        Some(self.pop())
    }
}

/// A receive buffer, and the payload that is being received past it.
#[derive(Debug)]
struct ReceiveBuffer {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    payload: Option<IoBuf>,
    in_flight: bool,
}

impl ReceiveBuffer {
    fn new(bytes: usize) -> ReceiveBuffer {
        ReceiveBuffer { buffer: vec![0; bytes].into(), start: 0, end: 0, payload: None, in_flight: false }
    }

    /// Returns the buffer for the next bytes.
    fn target(&mut self) -> (*mut u8, u32) {
        if let Some(payload) = self.payload {
            return (payload.as_ptr(), u32::try_from(payload.len()).unwrap_or(u32::MAX));
        }
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let room = &mut self.buffer[self.end..];
        (room.as_mut_ptr(), u32::try_from(room.len()).unwrap_or(u32::MAX))
    }

    fn take(&mut self, count: usize) -> Received {
        if count == 0 {
            return Received::End;
        }
        let Some(payload) = self.payload else {
            self.end = (self.end + count).min(self.buffer.len());
            return Received::Bytes;
        };
        let rest = payload.len().saturating_sub(count);
        self.payload = (rest > 0).then(|| payload.part(payload.len() - rest, rest));
        if rest == 0 { Received::Payload } else { Received::Part }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;
    use crate::Arena;

    const SEND: Token = Token { source: 1, kind: 0, index: 0, tag: 0 };
    const RECEIVE: Token = Token { source: 1, kind: 1, index: 0, tag: 0 };

    fn pair(frames: usize) -> (Stream, UnixStream, Ring) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let limits = StreamLimits { frames, receive_bytes: 64 };
        (Stream::new(ours.into(), SEND, RECEIVE, limits), theirs, Ring::new(8).unwrap())
    }

    fn next(ring: &mut Ring) -> Completion {
        let mut out = Vec::new();
        ring.wait(None, &mut out).unwrap();
        assert_eq!(out.len(), 1);
        out[0]
    }

    #[test]
    fn frames_are_sent_in_order_and_name_their_owners() {
        let (mut stream, mut peer, mut ring) = pair(200);
        let arena = Arena::new(1, 1 << 20).unwrap();
        arena.buf(0).copy_from(&[5; 1 << 20]);
        for n in 0..100u8 {
            let payload = arena.buf(0).part(0, usize::from(n) * 4096);
            stream.send(&[n; 40], Some(payload), Some(u32::from(n))).unwrap();
        }
        stream.send_owned(b"end", b"!".to_vec()).unwrap();
        let reader = std::thread::spawn(move || {
            let mut all = Vec::new();
            peer.read_to_end(&mut all).unwrap();
            all
        });
        let mut finished = Vec::new();
        while stream.is_sending() {
            stream.flush(&mut ring);
            let completion = next(&mut ring);
            assert_eq!(completion.token, SEND);
            stream.on_sent(completion, &mut finished).unwrap();
        }
        stream.shutdown();
        assert!(stream.is_idle());
        assert_eq!(finished, (0..100).collect::<Vec<_>>());
        let mut expected = Vec::new();
        for n in 0..100u8 {
            expected.extend([n; 40]);
            expected.extend(vec![5; usize::from(n) * 4096]);
        }
        expected.extend(b"end!");
        assert!(reader.join().unwrap() == expected);
    }

    #[test]
    fn a_full_stream_returns_an_error() {
        let (mut stream, _peer, _ring) = pair(1);
        stream.send(b"a", None, None).unwrap();
        assert_eq!(stream.send(b"b", None, None).unwrap_err().raw_os_error(), Some(libc::ENOBUFS));
    }

    #[test]
    fn a_receive_that_is_cancelled_leaves_the_socket_alone() {
        const CANCEL: Token = Token { source: 1, kind: 2, index: 0, tag: 0 };
        let (mut stream, mut peer, mut ring) = pair(1);
        stream.arm(&mut ring);
        let mut out = Vec::new();
        ring.wait(Some(std::time::Duration::from_millis(1)), &mut out).unwrap();
        assert!(out.is_empty(), "it waits for bytes");
        stream.disarm(&mut ring, CANCEL);
        while out.len() < 2 {
            ring.wait(None, &mut out).unwrap();
        }
        let received = *out.iter().find(|completion| completion.token == RECEIVE).unwrap();
        assert_eq!(stream.on_received(received).unwrap(), Received::Bytes);
        assert!(stream.bytes().is_empty() && stream.is_idle());
        peer.write_all(b"headrest").unwrap();
        stream.arm_at_most(&mut ring, 4);
        assert_eq!(stream.on_received(next(&mut ring)).unwrap(), Received::Bytes);
        assert_eq!(stream.bytes(), b"head");
        let mut left = [0; 4];
        UnixStream::from(stream.share().unwrap()).read_exact(&mut left).unwrap();
        assert_eq!(&left, b"rest", "another process finds it in the socket");
    }

    #[test]
    fn payloads_are_received_in_place() {
        let (mut stream, mut peer, mut ring) = pair(1);
        let arena = Arena::new(1, 4096).unwrap();
        peer.write_all(b"head").unwrap();
        peer.write_all(&[7; 1000]).unwrap();
        stream.arm(&mut ring);
        assert_eq!(stream.on_received(next(&mut ring)).unwrap(), Received::Bytes);
        assert_eq!(&stream.bytes()[..4], b"head");
        stream.consume(4);
        let mut done = stream.receive_into(arena.buf(0).part(0, 1000));
        while !done {
            stream.arm(&mut ring);
            done = stream.on_received(next(&mut ring)).unwrap() == Received::Payload;
        }
        assert_eq!(arena.buf(0).part(0, 1000).crc32c(), crc32c::crc32c(&[7; 1000]));
        drop(peer);
        stream.arm(&mut ring);
        assert_eq!(stream.on_received(next(&mut ring)).unwrap(), Received::End);
    }
}
