use shorthorn_types::ByteRange;

/// An operation that a frontend requests of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Fill the slot's buffer from the range.
    Read,
    /// Store the slot's buffer in the range; with `fua`, durably.
    Write {
        /// Durable before it is acknowledged.
        fua: bool,
    },
    /// Make everything that was acknowledged durable. The range is empty.
    Flush,
    /// The data of the range is no longer needed. Its whole blocks read as zeroes from now on, on every
    /// member, and blocks that it covers in part do not change.
    Discard,
    /// The range reads as zeroes from now on; with `fua`, durably.
    WriteZeroes {
        /// Durable before it is acknowledged.
        fua: bool,
    },
    /// Tell the check of the range as it reads now, or [`shorthorn_types::Errno::ROTTEN`]. Asked by the core
    /// alone.
    Verify,
    /// Reads like [`Operation::Read`], but a replica that finds rot by its checksums answers with
    /// [`shorthorn_types::Errno::ROTTEN`]. Only the core sends it.
    CheckedRead,
    /// Stores the slot's buffer like [`Operation::Write`], but the data is rot: no member has the stored
    /// data. The replica records that before it answers. Only the core sends it.
    WriteRot,
}

/// A request in one slot of one queue. The slot is the frontend's until it submits the request, and again
/// from the request's completion on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Index of the slot in its queue, and of its buffer in the queue's arena.
    pub slot: u16,
    /// The operation, without data: the slot's buffer has it.
    pub operation: Operation,
    /// The range of the volume. Checked by the frontend against the volume's size; at most
    /// [`shorthorn_types::limits::MAX_IO_BYTES`] of data and [`shorthorn_types::limits::MAX_ZERO_BYTES`] of
    /// discard or zeroes.
    pub range: ByteRange,
}
