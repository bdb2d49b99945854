//! Tests the calls to an agent over a socket.

use std::path::Path;

use shorthorn_api::v1;
use shorthorn_api::v1::node_tls_client::NodeTlsClient;
use shorthorn_api::v1::node_tls_server::{NodeTls, NodeTlsServer};
use shorthorn_api::{CLUSTER_HEADER, LEADER_HEADER};
use shorthorn_controller_core::observed::{AgentInfo, AgentLink, InstanceKey};
use shorthorn_types::{ReplicaId, VolumeName};
use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response};

use super::*;
use crate::store::MemoryStore;

/// An agent that keeps the cluster and the leader of each call about certificates.
#[derive(Clone, Default)]
struct Recorder(Arc<std::sync::Mutex<Vec<[String; 2]>>>);

impl Recorder {
    fn called<T, A: Default>(&self, request: &Request<T>) -> Result<Response<A>, Status> {
        let header = |name: &str| {
            let value = request.metadata().get(name);
            value.map_or("none", |value| value.to_str().unwrap()).to_owned()
        };
        self.0.lock().unwrap().push([header(CLUSTER_HEADER), header(LEADER_HEADER)]);
        Ok(Response::new(A::default()))
    }
}

#[tonic::async_trait]
impl NodeTls for Recorder {
    async fn get_node_tls(
        &self,
        request: Request<v1::GetNodeTlsRequest>,
    ) -> Result<Response<v1::NodeTlsState>, Status> {
        self.called(&request)
    }

    async fn create_certificate_request(
        &self,
        request: Request<v1::CreateCertificateRequestRequest>,
    ) -> Result<Response<v1::CertificateRequest>, Status> {
        self.called(&request)
    }

    async fn set_certificate(
        &self,
        request: Request<v1::SetCertificateRequest>,
    ) -> Result<Response<v1::NodeTlsState>, Status> {
        self.called(&request)
    }

    async fn set_trust(&self, request: Request<v1::TrustList>) -> Result<Response<v1::NodeTlsState>, Status> {
        self.called(&request)
    }
}

/// Serves the calls about certificates, and no others.
fn serve(recorder: &Recorder, socket: &Path) -> JoinHandle<()> {
    let incoming = UnixListenerStream::new(UnixListener::bind(socket).unwrap());
    let server = Server::builder().add_service(NodeTlsServer::new(recorder.clone()));
    tokio::spawn(async move { server.serve_with_incoming(incoming).await.unwrap() })
}

fn fleet(node: &NodeName, socket: &Path) -> Arc<Fleet> {
    let url = format!("unix://{}", socket.display()).parse().unwrap();
    let known = BTreeMap::from([(node.clone(), url)]);
    let store = Arc::new(MemoryStore::new().led_by(7));
    Fleet::new(&known, store, Arc::new(WorkQueue::new()), Metrics::default()).unwrap()
}

#[tokio::test]
async fn calls_about_certificates_say_the_cluster_and_the_leader_too() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("agent.sock");
    let recorder = Recorder::default();
    let serving = serve(&recorder, &socket);
    let node = NodeName::new("a").unwrap();
    let fleet = fleet(&node, &socket);
    assert!(fleet.connected().is_empty() && fleet.channel(&node).is_none(), "not reached yet");
    fleet.change(&node, |agent| agent.link = AgentLink::Synced);
    assert_eq!(fleet.connected(), std::slice::from_ref(&node));
    let mut client = NodeTlsClient::new(fleet.channel(&node).unwrap());
    client.get_node_tls(v1::GetNodeTlsRequest {}).await.unwrap();
    client.set_certificate(v1::SetCertificateRequest::default()).await.unwrap();
    let of_leader = ["in-memory".to_owned(), "7".to_owned()];
    assert_eq!(*recorder.0.lock().unwrap(), [of_leader.clone(), of_leader]);
    serving.abort();
}

#[tokio::test]
async fn a_call_that_an_older_agent_does_not_know_names_the_agent_to_upgrade() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("agent.sock");
    let serving = serve(&Recorder::default(), &socket);
    let node = NodeName::new("a").unwrap();
    let fleet = fleet(&node, &socket);
    let volume = VolumeName::new("v").unwrap();
    let call = AgentCall::StopInstance { instance: InstanceKey::engine(&volume), attach: Some(1) };
    let away = fleet.call(&node, &call).await.unwrap_err();
    assert!(matches!(away, AgentCallError::OutOfReach(_)), "{away}");
    fleet.change(&node, |agent| {
        agent.info = Some(AgentInfo { version: "0.0.9".to_owned(), ..AgentInfo::default() });
        agent.link = AgentLink::Synced;
    });
    let refused = fleet.call(&node, &call).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    let text = refused.to_string();
    assert!(text.contains("version 0.0.9") && text.contains("upgrade the agent of node a"), "{text}");
    // The next decision, and with it the object, has the remedy too.
    let agents = fleet.agents();
    let failure = &agents.get(&node).unwrap().failures[&call.instance()];
    assert!(failure.message.contains("upgrade the agent of node a"), "{failure:?}");
    assert!(fleet.can(&node, 0) && !fleet.can(&node, 1), "it has shown no feature");
    serving.abort();
}

#[tokio::test]
async fn each_request_that_an_older_agent_does_not_know_names_the_agent_to_upgrade() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("agent.sock");
    let serving = serve(&Recorder::default(), &socket);
    let node = NodeName::new("a").unwrap();
    let fleet = fleet(&node, &socket);
    fleet.change(&node, |agent| {
        agent.info = Some(AgentInfo { version: "0.0.9".to_owned(), ..AgentInfo::default() });
        agent.link = AgentLink::Synced;
    });
    let volume = VolumeName::new("v").unwrap();
    let replica = ReplicaId::from_random(1);
    let trashed = v1::TrashedReplica {
        disk_path: "/d".to_owned(),
        volume: "v".to_owned(),
        replica_id: replica.to_string(),
        ..v1::TrashedReplica::default()
    };
    let trashed = convert::trashed(&node, &trashed).unwrap();
    let upgrade = v1::UpgradeEngineRequest::default();
    let all = [
        ("inspect", fleet.inspect_replica(&node, &volume, replica, "/d").await.err()),
        ("trash", fleet.trash_on(&node).await.err()),
        ("restore", fleet.restore_replica(&trashed).await.err()),
        ("empty", fleet.remove_trash(&trashed).await.err()),
        ("remove", fleet.remove_disk(&node, "/d").await.err()),
        ("add", fleet.add_disk(&node, "/d").await.err()),
        ("upgrade", fleet.upgrade_engine(&node, upgrade).await.err()),
        ("scrub", fleet.scrub(&node, v1::ScrubRequest::default()).await.err()),
        ("cluster", fleet.cluster_of(&node).await.err()),
        ("take", fleet.take_node(&node, "other").await.err()),
        ("discover", fleet.discover_devices(vec![node.clone()]).await.remove(0).1.err()),
    ];
    for (request, error) in all {
        let error = error.unwrap_or_else(|| panic!("{request} was answered"));
        assert_eq!(error.code(), Code::FailedPrecondition, "{request}: {error}");
        let text = error.to_string();
        assert!(
            text.contains("version 0.0.9") && text.contains("upgrade the agent of node a"),
            "{request}: {text}"
        );
    }
    serving.abort();
}

#[tokio::test]
async fn an_older_agent_is_not_silent_about_its_disks() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("agent.sock");
    let serving = serve(&Recorder::default(), &socket);
    let node = NodeName::new("a").unwrap();
    let fleet = fleet(&node, &socket);
    assert_eq!(fleet.trash(fleet.known()).await.silent, std::slice::from_ref(&node), "not reached yet");
    fleet.change(&node, |agent| agent.link = AgentLink::Synced);
    let trash = fleet.trash(fleet.known()).await;
    let directories = fleet.directories(fleet.known()).await;
    for (silent, problems) in [(trash.silent, trash.problems), (directories.silent, directories.problems)] {
        assert!(silent.is_empty(), "{silent:?}");
        assert!(problems.len() == 1 && problems[0].contains("upgrade the agent of node a"), "{problems:?}");
    }
    serving.abort();
}
