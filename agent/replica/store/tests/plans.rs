//! The data path as the replica server uses it: plans here, I/O on the descriptors there.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)] // clippy does not count helpers as tests

mod common;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use common::{pattern, read_all};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use shorthorn_store::{
    AlignedBuffer, BlockSource, ByteRange, CreateOptions, EdgeBlock, FileIndex, MEMORY_ALIGNMENT, Store,
};

const TIME: &str = "2026-01-01T00:00:00Z";

struct Caller {
    store: Store,
    buffer: AlignedBuffer,
}

impl Caller {
    fn new(directory: &std::path::Path) -> Caller {
        let options = CreateOptions { size_bytes: 1 << 20, ..CreateOptions::default() };
        let store = Store::create(directory.join("replica"), options).unwrap();
        Caller { store, buffer: AlignedBuffer::new(1 << 20) }
    }

    fn file(&self, index: FileIndex) -> File {
        File::from(self.store.fd(index).try_clone_to_owned().unwrap())
    }

    /// Executes the steps of a plan, with I/O of whole blocks from aligned memory only.
    fn write(&mut self, offset: u64, data: &[u8]) {
        let range = ByteRange::new(offset, data.len() as u64).unwrap();
        let plan = self.store.plan_write(range).unwrap();
        let part = |range: ByteRange| &data[(range.offset() - offset) as usize..][..range.length() as usize];
        for edge in [plan.first, plan.last].into_iter().flatten() {
            self.merge(edge, part(edge.part));
        }
        if let Some(whole) = plan.whole {
            let head = self.file(self.store.head());
            let buffer = &mut self.buffer.as_mut_slice()[..whole.length() as usize];
            buffer.copy_from_slice(part(whole));
            head.write_all_at(buffer, whole.offset()).unwrap();
        }
        self.store.written(range);
    }

    fn merge(&mut self, edge: EdgeBlock, part: &[u8]) {
        let source = match edge.source {
            BlockSource::Zero => None,
            BlockSource::File(file) => Some(self.file(file)),
        };
        let head = self.file(self.store.head());
        let block = &mut self.buffer.as_mut_slice()[..4096];
        block.fill(0);
        if let Some(source) = source {
            source.read_exact_at(block, edge.block.offset()).unwrap();
        }
        block[(edge.part.offset() - edge.block.offset()) as usize..][..part.len()].copy_from_slice(part);
        head.write_all_at(block, edge.block.offset()).unwrap();
    }

    fn read(&mut self, range: ByteRange) -> Vec<u8> {
        let mut segments = Vec::new();
        self.store.plan_read(range, &mut segments).unwrap();
        let mut all = Vec::new();
        for segment in segments {
            let file = match segment.source {
                BlockSource::Zero => None,
                BlockSource::File(file) => Some(self.file(file)),
            };
            let buffer = &mut self.buffer.as_mut_slice()[..segment.range.length() as usize];
            buffer.fill(0);
            if let Some(file) = file {
                file.read_exact_at(buffer, segment.range.offset()).unwrap();
            }
            all.extend_from_slice(buffer);
        }
        all
    }
}

#[test]
fn plans_work_with_direct_io() {
    let directory = tempfile::tempdir().unwrap();
    let mut caller = Caller::new(directory.path());
    let flags =
        OFlag::from_bits_retain(fcntl(caller.store.fd(caller.store.head()), FcntlArg::F_GETFL).unwrap());
    assert_eq!(flags.contains(OFlag::O_DIRECT), caller.store.direct_io());
    assert_eq!(caller.buffer.as_slice().as_ptr().align_offset(MEMORY_ALIGNMENT), 0);
    let mut model = vec![0; 1 << 20];
    let ranges = [
        (0, 4096),
        (512, 512),
        (4096 * 3 + 512, 4096 * 5),
        (4096 * 2, 1024),
        (4096 * 7 + 3584, 1024),
        (1 << 19, 1 << 18),
    ];
    for round in 0..3u64 {
        for (number, (offset, length)) in ranges.into_iter().enumerate() {
            let (offset, data) =
                (offset + round as usize * 8192, pattern(round * 10 + number as u64, length));
            caller.write(offset as u64, &data);
            model[offset..offset + length].copy_from_slice(&data);
            assert!(
                caller.read(ByteRange::new(0, 1 << 20).unwrap()) == model,
                "round {round}, write {number}"
            );
        }
        caller.store.snapshot(&format!("s{round}"), true, BTreeMap::new(), TIME).unwrap();
    }
    assert!(read_all(&mut caller.store) == model);
}

/// A write that failed may have left anything in the head: it must be looked up again.
#[test]
fn a_failed_write_is_looked_up_again() {
    let directory = tempfile::tempdir().unwrap();
    let mut caller = Caller::new(directory.path());
    let old = pattern(1, 1 << 20);
    caller.write(0, &old);
    caller.store.snapshot("s", true, BTreeMap::new(), TIME).unwrap();
    let range = ByteRange::new(8192, 8192).unwrap();
    assert!(caller.read(range) == old[8192..16384]);
    caller.store.plan_write(range).unwrap();
    // Half of it reached the disk.
    let new = AlignedBuffer::new(4096);
    caller.file(caller.store.head()).write_all_at(new.as_slice(), 8192).unwrap();
    caller.store.write_failed(range);
    assert!(caller.read(range) == [&[0; 4096], &old[12288..16384]].concat());
}

/// Files keep their index while layers are put above and taken from below them.
#[test]
fn files_keep_their_index() {
    let directory = tempfile::tempdir().unwrap();
    let mut caller = Caller::new(directory.path());
    let mut heads = vec![caller.store.head()];
    for name in ["a", "b", "c"] {
        caller.write(0, &pattern(heads.len() as u64, 4096));
        caller.store.snapshot(name, true, BTreeMap::new(), TIME).unwrap();
        heads.push(caller.store.head());
    }
    let indices =
        |store: &Store| store.layers().into_iter().rev().map(|layer| layer.index).collect::<Vec<_>>();
    assert_eq!(indices(&caller.store), heads);
    let inode =
        |caller: &Caller, index| nix::sys::stat::fstat(caller.store.fd(index).as_fd()).unwrap().st_ino;
    let before: Vec<_> = heads.iter().map(|head| inode(&caller, *head)).collect();
    caller.store.remove("a").unwrap();
    caller.store.fold("a").unwrap();
    // `b` lives on in the file of `a`.
    assert_eq!(indices(&caller.store), [heads[0], heads[2], heads[3]]);
    for kept in [0, 2, 3] {
        assert_eq!(inode(&caller, heads[kept]), before[kept]);
    }
    assert!(caller.read(ByteRange::new(0, 4096).unwrap()) == pattern(3, 4096));
    caller.store.snapshot("d", true, BTreeMap::new(), TIME).unwrap();
    assert_eq!(caller.store.head(), heads[1], "a free index is used again");
}
