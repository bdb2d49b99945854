//! Handles the pods of one lost machine, as long as it is lost.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node as KubeNode, PersistentVolume, Pod as KubePod};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::api::{Api, DeleteParams, ListParams, Preconditions};
use shorthorn_controller_core::lost_node_pods::{self, AttachedVolume, KeepReason, Namespaced, Pod, PodPlan};
use shorthorn_controller_core::objects::{Key, Kind};
use shorthorn_controller_core::{Event, NodeName, Timestamp};
use shorthorn_kube::{CallError, bounded, is_code};
use thiserror::Error;

use super::read::{self, Claimed};
use super::{DEBOUNCE, PodForceDeleter};
use crate::backoff::backoff;
use crate::kubernetes::list_watch::{Watch, WatchChange, WatchEnd, list};

const FORCE_DELETED: &str = "PodForceDeleted";
const NOT_FORCE_DELETED: &str = "PodNotForceDeleted";
const DETACHED: &str = "AttachmentDeleted";

/// The problem and its object: each cause is logged once.
#[derive(Debug, Error)]
#[error("cannot {doing}: {error}")]
struct RoundError {
    doing: &'static str,
    error: CallError,
}

/// The state that is kept of a machine between rounds.
#[derive(Default)]
struct Memory {
    /// The claims of the volumes attached there, by the names of the attachments. They do not change
    /// meanwhile.
    claimed: BTreeMap<String, Claimed>,
    /// The reported reasons, by pod.
    reported: BTreeMap<String, KeepReason>,
    /// The last logged problem.
    trouble: String,
}

/// The result of a round.
struct Round {
    /// The version of the list of pods: later ones are changes.
    version: String,
    requeue_after: Option<Duration>,
}

impl PodForceDeleter {
    /// Ends the pods of a machine that may be ended, until it is dropped.
    pub(super) async fn look_after(self: Arc<PodForceDeleter>, name: String, node: NodeName) {
        let mut memory = Memory::default();
        let mut failures: u32 = 0;
        loop {
            match self.round_and_wait(&name, &node, &mut memory).await {
                Ok(()) => {
                    failures = 0;
                    memory.trouble.clear();
                }
                Err(trouble) => {
                    failures = failures.saturating_add(1);
                    let text = trouble.to_string();
                    if text == memory.trouble {
                        tracing::debug!(node = name, "{text}");
                    } else {
                        tracing::warn!(node = name, "{text}; its pods stay until that works");
                        memory.trouble = text;
                    }
                    tokio::time::sleep(backoff(failures)).await;
                }
            }
            tokio::time::sleep(DEBOUNCE).await;
        }
    }

    /// Decides once, then waits until something may be decided otherwise.
    async fn round_and_wait(
        &self,
        name: &str,
        node: &NodeName,
        memory: &mut Memory,
    ) -> Result<(), RoundError> {
        let round = {
            // An error means that the semaphore is closed, which does not happen.
            let _permit = self.rounds.acquire().await;
            self.round(name, node, memory).await?
        };
        let change = self.await_change(name, &round.version);
        match round.requeue_after {
            Some(wait) => tokio::time::timeout(wait, change).await.unwrap_or(Ok(())),
            None => change.await,
        }
    }

    async fn round(&self, name: &str, node: &NodeName, memory: &mut Memory) -> Result<Round, RoundError> {
        let machine = bounded(Api::<KubeNode>::all(self.client.clone()).get_opt(name)).await;
        let machine = machine.map_err(doing("read the node"))?;
        let attachments = self.attachments(name, memory).await?;
        // The last step: a pod exists before its attachment.
        let (pods, version) = self.pods(name).await?;
        memory.reported.retain(|uid, _| pods.iter().any(|pod| pod.uid == *uid));
        // Of a machine that is gone in Kubernetes, Kubernetes itself removes the pods.
        let Some(machine) = machine else { return Ok(Round { version, requeue_after: None }) };
        let machine = read::machine(&machine, self.sees(node));
        let plan = lost_node_pods::plan(machine, &pods, &attachments, Timestamp::now());
        let requeue_after = plan.requeue_after;
        self.carry_out(name, node, plan, &attachments, memory).await?;
        Ok(Round { version, requeue_after })
    }

    async fn carry_out(
        &self,
        name: &str,
        node: &NodeName,
        plan: PodPlan,
        attachments: &[AttachedVolume],
        memory: &mut Memory,
    ) -> Result<(), RoundError> {
        let mut trouble = None;
        for (pod, why) in plan.keep {
            tracing::debug!(node = name, pod = %pod.name, ?why, "stays");
            self.record_why_not(&pod, why, memory);
        }
        for pod in plan.force_delete {
            // It may have come back since: then its kubelet has the word.
            if self.sees(node) {
                return Ok(());
            }
            match self.force_delete(&pod).await {
                Ok(true) => self.record_force_delete(name, &pod, attachments),
                Ok(false) => {}
                Err(error) => trouble = Some(error),
            }
        }
        for attachment in plan.detach {
            if self.sees(node) {
                return Ok(());
            }
            match self.detach(&attachment).await {
                Ok(true) => self.record_detach(name, &attachment),
                Ok(false) => {}
                Err(error) => trouble = Some(error),
            }
        }
        trouble.map_or(Ok(()), Err)
    }

    /// Deletes the object of the pod at once; false: it is gone already, or another one has its name.
    async fn force_delete(&self, pod: &Pod) -> Result<bool, RoundError> {
        let api: Api<KubePod> = Api::namespaced(self.client.clone(), &pod.name.namespace);
        let now = exactly(&pod.uid).grace_period(0);
        let done = deleted(bounded(api.delete(&pod.name.name, &now)).await);
        self.metrics.force_deleted("pod", done.is_ok());
        done.map_err(doing("delete a pod"))
    }

    /// Has Kubernetes take the volume away from the machine; false: it does already.
    async fn detach(&self, attachment: &AttachedVolume) -> Result<bool, RoundError> {
        let api: Api<VolumeAttachment> = Api::all(self.client.clone());
        let done = deleted(bounded(api.delete(&attachment.name, &exactly(&attachment.uid))).await);
        self.metrics.force_deleted("attachment", done.is_ok());
        done.map_err(doing("delete an attachment"))
    }

    fn record_force_delete(&self, name: &str, pod: &Pod, attachments: &[AttachedVolume]) {
        let message = format!(
            "node {name} is lost and cannot end the pod: the controller deletes its object, so that \
             Kubernetes can start the pod on another node"
        );
        tracing::info!(node = name, pod = %pod.name, "{message}");
        self.record_of_the_pod(pod, false, FORCE_DELETED, message);
        for attachment in lost_node_pods::volumes_of(pod, attachments) {
            let message = format!("pod {} of the lost node {name} is force-deleted", pod.name);
            self.record_of_volume(attachment, FORCE_DELETED, message);
        }
    }

    fn record_detach(&self, name: &str, attachment: &AttachedVolume) {
        let message = format!(
            "no pod of the lost node {name} uses the volume any longer: the volume is detached once its \
             engine is fenced"
        );
        tracing::info!(node = name, attachment = attachment.name, "{message}");
        self.record_of_volume(attachment, DETACHED, message);
    }

    fn record_why_not(&self, pod: &Pod, why: KeepReason, memory: &mut Memory) {
        let Some(advice) = why.advice() else { return };
        if memory.reported.get(&pod.uid) != Some(&why) {
            tracing::warn!(pod = %pod.name, "{advice}");
            self.record_of_the_pod(pod, true, NOT_FORCE_DELETED, advice);
            memory.reported.insert(pod.uid.clone(), why);
        }
    }

    fn record_of_the_pod(&self, pod: &Pod, warning: bool, reason: &'static str, message: String) {
        let about: Namespaced = pod.name.clone();
        self.events.record_of_pod(Event { about, warning, reason, message }, &pod.uid);
    }

    fn record_of_volume(&self, attachment: &AttachedVolume, reason: &'static str, message: String) {
        let Some(handle) = &attachment.handle else { return };
        let about = Key::new(Kind::Volume, handle);
        let cluster = self.store.state();
        if let Some(uid) = cluster.uid(&about) {
            self.events.record(&Event { about, warning: false, reason, message }, Some(uid));
        }
    }

    /// Returns the disks that are attached to the machine, or about to be.
    async fn attachments(&self, name: &str, memory: &mut Memory) -> Result<Vec<AttachedVolume>, RoundError> {
        let api: Api<VolumeAttachment> = Api::all(self.client.clone());
        let there = |attachment: VolumeAttachment| Some(attachment).filter(|one| one.spec.node_name == name);
        let listed = list(&api, ListParams::default(), there).await;
        let (listed, _) = listed.map_err(doing("list attachments"))?;
        let names: BTreeSet<&str> = listed.iter().filter_map(read::volume_name).collect();
        memory.claimed.retain(|volume, _| names.contains(volume.as_str()));
        for volume in names {
            if !memory.claimed.contains_key(volume)
                && let Some(claimed) = self.claimed(volume).await?
            {
                memory.claimed.insert(volume.to_owned(), claimed);
            }
        }
        Ok(listed.iter().map(|one| read::attachment(one, &memory.claimed)).collect())
    }

    async fn claimed(&self, volume: &str) -> Result<Option<Claimed>, RoundError> {
        let api: Api<PersistentVolume> = Api::all(self.client.clone());
        let found = bounded(api.get_opt(volume)).await.map_err(doing("read a volume"))?;
        Ok(found.as_ref().and_then(read::claimed))
    }

    /// Returns the pods of the machine, and the version of the list.
    async fn pods(&self, name: &str) -> Result<(Vec<Pod>, String), RoundError> {
        let api: Api<KubePod> = Api::all(self.client.clone());
        let there = ListParams::default().fields(&field_selector(name));
        list(&api, there, |pod| read::pod(&pod)).await.map_err(doing("list the pods"))
    }

    /// Waits until a pod of the machine changes, or the watch ends without a change.
    async fn await_change(&self, name: &str, version: &str) -> Result<(), RoundError> {
        let trouble = doing("watch the pods");
        let api: Api<KubePod> = Api::all(self.client.clone());
        let change = async {
            let mut watch = Watch::open_metadata(&api, &field_selector(name), version).await?;
            while let WatchChange::Bookmark(_) = watch.next().await? {}
            Ok(())
        };
        match change.await {
            // Everything is read again in any case.
            Ok(()) | Err(WatchEnd::Ended | WatchEnd::Silent | WatchEnd::Expired(_)) => Ok(()),
            Err(WatchEnd::Refused(error) | WatchEnd::Failed(error)) => Err(trouble(error)),
        }
    }
}

fn field_selector(name: &str) -> String {
    format!("spec.nodeName={name}")
}

fn doing(doing: &'static str) -> impl Fn(CallError) -> RoundError {
    move |error| RoundError { doing, error }
}

/// Names exactly the examined object, and no other one of its name.
pub(in crate::kubernetes) fn exactly(uid: &str) -> DeleteParams {
    DeleteParams::default().preconditions(Preconditions { uid: Some(uid.to_owned()), resource_version: None })
}

/// Returns true if the object was deleted now. Otherwise it is gone already, or another object has its name.
pub(in crate::kubernetes) fn deleted<T>(result: Result<T, CallError>) -> Result<bool, CallError> {
    match result {
        Ok(_) => Ok(true),
        Err(error) if is_code(&error, 404) || is_code(&error, 409) => Ok(false),
        Err(error) => Err(error),
    }
}
