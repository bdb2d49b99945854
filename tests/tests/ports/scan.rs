//! The listening sockets of a host, and the answers of each to a stranger.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sched::{CloneFlags, setns};
use shorthorn_api::v1::controller_client::ControllerClient;
use shorthorn_api::v1::{self, EnrollRequest, controller_tls_client::ControllerTlsClient};
use shorthorn_pki::{Connector, JoinToken};
use shorthorn_tests::network::Network;
use tonic::transport::Endpoint;

use crate::{LIMIT, VOLUME};

/// The longest answer of a port to a stranger: a handshake of TLS lasts 10 s.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
/// Record types of TLS (RFC 8446, 5.1).
const TLS_ALERT: u8 = 21;
/// The longest challenge of a replica: a frame with one nonce.
const CHALLENGE_BYTES_MAX: usize = 512;

/// Does `work` in the network of a host. Processes and threads that it starts are in that network too.
pub fn inside<T: Send>(network: &Network, host: usize, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let file = File::open(network.file(host))?;
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            setns(file, CloneFlags::CLONE_NEWNET)?;
            work()
        });
        thread.join().map_err(|_| anyhow::anyhow!("the thread has panicked"))?
    })
}

/// Returns the listening sockets of the network of this thread.
pub fn listening() -> Result<Vec<Listening>> {
    let output = Command::new("ss").args(["-H", "-l", "-n", "-t", "-u", "-p"]).output()?;
    ensure!(output.status.success(), "ss: {}", String::from_utf8_lossy(&output.stderr));
    let shown = String::from_utf8(output.stdout)?;
    println!("{shown}");
    shown.lines().map(Listening::parse).collect()
}

/// A listening socket.
#[derive(Debug)]
pub struct Listening {
    pub address: SocketAddr,
    pub process: String,
}

impl Listening {
    /// Parses a line of `ss -Hlntup`: protocol, state, two queues, both addresses, and processes.
    fn parse(line: &str) -> Result<Listening> {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [protocol, _, _, _, local, ..] = fields[..] else { bail!("{line:?} is not a socket") };
        ensure!(protocol == "tcp", "a socket that is not TCP: {line}");
        let process = fields.get(6).copied().unwrap_or_default().to_owned();
        let address = local.parse().with_context(|| format!("{local} is on no single address"))?;
        Ok(Listening { address, process })
    }
}

/// Returns all that a port answers to these bytes.
pub fn answer(address: SocketAddr, bytes: &[u8]) -> Result<Vec<u8>> {
    let mut stream = TcpStream::connect_timeout(&address, LIMIT)?;
    stream.set_read_timeout(Some(ANSWER_LIMIT))?;
    // The other side may have closed it already.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    let mut piece = [0; 4096];
    loop {
        match stream.read(&mut piece) {
            Ok(0) => return Ok(answer),
            Ok(length) => answer.extend_from_slice(&piece[..length]),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return Ok(answer),
            Err(error) => return Err(error).with_context(|| format!("{address} holds a stranger")),
        }
    }
}

pub fn http(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
}

/// The beginnings of protocols that a stranger may speak.
fn probes() -> Vec<Vec<u8>> {
    let http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
    let random = (0..256).map(|_| fastrand::u8(..)).collect();
    vec![http("/metrics").into_bytes(), http2, random, vec![0; 4096], b"\x16\x03\x01".to_vec()]
}

/// True if text in the bytes says anything about the cluster.
fn reveals_cluster(bytes: &[u8], dir: &Path) -> bool {
    let text = String::from_utf8_lossy(bytes);
    [VOLUME, "n0", "n1", "shorthorn", &dir.display().to_string()].iter().any(|word| text.contains(word))
}

/// Checks that metrics and health are all that a port of metrics has, and that they have no secret.
pub fn check_metrics(address: SocketAddr, secrets: &[String]) -> Result<()> {
    for path in ["/metrics", "/healthz", "/readyz"] {
        let received = String::from_utf8_lossy(&answer(address, http(path).as_bytes())?).into_owned();
        ensure!(received.starts_with("HTTP/1.1 200") || path == "/readyz", "{address}{path}: {received}");
        let is_secret = |word: &String| received.contains(word.as_str());
        ensure!(
            !secrets.iter().any(is_secret) && !received.contains("-----BEGIN"),
            "{address}{path}: {received}"
        );
    }
    for path in ["/", "/debug", "/shorthorn.v1.Node/GetNode", "/metrics/../etc/passwd"] {
        let received = String::from_utf8_lossy(&answer(address, http(path).as_bytes())?).into_owned();
        ensure!(received.starts_with("HTTP/1.1 404"), "{address}{path}: {received}");
    }
    Ok(())
}

/// Checks that a port of TLS answers a stranger with alerts at most.
pub fn check_tls(address: SocketAddr, dir: &Path) -> Result<()> {
    for probe in probes() {
        let received = answer(address, &probe)?;
        let is_alert = received.first() == Some(&TLS_ALERT) && received.len() <= 16;
        ensure!(received.is_empty() || is_alert, "{address} answers {received:?}");
        ensure!(!reveals_cluster(&received, dir), "{address} answers {received:?}");
    }
    Ok(())
}

/// Checks that a handshake without a certificate ends with an alert, and that no data follows.
pub fn check_no_certificate(address: SocketAddr) -> Result<()> {
    let mut client = Command::new("openssl");
    client.args(["s_client", "-quiet", "-alpn", "h2", "-connect", &address.to_string()]);
    client.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut client = client.spawn().context("starting openssl")?;
    let mut stdin = client.stdin.take().context("openssl has no standard input")?;
    let _ = stdin.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0");
    // The end of the input would end it: it waits for the server.
    let output = std::thread::scope(|scope| {
        let waiting = scope.spawn(move || client.wait_with_output());
        let output = waiting.join().map_err(|_| anyhow::anyhow!("the thread has panicked"));
        drop(stdin);
        output
    })??;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(stderr.contains("certificate required"), "{address}: {stderr}");
    ensure!(output.stdout.is_empty(), "{address} sends {:?}", output.stdout);
    Ok(())
}

/// Checks that the controller takes nothing but an enrolment from a client without a certificate, and that
/// an enrolment needs a token of the node.
pub fn check_controller(address: SocketAddr, token: &str) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let pin = token.parse::<JoinToken>().context("the token")?.pin();
        let endpoint = Endpoint::from_shared(format!("http://{address}"))?.connect_timeout(LIMIT);
        let channel = endpoint.connect_with_connector_lazy(Connector::pinned(pin)?);
        let mut client = ControllerClient::new(channel.clone());
        let listed = client.list_volumes(v1::ListVolumesRequest::default());
        let refused = listed.await.err().context("volumes are listed for a stranger")?;
        ensure!(refused.code() == tonic::Code::Unauthenticated, "{refused}");
        let request = EnrollRequest { token: token.to_owned(), node_name: "n0".to_owned(), csr: Vec::new() };
        let enrolled = ControllerTlsClient::new(channel).enroll(request).await;
        ensure!(enrolled.is_err(), "the token of another node is taken");
        Ok(())
    })
}

/// Checks that a replica sends a challenge, and nothing else to those that do not know the volume's secret.
pub fn check_data(address: SocketAddr, dir: &Path) -> Result<()> {
    let mut challenges = Vec::new();
    for probe in probes() {
        let received = answer(address, &probe)?;
        ensure!(
            received.len() <= CHALLENGE_BYTES_MAX && !reveals_cluster(&received, dir),
            "{address} answers {received:?}"
        );
        challenges.push(received);
    }
    challenges.sort();
    let all = challenges.len();
    challenges.dedup();
    ensure!(challenges.len() == all, "{address} sends a challenge twice");
    Ok(())
}
