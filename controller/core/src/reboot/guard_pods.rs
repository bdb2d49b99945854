//! Guard pods: if volumes need the replicas of a node, it gets a pod with a PodDisruptionBudget that forbids
//! its eviction. So `kubectl drain`, and every other client that evicts pods, waits there until the volumes
//! can do without the node.
//!
//! The pod does nothing. It has to run: Kubernetes evicts a pod that does not run yet despite its budget.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::{MOVE_WAIT, Needed};
use crate::ClusterState;
use crate::discovery::KubernetesCluster;
use crate::objects::{Key, Kind};

/// The prefix of the names of pods and budgets.
const PREFIX: &str = "shorthorn-guard-";
/// The longest name of an object in Kubernetes.
const NAME_BYTES_MAX: usize = 253;
/// The maximum number of named volumes.
const LISTED_MAX: usize = 8;

/// A guard pod that should exist, with its budget.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedGuardPod {
    /// The Node object, which owns it.
    pub node: String,
    /// The uid of the Node object, by which the budget finds its pod.
    pub uid: String,
    /// The name of the machine in Kubernetes.
    pub machine: String,
    /// The volumes that need the node, and the events that they wait for.
    pub message: String,
}

/// A guard pod that the API server has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExistingGuardPod {
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
pub struct GuardPodPlan {
    /// Budgets to make before their pods, so that no pod is without one.
    pub make_budget: Vec<(String, WantedGuardPod)>,
    /// To be made.
    pub make_pod: Vec<(String, WantedGuardPod)>,
    /// Pods whose message has changed.
    pub report: Vec<(String, String)>,
    /// Pods to delete, because they are not needed any more or belong to another Node object.
    pub delete_pod: Vec<String>,
    /// The same for budgets.
    pub delete_budget: Vec<String>,
}

/// Returns the guard pods that should exist, by their names.
#[must_use]
pub fn wanted(
    cluster: &ClusterState,
    kubernetes: &KubernetesCluster,
    needed: &Needed,
) -> BTreeMap<String, WantedGuardPod> {
    let machines: BTreeMap<&str, &str> = kubernetes
        .drivers
        .iter()
        .filter(|(machine, _)| kubernetes.machines.contains_key(*machine))
        .map(|(machine, node)| (node.as_str(), machine.as_str()))
        .collect();
    let guard_pod = |(node, volumes): (&crate::NodeName, Vec<(&str, &str)>)| {
        let machine = (*machines.get(node.as_str())?).to_owned();
        let uid = cluster.uid(&Key::new(Kind::Node, node.as_str()))?.to_owned();
        let (node, message) = (node.as_str().to_owned(), message(&volumes));
        Some((name(&node, &uid), WantedGuardPod { node, uid, machine, message }))
    };
    needed.by_node().into_iter().filter_map(guard_pod).collect()
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

/// Plans the actions that lead to exactly these guard pods. `budgets` have the uid of their Node object.
#[must_use]
pub fn plan(
    wanted: &BTreeMap<String, WantedGuardPod>,
    pods: &BTreeMap<String, ExistingGuardPod>,
    budgets: &BTreeMap<String, String>,
) -> GuardPodPlan {
    let mut plan = GuardPodPlan::default();
    for (name, guard_pod) in wanted {
        if !budgets.contains_key(name) {
            plan.make_budget.push((name.clone(), guard_pod.clone()));
        }
        match pods.get(name) {
            None => plan.make_pod.push((name.clone(), guard_pod.clone())),
            Some(pod) if is_right(pod, guard_pod) && pod.message != guard_pod.message => {
                plan.report.push((name.clone(), guard_pod.message.clone()));
            }
            Some(_) => {}
        }
    }
    let is_wrong = |(name, pod): &(&String, &ExistingGuardPod)| {
        !pod.is_deleting && !wanted.get(*name).is_some_and(|guard_pod| is_right(pod, guard_pod))
    };
    plan.delete_pod = pods.iter().filter(is_wrong).map(|(name, _)| name.clone()).collect();
    let is_foreign =
        |(name, uid): &(&String, &String)| wanted.get(*name).is_none_or(|guard_pod| guard_pod.uid != **uid);
    plan.delete_budget = budgets.iter().filter(is_foreign).map(|(name, _)| name.clone()).collect();
    plan
}

/// The guard pods and budgets that are not wanted any more, and since when. They stay for a while: a drain
/// detaches a volume before Kubernetes attaches it to another node, and no node is needed meanwhile.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unneeded {
    /// By name, in time since any fixed moment.
    since: BTreeMap<String, Duration>,
}

impl Unneeded {
    /// Takes those deletions out of the plan that are not due at `now`, and returns the time until the next
    /// one. Pods and budgets that are wanted and wrong are deleted at once.
    pub fn delay(
        &mut self,
        plan: &mut GuardPodPlan,
        wanted: &BTreeMap<String, WantedGuardPod>,
        now: Duration,
    ) -> Option<Duration> {
        let names: BTreeSet<&String> = plan.delete_pod.iter().chain(&plan.delete_budget).collect();
        let unneeded = names.into_iter().filter(|name| !wanted.contains_key(*name));
        let since = |name: &String| (name.clone(), self.since.get(name).copied().unwrap_or(now));
        self.since = unneeded.map(since).collect();
        let left = |since: &Duration| MOVE_WAIT.saturating_sub(now.saturating_sub(*since));
        let is_due = |name: &String| self.since.get(name).is_none_or(|since| left(since).is_zero());
        plan.delete_pod.retain(is_due);
        plan.delete_budget.retain(is_due);
        self.since.values().map(left).filter(|left| !left.is_zero()).min()
    }
}

fn is_right(pod: &ExistingGuardPod, guard_pod: &WantedGuardPod) -> bool {
    !pod.has_ended && !pod.is_deleting && pod.uid == guard_pod.uid && pod.machine == guard_pod.machine
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discovery::Machine;
    use crate::objects::Node;
    use crate::{NodeName, Timestamp};

    fn guard_pod(message: &str) -> WantedGuardPod {
        let word = str::to_owned;
        WantedGuardPod { node: word("n0"), uid: word("u0"), machine: word("m0"), message: word(message) }
    }

    fn pod(guard_pod: &WantedGuardPod) -> ExistingGuardPod {
        let WantedGuardPod { uid, machine, message, .. } = guard_pod.clone();
        ExistingGuardPod { uid, machine, message, ..ExistingGuardPod::default() }
    }

    const NAME: &str = "shorthorn-guard-n0";

    fn planned(
        wanted: Option<&WantedGuardPod>,
        pod: Option<ExistingGuardPod>,
        budget: Option<&str>,
    ) -> GuardPodPlan {
        let wanted = wanted.map(|guard_pod| (NAME.to_owned(), guard_pod.clone())).into_iter().collect();
        let pods = pod.map(|pod| (NAME.to_owned(), pod)).into_iter().collect();
        let budgets = budget.map(|uid| (NAME.to_owned(), uid.to_owned())).into_iter().collect();
        plan(&wanted, &pods, &budgets)
    }

    #[test]
    fn a_guard_pod_has_a_budget_as_long_as_it_is_needed() {
        let guard_pod = guard_pod("a");
        let made = planned(Some(&guard_pod), None, None);
        assert_eq!((made.make_budget.len(), made.make_pod.len()), (1, 1), "{made:?}");
        assert_eq!(planned(Some(&guard_pod), Some(pod(&guard_pod)), Some("u0")), GuardPodPlan::default());
        let half = planned(Some(&guard_pod), Some(pod(&guard_pod)), None);
        assert_eq!(
            half,
            GuardPodPlan {
                make_budget: vec![(NAME.to_owned(), guard_pod.clone())],
                ..GuardPodPlan::default()
            }
        );
        let gone = planned(None, Some(pod(&guard_pod)), Some("u0"));
        let names = vec![NAME.to_owned()];
        assert_eq!(
            gone,
            GuardPodPlan { delete_pod: names.clone(), delete_budget: names, ..GuardPodPlan::default() }
        );
    }

    #[test]
    fn a_wrong_guard_pod_is_recreated_after_its_deletion_has_ended() {
        let guard_pod = guard_pod("a");
        let other_words = ExistingGuardPod { message: "b".to_owned(), ..pod(&guard_pod) };
        let listed = planned(Some(&guard_pod), Some(other_words), Some("u0"));
        assert_eq!(
            listed,
            GuardPodPlan { report: vec![(NAME.to_owned(), "a".to_owned())], ..GuardPodPlan::default() }
        );
        for wrong in [
            ExistingGuardPod { uid: "u1".to_owned(), ..pod(&guard_pod) },
            ExistingGuardPod { machine: "m1".to_owned(), ..pod(&guard_pod) },
            ExistingGuardPod { has_ended: true, ..pod(&guard_pod) },
        ] {
            let plan = planned(Some(&guard_pod), Some(wrong.clone()), Some("u0"));
            assert_eq!(plan, GuardPodPlan { delete_pod: vec![NAME.to_owned()], ..GuardPodPlan::default() });
            let going = ExistingGuardPod { is_deleting: true, ..wrong };
            assert_eq!(planned(Some(&guard_pod), Some(going), Some("u0")), GuardPodPlan::default());
        }
        let other = planned(Some(&guard_pod), Some(pod(&guard_pod)), Some("u1"));
        assert_eq!(other, GuardPodPlan { delete_budget: vec![NAME.to_owned()], ..GuardPodPlan::default() });
    }

    #[test]
    fn an_unneeded_guard_pod_stays_until_no_volume_has_needed_it_for_a_while() {
        let (guard_pod, mut unneeded) = (guard_pod("a"), Unneeded::default());
        let mut round = |is_wanted: bool, second: u64| {
            let wanted = Some(&guard_pod).filter(|_| is_wanted);
            let mut plan = planned(wanted, Some(pod(&guard_pod)), Some("u0"));
            let wanted = wanted.map(|guard_pod| (NAME.to_owned(), guard_pod.clone())).into_iter().collect();
            let next = unneeded.delay(&mut plan, &wanted, Duration::from_secs(second));
            (plan.delete_pod.len(), plan.delete_budget.len(), next.map(|next| next.as_secs()))
        };
        assert_eq!(round(false, 100), (0, 0, Some(60)));
        assert_eq!(round(false, 159), (0, 0, Some(1)));
        assert_eq!(round(true, 159), (0, 0, None));
        assert_eq!(round(false, 160), (0, 0, Some(60)), "the time begins again");
        assert_eq!(round(false, 220), (1, 1, None));
    }

    #[test]
    fn a_wrong_guard_pod_that_is_needed_is_deleted_at_once() {
        let guard_pod = guard_pod("a");
        let ended = ExistingGuardPod { has_ended: true, ..pod(&guard_pod) };
        let mut plan = planned(Some(&guard_pod), Some(ended), Some("u0"));
        let wanted = BTreeMap::from([(NAME.to_owned(), guard_pod)]);
        assert_eq!(Unneeded::default().delay(&mut plan, &wanted, Duration::ZERO), None);
        assert_eq!(plan.delete_pod, [NAME]);
    }

    #[test]
    fn a_guard_pod_runs_on_the_machine_of_its_node() {
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
            object.metadata.uid = Some(format!("u{at}"));
            cluster.insert(object.into());
            if node != "not-in-kubernetes" {
                kubernetes.machines.insert(format!("m{at}"), Machine::default());
                kubernetes.drivers.insert(format!("m{at}"), node.to_owned());
            }
        }
        let guard_pods = wanted(&cluster, &kubernetes, &needed);
        assert_eq!(guard_pods.keys().collect::<Vec<_>>(), [NAME, "shorthorn-guard-u2"]);
        let first = &guard_pods[NAME];
        assert_eq!((first.uid.as_str(), first.machine.as_str()), ("u0", "m0"));
        assert!(first.message.starts_with("volume v0: why\n"), "{}", first.message);
        assert!(first.message.ends_with("\nand 2 more volumes"), "{}", first.message);
        kubernetes.machines.remove("m0");
        assert!(!wanted(&cluster, &kubernetes, &needed).contains_key(NAME), "its machine is gone");
    }
}
