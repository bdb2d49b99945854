//! The state of the CA as it is stored. A large state is compressed: a Secret has room for 1 MiB, which is
//! the records of about 2,000 nodes as plain JSON. A small one stays readable for people and earlier
//! releases.

use std::io::{self, Read, Write};

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;

/// The largest state that is stored as it is.
const PLAIN_MAX_BYTES: usize = 256 << 10;
/// The largest state that is read.
const STATE_MAX_BYTES: u64 = 64 << 20;
/// The first bytes of gzip (RFC 1952).
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Returns the bytes to store for `state`.
///
/// # Errors
/// Does not happen: memory takes all writes.
pub(super) fn pack(state: Vec<u8>) -> io::Result<Vec<u8>> {
    if state.len() <= PLAIN_MAX_BYTES {
        return Ok(state);
    }
    let mut packer = GzEncoder::new(Vec::new(), Compression::default());
    packer.write_all(&state)?;
    packer.finish()
}

/// Returns the state of these stored bytes.
///
/// # Errors
/// They are damaged.
pub(super) fn unpack(stored: Vec<u8>) -> io::Result<Vec<u8>> {
    if !stored.starts_with(&GZIP_MAGIC) {
        return Ok(stored);
    }
    let mut state = Vec::new();
    GzDecoder::new(stored.as_slice()).take(STATE_MAX_BYTES).read_to_end(&mut state)?;
    Ok(state)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use shorthorn_pki::{Authority, ClusterId};

    use super::super::{RECORDS_MAX_BYTES, now};
    use super::*;

    /// The CA of a cluster of that many nodes, each with three valid certificates.
    fn state(nodes: u32) -> Vec<u8> {
        let authority = Authority::create(ClusterId::new("c0ffee").unwrap(), now()).unwrap();
        let pin = authority.pin().unwrap().to_string();
        let mut state: Value = serde_json::from_slice(&authority.to_json().unwrap()).unwrap();
        let mut issued = Vec::new();
        for at in 0..3 * nodes {
            let mut serial: [u8; 16] = crate::random::random_bytes().unwrap();
            serial[0] = 0x40;
            let serial = shorthorn_types::hex(&serial);
            let role = format!("node/worker-{:05}.nodes.example.internal", at % nodes);
            let not_after = now().as_secs() + u64::from(at) * 60;
            issued.push(json!({ "serial": serial, "role": role, "not_after": not_after, "signer": pin }));
        }
        state["issued"] = issued.into();
        serde_json::to_vec(&state).unwrap()
    }

    #[test]
    fn the_ca_of_5000_nodes_fits_into_a_secret() {
        let large = state(5000);
        assert!(large.len() > 2 * RECORDS_MAX_BYTES, "{} bytes", large.len());
        let stored = pack(large.clone()).unwrap();
        println!("{} bytes, stored as {}", large.len(), stored.len());
        assert!(stored.len() < RECORDS_MAX_BYTES, "{} bytes", stored.len());
        assert_eq!(unpack(stored.clone()).unwrap(), large);
        assert_eq!(Authority::from_json(&unpack(stored.clone()).unwrap()).unwrap().issued().len(), 15_000);
        assert!(unpack(stored[..stored.len() / 2].to_vec()).is_err(), "a damaged one");
        let small = state(100);
        assert_eq!(pack(small.clone()).unwrap(), small, "people can read it");
        assert_eq!(unpack(small.clone()).unwrap(), small);
    }
}
