//! Entry points of the fuzz targets in tests/fuzz: the parsers of this module are private otherwise.

use super::handshake::{Handshake, Next, Offer};
use super::protocol::{CommandKind, RequestHeader};

const SIZE_BYTES: u64 = 1 << 30;
/// No single answer of the negotiation may be longer, whatever a client sends.
const ANSWER_MAX_BYTES: usize = 16 << 10;

/// Negotiates with a client that sends `input`.
///
/// # Panics
/// The server accepts more bytes than it has, does not advance, or gives an answer without a bound.
pub fn negotiate(mut input: &[u8]) {
    let offer = Offer {
        name: "vol-1",
        size_bytes: SIZE_BYTES,
        max_request_bytes: 32 << 20,
        max_simple_request_bytes: 8 << 20,
    };
    let mut handshake = Handshake::new();
    loop {
        let mut answer = Vec::new();
        let (used_bytes, next) = handshake.advance(&offer, input, &mut answer);
        assert!(used_bytes <= input.len() && answer.len() <= ANSWER_MAX_BYTES);
        match next {
            Next::Go => assert!(used_bytes > 0 || input.is_empty(), "the negotiation does not advance"),
            Next::Wait | Next::Transmission | Next::Close => return,
        }
        input = &input[used_bytes..];
        if input.is_empty() {
            return;
        }
    }
}

/// Checks the headers of requests in `input`, one after the other.
///
/// # Panics
/// A header passes whose range is outside the volume.
pub fn check_requests(input: &[u8]) {
    for bytes in input.chunks(RequestHeader::BYTES) {
        let Some(Ok(header)) = RequestHeader::parse(bytes) else { continue };
        if header.kind != CommandKind::Disconnect && header.check(SIZE_BYTES).is_ok() {
            let end = header.offset_bytes.checked_add(u64::from(header.length_bytes));
            assert!(end.is_some_and(|end| end <= SIZE_BYTES), "{header:?}");
        }
    }
}
