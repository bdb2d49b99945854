//! The engine core: one volume as a state machine without I/O.
//!
//! Events go in ([`Event`]), outputs come out ([`Output`]). The core decides which requests are in flight,
//! and in which order overlapping ones reach the replicas. It also decides when a request may be
//! acknowledged, and which replicas are members. It has no clock, no socket and no thread: the engine process
//! and the simulator drive it.
//!
//! The core promises:
//! - A write, discard or write-zeroes is completed when every member of the current view has answered it, and
//!   so is a flush. A rebuilding replica that was sent the request has to answer too, or be dropped.
//! - Of two overlapping requests (rounded to whole blocks) of which one modifies data, the later is sent when
//!   the earlier is completed. Reads that overlap no modification never wait.
//! - A replica that fails leaves by a view change. Until the change is committed, the core acknowledges
//!   nothing that the replica has not answered, and sends nothing new. If half of the members are left, it is
//!   committed when the arbiter has granted the view; a further loss meanwhile is the end.
//! - Members without space for a modification leave if more than half of the view has done it. Else it fails,
//!   after all have been resynced in its range.
//! - A member that is connected and does not answer is dropped if the others can continue without it.
//!   Otherwise the core waits for it, up to a limit.
//! - If the members may differ at the start, regions are copied from one of them to all others. No request
//!   reads or writes a region before that.
//! - Write intent of a region is cleared only after a flush. That flush was sent when nothing was in flight
//!   there, and nothing was sent there since. Nothing that modifies the region is sent until the clearing is
//!   answered.
//! - The regions that a replica outside the view misses are counted from the moment it leaves or is tracked.
//!   The set has at least all regions that it lacks. The replica becomes a member when the regions are copied
//!   and all members have flushed. It also needs the out-of-sync sets of the others outside the view.
//! - Replicas that are being rebuilt harm only themselves: their failures, full disks among them, end only
//!   their rebuild.
//! - Copies keep to their limits, unless a request waits for one.
//! - Before the core completes a request with an error, it names the replicas that have caused it
//!   ([`Output::Failed`]).
//! - A core that refuses requests answers each with an error at once, whatever else is under way. It makes
//!   the members equal and rebuilds replicas like any other.
#![forbid(unsafe_code)]

mod absent;
mod bucket;
mod cause;
mod clearing;
mod clock;
mod closed;
mod copy;
mod dispatch;
mod engine;
mod event;
mod flight;
mod intent;
mod job;
mod marks;
mod membership;
mod no_space;
mod ranges;
mod rebuild_end;
mod replica_timeouts;
mod request;
mod resync;
mod scrub;
mod scrub_result;
mod size;
mod slot;
mod wake_flags;

pub use cause::{Blamed, Cause, FailedRequest};
pub use engine::EngineCore;
pub use event::{
    CopyLimits, CopyProgress, CoreConfig, DropCause, Event, FlightLimits, Output, Outputs, ScrubConfig,
    ZeroBlocks,
};
pub use membership::{Membership, PeerConfig, PeerIndex, PeerState};
pub use request::{Operation, Request};
pub use scrub_result::{
    BlockState, MemberSums, ReplicaSums, SUM_OF_NO_BLOCKS, ScrubResult, SourceProof, VolumeCheck,
    compare_sums, sum_to_keep,
};
pub use slot::SlotId;
