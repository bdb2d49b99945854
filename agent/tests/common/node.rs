//! A client of the node API, and the volume `v1` that tests ask for.

use std::path::{Path, PathBuf};

use shorthorn_api::v1::instance::Detail;
use shorthorn_api::v1::instance_event::Type;
use shorthorn_api::v1::node_client::NodeClient;
use shorthorn_api::v1::{self, InstanceKind, InstanceState};
use tonic::transport::{Channel, Endpoint};

use super::LIMIT;

pub const SIZE: u64 = 64 << 20;
pub const REPLICAS: [&str; 2] = ["0000000a", "0000000b"];

/// Returns a client of the agent that listens on `socket`.
pub async fn connect(socket: &Path) -> Result<NodeClient<Channel>, tonic::transport::Error> {
    let uri = format!("unix://{}", socket.display());
    Ok(NodeClient::new(Endpoint::from_shared(uri)?.timeout(LIMIT).connect().await?))
}

pub fn replica(disk: &Path, id: &str) -> v1::StartReplicaRequest {
    v1::StartReplicaRequest {
        volume: "v1".into(),
        replica_id: id.into(),
        disk_path: disk.display().to_string(),
        size_bytes: SIZE,
        first_members: REPLICAS.map(str::to_owned).to_vec(),
        secret: vec![7; 32],
        create: true,
        ..v1::StartReplicaRequest::default()
    }
}

pub fn engine(attach: u64, replicas: &[v1::Instance], frontend: &str) -> v1::StartEngineRequest {
    let address = |instance: &v1::Instance| match &instance.detail {
        Some(Detail::Replica(replica)) => v1::ReplicaAddress {
            replica_id: replica.replica_id.clone(),
            addresses: replica.addresses.clone(),
            local: true,
        },
        other => panic!("no replica: {other:?}"),
    };
    v1::StartEngineRequest {
        volume: "v1".into(),
        size_bytes: SIZE,
        attach,
        replicas: replicas.iter().map(address).collect(),
        frontend_word: frontend.into(),
        secret: vec![7; 32],
        ..v1::StartEngineRequest::default()
    }
}

pub fn stop(kind: InstanceKind, name: &str, attach: u64) -> v1::StopInstanceRequest {
    v1::StopInstanceRequest { kind: kind.into(), name: name.into(), attach, force: false }
}

pub async fn list(client: &mut NodeClient<Channel>) -> Vec<v1::Instance> {
    client.list_instances(v1::ListInstancesRequest {}).await.unwrap().into_inner().instances
}

/// Watches until the instance called `name` is as wanted.
pub async fn wait_for(
    client: &mut NodeClient<Channel>,
    name: &str,
    wanted: impl Fn(&v1::Instance) -> bool,
) -> v1::Instance {
    let mut last = None;
    let found = tokio::time::timeout(LIMIT, async {
        let mut events = client.watch_instances(v1::WatchInstancesRequest {}).await.unwrap().into_inner();
        while let Some(event) = events.message().await.unwrap() {
            let Some(instance) = event.instance.filter(|instance| instance.name == name) else { continue };
            if event.r#type == i32::from(Type::Set) && wanted(&instance) {
                return instance;
            }
            last = Some(instance);
        }
        panic!("the watch ended");
    });
    match found.await {
        Ok(instance) => instance,
        Err(_) => panic!("{name} never was as wanted; at last {last:?}"),
    }
}

pub fn running(instance: &v1::Instance) -> bool {
    instance.state() == InstanceState::Running
}

pub fn pid(instance: &v1::Instance) -> u32 {
    u32::try_from(instance.pid).unwrap()
}

pub fn endpoint(instance: &v1::Instance) -> PathBuf {
    match &instance.detail {
        Some(Detail::Engine(engine)) => PathBuf::from(&engine.endpoint),
        other => panic!("no engine: {other:?}"),
    }
}

/// Starts the disk, the replicas and the engine of the volume; returns the running engine.
pub async fn start_volume(disk: &Path, frontend: &str, client: &mut NodeClient<Channel>) -> v1::Instance {
    let path = disk.display().to_string();
    let added = client.add_disk(v1::AddDiskRequest { path }).await.unwrap().into_inner();
    assert!(added.is_usable(), "{added:?}");
    let mut replicas = Vec::new();
    for id in REPLICAS {
        client.start_replica(replica(disk, id)).await.unwrap();
        replicas.push(wait_for(client, &format!("v1-{id}"), running).await);
    }
    client.start_engine(engine(1, &replicas, frontend)).await.unwrap();
    wait_for(client, "v1", running).await
}
