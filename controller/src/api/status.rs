//! Converts errors to gRPC statuses; node.proto defines the meaning of each code.

use shorthorn_controller_core::requests::RequestError;
use tonic::{Code, Status};

use crate::agents::AgentCallError;
use crate::store::ObjectStoreError;

pub(super) fn of_request(error: &RequestError) -> Status {
    let code = match error {
        RequestError::VolumeName(_)
        | RequestError::NodeName(_)
        | RequestError::Frontend(_)
        | RequestError::Label(_)
        | RequestError::DataLocality(_)
        | RequestError::Size(_)
        | RequestError::DiskPath(_)
        | RequestError::Share(_)
        | RequestError::OtherName { .. }
        | RequestError::NotConfirmed(_)
        | RequestError::NodeNotConfirmed(_)
        | RequestError::Replicas(_) => Code::InvalidArgument,
        RequestError::NoVolume(_)
        | RequestError::NoNode(_)
        | RequestError::NothingToUndelete(_)
        | RequestError::HasReplicas(_)
        | RequestError::NotInTrash { .. }
        | RequestError::NoOrphan { .. }
        | RequestError::NoReplica { .. }
        | RequestError::NoSuchReplica(_)
        | RequestError::NoDisk { .. } => Code::NotFound,
        RequestError::Exists { .. } => Code::AlreadyExists,
        RequestError::NoRoom { .. } | RequestError::NodeFull { .. } => Code::ResourceExhausted,
        RequestError::AttachedElsewhere { .. }
        | RequestError::Deleting(_)
        | RequestError::LeftOut(_)
        | RequestError::IsPersistentVolume { .. }
        | RequestError::NotServed { .. }
        | RequestError::Shrinks { .. }
        | RequestError::IsServed(_)
        | RequestError::HoldsNothing(_)
        | RequestError::NoAttach { .. }
        | RequestError::IsAttached(_)
        | RequestError::NoDevice(_)
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
        | RequestError::NotAttached(_) => Code::FailedPrecondition,
    };
    Status::new(code, error.to_string())
}

pub(super) fn of_store(error: &ObjectStoreError) -> Status {
    let code = match error {
        ObjectStoreError::Refused { .. } => Code::InvalidArgument,
        _ => Code::Unavailable,
    };
    Status::new(code, error.to_string())
}

pub(super) fn of_call(error: &AgentCallError) -> Status {
    Status::new(error.code(), error.to_string())
}
