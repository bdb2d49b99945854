use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use super::size::Size;
use crate::address::ServerUrl;
use crate::config::DEFAULT_SERVER;

/// Creates, attaches, detaches and deletes Shorthorn volumes, and shows what is there.
#[derive(Debug, Parser)]
#[command(version, about, long_about = None, after_help = "\
Exit codes:
  0  done
  1  refused or failed; the message says what to do
  2  wrong usage
  3  no such volume or node
  4  not done within --timeout; the controller goes on with it
  5  the controller is out of reach")]
pub struct Cli {
    /// Where the controller is: unix:///PATH or http://HOST:PORT
    #[arg(long, global = true, value_name = "URL", env = "SHORTHORN_SERVER", default_value = DEFAULT_SERVER)]
    pub server: ServerUrl,
    /// Tables are for people and may change; json and yaml are for programs
    #[arg(long, short, global = true, value_enum, default_value_t = Format::Table)]
    pub output: Format,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// How results are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    Table,
    /// For programs.
    Json,
    /// For programs.
    Yaml,
}

/// What there is to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Volumes
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// The copies of the data of volumes
    #[command(subcommand)]
    Replica(ReplicaCommand),
    /// The machines
    #[command(subcommand)]
    Node(NodeCommand),
    /// The directories that hold replicas
    #[command(subcommand)]
    Disk(DiskCommand),
}

/// What there is to do with volumes.
#[derive(Debug, Subcommand)]
pub enum VolumeCommand {
    /// Makes a volume, and waits until its replicas have disks
    Create(CreateArgs),
    /// Shows all volumes
    #[command(visible_alias = "ls")]
    List,
    /// Shows everything about one volume
    Inspect {
        /// Name of the volume
        name: String,
    },
    /// Makes the device on a node, and waits until it is there
    Attach {
        /// Name of the volume
        name: String,
        /// The node that gets the device
        #[arg(long)]
        node: String,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Takes the device away, and waits until it is gone. It must not be in use
    Detach {
        /// Name of the volume
        name: String,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Deletes a volume with all its data, and waits until it is gone
    #[command(visible_alias = "rm")]
    Delete {
        /// Name of the volume
        name: String,
        /// Does not ask
        #[arg(long, short)]
        yes: bool,
        #[command(flatten)]
        wait: WaitArgs,
    },
}

/// What a new volume is like.
#[derive(Debug, Args)]
pub struct CreateArgs {
    /// Lower-case letters, digits and '-', at most 63
    pub name: String,
    /// Like 10GiB or 512MiB: KiB, MiB, GiB, TiB, or a number of bytes
    #[arg(long)]
    pub size: Size,
    /// How many copies of the data there are, 1 to 8
    #[arg(long, default_value_t = 3, value_name = "COUNT")]
    pub replicas: u32,
    /// auto, ublk, nbd or socket
    #[arg(long, default_value = "auto")]
    pub frontend: String,
    /// Allows several replicas on one node
    #[arg(long)]
    pub soft_anti_affinity: bool,
    /// How long to wait.
    #[command(flatten)]
    pub wait: WaitArgs,
}

/// How long to wait.
#[derive(Clone, Copy, Debug, Args)]
pub struct WaitArgs {
    /// Returns as soon as the controller knows; it goes on by itself
    #[arg(long)]
    pub no_wait: bool,
    /// Seconds to wait at most; the controller goes on by itself
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = seconds)]
    pub timeout: Duration,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let text = text.strip_suffix('s').unwrap_or(text);
    let number: f64 = text.parse().map_err(|_| "a number of seconds, like 90".to_owned())?;
    Duration::try_from_secs_f64(number).map_err(|error| error.to_string())
}

/// What there is to do with replicas.
#[derive(Debug, Subcommand)]
pub enum ReplicaCommand {
    /// Shows replicas
    #[command(visible_alias = "ls")]
    List {
        /// Only those of this volume
        #[arg(long)]
        volume: Option<String>,
    },
}

/// What there is to do with nodes.
#[derive(Debug, Subcommand)]
pub enum NodeCommand {
    /// Shows the nodes and their disks
    #[command(visible_alias = "ls")]
    List,
}

/// What there is to do with disks.
#[derive(Debug, Subcommand)]
pub enum DiskCommand {
    /// Has a node keep replicas in a directory
    Add {
        /// The node
        node: String,
        /// The directory there, on a mounted file system; absolute
        path: String,
    },
}
