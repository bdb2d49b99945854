use std::fmt;

use serde::{Deserialize, Serialize};

/// An error as the block layer knows it: a positive Linux errno.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Errno(i32);

impl Errno {
    /// An I/O error (EIO).
    pub const IO: Errno = Errno(5);
    /// Try again (EAGAIN). The obstacle ends soon.
    pub const AGAIN: Errno = Errno(11);
    /// The operation was interrupted by a shutdown (ESHUTDOWN).
    pub const SHUTDOWN: Errno = Errno(108);
    /// No space left on device (ENOSPC).
    pub const NO_SPACE: Errno = Errno(28);
    /// Invalid argument (EINVAL).
    pub const INVALID: Errno = Errno(22);
    /// Operation not supported (EOPNOTSUPP).
    pub const NOT_SUPPORTED: Errno = Errno(95);
    /// The connection timed out (ETIMEDOUT).
    pub const TIMED_OUT: Errno = Errno(110);
    /// The data that was read is not the data that was stored there (EBADMSG): the disk has changed or lost
    /// it.
    pub const ROTTEN: Errno = Errno(74);
    /// The operation is not permitted (EPERM).
    pub const NOT_PERMITTED: Errno = Errno(1);

    /// Returns the errno of `raw`; any value that is not a positive errno becomes [`Errno::IO`].
    #[must_use]
    pub const fn new(raw: i32) -> Errno {
        if raw > 0 && raw < 4096 { Errno(raw) } else { Errno::IO }
    }

    /// Returns the errno of a failed std I/O call.
    #[must_use]
    pub fn of(error: &std::io::Error) -> Errno {
        error.raw_os_error().map_or(Errno::IO, Errno::new)
    }

    /// Returns the positive number.
    #[must_use]
    pub const fn raw(self) -> i32 {
        self.0
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", std::io::Error::from_raw_os_error(self.0))
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Errno({})", self.0)
    }
}
