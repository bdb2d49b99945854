use std::convert::Infallible;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use super::bundle::BundleArgs;
use super::list;
use super::reach::ReachArgs;
use super::size::Size;
use crate::address::{AddressError, ServerUrl};

/// Creates, attaches, detaches and deletes Shorthorn volumes, and shows what is there.
#[derive(Debug, Parser)]
#[command(name = "shorthornctl", version, about, long_about = None, after_help = "\
Exit codes:
  0  done
  1  refused or failed; the message says what to do
  2  wrong usage
  3  no such volume or node
  4  not done within --timeout; the controller goes on with it
  5  the controller is out of reach
  6  status or doctor has found something wrong")]
pub struct Cli {
    /// Where the controller is.
    #[command(flatten)]
    pub reach: ReachArgs,
    /// Tables are for people and may change, wide ones show more; json and yaml are for programs, name is for scripts
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
    /// For people with wide screens.
    Wide,
    /// Kind and name, a line each.
    Name,
    /// For programs.
    Json,
    /// For programs.
    Yaml,
}

impl Format {
    /// Whether people read it. Where there are no names to show, `name` is as a table.
    pub(super) fn is_for_people(self) -> bool {
        !matches!(self, Format::Json | Format::Yaml)
    }
}

/// What there is to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Shows the cluster on one screen: what is wrong, what waits, and which versions there are
    Status,
    /// Checks whether the cluster is set up well, and says what mends what is not
    Doctor,
    /// Writes what whoever helps has to see to one file: objects, what is wrong, events, versions, metrics, configuration and
    /// logs. Secrets are left out
    SupportBundle(BundleArgs),
    /// Prints the script that completes commands in a shell
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
    /// The copies of the data of volumes
    #[command(subcommand)]
    Replica(ReplicaCommand),
    /// The machines
    #[command(subcommand)]
    Node(NodeCommand),
    /// The directories that hold replicas
    #[command(subcommand)]
    Disk(DiskCommand),
    /// Directories of replicas that belong to no volume: left over on a node or a disk that was given up
    /// and is back
    #[command(subcommand)]
    Orphan(OrphanCommand),
    /// Moves replicas of attached volumes to better places, a few at a time, and waits until that is done: apart from each
    /// other, to the node where their volume is used if it asks for that, to disks with more room
    Rebalance(RebalanceArgs),
}

/// What there is to do with volumes.
#[derive(Debug, Subcommand)]
pub enum VolumeCommand {
    /// Makes a volume, and waits until its replicas have disks
    Create(CreateArgs),
    /// Shows volumes; -o wide shows also what uses them
    #[command(visible_alias = "ls")]
    List {
        /// Only those whose claim is in this namespace
        #[arg(long, short, value_name = "NAMESPACE")]
        namespace: Option<String>,
        #[command(flatten)]
        options: list::Options,
    },
    /// Shows everything about one volume
    #[command(visible_alias = "show")]
    Inspect {
        /// Name of the volume
        name: String,
    },
    /// Says in sentences why a volume is not healthy, what it waits for and what can be done
    Why {
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
        /// Also if Kubernetes has it attached. Kubernetes is not told: no pod on that node gets the volume until it is
        /// attached there by hand or its VolumeAttachment is deleted
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Changes how many replicas a volume should have, and which places they get. Replicas that are there stay, but for those
    /// that are too many: these go one at a time while the volume is attached
    Set(SetVolumeArgs),
    /// Changes how many replicas a volume should have, as set --replicas does
    Replicas {
        /// Name of the volume
        name: String,
        /// How many copies of the data there are, 1 to 8
        count: u32,
    },
    /// Makes a volume larger, attached or not, while it is in use. It never gets smaller
    Expand {
        /// Name of the volume
        name: String,
        /// Its new size, like 20GiB
        size: Size,
        /// Waits until the volume, and its device where it is attached, has that size
        #[arg(long)]
        wait: bool,
        /// Seconds to wait at most; the controller goes on by itself
        #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = seconds, requires = "wait")]
        timeout: Duration,
    },
    /// Limits how much copying to replicas may take of the volume's speed
    RebuildLimit {
        /// Name of the volume
        name: String,
        /// The most that is copied per second, like 100MiB; 0: no limit
        #[arg(long, default_value = "0", value_name = "SIZE")]
        bytes_per_s: Size,
        /// The most that copying takes of the bytes that move while the volume is busy, 1 to 100 percent
        #[arg(long, default_value_t = 30, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(1..=100))]
        share: u32,
    },
    /// Compares the snapshots and the content of all replicas of an attached volume; show and why tell what was found
    Scrub {
        /// Name of the volume
        name: String,
        /// Puts right what has rotten: in a snapshot what is not as it was when all replicas agreed, else what differs
        /// from the majority
        #[arg(long)]
        repair: bool,
        /// The most that is compared per second, like 100MiB; 0: no limit
        #[arg(long, default_value = "0", value_name = "SIZE")]
        rate: Size,
        /// Ends the scrub that is under way
        #[arg(long, conflicts_with_all = ["repair", "rate"])]
        stop: bool,
    },
    /// Replaces the engine process of an attached volume by the program that is installed on its node now; the device
    /// stays in use
    UpgradeEngine {
        /// Name of the volume
        name: String,
    },
    /// Shows what each replica of a volume that cannot be served has, and makes one of them the volume. What others
    /// had and it lacks is lost for good
    Salvage(SalvageArgs),
    /// Shows what is left of deleted volumes and replicas: their data stays in the trash of its disk for a day, unless the agent
    /// there is configured otherwise or the disk gets full
    Trash {
        /// Only what is of this volume
        name: Option<String>,
        /// Deletes what is of this volume for good
        #[arg(long, requires = "name")]
        remove: bool,
        /// Deletes only this replica of it
        #[arg(long, value_name = "ID", requires = "remove")]
        replica: Option<String>,
        /// Does not ask
        #[arg(long, short, requires = "remove")]
        yes: bool,
    },
    /// Brings a deleted volume back from the trash, detached; fails if not all of it could be reached. A
    /// PersistentVolume of Kubernetes is not made by that
    Undelete {
        /// Name of the volume
        name: String,
    },
    /// Deletes a volume with its data, which stays in the trash for a while, and waits until it is gone
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

/// What is changed of a volume.
#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
pub struct VolumeChanges {
    /// How many copies of the data there are, 1 to 8
    #[arg(long, value_name = "COUNT")]
    pub replicas: Option<u32>,
    /// All tags that a node must have to get a replica; empty: none
    #[arg(long, value_name = "TAG,...")]
    pub node_selector: Option<TagList>,
    /// All tags that a disk must have to get a replica; empty: none
    #[arg(long, value_name = "TAG,...")]
    pub disk_selector: Option<TagList>,
    /// best-effort: a replica that gets a place goes where the volume is attached, if that can be
    #[arg(long, value_name = "disabled|best-effort")]
    pub data_locality: Option<String>,
    /// Whether several replicas may be on one node
    #[arg(long, value_name = "true|false")]
    pub soft_anti_affinity: Option<bool>,
    /// Whether no two replicas may be in one zone
    #[arg(long, value_name = "true|false")]
    pub hard_zone_anti_affinity: Option<bool>,
    /// Whether no two replicas may be on one disk
    #[arg(long, value_name = "true|false")]
    pub hard_disk_anti_affinity: Option<bool>,
}

/// Which volume is changed, and how.
#[derive(Debug, Args)]
pub struct SetVolumeArgs {
    /// Name of the volume
    pub name: String,
    /// What is changed.
    #[command(flatten)]
    pub changes: VolumeChanges,
}

/// Which replica becomes the volume.
#[derive(Debug, Args)]
pub struct SalvageArgs {
    /// Name of the volume
    pub name: String,
    /// The replica that becomes the volume; without it nothing is changed
    #[arg(long, value_name = "ID")]
    pub replica: Option<String>,
    /// Why; kept with the volume
    #[arg(long, default_value = "", hide_default_value = true)]
    pub reason: String,
    /// Does not ask
    #[arg(long, requires = "replica")]
    pub yes_i_may_lose_data: bool,
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
    /// Allows several replicas on one node (replicaSoftAntiAffinity)
    #[arg(long)]
    pub soft_anti_affinity: bool,
    /// Allows no two replicas in one zone; else they are apart where that can be
    #[arg(long)]
    pub hard_zone_anti_affinity: bool,
    /// Allows no two replicas on one disk; else they are apart where that can be
    #[arg(long)]
    pub hard_disk_anti_affinity: bool,
    /// Tags that a node must have to get a replica
    #[arg(long, value_name = "TAG,...", value_delimiter = ',')]
    pub node_selector: Vec<String>,
    /// Tags that a disk must have to get a replica
    #[arg(long, value_name = "TAG,...", value_delimiter = ',')]
    pub disk_selector: Vec<String>,
    /// best-effort: a replica that gets a place goes where the volume is attached, if that can be
    #[arg(long, default_value = "disabled", value_name = "disabled|best-effort")]
    pub data_locality: String,
    /// Replicas compare every read with the sums of its blocks; another replica answers a read of rot
    #[arg(long)]
    pub verify_reads: bool,
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
        /// Only those on this node
        #[arg(long)]
        node: Option<String>,
        #[command(flatten)]
        options: list::Options,
    },
    /// Has a replica replaced elsewhere and then deleted, and waits until it is gone. Its volume must be attached
    Evict {
        /// Name of the replica, as replica list shows it
        name: String,
        /// Returns as soon as the controller knows; it goes on by itself
        #[arg(long)]
        no_wait: bool,
        /// Seconds to wait at most; the controller goes on by itself
        #[arg(long, value_name = "SECONDS", default_value = "3600", value_parser = seconds)]
        timeout: Duration,
    },
}

/// What there is to do with nodes.
#[derive(Debug, Subcommand)]
pub enum NodeCommand {
    /// Shows the nodes and their disks
    #[command(visible_alias = "ls")]
    List {
        #[command(flatten)]
        options: list::Options,
    },
    /// Shows everything about one node: what it can do, what is on it, what it warns of
    #[command(visible_alias = "show")]
    Inspect {
        /// Name of the node
        name: String,
    },
    /// Says where the agent of a node answers; the controller makes the node if it is new
    Add {
        /// Name of the node, as its agent is configured
        name: String,
        /// HOST:PORT, http://HOST:PORT or unix:///PATH
        #[arg(long, value_name = "ADDRESS")]
        address: AgentAddress,
    },
    /// Has no new replicas made on a node; those that are there stay
    Cordon {
        /// Name of the node
        name: String,
    },
    /// Has everything leave a node, and waits until it is empty: its replicas are replaced elsewhere, then they go.
    /// Uncordon ends that
    Drain {
        /// Name of the node
        name: String,
        /// Returns as soon as the controller knows; it goes on by itself
        #[arg(long)]
        no_wait: bool,
        /// Seconds to wait at most; the controller goes on by itself
        #[arg(long, value_name = "SECONDS", default_value = "3600", value_parser = seconds)]
        timeout: Duration,
    },
    /// Allows new replicas on a node again; those that were to leave it stay
    Uncordon {
        /// Name of the node
        name: String,
    },
    /// Says whether a node can be restarted without taking a volume below what it needs, for scripts and
    /// kured. Ends with 0 if it can; else with 1, after saying which volumes hold it up and what they wait
    /// for
    CanReboot(CanRebootArgs),
    /// Gives up a node that never comes back: its replicas are forgotten as their volumes go on without them. One that
    /// answers is drained instead
    #[command(visible_alias = "rm")]
    Delete {
        /// Name of the node
        name: String,
        /// Does not ask
        #[arg(long, short)]
        yes: bool,
        /// Also where it is not cordoned, or has the last replica of volumes: those are lost
        #[arg(long)]
        force: bool,
    },
    /// Has a node that belongs to another cluster released to this one. Stop the controller of the other cluster first, or
    /// take the node out of it. What runs on the node goes on; what this cluster does not know, it leaves alone
    Release {
        /// Name of the node
        name: String,
        /// The cluster that it belongs to now, as a call without this says it
        #[arg(long, value_name = "CLUSTER")]
        cluster: Option<String>,
    },
    /// Says which tags a node has and what fails together with it
    Set {
        /// Name of the node
        name: String,
        /// All its tags from now on; empty: none
        #[arg(long, value_name = "TAG,...")]
        tags: Option<TagList>,
        /// Its zone; empty: the one that its agent is configured with
        #[arg(long)]
        zone: Option<String>,
    },
}

/// Which node, and when it is to be restarted.
#[derive(Debug, Args)]
pub struct CanRebootArgs {
    /// Name of the node
    pub name: String,
    /// Leaves out volumes that are attached there: kubectl drain moves them first
    #[arg(long)]
    pub before_drain: bool,
    /// Waits until it can
    #[arg(long)]
    pub wait: bool,
    /// Seconds to wait at most
    #[arg(long, value_name = "SECONDS", default_value = "3600", value_parser = seconds, requires = "wait")]
    pub timeout: Duration,
}

/// Where an agent answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentAddress(pub ServerUrl);

impl FromStr for AgentAddress {
    type Err = AddressError;
    fn from_str(text: &str) -> Result<AgentAddress, AddressError> {
        let url = if text.contains("://") { text.parse() } else { format!("http://{text}").parse() };
        url.map(AgentAddress)
    }
}

/// Tags in one word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TagList(pub Vec<String>);

impl FromStr for TagList {
    type Err = Infallible;
    fn from_str(text: &str) -> Result<TagList, Infallible> {
        Ok(TagList(text.split(',').filter(|tag| !tag.is_empty()).map(str::to_owned).collect()))
    }
}

/// What there is to do with directories that are left over.
#[derive(Debug, Subcommand)]
pub enum OrphanCommand {
    /// Shows them
    #[command(visible_alias = "ls")]
    List,
    /// Moves one of them to the trash of its disk
    #[command(visible_alias = "rm")]
    Delete {
        /// The node
        node: String,
        /// The disk there
        disk: String,
        /// Name of the directory, as the list shows it
        name: String,
        /// Does not ask
        #[arg(long, short)]
        yes: bool,
    },
}

/// What is moved, and how fast.
#[derive(Debug, Args)]
pub struct RebalanceArgs {
    /// Only replicas of these volumes; none: of all
    pub volumes: Vec<String>,
    /// The most replicas that are moved at a time; each is copied as a whole
    #[arg(long, value_name = "NUMBER", default_value = "4", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_moves: u32,
    /// Only shows what would be moved
    #[arg(long, conflicts_with = "cancel")]
    pub dry_run: bool,
    /// Lets stay what is on its way
    #[arg(long)]
    pub cancel: bool,
    /// Begins as many moves as may be made at a time, and returns
    #[arg(long)]
    pub no_wait: bool,
    /// Seconds to wait at most; what has begun goes on
    #[arg(long, value_name = "SECONDS", default_value = "86400", value_parser = seconds)]
    pub timeout: Duration,
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
    /// Shows the disks of all nodes, with their identities
    #[command(visible_alias = "ls")]
    List {
        #[command(flatten)]
        options: list::Options,
    },
    /// Has no new replicas made on a disk; those that are there stay
    Cordon {
        /// The node
        node: String,
        /// The directory there
        path: String,
    },
    /// Has everything leave a disk, and waits until it is empty: its replicas are replaced on other disks or nodes, then they
    /// go. Uncordon ends that
    Drain {
        /// The node
        node: String,
        /// The directory there
        path: String,
        /// Returns as soon as the controller knows; it goes on by itself
        #[arg(long)]
        no_wait: bool,
        /// Seconds to wait at most; the controller goes on by itself
        #[arg(long, value_name = "SECONDS", default_value = "3600", value_parser = seconds)]
        timeout: Duration,
    },
    /// Has a disk be used no more, once nothing is on it
    #[command(visible_alias = "rm")]
    Remove {
        /// The node
        node: String,
        /// The directory there
        path: String,
        /// It is gone, read-only or fails, and does not come back: its replicas are replaced, and what is
        /// on it is not waited for
        #[arg(long)]
        lost: bool,
        /// With --lost: also if nothing seems wrong with it, or if it has the last replica of volumes: those are lost. Else: also if
        /// something is in its trash, which stays on the disk
        #[arg(long)]
        force: bool,
        /// Does not ask
        #[arg(long, short)]
        yes: bool,
    },
    /// Allows new replicas on a disk again; those that were to leave it stay
    Uncordon {
        /// The node
        node: String,
        /// The directory there
        path: String,
    },
    /// Says which tags a disk has, what replicas leave to others there, and whether it gets new ones
    Set {
        /// The node
        node: String,
        /// The directory there
        path: String,
        /// All its tags from now on; empty: none
        #[arg(long, value_name = "TAG,...")]
        tags: Option<TagList>,
        /// What replicas leave to others, like 10GiB
        #[arg(long, value_name = "SIZE")]
        reserved: Option<Size>,
        /// Whether new replicas may go there
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
        for bad in ["", "https://a:1", "unix://relative"] {
            assert!(bad.parse::<AgentAddress>().is_err(), "{bad}");
        }
    }
}
