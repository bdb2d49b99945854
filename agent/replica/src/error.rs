use std::io;
use std::path::PathBuf;

use shorthorn_control::SpecError;
use shorthorn_replica_core::Denied;
use shorthorn_store::StoreError;
use shorthorn_tls::TlsError;
use shorthorn_types::limits::MAX_VOLUME_BYTES;
use shorthorn_types::{ByteRange, Errno, ReplicaId, VolumeName};
use thiserror::Error;

/// The reason why a replica does not serve, or refuses a request.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ReplicaError {
    /// The spec file cannot be used.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// Connections cannot be encrypted.
    #[error(transparent)]
    Encryption(#[from] TlsError),
    /// The directory has no replica, and the spec does not allow creating one.
    #[error(
        "{} holds no replica, and the spec does not allow creating one. If the disk is not mounted, mount \
         it. If the replica is lost, delete it: another one is then created and rebuilt", .0.display()
    )]
    Missing(PathBuf),
    /// The directory cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The directory belongs to another replica.
    #[error(
        "{} belongs to replica {replica} of volume {volume}, not to replica {expected_replica} of volume \
         {expected_volume}: the spec names the wrong directory", directory.display()
    )]
    OtherReplica {
        /// The replica's directory.
        directory: PathBuf,
        /// The volume of the directory.
        volume: VolumeName,
        /// The replica of the directory.
        replica: ReplicaId,
        /// The volume in the spec.
        expected_volume: VolumeName,
        /// The replica id in the spec.
        expected_replica: ReplicaId,
    },
    /// Another program has had the directory open since this process opened it.
    #[error(
        "{} was opened by another program, such as Longhorn, or copied since this replica last served it. \
         The data may be older or newer than that of the other replicas: rebuild it from another replica, or \
         salvage it", .0.display()
    )]
    ChangedByOthers(PathBuf),
    /// The directory has data, but its views are unknown.
    #[error(
        "{} holds data but has lost shorthorn.state, which names the engine that may write it. Restore the \
         file, rebuild the replica from another one, or salvage it. If no replica has ever served it, remove \
         shorthorn.guard: the next start then accepts the data", .0.display()
    )]
    StateLost(PathBuf),
    /// The saved state is damaged, or of a newer version.
    #[error("{}/shorthorn.state: {source}: written by a newer version, or damaged", directory.display())]
    State {
        /// The directory with `shorthorn.state`.
        directory: PathBuf,
        /// The error of the parser.
        source: serde_json::Error,
    },
    /// The state cannot be written as text.
    #[error("the state cannot be encoded: {0}")]
    Encode(serde_json::Error),
    /// The rules do not allow the request of the engine.
    #[error(transparent)]
    Denied(#[from] Denied),
    /// The size is larger than the maximum.
    #[error("a volume of {0} bytes is larger than the maximum, {MAX_VOLUME_BYTES}")]
    TooLarge(u64),
    /// The text is not the name of a layer.
    #[error("'{0}' is not the name of a layer's image")]
    NoLayer(String),
    /// A range of a layer that is not a piece of it.
    #[error(
        "{length_bytes} bytes at {offset_bytes} are not a piece of a layer: the engine has another version"
    )]
    NoPiece {
        /// The first requested byte, from the start of the layer.
        offset_bytes: u64,
        /// The requested length in bytes.
        length_bytes: u32,
    },
    /// Sums for pieces that a layer does not have.
    #[error(
        "{count} sums from piece {first_piece} on do not fit {image}: the replicas have different layers"
    )]
    Sums {
        /// Name of the layer's image.
        image: String,
        /// Index of the first piece in the request, from 0.
        first_piece: u32,
        /// The number of sums in the request.
        count: usize,
    },
    /// The record of the blocks that are lost cannot be read.
    #[error(
        "{0}: without this record the replica would serve rot as data, so it does not start. Start it again; \
         if that fails too, replace the replica, or salvage it if it is the last one"
    )]
    LostBlocksUnread(StoreError),
    /// The record of the blocks that are lost cannot be written.
    #[error("the record of lost blocks cannot be written: {0}")]
    LostBlocksUnwritten(Errno),
    /// A repair would make other rot look sound.
    #[error(
        "more blocks hold rot than can be tracked, some of them around {0}: scrub the volume, or replace \
         this replica"
    )]
    TooMuchRot(ByteRange),
    /// A repair writes pages of a set of regions, and the kernel is writing one. It ends soon.
    #[error("{0} cannot be repaired while the write-intent log is written: try again")]
    SetBeingWritten(ByteRange),
    /// A repair would restore a block that a request is modifying.
    #[error("a request is modifying {0}, which the layer has lost: try again")]
    BeingModified(ByteRange),
    /// A repair would show data or hide it, and no checksum says which is right.
    #[error(
        "{0} reads as zeroes, and no checksum says whether that is right. The scrub of the volume has to \
         compare it before the next scrub repairs the layer"
    )]
    UndecidedHole(ByteRange),
    /// A document that cannot be copied.
    #[error("the document of {0} is not text, so it cannot be copied: repair or replace it")]
    NoText(String),
    /// A socket cannot be set up.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address or path of the socket.
        address: String,
        /// The error of the system.
        source: io::Error,
    },
    /// The system refuses a resource that the process needs.
    #[error("cannot {action}: {source}")]
    System {
        /// The step of the program, such as "start a thread".
        action: &'static str,
        /// The answer of the kernel.
        source: io::Error,
    },
    /// The replica has failed, the failure is recorded on its disk, and no engine is connected any more. The
    /// next process serves again.
    #[error("{message}: the process ends and is restarted; failures in a row: {in_a_row}")]
    Failed {
        /// A description of the failure.
        message: String,
        /// The number of failures in a row.
        in_a_row: u32,
    },
    /// The data thread has ended without a command.
    #[error("the data thread has ended unexpectedly")]
    ThreadEnded,
}

impl ReplicaError {
    /// Returns the errno for the client whose request failed.
    #[must_use]
    pub fn errno(&self) -> Errno {
        match self {
            ReplicaError::Store(error) | ReplicaError::LostBlocksUnread(error) => error.errno(),
            ReplicaError::LostBlocksUnwritten(errno) => *errno,
            ReplicaError::Denied(denied) => denied.errno(),
            ReplicaError::NoLayer(_)
            | ReplicaError::NoPiece { .. }
            | ReplicaError::TooLarge(_)
            | ReplicaError::Sums { .. } => Errno::INVALID,
            ReplicaError::Listen { source, .. } | ReplicaError::System { source, .. } => Errno::of(source),
            ReplicaError::SetBeingWritten(_) | ReplicaError::BeingModified(_) => Errno::AGAIN,
            ReplicaError::UndecidedHole(_) => Errno::new(libc::EBUSY),
            ReplicaError::Missing(_) => Errno::new(libc::ENOENT),
            ReplicaError::Spec(_) | ReplicaError::OtherReplica { .. } => Errno::INVALID,
            _ => Errno::IO,
        }
    }

    /// Returns true if an engine repeats the request soon, again and again. It logs the outcome.
    #[must_use]
    pub fn passes_soon(&self) -> bool {
        matches!(self, ReplicaError::SetBeingWritten(_) | ReplicaError::BeingModified(_))
    }

    pub(crate) fn system(action: &'static str, source: impl Into<io::Error>) -> ReplicaError {
        ReplicaError::System { action, source: source.into() }
    }
}
