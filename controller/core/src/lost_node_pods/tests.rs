use super::*;
use crate::discovery;
use crate::objects::Secret;
use crate::observed::{AgentInfo, AgentLink, ObservedAgent};
use crate::reconcile::UNREACHABLE_AFTER;
use crate::requests::{Change, CreateVolume};

const NODE: &str = "n";
const LOST: MachineState = MachineState { is_ready: false, is_reachable: false, has_nameless_disks: false };

fn at(second: i64) -> Timestamp {
    Timestamp::new(1_000_000 + second, 0).unwrap()
}

fn claim(name: &str) -> Namespaced {
    Namespaced { namespace: "apps".to_owned(), name: name.to_owned() }
}

/// Returns a pod that had to be gone a second ago.
fn pod(name: &str, claims: &[&str]) -> Pod {
    Pod {
        name: claim(name),
        uid: format!("uid-{name}"),
        gone_by: Some(at(-1)),
        claims: claims.iter().map(|name| (*name).to_owned()).collect(),
        ..Pod::default()
    }
}

/// Returns an attachment of that claim, with a name derived from it.
fn attachment(of: &str, is_ours: bool) -> AttachedVolume {
    AttachedVolume {
        name: format!("csi-{of}"),
        uid: format!("uid-csi-{of}"),
        driver: if is_ours { "csi.shorthorn.io" } else { "disks.example" }.to_owned(),
        is_ours,
        claim: Some(claim(of)),
        handle: Some(format!("v-{of}")),
        is_deleting: false,
    }
}

fn force_deleted(plan: &PodPlan) -> Vec<&str> {
    plan.force_delete.iter().map(|pod| pod.name.name.as_str()).collect()
}

fn detached(plan: &PodPlan) -> Vec<&str> {
    plan.detach.iter().map(|attachment| attachment.name.as_str()).collect()
}

#[test]
fn a_pod_is_force_deleted_first_and_its_volume_is_detached_after() {
    let attachments = [attachment("data", true)];
    let first = plan(LOST, &[pod("p", &["data"])], &attachments, at(0));
    assert_eq!((force_deleted(&first), detached(&first)), (vec!["p"], vec![]));
    let second = plan(LOST, &[], &attachments, at(0));
    assert_eq!((force_deleted(&second), detached(&second)), (vec![], vec!["csi-data"]));
}

#[test]
fn nothing_is_done_unless_both_have_lost_the_node() {
    let attachments = [attachment("data", true), attachment("unused", true)];
    for machine in [MachineState { is_ready: true, ..LOST }, MachineState { is_reachable: true, ..LOST }] {
        assert_eq!(
            plan(machine, &[pod("p", &["data"])], &attachments, at(0)),
            PodPlan::default(),
            "{machine:?}"
        );
    }
}

#[test]
fn each_pod_that_stays_has_its_reason() {
    let ours = || pod("p", &["data"]);
    let owned = |owner| Pod { owner, ..ours() };
    let other = || KeepReason::OtherDriver("disks.example".to_owned());
    let itself = || KeepReason::OtherDriver("Kubernetes itself".to_owned());
    let nameless = MachineState { has_nameless_disks: true, ..LOST };
    let finalizers = || vec!["example/wait".to_owned()];
    let table: Vec<(&str, MachineState, Pod, Option<KeepReason>)> = vec![
        ("deleted, time over", LOST, ours(), None),
        ("exactly over", LOST, Pod { gone_by: Some(at(0)), ..ours() }, None),
        ("not deleted", LOST, Pod { gone_by: None, ..ours() }, Some(KeepReason::NotDeleted)),
        (
            "time left",
            LOST,
            Pod { gone_by: Some(at(7)), ..ours() },
            Some(KeepReason::Time(Duration::from_secs(7))),
        ),
        ("daemon", LOST, owned(PodOwner::DaemonSet), Some(KeepReason::OfItsNode(PodOwner::DaemonSet))),
        ("static", LOST, owned(PodOwner::Kubelet), Some(KeepReason::OfItsNode(PodOwner::Kubelet))),
        ("no claim", LOST, pod("p", &[]), Some(KeepReason::NotOurs)),
        ("claim that is not attached", LOST, pod("p", &["files"]), Some(KeepReason::NotOurs)),
        ("another driver's alone", LOST, pod("p", &["other"]), Some(KeepReason::NotOurs)),
        ("another driver's too", LOST, pod("p", &["data", "other"]), Some(other())),
        ("shared files too", LOST, pod("p", &["data", "files"]), None),
        ("perhaps a disk", nameless, pod("p", &["data", "files"]), Some(itself())),
        ("others' disks", nameless, ours(), None),
        ("a disk without a claim", LOST, Pod { has_inline_disk: true, ..ours() }, Some(itself())),
        ("finalizers, not ended yet", LOST, Pod { finalizers: finalizers(), ..ours() }, None),
        (
            "finalizers, ended",
            LOST,
            Pod { finalizers: finalizers(), is_ended_by_force: true, ..ours() },
            Some(KeepReason::Finalizers(finalizers())),
        ),
        ("ended containers", LOST, Pod { has_ended: true, ..ours() }, None),
        (
            "same claim, another namespace",
            LOST,
            Pod { name: Namespaced { namespace: "b".to_owned(), name: "p".to_owned() }, ..ours() },
            Some(KeepReason::NotOurs),
        ),
    ];
    let attachments = [attachment("data", true), attachment("other", false)];
    for (what, machine, pod, why) in table {
        let plan = plan(machine, std::slice::from_ref(&pod), &attachments, at(0));
        match why {
            None => assert_eq!((plan.force_delete, plan.keep), (vec![pod], vec![]), "{what}"),
            Some(why) => {
                let wait = if let KeepReason::Time(left) = why { Some(left) } else { None };
                assert_eq!(plan.requeue_after, wait, "{what}");
                assert_eq!((plan.force_delete, plan.keep), (vec![], vec![(pod, why)]), "{what}");
            }
        }
    }
}

#[test]
fn an_attachment_without_a_known_claim_may_be_of_any_claim() {
    let unknown = AttachedVolume { claim: None, ..attachment("x", false) };
    let attachments = [attachment("data", true), unknown];
    let pods = [pod("p", &["data"]), pod("q", &["data", "files"])];
    let plan = plan(LOST, &pods, &attachments, at(0));
    assert_eq!(force_deleted(&plan), ["p"]);
    assert!(
        matches!(&plan.keep[..], [(pod, KeepReason::OtherDriver(_))] if pod.name.name == "q"),
        "{plan:?}"
    );
}

#[test]
fn attachments_stay_while_a_pod_uses_them() {
    let table: Vec<(&str, Vec<Pod>, AttachedVolume, bool)> = vec![
        ("unknown", vec![pod("p", &["b"])], attachment("a", true), true),
        ("a pod that is force deleted now", vec![pod("p", &["a"])], attachment("a", true), false),
        (
            "a pod that Kubernetes has not deleted",
            vec![Pod { gone_by: None, ..pod("p", &["a"]) }],
            attachment("a", true),
            false,
        ),
        (
            "a daemon",
            vec![Pod { owner: PodOwner::DaemonSet, ..pod("p", &["a"]) }],
            attachment("a", true),
            false,
        ),
        (
            "one whose containers have ended",
            vec![Pod { has_ended: true, ..pod("p", &["a"]) }],
            attachment("a", true),
            true,
        ),
        ("another driver's", vec![], attachment("a", false), false),
        ("on its way out", vec![], AttachedVolume { is_deleting: true, ..attachment("a", true) }, false),
        ("of an unknown claim", vec![], AttachedVolume { claim: None, ..attachment("a", true) }, false),
    ];
    for (what, pods, attachment, is_detached) in table {
        let plan = plan(LOST, &pods, std::slice::from_ref(&attachment), at(0));
        assert_eq!(plan.detach, if is_detached { vec![attachment] } else { vec![] }, "{what}");
    }
}

#[test]
fn the_next_look_is_when_the_first_time_is_over() {
    let evicted = |name: &str, second| Pod { gone_by: Some(at(second)), ..pod(name, &["data"]) };
    let plan = plan(LOST, &[evicted("p", 9), evicted("q", 4)], &[attachment("data", true)], at(0));
    assert_eq!(plan.requeue_after, Some(Duration::from_secs(4)));
}

fn cluster(wanted_on: Option<&str>, is_on: Option<&str>) -> ClusterState {
    let name = |node: &str| NodeName::new(node).unwrap();
    let mut cluster = ClusterState::default();
    let wanted = CreateVolume { name: "v".to_owned(), size_bytes: 1 << 30, ..CreateVolume::default() };
    let Ok(Change::Store(mut volume)) = wanted.apply(&cluster, Secret::new([1; 32]), at(0)) else {
        panic!("the volume is refused");
    };
    volume.spec.node_id = wanted_on.map(name);
    volume.status.current_node_id = is_on.map(name);
    cluster.insert(volume.into());
    cluster
}

fn kubernetes(is_ready: bool) -> KubernetesCluster {
    let mut kubernetes = KubernetesCluster::default();
    // The name in Kubernetes may be another one.
    let machine = discovery::Machine { is_ready, ..discovery::Machine::default() };
    kubernetes.machines.insert("machine".to_owned(), machine);
    kubernetes.drivers.insert("machine".to_owned(), NODE.to_owned());
    kubernetes
}

fn agents(link: AgentLink) -> Agents {
    let info = Some(AgentInfo { name: NODE.to_owned(), ..AgentInfo::default() });
    let agent = ObservedAgent { link, info, ..ObservedAgent::new("http://a:1", at(0)) };
    Agents::from_iter([(NodeName::new(NODE).unwrap(), agent)])
}

#[test]
fn a_machine_is_lost_if_kubelet_and_agent_are_silent_and_a_volume_is_there() {
    let down = || agents(AgentLink::Down { since: at(0), reason: "silent".to_owned() });
    let limit_s = i64::try_from(UNREACHABLE_AFTER.as_secs()).unwrap();
    let here = || cluster(None, Some(NODE));
    let table: Vec<(&str, KubernetesCluster, ClusterState, Agents, i64, bool)> = vec![
        ("all of it", kubernetes(false), here(), down(), limit_s, true),
        ("a volume on its way there", kubernetes(false), cluster(Some(NODE), None), down(), limit_s, true),
        ("no agent was ever known", kubernetes(false), here(), Agents::default(), 0, true),
        ("kubelet is well", kubernetes(true), here(), down(), limit_s, false),
        ("the agent answers", kubernetes(false), here(), agents(AgentLink::Synced), limit_s, false),
        ("a volume elsewhere", kubernetes(false), cluster(Some("m"), Some("m")), down(), limit_s, false),
        ("no volume", kubernetes(false), ClusterState::default(), down(), limit_s, false),
        ("no machine", KubernetesCluster::default(), here(), down(), limit_s, false),
    ];
    for (what, kubernetes, cluster, agents, second, is_lost) in table {
        let lost = lost(&kubernetes, &cluster, &agents, at(second));
        assert_eq!(lost.machines.contains_key("machine"), is_lost, "{what}");
        assert_eq!(lost.requeue_after, None, "{what}");
    }
    let blurred = lost(&kubernetes(false), &here(), &down(), at(limit_s - 3));
    assert_eq!(
        blurred,
        LostMachines { machines: BTreeMap::new(), requeue_after: Some(Duration::from_secs(3)) }
    );
}
