//! The medium of a replica: its directory, the abilities of the file system under it, and whether the
//! directory may be changed.

use std::sync::Arc;

use nix::fcntl::OFlag;

use crate::directory::Directory;
use crate::error::StoreError;
use crate::host::HostFileSystem;
use crate::options::FaultHook;
use crate::step_executor::StepExecutor;

type Result<T> = std::result::Result<T, StoreError>;

/// An open directory with the rules for its changes.
#[derive(Debug)]
pub(crate) struct Medium {
    directory: Arc<Directory>,
    host: HostFileSystem,
    fault: Option<FaultHook>,
    access: Access,
}

/// The permission to change the directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    /// No change at all. This never becomes another one.
    ReadOnly,
    Writable,
    /// An operation is, or has stopped, half-way: only the recovery may change the directory.
    Broken,
}

impl Medium {
    pub fn new(
        directory: Directory,
        host: HostFileSystem,
        fault: Option<FaultHook>,
        is_read_only: bool,
    ) -> Medium {
        let access = if is_read_only { Access::ReadOnly } else { Access::Writable };
        Medium { directory: Arc::new(directory), host, fault, access }
    }

    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// Returns the directory for another thread.
    pub fn shared_directory(&self) -> Arc<Directory> {
        Arc::clone(&self.directory)
    }

    /// Returns the hook of crash tests.
    pub fn fault(&self) -> Option<&FaultHook> {
        self.fault.as_ref()
    }

    pub fn direct_io(&self) -> bool {
        self.host.direct_io
    }

    /// Returns the flag with which files of data are opened.
    pub fn direct_flag(&self) -> OFlag {
        if self.host.direct_io { OFlag::O_DIRECT } else { OFlag::empty() }
    }

    pub fn alignment_bytes(&self) -> u32 {
        self.host.alignment_bytes
    }

    pub fn can_punch(&self) -> bool {
        self.host.can_punch
    }

    pub fn executor(&self) -> StepExecutor<'_> {
        StepExecutor::new(&self.directory, self.fault.as_ref(), self.host.direct_io)
    }

    pub fn is_read_only(&self) -> bool {
        self.access == Access::ReadOnly
    }

    pub fn is_broken(&self) -> bool {
        self.access == Access::Broken
    }

    /// Refuses a change of a directory that is open for reading.
    pub fn check_not_read_only(&self) -> Result<()> {
        match self.access {
            Access::ReadOnly => Err(StoreError::ReadOnly(self.directory.path().to_owned())),
            Access::Writable | Access::Broken => Ok(()),
        }
    }

    /// Refuses a change also after an operation that failed half-way.
    pub fn check_writable(&self) -> Result<()> {
        self.check_not_read_only()?;
        if self.is_broken() { Err(self.broken_error()) } else { Ok(()) }
    }

    /// Checks that a block of zeroes hides the data of older layers, if there will be any. Reading is
    /// possible in any case, so that data can be saved.
    pub fn check_layers(&self, count: usize) -> Result<()> {
        let is_refused = self.host.zeroes_are_holes && count > 1 && !self.is_read_only();
        if is_refused { Err(StoreError::ZeroesAsHoles(self.directory.path().to_owned())) } else { Ok(()) }
    }

    pub fn broken_error(&self) -> StoreError {
        StoreError::Broken(self.directory.path().to_owned())
    }

    pub fn chain_error(&self, source: shorthorn_chain::ChainError) -> StoreError {
        StoreError::chain(self.directory.path(), source)
    }

    /// Records that an operation may leave the directory half-way.
    pub fn mark_broken(&mut self) {
        if self.access == Access::Writable {
            self.access = Access::Broken;
        }
    }

    /// Records that the directory is that of a whole operation again.
    pub fn mark_whole(&mut self) {
        if self.access == Access::Broken {
            self.access = Access::Writable;
        }
    }

    /// Records the stop by the test hook, after which the directory is as after a crash.
    pub fn record_stop(&mut self, error: Option<&StoreError>) {
        if matches!(error, Some(StoreError::Stopped)) {
            self.mark_broken();
        }
    }
}

#[cfg(test)]
impl Medium {
    /// Opens a directory for the test of a part.
    pub fn at(path: &std::path::Path, is_read_only: bool) -> Medium {
        let directory = Directory::open(path).unwrap();
        let host = HostFileSystem::probe(&directory, is_read_only).unwrap();
        Medium::new(directory, host, None, is_read_only)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_medium_takes_no_change_until_it_is_whole() {
        let temp = tempfile::tempdir().unwrap();
        let mut medium = Medium::at(temp.path(), false);
        medium.check_writable().unwrap();
        medium.record_stop(Some(&StoreError::FoldRunning));
        medium.record_stop(None);
        medium.check_writable().unwrap();
        medium.record_stop(Some(&StoreError::Stopped));
        assert!(medium.is_broken() && matches!(medium.check_writable(), Err(StoreError::Broken(_))));
        medium.check_not_read_only().unwrap();
        medium.mark_whole();
        medium.check_writable().unwrap();
    }

    #[test]
    fn blocks_of_zeroes_have_to_hide_older_layers() {
        let temp = tempfile::tempdir().unwrap();
        for is_read_only in [false, true] {
            let mut medium = Medium::at(temp.path(), is_read_only);
            medium.check_layers(2).unwrap();
            medium.host.zeroes_are_holes = true;
            medium.check_layers(1).unwrap();
            let refused = medium.check_layers(2);
            assert_eq!(refused.is_ok(), is_read_only, "{refused:?}");
            if let Err(error) = refused {
                assert_eq!(error.errno(), shorthorn_types::Errno::NOT_SUPPORTED);
                assert!(error.to_string().contains("zfs set compression=off"), "{error}");
            }
        }
    }

    #[test]
    fn a_medium_for_reading_never_becomes_writable() {
        let temp = tempfile::tempdir().unwrap();
        let mut medium = Medium::at(temp.path(), true);
        medium.mark_broken();
        assert!(medium.is_read_only() && !medium.is_broken());
        medium.mark_whole();
        assert!(matches!(medium.check_writable(), Err(StoreError::ReadOnly(_))));
        assert!(matches!(medium.check_not_read_only(), Err(StoreError::ReadOnly(_))));
    }
}
