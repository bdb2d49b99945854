//! Tests the parsers of documents, which come from damaged disks and from other programs. Parsers never
//! panic, and an accepted document is written again with the same meaning.
#![allow(clippy::unwrap_used)] // an unexpected value fails the test

use proptest::collection::vec;
use proptest::prelude::*;
use shorthorn_chain::{
    DiskMeta, FileRef, ImageName, OperationIntent, VolumeMeta, classify, with_check, without_check,
};

const VOLUME: &str = "{\"Size\":67108864,\"Head\":\"volume-head-002.img\",\"Dirty\":false,\"Rebuilding\":true,\"Error\":\"\",\"Parent\":\"volume-snap-s2.img\",\"SectorSize\":512,\"BackingFilePath\":\"\",\"Encrypted\":false,\"ShorthornRebuilding\":false}\n\
                      ";
const DISK: &str = "{\"Name\":\"volume-head-001.img\",\"Parent\":\"volume-snap-s1.img\",\"Removed\":false,\"UserCreated\":true,\"Created\":\"2026-11-20T23:36:34Z\",\"Labels\":{\"a\":\"b\"}}\n\
                    ";

/// Returns all documents that a program of ours writes, without a check.
fn documents() -> Vec<Vec<u8>> {
    let file = |name: &str| FileRef { name: name.to_owned(), inode: 7 };
    let intents = [
        OperationIntent::Expand { head: file("volume-head-001.img"), size_bytes: 8192 },
        OperationIntent::Delete { image: file("volume-snap-a.img") },
    ];
    let all = [VOLUME, DISK].map(|text| text.as_bytes().to_vec()).into_iter();
    all.chain(intents.map(|intent| intent.to_bytes())).collect()
}

#[derive(Clone, Debug)]
enum Edit {
    Set(prop::sample::Index, u8),
    Remove(prop::sample::Index, usize),
    Insert(prop::sample::Index, &'static str),
}

fn edits() -> impl Strategy<Value = Vec<Edit>> {
    let at = any::<prop::sample::Index>;
    let special =
        ["{", "}", "[", "\"", "\\", "-1", "1e999", "18446744073709551616", "null", "../", "\0", "\n", "999"];
    let edit = prop_oneof![
        (at(), any::<u8>()).prop_map(|(at, byte)| Edit::Set(at, byte)),
        (at(), 1usize..20).prop_map(|(at, count)| Edit::Remove(at, count)),
        (at(), prop::sample::select(special.to_vec())).prop_map(|(at, text)| Edit::Insert(at, text)),
    ];
    vec(edit, 0..4)
}

fn apply(text: &mut Vec<u8>, edits: &[Edit]) {
    for edit in edits {
        if text.is_empty() {
            return;
        }
        match edit {
            Edit::Set(at, byte) => {
                let at = at.index(text.len());
                text[at] = *byte;
            }
            Edit::Remove(at, count) => {
                let at = at.index(text.len());
                text.drain(at..(at + count).min(text.len()));
            }
            Edit::Insert(at, new) => {
                let at = at.index(text.len());
                text.splice(at..at, new.bytes());
            }
        }
    }
}

/// Parses `bytes` as each kind of document. Returns how many accept it.
fn check_every_kind(bytes: &[u8]) -> usize {
    let mut accepted = 0;
    if let Ok(volume) = VolumeMeta::parse(bytes) {
        // A document that names the fields of a check otherwise than we write it is refused; so it has none
        // among the unknown ones.
        assert_eq!(VolumeMeta::parse(&volume.to_bytes()).unwrap(), volume);
        accepted += 1;
    }
    if let Ok(disk) = DiskMeta::parse("x", bytes) {
        assert_eq!(DiskMeta::parse("x", &disk.to_bytes()).unwrap(), disk);
        let _ = disk.below_bytes();
        accepted += 1;
    }
    if let Ok(intent) = OperationIntent::parse(bytes) {
        assert_eq!(OperationIntent::parse(&intent.to_bytes()).unwrap(), intent);
        accepted += 1;
    }
    accepted
}

#[test]
fn each_document_is_accepted_as_it_is() {
    for document in documents() {
        assert!(check_every_kind(&document) > 0, "{}", String::from_utf8_lossy(&document));
    }
    let intents = documents().into_iter().skip(2).filter(|document| OperationIntent::parse(document).is_ok());
    assert_eq!(intents.count(), 2);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2048))]

    #[test]
    fn any_bytes_are_refused_or_written_again(bytes in vec(any::<u8>(), 0..200)) {
        check_every_kind(&bytes);
        let _ = without_check("x", &bytes);
    }

    #[test]
    fn a_changed_document_is_refused_or_written_again(
        kind in any::<prop::sample::Index>(), edits in edits()
    ) {
        let mut bytes = kind.get(&documents()).clone();
        apply(&mut bytes, &edits);
        check_every_kind(&bytes);
    }

    #[test]
    fn a_change_of_a_checked_document_is_refused(kind in any::<prop::sample::Index>(), edits in edits()) {
        let document = kind.get(&documents()).clone();
        let checked = with_check(document.clone());
        prop_assert_eq!(&without_check("x", &checked).unwrap(), &document);
        let mut changed = checked.clone();
        apply(&mut changed, &edits);
        let has_key = |bytes: &[u8]| bytes.windows(16).any(|window| window == b"\"ShorthornCheck\"");
        if has_key(&changed) && changed != checked {
            prop_assert!(without_check("x", &changed).is_err());
        }
    }

    #[test]
    fn a_name_of_an_image_stays_in_the_directory(
        head in prop_oneof![Just("volume-head-"), Just("volume-snap-"), Just("")],
        name in "(\\PC|/|\\.|\0){0,12}",
        tail in prop_oneof![4 => Just(".img"), 1 => Just(".img.meta"), 1 => Just("")],
    ) {
        let name = format!("{head}{name}{tail}");
        let _ = classify(&name);
        if let Some(image) = ImageName::parse(&name) {
            prop_assert_eq!(image.to_string(), name.clone());
            prop_assert!(!name.contains('/') && !name.contains('\0'));
        }
    }
}
