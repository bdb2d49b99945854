//! The CSI service behind the lease: the socket exists from the start. So the sidecars beside a standby
//! controller find it, learn from Probe that it is not ready, and wait. Nothing behind it works before this
//! controller leads.

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use shorthorn_api::csi::v1::controller_server::{ControllerServer, SERVICE_NAME};
use shorthorn_csi::NOT_READY;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::NamedService;

use super::CsiController;

/// The entrance to the Controller service of CSI, which answers before the service exists.
#[derive(Clone, Debug, Default)]
pub struct CsiStandby {
    controller: Arc<OnceLock<CsiController>>,
    /// The flag is set after `controller`: its readers find that.
    ready: Arc<AtomicBool>,
}

impl CsiStandby {
    /// Lets calls through to `controller` from now on.
    pub fn open(&self, controller: CsiController) {
        // It leads once in its life: a controller that leads no more ends as a process.
        let _ = self.controller.set(controller);
        self.ready.store(true, Ordering::Release);
    }

    /// Returns the flag that is true while calls reach the service.
    #[must_use]
    pub fn ready(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.ready)
    }
}

impl NamedService for CsiStandby {
    const NAME: &'static str = SERVICE_NAME;
}

impl Service<http::Request<Body>> for CsiStandby {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        match self.controller.get() {
            Some(controller) => {
                let mut server: ControllerServer<CsiController> = controller.clone().server();
                server.call(request)
            }
            None => Box::pin(async { Ok(Status::unavailable(NOT_READY).into_http()) }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use shorthorn_api::csi::v1;
    use shorthorn_api::csi::v1::controller_client::ControllerClient;
    use shorthorn_api::csi::v1::identity_client::IdentityClient;
    use shorthorn_controller_core::reconcile::Settings;
    use shorthorn_csi::IdentityService;
    use tokio::net::UnixListener;
    use tokio::sync::watch;
    use tokio_stream::wrappers::UnixListenerStream;
    use tonic::Code;
    use tonic::transport::{Endpoint, Server};

    use super::*;
    use crate::agents::Fleet;
    use crate::counters::Metrics;
    use crate::queue::WorkQueue;
    use crate::store::{MemoryStore, ObjectStore};

    #[tokio::test]
    async fn a_standby_is_not_ready_and_refuses_calls_until_it_leads() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("csi.sock");
        let standby = CsiStandby::default();
        let identity = IdentityService::new("driver", "1").ready_while(standby.ready()).server();
        let incoming = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
        let server = Server::builder().add_service(identity).add_service(standby.clone());
        let serving = tokio::spawn(server.serve_with_incoming(incoming));
        let channel = Endpoint::from_shared(format!("unix://{}", socket.display())).unwrap().connect_lazy();
        let mut probe = IdentityClient::new(channel.clone());
        let mut csi = ControllerClient::new(channel);
        let is_ready = probe.probe(v1::ProbeRequest {}).await.unwrap().into_inner().ready;
        assert_eq!(is_ready, Some(false), "a sidecar waits");
        let nameless = v1::CreateVolumeRequest::default;
        let refused = csi.create_volume(nameless()).await.unwrap_err();
        assert_eq!((refused.code(), refused.message()), (Code::Unavailable, NOT_READY));

        let store: Arc<dyn ObjectStore> = Arc::new(MemoryStore::new());
        let (metrics, queue) = (Metrics::default(), Arc::new(WorkQueue::new()));
        let fleet = Fleet::new(&BTreeMap::new(), Arc::clone(&store), queue, metrics.clone()).unwrap();
        let (_stop, stopping) = watch::channel(false);
        standby.open(CsiController::new(store, fleet, stopping, Settings::default(), metrics));
        let is_ready = probe.probe(v1::ProbeRequest {}).await.unwrap().into_inner().ready;
        assert_eq!(is_ready, Some(true));
        let refused = csi.create_volume(nameless()).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "the service answers: {refused}");
        serving.abort();
    }
}
