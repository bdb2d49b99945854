//! Errors of a directory on a real file system.

use std::io;
use std::path::{Path, PathBuf};

use shorthorn_chain::{ChainError, PlanError};
use shorthorn_types::{Errno, RangeError};
use thiserror::Error;

/// The reason why a call failed. Every message has the problem, its place, and the remedy unless it is plain.
/// [`StoreError::errno`] is the errno for a client of the block device.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The system refused a call.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The verb of the call, such as "open".
        action: &'static str,
        /// Path of the file or directory of the failed call.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The data of a layer could not be made durable. Its writes may be lost, and a repeated sync would
    /// succeed without meaning.
    #[error(
        "the data of {} could not be made durable: {source}; the replica counts as one that has lost data{}",
        path.display(), if *recorded { "" } else { ", but that could not be recorded for its next start" }
    )]
    NotDurable {
        /// Path of the layer that was to be synced.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
        /// True if the next opening knows.
        recorded: bool,
    },
    /// The directory makes no sense, or the operation does not.
    #[error("{}: {source}", directory.display())]
    Chain {
        /// The replica's directory.
        directory: PathBuf,
        /// The first problem that was found.
        source: ChainError,
    },
    /// The volume cannot serve the range.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// Another program has the directory open.
    #[error(
        "{} is in use{}; stop the program that uses it", directory.display(),
        holder.map_or_else(String::new, |pid| format!(" by process {pid}"))
    )]
    Locked {
        /// The replica's directory.
        directory: PathBuf,
        /// The process, if it is known.
        holder: Option<u32>,
    },
    /// Writes of a former process have not ended.
    #[error(
        "{} is still being written by a process that has ended: the disk is slow, or does not answer. Check \
         it and try again", .0.display()
    )]
    FormerWrites(PathBuf),
    /// The store was opened for reading only.
    #[error("{} is open for reading only", .0.display())]
    ReadOnly(PathBuf),
    /// The file system allocates more than a block at a time.
    #[error(
        "the file system of {} allocates {unit_bytes} bytes for a write of 4096, which would hide data of \
         older layers. Put replicas on a file system with blocks of 4096 bytes", directory.display()
    )]
    AllocationUnit {
        /// The replica's directory.
        directory: PathBuf,
        /// The bytes that a write of 4096 allocates.
        unit_bytes: u64,
    },
    /// The file system allocates less than a block at a time.
    #[error(
        "the file system of {} has blocks of {unit_bytes} bytes: after a loss of power a part of a block of \
         4096 could be missing. Make a file system with blocks of 4096 bytes (mkfs.ext4 -b 4096) and have \
         the replica rebuilt on it. The volume here can still be read", directory.display()
    )]
    SmallAllocationUnit {
        /// The replica's directory.
        directory: PathBuf,
        /// The size of its blocks in bytes.
        unit_bytes: u64,
    },
    /// The file system stores a block of zeroes as a hole.
    #[error(
        "the file system of {} stores blocks of zeroes as holes, which would bring back data of older \
         layers. Turn its compression off (zfs set compression=off), or put replicas on XFS or ext4. A \
         replica with snapshots that was written there may show older data: have it rebuilt from another \
         one", .0.display()
    )]
    ZeroesAsHoles(PathBuf),
    /// The directory has a replica already.
    #[error("{} holds a replica already; open it, or give another directory", .0.display())]
    Exists(PathBuf),
    /// The directory for a new replica has other things in it.
    #[error("{} is not empty ({entry}); a new replica needs a directory of its own", directory.display())]
    NotEmpty {
        /// The directory with the other files.
        directory: PathBuf,
        /// The first other file or directory that was found.
        entry: String,
    },
    /// The directory belongs to a volume with another secret.
    #[error(
        "{} belongs to a volume with another secret, maybe one that had this name before: move the directory \
         away. If it belongs to this volume, as after a restore of the controller's store from a backup, \
         remove shorthorn.fingerprint in it instead", .0.display()
    )]
    OtherSecret(PathBuf),
    /// The fingerprint of the volume's secret cannot be read.
    #[error(
        "{} is damaged: {reason}. The file identifies the volume of the directory. If the directory belongs \
         to this volume, remove the file", path.display()
    )]
    FingerprintDamaged {
        /// Path of `shorthorn.fingerprint`.
        path: PathBuf,
        /// The reason why the file cannot be read as a fingerprint.
        reason: String,
    },
    /// Our own state cannot be read.
    #[error(
        "{} is damaged: {reason}; rebuild the replica from another one, or salvage it if it is the last one",
        path.display()
    )]
    StateDamaged {
        /// Path of the file that has the state.
        path: PathBuf,
        /// The reason why the file cannot be read as a state.
        reason: String,
    },
    /// A newer version has written the record of an unfinished copy.
    #[error(
        "{} has format {format}, this program knows {known}. Run the version of shorthorn-agent that began \
         the copy, or remove the directory: the replica is then recreated from another one", path.display()
    )]
    CopyFormat {
        /// Path of `shorthorn.copy`.
        path: PathBuf,
        /// The format of the record.
        format: u32,
        /// The format of this program.
        known: u32,
    },
    /// The stop hook of a test stopped the operation.
    #[error("stopped by the test")]
    Stopped,
    /// An operation failed and its remains could not be repaired; the next open repairs them.
    #[error("{} has to be opened again: an operation failed and could not be undone", .0.display())]
    Broken(PathBuf),
    /// A fold has begun and not ended.
    #[error("a snapshot is being folded; wait for its end, or abandon it")]
    FoldRunning,
    /// The data copied by a fold no longer fits the chain.
    #[error("the chain changed while snapshot '{0}' was being folded; fold it again")]
    FoldOutdated(String),
    /// The replica has no such layer, or no copy to it is running.
    #[error("layer {0} does not exist, or is not being copied")]
    NoLayer(usize),
    /// The snapshot layer does not exist, or cannot have sums, or the given sums do not fit it.
    #[error("{0} is not a snapshot layer of the chain, or does not support this operation")]
    NoSnapshotLayer(String),
    /// A layer was not copied.
    #[error("layer {0} is incomplete: the replica does not count as rebuilt yet")]
    CopyUnfinished(String),
    /// An export would write into the replica.
    #[error("{} lies in the replica's own directory; export to another place", .0.display())]
    TargetInside(PathBuf),
}

impl StoreError {
    /// Returns the errno for a client of the block device.
    #[must_use]
    pub fn errno(&self) -> Errno {
        match self {
            // A file system whose own structures are damaged answers with the errno that stands for a block
            // that does not fit its sum.
            StoreError::Io { source, .. } | StoreError::NotDurable { source, .. } => {
                match Errno::of(source) {
                    Errno::ROTTEN => Errno::IO,
                    errno => errno,
                }
            }
            StoreError::Range(_) => Errno::INVALID,
            StoreError::ReadOnly(_) => Errno::new(nix::libc::EROFS),
            StoreError::Locked { .. } | StoreError::FormerWrites(_) | StoreError::FoldRunning => {
                Errno::new(nix::libc::EBUSY)
            }
            StoreError::NoLayer(_) | StoreError::NoSnapshotLayer(_) | StoreError::CopyUnfinished(_) => {
                Errno::INVALID
            }
            StoreError::Exists(_) | StoreError::NotEmpty { .. } => Errno::new(nix::libc::EEXIST),
            StoreError::AllocationUnit { .. }
            | StoreError::SmallAllocationUnit { .. }
            | StoreError::ZeroesAsHoles(_) => Errno::NOT_SUPPORTED,
            StoreError::Chain { source, .. } => errno_of(source),
            _ => Errno::IO,
        }
    }

    pub(crate) fn io(
        action: &'static str,
        path: impl AsRef<Path>,
        source: impl Into<io::Error>,
    ) -> StoreError {
        StoreError::Io { action, path: path.as_ref().to_owned(), source: source.into() }
    }

    /// Converts the error of a call that was to make the data of a layer durable. The holder of the store
    /// records it.
    pub(crate) fn not_durable(self) -> StoreError {
        match self {
            StoreError::Io { path, source, .. } => StoreError::NotDurable { path, source, recorded: false },
            other => other,
        }
    }

    pub(crate) fn chain(directory: &Path, source: ChainError) -> StoreError {
        StoreError::Chain { directory: directory.to_owned(), source }
    }
}

impl From<PlanError<StoreError>> for StoreError {
    fn from(error: PlanError<StoreError>) -> StoreError {
        match error {
            PlanError::Range(range) => StoreError::Range(range),
            PlanError::Source(source) => source,
        }
    }
}

fn errno_of(error: &ChainError) -> Errno {
    match error {
        ChainError::NoSnapshot(_) => Errno::new(nix::libc::ENOENT),
        ChainError::SnapshotExists(_) => Errno::new(nix::libc::EEXIST),
        ChainError::Unsupported { .. } => Errno::NOT_SUPPORTED,
        ChainError::CopyList { .. }
        | ChainError::SnapshotName { .. }
        | ChainError::SnapshotRemoved(_)
        | ChainError::NotRemoved(_)
        | ChainError::Shrink { .. }
        | ChainError::BadSize(_) => Errno::INVALID,
        ChainError::SeveralChildren { .. } | ChainError::ChildIsHead(_) => Errno::new(nix::libc::EBUSY),
        _ => Errno::IO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// XFS answers with it if its own structures are damaged.
    #[test]
    fn a_damaged_file_system_is_not_rot() {
        let error = |raw| StoreError::io("find the data of", "x", io::Error::from_raw_os_error(raw));
        assert_eq!(error(nix::libc::EBADMSG).errno(), Errno::IO);
        assert_eq!(error(nix::libc::ENOSPC).errno(), Errno::NO_SPACE);
    }
}
