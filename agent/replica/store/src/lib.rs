//! A replica: a directory of sparse files in Longhorn's version-1 format.
//!
//! [`Store`] opens a directory, holds it alone, and answers three kinds of calls:
//!
//! - *plans* for the data path ([`Store::plan_read`], [`Store::plan_write`], [`Store::plan_discard`],
//!   [`Store::plan_write_zeroes`]): which bytes of which file. The caller does the I/O on
//!   [`Store::fd`] and reports with [`Store::written`], [`Store::punched`] or [`Store::write_failed`];
//! - the same done at once ([`Store::read_at`], [`Store::write_at`], …), for tools and rare paths;
//! - *operations* on the directory ([`Store::snapshot`], [`Store::revert`], …), each of which happens
//!   whole or not at all, whenever the process or the machine stops.
//!
//! Beside the volume, a store keeps the data that a replica must not forget. These are its state
//! ([`Store::save_state`]), sets of regions ([`Store::region_files`]), the progress as a copy of another
//! replica ([`Store::begin_copy`]), and sums of its snapshots ([`SnapshotLayers::save_sums`]).
//!
//! [`inspect()`] and [`export()`] look at a directory without changing anything in it.
//!
//! The rules are in `shorthorn-chain`, which does no I/O; this crate executes them.
#![deny(unsafe_code)]

mod allocated;
mod binding;
mod block_sums;
mod boot;
mod buffer;
mod chain;
mod copy_record;
mod directory;
mod directory_lock;
mod directory_scan;
mod epoch_record;
mod error;
mod export;
mod fiemap;
mod files;
mod former_writes;
#[cfg(shorthorn_fuzzing)]
pub mod fuzzing;
mod host;
mod image;
mod info;
mod inspect;
mod lock;
mod lost_blocks;
mod medium;
mod ongoing_copy;
mod opening;
mod options;
mod regions;
mod repair;
mod revision;
mod state;
mod step_executor;
mod store;
mod sums;
mod sums_files;
mod table;
mod timestamp;
mod unwritten;

pub use allocated::AllocatedRuns;
pub use binding::{check_binding, rebind};
pub use block_sums::{
    BLOCKS_PER_SUM_PAGE, BlockSumsFile, SUM_PAGE_BYTES, SUM_PAGE_SPAN_BYTES, SumPage, block_sum, sum_of_data,
    sum_of_zeroes,
};
pub use boot::LossRecord;
pub use buffer::{AlignedBuffer, MEMORY_ALIGNMENT};
pub use chain::Chain;
pub use directory_lock::{DirectoryLock, lock_directory};
pub use error::StoreError;
pub use export::{ExportTarget, ExportedVolume, WriteDebug, export};
pub use info::{LayerInfo, Provenance, SnapshotInfo, StoreInfo};
pub use inspect::{
    DirectoryInspection, InspectedLayer, InspectedVolume, OwnState, Problem, SavedStatus, Severity, inspect,
};
pub use lost_blocks::{FoundLostBlocks, LOST_BLOCKS_MAX, LostBlock, LostBlocks};
pub use options::{CreateOptions, Fault, FaultHook, OpenOptions};
pub use regions::{RegionFile, RegionFiles};
pub use shorthorn_chain::{
    BlockSource, ChainError, CopyLayer, EdgeBlock, FileIndex, ImageName, MapUsage, ReadSegment, WINDOW_BYTES,
    WritePlan, ZeroStep, memory_limit_bytes, with_check, without_check,
};
pub use shorthorn_types::{ByteRange, Errno, RangeError};
pub use state::{SavedState, StateWriter};
pub use store::{FoldJob, FoldedJob, Store};
pub use sums::{FoundSums, LayerSums, SnapshotLayers};
pub use timestamp::now_rfc3339;
