//! A client of an engine's NBD server: the negotiation, and the headers of requests.
#![no_main]

use libfuzzer_sys::fuzz_target;
use shorthorn_frontend::fuzzing::{check_requests, negotiate};

fuzz_target!(|data: &[u8]| {
    let Some((kind, rest)) = data.split_first() else { return };
    if kind % 2 == 0 { negotiate(rest) } else { check_requests(rest) }
});
