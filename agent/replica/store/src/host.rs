//! Probes the capabilities of the file system under a directory.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, OFlag, fallocate};
use nix::sys::statfs::fstatfs;
use nix::unistd::{Whence, lseek};
use shorthorn_types::limits::{BLOCK_BYTES, SECTOR_BYTES};

use crate::buffer::AlignedBuffer;
use crate::directory::Directory;
use crate::error::StoreError;
use crate::files::signed;

/// The name of the file for a trial, if the file system has no unnamed files.
pub(crate) const PROBE_FILE: &str = "shorthorn.probe";
const PROBE_BYTES: u64 = 1 << 20;
/// An odd number of blocks, so that it is the second half of any larger unit.
const PROBE_OFFSET: u64 = 129 * BLOCK_BYTES;
/// The place of a block of zeroes.
const ZEROES_OFFSET: u64 = 65 * BLOCK_BYTES;
const BLOCK_LENGTH: i64 = 4096;

/// The abilities of the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostFileSystem {
    /// Files can be opened with O_DIRECT.
    pub direct_io: bool,
    /// The alignment of offset and length of a direct read, in bytes.
    pub alignment_bytes: u32,
    /// Holes can be made.
    pub can_punch: bool,
    /// A durable block of zeroes is a hole: it does not hide the data of layers below it.
    pub zeroes_are_holes: bool,
    /// The allocation unit in bytes, if it is smaller than a block. Then a part of a block can be data and
    /// the rest of it a hole. A loss of power or a failed write leaves that, and the rest would read as
    /// zeroes that were never written.
    smaller_unit_bytes: Option<u64>,
}

impl HostFileSystem {
    /// Probes the file system with a temporary file. The allocation unit counts, not the block size of
    /// statfs: NFS and ZFS report sizes of transfers, and ext4 with clusters reports its blocks.
    pub fn probe(directory: &Directory, read_only: bool) -> Result<HostFileSystem, StoreError> {
        let host = directory.with_reserve(|| match probe_file(directory, read_only)? {
            Some((file, direct_io)) => try_on(directory, &file, direct_io),
            None => from_statfs(directory),
        })?;
        match host.smaller_unit_bytes {
            // Existing data can be read: a block of which a part is data counts as data, here and for
            // Longhorn.
            Some(unit_bytes) if !read_only => {
                Err(StoreError::SmallAllocationUnit { directory: directory.path().to_owned(), unit_bytes })
            }
            _ => Ok(host),
        }
    }
}

/// Returns a file to try on, and whether it does direct I/O.
fn probe_file(directory: &Directory, read_only: bool) -> Result<Option<(File, bool)>, StoreError> {
    for (flag, direct_io) in [(OFlag::O_DIRECT, true), (OFlag::empty(), false)] {
        match directory.open_unnamed(flag) {
            Ok(file) => return Ok(Some((file, direct_io))),
            Err(Errno::EROFS | Errno::EACCES | Errno::EPERM) if read_only => return Ok(None),
            Err(Errno::EINVAL | Errno::EOPNOTSUPP | Errno::EISDIR | Errno::ENOENT) => {}
            Err(errno) => return Err(StoreError::io("make a file in", directory.path(), errno)),
        }
    }
    if read_only {
        return Ok(None);
    }
    let create = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_TRUNC;
    let direct = directory.open_file(PROBE_FILE, create | OFlag::O_DIRECT);
    let direct_io = direct.is_ok();
    let file = direct.or_else(|_| directory.open_file(PROBE_FILE, create));
    directory.unlink(PROBE_FILE)?;
    Ok(Some((file?, direct_io)))
}

fn try_on(directory: &Directory, file: &File, direct_io: bool) -> Result<HostFileSystem, StoreError> {
    let failed =
        |error: std::io::Error| StoreError::io("try out the file system of", directory.path(), error);
    let seek = |offset: u64, whence| match lseek(file.as_fd(), signed(offset), whence) {
        Ok(found) => Ok(u64::try_from(found).ok()),
        Err(Errno::ENXIO) => Ok(None),
        Err(errno) => Err(failed(errno.into())),
    };
    let mut buffer = AlignedBuffer::new(4096);
    buffer.as_mut_slice().fill(0x5a);
    file.set_len(PROBE_BYTES).map_err(failed)?;
    file.write_all_at(buffer.as_slice(), PROBE_OFFSET).map_err(failed)?;
    if !direct_io {
        // Until then the page cache decides which parts count as data, not the allocation.
        file.sync_all().map_err(failed)?;
    }
    let start = seek(0, Whence::SeekData)?.unwrap_or(PROBE_OFFSET);
    let end = seek(PROBE_OFFSET, Whence::SeekHole)?.unwrap_or(PROBE_BYTES);
    if start < PROBE_OFFSET || end > PROBE_OFFSET + BLOCK_BYTES {
        let unit_bytes = end.saturating_sub(start);
        return Err(StoreError::AllocationUnit { directory: directory.path().to_owned(), unit_bytes });
    }
    let sector = &mut buffer.as_mut_slice()[..512];
    let small_reads = file.read_exact_at(sector, PROBE_OFFSET + SECTOR_BYTES).is_ok();
    let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    // All of a block but its first sector: a hole appears in it only if something smaller than the block is
    // allocated.
    let rest = (signed(PROBE_OFFSET + SECTOR_BYTES), BLOCK_LENGTH - signed(SECTOR_BYTES));
    let smaller_unit_bytes = match fallocate(file.as_fd(), punch, rest.0, rest.1) {
        Ok(()) => {
            let end = seek(PROBE_OFFSET, Whence::SeekHole)?.unwrap_or(PROBE_BYTES);
            Some(end.saturating_sub(PROBE_OFFSET)).filter(|unit_bytes| *unit_bytes < BLOCK_BYTES)
        }
        Err(_) => None,
    };
    let punched = fallocate(file.as_fd(), punch, signed(PROBE_OFFSET), BLOCK_LENGTH).is_ok();
    let can_punch = punched && seek(0, Whence::SeekData)?.is_none();
    buffer.as_mut_slice().fill(0);
    file.write_all_at(buffer.as_slice(), ZEROES_OFFSET).and_then(|()| file.sync_all()).map_err(failed)?;
    let zeroes_are_holes = are_holes(seek(ZEROES_OFFSET, Whence::SeekData)?);
    Ok(HostFileSystem {
        direct_io,
        alignment_bytes: if !direct_io {
            1
        } else if small_reads {
            512
        } else {
            4096
        },
        can_punch,
        zeroes_are_holes,
        smaller_unit_bytes,
    })
}

/// Returns true unless a durable block of zeroes counts as data. `first_data` is the position of the first
/// data from [`ZEROES_OFFSET`] on, if any.
fn are_holes(first_data: Option<u64>) -> bool {
    first_data != Some(ZEROES_OFFSET)
}

/// Returns the known abilities of a file system that cannot be written.
fn from_statfs(directory: &Directory) -> Result<HostFileSystem, StoreError> {
    let failed = |errno: Errno| StoreError::io("look at the file system of", directory.path(), errno);
    let file =
        File::open(directory.path()).map_err(|error| StoreError::io("open", directory.path(), error))?;
    let unit_bytes = u64::try_from(fstatfs(file.as_fd()).map_err(failed)?.block_size()).unwrap_or(0);
    if unit_bytes > BLOCK_BYTES {
        return Err(StoreError::AllocationUnit { directory: directory.path().to_owned(), unit_bytes });
    }
    Ok(HostFileSystem {
        direct_io: false,
        alignment_bytes: 1,
        can_punch: false,
        zeroes_are_holes: false,
        smaller_unit_bytes: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_of_zeroes_without_data_is_a_hole() {
        let found = [Some(ZEROES_OFFSET), None, Some(ZEROES_OFFSET + BLOCK_BYTES)];
        assert_eq!(found.map(are_holes), [false, true, true]);
    }
}
