//! Decoders get bytes that a hostile or rotten peer may send. They never panic, they hold no more memory than
//! the stated bound, and a text that they accept encodes back to itself.
#![allow(clippy::unwrap_used)] // an unexpected value fails the test

use std::fmt::Debug;

use proptest::collection::vec;
use proptest::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;
use shorthorn_types::limits::{MAX_IO_BYTES, MAX_ZERO_BYTES};
use shorthorn_types::{
    Generation, MarkAction, MarkRegions, Members, RegionsOf, ReplicaId, Secret, View, ViewId,
};
use shorthorn_wire::*;

const SECRET: Secret = Secret::new([3; 32]);
const NONCE: Nonce = Nonce::new([5; 32]);
/// The most memory that a decoded list or text takes, as a multiple of its text. A list of views without
/// members is the densest: 70 characters for each; a list that grows doubles its room.
const HELD_PER_BYTE: usize = 8;

fn claim() -> EngineClaim {
    let generation = Generation::new(3, 1).of_nonce(1 << 52);
    EngineClaim { volume: "v1".parse().unwrap(), replica: ReplicaId::from_random(7), generation, queue: 2 }
}

/// Makes the CRC fit, as an attacker does.
fn mend(bytes: &mut [u8; HEADER_BYTES]) {
    let crc = crc32c::crc32c(&bytes[..36]);
    bytes[36..40].copy_from_slice(&crc.to_le_bytes());
}

/// Returns changes of bytes: the place, and the value.
fn changes() -> impl Strategy<Value = Vec<(prop::sample::Index, u8)>> {
    let byte = prop_oneof![any::<u8>(), Just(0), Just(0xff), Just(0x7f), Just(0x80), Just(0x10)];
    vec((any::<prop::sample::Index>(), byte), 0..6)
}

/// Headers that are good or nearly good, of every opcode, at and over all limits; sometimes with a few bytes
/// that are others.
fn headers() -> impl Strategy<Value = [u8; HEADER_BYTES]> {
    let offset = prop_oneof![
        Just(0),
        Just(0),
        (0u64..1 << 35).prop_map(|sector| sector * 512),
        prop::sample::select(vec![512, 513, u64::MAX, u64::MAX - 511, u64::MAX - 1023]),
    ];
    let limits = [MAX_IO_BYTES, MAX_TEXT_BYTES, MAX_LAYERS_TEXT_BYTES, MAX_ZERO_BYTES, u32::MAX];
    let over = limits.map(|limit| limit.saturating_add(1));
    let one_more = limits.map(|limit| limit.saturating_add(512));
    let length = prop_oneof![
        Just(0),
        (1u32..2048).prop_map(|sectors| sectors * 512),
        1u32..MAX_TEXT_BYTES,
        prop::sample::select([limits, over, one_more].concat()),
    ];
    let more = (any::<(u64, u32)>(), prop::sample::select(vec![0, 5, -1, i32::MIN]));
    let changes = prop_oneof![3 => Just(Vec::new()), 1 => changes()];
    let flags = prop::sample::select(vec![0u16, 0, 1, 0x8000, 0x8000, 0x8001, 2]);
    (0u8..26, flags, offset, length, more, changes).prop_map(
        |(opcode, flags, offset_bytes, length_bytes, ((id, data_check), status), changes)| {
            let request = Header::request(Opcode::Write, id, offset_bytes, length_bytes);
            let mut bytes = Header { data_check, status, ..request }.encode();
            bytes[5] = opcode;
            bytes[6..8].copy_from_slice(&flags.to_le_bytes());
            for (at, byte) in changes {
                bytes[5 + at.index(31)] = byte;
            }
            mend(&mut bytes);
            bytes
        },
    )
}

/// Checks that an accepted header is within its bounds.
fn check_bounds(header: &Header) {
    let bound = if header.opcode.is_control() { header.opcode.text_max_bytes() } else { MAX_IO_BYTES };
    assert!(header.data_bytes() <= bound && bound <= MAX_IO_BYTES.max(MAX_LAYERS_TEXT_BYTES), "{header}");
    assert!(header.range().is_ok(), "{header}");
    assert!(!header.to_string().is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn random_bytes_are_refused_or_encode_back(start in any::<[u8; 24]>(), end in any::<[u8; 24]>()) {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..24].copy_from_slice(&start);
        bytes[24..].copy_from_slice(&end);
        if let Ok(header) = Header::decode(&bytes) {
            prop_assert_eq!(header.encode(), bytes);
        }
        let session = Session::of_replica(&SECRET, NONCE, NONCE, &claim());
        prop_assert!(session.decode(&bytes).is_err());
    }

    #[test]
    fn frames_of_the_opening_encode_back(bytes in headers()) {
        if let Ok(header) = Header::decode(&bytes) {
            check_bounds(&header);
            prop_assert_eq!(header.encode(), bytes);
        }
    }

    #[test]
    fn frames_of_a_session_encode_back(frames in vec(headers(), 1..8)) {
        let mut sender = Session::of_engine(&SECRET, NONCE, NONCE, &claim());
        let mut receiver = Session::of_replica(&SECRET, NONCE, NONCE, &claim());
        let mut twin = Session::of_engine(&SECRET, NONCE, NONCE, &claim());
        for header in frames.iter().filter_map(|bytes| Header::decode(bytes).ok()) {
            let bytes = sender.encode(&header);
            let decoded = receiver.decode(&bytes).unwrap();
            receiver.advance();
            check_bounds(&decoded);
            prop_assert_eq!(decoded, header);
            prop_assert_eq!(twin.encode(&decoded), bytes);
        }
    }

    #[test]
    fn a_changed_frame_of_a_session_is_refused(bytes in headers(), changes in changes()) {
        let Ok(header) = Header::decode(&bytes) else { return Ok(()) };
        let sent = Session::of_engine(&SECRET, NONCE, NONCE, &claim()).encode(&header);
        let mut changed = sent;
        for (at, byte) in changes {
            changed[at.index(HEADER_BYTES)] = byte;
        }
        mend(&mut changed);
        let received = Session::of_replica(&SECRET, NONCE, NONCE, &claim()).decode(&changed);
        prop_assert_eq!(received.is_ok(), changed == sent);
    }
}

fn view(number: u32) -> View {
    let id = ViewId { generation: claim().generation, number };
    View { id, members: Members::new((0..3).map(ReplicaId::from_random)).unwrap() }
}

fn report() -> ReplicaReport {
    ReplicaReport { committed: view(1), proposed: vec![view(2), view(u32::MAX)] }
}

fn patch() -> Vec<u8> {
    let image = "volume-snap-a.img".to_owned();
    let patch = LayerPatch { image, offset_bytes: 8192, length_bytes: 16384, runs: vec![(0, 1), (3, 1)] };
    encode_patch(9, &patch, &[b'x'; 8192]).1
}

/// Returns a text of every kind that the protocol has.
fn texts() -> Vec<Vec<u8>> {
    fn json(text: &impl Serialize) -> Vec<u8> {
        serde_json::to_vec(text).unwrap()
    }
    let session = Session::of_replica(&SECRET, NONCE, NONCE, &claim());
    let challenge = Challenge { nonce: NONCE, encrypted: true };
    let welcome = Welcome {
        run: 7,
        size_bytes: 1 << 40,
        report: report(),
        lost_cache: true,
        rebuilding: false,
        tracks: view(1).members,
        stamp: Some(7),
    };
    let layer =
        WireLayer { image: "volume-snap-a.img".into(), meta: "{\"Name\":\"\\n\"}".into(), size_bytes: 4096 };
    let extent = Extent { offset_bytes: 8192, length_bytes: 4096 };
    let image = layer.image.clone();
    let of = RegionsOf::OutOfSync(ReplicaId::from_random(9));
    let runs = vec![(3, 2), (9, 1)];
    vec![
        json(&challenge),
        json(&Hello::new(claim(), NONCE, &challenge, &SECRET)),
        json(&session.prove_welcome(&welcome)),
        json(&welcome),
        json(&Refusal { message: "fenced".into(), holder: Some(session.prove_holder(claim().generation)) }),
        json(&ViewMessage { view: view(3), basis: report() }),
        json(&RegionsQuery { of, from: 4, size_bytes: Some(1 << 30) }),
        json(&RegionsPage { kept: true, runs: runs.clone(), next: Some(10), stamp: 3 }),
        json(&MarkRegions { of, action: MarkAction::Clear, runs, stamp: 1, size_bytes: Some(1 << 30) }),
        json(&LayerList { layers: vec![layer.clone(), layer] }),
        json(&CopyState { done: vec![true, false] }),
        json(&ExtentsQuery { layer: 1, from_bytes: 4096 }),
        json(&ExtentsPage { extents: vec![extent; 3], next_bytes: Some(1 << 20) }),
        json(&CopyEnd { layer: Some(1) }),
        json(&LayerRange { image: image.clone(), offset_bytes: 0, length_bytes: MAX_IO_BYTES }),
        json(&LayerCheck { sum: Some(1), kept: None, next_bytes: Some(1 << 20) }),
        json(&KeepSums { image, is_first: true, is_last: false, first_piece: 1, sums: vec![1, 0, u32::MAX] }),
        json(&ExpandReplica { size_bytes: 1 << 40 }),
        patch(),
        // Without data.
        patch().into_iter().take_while(|byte| *byte != b'\n').collect(),
    ]
}

/// A place in the first bytes of a text, up to the given number: those of a patch are few, but matter most.
type Place = (prop::sample::Index, usize);

/// A change of a text.
#[derive(Clone, Debug)]
enum Edit {
    Set(Place, u8),
    Remove(Place, usize),
    /// Repeats the bytes from here on, at most 64 of them.
    Repeat(Place, usize, usize),
    Insert(Place, &'static str),
    /// The next number is this one.
    Number(Place, &'static str),
}

fn edits() -> impl Strategy<Value = Vec<Edit>> {
    let at = || (any::<prop::sample::Index>(), prop::sample::select(vec![128, usize::MAX]));
    let numbers =
        ["0", "1", "-1", "4095", "4294967295", "18446744073709551615", "18446744073709547520", "1e99"];
    let special = [
        "-1",
        "18446744073709551615",
        "1e99",
        "null",
        "[",
        "{}",
        "\"",
        "\\u0000",
        "\\ud800",
        "]",
        "\n",
        ",",
        " ",
    ];
    let edit = prop_oneof![
        1 => (at(), any::<u8>()).prop_map(|(at, byte)| Edit::Set(at, byte)),
        1 => (at(), 1usize..20).prop_map(|(at, count)| Edit::Remove(at, count)),
        1 => (at(), 1usize..64, 1usize..100).prop_map(|(at, bytes, times)| Edit::Repeat(at, bytes, times)),
        1 => (at(), prop::sample::select(special.to_vec())).prop_map(|(at, text)| Edit::Insert(at, text)),
        4 => (at(), prop::sample::select(numbers.to_vec())).prop_map(|(at, text)| Edit::Number(at, text)),
    ];
    vec(edit, 0..5)
}

fn apply(text: &mut Vec<u8>, edits: Vec<Edit>) {
    for edit in edits {
        if text.is_empty() {
            return;
        }
        match edit {
            Edit::Set(at, byte) => {
                let at = at.0.index(text.len().min(at.1));
                text[at] = byte;
            }
            Edit::Remove(at, count) => {
                let at = at.0.index(text.len().min(at.1));
                text.drain(at..(at + count).min(text.len()));
            }
            Edit::Repeat(at, bytes, times) => {
                let at = at.0.index(text.len().min(at.1));
                let part = text[at..(at + bytes).min(text.len())].repeat(times);
                text.splice(at..at, part);
            }
            Edit::Insert(at, new) => {
                let at = at.0.index(text.len().min(at.1));
                text.splice(at..at, new.bytes());
            }
            Edit::Number(at, new) => {
                let from = at.0.index(text.len().min(at.1));
                let Some(start) = text[from..].iter().position(u8::is_ascii_digit) else { continue };
                let digits = text[from + start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
                text.splice(from + start..from + start + digits, new.bytes());
            }
        }
    }
    text.truncate(MAX_TEXT_BYTES as usize);
}

fn header_of(opcode: Opcode, text: &[u8]) -> Header {
    let request = Header::request(opcode, 1, 0, u32::try_from(text.len()).unwrap());
    Header { data_check: crc32c::crc32c(text), ..request }
}

/// Decodes `text` as a `T` and returns the text of the value, if it is accepted. Checks that the value is
/// within its bound, as counted by `held_bytes`, and that its own text decodes to the same value.
fn check_text<T>(text: &[u8], held_bytes: impl Fn(&T) -> usize) -> Option<Vec<u8>>
where
    T: Serialize + DeserializeOwned + Debug,
{
    let header = header_of(Opcode::Layers, text);
    let value = decode_text::<T>(&header, text).ok()?;
    assert!(held_bytes(&value) <= HELD_PER_BYTE * text.len().max(64), "{value:?}");
    let (header, again) = encode_text(header, &value);
    let twin: T = decode_text(&header, &again).unwrap();
    assert_eq!(format!("{twin:?}"), format!("{value:?}"));
    assert_eq!(encode_text(header, &twin).1, again);
    Some(again)
}

fn room<T>(list: &Vec<T>) -> usize {
    list.capacity() * size_of::<T>()
}

/// Decodes `text` as each kind of text; the texts of those kinds that accept it.
fn check_every_kind(text: &[u8]) -> Vec<Vec<u8>> {
    let results = [
        check_text(text, |_: &Challenge| 0),
        check_text(text, |_: &Hello| 0),
        check_text(text, |_: &ProvenWelcome| 0),
        check_text(text, |welcome: &Welcome| room(&welcome.report.proposed)),
        check_text(text, |refusal: &Refusal| refusal.message.capacity()),
        check_text(text, |message: &ViewMessage| room(&message.basis.proposed)),
        check_text(text, |_: &RegionsQuery| 0),
        check_text(text, |page: &RegionsPage| room(&page.runs)),
        check_text(text, |mark: &MarkRegions| room(&mark.runs)),
        check_text(text, |list: &LayerList| {
            let texts = list.layers.iter().map(|layer| layer.image.capacity() + layer.meta.capacity());
            room(&list.layers) + texts.sum::<usize>()
        }),
        check_text(text, |state: &CopyState| room(&state.done)),
        check_text(text, |_: &ExtentsQuery| 0),
        check_text(text, |page: &ExtentsPage| room(&page.extents)),
        check_text(text, |_: &CopyEnd| 0),
        check_text(text, |range: &LayerRange| range.image.capacity()),
        check_text(text, |_: &LayerCheck| 0),
        check_text(text, |sums: &KeepSums| room(&sums.sums) + sums.image.capacity()),
        check_text(text, |_: &ExpandReplica| 0),
        check_patch(text),
    ];
    results.into_iter().flatten().collect()
}

fn check_patch(text: &[u8]) -> Option<Vec<u8>> {
    let header = header_of(Opcode::RepairLayer, text);
    let (patch, data) = decode_patch(&header, text).ok()?;
    assert!(patch.length_bytes <= PATCH_BYTES_MAX && data.len() <= PATCH_BYTES_MAX as usize);
    let (header, again) = encode_patch(1, &patch, data);
    assert_eq!(decode_patch(&header, &again), Ok((patch, data)));
    Some(again)
}

fn limits() -> impl Strategy<Value = u32> {
    prop_oneof![3 => 0u32..5, 1 => prop::sample::select(vec![128, 129, 1 << 31, u32::MAX - 1, u32::MAX])]
}

#[test]
fn every_kind_of_text_is_accepted_as_it_is() {
    let without_data = texts().len() - 1;
    for text in texts().into_iter().take(without_data) {
        assert!(check_every_kind(&text).contains(&text), "{}", String::from_utf8_lossy(&text));
    }
}

#[test]
fn the_densest_lists_hold_no_more_than_their_bound() {
    let list = |begin: &str, one: &str, end: &str| {
        let count = (MAX_TEXT_BYTES as usize - begin.len() - end.len()) / (one.len() + 1);
        format!("{begin}{}{end}", vec![one; count].join(","))
    };
    let view = r#"{"id":{"generation":{"attach":1,"restart":0},"number":1},"members":[]}"#;
    let basis = format!(r#"{{"view":{view},"basis":{{"committed":{view},"proposed":["#);
    let of = r#"{"of":"intent","action":"clear","runs":["#;
    let sums = r#"{"image":"","is_first":true,"is_last":true,"first_piece":0,"sums":["#;
    let texts = [
        list(r#"{"kept":true,"next":null,"runs":["#, "[1,1]", "]}"),
        list(of, "[1,1]", "]}"),
        list(sums, "1", "]}"),
        list(r#"{"done":["#, "true", "]}"),
        list(r#"{"layers":["#, r#"{"image":"","meta":"","size_bytes":1}"#, "]}"),
        list(r#"{"next_bytes":null,"extents":["#, r#"{"offset_bytes":1,"length_bytes":1}"#, "]}"),
        list(&basis, view, "]}}"),
    ];
    for text in texts {
        assert_eq!(check_every_kind(text.as_bytes()).len(), 1, "{text}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2048))]

    #[test]
    fn any_text_is_refused_or_encodes_back(text in vec(any::<u8>(), 0..200)) {
        check_every_kind(&text);
    }

    #[test]
    fn a_changed_text_is_refused_or_encodes_back(kind in any::<prop::sample::Index>(), edits in edits()) {
        let mut text = kind.get(&texts()).clone();
        apply(&mut text, edits);
        check_every_kind(&text);
    }

    #[test]
    fn a_changed_welcome_is_not_believed(edits in edits()) {
        let keys = || Session::of_replica(&SECRET, NONCE, NONCE, &claim());
        let sent = texts()[2].clone();
        let mut text = sent.clone();
        apply(&mut text, edits);
        let header = header_of(Opcode::Hello, &text);
        let Ok(proven) = decode_text::<ProvenWelcome>(&header, &text) else { return Ok(()) };
        if let Ok(welcome) = keys().take_welcome(&proven) {
            let original: ProvenWelcome = serde_json::from_slice(&sent).unwrap();
            prop_assert_eq!(welcome, keys().take_welcome(&original).unwrap());
        }
    }

    #[test]
    fn any_patch_is_refused_or_encodes_back(
        runs in vec((limits(), limits()), 0..4),
        offset_bytes in prop::sample::select(vec![0, 4096, 512, u64::MAX, u64::MAX - 4095]),
        length_bytes in limits().prop_map(|blocks| blocks.wrapping_mul(4096)),
        blocks in 0usize..8,
    ) {
        let patch = LayerPatch { image: "a.img".into(), offset_bytes, length_bytes, runs };
        let mut text = serde_json::to_vec(&patch).unwrap();
        text.push(b'\n');
        text.resize(text.len() + blocks * 4096, b'x');
        check_patch(&text);
    }

    /// Passes decoded pages to their check.
    #[test]
    fn no_page_makes_its_check_panic(edits in edits(), from in any::<u32>(), size_mib in 1u64..1 << 24) {
        let query = RegionsQuery { of: RegionsOf::Intent, from, size_bytes: Some(size_mib << 20) };
        let from_bytes = u64::from(from) << 12;
        for kind in [7, 12] {
            let mut text = texts()[kind].clone();
            apply(&mut text, edits.clone());
            if let Ok(page) = serde_json::from_slice::<RegionsPage>(&text) {
                let _ = page.check(&query);
            }
            if let Ok(page) = serde_json::from_slice::<ExtentsPage>(&text) {
                let _ = page.check(&ExtentsQuery { layer: 0, from_bytes }, 1 << 30);
            }
        }
    }
}
