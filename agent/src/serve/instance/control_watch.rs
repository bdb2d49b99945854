//! Talks to the control socket of a process, on the async runtime of the agent.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use shorthorn_control::{IoCounters, ProcessCommand, ProcessStatus};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};

/// The longest line that a process may send; a status with eight members has about 2 KiB.
const LINE_MAX_BYTES: u64 = 64 << 10;
/// The time after which a process that does not take a command counts as hanging. The thread of the control
/// socket takes commands even while the process waits for a disk.
const COMMAND_LIMIT: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Sends a command to the process. The result shows in its status.
///
/// # Errors
/// No process listens there, or it does not take the command.
pub async fn request(control: &Path, command: &ProcessCommand) -> io::Result<()> {
    let mut line = serde_json::to_vec(command)?;
    line.push(b'\n');
    let sent = async {
        let mut stream = UnixStream::connect(control).await?;
        stream.write_all(&line).await
    };
    timeout(COMMAND_LIMIT, sent).await.map_err(io::Error::from)?
}

/// Returns the counters of the requests of the engine's user. The caller limits the time.
///
/// # Errors
/// No process listens there, or the engine is older than the counters.
pub async fn io_counters(control: &Path) -> io::Result<IoCounters> {
    let mut stream = UnixStream::connect(control).await?;
    let mut line = serde_json::to_vec(&ProcessCommand::Io)?;
    line.push(b'\n');
    stream.write_all(&line).await?;
    line.clear();
    BufReader::new(stream).take(LINE_MAX_BYTES).read_until(b'\n', &mut line).await?;
    Ok(serde_json::from_slice(&line)?)
}

/// Returns the status of the process. The caller limits the time.
///
/// # Errors
/// No process listens there, or it is about to end.
pub async fn status(control: &Path) -> io::Result<ProcessStatus> {
    let mut lines = watch(control).await?;
    let mut line = Vec::new();
    (&mut lines).take(LINE_MAX_BYTES).read_until(b'\n', &mut line).await?;
    Ok(serde_json::from_slice(&line)?)
}

/// Gives every status to `take`, and `None` when the process cannot be asked any more; for ever.
pub async fn follow(control: PathBuf, mut take: impl FnMut(Option<ProcessStatus>)) {
    let mut pause = FIRST_PAUSE;
    loop {
        let mut has_reported = false;
        let ended = once(&control, &mut has_reported, &mut take).await;
        if has_reported {
            pause = FIRST_PAUSE;
            take(None);
        }
        if let Err(error) = ended {
            tracing::trace!("{}: {error}", control.display());
        }
        // The process may still start, or may have ended for good: the manager ends this wait.
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

async fn once(
    control: &Path,
    has_reported: &mut bool,
    take: &mut impl FnMut(Option<ProcessStatus>),
) -> io::Result<()> {
    let mut lines = watch(control).await?;
    let mut line = Vec::new();
    loop {
        line.clear();
        if (&mut lines).take(LINE_MAX_BYTES).read_until(b'\n', &mut line).await? == 0 {
            return Ok(());
        }
        let status = serde_json::from_slice(&line)?;
        *has_reported = true;
        take(Some(status));
    }
}

/// Connects to a process that sends its status now and after every change.
async fn watch(control: &Path) -> io::Result<BufReader<UnixStream>> {
    let mut stream = UnixStream::connect(control).await?;
    let mut line = serde_json::to_vec(&ProcessCommand::Watch)?;
    line.push(b'\n');
    stream.write_all(&line).await?;
    Ok(BufReader::new(stream))
}
