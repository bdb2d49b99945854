//! The replacement of lost replicas, and the limit of rebuilds on a node.

use super::*;
use crate::observed::ObservedReplica;
use crate::{Labels, labels};

/// Returns [`degraded_cluster`], with `rebuilding` replicas of other volumes on c, each of which has
/// `members` members.
fn busy_cluster(rebuilding: u64, waiting: u64, members: u64) -> (ClusterState, Agents) {
    let mut cluster = degraded_cluster();
    let mut volume = cluster.volumes["v"].clone();
    volume.spec.number_of_replicas = 3;
    let second = ReplicaId::from_random(3);
    volume.status.first_members.push(second);
    cluster.insert(volume.clone().into());
    cluster.insert(replica(second, "b", None).into());
    let mut engine = cluster.engines["v"].clone();
    engine.status.replica_mode_map.insert(second, MemberRecord::of(MemberMode::Member));
    cluster.insert(engine.clone().into());
    for number in 0..rebuilding + waiting {
        let name = VolumeName::new(&format!("other{number}")).unwrap();
        let mut other = volume.clone();
        other.metadata.name = name.to_string();
        other.spec.volume_name = name.clone();
        other.status.first_members = Vec::new();
        let mut its = engine.clone();
        its.metadata.name = name.to_string();
        its.spec.volume_name = name.clone();
        its.status.replica_mode_map = (0..members)
            .map(|at| (ReplicaId::from_random(50 + at), MemberRecord::of(MemberMode::Member)))
            .collect();
        let id = ReplicaId::from_random(90);
        if number < rebuilding {
            let mut new = replica(id, "c", None);
            new.metadata.name = ReplicaSpec::instance_name(&name, id);
            new.spec.volume_name = name;
            new.status.healthy_at = None;
            its.status.replica_mode_map.insert(id, MemberRecord::of(MemberMode::Rebuilding));
            cluster.insert(new.into());
        }
        cluster.insert(other.into());
        cluster.insert(its.into());
    }
    let mut agents = agents(None);
    let mut c = agents.by_node().values().next().unwrap().clone();
    c.info = Some(AgentInfo { name: "c".to_owned(), ..AgentInfo::default() });
    agents.insert(NodeName::new("c").unwrap(), c);
    (cluster, agents)
}

#[test]
fn a_node_brings_up_few_replicas_at_a_time_and_the_neediest_first() {
    let settings =
        Settings { replica_replace_after: Duration::ZERO, rebuilds_per_node: 2, ..Settings::default() };
    let decide = |(cluster, agents): (ClusterState, Agents)| {
        let context =
            Context { cluster: &cluster, agents: &agents, now: now(), random: [7; MAX_MEMBERS], settings };
        let decision = reconcile(&context, &Key::new(Kind::Volume, "v"));
        let is_new = |action: &Action| {
            matches!(action, Action::Write(object)
                if matches!(&**object, Object::Replica(new) if new.status.data == DataState::None))
        };
        (decision.actions.iter().any(is_new), decision.requeue_after)
    };
    assert!(decide(busy_cluster(1, 0, 2)).0);
    assert_eq!(decide(busy_cluster(2, 0, 2)), (false, Some(REBUILD_CHECK)), "as many as may be");
    // One place is left: it is for a volume with fewer members than this one has.
    assert_eq!(decide(busy_cluster(1, 1, 1)), (false, Some(REBUILD_CHECK)));
    assert!(decide(busy_cluster(1, 1, 2)).0, "others need it no more");
    // A volume that gets no place in any case delays no other one.
    let (mut cluster, agents) = busy_cluster(1, 1, 1);
    let mut other = cluster.volumes["other1"].clone();
    other.status.robustness = Robustness::Faulted;
    cluster.insert(other.into());
    assert!(decide((cluster, agents)).0);
    // A replica that is being deleted is not waited for, so its volume is as needy as without it.
    let (mut cluster, agents) = busy_cluster(1, 1, 1);
    let (id, name) = (ReplicaId::from_random(91), VolumeName::new("other1").unwrap());
    let mut deleted = replica(id, "c", None);
    deleted.metadata.name = ReplicaSpec::instance_name(&name, id);
    (deleted.spec.volume_name, deleted.metadata.deletion_timestamp) = (name, Some(now()));
    cluster.insert(deleted.into());
    assert_eq!(decide((cluster, agents)), (false, Some(REBUILD_CHECK)));
}

#[test]
fn a_needier_volume_delays_no_other_one_on_nodes_without_its_tags() {
    let settings =
        Settings { replica_replace_after: Duration::ZERO, rebuilds_per_node: 1, ..Settings::default() };
    let tags = |tag: &str| labels([tag]).unwrap();
    let is_placed = |node_selector: Labels, disk_selector: Labels| {
        let (mut cluster, agents) = busy_cluster(0, 1, 1);
        let mut node = cluster.nodes["c"].clone();
        node.spec.tags = tags("fast");
        node.spec.disks.get_mut(DISK).unwrap().tags = tags("ssd");
        cluster.insert(node.into());
        let mut other = cluster.volumes["other0"].clone();
        (other.spec.node_selector, other.spec.disk_selector) = (node_selector, disk_selector);
        cluster.insert(other.into());
        makes_replica(&cluster, &agents, settings)
    };
    assert!(!is_placed(Labels::new(), Labels::new()));
    assert!(!is_placed(tags("fast"), tags("ssd")));
    assert!(is_placed(tags("slow"), Labels::new()));
    assert!(is_placed(tags("fast"), tags("hdd")));
}

/// The first run over such a replica stores that it is away: the engine does not know it yet.
#[test]
fn a_replica_just_made_counts_as_a_rebuild_until_it_is_lost() {
    let is_placed = |mode: Option<MemberMode>, away: Duration, deleted: bool| {
        let (mut cluster, agents) = busy_cluster(2, 0, 2);
        let id = ReplicaId::from_random(90);
        for volume in ["other0", "other1"] {
            let mut engine = cluster.engines[volume].clone();
            engine.status.replica_mode_map.remove(&id);
            engine.status.replica_mode_map.extend(mode.map(|mode| (id, MemberRecord::of(mode))));
            cluster.insert(engine.into());
            let name = ReplicaSpec::instance_name(&VolumeName::new(volume).unwrap(), id);
            let mut new = cluster.replicas[&name].clone();
            let since = Some(now() - away);
            (new.status.lost_since, new.status.failed_at) = (since, since);
            new.metadata.deletion_timestamp = deleted.then(now);
            cluster.insert(new.into());
        }
        let settings = Settings { rebuilds_per_node: 2, ..Settings::default() };
        makes_replica(&cluster, &agents, Settings { replica_replace_after: Duration::ZERO, ..settings })
    };
    for mode in [None, Some(MemberMode::Connecting), Some(MemberMode::Failed)] {
        assert!(!is_placed(mode, Duration::ZERO, false), "{mode:?}");
        assert!(is_placed(mode, NEW_REPLICA_WAIT, false), "{mode:?}: its volume does not wait for it");
        assert!(is_placed(mode, Duration::ZERO, true), "{mode:?}: it is not made any more");
    }
    assert!(!is_placed(Some(MemberMode::Rebuilding), NEW_REPLICA_WAIT, false));
}

/// The engine of a complete volume does not show the new replica before it has its address.
#[test]
fn a_replica_that_takes_the_place_of_a_member_counts_at_once() {
    let (mut cluster, agents) = busy_cluster(2, 0, 3);
    for volume in ["other0", "other1"] {
        let mut engine = cluster.engines[volume].clone();
        engine.status.replica_mode_map.remove(&ReplicaId::from_random(90));
        cluster.insert(engine.into());
        let mut other = cluster.volumes[volume].clone();
        other.status.robustness = Robustness::Healthy;
        cluster.insert(other.into());
    }
    let settings =
        Settings { replica_replace_after: Duration::ZERO, rebuilds_per_node: 2, ..Settings::default() };
    assert!(!makes_replica(&cluster, &agents, settings));
}

/// The last look at the file system does not show the data that is being copied there.
#[test]
fn the_bytes_of_rebuilds_in_progress_are_not_free() {
    let is_placed_in = |state: InstanceState, coming: u64, copied: u64, is_reserved: bool| {
        let (mut cluster, mut agents) = busy_cluster(u64::from(!is_reserved), 1, 2);
        let mut other = cluster.volumes["other0"].clone();
        other.status.actual_size = Some(coming);
        cluster.insert(other.into());
        let (id, name) = (ReplicaId::from_random(90), VolumeName::new("other0").unwrap());
        if is_reserved {
            let mut new = replica(id, "c", None);
            new.metadata.name = ReplicaSpec::instance_name(&name, id);
            new.spec.volume_name = name.clone();
            assert!(cluster.reserve(vec![new]));
        }
        let shown = ObservedReplica { allocated_bytes: copied, ..ObservedReplica::default() };
        let detail = Detail::Replica(shown);
        let mut c = agents.get(&NodeName::new("c").unwrap()).unwrap().clone();
        c.instances.insert(InstanceKey::replica(&name, id), Instance { state, message: None, detail });
        agents.insert(NodeName::new("c").unwrap(), c);
        let settings = Settings { replica_replace_after: Duration::ZERO, ..Settings::default() };
        makes_replica(&cluster, &agents, settings)
    };
    let is_placed =
        |coming, copied, is_reserved| is_placed_in(InstanceState::Running, coming, copied, is_reserved);
    let rest = DISK_BYTES / 100 * 90;
    for is_reserved in [false, true] {
        assert!(is_placed(rest, 0, is_reserved));
        assert!(!is_placed(rest + (1 << 20), 0, is_reserved), "a tenth has to stay free");
    }
    assert!(is_placed(rest + (1 << 20), 1 << 20, false), "the rest of the copy counts");
    assert!(is_placed_in(InstanceState::Error, rest + (1 << 20), 0, false), "its process has ended");
}

#[test]
fn a_refusal_is_stored_again_only_if_more_than_the_free_space_differs() {
    let (mut cluster, mut agents) = busy_cluster(0, 0, 2);
    let settings = Settings { replica_replace_after: Duration::ZERO, ..Settings::default() };
    let mut run = |cluster: &mut ClusterState, available_bytes: u64| {
        agents.change_all(|agent| {
            agent.disks.values_mut().for_each(|disk| disk.available_bytes = available_bytes);
        });
        let context = Context { cluster, agents: &agents, now: now(), random: [7; MAX_MEMBERS], settings };
        let actions = reconcile(&context, &Key::new(Kind::Volume, "v")).actions;
        let is_event = |action: &Action| matches!(action, Action::Emit(event) if event.reason == "NoPlace");
        let events = actions.iter().filter(|action| is_event(action)).count();
        let written = actions.into_iter().find_map(|action| match action {
            Action::Write(object) => match *object {
                Object::Volume(volume) => Some(volume),
                _ => None,
            },
            _ => None,
        });
        let message = written
            .clone()
            .map(|volume| volume.status.conditions.get(ConditionType::Scheduled).unwrap().message.clone());
        written.into_iter().for_each(|volume| cluster.insert(volume.into()));
        (events, message)
    };
    let (events, message) = run(&mut cluster, 1 << 30);
    assert!(events == 1 && message.as_ref().unwrap().contains("has 1.0 GiB free"), "{message:?}");
    assert_eq!(run(&mut cluster, 2 << 30), (0, None));
    let mut cordoned = cluster.nodes["c"].clone();
    cordoned.spec.allow_scheduling = false;
    cluster.insert(cordoned.into());
    let (events, message) = run(&mut cluster, 2 << 30);
    assert!(events == 1 && message.as_ref().unwrap().contains("cordoned"), "{message:?}");
}

fn makes_replica(cluster: &ClusterState, agents: &Agents, settings: Settings) -> bool {
    let context = Context { cluster, agents, now: now(), random: [7; MAX_MEMBERS], settings };
    let actions = reconcile(&context, &Key::new(Kind::Volume, "v")).actions;
    actions.iter().any(|action| match action {
        Action::Write(object) => {
            matches!(&**object, Object::Replica(new) if new.status.data == DataState::None)
        }
        _ => false,
    })
}

/// The object of the lost replacement stays, because its node does not answer either.
#[test]
fn a_replacement_that_is_lost_is_replaced_in_turn() {
    let (mut cluster, mut agents) = (degraded_cluster(), agents(None));
    let failed = ReplicaId::from_random(4);
    let mut new = replica(failed, "d", Some(now()));
    (new.status.healthy_at, new.metadata.deletion_timestamp) = (None, Some(now()));
    cluster.insert(new.into());
    let here = agents.by_node().values().next().unwrap().clone();
    for name in ["c", "d"] {
        cluster.insert(node(name).into());
        let info = Some(AgentInfo { name: name.to_owned(), ..AgentInfo::default() });
        let mut agent = ObservedAgent { info, ..here.clone() };
        if name == "d" {
            agent.link = AgentLink::Down { since: Timestamp::UNIX_EPOCH, reason: String::new() };
        }
        agents.insert(NodeName::new(name).unwrap(), agent);
    }
    let settings = Settings { replica_replace_after: Duration::ZERO, ..Settings::default() };
    let context =
        Context { cluster: &cluster, agents: &agents, now: now(), random: [7; MAX_MEMBERS], settings };
    let decision = reconcile(&context, &Key::new(Kind::Volume, "v"));
    let is_on_c = |action: &Action| {
        matches!(action, Action::Write(object)
            if matches!(&**object, Object::Replica(new) if new.spec.node_id.as_str() == "c"))
    };
    assert!(decision.actions.iter().any(is_on_c), "{:#?}", decision.actions);
}

/// The disk of such a replica is full, for example. It would begin a rebuild again and again.
#[test]
fn a_replica_that_ends_its_rebuilds_stays_lost_while_it_is_rebuilt_again() {
    let lost_since = Some(now() - Duration::from_secs(60));
    let lost_since_when = |rebuild_failed| {
        let mut cluster = degraded_cluster();
        let lost = cluster.replicas.values().find(|replica| replica.status.lost_since.is_some()).unwrap();
        let mut lost = lost.clone();
        lost.status.lost_since = lost_since;
        let mut engine = cluster.engines["v"].clone();
        let member = MemberRecord { rebuild_failed, ..MemberRecord::of(MemberMode::Rebuilding) };
        engine.status.replica_mode_map.insert(lost.spec.replica_id, member);
        let name = lost.metadata.name.clone();
        cluster.insert(engine.into());
        cluster.insert(lost.into());
        let agents = agents(None);
        let settings = Settings::default();
        let context =
            Context { cluster: &cluster, agents: &agents, now: now(), random: [0; MAX_MEMBERS], settings };
        let decision = reconcile(&context, &Key::new(Kind::Replica, &name));
        let written = decision.actions.iter().find_map(|action| match action {
            Action::Write(object) => match &**object {
                Object::Replica(replica) => Some(replica.status.lost_since),
                _ => None,
            },
            _ => None,
        });
        written.unwrap_or(lost_since)
    };
    assert_eq!((lost_since_when(false), lost_since_when(true)), (None, lost_since));
}
