//! The line on standard output.

use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use shorthorn_types::{ReplicaId, VolumeName};

/// The announcement for the caller of `run`; additions only.
#[derive(Debug, Serialize)]
pub struct ReadyAnnouncement {
    /// The volume as the command line names it.
    pub name: VolumeName,
    /// The block device, `/dev/longhorn/<volume>`; null with the frontend `socket`.
    pub device: Option<PathBuf>,
    /// For NBD clients; null with a kernel frontend.
    pub uri: Option<String>,
    /// The socket in `uri`.
    pub socket: Option<PathBuf>,
    /// All processes of the volume.
    pub pids: Pids,
    /// socket, ublk, nbd or iscsi.
    pub frontend: &'static str,
    /// Size of the volume.
    pub size_bytes: u64,
    /// Number of the attachment and of the engine's start.
    pub generation: String,
    /// The replicas, in the order of `pids.replicas`.
    pub replicas: Vec<ReadyReplica>,
}

/// All processes of a volume.
#[derive(Debug, Serialize)]
pub struct Pids {
    /// The process id of the supervisor.
    pub supervisor: u32,
    /// The process id of the engine, if it runs.
    pub engine: Option<u32>,
    /// The replicas that run; all of them, unless one was lost.
    pub replicas: Vec<u32>,
}

/// A replica in the announcement.
#[derive(Debug, Serialize)]
pub struct ReadyReplica {
    /// Identity in the views of the volume.
    pub id: ReplicaId,
    pub directory: PathBuf,
    /// The process id; null if the replica does not run.
    pub pid: Option<u32>,
}

impl ReadyAnnouncement {
    /// Writes the line.
    pub fn print(&self) {
        let line = serde_json::to_string(self).unwrap_or_default();
        let mut out = std::io::stdout().lock();
        if let Err(error) = writeln!(out, "{line}").and_then(|()| out.flush()) {
            tracing::warn!(%error, "standard output has no reader");
        }
    }
}

/// Returns the URI of an NBD export on a Unix socket.
pub fn nbd_uri(export: &VolumeName, socket: &Path) -> String {
    let mut uri = format!("nbd+unix:///{export}?socket=");
    for byte in socket.as_os_str().as_bytes() {
        match byte {
            b'/' | b'-' | b'.' | b'_' | b'~' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' => {
                uri.push(char::from(*byte));
            }
            _ => uri.push_str(&format!("%{byte:02X}")),
        }
    }
    uri
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_are_escaped() {
        let name = "v1".parse().unwrap();
        let uri = nbd_uri(&name, Path::new("/tmp/a b&c/nbd"));
        assert_eq!(uri, "nbd+unix:///v1?socket=/tmp/a%20b%26c/nbd");
    }
}
