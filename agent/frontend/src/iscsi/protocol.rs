//! The bytes of FUSE (linux/fuse.h, protocol 7), as far as a file system of one file needs them.
//!
//! The mount itself is the file: the root of the file system is a regular file. So no name is ever looked up.

/// The length of a request's header.
const IN_HEADER_BYTES: usize = 40;
/// The longest fixed part of the requests that are understood: the header, and the arguments of a WRITE. The
/// data of a WRITE follows.
pub(super) const FIXED_BYTES: usize = 80;
/// The length of an answer's header.
const OUT_HEADER_BYTES: usize = 16;
/// The longest answer without data: the attributes of the file.
const REPLY_BYTES_MAX: usize = OUT_HEADER_BYTES + 104;

/// The inode of the root, by definition.
const ROOT: u64 = 1;
/// The version of the protocol that answers have. Kernels since 4.20 know it.
const MAJOR: u32 = 7;
const MINOR: u32 = 28;
/// The unit of the fields `blocks` of attributes.
const ATTRIBUTE_BLOCK_BYTES: u64 = 512;
const PAGE_BYTES: u32 = 4096;
/// The block size that a user of the file sees: tgtd makes it the physical block of the disk.
const BLOCK_BYTES: u32 = 4096;
/// A regular file of root.
pub(super) const FILE_MODE: u32 = 0o100_600;

/// Flags of INIT.
const BIG_WRITES: u32 = 1 << 5;
const MAX_PAGES: u32 = 1 << 22;
/// Flags of OPEN. Nothing is kept in the page cache, and writes to the file do not wait for each other.
const DIRECT_IO: u32 = 1;
const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;

/// A request of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FuseRequest {
    /// The number with which it is answered.
    pub(super) unique: u64,
    pub(super) operation: FuseOperation,
}

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FuseOperation {
    /// The first request of a mount.
    Init {
        major: u32,
        flags: u32,
    },
    Attributes,
    Open,
    Read {
        offset_bytes: u64,
        length_bytes: u32,
    },
    /// The data is behind [`FIXED_BYTES`].
    Write {
        offset_bytes: u64,
        length_bytes: u32,
    },
    Sync,
    Allocate {
        offset_bytes: u64,
        length_bytes: u64,
        mode: u32,
    },
    /// The last user of a descriptor has closed it, or the file system is unmounted.
    Close,
    FileSystemStatus,
    /// The kernel expects no answer.
    Unanswered,
    /// This file system does not have it.
    Unknown,
}

/// The bytes are not a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BadRequest;

impl FuseRequest {
    /// Parses a request of `length` bytes, of which `fixed` holds the first. Bytes of `fixed` behind the
    /// request have no meaning.
    pub(super) fn parse(fixed: &[u8; FIXED_BYTES], length: usize) -> Result<FuseRequest, BadRequest> {
        if length < IN_HEADER_BYTES || u32_at(fixed, 0) as usize != length {
            return Err(BadRequest);
        }
        let unique = u64_at(fixed, 8);
        let arguments = length - IN_HEADER_BYTES;
        let needs = |bytes: usize| if arguments < bytes { Err(BadRequest) } else { Ok(()) };
        let operation = match u32_at(fixed, 4) {
            2 | 36 | 42 => FuseOperation::Unanswered, // FORGET, INTERRUPT, BATCH_FORGET
            3 => FuseOperation::Attributes,
            14 => FuseOperation::Open,
            15 => {
                needs(40)?;
                FuseOperation::Read { offset_bytes: u64_at(fixed, 48), length_bytes: u32_at(fixed, 56) }
            }
            16 => {
                needs(40)?;
                let length_bytes = u32_at(fixed, 56);
                if length != FIXED_BYTES + length_bytes as usize {
                    return Err(BadRequest);
                }
                FuseOperation::Write { offset_bytes: u64_at(fixed, 48), length_bytes }
            }
            17 => FuseOperation::FileSystemStatus,
            18 | 38 => FuseOperation::Close, // RELEASE, DESTROY
            20 => FuseOperation::Sync,
            26 => {
                needs(16)?;
                FuseOperation::Init { major: u32_at(fixed, 40), flags: u32_at(fixed, 52) }
            }
            43 => {
                needs(32)?;
                FuseOperation::Allocate {
                    offset_bytes: u64_at(fixed, 48),
                    length_bytes: u64_at(fixed, 56),
                    mode: u32_at(fixed, 64),
                }
            }
            _ => FuseOperation::Unknown,
        };
        Ok(FuseRequest { unique, operation })
    }
}

/// An answer without data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reply {
    bytes: [u8; REPLY_BYTES_MAX],
    length: usize,
}

impl Reply {
    fn new(unique: u64) -> Reply {
        let mut reply = Reply { bytes: [0; REPLY_BYTES_MAX], length: OUT_HEADER_BYTES };
        reply.bytes[8..16].copy_from_slice(&unique.to_ne_bytes());
        reply
    }

    /// Returns the bytes; `data_bytes` follow them.
    pub(super) fn bytes(&mut self, data_bytes: u32) -> &[u8] {
        let length = u32::try_from(self.length).unwrap_or(0) + data_bytes;
        self.bytes[..4].copy_from_slice(&length.to_ne_bytes());
        &self.bytes[..self.length]
    }

    fn u16(mut self, value: u16) -> Reply {
        self.bytes[self.length..self.length + 2].copy_from_slice(&value.to_ne_bytes());
        self.length += 2;
        self
    }

    fn u32(mut self, value: u32) -> Reply {
        self.bytes[self.length..self.length + 4].copy_from_slice(&value.to_ne_bytes());
        self.length += 4;
        self
    }

    fn u64(mut self, value: u64) -> Reply {
        self.bytes[self.length..self.length + 8].copy_from_slice(&value.to_ne_bytes());
        self.length += 8;
        self
    }

    fn zeroes(mut self, count: usize) -> Reply {
        self.length += count;
        self
    }
}

/// The request is done; the data of a READ may follow.
pub(super) fn done(unique: u64) -> Reply {
    Reply::new(unique)
}

/// The request has failed with `errno`, a positive number.
pub(super) fn failed(unique: u64, errno: i32) -> Reply {
    let mut reply = Reply::new(unique);
    reply.bytes[4..8].copy_from_slice(&(-errno).to_ne_bytes());
    reply
}

/// The data of a WRITE is written.
pub(super) fn written(unique: u64, length_bytes: u32) -> Reply {
    Reply::new(unique).u32(length_bytes).u32(0)
}

/// Agrees with the kernel on requests of at most `data_bytes`. `offered` has the flags of the kernel.
pub(super) fn initialised(unique: u64, offered: u32, data_bytes: u32) -> Reply {
    Reply::new(unique)
        .u32(MAJOR)
        .u32(MINOR)
        .u32(0) // no read-ahead
        .u32(offered & (BIG_WRITES | MAX_PAGES))
        .u32(0) // the kernel's own limits of background requests, of which none are sent
        .u32(data_bytes)
        .u32(1) // times in nanoseconds
        .u16(u16::try_from(data_bytes / PAGE_BYTES).unwrap_or(u16::MAX))
        .zeroes(34)
}

/// Returns true if this code knows the kernel's major version of the protocol.
pub(super) fn is_known(major: u32) -> bool {
    major == MAJOR
}

/// The file is open.
pub(super) fn opened(unique: u64) -> Reply {
    Reply::new(unique).u64(0).u32(DIRECT_IO | PARALLEL_DIRECT_WRITES).u32(0)
}

/// The attributes of the file, which the kernel may not keep: a volume grows.
pub(super) fn attributes(unique: u64, size_bytes: u64) -> Reply {
    Reply::new(unique)
        .zeroes(16) // for how long they are valid
        .u64(ROOT)
        .u64(size_bytes)
        .u64(size_bytes / ATTRIBUTE_BLOCK_BYTES)
        .zeroes(36) // times
        .u32(FILE_MODE)
        .u32(1) // one name
        .zeroes(12) // root's, and no device
        .u32(BLOCK_BYTES)
        .zeroes(4)
}

/// The answer to statfs(2). tgtd does not read the numbers.
pub(super) fn file_system_status(unique: u64) -> Reply {
    Reply::new(unique).zeroes(40).u32(BLOCK_BYTES).zeroes(36)
}

fn u32_at(bytes: &[u8; FIXED_BYTES], start: usize) -> u32 {
    let mut value = [0; 4];
    value.copy_from_slice(&bytes[start..start + 4]);
    u32::from_ne_bytes(value)
}

fn u64_at(bytes: &[u8; FIXED_BYTES], start: usize) -> u64 {
    let mut value = [0; 8];
    value.copy_from_slice(&bytes[start..start + 8]);
    u64::from_ne_bytes(value)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request(opcode: u32, arguments: &[u8], data: usize) -> ([u8; FIXED_BYTES], usize) {
        let mut bytes = [0; FIXED_BYTES];
        let length = IN_HEADER_BYTES + arguments.len() + data;
        bytes[..4].copy_from_slice(&u32::try_from(length).unwrap().to_ne_bytes());
        bytes[4..8].copy_from_slice(&opcode.to_ne_bytes());
        bytes[8..16].copy_from_slice(&77u64.to_ne_bytes());
        bytes[IN_HEADER_BYTES..IN_HEADER_BYTES + arguments.len()].copy_from_slice(arguments);
        (bytes, length)
    }

    fn operation(opcode: u32, arguments: &[u8], data: usize) -> Result<FuseOperation, BadRequest> {
        let (bytes, length) = request(opcode, arguments, data);
        let request = FuseRequest::parse(&bytes, length)?;
        assert_eq!(request.unique, 77);
        Ok(request.operation)
    }

    /// The arguments of READ and WRITE: handle, offset, length, and 20 bytes without meaning here.
    fn transfer(offset: u64, length: u32) -> Vec<u8> {
        let mut arguments = vec![9; 8];
        arguments.extend(offset.to_ne_bytes());
        arguments.extend(length.to_ne_bytes());
        arguments.resize(40, 3);
        arguments
    }

    #[test]
    fn requests_of_a_kernel() {
        let (offset_bytes, length_bytes) = (1 << 40, 8192);
        let arguments = transfer(offset_bytes, length_bytes);
        assert_eq!(operation(15, &arguments, 0), Ok(FuseOperation::Read { offset_bytes, length_bytes }));
        assert_eq!(operation(16, &arguments, 8192), Ok(FuseOperation::Write { offset_bytes, length_bytes }));
        assert_eq!(operation(20, &[0; 16], 0), Ok(FuseOperation::Sync));
        let mut hole = vec![0; 8];
        hole.extend(4096u64.to_ne_bytes());
        hole.extend((5u64 << 32).to_ne_bytes());
        hole.extend(3u64.to_ne_bytes());
        let expected = FuseOperation::Allocate { offset_bytes: 4096, length_bytes: 5 << 32, mode: 3 };
        assert_eq!(operation(43, &hole, 0), Ok(expected));
        let init: Vec<u8> = [7u32, 41, 0, 1 << 22].iter().flat_map(|value| value.to_ne_bytes()).collect();
        assert_eq!(operation(26, &init, 0), Ok(FuseOperation::Init { major: 7, flags: 1 << 22 }));
        assert_eq!(operation(22, b"security.capability", 0), Ok(FuseOperation::Unknown));
        assert_eq!(operation(36, &[0; 8], 0), Ok(FuseOperation::Unanswered));
    }

    #[test]
    fn requests_that_are_too_short_or_lie() {
        assert_eq!(operation(16, &transfer(0, 8192), 4096), Err(BadRequest), "less data than it says");
        assert_eq!(operation(15, &[0; 20], 0), Err(BadRequest));
        assert_eq!(operation(26, &[0; 8], 0), Err(BadRequest));
        let (bytes, length) = request(3, &[0; 16], 0);
        assert_eq!(FuseRequest::parse(&bytes, length + 1), Err(BadRequest));
        assert_eq!(FuseRequest::parse(&bytes, 8), Err(BadRequest));
    }

    #[test]
    fn answers_have_the_lengths_of_the_kernel() {
        for (mut reply, expected) in [
            (done(1), 16),
            (failed(1, 5), 16),
            (written(1, 4096), 24),
            (initialised(1, u32::MAX, 1 << 20), 80),
            (opened(1), 32),
            (attributes(1, 1 << 30), 120),
            (file_system_status(1), 96),
        ] {
            let bytes = reply.bytes(0);
            assert_eq!(bytes.len(), expected);
            assert_eq!(bytes[..4], u32::try_from(expected).unwrap().to_ne_bytes());
        }
        assert_eq!(done(1).bytes(512)[..4], 528u32.to_ne_bytes());
        assert_eq!(failed(1, 5).bytes(0)[4..8], (-5i32).to_ne_bytes());
        let mut attributes = attributes(1, 1 << 30);
        let bytes = attributes.bytes(0);
        assert_eq!(bytes[40..48], (1u64 << 30).to_ne_bytes());
        assert_eq!(bytes[92..96], FILE_MODE.to_ne_bytes());
        assert_eq!(bytes[112..116], BLOCK_BYTES.to_ne_bytes());
        let mut initialised = initialised(1, MAX_PAGES | 1, 1 << 20);
        let bytes = initialised.bytes(0);
        assert_eq!(
            (&bytes[28..32], &bytes[36..40]),
            (&MAX_PAGES.to_ne_bytes()[..], &(1u32 << 20).to_ne_bytes()[..])
        );
        assert_eq!(bytes[44..46], 256u16.to_ne_bytes());
    }

    proptest! {
        #[test]
        fn a_write_has_the_data_that_it_states(bytes: [[u8; 8]; 10], length in 0usize..1 << 21) {
            let mut fixed: [u8; FIXED_BYTES] = bytes.concat().try_into().unwrap();
            let is_right = fixed[79].is_multiple_of(2);
            let stated = if is_right { u32::try_from(length).unwrap() } else { u32_at(&fixed, 0) };
            fixed[..4].copy_from_slice(&stated.to_ne_bytes());
            let opcode = u32::from(fixed[78] % 48);
            fixed[4..8].copy_from_slice(&opcode.to_ne_bytes());
            if let Ok(FuseRequest { operation: FuseOperation::Write { length_bytes, .. }, .. }) =
                FuseRequest::parse(&fixed, length)
            {
                prop_assert_eq!(length_bytes as usize + FIXED_BYTES, length);
            }
        }
    }
}
