//! Derives the layout of a directory from its files, and finishes or reverts interrupted operations.
//!
//! Shorthorn's own operations leave an intent file ([`OperationIntent`]), so that recovery does not guess.
//! Longhorn leaves none. Its remains are repaired if only one reading is possible, and left alone if data
//! would have to be discarded. They are refused if the chain depends on a guess.

use std::collections::BTreeMap;

use crate::directory_facts::{DirectoryFacts, ImageFacts, MetaFacts};
use crate::document::{DiskMeta, VolumeMeta};
use crate::error::ChainError;
use crate::intent::{FileRef, OperationIntent};
use crate::layout::{Layout, head_of};
use crate::names::{INTENT_FILE, ImageName, VOLUME_META};
use crate::operation::expand_steps;
use crate::optional_checks::Checks;
use crate::step::{FileStep, document_steps};

/// The layout of a directory and the steps that repair it.
#[derive(Clone, Debug)]
pub struct Recovery {
    /// The layout once the steps are done. Every file that it names exists already.
    pub layout: Layout,
    /// The steps that repair the directory; empty after a clean close.
    pub steps: Vec<FileStep>,
    /// Messages about the findings and the repairs, for people.
    pub messages: Vec<String>,
}

/// Derives the layout of a directory.
///
/// # Errors
/// [`ChainError`] if it has no valid layout, or more than one.
pub fn recover(facts: DirectoryFacts, checks: &Checks) -> Result<Recovery, ChainError> {
    if let Some(name) = facts.foreign_metas.first() {
        return Err(ChainError::ForeignMeta { name: name.clone() });
    }
    let volume = VolumeMeta::parse(facts.volume_meta.as_deref().ok_or(ChainError::NoVolumeMeta)?)?;
    let head = head_of(&volume)?;
    let intent = facts.intent.as_deref().map(OperationIntent::parse).transpose()?;
    let mut work = RepairWork {
        head,
        volume,
        images: facts.images,
        metas: facts.metas,
        steps: Vec::new(),
        messages: Vec::new(),
    };
    for temp in facts.temps {
        work.steps.push(FileStep::Unlink { name: temp });
    }
    if let Some(intent) = &intent {
        work.recover(intent)?;
    }
    work.recover_stray_heads()?;
    work.recover_links_to_head();
    if intent.is_some() {
        // The intent is removed last: until then any repair could be lost again.
        work.steps.extend([FileStep::SyncDirectory, FileStep::Unlink { name: INTENT_FILE.to_owned() }]);
    }
    if !work.steps.is_empty() {
        work.steps.push(FileStep::SyncDirectory);
    }
    work.finish(checks)
}

/// The directory during its repair.
struct RepairWork {
    volume: VolumeMeta,
    head: ImageName,
    images: BTreeMap<ImageName, ImageFacts>,
    metas: BTreeMap<ImageName, MetaFacts>,
    steps: Vec<FileStep>,
    messages: Vec<String>,
}

impl RepairWork {
    fn finish(mut self, checks: &Checks) -> Result<Recovery, ChainError> {
        let mut metas = BTreeMap::new();
        for (image, meta) in &self.metas {
            metas.insert(image.clone(), DiskMeta::parse(&image.meta_name(), &meta.bytes)?);
        }
        for image in self.images.keys().filter(|image| !metas.contains_key(*image)) {
            self.messages.push(format!("{image} has no document {}; it is left alone", image.meta_name()));
        }
        for image in metas.keys().filter(|image| !self.images.contains_key(*image)) {
            self.messages
                .push(format!("{} belongs to no image {image}; it is left alone", image.meta_name()));
        }
        let layout = Layout::new(self.volume, &self.images, metas, checks)?;
        Ok(Recovery { layout, steps: self.steps, messages: self.messages })
    }

    fn recover(&mut self, intent: &OperationIntent) -> Result<(), ChainError> {
        match intent {
            OperationIntent::ReplaceHead { old_head, new_head, snapshot } => {
                let snapshot = snapshot.as_deref().and_then(ImageName::parse);
                self.recover_head_change(old_head, new_head, snapshot);
                Ok(())
            }
            OperationIntent::Expand { head, size_bytes } => self.recover_expansion(head, *size_bytes),
            OperationIntent::Fold { parent, child, grandparent } => {
                self.recover_fold(parent, child, grandparent)
            }
            OperationIntent::Delete { image } => {
                self.recover_delete(image);
                Ok(())
            }
        }
    }

    fn recover_head_change(&mut self, old_head: &FileRef, new_head: &str, snapshot: Option<ImageName>) {
        let (Some(old), Some(new)) = (ImageName::parse(&old_head.name), ImageName::parse(new_head)) else {
            return;
        };
        if self.head == new {
            self.messages.push(format!("finished the change of the head from {old} to {new}"));
            if self.is(&old, old_head.inode) || !self.images.contains_key(&old) {
                self.remove(&old);
            }
        } else if self.head == old {
            self.messages.push(format!("took back the unfinished change of the head from {old} to {new}"));
            if self.images.get(&new).is_none_or(|image| !image.holds_data) {
                self.remove(&new);
            }
            if let Some(snapshot) = snapshot
                && (self.is(&snapshot, old_head.inode) || !self.images.contains_key(&snapshot))
            {
                self.remove(&snapshot);
            }
        }
    }

    /// Completes an expansion, because its caller may already know that it has succeeded.
    fn recover_expansion(&mut self, head: &FileRef, size_bytes: u64) -> Result<(), ChainError> {
        let Ok(size) = i64::try_from(size_bytes) else { return Ok(()) };
        if self.head.as_str() != head.name || !self.is(&self.head, head.inode) || self.volume.size >= size {
            return Ok(());
        }
        self.messages.push(format!("finished the expansion to {size_bytes} bytes"));
        let (name, head_meta) = (self.head.clone(), self.head.meta_name());
        let Some(meta) = self.metas.get(&name) else {
            return Err(ChainError::MissingMeta { meta: head_meta, needed_by: VOLUME_META.to_owned() });
        };
        let mut document = DiskMeta::parse(&head_meta, &meta.bytes)?;
        let below = ImageName::parse(&document.parent).and_then(|below| self.images.get(&below));
        document.set_bytes_below(size_bytes, below.map(|image| image.size_bytes));
        let bytes = document.to_bytes();
        self.steps.extend(expand_steps(&name, size_bytes, bytes.clone()));
        self.volume.size = size;
        self.steps.extend(document_steps(VOLUME_META, self.volume.to_bytes()));
        self.metas.insert(name.clone(), MetaFacts { inode: 0, bytes });
        if let Some(image) = self.images.get_mut(&name) {
            image.size_bytes = image.size_bytes.max(size_bytes);
        }
        Ok(())
    }

    fn recover_fold(
        &mut self,
        parent: &FileRef,
        child: &FileRef,
        grandparent: &str,
    ) -> Result<(), ChainError> {
        let (Some(folded), Some(name)) = (ImageName::parse(&parent.name), ImageName::parse(&child.name))
        else {
            return Ok(());
        };
        if !self.is(&name, parent.inode) || self.images.contains_key(&folded) {
            // Not renamed yet: the copy can be made again, and does no harm until then.
            return Ok(());
        }
        self.messages.push(format!("finished folding {folded} and {name} together"));
        if let Some(meta) = self.metas.get_mut(&name) {
            let mut document = DiskMeta::parse(&name.meta_name(), &meta.bytes)?;
            if document.parent == parent.name {
                grandparent.clone_into(&mut document.parent);
                let below = ImageName::parse(grandparent).and_then(|below| self.images.get(&below));
                let size_bytes = self.images.get(&name).map_or(0, |image| image.size_bytes);
                document.set_bytes_below(size_bytes, below.map(|image| image.size_bytes));
                meta.bytes = document.to_bytes();
                self.steps.extend(document_steps(&name.meta_name(), meta.bytes.clone()));
            }
        }
        if name == self.head {
            grandparent.clone_into(&mut self.volume.parent);
            self.steps.extend(document_steps(VOLUME_META, self.volume.to_bytes()));
        }
        self.steps.extend([FileStep::SyncDirectory, FileStep::Unlink { name: name.checksum_name() }]);
        self.remove(&folded);
        Ok(())
    }

    fn recover_delete(&mut self, image: &FileRef) {
        let Some(name) = ImageName::parse(&image.name) else { return };
        if self.is(&name, image.inode) || !self.images.contains_key(&name) {
            self.messages.push(format!("finished deleting {name}"));
            self.remove(&name);
        }
    }

    /// Removes heads other than the one that `volume.meta` names. An interrupted snapshot or revert leaves
    /// them.
    fn recover_stray_heads(&mut self) -> Result<(), ChainError> {
        let strays: Vec<_> =
            self.images.keys().filter(|name| name.is_head() && **name != self.head).cloned().collect();
        for stray in strays {
            let ImageFacts { inode, holds_data, .. } = self.images[&stray];
            let twin = self.images.iter().find(|(name, image)| !name.is_head() && image.inode == inode);
            if let Some(twin) = twin.map(|(name, _)| name.clone()) {
                self.recover_old_head(&stray, &twin)?;
            } else if holds_data {
                self.messages.push(format!("{stray} is not the head and holds data; it is left alone"));
            } else {
                self.messages.push(format!("removed {stray}, an empty head that never came into use"));
                self.remove(&stray);
            }
        }
        let is_stray =
            |name: &&ImageName| name.is_head() && **name != self.head && !self.images.contains_key(*name);
        for stray in self.metas.keys().filter(is_stray).cloned().collect::<Vec<_>>() {
            self.remove(&stray);
        }
        Ok(())
    }

    /// Completes the rename of the old head `stray`, which became the snapshot `twin` and has both names
    /// still. Longhorn writes the snapshot's document last. Until then it is the head's, and says that no
    /// user took it, so that the next purge would delete it.
    fn recover_old_head(&mut self, stray: &ImageName, twin: &ImageName) -> Result<(), ChainError> {
        self.messages.push(format!("finished the snapshot {twin}, whose old name {stray} was still there"));
        if let Some(old) = self.metas.get(stray).cloned()
            && self.metas.get(twin).is_none_or(|meta| meta.inode == old.inode)
        {
            let mut document = DiskMeta::parse(&stray.meta_name(), &old.bytes)?;
            document.user_created = true;
            let bytes = document.to_bytes();
            self.steps.extend(document_steps(&twin.meta_name(), bytes.clone()));
            self.steps.push(FileStep::SyncDirectory);
            self.metas.insert(twin.clone(), MetaFacts { inode: 0, bytes });
        }
        self.remove(stray);
        Ok(())
    }

    /// Removes snapshots that are the head itself: links that an unfinished snapshot made. Applies only if no
    /// layer builds on them; else the layout is refused.
    fn recover_links_to_head(&mut self) {
        let Some(head) = self.images.get(&self.head).copied() else { return };
        let parents: Vec<String> = self
            .metas
            .iter()
            .filter_map(|(name, meta)| DiskMeta::parse(name.as_str(), &meta.bytes).ok())
            .map(|meta| meta.parent)
            .collect();
        let is_link = |name: &ImageName, image: &ImageFacts| {
            !name.is_head()
                && image.inode == head.inode
                && !parents.iter().any(|parent| parent == name.as_str())
        };
        let links =
            self.images.iter().filter(|(name, image)| is_link(name, image)).map(|(name, _)| name.clone());
        for link in links.collect::<Vec<_>>() {
            self.messages
                .push(format!("took back the unfinished snapshot {link}, a second name of the head"));
            self.remove(&link);
        }
    }

    fn is(&self, image: &ImageName, inode: u64) -> bool {
        self.images.get(image).is_some_and(|facts| facts.inode == inode)
    }

    /// Removes an image and its files. The document is removed last, because an image without one is easier
    /// to recognise than a document without an image.
    fn remove(&mut self, image: &ImageName) {
        if self.images.remove(image).is_some() {
            self.steps.push(FileStep::Unlink { name: image.to_string() });
        }
        if self.metas.remove(image).is_some() {
            self.steps.push(FileStep::Unlink { name: image.meta_name() });
        }
        if !image.is_head() {
            self.steps.push(FileStep::Unlink { name: image.checksum_name() });
        }
    }
}
