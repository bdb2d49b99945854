//! Registration of the driver with kubelet, which finds its socket in the directory of plugins.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use shorthorn_api::pluginregistration::registration_server::{Registration, RegistrationServer};
use shorthorn_api::pluginregistration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use tonic::{Request, Response, Status};

/// The kind of plugin that a CSI driver is.
const PLUGIN_TYPE: &str = "CSIPlugin";
/// kubelet's version of its interface to CSI drivers; it refuses 2 and above.
const INTERFACE_VERSION: &str = "1.0.0";

/// The registration service of the driver.
#[derive(Clone, Debug)]
pub struct RegistrationService {
    info: PluginInfo,
    /// True if kubelet has reported a successful registration.
    registered: Arc<AtomicBool>,
}

impl RegistrationService {
    /// Creates the registration of the driver `name`, whose CSI socket is at `endpoint`. `registered` is set
    /// to the report of kubelet.
    #[must_use]
    pub fn new(name: &str, endpoint: &Path, registered: Arc<AtomicBool>) -> RegistrationService {
        RegistrationService {
            info: PluginInfo {
                r#type: PLUGIN_TYPE.to_owned(),
                name: name.to_owned(),
                endpoint: endpoint.display().to_string(),
                supported_versions: vec![INTERFACE_VERSION.to_owned()],
            },
            registered,
        }
    }

    /// Returns the service for a gRPC server.
    #[must_use]
    pub fn server(self) -> RegistrationServer<RegistrationService> {
        RegistrationServer::new(self)
    }
}

#[tonic::async_trait]
impl Registration for RegistrationService {
    /// Answers from memory, because kubelet waits one second.
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(self.info.clone()))
    }

    /// Stores the report; after a failure kubelet tries again by itself, less and less often.
    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let RegistrationStatus { plugin_registered, error } = request.into_inner();
        self.registered.store(plugin_registered, Ordering::Relaxed);
        if plugin_registered {
            tracing::info!(driver = self.info.name, "kubelet has registered the driver");
        } else {
            tracing::warn!(
                driver = self.info.name,
                "kubelet has refused the driver and tries again: {error}"
            );
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
