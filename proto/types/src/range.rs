use std::fmt;

use thiserror::Error;

use crate::limits::{BLOCK_BYTES, SECTOR_BYTES};

/// A run of bytes of a volume. Its end never overflows.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ByteRange {
    offset_bytes: u64,
    length_bytes: u64,
}

/// The reason why a range is refused.
#[derive(Debug, Error, PartialEq, Eq, Clone, Copy)]
pub enum RangeError {
    /// Offset plus length does not fit 64 bits.
    #[error("offset {offset_bytes} plus length {length_bytes} overflows")]
    Overflow {
        /// The requested first byte.
        offset_bytes: u64,
        /// The requested number of bytes.
        length_bytes: u64,
    },
    /// Offset or length is not a multiple of the sector.
    #[error("offset {offset_bytes} or length {length_bytes} is not a multiple of 512 bytes")]
    Unaligned {
        /// The requested first byte.
        offset_bytes: u64,
        /// The requested number of bytes.
        length_bytes: u64,
    },
    /// The range has no bytes.
    #[error("the range at {0} is empty")]
    Empty(u64),
    /// The range extends past the end of the volume.
    #[error("the range ends at {end_bytes}, past the end of the volume at {size_bytes}")]
    PastEnd {
        /// The first byte behind the range.
        end_bytes: u64,
        /// The size of the volume.
        size_bytes: u64,
    },
}

impl ByteRange {
    /// The empty range.
    pub const EMPTY: ByteRange = ByteRange { offset_bytes: 0, length_bytes: 0 };

    /// Creates the range of `length_bytes` at `offset_bytes`.
    ///
    /// # Errors
    /// [`RangeError::Overflow`] if the end does not fit 64 bits.
    pub const fn new(offset_bytes: u64, length_bytes: u64) -> Result<ByteRange, RangeError> {
        if offset_bytes.checked_add(length_bytes).is_none() {
            return Err(RangeError::Overflow { offset_bytes, length_bytes });
        }
        Ok(ByteRange { offset_bytes, length_bytes })
    }

    /// Checks that the range is a request that a volume of `size_bytes` can serve.
    ///
    /// # Errors
    /// [`RangeError`] says which rule it breaks.
    pub const fn check(self, size_bytes: u64) -> Result<ByteRange, RangeError> {
        let ByteRange { offset_bytes, length_bytes } = self;
        if !offset_bytes.is_multiple_of(SECTOR_BYTES) || !length_bytes.is_multiple_of(SECTOR_BYTES) {
            return Err(RangeError::Unaligned { offset_bytes, length_bytes });
        }
        if length_bytes == 0 {
            return Err(RangeError::Empty(offset_bytes));
        }
        if self.end() > size_bytes {
            return Err(RangeError::PastEnd { end_bytes: self.end(), size_bytes });
        }
        Ok(self)
    }

    /// Returns the start of the range in bytes.
    #[must_use]
    pub const fn offset(self) -> u64 {
        self.offset_bytes
    }

    /// Returns the length of the range in bytes.
    #[must_use]
    pub const fn length(self) -> u64 {
        self.length_bytes
    }

    /// Returns the first byte after the range.
    #[must_use]
    pub const fn end(self) -> u64 {
        self.offset_bytes + self.length_bytes
    }

    /// Returns true if the range has no bytes.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.length_bytes == 0
    }

    /// Returns true if the two share a byte.
    #[must_use]
    pub const fn overlaps(self, other: ByteRange) -> bool {
        self.offset_bytes < other.end() && other.offset_bytes < self.end()
    }

    /// Splits the range at the byte `end`. The rest is none if the range ends there or before. The first part
    /// is the whole range unless it begins before `end`.
    #[must_use]
    pub const fn split_at(self, end: u64) -> (ByteRange, Option<ByteRange>) {
        if end <= self.offset_bytes || end >= self.end() {
            return (self, None);
        }
        let first = ByteRange { offset_bytes: self.offset_bytes, length_bytes: end - self.offset_bytes };
        (first, Some(ByteRange { offset_bytes: end, length_bytes: self.end() - end }))
    }

    /// Returns the range grown to whole blocks of [`BLOCK_BYTES`].
    #[must_use]
    pub const fn grown_to_blocks(self) -> ByteRange {
        let start = self.offset_bytes / BLOCK_BYTES * BLOCK_BYTES;
        let end = match self.end().checked_next_multiple_of(BLOCK_BYTES) {
            Some(end) => end,
            None => self.end(),
        };
        ByteRange { offset_bytes: start, length_bytes: end - start }
    }

    /// Returns the whole blocks inside the range; empty if it has none.
    #[must_use]
    pub const fn shrunk_to_blocks(self) -> ByteRange {
        let end = self.end() / BLOCK_BYTES * BLOCK_BYTES;
        match self.offset_bytes.checked_next_multiple_of(BLOCK_BYTES) {
            Some(start) if start < end => ByteRange { offset_bytes: start, length_bytes: end - start },
            _ => ByteRange { offset_bytes: self.offset_bytes, length_bytes: 0 },
        }
    }
}

impl fmt::Debug for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}", self.offset_bytes, self.length_bytes)
    }
}

impl fmt::Display for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}", self.offset_bytes, self.length_bytes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn invalid_ranges_are_refused() {
        assert!(ByteRange::new(u64::MAX, 1).is_err());
        let check = |offset, length| ByteRange::new(offset, length).unwrap().check(1 << 20);
        assert!(check(0, 512).is_ok());
        assert!(check((1 << 20) - 512, 512).is_ok());
        assert!(matches!(check(1, 512), Err(RangeError::Unaligned { .. })));
        assert!(matches!(check(0, 0), Err(RangeError::Empty(0))));
        assert!(matches!(check(1 << 20, 512), Err(RangeError::PastEnd { .. })));
    }

    #[test]
    fn only_an_end_inside_splits() {
        let range = |offset, length| ByteRange::new(offset, length).unwrap();
        let whole = range(10, 20);
        assert_eq!(whole.split_at(11), (range(10, 1), Some(range(11, 19))));
        assert_eq!(whole.split_at(29), (range(10, 19), Some(range(29, 1))));
        for end in [0, 10, 30, u64::MAX] {
            assert_eq!(whole.split_at(end), (whole, None), "{end}");
        }
    }

    proptest! {
        #[test]
        fn growing_and_shrinking_bracket_the_range(offset in 0u64..1 << 40, length in 0u64..1 << 30) {
            let range = ByteRange::new(offset, length).unwrap();
            let (grown, shrunk) = (range.grown_to_blocks(), range.shrunk_to_blocks());
            prop_assert!(grown.offset() <= offset && grown.end() >= range.end());
            prop_assert!(grown.offset() % BLOCK_BYTES == 0 && grown.end() % BLOCK_BYTES == 0);
            prop_assert!(shrunk.is_empty() || (shrunk.offset() >= offset && shrunk.end() <= range.end()));
            prop_assert!(shrunk.length() % BLOCK_BYTES == 0);
            prop_assert!(length < 2 * BLOCK_BYTES || !shrunk.is_empty());
        }
    }
}
