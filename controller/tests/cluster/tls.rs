//! The real controller and the real shorthornctl with TLS around an agent in memory.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::support::agent::FakeAgent;
use crate::support::cluster::LIMIT;
use crate::support::tls_agent::{TlsAgent, enrol, enrol_with_pin};
use shorthorn_api::v1;
use shorthorn_api::v1::controller_client::ControllerClient;
use shorthorn_api::v1::node_client::NodeClient;
use shorthorn_pki::{Bundle, Connector, Credentials, Pin, PrivateKey, Role, load};
use shorthorn_testkit::binary;
use shorthorn_testkit::metrics::own_address;
use shorthorn_testkit::waiting::wait_for_async;
use tokio::net::{TcpListener, UnixDatagram};
use tokio::process::{Child, Command};
use tokio::time::timeout;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

/// A controller with TLS, and the address of the agent of node a.
struct Cluster {
    directory: tempfile::TempDir,
    tls: SocketAddr,
    agent: SocketAddr,
    controller: Option<Child>,
}

impl Cluster {
    async fn start() -> Cluster {
        let (tls, agent) = (own_address(), own_address());
        let mut cluster = Cluster { directory: tempfile::tempdir().unwrap(), tls, agent, controller: None };
        cluster.start_controller().await;
        cluster
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    async fn start_controller(&mut self) {
        let notify = self.path("notify.sock");
        let _ = std::fs::remove_file(&notify);
        let socket = UnixDatagram::bind(&notify).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_shorthorn-controller"));
        command.arg("serve").arg("--store").arg(self.path("store.redb"));
        command.args(["--listen", &format!("unix://{}", self.path("controller.sock").display())]);
        command.args(["--tls-listen", &self.tls.to_string(), "--metrics-listen", "off"]);
        command.args(["--node", &format!("a=https://{}", self.agent)]);
        command.stdin(Stdio::null()).kill_on_drop(true).env("NOTIFY_SOCKET", &notify);
        self.controller = Some(command.spawn().unwrap());
        let mut buffer = [0; 64];
        let length = timeout(LIMIT, socket.recv(&mut buffer)).await.unwrap().unwrap();
        assert_eq!(&buffer[..length], b"READY=1\n");
    }

    async fn ctl_at(&self, server: &str, words: &[&str]) -> Output {
        let mut command = Command::new(binary("shorthornctl").unwrap());
        command.env("SHORTHORN_SERVER", server).args(words).current_dir(self.directory.path());
        command.stdin(Stdio::null()).kill_on_drop(true);
        timeout(LIMIT, command.output()).await.unwrap().unwrap()
    }

    /// Over the Unix socket.
    async fn ctl(&self, words: &[&str]) -> Result<String, String> {
        let server = format!("unix://{}", self.path("controller.sock").display());
        text(&self.ctl_at(&server, words).await)
    }

    /// Over TLS with the certificate in this file.
    async fn remote(&self, identity: &str, words: &[&str]) -> Result<String, String> {
        let words: Vec<&str> = ["--tls-identity", identity].iter().chain(words).copied().collect();
        text(&self.ctl_at(&format!("https://{}", self.tls), &words).await)
    }

    async fn until(&self, step: &str, words: &[&str], is_well: impl Fn(&Result<String, String>) -> bool) {
        wait_for_async(step, LIMIT, async || {
            let result = self.ctl(words).await;
            if is_well(&result) { Ok(()) } else { Err(result) }
        })
        .await;
    }

    /// Until the controller uses the agent of node a, or does not.
    async fn until_reached(&self, step: &str, expected: bool) {
        self.until(step, &["disk", "add", "a", "/var/lib/longhorn"], |result| result.is_ok() == expected)
            .await;
    }

    async fn bundle(&self, node: &str) -> Bundle {
        let token = self.ctl(&["node", "token", node]).await.unwrap();
        enrol(self.tls, token.trim(), node, &PrivateKey::generate().unwrap()).await.unwrap()
    }

    /// The agent of node a, which has joined.
    async fn agent(&self) -> TlsAgent {
        let fake = FakeAgent::new("a", Arc::default());
        TlsAgent::new(fake, self.bundle("a").await, self.path("agent.pem"))
    }

    async fn listener(&self) -> TcpListener {
        TcpListener::bind(self.agent).await.unwrap()
    }

    async fn admin(&self, name: &str) -> Credentials {
        self.ctl(&["tls", "issue", name]).await.unwrap();
        Credentials::new(load(&self.path(&format!("{name}.pem"))).unwrap().unwrap()).unwrap()
    }
}

fn text(output: &Output) -> Result<String, String> {
    let of = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    if output.status.success() { Ok(of(&output.stdout)) } else { Err(of(&output.stderr)) }
}

fn channel(address: SocketAddr, credentials: &Credentials, expected: Role) -> Channel {
    let connector = Connector::new(credentials, expected).unwrap().always_tls();
    Endpoint::from_shared(format!("http://{address}")).unwrap().connect_with_connector_lazy(connector)
}

#[tokio::test]
async fn a_node_joins_by_a_token_and_only_the_controller_may_call_its_agent() {
    let cluster = Cluster::start().await;
    let agent = cluster.agent().await;
    let _serving = agent.serve(cluster.listener().await);
    cluster.until_reached("reached with the right certificate", true).await;

    let node = Role::node("a").unwrap();
    let get = |credentials: Credentials| {
        let mut client = NodeClient::new(channel(cluster.agent, &credentials, node.clone()));
        async move { client.get_node(v1::GetNodeRequest {}).await.unwrap_err() }
    };
    let admin = cluster.admin("ann").await;
    let refused = get(admin).await;
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    // The certificates of nodes are for servers only.
    let other_node = Credentials::new(cluster.bundle("b").await).unwrap();
    let refused = get(other_node).await;
    assert_ne!(refused.code(), Code::PermissionDenied, "the handshake fails: {refused}");
    let nothing = Bundle { identity: None, trust: agent.credentials.current().trust.clone() };
    let refused = get(Credentials::new(nothing).unwrap()).await;
    assert!(format!("{refused:?}").contains("enrol"), "{refused:?}");
    // In plain, as any pod could before.
    let plain = Endpoint::from_shared(format!("http://{}", cluster.agent)).unwrap().connect_lazy();
    let refused = NodeClient::new(plain).get_node(v1::GetNodeRequest {}).await.unwrap_err();
    assert_ne!(refused.code(), Code::Ok);
}

#[tokio::test]
async fn an_agent_with_the_certificate_of_another_node_is_not_used() {
    let cluster = Cluster::start().await;
    let fake = FakeAgent::new("a", Arc::default());
    let agent = TlsAgent::new(fake, cluster.bundle("b").await, cluster.path("agent.pem"));
    let _serving = agent.serve(cluster.listener().await);
    cluster
        .until("named", &["node", "inspect", "a"], |shown| {
            shown.as_ref().is_ok_and(|text| text.contains("node/b") && text.contains("expected node/a"))
        })
        .await;
    assert!(cluster.ctl(&["disk", "add", "a", "/var/lib/longhorn"]).await.is_err());
}

#[tokio::test]
async fn a_token_works_once_for_its_node_and_a_pin_names_the_controller() {
    let cluster = Cluster::start().await;
    let token = cluster.ctl(&["node", "token", "a"]).await.unwrap();
    let (token, key) = (token.trim(), PrivateKey::generate().unwrap());
    let other_node = enrol(cluster.tls, token, "b", &key).await.unwrap_err();
    assert_eq!(other_node.code(), Code::PermissionDenied, "{other_node}");
    let other_pin = enrol_with_pin(cluster.tls, token, "a", &key, Pin::of(b"other")).await.unwrap_err();
    assert!(format!("{other_pin:?}").contains("pin"), "{other_pin:?}");
    enrol(cluster.tls, token, "a", &key).await.unwrap();
    enrol(cluster.tls, token, "a", &key).await.expect("the answer was lost");
    let replayed = enrol(cluster.tls, token, "a", &PrivateKey::generate().unwrap()).await.unwrap_err();
    assert_eq!(replayed.code(), Code::PermissionDenied, "{replayed}");
    assert!(replayed.message().contains("used"), "{replayed}");
}

#[tokio::test]
async fn administrators_need_a_certificate_that_is_not_revoked() {
    let cluster = Cluster::start().await;
    let admin = cluster.admin("ann").await;
    cluster.remote("ann.pem", &["tls", "show"]).await.unwrap();
    cluster.remote("ann.pem", &["node", "list"]).await.unwrap();
    // Without a certificate the handshake works, for nodes that join, and calls do not.
    let trust = admin.current().trust.clone();
    let stranger = Connector::pinned(trust.pins()[0]).unwrap();
    let endpoint = Endpoint::from_shared(format!("http://{}", cluster.tls)).unwrap();
    let stranger = endpoint.connect_with_connector_lazy(stranger);
    let refused = ControllerClient::new(stranger).list_nodes(v1::ListNodesRequest::default()).await;
    assert_eq!(refused.unwrap_err().code(), Code::Unauthenticated);
    // A connection that was open before is closed too.
    let mut open = ControllerClient::new(channel(cluster.tls, &admin, Role::Controller));
    open.list_nodes(v1::ListNodesRequest::default()).await.unwrap();
    cluster.ctl(&["tls", "revoke", "admin/ann"]).await.unwrap();
    open.list_nodes(v1::ListNodesRequest::default()).await.unwrap_err();
    cluster.remote("ann.pem", &["tls", "show"]).await.unwrap_err();
    let without = cluster.ctl_at("http://192.0.2.1:9521", &["node", "list"]).await;
    let error = text(&without).unwrap_err();
    assert!(error.contains("--tls-identity"), "{error}");
}

#[tokio::test]
async fn a_revoked_node_is_not_used_and_may_join_again() {
    let cluster = Cluster::start().await;
    let agent = cluster.agent().await;
    let serving = agent.serve(cluster.listener().await);
    cluster.until_reached("reached", true).await;
    cluster.ctl(&["tls", "revoke", "a"]).await.unwrap();
    cluster.until_reached("refused after the revocation", false).await;
    serving.abort();
    let _ = serving.await;
    let agent = cluster.agent().await;
    let _serving = agent.serve(cluster.listener().await);
    cluster.until_reached("reached after it has joined again", true).await;
}

#[tokio::test]
async fn certificates_are_renewed_and_the_ca_is_replaced_without_a_restart() {
    let mut cluster = Cluster::start().await;
    let agent = cluster.agent().await;
    let _serving = agent.serve(cluster.listener().await);
    cluster.until_reached("reached", true).await;
    let first = agent.serial();
    agent.claims_to_be_due.store(true, Ordering::SeqCst);
    // Each change of the trust list has agents looked at now.
    cluster.admin("ann").await;
    cluster.ctl(&["tls", "revoke", "admin/ann"]).await.unwrap();
    cluster.until("renewed", &["tls", "show"], |_| agent.serial() != first).await;
    cluster.until_reached("reached with the new certificate", true).await;

    let old = agent.state();
    cluster.ctl(&["tls", "roll-over"]).await.unwrap();
    cluster.until("given the new CA", &["tls", "show"], |_| agent.state().trusted_pins.len() == 2).await;
    let no_one_behind = |shown: &Result<String, String>| {
        let json: serde_json::Value = serde_json::from_str(shown.as_ref().unwrap()).unwrap();
        json["nodes_behind"] == serde_json::json!([])
    };
    cluster.until("up to date", &["tls", "show", "-o", "json"], no_one_behind).await;
    cluster.ctl(&["tls", "roll-over"]).await.unwrap();
    cluster.until("reissued", &["tls", "show"], |_| agent.state().signer_pin != old.signer_pin).await;
    cluster.until("up to date", &["tls", "show", "-o", "json"], no_one_behind).await;
    cluster.ctl(&["tls", "roll-over"]).await.unwrap();
    let is_alone = |_: &Result<String, String>| {
        let pins = agent.state().trusted_pins;
        pins.len() == 1 && pins[0] != old.signer_pin
    };
    cluster.until("without the old CA", &["tls", "show"], is_alone).await;
    cluster.until_reached("reached with the new CA", true).await;

    // The next controller has the same CA.
    cluster.controller.take().unwrap().kill().await.unwrap();
    cluster.start_controller().await;
    cluster.until_reached("reached by the next controller", true).await;
}
