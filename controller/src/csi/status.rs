//! Errors of requests and of the store as CSI codes.

use shorthorn_controller_core::csi::{SizeError, SizedError};
use shorthorn_controller_core::requests::RequestError;
use shorthorn_csi::CsiError;

use crate::store::{ChangeError, ObjectStoreError};

/// Failures as [`CsiError`].
pub(super) trait IntoCsiError {
    fn into_csi_error(self) -> CsiError;
}

impl IntoCsiError for RequestError {
    fn into_csi_error(self) -> CsiError {
        let message = self.to_string();
        match self {
            // No volume and no node has such a name.
            RequestError::VolumeName(_)
            | RequestError::NodeName(_)
            | RequestError::NoVolume(_)
            | RequestError::NoNode(_)
            | RequestError::NothingToUndelete(_)
            | RequestError::HasReplicas(_)
            | RequestError::NotInTrash { .. }
            | RequestError::NoOrphan { .. }
            | RequestError::NoReplica { .. }
            | RequestError::NoDisk { .. } => CsiError::NotFound(message),
            RequestError::Exists { .. } => CsiError::Exists(message),
            // Kubernetes asks again until it is repaired.
            RequestError::LeftOut(_) => CsiError::Unavailable(message),
            // The deletion is in progress, and needs no operator.
            RequestError::Deleting(_) => CsiError::Aborted(message),
            RequestError::AttachedElsewhere { .. }
            | RequestError::NotServed { .. }
            | RequestError::NoSuchReplica(_)
            | RequestError::IsPersistentVolume { .. }
            | RequestError::Shrinks { .. }
            | RequestError::HoldsNothing(_)
            | RequestError::NoAttach { .. }
            | RequestError::IsServed(_)
            | RequestError::IsAttached(_)
            | RequestError::Published { .. }
            | RequestError::NodeAnswers(_)
            | RequestError::NodeNotCordoned(_)
            | RequestError::NodeHasEngines { .. }
            | RequestError::NodeHasLast { .. }
            | RequestError::NodeHasMajority { .. }
            | RequestError::DiskHasReplicas { .. }
            | RequestError::DiskIsUsable { .. }
            | RequestError::DiskHasLast { .. }
            | RequestError::DiskHasMajority { .. }
            | RequestError::DiskHasTrash { .. }
            | RequestError::NeverAttached(_)
            | RequestError::NotAttached(_) => CsiError::Precondition(message),
            RequestError::NoRoom { .. } | RequestError::NodeFull { .. } => CsiError::Exhausted(message),
            RequestError::Size(_) => CsiError::OutOfRange(message),
            RequestError::Frontend(_)
            | RequestError::Label(_)
            | RequestError::DataLocality(_)
            | RequestError::Replicas(_)
            | RequestError::DiskPath(_)
            | RequestError::Share(_)
            | RequestError::NoDevice(_)
            | RequestError::OtherName { .. }
            | RequestError::NodeNotConfirmed(_)
            | RequestError::NotConfirmed(_) => CsiError::Invalid(message),
        }
    }
}

impl IntoCsiError for SizeError {
    fn into_csi_error(self) -> CsiError {
        CsiError::OutOfRange(format!("capacity_range: {self}"))
    }
}

impl IntoCsiError for SizedError {
    fn into_csi_error(self) -> CsiError {
        match self {
            SizedError::Size(error) => error.into_csi_error(),
            SizedError::Request(error) => error.into_csi_error(),
        }
    }
}

impl<E: IntoCsiError> IntoCsiError for ChangeError<E> {
    fn into_csi_error(self) -> CsiError {
        match self {
            ChangeError::Refused(error) => error.into_csi_error(),
            ChangeError::Store(error @ ObjectStoreError::Conflict { .. }) => {
                CsiError::Aborted(format!("too many changes at once: {error}; ask again"))
            }
            ChangeError::Store(error) => CsiError::Unavailable(error.to_string()),
        }
    }
}
