//! `shorthorn-agent serve` with instances as processes of its own, through the node API.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::node::{
    REPLICAS, SIZE, connect, endpoint, engine, list, pid, replica, running, start_volume, stop, wait_for,
};
use common::{AgentProcess, LIMIT, agent, lives, signal_to, wait_for_end};
use nix::sys::signal::Signal;
use shorthorn_api::v1::instance_event::Type;
use shorthorn_api::v1::node_client::NodeClient;
use shorthorn_api::v1::{self, InstanceKind, InstanceState};
use shorthorn_testkit::nbd::Nbd;
use shorthorn_types::status::Frontend;
use tempfile::TempDir;
use tonic::Code;
use tonic::transport::Channel;

/// A node: directories that outlive its agents, and processes that outlive them too, until this is dropped.
struct Node {
    dir: TempDir,
}

impl Node {
    fn new() -> Node {
        let node = Node { dir: tempfile::tempdir().unwrap() };
        fs::create_dir(node.disk()).unwrap();
        let path = |name: &str| node.dir.path().join(name).display().to_string();
        let config = format!(
            "node_name = \"n1\"\nlisten = [\"unix:{}\"]\nstate_dir = \"{}\"\nruntime_dir = \"{}\"\n\
             device_dir = \"{}\"\ninstances = \"children\"\ncsi = \"off\"\n",
            path("sock"),
            path("s"),
            path("r"),
            path("dev")
        );
        fs::write(node.config(), config).unwrap();
        node
    }

    fn disk(&self) -> PathBuf {
        self.dir.path().join("disk")
    }

    fn config(&self) -> PathBuf {
        self.dir.path().join("agent.toml")
    }

    fn agent(&self) -> AgentProcess {
        AgentProcess::start(agent().arg("serve").arg("--config").arg(self.config()))
    }

    /// Returns an agent that answers, and a client of it.
    async fn start(&self) -> (AgentProcess, NodeClient<Channel>) {
        let agent = self.agent();
        agent.wait_for_log(": ready node=");
        let client = connect(&self.dir.path().join("sock")).await.unwrap();
        (agent, client)
    }

    fn replica(&self, id: &str) -> v1::StartReplicaRequest {
        replica(&self.disk(), id)
    }

    fn pid_files(&self) -> Vec<PathBuf> {
        let folders = ["r/engine", "r/replica"].map(|folder| self.dir.path().join(folder));
        let entries = folders.iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten();
        let paths = entries.map(|entry| entry.path());
        paths.filter(|path| path.extension().is_some_and(|extension| extension == "pid")).collect()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        for file in self.pid_files() {
            let pid = fs::read_to_string(file).ok().and_then(|text| text.trim().parse::<u32>().ok());
            let ours = |pid: &u32| {
                let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                let dir = self.dir.path().as_os_str().as_encoded_bytes();
                arguments.windows(dir.len()).any(|window| window == dir)
            };
            if let Some(pid) = pid.filter(ours) {
                signal_to(pid, Signal::SIGKILL);
            }
        }
    }
}

/// Returns a call of the controller of a cluster.
fn of<T>(cluster: &str, message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.metadata_mut().insert(shorthorn_api::CLUSTER_HEADER, cluster.parse().unwrap());
    request
}

#[tokio::test]
async fn a_node_belongs_to_one_cluster() {
    let node = Node::new();
    let (agent, mut client) = node.start().await;
    let ask = || v1::ListInstancesRequest {};
    let info = client.get_node(of("two", v1::GetNodeRequest {})).await.unwrap().into_inner();
    assert_eq!(info.cluster, "", "a question about its identity does not claim the agent");
    client.list_instances(of("one", ask())).await.unwrap();
    drop(agent);
    let (_agent, mut client) = node.start().await;
    let refused = client.list_instances(of("two", ask())).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains("belongs to cluster one"), "{refused}");
    let stop = stop(InstanceKind::Engine, "v1", 1);
    assert_eq!(client.stop_instance(of("two", stop)).await.unwrap_err().code(), Code::FailedPrecondition);
    let info = client.get_node(of("two", v1::GetNodeRequest {})).await.unwrap().into_inner();
    assert_eq!(info.cluster, "one");
    // A controller of an earlier release says nothing.
    client.list_instances(ask()).await.unwrap();

    let release = |from: &str| v1::ReleaseNodeRequest { cluster: from.into() };
    let wrong = client.release_node(of("two", release("three"))).await.unwrap_err();
    assert_eq!(wrong.code(), Code::FailedPrecondition);
    client.release_node(of("two", release("one"))).await.unwrap();
    client.list_instances(of("two", ask())).await.unwrap();
    assert_eq!(client.list_instances(of("one", ask())).await.unwrap_err().code(), Code::FailedPrecondition);
}

fn engine_of(attach: u64, replicas: &[v1::Instance]) -> v1::StartEngineRequest {
    engine(attach, replicas, "socket")
}

/// Deletes the replicas of the volume, which has no engine, into the trash.
async fn delete_replicas(node: &Node, client: &mut NodeClient<Channel>) {
    for id in REPLICAS {
        let request = || v1::DeleteReplicaRequest {
            disk_path: node.disk().display().to_string(),
            volume: "v1".into(),
            replica_id: id.into(),
            record: format!("the record of {id}"),
            ..v1::DeleteReplicaRequest::default()
        };
        let early = client.delete_replica(request()).await.unwrap_err();
        assert_eq!(early.code(), Code::FailedPrecondition);
        let other = v1::DeleteReplicaRequest { disk_uuid: "another".into(), ..request() };
        assert!(
            client.delete_replica(other).await.unwrap_err().message().contains("disk another is expected")
        );
        client.stop_instance(stop(InstanceKind::Replica, &format!("v1-{id}"), 0)).await.unwrap();
        client.delete_replica(request()).await.unwrap();
        client.delete_replica(request()).await.unwrap();
    }
}

/// Checks the disk after its replicas were deleted. Returns the identity of the disk.
async fn disk_after_deletion(node: &Node, client: &mut NodeClient<Channel>) -> String {
    assert!(list(client).await.is_empty());
    let disks = client.list_disks(v1::ListDisksRequest {}).await.unwrap().into_inner().disks;
    assert!(disks[0].replicas.is_empty() && disks[0].trash_bytes > 0, "{disks:?}");
    assert!(node.pid_files().is_empty());
    disks[0].uuid.clone()
}

/// Restores the replicas from the trash. They are not recreated.
async fn restore_replicas(node: &Node, uuid: &str, client: &mut NodeClient<Channel>) {
    let trash = client.list_trash(v1::ListTrashRequest {}).await.unwrap().into_inner().replicas;
    assert_eq!(trash.len(), REPLICAS.len(), "{trash:?}");
    for trashed in trash {
        assert!(trashed.problem.is_empty() && trashed.disk_uuid == uuid, "{trashed:?}");
        assert_eq!(trashed.record, format!("the record of {}", trashed.replica_id));
        let committed = trashed.committed.as_ref().map(|view| (view.attach, view.members.len()));
        assert!(
            trashed.known_generation().is_some_and(|known| known.attach == 1)
                && committed == Some((1, REPLICAS.len())),
            "{trashed:?}"
        );
        let anew = v1::StartReplicaRequest { create: true, ..node.replica(&trashed.replica_id) };
        let refused = client.start_replica(anew).await.unwrap_err();
        assert!(refused.message().contains("is in the trash"), "{refused}");
        let request = || v1::RestoreReplicaRequest {
            disk_path: trashed.disk_path.clone(),
            volume: trashed.volume.clone(),
            replica_id: trashed.replica_id.clone(),
            deleted_ms: trashed.deleted_ms,
            disk_uuid: String::new(),
        };
        client.restore_replica(request()).await.unwrap();
        client.restore_replica(request()).await.unwrap();
    }
}

/// Empties the trash, in which all replicas are restored.
async fn empty_trash(client: &mut NodeClient<Channel>) {
    let trash = client.list_trash(v1::ListTrashRequest {}).await.unwrap().into_inner().replicas;
    assert!(trash.len() == REPLICAS.len() && trash.iter().all(|trashed| trashed.restored), "{trash:?}");
    for trashed in trash {
        let v1::TrashedReplica { disk_path, volume, replica_id, deleted_ms, disk_uuid, .. } = trashed;
        let request = v1::RemoveTrashRequest { disk_path, volume, replica_id, deleted_ms, disk_uuid };
        client.remove_trash(request).await.unwrap();
    }
    assert!(client.list_trash(v1::ListTrashRequest {}).await.unwrap().into_inner().replicas.is_empty());
}

/// The volume comes back from the trash with its written data.
#[tokio::test]
async fn a_volume_from_start_to_deletion() {
    let node = Node::new();
    let (_agent, mut client) = node.start().await;
    let info = client.get_node(v1::GetNodeRequest {}).await.unwrap().into_inner();
    assert_eq!(info.name, "n1");
    assert!(
        info.frontends
            .iter()
            .any(|frontend| frontend.known_frontend() == Some(Frontend::Socket) && frontend.usable),
        "{info:?}"
    );
    let engine = start_volume(&node.disk(), "socket", &mut client).await;
    let mut nbd = Nbd::connect(&endpoint(&engine), "v1").unwrap();
    nbd.write(0, &[5; 4096]).unwrap();
    drop(nbd);
    assert_eq!(list(&mut client).await.len(), 3);

    client.stop_instance(stop(InstanceKind::Engine, "v1", 1)).await.unwrap();
    assert!(!lives(pid(&engine)));
    delete_replicas(&node, &mut client).await;
    let uuid = disk_after_deletion(&node, &mut client).await;
    restore_replicas(&node, &uuid, &mut client).await;
    empty_trash(&mut client).await;
    let mut replicas = Vec::new();
    for id in REPLICAS {
        client.start_replica(v1::StartReplicaRequest { create: false, ..node.replica(id) }).await.unwrap();
        replicas.push(wait_for(&mut client, &format!("v1-{id}"), running).await);
    }
    client.start_engine(engine_of(2, &replicas)).await.unwrap();
    let engine = wait_for(&mut client, "v1", running).await;
    let mut nbd = Nbd::connect(&endpoint(&engine), "v1").unwrap();
    assert_eq!(nbd.read(0, 4096).unwrap(), [5; 4096]);
}

/// A caller that can start replicas must not read a directory with a secret of its own.
#[tokio::test]
async fn a_replica_directory_belongs_to_the_secret_of_its_volume() {
    let node = Node::new();
    let (_agent, mut client) = node.start().await;
    let name = "v1-0000000a";
    let with = |secret: u8, rebind| v1::StartReplicaRequest {
        secret: vec![secret; 32],
        create: secret == 7,
        rebind,
        ..node.replica(REPLICAS[0])
    };
    let stop = || stop(InstanceKind::Replica, name, 0);
    client.add_disk(v1::AddDiskRequest { path: node.disk().display().to_string() }).await.unwrap();
    client.start_replica(with(7, false)).await.unwrap();
    wait_for(&mut client, name, running).await;
    client.stop_instance(stop()).await.unwrap();
    let refused = client.start_replica(with(8, false)).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains("belongs to a volume with another secret"), "{refused}");
    assert!(list(&mut client).await.is_empty());

    client.start_replica(with(8, true)).await.unwrap();
    wait_for(&mut client, name, running).await;
    client.start_replica(with(8, true)).await.unwrap();
    client.stop_instance(stop()).await.unwrap();
    assert_eq!(client.start_replica(with(7, false)).await.unwrap_err().code(), Code::FailedPrecondition);

    // As an earlier release has left it: the next start binds it.
    let fingerprint = node.disk().join("replicas").join(name).join("shorthorn.fingerprint");
    fs::remove_file(&fingerprint).unwrap();
    client.start_replica(with(9, false)).await.unwrap();
    wait_for(&mut client, name, running).await;
    client.stop_instance(stop()).await.unwrap();
    assert!(fingerprint.exists());
    assert_eq!(client.start_replica(with(8, false)).await.unwrap_err().code(), Code::FailedPrecondition);
}

#[tokio::test]
async fn replicas_that_start_at_once_have_different_ports() {
    const COUNT: u32 = 12;
    let node = Node::new();
    let config = fs::read_to_string(node.config()).unwrap();
    fs::write(node.config(), format!("{config}data_address = \"127.0.0.1\"\n")).unwrap();
    let (_agent, mut client) = node.start().await;
    client.add_disk(v1::AddDiskRequest { path: node.disk().display().to_string() }).await.unwrap();
    let mut starts = tokio::task::JoinSet::new();
    for number in 1..=COUNT {
        let request = v1::StartReplicaRequest { create: true, ..node.replica(&format!("{number:08x}")) };
        let mut client = client.clone();
        starts.spawn(async move { client.start_replica(request).await.unwrap() });
    }
    starts.join_all().await;
    let specs =
        fs::read_dir(node.dir.path().join("s/instances/replica")).unwrap().map(|entry| entry.unwrap().path());
    let text = |spec| fs::read_to_string(spec).unwrap();
    let address =
        |spec| serde_json::from_str::<serde_json::Value>(&text(spec)).unwrap()["data_address"].to_string();
    let addresses: std::collections::BTreeSet<String> = specs.map(address).collect();
    assert_eq!(addresses.len(), COUNT as usize, "{addresses:?}");
}

/// A volume that encrypts in transit is served encrypted or not at all.
#[tokio::test]
async fn a_replica_that_encrypts_in_transit_needs_the_kernel() {
    let node = Node::new();
    let (_agent, mut client) = node.start().await;
    client.add_disk(v1::AddDiskRequest { path: node.disk().display().to_string() }).await.unwrap();
    let request =
        v1::StartReplicaRequest { create: true, encrypt_in_transit: true, ..node.replica(REPLICAS[0]) };
    let started = client.start_replica(request.clone()).await;
    if let Err(error) = shorthorn_tls::check_kernel() {
        let refused = started.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition);
        assert!(refused.message().contains("modprobe tls"), "{refused}");
        assert!(list(&mut client).await.is_empty(), "{error}");
        return;
    }
    wait_for(&mut client, "v1-0000000a", running).await;
    let plain = v1::StartReplicaRequest { encrypt_in_transit: false, ..request };
    assert_eq!(client.start_replica(plain).await.unwrap_err().code(), Code::AlreadyExists);
}

#[tokio::test]
async fn a_killed_agent_changes_nothing() {
    let node = Node::new();
    let (agent, mut client) = node.start().await;
    let engine = start_volume(&node.disk(), "socket", &mut client).await;
    let mut nbd = Nbd::connect(&endpoint(&engine), "v1").unwrap();
    nbd.write(0, &[1; 4096]).unwrap();
    let mut before: Vec<u32> = list(&mut client).await.iter().map(pid).collect();
    before.sort_unstable();
    drop(agent); // SIGKILL
    nbd.write(4096, &[2; 4096]).unwrap();

    let (mut agent, mut client) = node.start().await;
    for name in ["v1", "v1-0000000a", "v1-0000000b"] {
        wait_for(&mut client, name, running).await;
    }
    let mut after: Vec<u32> = list(&mut client).await.iter().map(pid).collect();
    after.sort_unstable();
    assert_eq!(after, before);
    assert_eq!(nbd.read(0, 8192).unwrap(), [[1; 4096], [2; 4096]].concat());

    agent.signal(Signal::SIGTERM);
    assert!(agent.ended().success());
    assert!(before.iter().all(|pid| lives(*pid)), "stopping the agent stops nothing else");
    let (_agent, mut client) = node.start().await;
    wait_for(&mut client, "v1", running).await;
    drop(nbd);
    client.stop_instance(stop(InstanceKind::Engine, "v1", 0)).await.unwrap();
    assert!(wait_for_end(pid(&engine)));
}

#[tokio::test]
async fn a_dead_process_is_restarted() {
    let node = Node::new();
    let (agent, mut client) = node.start().await;
    start_volume(&node.disk(), "socket", &mut client).await;
    let name = "v1-0000000a";
    let first = wait_for(&mut client, name, running).await;
    signal_to(pid(&first), Signal::SIGKILL);
    let second = wait_for(&mut client, name, |replica| running(replica) && replica.pid != first.pid).await;
    // The next agent restarts processes that die without an agent.
    drop(agent);
    signal_to(pid(&second), Signal::SIGKILL);
    assert!(wait_for_end(pid(&second)));
    let (_agent, mut client) = node.start().await;
    wait_for(&mut client, name, |replica| running(replica) && replica.pid != second.pid).await;
}

#[tokio::test]
async fn after_a_reboot_nothing_starts_by_itself() {
    let node = Node::new();
    let (agent, mut client) = node.start().await;
    let engine_before = start_volume(&node.disk(), "socket", &mut client).await;
    let pids: Vec<u32> = list(&mut client).await.iter().map(pid).collect();
    drop(agent);
    for pid in pids {
        signal_to(pid, Signal::SIGKILL);
        assert!(wait_for_end(pid));
    }
    fs::write(node.dir.path().join("r/boot-id"), "another boot").unwrap();

    let (_agent, mut client) = node.start().await;
    let instances = list(&mut client).await;
    assert_eq!(instances.len(), 3);
    assert!(instances.iter().all(|instance| instance.state() == InstanceState::Stopped), "{instances:?}");
    let mut replicas = Vec::new();
    for id in REPLICAS {
        let request = v1::StartReplicaRequest { create: false, ..node.replica(id) };
        client.start_replica(request).await.unwrap();
        replicas.push(wait_for(&mut client, &format!("v1-{id}"), running).await);
    }
    client.start_engine(engine(2, &replicas, "socket")).await.unwrap();
    let engine = wait_for(&mut client, "v1", running).await;
    assert_ne!(engine.pid, engine_before.pid);
}

#[tokio::test]
async fn an_engine_is_expanded_and_the_next_one_knows() {
    let node = Node::new();
    let (_agent, mut client) = node.start().await;
    let first = start_volume(&node.disk(), "socket", &mut client).await;
    let order = |attach, size_bytes| v1::ExpandEngineRequest { volume: "v1".into(), attach, size_bytes };
    let has = |size: u64| {
        move |instance: &v1::Instance| match &instance.detail {
            Some(v1::instance::Detail::Engine(engine)) => running(instance) && engine.size_bytes == size,
            _ => false,
        }
    };
    client.expand_engine(order(1, SIZE * 2)).await.unwrap();
    wait_for(&mut client, "v1", has(SIZE * 2)).await;
    // Said again, said late, and said to another one.
    client.expand_engine(order(1, SIZE * 2)).await.unwrap();
    client.expand_engine(order(1, SIZE)).await.unwrap();
    let refused = client.expand_engine(order(2, SIZE * 4)).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    let odd = client.expand_engine(order(1, SIZE * 2 + 1)).await.unwrap_err();
    assert_eq!(odd.code(), Code::InvalidArgument);

    signal_to(pid(&first), Signal::SIGKILL);
    let is_next = |instance: &v1::Instance| instance.pid != first.pid && has(SIZE * 2)(instance);
    wait_for(&mut client, "v1", is_next).await;
    // A start that comes late has the size of before.
    let replicas: Vec<_> = {
        let all = list(&mut client).await;
        all.into_iter().filter(|instance| instance.kind() == InstanceKind::Replica).collect()
    };
    client.start_engine(engine(1, &replicas, "socket")).await.unwrap();
    assert!(has(SIZE * 2)(&wait_for(&mut client, "v1", running).await));
}

#[tokio::test]
async fn calls_can_be_repeated_and_contradictions_are_refused() {
    let node = Node::new();
    let (_agent, mut client) = node.start().await;
    let first = start_volume(&node.disk(), "socket", &mut client).await;
    let replicas: Vec<_> = {
        let all = list(&mut client).await;
        all.into_iter().filter(|instance| instance.kind() == InstanceKind::Replica).collect()
    };
    let again = client.start_engine(engine(1, &replicas, "socket")).await.unwrap().into_inner();
    assert_eq!(again.pid, first.pid);
    let replica = v1::StartReplicaRequest { create: false, ..node.replica(REPLICAS[0]) };
    assert_eq!(client.start_replica(replica).await.unwrap().into_inner().pid, replicas[0].pid);

    let refused = |result: Result<tonic::Response<v1::Instance>, tonic::Status>| result.unwrap_err().code();
    let higher = client.start_engine(engine(2, &replicas, "socket")).await;
    assert_eq!(refused(higher), Code::AlreadyExists);
    let other = v1::StartReplicaRequest { secret: vec![9; 32], ..node.replica(REPLICAS[0]) };
    assert_eq!(refused(client.start_replica(other).await), Code::AlreadyExists);
    // The size does not matter for an existing replica: its engine makes it grow.
    let larger = v1::StartReplicaRequest { size_bytes: SIZE * 2, ..node.replica(REPLICAS[0]) };
    assert_eq!(client.start_replica(larger).await.unwrap().into_inner().pid, replicas[0].pid);
    let unknown = v1::StartReplicaRequest { disk_path: "/nowhere".into(), ..node.replica("0000000c") };
    assert_eq!(refused(client.start_replica(unknown).await), Code::NotFound);
    let name = v1::StartReplicaRequest { volume: "../v1".into(), ..node.replica("0000000c") };
    assert_eq!(refused(client.start_replica(name).await), Code::InvalidArgument);
    let secret = v1::StartEngineRequest { secret: vec![1], ..engine(1, &replicas, "socket") };
    assert_eq!(refused(client.start_engine(secret).await), Code::InvalidArgument);

    client.stop_instance(stop(InstanceKind::Engine, "other", 0)).await.unwrap();
    let bad = client.stop_instance(stop(InstanceKind::Engine, "a/b", 0)).await.unwrap_err();
    assert_eq!(bad.code(), Code::InvalidArgument);

    client.stop_instance(stop(InstanceKind::Engine, "v1", 1)).await.unwrap();
    client.start_engine(engine(3, &replicas, "socket")).await.unwrap();
    let third = wait_for(&mut client, "v1", running).await;
    client.stop_instance(stop(InstanceKind::Engine, "v1", 2)).await.unwrap();
    assert!(lives(pid(&third)), "a late stop must leave a later engine alone");
    assert_eq!(refused(client.start_engine(engine(2, &replicas, "socket")).await), Code::FailedPrecondition);
}

#[tokio::test]
async fn watches_report_all_changes_in_order() {
    let node = Node::new();
    let (mut agent, mut client) = node.start().await;
    start_volume(&node.disk(), "socket", &mut client).await;
    let mut events = client.watch_instances(v1::WatchInstancesRequest {}).await.unwrap().into_inner();
    let mut kinds = Vec::new();
    for _ in 0..4 {
        kinds.push(events.message().await.unwrap().unwrap().r#type());
    }
    assert_eq!(kinds, [Type::Set, Type::Set, Type::Set, Type::Synced]);
    client.stop_instance(stop(InstanceKind::Engine, "v1", 0)).await.unwrap();
    let mut last = InstanceState::Running;
    loop {
        let event = tokio::time::timeout(LIMIT, events.message()).await.unwrap().unwrap().unwrap();
        let Some(instance) = event.instance.clone().filter(|instance| instance.name == "v1") else {
            continue;
        };
        match event.r#type() {
            Type::Gone => break,
            _ => last = instance.state(),
        }
    }
    assert_eq!(last, InstanceState::Stopping);
    // An agent that stops ends its watches, and does not wait for the clients that hold them.
    agent.signal(Signal::SIGTERM);
    let end = tokio::time::timeout(LIMIT, async { while let Ok(Some(_)) = events.message().await {} });
    end.await.expect("the watch ends with the agent");
    assert!(agent.ended().success());
}

#[tokio::test]
async fn an_instance_that_cannot_start_reports_the_reason() {
    let node = Node::new();
    let (_agent, mut client) = node.start().await;
    let path = node.disk().display().to_string();
    client.add_disk(v1::AddDiskRequest { path }).await.unwrap();
    let request = v1::StartReplicaRequest { create: false, ..node.replica(REPLICAS[0]) };
    client.start_replica(request).await.unwrap();
    let failed =
        wait_for(&mut client, "v1-0000000a", |replica| replica.state() == InstanceState::Error).await;
    assert!(failed.message.contains("v1-0000000a"), "{}", failed.message);
    client.stop_instance(stop(InstanceKind::Replica, "v1-0000000a", 0)).await.unwrap();
    assert!(list(&mut client).await.is_empty());
}

/// The agent looks at its own host in between: it must keep its lock, and not take itself for a stranger.
#[tokio::test]
async fn a_second_agent_is_refused() {
    let node = Node::new();
    let (first, mut client) = node.start().await;
    let info = client.get_node(v1::GetNodeRequest {}).await.unwrap().into_inner();
    assert!(!info.warnings.iter().any(|warning| warning.starts_with("ports:")), "{:?}", info.warnings);
    let log = node.agent().failed();
    assert!(log.contains(&format!("locked by process {}", first.pid())), "{log}");
}

#[test]
fn a_wrong_configuration_is_refused_with_its_line() {
    let node = Node::new();
    let config = node.config();
    fs::write(&config, "node_name = \"n1\"\n\ncolour = \"red\"\n").unwrap();
    let log = node.agent().failed();
    assert!(log.contains(&format!("{}:3: unknown field `colour`", config.display())), "{log}");
    fs::write(&config, "# here\nqueue_depth = 0\n").unwrap();
    let log = AgentProcess::start(agent().args(["serve", "--check", "--config"]).arg(&config)).failed();
    assert!(log.contains(&format!("{}:2: queue_depth: 0 is not between", config.display())), "{log}");
    let missing = Path::new("/nonexistent/agent.toml");
    let log = AgentProcess::start(agent().args(["serve", "--config"]).arg(missing)).failed();
    assert!(log.contains("/nonexistent/agent.toml"), "{log}");
}

#[test]
fn the_sample_configuration_is_good() {
    let sample = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/agent.toml");
    let check = agent().args(["serve", "--check", "--config", sample]).output().unwrap();
    let printed = String::from_utf8(check.stdout).unwrap();
    assert!(
        check.status.success() && printed.contains(sample) && printed.contains("no mistakes"),
        "{printed}"
    );
}
