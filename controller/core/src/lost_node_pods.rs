//! Handles pods that do not end, because the kubelet of their node is gone.
//!
//! Kubernetes decides by itself that such pods move elsewhere and deletes them, but waits for that kubelet to
//! report their end. So their objects stay, no new pod replaces them, and their volumes stay attached.
//! Shorthorn can report in the kubelet's place for pods whose disks are its own. Detaching such a volume from
//! a lost node fences the engine there first (`reconcile::volume::fence`), and only then may the volume be
//! used elsewhere. So such a pod cannot write any more, even if it still runs.
//!
//! The decisions follow Kubernetes. A pod is force-deleted only after its deletion and its grace period, if
//! both Kubernetes and this controller have lost its node. The pod may still write to a disk of another
//! driver there, as far as is known; such a pod stays. Attachments are deleted when no pod of the node uses
//! them any more.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use crate::discovery::KubernetesCluster;
use crate::event_correlator::About;
use crate::observed::Agents;
use crate::reconcile::{Reachability, reachability_of};
use crate::{ClusterState, NodeName, Timestamp};

/// The name of an object in a namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Namespaced {
    /// The namespace of the object.
    pub namespace: String,
    /// The name, unique in the namespace among objects of one kind.
    pub name: String,
}

impl fmt::Display for Namespaced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl About for Namespaced {
    fn name(&self) -> &str {
        &self.name
    }
}

/// The known state of a machine at the moment of a decision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MachineState {
    /// True if Kubernetes reports that its kubelet is ready.
    pub is_ready: bool,
    /// True if this controller reaches its agent, or has lost it only a moment ago.
    pub is_reachable: bool,
    /// True if Kubernetes has disks attached there without an attachment: those of the drivers that are part
    /// of it.
    pub has_nameless_disks: bool,
}

/// A pod of that machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pod {
    /// Namespace and name.
    pub name: Namespaced,
    /// The uid, which distinguishes it from other objects of the name.
    pub uid: String,
    /// The deadline of the pod's deletion, if it is being deleted.
    pub gone_by: Option<Timestamp>,
    /// True if a client has already forced its deletion.
    pub is_ended_by_force: bool,
    /// The finalizers, whose owners handle the deletion.
    pub finalizers: Vec<String>,
    /// Decides if the pod may be deleted by force.
    pub owner: PodOwner,
    /// True if a controller re-creates the pod after its end.
    pub has_controller: bool,
    /// True if its containers have ended for good: it uses nothing.
    pub has_ended: bool,
    /// The claims in its namespace that it uses.
    pub claims: BTreeSet<String>,
    /// True if it names a disk of a driver that is part of Kubernetes, without a claim.
    pub has_inline_disk: bool,
}

/// The owner of a pod, as far as it matters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PodOwner {
    /// Kubernetes may start the pod on another node, or the pod has no owner.
    #[default]
    Any,
    /// The pod belongs to its node and cannot move.
    DaemonSet,
    /// The kubelet has the pod from a file, and the object only shows it.
    Kubelet,
}

/// A volume that Kubernetes has attached to that machine, or is about to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttachedVolume {
    /// Name of the VolumeAttachment object.
    pub name: String,
    /// The uid, which distinguishes it from other objects of the name.
    pub uid: String,
    /// The driver of the disk.
    pub driver: String,
    /// True if the driver is Shorthorn's.
    pub is_ours: bool,
    /// The claim of the volume; none if it is unknown.
    pub claim: Option<Namespaced>,
    /// The name that the driver has for the volume, if that is known.
    pub handle: Option<String>,
    /// True if it is being deleted.
    pub is_deleting: bool,
}

impl AttachedVolume {
    fn is_used_by(&self, pod: &Pod) -> bool {
        let is_its =
            |claim: &Namespaced| claim.namespace == pod.name.namespace && pod.claims.contains(&claim.name);
        self.claim.as_ref().is_some_and(is_its)
    }
}

/// The reason why a pod stays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeepReason {
    /// Kubernetes has not deleted the pod.
    NotDeleted,
    /// The pod has this much time left.
    Time(Duration),
    /// The pod belongs to its node.
    OfItsNode(PodOwner),
    /// The pod uses no volume of ours that is attached there.
    NotOurs,
    /// The pod uses a disk of this driver, and may write to it.
    OtherDriver(String),
    /// The pod was deleted already, and the owners of these finalizers still have to act.
    Finalizers(Vec<String>),
}

impl KeepReason {
    /// Returns the advice for people, if they have to act.
    #[must_use]
    pub fn advice(&self) -> Option<String> {
        match self {
            KeepReason::OtherDriver(driver) => Some(format!(
                "not force-deleted: the pod also has a disk of {driver} there, which may still be written \
                 to. Once the node is certainly off, run kubectl delete pod --force"
            )),
            KeepReason::Finalizers(names) => Some(format!(
                "the pod is deleted, and its object waits for its finalizers: \
                 {}",
                names.join(", ")
            )),
            KeepReason::NotDeleted | KeepReason::Time(_) | KeepReason::OfItsNode(_) | KeepReason::NotOurs => {
                None
            }
        }
    }
}

/// The plan for the pods of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodPlan {
    /// Pods to delete at once, without a confirmation that they have ended.
    pub force_delete: Vec<Pod>,
    /// Pods that stay.
    pub keep: Vec<(Pod, KeepReason)>,
    /// Attachments to delete, because no pod uses them.
    pub detach: Vec<AttachedVolume>,
    /// Look again after this time even if nothing changes.
    pub requeue_after: Option<Duration>,
}

/// Decides about all pods of a machine. `pods` are to be read after `attachments`: a pod exists before its
/// attachment.
#[must_use]
pub fn plan(machine: MachineState, pods: &[Pod], attachments: &[AttachedVolume], now: Timestamp) -> PodPlan {
    let mut plan = PodPlan::default();
    if machine.is_ready || machine.is_reachable {
        return plan;
    }
    for pod in pods {
        match why_not(machine, pod, attachments, now) {
            None => plan.force_delete.push(pod.clone()),
            Some(why) => {
                if let KeepReason::Time(left) = why {
                    plan.requeue_after = Some(plan.requeue_after.map_or(left, |sooner| sooner.min(left)));
                }
                plan.keep.push((pod.clone(), why));
            }
        }
    }
    // A pod that is force-deleted now uses its volumes until its object is gone: Kubernetes would attach them
    // again.
    let is_used = |attachment: &AttachedVolume| {
        pods.iter().filter(|pod| !pod.has_ended).any(|pod| attachment.is_used_by(pod))
    };
    let unused = attachments.iter().filter(|attachment| {
        attachment.is_ours && !attachment.is_deleting && attachment.claim.is_some() && !is_used(attachment)
    });
    plan.detach = unused.cloned().collect();
    plan
}

/// Returns the volumes of ours that the pod has there.
pub fn volumes_of<'a>(
    pod: &'a Pod,
    attachments: &'a [AttachedVolume],
) -> impl Iterator<Item = &'a AttachedVolume> {
    attachments.iter().filter(move |attachment| attachment.is_ours && attachment.is_used_by(pod))
}

/// Returns the reason why the pod stays; none if it is to be force-deleted.
fn why_not(
    machine: MachineState,
    pod: &Pod,
    attachments: &[AttachedVolume],
    now: Timestamp,
) -> Option<KeepReason> {
    if pod.owner != PodOwner::Any {
        return Some(KeepReason::OfItsNode(pod.owner));
    }
    if volumes_of(pod, attachments).next().is_none() {
        return Some(KeepReason::NotOurs);
    }
    let Some(gone_by) = pod.gone_by else { return Some(KeepReason::NotDeleted) };
    let left_ms = gone_by.as_millisecond().saturating_sub(now.as_millisecond());
    if let Ok(left_ms @ 1..) = u64::try_from(left_ms) {
        return Some(KeepReason::Time(Duration::from_millis(left_ms)));
    }
    if let Some(driver) = other_driver(machine, pod, attachments) {
        return Some(KeepReason::OtherDriver(driver));
    }
    // Only the end of the pod can still be reported.
    (pod.is_ended_by_force && !pod.finalizers.is_empty())
        .then(|| KeepReason::Finalizers(pod.finalizers.clone()))
}

/// Returns a driver of which the pod has a disk there, or may have.
fn other_driver(machine: MachineState, pod: &Pod, attachments: &[AttachedVolume]) -> Option<String> {
    let others = || attachments.iter().filter(|attachment| !attachment.is_ours);
    if let Some(other) = others().find(|attachment| attachment.is_used_by(pod)) {
        return Some(other.driver.clone());
    }
    if pod.has_inline_disk {
        return Some("Kubernetes itself".to_owned());
    }
    // A claim without an attachment belongs to no disk, unless disks with unknown claims exist.
    let attached: BTreeSet<&str> = attachments
        .iter()
        .filter(|attachment| attachment.is_used_by(pod))
        .filter_map(|attachment| Some(attachment.claim.as_ref()?.name.as_str()))
        .collect();
    if pod.claims.iter().all(|claim| attached.contains(claim.as_str())) {
        return None;
    }
    let unclaimed = others().find(|attachment| attachment.claim.is_none());
    let nameless = machine.has_nameless_disks.then(|| "Kubernetes itself".to_owned());
    unclaimed.map(|attachment| attachment.driver.clone()).or(nameless)
}

/// The machines whose pods may have to be force-deleted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LostMachines {
    /// By their names in Kubernetes, with the names of their nodes.
    pub machines: BTreeMap<String, NodeName>,
    /// Look again after this time even if nothing changes.
    pub requeue_after: Option<Duration>,
}

/// Returns the machines that both Kubernetes and this controller have lost, and that a volume of ours is on.
#[must_use]
pub fn lost(
    kubernetes: &KubernetesCluster,
    cluster: &ClusterState,
    agents: &Agents,
    now: Timestamp,
) -> LostMachines {
    let mut lost = LostMachines::default();
    let unwell = kubernetes
        .drivers
        .iter()
        .filter(|(name, _)| kubernetes.machines.get(*name).is_some_and(|machine| !machine.is_ready));
    let unwell = unwell.filter_map(|(name, driver)| Some((name, NodeName::new(driver).ok()?)));
    let has_volumes = |node: &NodeName| cluster.volumes_on(node.as_str()).next().is_some();
    for (name, node) in unwell.filter(|(_, node)| has_volumes(node)) {
        match reachability_of(agents, now, &node) {
            Reachability::Reachable(_) => {}
            Reachability::Uncertain(left) => {
                lost.requeue_after = Some(lost.requeue_after.map_or(left, |sooner| sooner.min(left)));
            }
            Reachability::Unreachable(_) => drop(lost.machines.insert(name.clone(), node)),
        }
    }
    lost
}

/// Returns true if this controller reaches the agent of that node, or has lost it only a moment ago.
#[must_use]
pub fn is_reachable(agents: &Agents, node: &NodeName, now: Timestamp) -> bool {
    !matches!(reachability_of(agents, now, node), Reachability::Unreachable(_))
}

#[cfg(test)]
mod tests;
