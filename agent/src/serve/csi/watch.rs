//! Learning from the kernel that something at a path may have changed.

use std::io;
use std::path::PathBuf;

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe::Receiver;

/// Enough for one event, with a name of any length.
const EVENT_MAX_BYTES: usize = 16 + 256;

/// A watch of directories. Events have no details: the woken thread reads the directories again, and sets new
/// watches.
pub struct DirectoryWatch(Receiver);

impl DirectoryWatch {
    /// Watches the directories that `paths` are in, or the nearest that exist above them.
    ///
    /// # Errors
    /// The error of inotify.
    pub fn over(paths: &[PathBuf]) -> io::Result<DirectoryWatch> {
        let events = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        let what = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_MOVE
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF
            | AddWatchFlags::IN_ONLYDIR;
        for path in paths {
            // The names above matter as well: removing a directory removes its content.
            for above in path.ancestors().skip(1).filter(|above| above.is_dir()).take(3) {
                events.add_watch(above, what)?;
            }
        }
        // Reading events is reading from a descriptor that can be waited for, as with a pipe.
        Ok(DirectoryWatch(Receiver::from_owned_fd_unchecked(events.into())?))
    }

    /// Returns when something has happened.
    pub async fn changed(mut self) {
        let mut event = [0; EVENT_MAX_BYTES * 16];
        if let Err(error) = self.0.read(&mut event).await {
            tracing::warn!("inotify: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;
    use std::time::Duration;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    async fn wakes(path: &Path, act: impl FnOnce()) {
        let watch = DirectoryWatch::over(&[path.to_owned()]).unwrap();
        act();
        tokio::time::timeout(LIMIT, watch.changed()).await.unwrap();
    }

    #[tokio::test]
    async fn wakes_waiters_for_a_directory_a_file_or_its_removal() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b/c");
        wakes(&path, || fs::create_dir(dir.path().join("a")).unwrap()).await;
        wakes(&path, || fs::create_dir(dir.path().join("a/b")).unwrap()).await;
        wakes(&path, || fs::write(&path, "").unwrap()).await;
        wakes(&path, || fs::remove_file(&path).unwrap()).await;
        wakes(&path, || fs::remove_dir(dir.path().join("a/b")).unwrap()).await;
        wakes(&path, || fs::rename(dir.path().join("a"), dir.path().join("x")).unwrap()).await;
    }
}
