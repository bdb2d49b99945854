//! Guard pods: if volumes need the replicas of a node, it gets a pod with a PodDisruptionBudget that forbids
//! its eviction. So `kubectl drain`, and every other client that evicts pods, waits there until the volumes
//! can do without the node.
//!
//! The pod does nothing. It has to run: Kubernetes evicts a pod that does not run yet despite its budget.

use std::collections::BTreeMap;

use super::Needed;
use crate::ClusterState;
use crate::discovery::KubernetesCluster;
use crate::objects::{Key, Kind};

/// The prefix of the names of pods and budgets.
const PREFIX: &str = "shorthorn-guard-";
/// The longest name of an object in Kubernetes.
const NAME_BYTES_MAX: usize = 253;
/// The maximum number of named volumes.
const LISTED_MAX: usize = 8;

/// A guard that should be there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guard {
    /// The Node object, which owns it.
    pub node: String,
    /// The uid of the Node object, by which the budget finds its pod.
    pub uid: String,
    /// The name of the machine in Kubernetes.
    pub machine: String,
    /// The volumes that need the node, and the events that they wait for.
    pub message: String,
}

/// An existing guard pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuardPod {
    /// The uid of its Node object.
    pub uid: String,
    /// Name of the Kubernetes node that runs it; empty without one.
    pub machine: String,
    /// Read from its annotation: the volumes, and the events that they wait for.
    pub message: String,
    /// True if the pod runs no more, because the machine had no room for it or ended it.
    pub has_ended: bool,
    /// True if it is being deleted.
    pub is_deleting: bool,
}

/// The necessary actions, each by the name of pod or budget, in this order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuardPlan {
    /// Budgets to make before their pods, so that no pod is without one.
    pub make_budget: Vec<(String, Guard)>,
    /// To be made.
    pub make_pod: Vec<(String, Guard)>,
    /// Pods whose message has changed.
    pub report: Vec<(String, String)>,
    /// Pods to delete, because they are not needed any more or belong to another Node object.
    pub delete_pod: Vec<String>,
    /// The same for budgets.
    pub delete_budget: Vec<String>,
}

/// Returns the guards that should be there, by their names.
#[must_use]
pub fn wanted(
    cluster: &ClusterState,
    kubernetes: &KubernetesCluster,
    needed: &Needed,
) -> BTreeMap<String, Guard> {
    let machines: BTreeMap<&str, &str> = kubernetes
        .drivers
        .iter()
        .filter(|(machine, _)| kubernetes.machines.contains_key(*machine))
        .map(|(machine, node)| (node.as_str(), machine.as_str()))
        .collect();
    let guard = |(node, volumes): (&crate::NodeName, Vec<(&str, &str)>)| {
        let machine = (*machines.get(node.as_str())?).to_owned();
        let uid = cluster.uid(&Key::new(Kind::Node, node.as_str()))?.to_owned();
        let (node, message) = (node.as_str().to_owned(), message(&volumes));
        Some((name(&node, &uid), Guard { node, uid, machine, message }))
    };
    needed.by_node().into_iter().filter_map(guard).collect()
}

fn name(node: &str, uid: &str) -> String {
    let is_short = PREFIX.len() + node.len() <= NAME_BYTES_MAX;
    format!("{PREFIX}{}", if is_short { node } else { uid })
}

fn message(volumes: &[(&str, &str)]) -> String {
    let listed = volumes.iter().take(LISTED_MAX).map(|(volume, why)| format!("volume {volume}: {why}"));
    let mut text = listed.collect::<Vec<_>>().join("\n");
    if let Some(more @ 1..) = volumes.len().checked_sub(LISTED_MAX) {
        text.push_str(&format!("\nand {more} more volumes"));
    }
    text
}

/// Plans the actions that lead to exactly these guards. `budgets` have the uid of their Node object.
#[must_use]
pub fn plan(
    wanted: &BTreeMap<String, Guard>,
    pods: &BTreeMap<String, GuardPod>,
    budgets: &BTreeMap<String, String>,
) -> GuardPlan {
    let mut plan = GuardPlan::default();
    for (name, guard) in wanted {
        if !budgets.contains_key(name) {
            plan.make_budget.push((name.clone(), guard.clone()));
        }
        match pods.get(name) {
            None => plan.make_pod.push((name.clone(), guard.clone())),
            Some(pod) if is_right(pod, guard) && pod.message != guard.message => {
                plan.report.push((name.clone(), guard.message.clone()));
            }
            Some(_) => {}
        }
    }
    let is_wrong = |(name, pod): &(&String, &GuardPod)| {
        !pod.is_deleting && !wanted.get(*name).is_some_and(|guard| is_right(pod, guard))
    };
    plan.delete_pod = pods.iter().filter(is_wrong).map(|(name, _)| name.clone()).collect();
    let is_foreign =
        |(name, uid): &(&String, &String)| wanted.get(*name).is_none_or(|guard| guard.uid != **uid);
    plan.delete_budget = budgets.iter().filter(is_foreign).map(|(name, _)| name.clone()).collect();
    plan
}

fn is_right(pod: &GuardPod, guard: &Guard) -> bool {
    !pod.has_ended && !pod.is_deleting && pod.uid == guard.uid && pod.machine == guard.machine
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discovery::Machine;
    use crate::objects::Node;
    use crate::{NodeName, Timestamp};

    fn guard(message: &str) -> Guard {
        let word = str::to_owned;
        Guard { node: word("n0"), uid: word("u0"), machine: word("m0"), message: word(message) }
    }

    fn pod(guard: &Guard) -> GuardPod {
        let Guard { uid, machine, message, .. } = guard.clone();
        GuardPod { uid, machine, message, ..GuardPod::default() }
    }

    const NAME: &str = "shorthorn-guard-n0";

    fn planned(wanted: Option<&Guard>, pod: Option<GuardPod>, budget: Option<&str>) -> GuardPlan {
        let wanted = wanted.map(|guard| (NAME.to_owned(), guard.clone())).into_iter().collect();
        let pods = pod.map(|pod| (NAME.to_owned(), pod)).into_iter().collect();
        let budgets = budget.map(|uid| (NAME.to_owned(), uid.to_owned())).into_iter().collect();
        plan(&wanted, &pods, &budgets)
    }

    #[test]
    fn a_guard_is_a_pod_and_a_budget_as_long_as_it_is_needed() {
        let guard = guard("a");
        let made = planned(Some(&guard), None, None);
        assert_eq!((made.make_budget.len(), made.make_pod.len()), (1, 1), "{made:?}");
        assert_eq!(planned(Some(&guard), Some(pod(&guard)), Some("u0")), GuardPlan::default());
        let half = planned(Some(&guard), Some(pod(&guard)), None);
        assert_eq!(
            half,
            GuardPlan { make_budget: vec![(NAME.to_owned(), guard.clone())], ..GuardPlan::default() }
        );
        let gone = planned(None, Some(pod(&guard)), Some("u0"));
        let names = vec![NAME.to_owned()];
        assert_eq!(
            gone,
            GuardPlan { delete_pod: names.clone(), delete_budget: names, ..GuardPlan::default() }
        );
    }

    #[test]
    fn a_wrong_guard_pod_is_recreated_after_its_deletion_has_ended() {
        let guard = guard("a");
        let other_words = GuardPod { message: "b".to_owned(), ..pod(&guard) };
        let listed = planned(Some(&guard), Some(other_words), Some("u0"));
        assert_eq!(
            listed,
            GuardPlan { report: vec![(NAME.to_owned(), "a".to_owned())], ..GuardPlan::default() }
        );
        for wrong in [
            GuardPod { uid: "u1".to_owned(), ..pod(&guard) },
            GuardPod { machine: "m1".to_owned(), ..pod(&guard) },
            GuardPod { has_ended: true, ..pod(&guard) },
        ] {
            let plan = planned(Some(&guard), Some(wrong.clone()), Some("u0"));
            assert_eq!(plan, GuardPlan { delete_pod: vec![NAME.to_owned()], ..GuardPlan::default() });
            let going = GuardPod { is_deleting: true, ..wrong };
            assert_eq!(planned(Some(&guard), Some(going), Some("u0")), GuardPlan::default());
        }
        let other = planned(Some(&guard), Some(pod(&guard)), Some("u1"));
        assert_eq!(other, GuardPlan { delete_budget: vec![NAME.to_owned()], ..GuardPlan::default() });
    }

    #[test]
    fn a_guard_runs_on_the_machine_of_its_node() {
        let holds = |node: &str| (NodeName::new(node).unwrap(), "why".to_owned());
        let mut needed = Needed::default();
        let long = ["a", "b", "c", "d"].map(|letter| letter.repeat(60)).join(".");
        let nodes = ["n0", "not-in-kubernetes", long.as_str()];
        for at in 0..10 {
            needed.by_volume.insert(format!("v{at}"), nodes.into_iter().map(holds).collect());
        }
        let (mut cluster, mut kubernetes) = (ClusterState::default(), KubernetesCluster::default());
        for (at, node) in nodes.into_iter().enumerate() {
            let mut object = Node::new(node, Timestamp::UNIX_EPOCH);
            object.metadata.uid = format!("u{at}");
            cluster.insert(object.into());
            if node != "not-in-kubernetes" {
                kubernetes.machines.insert(format!("m{at}"), Machine::default());
                kubernetes.drivers.insert(format!("m{at}"), node.to_owned());
            }
        }
        let guards = wanted(&cluster, &kubernetes, &needed);
        assert_eq!(guards.keys().collect::<Vec<_>>(), [NAME, "shorthorn-guard-u2"]);
        let first = &guards[NAME];
        assert_eq!((first.uid.as_str(), first.machine.as_str()), ("u0", "m0"));
        assert!(first.message.starts_with("volume v0: why\n"), "{}", first.message);
        assert!(first.message.ends_with("\nand 2 more volumes"), "{}", first.message);
        kubernetes.machines.remove("m0");
        assert!(!wanted(&cluster, &kubernetes, &needed).contains_key(NAME), "its machine is gone");
    }
}
