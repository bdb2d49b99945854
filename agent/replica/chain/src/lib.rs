//! The meaning of a replica directory, without I/O.
//!
//! A replica keeps a volume as a chain of sparse files in Longhorn's version-1 format. The *head* takes
//! writes, the snapshots below it never change, and a hole in a layer means "ask the parent". This crate
//! holds everything about that which needs no I/O:
//!
//! - [`ImageName`], [`SnapshotName`], [`VolumeMeta`], [`DiskMeta`]: names and documents;
//! - [`DirectoryFacts`] and [`recover`]: derive the [`Layout`] of a directory from its files, with the
//!   [`FileStep`]s that complete or revert interrupted operations;
//! - `Layout::plan_*`: every operation on the directory as a list of small steps;
//! - [`CopyList`]: how a directory becomes a copy of another one;
//! - [`BlockMap`]: which layer holds each 4 KiB block, and the plans for reads, writes, discards and zeroes.
//!   It takes bounded memory, and is filled on demand from extents that the caller supplies.
//!
//! The store crate executes the steps and the plans. Nothing here reads a file or a clock. So tests can stop
//! an operation after any step, and simulators can run it over a disk of their own.
#![forbid(unsafe_code)]

mod block_map;
mod copy;
mod directory_facts;
mod document;
mod document_check;
mod error;
mod extents;
mod intent;
mod layout;
mod limits;
mod names;
mod operation;
mod optional_checks;
mod plan;
mod recovery;
mod step;
mod window;

pub use block_map::{BlockMap, MapUsage};
pub use copy::{CopyLayer, CopyList};
pub use directory_facts::{DirectoryFacts, ImageFacts, MetaFacts};
pub use document::{DiskMeta, VolumeMeta};
pub use document_check::{with_check, without_check};
pub use error::ChainError;
pub use extents::{ExtentSource, FileIndex};
pub use intent::{FileRef, OperationIntent};
pub use layout::{ChainLayer, Layout};
pub use limits::{MAX_LAYERS, WINDOW_BYTES, memory_limit_bytes};
pub use names::{
    CHECKSUM_SUFFIX, DirectoryEntry, INTENT_FILE, ImageName, META_SUFFIX, OWN_PREFIX, REVISION_FILE,
    SnapshotName, TEMP_SUFFIX, VOLUME_META, classify, temp_name,
};
pub use operation::{DirectoryOperation, FoldPlan, NewSnapshot, create_steps};
pub use optional_checks::Checks;
pub use plan::{BlockSource, EdgeBlock, PlanError, ReadSegment, WritePlan, ZeroStep};
pub use recovery::{Recovery, recover};
pub use shorthorn_types::{ByteRange, RangeError};
pub use step::{FileStep, document_steps};
