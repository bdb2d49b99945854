//! The range of the head in which blocks may be allocated but not written. See `unwritten`.

use shorthorn_types::ByteRange;

/// Covers all places with one range: that needs no memory, and failures are rare.
#[derive(Debug, Default)]
pub(crate) struct UnverifiedRange {
    range: Option<ByteRange>,
}

impl UnverifiedRange {
    /// Suspects the whole head of a volume.
    pub fn everywhere(size_bytes: u64) -> UnverifiedRange {
        UnverifiedRange { range: ByteRange::new(0, size_bytes).ok() }
    }

    pub fn range(&self) -> Option<ByteRange> {
        self.range
    }

    /// Grows the range to include another one.
    pub fn add(&mut self, range: ByteRange) {
        let hull = self.range.map_or(Ok(range), |before| {
            let start = before.offset().min(range.offset());
            ByteRange::new(start, before.end().max(range.end()) - start)
        });
        self.range = hull.ok().filter(|range| !range.is_empty()).or(self.range);
    }

    /// Trusts all of the head: its unwritten blocks are holes now.
    pub fn clear(&mut self) {
        self.range = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_range_covers_all_that_was_added_until_it_is_cleared() {
        let range = |start: u64, end: u64| ByteRange::new(start, end - start).unwrap();
        let mut unverified = UnverifiedRange::default();
        unverified.add(range(8192, 8192));
        assert_eq!(unverified.range(), None, "nothing was written");
        unverified.add(range(8192, 12288));
        assert_eq!(unverified.range(), Some(range(8192, 12288)));
        unverified.add(range(0, 4096));
        unverified.add(range(4096, 16384));
        unverified.add(range(8192, 12288));
        assert_eq!(unverified.range(), Some(range(0, 16384)));
        unverified.clear();
        assert_eq!(unverified.range(), None);
        assert_eq!(UnverifiedRange::everywhere(1 << 20).range(), Some(range(0, 1 << 20)));
    }
}
