//! Writers that know the expected content of reads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use shorthorn_testkit::Random;
use shorthorn_testkit::nbd::Nbd;

use crate::LIMIT;
use crate::volume::Volume;

const WRITERS: u64 = 4;
const BLOCK: u64 = 4096;

/// The last writes of a writer, block by block. None if the engine has ended.
type Written = Option<Vec<(u64, u8)>>;

/// Each writer has blocks of its own, and writes them again and again with a counter.
pub struct Load {
    stop: Arc<AtomicBool>,
    written: Arc<AtomicU64>,
    writers: Vec<JoinHandle<Written>>,
    seed: u64,
}

impl Load {
    pub fn start(volume: &Volume, seed: u64) -> Load {
        println!("seed {seed}");
        let (stop, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let blocks = volume.size_bytes / BLOCK / WRITERS;
        let writer = |number| {
            let (stop, written, socket) = (Arc::clone(&stop), Arc::clone(&written), volume.frontend());
            thread::spawn(move || {
                let mut nbd = Nbd::connect(&socket, "v1").unwrap();
                let mut random = Random::new(seed * WRITERS + number + 1);
                let mut model = std::collections::BTreeMap::new();
                while !stop.load(Ordering::Relaxed) {
                    let count = 1 + random.below(8);
                    let first = random.below(blocks - count);
                    let fill = u8::try_from(random.below(256)).unwrap();
                    let offset = (number * blocks + first) * BLOCK;
                    let data = vec![fill; usize::try_from(count * BLOCK).unwrap()];
                    if nbd.write(offset, &data).is_err() {
                        return None; // the engine was killed
                    }
                    model.extend(
                        (first..first + count).map(|block| ((number * blocks + block) * BLOCK, fill)),
                    );
                    written.fetch_add(1, Ordering::Relaxed);
                }
                Some(model.into_iter().collect())
            })
        };
        let writers = (0..WRITERS).map(writer).collect();
        Load { stop, written, writers, seed }
    }

    /// Waits until `count` more writes are acknowledged.
    pub fn wait_for_writes(&self, count: u64) {
        let (begin, from) = (Instant::now(), self.written.load(Ordering::Relaxed));
        while self.written.load(Ordering::Relaxed) < from + count {
            assert!(begin.elapsed() < LIMIT, "seed {}: nothing is written any more", self.seed);
            thread::yield_now();
        }
    }

    /// Stops, and checks that every block reads as it was written last.
    pub fn stop_and_verify(self, volume: &Volume) {
        self.stop.store(true, Ordering::Relaxed);
        let mut nbd = Nbd::connect(&volume.frontend(), "v1").unwrap();
        for writer in self.writers {
            let model = writer.join().unwrap().expect("the engine lives");
            for (offset, fill) in model {
                let found = nbd.read(offset, 4096).unwrap();
                assert!(
                    found == [fill; 4096],
                    "seed {}: at {offset}: {} instead of {fill}",
                    self.seed,
                    found[0]
                );
            }
        }
    }

    /// Abandons the load after the engine was killed.
    pub fn abandon(self) {
        self.stop.store(true, Ordering::Relaxed);
        for writer in self.writers {
            let _ = writer.join().unwrap();
        }
    }
}
