use std::sync::atomic::{AtomicBool, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

/// No step takes longer, on the busiest machine.
const LIMIT: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Program {
    is_ready: AtomicBool,
}

#[async_trait]
impl MetricsSource for Program {
    fn program(&self) -> (&'static str, &'static str) {
        ("test", "1.2.3")
    }

    fn ready(&self) -> Result<(), String> {
        if self.is_ready.load(Ordering::Relaxed) { Ok(()) } else { Err("the store is away".to_owned()) }
    }

    async fn fill(&self, page: &mut MetricsPage) {
        page.gauges("shorthorn_test", "A test").set(&[("of", "this")], 7);
    }
}

async fn serving() -> (SocketAddr, Arc<Program>, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let program = Arc::<Program>::default();
    let source: Arc<dyn MetricsSource> = Arc::<Program>::clone(&program);
    (address, program, tokio::spawn(serve(listener, source)))
}

async fn ask(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    // The answer may come, and the connection end, before all of a long request is taken.
    let _ = stream.write_all(request.as_bytes()).await;
    let mut answer = Vec::new();
    let _ = tokio::time::timeout(LIMIT, stream.read_to_end(&mut answer)).await.unwrap();
    String::from_utf8(answer).unwrap()
}

async fn get(address: SocketAddr, path: &str) -> String {
    ask(address, &format!("GET {path} HTTP/1.1\r\nHost: here\r\n\r\n")).await
}

#[tokio::test]
async fn serves_metrics_and_health() {
    let (address, program, server) = serving().await;
    let metrics = get(address, "/metrics").await;
    assert!(metrics.starts_with("HTTP/1.1 200 OK\r\n"), "{metrics}");
    assert!(metrics.to_lowercase().contains(&format!("content-type: {OPENMETRICS}\r\n")), "{metrics}");
    for line in [
        "shorthorn_build_info{program=\"test\",version=\"1.2.3\"} 1\n",
        "shorthorn_test{of=\"this\"} 7\n",
        "\nprocess_resident_memory_bytes{} ",
        "\nprocess_cpu_seconds_total{} ",
    ] {
        assert!(metrics.contains(line), "{line:?} is not in {metrics}");
    }
    assert!(metrics.ends_with("# EOF\n"));
    assert!(get(address, "/healthz").await.ends_with("\r\n\r\nok\n"));
    let waiting = get(address, "/readyz").await;
    assert!(
        waiting.starts_with("HTTP/1.1 503 ") && waiting.ends_with("not ready: the store is away\n"),
        "{waiting}"
    );
    program.is_ready.store(true, Ordering::Relaxed);
    assert!(get(address, "/readyz").await.starts_with("HTTP/1.1 200 OK\r\n"));
    server.abort();
}

#[tokio::test]
async fn unknown_requests_are_refused() {
    let (address, _, server) = serving().await;
    assert!(get(address, "/").await.starts_with("HTTP/1.1 404 "));
    let posted = ask(address, "POST /metrics HTTP/1.1\r\nHost: here\r\nContent-Length: 0\r\n\r\n").await;
    assert!(posted.starts_with("HTTP/1.1 405 "), "{posted}");
    assert!(ask(address, "nonsense\r\n\r\n").await.starts_with("HTTP/1.1 400 "));
    let long = format!("GET /metrics HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(2 * REQUEST_MAX_BYTES));
    assert!(!ask(address, &long).await.contains(" 200 OK"));
    assert!(get(address, "/healthz").await.contains("200 OK"));
    server.abort();
}

#[tokio::test]
async fn silent_clients_do_not_delay_others_for_long() {
    let (address, _, server) = serving().await;
    let mut silent = Vec::new();
    for _ in 0..CONNECTIONS_MAX {
        silent.push(TcpStream::connect(address).await.unwrap());
    }
    // It waits until one of them is given up.
    assert!(get(address, "/healthz").await.contains("200 OK"));
    server.abort();
}

#[tokio::test]
async fn only_a_configured_address_must_be_free() {
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = MetricsListen::At(taken.local_addr().unwrap());
    let source = || -> Arc<dyn MetricsSource> { Arc::<Program>::default() };
    let error = start(address, MetricsListen::Off, source()).await.unwrap_err().to_string();
    assert!(error.contains(&address.to_string()) && error.contains("metrics_listen"), "{error}");
    assert!(start(address, address, source()).await.unwrap().is_none());
    assert!(start(MetricsListen::Off, address, source()).await.unwrap().is_none());
    assert!(start(MetricsListen::loopback(0), address, source()).await.unwrap().is_some());
}
