use std::io;
use std::path::{Path, PathBuf};

use shorthorn_control::SpecError;
use thiserror::Error;

/// The reason why a volume cannot be run.
#[derive(Debug, Error)]
pub enum RunError {
    /// A file or directory of the volume does not work.
    #[error("{path}: {source}")]
    Io {
        /// The path of the file or directory.
        path: PathBuf,
        source: io::Error,
    },
    /// Signals, threads or processes cannot be had.
    #[error("{action}: {source}")]
    System { action: &'static str, source: io::Error },
    /// A JSON file of the volume cannot be read or written.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// Another supervisor has the directory.
    #[error("{dir} is in use by process {pid}: stop that process first (kill {pid})")]
    Held {
        dir: PathBuf,
        /// The process id of the holder.
        pid: i32,
    },
    /// The directory holds another volume than the requested one.
    #[error(
        "{dir} holds a volume whose {what} is {found}, not {wanted}: use {what} {found}, or another directory"
    )]
    Other {
        dir: PathBuf,
        /// Name, size or number of replicas.
        what: &'static str,
        /// The value in the directory.
        found: String,
        /// The requested value.
        wanted: String,
    },
    /// No directory for sockets has a path short enough.
    #[error(
        "{path} is too long for a Unix socket, which has {longest} bytes at most: use a shorter directory, \
         or set XDG_RUNTIME_DIR to one"
    )]
    TooLong {
        /// The path that was tried last.
        path: PathBuf,
        /// The longest that works.
        longest: usize,
    },
    /// A directory that other users own or can write to must not hold the sockets.
    #[error("{0} is not a directory of this user with mode 0700: remove it, or set XDG_RUNTIME_DIR")]
    NotOurs(PathBuf),
    /// A process of an earlier run continues and cannot be stopped.
    #[error("process {pid} of an earlier run on this directory {why}")]
    Leftover {
        pid: i32,
        /// The reason why it cannot be stopped.
        why: String,
    },
    /// A process ended before the volume was ready.
    #[error("the {role} ended before the volume was ready: {message}")]
    Ended {
        role: String,
        /// The last message of the process.
        message: String,
    },
    /// The engine needs at least one.
    #[error("no replica can be opened: {0}")]
    NoReplica(String),
    /// The time to become ready has passed.
    #[error("the volume is not ready after {seconds} s: {message}")]
    NotReady {
        /// The time limit in seconds.
        seconds: u64,
        /// The reason for waiting.
        message: String,
    },
    /// A process did not stop, or not cleanly.
    #[error("the {role} did not stop cleanly: {message}")]
    Unclean {
        role: String,
        /// The message at its end.
        message: String,
    },
}

impl RunError {
    /// Makes a function for `map_err` that reports that the system refused an action on `path`.
    pub fn at(path: &Path) -> impl FnOnce(io::Error) -> RunError {
        |source| RunError::Io { path: path.to_owned(), source }
    }

    /// Makes a function for `map_err` that reports that the system refused `action`.
    pub fn doing<E: Into<io::Error>>(action: &'static str) -> impl FnOnce(E) -> RunError {
        move |source| RunError::System { action, source: source.into() }
    }
}
