//! Measures how fast and how evenly replicas get their places in a large cluster. The cluster has 1,000 nodes
//! in ten zones. 10,000 volumes of three replicas come one after the other.
//!
//! A placement is one replica that has a place. The benchmark measures the way of the controller. The
//! volume's reconciler decides over the cluster state of all objects until the volume has its replicas. Each
//! object that it writes is put into that cluster state, as the store's cache does. The benchmark leaves out
//! the time in which the store makes them durable.
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_types,
    missing_docs,
    reason = "a benchmark has a clock, and ends if an assumption of it is wrong"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use shorthorn_controller_core::objects::{
    ConditionType, DiskSpec, DiskStatus, Finding, Key, Kind, Metadata, Node, NodeSpec, NodeStatus,
    ResourceVersion, Robustness, Secret, VolumeState,
};
use shorthorn_controller_core::observed::{AgentInfo, AgentLink, Agents, ObservedAgent, ObservedDisk};
use shorthorn_controller_core::rebalance::RebalanceInput;
use shorthorn_controller_core::reconcile::{Context, Settings, reconcile};
use shorthorn_controller_core::requests::{Change, CreateVolume};
use shorthorn_controller_core::{Action, ClusterState, NodeName, Timestamp};
use shorthorn_types::limits::MAX_MEMBERS;

const NODES: usize = 1_000;
const ZONES: usize = 10;
const VOLUMES: usize = 10_000;
const REPLICAS: usize = 3;
const VOLUME_BYTES: u64 = 10 << 30;
const DISK: &str = "/var/lib/longhorn";
const DISK_BYTES: u64 = 4 << 40;
/// The maximum number of runs, above those that a volume needs to have its replicas.
const RUNS_MAX: usize = 10;

struct Cluster {
    state: ClusterState,
    agents: Agents,
    revision: u64,
    random: u64,
}

fn main() {
    // `cargo test --benches` runs this too, and wants no more than that it works.
    let is_test = !std::env::args().any(|argument| argument == "--bench");
    let sizes = (option("--nodes").unwrap_or(NODES), option("--volumes").unwrap_or(VOLUMES));
    let (nodes, volumes) = if is_test { (20, 50) } else { sizes };
    let mut cluster = Cluster::of(nodes);
    let mut deciding = Duration::ZERO;
    let mut slowest = Duration::ZERO;
    let mut last_tenth = Duration::ZERO;
    for at in 0..volumes {
        let name = cluster.create(at);
        let start = Instant::now();
        cluster.converge(&name);
        let took = start.elapsed();
        deciding += took;
        slowest = slowest.max(took);
        if at >= volumes - volumes / 10 {
            last_tenth += took;
        }
    }
    let placements = (volumes * REPLICAS) as f64;
    let (least, most) = cluster.spread();
    println!(
        "\nplacing {} replicas of {volumes} volumes on {nodes} nodes in {ZONES} zones",
        volumes * REPLICAS
    );
    let line = |what: &str, value: String| println!("  {what:<34} {value:>10}");
    line("placements/s (one replica each)", format!("{:.0}", placements / deciding.as_secs_f64()));
    line("of those the last tenth, per s", format!("{:.0}", placements / 10.0 / last_tenth.as_secs_f64()));
    line("slowest volume, ms", format!("{:.2}", slowest.as_secs_f64() * 1e3));
    line("even, replicas per node", format!("{:.2}", placements / nodes as f64));
    line("least, replicas per node", least.to_string());
    line("most, replicas per node", most.to_string());
    line("volumes not in 3 zones", cluster.badly_zoned().to_string());
    cluster.plan_moves(line);
}

/// Returns the number that follows that word on the command line.
fn option(word: &str) -> Option<usize> {
    std::env::args().skip_while(|argument| argument != word).nth(1).map(|number| number.parse().unwrap())
}

impl Cluster {
    fn of(nodes: usize) -> Cluster {
        let now = Timestamp::UNIX_EPOCH;
        let mut cluster =
            Cluster { state: ClusterState::default(), agents: Agents::default(), revision: 0, random: 1 };
        for at in 0..nodes {
            let name = NodeName::new(&format!("node-{at:04}")).unwrap();
            cluster.agents.insert(name.clone(), agent(&name, now));
            cluster.state.insert(node(&name, at, now).into());
        }
        cluster
    }

    fn create(&mut self, at: usize) -> String {
        let name = format!("volume-{at:05}");
        let wanted = CreateVolume {
            name: name.clone(),
            size_bytes: VOLUME_BYTES,
            number_of_replicas: Some(u32::try_from(REPLICAS).unwrap()),
            ..CreateVolume::default()
        };
        let change = wanted.apply(&self.state, Secret::new([7; 32]), Timestamp::UNIX_EPOCH).unwrap();
        let Change::Store(volume) = change else { panic!("{name} is there already") };
        self.state.insert(volume.into());
        name
    }

    /// Runs the volume's reconciler until its replicas have places.
    fn converge(&mut self, name: &str) {
        let key = Key::new(Kind::Volume, name);
        for _ in 0..RUNS_MAX {
            let random = std::array::from_fn::<u64, MAX_MEMBERS, _>(|_| self.next_random());
            let context = Context {
                cluster: &self.state,
                agents: &self.agents,
                now: Timestamp::UNIX_EPOCH,
                random,
                settings: Settings::default(),
            };
            let decision = reconcile(&context, &key);
            for action in decision.actions {
                let Action::Write(mut object) = action else { continue };
                self.revision += 1;
                object.metadata_mut().resource_version = ResourceVersion::new(self.revision);
                self.state.insert(*object);
            }
            if self.state.volumes[name].status.state == VolumeState::Detached {
                return;
            }
        }
        panic!("{name} has no places: {:?}", self.state.volumes[name].status);
    }

    fn next_random(&mut self) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        self.random >> 16
    }

    /// Plans the moves, for the cluster as it is and with a tenth more empty nodes.
    fn plan_moves(&mut self, line: impl Fn(&str, String)) {
        let now = Timestamp::UNIX_EPOCH;
        let names: Vec<String> = self.state.volumes.keys().cloned().collect();
        for name in names {
            let mut volume = self.state.volumes[&name].clone();
            volume.status.state = VolumeState::Attached;
            volume.status.robustness = Robustness::Healthy;
            self.state.insert(volume.into());
        }
        for what in ["as it is", "with a tenth more nodes"] {
            let start = Instant::now();
            let plan = RebalanceInput::of(&self.state, &self.agents, Settings::default().scheduling, &[])
                .unwrap()
                .plan();
            let took = start.elapsed();
            line(&format!("moves {what}"), plan.moves.len().to_string());
            line("  to find them, ms", format!("{:.0}", took.as_secs_f64() * 1e3));
            let nodes = self.state.nodes.len();
            for at in nodes..nodes + nodes / 10 {
                let name = NodeName::new(&format!("node-{at:04}")).unwrap();
                self.agents.insert(name.clone(), agent(&name, now));
                self.state.insert(node(&name, at, now).into());
            }
        }
    }

    fn spread(&self) -> (usize, usize) {
        let mut on: BTreeMap<&str, usize> = self.state.nodes.keys().map(|name| (name.as_str(), 0)).collect();
        for replica in self.state.replicas.values() {
            *on.get_mut(replica.spec.node_id.as_str()).unwrap() += 1;
        }
        (*on.values().min().unwrap(), *on.values().max().unwrap())
    }

    fn badly_zoned(&self) -> usize {
        let mut zones: BTreeMap<&str, BTreeSet<_>> = BTreeMap::new();
        for replica in self.state.replicas.values() {
            let zone = self.state.nodes[replica.spec.node_id.as_str()].zone();
            zones.entry(replica.spec.volume_name.as_str()).or_default().insert(zone);
        }
        zones.values().filter(|zones| zones.len() < REPLICAS).count()
    }
}

fn agent(name: &NodeName, now: Timestamp) -> ObservedAgent {
    let disk =
        ObservedDisk { total_bytes: DISK_BYTES, available_bytes: DISK_BYTES, ..ObservedDisk::default() };
    ObservedAgent {
        link: AgentLink::Synced,
        info: Some(AgentInfo { name: name.to_string(), ..AgentInfo::default() }),
        disks: BTreeMap::from([(DISK.to_owned(), disk)]),
        ..ObservedAgent::new("http://agent", now)
    }
}

fn node(name: &NodeName, at: usize, now: Timestamp) -> Node {
    let disks = BTreeMap::from([(DISK.to_owned(), DiskSpec::of_new(DISK_BYTES))]);
    let disk = DiskStatus { storage_maximum: DISK_BYTES, ..DiskStatus::default() };
    let mut status = NodeStatus {
        disk_status: BTreeMap::from([(DISK.to_owned(), disk)]),
        zone: Some(format!("zone-{}", at % ZONES).parse().unwrap()),
        ..NodeStatus::default()
    };
    status.conditions.set(ConditionType::Ready, Finding::Well, now);
    Node {
        metadata: Metadata::new(name.as_str(), now),
        spec: NodeSpec { allow_scheduling: true, disks, ..NodeSpec::default() },
        status,
    }
}
