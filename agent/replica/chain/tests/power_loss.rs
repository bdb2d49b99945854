//! Tests every operation on a simulated disk that loses unsynced data, after every step.
//!
//! The disk keeps names and contents apart. A name may have been made, changed or removed since the last sync
//! of the directory. Such a name may or may not exist afterwards, each independently of the others. A file
//! whose content was not synced has the old content, or the new one, or is empty. That is harsher than any
//! journaling file system.
#![allow(clippy::unwrap_used)] // clippy does not count helpers as tests

use std::collections::{BTreeMap, BTreeSet};

use shorthorn_chain::{
    ChainError, Checks, CopyLayer, CopyList, DirectoryEntry, DirectoryFacts, DiskMeta, FileStep, FoldPlan,
    ImageFacts, ImageName, Layout, MetaFacts, NewSnapshot, SnapshotName, VolumeMeta, classify, create_steps,
    recover,
};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 4;
const TIME: &str = "2026-01-01T00:00:00Z";

#[derive(Clone, Debug, PartialEq)]
enum Content {
    Document(Vec<u8>),
    /// The content of each block; `None` is a hole.
    Image(Vec<Option<u8>>),
}

#[derive(Clone, Debug)]
struct Inode {
    synced: Option<Content>,
    current: Content,
}

#[derive(Clone, Debug)]
enum NameChange {
    Set { name: String, inode: u64 },
    Rename { from: String, to: String, inode: u64 },
    Clear { name: String },
}

#[derive(Clone, Debug, Default)]
struct Disk {
    inodes: BTreeMap<u64, Inode>,
    names: BTreeMap<String, u64>,
    synced_names: BTreeMap<String, u64>,
    pending: Vec<NameChange>,
    next_inode: u64,
}

impl Disk {
    fn create(&mut self, name: &str, content: Content) {
        self.next_inode += 1;
        self.inodes.insert(self.next_inode, Inode { synced: None, current: content });
        self.change(NameChange::Set { name: name.to_owned(), inode: self.next_inode });
    }

    fn change(&mut self, change: NameChange) {
        apply(&mut self.names, &change);
        self.pending.push(change);
    }

    fn inode(&mut self, name: &str) -> &mut Inode {
        let inode = self.names[name];
        self.inodes.get_mut(&inode).unwrap()
    }

    fn image(&mut self, name: &str) -> &mut Vec<Option<u8>> {
        match &mut self.inode(name).current {
            Content::Image(blocks) => blocks,
            Content::Document(_) => panic!("{name} is not an image"),
        }
    }

    fn execute(&mut self, step: &FileStep) {
        match step {
            FileStep::Write { name, bytes } => self.create(name, Content::Document(bytes.clone())),
            FileStep::SyncFile { name } => {
                let inode = self.inode(name);
                inode.synced = Some(inode.current.clone());
            }
            FileStep::Vouch { .. } => {}
            FileStep::Rename { from, to } => {
                let inode = self.names[from];
                self.change(NameChange::Rename { from: from.clone(), to: to.clone(), inode });
            }
            FileStep::Link { from, to } => {
                assert!(!self.names.contains_key(to), "{to} is there already");
                self.change(NameChange::Set { name: to.clone(), inode: self.names[from] });
            }
            FileStep::Unlink { name } => {
                if self.names.contains_key(name) {
                    self.change(NameChange::Clear { name: name.clone() });
                }
            }
            FileStep::SyncDirectory => {
                self.synced_names.clone_from(&self.names);
                self.pending.clear();
            }
            FileStep::CreateSparse { name, size_bytes } => {
                assert!(!self.names.contains_key(name), "{name} is there already");
                self.create(name, Content::Image(vec![None; usize::try_from(size_bytes / BLOCK).unwrap()]));
            }
            FileStep::Grow { name, size_bytes } => {
                let blocks = usize::try_from(size_bytes / BLOCK).unwrap();
                let image = self.image(name);
                image.resize(blocks.max(image.len()), None);
            }
            FileStep::Fold { from, into } => {
                let upper = self.image(from.as_str()).clone();
                for (lower, upper) in self.image(into.as_str()).iter_mut().zip(upper) {
                    *lower = upper.or(*lower);
                }
            }
        }
    }

    fn recover(&mut self) {
        for inode in self.inodes.values_mut() {
            inode.synced = Some(inode.current.clone());
        }
        self.execute(&FileStep::SyncDirectory);
    }

    /// Returns the disk after a power loss. `kept` selects the pending changes of names that survive, and
    /// `contents` the unsynced contents.
    fn lose_power(&self, kept: u32, contents: Unsynced) -> Disk {
        let mut disk = self.clone();
        disk.names.clone_from(&self.synced_names);
        for (bit, change) in self.pending.iter().enumerate() {
            if kept >> bit & 1 == 1 {
                apply(&mut disk.names, change);
            }
        }
        disk.synced_names.clone_from(&disk.names);
        disk.pending.clear();
        for inode in disk.inodes.values_mut() {
            inode.current = match (&inode.synced, &inode.current, contents) {
                (_, current, Unsynced::Kept) => current.clone(),
                (Some(synced), _, _) => synced.clone(),
                (None, Content::Document(_), _) => Content::Document(Vec::new()),
                (None, Content::Image(_), _) => Content::Image(Vec::new()),
            };
            inode.synced = Some(inode.current.clone());
        }
        disk
    }

    fn facts(&self) -> DirectoryFacts {
        let mut facts = DirectoryFacts::default();
        for (name, &inode) in &self.names {
            match (classify(name), &self.inodes[&inode].current) {
                (DirectoryEntry::VolumeMeta, Content::Document(bytes)) => {
                    facts.volume_meta = Some(bytes.clone())
                }
                (DirectoryEntry::Intent, Content::Document(bytes)) => facts.intent = Some(bytes.clone()),
                (DirectoryEntry::Meta(image), Content::Document(bytes)) => {
                    facts.metas.insert(image, MetaFacts { inode, bytes: bytes.clone() });
                }
                (DirectoryEntry::Image(image), Content::Image(blocks)) => {
                    let size_bytes = blocks.len() as u64 * BLOCK;
                    let holds_data = blocks.iter().any(Option::is_some);
                    facts.images.insert(image, ImageFacts { size_bytes, inode, holds_data });
                }
                (DirectoryEntry::Temp, _) => facts.temps.push(name.clone()),
                (entry, _) => panic!("{name} is {entry:?}"),
            }
        }
        facts
    }

    /// Returns the content that a chain of layers reads as.
    fn read(&self, chain: &[ImageName]) -> Vec<u8> {
        let mut volume = Vec::new();
        for image in chain.iter().rev() {
            let Content::Image(blocks) = &self.inodes[&self.names[image.as_str()]].current else { panic!() };
            volume.resize(blocks.len().max(volume.len()), 0);
            for (block, data) in volume.iter_mut().zip(blocks) {
                *block = data.unwrap_or(*block);
            }
        }
        volume
    }
}

#[derive(Clone, Copy, Debug)]
enum Unsynced {
    Kept,
    Lost,
}

fn apply(names: &mut BTreeMap<String, u64>, change: &NameChange) {
    match change {
        NameChange::Set { name, inode } => {
            names.insert(name.clone(), *inode);
        }
        NameChange::Rename { from, to, inode } => {
            names.remove(from);
            names.insert(to.clone(), *inode);
        }
        NameChange::Clear { name } => {
            names.remove(name);
        }
    }
}

/// The visible state of a directory: the volume, and each snapshot with its content unless it is removed.
#[derive(Clone, Debug, PartialEq)]
struct View {
    volume: Vec<u8>,
    snapshots: BTreeMap<String, Option<Vec<u8>>>,
}

fn view(disk: &Disk, layout: &Layout) -> View {
    let snapshots = layout.disks().iter().filter_map(|(image, found)| {
        let name = image.snapshot_name()?;
        let chain =
            (!found.meta.removed).then(|| layout.chain_of_snapshot(name, &Checks::default()).unwrap());
        Some((name.to_owned(), chain.map(|chain| disk.read(&chain))))
    });
    View { snapshots: snapshots.collect(), volume: disk.read(layout.chain()) }
}

fn open(disk: &mut Disk) -> Result<Layout, ChainError> {
    let recovery = recover(disk.facts(), &Checks::default())?;
    recovery.steps.iter().for_each(|step| disk.execute(step));
    Ok(recovery.layout)
}

fn perform(disk: &mut Disk, steps: &[FileStep]) {
    steps.iter().for_each(|step| disk.execute(step));
}

fn new_snapshot(name: &str) -> NewSnapshot {
    let name = SnapshotName::new(name).unwrap();
    NewSnapshot { name, user_created: true, labels: BTreeMap::new(), created: TIME.to_owned() }
}

/// Returns `a` ← `b` ← `c` ← head and `side` on `a`, every layer with blocks of its own; `b` is removed.
fn prepare() -> Disk {
    let mut disk = Disk::default();
    perform(&mut disk, &create_steps(BLOCKS * BLOCK, TIME).unwrap().steps);
    let write = |disk: &mut Disk, block: usize, value: u8| {
        let head = open(disk).unwrap().head().clone();
        disk.image(head.as_str())[block] = Some(value);
    };
    let snapshot = |disk: &mut Disk, name: &str| {
        let operation = open(disk).unwrap().plan_snapshot(new_snapshot(name)).unwrap();
        perform(disk, &operation.steps);
    };
    write(&mut disk, 0, 1);
    write(&mut disk, 1, 1);
    snapshot(&mut disk, "a");
    write(&mut disk, 0, 7);
    snapshot(&mut disk, "side");
    let revert = open(&mut disk).unwrap().plan_revert("a", TIME).unwrap();
    perform(&mut disk, &revert.steps);
    write(&mut disk, 1, 2);
    write(&mut disk, 2, 2);
    snapshot(&mut disk, "b");
    write(&mut disk, 2, 3);
    snapshot(&mut disk, "c");
    write(&mut disk, 3, 4);
    let remove = open(&mut disk).unwrap().plan_remove("b").unwrap();
    perform(&mut disk, &remove.steps);
    disk.recover();
    disk
}

/// Loses power after every step of an operation in every way, and after every step of the repair too.
fn survives(plan: impl Fn(&Layout) -> Vec<FileStep>) {
    let mut old_disk = prepare();
    let old_layout = open(&mut old_disk).unwrap();
    let old = view(&old_disk, &old_layout);
    let steps = plan(&old_layout);
    let mut new_disk = old_disk.clone();
    perform(&mut new_disk, &steps);
    let new_layout = open(&mut new_disk).unwrap();
    let new = view(&new_disk, &new_layout);
    assert!(old != new);

    let mut seen = BTreeSet::new();
    let mut disk = old_disk;
    for (number, step) in steps.iter().enumerate() {
        disk.execute(step);
        for_each_loss(&disk, |lost, how| {
            let when = format!("after step {number} ({step:?}), {how}");
            let shown = judge(lost, &old, &new, &when);
            seen.insert(shown);
            let Ok(recovery) = recover(lost.facts(), &Checks::default()) else { panic!("{when}") };
            let mut repaired = lost.clone();
            for (again, step) in recovery.steps.iter().enumerate() {
                repaired.execute(step);
                for_each_loss(&repaired, |lost, how| {
                    let when = format!("{when}, then after step {again} of the repair, {how}");
                    assert_eq!(judge(lost, &old, &new, &when), shown, "{when}");
                });
            }
        });
    }
    // An operation that returned is durable.
    for_each_loss(&disk, |lost, how| assert!(judge(lost, &old, &new, how), "{how}"));
    assert_eq!(seen.len(), 2, "both outcomes must occur");
}

fn for_each_loss(disk: &Disk, mut each: impl FnMut(&Disk, &str)) {
    assert!(disk.pending.len() < 12, "too many changes of names between two syncs: {:?}", disk.pending);
    for kept in 0..1u32 << disk.pending.len() {
        for contents in [Unsynced::Kept, Unsynced::Lost] {
            each(
                &disk.lose_power(kept, contents),
                &format!("names {kept:b} and unsynced contents {contents:?}"),
            );
        }
    }
}

/// Returns true if the directory shows the new state. It must show either the new or the old one, and be left
/// tidy.
fn judge(disk: &Disk, old: &View, new: &View, when: &str) -> bool {
    let mut disk = disk.clone();
    let layout = open(&mut disk).unwrap_or_else(|error| panic!("{error} {when}: {:?}", disk.names));
    let found = view(&disk, &layout);
    assert!(found == *old || found == *new, "{when}: {found:?}\n{:?}", disk.names);
    let again = recover(disk.facts(), &Checks::default()).unwrap();
    assert!(again.steps.is_empty() && again.messages.is_empty(), "{when}: {again:?}");
    assert_eq!(again.layout, layout, "{when}");
    found == *new
}

#[test]
fn snapshot() {
    survives(|layout| layout.plan_snapshot(new_snapshot("new")).unwrap().steps);
}

/// Checks that a snapshot has all earlier writes, flushed or not, and that they are durable once it counts.
#[test]
fn snapshot_has_all_earlier_writes() {
    let mut disk = prepare();
    let layout = open(&mut disk).unwrap();
    disk.image(layout.head().as_str())[0] = Some(9);
    let whole = disk.read(layout.chain());
    let mut counted = 0;
    for step in layout.plan_snapshot(new_snapshot("new")).unwrap().steps {
        disk.execute(&step);
        for_each_loss(&disk, |lost, how| {
            let mut lost = lost.clone();
            let layout = open(&mut lost).unwrap();
            if layout.snapshot("new").is_ok() {
                counted += 1;
                assert_eq!(view(&lost, &layout).snapshots["new"].as_ref(), Some(&whole), "{how}");
            }
        });
    }
    assert!(counted > 0);
}

#[test]
fn expand() {
    survives(|layout| layout.plan_expand((BLOCKS + 1) * BLOCK).unwrap().steps);
}

#[test]
fn revert() {
    survives(|layout| layout.plan_revert("side", TIME).unwrap().steps);
}

#[test]
fn remove() {
    survives(|layout| layout.plan_remove("c").unwrap().steps);
}

#[test]
fn fold() {
    survives(|layout| match layout.plan_fold("b").unwrap() {
        FoldPlan::Fold { copy, finish, .. } => [copy, finish.steps].concat(),
        FoldPlan::Delete(_) => panic!("b has a child"),
    });
}

/// Checks that an incomplete copy is not a replica. Repeating the copy from the start succeeds from any
/// state, and keeps the layer that was complete.
#[test]
fn copy() {
    let prepared = prepare();
    let whole =
        prepared.facts().images.keys().find(|image| image.snapshot_name() == Some("a")).cloned().unwrap();
    let layer = |image: &str, parent: &str| {
        let meta = DiskMeta { name: image.to_owned(), parent: parent.to_owned(), ..DiskMeta::default() };
        let image = ImageName::parse(image).unwrap();
        CopyLayer { image, meta: meta.to_bytes(), size_bytes: BLOCKS * BLOCK }
    };
    let layers = vec![
        layer(whole.as_str(), ""),
        layer("volume-snap-new.img", whole.as_str()),
        layer("volume-head-009.img", "volume-snap-new.img"),
    ];
    let list = CopyList::new(layers, BLOCKS * BLOCK).unwrap();
    let steps = |disk: &Disk| {
        let volume = VolumeMeta::parse(&disk.facts().volume_meta.unwrap()).unwrap();
        let names: Vec<String> = disk.names.keys().cloned().collect();
        list.steps(&volume, &names, &[true, false, false])
    };
    let check = |disk: &Disk, when: &str| {
        let checks = Checks { accept_rebuilding: true, ..Checks::default() };
        let found = recover(disk.facts(), &checks).unwrap_or_else(|error| panic!("{error} {when}"));
        let chain: Vec<&str> = found.layout.chain().iter().map(ImageName::as_str).collect();
        assert_eq!(chain, ["volume-head-009.img", "volume-snap-new.img", whole.as_str()], "{when}");
        assert_eq!(disk.read(found.layout.chain()), [1, 1, 0, 0], "{when}");
        assert_eq!(found.layout.disks().len(), 3, "{when}");
        assert!(found.layout.volume().is_rebuilding(), "{when}");
    };
    let mut disk = prepared;
    for (number, step) in steps(&disk).iter().enumerate() {
        disk.execute(step);
        for_each_loss(&disk, |lost, how| {
            let mut again = lost.clone();
            perform(&mut again, &steps(lost));
            check(&again, &format!("again after step {number} ({step:?}), {how}"));
        });
    }
    for_each_loss(&disk, check);
}
