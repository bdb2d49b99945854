//! Random numbers of the system.

use shorthorn_controller_core::objects::{SECRET_BYTES, Secret};

/// The secret of a new volume.
///
/// # Errors
/// The system has no random numbers.
pub fn new_secret() -> Result<Secret, getrandom::Error> {
    let mut secret = [0; SECRET_BYTES];
    getrandom::fill(&mut secret)?;
    Ok(Secret::new(secret))
}
