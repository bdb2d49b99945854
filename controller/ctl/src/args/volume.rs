//! Arguments of the commands for volumes.

use std::time::Duration;

use clap::{Args, Subcommand};
use shorthorn_types::parse_bytes;

use super::{TagList, WaitArgs};
use crate::format::seconds;
use crate::list;

#[derive(Debug, Subcommand)]
pub enum VolumeCommand {
    /// Creates a volume, and waits until its replicas are scheduled
    Create(CreateArgs),
    /// Lists volumes; -o wide also shows their claims and workloads
    #[command(visible_alias = "ls")]
    List {
        /// Lists only volumes whose claim is in this namespace
        #[arg(long, short, value_name = "NAMESPACE")]
        namespace: Option<String>,
        #[command(flatten)]
        options: list::ListOptions,
    },
    /// Shows everything about one volume
    #[command(visible_alias = "show")]
    Inspect {
        /// Name of the volume
        name: String,
    },
    /// Explains the problems of a volume, the events that it waits for, and the remedies
    Why {
        /// Name of the volume
        name: String,
    },
    /// Attaches a volume to a node, and waits for its device
    Attach {
        /// Name of the volume
        name: String,
        /// The node to attach the volume to
        #[arg(long)]
        node: String,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Detaches a volume, and waits until its device is gone. The device must not be in use
    Detach {
        /// Name of the volume
        name: String,
        /// Detaches even if a VolumeAttachment names the volume. Kubernetes does not notice: pods on that
        /// node do not get the volume until you attach it there by hand or delete its VolumeAttachment.
        /// An engine that has not served for a minute is stopped although its device is in use. Its users
        /// get errors. Writes in progress and data in the page cache are lost
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Changes the number of replicas of a volume and the rules for their placement. Existing replicas stay.
    /// Surplus replicas are removed one at a time while the volume is attached
    Set(SetVolumeArgs),
    /// Changes the number of replicas, like set --replicas
    Replicas {
        /// Name of the volume
        name: String,
        /// Number of replicas, 1 to 8
        count: u32,
    },
    /// Makes a volume larger, attached or not, even in use. Volumes never shrink
    Expand {
        /// Name of the volume
        name: String,
        /// New size, like 20GiB
        #[arg(value_parser = parse_bytes)]
        size: u64,
        /// Waits until the volume, and its device if it is attached, have that size
        #[arg(long)]
        wait: bool,
        /// Maximum seconds to wait; the controller continues without this command
        #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = seconds, requires = "wait")]
        timeout: Duration,
    },
    /// Limits the speed of rebuilds of a volume
    RebuildLimit {
        /// Name of the volume
        name: String,
        /// Maximum bytes copied per second, like 100MiB; 0: no limit
        #[arg(long, default_value = "0", value_name = "SIZE", value_parser = parse_bytes)]
        bytes_per_s: u64,
        /// Maximum share of rebuilds and resyncs in the traffic of a busy volume, in percent: 1 to 100
        #[arg(
            long, default_value_t = 30, value_name = "PERCENT",
            value_parser = clap::value_parser!(u32).range(1..=100)
        )]
        share: u32,
    },
    /// Compares snapshots and data of all replicas of an attached volume; inspect and why show the result
    Scrub {
        /// Name of the volume
        name: String,
        /// Repairs rot: in a snapshot, data that differs from its checksum; otherwise, data that differs from
        /// the majority
        #[arg(long)]
        repair: bool,
        /// Maximum bytes compared per second, like 100MiB; 0: no limit
        #[arg(long, default_value = "0", value_name = "SIZE", value_parser = parse_bytes)]
        rate: u64,
        /// Stops the current scrub
        #[arg(long, conflicts_with_all = ["repair", "rate"])]
        stop: bool,
    },
    /// Restarts the engine of an attached volume with the program that is installed on its node. The device
    /// stays in use
    UpgradeEngine {
        /// Name of the volume
        name: String,
    },
    /// Shows the data of each replica of a volume that cannot start, and starts the volume from one of them.
    /// Data that only other replicas have is lost for good
    Salvage(SalvageArgs),
    /// Lists deleted volumes and replicas in the trash. Data stays in the trash of its disk for a day, unless
    /// the agent is configured otherwise or the disk fills up
    Trash {
        /// Lists only the trash of this volume
        name: Option<String>,
        #[command(flatten)]
        order: list::Order,
        /// Deletes the trash of this volume for good
        #[arg(long, requires = "name", conflicts_with_all = ["sort_by", "watch"])]
        remove: bool,
        /// Deletes only this replica
        #[arg(long, value_name = "ID", requires = "remove")]
        replica: Option<String>,
        /// Does not ask
        #[arg(long, short, requires = "remove")]
        yes: bool,
    },
    /// Restores a deleted volume from the trash, detached. Fails if a part of the trash could not be reached.
    /// Does not create a PersistentVolume
    Undelete {
        /// Name of the volume
        name: String,
    },
    /// Deletes a volume, and waits until it is gone. Its data stays in the trash for a while
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

/// The changes of `volume set`, of which at least one is required.
#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
pub struct VolumeChanges {
    /// The number of replicas, 1 to 8
    #[arg(long, value_name = "COUNT")]
    pub replicas: Option<u32>,
    /// Tags that a node must have to get a replica; empty: none
    #[arg(long, value_name = "TAG,...")]
    pub node_selector: Option<TagList>,
    /// Tags that a disk must have to get a replica; empty: none
    #[arg(long, value_name = "TAG,...")]
    pub disk_selector: Option<TagList>,
    /// best-effort: places a new replica on the node of the engine if possible
    #[arg(long, value_name = "disabled|best-effort")]
    pub data_locality: Option<String>,
    /// Allows several replicas on one node
    #[arg(long, value_name = "true|false")]
    pub soft_anti_affinity: Option<bool>,
    /// Forbids two replicas in one zone
    #[arg(long, value_name = "true|false")]
    pub hard_zone_anti_affinity: Option<bool>,
    /// Forbids two replicas on one disk
    #[arg(long, value_name = "true|false")]
    pub hard_disk_anti_affinity: Option<bool>,
}

/// Arguments of volume set.
#[derive(Debug, Args)]
pub struct SetVolumeArgs {
    /// Name of the volume
    pub name: String,
    /// Flags of the settings to change; at least one is required.
    #[command(flatten)]
    pub changes: VolumeChanges,
}

/// Arguments of volume salvage.
#[derive(Debug, Args)]
pub struct SalvageArgs {
    /// Name of the volume
    pub name: String,
    /// The replica to start the volume from. Without it, the command only shows the replicas
    #[arg(long, value_name = "ID")]
    pub replica: Option<String>,
    /// Reason, stored with the volume
    #[arg(long, default_value = "", hide_default_value = true)]
    pub reason: String,
    /// Does not ask
    #[arg(long, requires = "replica")]
    pub yes_i_may_lose_data: bool,
}

/// Arguments of volume create.
#[derive(Debug, Args)]
pub struct CreateArgs {
    /// Name of the volume: lower-case letters, digits and '-', at most 63 characters
    pub name: String,
    /// Size, like 10GiB or 512MiB: KiB, MiB, GiB, TiB, or a number of bytes
    #[arg(long, value_parser = parse_bytes)]
    pub size: u64,
    /// The number of replicas, 1 to 8
    #[arg(long, default_value_t = 3, value_name = "COUNT")]
    pub replicas: u32,
    /// Frontend: auto, ublk, nbd, iscsi or socket
    #[arg(long, default_value = "auto")]
    pub frontend: String,
    /// Allows several replicas on one node (replicaSoftAntiAffinity)
    #[arg(long)]
    pub soft_anti_affinity: bool,
    /// Forbids two replicas in one zone. By default they are apart if possible
    #[arg(long)]
    pub hard_zone_anti_affinity: bool,
    /// Forbids two replicas on one disk. By default they are apart if possible
    #[arg(long)]
    pub hard_disk_anti_affinity: bool,
    /// Tags that a node must have to get a replica
    #[arg(long, value_name = "TAG,...", value_delimiter = ',')]
    pub node_selector: Vec<String>,
    /// Tags that a disk must have to get a replica
    #[arg(long, value_name = "TAG,...", value_delimiter = ',')]
    pub disk_selector: Vec<String>,
    /// best-effort: places a new replica on the node of the engine if possible
    #[arg(long, default_value = "disabled", value_name = "disabled|best-effort")]
    pub data_locality: String,
    /// Replicas compare every read with their block checksums; another replica answers if one has rot
    #[arg(long)]
    pub verify_reads: bool,
    /// Encrypts data between nodes by TLS 1.3; the kernels of the nodes need the module tls
    #[arg(long)]
    pub encrypt_in_transit: bool,
    /// The limits of waiting.
    #[command(flatten)]
    pub wait: WaitArgs,
}
