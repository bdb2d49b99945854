//! Every operation on a directory, as the list of steps that it consists of.
//!
//! All follow one pattern: prepare beside the files in use, make that durable, take over with one rename,
//! make that durable, clean up. A crash before the rename leaves the old state, a crash after it the new one,
//! and [`recover`](crate::recover) tidies either.

use std::collections::BTreeMap;

use crate::document::{DiskMeta, VolumeMeta};
use crate::error::ChainError;
use crate::intent::{FileRef, OperationIntent};
use crate::layout::{ChainLayer, Layout, check_size};
use crate::limits::MAX_LAYERS;
use crate::names::{INTENT_FILE, ImageName, SnapshotName, VOLUME_META};
use crate::step::{FileStep, document_steps};

/// An operation and the layout of the directory after it.
#[derive(Clone, Debug)]
pub struct DirectoryOperation {
    /// The steps to execute, in order.
    pub steps: Vec<FileStep>,
    /// The layout when all is done. Images made on the way have inode 0 in it.
    pub after: Layout,
}

/// The way in which a removed snapshot is deleted.
#[derive(Clone, Debug)]
pub enum FoldPlan {
    /// No layer builds on the snapshot: it is deleted.
    Delete(DirectoryOperation),
    /// Exactly one layer builds on the snapshot: that layer is folded into it, and it takes that layer's
    /// name.
    Fold {
        /// The layer above, whose data is copied down.
        child: ImageName,
        /// The removed snapshot, which receives the data.
        parent: ImageName,
        /// Copies the data. Repeatable, and invisible to all readers.
        copy: Vec<FileStep>,
        /// Takes over, after the copy.
        finish: DirectoryOperation,
    },
}

/// A snapshot to take.
#[derive(Clone, Debug)]
pub struct NewSnapshot {
    /// Name for the layer that is the head now.
    pub name: SnapshotName,
    /// True if a user wants it, rather than the system.
    pub user_created: bool,
    /// Stored in the document of the image.
    pub labels: BTreeMap<String, String>,
    /// The time of creation, RFC 3339 in UTC.
    pub created: String,
}

/// Returns the steps that make an empty volume, and its layout.
///
/// # Errors
/// [`ChainError::BadSize`].
pub fn create_steps(size_bytes: u64, created: &str) -> Result<DirectoryOperation, ChainError> {
    let size = check_size(size_bytes)?;
    let head = ImageName::head(0);
    let meta = DiskMeta { name: head.to_string(), created: created.to_owned(), ..DiskMeta::default() };
    let volume = VolumeMeta { size, head: head.to_string(), sector_size: 512, ..VolumeMeta::default() };
    let mut steps = create_image(&head, size_bytes);
    steps.extend(document_steps(&head.meta_name(), meta.to_bytes()));
    steps.push(FileStep::SyncDirectory);
    steps.extend(document_steps(VOLUME_META, volume.to_bytes()));
    steps.push(FileStep::SyncDirectory);
    let disks = BTreeMap::from([(head.clone(), ChainLayer { meta, size_bytes, inode: 0 })]);
    Ok(DirectoryOperation { steps, after: Layout { volume, disks, chain: vec![head], size_bytes } })
}

impl Layout {
    /// Rewrites `volume.meta`, durably.
    #[must_use]
    pub fn volume_steps(&self) -> Vec<FileStep> {
        let mut steps = document_steps(VOLUME_META, self.volume.to_bytes());
        steps.push(FileStep::SyncDirectory);
        steps
    }

    /// Makes a snapshot of the current head.
    ///
    /// # Errors
    /// The name is taken, or the chain would be too long.
    pub fn plan_snapshot(&self, snapshot: NewSnapshot) -> Result<DirectoryOperation, ChainError> {
        self.put_head_above(snapshot)
    }

    /// Plans to enlarge the volume while it is written: the head grows in place, and the added part is a
    /// hole. The layers below stay as they are; past their ends they are holes too. Longhorn makes a snapshot
    /// for it. Replicas of a volume in use would have to make that at the same moment.
    ///
    /// # Errors
    /// The size is smaller, or not valid for a volume.
    pub fn plan_expand(&self, size_bytes: u64) -> Result<DirectoryOperation, ChainError> {
        let size = check_size(size_bytes)?;
        if size_bytes <= self.size_bytes {
            return Err(ChainError::Shrink { size_bytes: self.size_bytes, wanted_bytes: size_bytes });
        }
        let head = self.head().clone();
        let below_bytes =
            self.chain.get(1).and_then(|below| self.disks.get(below)).map(|disk| disk.size_bytes);
        let mut after = self.clone();
        (after.volume.size, after.size_bytes) = (size, size_bytes);
        let disk = after.disks.get_mut(&head).ok_or_else(|| missing(&head))?;
        disk.size_bytes = size_bytes;
        disk.meta.set_bytes_below(size_bytes, below_bytes);
        let head_ref = FileRef { name: head.to_string(), inode: disk.inode };
        let mut steps = record_intent(&OperationIntent::Expand { head: head_ref, size_bytes });
        steps.extend(expand_steps(&head, size_bytes, disk.meta.to_bytes()));
        steps.extend(after.volume_steps());
        steps.extend(remove_intent());
        Ok(DirectoryOperation { steps, after })
    }

    fn put_head_above(&self, new: NewSnapshot) -> Result<DirectoryOperation, ChainError> {
        let size_bytes = self.size_bytes;
        let snapshot = ImageName::snapshot(&new.name);
        if self.disks.contains_key(&snapshot) {
            return Err(ChainError::SnapshotExists(new.name.as_str().to_owned()));
        }
        if self.chain.len() >= MAX_LAYERS {
            return Err(ChainError::TooManyLayers);
        }
        let old = self.head().clone();
        let head = self.free_head()?;
        let mut after = self.clone();
        let mut disk = after.disks.remove(&old).ok_or_else(|| missing(&old))?;
        disk.meta.user_created = new.user_created;
        disk.meta.created.clone_from(&new.created);
        let below_bytes = disk.meta.below_bytes();
        disk.meta.labels = Some(new.labels);
        disk.meta.set_bytes_below(size_bytes, below_bytes);
        snapshot.as_str().clone_into(&mut disk.meta.name);

        let intent = OperationIntent::ReplaceHead {
            old_head: FileRef { name: old.to_string(), inode: disk.inode },
            new_head: head.to_string(),
            snapshot: Some(snapshot.to_string()),
        };
        let mut steps = vec![FileStep::SyncFile { name: old.to_string() }];
        steps.extend(record_intent(&intent));
        let new_meta = after.add_head(&head, snapshot.as_str(), &new.created, size_bytes)?;
        steps.extend(create_image(&head, size_bytes));
        steps.extend(document_steps(&head.meta_name(), new_meta));
        // An integrity record of an earlier snapshot of this name would not fit.
        steps.push(FileStep::Unlink { name: snapshot.checksum_name() });
        steps.push(FileStep::Link { from: old.to_string(), to: snapshot.to_string() });
        steps.extend(document_steps(&snapshot.meta_name(), disk.meta.to_bytes()));
        steps.push(FileStep::SyncDirectory);

        after.chain[0] = snapshot.clone();
        after.chain.insert(0, head);
        after.disks.insert(snapshot, disk);
        steps.extend(after.volume_steps());
        steps.extend(unlink_image(&old));
        steps.extend(remove_intent());
        Ok(DirectoryOperation { steps, after })
    }

    /// Plans to drop the head and continue from a snapshot.
    ///
    /// # Errors
    /// The snapshot does not exist, or is removed, or its chain is broken.
    pub fn plan_revert(&self, name: &str, created: &str) -> Result<DirectoryOperation, ChainError> {
        // Its layers have been checked when the directory was opened, or were made since.
        let accept = crate::optional_checks::Checks { accept_short_layers: true, ..Default::default() };
        let mut chain = self.chain_of_snapshot(name, &accept)?;
        let (target, old, head) = (chain[0].clone(), self.head().clone(), self.free_head()?);
        if chain.len() >= MAX_LAYERS {
            return Err(ChainError::TooManyLayers);
        }
        let mut after = self.clone();
        let disk = after.disks.remove(&old).ok_or_else(|| missing(&old))?;
        let intent = OperationIntent::ReplaceHead {
            old_head: FileRef { name: old.to_string(), inode: disk.inode },
            new_head: head.to_string(),
            snapshot: None,
        };
        let mut steps = record_intent(&intent);
        let new_meta = after.add_head(&head, target.as_str(), created, self.size_bytes)?;
        steps.extend(create_image(&head, self.size_bytes));
        steps.extend(document_steps(&head.meta_name(), new_meta));
        steps.push(FileStep::SyncDirectory);
        chain.insert(0, head);
        after.chain = chain;
        steps.extend(after.volume_steps());
        steps.extend(unlink_image(&old));
        steps.extend(remove_intent());
        Ok(DirectoryOperation { steps, after })
    }

    /// Plans to mark a snapshot as removed. [`Layout::plan_fold`] deletes its data.
    ///
    /// # Errors
    /// [`ChainError::NoSnapshot`].
    pub fn plan_remove(&self, name: &str) -> Result<DirectoryOperation, ChainError> {
        let image = self.snapshot(name)?.0.clone();
        let mut after = self.clone();
        let disk = after.disks.get_mut(&image).ok_or_else(|| missing(&image))?;
        disk.meta.removed = true;
        let mut steps = document_steps(&image.meta_name(), disk.meta.to_bytes());
        steps.push(FileStep::SyncDirectory);
        Ok(DirectoryOperation { steps, after })
    }

    /// Plans to mark these snapshots as ones that may lack data since a salvage. A copy of another snapshot
    /// of the same name does not pass for one of these.
    ///
    /// # Errors
    /// An image that is not a layer.
    pub fn plan_salvaged(
        &self,
        images: &[ImageName],
        salvage: &str,
    ) -> Result<DirectoryOperation, ChainError> {
        let mut after = self.clone();
        let mut steps = Vec::new();
        for image in images {
            let disk = after.disks.get_mut(image).ok_or_else(|| missing(image))?;
            disk.meta.set_salvaged(salvage);
            steps.extend(document_steps(&image.meta_name(), disk.meta.to_bytes()));
        }
        steps.push(FileStep::SyncDirectory);
        Ok(DirectoryOperation { steps, after })
    }

    /// Plans the deletion of a removed snapshot, by a fold if a layer builds on it.
    ///
    /// # Errors
    /// It is not marked as removed, or several layers build on it.
    pub fn plan_fold(&self, name: &str) -> Result<FoldPlan, ChainError> {
        let (parent, disk) = self.snapshot(name)?;
        if !disk.meta.removed {
            return Err(ChainError::NotRemoved(name.to_owned()));
        }
        let children: Vec<_> = self.children(parent).cloned().collect();
        match children.as_slice() {
            [] => Ok(FoldPlan::Delete(self.delete(parent, disk))),
            [child] => self.fold(parent, disk, child),
            several => Err(ChainError::SeveralChildren { name: name.to_owned(), children: several.len() }),
        }
    }

    fn delete(&self, image: &ImageName, disk: &ChainLayer) -> DirectoryOperation {
        let intent =
            OperationIntent::Delete { image: FileRef { name: image.to_string(), inode: disk.inode } };
        let mut steps = record_intent(&intent);
        steps.extend(unlink_image(image));
        steps.push(FileStep::Unlink { name: image.checksum_name() });
        steps.extend(remove_intent());
        let mut after = self.clone();
        after.disks.remove(image);
        DirectoryOperation { steps, after }
    }

    fn fold(&self, parent: &ImageName, disk: &ChainLayer, child: &ImageName) -> Result<FoldPlan, ChainError> {
        let upper = self.disks.get(child).ok_or_else(|| missing(child))?;
        let size_bytes = upper.size_bytes.max(disk.size_bytes);
        let copy = vec![
            FileStep::Grow { name: parent.to_string(), size_bytes },
            FileStep::Fold { from: child.clone(), into: parent.clone() },
            FileStep::SyncFile { name: parent.to_string() },
        ];
        let intent = OperationIntent::Fold {
            parent: FileRef { name: parent.to_string(), inode: disk.inode },
            child: FileRef { name: child.to_string(), inode: upper.inode },
            grandparent: disk.meta.parent.clone(),
        };
        let mut after = self.clone();
        let mut folded = upper.clone();
        let grandparent = ImageName::parse(&disk.meta.parent);
        let below_bytes = grandparent.and_then(|below| self.disks.get(&below)).map(|disk| disk.size_bytes);
        folded.meta.parent.clone_from(&disk.meta.parent);
        folded.meta.set_bytes_below(size_bytes, below_bytes);
        folded.size_bytes = size_bytes;
        folded.inode = disk.inode;
        let mut steps = record_intent(&intent);
        steps.push(FileStep::Rename { from: parent.to_string(), to: child.to_string() });
        steps.push(FileStep::SyncDirectory);
        steps.extend(document_steps(&child.meta_name(), folded.meta.to_bytes()));
        if child == self.head() {
            after.volume.parent.clone_from(&disk.meta.parent);
            steps.extend(document_steps(VOLUME_META, after.volume.to_bytes()));
        }
        steps.push(FileStep::SyncDirectory);
        steps.push(FileStep::Unlink { name: parent.meta_name() });
        steps.push(FileStep::Unlink { name: parent.checksum_name() });
        steps.push(FileStep::Unlink { name: child.checksum_name() });
        steps.extend(remove_intent());
        after.disks.insert(child.clone(), folded);
        after.disks.remove(parent);
        after.chain.retain(|image| image != parent);
        Ok(FoldPlan::Fold {
            child: child.clone(),
            parent: parent.clone(),
            copy,
            finish: DirectoryOperation { steps, after },
        })
    }

    fn free_head(&self) -> Result<ImageName, ChainError> {
        self.head().next_head(|name| self.disks.contains_key(name)).ok_or(ChainError::NoHeadNumber)
    }

    /// Puts a new head into the documents; returns its own.
    fn add_head(
        &mut self,
        head: &ImageName,
        parent: &str,
        created: &str,
        size_bytes: u64,
    ) -> Result<Vec<u8>, ChainError> {
        let mut meta = DiskMeta {
            name: head.to_string(),
            parent: parent.to_owned(),
            created: created.to_owned(),
            ..DiskMeta::default()
        };
        let below = ImageName::parse(parent).and_then(|below| self.disks.get(&below));
        meta.set_bytes_below(size_bytes, below.map(|disk| disk.size_bytes));
        let bytes = meta.to_bytes();
        self.disks.insert(head.clone(), ChainLayer { meta, size_bytes, inode: 0 });
        self.volume.head = head.to_string();
        parent.clone_into(&mut self.volume.parent);
        self.volume.size = check_size(size_bytes)?;
        self.size_bytes = size_bytes;
        Ok(bytes)
    }
}

pub(crate) fn create_image(image: &ImageName, size_bytes: u64) -> Vec<FileStep> {
    let name = image.to_string();
    vec![FileStep::CreateSparse { name: name.clone(), size_bytes }, FileStep::SyncFile { name }]
}

/// Makes the head longer and its document say so. Repeatable.
pub(crate) fn expand_steps(head: &ImageName, size_bytes: u64, meta: Vec<u8>) -> Vec<FileStep> {
    let name = head.to_string();
    let mut steps = vec![FileStep::Grow { name: name.clone(), size_bytes }, FileStep::SyncFile { name }];
    steps.extend(document_steps(&head.meta_name(), meta));
    steps.push(FileStep::SyncDirectory);
    steps
}

fn unlink_image(image: &ImageName) -> [FileStep; 2] {
    [FileStep::Unlink { name: image.to_string() }, FileStep::Unlink { name: image.meta_name() }]
}

fn record_intent(intent: &OperationIntent) -> Vec<FileStep> {
    let mut steps = document_steps(INTENT_FILE, intent.to_bytes());
    steps.push(FileStep::SyncDirectory);
    steps
}

/// Removes the intent file, after its repair is durable.
fn remove_intent() -> [FileStep; 3] {
    [FileStep::SyncDirectory, FileStep::Unlink { name: INTENT_FILE.to_owned() }, FileStep::SyncDirectory]
}

fn missing(image: &ImageName) -> ChainError {
    ChainError::MissingImage { image: image.to_string(), needed_by: "the operation".to_owned() }
}
