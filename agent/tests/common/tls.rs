//! A cluster of certificates, and clients of a node API with TLS.

use std::path::Path;
use std::time::{Duration, SystemTime};

use shorthorn_api::v1::node_client::NodeClient;
use shorthorn_api::v1::node_tls_client::NodeTlsClient;
use shorthorn_pki::{Authority, Bundle, ClusterId, Connector, Credentials, Role, UnixTime};
use tonic::transport::{Channel, Endpoint};

use super::LIMIT;

pub const DAY: Duration = Duration::from_hours(24);

pub fn now() -> UnixTime {
    UnixTime::since_unix_epoch(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap())
}

pub fn ago(age: Duration) -> UnixTime {
    UnixTime::since_unix_epoch(Duration::from_secs(now().as_secs()) - age)
}

pub fn node(name: &str) -> Role {
    Role::node(name).unwrap()
}

/// The CA of a cluster.
pub struct Cluster(pub Authority);

impl Cluster {
    pub fn new(id: &str) -> Cluster {
        // Long ago, so that certificates that it signed are expired now.
        Cluster(Authority::create(ClusterId::new(id).unwrap(), ago(400 * DAY)).unwrap())
    }

    /// A bundle that was signed at `time`.
    pub fn bundle_of(&mut self, role: &Role, time: UnixTime) -> Bundle {
        let identity = Some(self.0.issue(role, time).unwrap());
        Bundle { identity, trust: self.0.trust().unwrap() }
    }

    pub fn bundle(&mut self, role: &Role) -> Bundle {
        self.bundle_of(role, now())
    }

    /// Gives a node its certificate, as an enrolment does.
    pub fn enrol(&mut self, tls_dir: &Path, role: &Role) {
        std::fs::create_dir_all(tls_dir).unwrap();
        shorthorn_pki::store(&tls_dir.join("agent.pem"), &self.bundle(role)).unwrap();
    }
}

/// A connection to the node `expected` with the certificate of `bundle`.
pub async fn dial(port: u16, bundle: Bundle, expected: &str) -> Result<Channel, String> {
    let credentials = Credentials::new(bundle).unwrap();
    let connector = Connector::new(&credentials, node(expected)).unwrap().always_tls();
    let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{port}")).unwrap().timeout(LIMIT);
    endpoint.connect_with_connector(connector).await.map_err(|error| format!("{error:?}"))
}

pub async fn client(port: u16, bundle: Bundle, expected: &str) -> NodeClient<Channel> {
    NodeClient::new(dial(port, bundle, expected).await.unwrap())
}

pub async fn certificates(port: u16, bundle: Bundle, expected: &str) -> NodeTlsClient<Channel> {
    NodeTlsClient::new(dial(port, bundle, expected).await.unwrap())
}
