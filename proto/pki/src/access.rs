//! Table of the roles that may call each method. A method without an entry is refused.

use std::task::{Context, Poll};

use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tower_layer::Layer;

use crate::certificate_check::TlsPeer;
use crate::role::Role;

/// The kinds of callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoleKind {
    /// Callers without a certificate too.
    Anyone,
    /// Callers with the certificate of a controller.
    Controller,
    /// Callers with the certificate of an administrator.
    Admin,
    /// Agents. No method permits them: an attacker on one node gets no hold of others.
    Node,
}

const ANYONE: &[RoleKind] = &[RoleKind::Anyone];
const CONTROLLER: &[RoleKind] = &[RoleKind::Controller];
const ADMIN: &[RoleKind] = &[RoleKind::Admin];

/// The permitted callers of each method, by its path.
pub const TABLE: &[(&str, &[RoleKind])] = &[
    ("/shorthorn.v1.Node/GetNode", CONTROLLER),
    ("/shorthorn.v1.Node/ReleaseNode", CONTROLLER),
    ("/shorthorn.v1.Node/ListInstances", CONTROLLER),
    ("/shorthorn.v1.Node/StartReplica", CONTROLLER),
    ("/shorthorn.v1.Node/StartEngine", CONTROLLER),
    ("/shorthorn.v1.Node/StopInstance", CONTROLLER),
    ("/shorthorn.v1.Node/Grant", CONTROLLER),
    ("/shorthorn.v1.Node/UpdateReplicas", CONTROLLER),
    ("/shorthorn.v1.Node/UpgradeEngine", CONTROLLER),
    ("/shorthorn.v1.Node/Scrub", CONTROLLER),
    ("/shorthorn.v1.Node/FenceReplica", CONTROLLER),
    ("/shorthorn.v1.Node/SetRebuildLimits", CONTROLLER),
    ("/shorthorn.v1.Node/ExpandEngine", CONTROLLER),
    ("/shorthorn.v1.Node/WatchInstances", CONTROLLER),
    ("/shorthorn.v1.Node/ListDisks", CONTROLLER),
    ("/shorthorn.v1.Node/AddDisk", CONTROLLER),
    ("/shorthorn.v1.Node/RemoveDisk", CONTROLLER),
    ("/shorthorn.v1.Node/DeleteReplica", CONTROLLER),
    ("/shorthorn.v1.Node/ListTrash", CONTROLLER),
    ("/shorthorn.v1.Node/RestoreReplica", CONTROLLER),
    ("/shorthorn.v1.Node/RemoveTrash", CONTROLLER),
    ("/shorthorn.v1.Node/InspectReplica", CONTROLLER),
    ("/shorthorn.v1.Node/SalvageReplica", CONTROLLER),
    ("/shorthorn.v1.Node/ListDevices", CONTROLLER),
    ("/shorthorn.v1.Node/DiscoverDevices", CONTROLLER),
    ("/shorthorn.v1.NodeTls/GetNodeTls", CONTROLLER),
    ("/shorthorn.v1.NodeTls/CreateCertificateRequest", CONTROLLER),
    ("/shorthorn.v1.NodeTls/SetCertificate", CONTROLLER),
    ("/shorthorn.v1.NodeTls/SetTrust", CONTROLLER),
    ("/shorthorn.v1.Controller/CreateVolume", ADMIN),
    ("/shorthorn.v1.Controller/GetVolume", ADMIN),
    ("/shorthorn.v1.Controller/ListVolumes", ADMIN),
    ("/shorthorn.v1.Controller/AttachVolume", ADMIN),
    ("/shorthorn.v1.Controller/DetachVolume", ADMIN),
    ("/shorthorn.v1.Controller/DeleteVolume", ADMIN),
    ("/shorthorn.v1.Controller/ListTrash", ADMIN),
    ("/shorthorn.v1.Controller/UndeleteVolume", ADMIN),
    ("/shorthorn.v1.Controller/RemoveTrash", ADMIN),
    ("/shorthorn.v1.Controller/WatchVolume", ADMIN),
    ("/shorthorn.v1.Controller/ExplainVolume", ADMIN),
    ("/shorthorn.v1.Controller/SetNumberOfReplicas", ADMIN),
    ("/shorthorn.v1.Controller/ExpandVolume", ADMIN),
    ("/shorthorn.v1.Controller/SetVolumeRebuildLimits", ADMIN),
    ("/shorthorn.v1.Controller/ScrubVolume", ADMIN),
    ("/shorthorn.v1.Controller/UpgradeVolumeEngine", ADMIN),
    ("/shorthorn.v1.Controller/InspectReplicas", ADMIN),
    ("/shorthorn.v1.Controller/SalvageVolume", ADMIN),
    ("/shorthorn.v1.Controller/ListReplicas", ADMIN),
    ("/shorthorn.v1.Controller/ListNodes", ADMIN),
    ("/shorthorn.v1.Controller/AddDisk", ADMIN),
    ("/shorthorn.v1.Controller/DiscoverDevices", ADMIN),
    ("/shorthorn.v1.Controller/RemoveDisk", ADMIN),
    ("/shorthorn.v1.Controller/ListOrphans", ADMIN),
    ("/shorthorn.v1.Controller/DeleteOrphan", ADMIN),
    ("/shorthorn.v1.Controller/SetNode", ADMIN),
    ("/shorthorn.v1.Controller/SetDisk", ADMIN),
    ("/shorthorn.v1.Controller/DeleteNode", ADMIN),
    ("/shorthorn.v1.Controller/TakeNode", ADMIN),
    ("/shorthorn.v1.Controller/GetDrain", ADMIN),
    ("/shorthorn.v1.Controller/CheckReboot", ADMIN),
    ("/shorthorn.v1.Controller/Rebalance", ADMIN),
    ("/shorthorn.v1.Controller/GetOverview", ADMIN),
    ("/shorthorn.v1.Controller/Examine", ADMIN),
    ("/shorthorn.v1.Controller/SetVolume", ADMIN),
    ("/shorthorn.v1.Controller/EvictReplica", ADMIN),
    ("/shorthorn.v1.Controller/InspectNode", ADMIN),
    ("/shorthorn.v1.Controller/GetDiagnostics", ADMIN),
    ("/shorthorn.v1.ControllerTls/Enroll", ANYONE),
    ("/shorthorn.v1.ControllerTls/CreateJoinToken", ADMIN),
    ("/shorthorn.v1.ControllerTls/IssueAdminCertificate", ADMIN),
    ("/shorthorn.v1.ControllerTls/GetTls", ADMIN),
    ("/shorthorn.v1.ControllerTls/RevokeCertificate", ADMIN),
    ("/shorthorn.v1.ControllerTls/RollOver", ADMIN),
];

/// A call is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallRefusal {
    /// The caller has to show a certificate.
    NoCertificate,
    /// The role of the caller may not call this method.
    NotPermitted(Role),
    /// The method has no entry.
    UnknownMethod,
}

/// Checks that a caller of this role may call the method with this path.
///
/// # Errors
/// [`CallRefusal`].
pub fn check(path: &str, role: Option<&Role>) -> Result<(), CallRefusal> {
    let entry = TABLE.iter().find(|(known, _)| *known == path);
    let kinds = entry.map(|(_, kinds)| *kinds).ok_or(CallRefusal::UnknownMethod)?;
    if kinds.contains(&RoleKind::Anyone) {
        return Ok(());
    }
    let role = role.ok_or(CallRefusal::NoCertificate)?;
    let kind = match role {
        Role::Controller => RoleKind::Controller,
        Role::Admin(_) => RoleKind::Admin,
        Role::Node(_) => RoleKind::Node,
    };
    if kinds.contains(&kind) { Ok(()) } else { Err(CallRefusal::NotPermitted(role.clone())) }
}

impl CallRefusal {
    fn status(&self, path: &str) -> Status {
        match self {
            CallRefusal::NoCertificate => Status::unauthenticated(format!(
                "{path} needs a certificate: use --tls-identity FILE, from shorthornctl tls issue"
            )),
            CallRefusal::NotPermitted(role) => {
                Status::permission_denied(format!("{role} may not call {path}"))
            }
            CallRefusal::UnknownMethod => {
                Status::permission_denied(format!("{path} is not permitted over TLS"))
            }
        }
    }
}

/// A layer for servers behind [`crate::incoming()`], which checks each call. Without the [`TlsPeer`] of a
/// connection it permits the methods for anyone only.
#[derive(Clone, Copy, Debug, Default)]
pub struct AccessLayer;

impl<S> Layer<S> for AccessLayer {
    type Service = CheckedService<S>;
    fn layer(&self, inner: S) -> CheckedService<S> {
        CheckedService { inner }
    }
}

/// A service whose calls are checked.
#[derive(Clone, Debug)]
pub struct CheckedService<S> {
    inner: S,
}

impl<S> Service<http::Request<Body>> for CheckedService<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>>,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<Self::Response, S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let peer = request.extensions().get::<TlsPeer>();
        let path = request.uri().path();
        if let Err(refusal) = check(path, peer.and_then(TlsPeer::role)) {
            let address = peer.map(|peer| peer.address.to_string()).unwrap_or_default();
            let status = refusal.status(path);
            let reason = status.message();
            match refusal {
                // A client without a certificate must not fill the log.
                CallRefusal::NoCertificate => tracing::debug!(%address, path, reason, "call refused"),
                _ => tracing::warn!(%address, path, reason, "call refused"),
            }
            return Box::pin(async move { Ok(status.into_http()) });
        }
        Box::pin(self.inner.call(request))
    }
}
