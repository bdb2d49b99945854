//! Handshakes of encrypted connections. The peer sends any bytes: without the secret, no handshake ends well,
//! and the answers have a bound.
#![no_main]

use std::io::{self, Read, Write};
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use shorthorn_tls::{EngineTls, Keys, RECORD_HEADER_BYTES, ReplicaTls, TlsError, read_record};
use shorthorn_types::Secret;

const SECRET: Secret = Secret::new([7; 32]);
/// More than an end sends in a whole handshake.
const SENT_BYTES_MAX: usize = 16 << 10;

static ENGINE: LazyLock<EngineTls> = LazyLock::new(|| EngineTls::new(&SECRET).expect("keys"));
static REPLICA: LazyLock<ReplicaTls> = LazyLock::new(|| ReplicaTls::new(&SECRET).expect("keys"));

/// A peer that sends bytes and ignores the answers.
struct Peer<'a> {
    sends: &'a [u8],
    received_bytes: usize,
}

impl Read for Peer<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.sends.read(buffer)
    }
}

impl Write for Peer<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.received_bytes += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((kind, sends)) = data.split_first() else { return };
    let mut peer = Peer { sends, received_bytes: 0 };
    let keys = if kind % 2 == 0 { serve(&mut peer) } else { ENGINE.handshake(&mut peer) };
    assert!(keys.is_err(), "a peer without the secret got keys");
    assert!(peer.received_bytes <= SENT_BYTES_MAX, "{} bytes", peer.received_bytes);
});

fn serve(peer: &mut Peer<'_>) -> Result<Keys, TlsError> {
    let mut start = [0; RECORD_HEADER_BYTES];
    peer.read_exact(&mut start)?;
    let first = read_record(start, peer)?;
    assert!(first.starts_with(&start) && first.len() <= RECORD_HEADER_BYTES + (1 << 14) + 256);
    REPLICA.handshake(first, peer)
}
