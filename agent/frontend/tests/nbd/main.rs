//! The frontend `socket`, and with it all of the NBD server, in front of a volume in memory.
#![allow(clippy::unwrap_used, reason = "a test ends if an assumption of it is wrong")]

mod clients;
mod host;
mod raw;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use host::{Host, Volume};
use shorthorn_frontend::{Device, FrontendSpec, Prepared, prepare_socket};
use shorthorn_types::VolumeName;

const SIZE: u64 = 256 << 20;

fn spec(path: &Path, queues: u16, depth: u16) -> FrontendSpec {
    FrontendSpec {
        volume: VolumeName::new("vol-1").unwrap(),
        size_bytes: SIZE,
        queues,
        depth,
        socket_path: path.to_owned(),
        device_dir: PathBuf::from("/nonexistent"),
        previous: None,
        refuses_requests: false,
    }
}

/// A volume behind a socket.
struct Server {
    dir: tempfile::TempDir,
    host: Option<Host>,
    volume: Arc<Volume>,
    device: Box<dyn Device>,
}

impl Server {
    fn new(queues: u16, depth: u16) -> Server {
        let dir = tempfile::tempdir().unwrap();
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(SIZE).unwrap();
        let volume = Volume::new(file);
        let Prepared { queues, mut device } =
            prepare_socket(&spec(&dir.path().join("sock"), queues, depth)).unwrap();
        let host = Host::start(&volume, queues, depth);
        assert_eq!(device.go_live().unwrap(), dir.path().join("sock"));
        Server { dir, host: Some(host), volume, device }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("sock")
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///vol-1?socket={}", self.path().display())
    }

    fn host(&self) -> &Host {
        self.host.as_ref().unwrap()
    }

    fn stop(mut self) {
        self.device.stop().unwrap();
        assert!(!self.path().exists());
        self.host.take().unwrap().stop();
    }
}
