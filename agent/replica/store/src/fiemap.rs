//! The extents of a file from FS_IOC_FIEMAP: Documentation/filesystems/fiemap.rst and
//! include/uapi/linux/fiemap.h of the kernel. Longhorn decides with it which layer holds a block.
#![allow(unsafe_code)] // the call has no safe wrapper

use std::fs::File;
use std::os::fd::AsRawFd;

/// The number of extents of one call: 14 KiB of memory, and few calls for a file in many pieces.
const EXTENTS: usize = 256;

/// FIEMAP_FLAG_SYNC: the file is written first. A file system may record later than it says that a write is
/// done that the extent is written.
const SYNC: u32 = 0x1;
/// FIEMAP_EXTENT_LAST.
const LAST: u32 = 0x1;
/// FIEMAP_EXTENT_UNWRITTEN: allocated, and reads as zeroes.
const UNWRITTEN: u32 = 0x800;

/// `struct fiemap` without its array: the number of the call contains its size.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Head {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
}

/// An entry of the answer of FS_IOC_FIEMAP: `struct fiemap_extent` in linux/fiemap.h.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FiemapExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved: [u64; 2],
    flags: u32,
    reserved_too: [u32; 3],
}

#[repr(C)]
#[derive(Debug)]
struct Map {
    head: Head,
    extents: [FiemapExtent; EXTENTS],
}

mod system {
    nix::ioctl_readwrite!(
        /// Puts the extents of a file behind the head, as many as its `extent_count` says.
        fiemap, b'f', 11, super::Head
    );
}

impl FiemapExtent {
    pub fn offset(&self) -> u64 {
        self.logical
    }

    pub fn end(&self) -> u64 {
        self.logical.saturating_add(self.length)
    }

    pub fn is_last(&self) -> bool {
        self.flags & LAST != 0
    }

    pub fn is_unwritten(&self) -> bool {
        self.flags & UNWRITTEN != 0
    }
}

/// A page of the extents of a file, in the order of their offsets.
#[derive(Debug)]
pub(crate) struct ExtentPage(Box<Map>);

impl ExtentPage {
    pub fn new() -> ExtentPage {
        ExtentPage(Box::new(Map { head: Head::default(), extents: [FiemapExtent::default(); EXTENTS] }))
    }

    /// Returns the first extents of `file` that have a byte from `start` to `end`.
    pub fn read(&mut self, file: &File, start: u64, end: u64) -> nix::Result<&[FiemapExtent]> {
        let map = &mut *self.0;
        map.head = Head {
            start,
            length: end.saturating_sub(start),
            flags: SYNC,
            extent_count: u32::try_from(EXTENTS).unwrap_or(0),
            ..Head::default()
        };
        // SAFETY: the head is the first field of `map`, and `extent_count` extents follow it there: the
        // kernel writes no more than that, during the call. All of it are plain numbers.
        unsafe { system::fiemap(file.as_raw_fd(), std::ptr::from_mut(map).cast())? };
        let count = usize::try_from(map.head.mapped_extents).unwrap_or(EXTENTS).min(EXTENTS);
        Ok(&map.extents[..count])
    }
}
