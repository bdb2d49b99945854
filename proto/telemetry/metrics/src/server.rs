use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use thiserror::Error;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, Semaphore};
use tokio::task::JoinHandle;

use crate::address::MetricsListen;
use crate::page::MetricsPage;
use crate::process;

/// The maximum number of connections; more of them wait.
const CONNECTIONS_MAX: usize = 16;
/// The longest that one may last. It carries one request. That is the default limit of a scrape by
/// Prometheus.
const CONNECTION_LIMIT: Duration = Duration::from_secs(10);
/// The longest that a client may take to ask. A request fits one packet, and a silent client occupies one of
/// few places.
const REQUEST_LIMIT: Duration = Duration::from_secs(5);
/// The most that it may ask with.
const REQUEST_MAX_BYTES: usize = 16 << 10;
const HEADERS_MAX: usize = 64;
/// The pause after an error of accept, usually a lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const TEXT: &str = "text/plain; charset=utf-8";

/// The health and the metrics of a program.
#[async_trait]
pub trait MetricsSource: Send + Sync + 'static {
    /// Returns the name and the version of the program.
    fn program(&self) -> (&'static str, &'static str);

    /// Returns an error unless the program can do its work.
    ///
    /// # Errors
    /// Why not, in plain words.
    fn ready(&self) -> Result<(), String>;

    /// Adds the current numbers to the page. Implementations bound long operations: the caller waits for some
    /// seconds only.
    async fn fill(&self, page: &mut MetricsPage);
}

/// The address cannot be used.
#[derive(Debug, Error)]
#[error("cannot serve metrics on {0}: {1}; choose another metrics_listen, or off")]
pub struct MetricsError(SocketAddr, io::Error);

/// Metrics and health are served until this is dropped.
#[derive(Debug)]
pub struct MetricsServer(JoinHandle<()>);

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Serves the health and the metrics of `source` at `listen`. If that is the `default` and is taken, the
/// program starts all the same: several programs may run on one host.
///
/// # Errors
/// [`MetricsError`] for a configured address.
pub async fn start(
    listen: MetricsListen,
    default: MetricsListen,
    source: Arc<dyn MetricsSource>,
) -> Result<Option<MetricsServer>, MetricsError> {
    let MetricsListen::At(address) = listen else { return Ok(None) };
    let bound = TcpListener::bind(address).await.and_then(|listener| Ok((listener.local_addr()?, listener)));
    match bound {
        Ok((address, listener)) => {
            tracing::info!(%address, "metrics and health are served");
            Ok(Some(MetricsServer(tokio::spawn(serve(listener, source)))))
        }
        Err(error) if listen != default => Err(MetricsError(address, error)),
        Err(error) => {
            tracing::warn!(
                %address,
                %error,
                "metrics and health are not served: give metrics_listen another address"
            );
            Ok(None)
        }
    }
}

struct ServedMetrics {
    source: Arc<dyn MetricsSource>,
    /// The lock for making pages one at a time.
    making: Mutex<()>,
}

async fn serve(listener: TcpListener, source: Arc<dyn MetricsSource>) {
    let shown = Arc::new(ServedMetrics { source, making: Mutex::new(()) });
    let free = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        // It is never closed.
        let Ok(permit) = Arc::clone(&free).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let shown = Arc::clone(&shown);
                tokio::spawn(async move {
                    answer(stream, shown).await;
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "metrics: accept failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn answer(stream: TcpStream, shown: Arc<ServedMetrics>) {
    let service = service_fn(move |request: Request<Incoming>| {
        let shown = Arc::clone(&shown);
        async move {
            Ok::<_, std::convert::Infallible>(respond(request.method(), request.uri().path(), &shown).await)
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_LIMIT)
        .max_buf_size(REQUEST_MAX_BYTES)
        .max_headers(HEADERS_MAX)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    // Errors of a client matter only to that client.
    if let Ok(Err(error)) = tokio::time::timeout(CONNECTION_LIMIT, connection).await {
        tracing::debug!(%error, "metrics: connection");
    }
}

async fn respond(method: &Method, path: &str, shown: &ServedMetrics) -> Response<Full<Bytes>> {
    if method != Method::GET && method != Method::HEAD {
        let mut refused =
            response(StatusCode::METHOD_NOT_ALLOWED, TEXT, "only GET and HEAD are served\n".into());
        refused.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return refused;
    }
    match path {
        "/healthz" => response(StatusCode::OK, TEXT, "ok\n".into()),
        "/readyz" => match shown.source.ready() {
            Ok(()) => response(StatusCode::OK, TEXT, "ready\n".into()),
            Err(reason) => response(StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("not ready: {reason}\n")),
        },
        "/metrics" => {
            let _making = shown.making.lock().await;
            let mut page = MetricsPage::default();
            let (program, version) = shown.source.program();
            process::show(&mut page, program, version);
            shown.source.fill(&mut page).await;
            match page.text() {
                Ok(text) => response(StatusCode::OK, OPENMETRICS, text),
                Err(error) => response(StatusCode::INTERNAL_SERVER_ERROR, TEXT, format!("{error}\n")),
            }
        }
        _ => response(StatusCode::NOT_FOUND, TEXT, "this server has /metrics, /healthz and /readyz\n".into()),
    }
}

fn response(status: StatusCode, content_type: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

#[cfg(test)]
mod tests;
