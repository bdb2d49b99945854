//! The intent that is stored while an operation runs, so that a crash leaves a defined state.
//!
//! Each operation has one step that makes it happen (a rename). The intent has the files from before. From
//! these and the current files, recovery derives on which side of the step the crash was. Then it reverts the
//! steps before it, or does the steps after it. Files are named with their inodes, so that an outdated intent
//! does no harm.

use serde::{Deserialize, Serialize};

use crate::document::to_bytes;
use crate::error::ChainError;
use crate::names::INTENT_FILE;

/// A file and which one it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRef {
    /// Name in the directory of the replica.
    pub name: String,
    /// Inode of the file when the operation began.
    pub inode: u64,
}

/// The operation in progress.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "operation", rename_all = "kebab-case")]
pub enum OperationIntent {
    /// Another head takes over, when `volume.meta` names it: snapshot and revert.
    ReplaceHead {
        /// The head until then.
        old_head: FileRef,
        /// The head from then on.
        new_head: String,
        /// The snapshot that the old head becomes; a revert throws it away.
        snapshot: Option<String>,
    },
    /// The volume becomes larger, and its head with it. Unlike the others it is never reverted: once this
    /// intent exists, the next opening of the directory completes the expansion.
    Expand {
        /// The head that grows.
        head: FileRef,
        /// The size in bytes that volume and head get.
        size_bytes: u64,
    },
    /// A layer was folded into its parent, and takes the place of the layer when it gets its name.
    Fold {
        /// The parent, which holds the data of both.
        parent: FileRef,
        /// The layer whose name it gets.
        child: FileRef,
        /// The parent's parent, empty if it has none.
        grandparent: String,
    },
    /// A snapshot that no layer builds on is removed.
    Delete {
        /// The image of the layer.
        image: FileRef,
    },
}

impl OperationIntent {
    /// Reads the intent file.
    ///
    /// # Errors
    /// [`ChainError::Document`].
    pub fn parse(bytes: &[u8]) -> Result<OperationIntent, ChainError> {
        serde_json::from_slice(bytes)
            .map_err(|error| ChainError::Document { name: INTENT_FILE.to_owned(), reason: error.to_string() })
    }

    /// Returns the content of the intent file.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        to_bytes(self)
    }
}
