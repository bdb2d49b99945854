//! Logs a line for each call, also if its caller is gone.

use std::time::Instant;

use shorthorn_csi::CsiError;
use tonic::{Code, Response, Status};

use crate::counters::Metrics;

/// The maximum length of a logged name.
const NAME_MAX_CHARS: usize = 128;

/// A running call; the outcome is logged when this is dropped.
#[derive(Debug)]
pub(super) struct CsiCall {
    metrics: Metrics,
    method: &'static str,
    volume: String,
    node: String,
    started: Instant,
    /// None: the caller did not wait for it.
    ended: Option<(Code, String)>,
}

impl CsiCall {
    /// Creates a call of `method` about a volume and a node, which may be empty.
    pub(super) fn new(metrics: &Metrics, method: &'static str, volume: &str, node: &str) -> CsiCall {
        let short = |name: &str| name.chars().take(NAME_MAX_CHARS).collect();
        let (metrics, started) = (metrics.clone(), Instant::now());
        CsiCall { metrics, method, volume: short(volume), node: short(node), started, ended: None }
    }

    /// Runs the call and returns its answer, which is also recorded for the log.
    pub(super) async fn answer<T>(
        mut self,
        work: impl Future<Output = Result<T, CsiError>>,
    ) -> Result<Response<T>, Status> {
        let answer = work.await.map(Response::new).map_err(Status::from);
        self.ended = Some(match &answer {
            Ok(_) => (Code::Ok, String::new()),
            Err(status) => (status.code(), status.message().to_owned()),
        });
        answer
    }
}

impl Drop for CsiCall {
    fn drop(&mut self) {
        let CsiCall { metrics, method, volume, node, started, ended } = self;
        let (volume, node) = (volume.as_str(), node.as_str());
        let took = started.elapsed();
        let code = ended.as_ref().map_or(Code::Cancelled, |(code, _)| *code);
        metrics.answered_csi(method, &format!("{code:?}"), took);
        let duration_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        let error = match ended {
            Some((Code::Ok, _)) => {
                tracing::info!(method, volume, node, code = "Ok", duration_ms, "call");
                return;
            }
            Some((_, error)) => error.as_str(),
            None => "the caller disconnected",
        };
        tracing::info!(method, volume, node, code = ?code, duration_ms, error, "call");
    }
}
