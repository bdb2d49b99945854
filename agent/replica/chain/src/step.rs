//! The small steps that every change to a directory is made of.

use crate::names::{ImageName, VOLUME_META, temp_name};

/// A step of an operation. Each is atomic or repeatable, so that an operation can stop between any two of
/// them, or inside one, and be finished or undone later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileStep {
    /// Creates or truncates the file and writes `bytes`.
    Write {
        /// Name in the directory of the replica.
        name: String,
        /// The whole content of the file.
        bytes: Vec<u8>,
    },
    /// Makes the file's content durable.
    SyncFile {
        /// Name in the directory of the replica.
        name: String,
    },
    /// Records that the file, about to become `volume.meta`, is our doing and not Longhorn's.
    Vouch {
        /// Name that the file has until it is renamed.
        name: String,
    },
    /// Renames a file and replaces the file of that name, if any.
    Rename {
        /// The old name.
        from: String,
        /// The new name, which another file may have until then.
        to: String,
    },
    /// Gives a file a second name.
    Link {
        /// The first name, which the file keeps.
        from: String,
        /// The second name.
        to: String,
    },
    /// Removes the name, if it exists.
    Unlink {
        /// The name in the directory of the replica.
        name: String,
    },
    /// Makes all names durable.
    SyncDirectory,
    /// Creates a file without data; it must not exist.
    CreateSparse {
        /// Name that the new file gets.
        name: String,
        /// The apparent size; the whole file is a hole.
        size_bytes: u64,
    },
    /// Makes a file longer; the added part is a hole.
    Grow {
        /// Name in the directory of the replica.
        name: String,
        /// The size afterwards in bytes.
        size_bytes: u64,
    },
    /// Copies every block that `from` holds over the same block of `into`.
    Fold {
        /// The upper layer.
        from: ImageName,
        /// The lower layer, which nothing reads any more.
        into: ImageName,
    },
}

/// Replaces the document `name` so that a crash leaves the old or the new content, never a mixture: temporary
/// file, sync, rename. The caller appends [`FileStep::SyncDirectory`] if the new content must be durable
/// before the next step.
#[must_use]
pub fn document_steps(name: &str, bytes: Vec<u8>) -> Vec<FileStep> {
    let temp = temp_name(name);
    let mut steps =
        vec![FileStep::Write { name: temp.clone(), bytes }, FileStep::SyncFile { name: temp.clone() }];
    if name == VOLUME_META {
        steps.push(FileStep::Vouch { name: temp.clone() });
    }
    steps.push(FileStep::Rename { from: temp, to: name.to_owned() });
    steps
}
