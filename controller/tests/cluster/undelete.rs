//! Tests events beside an undeletion, and beside the deletion before it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, RwLockReadGuard};
use std::time::Duration;

use crate::support::agent::{FakeAgent, Truth};
use async_trait::async_trait;
use shorthorn_api::v1;
use shorthorn_api::v1::controller_server::Controller;
use shorthorn_controller::agents::Fleet;
use shorthorn_controller::api::Api;
use shorthorn_controller::metrics::Metrics;
use shorthorn_controller::store::{MemoryStore, ObjectStore, ObjectStoreError};
use shorthorn_controller::work::{WorkQueue, Worker};
use shorthorn_controller_core::objects::{
    CurrentState, DataState, DesireState, Key, Metadata, Object, Replica, ReplicaSpec, ResourceVersion,
    Secret, StoredReplicaStatus, Volume, VolumeState,
};
use shorthorn_controller_core::reconcile::Settings;
use shorthorn_controller_core::requests::{Change, CreateVolume};
use shorthorn_controller_core::undelete::DeletionRecord;
use shorthorn_controller_core::{ClusterState, NodeName, Timestamp};
use shorthorn_testkit::waiting::wait_for_async;
use shorthorn_types::ReplicaId;
use tokio::sync::{broadcast, mpsc, watch};
use tokio::task::JoinSet;
use tonic::{Code, Request};

const DISK: &str = "/var/lib/longhorn";
/// No single step of a test takes longer, on the busiest machine.
const LIMIT: Duration = Duration::from_secs(60);

fn id(number: u64) -> ReplicaId {
    ReplicaId::from_random(number)
}

/// Returns a volume v with replicas 1 and 2, as it was before its deletion.
fn volume() -> Volume {
    let wanted = CreateVolume { name: "v".to_owned(), size_bytes: 1 << 30, ..CreateVolume::default() };
    let made = wanted.apply(&ClusterState::default(), Secret::new([1; 32]), Timestamp::now()).unwrap();
    let Change::Store(mut volume) = made else { panic!("{made:?}") };
    (volume.status.state, volume.status.attach) = (VolumeState::Detached, Some(1));
    volume.status.first_members = vec![id(1), id(2)];
    volume.spec.number_of_replicas = 2;
    volume
}

fn replica(number: u64, node: &str) -> Replica {
    let volume_name = volume().spec.volume_name;
    let metadata = Metadata::new(ReplicaSpec::instance_name(&volume_name, id(number)), Timestamp::now());
    let spec = ReplicaSpec {
        volume_name,
        volume_size: 1 << 30,
        replica_id: id(number),
        node_id: NodeName::new(node).unwrap(),
        disk_path: DISK.to_owned(),
        disk_id: format!("uuid-of-{DISK}"),
        desire_state: DesireState::Stopped,
        eviction_requested: false,
    };
    let status = StoredReplicaStatus {
        current_state: CurrentState::Stopped,
        data: DataState::Present,
        ..StoredReplicaStatus::default()
    };
    Replica { metadata, spec, status }
}

/// Returns the directory of that replica in the trash of its node.
fn trashed(number: u64, node: &str, deleted_ms: u64) -> v1::TrashedReplica {
    v1::TrashedReplica {
        disk_path: DISK.to_owned(),
        disk_uuid: format!("uuid-of-{DISK}"),
        volume: "v".to_owned(),
        replica_id: id(number).to_string(),
        deleted_ms,
        record: DeletionRecord::of(&volume(), &replica(number, node), true),
        ..v1::TrashedReplica::default()
    }
}

/// Agents of a and b, and the state of their controller.
struct Nodes {
    agents: [FakeAgent; 2],
    truth: Arc<Mutex<Truth>>,
    store: Arc<dyn ObjectStore>,
    fleet: Arc<Fleet>,
    queue: Arc<WorkQueue>,
    tasks: JoinSet<()>,
    _directory: tempfile::TempDir,
}

impl Nodes {
    async fn start(store: Arc<dyn ObjectStore>) -> Nodes {
        let directory = tempfile::tempdir().unwrap();
        let truth = Arc::default();
        let agents = ["a", "b"].map(|name| FakeAgent::new(name, Arc::clone(&truth)));
        let (mut tasks, mut known) = (JoinSet::new(), BTreeMap::new());
        for agent in &agents {
            let socket = directory.path().join(&agent.name);
            let serving = agent.serve(&socket);
            tasks.spawn(async move { serving.await.unwrap() });
            let url = format!("unix://{}", socket.display()).parse().unwrap();
            known.insert(NodeName::new(&agent.name).unwrap(), url);
        }
        let queue = Arc::new(WorkQueue::new());
        let fleet = Fleet::new(&known, Arc::clone(&store), Arc::clone(&queue), Metrics::default()).unwrap();
        tasks.spawn(Arc::clone(&fleet).run());
        wait_for_async("the agents are in reach", LIMIT, async || {
            let has_all = fleet.agents().by_node().values().all(|agent| agent.is_synced());
            if has_all { Ok(()) } else { Err(()) }
        })
        .await;
        for agent in &agents {
            fleet.add_disk(&NodeName::new(&agent.name).unwrap(), DISK).await.unwrap();
        }
        Nodes { agents, truth, store, fleet, queue, tasks, _directory: directory }
    }

    /// Runs the reconcilers.
    fn work(&mut self) {
        let (broken, _) = mpsc::channel(1);
        let (store, fleet, queue) =
            (Arc::clone(&self.store), Arc::clone(&self.fleet), Arc::clone(&self.queue));
        let worker = Worker::new(store, fleet, queue, broken, None, Settings::default(), Metrics::default());
        self.tasks.spawn(worker.run());
    }

    async fn undelete(&self) -> Result<v1::UndeleteVolumeResponse, tonic::Status> {
        let (_stop, stopping) = watch::channel(false);
        let api = Api::new(Arc::clone(&self.store), Arc::clone(&self.fleet), stopping, Settings::default());
        let request = v1::UndeleteVolumeRequest { name: "v".to_owned() };
        Ok(api.undelete_volume(Request::new(request)).await?.into_inner())
    }

    fn check(&self) {
        let truth = self.truth.lock().unwrap();
        assert!(truth.violations.is_empty(), "{:#?}", truth.violations);
    }
}

/// A deletion was decided, and its first call takes long: meanwhile the replica belongs to the undeleted
/// volume again.
#[tokio::test]
async fn a_deletion_that_was_decided_before_an_undeletion_deletes_nothing() {
    let store: Arc<dyn ObjectStore> = Arc::new(MemoryStore::new());
    let mut nodes = Nodes::start(Arc::clone(&store)).await;
    let name = replica(1, "a").metadata.name;
    nodes.agents[0].leave_over(&name);
    let mut left = replica(1, "a");
    left.metadata.deletion_timestamp = Some(Timestamp::now());
    left.status.deletion_record = Some(DeletionRecord::of(&volume(), &left, true));
    let left = store.put(left.into()).await.unwrap();
    let undeleted = Arc::clone(&store);
    nodes.agents[0].meanwhile("StopInstance", async move {
        let Object::Replica(mut back) = left else { panic!("{left:?}") };
        back.status.deletion_record = None;
        back.spec.desire_state = DesireState::Running;
        undeleted.put(back.into()).await.unwrap();
        let mut volume = volume();
        (volume.spec.node_id, volume.status.current_node_id) =
            (NodeName::new("a").ok(), NodeName::new("a").ok());
        (volume.status.state, volume.status.attach) = (VolumeState::Attaching, Some(2));
        undeleted.put(volume.into()).await.unwrap();
    });
    nodes.work();
    wait_for_async("the replica is started", LIMIT, async || {
        assert!(nodes.agents[0].trashed().is_empty(), "the data of the undeleted volume is in the trash");
        let running = nodes.agents[0].running();
        if running.contains(&name) { Ok(()) } else { Err(running) }
    })
    .await;
    assert!(nodes.agents[0].directories().contains(&name));
    nodes.check();
}

/// A call of the deletion comes late, and moves a directory that was restored already.
#[tokio::test]
async fn a_replica_deleted_during_the_undeletion_is_restored_and_no_older_one() {
    let nodes = Nodes::start(Arc::new(MemoryStore::new())).await;
    let [a, b] = &nodes.agents;
    a.trash(trashed(1, "a", 3));
    a.trash(trashed(1, "a", 10));
    b.trash(trashed(2, "b", 11));
    let late = a.clone();
    b.meanwhile("RestoreReplica", async move { late.trash(trashed(1, "a", 20)) });
    let answer = nodes.undelete().await.unwrap();
    assert!(answer.problems.is_empty(), "{:?}", answer.problems);
    assert!(a.directories().len() == 1 && b.directories().len() == 1);
    assert_eq!((a.trashed(), b.trashed()), (vec![3], vec![]), "older data stays");
    assert!(nodes.store.state().volumes.contains_key("v"));
    nodes.check();
}

/// A store in which another client changes the volume v first, some times.
#[derive(Debug)]
struct Contended {
    store: MemoryStore,
    conflicts: AtomicU32,
}

#[async_trait]
impl ObjectStore for Contended {
    fn state(&self) -> RwLockReadGuard<'_, ClusterState> {
        self.store.state()
    }

    async fn put(&self, object: Object) -> Result<Object, ObjectStoreError> {
        let is_volume = matches!(object, Object::Volume(_));
        let left = |left: u32| left.checked_sub(1);
        if is_volume && self.conflicts.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left).is_ok() {
            let (key, expected) = (object.key(), object.metadata().resource_version);
            let found = ResourceVersion::new(expected.map_or(0, ResourceVersion::get) + 1);
            return Err(ObjectStoreError::Conflict { key, expected, found });
        }
        self.store.put(object).await
    }

    async fn remove(&self, key: &Key, version: Option<ResourceVersion>) -> Result<(), ObjectStoreError> {
        self.store.remove(key, version).await
    }

    fn reserve(&self, replicas: Vec<Replica>) -> bool {
        self.store.reserve(replicas)
    }

    fn forget_reservations(&self, names: &[String]) {
        self.store.forget_reservations(names);
    }

    fn changes(&self) -> broadcast::Receiver<Key> {
        self.store.changes()
    }

    fn cluster(&self) -> &str {
        self.store.cluster()
    }
}

#[tokio::test]
async fn a_conflicting_undeletion_is_repeated_a_limited_number_of_times() {
    const ALWAYS: u32 = 1000;
    let store = Arc::new(Contended { store: MemoryStore::new(), conflicts: AtomicU32::new(ALWAYS) });
    let nodes = Nodes::start(Arc::<Contended>::clone(&store)).await;
    nodes.agents[0].trash(trashed(1, "a", 10));
    let error = nodes.undelete().await.unwrap_err();
    assert_eq!(error.code(), Code::Aborted, "{error}");
    let tried = ALWAYS - store.conflicts.load(Ordering::Relaxed);
    assert!((2..100).contains(&tried), "{tried} attempts");
    store.conflicts.store(2, Ordering::Relaxed);
    nodes.undelete().await.unwrap();
    assert!(nodes.store.state().volumes.contains_key("v"));
    assert!(nodes.agents[0].trashed().is_empty());
    nodes.check();
}
