//! Every limit of a replica process, in one place.

use std::time::Duration;

pub(crate) use shorthorn_replica_core::CONNECTIONS_MAX;
use shorthorn_types::limits::{
    BLOCK_BYTES, ENGINE_FLIGHT_BYTES_MAX, ENGINE_FLIGHT_REQUESTS_MAX, MAX_IO_BYTES,
};

/// The number of requests in flight that all connections share, beyond the one that each can always have.
pub(crate) const SHARED_SLOTS: usize = 288;
// For the requests of a frontend, eight pieces of copies, and control connections.
const _: () = assert!(SHARED_SLOTS >= 2 * ENGINE_FLIGHT_REQUESTS_MAX + 8 + CONNECTIONS_MAX);
/// The total number of slots. Every request has one, from its header until its response is sent.
pub(crate) const SLOTS: usize = SHARED_SLOTS + CONNECTIONS_MAX;
/// The maximum data of requests in flight, beyond the one request that each connection can always have. It
/// covers the requests of a frontend, eight pieces of copies, and four requests of control connections. So
/// every connection is read, and every PING is answered, however slow the disk is.
pub(crate) const BYTES_IN_FLIGHT_MAX: u64 = 2 * ENGINE_FLIGHT_BYTES_MAX + 12 * MAX_IO_BYTES as u64;
/// The maximum memory of free slots in bytes; the rest is returned to the kernel at once.
pub(crate) const SLOT_MEMORY_MAX: u64 = 4 << 20;
/// The memory that each slot keeps after a while without requests, in bytes.
pub(crate) const SLOT_MEMORY_IDLE_BYTES: usize = (EDGE_BLOCKS + 1) * BLOCK_BYTES_USIZE;
/// Bytes that are received ahead on one connection: many small requests in one system call.
pub(crate) const RECEIVE_BYTES: usize = 64 << 10;
/// Submissions that the ring takes before it has to enter the kernel.
pub(crate) const RING_ENTRIES: u32 = 256;

/// [`BLOCK_BYTES`] as a length of memory.
pub(crate) const BLOCK_BYTES_USIZE: usize = 4096;
const _: () = assert!(BLOCK_BYTES_USIZE as u64 == BLOCK_BYTES);
/// The blocks that the largest request touches if it begins inside one.
pub(crate) const REQUEST_BLOCKS_MAX: usize = MAX_IO_BYTES as usize / BLOCK_BYTES_USIZE + 1;
/// Blocks at the start of a slot's buffer in which the two edges of a write are read.
pub(crate) const EDGE_BLOCKS: usize = 2;
/// The size of a slot's buffer: the edges, and the blocks of the request behind them.
pub(crate) const SLOT_BYTES: usize = (EDGE_BLOCKS + REQUEST_BLOCKS_MAX) * BLOCK_BYTES_USIZE;

/// The maximum number of discards and writes of zeroes that run at once; others wait.
pub(crate) const ZERO_JOBS_MAX: usize = 4;
/// The bytes of a discard or write of zeroes that are planned at a time, which bounds the length of a plan.
pub(crate) const ZERO_PLAN_BYTES: u64 = 4 << 20;
/// The bytes of zeroes that are written at a time.
pub(crate) const ZERO_WRITE_BYTES: u64 = 1 << 20;

/// The time limit for an engine to prove its identity on a new connection. It needs two round trips for that
/// and no disk. Unproven connections are limited, so silent ones must end soon.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// The interval at which the data thread looks for silent connections and unused memory. Neither is urgent,
/// and an idle replica must not wake up often.
pub(crate) const TICK: Duration = Duration::from_secs(5);
/// The number of ticks without a byte after which a connection is closed: 60 seconds. An idle engine sends
/// PINGs.
pub(crate) const SILENT_TICKS_MAX: u32 = 12;
/// The interval of reading the free space for the status. People and the scheduler need no newer figure.
pub(crate) const STATUS_PERIOD: Duration = Duration::from_secs(30);
/// The time for which engines get the last known free space before the file system is asked again. Each queue
/// of an engine asks about once a second, and a newer figure has no use.
pub(crate) const FREE_SPACE_PERIOD: Duration = Duration::from_secs(1);
/// The stack size of a thread without deep calls.
pub(crate) const SMALL_STACK_BYTES: usize = 256 << 10;

/// Pages of sums that are kept in memory, each for 2 MiB of the volume.
pub(crate) const SUM_PAGES: usize = 24;
/// Pages of sums that are kept in memory while reads are verified: 4 GiB of the volume, in 12 MiB. A read of
/// a block of other pages reads its page too.
pub(crate) const SUM_PAGES_MAX: usize = 2048;
/// The bytes that are read at a time for sums.
pub(crate) const SUM_PIECE_BYTES: u64 = 256 << 10;
/// While requests are under way, the speed of summing is divided by this.
pub(crate) const SUM_BUSY_SHARE: u64 = 8;
/// The interval of searching clean regions while others are to be summed. Sums are not urgent.
pub(crate) const SUM_LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// The pause between two searches for regions that hold data, at the start. A search takes some milliseconds.
pub(crate) const SUM_SEARCH_PAUSE: Duration = Duration::from_millis(100);
/// The pause before sums are tried again after a lack of space, or of regions that cannot be read. Also the
/// longest pause between two regions.
pub(crate) const SUM_SPACE_INTERVAL: Duration = Duration::from_secs(60);
/// The free space below which the replica stores no sums: the volume needs the space more.
pub(crate) const SUM_FREE_BYTES_MIN: u64 = 64 << 20;
/// Rotten blocks that a process logs; all are counted.
pub(crate) const REPORTED_ROTTEN_MAX: u64 = 16;
