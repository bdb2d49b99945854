use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;

use crate::status::{ProcessCommand, ProcessStatus};

/// The time limit of an answer. A process answers from memory, so a longer silence means that it hangs.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// The reason why a request to a process has failed.
#[derive(Debug, Error)]
pub enum ControlError {
    /// The socket does not work: the process does not run, or hangs.
    #[error("control socket {path}: {source}")]
    Io {
        /// Path of the control socket.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The answer is not valid in this version.
    #[error("control socket {path}: unexpected answer: {source}")]
    Answer {
        /// Path of the control socket.
        path: PathBuf,
        /// The error of the parser, with its position.
        source: serde_json::Error,
    },
}

/// A connection to the control socket of a process.
#[derive(Debug)]
pub struct ControlClient {
    path: PathBuf,
    stream: UnixStream,
}

impl ControlClient {
    /// Connects to the socket at `path`.
    ///
    /// # Errors
    /// Fails with [`ControlError::Io`] if no process listens there.
    pub fn connect(path: &Path) -> Result<ControlClient, ControlError> {
        let io = |source| ControlError::Io { path: path.to_owned(), source };
        let stream = UnixStream::connect(path).map_err(io)?;
        stream.set_write_timeout(Some(ANSWER_TIMEOUT)).map_err(io)?;
        stream.set_read_timeout(Some(ANSWER_TIMEOUT)).map_err(io)?;
        Ok(ControlClient { path: path.to_owned(), stream })
    }

    fn send(&self, command: &ProcessCommand) -> Result<(), ControlError> {
        let mut line = serde_json::to_vec(command).map_err(|source| self.answer(source))?;
        line.push(b'\n');
        (&self.stream).write_all(&line).map_err(|source| self.io(source))
    }

    fn io(&self, source: io::Error) -> ControlError {
        ControlError::Io { path: self.path.clone(), source }
    }

    fn answer(&self, source: serde_json::Error) -> ControlError {
        ControlError::Answer { path: self.path.clone(), source }
    }

    fn read(&self, lines: &mut impl BufRead) -> Result<Option<ProcessStatus>, ControlError> {
        let mut line = String::new();
        if lines.read_line(&mut line).map_err(|source| self.io(source))? == 0 {
            return Ok(None);
        }
        serde_json::from_str(&line).map(Some).map_err(|source| self.answer(source))
    }

    /// Returns the current status.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn status(&self) -> Result<ProcessStatus, ControlError> {
        self.send(&ProcessCommand::Status)?;
        let status = self.read(&mut BufReader::new(&self.stream))?;
        status.ok_or_else(|| self.io(io::ErrorKind::UnexpectedEof.into()))
    }

    /// Yields the current status, then one after every change; ends when the process does.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn watch(self) -> Result<impl Iterator<Item = Result<ProcessStatus, ControlError>>, ControlError> {
        self.send(&ProcessCommand::Watch)?;
        self.stream.set_read_timeout(None).map_err(|source| self.io(source))?;
        let stream = self.stream.try_clone().map_err(|source| self.io(source))?;
        let mut lines = BufReader::new(stream);
        Ok(std::iter::from_fn(move || self.read(&mut lines).transpose()))
    }

    /// Sends a command to the process. The result shows in its status.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn request(&self, command: &ProcessCommand) -> Result<(), ControlError> {
        self.send(command)
    }

    /// Asks the process to end.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn stop(&self) -> Result<(), ControlError> {
        self.send(&ProcessCommand::Stop)
    }
}
