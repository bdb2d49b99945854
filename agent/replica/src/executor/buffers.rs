use std::io;

use shorthorn_ring::{Arena, IoBuf};
use shorthorn_types::ByteRange;

use super::block::{distance, length_of};
use crate::limits::{
    BLOCK_BYTES_USIZE, EDGE_BLOCKS, SLOT_BYTES, SLOT_MEMORY_IDLE_BYTES, SLOT_MEMORY_MAX, SLOTS,
    ZERO_WRITE_BYTES,
};

/// The buffers of all slots.
///
/// In the buffer of a request the volume's blocks lie back to back, in the whole blocks behind the edges. So
/// for any offset of the request, memory is aligned as direct I/O demands.
#[derive(Debug)]
pub(super) struct Buffers {
    arena: Arena,
    /// The bytes of each slot that may have memory.
    touched: Box<[usize]>,
    touched_sum: u64,
}

impl Buffers {
    pub fn new() -> io::Result<Buffers> {
        // Two more than the slots of requests: one for reads of sums, and one for zeroes. No request writes
        // there, so these cost no memory.
        let arena = Arena::new(SLOTS + 2, SLOT_BYTES)?;
        Ok(Buffers { arena, touched: vec![0; SLOTS + 1].into(), touched_sum: 0 })
    }

    /// Prepares the slot for the blocks of `range`.
    pub fn touch(&mut self, slot: u16, blocks: ByteRange) {
        let end = EDGE_BLOCKS * BLOCK_BYTES_USIZE + length_of(blocks);
        let touched = &mut self.touched[usize::from(slot)];
        if end > *touched {
            self.touched_sum += (end - *touched) as u64;
            *touched = end;
        }
    }

    /// Frees a slot, and returns its memory to the kernel if all free slots together have too much.
    pub fn free(&mut self, slot: u16) {
        if self.touched_sum > SLOT_MEMORY_MAX {
            self.release(usize::from(slot));
        }
    }

    /// Releases the buffer after a read for sums has ended.
    pub fn release_one(&mut self, slot: u16) {
        self.release(usize::from(slot));
    }

    /// Releases the memory of all slots of requests, which have been free for a while.
    pub fn release_all(&mut self) {
        (0..SLOTS).for_each(|slot| self.release(slot));
    }

    fn release(&mut self, slot: usize) {
        let touched = &mut self.touched[slot];
        if *touched > SLOT_MEMORY_IDLE_BYTES {
            self.arena.release_pages(slot, SLOT_MEMORY_IDLE_BYTES);
            self.touched_sum -= (*touched - SLOT_MEMORY_IDLE_BYTES) as u64;
            *touched = SLOT_MEMORY_IDLE_BYTES;
        }
    }

    /// Returns `count` blocks of the slot's buffer from `first`, the edges included.
    pub fn blocks(&self, slot: u16, first: usize, count: usize) -> IoBuf {
        self.arena.buf(usize::from(slot)).part(first * BLOCK_BYTES_USIZE, count * BLOCK_BYTES_USIZE)
    }

    /// Returns the buffer of `part` for a request whose blocks begin at `start`.
    pub fn part(&self, slot: u16, start: u64, part: ByteRange) -> IoBuf {
        let distance = distance(part.offset() - start);
        self.arena.buf(usize::from(slot)).part(EDGE_BLOCKS * BLOCK_BYTES_USIZE + distance, length_of(part))
    }

    /// Returns `length` zeroes, at most [`ZERO_WRITE_BYTES`].
    pub fn zeroes(&self, length: u64) -> IoBuf {
        debug_assert!(length <= ZERO_WRITE_BYTES);
        self.arena.buf(SLOTS + 1).part(0, distance(length))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    /// Returns the number of pages of `buf` that have memory, according to the kernel.
    fn resident_pages(buf: IoBuf) -> usize {
        let map = File::open("/proc/self/pagemap").unwrap();
        let first = buf.as_ptr() as u64 / 4096;
        let present = |page: u64| {
            let mut entry = [0; 8];
            map.read_exact_at(&mut entry, page * 8).unwrap();
            entry[7] & 0x80 != 0
        };
        (first..first + buf.len() as u64 / 4096).filter(|page| present(*page)).count()
    }

    #[test]
    fn memory_of_large_requests_is_given_back_even_when_locked() {
        // As the process does: locked memory needs another call to be given back.
        let _ = shorthorn_ring::protect_thread();
        let mut buffers = Buffers::new().unwrap();
        let large = ByteRange::new(0, 1 << 20).unwrap();
        let fill = |buffers: &mut Buffers, slot| {
            buffers.touch(slot, large);
            buffers.blocks(slot, EDGE_BLOCKS, 256).copy_from(&vec![1; 1 << 20]);
        };
        fill(&mut buffers, 0);
        assert_eq!(resident_pages(buffers.blocks(0, 0, 258)), 256);
        buffers.free(0);
        assert_eq!(resident_pages(buffers.blocks(0, 0, 258)), 256, "a little is kept");
        (1..9).for_each(|slot| fill(&mut buffers, slot));
        buffers.free(8);
        assert_eq!(resident_pages(buffers.blocks(8, 0, 258)), 1, "but no more");
        buffers.release_all();
        assert_eq!(resident_pages(buffers.blocks(0, 0, 258)), 1);
        assert_eq!(buffers.touched_sum, 9 * SLOT_MEMORY_IDLE_BYTES as u64);
    }
}
