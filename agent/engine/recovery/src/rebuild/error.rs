//! The reasons why an attempt fails.

use shorthorn_types::{ByteRange, ReplicaId};

use super::Source;
use crate::replica_link::LinkError;

/// The reason why an attempt to rebuild the replica failed.
#[derive(Debug)]
pub enum RebuildError<E> {
    /// The replica was given up, or the process ends.
    Ended,
    /// Another event has to happen first. The rebuild task tries again soon.
    NotYet(&'static str),
    /// A request has failed.
    Failed {
        /// The step of the rebuild, such as "ending a copy".
        doing: &'static str,
        /// The error of the replica.
        error: E,
    },
    /// A request to the member that is read to make a copy has failed.
    SourceFailed {
        /// The member that the copy is read from.
        source: ReplicaId,
        /// The step of the rebuild, such as "ending a copy".
        doing: &'static str,
        /// The error of the member.
        error: E,
    },
    /// A member cannot read a block of a snapshot, and no other member has it sound. Another attempt may read
    /// it.
    Unread {
        /// The member that cannot read the block.
        member: ReplicaId,
        /// The block, in the snapshot.
        range: ByteRange,
        /// The error of the member.
        error: E,
    },
}

impl<E> RebuildError<E> {
    /// Makes a function for `map_err` that reports a failed request with this purpose.
    pub fn while_doing(doing: &'static str) -> impl FnOnce(E) -> RebuildError<E> {
        move |error| RebuildError::Failed { doing, error }
    }

    /// Makes a function for `map_err` that reports a failed request with this purpose to the `source` of the
    /// copy.
    pub fn while_reading(source: Source, doing: &'static str) -> impl FnOnce(E) -> RebuildError<E> {
        move |error| RebuildError::SourceFailed { source: source.address.replica, doing, error }
    }
}

pub(super) fn describe<E: LinkError>(error: &RebuildError<E>) -> String {
    match error {
        RebuildError::Ended => "the rebuild was given up".to_owned(),
        RebuildError::NotYet(why) => (*why).to_owned(),
        RebuildError::Failed { doing, error } => format!("{doing}: {error}"),
        RebuildError::SourceFailed { source, doing, error } => format!("{source}: {doing}: {error}"),
        RebuildError::Unread { member, range, error } => format!("{member} cannot read {range}: {error}"),
    }
}
