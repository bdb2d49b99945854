//! The API server of Kubernetes, as the controller and shorthornctl see it.
//!
//! - [`client`]: the way to the API server, by a kubeconfig or as a pod.
//! - [`calls`]: calls with a time limit, and errors that show whether a retry can succeed.
//! - [`crds`]: the definitions of the custom resources.
//!
//! Reconcilers, stores and watches are in the controller: this crate knows only names.
#![forbid(unsafe_code)]

pub mod calls;
pub mod client;
pub mod crds;

use kube::core::ApiResource;
use shorthorn_objects::Kind;

pub use calls::{CallError, bounded, is_code};
pub use client::{ApiServerError, client_of};

/// The default namespace of the controller and the custom resources.
pub const DEFAULT_NAMESPACE: &str = "shorthorn-system";
/// The port of the API in a pod, for `kubectl port-forward` and shorthornctl.
pub const API_PORT: u16 = 9520;
/// The name of the Lease that the leading controller holds.
pub const LEASE_NAME: &str = "shorthorn-controller";
/// The API group of the custom resources.
pub const GROUP: &str = "shorthorn.io";
/// The version of the custom resources.
pub const VERSION: &str = "v1alpha1";
/// The label of engines and replicas with the name of their volume.
pub const VOLUME_LABEL: &str = "shorthorn.io/volume";
/// The field manager of all writes of the controller.
pub const FIELD_MANAGER: &str = "shorthorn-controller";
/// All kinds, in an order in which referring ones come first.
pub const KINDS: [Kind; 4] = [Kind::Node, Kind::Replica, Kind::Engine, Kind::Volume];

/// Returns the name of the kind in objects.
#[must_use]
pub const fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Volume => "Volume",
        Kind::Engine => "Engine",
        Kind::Replica => "Replica",
        Kind::Node => "Node",
    }
}

/// Returns the name of the kind in paths.
#[must_use]
pub fn plural(kind: Kind) -> String {
    format!("{}s", kind.as_str())
}

/// Describes a kind for requests of the dynamic client.
#[must_use]
pub fn resource(kind: Kind) -> ApiResource {
    ApiResource {
        group: GROUP.to_owned(),
        version: VERSION.to_owned(),
        api_version: format!("{GROUP}/{VERSION}"),
        kind: kind_name(kind).to_owned(),
        plural: plural(kind),
    }
}
