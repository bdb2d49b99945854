//! Memory that O_DIRECT accepts.

/// The alignment of every buffer for direct I/O: enough for any device.
pub const MEMORY_ALIGNMENT: usize = 4096;

/// The bytes that the synchronous calls move at a time.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;

/// A zeroed buffer that begins at a multiple of [`MEMORY_ALIGNMENT`].
#[derive(Debug)]
pub struct AlignedBuffer {
    bytes: Vec<u8>,
    start: usize,
    length: usize,
}

impl AlignedBuffer {
    /// Creates a buffer of `length` bytes.
    #[must_use]
    pub fn new(length: usize) -> AlignedBuffer {
        let bytes = vec![0; length + MEMORY_ALIGNMENT];
        let start = bytes.as_ptr().align_offset(MEMORY_ALIGNMENT);
        AlignedBuffer { bytes, start, length }
    }

    /// Returns the bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.length]
    }

    /// Returns the bytes, to change.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_zero() {
        for length in [512, 4096, 1 << 20] {
            let mut buffer = AlignedBuffer::new(length);
            assert_eq!(buffer.as_slice().as_ptr().align_offset(MEMORY_ALIGNMENT), 0);
            assert_eq!(buffer.as_mut_slice().len(), length);
            assert!(buffer.as_slice().iter().all(|byte| *byte == 0));
        }
    }
}
