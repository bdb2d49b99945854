//! Who the driver is. The sockets of the nodes and of the controller answer this alike.

use std::collections::HashMap;

use shorthorn_proto::csi::v1::identity_server::{Identity as IdentityRpc, IdentityServer};
use shorthorn_proto::csi::v1::{self, plugin_capability as capability};
use tonic::{Request, Response, Status};

/// The Identity service.
#[derive(Clone, Debug)]
pub struct Identity {
    name: String,
    version: String,
}

impl Identity {
    /// Of the driver called `name`.
    #[must_use]
    pub fn new(name: &str, version: &str) -> Identity {
        Identity { name: name.to_owned(), version: version.to_owned() }
    }

    /// As a service of a gRPC server.
    #[must_use]
    pub fn server(self) -> IdentityServer<Identity> {
        IdentityServer::new(self)
    }
}

fn service(kind: capability::service::Type) -> v1::PluginCapability {
    let service = capability::Service { r#type: kind.into() };
    v1::PluginCapability { r#type: Some(capability::Type::Service(service)) }
}

#[tonic::async_trait]
impl IdentityRpc for Identity {
    async fn get_plugin_info(
        &self,
        _: Request<v1::GetPluginInfoRequest>,
    ) -> Result<Response<v1::GetPluginInfoResponse>, Status> {
        let (name, vendor_version) = (self.name.clone(), self.version.clone());
        Ok(Response::new(v1::GetPluginInfoResponse { name, vendor_version, manifest: HashMap::new() }))
    }

    /// Those of the whole driver: callers ask the node what the controller can do, too.
    async fn get_plugin_capabilities(
        &self,
        _: Request<v1::GetPluginCapabilitiesRequest>,
    ) -> Result<Response<v1::GetPluginCapabilitiesResponse>, Status> {
        use capability::{VolumeExpansion, service::Type, volume_expansion};
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
        // Whoever can be asked is ready: the sockets are served last.
        Ok(Response::new(v1::ProbeResponse { ready: Some(true) }))
    }
}
