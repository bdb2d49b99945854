//! Tests sums of snapshots' layers in a replica process. The test plays the scrub.
#![allow(clippy::unwrap_used)] // an unexpected value fails the test

mod common;

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;

use common::*;
use shorthorn_control::ReplicaSpec;
use shorthorn_store::{OpenOptions, Store};
use shorthorn_wire::{
    CONTROL_QUEUE, EMPTY_SUM, Header, KeepSums, LayerCheck, LayerPatch, LayerRange, Opcode, SummedRun,
    encode_patch, piece_sum,
};

/// The last piece is shorter than the others.
const SIZE: u64 = 8 * MIB + 8192;
const NOW: &str = "2026-11-22T10:00:00Z";
const IMAGE: &str = "volume-snap-first.img";

/// Returns a replica with a snapshot that has blocks in the pieces 1, 5 and 8.
fn filled(spec: &ReplicaSpec) -> Replica {
    assert!(Replica::start(spec).terminate().success());
    let mut store = Store::open(&spec.directory, OpenOptions::default()).unwrap();
    store.write_at(&pattern(1, 8192), MIB + 4096, false).unwrap();
    store.write_at(&[0; 4096], MIB + 65536, false).unwrap();
    store.write_at(&pattern(2, 4096), 5 * MIB, false).unwrap();
    store.write_at(&pattern(3, 4096), SIZE - 4096, false).unwrap();
    store.snapshot("first", true, BTreeMap::new(), NOW).unwrap();
    store.write_at(&pattern(9, 65536), MIB, false).unwrap();
    store.close().unwrap();
    Replica::start(spec)
}

fn check(client: &mut Client, piece: u64) -> Result<LayerCheck, i32> {
    let offset_bytes = piece * MIB;
    let length_bytes = u32::try_from(MIB.min(SIZE - offset_bytes)).unwrap();
    let asked = LayerRange { image: IMAGE.to_owned(), offset_bytes, length_bytes };
    client.ask(Opcode::CheckLayer, &asked).map_err(|(errno, _)| errno)
}

fn open(replica: &Replica) -> Client {
    replica.try_open(generation(1), CONTROL_QUEUE).unwrap().0
}

fn run(first_block: u32, data: &[u8]) -> SummedRun {
    SummedRun { first_block, blocks: u32::try_from(data.len() / 4096).unwrap(), crc32c: crc32c(data) }
}

/// Returns the sum of piece 1.
fn expected() -> u32 {
    piece_sum([run(1, &pattern(1, 8192)), run(16, &[0; 4096])])
}

fn keep(first_piece: u32, sums: &[u32], is_first: bool, is_last: bool) -> KeepSums {
    KeepSums { image: IMAGE.to_owned(), is_first, is_last, first_piece, sums: sums.to_vec() }
}

#[test]
fn it_reports_the_sum_of_a_piece_and_the_next_piece_with_data() {
    let base = base();
    let spec = spec(base.path(), SIZE);
    let replica = filled(&spec);
    let mut client = open(&replica);
    let answered = |client: &mut Client, piece| {
        let LayerCheck { sum, kept, next_bytes } = check(client, piece).unwrap();
        (sum, kept, next_bytes.map(|next| next / MIB))
    };
    assert_eq!(answered(&mut client, 0), (Some(EMPTY_SUM), None, Some(1)));
    assert_eq!(answered(&mut client, 1), (Some(expected()), None, Some(5)));
    assert_eq!(answered(&mut client, 5).2, Some(8));
    assert_eq!(answered(&mut client, 8), (Some(piece_sum([run(1, &pattern(3, 4096))])), None, None));
    let wrong =
        [(IMAGE, 512, 4096), (IMAGE, 0, 4096), (IMAGE, SIZE, 8192), ("volume-head-001.img", 0, 1 << 20)];
    for (image, offset_bytes, length_bytes) in wrong {
        let asked = LayerRange { image: image.to_owned(), offset_bytes, length_bytes };
        let (errno, refusal) = client.ask::<_, LayerCheck>(Opcode::CheckLayer, &asked).unwrap_err();
        assert_eq!(errno, libc::EINVAL, "{image} {offset_bytes} {refusal:?}");
    }
    assert!(check(&mut client, 1).is_ok(), "the refused request has no other effect");
}

#[test]
fn it_keeps_sums_once_it_has_received_all() {
    let base = base();
    let spec = spec(base.path(), SIZE);
    let replica = filled(&spec);
    let mut client = open(&replica);
    client.send_text(Opcode::KeepSums, &keep(1, &[expected(), 3], true, false)).unwrap();
    assert_eq!(check(&mut client, 1).unwrap().kept, None, "not yet");
    client.send_text(Opcode::KeepSums, &keep(8, &[0], false, true)).unwrap();
    let kept =
        |client: &mut Client| (0..9).map(|piece| check(client, piece).unwrap().kept).collect::<Vec<_>>();
    let empty = Some(EMPTY_SUM);
    let all = [empty, Some(expected()), Some(3), empty, empty, empty, empty, empty, None];
    assert_eq!(kept(&mut client), all);
    assert_eq!(check(&mut client, 1).unwrap().next_bytes, Some(2 * MIB), "there was something, by its sum");
    assert!(replica.terminate().success());
    let replica = Replica::start(&spec);
    let mut client = open(&replica);
    assert_eq!(kept(&mut client), all, "after a restart");
    // Sums that do not fit are refused, and an incomplete series is not kept.
    assert!(client.send_text(Opcode::KeepSums, &keep(8, &[1, 2], true, false)).is_err());
    assert!(client.send_text(Opcode::KeepSums, &keep(u32::MAX, &[1], true, true)).is_err());
    client.send_text(Opcode::KeepSums, &keep(0, &[4], true, false)).unwrap();
    let mut other = keep(0, &[4], false, true);
    other.image = "volume-snap-none.img".to_owned();
    assert!(client.send_text(Opcode::KeepSums, &other).is_err());
    assert_eq!(kept(&mut client), all);
}

#[test]
fn it_keeps_no_sums_of_a_layer_whose_first_ones_it_has_not_received() {
    let base = base();
    let spec = spec(base.path(), SIZE);
    let replica = filled(&spec);
    let mut client = open(&replica);
    assert!(client.send_text(Opcode::KeepSums, &keep(1, &[7], false, true)).is_err());
    assert_eq!(check(&mut client, 1).unwrap().kept, None);
}

#[test]
fn rot_changes_the_sum_and_is_repaired() {
    let base = base();
    let spec = spec(base.path(), SIZE);
    let replica = filled(&spec);
    let mut client = open(&replica);
    let file = std::fs::File::options().write(true).open(spec.directory.join(IMAGE)).unwrap();
    file.write_all_at(&[0; 4096], MIB + 4096).unwrap();
    file.write_all_at(&[0; 4096], MIB + 262144).unwrap();
    file.sync_all().unwrap();
    assert_ne!(check(&mut client, 1).unwrap().sum, Some(expected()));
    let runs = vec![(1, 2), (16, 1)];
    let image = IMAGE.to_owned();
    let patch = LayerPatch { image, offset_bytes: MIB, length_bytes: 512 << 10, runs };
    let data = [pattern(1, 8192), vec![0; 4096]].concat();
    let send = |client: &mut Client, header: &Header, text: &[u8]| {
        client.raw(&[&client.encode(header)[..], text].concat());
        client.receive().map(|(response, _)| response.status)
    };
    let (header, text) = encode_patch(5, &patch, &data);
    assert_eq!(send(&mut client, &header, &text).unwrap(), 0);
    assert_eq!(
        check(&mut client, 1).unwrap().sum,
        Some(expected()),
        "the block that was none is a hole again"
    );
    // Not of the head, and nothing that was damaged on the way.
    let (header, text) =
        encode_patch(6, &LayerPatch { image: "volume-head-001.img".to_owned(), ..patch.clone() }, &data);
    assert_eq!(send(&mut client, &header, &text).unwrap(), libc::EINVAL);
    let (header, mut text) = encode_patch(7, &patch, &data);
    *text.last_mut().unwrap() ^= 1;
    assert!(send(&mut client, &header, &text).is_err(), "the connection is closed");
    assert_eq!(check(&mut open(&replica), 1).unwrap().sum, Some(expected()));
}
