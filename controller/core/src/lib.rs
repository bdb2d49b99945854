//! The decisions of the control plane, without any I/O.
//!
//! - [`objects`]: Volume, Engine, Replica and Node, as they are stored, and the [`ClusterState`] of all of
//!   them.
//! - [`observed`]: the current reports of the agents; never stored.
//! - [`reconcile`]: from both to a short list of [`Action`]s, one function per kind of object.
//! - [`schema`]: the objects as schemas of custom resources.
//! - [`scheduler`]: nodes and disks for replicas, or the reason why none fits.
//! - [`csi`]: the meaning of CSI calls for the stored objects.
//! - [`discovery`]: which nodes of a Kubernetes cluster have an agent.
//! - [`claimed`]: which volumes a PersistentVolume of Kubernetes needs.
//! - [`doctor`]: the checks of the setup of a cluster, with remedies.
//! - [`drain`]: the replicas that are left on a drained node.
//! - [`left_out_objects`]: stored objects that the controller cannot use, and that still count.
//! - [`given_up_places`]: nodes and disks that do not come back.
//! - [`lost_disk`], [`lost_node`]: giving up disks and nodes that do not come back.
//! - [`orphans`]: directories of replicas that nothing stored names.
//! - [`overview`]: the whole cluster on one screen.
//! - [`rebalance`]: which replicas would be better elsewhere.
//! - [`requests`]: the changes of an API call in the stored objects, or the reason of its refusal.
//! - [`salvage`]: the replicas that a salvage may choose, and the losses with each.
//! - [`lost_node_pods`]: which pods of a lost node are to be force-deleted.
//! - [`event_correlator`]: the choice and the rate of events for people.
//! - [`dead_mounts`]: which pods are deleted because their device is gone.
//! - [`undelete`]: restores a deleted volume from the trash of its disks.
//! - [`why`]: the problems of a volume, in sentences.
//!
//! Everything is level-triggered: a decision depends only on the current stored and observed state. So the
//! shell that carries actions out may die between any two of them. An action that calls an agent is
//! idempotent, and a write carries the resource version of its decision.
//!
//! The order that keeps data safe, in one place:
//! 1. `volume.status.attach` is raised and stored before any engine is started with that number.
//! 2. `engine.status.currentState` leaves `stopped` before the first start call, and becomes `stopped`
//!    only after a stop call was answered. A stored `stopped` therefore proves that no start is in progress.
//! 3. `replica.spec.desireState` is `running` before the first call that may create a directory. It is
//!    withdrawn only once the status says that a process and a directory may exist. `replica.status.data`
//!    becomes `present` in the same write that publishes the replica's addresses. An engine gets only
//!    published addresses, so no directory that an engine has used is ever recreated.
//! 4. The data of a replica is deleted only if its deletion was requested: by the deletion of its volume, or
//!    because it was replaced. A replaced replica is deleted only while the engine serves with the configured
//!    number of members and does not know that replica any more.
//! 5. A grant of the arbiter is stored in the volume before any engine gets it. The compare-and-swap also
//!    holds the number of the attachment.
//! 6. A salvage is stored with a number of its own, and the engine is stopped, before the replica gets the
//!    decision.
#![forbid(unsafe_code)]

mod action;
pub mod claimed;
mod cluster_state;
pub mod csi;
pub mod dead_mounts;
pub mod discovery;
pub mod doctor;
pub mod drain;
pub mod event_correlator;
#[cfg(test)]
mod example;
pub mod given_up_places;
pub mod left_out_objects;
pub mod lost_disk;
pub mod lost_node;
pub mod lost_node_pods;
pub mod observed;
pub mod orphans;
pub mod overview;
pub mod rebalance;
pub mod reboot;
pub mod reconcile;
pub mod requests;
pub mod salvage;
pub mod scheduler;
pub mod surviving_replicas;
pub mod undelete;
pub mod why;

pub use action::{Action, AgentCall, Decision, Event, StartEngine, StartReplica};
pub use cluster_state::{ClusterState, Rebuild, Replicas, ScheduledBytes, Selectors, UsefulRoom};
pub use shorthorn_objects::{
    self as objects, Label, LabelError, Labels, NodeName, NodeNameError, ReplicaTarget, Timestamp, labels,
    schema,
};
