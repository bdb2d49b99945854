//! Claims the node for one cluster. The agent durably remembers the first cluster whose controller calls.
//! Controllers of other clusters may only ask for the claim. Two controllers that drive one node would delete
//! each other's instances.
//!
//! A call without the name of a cluster comes from a controller of an earlier release, and the agent accepts
//! it. With TLS, the caller's certificate names the cluster of the call.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use serde::{Deserialize, Serialize};
use shorthorn_api::CLUSTER_HEADER;
use shorthorn_control::{Unknown, load_spec, store_spec};
use shorthorn_pki::TlsPeer;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::NamedService;

use crate::serve::blocking;
use crate::serve::error::NodeError;
use crate::serve::leaders::Leaders;

/// The longest name of a cluster.
const NAME_MAX_BYTES: usize = 128;
/// The calls that every controller may make: reading the claim, and changing it.
const FOR_ALL: [&str; 2] = ["GetNode", "ReleaseNode"];

/// The cluster that this node belongs to.
#[derive(Debug)]
pub struct NodeClaim {
    file: PathBuf,
    owner: Mutex<Option<String>>,
}

#[derive(Debug, Serialize, Deserialize)]
struct StoredClaim {
    cluster: String,
    /// Fields of a later version.
    #[serde(flatten)]
    unknown: Unknown,
}

impl NodeClaim {
    /// Reads the claim that an earlier agent has stored.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn open(state_dir: &Path) -> Result<NodeClaim, NodeError> {
        let file = state_dir.join("cluster.json");
        let owner = if file.try_exists().map_err(NodeError::at(&file))? {
            Some(load_spec::<StoredClaim>(&file)?.cluster)
        } else {
            None
        };
        Ok(NodeClaim { file, owner: Mutex::new(owner) })
    }

    fn lock(&self) -> MutexGuard<'_, Option<String>> {
        self.owner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the cluster that it belongs to, if it belongs to one yet.
    pub fn owner(&self) -> Option<String> {
        self.lock().clone()
    }

    /// Lets a call of the controller of `cluster` through, or says why not. The first one makes this node its
    /// own.
    ///
    /// # Errors
    /// [`NodeError::Precondition`] if it belongs to another cluster.
    pub fn admit(&self, cluster: &str) -> Result<(), NodeError> {
        let mut owner = self.lock();
        match owner.as_deref() {
            Some(owner) if owner == cluster => Ok(()),
            Some(owner) => Err(NodeError::Precondition(format!(
                "this node belongs to cluster {owner}, and the calling controller to {cluster}. Stop the \
                 controller that should not have the node, then run shorthornctl node release with the other \
                 one"
            ))),
            None => {
                self.keep(cluster)?;
                tracing::info!(cluster, "this node now belongs to a cluster");
                *owner = Some(cluster.to_owned());
                Ok(())
            }
        }
    }

    /// Makes the node another cluster's. `from` is the former cluster according to the caller.
    ///
    /// # Errors
    /// [`NodeError::Precondition`] if it does not belong to `from`.
    pub fn hand_over(&self, from: &str, to: &str) -> Result<(), NodeError> {
        let mut owner = self.lock();
        let present = owner.clone().unwrap_or_default();
        if present == to {
            return Ok(());
        }
        if present != from {
            return Err(NodeError::Precondition(format!(
                "this node belongs to cluster {present:?}, not to {from:?}: only its current cluster can \
                 hand it over"
            )));
        }
        self.keep(to)?;
        tracing::warn!(from, to, "this node now belongs to another cluster");
        *owner = Some(to.to_owned());
        Ok(())
    }

    fn keep(&self, cluster: &str) -> Result<(), NodeError> {
        let is_plain = |byte: u8| byte.is_ascii_graphic();
        if cluster.is_empty() || cluster.len() > NAME_MAX_BYTES || !cluster.bytes().all(is_plain) {
            return Err(NodeError::Invalid(format!(
                "a cluster has a name of 1 to {NAME_MAX_BYTES} letters, digits and signs, without spaces"
            )));
        }
        Ok(store_spec(&self.file, &StoredClaim { cluster: cluster.to_owned(), unknown: Unknown::default() })?)
    }
}

/// A service that only the cluster of this node may use.
#[derive(Clone, Debug)]
pub struct ClaimedService<S> {
    service: S,
    claim: Arc<NodeClaim>,
    leaders: Arc<Leaders>,
}

impl<S> ClaimedService<S> {
    /// Returns `service` behind `claim`. All services of an agent share `leaders`: a leader that has called
    /// one of them is the newest for the others too.
    pub fn new(service: S, claim: Arc<NodeClaim>, leaders: Arc<Leaders>) -> ClaimedService<S> {
        ClaimedService { service, claim, leaders }
    }
}

impl<S: NamedService> NamedService for ClaimedService<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<http::Request<Body>> for ClaimedService<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>> + Clone + Send + 'static,
    S::Future: Send,
{
    type Response = http::Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<Self::Response, S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let cluster = cluster_of(&request);
        // The polled one is moved into the call.
        let waiting = self.service.clone();
        let mut service = std::mem::replace(&mut self.service, waiting);
        let (claim, leaders) = (Arc::clone(&self.claim), Arc::clone(&self.leaders));
        let admitting = Arc::clone(&claim);
        Box::pin(async move {
            let admitted = match cluster {
                None => Ok(()),
                Some(Ok(cluster)) if claim.owner().as_ref() == Some(&cluster) => Ok(()),
                Some(Ok(cluster)) => blocking(move || claim.admit(&cluster)).await,
                Some(Err(error)) => Err(error),
            };
            let owner = admitting.owner();
            if let Err(error) = admitted.and_then(|()| leaders.admit(&request, owner.as_deref())) {
                return Ok(Status::from(error).into_http());
            }
            service.call(request).await
        })
    }
}

/// Returns the cluster that must match for this call; none if every caller may make it.
fn cluster_of(request: &http::Request<Body>) -> Option<Result<String, NodeError>> {
    let method = request.uri().path().rsplit('/').next().unwrap_or_default();
    let unreadable = |_| NodeError::Invalid(format!("the header {CLUSTER_HEADER} is not text"));
    let header = request.headers().get(CLUSTER_HEADER);
    let header = match header.map(|header| header.to_str().map_err(unreadable)).transpose() {
        Ok(header) => header,
        Err(error) => return Some(Err(error)),
    };
    let certificate = request.extensions().get::<TlsPeer>().and_then(|peer| peer.certificate.as_ref());
    let proven = certificate.map(|certificate| certificate.name.cluster.as_str());
    if let (Some(proven), Some(header)) = (proven, header.filter(|header| proven != Some(*header))) {
        return Some(Err(NodeError::Precondition(format!(
            "the header {CLUSTER_HEADER} says {header:?}, and the certificate of the caller is of cluster \
             {proven:?}"
        ))));
    }
    if FOR_ALL.contains(&method) {
        return None;
    }
    Some(Ok(proven.or(header)?.to_owned()))
}

#[cfg(test)]
mod tests {
    use shorthorn_pki::Certificate;

    use super::*;

    #[test]
    fn the_first_cluster_has_the_node_until_it_is_handed_over() {
        let dir = tempfile::tempdir().unwrap();
        let claim = NodeClaim::open(dir.path()).unwrap();
        assert_eq!(claim.owner(), None);
        claim.admit("one").unwrap();
        claim.admit("one").unwrap();
        let refused = claim.admit("two").unwrap_err().to_string();
        assert!(refused.contains("belongs to cluster one") && refused.contains("node release"), "{refused}");
        drop(claim);
        let claim = NodeClaim::open(dir.path()).unwrap();
        assert!(matches!(claim.admit("two"), Err(NodeError::Precondition(_))), "the next agent knows it");

        let wrong = claim.hand_over("three", "two").unwrap_err().to_string();
        assert!(wrong.contains("\"one\""), "{wrong}");
        claim.hand_over("one", "two").unwrap();
        claim.hand_over("one", "two").unwrap();
        assert!(claim.admit("one").is_err());
        NodeClaim::open(dir.path()).unwrap().admit("two").unwrap();
    }

    #[test]
    fn a_cluster_has_a_name() {
        let dir = tempfile::tempdir().unwrap();
        let claim = NodeClaim::open(dir.path()).unwrap();
        for bad in ["", "a b", &"x".repeat(NAME_MAX_BYTES + 1)] {
            assert!(matches!(claim.admit(bad), Err(NodeError::Invalid(_))), "{bad:?}");
        }
        assert_eq!(claim.owner(), None);
    }

    fn asked(method: &str, cluster: Option<&str>) -> Option<Result<String, NodeError>> {
        let mut request = http::Request::builder().uri(format!("http://a/shorthorn.v1.Node/{method}"));
        if let Some(cluster) = cluster {
            request = request.header(CLUSTER_HEADER, cluster);
        }
        cluster_of(&request.body(Body::empty()).unwrap())
    }

    #[test]
    fn any_cluster_may_query_and_release_the_node() {
        assert!(asked("GetNode", Some("one")).is_none());
        assert!(asked("ReleaseNode", Some("one")).is_none());
        assert_eq!(asked("StopInstance", Some("one")).unwrap().unwrap(), "one");
        assert!(asked("StopInstance", None).is_none(), "a controller of an earlier release says none");
    }

    #[test]
    fn a_certificate_says_the_cluster_of_a_call() {
        let certificate = Certificate {
            serial: "01".parse().unwrap(),
            name: "shorthorn://one/controller".parse().unwrap(),
            not_before: 0,
            not_after: 1,
            public: Vec::new(),
        };
        let address = "10.0.0.1:1".parse().unwrap();
        let peer = TlsPeer { address, certificate: Some(Arc::new(certificate)) };
        let asked = |method: &str, header: Option<&str>| {
            let mut request = http::Request::builder().uri(format!("http://a/shorthorn.v1.Node/{method}"));
            if let Some(header) = header {
                request = request.header(CLUSTER_HEADER, header);
            }
            let mut request = request.body(Body::empty()).unwrap();
            request.extensions_mut().insert(peer.clone());
            cluster_of(&request)
        };
        assert_eq!(asked("StopInstance", None).unwrap().unwrap(), "one");
        assert_eq!(asked("StopInstance", Some("one")).unwrap().unwrap(), "one");
        assert!(asked("GetNode", Some("one")).is_none());
        for method in ["StopInstance", "ReleaseNode"] {
            assert!(matches!(asked(method, Some("two")), Some(Err(NodeError::Precondition(_)))), "{method}");
        }
    }
}
