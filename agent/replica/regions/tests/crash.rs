//! Tests crashes at any point: the disk never lacks regions in which modifications may be executed.
#![allow(clippy::unwrap_used)] // an unexpected value fails the test

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use shorthorn_regions::{DirtyMark, Marked, PAGE_BYTES, PageWrite, SetKey, WriteIntentLog};
use shorthorn_types::{ByteRange, MarkAction, MarkRegions, RegionSet, Regions, RegionsOf, ReplicaId};

const REGION_BYTES: u64 = 64 << 10;
/// Two pages; the test uses the regions around the border between them.
const COUNT: u32 = 32_256 + 20;
const FIRST: u32 = COUNT - 40;
const SIZE_BYTES: u64 = COUNT as u64 * REGION_BYTES;
/// The sizes that the volume grows to; the last ones have larger regions.
const SIZES: [u64; 5] =
    [SIZE_BYTES + 4096, SIZE_BYTES + 64 * REGION_BYTES, 4 << 30, (64 << 30) + 4096, 300 << 30];

#[derive(Clone, Debug)]
enum Event {
    /// A modification comes.
    Modify {
        first: u32,
        count: u32,
    },
    /// The waiting modifications ask again.
    Retry,
    Clear {
        out_of_sync: bool,
        first: u32,
        count: u32,
    },
    Begin {
        lazy: bool,
    },
    /// A write under way ends, with or without an error.
    End {
        which: prop::sample::Index,
        well: bool,
    },
    Keep,
    Forget,
    /// All possible regions are read to be summed.
    BeginSums {
        first: u32,
        count: u32,
    },
    /// Their sums are durable, or will not be.
    EndSums {
        well: bool,
    },
    /// The volume grows, maybe to one with larger regions. The process dies after `files` files were
    /// recreated.
    Expand {
        by: usize,
        files: usize,
        fates: Vec<u8>,
    },
    /// The process dies; each write under way is lost, done or torn.
    Crash {
        fates: Vec<u8>,
    },
}

fn event() -> impl Strategy<Value = Event> {
    let run = || (0u32..40, 1u32..6);
    prop_oneof![
        6 => run().prop_map(|(first, count)| Event::Modify { first, count }),
        4 => Just(Event::Retry),
        3 => (any::<bool>(), run())
            .prop_map(|(out_of_sync, (first, count))| Event::Clear { out_of_sync, first, count }),
        5 => any::<bool>().prop_map(|lazy| Event::Begin { lazy }),
        5 => (any::<prop::sample::Index>(), prop::bool::weighted(0.9))
            .prop_map(|(which, well)| Event::End { which, well }),
        1 => Just(Event::Keep),
        1 => Just(Event::Forget),
        3 => run().prop_map(|(first, count)| Event::BeginSums { first, count }),
        3 => prop::bool::weighted(0.8).prop_map(|well| Event::EndSums { well }),
        1 => (0..SIZES.len(), 0..4usize, prop::collection::vec(0u8..3, 8))
            .prop_map(|(by, files, fates)| Event::Expand { by, files, fates }),
        2 => prop::collection::vec(0u8..3, 8).prop_map(|fates| Event::Crash { fates }),
    ]
}

struct Write {
    slot: u8,
    key: SetKey,
    /// The number of the set's file. A set that is made again under the same name has another file.
    file: u64,
    at: usize,
    bytes: Box<[u8; PAGE_BYTES]>,
}

/// A write-intent log, the disk under it, and the required content of its sets.
struct Simulation {
    intent_log: WriteIntentLog,
    disk: BTreeMap<SetKey, (u64, Vec<u8>)>,
    files: u64,
    writes: Vec<Write>,
    waiting: Vec<(u32, u32)>,
    /// In regions of the volume as it was made.
    must: BTreeMap<SetKey, BTreeSet<u32>>,
    size_bytes: u64,
    /// The number of modifications of each region, in the original division of the volume.
    content: BTreeMap<u32, u64>,
    /// The number of modifications of each region when its stored sums were read.
    sums: BTreeMap<u32, u64>,
    /// Regions that were read to store their sums.
    read: BTreeMap<u32, u64>,
}

fn out_of_sync() -> ReplicaId {
    ReplicaId::from_random(77)
}

impl Simulation {
    fn new() -> Simulation {
        let regions = Regions::of(u64::from(COUNT) * REGION_BYTES);
        let mut intent_log = WriteIntentLog::new(regions, 3, &RegionSet::empty(COUNT));
        intent_log.keep_unsummed(None);
        intent_log.want_sums(FIRST..COUNT);
        let file = |key| (key, (0, intent_log.file(key).unwrap()));
        let disk = BTreeMap::from([file(SetKey::Intent), file(SetKey::Unsummed)]);
        let must = BTreeMap::from([(SetKey::Intent, BTreeSet::new())]);
        Simulation {
            intent_log,
            disk,
            files: 1,
            writes: vec![],
            waiting: vec![],
            must,
            size_bytes: SIZE_BYTES,
            content: BTreeMap::new(),
            sums: BTreeMap::new(),
            read: BTreeMap::new(),
        }
    }

    fn admit(&mut self, first: u32, count: u32) -> bool {
        let range = ByteRange::new(u64::from(first) * REGION_BYTES, u64::from(count) * REGION_BYTES).unwrap();
        let go = self.intent_log.mark_dirty(range) == DirtyMark::Durable;
        if go {
            for must in self.must.values_mut() {
                must.extend((first..first + count).filter(|region| *region < COUNT));
            }
            for region in (first..first + count).filter(|region| *region < COUNT) {
                *self.content.entry(region).or_default() += 1;
            }
        }
        go
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Modify { first, count } => {
                let first = FIRST + first;
                if !self.admit(first, count) {
                    self.waiting.push((first, count));
                }
            }
            Event::Retry => {
                for (first, count) in std::mem::take(&mut self.waiting) {
                    if !self.admit(first, count) {
                        self.waiting.push((first, count));
                    }
                }
            }
            Event::Clear { out_of_sync: of_out_of_sync, first, count } => {
                self.clear(of_out_of_sync, FIRST + first, count.min(40 - first));
            }
            Event::Begin { lazy } => {
                if let Some(PageWrite { slot, key, page, bytes }) = self.intent_log.begin_write(lazy) {
                    let (file, at) = (self.disk[&key].0, page as usize * PAGE_BYTES);
                    self.writes.push(Write { slot, key, file, at, bytes: Box::new(*bytes) });
                }
            }
            Event::End { which, well } => {
                if !self.writes.is_empty() {
                    let write = self.writes.swap_remove(which.index(self.writes.len()));
                    self.land(&write, if well { 1 } else { 2 });
                    self.intent_log.end_write(write.slot, well);
                }
            }
            Event::Keep => self.keep(),
            Event::Forget => self.forget(),
            Event::BeginSums { first, count } => self.begin_sums(FIRST + first..FIRST + first + count),
            Event::EndSums { well } => {
                if well {
                    self.sums.append(&mut self.read);
                }
                self.read.clear();
                self.intent_log.end_sums(well);
            }
            Event::Expand { by, files, fates } => self.expand(SIZES[by], files, &fates),
            Event::Crash { fates } => self.crash(&fates),
        }
    }

    fn clear(&mut self, of_out_of_sync: bool, first: u32, count: u32) {
        let (of, key) = if of_out_of_sync {
            (RegionsOf::OutOfSync(out_of_sync()), SetKey::OutOfSync(out_of_sync()))
        } else {
            (RegionsOf::Intent, SetKey::Intent)
        };
        let clear = MarkRegions {
            of,
            action: MarkAction::Clear,
            runs: vec![(first, count)],
            stamp: 0,
            size_bytes: Some(SIZE_BYTES),
        };
        self.intent_log.mark(&clear).unwrap();
        if let Some(must) = self.must.get_mut(&key) {
            must.retain(|region| !(first..first + count).contains(region));
        }
    }

    fn forget(&mut self) {
        let forget = MarkRegions {
            of: RegionsOf::OutOfSync(out_of_sync()),
            action: MarkAction::Forget,
            runs: vec![],
            stamp: 0,
            size_bytes: Some(SIZE_BYTES),
        };
        if let Ok(Marked::Remove(replica)) = self.intent_log.mark(&forget) {
            self.disk.remove(&SetKey::OutOfSync(replica));
            self.must.remove(&SetKey::OutOfSync(replica));
            self.intent_log.forget(replica);
        }
    }

    /// Returns the current regions that contain these regions of the original volume.
    fn now(&self, regions: std::ops::Range<u32>) -> std::ops::Range<u32> {
        self.intent_log.regions().touched(Regions::of(SIZE_BYTES).bytes(regions))
    }

    fn begin_sums(&mut self, run: std::ops::Range<u32>) {
        self.read.clear();
        if !self.intent_log.begin_sums(self.now(run)) {
            return;
        }
        for region in FIRST..COUNT {
            if self.now(region..region + 1).all(|now| self.intent_log.is_being_summed(now)) {
                self.read.insert(region, self.content.get(&region).copied().unwrap_or(0));
            }
        }
    }

    fn expand(&mut self, size_bytes: u64, files: usize, fates: &[u8]) {
        if size_bytes <= self.size_bytes {
            return;
        }
        self.size_bytes = size_bytes;
        let grown = self.intent_log.grown(Regions::of(size_bytes));
        let all: Vec<_> = grown.files().collect();
        for (key, bytes) in all.iter().take(files).cloned() {
            self.files += 1;
            self.disk.insert(key, (self.files, bytes));
        }
        if files < all.len() {
            return self.crash(fates);
        }
        self.intent_log.grow(grown);
        self.read.clear();
    }

    fn keep(&mut self) {
        let add = MarkRegions {
            of: RegionsOf::OutOfSync(out_of_sync()),
            action: MarkAction::Add,
            runs: vec![(FIRST, 2)],
            stamp: 0,
            size_bytes: Some(SIZE_BYTES),
        };
        let key = SetKey::OutOfSync(out_of_sync());
        if let Marked::Begin(new) = self.intent_log.mark(&add).unwrap() {
            self.files += 1;
            self.disk.insert(key, (self.files, new.file()));
            self.intent_log.keep(new);
            self.must.insert(key, BTreeSet::from([FIRST, FIRST + 1]));
        }
    }

    /// Ends a write: `fate` 0 writes nothing, 1 all of it, 2 a part.
    fn land(&mut self, write: &Write, fate: u8) {
        let Some((file, bytes)) = self.disk.get_mut(&write.key) else { return };
        if *file != write.file || fate == 0 {
            return;
        }
        let part = if fate == 1 { PAGE_BYTES } else { 512 };
        bytes[write.at..write.at + part].copy_from_slice(&write.bytes[..part]);
    }

    fn crash(&mut self, fates: &[u8]) {
        for (write, fate) in std::mem::take(&mut self.writes).into_iter().zip(fates) {
            self.land(&write, *fate);
        }
        self.waiting.clear();
        let (regions, epoch) = (Regions::of(self.size_bytes), 3);
        let (mut intent_log, _) = WriteIntentLog::load(regions, epoch, &self.disk[&SetKey::Intent].1);
        if let Some((_, file)) = self.disk.get(&SetKey::OutOfSync(out_of_sync())) {
            assert!(intent_log.load_out_of_sync(out_of_sync(), file).unwrap().0);
        }
        intent_log.keep_unsummed(Some(&self.disk[&SetKey::Unsummed].1));
        self.read.clear();
        self.intent_log = intent_log;
        self.intent_log.want_sums(self.now(FIRST..COUNT));
        for (key, (file, bytes)) in &mut self.disk {
            if self.intent_log.is_outgrown(*key) {
                self.files += 1;
                (*file, *bytes) = (self.files, self.intent_log.file(*key).unwrap());
            }
        }
        self.check();
    }

    fn check(&mut self) {
        for region in FIRST..COUNT {
            if self.now(region..region + 1).all(|now| self.intent_log.is_summed(now)) {
                let content = self.content.get(&region).copied().unwrap_or(0);
                assert_eq!(
                    self.sums.get(&region),
                    Some(&content),
                    "the sums of region {region} are outdated"
                );
            }
        }
        for (key, must) in &self.must {
            let content = self.intent_log.content(*key).unwrap();
            for region in must {
                let bytes = Regions::of(SIZE_BYTES).range(*region);
                let is_in = content.contains_all(self.intent_log.regions().touched(bytes));
                assert!(is_in, "{key} has lost region {region}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn nothing_admitted_is_ever_missing(events in prop::collection::vec(event(), 1..120)) {
        let mut sim = Simulation::new();
        for event in events {
            sim.happen(event);
            sim.check();
        }
        // Without more failures everything that waits gets through, in a bounded number of rounds.
        sim.crash(&[0, 1, 2, 0, 1, 2, 0, 1]);
        sim.happen(Event::Modify { first: 0, count: 40 });
        for _ in 0..4 {
            while let Some(PageWrite { slot, .. }) = sim.intent_log.begin_write(false) {
                sim.intent_log.end_write(slot, true);
            }
            sim.happen(Event::Retry);
        }
        prop_assert!(sim.waiting.is_empty());
    }
}

#[test]
fn regions_are_summed_when_they_are_clean_and_only_then() {
    let mut sim = Simulation::new();
    sim.happen(Event::Modify { first: 0, count: 2 });
    assert_eq!(sim.intent_log.next_to_sum(FIRST), Some(FIRST + 2), "the first two wait for their pages");
    while let Some(PageWrite { slot, .. }) = sim.intent_log.begin_write(false) {
        sim.intent_log.end_write(slot, true);
    }
    sim.happen(Event::Retry);
    sim.happen(Event::Clear { out_of_sync: false, first: 0, count: 1 });
    assert_eq!(sim.intent_log.next_to_sum(FIRST), Some(FIRST), "the engine says that it is clean");
    sim.happen(Event::BeginSums { first: 0, count: 4 });
    assert!(!sim.intent_log.is_being_summed(FIRST + 1), "it is not clean");
    sim.happen(Event::Modify { first: 2, count: 1 });
    sim.happen(Event::EndSums { well: true });
    let summed = [0, 1, 2, 3].map(|at| sim.intent_log.is_summed(FIRST + at));
    assert_eq!(summed, [true, false, false, true], "the third was modified meanwhile");
    sim.check();
    sim.intent_log.forget_unsummed();
    assert!(!sim.intent_log.is_summed(FIRST), "without the set no sum counts");
}
