//! What a controller costs that has nothing to do: 10,000 attached volumes of three replicas on 1,000 nodes.
//!
//! The controller is the real program with a store in memory-backed storage, so that the disk of this machine does not
//! count; the agents are those of the tests, all in this process. The volumes are made and attached through the
//! controller API. When nothing has changed for a while, the CPU time and the resident memory that the controller itself
//! shows at /metrics are read at both ends of a minute.
//! `--volumes N` and `--nodes N` make it smaller.
#![allow(
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    dead_code,
    missing_docs,
    reason = "a benchmark ends where something it relies on is not so"
)]

#[path = "../tests/support/agent.rs"]
mod agent;

use std::fmt::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use agent::{FakeAgent, Truth};
use shorthorn_proto::v1;
use shorthorn_proto::v1::controller_client::ControllerClient;
use shorthorn_testkit::metrics::{get, own_address, samples, value};
use tokio::task::JoinSet;
use tonic::transport::{Channel, Endpoint};

/// Calls under way at once.
const CALLS: usize = 64;
/// Far more than making all volumes takes.
const LIMIT: Duration = Duration::from_secs(1800);
/// How long nothing is done before the measurement begins.
const CALM: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(500);

struct Size {
    nodes: usize,
    volumes: usize,
    measured: Duration,
}

/// The controller; it goes with this.
struct Controller(Child);

impl Drop for Controller {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::main]
async fn main() {
    // `cargo test --benches` runs this too, and wants no more than that it works.
    let is_test = !std::env::args().any(|argument| argument == "--bench");
    let size = if is_test {
        Size { nodes: 5, volumes: 10, measured: Duration::from_secs(1) }
    } else {
        let volumes = option("--volumes").unwrap_or(10_000);
        Size { nodes: option("--nodes").unwrap_or(1_000), volumes, measured: Duration::from_secs(60) }
    };
    let memory = Path::new("/dev/shm");
    let place = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    let folder = tempfile::tempdir_in(place).unwrap();
    let truth: Arc<Mutex<Truth>> = Arc::default();
    let agents: Vec<FakeAgent> =
        (0..size.nodes).map(|at| FakeAgent::new(&node(at), Arc::clone(&truth))).collect();
    let _serving: Vec<_> = agents.iter().map(|agent| agent.serve(&folder.path().join(&agent.name))).collect();
    let metrics = own_address();
    let _controller = start(folder.path(), &agents, metrics);
    until(metrics, "all agents followed", |shown| {
        shown("shorthorn_nodes{ready=\"true\"}") == Some(size.nodes as f64)
    })
    .await;
    let client = ControllerClient::new(channel(folder.path()));
    for_each(size.nodes, &client, |mut client, at| async move {
        let request = v1::AddNodeDiskRequest { node: node(at), path: "/disk".into() };
        client.add_disk(request).await.unwrap();
    })
    .await;
    let begun = Instant::now();
    let nodes = size.nodes;
    for_each(size.volumes, &client, |mut client, at| async move {
        let name = format!("volume-{at:05}");
        let request = v1::CreateVolumeRequest {
            name: name.clone(),
            size_bytes: 1 << 30,
            number_of_replicas: 3,
            ..v1::CreateVolumeRequest::default()
        };
        client.create_volume(request).await.unwrap();
        client.attach_volume(v1::AttachVolumeRequest { name, node: node(at % nodes) }).await.unwrap();
    })
    .await;
    let healthy = "shorthorn_volumes{state=\"attached\",robustness=\"healthy\"}";
    until(metrics, "all volumes healthy", |shown| shown(healthy) == Some(size.volumes as f64)).await;
    let made = begun.elapsed();
    tokio::time::sleep(if is_test { Duration::ZERO } else { CALM }).await;
    report(metrics, &size, made, &folder.path().join("store.redb")).await;
    let truth = truth.lock().unwrap();
    assert!(truth.violations.is_empty(), "{:#?}", truth.violations);
}

/// The number that follows that word on the command line.
fn option(word: &str) -> Option<usize> {
    std::env::args().skip_while(|argument| argument != word).nth(1).map(|number| number.parse().unwrap())
}

fn node(at: usize) -> String {
    format!("node-{at:04}")
}

fn start(folder: &Path, agents: &[FakeAgent], metrics: SocketAddr) -> Controller {
    let mut config = String::from("[nodes]\n");
    for agent in agents {
        let socket = folder.join(&agent.name);
        writeln!(config, "{} = \"unix://{}\"", agent.name, socket.display()).unwrap();
    }
    let path = folder.join("controller.toml");
    std::fs::write(&path, config).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_shorthorn-controller"));
    command.arg("serve").arg("--config").arg(path).arg("--store").arg(folder.join("store.redb"));
    command.arg("--listen").arg(format!("unix://{}", socket(folder).display()));
    command.args(["--metrics-listen", &metrics.to_string(), "--log", "error"]);
    Controller(command.stdin(Stdio::null()).spawn().unwrap())
}

fn socket(folder: &Path) -> PathBuf {
    folder.join("controller.sock")
}

fn channel(folder: &Path) -> Channel {
    Endpoint::from_shared(format!("unix://{}", socket(folder).display())).unwrap().connect_lazy()
}

/// Does `work` for each of `count` numbers, some at a time.
async fn for_each<F: Future<Output = ()> + Send + 'static>(
    count: usize,
    client: &ControllerClient<Channel>,
    work: impl Fn(ControllerClient<Channel>, usize) -> F,
) {
    let mut under_way = JoinSet::new();
    for at in 0..count {
        if under_way.len() >= CALLS {
            under_way.join_next().await.unwrap().unwrap();
        }
        under_way.spawn(work(client.clone(), at));
    }
    under_way.join_all().await;
}

async fn look(metrics: SocketAddr) -> Option<Vec<(String, f64)>> {
    let answer = tokio::task::spawn_blocking(move || get(metrics, "/metrics")).await.unwrap();
    answer.ok().filter(|(status, _)| *status == 200).map(|(_, text)| samples(&text))
}

/// Waits until the metrics look like that.
async fn until(metrics: SocketAddr, what: &str, seen: impl Fn(&dyn Fn(&str) -> Option<f64>) -> bool) {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(shown) = look(metrics).await
            && seen(&|series| value(&shown, series))
        {
            return;
        }
        assert!(Instant::now() < deadline, "never {what}");
        tokio::time::sleep(POLL).await;
    }
}

async fn report(metrics: SocketAddr, size: &Size, made: Duration, store: &Path) {
    let before = look(metrics).await.unwrap();
    let begun = Instant::now();
    tokio::time::sleep(size.measured).await;
    let took = begun.elapsed().as_secs_f64();
    let scraping = Instant::now();
    let after = look(metrics).await.unwrap();
    let scrape = scraping.elapsed();
    let sum = |shown: &[(String, f64)], family: &str| -> f64 {
        shown.iter().filter(|(name, _)| name.starts_with(family)).map(|(_, value)| value).sum()
    };
    let grown = |family: &str| sum(&after, family) - sum(&before, family);
    let cpu = grown("process_cpu_seconds_total") / took * 100.0;
    let memory = sum(&after, "process_resident_memory_bytes") / f64::from(1 << 20);
    println!("\n{} attached volumes of three replicas on {} nodes, nothing to do", size.volumes, size.nodes);
    let line = |what: &str, value: String| println!("  {what:<44} {value:>10}");
    line("resident memory, MiB (aim: below 300)", format!("{memory:.0}"));
    line("CPU, % of a core (aim: below 5)", format!("{cpu:.2}"));
    line(
        "runs of reconcilers, per s",
        format!("{:.1}", grown("shorthorn_controller_reconciles_total") / took),
    );
    line(
        "writes to the store, per s",
        format!("{:.2}", grown("shorthorn_controller_store_writes_total") / took),
    );
    line("answer of /metrics, ms", format!("{:.1}", scrape.as_secs_f64() * 1e3));
    line("made and attached, volumes/s", format!("{:.0}", size.volumes as f64 / made.as_secs_f64()));
    line("store, MiB", format!("{:.0}", std::fs::metadata(store).unwrap().len() as f64 / f64::from(1 << 20)));
}
