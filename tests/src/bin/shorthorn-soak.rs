//! `make soak`: a thousand faults under verified load, as a table.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use shorthorn_control::FrontendChoice;
use shorthorn_tests::soak::{SoakOptions, run, run_in_vm};
use shorthorn_vmkit::Kernel;

/// An emulated machine is slow: a thousand faults take over an hour.
const VM_LIMIT: Duration = Duration::from_secs(6 * 3600);
/// replica_timeout_ms of the volumes, on the processors of this machine and on emulated ones. Those do
/// everything several times slower, and a replica that is late only for that is dropped for nothing. All
/// other limits are the same: they are times of the engine.
const REPLICA_TIMEOUT_MS: u64 = 3000;
const REPLICA_TIMEOUT_IN_VM_MS: u64 = 10_000;

/// Injects kills, pauses, cuts, slow and full disks, and corrupt frames into volumes of three replicas. Needs
/// root.
#[derive(Debug, Parser)]
struct Arguments {
    /// Seed of the faults and their order; drawn and printed by default.
    #[arg(long)]
    seed: Option<u64>,
    /// Number of faults to inject in the whole run.
    #[arg(long, default_value_t = 1000)]
    faults: usize,
    /// Time in seconds after which no fault begins.
    #[arg(long)]
    seconds: Option<u64>,
    /// Number of volumes under faults at the same time; each gets a part of the faults.
    #[arg(long, default_value_t = 6)]
    volumes: usize,
    /// Only this volume, with its part of the faults: counted from 0.
    #[arg(long)]
    only: Option<usize>,
    /// Maximum duration of a fault in seconds.
    #[arg(long, default_value_t = 30)]
    longest: u64,
    /// Frontend of the volumes.
    #[arg(long, value_enum, default_value = "socket")]
    frontend: Frontend,
    /// replica_timeout_ms of the volumes: 3000, and 10000 in a virtual machine, which may be emulated.
    #[arg(long)]
    replica_timeout_ms: Option<u64>,
    /// Volumes encrypt in transit; the kernel needs its module tls.
    #[arg(long)]
    encrypt_in_transit: bool,
    /// Runs in a virtual machine.
    #[arg(long)]
    in_vm: bool,
    /// The kernel of the machine: newest (Debian's newest), ublk (Debian 13's) or nbd (Debian 12's, without
    /// ublk).
    #[arg(long, default_value = "newest", value_parser = kernel, requires = "in_vm")]
    kernel: Kernel,
    /// Stops all volumes after the first violation.
    #[arg(long)]
    stop_early: bool,
    /// Directory of the files; they stay there after a failure.
    #[arg(long, default_value = "/var/tmp")]
    dir: PathBuf,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Frontend {
    /// NBD on a Unix socket.
    Socket,
    /// A block device; the kernel has to have ublk.
    Ublk,
    /// A block device; the kernel has to have NBD.
    Nbd,
}

impl Frontend {
    fn choice(self) -> FrontendChoice {
        match self {
            Frontend::Socket => FrontendChoice::Socket,
            Frontend::Ublk => FrontendChoice::Ublk,
            Frontend::Nbd => FrontendChoice::Nbd,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Frontend::Socket => "socket",
            Frontend::Ublk => "ublk",
            Frontend::Nbd => "nbd",
        }
    }
}

fn kernel(name: &str) -> Result<Kernel, String> {
    Kernel::from_name(name).ok_or_else(|| "use newest, ublk or nbd".to_owned())
}

fn main() -> ExitCode {
    match soak(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            // If standard error is closed, no message is possible.
            let _ = writeln!(io::stderr(), "\nThe soak run failed: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn soak(arguments: &Arguments) -> Result<bool> {
    let seed = arguments.seed.unwrap_or_else(|| fastrand::u64(..));
    let default_ms = if arguments.in_vm { REPLICA_TIMEOUT_IN_VM_MS } else { REPLICA_TIMEOUT_MS };
    let replica_timeout_ms = arguments.replica_timeout_ms.unwrap_or(default_ms);
    let options = SoakOptions {
        seed,
        faults: arguments.faults,
        time: arguments.seconds.map(Duration::from_secs),
        volumes: arguments.volumes.max(1),
        only: arguments.only,
        longest: Duration::from_secs(arguments.longest),
        frontend: arguments.frontend.choice(),
        replica_timeout: Duration::from_millis(replica_timeout_ms),
        encrypt: arguments.encrypt_in_transit,
        start: Instant::now(),
        stops_early: arguments.stop_early,
    };
    let replay = format!(
        "shorthorn-soak --seed {seed} --faults {} --volumes {} --longest {} --frontend {} \
         --replica-timeout-ms {replica_timeout_ms}{}",
        options.faults,
        options.volumes,
        arguments.longest,
        arguments.frontend.name(),
        if arguments.encrypt_in_transit { " --encrypt-in-transit" } else { "" }
    );
    println!("{replay}");
    if arguments.in_vm {
        let time = arguments.seconds.map(|seconds| format!("--seconds {seconds}"));
        let only = arguments.only.map(|only| format!("--only {only}"));
        let early = arguments.stop_early.then(|| "--stop-early".to_owned());
        let words = replay.split(' ').skip(1).map(str::to_owned).chain(time).chain(only).chain(early);
        return run_in_vm(arguments.kernel, &words.collect::<Vec<_>>(), VM_LIMIT);
    }
    let folder = tempfile::Builder::new().prefix("soak").tempdir_in(&arguments.dir);
    let folder = folder.with_context(|| format!("making a folder in {}", arguments.dir.display()))?;
    let report = run(&options, folder.path())?;
    println!("\n{report}");
    if report.passes_so_far() {
        return Ok(true);
    }
    println!("Logs and disks: {}", folder.keep().display());
    println!("The same faults in the same order: {replay}");
    println!("Those of volume N alone: the same with --only N");
    Ok(false)
}
