use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Deserializer};
use shorthorn_control::ReplicaStatus;

use shorthorn_vmkit::wait_at_most;

use crate::{NbdClient, binary, engine_status, replica_status};

const READY_LIMIT: Duration = Duration::from_secs(60);
const STOP_LIMIT: Duration = Duration::from_secs(60);

/// The options of a volume that runs in `shorthorn-agent run`.
#[derive(Clone, Debug)]
pub struct LocalVolumeOptions {
    /// Name of the volume on the command line.
    pub name: String,
    /// The directory of its replicas.
    pub dir: PathBuf,
    /// The size as in the command line.
    pub size: String,
    /// Passed as `--replicas`, from 1.
    pub replicas: u32,
    /// Additional flags.
    pub extra: Vec<String>,
}

impl LocalVolumeOptions {
    /// Creates a volume with three replicas of 1 GiB and the frontend `socket`.
    #[must_use]
    pub fn new(dir: &Path) -> LocalVolumeOptions {
        LocalVolumeOptions {
            name: "local".into(),
            dir: dir.to_owned(),
            size: "1GiB".into(),
            replicas: 3,
            extra: Vec::new(),
        }
    }
}

/// The line that `shorthorn-agent run` prints when the volume is ready.
#[derive(Clone, Debug, Deserialize)]
pub struct ReadyAnnouncement {
    /// The name of the volume.
    pub name: String,
    /// The block device, if it has one.
    pub device: Option<PathBuf>,
    /// The URI for NBD clients; empty if it has a device.
    #[serde(deserialize_with = "text_or_nothing")]
    pub uri: String,
    /// The socket in `uri`.
    pub socket: Option<PathBuf>,
    /// All processes.
    pub pids: Pids,
    /// The replicas, in their order.
    pub replicas: Vec<ReadyReplica>,
}

/// A replica of a local volume.
#[derive(Clone, Debug, Deserialize)]
pub struct ReadyReplica {
    /// The identity in views.
    pub id: String,
    /// The directory with the data.
    pub directory: PathBuf,
}

fn text_or_nothing<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Ok(Option::<String>::deserialize(deserializer)?.unwrap_or_default())
}

/// The processes of a local volume.
#[derive(Clone, Debug, Deserialize)]
pub struct Pids {
    /// `shorthorn-agent run`.
    pub supervisor: i32,
    /// The process id of the engine.
    pub engine: i32,
    /// The replicas, in their order.
    pub replicas: Vec<i32>,
}

/// A volume run by `shorthorn-agent run`, stopped when dropped.
#[derive(Debug)]
pub struct LocalVolume {
    child: Child,
    /// The announcement that was printed.
    pub ready: ReadyAnnouncement,
}

impl LocalVolume {
    /// Starts a volume and waits until it is ready.
    ///
    /// # Errors
    /// It ended, or was not ready in time; its log is on standard error.
    pub fn start(options: &LocalVolumeOptions) -> Result<LocalVolume> {
        let (replicas, dir) = (options.replicas.to_string(), options.dir.display().to_string());
        let fixed = ["run", &options.name, "--dir", &dir, "--size", &options.size];
        let further = ["--replicas", &replicas, "--frontend", "socket"];
        let words = fixed.into_iter().chain(further).map(str::to_owned);
        LocalVolume::start_with(&words.chain(options.extra.iter().cloned()).collect::<Vec<_>>())
    }

    /// Starts a volume by these arguments of `shorthorn-agent` and waits until it is ready.
    ///
    /// # Errors
    /// It ended, or was not ready in time; its log is on standard error.
    pub fn start_with(arguments: &[String]) -> Result<LocalVolume> {
        let mut child = Command::new(binary("shorthorn-agent")?)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting shorthorn-agent run")?;
        let output = child.stdout.take().context("no standard output")?;
        let (sender, line) = mpsc::channel();
        thread::spawn(move || {
            let mut text = String::new();
            let mut output = BufReader::new(output);
            // The receiver is gone when the time is over.
            let _ = sender.send(output.read_line(&mut text).map(|_| text));
            let _ = output.read_to_end(&mut Vec::new());
        });
        let text = line.recv_timeout(READY_LIMIT);
        let ready = text.map_err(anyhow::Error::from).and_then(|text| Ok(text?)).and_then(|text| {
            serde_json::from_str(&text).with_context(|| format!("reading the ready line {text:?}"))
        });
        match ready {
            Ok(ready) => Ok(LocalVolume { child, ready }),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(error.context("the volume did not become ready"))
            }
        }
    }

    /// Returns the directory of the sockets and pid files of its processes.
    ///
    /// # Errors
    /// The volume has a kernel frontend.
    fn runtime(&self) -> Result<&Path> {
        self.ready.socket.as_deref().and_then(Path::parent).context("the volume has no socket")
    }

    /// Returns the control socket of the engine.
    ///
    /// # Errors
    /// The volume has a kernel frontend.
    pub fn engine_control(&self) -> Result<PathBuf> {
        Ok(self.runtime()?.join("engine.control"))
    }

    /// Returns the current process id of the engine.
    ///
    /// # Errors
    /// It does not run.
    pub fn engine_pid(&self) -> Result<i32> {
        Ok(engine_status(&self.engine_control()?)?.pid.context("an engine without a process")?.try_into()?)
    }

    /// Returns the current process id of a replica.
    ///
    /// # Errors
    /// It does not run.
    pub fn replica_pid(&self, index: usize) -> Result<i32> {
        Ok(self.replica_status(index)?.pid.try_into()?)
    }

    /// Returns the status of a replica.
    ///
    /// # Errors
    /// It does not run.
    pub fn replica_status(&self, index: usize) -> Result<ReplicaStatus> {
        let replica = self.ready.replicas.get(index).context("no such replica")?;
        replica_status(&self.runtime()?.join(format!("{}.control", replica.id)))
    }

    /// Returns the directories of all replicas.
    #[must_use]
    pub fn directories(&self) -> Vec<PathBuf> {
        self.ready.replicas.iter().map(|replica| replica.directory.clone()).collect()
    }

    /// Returns a client of the volume.
    ///
    /// # Errors
    /// The volume has a kernel frontend, or its engine does not answer.
    pub fn client(&self) -> Result<NbdClient> {
        let socket = self.ready.socket.as_deref().context("the volume has no socket")?;
        NbdClient::connect(socket, &self.ready.name, READY_LIMIT)
    }

    /// Stops the volume as a user would, with SIGTERM, and waits for its end.
    ///
    /// # Errors
    /// It does not end in time, or not well.
    pub fn stop(mut self) -> Result<()> {
        self.terminate()
    }

    fn terminate(&mut self) -> Result<()> {
        if self.child.try_wait()?.is_some() {
            return Ok(());
        }
        kill(pid_of(&self.child)?, Signal::SIGTERM)?;
        match wait_at_most(&mut self.child, STOP_LIMIT)? {
            Some(status) if status.success() => Ok(()),
            Some(status) => bail!("shorthorn-agent run ended with {status}"),
            None => {
                self.child.kill()?;
                bail!("shorthorn-agent run did not stop within {STOP_LIMIT:?}");
            }
        }
    }
}

impl Drop for LocalVolume {
    fn drop(&mut self) {
        if let Err(error) = self.terminate() {
            let _ = writeln!(std::io::stderr(), "stopping a volume: {error:#}");
        }
    }
}

fn pid_of(child: &Child) -> Result<Pid> {
    Ok(Pid::from_raw(i32::try_from(child.id())?))
}
