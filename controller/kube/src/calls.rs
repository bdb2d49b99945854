//! Calls to the API server: each has a time limit, and an error that shows whether a retry can succeed.

use std::time::Duration;

use thiserror::Error;

/// The longest that the API server may take to answer. A slow etcd delays answers by seconds, and every
/// caller tries again.
pub const CALL_LIMIT: Duration = Duration::from_secs(15);

/// The reason why a call to the API server failed.
#[derive(Debug, Error)]
pub enum CallError {
    /// The time limit has passed without an answer. The call may be executed all the same.
    #[error("the API server does not answer within {} s", CALL_LIMIT.as_secs())]
    TooLate,
    /// The API server was unreachable, or has refused.
    #[error("{}", words(.0))]
    Api(#[from] kube::Error),
}

/// Returns the error down to the message of the system.
fn words(error: &kube::Error) -> String {
    if let kube::Error::Api(status) = error {
        return format!("the API server refuses: {} ({})", status.message, status.code);
    }
    let mut innermost: &dyn std::error::Error = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    format!("the API server cannot be reached: {innermost}")
}

/// Waits for the answer, but not for ever.
///
/// # Errors
/// [`CallError`].
pub async fn bounded<T>(call: impl Future<Output = kube::Result<T>>) -> Result<T, CallError> {
    match tokio::time::timeout(CALL_LIMIT, call).await {
        Ok(result) => Ok(result?),
        Err(_) => Err(CallError::TooLate),
    }
}

/// Returns true if the API server answered with that status.
#[must_use]
pub fn is_code(error: &CallError, code: u16) -> bool {
    matches!(error, CallError::Api(kube::Error::Api(status)) if status.code == code)
}
