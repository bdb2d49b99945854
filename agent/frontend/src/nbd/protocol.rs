//! The NBD protocol as bytes: numbers, the request header and the replies. Pure; the source is the protocol's
//! own document (NetworkBlockDevice/nbd, doc/proto.md). Everything is big-endian.

use shorthorn_types::Errno;

/// First word of a server: "NBDMAGIC".
pub(crate) const SERVER_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second word of a newstyle server, first word of every option: "IHAVEOPT".
pub(crate) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// First word of every reply to an option.
pub(crate) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// The longest READ or WRITE that is served. This is the portable maximum of the protocol, and the maximum of
/// Linux.
pub(crate) const MAX_REQUEST_BYTES: u32 = 32 << 20;

/// Transmission flags: the abilities of the export.
pub(crate) mod transmission_flags {
    pub(crate) const HAS_FLAGS: u16 = 1 << 0;
    pub(crate) const SEND_FLUSH: u16 = 1 << 2;
    pub(crate) const SEND_FUA: u16 = 1 << 3;
    pub(crate) const SEND_TRIM: u16 = 1 << 5;
    pub(crate) const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub(crate) const CAN_MULTI_CONN: u16 = 1 << 8;

    /// The flags of every Shorthorn volume. A FLUSH covers writes completed on any connection, hence
    /// CAN_MULTI_CONN.
    pub(crate) const ALL: u16 =
        HAS_FLAGS | SEND_FLUSH | SEND_FUA | SEND_TRIM | SEND_WRITE_ZEROES | CAN_MULTI_CONN;
}

const COMMAND_FLAG_FUA: u16 = 1 << 0;
const COMMAND_FLAG_NO_HOLE: u16 = 1 << 1;

/// The command of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CommandKind {
    Read,
    Write,
    Flush,
    Trim,
    WriteZeroes,
    /// The client ends the connection, without a reply.
    Disconnect,
    /// A command that was never announced, or is not known.
    Unknown(u16),
}

/// The first 28 bytes of a request of an NBD client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestHeader {
    pub(crate) flags: u16,
    pub(crate) kind: CommandKind,
    /// The client's name for the request, which the reply carries.
    pub(crate) cookie: u64,
    pub(crate) offset_bytes: u64,
    pub(crate) length_bytes: u32,
}

/// The bytes are not a request: the connection has to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BadMagic(pub(crate) u32);

impl RequestHeader {
    pub(crate) const BYTES: usize = 28;

    /// Returns the header at the start of `bytes`; `None` if they are too few.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Result<RequestHeader, BadMagic>> {
        let (magic, rest) = bytes.split_first_chunk()?;
        let (flags, rest) = rest.split_first_chunk()?;
        let (kind, rest) = rest.split_first_chunk()?;
        let (cookie, rest) = rest.split_first_chunk()?;
        let (offset, rest) = rest.split_first_chunk()?;
        let (length, _) = rest.split_first_chunk()?;
        let magic = u32::from_be_bytes(*magic);
        if magic != REQUEST_MAGIC {
            return Some(Err(BadMagic(magic)));
        }
        Some(Ok(RequestHeader {
            flags: u16::from_be_bytes(*flags),
            kind: match u16::from_be_bytes(*kind) {
                0 => CommandKind::Read,
                1 => CommandKind::Write,
                2 => CommandKind::Disconnect,
                3 => CommandKind::Flush,
                4 => CommandKind::Trim,
                6 => CommandKind::WriteZeroes,
                other => CommandKind::Unknown(other),
            },
            cookie: u64::from_be_bytes(*cookie),
            offset_bytes: u64::from_be_bytes(*offset),
            length_bytes: u32::from_be_bytes(*length),
        }))
    }

    /// Returns true if the answer must wait until the data is durable.
    pub(crate) fn fua(&self) -> bool {
        self.flags & COMMAND_FLAG_FUA != 0
    }

    /// Returns true if zeroes that are written have to take space: later writes there do not fail for lack of
    /// it.
    pub(crate) fn no_hole(&self) -> bool {
        self.flags & COMMAND_FLAG_NO_HOLE != 0
    }

    /// Checks flags, alignment and bounds against a volume of `size_bytes`.
    pub(crate) fn check(&self, size_bytes: u64) -> Result<(), NbdError> {
        let allowed = match self.kind {
            CommandKind::WriteZeroes => COMMAND_FLAG_FUA | COMMAND_FLAG_NO_HOLE,
            _ => COMMAND_FLAG_FUA,
        };
        if self.flags & !allowed != 0 {
            return Err(NbdError::INVALID);
        }
        match self.kind {
            CommandKind::Unknown(_) => Err(NbdError::INVALID),
            CommandKind::Disconnect => Ok(()),
            CommandKind::Flush if self.offset_bytes == 0 && self.length_bytes == 0 => Ok(()),
            CommandKind::Flush => Err(NbdError::INVALID),
            CommandKind::Read | CommandKind::Write if self.length_bytes > MAX_REQUEST_BYTES => {
                Err(NbdError::INVALID)
            }
            _ => self.check_range(size_bytes),
        }
    }

    fn check_range(&self, size_bytes: u64) -> Result<(), NbdError> {
        use shorthorn_types::{ByteRange, RangeError};
        let range = ByteRange::new(self.offset_bytes, self.length_bytes.into());
        let past_end = match self.kind {
            CommandKind::Write | CommandKind::WriteZeroes => NbdError::NO_SPACE,
            _ => NbdError::INVALID,
        };
        match range.and_then(|range| range.check(size_bytes)) {
            Ok(_) => Ok(()),
            Err(RangeError::PastEnd { .. } | RangeError::Overflow { .. }) => Err(past_end),
            Err(_) => Err(NbdError::INVALID),
        }
    }
}

/// An error as NBD knows it: one of the few errno values of its document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NbdError(u32);

impl NbdError {
    pub(crate) const IO: NbdError = NbdError(5);
    pub(crate) const INVALID: NbdError = NbdError(22);
    pub(crate) const NO_SPACE: NbdError = NbdError(28);

    /// Returns the errno: NBD's numbers are those of Linux.
    pub(crate) fn errno(self) -> Errno {
        i32::try_from(self.0).map_or(Errno::IO, Errno::new)
    }
}

impl From<Errno> for NbdError {
    fn from(errno: Errno) -> NbdError {
        match errno.raw() {
            libc::EPERM | libc::EROFS => NbdError(1),
            libc::ENOMEM => NbdError(12),
            libc::EINVAL => NbdError::INVALID,
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => NbdError::NO_SPACE,
            libc::EOPNOTSUPP => NbdError(95),
            libc::ESHUTDOWN => NbdError(108),
            _ => NbdError::IO,
        }
    }
}

/// Returns a reply without structure: the header of a READ's data, or all there is.
pub(crate) fn simple_reply(cookie: u64, error: Option<NbdError>) -> [u8; 16] {
    let mut reply = [0; 16];
    reply[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    reply[4..8].copy_from_slice(&error.map_or(0, |error| error.0).to_be_bytes());
    reply[8..].copy_from_slice(&cookie.to_be_bytes());
    reply
}

const CHUNK_FLAG_DONE: u16 = 1 << 0;
const CHUNK_OFFSET_DATA: u16 = 1;
const CHUNK_ERROR: u16 = (1 << 15) + 1;

fn chunk_header(done: bool, kind: u16, cookie: u64, length_bytes: u32) -> [u8; 20] {
    let flags = if done { CHUNK_FLAG_DONE } else { 0 };
    let mut header = [0; 20];
    header[..4].copy_from_slice(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
    header[4..6].copy_from_slice(&flags.to_be_bytes());
    header[6..8].copy_from_slice(&kind.to_be_bytes());
    header[8..16].copy_from_slice(&cookie.to_be_bytes());
    header[16..].copy_from_slice(&length_bytes.to_be_bytes());
    header
}

/// Returns the header of a structured chunk that `length_bytes` of data at `offset_bytes` follow; `done` for
/// the last chunk of its request.
pub(crate) fn data_chunk(cookie: u64, offset_bytes: u64, length_bytes: u32, done: bool) -> [u8; 28] {
    let mut chunk = [0; 28];
    chunk[..20].copy_from_slice(&chunk_header(done, CHUNK_OFFSET_DATA, cookie, length_bytes + 8));
    chunk[20..].copy_from_slice(&offset_bytes.to_be_bytes());
    chunk
}

/// Returns the structured chunk that ends a request with an error (and no text).
pub(crate) fn error_chunk(cookie: u64, error: NbdError) -> [u8; 26] {
    let mut chunk = [0; 26];
    chunk[..20].copy_from_slice(&chunk_header(true, CHUNK_ERROR, cookie, 6));
    chunk[20..24].copy_from_slice(&error.0.to_be_bytes());
    chunk
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SIZE: u64 = 1 << 30;

    fn header(kind: u16, flags: u16, offset: u64, length: u32) -> RequestHeader {
        let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(77u64.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        bytes.extend(length.to_be_bytes());
        assert_eq!(bytes.len(), RequestHeader::BYTES);
        RequestHeader::parse(&bytes).unwrap().unwrap()
    }

    #[test]
    fn a_request_by_its_bytes() {
        let bytes = [
            0x25, 0x60, 0x95, 0x13, 0, 1, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0x20, 0, 0, 0,
            0x10, 0,
        ];
        let request = RequestHeader::parse(&bytes).unwrap().unwrap();
        assert_eq!(request.kind, CommandKind::Write);
        assert!(request.fua());
        assert_eq!(request.cookie, 0x0102_0304_0506_0708);
        assert_eq!((request.offset_bytes, request.length_bytes), (0x2000, 0x1000));
        assert_eq!(request.check(SIZE), Ok(()));
        assert_eq!(RequestHeader::parse(&bytes[..27]), None);
        assert_eq!(RequestHeader::parse(&[0; 28]), Some(Err(BadMagic(0))));
    }

    #[test]
    fn replies_by_their_bytes() {
        let cookie = 0x0102_0304_0506_0708;
        assert_eq!(
            simple_reply(cookie, Some(NbdError::NO_SPACE)),
            [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 28, 1, 2, 3, 4, 5, 6, 7, 8]
        );
        assert_eq!(
            data_chunk(cookie, 512, 4096, false),
            [
                0x66, 0x8e, 0x33, 0xef, 0, 0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0x10, 8, 0, 0, 0, 0, 0, 0,
                2, 0
            ]
        );
        assert_eq!(
            error_chunk(cookie, NbdError::IO),
            [0x66, 0x8e, 0x33, 0xef, 0, 1, 0x80, 1, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 6, 0, 0, 0, 5, 0, 0]
        );
    }

    #[test]
    fn requests_that_cannot_be_served_get_the_prescribed_errors() {
        const READ: u16 = 0;
        const WRITE: u16 = 1;
        const FLUSH: u16 = 3;
        const TRIM: u16 = 4;
        const CACHE: u16 = 5;
        const ZERO: u16 = 6;
        let check = |kind, flags, offset, length| header(kind, flags, offset, length).check(SIZE);
        for kind in [READ, WRITE, TRIM, ZERO] {
            assert_eq!(check(kind, 0, SIZE - 512, 512), Ok(()));
            assert_eq!(check(kind, COMMAND_FLAG_FUA, 0, 512), Ok(()));
            assert_eq!(check(kind, 0, 1, 512), Err(NbdError::INVALID), "unaligned");
            assert_eq!(check(kind, 0, 0, 511), Err(NbdError::INVALID), "unaligned");
            assert_eq!(check(kind, 0, 0, 0), Err(NbdError::INVALID), "empty");
            assert_eq!(check(kind, 4, 0, 512), Err(NbdError::INVALID), "flag");
        }
        for (kind, error) in [
            (READ, NbdError::INVALID),
            (TRIM, NbdError::INVALID),
            (WRITE, NbdError::NO_SPACE),
            (ZERO, NbdError::NO_SPACE),
        ] {
            assert_eq!(check(kind, 0, SIZE, 512), Err(error));
            assert_eq!(check(kind, 0, u64::MAX - 511, 1024), Err(error));
        }
        assert_eq!(check(READ, 0, 0, MAX_REQUEST_BYTES), Ok(()));
        assert_eq!(check(READ, 0, 0, MAX_REQUEST_BYTES + 512), Err(NbdError::INVALID));
        assert_eq!(check(WRITE, COMMAND_FLAG_NO_HOLE, 0, 512), Err(NbdError::INVALID));
        assert_eq!(check(ZERO, COMMAND_FLAG_NO_HOLE, 0, 512), Ok(()));
        assert_eq!(check(ZERO, 0, 0, MAX_REQUEST_BYTES * 2), Ok(()));
        assert_eq!(check(FLUSH, COMMAND_FLAG_FUA, 0, 0), Ok(()));
        assert_eq!(check(FLUSH, 0, 0, 512), Err(NbdError::INVALID));
        assert_eq!(check(CACHE, 0, 0, 512), Err(NbdError::INVALID));
        assert_eq!(check(999, 0, 0, 512), Err(NbdError::INVALID));
    }

    #[test]
    fn errors_that_nbd_does_not_know_become_eio() {
        for (raw, nbd) in
            [(1, 1), (5, 5), (12, 12), (22, 22), (28, 28), (122, 28), (95, 95), (108, 108), (110, 5)]
        {
            assert_eq!(NbdError::from(Errno::new(raw)).0, nbd, "{raw}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..64), magic: bool
        ) {
            let mut bytes = bytes;
            if magic {
                bytes.splice(..bytes.len().min(4), REQUEST_MAGIC.to_be_bytes());
            }
            match RequestHeader::parse(&bytes) {
                None => prop_assert!(bytes.len() < RequestHeader::BYTES),
                Some(Ok(request)) => { let _ = request.check(SIZE); }
                Some(Err(_)) => prop_assert!(!magic),
            }
        }

        #[test]
        fn requests_that_pass_the_check_are_inside_the_volume(
            kind in 0u16..8, flags in 0u16..4, offset: u64, length: u32
        ) {
            let request = header(kind, flags, offset, length);
            if request.check(SIZE).is_ok() && !matches!(request.kind, CommandKind::Disconnect) {
                prop_assert!(request.offset_bytes + u64::from(request.length_bytes) <= SIZE);
                prop_assert_eq!(request.length_bytes % 512, 0);
            }
        }
    }
}
