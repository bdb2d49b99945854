//! The identity of the driver. The sockets of the nodes and of the controller answer with the same.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use shorthorn_api::csi::v1::identity_server::{Identity as IdentityRpc, IdentityServer};
use shorthorn_api::csi::v1::{self, plugin_capability as capability};
use tonic::{Request, Response, Status};

/// The message of a refused call while another process leads. Callers take its code for a failure that
/// passes.
pub const NOT_READY: &str = "this controller stands by and does not lead; retry once Probe reports ready";

/// Serves the CSI calls that controller and node have in common.
#[derive(Clone, Debug)]
pub struct IdentityService {
    name: String,
    version: String,
    ready: Arc<AtomicBool>,
}

impl IdentityService {
    /// Returns the identity of the driver `name`.
    #[must_use]
    pub fn new(name: &str, version: &str) -> IdentityService {
        // The last server of the socket is ready once it can be asked.
        IdentityService {
            name: name.to_owned(),
            version: version.to_owned(),
            ready: Arc::new(AtomicBool::new(true)),
        }
    }

    /// Returns an identity that is ready only while `ready` says so. Until then Probe answers that, and every
    /// other call is refused as unavailable.
    #[must_use]
    pub fn ready_while(self, ready: Arc<AtomicBool>) -> IdentityService {
        IdentityService { ready, ..self }
    }

    fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    fn check_ready(&self) -> Result<(), Status> {
        if self.is_ready() { Ok(()) } else { Err(Status::unavailable(NOT_READY)) }
    }

    /// Returns the service for a gRPC server.
    #[must_use]
    pub fn server(self) -> IdentityServer<IdentityService> {
        IdentityServer::new(self)
    }
}

fn service(kind: capability::service::Type) -> v1::PluginCapability {
    let service = capability::Service { r#type: kind.into() };
    v1::PluginCapability { r#type: Some(capability::Type::Service(service)) }
}

#[tonic::async_trait]
impl IdentityRpc for IdentityService {
    async fn get_plugin_info(
        &self,
        _: Request<v1::GetPluginInfoRequest>,
    ) -> Result<Response<v1::GetPluginInfoResponse>, Status> {
        self.check_ready()?;
        let (name, vendor_version) = (self.name.clone(), self.version.clone());
        Ok(Response::new(v1::GetPluginInfoResponse { name, vendor_version, manifest: HashMap::new() }))
    }

    /// Returns the capabilities of the whole driver: callers ask the node for those of the controller, too.
    async fn get_plugin_capabilities(
        &self,
        _: Request<v1::GetPluginCapabilitiesRequest>,
    ) -> Result<Response<v1::GetPluginCapabilitiesResponse>, Status> {
        use capability::{VolumeExpansion, service::Type, volume_expansion};
        self.check_ready()?;
        let online = VolumeExpansion { r#type: volume_expansion::Type::Online.into() };
        let capabilities = vec![
            service(Type::ControllerService),
            service(Type::VolumeAccessibilityConstraints),
            v1::PluginCapability { r#type: Some(capability::Type::VolumeExpansion(online)) },
        ];
        Ok(Response::new(v1::GetPluginCapabilitiesResponse { capabilities }))
    }

    async fn probe(&self, _: Request<v1::ProbeRequest>) -> Result<Response<v1::ProbeResponse>, Status> {
        tracing::debug!("Probe");
        Ok(Response::new(v1::ProbeResponse { ready: Some(self.is_ready()) }))
    }
}
