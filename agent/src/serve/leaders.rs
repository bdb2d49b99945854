//! Refuses changes by a former leader. A controller that was paused may continue after another one has taken
//! over, and send calls that it decided on before.
//!
//! Calls of an engine have the number of its attachment, and replicas keep the generation. A stop of a
//! replica, a salvage, a disk and a start after an undeletion have neither. So the rule is the same for all
//! calls that change something.
//!
//! The number of a leader is the version of the Lease when it took that, which only rises. It is kept in
//! memory: the pause of a controller would have to outlast this process too.

use std::sync::{Mutex, PoisonError};

use shorthorn_api::{CLUSTER_HEADER, LEADER_HEADER};
use tonic::body::Body;
use tonic::codegen::http;

use crate::serve::error::NodeError;

/// The calls that change nothing. A call of a later version counts as a change.
const READING: [&str; 9] = [
    "GetNode",
    "GetNodeTls",
    "ListInstances",
    "WatchInstances",
    "ListDisks",
    "ListTrash",
    "InspectReplica",
    "ListDevices",
    "DiscoverDevices",
];

/// See the module.
#[derive(Debug, Default)]
pub struct Leaders {
    newest: Mutex<Newest>,
}

#[derive(Debug, Default)]
struct Newest {
    /// The cluster whose leaders are counted.
    cluster: Option<String>,
    number: u64,
}

impl Leaders {
    /// Admits or refuses the call. `owner` is the cluster of this node, if any. A call without a number comes
    /// from an earlier release, or from a controller with a store of its own: only one controller runs then.
    ///
    /// # Errors
    /// [`NodeError::Precondition`]: the call changes something, and a newer leader has called.
    pub fn admit(&self, request: &http::Request<Body>, owner: Option<&str>) -> Result<(), NodeError> {
        let text = |name: &str| request.headers().get(name).map(http::HeaderValue::to_str);
        let Some(number) = text(LEADER_HEADER) else { return Ok(()) };
        let number = number.ok().and_then(|number| number.parse().ok());
        let number: u64 = number
            .ok_or_else(|| NodeError::Invalid(format!("the header {LEADER_HEADER} is not a number")))?;
        if text(CLUSTER_HEADER).and_then(Result::ok).is_some_and(|cluster| Some(cluster) != owner) {
            // A controller of another cluster may ask for the owner. Its number does not count here.
            return Ok(());
        }
        let method = request.uri().path().rsplit('/').next().unwrap_or_default();
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        if newest.cluster.as_deref() != owner {
            // The node was handed over, and each cluster counts its own leaders.
            *newest = Newest { cluster: owner.map(str::to_owned), number: 0 };
        }
        if number < newest.number && !READING.contains(&method) {
            return Err(NodeError::Precondition(format!(
                "controller {number} is not the leader any more: controller {} is, and this node refuses \
                 the call. If the API server was restored from a backup, restart this agent",
                newest.number
            )));
        }
        newest.number = number.max(newest.number);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The calls that change something. A new method of a service belongs here or into [`READING`].
    const CHANGING: [&str; 20] = [
        "ReleaseNode",
        "StartReplica",
        "StartEngine",
        "StopInstance",
        "Grant",
        "UpdateReplicas",
        "UpgradeEngine",
        "Scrub",
        "FenceReplica",
        "SetRebuildLimits",
        "ExpandEngine",
        "AddDisk",
        "RemoveDisk",
        "DeleteReplica",
        "RestoreReplica",
        "RemoveTrash",
        "SalvageReplica",
        "CreateCertificateRequest",
        "SetCertificate",
        "SetTrust",
    ];

    fn call(leaders: &Leaders, method: &str, number: Option<&str>, cluster: &str) -> Result<(), NodeError> {
        let mut request = http::Request::builder().uri(format!("http://a/shorthorn.v1.Any/{method}"));
        request = request.header(CLUSTER_HEADER, "one");
        if let Some(number) = number {
            request = request.header(LEADER_HEADER, number);
        }
        leaders.admit(&request.body(Body::empty()).unwrap(), Some(cluster))
    }

    /// The methods of both services of an agent.
    fn methods() -> Vec<String> {
        let paths = shorthorn_api::method_paths().unwrap();
        let of = |service: &str| {
            let methods = paths.iter().filter_map(|path| path.strip_prefix(service)).map(str::to_owned);
            methods.collect::<Vec<_>>()
        };
        [of("/shorthorn.v1.Node/"), of("/shorthorn.v1.NodeTls/")].concat()
    }

    #[test]
    fn every_call_either_reads_or_changes_something() {
        let mut listed = [READING.to_vec(), CHANGING.to_vec()].concat();
        let mut methods = methods();
        listed.sort_unstable();
        methods.sort_unstable();
        assert_eq!(listed, methods);
    }

    #[test]
    fn an_older_leader_changes_nothing_after_a_newer_one_has_called() {
        let leaders = Leaders::default();
        call(&leaders, "DeleteReplica", Some("7"), "one").unwrap();
        call(&leaders, "WatchInstances", Some("12"), "one").unwrap();
        let methods = methods();
        for method in &methods {
            let of_older = call(&leaders, method, Some("7"), "one");
            if READING.contains(&method.as_str()) {
                of_older.unwrap();
            } else {
                let refused = of_older.unwrap_err().to_string();
                assert!(
                    refused.contains("controller 7") && refused.contains("restart this agent"),
                    "{refused}"
                );
            }
            call(&leaders, method, Some("12"), "one").unwrap();
            call(&leaders, method, None, "one").unwrap();
        }
        assert!(call(&leaders, "StopInstance", Some("11"), "one").is_err(), "that was no newer one");
        assert!(matches!(call(&leaders, "Grant", Some("x"), "one"), Err(NodeError::Invalid(_))));
    }

    #[test]
    fn each_cluster_counts_its_own_leaders() {
        let leaders = Leaders::default();
        call(&leaders, "StartEngine", Some("12"), "one").unwrap();
        // A controller of cluster one reads the claim, after the node was handed over.
        call(&leaders, "GetNode", Some("99"), "two").unwrap();
        let mut request = http::Request::builder().uri("http://a/shorthorn.v1.Node/StartEngine");
        request = request.header(CLUSTER_HEADER, "two").header(LEADER_HEADER, "3");
        leaders.admit(&request.body(Body::empty()).unwrap(), Some("two")).unwrap();
        assert_eq!(leaders.newest.lock().unwrap().number, 3);
    }
}
