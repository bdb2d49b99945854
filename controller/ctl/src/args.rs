mod volume;

use std::convert::Infallible;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use shorthorn_pki::address::{AddressError, ServerUrl};
use shorthorn_types::parse_bytes;

use super::bundle::BundleArgs;
use super::format::{Format, seconds};
use super::list;
use super::reach::ReachArgs;
use super::tls::{TlsCommand, TokenArgs};
use super::upgrade::UpgradeCommand;
pub use volume::{CreateArgs, SalvageArgs, SetVolumeArgs, VolumeCommand};

/// Creates, attaches, detaches and deletes Shorthorn volumes, and shows their state.
#[derive(Debug, Parser)]
#[command(name = "shorthornctl", version, about, long_about = None, after_help = "\
Exit codes:
  0  done
  1  refused or failed; the message has the remedy
  2  wrong usage
  3  no such volume or node
  4  not done within --timeout; the controller continues
  5  the controller does not answer
  6  status or doctor has found a problem")]
pub struct Cli {
    /// Address of the controller.
    #[command(flatten)]
    pub reach: ReachArgs,
    /// Output format: table and wide are for people and may change; json and yaml are for programs, name is
    /// for scripts
    #[arg(long, short, global = true, value_enum, default_value_t = Format::Table)]
    pub output: Format,
    /// The subcommand with its arguments.
    #[command(subcommand)]
    pub command: CtlCommand,
}

/// Commands of shorthornctl.
#[derive(Debug, Subcommand)]
pub enum CtlCommand {
    /// Shows the cluster on one screen: problems, pending work and versions
    Status,
    /// Checks the setup of the cluster, and suggests a remedy for each problem
    Doctor,
    /// Writes a support bundle to one file: objects, problems, events, versions, metrics, configuration and
    /// logs. Leaves out secrets
    SupportBundle(BundleArgs),
    /// Prints the completion script for a shell
    Completion {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Writes a man page of each command to a directory
    #[command(hide = true)]
    Man {
        /// The directory
        directory: PathBuf,
    },
    /// Volumes
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Replicas: the copies of the data of volumes
    #[command(subcommand)]
    Replica(ReplicaCommand),
    /// Nodes
    #[command(subcommand)]
    Node(NodeCommand),
    /// Disks: the directories that hold replicas
    #[command(subcommand)]
    Disk(DiskCommand),
    /// Orphans: replica directories without a volume, for example on a node or disk that was given up and is
    /// back
    #[command(subcommand)]
    Orphan(OrphanCommand),
    /// Certificates: of administrators, nodes, and the cluster's CA
    #[command(subcommand)]
    Tls(TlsCommand),
    /// Upgrades of programs that run
    #[command(subcommand)]
    Upgrade(UpgradeCommand),
    /// Moves replicas of attached volumes to better places, a few at a time, and waits for the moves. A
    /// better place is apart from other replicas of the volume, on the node of the engine, or on a disk with
    /// more room
    Rebalance(RebalanceArgs),
}

/// The limits of waiting.
#[derive(Clone, Copy, Debug, Args)]
pub struct WaitArgs {
    /// Returns once the controller has accepted the request, and does not wait
    #[arg(long)]
    pub no_wait: bool,
    /// Maximum seconds to wait; the controller continues without this command
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = seconds)]
    pub timeout: Duration,
}

#[derive(Debug, Subcommand)]
pub enum ReplicaCommand {
    /// Lists replicas
    #[command(visible_alias = "ls")]
    List {
        /// Lists only replicas of this volume
        #[arg(long)]
        volume: Option<String>,
        /// Lists only replicas on this node
        #[arg(long)]
        node: Option<String>,
        #[command(flatten)]
        options: list::ListOptions,
    },
    /// Replaces a replica elsewhere, then deletes it, and waits until it is gone. Its volume must be attached
    Evict {
        /// Name of the replica, from replica list
        name: String,
        /// Returns once the controller has accepted the request, and does not wait
        #[arg(long)]
        no_wait: bool,
        /// Maximum seconds to wait; the controller continues without this command
        #[arg(long, value_name = "SECONDS", default_value = "3600", value_parser = seconds)]
        timeout: Duration,
    },
}

#[derive(Debug, Subcommand)]
pub enum NodeCommand {
    /// Lists nodes and their disks
    #[command(visible_alias = "ls")]
    List {
        #[command(flatten)]
        options: list::ListOptions,
    },
    /// Shows everything about one node: frontends, disks, replicas, warnings
    #[command(visible_alias = "show")]
    Inspect {
        /// Name of the node
        name: String,
    },
    /// Sets the address of a node's agent; the controller creates the Node object if it is new
    Add {
        /// Name of the node, from the configuration of its agent
        name: String,
        /// HOST:PORT, http://HOST:PORT, https://HOST:PORT or unix:///PATH
        #[arg(long, value_name = "ADDRESS")]
        address: AgentAddress,
    },
    /// Prints a token that lets the agent of one node join, once
    Token(TokenArgs),
    /// Places no new replicas on a node; existing replicas stay
    Cordon {
        /// Name of the node
        name: String,
    },
    /// Replaces all replicas of a node elsewhere, deletes them, and waits until the node is empty. Uncordon
    /// cancels the drain
    Drain {
        /// Name of the node
        name: String,
        /// Returns once the controller has accepted the request, and does not wait
        #[arg(long)]
        no_wait: bool,
        /// Maximum seconds to wait; the controller continues without this command
        #[arg(long, value_name = "SECONDS", default_value = "3600", value_parser = seconds)]
        timeout: Duration,
    },
    /// Allows new replicas on a node again, and cancels a drain
    Uncordon {
        /// Name of the node
        name: String,
    },
    /// Reports whether a node can be restarted without leaving a volume with too few replicas, for scripts
    /// and kured. Exits with 0 if it can, otherwise with 1 and a list of the volumes that hold the node and
    /// their reasons
    CanReboot(CanRebootArgs),
    /// Gives up a node that never comes back. The controller forgets its replicas once their volumes are
    /// served without them. Drain a node that answers instead
    #[command(visible_alias = "rm")]
    Delete {
        /// Name of the node
        name: String,
        /// Does not ask
        #[arg(long, short)]
        yes: bool,
        /// Gives the node up even if it is not cordoned, has the last replica of a volume, or volumes are
        /// being detached from it. A volume without a complete replica is then lost
        #[arg(long)]
        force: bool,
    },
    /// Takes over a node that belongs to another cluster. Stop the controller of the other cluster first, or
    /// remove the node from it. Processes on the node continue; this cluster does not change those that it
    /// does not know
    Release {
        /// Name of the node
        name: String,
        /// The current owner of the node, as this command reports it without --cluster
        #[arg(long, value_name = "CLUSTER")]
        cluster: Option<String>,
    },
    /// Sets the tags and the zone of a node
    Set {
        /// Name of the node
        name: String,
        /// All tags of the node, replacing the current ones; empty: none
        #[arg(long, value_name = "TAG,...")]
        tags: Option<TagList>,
        /// Zone; empty: the zone in the configuration of its agent
        #[arg(long)]
        zone: Option<String>,
    },
}

/// Arguments of node can-reboot.
#[derive(Debug, Args)]
pub struct CanRebootArgs {
    /// Name of the node
    pub name: String,
    /// Ignores volumes that are attached to the node: kubectl drain moves them first
    #[arg(long)]
    pub before_drain: bool,
    /// Waits until the node can be restarted
    #[arg(long)]
    pub wait: bool,
    /// Maximum seconds to wait
    #[arg(long, value_name = "SECONDS", default_value = "3600", value_parser = seconds, requires = "wait")]
    pub timeout: Duration,
}

/// URL of an agent, whose scheme decides about TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentAddress(pub ServerUrl);

impl FromStr for AgentAddress {
    type Err = AddressError;
    fn from_str(text: &str) -> Result<AgentAddress, AddressError> {
        let url = if text.contains("://") { text.parse() } else { format!("http://{text}").parse() };
        url.map(AgentAddress)
    }
}

/// Tags in one argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TagList(pub Vec<String>);

impl FromStr for TagList {
    type Err = Infallible;
    fn from_str(text: &str) -> Result<TagList, Infallible> {
        Ok(TagList(text.split(',').filter(|tag| !tag.is_empty()).map(str::to_owned).collect()))
    }
}

#[derive(Debug, Subcommand)]
pub enum OrphanCommand {
    /// Lists orphans: replica directories that belong to no Replica object
    #[command(visible_alias = "ls")]
    List {
        #[command(flatten)]
        order: list::Order,
    },
    /// Moves an orphan to the trash of its disk
    #[command(visible_alias = "rm")]
    Delete {
        /// Name of the node
        node: String,
        /// Directory of its disk, from orphan list
        disk: String,
        /// Name of the directory, from orphan list
        name: String,
        /// Does not ask
        #[arg(long, short)]
        yes: bool,
    },
}

/// Arguments of rebalance.
#[derive(Debug, Args)]
pub struct RebalanceArgs {
    /// Moves only replicas of these volumes; by default, of all volumes
    pub volumes: Vec<String>,
    /// Maximum number of concurrent moves; each is a full copy
    #[arg(
        long, value_name = "NUMBER", default_value = "4", value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub max_moves: u32,
    /// Shows the planned moves, and moves nothing
    #[arg(long, conflicts_with = "cancel")]
    pub dry_run: bool,
    /// Cancels pending moves
    #[arg(long)]
    pub cancel: bool,
    /// Starts the first moves, and does not wait
    #[arg(long)]
    pub no_wait: bool,
    /// Maximum seconds to wait; moves that have started continue
    #[arg(long, value_name = "SECONDS", default_value = "86400", value_parser = seconds)]
    pub timeout: Duration,
}

/// Arguments of disk discover.
#[derive(Debug, Args)]
pub struct DiscoverArgs {
    /// Lists only devices of this node; can be repeated
    #[arg(long = "node", value_name = "NODE")]
    pub nodes: Vec<String>,
    /// Also shows devices that do not fit, with the reasons
    #[arg(long)]
    pub all: bool,
}

#[derive(Debug, Subcommand)]
pub enum DiskCommand {
    /// Adds a directory of a node as a disk for replicas
    Add {
        /// Name of the node
        node: String,
        /// Absolute path of the directory, on a mounted file system
        path: String,
    },
    /// Lists the block devices of all nodes that may become disks. Changes nothing: shorthorn-agent disk init
    /// makes disks of them on their host, from a reviewed file
    Discover(DiscoverArgs),
    /// Lists the disks of all nodes, with their UUIDs
    #[command(visible_alias = "ls")]
    List {
        #[command(flatten)]
        options: list::ListOptions,
    },
    /// Places no new replicas on a disk; existing replicas stay
    Cordon {
        /// Name of the node
        node: String,
        /// Directory of the disk
        path: String,
    },
    /// Replaces all replicas of a disk on other disks or nodes, deletes them, and waits until the disk is
    /// empty. Uncordon cancels the drain
    Drain {
        /// Name of the node
        node: String,
        /// Directory of the disk
        path: String,
        /// Returns once the controller has accepted the request, and does not wait
        #[arg(long)]
        no_wait: bool,
        /// Maximum seconds to wait; the controller continues without this command
        #[arg(long, value_name = "SECONDS", default_value = "3600", value_parser = seconds)]
        timeout: Duration,
    },
    /// Removes an empty disk from its node
    #[command(visible_alias = "rm")]
    Remove {
        /// Name of the node
        node: String,
        /// Directory of the disk
        path: String,
        /// The disk is gone, read-only or failing, and never comes back. Replaces its replicas without
        /// waiting for its data
        #[arg(long)]
        lost: bool,
        /// With --lost: removes the disk even if it works, or has the last complete replica of a volume,
        /// which is lost. Without --lost: removes the disk with its trash, which stays on it
        #[arg(long)]
        force: bool,
        /// Does not ask
        #[arg(long, short)]
        yes: bool,
    },
    /// Allows new replicas on a disk again, and cancels a drain
    Uncordon {
        /// Name of the node
        node: String,
        /// Directory of the disk
        path: String,
    },
    /// Sets the tags of a disk, its reserved space, and whether new replicas may be placed there
    Set {
        /// Name of the node
        node: String,
        /// Directory of the disk
        path: String,
        /// All tags of the disk, replacing the current ones; empty: none
        #[arg(long, value_name = "TAG,...")]
        tags: Option<TagList>,
        /// Space reserved for other uses, like 10GiB
        #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
        reserved: Option<u64>,
        /// Allows new replicas there
        #[arg(long, value_name = "true|false")]
        scheduling: Option<bool>,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_is_named_in_short_or_in_full() {
        for (text, url) in [
            ("10.0.0.1:9501", "http://10.0.0.1:9501"),
            ("[fd00::1]:9501", "http://[fd00::1]:9501"),
            ("http://node-a:9501", "http://node-a:9501"),
            ("unix:///run/agent.sock", "unix:///run/agent.sock"),
        ] {
            let AgentAddress(found) = text.parse().unwrap();
            assert_eq!(found.to_string(), url);
        }
        for bad in ["", "ftp://a:1", "unix://relative"] {
            assert!(bad.parse::<AgentAddress>().is_err(), "{bad}");
        }
    }
}
