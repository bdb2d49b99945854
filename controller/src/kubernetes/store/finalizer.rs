//! The finalizer of objects that represent data.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use shorthorn_controller_core::objects::Kind;

/// Keeps an object with data until the reconcilers have deleted that.
pub const FINALIZER: &str = "shorthorn.io/data";

/// Returns true if objects of that kind represent data, and so have a finalizer.
pub const fn has_data(kind: Kind) -> bool {
    matches!(kind, Kind::Volume | Kind::Engine | Kind::Replica)
}

/// Returns true if Kubernetes keeps the object until its data is deleted.
pub fn is_held(kind: Kind, metadata: &ObjectMeta) -> bool {
    !has_data(kind)
        || metadata
            .finalizers
            .as_ref()
            .is_some_and(|finalizers| finalizers.iter().any(|one| one == FINALIZER))
}
