//! The newest leader that has called. A controller that was paused may wake after another one has taken
//! over, and send a call that it decided on before: it deletes nothing here any more.
//!
//! The number of a leader is the version of the Lease when it took that, which only rises. It is kept in
//! memory: the pause of a controller would have to outlast this process too.

use std::sync::{Mutex, PoisonError};

use shorthorn_api::LEADER_HEADER;
use tonic::body::Body;
use tonic::codegen::http;

use crate::serve::error::NodeError;

/// The calls that delete data.
const DELETING: [&str; 2] = ["DeleteReplica", "RemoveTrash"];

/// See the module.
#[derive(Debug, Default)]
pub struct Leaders {
    newest: Mutex<u64>,
}

impl Leaders {
    /// Lets the call through, or says why not. A call without a number is of an earlier release, or of a
    /// controller with a store of its own, of which there is one at a time.
    ///
    /// # Errors
    /// [`NodeError::Precondition`]: it deletes data, and a newer leader has called.
    pub fn admit(&self, request: &http::Request<Body>) -> Result<(), NodeError> {
        let Some(number) = request.headers().get(LEADER_HEADER) else { return Ok(()) };
        let number = number.to_str().ok().and_then(|number| number.parse().ok());
        let number: u64 =
            number.ok_or_else(|| NodeError::Invalid(format!("the header {LEADER_HEADER} is no number")))?;
        let method = request.uri().path().rsplit('/').next().unwrap_or_default();
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        if number < *newest && DELETING.contains(&method) {
            return Err(NodeError::Precondition(format!(
                "controller {number} is not the leader any more, as {newest} has called: it deletes nothing. If the API server \
                 was restored from a backup, restart this agent"
            )));
        }
        *newest = number.max(*newest);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_leader_deletes_nothing_after_a_newer_one_has_called() {
        let leaders = Leaders::default();
        let call = |method: &str, number: Option<&str>| {
            let mut request = http::Request::builder().uri(format!("http://a/shorthorn.v1.Node/{method}"));
            if let Some(number) = number {
                request = request.header(LEADER_HEADER, number);
            }
            leaders.admit(&request.body(Body::empty()).unwrap())
        };
        call("DeleteReplica", Some("7")).unwrap();
        call("WatchInstances", Some("12")).unwrap();
        for method in DELETING {
            let refused = call(method, Some("7")).unwrap_err().to_string();
            assert!(refused.contains("controller 7") && refused.contains("restart this agent"), "{refused}");
            call(method, Some("12")).unwrap();
            call(method, None).unwrap();
        }
        call("StopInstance", Some("7")).unwrap();
        assert!(call("DeleteReplica", Some("7")).is_err(), "that was no newer one");
        assert!(matches!(call("DeleteReplica", Some("x")), Err(NodeError::Invalid(_))));
    }
}
