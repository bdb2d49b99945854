use std::io;
use std::ptr::{self, NonNull};

/// Page-aligned memory for the data of requests: `slots` buffers of `slot_bytes` each.
///
/// It is mapped once and never unmapped, so a handle to it can not dangle. Pages that were never touched
/// cost nothing.
#[derive(Debug)]
pub struct Arena {
    base: NonNull<u8>,
    slots: usize,
    slot_bytes: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread, and is never unmapped.
unsafe impl Send for Arena {}

impl Arena {
    /// Maps the memory. `slot_bytes` is rounded up to whole pages.
    ///
    /// # Errors
    /// The error of mmap.
    pub fn new(slots: usize, slot_bytes: usize) -> io::Result<Arena> {
        let slot_bytes = slot_bytes.next_multiple_of(4096);
        let length = slots.checked_mul(slot_bytes).filter(|n| *n > 0).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: a private anonymous mapping at an address of the kernel's choice touches nothing of ours.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // A huge page for one small request in each slot would be memory for nothing. A kernel without huge
        // pages refuses, which is fine.
        // SAFETY: advice about a mapping of ours changes none of its bytes.
        unsafe { libc::madvise(base, length, libc::MADV_NOHUGEPAGE) };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Arena { base, slots, slot_bytes })
    }

    /// Returns the number of buffers.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Returns the length of each buffer in bytes.
    #[must_use]
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Returns the buffer `slot`.
    ///
    /// # Panics
    /// The slot does not exist.
    #[must_use]
    pub fn buf(&self, slot: usize) -> IoBuf {
        assert!(slot < self.slots, "slot {slot} of {}", self.slots);
        // SAFETY: the offset is inside the mapping, as just checked.
        let base = unsafe { self.base.add(slot * self.slot_bytes) };
        IoBuf { base, length: self.slot_bytes }
    }

    /// Gives the pages of `slot` behind its first `keep_bytes` back to the kernel; they read as zeroes
    /// afterwards. Only for slots that no request uses.
    pub fn release_pages(&self, slot: usize, keep_bytes: usize) {
        let buf = self.buf(slot);
        let keep = keep_bytes.next_multiple_of(4096).min(buf.length);
        let (start, length) = (buf.part(keep, buf.length - keep).as_ptr(), buf.length - keep);
        // Memory that protect_thread has locked is only given up to this advice, from Linux 5.18.
        // SAFETY: the range is inside the mapping. A failure changes nothing and costs only memory.
        let released = unsafe { libc::madvise(start.cast(), length, libc::MADV_DONTNEED_LOCKED) } == 0;
        if !released {
            // SAFETY: as above.
            unsafe { libc::madvise(start.cast(), length, libc::MADV_DONTNEED) };
        }
    }
}

/// A handle to memory of an [`Arena`]. Copying the handle copies no bytes.
///
/// Two holders can use the same bytes: the owner of the slot decides. The bytes are only ever copied in and
/// out, never lent, so the kernel may change them at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoBuf {
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: the memory belongs to the process and is never unmapped; see Arena.
unsafe impl Send for IoBuf {}

#[allow(clippy::len_without_is_empty)]
impl IoBuf {
    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Returns the address of the bytes.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Returns `length` bytes from `start`.
    ///
    /// # Panics
    /// The part is not inside the buffer.
    #[must_use]
    pub fn part(&self, start: usize, length: usize) -> IoBuf {
        assert!(
            start.checked_add(length).is_some_and(|end| end <= self.length),
            "{length} bytes at {start} of a buffer of {}",
            self.length
        );
        // SAFETY: inside the mapping, as just checked.
        let base = unsafe { self.base.add(start) };
        IoBuf { base, length }
    }

    /// Copies `bytes` to the start of the buffer.
    ///
    /// # Panics
    /// The bytes are longer than the buffer.
    pub fn copy_from(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.length);
        // SAFETY: both ranges are valid; `bytes` is a Rust slice and so not part of an arena.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.as_ptr(), bytes.len()) }
    }

    /// Copies the start of the buffer to `bytes`.
    ///
    /// # Panics
    /// The buffer is shorter.
    pub fn copy_to(&self, bytes: &mut [u8]) {
        assert!(bytes.len() <= self.length);
        // SAFETY: as in copy_from.
        unsafe { ptr::copy_nonoverlapping(self.base.as_ptr(), bytes.as_mut_ptr(), bytes.len()) }
    }

    /// Copies from another buffer of the same length; they may overlap.
    ///
    /// # Panics
    /// The lengths differ.
    pub fn copy_from_buf(&self, other: IoBuf) {
        assert_eq!(self.length, other.length);
        // SAFETY: both ranges are valid, and ptr::copy lets them overlap.
        unsafe { ptr::copy(other.base.as_ptr(), self.base.as_ptr(), self.length) }
    }

    /// Fills the buffer with zeroes.
    pub fn zero(&self) {
        // SAFETY: the range is valid.
        unsafe { ptr::write_bytes(self.base.as_ptr(), 0, self.length) }
    }

    /// Returns true if all bytes are zero.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        // SAFETY: as in crc32c.
        let bytes = unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.length) };
        // A cache line at a time without a branch inside: the compiler makes vector instructions of it.
        let mut lines = bytes.chunks_exact(64);
        lines.by_ref().all(|line| line.iter().fold(0, |all, byte| all | byte) == 0)
            && lines.remainder().iter().all(|byte| *byte == 0)
    }

    /// Returns the CRC-32C of the whole buffer.
    #[must_use]
    pub fn crc32c(&self) -> u32 {
        // SAFETY: the range is valid and initialised (the kernel hands out zeroed pages); the slice lives for
        // this call only. The caller that computes a check owns the bytes at that time.
        crc32c::crc32c(unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.length) })
    }
}

/// The free slots of an arena. The last freed slot is used first, because its pages are warm.
#[derive(Debug)]
pub struct SlotPool {
    free: Vec<u16>,
}

impl SlotPool {
    /// Creates a pool with slots 0 to `slots` - 1, all free.
    #[must_use]
    pub fn new(slots: u16) -> SlotPool {
        SlotPool { free: (0..slots).rev().collect() }
    }

    /// Returns a free slot.
    pub fn take(&mut self) -> Option<u16> {
        self.free.pop()
    }

    /// Gives `slot` back.
    pub fn give(&mut self, slot: u16) {
        debug_assert!(!self.free.contains(&slot), "slot {slot} is given back twice");
        self.free.push(slot);
    }

    /// Returns the number of slots that [`SlotPool::take`] can give.
    #[must_use]
    pub fn free(&self) -> usize {
        self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_apart_and_bounded() {
        let arena = Arena::new(2, 100).unwrap();
        assert_eq!(arena.slot_bytes(), 4096);
        arena.buf(0).copy_from(&[7; 4096]);
        arena.buf(1).part(4, 2).copy_from(&[1, 2]);
        let mut out = [9; 8];
        arena.buf(1).copy_to(&mut out);
        assert_eq!(out, [0, 0, 0, 0, 1, 2, 0, 0]);
        assert_eq!(arena.buf(0).crc32c(), crc32c::crc32c(&[7; 4096]));
        assert!(!arena.buf(0).is_zero());
        arena.release_pages(0, 0);
        assert!(arena.buf(0).is_zero());
        for at in [0, 63, 64, 999] {
            arena.buf(0).part(at, 1).copy_from(&[1]);
            assert!(!arena.buf(0).part(0, 1000).is_zero() && arena.buf(0).part(1000, 1000).is_zero(), "{at}");
            arena.buf(0).part(at, 1).zero();
        }
        assert_eq!(arena.buf(0).crc32c(), crc32c::crc32c(&[0; 4096]));
        assert!(std::panic::catch_unwind(|| arena.buf(2)).is_err());
        assert!(std::panic::catch_unwind(|| arena.buf(1).part(4095, 2)).is_err());
    }
}
