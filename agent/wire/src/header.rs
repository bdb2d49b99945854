use std::fmt;

use shorthorn_types::limits::{MAX_IO_BYTES, MAX_ZERO_BYTES, SECTOR_BYTES};
use shorthorn_types::{ByteRange, Errno};
use thiserror::Error;

/// Length of an encoded [`Header`].
pub const HEADER_BYTES: usize = 48;
/// The offset of the keyed check, at the end of the header.
const KEYED_CHECK_AT: usize = 40;
/// The maximum length of the text of a control frame, except for texts with a list of layers.
pub const MAX_TEXT_BYTES: u32 = 16 << 10;
/// The longest list of layers: a chain has up to 250, whose documents and names have no small bound.
pub const MAX_LAYERS_TEXT_BYTES: u32 = MAX_IO_BYTES;

const MAGIC: u32 = u32::from_le_bytes(*b"SHRN");
const VERSION: u8 = 2;

/// The operation of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Opcode {
    /// Replica to engine, first of all: a nonce. Text: [`crate::Challenge`].
    Challenge = 1,
    /// Engine to replica. Text: [`crate::Hello`]; the response carries [`crate::ProvenWelcome`].
    Hello = 2,
    /// Data of the range; the response carries it.
    Read = 3,
    /// Data for the range, behind the header.
    Write = 4,
    /// Makes all writes answered so far durable.
    Flush = 5,
    /// The range is not needed any more. Its whole blocks read as zeroes from now on, and a block that it
    /// covers in part does not change.
    Discard = 6,
    /// The range reads as zeroes from now on.
    WriteZeroes = 7,
    /// Are you there?
    Ping = 8,
    /// Store this proposed view. Text: [`crate::ViewMessage`].
    Propose = 9,
    /// This view is committed. Text: [`crate::ViewMessage`].
    Commit = 10,
    /// Requests the regions in one of the replica's sets. Text: [`crate::RegionsQuery`]; the response carries
    /// [`crate::RegionsPage`].
    Regions = 11,
    /// Change one of the replica's sets of regions. Text: [`shorthorn_types::MarkRegions`].
    Mark = 12,
    /// The CRC-32C of the data of the range, as it reads now: it comes in the data check of the response,
    /// which has no data. [`Errno::ROTTEN`] as with [`Flags::CHECKED`].
    Verify = 13,
    /// Requests the layers of the replica. The response carries [`crate::LayerList`].
    Layers = 14,
    /// Become a copy of a replica that has these layers. Text: [`crate::LayerList`]; the response carries
    /// [`crate::CopyState`].
    CopyBegin = 15,
    /// Requests the extents of a layer. Text: [`crate::ExtentsQuery`]; the response carries
    /// [`crate::ExtentsPage`].
    Extents = 16,
    /// Data of the range in one layer alone, whose number is in the status field. With [`Flags::CHECKED`],
    /// the blocks of it that a reader of the volume sees are compared.
    ReadLayer = 17,
    /// Data for the range in one layer of a replica that is being copied to; its number is in the status
    /// field.
    WriteLayer = 18,
    /// A layer is, or all of them are, copied: make it durable. Text: [`crate::CopyEnd`].
    CopyEnd = 19,
    /// Requests the checks of a snapshot's layer in a range. Text: [`crate::LayerRange`]; the response
    /// carries [`crate::LayerCheck`].
    CheckLayer = 20,
    /// Keep these sums of a snapshot's layer. Text: [`crate::KeepSums`].
    KeepSums = 21,
    /// Repairs a snapshot's layer. Text: [`crate::LayerPatch`], and data behind it, see
    /// [`crate::encode_patch`].
    RepairLayer = 22,
    /// The volume has grown. Text: [`crate::ExpandReplica`].
    Expand = 23,
}

impl Opcode {
    const ALL: [Opcode; 23] = [
        Opcode::Challenge,
        Opcode::Hello,
        Opcode::Read,
        Opcode::Write,
        Opcode::Flush,
        Opcode::Discard,
        Opcode::WriteZeroes,
        Opcode::Ping,
        Opcode::Propose,
        Opcode::Commit,
        Opcode::Regions,
        Opcode::Mark,
        Opcode::Verify,
        Opcode::Layers,
        Opcode::CopyBegin,
        Opcode::Extents,
        Opcode::ReadLayer,
        Opcode::WriteLayer,
        Opcode::CopyEnd,
        Opcode::CheckLayer,
        Opcode::KeepSums,
        Opcode::RepairLayer,
        Opcode::Expand,
    ];

    fn of(raw: u8) -> Option<Opcode> {
        Opcode::ALL.get(usize::from(raw).checked_sub(1)?).copied()
    }

    /// Returns true if the frame carries text (JSON), not data of the volume alone.
    #[must_use]
    pub const fn is_control(self) -> bool {
        match self {
            Opcode::Challenge | Opcode::Hello | Opcode::Propose | Opcode::Commit => true,
            Opcode::Regions | Opcode::Mark | Opcode::Layers => true,
            Opcode::CopyBegin | Opcode::Extents | Opcode::CopyEnd => true,
            Opcode::CheckLayer | Opcode::KeepSums | Opcode::RepairLayer | Opcode::Expand => true,
            Opcode::Read | Opcode::Write | Opcode::Flush | Opcode::Discard | Opcode::WriteZeroes => false,
            Opcode::Ping | Opcode::Verify | Opcode::ReadLayer | Opcode::WriteLayer => false,
        }
    }
}

impl Opcode {
    /// Returns the longest text that such a frame carries.
    #[must_use]
    pub const fn text_max_bytes(self) -> u32 {
        match self {
            Opcode::Layers | Opcode::CopyBegin => MAX_LAYERS_TEXT_BYTES,
            Opcode::RepairLayer => MAX_IO_BYTES,
            _ => MAX_TEXT_BYTES,
        }
    }
}

/// Bits beside the opcode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(u16);

impl Flags {
    /// A plain request.
    pub const NONE: Flags = Flags(0);
    /// The write is durable before it is answered.
    pub const FUA: Flags = Flags(1);
    /// The replica answers the read with [`Errno::ROTTEN`] if it knows that its data differs from the
    /// stored data. In the answer to VERIFY, or to a READ_LAYER with this flag: each block matches a checksum
    /// that counts. Earlier replicas never answer so.
    pub const CHECKED: Flags = Flags(2);
    /// The data of a write, or of the write of a layer, is rot: no member has the stored data. The replica
    /// has to record it as rot.
    pub const ROTTEN: Flags = Flags(4);
    /// The frame answers the request with the same id.
    pub const RESPONSE: Flags = Flags(1 << 15);
    const KNOWN: u16 = Flags::FUA.0 | Flags::CHECKED.0 | Flags::ROTTEN.0 | Flags::RESPONSE.0;

    /// Returns true if all bits of `other` are set.
    #[must_use]
    pub const fn has(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the flags of `self` and of `other`.
    #[must_use]
    pub const fn with(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }
}

/// The fixed part of a frame. A decoded header has passed every check that needs no volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The operation that is requested or answered.
    pub opcode: Opcode,
    /// Bits beside it.
    pub flags: Flags,
    /// Chosen by the engine, repeated in the response.
    pub id: u64,
    /// The range in the volume; of control frames and responses without data: offset 0 and the length of the
    /// text.
    pub offset_bytes: u64,
    /// See `offset_bytes`.
    pub length_bytes: u32,
    /// Errno of a response; 0 is success. In a request for one layer its number, 0 in others.
    pub status: i32,
    /// The CRC-32C of the data behind the header, 0 without data. In the answer to a PING: see
    /// [`Header::free_mib`].
    pub data_check: u32,
}

/// The reason why bytes are not a frame. Every error ends the connection, because later bytes cannot be
/// trusted.
#[derive(Debug, Error, PartialEq, Eq, Clone, Copy)]
pub enum FrameError {
    /// The stream does not start with the magic.
    #[error("magic {0:#010x} instead of {MAGIC:#010x}: the peer does not speak this protocol")]
    Magic(u32),
    /// A version of the protocol that this build does not know.
    #[error("protocol version {0}, this build speaks {VERSION}: upgrade the older side")]
    Version(u8),
    /// The header was damaged in transit.
    #[error("header check {found:#010x}, computed {computed:#010x}: the header was damaged in transit")]
    HeaderCheck {
        /// The check that the sender has computed.
        found: u32,
        /// The check of the received bytes.
        computed: u32,
    },
    /// The frame is not the one that the peer has sent at this position.
    #[error(
        "the keyed check of frame {number} is wrong: the frame was repeated, moved, or made without the \
         volume's secret. Look for an attacker in the network between the two hosts"
    )]
    KeyedCheck {
        /// The number of earlier frames in this direction.
        number: u64,
    },
    /// The data was damaged in transit.
    #[error(
        "data check {found:#010x}, computed {computed:#010x} over {length_bytes} bytes: the data was damaged \
         in transit"
    )]
    DataCheck {
        /// The check that the sender has computed.
        found: u32,
        /// The check of the received data.
        computed: u32,
        /// The number of bytes that the checks cover.
        length_bytes: u32,
    },
    /// An opcode that this version does not have.
    #[error("unknown opcode {0}: the other side has another version")]
    Opcode(u8),
    /// Flags that this version does not have.
    #[error("unknown flags {0:#06x}: the other side has another version")]
    Flags(u16),
    /// A length over the limit of its opcode, or a range that no volume has.
    #[error("{opcode:?} at {offset_bytes} of {length_bytes} bytes is out of bounds")]
    Bounds {
        /// The operation, which decides about the limit.
        opcode: Opcode,
        /// The first byte, as received.
        offset_bytes: u64,
        /// The number of bytes, as received.
        length_bytes: u32,
    },
    /// A text that is not the JSON of its opcode.
    #[error("this version cannot read the text of {0:?}")]
    Text(Opcode),
}

impl Header {
    /// Returns a request without data.
    #[must_use]
    pub const fn request(opcode: Opcode, id: u64, offset_bytes: u64, length_bytes: u32) -> Header {
        Header { opcode, flags: Flags::NONE, id, offset_bytes, length_bytes, status: 0, data_check: 0 }
    }

    /// Returns the free space of the replica's disk in MiB, from the answer to a PING; none if it is unknown.
    /// A disk with less than 1 MiB counts as unknown, because both have 0 in the frame.
    #[must_use]
    pub const fn free_mib(&self) -> Option<u32> {
        match self.data_check {
            0 => None,
            free_mib => Some(free_mib),
        }
    }

    /// Returns the answer to a PING with the free space of the replica's disk, if it is known.
    #[must_use]
    pub fn with_free_mib(self, free_mib: Option<u32>) -> Header {
        Header { data_check: free_mib.unwrap_or(0), ..self }
    }

    /// Returns the response to this request: success or an errno, with no data or text behind it.
    #[must_use]
    pub const fn response(&self, outcome: Result<(), Errno>) -> Header {
        let status = match outcome {
            Ok(()) => 0,
            Err(errno) => errno.raw(),
        };
        let Header { opcode, id, offset_bytes, .. } = *self;
        let length_bytes = if opcode.is_control() { 0 } else { self.length_bytes };
        Header { opcode, flags: Flags::RESPONSE, id, offset_bytes, length_bytes, status, data_check: 0 }
    }

    /// Returns true if this answers a request.
    #[must_use]
    pub const fn is_response(&self) -> bool {
        self.flags.has(Flags::RESPONSE)
    }

    /// Returns the outcome in a response.
    ///
    /// # Errors
    /// The errno that the replica answered with.
    pub const fn outcome(&self) -> Result<(), Errno> {
        if self.status == 0 { Ok(()) } else { Err(Errno::new(self.status)) }
    }

    /// Returns the number of bytes after the header.
    #[must_use]
    pub const fn data_bytes(&self) -> u32 {
        let follows = match (self.opcode, self.is_response()) {
            (Opcode::Read | Opcode::ReadLayer, true) => self.status == 0,
            (Opcode::Write | Opcode::WriteLayer, false) => true,
            (opcode, _) => opcode.is_control(),
        };
        if follows { self.length_bytes } else { 0 }
    }

    /// Returns the range that the request is about.
    ///
    /// # Errors
    /// None for a decoded header.
    pub fn range(&self) -> Result<ByteRange, FrameError> {
        ByteRange::new(self.offset_bytes, u64::from(self.length_bytes)).map_err(|_| self.out_of_bounds())
    }

    const fn out_of_bounds(&self) -> FrameError {
        FrameError::Bounds {
            opcode: self.opcode,
            offset_bytes: self.offset_bytes,
            length_bytes: self.length_bytes,
        }
    }

    /// Returns the bytes of the header of a frame of the opening, which has no keyed check yet.
    /// [`Session`](crate::Session) makes all others.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        self.encode_keyed(|_| 0)
    }

    /// Returns the bytes of the header, with the keyed check that `check` computes from those before it.
    pub(crate) fn encode_keyed(
        &self,
        check: impl FnOnce(&mut [u8; HEADER_BYTES]) -> u64,
    ) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        // As whole words: the checks read them back, and a processor waits if they were written in smaller
        // pieces.
        let kind = [VERSION, self.opcode as u8];
        let first =
            u64::from(MAGIC) | u64::from(u16::from_le_bytes(kind)) << 32 | u64::from(self.flags.0) << 48;
        let status = u32::from_le_bytes(self.status.to_le_bytes());
        out[0..8].copy_from_slice(&first.to_le_bytes());
        out[8..16].copy_from_slice(&self.id.to_le_bytes());
        out[16..24].copy_from_slice(&self.offset_bytes.to_le_bytes());
        out[24..32].copy_from_slice(&two(self.length_bytes, status).to_le_bytes());
        out[32..36].copy_from_slice(&self.data_check.to_le_bytes());
        let crc = crc32c::crc32c(&out[..36]);
        out[32..40].copy_from_slice(&two(self.data_check, crc).to_le_bytes());
        let check = check(&mut out);
        out[KEYED_CHECK_AT..].copy_from_slice(&check.to_le_bytes());
        out
    }

    /// Reads and checks the header of a frame of the opening. [`Session`](crate::Session) reads all others.
    ///
    /// # Errors
    /// [`FrameError`] has the problem; the connection has to be closed.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, FrameError> {
        Header::decode_keyed(bytes, 0, 0)
    }

    /// Reads and checks the header of frame `number`, whose keyed check has to be `check`.
    pub(crate) fn decode_keyed(
        bytes: &[u8; HEADER_BYTES],
        number: u64,
        check: u64,
    ) -> Result<Header, FrameError> {
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        if u32_at(0) != MAGIC {
            return Err(FrameError::Magic(u32_at(0)));
        }
        let computed = crc32c::crc32c(&bytes[..36]);
        if u32_at(36) != computed {
            return Err(FrameError::HeaderCheck { found: u32_at(36), computed });
        }
        // Bytes 0 to 39 are alike in every version, so that each of two versions can say that it is another
        // one.
        if bytes[4] != VERSION {
            return Err(FrameError::Version(bytes[4]));
        }
        if u64_at(KEYED_CHECK_AT) != check {
            return Err(FrameError::KeyedCheck { number });
        }
        if u16_at(6) & !Flags::KNOWN != 0 {
            return Err(FrameError::Flags(u16_at(6)));
        }
        let header = Header {
            opcode: Opcode::of(bytes[5]).ok_or(FrameError::Opcode(bytes[5]))?,
            flags: Flags(u16_at(6)),
            id: u64_at(8),
            offset_bytes: u64_at(16),
            length_bytes: u32_at(24),
            status: i32::from_le_bytes([bytes[28], bytes[29], bytes[30], bytes[31]]),
            data_check: u32_at(32),
        };
        header.check_bounds()
    }

    fn check_bounds(self) -> Result<Header, FrameError> {
        let length = self.length_bytes;
        let good = match self.opcode {
            Opcode::Read | Opcode::Write | Opcode::Verify | Opcode::ReadLayer | Opcode::WriteLayer => {
                length > 0 && length <= MAX_IO_BYTES && self.is_sectors()
            }
            Opcode::Discard | Opcode::WriteZeroes => {
                length > 0 && length <= MAX_ZERO_BYTES && self.is_sectors()
            }
            Opcode::Flush | Opcode::Ping => length == 0 && self.offset_bytes == 0,
            opcode => opcode.is_control() && length <= opcode.text_max_bytes() && self.offset_bytes == 0,
        };
        let overflows = self.offset_bytes.checked_add(u64::from(length)).is_none();
        if !good || overflows { Err(self.out_of_bounds()) } else { Ok(self) }
    }

    const fn is_sectors(&self) -> bool {
        self.offset_bytes.is_multiple_of(SECTOR_BYTES)
            && (self.length_bytes as u64).is_multiple_of(SECTOR_BYTES)
    }

    /// Compares the data that came behind the header with its check.
    ///
    /// # Errors
    /// [`FrameError::DataCheck`].
    pub const fn check_data(&self, computed: u32) -> Result<(), FrameError> {
        if computed == self.data_check {
            return Ok(());
        }
        Err(FrameError::DataCheck { found: self.data_check, computed, length_bytes: self.length_bytes })
    }
}

/// Returns two fields of four bytes as a word.
const fn two(first: u32, second: u32) -> u64 {
    first as u64 | (second as u64) << 32
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.is_response() { "response" } else { "request" };
        write!(
            f,
            "{:?} {kind} {:#x} at {} of {} bytes",
            self.opcode, self.id, self.offset_bytes, self.length_bytes
        )
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Challenge;

    fn header() -> impl Strategy<Value = Header> {
        let opcode = prop::sample::select(Opcode::ALL.to_vec());
        (opcode, any::<(bool, bool, u64, u32)>(), 0u64..1 << 31, 1u32..2048).prop_map(
            |(opcode, (fua, response, id, data_check), sector, sectors)| {
                let ranged = !opcode.is_control() && !matches!(opcode, Opcode::Flush | Opcode::Ping);
                let text = if opcode.is_control() { sectors } else { 0 };
                let flags = if fua { Flags::FUA } else { Flags::NONE };
                Header {
                    opcode,
                    flags: if response { flags.with(Flags::RESPONSE) } else { flags },
                    id,
                    offset_bytes: if ranged { sector * 512 } else { 0 },
                    length_bytes: if ranged { sectors * 512 } else { text },
                    status: if response { 5 } else { 0 },
                    data_check,
                }
            },
        )
    }

    proptest! {
        #[test]
        fn bytes_and_back(header in header()) {
            prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn every_damaged_bit_is_noticed(header in header(), bit in 0usize..HEADER_BYTES * 8) {
            let mut bytes = header.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Header::decode(&bytes).is_err());
        }

        #[test]
        fn any_bytes_are_refused_or_within_bounds(
            mut bytes in prop::array::uniform32(any::<u8>()), opcode in 0u8..24
        ) {
            let mut whole = [0; HEADER_BYTES];
            bytes[..4].copy_from_slice(b"SHRN");
            (bytes[4], bytes[5]) = (VERSION, opcode);
            whole[..32].copy_from_slice(&bytes);
            let crc = crc32c::crc32c(&whole[..36]);
            whole[36..40].copy_from_slice(&crc.to_le_bytes());
            if let Ok(header) = Header::decode(&whole) {
                prop_assert!(header.data_bytes() <= MAX_IO_BYTES.max(MAX_LAYERS_TEXT_BYTES));
                prop_assert!(header.range().is_ok());
            }
        }
    }

    #[test]
    fn the_layout_is_fixed() {
        let mut header = Header::request(Opcode::Write, 0x0102_0304_0506_0708, 4096, 512);
        header.flags = Flags::FUA;
        header.data_check = 0xdead_beef;
        let bytes = header.encode();
        assert_eq!(&bytes[..8], b"SHRN\x02\x04\x01\x00");
        assert_eq!(&bytes[8..16], &[8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!(&bytes[16..32], &[0, 16, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0]);
        assert_eq!(&bytes[32..36], &[0xef, 0xbe, 0xad, 0xde]);
        assert_eq!(&bytes[36..40], &crc32c::crc32c(&bytes[..36]).to_le_bytes());
        assert_eq!(&bytes[40..], &[0; 8]);
    }

    #[test]
    fn another_protocol_version_is_named() {
        // The bytes of version 1, whose header ended after the CRC.
        let mut bytes = Challenge::HEADER.encode();
        bytes[4] = 1;
        let crc = crc32c::crc32c(&bytes[..36]);
        bytes[36..40].copy_from_slice(&crc.to_le_bytes());
        bytes[40..].copy_from_slice(b"{\"nonce\"");
        let error = Header::decode(&bytes).unwrap_err();
        assert_eq!(error, FrameError::Version(1));
        assert!(error.to_string().contains("protocol version 1, this build speaks 2"), "{error}");
    }

    #[test]
    fn refuses_ranges_over_the_limit() {
        let decode = |opcode, length| Header::decode(&Header::request(opcode, 1, 0, length).encode());
        assert!(decode(Opcode::Write, MAX_IO_BYTES).is_ok());
        assert!(matches!(decode(Opcode::Write, MAX_IO_BYTES + 512), Err(FrameError::Bounds { .. })));
        assert!(matches!(decode(Opcode::Read, 100), Err(FrameError::Bounds { .. })));
        assert!(matches!(decode(Opcode::Flush, 512), Err(FrameError::Bounds { .. })));
        assert!(matches!(decode(Opcode::Hello, MAX_TEXT_BYTES + 1), Err(FrameError::Bounds { .. })));
        assert!(decode(Opcode::CopyBegin, MAX_LAYERS_TEXT_BYTES).is_ok());
        assert!(decode(Opcode::Layers, MAX_LAYERS_TEXT_BYTES + 1).is_err());
        assert!(decode(Opcode::RepairLayer, MAX_IO_BYTES).is_ok());
        assert!(decode(Opcode::RepairLayer, MAX_IO_BYTES + 1).is_err());
        assert!(decode(Opcode::KeepSums, MAX_TEXT_BYTES + 1).is_err());
    }
}
