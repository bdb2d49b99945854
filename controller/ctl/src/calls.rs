//! Calls to the controller with a time limit.

use std::time::Duration;

/// The longest that a call may take: the controller answers at once, but an agent that prepares a disk
/// stands behind some calls.
const CALL_LIMIT: Duration = Duration::from_secs(30);

/// Returns the request with the time limit of a call.
pub(super) fn limited<T>(message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.set_timeout(CALL_LIMIT);
    request
}
