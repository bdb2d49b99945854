//! Adds the cluster to calls to agents, and checks whether a node belongs to it.

use shorthorn_api::{CLUSTER_HEADER, LEADER_HEADER, v1};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::{Request, Status};

/// Says with every call for which cluster it is, and of which leader.
#[derive(Clone, Debug)]
pub(crate) struct OfCluster {
    cluster: Option<MetadataValue<Ascii>>,
    leader: Option<u64>,
}

impl OfCluster {
    /// For the cluster of that name, which is one that a store has drawn.
    pub(super) fn new(cluster: &str, leader: Option<u64>) -> OfCluster {
        OfCluster { cluster: cluster.parse().ok(), leader }
    }
}

impl Interceptor for OfCluster {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(cluster) = &self.cluster {
            request.metadata_mut().insert(CLUSTER_HEADER, cluster.clone());
        }
        if let Some(leader) = self.leader {
            request.metadata_mut().insert(LEADER_HEADER, leader.into());
        }
        Ok(request)
    }
}

/// Returns an error unless the node belongs to this cluster, or is free.
pub(super) fn check(info: &v1::NodeInfo, cluster: &str) -> Result<(), Status> {
    if info.cluster.is_empty() || info.cluster == cluster {
        return Ok(());
    }
    Err(Status::failed_precondition(format!(
        "the node belongs to cluster {}, and this controller to {cluster}: this controller does not use the \
         node. If the other cluster no longer needs it, stop its controller, then run shorthornctl node \
         release NODE --cluster {}",
        info.cluster, info.cluster
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_names_its_cluster_and_leader() {
        let request = OfCluster::new("one", None).call(Request::new(())).unwrap();
        assert_eq!(request.metadata().get(CLUSTER_HEADER).unwrap(), "one");
        assert!(request.metadata().get(LEADER_HEADER).is_none());
        let request = OfCluster::new("one", Some(7)).call(Request::new(())).unwrap();
        assert_eq!(request.metadata().get(LEADER_HEADER).unwrap(), "7");
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
