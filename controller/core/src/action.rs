use std::collections::BTreeMap;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use shorthorn_types::{ReplicaId, View, VolumeName};

use crate::objects::{Frontend, Key, Object, RebuildLimits, Replica, Secret};
use crate::observed::InstanceKey;
use crate::{NodeName, World};

/// One small step. The shell carries the steps of a decision out in order and gives the rest up at the
/// first that fails; the next decision starts from what is so then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Stores the object if the stored one still has its resource version.
    Write(Box<Object>),
    /// Removes the object if it still has this resource version.
    Remove(Key, u64),
    /// Asks the agent of a node for something.
    Call(NodeName, AgentCall),
    /// Tells people what happens.
    Emit(Event),
}

/// A call to an agent, all of them idempotent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AgentCall {
    /// Starts a replica process.
    StartReplica {
        /// Whose data it holds.
        volume: VolumeName,
        /// Which replica.
        replica_id: ReplicaId,
        /// The disk that its directory is on.
        disk_path: String,
        /// The identity of that disk.
        disk_uuid: String,
        /// Size of the volume.
        size_bytes: u64,
        /// The members of the volume's first view.
        first_members: Vec<ReplicaId>,
        /// The volume's secret.
        secret: Secret,
        /// Whether a missing directory may be made.
        create: bool,
        /// Whether the directory may belong to an earlier secret of the volume.
        rebind: bool,
    },
    /// Starts an engine process.
    StartEngine {
        /// Whose engine it is.
        volume: VolumeName,
        /// Size of the volume.
        size_bytes: u64,
        /// Number of the attachment.
        attach: u64,
        /// The replicas and where they are.
        replicas: BTreeMap<ReplicaId, ReplicaTarget>,
        /// How the device is made.
        frontend: Frontend,
        /// The volume's secret.
        secret: Secret,
        /// What the arbiter granted last.
        granted: Option<Box<View>>,
        /// How much copying may take.
        rebuild: RebuildLimits,
        /// Number of that list of replicas.
        revision: u64,
        /// The oldest attachment whose engine this one may take the device over from; 0: none.
        continues: u64,
        /// Whether replicas compare every read with the sums of its blocks.
        verify_reads: bool,
    },
    /// Tells an engine what the arbiter has granted. Stored before.
    Grant {
        /// Whose engine it is.
        volume: VolumeName,
        /// Number of the attachment.
        attach: u64,
        /// The recorded view.
        view: Box<View>,
    },
    /// Gives a running engine another list of replicas.
    UpdateReplicas {
        /// Whose engine it is.
        volume: VolumeName,
        /// Number of the attachment.
        attach: u64,
        /// The replicas and where they are.
        replicas: BTreeMap<ReplicaId, ReplicaTarget>,
        /// Number of that list.
        revision: u64,
    },
    /// Tells a running engine how much copying may take.
    SetRebuildLimits {
        /// Whose engine it is.
        volume: VolumeName,
        /// Number of the attachment.
        attach: u64,
        /// The limits.
        limits: RebuildLimits,
    },
    /// Keeps the engines of older attachments from a replica.
    FenceReplica {
        /// Whose data it holds.
        volume: VolumeName,
        /// Which replica.
        replica_id: ReplicaId,
        /// The oldest attachment that may use it. Stored before.
        attach: u64,
    },
    /// Tells a running engine that its volume grows.
    ExpandEngine {
        /// Whose engine it is.
        volume: VolumeName,
        /// Number of the attachment.
        attach: u64,
        /// The new size.
        size_bytes: u64,
    },
    /// Makes what a stopped replica has the truth of its volume.
    SalvageReplica {
        /// The disk that its directory is on.
        disk_path: String,
        /// The identity of that disk.
        disk_uuid: String,
        /// Whose data it holds.
        volume: VolumeName,
        /// Which replica.
        replica_id: ReplicaId,
        /// The number that was drawn for it.
        attach: u64,
    },
    /// Stops a process.
    StopInstance {
        /// Which one.
        instance: InstanceKey,
        /// Of an engine: only if its attachment is this one or an older one. 0: any.
        attach: u64,
    },
    /// Deletes the directory of a stopped replica.
    DeleteReplica {
        /// The disk that its directory is on.
        disk_path: String,
        /// The identity of that disk.
        disk_uuid: String,
        /// Whose data it held.
        volume: VolumeName,
        /// Which replica.
        replica_id: ReplicaId,
        /// Kept with it in the trash.
        record: String,
    },
}

impl AgentCall {
    /// The instance that the call is about: its failure is shown with that one.
    #[must_use]
    pub fn instance(&self) -> InstanceKey {
        match self {
            AgentCall::StartReplica { volume, replica_id, .. }
            | AgentCall::FenceReplica { volume, replica_id, .. }
            | AgentCall::SalvageReplica { volume, replica_id, .. }
            | AgentCall::DeleteReplica { volume, replica_id, .. } => {
                InstanceKey::replica(volume, *replica_id)
            }
            AgentCall::StartEngine { volume, .. }
            | AgentCall::Grant { volume, .. }
            | AgentCall::UpdateReplicas { volume, .. }
            | AgentCall::SetRebuildLimits { volume, .. }
            | AgentCall::ExpandEngine { volume, .. } => InstanceKey::engine(volume),
            AgentCall::StopInstance { instance, .. } => instance.clone(),
        }
    }

    /// Its name in the node API.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            AgentCall::StartReplica { .. } => "StartReplica",
            AgentCall::StartEngine { .. } => "StartEngine",
            AgentCall::Grant { .. } => "Grant",
            AgentCall::UpdateReplicas { .. } => "UpdateReplicas",
            AgentCall::SetRebuildLimits { .. } => "SetRebuildLimits",
            AgentCall::FenceReplica { .. } => "FenceReplica",
            AgentCall::ExpandEngine { .. } => "ExpandEngine",
            AgentCall::SalvageReplica { .. } => "SalvageReplica",
            AgentCall::StopInstance { .. } => "StopInstance",
            AgentCall::DeleteReplica { .. } => "DeleteReplica",
        }
    }

    /// What it does, in a word.
    #[must_use]
    pub const fn verb(&self) -> &'static str {
        match self {
            AgentCall::StartReplica { .. } => "start replica",
            AgentCall::StartEngine { .. } => "start engine",
            AgentCall::Grant { .. } => "tell what is granted",
            AgentCall::UpdateReplicas { .. } => "tell where the replicas are",
            AgentCall::SetRebuildLimits { .. } => "set the limits of copying",
            AgentCall::FenceReplica { .. } => "keep older engines from replica",
            AgentCall::ExpandEngine { .. } => "expand",
            AgentCall::SalvageReplica { .. } => "salvage replica",
            AgentCall::StopInstance { .. } => "stop",
            AgentCall::DeleteReplica { .. } => "delete replica data",
        }
    }
}

/// Where an engine finds a replica.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ReplicaTarget {
    /// In the order to try.
    pub addresses: Vec<String>,
    /// Whether it is on the engine's node.
    pub local: bool,
}

/// Something that people should hear of.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Event<A = Key> {
    /// What it happened to.
    pub about: A,
    /// Whether it is a trouble.
    pub warning: bool,
    /// One word for programs.
    pub reason: &'static str,
    /// A sentence for people.
    pub message: String,
}

/// What a reconciler decides.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// To be carried out in this order.
    pub actions: Vec<Action>,
    /// Look again after this time even if nothing changes: a time limit ends then.
    pub look_again: Option<Duration>,
}

impl Decision {
    /// Nothing to do.
    #[must_use]
    pub fn nothing() -> Decision {
        Decision::default()
    }

    /// The replicas that it makes.
    pub fn new_replicas<'a>(&'a self, world: &'a World) -> impl Iterator<Item = &'a Replica> {
        self.actions
            .iter()
            .filter_map(|action| match action {
                Action::Write(object) => match &**object {
                    Object::Replica(replica) => Some(replica),
                    _ => None,
                },
                _ => None,
            })
            .filter(|replica| !world.replicas.contains_key(&replica.metadata.name))
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

    /// Looks again after `wait`, or sooner where that was decided already.
    pub(crate) fn again_after(&mut self, wait: Duration) {
        self.look_again = Some(self.look_again.map_or(wait, |earlier| earlier.min(wait)));
    }
}
