//! Handles pods that use a device that is gone, as after an engine has ended for good. Every access fails,
//! and stays so until the volume is staged again. Kubernetes does that only for a new pod.
//!
//! Such a pod is deleted as by `kubectl delete pod`, if a controller owns it and so re-creates it. Others are
//! reported. The agent reports dead mounts and their pods; only reports of a reachable agent count.

use crate::NodeName;
use crate::lost_node_pods::{Pod, PodOwner};
use crate::observed::{Agents, DeadMount};

/// The plan for the pods of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RestagePlan {
    /// Pods to delete, each with its volumes whose devices are gone.
    pub end: Vec<(Pod, Vec<String>)>,
    /// Pods that no controller would re-create: the administrator has to decide.
    pub report: Vec<(Pod, Vec<String>)>,
}

/// Returns the dead mounts of reachable nodes.
#[must_use]
pub fn nodes(agents: &Agents) -> Vec<(NodeName, Vec<DeadMount>)> {
    let synced = agents.by_node().iter().filter(|(_, agent)| agent.is_synced());
    let mounts =
        synced.filter_map(|(node, agent)| Some((node.clone(), agent.info.as_ref()?.dead_mounts.clone())));
    mounts.filter(|(_, mounts)| !mounts.is_empty()).collect()
}

/// Decides about all pods of a node.
#[must_use]
pub fn plan(mounts: &[DeadMount], pods: &[Pod]) -> RestagePlan {
    let mut plan = RestagePlan::default();
    for pod in pods {
        let mine = mounts.iter().filter(|mount| mount.pod_uid == pod.uid);
        let volumes: Vec<String> = mine.map(|mount| mount.volume.clone()).collect();
        // A pod that is being deleted needs no help; a kubelet ends those that it has from a file.
        if volumes.is_empty() || pod.gone_by.is_some() || pod.has_ended || pod.owner == PodOwner::Kubelet {
            continue;
        }
        if pod.has_controller {
            plan.end.push((pod.clone(), volumes));
        } else {
            plan.report.push((pod.clone(), volumes));
        }
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Timestamp;
    use crate::lost_node_pods::Namespaced;
    use crate::observed::{AgentInfo, AgentLink, ObservedAgent};

    fn pod(name: &str, has_controller: bool) -> Pod {
        let name = Namespaced { namespace: "n".to_owned(), name: name.to_owned() };
        Pod { uid: format!("uid-{}", name.name), name, has_controller, ..Pod::default() }
    }

    fn dead(volume: &str, pod: &str) -> DeadMount {
        DeadMount { volume: volume.to_owned(), pod_uid: format!("uid-{pod}") }
    }

    fn ended(pod: Pod) -> usize {
        let plan = plan(&[dead("v", &pod.name.name)], &[pod]);
        assert!(plan.report.is_empty(), "{plan:?}");
        plan.end.len()
    }

    #[test]
    fn a_pod_with_a_controller_is_ended_if_its_device_is_gone() {
        let (owned, bare, well) = (pod("owned", true), pod("bare", false), pod("well", true));
        let mounts = [dead("v", "owned"), dead("w", "owned"), dead("u", "bare"), dead("u", "long-gone")];
        let plan = plan(&mounts, &[owned.clone(), bare.clone(), well]);
        assert_eq!(plan.end, [(owned, vec!["v".to_owned(), "w".to_owned()])]);
        assert_eq!(plan.report, [(bare, vec!["u".to_owned()])]);
    }

    #[test]
    fn a_pod_that_ends_or_that_a_kubelet_has_from_a_file_is_left_alone() {
        let well = pod("p", true);
        assert_eq!(ended(well.clone()), 1);
        assert_eq!(ended(Pod { owner: PodOwner::DaemonSet, ..well.clone() }), 1);
        assert_eq!(ended(Pod { gone_by: Some(Timestamp::UNIX_EPOCH), ..well.clone() }), 0);
        assert_eq!(ended(Pod { has_ended: true, ..well.clone() }), 0);
        assert_eq!(ended(Pod { owner: PodOwner::Kubelet, ..well }), 0);
    }

    #[test]
    fn only_an_agent_in_reach_is_believed() {
        let mut agents = Agents::default();
        for (node, mounts) in [("a", vec![dead("v", "p")]), ("b", vec![]), ("c", vec![dead("w", "q")])] {
            let mut agent = ObservedAgent::new("http://x:1", Timestamp::UNIX_EPOCH);
            agent.info = Some(AgentInfo { dead_mounts: mounts, ..AgentInfo::default() });
            if node != "c" {
                agent.link = AgentLink::Synced;
            }
            agents.insert(NodeName::new(node).unwrap(), agent);
        }
        assert_eq!(nodes(&agents), [(NodeName::new("a").unwrap(), vec![dead("v", "p")])]);
    }
}
