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
pub struct CsiGate {
    controller: Arc<OnceLock<CsiController>>,
    /// The flag is set after `controller`: its readers find that.
    ready: Arc<AtomicBool>,
}

impl CsiGate {
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

impl NamedService for CsiGate {
    const NAME: &'static str = SERVICE_NAME;
}

impl Service<http::Request<Body>> for CsiGate {
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
