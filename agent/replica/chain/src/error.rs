//! Errors of a replica directory and of operations on it.

use thiserror::Error;

use crate::limits::MAX_LAYERS;

/// The reason why a directory cannot be used, or an operation cannot be planned. Every message has the
/// problem, its place, and the remedy unless it is plain.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ChainError {
    /// A document has changed since it was written.
    #[error(
        "{name} does not match its check: it is damaged. Rebuild the replica from another one, or put the \
         file back from a copy. If the edit was intended, remove the field {field}"
    )]
    Check {
        /// Name of the document whose check is wrong.
        name: String,
        /// `ShorthornCheck`, the last field of the document.
        field: &'static str,
    },
    /// The directory has no `volume.meta`.
    #[error(
        "volume.meta is missing: this is not a replica directory, or a crash took the file; \
         restore it, or rebuild the replica from another one"
    )]
    NoVolumeMeta,
    /// A document has no bytes, as power loss leaves files that were not synced.
    #[error("{name} is empty: a crash took its content; restore it, or rebuild the replica from another one")]
    EmptyDocument {
        /// Name of the document without bytes.
        name: String,
    },
    /// A document cannot be read.
    #[error("{name} is damaged: {reason}; restore it, or rebuild the replica from another one")]
    Document {
        /// Name of the document that the parser rejects.
        name: String,
        /// The message of the parser, with line and column.
        reason: String,
    },
    /// A value in a document cannot be right.
    #[error("{name}: {field} is {value}, but {rule}")]
    Value {
        /// Name of the document that has the value.
        name: String,
        /// The key of the value in the document.
        field: &'static str,
        /// The bad value.
        value: String,
        /// The rule that the value breaks.
        rule: &'static str,
    },
    /// The volume uses something that we cannot do.
    #[error("volume.meta: {field} is {value}: {what} is not supported; the directory was left as it is")]
    Unsupported {
        /// The key of the value in volume.meta.
        field: &'static str,
        /// The bad value.
        value: String,
        /// The unsupported feature, such as "a backing image".
        what: &'static str,
    },
    /// The replica lacks data.
    #[error(
        "volume.meta says Rebuilding: this replica was being rebuilt and lacks data; \
         let the rebuild finish, or use another replica"
    )]
    Rebuilding,
    /// The layers of another replica cannot be copied.
    #[error("the layers to copy do not form a chain: {reason}; nothing was changed")]
    CopyList {
        /// The first violated rule, in words.
        reason: String,
    },
    /// A file ends in `.meta` but belongs to no image.
    #[error(
        "{name} does not belong to the chain, but Longhorn would use it as a layer: move it out of the \
         directory"
    )]
    ForeignMeta {
        /// Name of the file that ends in `.meta`.
        name: String,
    },
    /// A layer of the chain has no image.
    #[error(
        "{image} is missing, but {needed_by} needs it; restore it, or rebuild the replica from another one"
    )]
    MissingImage {
        /// Name of the image file that the chain lacks.
        image: String,
        /// The document that names the image.
        needed_by: String,
    },
    /// The image of a removed layer's only child is missing, for an unknown reason.
    #[error(
        "{image} is missing, but {needed_by} needs it; its parent {parent} is marked as removed. Either a \
         Longhorn purge stopped after it had folded {image} into {parent} and before it renamed {parent}, or \
         the file was lost. If a purge was running, rename {parent} to {image}; else rebuild the replica \
         from another one"
    )]
    AmbiguousFold {
        /// Name of the image file that the chain lacks.
        image: String,
        /// The document that names the image.
        needed_by: String,
        /// The removed parent that may hold its data.
        parent: String,
    },
    /// A layer of the chain has no document.
    #[error(
        "{meta} is missing, but {needed_by} needs it; restore it, or rebuild the replica from another one"
    )]
    MissingMeta {
        /// Name of the document that the chain lacks.
        meta: String,
        /// The document that names the image.
        needed_by: String,
    },
    /// The chain comes back to itself.
    #[error("the chain of parents has a cycle at {image}: one of the documents is wrong")]
    Cycle {
        /// The image at which the cycle closes.
        image: String,
    },
    /// The chain is too long.
    #[error("the chain has more than {MAX_LAYERS} layers; remove and fold snapshots first")]
    TooManyLayers,
    /// The head is not as large as the volume.
    #[error(
        "{image} has {size_bytes} bytes, but the volume has {volume_bytes}: the file was truncated or \
         replaced"
    )]
    HeadSize {
        /// Name of the head's image.
        image: String,
        /// The actual size in bytes.
        size_bytes: u64,
        /// The volume's size.
        volume_bytes: u64,
    },
    /// A layer is larger than the one above it; volumes never shrink.
    #[error(
        "{child} has {child_bytes} bytes, less than its parent {image} with {size_bytes}: {child} was \
         truncated"
    )]
    LayerShrinks {
        /// The larger, lower layer.
        image: String,
        /// The actual size in bytes.
        size_bytes: u64,
        /// The layer above.
        child: String,
        /// The apparent size of `child` in bytes.
        child_bytes: u64,
    },
    /// A layer is smaller than the one above it and nothing says that the volume was expanded between.
    #[error(
        "{image} has {size_bytes} bytes, less than {child} above it with {child_bytes}, and no expansion \
         explains it: the file was truncated. If Longhorn has expanded the volume and purged that snapshot \
         since, open it once with 'accept short layers'"
    )]
    ShortLayer {
        /// The smaller, lower layer.
        image: String,
        /// The actual size in bytes.
        size_bytes: u64,
        /// The layer above.
        child: String,
        /// The apparent size of `child` in bytes.
        child_bytes: u64,
    },
    /// An image's size is not a multiple of 4096.
    #[error("{image} has {size_bytes} bytes, not a multiple of 4096: the file was truncated")]
    RaggedImage {
        /// Name of the image that was truncated.
        image: String,
        /// The actual size in bytes.
        size_bytes: u64,
    },
    /// The image of a snapshot in the chain is the head itself.
    #[error(
        "{image} and the head {head} are the same file, so the snapshot would change: restore one of them"
    )]
    SnapshotIsHead {
        /// The snapshot's file.
        image: String,
        /// The head's file.
        head: String,
    },
    /// A name for a new snapshot is not allowed.
    #[error("'{name}' cannot be a snapshot's name: {rule}")]
    SnapshotName {
        /// The refused name.
        name: String,
        /// The rule that it breaks.
        rule: &'static str,
    },
    /// The chain has a snapshot of this name already.
    #[error("snapshot '{0}' exists already")]
    SnapshotExists(String),
    /// A snapshot of this name does not exist.
    #[error("no snapshot '{0}'")]
    NoSnapshot(String),
    /// The snapshot was removed; its content is no longer kept.
    #[error("snapshot '{0}' is marked as removed: its content is no longer kept")]
    SnapshotRemoved(String),
    /// Only removed snapshots are folded.
    #[error("snapshot '{0}' is not marked as removed; remove it before it is folded")]
    NotRemoved(String),
    /// Folding needs exactly one child.
    #[error("snapshot '{name}' has {children} children; it stays until all but one of them are gone")]
    SeveralChildren {
        /// Name of the snapshot that has the children.
        name: String,
        /// The number of layers that build on it.
        children: usize,
    },
    /// The fold cannot run beside writes.
    #[error(
        "snapshot '{0}' lies directly under the head, and folding it copies the head. Fold it while no \
         request is in flight, or take another snapshot first"
    )]
    ChildIsHead(String),
    /// A volume only grows.
    #[error("the volume has {size_bytes} bytes and cannot get {wanted_bytes}: a volume only grows")]
    Shrink {
        /// The size of the volume in bytes.
        size_bytes: u64,
        /// The requested size in bytes.
        wanted_bytes: u64,
    },
    /// A size that no volume can have.
    #[error("a volume cannot have {0} bytes: the size is a multiple of 4096, above 0 and below 2^63")]
    BadSize(u64),
    /// No number is free for a new head.
    #[error(
        "every head number from 000 to 999 is in use: move files that do not belong to the chain out of the \
         directory"
    )]
    NoHeadNumber,
}
