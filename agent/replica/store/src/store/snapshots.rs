//! Snapshots: make one, revert to one, and remove one. Each happens whole or not at all.
//!
//! A removed snapshot stays in the chain until [`Store::fold`] deletes it. After each operation, plans made
//! before are void: see `operations.rs`.

use std::collections::BTreeMap;

use shorthorn_chain::{DirectoryOperation, NewSnapshot, SnapshotName};

use crate::error::StoreError;
use crate::store::Store;

type Result<T> = std::result::Result<T, StoreError>;

impl Store {
    /// Makes a snapshot of the current volume. No write may be in flight: it would land in the snapshot.
    /// `created_rfc3339` is the time, in UTC ([`now_rfc3339`](crate::now_rfc3339)).
    ///
    /// # Errors
    /// [`StoreError`]; there is then no such snapshot.
    pub fn snapshot(
        &mut self,
        name: &str,
        user_created: bool,
        labels: BTreeMap<String, String>,
        created_rfc3339: &str,
    ) -> Result<()> {
        self.medium.check_writable()?;
        self.medium.check_layers(self.image.layout().chain().len() + 1)?;
        let name = SnapshotName::new(name).map_err(|error| self.medium.chain_error(error))?;
        self.punch_unwritten()?;
        let created = created_rfc3339.to_owned();
        let new = NewSnapshot { name, user_created, labels, created };
        let operation =
            self.image.layout().plan_snapshot(new).map_err(|error| self.medium.chain_error(error))?;
        self.put_head_above(operation)
    }

    /// Discards the writes since a snapshot. No request may be in flight, and every mount of the volume must
    /// be gone.
    ///
    /// # Errors
    /// [`StoreError`]; the volume is then as it was.
    pub fn revert(&mut self, name: &str, created_rfc3339: &str) -> Result<()> {
        self.medium.check_writable()?;
        self.image.check_no_fold()?;
        let operation = self
            .image
            .layout()
            .plan_revert(name, created_rfc3339)
            .map_err(|error| self.medium.chain_error(error))?;
        self.remember_short_layers(&operation)?;
        self.forget_block_sums()?;
        self.perform(operation)?;
        self.reopen()
    }

    /// Marks a snapshot as removed: it can no longer be reverted to or exported, and
    /// [`Store::fold`] deletes it.
    ///
    /// # Errors
    /// [`StoreError`]; the snapshot is then as it was.
    pub fn remove(&mut self, name: &str) -> Result<()> {
        self.medium.check_writable()?;
        let operation =
            self.image.layout().plan_remove(name).map_err(|error| self.medium.chain_error(error))?;
        self.perform(operation)
    }

    fn put_head_above(&mut self, operation: DirectoryOperation) -> Result<()> {
        let old_head = self.head();
        let old_image = self.image.head_name().clone();
        self.perform(operation)?;
        let chain = self.image.layout().chain();
        if self.image.find(&old_image).is_none() || chain.len() < 2 {
            return Ok(()); // Recovered after a failure, and reopened.
        }
        let (image, snapshot) = (chain[0].clone(), chain[1].clone());
        let pushed = self.image.push_head(&self.medium, old_head, &image, snapshot);
        pushed.inspect_err(|_| self.medium.mark_broken())
    }
}
