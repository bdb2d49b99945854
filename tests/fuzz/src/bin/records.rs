//! Records that a replica keeps beside its data. Any bytes are refused, or give a record that is written and
//! read again as the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use shorthorn_store::fuzzing::{check_documents, check_layer_sums, check_sum_page};

fuzz_target!(|data: &[u8]| {
    let Some((kind, rest)) = data.split_first() else { return };
    match kind % 4 {
        0 => check_layer_sums(rest),
        1 => check_sum_page(rest),
        _ => check_documents(rest),
    }
});
