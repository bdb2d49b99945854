//! Options for creating and opening a store.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// For a new replica.
#[derive(Clone, Debug, Default)]
pub struct CreateOptions {
    /// The size of the volume, a multiple of 4096.
    pub size_bytes: u64,
    /// The time of creation, RFC 3339 in UTC; `None` is now.
    pub created: Option<String>,
    /// See [`OpenOptions::loss_record`].
    pub loss_record: Option<PathBuf>,
    /// Stops or fails in the middle; for crash tests.
    pub fault: Option<FaultHook>,
}

/// For an existing replica.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// Change nothing: no lock file, no flag in `volume.meta`, no repairs.
    pub read_only: bool,
    /// Take a replica whose rebuild did not finish.
    pub accept_rebuilding: bool,
    /// True to accept layers that are shorter than the one above although no expansion is documented. The
    /// sizes are remembered, so that the option is needed only once.
    pub accept_short_layers: bool,
    /// A file for the record that data may be lost. It is used if nothing in the directory can be changed, as
    /// after a file system has given up. The file does not exist yet, and is on another file system that
    /// keeps it until the host is restarted, such as `/run`. The next opening of the directory has to name
    /// the same file.
    pub loss_record: Option<PathBuf>,
    /// Stops or fails in the middle; for crash tests.
    pub fault: Option<FaultHook>,
}

/// The decision of a [`FaultHook`] on a completed step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Do nothing.
    None,
    /// The store stops there as if the process had died: it does nothing more, and every later call fails.
    Die,
    /// The next step fails with this errno.
    Fail(i32),
}

/// A hook that is called with a description after every step of an operation and every chunk that a fold
/// copies.
#[derive(Clone)]
pub struct FaultHook(Arc<dyn Fn(&str) -> Fault + Send + Sync>);

impl FaultHook {
    /// Creates a hook that asks `fault`.
    pub fn new(fault: impl Fn(&str) -> Fault + Send + Sync + 'static) -> FaultHook {
        FaultHook(Arc::new(fault))
    }

    pub(crate) fn after(&self, done: &str) -> Fault {
        (self.0)(done)
    }
}

impl fmt::Debug for FaultHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FaultHook")
    }
}
