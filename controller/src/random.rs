//! Random numbers of the system.

use shorthorn_controller_core::objects::{SECRET_BYTES, Secret};
use shorthorn_types::hex;

/// The number of random bytes in the name of a cluster.
const CLUSTER_BYTES: usize = 16;

/// Returns the name of a new cluster.
///
/// # Errors
/// The system has no random numbers.
pub fn new_cluster() -> Result<String, getrandom::Error> {
    let mut bytes = [0; CLUSTER_BYTES];
    getrandom::fill(&mut bytes)?;
    Ok(hex(&bytes))
}

/// Returns the secret of a new volume.
///
/// # Errors
/// The system has no random numbers.
pub fn new_secret() -> Result<Secret, getrandom::Error> {
    let mut secret = [0; SECRET_BYTES];
    getrandom::fill(&mut secret)?;
    Ok(Secret::new(secret))
}
