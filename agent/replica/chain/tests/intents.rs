//! Tests intents of operations that are out of date, because another program has had the directory since the
//! crash.
#![allow(clippy::unwrap_used)] // clippy does not count helpers as tests

use std::collections::BTreeMap;

use shorthorn_chain::{
    Checks, DirectoryFacts, DiskMeta, FileRef, FileStep, ImageFacts, ImageName, MetaFacts, OperationIntent,
    VolumeMeta, recover,
};

const SIZE_BYTES: u64 = 1 << 20;

fn image(name: &str) -> ImageName {
    ImageName::parse(name).unwrap()
}

/// Returns `volume-head-005.img` on `volume-snap-b.img` on `volume-snap-a.img`, and an intent file.
fn directory(intent: &OperationIntent) -> DirectoryFacts {
    let volume = VolumeMeta {
        size: i64::try_from(SIZE_BYTES).unwrap(),
        head: "volume-head-005.img".to_owned(),
        parent: "volume-snap-b.img".to_owned(),
        sector_size: 512,
        ..VolumeMeta::default()
    };
    let mut facts = DirectoryFacts {
        volume_meta: Some(volume.to_bytes()),
        intent: Some(intent.to_bytes()),
        ..DirectoryFacts::default()
    };
    let layers = [
        ("volume-head-005.img", "volume-snap-b.img", 5),
        ("volume-snap-b.img", "volume-snap-a.img", 2),
        ("volume-snap-a.img", "", 1),
    ];
    for (name, parent, inode) in layers {
        facts.images.insert(image(name), ImageFacts { size_bytes: SIZE_BYTES, inode, holds_data: true });
        let meta = DiskMeta { parent: parent.to_owned(), ..DiskMeta::default() };
        facts.metas.insert(image(name), MetaFacts { inode: inode + 100, bytes: meta.to_bytes() });
    }
    facts
}

fn file(name: &str, inode: u64) -> FileRef {
    FileRef { name: name.to_owned(), inode }
}

/// Checks that the recovery removes only the intent file itself.
fn does_no_harm(intent: &OperationIntent) {
    let recovery = recover(directory(intent), &Checks::default()).unwrap();
    let unlinked: BTreeMap<_, _> = recovery
        .steps
        .iter()
        .filter_map(|step| match step {
            FileStep::Unlink { name } if !name.ends_with(".checksum") => Some((name.as_str(), ())),
            FileStep::Unlink { .. } | FileStep::SyncDirectory => None,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(unlinked.into_keys().collect::<Vec<_>>(), ["shorthorn.operation"], "{intent:?}");
    assert_eq!(recovery.layout.chain().len(), 3);
}

#[test]
fn files_that_are_others_by_now_are_left_alone() {
    let other = 77;
    let head = |old, new: &str, snapshot: Option<&str>| OperationIntent::ReplaceHead {
        old_head: old,
        new_head: new.to_owned(),
        snapshot: snapshot.map(str::to_owned),
    };
    // Neither the old head nor the new one is the head.
    does_no_harm(&head(file("volume-head-003.img", 3), "volume-head-004.img", Some("volume-snap-b.img")));
    // The head has the old one's name, and the file to revert is another one.
    does_no_harm(&head(file("volume-head-005.img", other), "volume-head-006.img", Some("volume-snap-b.img")));
    // The new head is in use, and the snapshot's name is in use too.
    does_no_harm(&head(file("volume-snap-b.img", other), "volume-head-005.img", None));
    does_no_harm(&OperationIntent::Delete { image: file("volume-snap-a.img", other) });
    let fold =
        |parent, child| OperationIntent::Fold { parent, child, grandparent: "volume-snap-z.img".to_owned() };
    // Not renamed yet.
    does_no_harm(&fold(file("volume-snap-a.img", 1), file("volume-snap-b.img", 2)));
    // The parent is gone, but the child is not the result of its fold.
    does_no_harm(&fold(file("volume-snap-gone.img", other), file("volume-snap-b.img", 2)));
    // It is, but its document has been taken care of.
    let recovered = fold(file("volume-snap-gone.img", 2), file("volume-snap-b.img", 9));
    does_no_harm(&recovered);
}

#[test]
fn a_fold_that_was_renamed_is_finished() {
    let fold = OperationIntent::Fold {
        parent: file("volume-snap-gone.img", 2),
        child: file("volume-snap-b.img", 9),
        grandparent: "volume-snap-a.img".to_owned(),
    };
    let mut facts = directory(&fold);
    for (name, parent) in
        [("volume-snap-b.img", "volume-snap-gone.img"), ("volume-snap-gone.img", "volume-snap-a.img")]
    {
        let meta = DiskMeta { parent: parent.to_owned(), ..DiskMeta::default() };
        facts.metas.insert(image(name), MetaFacts { inode: 0, bytes: meta.to_bytes() });
    }
    let recovery = recover(facts, &Checks::default()).unwrap();
    assert_eq!(recovery.layout.chain().len(), 3);
    assert!(recovery.steps.contains(&FileStep::Unlink { name: "volume-snap-gone.img.meta".to_owned() }));
}

/// The parent's file was lost before it took the child's name: that is not a finished fold.
#[test]
fn a_fold_whose_parent_was_lost_is_refused() {
    let fold = OperationIntent::Fold {
        parent: file("volume-snap-gone.img", 77),
        child: file("volume-snap-b.img", 2),
        grandparent: "volume-snap-a.img".to_owned(),
    };
    let mut facts = directory(&fold);
    let meta = DiskMeta { parent: "volume-snap-gone.img".to_owned(), ..DiskMeta::default() };
    facts.metas.insert(image("volume-snap-b.img"), MetaFacts { inode: 0, bytes: meta.to_bytes() });
    let error = recover(facts, &Checks::default()).unwrap_err().to_string();
    assert!(error.contains("volume-snap-gone.img is missing"), "{error}");
}

#[test]
fn a_damaged_intent_is_refused() {
    let mut facts = directory(&OperationIntent::Delete { image: file("volume-snap-a.img", 1) });
    facts.intent = Some(b"{\"operation\":\"dance\"}".to_vec());
    let error = recover(facts, &Checks::default()).unwrap_err().to_string();
    assert!(error.contains("shorthorn.operation is damaged"), "{error}");
}
