//! Helpers that the tests of the store share.
#![allow(dead_code, clippy::unwrap_used)] // Each test program uses a part; to clippy, helpers are not tests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use ring::digest::{SHA256, digest};
use shorthorn_store::Store;
use tempfile::TempDir;

/// A directory that a real Longhorn engine made, and its expected content.
pub struct Fixture {
    _temp: TempDir,
    path: PathBuf,
    pub expected: Expected,
}

#[derive(serde::Deserialize)]
pub struct Expected {
    pub size: u64,
    pub head_sha256: String,
    pub head_mib_sha256: Vec<String>,
    pub snapshots: BTreeMap<String, ExpectedSnapshot>,
}

#[derive(serde::Deserialize)]
pub struct ExpectedSnapshot {
    pub sha256: String,
    pub parent: String,
}

/// Returns a temporary directory, in memory if possible: the tests make many thousand syncs, which take a
/// disk minutes.
pub fn scratch() -> TempDir {
    let memory = Path::new("/dev/shm");
    tempfile::tempdir_in(memory).unwrap_or_else(|_| tempfile::tempdir().unwrap())
}

impl Fixture {
    pub fn unpack(name: &str) -> Fixture {
        Fixture::unpack_in(scratch(), name)
    }

    pub fn unpack_in(temp: TempDir, name: &str) -> Fixture {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        let tar = fixtures.join(format!("{name}.tar.zst"));
        let status =
            Command::new("tar").arg("-C").arg(temp.path()).arg("--zstd").arg("-xf").arg(tar).status();
        assert!(status.unwrap().success(), "tar with zstd is needed to unpack the fixtures");
        let expected = std::fs::read(fixtures.join(format!("{name}.json"))).unwrap();
        let expected = serde_json::from_slice(&expected).unwrap();
        Fixture { path: temp.path().join(name), _temp: temp, expected }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn documents(&self) -> BTreeMap<String, String> {
        documents(&self.path)
    }
}

/// Returns the content of all files that end in `.meta`.
pub fn documents(path: &Path) -> BTreeMap<String, String> {
    let mut documents = BTreeMap::new();
    for entry in std::fs::read_dir(path).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if name.ends_with(".meta") {
            documents.insert(name, std::fs::read_to_string(entry.path()).unwrap());
        }
    }
    documents
}

pub fn read_all(store: &mut Store) -> Vec<u8> {
    let mut volume = vec![0; usize::try_from(store.size_bytes()).unwrap()];
    store.read_at(&mut volume, 0).unwrap();
    volume
}

pub fn sha256(bytes: &[u8]) -> String {
    shorthorn_types::hex(digest(&SHA256, bytes).as_ref())
}

pub fn mib_sums(volume: &[u8]) -> Vec<String> {
    volume.chunks(1 << 20).map(sha256).collect()
}

/// Returns bytes that differ from sector to sector and from one `seed` to the next, and are never zero.
pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state.to_le_bytes()[3]) | 1
    };
    (0..length).map(|_| next()).collect()
}
