//! The exported volume.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use shorthorn_types::VolumeName;

/// The name and size of the exported volume.
#[derive(Debug)]
pub(super) struct Export {
    pub(super) name: VolumeName,
    size_bytes: AtomicU64,
}

impl Export {
    pub(super) fn new(name: VolumeName, size_bytes: u64) -> Arc<Export> {
        Arc::new(Export { name, size_bytes: AtomicU64::new(size_bytes) })
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    pub(super) fn grow(&self, size_bytes: u64) {
        self.size_bytes.store(size_bytes, Ordering::Release);
    }
}
