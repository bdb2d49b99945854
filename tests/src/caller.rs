use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::runtime::{Builder, Runtime};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response, Status};

/// A gRPC client for threads that wait. It connects when it is used, and again after the server was away.
#[derive(Debug)]
pub struct Caller {
    runtime: Runtime,
    channel: Channel,
}

impl Caller {
    /// Connects to a Unix socket.
    ///
    /// # Errors
    /// The path cannot be an address.
    pub fn unix(path: &Path) -> Result<Caller> {
        Caller::to(format!("unix://{}", path.display()))
    }

    /// Connects to a port on loopback.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn tcp(port: u16) -> Result<Caller> {
        Caller::to(format!("http://127.0.0.1:{port}"))
    }

    fn to(address: String) -> Result<Caller> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let endpoint = Endpoint::from_shared(address.clone()).with_context(|| address)?;
        let channel = {
            let _entered = runtime.enter();
            endpoint.connect_lazy()
        };
        Ok(Caller { runtime, channel })
    }

    /// Makes a call that says that it may take until `limit`. A refusal is a [`Status`] in the error.
    ///
    /// # Errors
    /// It is refused, or takes too long.
    pub fn call<T, R>(
        &self,
        message: T,
        limit: Duration,
        send: impl AsyncFnOnce(Channel, Request<T>) -> Result<Response<R>, Status>,
    ) -> Result<R> {
        let mut request = Request::new(message);
        request.set_timeout(limit);
        let answer = self.runtime.block_on(send(self.channel.clone(), request))?;
        Ok(answer.into_inner())
    }
}
