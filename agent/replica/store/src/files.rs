//! The open files of a chain.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::unistd::{Whence, lseek};
use shorthorn_chain::{ExtentSource, FileIndex, ImageName};
use shorthorn_types::ByteRange;

use crate::directory::Directory;
use crate::error::StoreError;
use crate::former_writes::open_for_writes;

/// The open files, each at the slot of its [`FileIndex`].
#[derive(Debug, Default)]
pub(crate) struct Files {
    slots: Vec<Option<LayerFile>>,
}

/// The files of a chain that are opened for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writable {
    None,
    Head,
    /// The snapshots too, which are being copied.
    All,
}

#[derive(Debug)]
struct LayerFile {
    name: ImageName,
    file: File,
}

impl Files {
    /// Opens a chain, the head first; returns the indices in the same order.
    pub fn open_chain(
        directory: &Directory,
        chain: &[ImageName],
        direct_io: bool,
        writable: Writable,
    ) -> Result<(Files, Vec<FileIndex>), StoreError> {
        let mut files = Files::default();
        let mut indices = Vec::with_capacity(chain.len());
        for (position, name) in chain.iter().enumerate() {
            let writable = writable == Writable::All || (writable == Writable::Head && position == 0);
            indices.push(files.open(directory, name, direct_io, writable)?);
        }
        Ok((files, indices))
    }

    /// Opens one more file, in the first free slot.
    pub fn open(
        &mut self,
        directory: &Directory,
        name: &ImageName,
        direct_io: bool,
        writable: bool,
    ) -> Result<FileIndex, StoreError> {
        let free = self.slots.iter().position(Option::is_none).unwrap_or(self.slots.len());
        // A chain is shorter than the table, so a slot is always free.
        let index = u8::try_from(free)
            .ok()
            .and_then(FileIndex::new)
            .ok_or_else(|| StoreError::io("open", directory.path_of(name.as_str()), Errno::EMFILE))?;
        let file = open_image(directory, name, direct_io, writable)?;
        if free == self.slots.len() {
            self.slots.push(None);
        }
        self.slots[free] = Some(LayerFile { name: name.clone(), file });
        Ok(index)
    }

    pub fn close(&mut self, index: FileIndex) {
        self.slots[index.slot()] = None;
    }

    pub fn rename(&mut self, index: FileIndex, name: ImageName) {
        if let Some(layer) = &mut self.slots[index.slot()] {
            layer.name = name;
        }
    }

    pub fn find(&self, name: &ImageName) -> Option<FileIndex> {
        let slot =
            self.slots.iter().position(|slot| slot.as_ref().is_some_and(|layer| layer.name == *name))?;
        FileIndex::new(u8::try_from(slot).ok()?)
    }

    /// Returns the file at an index.
    ///
    /// # Panics
    /// The index is not in this chain: plans are for the chain that they were made for.
    pub fn get(&self, index: FileIndex) -> &File {
        &self.slots[index.slot()].as_ref().expect("the file has left the chain").file
    }

    pub fn fd(&self, index: FileIndex) -> BorrowedFd<'_> {
        self.get(index).as_fd()
    }

    pub fn indices(&self) -> impl Iterator<Item = FileIndex> + '_ {
        let open = (0u8..).zip(&self.slots).filter(|(_, slot)| slot.is_some());
        open.filter_map(|(slot, _)| FileIndex::new(slot))
    }

    pub fn name(&self, index: FileIndex) -> Option<&ImageName> {
        self.slots.get(index.slot())?.as_ref().map(|layer| &layer.name)
    }
}

impl ExtentSource for Files {
    type Error = StoreError;

    fn data_extents(
        &mut self,
        index: FileIndex,
        range: ByteRange,
        found: &mut dyn FnMut(ByteRange),
    ) -> Result<(), StoreError> {
        data_extents(self.get(index), range, found).map_err(|errno| {
            let name = self.name(index).map_or("a layer", ImageName::as_str);
            StoreError::io("find the data of", name, errno)
        })
    }
}

pub(crate) fn open_image(
    directory: &Directory,
    name: &ImageName,
    direct_io: bool,
    writable: bool,
) -> Result<File, StoreError> {
    let direct = if direct_io { OFlag::O_DIRECT } else { OFlag::empty() };
    match writable {
        true => open_for_writes(directory, name.as_str(), direct),
        false => directory.open_file(name.as_str(), OFlag::O_RDONLY | direct),
    }
}

/// Calls `found` for every run of data in `range`. Unwritten extents are holes to SEEK_DATA.
pub(crate) fn data_extents(
    file: &File,
    range: ByteRange,
    found: &mut dyn FnMut(ByteRange),
) -> nix::Result<()> {
    let mut offset = range.offset();
    while offset < range.end()
        && let Some(data) = next_data(file, offset)?
        && data.offset() < range.end()
    {
        let end = data.end().min(range.end());
        found(ByteRange::new(data.offset(), end - data.offset()).map_err(|_| Errno::EOVERFLOW)?);
        offset = end;
    }
    Ok(())
}

/// Returns the first run of data from `offset` on.
pub(crate) fn next_data(file: &File, offset: u64) -> nix::Result<Option<ByteRange>> {
    let start = match lseek(file.as_fd(), signed(offset), Whence::SeekData) {
        Ok(start) => u64::try_from(start).unwrap_or(offset),
        Err(Errno::ENXIO) => return Ok(None),
        Err(errno) => return Err(errno),
    };
    let end = u64::try_from(lseek(file.as_fd(), signed(start), Whence::SeekHole)?).unwrap_or(start);
    if end <= start {
        return Err(Errno::EIO);
    }
    ByteRange::new(start, end - start).map(Some).map_err(|_| Errno::EOVERFLOW)
}

/// Returns an offset for the system. Volumes are smaller than 2^63 bytes.
pub(crate) fn signed(offset: u64) -> i64 {
    i64::try_from(offset).unwrap_or(i64::MAX)
}
