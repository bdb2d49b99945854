//! Random numbers of the system.

use shorthorn_controller_core::objects::{SECRET_BYTES, Secret};
use shorthorn_types::hex;

/// The number of random bytes in the name of a cluster.
const CLUSTER_BYTES: usize = 16;

/// Returns an array filled by the random numbers of the system.
///
/// # Errors
/// The system has no random numbers.
pub fn random_bytes<const N: usize>() -> Result<[u8; N], getrandom::Error> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

/// Returns the name of a new cluster.
///
/// # Errors
/// The system has no random numbers.
pub fn new_cluster() -> Result<String, getrandom::Error> {
    Ok(hex(&random_bytes::<CLUSTER_BYTES>()?))
}

/// Returns the secret of a new volume.
///
/// # Errors
/// The system has no random numbers.
pub fn new_secret() -> Result<Secret, getrandom::Error> {
    Ok(Secret::new(random_bytes::<SECRET_BYTES>()?))
}
