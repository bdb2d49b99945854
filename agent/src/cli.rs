//! The command line.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use shorthorn_control::{FrontendChoice, INTENT_CLEAR_AFTER_MS};
use shorthorn_logging::LogFormat;
use shorthorn_metrics::MetricsListen;
use shorthorn_types::VolumeName;

use crate::filesystem::Filesystem;
use crate::serve::config::SUM_MIB_PER_S;
use crate::size::SizeArgument;

/// The place of mount units.
const UNITS: &str = "/etc/systemd/system";

/// Replicated block storage: everything that runs on a node.
///
/// `serve` is the agent of a node in a cluster. `run` does not need an agent, a controller or a
/// configuration. It serves one volume from a directory for as long as it runs. `engine` and `replica serve`
/// are the processes that both of them start.
#[derive(Debug, Parser)]
#[command(name = "shorthorn-agent", version, about, long_about, max_term_width = 100)]
pub struct Cli {
    #[command(flatten)]
    pub log: LogArgs,
    #[command(subcommand)]
    pub command: AgentCommand,
}

#[derive(Debug, Args)]
pub struct LogArgs {
    /// Log level: error, warn, info, debug or trace, or directives like info,shorthorn_engine=debug.
    /// Overrides the configuration file; the default is info
    #[arg(long, global = true, value_name = "LEVEL", env = "SHORTHORN_LOG", value_parser = log_level)]
    pub log_level: Option<String>,
    /// Format of the log on standard error. Overrides the configuration file
    #[arg(long, global = true, value_name = "FORMAT", env = "SHORTHORN_LOG_FORMAT")]
    pub log_format: Option<LogFormat>,
}

fn log_level(text: &str) -> Result<String, String> {
    shorthorn_logging::check_level(text).map(|()| text.to_owned())
}

#[derive(Debug, Subcommand)]
pub enum AgentCommand {
    /// Runs one volume without a daemon, until SIGTERM or ctrl-C
    Run(RunArgs),
    /// Runs the agent of this node: the API that a controller calls
    Serve(ServeArgs),
    /// Runs the agent of the host from a container on it
    ServeOnHost(ServeOnHostArgs),
    /// Sets this node up: settings, disks, certificate and units
    Setup(SetupArgs),
    /// Gets a certificate for this node from a controller, with a one-time token
    Join(JoinArgs),
    /// Checks whether this host can serve volumes, and names the remedy of each problem
    Check(CheckArgs),
    /// Finds empty devices, and makes disks of those that an operator has chosen
    #[command(subcommand)]
    Disk(DiskCommand),
    /// Runs the engine of one volume; started by `serve` and `run`
    Engine(RoleArgs),
    /// Serves, shows or exports a replica directory
    #[command(subcommand)]
    Replica(ReplicaDirectoryCommand),
    /// Writes a man page of each command to a directory
    #[command(hide = true)]
    Man {
        /// The directory
        directory: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
pub enum ReplicaDirectoryCommand {
    /// Serves one replica directory to engines; started by `serve` and `run`
    Serve(RoleArgs),
    /// Shows a replica directory that no process has open
    Inspect(InspectArgs),
    /// Exports the volume of a replica directory, or one of its snapshots, as a raw image
    Export(ExportArgs),
}

/// Arguments of an engine or replica process.
#[derive(Clone, Debug, Args)]
pub struct RoleArgs {
    /// Spec file of the process: JSON, written by `serve` and `run`
    #[arg(long, value_name = "FILE")]
    pub spec: PathBuf,
    /// Locks this file and writes the process id to it; does not start if another process has the lock
    #[arg(long, value_name = "FILE")]
    pub pid_file: Option<PathBuf>,
    /// Writes the message to this file if the process ends with an error
    #[arg(long, value_name = "FILE")]
    pub error_file: Option<PathBuf>,
    /// Stops when the parent process, which must have this id, ends
    #[arg(long, value_name = "PID")]
    pub parent: Option<i32>,
}

/// Runs one volume in a directory, without a daemon.
///
/// Creates the volume if DIR has none, otherwise continues with the existing one. When the volume is ready,
/// the command prints one line of JSON with `device` or with `uri` and `socket`. `pids` are all its
/// processes. It restarts an engine or replica that dies. SIGTERM and SIGINT stop everything cleanly.
///
/// After SIGKILL, a volume with the frontend `socket` stops as well. With a kernel frontend, engine and
/// replicas continue, so that a mounted file system keeps its disk. The next `run` on DIR takes the device
/// over.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Name of the volume: lower-case letters, digits and '-', at most 63 characters
    pub name: VolumeName,
    /// Directory of the volume: its replicas, identity and sockets; created if it does not exist
    #[arg(long)]
    pub dir: PathBuf,
    /// Size of the volume, for instance 1GiB: a multiple of 4096 bytes
    #[arg(long)]
    pub size: SizeArgument,
    /// Number of replicas, 1 to 8
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=8))]
    pub replicas: u8,
    /// Frontend of the volume. `socket` works for every user, the others need root and a kernel driver
    #[arg(long, default_value = "socket")]
    pub frontend: FrontendArg,
    /// Threads of the engine, and connections to each replica; NBD and iSCSI have one
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=8))]
    pub queues: u16,
    /// Requests in flight per queue
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub queue_depth: u16,
    /// Milliseconds after which a replica that does not answer counts as late
    #[arg(
        long, default_value_t = 5000, value_name = "MS",
        value_parser = clap::value_parser!(u32).range(500..=600_000)
    )]
    pub replica_timeout_ms: u32,
    /// Milliseconds without a write after which a region counts as clean. After a crash of the engine, only
    /// dirty regions are resynced. 0: never while the engine runs
    #[arg(long, default_value_t = INTENT_CLEAR_AFTER_MS, value_name = "MS")]
    pub intent_clear_after_ms: u32,
    /// Replicas compare every read with their block checksums; another replica answers if one has rot
    #[arg(long)]
    pub verify_reads: bool,
    /// MiB per second that each replica of an idle volume reads to compute block checksums. 0: no checksums
    #[arg(long, default_value_t = SUM_MIB_PER_S, value_name = "MIB")]
    pub sum_mib_per_s: u32,
    /// Seconds after which the command fails if the volume is not ready
    #[arg(
        long, default_value_t = 60, value_name = "SECONDS",
        value_parser = clap::value_parser!(u64).range(1..=3600)
    )]
    pub ready_timeout: u64,
    /// Directory of the device node
    #[arg(long, default_value = "/dev/longhorn", value_name = "DIR")]
    pub device_dir: PathBuf,
}

/// A frontend, as people name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FrontendArg {
    /// NBD on a Unix socket: no kernel driver, no root
    Socket,
    /// A block device: ublk if the kernel has it, otherwise nbd, otherwise iscsi
    Auto,
    /// A block device through the ublk driver
    Ublk,
    /// A block device through the nbd driver
    Nbd,
    /// A block device through tgt and open-iscsi, for kernels with neither driver
    Iscsi,
}

impl From<FrontendArg> for FrontendChoice {
    fn from(arg: FrontendArg) -> FrontendChoice {
        match arg {
            FrontendArg::Socket => FrontendChoice::Socket,
            FrontendArg::Auto => FrontendChoice::Auto,
            FrontendArg::Ublk => FrontendChoice::Ublk,
            FrontendArg::Nbd => FrontendChoice::Nbd,
            FrontendArg::Iscsi => FrontendChoice::Iscsi,
        }
    }
}

/// Runs the agent of this node.
///
/// Engines and replicas are systemd units, or separate processes if PID 1 is not systemd. They continue
/// when the agent stops, crashes or is upgraded, and the next agent finds them again.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Configuration file in TOML. The default is /etc/shorthorn/agent.toml, if that exists
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Checks the configuration, and exits
    #[arg(long)]
    pub check: bool,
    /// Overrides `data_address`, `data_interface` and `data_network` of the configuration
    #[arg(long, value_name = "IP")]
    pub data_address: Option<IpAddr>,
    /// Overrides `metrics_listen` of the configuration; off turns metrics off
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub metrics_listen: Option<MetricsListen>,
}

/// Runs the agent of the host from a container on it.
///
/// The container has to be privileged, with the process ids and the network of the host (`hostPID`,
/// `hostNetwork`). The command copies this program and its units to the host, enters the mounts of the host,
/// and runs `serve` there. Engines and replicas are units of the host's systemd: they continue when the
/// container ends.
#[derive(Debug, Args)]
pub struct ServeOnHostArgs {
    /// Settings as in agent.toml, in a file of the container; copied to /run/shorthorn/agent.toml of the host
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Name of the node, unless the settings have it
    #[arg(long, value_name = "NAME")]
    pub node_name: Option<String>,
    /// Address of the node for its API and its replicas, unless the settings have others
    #[arg(long, value_name = "IP")]
    pub address: IpAddr,
    /// Port of the API
    #[arg(long, default_value_t = 9501, value_name = "PORT")]
    pub port: u16,
    /// Port of metrics on the address of the node, unless the settings have `metrics_listen`
    #[arg(long, value_name = "PORT")]
    pub metrics_port: Option<u16>,
    /// Directory of the host for this program. Its file system must allow programs to run
    #[arg(long, default_value = "/var/lib/shorthorn/bin", value_name = "DIR")]
    pub programs: PathBuf,
}

/// Gets a certificate for this node from a controller, with a one-time token.
///
/// `shorthornctl node token NAME` makes the token. In a Kubernetes cluster, the agent needs no token: it uses
/// the identity of the kubelet. A running agent notices the certificate and begins to serve the controller.
#[derive(Debug, Args)]
pub struct JoinArgs {
    /// The token; @FILE reads it from a file, @- from standard input
    #[arg(long, value_name = "TOKEN|@FILE", env = "SHORTHORN_JOIN_TOKEN", hide_env_values = true)]
    pub token: String,
    /// Address of the controller's enrolment API
    #[arg(long, value_name = "HOST:PORT")]
    pub controller: String,
    /// Configuration file of the agent, for the name of the node and `tls_dir`
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Sets this node up, after its package was installed.
///
/// Makes the directories of the disks, writes agent.toml, gets a certificate if a token is given, enables and
/// starts the units, and checks the host. A configuration that was changed stays: the command then names the
/// differences and does nothing. It can be repeated. In a Kubernetes cluster, the agent needs no token,
/// because it uses the identity of the kubelet. Exit code: that of `check`, or 1 if a step has failed.
#[derive(Debug, Args)]
pub struct SetupArgs {
    /// Token of the cluster; @FILE reads it from a file, @- from standard input
    #[arg(
        long,
        value_name = "TOKEN|@FILE",
        env = "SHORTHORN_JOIN_TOKEN",
        hide_env_values = true,
        requires = "controller"
    )]
    pub token: Option<String>,
    /// Address of the controller's enrolment API
    #[arg(long, value_name = "HOST:PORT", requires = "token")]
    pub controller: Option<String>,
    /// Name of the node [default: the name of the host]
    #[arg(long, value_name = "NAME")]
    pub node_name: Option<String>,
    /// Address of the node for its API and its replicas [default: the address of the default route]
    #[arg(long, value_name = "IP")]
    pub address: Option<IpAddr>,
    /// Interface with the address at which other nodes reach the replicas, instead of the address of the node
    #[arg(long, value_name = "NAME")]
    pub data_interface: Option<String>,
    /// Directory of a disk, on a mounted file system; created if it does not exist. Can be repeated
    #[arg(long = "disk", value_name = "DIR", default_value = "/var/lib/longhorn")]
    pub disks: Vec<PathBuf>,
    /// Configuration file of the agent [default: /etc/shorthorn/agent.toml]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Shows the steps, and performs none
    #[arg(long)]
    pub dry_run: bool,
}

/// Checks whether this host can serve volumes.
///
/// Examines kernel, ublk and NBD, multipathd, udev and LVM, kubelet, disks, ports, clock, network and
/// certificate. It loads the modules of ublk and NBD as the agent does, pings the nodes of replicas that
/// this node uses, and changes nothing else. Exit code: 0 without a finding, 1 if the worst finding is a
/// warning, 2 if a check has failed. `shorthornctl doctor` shows the findings of all nodes, except those
/// that need a ping or a module.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// Configuration file of the agent
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Output format: for people, or for programs
    #[arg(long, short, default_value = "text", value_name = "FORMAT")]
    pub output: OutputFormat,
}

#[derive(Debug, Subcommand)]
pub enum DiskCommand {
    /// Writes a file with the devices of this host that may become disks, for review
    Discover(DiscoverArgs),
    /// Makes file systems on the devices that a reviewed file lists, mounts them and adds them as disks
    Init(InitArgs),
}

/// Writes a file with the devices of this host that may become disks.
///
/// A device fits if it is empty and unused. It must not have partitions, mounts, swap, or a signature of a
/// file system, partition table, LVM or RAID. Devices are only read. The reasons against the others are
/// comments of the file. Mounted file systems need no file: `shorthornctl disk add NODE DIRECTORY`.
#[derive(Debug, Args)]
pub struct DiscoverArgs {
    /// Devices to examine; all disks and RAID arrays by default. Network disks, such as iSCSI, are skipped
    /// unless you name them
    #[arg(value_name = "DEVICE")]
    pub devices: Vec<PathBuf>,
    /// The file to write; `-` is standard output
    #[arg(long, short, default_value = "-", value_name = "FILE")]
    pub file: PathBuf,
    /// File system to make
    #[arg(long, value_enum, default_value_t = Filesystem::Xfs)]
    pub filesystem: Filesystem,
    /// Configuration file of the agent
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Makes file systems on the devices that a reviewed file wants.
///
/// It looks at all of them first, and changes nothing if one must not be used. That is a device other than
/// the file names, or one that is no longer empty and unused. After an interruption, run it again: it
/// continues. A systemd unit mounts each file system by its UUID.
#[derive(Debug, Args)]
pub struct InitArgs {
    /// The reviewed file
    pub file: PathBuf,
    /// Checks the file and the devices, and changes nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Repeats each interrupted mkfs of the file
    #[arg(long)]
    pub redo: bool,
    /// Directory of the mount units
    #[arg(long, value_name = "DIR", default_value = UNITS)]
    pub units: PathBuf,
    /// Configuration file of the agent
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct InspectArgs {
    /// The replica directory
    pub dir: PathBuf,
    /// Output format: for people, or for programs
    #[arg(long, default_value = "text", value_name = "FORMAT")]
    pub output: OutputFormat,
}

/// Formats for the output of commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// For people
    Text,
    /// For programs
    Json,
}

#[derive(Debug, Args)]
pub struct ExportArgs {
    /// The replica directory
    pub dir: PathBuf,
    /// The snapshot to write instead of the current data of the volume
    #[arg(long, value_name = "NAME")]
    pub snapshot: Option<String>,
    /// The file to write, sparse; `-` is standard output
    #[arg(value_name = "FILE|-")]
    pub file: PathBuf,
}
