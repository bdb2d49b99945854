//! The limit of open files. Each agent has a connection, and the usual soft limit of 1024 is too low for a
//! large cluster. systemd and container runtimes set it that low for programs that use select(2), which this
//! one does not.

use std::io;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// The most that is asked for: 5,000 agents need a tenth of it.
const WANTED: u64 = 65_536;

/// Raises the limit as far as the system permits.
pub fn raise_limit() {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return };
    if let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, hard.min(WANTED).max(soft), hard) {
        tracing::warn!(error = %io::Error::from(error), soft, "the limit of open files cannot be raised");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_raised_as_far_as_the_system_permits() {
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, 1024, hard).unwrap();
        raise_limit();
        assert_eq!(getrlimit(Resource::RLIMIT_NOFILE).unwrap(), (hard.min(WANTED), hard));
    }
}
