//! Mutual TLS of the node API, with real processes.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Command;

use common::api_server::{ApiServer, Decision};
use common::tls::{Cluster, DAY, ago, certificates, client, dial, node};
use common::{AgentProcess, agent};
use shorthorn_api::v1::node_client::NodeClient;
use shorthorn_api::v1::node_tls_client::NodeTlsClient;
use shorthorn_api::{CLUSTER_HEADER, LEADER_HEADER, v1};
use shorthorn_pki::{Bundle, CertificateDer, CertificateRequest, Role, Trust};
use shorthorn_testkit::free_port;
use tempfile::TempDir;
use tonic::service::Interceptor;
use tonic::transport::Channel;
use tonic::{Code, Request as Call};

/// A node whose agent has an address with TLS.
struct Node {
    dir: TempDir,
    port: u16,
    metrics_port: u16,
    kubeconfig: String,
}

impl Node {
    fn new() -> Node {
        let dir = tempfile::tempdir().unwrap();
        Node {
            dir,
            port: free_port().unwrap(),
            metrics_port: free_port().unwrap(),
            kubeconfig: "off".to_owned(),
        }
    }

    fn tls_dir(&self) -> PathBuf {
        self.dir.path().join("tls")
    }

    fn file(&self) -> PathBuf {
        self.tls_dir().join("agent.pem")
    }

    fn config(&self) -> PathBuf {
        let path = |name: &str| self.dir.path().join(name).display().to_string();
        let config = format!(
            "node_name = \"n1\"\nlisten = [\"unix:{}\", \"tls:127.0.0.1:{}\"]\ntls_dir = \"{}\"\n\
             kubelet_kubeconfig = \"{}\"\nstate_dir = \"{}\"\nruntime_dir = \"{}\"\ndevice_dir = \"{}\"\n\
             instances = \"children\"\ncsi = \"off\"\nmetrics_listen = \"127.0.0.1:{}\"\n",
            path("sock"),
            self.port,
            path("tls"),
            self.kubeconfig,
            path("s"),
            path("r"),
            path("dev"),
            self.metrics_port
        );
        let file = self.dir.path().join("agent.toml");
        fs::write(&file, config).unwrap();
        file
    }

    fn start(&self) -> AgentProcess {
        let agent = AgentProcess::start(agent().arg("serve").arg("--config").arg(self.config()));
        agent.wait_for_log(": ready node=");
        agent
    }

    /// An agent that has a certificate and serves.
    fn enrolled(&self, cluster: &mut Cluster) -> AgentProcess {
        cluster.enrol(&self.tls_dir(), &node("n1"));
        let agent = AgentProcess::start(agent().arg("serve").arg("--config").arg(self.config()));
        agent.wait_for_log("listening with TLS");
        agent
    }

    async fn local(&self) -> Channel {
        let uri = format!("unix://{}", self.dir.path().join("sock").display());
        tonic::transport::Endpoint::from_shared(uri).unwrap().connect().await.unwrap()
    }

    /// The value of shorthorn_agent_certificate_expiry_seconds.
    fn expiry_s(&self) -> u64 {
        let mut stream = TcpStream::connect(("127.0.0.1", self.metrics_port)).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").unwrap();
        let mut page = String::new();
        stream.read_to_string(&mut page).unwrap();
        let value =
            |line: &str| line.strip_prefix("shorthorn_agent_certificate_expiry_seconds{} ")?.parse().ok();
        page.lines().find_map(value).unwrap()
    }

    fn check(&self) -> (bool, String) {
        let output = agent().args(["serve", "--check", "--config"]).arg(self.config()).output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(text).unwrap())
    }

    fn join(&self, token: &str, controller: &str) -> (bool, String) {
        let output = join(token, controller).arg("--config").arg(self.config()).output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(text).unwrap())
    }
}

fn join(token: &str, controller: &str) -> Command {
    let mut command = agent();
    command.args(["join", "--token", token, "--controller", controller]);
    command
}

/// The answer to a harmless call.
async fn ask(port: u16, bundle: Bundle) -> Result<(), (Option<Code>, String)> {
    let channel = dial(port, bundle, "n1").await.map_err(|error| (None, error))?;
    let asked = NodeClient::new(channel).list_instances(v1::ListInstancesRequest {}).await;
    asked.map(drop).map_err(|status| (Some(status.code()), format!("{status:?}")))
}

#[tokio::test]
async fn only_the_controller_of_the_cluster_is_served() {
    let (node_dir, mut ours, mut other) = (Node::new(), Cluster::new("one"), Cluster::new("one"));
    let _agent = node_dir.enrolled(&mut ours);
    let port = node_dir.port;
    ask(port, ours.bundle(&Role::Controller)).await.unwrap();

    for role in [Role::admin("ann").unwrap(), node("n1"), node("n2")] {
        let (code, text) = ask(port, ours.bundle(&role)).await.unwrap_err();
        assert!(code.is_none_or(|code| code != Code::Ok) && !text.is_empty(), "{role}: {text}");
    }
    let (code, text) = ask(port, ours.bundle(&Role::admin("ann").unwrap())).await.unwrap_err();
    assert_eq!(code, Some(Code::PermissionDenied), "{text}");

    // It trusts our CA, and its certificate is of another one.
    let foreign = Bundle { trust: ours.0.trust().unwrap(), ..other.bundle(&Role::Controller) };
    assert!(ask(port, foreign).await.is_err(), "another CA of the same name");
    let expired = ours.bundle_of(&Role::Controller, ago(100 * DAY));
    assert!(ask(port, expired).await.is_err(), "expired");
    let anonymous = Bundle { identity: None, trust: ours.0.trust().unwrap() };
    assert!(ask(port, anonymous).await.is_err(), "no certificate");
    // Without TLS.
    let plain = tonic::transport::Endpoint::from_shared(format!("http://127.0.0.1:{port}")).unwrap();
    let refused = match plain.connect().await {
        Ok(channel) => NodeClient::new(channel).list_instances(v1::ListInstancesRequest {}).await.is_err(),
        Err(_) => true,
    };
    assert!(refused);
    // The controller expects another node there.
    assert!(dial(port, ours.bundle(&Role::Controller), "n2").await.is_err());
    ask(port, ours.bundle(&Role::Controller)).await.unwrap();
}

#[tokio::test]
async fn a_revoked_controller_is_cut_off() {
    let (node_dir, mut ours) = (Node::new(), Cluster::new("one"));
    let _agent = node_dir.enrolled(&mut ours);
    let port = node_dir.port;
    let (good, bad) = (ours.bundle(&Role::Controller), ours.bundle(&Role::Controller));
    let mut open = client(port, bad.clone(), "n1").await;
    open.list_instances(v1::ListInstancesRequest {}).await.unwrap();
    let serial = bad.identity.as_ref().unwrap().certificate().serial.clone();
    let trust = ours.0.trust().unwrap();
    let authorities = trust.authorities().iter().map(|der| der.to_vec());
    let trust = Trust::new(trust.cluster().clone(), trust.version() + 1, authorities, [serial]).unwrap();
    let list = v1::TrustList {
        cluster: trust.cluster().to_string(),
        version: trust.version(),
        authorities: trust.authorities().iter().map(|der| der.to_vec()).collect(),
        revoked: trust.revoked().iter().map(ToString::to_string).collect(),
    };
    let mut tls = certificates(port, good.clone(), "n1").await;
    let state = tls.set_trust(list.clone()).await.unwrap().into_inner();
    assert_eq!(state.trust_version, trust.version());
    assert!(open.list_instances(v1::ListInstancesRequest {}).await.is_err(), "its connection was open");
    assert!(ask(port, bad).await.is_err());
    ask(port, good).await.unwrap();

    let foreign = v1::TrustList { cluster: "two".into(), version: 99, ..list.clone() };
    assert_eq!(tls.set_trust(foreign).await.unwrap_err().code(), Code::FailedPrecondition);
    let other = Cluster::new("one").0.trust().unwrap();
    let without_own = v1::TrustList {
        version: 99,
        authorities: other.authorities().iter().map(|der| der.to_vec()).collect(),
        ..list
    };
    assert_eq!(tls.set_trust(without_own).await.unwrap_err().code(), Code::FailedPrecondition);
    let kept = shorthorn_pki::load(&node_dir.file()).unwrap().unwrap();
    assert_eq!(kept.trust, trust, "the next agent knows it");
}

#[tokio::test]
async fn a_certificate_is_renewed_under_a_stream() {
    let (node_dir, mut ours) = (Node::new(), Cluster::new("one"));
    let _agent = node_dir.enrolled(&mut ours);
    let port = node_dir.port;
    let bundle = ours.bundle(&Role::Controller);
    let mut watching = client(port, bundle.clone(), "n1").await;
    let mut events = watching.watch_instances(v1::WatchInstancesRequest {}).await.unwrap().into_inner();
    assert!(events.message().await.unwrap().is_some());

    let mut tls = certificates(port, bundle.clone(), "n1").await;
    let before = tls.get_node_tls(v1::GetNodeTlsRequest {}).await.unwrap().into_inner();
    let early = v1::SetCertificateRequest { chain: Vec::new() };
    assert_eq!(tls.set_certificate(early).await.unwrap_err().code(), Code::FailedPrecondition);
    let csr = tls.create_certificate_request(v1::CreateCertificateRequestRequest {}).await.unwrap();
    let request = CertificateRequest::from_der(&csr.into_inner().csr).unwrap();
    assert_eq!(request.common_name(), "n1");
    let signed = |cluster: &mut Cluster, role: &Role| {
        let chain = cluster.0.sign(&request, role, common::tls::now()).unwrap();
        v1::SetCertificateRequest {
            chain: chain.iter().map(|der: &CertificateDer<'_>| der.to_vec()).collect(),
        }
    };
    for wrong in [signed(&mut ours, &node("n2")), signed(&mut Cluster::new("one"), &node("n1"))] {
        assert_eq!(tls.set_certificate(wrong).await.unwrap_err().code(), Code::FailedPrecondition);
    }
    let good = signed(&mut ours, &node("n1"));
    let after = tls.set_certificate(good.clone()).await.unwrap().into_inner();
    assert_ne!(after.serial, before.serial);
    assert_eq!(tls.set_certificate(good).await.unwrap().into_inner(), after, "its answer was lost");
    let kept = shorthorn_pki::load(&node_dir.file()).unwrap().unwrap();
    assert_eq!(kept.identity.unwrap().certificate().serial.to_string(), after.serial);

    // The stream continues to report changes.
    let _ = watching.list_instances(v1::ListInstancesRequest {}).await.unwrap();
    ask(port, bundle).await.unwrap();
    drop(events);
}

#[tokio::test]
async fn without_a_certificate_only_this_host_is_served() {
    let (node_dir, mut ours) = (Node::new(), Cluster::new("one"));
    let (ok, text) = node_dir.check();
    assert!(ok && text.contains("no certificate yet: run shorthorn-agent join"), "{text}");
    let agent = node_dir.start();
    let mut local = NodeClient::new(node_dir.local().await);
    local.list_instances(v1::ListInstancesRequest {}).await.unwrap();
    assert!(ask(node_dir.port, ours.bundle(&Role::Controller)).await.is_err());
    let state = NodeTlsClient::new(node_dir.local().await).get_node_tls(v1::GetNodeTlsRequest {}).await;
    assert_eq!(state.unwrap().into_inner(), v1::NodeTlsState::default());
    assert_eq!(node_dir.expiry_s(), 0);
    // As `join` does.
    ours.enrol(&node_dir.tls_dir(), &node("n1"));
    agent.wait_for_log("listening with TLS");
    ask(node_dir.port, ours.bundle(&Role::Controller)).await.unwrap();
    let kept = shorthorn_pki::load(&node_dir.file()).unwrap().unwrap();
    assert_eq!(node_dir.expiry_s(), kept.identity.unwrap().certificate().not_after);
    assert!(node_dir.check().0);
}

#[test]
fn a_check_reports_a_certificate_that_cannot_be_used() {
    let (node_dir, mut ours) = (Node::new(), Cluster::new("one"));
    let (file, store) =
        (node_dir.file(), |bundle: &Bundle| shorthorn_pki::store(&node_dir.file(), bundle).unwrap());
    fs::create_dir(node_dir.tls_dir()).unwrap();
    let refused = |wanted: &str| {
        let (ok, text) = node_dir.check();
        assert!(!ok && text.contains(wanted), "{wanted:?}: {text}");
    };
    fs::write(&file, "no PEM").unwrap();
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    fs::set_permissions(&file, private).unwrap();
    refused("agent.pem");
    store(&ours.bundle_of(&node("n1"), ago(100 * DAY)));
    refused("is expired");
    store(&ours.bundle(&node("n2")));
    refused("node/n2");
    store(&ours.bundle(&node("n1")));
    assert!(node_dir.check().0);
    fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    refused("chmod 600");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_enrols_with_the_identity_of_its_kubelet() {
    let (mut node_dir, mut ours) = (Node::new(), Cluster::new("one"));
    let controller = ours.bundle(&Role::Controller);
    let server = ApiServer::start(node_dir.dir.path(), ours.0, Decision::None).await;
    node_dir.kubeconfig = server.kubeconfig.display().to_string();
    let (ok, text) = node_dir.check();
    assert!(ok && text.contains("the agent enrols it with"), "{text}");
    let agent = node_dir.start();
    server.wait_for_requests(1).await;
    assert!(!node_dir.file().exists());
    server.decide(Decision::Sign);
    agent.wait_for_log("listening with TLS");
    ask(node_dir.port, controller.clone()).await.unwrap();
    let made = &server.requests()[0];
    assert_eq!(made["spec"]["signerName"], "shorthorn.io/agent");
    drop(agent);
    // It is remembered.
    let agent = node_dir.start();
    ask(node_dir.port, controller).await.unwrap();
    assert_eq!(server.requests().len(), 1);
    drop(agent);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_denied_or_wrong_answer_is_reported_and_another_key_is_made() {
    let (mut node_dir, ours) = (Node::new(), Cluster::new("one"));
    let server = ApiServer::start(node_dir.dir.path(), ours.0, Decision::Deny).await;
    node_dir.kubeconfig = server.kubeconfig.display().to_string();
    let agent = node_dir.start();
    agent.wait_for_log("was denied: Policy: not this node");
    drop(agent);
    server.decide(Decision::SignForAnother);
    let agent = node_dir.start();
    agent.wait_for_log("check node_name");
    let requests = server.requests();
    assert_eq!(requests.len(), 2);
    assert_ne!(requests[0]["spec"]["request"], requests[1]["spec"]["request"]);
    assert!(!node_dir.file().exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_joins_with_a_token_once() {
    let (first, second) = (Node::new(), Node::new());
    let mut ours = Cluster::new("one");
    let token = ours.0.create_token(None, 3600, common::tls::now()).unwrap().reveal();
    let wrong_pin = {
        let other = Cluster::new("one").0.pin().unwrap().to_string();
        let (start, _) = token.rsplit_once('.').unwrap();
        format!("{start}.{other}")
    };
    let controller = ours.bundle(&Role::Controller);
    let address = common::controller::start(ours.0, controller.clone()).await;
    let run = |node_dir: &Node, token: &str| {
        // The stand-in for the controller runs in this runtime.
        tokio::task::block_in_place(|| node_dir.join(token, &address))
    };
    let (ok, text) = run(&first, &wrong_pin);
    assert!(!ok && text.to_lowercase().contains("pin"), "{text}");
    assert!(!first.file().exists());
    let (ok, text) = run(&first, &token);
    assert!(ok && text.contains("node n1 has joined cluster one"), "{text}");
    let agent = first.start();
    ask(first.port, controller).await.unwrap();
    drop(agent);
    let (ok, text) = run(&second, &token);
    assert!(!ok && text.contains("used already"), "{text}");

    // Another cluster, with its own right token.
    let mut other = Cluster::new("two");
    let token = other.0.create_token(Some("n1"), 3600, common::tls::now()).unwrap().reveal();
    let controller = other.bundle(&Role::Controller);
    let address = common::controller::start(other.0, controller).await;
    let (ok, text) = tokio::task::block_in_place(|| first.join(&token, &address));
    assert!(!ok && text.contains("signed by a CA that"), "{text}");
}

#[tokio::test]
async fn an_older_leader_changes_no_certificate_after_a_newer_one_has_called() {
    fn of_leader(number: u64) -> impl Interceptor {
        move |mut call: Call<()>| {
            call.metadata_mut().insert(CLUSTER_HEADER, "one".parse().unwrap());
            call.metadata_mut().insert(LEADER_HEADER, number.into());
            Ok(call)
        }
    }
    let node = Node::new();
    let _agent = node.start();
    // The calls of both services count together.
    let mut newer = NodeClient::with_interceptor(node.local().await, of_leader(7));
    newer.list_instances(v1::ListInstancesRequest {}).await.unwrap();
    let mut older = NodeTlsClient::with_interceptor(node.local().await, of_leader(6));
    older.get_node_tls(v1::GetNodeTlsRequest {}).await.unwrap();
    let refused = older.set_trust(v1::TrustList::default()).await.unwrap_err();
    assert!(refused.message().contains("controller 6 is not the leader any more"), "{refused}");
    let mut newer = NodeTlsClient::with_interceptor(node.local().await, of_leader(7));
    let refused = newer.set_trust(v1::TrustList::default()).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "only the empty list is wrong: {refused}");
}
