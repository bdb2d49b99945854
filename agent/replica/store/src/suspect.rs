//! The range of the head in which blocks may be allocated but not written. See `unwritten`.

use shorthorn_types::ByteRange;

/// Covers all places with one range: that needs no memory, and failures are rare.
#[derive(Debug, Default)]
pub(crate) struct Suspect {
    range: Option<ByteRange>,
}

impl Suspect {
    /// Suspects the whole head of a volume.
    pub fn everywhere(size_bytes: u64) -> Suspect {
        Suspect { range: ByteRange::new(0, size_bytes).ok() }
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
        let mut suspect = Suspect::default();
        suspect.add(range(8192, 8192));
        assert_eq!(suspect.range(), None, "nothing was written");
        suspect.add(range(8192, 12288));
        assert_eq!(suspect.range(), Some(range(8192, 12288)));
        suspect.add(range(0, 4096));
        suspect.add(range(4096, 16384));
        suspect.add(range(8192, 12288));
        assert_eq!(suspect.range(), Some(range(0, 16384)));
        suspect.clear();
        assert_eq!(suspect.range(), None);
        assert_eq!(Suspect::everywhere(1 << 20).range(), Some(range(0, 1 << 20)));
    }
}
