use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator, which counts what it is asked for: `#[global_allocator] static A: CountingAllocator`.
#[derive(Debug)]
pub struct CountingAllocator(AtomicUsize);

impl CountingAllocator {
    /// Nothing is counted yet.
    #[must_use]
    #[allow(clippy::new_without_default)] // a static is made by a const fn
    pub const fn new() -> CountingAllocator {
        CountingAllocator(AtomicUsize::new(0))
    }

    /// How many allocations there were.
    pub fn allocations(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.0.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the rules of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the rules of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}
