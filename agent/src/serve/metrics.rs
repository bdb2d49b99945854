//! Metrics of the agent at `/metrics`, and `/readyz`. docs/metrics.md explains every metric.
//!
//! Instances are shown as in the table. At each request, the agent asks engines for their counters and disks
//! for their space. Each question has a time limit: a hanging disk or engine is left out.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use shorthorn_api::v1::instance::Detail;
use shorthorn_api::v1::{self, InstanceKind, InstanceState};
use shorthorn_control::{EnginePhase, IoCounters, MemberMode};
use shorthorn_metrics::{MetricsPage, MetricsSource};
use shorthorn_types::VolumeName;
use shorthorn_types::status::DeviceState;
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use crate::serve::csi::DriverState;
use crate::serve::devices;
use crate::serve::disks::Disks;
use crate::serve::instance::{Table, io_counters};
use crate::serve::tls::NodeTls;

/// The time limit for an engine to return its counters, which it has in memory.
const ENGINE_LIMIT: Duration = Duration::from_secs(1);
/// The number of engines that are asked at once.
const ENGINES_AT_ONCE: usize = 32;
/// The time limit for disks and devices. Clients that wait for a page have more patience.
const DISKS_LIMIT: Duration = Duration::from_secs(3);

const STATES: [(InstanceState, &str); 5] = [
    (InstanceState::Starting, "starting"),
    (InstanceState::Running, "running"),
    (InstanceState::Stopping, "stopping"),
    (InstanceState::Stopped, "stopped"),
    (InstanceState::Error, "error"),
];

/// The sources of the metrics once the agent serves.
pub struct MetricsInputs {
    pub table: Arc<Table>,
    /// The disks with their space and trash.
    pub disks: Arc<Disks>,
    /// The directory of the device nodes.
    pub device_dir: PathBuf,
    /// The CSI driver; none: it is off.
    pub driver: Option<Arc<DriverState>>,
    /// The certificate; none: no address has TLS.
    pub tls: Option<Arc<NodeTls>>,
}

/// The health and the metrics of the agent.
pub struct AgentMetrics {
    shown: OnceLock<MetricsInputs>,
    /// A lock held while disks are probed, even if the caller is gone: a hanging disk gets no second probe.
    reading: Arc<Mutex<()>>,
}

impl AgentMetrics {
    /// Returns the metrics of an agent that does not serve yet.
    pub fn new() -> Arc<AgentMetrics> {
        Arc::new(AgentMetrics { shown: OnceLock::new(), reading: Arc::default() })
    }

    /// Sets the sources when the agent begins to serve.
    pub fn show(&self, shown: MetricsInputs) {
        // It is called once.
        let _ = self.shown.set(shown);
    }
}

#[async_trait]
impl MetricsSource for AgentMetrics {
    fn program(&self) -> (&'static str, &'static str) {
        ("agent", env!("CARGO_PKG_VERSION"))
    }

    fn ready(&self) -> Result<(), String> {
        let shown = self.shown.get().ok_or("the agent is starting")?;
        let problem = shown.driver.as_ref().and_then(|driver| driver.problem());
        problem.map_or(Ok(()), |problem| Err(format!("the CSI driver cannot be served: {problem}")))
    }

    async fn fill(&self, page: &mut MetricsPage) {
        let Some(shown) = self.shown.get() else { return };
        show_instances(&shown.table.list(), page);
        show_io(&ask_engines(shown.table.engines()).await, page);
        if let Some(driver) = &shown.driver {
            show_registration(driver.registered.load(Ordering::Relaxed), page);
        }
        if let Some(tls) = &shown.tls {
            show_certificate(tls.expiry_s().unwrap_or_default(), page);
        }
        let reading = Arc::clone(&self.reading);
        let found = read_disks(reading, Arc::clone(&shown.disks), shown.device_dir.clone()).await;
        show_answer(found.is_some(), page);
        if let Some((disks, devices)) = found {
            show_disks(&disks, page);
            show_devices(&devices, page);
        }
    }
}

type DisksAndDevices = (Vec<v1::Disk>, Vec<v1::Device>);

/// Returns the disks and devices; none if they cannot be read in time.
async fn read_disks(
    reading: Arc<Mutex<()>>,
    disks: Arc<Disks>,
    device_dir: PathBuf,
) -> Option<DisksAndDevices> {
    let alone = reading.try_lock_owned().ok()?;
    let read = tokio::task::spawn_blocking(move || {
        let _alone = alone;
        // The existence of an engine does not matter: volumes without one are counted as recovering
        // elsewhere.
        (disks.list(), devices::list(&device_dir, |_| true).unwrap_or_default())
    });
    tokio::time::timeout(DISKS_LIMIT, read).await.ok()?.ok()
}

/// Returns the counters of each engine; those that do not answer are left out.
async fn ask_engines(engines: Vec<(VolumeName, PathBuf)>) -> BTreeMap<VolumeName, IoCounters> {
    let mut answers = BTreeMap::new();
    let mut asked = JoinSet::new();
    let mut waiting = engines.into_iter();
    loop {
        while asked.len() < ENGINES_AT_ONCE
            && let Some((volume, control)) = waiting.next()
        {
            asked.spawn(async move { (volume, ask(&control).await) });
        }
        match asked.join_next().await {
            Some(Ok((volume, Some(counters)))) => drop(answers.insert(volume, counters)),
            Some(_) => {}
            None => return answers,
        }
    }
}

async fn ask(control: &Path) -> Option<IoCounters> {
    tokio::time::timeout(ENGINE_LIMIT, io_counters(control)).await.ok()?.ok()
}

fn show_instances(instances: &[v1::Instance], page: &mut MetricsPage) {
    for (kind, name, help) in [
        (InstanceKind::Engine, "shorthorn_agent_engines", "Engines on this node"),
        (InstanceKind::Replica, "shorthorn_agent_replicas", "Replicas on this node"),
    ] {
        let gauges = page.gauges(name, help);
        for (state, word) in STATES {
            let here = instances.iter().filter(|one| one.kind() == kind && one.state() == state).count();
            gauges.set(&[("state", word)], number(here));
        }
    }
    let failures = page.gauges(
        "shorthorn_replica_failures",
        "Consecutive failures of the disk of a replica. Each failure ends the replica's process, which is \
         restarted after 0 s, 60 s, 10 min, and then an hour each. 0 after an hour without failures",
    );
    for instance in instances {
        if let Some(Detail::Replica(replica)) = &instance.detail {
            let labels = [("volume", replica.volume.as_str()), ("replica", replica.replica_id.as_str())];
            failures.set(&labels, u64::from(replica.failures));
        }
    }
    let engines: Vec<&v1::EngineStatus> = instances
        .iter()
        .filter_map(|instance| match &instance.detail {
            Some(Detail::Engine(engine)) => Some(engine),
            _ => None,
        })
        .collect();
    show_volumes(&engines, page);
    show_copies(&engines, page);
}

fn show_volumes(engines: &[&v1::EngineStatus], page: &mut MetricsPage) {
    let sizes = page
        .gauges("shorthorn_volume_size_bytes", "Size of the device of a volume with its engine on this node");
    let frozen = page.gauges(
        "shorthorn_volume_frozen",
        "1 if requests of a volume wait for replicas or the arbiter, otherwise 0",
    );
    let lost = page.gauges(
        "shorthorn_volume_lost_writes",
        "1 if every request fails because all replicas lost power and unflushed writes may be gone. 0 again \
         from the next attachment",
    );
    let outdated = page.gauges(
        "shorthorn_volume_engine_outdated",
        "1 if the program of a volume's engine differs from the installed program, otherwise 0",
    );
    let members = page.gauges(
        "shorthorn_volume_replicas",
        "Replicas of a volume, by mode: member, rebuilding, connecting or failed",
    );
    let awaited = page.gauges(
        "shorthorn_volume_replicas_awaited",
        "Late members without which the other members cannot continue: requests wait for them",
    );
    let waits = page.counters(
        "shorthorn_volume_replica_waits",
        "Number of times that requests had to wait for a late member, since the engine process started",
    );
    let rot = page.counters(
        "shorthorn_volume_replica_rot",
        "Number of times that the source of a copy had rot according to its checksums, since the engine \
         process started. Another member then supplied the data, to the source with rot too",
    );
    let rot_copied = page.counters(
        "shorthorn_volume_replica_rot_copied",
        "Number of times that rot was copied as it is, because no other member had sound data",
    );
    for engine in engines {
        let volume = ("volume", engine.volume.as_str());
        let late = engine.members.iter().filter(|member| member.is_awaited());
        awaited.set(&[volume], number(late.count()));
        for member in &engine.members {
            let replica = ("replica", member.replica_id.as_str());
            waits.add(&[volume, replica], member.times_awaited);
            rot.add(&[volume, replica], member.times_rotten);
            rot_copied.add(&[volume, replica], member.times_rot_copied);
        }
        sizes.set(&[volume], engine.size_bytes);
        frozen.set(&[volume], u64::from(engine.known_phase() == Some(EnginePhase::Frozen)));
        lost.set(&[volume], u64::from(engine.lost_writes));
        engine.needs_upgrade.iter().for_each(|needed| outdated.set(&[volume], u64::from(*needed)));
        for mode in MemberMode::ALL {
            let count = engine.members.iter().filter(|member| member.known_mode() == mode).count();
            members.set(&[volume, ("mode", mode.as_str())], number(count));
        }
    }
}

fn show_copies(engines: &[&v1::EngineStatus], page: &mut MetricsPage) {
    let total = page.gauges(
        "shorthorn_volume_rebuild_total_bytes",
        "Bytes to copy in total to a replica that is being rebuilt",
    );
    let left = page.gauges(
        "shorthorn_volume_rebuild_left_bytes",
        "Bytes still to copy to a replica that is being rebuilt",
    );
    let unequal =
        page.gauges("shorthorn_volume_resync_left_bytes", "Bytes still to resync after an unclean stop");
    for engine in engines {
        let volume = ("volume", engine.volume.as_str());
        for member in &engine.members {
            if let Some(copy) = &member.copy {
                let labels = [volume, ("replica", member.replica_id.as_str())];
                total.set(&labels, copy.total_bytes);
                left.set(&labels, copy.left_bytes);
            }
        }
        unequal.set(&[volume], engine.resync.as_ref().map_or(0, |copy| copy.left_bytes));
    }
}

fn show_io(answers: &BTreeMap<VolumeName, IoCounters>, page: &mut MetricsPage) {
    let operations = page.counters(
        "shorthorn_volume_operations",
        "Requests completed since the engine process started: read, write, flush and discard (with zeroes)",
    );
    let bytes = page.counters("shorthorn_volume_bytes", "Bytes of successful requests");
    let failed = page.counters("shorthorn_volume_operation_errors", "Requests that ended with an error");
    let refused = page.counters(
        "shorthorn_volume_refused_operations",
        "Requests that no volume supports, answered with an error",
    );
    let seconds = page.seconds(
        "shorthorn_volume_operation_seconds",
        "Total duration of requests in the engine. Divided by the number of operations: the mean latency",
    );
    for (volume, counters) in answers {
        refused.add(&[("volume", volume.as_str())], counters.refused);
        let kinds = [
            ("read", counters.read),
            ("write", counters.write),
            ("flush", counters.flush),
            ("discard", counters.discard),
        ];
        for (kind, counter) in kinds {
            let labels = [("volume", volume.as_str()), ("operation", kind)];
            operations.add(&labels, counter.operations);
            bytes.add(&labels, counter.bytes);
            failed.add(&labels, counter.failed);
            seconds.add(&labels, Duration::from_micros(counter.duration_us).as_secs_f64());
        }
    }
}

fn show_registration(is_registered: bool, page: &mut MetricsPage) {
    let registered = page.gauges(
        "shorthorn_agent_csi_registered",
        "1 if kubelet has confirmed the registration of the CSI driver, otherwise 0; absent if CSI is off",
    );
    registered.set(&[], u64::from(is_registered));
}

fn show_certificate(expiry_s: u64, page: &mut MetricsPage) {
    let expiry = page.gauges(
        "shorthorn_agent_certificate_expiry_seconds",
        "Seconds since 1970 at which the certificate of this node expires; 0 if the node has none. Absent if \
         no address is served by TLS",
    );
    expiry.set(&[], expiry_s);
}

fn show_answer(do_disks_answer: bool, page: &mut MetricsPage) {
    let answered = page.gauges(
        "shorthorn_agent_disks_answer",
        "1 if all disks answer, 0 if a disk hangs; the metrics of disks and devices are then omitted",
    );
    answered.set(&[], u64::from(do_disks_answer));
}

fn show_disks(disks: &[v1::Disk], page: &mut MetricsPage) {
    let sizes = page.gauges("shorthorn_disk_size_bytes", "Size of the file system of a disk");
    let free = page.gauges("shorthorn_disk_available_bytes", "Free space of the file system of a disk");
    let usable = page.gauges("shorthorn_disk_usable", "1 if the disk can be used, 0 if it has a problem");
    let replicas = page.gauges("shorthorn_disk_replicas", "Replica directories on a disk, in use or not");
    for disk in disks {
        let path = [("disk", disk.path.as_str())];
        sizes.set(&path, disk.total_bytes);
        free.set(&path, disk.available_bytes);
        usable.set(&path, u64::from(disk.is_usable()));
        replicas.set(&path, number(disk.replicas.len()));
    }
}

fn show_devices(devices: &[v1::Device], page: &mut MetricsPage) {
    let gauges = page
        .gauges("shorthorn_agent_devices", "Device nodes of volumes on this node; stale ones have no device");
    for state in DeviceState::ALL {
        let count = devices.iter().filter(|device| device.known_state() == Some(state)).count();
        gauges.set(&[("state", state.as_str())], number(count));
    }
}

fn number(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use shorthorn_control::IoCounter;
    use shorthorn_testkit::docs::check_generated;
    use shorthorn_testkit::metrics::documented;

    use super::*;

    /// A page with a sample of every metric.
    fn full_page() -> String {
        let copy = Some(v1::CopyStatus { total_bytes: 100, left_bytes: 40, bytes_per_s: 1 });
        let member = |id: &str, mode: MemberMode, copy| {
            let replica_id = id.into();
            v1::EngineMember { replica_id, copy, ..v1::EngineMember::default() }.with_mode(mode)
        };
        let engine = v1::EngineStatus {
            volume: "v1".into(),
            lost_writes: true,
            needs_upgrade: Some(true),
            size_bytes: 4096,
            members: vec![
                member("0000000a", MemberMode::Member, None),
                member("0000000b", MemberMode::Rebuilding, copy),
                v1::EngineMember {
                    awaited: Some(true),
                    times_awaited: 2,
                    times_rotten: 3,
                    times_rot_copied: 1,
                    ..member("0000000c", MemberMode::Member, None)
                },
            ],
            ..v1::EngineStatus::default()
        }
        .with_phase(EnginePhase::Frozen);
        let instance = v1::Instance {
            kind: InstanceKind::Engine.into(),
            name: "v1".into(),
            state: InstanceState::Running.into(),
            detail: Some(Detail::Engine(engine)),
            ..v1::Instance::default()
        };
        let mut page = MetricsPage::default();
        let replica = v1::ReplicaStatus {
            volume: "v1".into(),
            replica_id: "0000000a".into(),
            failures: 2,
            ..v1::ReplicaStatus::default()
        };
        let failed = v1::Instance {
            kind: InstanceKind::Replica.into(),
            state: InstanceState::Error.into(),
            detail: Some(Detail::Replica(replica)),
            ..v1::Instance::default()
        };
        show_instances(&[instance, failed], &mut page);
        let write = IoCounter { operations: 3, bytes: 12288, failed: 1, duration_us: 1500 };
        let counters = IoCounters { write, refused: 2, ..IoCounters::default() };
        show_io(&BTreeMap::from([("v1".parse().unwrap(), counters)]), &mut page);
        let disk =
            v1::Disk { path: "/d".into(), available_bytes: 7, problem: "full".into(), ..v1::Disk::default() };
        show_disks(&[disk], &mut page);
        let states =
            [DeviceState::Live, DeviceState::Recovering, DeviceState::Recovering, DeviceState::Stale];
        show_devices(&states.map(|state| v1::Device::default().with_state(state)), &mut page);
        show_registration(true, &mut page);
        show_certificate(7, &mut page);
        show_answer(true, &mut page);
        page.text().unwrap()
    }

    #[test]
    fn the_documentation_has_every_metric() {
        check_generated("docs/metrics.md", "agent", &documented(&full_page()));
    }

    #[test]
    fn volumes_are_shown_with_members_copies_and_counters() {
        let text = full_page();
        for line in [
            "shorthorn_agent_engines{state=\"running\"} 1\n",
            "shorthorn_agent_replicas{state=\"running\"} 0\n",
            "shorthorn_agent_replicas{state=\"error\"} 1\n",
            "shorthorn_replica_failures{volume=\"v1\",replica=\"0000000a\"} 2\n",
            "shorthorn_volume_size_bytes{volume=\"v1\"} 4096\n",
            "shorthorn_volume_replicas_awaited{volume=\"v1\"} 1\n",
            "shorthorn_volume_replica_waits_total{volume=\"v1\",replica=\"0000000c\"} 2\n",
            "shorthorn_volume_replica_rot_total{volume=\"v1\",replica=\"0000000c\"} 3\n",
            "shorthorn_volume_replica_rot_copied_total{volume=\"v1\",replica=\"0000000c\"} 1\n",
            "shorthorn_volume_frozen{volume=\"v1\"} 1\n",
            "shorthorn_volume_lost_writes{volume=\"v1\"} 1\n",
            "shorthorn_volume_replicas{volume=\"v1\",mode=\"member\"} 2\n",
            "shorthorn_volume_replicas{volume=\"v1\",mode=\"failed\"} 0\n",
            "shorthorn_volume_rebuild_left_bytes{volume=\"v1\",replica=\"0000000b\"} 40\n",
            "shorthorn_volume_operations_total{volume=\"v1\",operation=\"write\"} 3\n",
            "shorthorn_volume_bytes_total{volume=\"v1\",operation=\"write\"} 12288\n",
            "shorthorn_volume_refused_operations_total{volume=\"v1\"} 2\n",
            "shorthorn_volume_operation_errors_total{volume=\"v1\",operation=\"write\"} 1\n",
            "shorthorn_volume_operation_seconds_total{volume=\"v1\",operation=\"write\"} 0.0015\n",
            "shorthorn_disk_available_bytes{disk=\"/d\"} 7\n",
            "shorthorn_disk_usable{disk=\"/d\"} 0\n",
            "shorthorn_agent_devices{state=\"live\"} 1\n",
            "shorthorn_agent_devices{state=\"recovering\"} 2\n",
            "shorthorn_agent_devices{state=\"stale\"} 1\n",
        ] {
            assert!(text.contains(line), "{line:?} is not in {text}");
        }
    }
}
