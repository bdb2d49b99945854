use std::collections::BTreeMap;
use std::time::Duration;

use shorthorn_types::{ReplicaId, View, VolumeName};

use crate::objects::{Frontend, Key, Object, RebuildLimits, Replica, ReplicaTarget, ResourceVersion, Secret};
use crate::observed::InstanceKey;
use crate::{ClusterState, NodeName};

/// A small step. The shell performs the steps of a decision in order, up to the first that fails. The next
/// decision starts from the state after that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Stores the object if the stored one still has its resource version.
    Write(Box<Object>),
    /// Removes the object if it still has this resource version.
    Remove(Key, Option<ResourceVersion>),
    /// Makes a call of the node API.
    Call(NodeName, AgentCall),
    /// Records an event for people.
    Emit(Event),
}

/// A call to an agent, all of them idempotent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AgentCall {
    /// Starts a replica process.
    StartReplica(StartReplica),
    /// Starts an engine process.
    StartEngine(StartEngine),
    /// Sends an engine the grant of the arbiter, which is stored before.
    Grant {
        /// Name of the Volume and of the Engine object.
        volume: VolumeName,
        /// The number of the attachment that the engine has to have.
        attach: u64,
        /// The recorded view.
        view: Box<View>,
    },
    /// Gives a running engine another list of replicas.
    UpdateReplicas {
        /// Name of the Volume and of the Engine object.
        volume: VolumeName,
        /// The number of the attachment that the engine has to have.
        attach: u64,
        /// The replicas and their addresses.
        replicas: BTreeMap<ReplicaId, ReplicaTarget>,
        /// The number of the list, which rises with each change.
        revision: u64,
    },
    /// Sends a running engine the limits of copies.
    SetRebuildLimits {
        /// Name of the Volume and of the Engine object.
        volume: VolumeName,
        /// The number of the attachment that the engine has to have.
        attach: u64,
        /// The new limits, which replace all former ones.
        limits: RebuildLimits,
    },
    /// Keeps the engines of older attachments from a replica.
    FenceReplica {
        /// Names the replica process, together with `replica_id`.
        volume: VolumeName,
        /// Identity of the replica in the views of the volume.
        replica_id: ReplicaId,
        /// The oldest attachment that may use it. Stored before.
        attach: u64,
    },
    /// Makes a running engine expand its volume.
    ExpandEngine {
        /// Name of the Volume and of the Engine object.
        volume: VolumeName,
        /// The number of the attachment that the engine has to have.
        attach: u64,
        /// The size to grow to, in bytes.
        size_bytes: u64,
    },
    /// Salvages a stopped replica: its data becomes the data of the volume.
    SalvageReplica {
        /// The disk that its directory is on.
        disk_path: String,
        /// The identity of that disk, if it is known.
        disk_uuid: Option<String>,
        /// Names the replica process, together with `replica_id`.
        volume: VolumeName,
        /// Identity of the replica in the views of the volume.
        replica_id: ReplicaId,
        /// The number that was drawn for it.
        attach: u64,
    },
    /// Stops a process.
    StopInstance {
        /// The process, by its kind and name.
        instance: InstanceKey,
        /// The limit for engines: they are stopped only if their attachment is this one or an older one.
        /// None: the agent stops an engine of any attachment.
        attach: Option<u64>,
    },
    /// Stops an engine although its device is in use, unless it serves or has served a short time ago.
    ForceStopEngine {
        /// The deleted or detached volume whose engine ends.
        volume: VolumeName,
        /// The limit: an engine of a later attachment continues.
        attach: Option<u64>,
    },
    /// Deletes the directory of a stopped replica.
    DeleteReplica {
        /// The disk that its directory is on.
        disk_path: String,
        /// The identity of that disk, if it is known.
        disk_uuid: Option<String>,
        /// The volume of the deleted replica.
        volume: VolumeName,
        /// Identity of the replica in the views of the volume.
        replica_id: ReplicaId,
        /// Kept with it in the trash.
        record: String,
    },
}

/// The start of a replica process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartReplica {
    /// Names the replica process, together with `replica_id`.
    pub volume: VolumeName,
    /// Identity of the replica in the views of the volume.
    pub replica_id: ReplicaId,
    /// The disk that its directory is on.
    pub disk_path: String,
    /// The identity of that disk, if it is known.
    pub disk_uuid: Option<String>,
    /// Size of the volume in bytes.
    pub size_bytes: u64,
    /// The members of the volume's first view.
    pub first_members: Vec<ReplicaId>,
    /// The volume's secret.
    pub secret: Secret,
    /// True if a missing directory may be made.
    pub create: bool,
    /// True if the directory may belong to an earlier secret of the volume.
    pub rebind: bool,
    /// True if engines on other nodes have to encrypt.
    pub encrypt_in_transit: bool,
}

/// The start of an engine process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartEngine {
    /// Name of the Volume and of the Engine object.
    pub volume: VolumeName,
    /// Size of the volume in bytes.
    pub size_bytes: u64,
    /// The number of the attachment, a part of the generation of the engine.
    pub attach: u64,
    /// The replicas and their addresses.
    pub replicas: BTreeMap<ReplicaId, ReplicaTarget>,
    /// The choice of the frontend.
    pub frontend: Frontend,
    /// The volume's secret.
    pub secret: Secret,
    /// The arbiter's last grant.
    pub granted: Option<Box<View>>,
    /// The limits of copies.
    pub rebuild: RebuildLimits,
    /// Number of that list of replicas.
    pub revision: u64,
    /// The oldest attachment whose engine this one may take the device over from, if any.
    pub continues: Option<u64>,
    /// True if replicas compare every read with the sums of its blocks.
    pub verify_reads: bool,
    /// True if it encrypts connections to other nodes.
    pub encrypt_in_transit: bool,
}

impl AgentCall {
    /// Returns the instance that the call is about. A failure of the call is shown in the status of that
    /// instance.
    #[must_use]
    pub fn instance(&self) -> InstanceKey {
        match self {
            AgentCall::StartReplica(StartReplica { volume, replica_id, .. })
            | AgentCall::FenceReplica { volume, replica_id, .. }
            | AgentCall::SalvageReplica { volume, replica_id, .. }
            | AgentCall::DeleteReplica { volume, replica_id, .. } => {
                InstanceKey::replica(volume, *replica_id)
            }
            AgentCall::StartEngine(StartEngine { volume, .. })
            | AgentCall::Grant { volume, .. }
            | AgentCall::UpdateReplicas { volume, .. }
            | AgentCall::SetRebuildLimits { volume, .. }
            | AgentCall::ExpandEngine { volume, .. }
            | AgentCall::ForceStopEngine { volume, .. } => InstanceKey::engine(volume),
            AgentCall::StopInstance { instance, .. } => instance.clone(),
        }
    }

    /// Returns the name of the call in the node API.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            AgentCall::StartReplica(_) => "StartReplica",
            AgentCall::StartEngine(_) => "StartEngine",
            AgentCall::Grant { .. } => "Grant",
            AgentCall::UpdateReplicas { .. } => "UpdateReplicas",
            AgentCall::SetRebuildLimits { .. } => "SetRebuildLimits",
            AgentCall::FenceReplica { .. } => "FenceReplica",
            AgentCall::ExpandEngine { .. } => "ExpandEngine",
            AgentCall::SalvageReplica { .. } => "SalvageReplica",
            AgentCall::StopInstance { .. } | AgentCall::ForceStopEngine { .. } => "StopInstance",
            AgentCall::DeleteReplica { .. } => "DeleteReplica",
        }
    }

    /// Returns a verb for the call.
    #[must_use]
    pub const fn verb(&self) -> &'static str {
        match self {
            AgentCall::StartReplica(_) => "start replica",
            AgentCall::StartEngine(_) => "start engine",
            AgentCall::Grant { .. } => "send the grant",
            AgentCall::UpdateReplicas { .. } => "send the addresses of the replicas",
            AgentCall::SetRebuildLimits { .. } => "set the limits of copying",
            AgentCall::FenceReplica { .. } => "keep older engines from replica",
            AgentCall::ExpandEngine { .. } => "expand",
            AgentCall::SalvageReplica { .. } => "salvage replica",
            AgentCall::StopInstance { .. } | AgentCall::ForceStopEngine { .. } => "stop",
            AgentCall::DeleteReplica { .. } => "delete replica data",
        }
    }
}

/// An event for people.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Event<A = Key> {
    /// The object that the event is recorded for.
    pub about: A,
    /// True for a warning.
    pub warning: bool,
    /// The reason: a word for programs.
    pub reason: &'static str,
    /// A sentence for people.
    pub message: String,
}

/// The decision of a reconciler.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// To be carried out in this order.
    pub actions: Vec<Action>,
    /// Reconcile again after this time even without a change, because a time limit ends then.
    pub requeue_after: Option<Duration>,
}

impl Decision {
    /// Returns a decision without actions.
    #[must_use]
    pub fn nothing() -> Decision {
        Decision::default()
    }

    /// Returns the replicas that it makes.
    pub fn new_replicas<'a>(&'a self, cluster: &'a ClusterState) -> impl Iterator<Item = &'a Replica> {
        self.actions
            .iter()
            .filter_map(|action| match action {
                Action::Write(object) => match &**object {
                    Object::Replica(replica) => Some(replica),
                    _ => None,
                },
                _ => None,
            })
            .filter(|replica| !cluster.replicas.contains_key(&replica.metadata.name))
    }

    pub(crate) fn write(&mut self, object: impl Into<Object>) {
        self.actions.push(Action::Write(Box::new(object.into())));
    }

    pub(crate) fn call(&mut self, node: &NodeName, call: AgentCall) {
        self.actions.push(Action::Call(node.clone(), call));
    }

    pub(crate) fn emit(&mut self, about: Key, warning: bool, reason: &'static str, message: String) {
        self.actions.push(Action::Emit(Event { about, warning, reason, message }));
    }

    /// Looks again after `wait`, or sooner if that was decided already.
    pub(crate) fn again_after(&mut self, wait: Duration) {
        self.requeue_after = Some(self.requeue_after.map_or(wait, |earlier| earlier.min(wait)));
    }
}
