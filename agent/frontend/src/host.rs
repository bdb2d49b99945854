//! The host of this process, and how programs run there.
//!
//! In a container they run in the mount and network namespaces of the host, by nsenter(1). The host is where
//! process 1 is, so the container must share the host's process ids.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The program that runs others in the namespaces of the host, and its options.
const ENTER: [&str; 6] = ["nsenter", "--target", "1", "--mount", "--net", "--"];
/// The directories that programs of the host are in.
const PROGRAM_DIRECTORIES: [&str; 4] = ["usr/sbin", "usr/bin", "sbin", "bin"];

/// The host of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Host {
    is_container: bool,
}

impl Host {
    /// Compares the namespace of this process with that of process 1. If neither can be read, it is the
    /// same.
    pub(crate) fn here() -> Host {
        let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/mnt"));
        let is_container = match (namespace("1"), namespace("self")) {
            (Ok(first), Ok(own)) => first != own,
            _ => false,
        };
        Host { is_container }
    }

    /// Returns the path of the host's root directory.
    pub(crate) fn root(&self) -> &'static Path {
        Path::new(if self.is_container { "/proc/1/root" } else { "/" })
    }

    /// Returns the path of a program of the host, seen from this process.
    pub(crate) fn find(&self, program: &str) -> Option<PathBuf> {
        PROGRAM_DIRECTORIES.iter().map(|dir| self.root().join(dir).join(program)).find(|path| path.exists())
    }

    /// Returns the command that runs `program` on the host.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = match self.is_container {
            false => Command::new(program),
            true => {
                let mut command = Command::new(ENTER[0]);
                command.args(&ENTER[1..]).arg(program);
                command
            }
        };
        // Messages to the service manager are of the engine only.
        command.env_remove("NOTIFY_SOCKET");
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(command: &Command) -> Vec<String> {
        let program = command.get_program().to_string_lossy().into_owned();
        [program]
            .into_iter()
            .chain(command.get_args().map(|word| word.to_string_lossy().into_owned()))
            .collect()
    }

    #[test]
    fn programs_run_on_the_host_from_a_container_too() {
        assert_eq!(words(&Host { is_container: false }.command("tgtadm")), ["tgtadm"]);
        let entered = ["nsenter", "--target", "1", "--mount", "--net", "--", "tgtadm"];
        assert_eq!(words(&Host { is_container: true }.command("tgtadm")), entered);
        assert_eq!(Host { is_container: true }.root(), Path::new("/proc/1/root"));
        assert!(Host { is_container: false }.find("sh").is_some());
        assert!(Host { is_container: false }.find("no-such-program").is_none());
    }
}
