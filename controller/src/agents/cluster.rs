//! Which cluster a call to an agent is for, and whether a node belongs to it.

use shorthorn_api::{CLUSTER_HEADER, v1};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::{Request, Status};

/// Says with every call for which cluster it is.
#[derive(Clone, Debug)]
pub(super) struct OfCluster(Option<MetadataValue<Ascii>>);

impl OfCluster {
    /// For the cluster of that name, which is one that a store has drawn.
    pub(super) fn new(cluster: &str) -> OfCluster {
        OfCluster(cluster.parse().ok())
    }
}

impl Interceptor for OfCluster {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(cluster) = &self.0 {
            request.metadata_mut().insert(CLUSTER_HEADER, cluster.clone());
        }
        Ok(request)
    }
}

/// Whether the node is ours, or may become so.
pub(super) fn check(info: &v1::NodeInfo, cluster: &str) -> Result<(), Status> {
    if info.cluster.is_empty() || info.cluster == cluster {
        return Ok(());
    }
    Err(Status::failed_precondition(format!(
        "it belongs to cluster {}, and this controller to {cluster}: this controller does not use the node. \
         If the other cluster no longer needs it, stop its controller, then \
         run shorthornctl node release NODE --cluster {}",
        info.cluster, info.cluster
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_says_which_cluster_it_is_for() {
        let request = OfCluster::new("one").call(Request::new(())).unwrap();
        assert_eq!(request.metadata().get(CLUSTER_HEADER).unwrap(), "one");
    }

    #[test]
    fn a_node_of_another_cluster_is_left_alone() {
        let info = |cluster: &str| v1::NodeInfo { cluster: cluster.into(), ..v1::NodeInfo::default() };
        check(&info("one"), "one").unwrap();
        // New, or an agent of an earlier release.
        check(&info(""), "one").unwrap();
        let error = check(&info("two"), "one").unwrap_err();
        assert!(error.message().contains("--cluster two"), "{error}");
    }
}
