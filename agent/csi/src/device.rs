//! Block devices as the kernel shows them: numbers, sizes, and exclusive users.

use std::fs;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use shorthorn_linux::block_device::size_by_number;
use shorthorn_types::DeviceNumber;

/// The bytes at both ends of a device that must be zero before it counts as empty. Every format that this
/// host could know keeps something in one of them.
const ENDS_BYTES: u64 = 1 << 20;
const CHUNK_BYTES: usize = 64 << 10;

/// Returns the device of the node at `path`; none if the path does not exist or is not a node of a block
/// device.
pub(crate) fn number_at(path: &Path) -> io::Result<Option<DeviceNumber>> {
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.file_type().is_block_device() => Ok(Some(DeviceNumber::of(meta.rdev()))),
        Ok(_) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns true if a device of that number can hold data: an nbd device without a server exists with a size
/// of 0.
pub(crate) fn is_live(number: DeviceNumber) -> bool {
    size_by_number(number).is_ok_and(|size| size.is_some_and(|bytes| bytes > 0))
}

/// Returns whether the kernel refuses writes to a device, for any reason.
pub(crate) fn is_read_only(number: DeviceNumber) -> io::Result<bool> {
    let text = fs::read_to_string(format!("/sys/dev/block/{number}/ro"))?;
    Ok(text.trim_end() != "0")
}

/// Returns true if the device has an exclusive user: a mount, also one in another mount namespace only, or a
/// device on top of it.
pub(crate) fn is_open_exclusively(path: &Path) -> io::Result<bool> {
    match fs::OpenOptions::new().read(true).custom_flags(libc::O_EXCL | libc::O_CLOEXEC).open(path) {
        Ok(_) => Ok(false),
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(true),
        Err(error) => Err(error),
    }
}

/// Returns whether both ends of the device read as zeroes.
pub(crate) fn has_zero_ends(path: &Path, size_bytes: u64) -> io::Result<bool> {
    let mut file = fs::File::open(path)?;
    Ok(is_zero(&mut file, 0, size_bytes.min(ENDS_BYTES))?
        && is_zero(&mut file, size_bytes.saturating_sub(ENDS_BYTES), size_bytes.min(ENDS_BYTES))?)
}

fn is_zero(file: &mut fs::File, from: u64, length: u64) -> io::Result<bool> {
    file.seek(SeekFrom::Start(from))?;
    let mut part = file.take(length);
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut left = length;
    while left > 0 {
        let got = part.read(&mut chunk)?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if chunk[..got].iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
        left -= got as u64;
    }
    Ok(true)
}

/// Has everything that was written to the device made durable.
pub(crate) fn flush(path: &Path) -> io::Result<()> {
    fs::File::open(path)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_does_not_exist_is_not_live() {
        assert!(!is_live(DeviceNumber { major: 4095, minor: 1 }));
    }

    #[test]
    fn data_at_either_end_is_seen() {
        use std::os::unix::fs::FileExt;
        const SIZE: u64 = 8 << 20;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        for (at, zero) in [
            (None, true),
            (Some(0), false),
            (Some(ENDS_BYTES - 1), false),
            (Some(ENDS_BYTES), true),
            (Some(SIZE - ENDS_BYTES), false),
            (Some(SIZE - 1), false),
        ] {
            let file = fs::File::create(&path).unwrap();
            file.set_len(SIZE).unwrap();
            if let Some(at) = at {
                file.write_all_at(&[1], at).unwrap();
            }
            assert_eq!(has_zero_ends(&path, SIZE).unwrap(), zero, "{at:?}");
        }
        fs::File::create(&path).unwrap().set_len(4096).unwrap();
        assert!(has_zero_ends(&path, 4096).unwrap());
        assert!(has_zero_ends(&path, 8192).is_err(), "a device that is shorter than it says is not empty");
    }
}
