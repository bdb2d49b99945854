use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, which counts its calls: `#[global_allocator] static A: CountingAllocator`.
#[derive(Debug)]
pub struct CountingAllocator(());

impl CountingAllocator {
    /// Creates an allocator with a count of zero.
    #[must_use]
    #[allow(clippy::new_without_default)] // a static is made by a const fn
    pub const fn new() -> CountingAllocator {
        CountingAllocator(())
    }

    /// Returns the number of allocations of this thread. The test harness has a thread of its own.
    pub fn allocations(&self) -> usize {
        COUNT.get()
    }
}

// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that is ending counts nothing more.
        let _ = COUNT.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller keeps the rules of `alloc`.
        unsafe { System.alloc(layout) }
    }

    // SAFETY: as for the whole implementation.
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the rules of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}
