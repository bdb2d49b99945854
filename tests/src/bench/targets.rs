use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use tempfile::TempDir;

use super::process::Usage;
use super::workload::Workload;
use crate::{FioJob, LocalVolume, LocalVolumeOptions, fio, until};

const SERVER_LIMIT: Duration = Duration::from_secs(20);

/// A kind of measured target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetKind {
    /// A volume of Shorthorn behind the frontend `socket`.
    Shorthorn {
        /// The number of its replicas, all on this host.
        replicas: u32,
    },
    /// Measures fio on as many files as replicas: the limits of the disk and the file system. Writes are sent
    /// to all files at once, one request each, and count once; reads use one file.
    Files {
        /// A file for each replica of the compared volume.
        files: u32,
    },
    /// qemu-nbd on one file: one hop over NBD, no replication.
    OneHop,
}

/// A measurement.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    /// Requests per second.
    pub requests_per_s: f64,
    /// Bytes per second.
    pub bytes_per_s: f64,
    /// Mean time of a request, in microseconds.
    pub mean_us: f64,
    /// CPU time per request over all server processes, in microseconds; fio itself is not counted.
    pub cpu_us_per_request: Option<f64>,
    /// Resident memory of all server processes right after the load.
    pub resident_bytes: Option<u64>,
}

/// A server of a volume.
#[derive(Debug)]
pub struct BenchTarget {
    kind: TargetKind,
    // Dropped in this order: the server ends before its files are removed.
    server: Server,
    folder: TempDir,
    size: String,
}

#[derive(Debug)]
enum Server {
    None,
    Volume(LocalVolume),
    OneHop { child: Child, socket: PathBuf },
}

impl BenchTarget {
    /// Starts it, with its files in a folder of its own below `base`; loads use the first `size` of it.
    ///
    /// # Errors
    /// It does not start.
    pub fn start(kind: TargetKind, base: &Path, size: &str) -> Result<BenchTarget> {
        let folder = tempfile::Builder::new().prefix("bench-").tempdir_in(base)?;
        let server = match kind {
            TargetKind::Files { .. } => Server::None,
            TargetKind::Shorthorn { replicas } => {
                let mut options = LocalVolumeOptions::new(folder.path());
                options.replicas = replicas;
                options.size = "10GiB".into();
                Server::Volume(LocalVolume::start(&options)?)
            }
            TargetKind::OneHop => one_hop(folder.path())?,
        };
        Ok(BenchTarget { kind, server, folder, size: size.to_owned() })
    }

    /// Puts the load on it.
    ///
    /// # Errors
    /// fio has seen an error, or a server process is gone.
    pub fn measure(&self, workload: &Workload, seconds: u32) -> Result<Measured> {
        let (arguments, parts) = self.arguments(workload, seconds);
        let pids = self.pids()?;
        let before = Usage::of(&pids)?;
        let report = fio(&FioJob { arguments })?;
        let after = Usage::of(&pids)?;
        let requests = report.requests as f64 / parts;
        let used = (after.cpu_us - before.cpu_us) as f64;
        Ok(Measured {
            requests_per_s: report.requests_per_s / parts,
            bytes_per_s: report.bytes_per_s / parts,
            mean_us: report.mean_us,
            cpu_us_per_request: (!pids.is_empty()).then_some(used / requests.max(1.0)),
            resident_bytes: (!pids.is_empty()).then_some(after.resident_bytes),
        })
    }

    /// Returns fio's arguments, and how many of its requests stand for one.
    fn arguments(&self, workload: &Workload, seconds: u32) -> (Vec<String>, f64) {
        let mut arguments = workload.arguments(seconds, &self.size);
        let uri = match (&self.server, self.kind) {
            (Server::Volume(volume), _) => volume.ready.uri.clone(),
            (Server::OneHop { socket, .. }, _) => format!("nbd+unix:///?socket={}", socket.display()),
            (Server::None, kind) => {
                let files = match kind {
                    TargetKind::Files { files } if workload.writes() => files,
                    _ => 1,
                };
                arguments.extend(["--ioengine=io_uring".into(), "--direct=1".into()]);
                for file in 0..files {
                    let path = self.folder.path().join(format!("file-{file}"));
                    arguments
                        .extend([format!("--name=file-{file}"), format!("--filename={}", path.display())]);
                }
                return (repeat_per_job(&arguments), f64::from(files));
            }
        };
        arguments.extend(["--ioengine=nbd".into(), format!("--uri={uri}"), "--name=nbd".into()]);
        (arguments, 1.0)
    }

    fn pids(&self) -> Result<Vec<i32>> {
        Ok(match &self.server {
            Server::None => Vec::new(),
            Server::OneHop { child, .. } => vec![i32::try_from(child.id())?],
            Server::Volume(volume) => {
                let pids = &volume.ready.pids;
                let mut all = vec![pids.supervisor, pids.engine];
                all.extend(&pids.replicas);
                all
            }
        })
    }
}

/// Repeats arguments for every job. fio takes arguments before the first `--name` as defaults of all jobs
/// only in job files. On the command line they belong to the job that they follow.
fn repeat_per_job(arguments: &[String]) -> Vec<String> {
    let is_job = |argument: &&String| argument.starts_with("--name=") || argument.starts_with("--filename=");
    let common: Vec<&String> = arguments.iter().filter(|argument| !is_job(argument)).collect();
    let mut all = Vec::new();
    for argument in arguments.iter().filter(is_job) {
        all.push(argument.clone());
        if argument.starts_with("--name=") {
            all.extend(common.iter().map(|argument| (*argument).clone()));
        }
    }
    all
}

fn one_hop(folder: &Path) -> Result<Server> {
    let (file, socket) = (folder.join("file"), folder.join("nbd.sock"));
    File::create(&file)?.set_len(10 << 30)?;
    let child = Command::new("qemu-nbd")
        .args([
            "--format=raw",
            "--cache=none",
            "--aio=native",
            "--discard=unmap",
            "--persistent",
            "--shared=4",
        ])
        .arg(format!("--socket={}", socket.display()))
        .arg(&file)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .context("starting qemu-nbd")?;
    until("socket of qemu-nbd", SERVER_LIMIT, || Ok(fs::exists(&socket)?.then_some(())))?;
    Ok(Server::OneHop { child, socket })
}

impl Drop for BenchTarget {
    fn drop(&mut self) {
        if let Server::OneHop { child, .. } = &mut self.server {
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
