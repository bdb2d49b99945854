//! The operations that the executor asks of the kernel, and their results.

use shorthorn_ring::Token;
use shorthorn_types::Errno;

use super::piece::Piece;

/// The source of the tokens of everything that the executor asks of the kernel.
pub(crate) const SOURCE_DISK: u8 = 1;

/// The purpose of an operation: the `kind` of its token.
pub(super) mod kind {
    /// Blocks of a read; the tag is a piece.
    pub const READ: u8 = 0;
    /// A block that a write changes in part; the tag is a piece.
    pub const EDGE: u8 = 1;
    /// Blocks of a write; the tag is a piece.
    pub const WRITE: u8 = 2;
    /// The fdatasync of all flushes.
    pub const SYNC: u8 = 3;
    /// The current step of a discard or write of zeroes; the tag is the job.
    pub const ZERO_STEP: u8 = 4;
    /// The block that such a step changes in part is read; the tag is the job.
    pub const ZERO_EDGE: u8 = 5;
    /// A page of a set of regions; the index is not a slot but the number of the write.
    pub const PAGE: u8 = 6;
    /// Blocks of a layer that is being copied; the tag is a piece.
    pub const LAYER: u8 = 7;
    /// A page of sums of blocks is read; the index is its place in memory.
    pub const SUMS_READ: u8 = 8;
    /// The sums are written.
    pub const SUMS_WRITE: u8 = 9;
}

/// The result of a request.
pub(crate) type OperationResult = Result<(), Errno>;

/// Returns the token of an operation on a piece of the slot's buffer.
pub(super) fn piece_token(kind: u8, slot: u16, piece: Piece) -> Token {
    Token { source: SOURCE_DISK, kind, index: slot, tag: piece.pack() }
}

/// Returns the token of an operation that has a number instead of a slot.
pub(super) fn numbered_token(kind: u8, number: u16) -> Token {
    Token { source: SOURCE_DISK, kind, index: number, tag: 0 }
}

/// Returns the token of a step of a discard or write of zeroes.
pub(super) fn zero_token(kind: u8, job: u8) -> Token {
    Token { source: SOURCE_DISK, kind, index: 0, tag: u32::from(job) }
}

/// Failures after which the same operation is tried again.
pub(super) fn is_passing(errno: Errno) -> bool {
    matches!(errno.raw(), libc::EINTR | libc::EAGAIN)
}

/// A file system whose own structures are damaged answers with the errno that stands for a block that does
/// not fit its sum.
pub(super) fn not_rot(errno: Errno) -> Errno {
    if errno == Errno::ROTTEN { Errno::IO } else { errno }
}
