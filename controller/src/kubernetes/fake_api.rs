//! A client of Kubernetes whose requests a test answers, without a network.

use std::convert::Infallible;
use std::sync::Arc;

use http::request::Parts;
use http::{Request, Response};
use kube::Client;
use kube::client::Body;
use serde_json::Value;
use tower::service_fn;

/// The part of an API server that a test needs.
pub(crate) trait FakeApi: Send + Sync + 'static {
    /// Answers a request with a status code and an object.
    fn answer(&self, head: &Parts, body: &[u8]) -> impl Future<Output = (u16, Value)> + Send;
}

/// Returns a client of the namespace `n`, all of whose requests `api` answers.
pub(crate) fn fake_client<A: FakeApi>(api: &Arc<A>) -> Client {
    let api = Arc::clone(api);
    let service = service_fn(move |request: Request<Body>| {
        let api = Arc::clone(&api);
        async move {
            let (head, body) = request.into_parts();
            let body = body.collect_bytes().await.unwrap();
            let (code, answer) = api.answer(&head, &body).await;
            let answer = Body::from(serde_json::to_vec(&answer).unwrap());
            Ok::<_, Infallible>(Response::builder().status(code).body(answer).unwrap())
        }
    });
    Client::new(service, "n")
}
