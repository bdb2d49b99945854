use shorthorn_types::Generation;

use super::*;
use crate::objects::{ConditionType, Key, Kind, Node, Object};
use crate::observed::Agents;
use crate::reconcile::{Context, Settings, reconcile};
use crate::requests::{Change, CreateVolume};
use crate::{Action, Decision};

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn volume(created: i64) -> Volume {
    let wanted = CreateVolume { name: "v".to_owned(), size_bytes: 1 << 20, ..CreateVolume::default() };
    let made = wanted.apply(&ClusterState::default(), Secret::new([7; SECRET_BYTES]), at(created)).unwrap();
    let Change::Store(mut volume) = made else { panic!("{made:?}") };
    volume.status.state = VolumeState::Deleting;
    volume.status.attach = Some(5);
    volume.status.first_members = (1..=3).map(ReplicaId::from_random).collect();
    volume
}

/// Returns the directory of a replica on a node of its own, as it is in the trash after the deletion.
fn trashed(volume: &Volume, id: u64, deleted_ms: u64, failed: bool) -> Trashed {
    let mut there = Trashed {
        node: NodeName::new(&format!("n{id}")).unwrap(),
        disk_path: "/disk".to_owned(),
        disk_uuid: Some("disk".to_owned()),
        volume: volume.spec.volume_name.clone(),
        replica_id: ReplicaId::from_random(id),
        deleted_ms,
        data_age: DataAge::default(),
        restored: false,
        record: None,
    };
    let stored = DeletionRecord {
        with_volume: false,
        volume_created: at(0),
        volume_version: None,
        spec: volume.spec.clone(),
        attach: None,
        fenced_attach: None,
        arbiter: Arbiter::default(),
        grant_unreported: false,
        salvage: None,
        first_members: Vec::new(),
        current_size: 0,
        disk_id: "disk".to_owned(),
        healthy_at: None,
        failed_at: failed.then(|| at(9)),
    };
    let text = DeletionRecord::of(volume, &replica(&there, &stored, at(1)), volume.is_deleting());
    assert!(!text.contains(&"07".repeat(SECRET_BYTES)), "the secret is not kept: {text}");
    there.record = Some(serde_json::from_str(&text).unwrap());
    there
}

fn deleted(created: i64) -> Volume {
    let mut volume = volume(created);
    volume.metadata.deletion_timestamp = Some(at(100));
    volume
}

#[test]
fn the_record_of_a_volume_that_was_never_attached_has_the_number_zero() {
    let mut volume = deleted(50);
    volume.status.attach = None;
    let record = trashed(&volume, 1, 10, false).record.unwrap();
    assert_eq!(record.attach, None);
    let written = serde_json::to_value(&record).unwrap();
    assert_eq!(written["attach"], 0);
    assert_eq!(serde_json::from_value::<DeletionRecord>(written).unwrap(), record);
}

/// Returns the undeletion if every directory can be restored, and the restored directories.
fn back(cluster: &ClusterState, trash: &[Trashed]) -> Result<(Undeletion, Vec<Trashed>), RequestError> {
    let restored = directories(cluster, "v", trash)?;
    let in_place = restored.iter().map(|trashed| trashed.replica_id).collect();
    let undeletion = undelete(cluster, "v", trash, &in_place, Secret::new([9; SECRET_BYTES]), at(200))?;
    Ok((undeletion, restored))
}

fn stored(undeletion: &Undeletion) -> ClusterState {
    add(ClusterState::default(), undeletion)
}

fn add(mut cluster: ClusterState, undeletion: &Undeletion) -> ClusterState {
    undeletion.replicas.iter().cloned().for_each(|replica| cluster.insert(replica.into()));
    undeletion.engine.iter().cloned().for_each(|engine| cluster.insert(engine.into()));
    undeletion.volume.iter().cloned().for_each(|volume| cluster.insert(volume.into()));
    cluster
}

#[test]
fn an_undeleted_volume_is_detached_and_has_its_replicas() {
    let volume = deleted(1);
    let trash =
        [trashed(&volume, 1, 10, false), trashed(&volume, 2, 11, false), trashed(&volume, 3, 12, true)];
    let (undeletion, restored) = back(&ClusterState::default(), &trash).unwrap();
    let found = undeletion.volume.clone().unwrap();
    assert_eq!((found.status.state, found.status.attach), (VolumeState::Detached, Some(5)));
    assert_eq!((found.spec.node_id.clone(), found.spec.secret.bytes()[0]), (None, 9));
    assert_eq!(found.status.first_members, volume.status.first_members);
    assert!(!found.metadata.is_deleting());
    let failed: Vec<bool> =
        undeletion.replicas.iter().map(|replica| replica.status.failed_at.is_some()).collect();
    assert_eq!(failed, [false, false, true], "a replica that had left the view stays outside");
    let is_kept = |replica: &Replica| {
        replica.status.data == DataState::Present && replica.spec.desire_state == DesireState::Stopped
    };
    assert!(undeletion.replicas.iter().all(is_kept), "none is recreated");
    assert_eq!(restored, trash);
}

#[test]
fn a_grant_that_nothing_has_reported_is_still_unreported_after_an_undeletion() {
    let mut volume = deleted(1);
    volume.status.grant_unreported = true;
    let (undeletion, _) = back(&ClusterState::default(), &[trashed(&volume, 1, 10, false)]).unwrap();
    assert!(undeletion.volume.unwrap().status.grant_unreported);
}

/// Until the chosen replica has the decision, it must not be started with the grant for the salvage.
#[test]
fn a_salvage_that_was_not_carried_out_is_still_to_be_carried_out_after_an_undeletion() {
    let mut volume = deleted(1);
    let salvage = |done| Salvage {
        replica_id: ReplicaId::from_random(1),
        attach: 5,
        decided_at: at(90),
        by: "test".to_owned(),
        reason: String::new(),
        losses: String::new(),
        done,
    };
    for (done, expected) in [(false, Some(salvage(false))), (true, None)] {
        volume.status.salvage = Some(salvage(done));
        let (undeletion, _) = back(&ClusterState::default(), &[trashed(&volume, 1, 10, false)]).unwrap();
        assert_eq!(undeletion.volume.unwrap().status.salvage, expected);
    }
}

#[test]
fn a_replica_that_left_its_volume_earlier_stays_in_the_trash() {
    let (living, gone) = (volume(1), deleted(1));
    let trash = [trashed(&living, 3, 5, false), trashed(&gone, 1, 10, false)];
    assert_eq!(back(&ClusterState::default(), &trash).unwrap().1, trash[1..]);
    assert!(matches!(back(&ClusterState::default(), &trash[..1]), Err(RequestError::NothingToUndelete(_))));
    let damaged = Trashed { record: None, ..trash[1].clone() };
    assert!(matches!(back(&ClusterState::default(), &[damaged]), Err(RequestError::NothingToUndelete(_))));
}

/// Returns a deleted volume of the name with ids of its own, of which `first` is the first.
fn life(created: i64, version: u64, first: u64) -> Volume {
    let mut gone = deleted(created);
    gone.metadata.resource_version = ResourceVersion::new(version);
    gone.status.first_members = (first..first + 3).map(ReplicaId::from_random).collect();
    gone
}

#[test]
fn of_two_volumes_of_a_name_the_last_stored_one_is_undeleted() {
    // The clock of the controller that made the first one was ahead, and so are those of two nodes.
    let (first, second) = (life(50, 7, 1), life(1, 9, 4));
    let trash =
        [trashed(&first, 1, 100, false), trashed(&second, 5, 60, false), trashed(&first, 3, 110, false)];
    assert_eq!(back(&ClusterState::default(), &trash).unwrap().1, trash[1..2]);
    // Records of releases that recorded no version are of earlier volumes; among them clocks decide.
    let (old, older) = (life(80, 0, 1), life(70, 0, 4));
    let trash = [trashed(&old, 1, 10, false), trashed(&older, 5, 90, false)];
    assert_eq!(back(&ClusterState::default(), &trash).unwrap().1, trash[..1]);
    let trash = [trash[0].clone(), trashed(&second, 5, 5, false)];
    assert_eq!(back(&ClusterState::default(), &trash).unwrap().1, trash[1..]);
}

/// The same volume, undeleted by a controller whose clock is behind, and deleted once more.
#[test]
fn a_volume_is_undeleted_repeatedly_with_all_of_its_replicas() {
    let before = life(50, 7, 1);
    let mut again = life(20, 9, 1);
    again.status.attach = Some(6);
    let trash = [trashed(&before, 1, 10, false), trashed(&again, 2, 11, false)];
    let (undeletion, restored) = back(&ClusterState::default(), &trash).unwrap();
    assert_eq!(restored, trash);
    let failed: Vec<bool> =
        undeletion.replicas.iter().map(|replica| replica.status.failed_at.is_some()).collect();
    assert_eq!(failed, [true, false], "it has continued without the first one");
}

/// A deletion has left replicas behind, and a new volume of the name is made: it has nothing of the old one.
#[test]
fn a_new_volume_beside_replicas_left_behind_is_not_half_undeleted() {
    let gone = life(1, 7, 1);
    let behind = trashed(&gone, 2, 10, false);
    let mut left = replica(&behind, behind.record.as_ref().unwrap(), at(50));
    left.metadata.deletion_timestamp = Some(at(100));
    left.status.deletion_record = Some(serde_json::to_string(&behind.record).unwrap());
    let mut cluster = ClusterState::default();
    cluster.insert(left.into());
    let wanted = CreateVolume { name: "v".to_owned(), size_bytes: 1 << 20, ..CreateVolume::default() };
    let made = wanted.apply(&ClusterState::default(), Secret::new([7; SECRET_BYTES]), at(300)).unwrap();
    let Change::Store(new) = made else { panic!("{made:?}") };
    cluster.insert(new.into());
    let trash = [trashed(&gone, 1, 10, false), behind];
    assert!(matches!(back(&cluster, &trash), Err(RequestError::Exists { .. })), "it has a life of its own");
}

fn data_age(attach: u64, number: u32) -> DataAge {
    let id = ViewId { generation: Generation::new(attach, 1), number };
    DataAge { committed: Some(id), proposed: None, attach: Some(attach) }
}

/// Clocks of nodes differ; the content of the directories and the records does not depend on them.
#[test]
fn the_directories_with_the_newest_content_are_restored() {
    let gone = deleted(1);
    let mut earlier = gone.clone();
    earlier.status.attach = Some(3);
    // Replica 1 was deleted at attachment 3 by a clock that is ahead, came back, and was deleted again.
    let old = Trashed { data_age: data_age(3, 1), ..trashed(&earlier, 1, 90, false) };
    let new = Trashed { data_age: data_age(5, 2), ..trashed(&gone, 1, 20, false) };
    let absent = Trashed { data_age: data_age(3, 1), ..trashed(&earlier, 2, 91, false) };
    let trash = [old, new.clone(), absent.clone()];
    let (undeletion, restored) = back(&ClusterState::default(), &trash).unwrap();
    assert_eq!(restored, [new.clone(), absent]);
    assert_eq!(undeletion.volume.unwrap().status.attach, Some(5), "of the newest record");
    let failed: Vec<bool> =
        undeletion.replicas.iter().map(|replica| replica.status.failed_at.is_some()).collect();
    assert_eq!(failed, [false, true], "the volume has continued without the second one");
    // Directories that say the same: only then the clocks decide.
    let later = Trashed { deleted_ms: 21, ..new.clone() };
    assert_eq!(back(&ClusterState::default(), &[later.clone(), new]).unwrap().1, [later]);
}

/// Interrupts an undeletion at every point: another one completes it, and no stored object could make a
/// directory anew.
#[test]
fn an_undeletion_that_is_cut_off_anywhere_is_finished_by_the_next() {
    let gone = deleted(1);
    let trash = [trashed(&gone, 1, 10, false), trashed(&gone, 2, 11, false)];
    let (whole, _) = back(&ClusterState::default(), &trash).unwrap();
    let in_place = trash.clone().map(|trashed| Trashed { restored: true, ..trashed });
    let mut steps: Vec<Object> = whole.replicas.iter().cloned().map(Object::from).collect();
    steps.extend(whole.engine.clone().map(Object::from));
    steps.extend(whole.volume.clone().map(Object::from));
    for cut in 0..=steps.len() {
        for half in [false, true] {
            let mut cluster = ClusterState::default();
            steps[..cut].iter().cloned().for_each(|object| cluster.insert(object));
            if let (true, Some(next)) = (half, steps.get(cut)) {
                cluster.insert(without_status(next.clone()));
            }
            let starts = |replica: &Replica| replica.spec.desire_state == DesireState::Running;
            assert!(!cluster.replicas.values().any(starts), "{cut}");
            let (again, restored) = back(&cluster, &in_place).unwrap();
            assert_eq!(restored, in_place, "{cut}");
            let end = add(cluster, &again);
            let shown = |cluster: &ClusterState| {
                let replicas: Vec<_> = cluster.replicas.values().map(|one| one.status.clone()).collect();
                (replicas, cluster.volumes["v"].status.clone(), cluster.engines.contains_key("v"))
            };
            assert_eq!(shown(&end), shown(&stored(&whole)), "cut off before step {cut}, in it: {half}");
        }
    }
}

/// Returns the object as in a store that takes spec and status by separate calls.
fn without_status(object: Object) -> Object {
    match object {
        Object::Replica(replica) => Replica { status: StoredReplicaStatus::default(), ..replica }.into(),
        Object::Volume(volume) => Volume { status: VolumeStatus::default(), ..volume }.into(),
        other => other,
    }
}

/// The node of one replica is silent when its undeletion is repeated, after only the spec of that replica
/// was stored.
#[test]
fn a_partly_stored_replica_is_never_recreated() {
    let gone = deleted(1);
    let trash = [trashed(&gone, 1, 10, false), trashed(&gone, 2, 11, false)];
    let (whole, _) = back(&ClusterState::default(), &trash).unwrap();
    let mut cluster = ClusterState::default();
    cluster.insert(without_status(whole.replicas[1].clone().into()));
    let (again, _) = back(&cluster, &trash[..1]).unwrap();
    let end = add(cluster, &again);
    assert_eq!(end.replicas.len(), 2);
    assert!(end.replicas.values().all(|replica| replica.status.data == DataState::Present));
}

/// An undeletion was interrupted, and a new volume of the name is made.
#[test]
fn a_new_volume_does_not_get_half_undeleted_replicas() {
    let (whole, _) = back(&ClusterState::default(), &[trashed(&deleted(1), 1, 10, false)]).unwrap();
    let mut cluster = ClusterState::default();
    cluster.insert(without_status(whole.replicas[0].clone().into()));
    let wanted = CreateVolume { name: "v".to_owned(), size_bytes: 1 << 20, ..CreateVolume::default() };
    let made = wanted.clone().apply(&cluster, Secret::new([7; SECRET_BYTES]), at(300));
    assert_eq!(made.unwrap_err(), RequestError::HasReplicas("v".to_owned()));
    // By kubectl: it waits, and its own deletion says nothing of the data.
    let made = wanted.apply(&ClusterState::default(), Secret::new([7; SECRET_BYTES]), at(300)).unwrap();
    let Change::Store(bare) = made else { panic!("{made:?}") };
    assert_eq!(DeletionRecord::of(&bare, &whole.replicas[0], true), "");
    cluster.insert(bare.into());
    let agents = Agents::default();
    let context = Context {
        cluster: &cluster,
        agents: &agents,
        now: at(301),
        random: Default::default(),
        settings: Settings::default(),
    };
    let decision = reconcile(&context, &Key::new(Kind::Volume, "v"));
    let settled = decision.actions.iter().find_map(|action| match action {
        Action::Write(object) => match &**object {
            Object::Volume(volume) => volume.status.conditions.get(ConditionType::Settled),
            _ => None,
        },
        _ => None,
    });
    assert_eq!(settled.unwrap().reason, "Undeleting", "{decision:#?}");
}

#[test]
fn an_undeletion_adds_replicas_later_but_not_to_another_volume() {
    let gone = deleted(1);
    let trash = [trashed(&gone, 1, 10, false), trashed(&gone, 2, 11, false)];
    // The call to one node has failed, and nothing is stored of that replica.
    let first = [trash[0].replica_id].into();
    let secret = || Secret::new([9; SECRET_BYTES]);
    let cut = undelete(&ClusterState::default(), "v", &trash, &first, secret(), at(200)).unwrap();
    assert!(cut.replicas.len() == 1 && cut.volume.is_some());
    let mut cluster = stored(&cut);
    let (again, restored) = back(&cluster, &trash[1..]).unwrap();
    assert!(again.volume.is_none() && again.engine.is_none() && restored == trash[1..]);
    assert!(again.replicas.len() == 1 && again.replicas[0].status.failed_at.is_none());
    let mut served = cluster.volumes["v"].clone();
    served.status.attach = Some(6);
    cluster.insert(served.into());
    let (late, _) = back(&cluster, &trash[1..]).unwrap();
    assert!(late.replicas[0].status.failed_at.is_some(), "the volume has continued without it");
    let mut other = ClusterState::default();
    let mut stranger = volume(300);
    stranger.status.first_members = vec![ReplicaId::from_random(4)];
    other.insert(Object::Volume(stranger.clone()));
    assert!(matches!(back(&other, &trash), Err(RequestError::Exists { .. })));
    stranger.status.first_members = gone.status.first_members.clone();
    stranger.metadata.deletion_timestamp = Some(at(301));
    other.insert(Object::Volume(stranger));
    assert!(matches!(back(&other, &trash), Err(RequestError::Deleting(_))));
}

/// A node did not answer when its volume was deleted: its replica is left, without a volume.
#[test]
fn replicas_left_behind_belong_to_the_undeleted_volume_again() {
    let gone = deleted(1);
    let trash = [trashed(&gone, 1, 10, false)];
    let behind = trashed(&gone, 2, 0, false);
    let record = behind.record.clone().unwrap();
    let mut left = replica(&behind, &record, at(50));
    left.metadata.deletion_timestamp = Some(at(100));
    left.status.deletion_record = Some(serde_json::to_string(&record).unwrap());
    left.status.message = "no answer".to_owned();
    let mut cluster = ClusterState::default();
    cluster.insert(left.clone().into());
    assert_eq!(cluster.replicas_of(&gone.spec.volume_name).count(), 0);
    let (undeletion, restored) = back(&cluster, &trash).unwrap();
    assert_eq!(restored, trash);
    let end = add(cluster.clone(), &undeletion);
    let of_it: Vec<&Replica> = end.replicas_of(&gone.spec.volume_name).collect();
    assert_eq!(of_it.len(), 2);
    let back_again = of_it.into_iter().find(|replica| replica.spec.replica_id == behind.replica_id).unwrap();
    assert!(back_again.metadata.is_deleting() && back_again.status.data == DataState::Present);
    assert!(back_again.status.stop_first, "a process there has the secret that the volume had before");
    assert!(back_again.status.rebind, "its directory belongs to that secret");
    assert!(back_again.status.message.is_empty() && back_again.status.failed_at.is_none());
    // The deletion continues meanwhile: the directory is in the trash, and the object still exists.
    let mut both = [trash[0].clone(), behind.clone()];
    let (_, restored) = back(&cluster, &both).unwrap();
    assert_eq!(restored, both);
    both[1].restored = true;
    assert_eq!(directories(&cluster, "v", &both).unwrap(), both[..1]);
    // Also if it is all that there is: the others' time in the trash is over.
    let (alone, restored) = back(&cluster, &[]).unwrap();
    assert!(restored.is_empty() && alone.replicas.len() == 1);
    assert_eq!(alone.volume.unwrap().status.attach, Some(5));
    // The directory of another volume of the name is left alone.
    let newer = [trashed(&life(50, 0, 3), 3, 60, false)];
    let (other, _) = back(&cluster, &newer).unwrap();
    assert!(other.replicas.iter().all(|replica| replica.spec.replica_id == ReplicaId::from_random(3)));
}

/// The trash is empty: the records with the replicas are the only ones.
#[test]
fn an_interrupted_undeletion_of_replicas_left_behind_is_finished() {
    let gone = deleted(1);
    let mut before = ClusterState::default();
    for id in [1, 2] {
        let behind = trashed(&gone, id, 0, false);
        let record = behind.record.clone().unwrap();
        let mut left = replica(&behind, &record, at(50));
        left.metadata.deletion_timestamp = Some(at(100));
        left.status.deletion_record = Some(serde_json::to_string(&record).unwrap());
        before.insert(left.into());
    }
    let (whole, _) = back(&before, &[]).unwrap();
    let mut steps: Vec<Object> = whole.replicas.iter().cloned().map(Object::from).collect();
    steps.extend(whole.engine.clone().map(Object::from));
    steps.extend(whole.volume.clone().map(Object::from));
    assert_eq!(steps.len(), 4);
    for cut in 0..=steps.len() {
        for half in [false, true] {
            let mut cluster = before.clone();
            steps[..cut].iter().cloned().for_each(|object| cluster.insert(object));
            if let (true, Some(Object::Volume(next))) = (half, steps.get(cut)) {
                // A store that takes spec and status by calls of their own. A replica is there already,
                // with its spec.
                cluster.insert(without_status(next.clone().into()));
            }
            let (again, _) = back(&cluster, &[]).unwrap_or_else(|error| panic!("{cut}, {half}: {error}"));
            let end = add(cluster, &again);
            let shown = |cluster: &ClusterState| {
                let replicas: Vec<_> = cluster.replicas.values().map(|one| one.status.clone()).collect();
                (replicas, cluster.volumes["v"].status.clone(), cluster.engines.contains_key("v"))
            };
            assert_eq!(
                shown(&end),
                shown(&add(before.clone(), &whole)),
                "cut off before {cut}, in it: {half}"
            );
        }
    }
}

/// A user creates a volume of the name with kubectl while an undeletion is cut off, and deletes it again.
#[test]
fn the_record_of_a_replica_that_was_taken_back_stays_until_the_volume_is_stored() {
    let gone = deleted(1);
    let behind = trashed(&gone, 1, 0, false);
    let record = serde_json::to_string(&behind.record).unwrap();
    let mut left = replica(&behind, behind.record.as_ref().unwrap(), at(50));
    left.metadata.deletion_timestamp = Some(at(100));
    left.status.deletion_record = Some(record.clone());
    let mut cluster = ClusterState::default();
    // The node does not answer, and is not given up.
    cluster.insert(Node::new("n1", at(0)).into());
    cluster.insert(left.into());
    let (whole, _) = back(&cluster, &[]).unwrap();
    cluster.insert(whole.replicas[0].clone().into());
    let agents = Agents::default();
    let decide = |cluster: &ClusterState, kind, name: &str| {
        let settings = Settings::default();
        let context =
            Context { cluster, agents: &agents, now: at(301), random: Default::default(), settings };
        reconcile(&context, &Key::new(kind, name))
    };
    let name = whole.replicas[0].metadata.name.clone();
    assert!(decide(&cluster, Kind::Replica, &name).actions.is_empty(), "it waits for its volume");
    let mut bare = whole.volume.clone().unwrap();
    bare.status = VolumeStatus { state: VolumeState::Deleting, ..VolumeStatus::default() };
    bare.metadata.deletion_timestamp = Some(at(300));
    cluster.insert(bare.into());
    let kept = |decision: &Decision| match &decision.actions[..] {
        [Action::Write(object)] => match &**object {
            Object::Replica(replica) => {
                (replica.status.deletion_record.clone(), replica.status.undeletion_record.clone())
            }
            other => panic!("{other:#?}"),
        },
        other => panic!("{other:#?}"),
    };
    let decision = decide(&cluster, Kind::Replica, &name);
    assert_eq!(kept(&decision).0.as_ref(), Some(&record), "it is left behind once more, with the record");
    cluster.insert(whole.volume.clone().unwrap().into());
    let mut running = whole.replicas[0].clone();
    running.spec.desire_state = DesireState::Running;
    cluster.insert(running.into());
    assert_eq!(kept(&decide(&cluster, Kind::Replica, &name)), (None, None), "the volume is stored");
}
