//! A controller at the size of a large cluster: 100,000 attached volumes of three replicas on 5,000 nodes.
//!
//! The controller is the real program with a store in memory-backed storage, so that the disk of this machine
//! does not count. The agents are those of the tests, all in this process. At its end it prints its figures,
//! each beside its limit:
//!
//! 1. placements per second, from the API call to the store: replicas that get a place
//! 2. CPU time and memory of an idle controller
//! 3. the time of a CSI CreateVolume, which is that from a claim to Bound without the sidecar
//! 4. the time from the death of a node until its volumes are attached elsewhere, while other volumes rebuild
//! 5. the time from the kill of the controller until the next decides, and for Kubernetes the time in which a
//!    new leader reads all objects
//!
//! The controller of 1 to 5 has an embedded store. Not measured: the API server of a cluster, and the time
//! until the Lease of a dead leader has run out (12 s).
//!
//! At full size a figure beyond its limit fails the run. Other numbers come while it runs, among them the
//! CPU time of the controller after each step. `--volumes N` and `--nodes N` make it smaller. `--minutes N`
//! limits its duration (default 90): then it fails.
#![allow(
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    dead_code,
    missing_docs,
    reason = "a benchmark ends if an assumption of it is wrong"
)]

#[path = "../tests/cluster/support/agent.rs"]
mod agent;
#[path = "fleet/api_server.rs"]
mod api_server;
#[path = "fleet/controller.rs"]
mod controller;
#[path = "fleet/figures.rs"]
mod figures;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use agent::{FakeAgent, Truth};
use controller::{Controller, create, publish, unpublish};
use figures::{Figures, Limit, line};
use shorthorn_api::v1;
use shorthorn_controller::open_files;
use tokio::task::{JoinHandle, JoinSet};

/// Calls under way at once.
const CALLS: usize = 64;
/// The quiet time before the measurement begins.
const CALM: Duration = Duration::from_secs(10);
/// The interval at which rebuilding engines report their progress, as real ones do.
const PROGRESS_EVERY: Duration = Duration::from_secs(1);
/// The wait before a refused call is repeated. Kubernetes begins with a second.
const REPEAT: Duration = Duration::from_millis(500);
/// CreateVolume calls that are timed.
const TIMED_CREATES: usize = 100;
const REPLICAS: u32 = 3;
/// Volumes attached to the node that dies.
const LOST_VOLUMES: usize = 60;
/// The size from which the limits count.
const FULL: (usize, usize) = (5_000, 100_000);
/// The longest duration of a run.
const MINUTES_MAX: usize = 90;

struct Size {
    nodes: usize,
    volumes: usize,
    rebuilding: usize,
    measured: Duration,
    calm: Duration,
}

struct Fleet {
    size: Size,
    agents: Vec<FakeAgent>,
    serving: Vec<JoinHandle<()>>,
    truth: Arc<Mutex<Truth>>,
    controller: Controller,
    figures: Figures,
}

#[tokio::main]
async fn main() {
    // `cargo test --benches` runs this too, and wants no more than that it works.
    let is_test = !std::env::args().any(|argument| argument == "--bench");
    let size = if is_test {
        let (measured, calm) = (Duration::from_secs(1), Duration::ZERO);
        Size { nodes: 6, volumes: 12, rebuilding: 3, measured, calm }
    } else {
        let (nodes, volumes) = (option("--nodes").unwrap_or(5_000), option("--volumes").unwrap_or(100_000));
        Size { nodes, volumes, rebuilding: volumes / 20, measured: Duration::from_secs(60), calm: CALM }
    };
    // Each agent has a socket, and two for its connection.
    open_files::raise_limit();
    let minutes = option("--minutes").unwrap_or(MINUTES_MAX);
    let limit = Duration::from_mins(u64::try_from(minutes).unwrap());
    // The controller ends with the run.
    let ended = tokio::time::timeout(limit, run(size)).await;
    ended.unwrap_or_else(|_| panic!("the benchmark did not end within {minutes} minutes"));
}

async fn run(size: Size) {
    let mut fleet = Fleet::start(size).await;
    println!("\n{} attached volumes of three replicas on {} nodes", fleet.size.volumes, fleet.size.nodes);
    fleet.fill().await;
    fleet.idle().await;
    fleet.create().await;
    fleet.lose_a_node().await;
    fleet.take_over().await;
    fleet.read_objects().await;
    let are_met = fleet.figures.show();
    let is_full = (fleet.size.nodes, fleet.size.volumes) >= FULL;
    assert!(are_met || !is_full, "a figure is beyond its limit");
    let truth = fleet.truth.lock().unwrap();
    assert!(truth.violations.is_empty(), "{:#?}", truth.violations);
}

/// Returns the number that follows that word on the command line.
fn option(word: &str) -> Option<usize> {
    std::env::args().skip_while(|argument| argument != word).nth(1).map(|number| number.parse().unwrap())
}

fn node(at: usize) -> String {
    format!("node-{at:04}")
}

fn volume(at: usize) -> String {
    format!("volume-{at:06}")
}

impl Size {
    /// Returns the node that dies.
    fn lost(&self) -> usize {
        self.nodes - 1
    }

    /// Returns the node to which a volume is attached: one after the other, and more to the node that dies.
    fn home(&self, volume: usize) -> usize {
        let per_node = self.volumes.div_ceil(self.nodes);
        let is_extra = volume < LOST_VOLUMES.saturating_sub(per_node).min(self.volumes / 4);
        if is_extra { self.lost() } else { volume % self.nodes }
    }
}

impl Fleet {
    async fn start(size: Size) -> Fleet {
        let truth: Arc<Mutex<Truth>> = Arc::default();
        let agents: Vec<FakeAgent> =
            (0..size.nodes).map(|at| FakeAgent::new(&node(at), Arc::clone(&truth))).collect();
        let controller = Controller::start(&agents);
        let serving = agents.iter().map(|agent| agent.serve(&controller.agent_socket(&agent.name))).collect();
        let figures = Figures::default();
        let fleet = Fleet { size, agents, serving, truth, controller, figures };
        fleet.all_followed(fleet.size.nodes).await;
        for_each(fleet.size.nodes, |at| {
            let mut api = fleet.controller.api();
            async move {
                let request = v1::AddNodeDiskRequest { node: node(at), path: "/disk".into() };
                api.add_disk(request).await.unwrap();
            }
        })
        .await;
        fleet
    }

    async fn all_followed(&self, nodes: usize) {
        let ready = "shorthorn_nodes{ready=\"true\"}";
        self.controller.until("all agents followed", |shown| shown.value(ready) == Some(nodes as f64)).await;
    }

    /// Creates every volume, and then attaches each.
    async fn fill(&mut self) {
        let begun = Instant::now();
        for_each(self.size.volumes, |at| {
            let mut api = self.controller.api();
            async move {
                let request = v1::CreateVolumeRequest {
                    name: volume(at),
                    size_bytes: 1 << 30,
                    number_of_replicas: REPLICAS,
                    ..v1::CreateVolumeRequest::default()
                };
                api.create_volume(request).await.unwrap();
            }
        })
        .await;
        let all = self.size.volumes as f64;
        let placed = "shorthorn_volumes{state=\"detached\"";
        self.controller.until("all volumes placed", |shown| shown.sum(placed) >= all).await;
        let placements = all * f64::from(REPLICAS) / begun.elapsed().as_secs_f64();
        self.figures.add("placements per second, stored", placements, Limit::AtLeast(2000.0));
        self.cpu("placing").await;
        let begun = Instant::now();
        for_each(self.size.volumes, |at| {
            let (mut api, home) = (self.controller.api(), node(self.size.home(at)));
            async move {
                let request = v1::AttachVolumeRequest { name: volume(at), node: home };
                api.attach_volume(request).await.unwrap();
            }
        })
        .await;
        let healthy = "shorthorn_volumes{state=\"attached\",robustness=\"healthy\"}";
        let rebuilds = self.end_rebuilds();
        self.controller.until("all volumes healthy", |shown| shown.value(healthy) == Some(all)).await;
        rebuilds.abort();
        line("attached, volumes/s", format!("{:.0}", all / begun.elapsed().as_secs_f64()));
        self.cpu("attaching").await;
    }

    /// Ends every rebuild soon after its begin. If all volumes are attached at once, some engines do not wait
    /// for their last replica.
    fn end_rebuilds(&self) -> JoinHandle<()> {
        let agents = self.agents.clone();
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(PROGRESS_EVERY).await;
                agents.iter().for_each(FakeAgent::end_rebuilds);
            }
        })
    }

    /// Prints the CPU time of the controller since its start.
    async fn cpu(&self, step: &str) {
        let shown = self.controller.read_metrics().await.unwrap();
        let (cpu, runs) =
            (shown.sum("process_cpu_seconds_total"), shown.sum("shorthorn_controller_reconciles_total"));
        line(&format!("  CPU time after {step}, s; runs of reconcilers"), format!("{cpu:.1}; {runs:.0}"));
    }

    async fn idle(&mut self) {
        tokio::time::sleep(self.size.calm).await;
        let before = self.controller.read_metrics().await.unwrap();
        let begun = Instant::now();
        tokio::time::sleep(self.size.measured).await;
        let took = begun.elapsed().as_secs_f64();
        let scraping = Instant::now();
        let after = self.controller.read_metrics().await.unwrap();
        let scrape = scraping.elapsed();
        let grown = |family: &str| after.sum(family) - before.sum(family);
        let cpu = grown("process_cpu_seconds_total") / took * 100.0;
        let memory = after.sum("process_resident_memory_bytes") / f64::from(1 << 20);
        self.figures.add("nothing to do: CPU, % of a core", cpu, Limit::Below(5.0));
        self.figures.add("nothing to do: resident memory, MiB", memory, Limit::Below(2048.0));
        let runs = grown("shorthorn_controller_reconciles_total") / took;
        line("nothing to do: runs of reconcilers, per s", format!("{runs:.1}"));
        let writes = grown("shorthorn_controller_store_writes_total") / took;
        line("nothing to do: writes to the store, per s", format!("{writes:.2}"));
        line("answer of /metrics, ms", format!("{:.1}", scrape.as_secs_f64() * 1e3));
    }

    async fn create(&mut self) {
        let mut csi = self.controller.csi();
        let mut times = Vec::new();
        for at in 0..TIMED_CREATES {
            let begun = Instant::now();
            csi.create_volume(create(&format!("timed-{at}"))).await.unwrap();
            times.push(begun.elapsed());
        }
        times.sort_unstable();
        let middle = times[times.len() / 2].as_secs_f64() * 1e3;
        let longest = times[times.len() - 1].as_secs_f64() * 1e3;
        line("CSI CreateVolume, median, ms", format!("{middle:.1}"));
        self.figures.add("CSI CreateVolume, longest, ms", longest, Limit::Below(1000.0));
    }

    /// Kills the last node while many volumes rebuild.
    async fn lose_a_node(&mut self) {
        let (nodes, lost) = (self.size.nodes, self.size.lost());
        let progress = self.rebuild().await;
        let begun = Instant::now();
        self.serving[lost].abort();
        self.agents[lost].hang_up();
        let moved: Vec<usize> = (0..self.size.volumes).filter(|at| self.size.home(*at) == lost).collect();
        let mut moving = JoinSet::new();
        for (turn, at) in moved.iter().enumerate() {
            let (mut csi, name, target) = (self.controller.csi(), volume(*at), node(turn % (nodes - 1)));
            moving.spawn(async move {
                // The sequence of Kubernetes: off the lost node, then to another one, repeated while it is
                // refused.
                while csi.controller_unpublish_volume(unpublish(&name, &node(lost))).await.is_err() {
                    tokio::time::sleep(REPEAT).await;
                }
                while csi.controller_publish_volume(publish(&name, &target)).await.is_err() {
                    tokio::time::sleep(REPEAT).await;
                }
                begun.elapsed()
            });
        }
        let longest = moving.join_all().await.into_iter().max().unwrap_or_default();
        progress.abort();
        let what = format!("a node dies: its {} volumes attached elsewhere, s", moved.len());
        self.figures.add(&what, longest.as_secs_f64(), Limit::Below(20.0));
        self.cpu("the loss of a node").await;
    }

    /// Has the replicas of some nodes replaced. The new ones never end, and their engines show progress.
    async fn rebuild(&self) -> JoinHandle<()> {
        let per_node = (self.size.volumes * 3).div_ceil(self.size.nodes);
        // Two replicas of one volume on two of these nodes are one rebuild.
        let drained = (self.size.rebuilding * 6 / 5).div_ceil(per_node).min(self.size.nodes / 3);
        // The replicas of a volume are often on neighbours, and count as one rebuild.
        let stride = self.size.nodes / drained.max(1);
        let begun = Instant::now();
        for_each(drained, |at| {
            let mut api = self.controller.api();
            async move {
                let name = node(at * stride);
                let eviction_requested = Some(true);
                let request = v1::SetNodeRequest { name, eviction_requested, ..Default::default() };
                api.set_node(request).await.unwrap();
            }
        })
        .await;
        let wanted = self.size.rebuilding;
        let engines = loop {
            let engines: Vec<(FakeAgent, String)> = self
                .agents
                .iter()
                .flat_map(|agent| agent.rebuilding().into_iter().map(|volume| (agent.clone(), volume)))
                .collect();
            if engines.len() >= wanted {
                break engines;
            }
            assert!(begun.elapsed() < controller::LIMIT, "only {} volumes rebuild", engines.len());
            tokio::time::sleep(controller::POLL).await;
        };
        let count = engines.len();
        line(
            &format!("{count} replicas placed elsewhere and rebuilding, after s"),
            format!("{:.1}", begun.elapsed().as_secs_f64()),
        );
        self.cpu("the begin of rebuilds").await;
        tokio::spawn(async move {
            let mut left_bytes = 1 << 30;
            loop {
                left_bytes -= 1;
                for (agent, volume) in &engines {
                    agent.show_progress(volume, left_bytes);
                }
                tokio::time::sleep(PROGRESS_EVERY).await;
            }
        })
    }

    /// Kills the controller. The next one has the same store.
    async fn take_over(&mut self) {
        let begun = Instant::now();
        self.controller.end();
        // Each agent keeps its end of a connection open.
        self.agents.iter().for_each(FakeAgent::hang_up);
        self.controller.restart();
        let decided = self
            .controller
            .until("a decision", |shown| shown.sum("shorthorn_controller_reconciles_total") > 0.0);
        decided.await;
        let first = begun.elapsed();
        let name = "timed-0".to_owned();
        let mut csi = self.controller.csi();
        while csi.controller_publish_volume(publish(&name, &node(0))).await.is_err() {
            tokio::time::sleep(REPEAT).await;
        }
        let attached = begun.elapsed();
        self.all_followed(self.size.nodes - 1).await;
        let seconds = |time: Duration| format!("{:.1}", time.as_secs_f64());
        let what = "the controller is killed: the next one decides, after s";
        self.figures.add(what, first.as_secs_f64(), Limit::Below(15.0));
        line("the controller is killed: a volume is attached, after s", seconds(attached));
        line("the controller is killed: all agents followed, after s", seconds(begun.elapsed()));
    }

    /// Ends the controller, and reads its objects as a new leader in Kubernetes does.
    async fn read_objects(&mut self) {
        let store = self.controller.end();
        let (count, took) = api_server::read_all(&store).await;
        line("a new leader in Kubernetes reads objects", count.to_string());
        self.figures.add(
            "a new leader in Kubernetes has read all, s",
            took.as_secs_f64(),
            Limit::Below(15.0),
        );
    }
}

/// Does `work` for each of `count` numbers, some at a time.
async fn for_each<F: Future<Output = ()> + Send + 'static>(count: usize, work: impl Fn(usize) -> F) {
    let mut under_way = JoinSet::new();
    for at in 0..count {
        if under_way.len() >= CALLS {
            under_way.join_next().await.unwrap().unwrap();
        }
        under_way.spawn(work(at));
    }
    under_way.join_all().await;
}
