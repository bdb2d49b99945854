//! Decides whether unflushed writes may be lost, because the host was restarted or the disk has failed.
//!
//! `shorthorn.boot` has the boot of the kernel in which the directory was last open. A directory that was not
//! closed cleanly and was open in another boot may have lost the data in the page cache then. That holds
//! until the engine reports that a rebuild has made up for it.
//!
//! A file that is damaged may have said that data is gone: then it counts as if it had.
//!
//! The kernel discards data that it could not write, and reports that once. So a failure is recorded here
//! when it is reported: the next process, in the same boot, would not notice. The record includes the number
//! of failures in a row, by which the caller decides how soon the next process is started. A file system that
//! has failed accepts no record. The record is then made outside of the directory, and has to last only as
//! long as the boot of the host.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use nix::libc::ENOMEM;
use serde::{Deserialize, Serialize};
use shorthorn_chain::{with_check, without_check};

use crate::directory::{Directory, is_full};
use crate::error::StoreError;

const BOOT_FILE: &str = "shorthorn.boot";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The content of `shorthorn.boot`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Boot {
    boot_id: String,
    #[serde(rename = "lost_cache")]
    loss: CacheLoss,
    /// The number of failures in a row. Programs of earlier versions do not write it.
    #[serde(default)]
    failures: u32,
    /// See [`OpenOptions::loss_record`](crate::OpenOptions::loss_record).
    #[serde(skip)]
    elsewhere: Option<PathBuf>,
}

/// The possible loss of data that was not durable. The file has only whether there may be one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "bool", into = "bool")]
enum CacheLoss {
    #[default]
    None,
    /// Data may have been lost before the directory was opened.
    Earlier,
    /// Data may have been lost since then: nothing in this process makes up for it.
    Now,
}

impl From<bool> for CacheLoss {
    fn from(lost: bool) -> CacheLoss {
        if lost { CacheLoss::Earlier } else { CacheLoss::None }
    }
}

impl From<CacheLoss> for bool {
    fn from(loss: CacheLoss) -> bool {
        loss != CacheLoss::None
    }
}

/// The state of the record that data may be lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossRecord {
    /// The record is written, with the count of failures.
    Written,
    /// The record could not be written. The file is removed instead, which means the same but loses the
    /// count.
    FileRemoved,
    /// The directory cannot be changed. The record is in
    /// [`OpenOptions::loss_record`](crate::OpenOptions::loss_record).
    Elsewhere,
}

/// The content of the file.
enum BootFile {
    /// The file does not exist.
    Nothing,
    Boot(Boot),
    Damaged,
}

impl Boot {
    /// Returns the state of a directory that is being opened, from `was_dirty` and the file, with any problem
    /// of the file.
    pub fn judge(
        directory: &Directory,
        was_dirty: bool,
        elsewhere: Option<PathBuf>,
    ) -> Result<(Boot, Option<String>), StoreError> {
        let (mut boot, damage) = Boot::judge_file(directory, was_dirty)?;
        if elsewhere.as_deref().is_some_and(may_exist) {
            boot.loss = CacheLoss::Earlier;
        }
        boot.elsewhere = elsewhere;
        Ok((boot, damage))
    }

    fn judge_file(directory: &Directory, was_dirty: bool) -> Result<(Boot, Option<String>), StoreError> {
        // Without the kernel's word every boot is another one.
        let boot_id = std::fs::read_to_string(BOOT_ID).unwrap_or_default().trim().to_owned();
        let Some(bytes) = directory.read(BOOT_FILE)? else {
            return Ok((judge(&BootFile::Nothing, boot_id, was_dirty), None));
        };
        let Some(found) = parse(&bytes) else {
            let record = format!("{BOOT_FILE} is damaged: the replica counts as one that may have lost data");
            return Ok((judge(&BootFile::Damaged, boot_id, was_dirty), Some(record)));
        };
        Ok((judge(&BootFile::Boot(found), boot_id, was_dirty), None))
    }

    /// Writes it down. A record elsewhere is not needed any more then.
    ///
    /// # Errors
    /// An I/O error; a record elsewhere stays.
    pub fn take_over(&self, directory: &Directory) -> Result<(), StoreError> {
        self.save(directory)?;
        if let Some(record) = &self.elsewhere {
            // If it stays, the next opening counts as one after a loss: that does no harm.
            drop(fs::remove_file(record));
        }
        Ok(())
    }

    /// Writes it down.
    pub fn save(&self, directory: &Directory) -> Result<(), StoreError> {
        let mut bytes = serde_json::to_vec(self)
            .map_err(|error| StoreError::io("write", directory.path_of(BOOT_FILE), error))?;
        bytes.push(b'\n');
        directory.replace(BOOT_FILE, &with_check(bytes))
    }

    /// Returns true if data may be gone.
    pub fn lost_cache(&self) -> bool {
        self.loss.into()
    }

    /// Returns the number of failures in a row.
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// Returns true if it was lost since the directory was opened.
    pub fn is_lost_now(&self) -> bool {
        self.loss == CacheLoss::Now
    }

    /// Returns the same state, with only the losses since the directory was opened.
    pub fn made_up_for(&self) -> Boot {
        let loss = if self.is_lost_now() { CacheLoss::Now } else { CacheLoss::None };
        Boot { loss, ..self.clone() }
    }

    /// Records that data may be lost from now on, whatever the result of the record, with the number of
    /// failures in a row. If the record cannot be written, the file is removed: an open directory without it
    /// counts as one that has lost data too. If that is not possible either, the record is made elsewhere.
    ///
    /// # Errors
    /// Nothing of that is durable: the error of that record.
    pub fn lose(&mut self, directory: &Directory, failures: u32) -> Result<LossRecord, StoreError> {
        (self.loss, self.failures) = (CacheLoss::Now, failures);
        match self.save(directory) {
            Ok(()) => Ok(LossRecord::Written),
            Err(error) => {
                let removed = directory.unlink(BOOT_FILE).and_then(|()| directory.sync());
                if removed.is_ok() {
                    return Ok(LossRecord::FileRemoved);
                }
                let recorded = self.elsewhere.as_deref().is_some_and(|record| write_record(record).is_ok());
                if recorded { Ok(LossRecord::Elsewhere) } else { Err(error) }
            }
        }
    }

    /// Records the loss that the result of a write of an opening means. A failure is recorded as a loss,
    /// because the kernel may have reported one by it: the next opening would not notice. A lack of space or
    /// memory is not a loss.
    pub fn recording(
        &mut self,
        directory: &Directory,
        mut result: Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let tells = match &result {
            Err(error @ StoreError::Io { .. }) => !is_full(error.errno()) && error.errno().raw() != ENOMEM,
            Err(StoreError::NotDurable { recorded, .. }) => !recorded,
            _ => false,
        };
        let is_recorded = tells && self.lose(directory, self.failures).is_ok();
        if let Err(StoreError::NotDurable { recorded, .. }) = &mut result {
            *recorded |= is_recorded;
        }
        result
    }
}

/// Returns true unless the file surely does not exist.
fn may_exist(file: &Path) -> bool {
    !fs::symlink_metadata(file).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Makes the file. It may lie on the disk that has failed: it counts only if the disk says that it is
/// durable.
fn write_record(file: &Path) -> io::Result<()> {
    File::create(file)?.sync_all()?;
    File::open(file.parent().unwrap_or_else(|| Path::new("/")))?.sync_all()
}

fn parse(bytes: &[u8]) -> Option<Boot> {
    let document = without_check(BOOT_FILE, bytes).ok()?;
    serde_json::from_slice(&document).ok()
}

fn judge(found: &BootFile, boot_id: String, was_dirty: bool) -> Boot {
    let (same_boot, lost_before, failures) = match found {
        BootFile::Nothing => (false, false, 0),
        BootFile::Boot(found) => {
            (found.boot_id == boot_id && !boot_id.is_empty(), found.lost_cache(), found.failures)
        }
        BootFile::Damaged => (false, true, 0),
    };
    let loss = CacheLoss::from(lost_before || (was_dirty && !same_boot));
    Boot { boot_id, loss, failures, ..Boot::default() }
}

#[cfg(shorthorn_fuzzing)]
pub(crate) mod fuzzing {
    use super::*;

    /// A record that is accepted is written and read again as the same.
    pub fn check(bytes: &[u8]) {
        let Some(boot) = parse(bytes) else { return };
        let written = serde_json::to_vec(&boot).expect("a record that was read");
        assert_eq!(parse(&with_check([&written[..], b"\n"].concat())), Some(boot));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_a_dirty_directory_of_another_boot_has_lost_something() {
        let boot = |boot_id: &str, lost: bool| Boot {
            boot_id: boot_id.to_owned(),
            loss: lost.into(),
            ..Boot::default()
        };
        let lost = |found: Option<Boot>, now: &str, dirty| {
            judge(&found.map_or(BootFile::Nothing, BootFile::Boot), now.to_owned(), dirty).lost_cache()
        };
        assert!(!lost(Some(boot("a", false)), "a", true), "a process that died takes no page cache with it");
        assert!(!lost(Some(boot("a", false)), "b", false));
        assert!(lost(Some(boot("a", false)), "b", true));
        assert!(lost(None, "b", true), "the boot is unknown");
        assert!(!lost(None, "b", false));
        assert!(lost(Some(boot("", false)), "", true));
        assert!(lost(Some(boot("b", true)), "b", false), "a clean close does not bring it back");
        assert!(judge(&BootFile::Damaged, "b".to_owned(), false).lost_cache(), "it may have said so");
        assert!(!boot("b", true).made_up_for().lost_cache());
        let now = Boot { loss: CacheLoss::Now, ..boot("b", true) };
        assert!(now.made_up_for().lost_cache(), "not by the process that has lost it");
    }

    #[test]
    fn failures_outlive_boots_and_earlier_documents_have_none() {
        let failed = Boot { boot_id: "a".to_owned(), failures: 3, ..Boot::default() };
        assert_eq!(failed.made_up_for().failures(), 3);
        for now in ["a", "b"] {
            assert_eq!(judge(&BootFile::Boot(failed.clone()), now.to_owned(), true).failures(), 3);
        }
        let before: Boot = serde_json::from_str(r#"{"boot_id":"a","lost_cache":true}"#).unwrap();
        assert_eq!((before.failures(), before.lost_cache()), (0, true));
        let written = |loss| serde_json::to_string(&Boot { loss, ..before.clone() }).unwrap();
        let lost = [CacheLoss::None, CacheLoss::Earlier, CacheLoss::Now].map(written);
        for (text, lost) in lost.iter().zip([false, true, true]) {
            assert_eq!(*text, format!(r#"{{"boot_id":"a","lost_cache":{lost},"failures":0}}"#));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_record_or_damaged(bytes in prop::collection::vec(any::<u8>(), 0..120)) {
            parse(&bytes);
        }

        /// Checks that changing any single byte never makes up for lost data.
        #[test]
        fn a_changed_record_does_not_say_that_all_is_well(
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
            failures in any::<u32>(),
        ) {
            let loss = CacheLoss::Earlier;
            let lost = Boot { boot_id: "a".to_owned(), loss, failures, ..Boot::default() };
            let mut bytes = serde_json::to_vec(&lost).unwrap();
            bytes.push(b'\n');
            let mut bytes = with_check(bytes);
            let at = at.index(bytes.len());
            bytes[at] = byte;
            let found = parse(&bytes).map_or(BootFile::Damaged, BootFile::Boot);
            prop_assert!(judge(&found, "a".to_owned(), false).lost_cache());
        }
    }
}
