//! Frames and texts between engine and replica. Any bytes are refused, or decode to a value that encodes
//! back. Answers that pass their checks fit the volume.
#![no_main]

use std::fmt::Debug;

use libfuzzer_sys::fuzz_target;
use serde::Serialize;
use serde::de::DeserializeOwned;
use shorthorn_types::limits::{BLOCK_BYTES, MAX_IO_BYTES, MAX_LAYERS, MAX_PROPOSED_VIEWS, MAX_VOLUME_BYTES};
use shorthorn_types::{Generation, ImageKind, MarkRegions, Regions, RegionsOf, ReplicaId, Secret};
use shorthorn_wire::*;

/// Place of the checksum in a header, which the target makes fit, as an attacker does.
const CHECK_AT: usize = 36;

fuzz_target!(|data: &[u8]| {
    let Some((kind, rest)) = data.split_first() else { return };
    if kind % 4 == 0 { check_headers(rest) } else { check_texts(rest) }
});

fn check_headers(data: &[u8]) {
    let claim = EngineClaim {
        volume: "v1".parse().expect("a volume's name"),
        replica: ReplicaId::from_random(7),
        generation: Generation::new(3, 1).of_nonce(1 << 52),
        queue: 2,
    };
    let (secret, nonce) = (Secret::new([3; 32]), Nonce::new([5; 32]));
    let mut sender = Session::of_engine(&secret, nonce, nonce, &claim);
    let mut receiver = Session::of_replica(&secret, nonce, nonce, &claim);
    for chunk in data.chunks_exact(HEADER_BYTES) {
        let mut bytes: [u8; HEADER_BYTES] = chunk.try_into().expect("a chunk of that size");
        let check = crc32c::crc32c(&bytes[..CHECK_AT]).to_le_bytes();
        bytes[CHECK_AT..CHECK_AT + 4].copy_from_slice(&check);
        assert!(receiver.decode(&bytes).is_err(), "a frame without proof was accepted");
        let Ok(header) = Header::decode(&bytes) else { continue };
        assert_eq!(header.encode(), bytes);
        assert!(header.data_bytes() <= MAX_IO_BYTES.max(MAX_LAYERS_TEXT_BYTES));
        assert!(header.range().is_ok());
        let proven = sender.encode(&header);
        assert_eq!(receiver.decode(&proven).expect("a proven frame"), header);
        receiver.advance();
    }
}

fn check_texts(text: &[u8]) {
    check_answers(text);
    check_text::<Challenge>(text);
    check_text::<Hello>(text);
    check_text::<ProvenWelcome>(text);
    check_text::<Welcome>(text);
    check_text::<Refusal>(text);
    check_text::<ViewMessage>(text);
    check_text::<RegionsQuery>(text);
    check_text::<RegionsPage>(text);
    check_text::<MarkRegions>(text);
    check_text::<LayerList>(text);
    check_text::<CopyState>(text);
    check_text::<ExtentsQuery>(text);
    check_text::<ExtentsPage>(text);
    check_text::<CopyEnd>(text);
    check_text::<ExpandReplica>(text);
    check_text::<LayerRange>(text);
    check_text::<LayerCheck>(text);
    check_text::<KeepSums>(text);
    check_patch(text);
}

fn header_of(opcode: Opcode, text: &[u8]) -> Option<Header> {
    let length = u32::try_from(text.len()).ok().filter(|bytes| *bytes <= MAX_TEXT_BYTES)?;
    Some(Header { data_check: crc32c::crc32c(text), ..Header::request(opcode, 1, 0, length) })
}

fn check_text<T: Serialize + DeserializeOwned + Debug>(text: &[u8]) {
    let Some(header) = header_of(Opcode::Layers, text) else { return };
    let Ok(value) = decode_text::<T>(&header, text) else { return };
    let (header, again) = encode_text(header, &value);
    let twin: T = decode_text(&header, &again).expect("an encoded text");
    assert_eq!(format!("{twin:?}"), format!("{value:?}"));
}

fn check_patch(text: &[u8]) {
    let Some(header) = header_of(Opcode::RepairLayer, text) else { return };
    let Ok((patch, data)) = decode_patch(&header, text) else { return };
    let (header, again) = encode_patch(1, &patch, data);
    assert_eq!(decode_patch(&header, &again), Ok((patch, data)));
}

fn decoded<T: DeserializeOwned>(text: &[u8]) -> Option<T> {
    decode_text(&header_of(Opcode::Layers, text)?, text).ok()
}

/// Checks that an answer that the engine would use fits, in volumes of several sizes.
fn check_answers(text: &[u8]) {
    for size_bytes in [BLOCK_BYTES, 64 << 20, MAX_VOLUME_BYTES] {
        check_layers(text, size_bytes);
        check_extents(text, size_bytes);
        check_regions(text, size_bytes);
    }
    if let Some(check) = decoded::<LayerCheck>(text).filter(|check| check.check().is_ok()) {
        assert!(check.next_bytes.is_none_or(|next| next.is_multiple_of(SUM_PIECE_BYTES)));
        assert!(![check.sum, check.kept].contains(&Some(0)));
    }
    if let Some(welcome) = decoded::<Welcome>(text).filter(|welcome| welcome.check().is_ok()) {
        assert!(welcome.report.proposed.len() <= MAX_PROPOSED_VIEWS);
    }
}

fn check_layers(text: &[u8], size_bytes: u64) {
    let list = decoded::<LayerList>(text).filter(|list| list.check(size_bytes).is_ok());
    let Some(LayerList { layers }) = list else { return };
    assert!(!layers.is_empty() && layers.len() <= MAX_LAYERS);
    let mut below_bytes = BLOCK_BYTES;
    for layer in &layers {
        assert!(layer.size_bytes >= below_bytes && layer.size_bytes <= size_bytes);
        assert!(!layer.image.contains(['/', '\0']) && layer.image.len() < 250);
        below_bytes = layer.size_bytes;
    }
    let heads = layers.iter().filter(|layer| ImageKind::of(&layer.image) == Some(ImageKind::Head));
    assert_eq!(heads.count(), 1);
}

fn check_extents(text: &[u8], size_bytes: u64) {
    for from_bytes in [0, BLOCK_BYTES + 1] {
        let query = ExtentsQuery { layer: 0, from_bytes };
        let page = decoded::<ExtentsPage>(text).filter(|page| page.check(&query, size_bytes).is_ok());
        let Some(page) = page else { continue };
        assert!(page.extents.len() <= ExtentsPage::EXTENTS_MAX);
        let mut end_bytes = from_bytes / BLOCK_BYTES * BLOCK_BYTES;
        for extent in &page.extents {
            assert!(extent.offset_bytes >= end_bytes && extent.length_bytes > 0);
            end_bytes = extent.offset_bytes + extent.length_bytes;
            assert!(end_bytes <= size_bytes && end_bytes.is_multiple_of(BLOCK_BYTES));
        }
        assert!(page.next_bytes.is_none_or(|next| next >= end_bytes && next > from_bytes));
    }
}

fn check_regions(text: &[u8], size_bytes: u64) {
    for of in [RegionsOf::Intent, RegionsOf::Allocated] {
        let query = RegionsQuery { of, from: 0, size_bytes: Some(size_bytes) };
        let page = decoded::<RegionsPage>(text).filter(|page| page.check(&query).is_ok());
        let Some(page) = page else { continue };
        let mut end = 0;
        for (start, count) in &page.runs {
            assert!(*start >= end && *count > 0);
            end = start + count;
            assert!(end <= Regions::of(size_bytes).count());
        }
        assert!(page.next.is_none_or(|next| next >= end && next > 0));
    }
}
