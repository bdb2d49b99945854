//! Connections to a port of a pod, through the API server and the kubelet of the pod.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};
use tokio::io::DuplexStream;
use tonic::codegen::{BoxFuture, Service};
use tonic::transport::{Endpoint, Uri};

use super::leader::{self, Leader};

/// The URI of a connection, which the connector ignores.
const ANY_URI: &str = "http://controller.invalid";

/// The error of the last connection.
#[derive(Clone, Debug, Default)]
pub(super) struct LastProblem(Arc<Mutex<Option<String>>>);

impl LastProblem {
    pub(super) fn last(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, problem: Option<String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = problem;
    }
}

/// Streams to the leading pod.
#[derive(Clone)]
pub(super) struct PodStreams {
    client: Client,
    namespace: String,
    problem: LastProblem,
}

impl PodStreams {
    pub(super) fn new(client: Client, namespace: String, problem: LastProblem) -> PodStreams {
        PodStreams { client, namespace, problem }
    }

    /// Returns a stream to the API of the controller that leads now.
    async fn open(&self) -> io::Result<DuplexStream> {
        let opened = self.try_open().await;
        self.problem.set(opened.as_ref().err().map(ToString::to_string));
        opened
    }

    async fn try_open(&self) -> io::Result<DuplexStream> {
        let Leader { pod, port } =
            leader::find(&self.client, &self.namespace).await.map_err(io::Error::other)?;
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        let refused = |error: &dyn std::fmt::Display| {
            io::Error::other(format!("no connection to port {port} of pod {pod}, which leads: {error}"))
        };
        let mut forwarder = pods.portforward(&pod, &[port]).await.map_err(|error| refused(&error))?;
        let stream = forwarder.take_stream(port).ok_or_else(|| refused(&"the stream is missing"))?;
        if let Some(error) = forwarder.take_error(port) {
            let problem = self.problem.clone();
            // It ends with the connection.
            tokio::spawn(async move {
                if let Some(error) = error.await {
                    problem.set(Some(format!("port {port} of pod {pod}, which leads: {error}")));
                }
            });
        }
        Ok(stream)
    }
}

/// Returns an endpoint for a connector that knows the address itself.
pub(super) fn endpoint() -> Result<Endpoint, tonic::transport::Error> {
    Endpoint::from_shared(ANY_URI)
}

/// Makes each connection to the leader of that moment.
#[derive(Clone)]
pub(super) struct ForwardConnector(PodStreams);

impl ForwardConnector {
    pub(super) fn new(streams: PodStreams) -> ForwardConnector {
        ForwardConnector(streams)
    }
}

impl Service<Uri> for ForwardConnector {
    type Response = TokioIo<DuplexStream>;
    type Error = io::Error;
    type Future = BoxFuture<Self::Response, io::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let streams = self.0.clone();
        Box::pin(async move { streams.open().await.map(TokioIo::new) })
    }
}
