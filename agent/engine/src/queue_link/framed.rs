use std::io;

use shorthorn_ring::{IoBuf, Stream};
use shorthorn_wire::{FrameError, HEADER_BYTES, Header, Session};

/// A stream of frames with keyed checks. All headers that are sent and taken pass through here, so that none
/// is left out of the numbers.
#[derive(Debug)]
pub struct Framed {
    /// For all but headers.
    pub stream: Stream,
    pub session: Session,
}

impl Framed {
    /// Queues a frame. After an error the connection is of no more use: the number of the frame is gone.
    pub fn send(&mut self, header: &Header, data: Option<IoBuf>) -> io::Result<()> {
        self.stream.send(&self.session.encode(header), data, None)
    }

    /// Queues a frame whose text the stream owns.
    pub fn send_owned(&mut self, header: &Header, text: Vec<u8>) -> io::Result<()> {
        self.stream.send_owned(&self.session.encode(header), text)
    }

    /// Returns the header of the next frame, if it is here whole. The frame stays the next one until it is
    /// taken.
    pub fn header(&self) -> Option<Result<Header, FrameError>> {
        self.stream.bytes().first_chunk().map(|bytes| self.session.decode(bytes))
    }

    /// Takes the next frame: its header, and `text_bytes` behind it.
    pub fn take(&mut self, text_bytes: usize) {
        self.session.advance();
        self.stream.consume(HEADER_BYTES + text_bytes);
    }
}
