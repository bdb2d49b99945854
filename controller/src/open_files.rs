//! The limit of open files. Each agent has a connection, and the usual soft limit of 1024 is too low for a
//! large cluster. systemd and container runtimes set it that low for programs that use select(2), which this
//! one does not.

use rustix::process::{Resource, getrlimit, setrlimit};

/// The most that is asked for: 5,000 agents need a tenth of it.
const WANTED: u64 = 65_536;

/// Raises the limit as far as the system permits.
pub fn raise_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    let Some(soft) = limit.current else { return };
    let raised = limit.maximum.unwrap_or(WANTED).min(WANTED).max(soft);
    limit.current = Some(raised);
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, soft, "the limit of open files cannot be raised");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_raised_as_far_as_the_system_permits() {
        let mut low = getrlimit(Resource::Nofile);
        low.current = Some(1024);
        setrlimit(Resource::Nofile, low).unwrap();
        raise_limit();
        let raised = getrlimit(Resource::Nofile);
        assert_eq!(raised.current, Some(low.maximum.unwrap_or(WANTED).min(WANTED)));
        assert_eq!(raised.maximum, low.maximum);
    }
}
