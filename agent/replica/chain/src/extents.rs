//! Loading the extents of a file into the block map.

use std::num::NonZeroU8;

use shorthorn_types::ByteRange;

/// The identity of an open file of a chain, which is not its position.
///
/// A file keeps its index for as long as it is open, even if layers are added above it or removed below it.
/// The index of a file that has left the chain is given to a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileIndex(NonZeroU8); // not zero, so that an optional one takes one byte in the map

impl FileIndex {
    /// The maximum number of open files in one chain.
    pub const SLOTS: usize = u8::MAX as usize;

    /// Creates the file at `slot` of a table of [`FileIndex::SLOTS`].
    #[must_use]
    pub const fn new(slot: u8) -> Option<FileIndex> {
        match slot.checked_add(1) {
            Some(number) => match NonZeroU8::new(number) {
                Some(number) => Some(FileIndex(number)),
                None => None,
            },
            None => None,
        }
    }

    /// Returns the slot in a table of open files.
    #[must_use]
    pub const fn slot(self) -> usize {
        self.0.get() as usize - 1
    }
}

/// Supplies the data extents of the chain's files.
pub trait ExtentSource {
    /// The reason why a file cannot be examined.
    type Error;

    /// Calls `found` for every run of bytes in `range` for which `file` holds data, in ascending order.
    /// Unwritten extents, and the part past the end of the file, are holes. The runs need not be aligned: a
    /// block that is data in part counts as data. Blocks are always written whole, and only zeroes in them
    /// can be holes.
    ///
    /// # Errors
    /// The error of the source.
    fn data_extents(
        &mut self,
        file: FileIndex,
        range: ByteRange,
        found: &mut dyn FnMut(ByteRange),
    ) -> Result<(), Self::Error>;
}
