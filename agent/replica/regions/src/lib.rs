//! The sets of regions that a replica keeps beside its data, as pure rules.
//!
//! - *Intent*: where the members of the volume may differ after a crash. A region is in it, durably, before
//!   the first modification of the region is executed.
//! - *Out-of-sync*, one for each absent replica: the regions that it lacks. A region is in it, durably,
//!   before a modification of the region is executed.
//! - *Unsummed*, if sums of blocks are kept: the regions in which none of them counts. A region is in it,
//!   durably, before a modification of the region is executed. It leaves only after the sums of its content
//!   are durable. The set is for the replica alone.
//!
//! A [`WriteIntentLog`] has them in memory and knows their durable part. The shell around it asks
//! [`WriteIntentLog::mark_dirty`] before every modification. If the mark is pending, it writes the pages that
//! [`WriteIntentLog::begin_write`] returns, reports each with [`WriteIntentLog::end_write`], and asks again.
//!
//! On the disk a set is a file of pages of [`PAGE_BYTES`], each with its own check. While a page is written
//! its place on the disk holds the page from before, the new one, or neither. A page that is neither reads as
//! if all its regions were in. So a crash can only ever add regions to a set.
//!
//! A new set is complete on the disk before it is kept ([`NewSet`]). The file of an ended one is removed from
//! the disk before it is forgotten. So a file that is found has never missed a modification.
#![forbid(unsafe_code)]

mod page;
mod set;
mod set_key;
mod unsummed;
mod write_intent_log;

pub use page::{PAGE_BYTES, PageDamage, REGIONS_PER_PAGE};
pub use set_key::SetKey;
pub use unsummed::SUMMED_AT_ONCE_MAX;
pub use write_intent_log::{
    DirtyMark, GrownSets, IntentLogError, Marked, NewSet, PAGE_WRITES_MAX, PageWrite, RunsPage, Ticket,
    WriteIntentLog,
};
