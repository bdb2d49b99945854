//! Errors of this crate as gRPC codes.

use shorthorn_csi::CsiError;

use crate::command::CommandError;
use crate::volumes::VolumesError;

impl From<CommandError> for CsiError {
    fn from(error: CommandError) -> CsiError {
        CsiError::Internal(error.to_string())
    }
}

impl From<VolumesError> for CsiError {
    fn from(error: VolumesError) -> CsiError {
        let message = error.to_string();
        match error {
            VolumesError::NotFound(_) => CsiError::NotFound(message),
            VolumesError::Unavailable(_) => CsiError::Unavailable(message),
        }
    }
}
