//! The steps by which something becomes durable, and why one is not taken.

use std::fmt;

use shorthorn_regions::{IntentLogError, SetKey};
use shorthorn_types::{Errno, ReplicaId};
use shorthorn_views::{Refused, ReplicaViews};
use thiserror::Error;

use crate::failure::RecordOutcome;

/// Resource busy (EBUSY).
const BUSY: Errno = Errno::new(16);
/// Out of memory (ENOMEM).
const NO_MEMORY: Errno = Errno::new(12);
/// Quota exceeded (EDQUOT).
const QUOTA: Errno = Errno::new(122);

/// A step that makes a change durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DurableStep<'a> {
    /// Stores the views, in place of those from before.
    SaveViews(&'a ReplicaViews),
    /// Creates or replaces the file of a set. A crash leaves either the new file or the former state.
    MakeSet(SetKey, &'a [u8]),
    /// Removes the file of a set, if it exists.
    RemoveSet(SetKey),
    /// Records that data that may be gone is made up for.
    RecordMadeUpFor,
    /// Records for Longhorn, which has no views, that the replica has left one and may lack data.
    RecordLeft,
    /// Records for Longhorn that the replica is a member again.
    RecordMember,
}

/// Performs steps.
pub trait Disk {
    /// The reason why a step has failed.
    type Error: StepError + From<Denied>;

    /// Performs one step, which is durable on return.
    ///
    /// # Errors
    /// The step may or may not be done.
    fn perform(&mut self, step: DurableStep<'_>) -> Result<(), Self::Error>;

    /// Records durably that data may be gone that was written here, and that the replica has failed
    /// `in_a_row` times.
    fn record_failure(&mut self, in_a_row: u32) -> RecordOutcome;
}

/// An error that ends in an errno.
pub trait StepError: fmt::Display {
    /// Returns the errno, which decides if the failure is final: see [`is_final`].
    fn errno(&self) -> Errno;
}

/// The reason why the replica refuses a request of an engine. The state has not changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Denied {
    /// The rules of views do not allow it.
    #[error(transparent)]
    Views(#[from] Refused),
    /// A set of regions cannot be changed so.
    #[error(transparent)]
    Regions(#[from] IntentLogError),
    /// A member of the volume would be thrown away.
    #[error(
        "replica {0} holds data and is a member in the views that it knows: if it has left, send it the \
         committed view first"
    )]
    IsMember(ReplicaId),
    /// Requests are in flight while the files under them are to be replaced.
    #[error("requests are in flight: wait for their answers first")]
    Busy,
}

impl Denied {
    /// Returns the errno for the engine that asked.
    #[must_use]
    pub fn errno(&self) -> Errno {
        match self {
            Denied::Views(Refused::TooManyProposed) | Denied::Regions(IntentLogError::TooManySets(_)) => {
                Errno::NO_SPACE
            }
            Denied::Views(_) => Errno::NOT_PERMITTED,
            Denied::Regions(_) => Errno::INVALID,
            Denied::IsMember(_) | Denied::Busy => BUSY,
        }
    }
}

impl StepError for Errno {
    fn errno(&self) -> Errno {
        *self
    }
}

impl From<Denied> for Errno {
    fn from(denied: Denied) -> Errno {
        denied.errno()
    }
}

/// Returns true if data cannot be trusted after a write or step has failed with `errno`. Space and memory can
/// come back.
#[must_use]
pub fn is_final(errno: Errno) -> bool {
    ![Errno::NO_SPACE, QUOTA, NO_MEMORY].contains(&errno)
}
