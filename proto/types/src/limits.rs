//! Every limit of the data path that more than one crate has to know.

/// The smallest unit of a request: a logical block of the device.
pub const SECTOR_BYTES: u64 = 512;
/// The unit in which a replica keeps data and in which overlapping requests are ordered.
pub const BLOCK_BYTES: u64 = 4096;
/// The maximum data of one READ or WRITE; frontends split larger requests.
pub const MAX_IO_BYTES: u32 = 1 << 20;
/// The largest range of one DISCARD or WRITE_ZEROES; frontends split larger requests. Bounded because a
/// replica may have to write the zeroes out, and has to answer within the time-out.
pub const MAX_ZERO_BYTES: u32 = 32 << 20;
/// The largest volume in bytes, far below the limits of Longhorn's directories and of ext4 files.
pub const MAX_VOLUME_BYTES: u64 = 1 << 44;
/// The most layers that a replica can have, the head included; Longhorn refuses longer chains.
pub const MAX_LAYERS: usize = 250;
/// The longest name of an image. A file name has at most 255 bytes. The document beside the image is written
/// under the name of the image with `.meta.tmp` behind it.
pub const MAX_IMAGE_NAME_BYTES: usize = 246;
/// The most replicas that one volume can have.
pub const MAX_MEMBERS: usize = 8;
/// The most proposed views that a replica keeps beside the committed one.
pub const MAX_PROPOSED_VIEWS: usize = 16;
/// The longest volume name.
pub const MAX_VOLUME_NAME_BYTES: usize = 63;
/// The most queues (threads, connections per replica) of one engine.
pub const MAX_QUEUES: u16 = 8;
/// The most requests in flight in one queue.
pub const MAX_QUEUE_DEPTH: u16 = 256;
/// Data of the frontend's reads that an engine has in flight, on all connections to one replica; of its
/// writes likewise. A replica has room for more: for copies and scrubs beside.
pub const ENGINE_FLIGHT_BYTES_MAX: u64 = 4 << 20;
/// Reads of the frontend that an engine has in flight; all other requests likewise.
pub const ENGINE_FLIGHT_REQUESTS_MAX: usize = 128;
