//! A volume of three. Each replica is on a host of its own with a disk of its own, and the engine is on one
//! of these hosts. The links between the engine and each replica can be disturbed.

use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use shorthorn_control::{
    ControlClient, EngineSpec, EngineStatus, FrontendChoice, INTENT_CLEAR_AFTER_MS, ProcessCommand,
    RebuildLimits, ReplicaEndpoint, ReplicaSpec, SUM_BYTES_PER_S, ScrubCommand, Secret, Unknown, store_spec,
};
use shorthorn_types::{Members, ReplicaId};

use super::SoakOptions;
use super::disk::Disk;
use super::faulty_link::{FaultyLink, LinkDirection};
use super::supervisor::Supervisor;
use crate::network::{Network, address};
use crate::{DeviceClient, NbdClient, VolumeClient, binary, compare_exports, engine_status, is_whole, until};

/// The number of replicas of each volume.
pub(super) const REPLICAS: usize = 3;
const SIZE_BYTES: u64 = 64 << 20;
/// Room for the volume, and so little more that it can be filled quickly.
const DISK_MIB: u64 = 96;
const REPLICA_PORT: u16 = 7000;
const LINK_PORT: u16 = 7100;
const TLS_STAT: &str = "/proc/net/tls_stat";
const START_LIMIT: Duration = Duration::from_secs(60);
const ENGINE: usize = REPLICAS;
const ENGINE_NAME: &str = "engine";

/// The target of a fault.
#[derive(Clone, Copy, Debug)]
pub(super) enum VolumeProcess {
    Replica(usize),
    Engine,
}

impl VolumeProcess {
    fn index(self) -> usize {
        match self {
            VolumeProcess::Replica(replica) => replica,
            VolumeProcess::Engine => ENGINE,
        }
    }
}

/// A volume with all that belongs to it; gone when dropped, but for its files.
#[derive(Debug)]
pub(super) struct Volume {
    dir: PathBuf,
    name: String,
    engine_host: usize,
    frontend: FrontendChoice,
    // The order of these matters when they are dropped.
    processes: Supervisor,
    links: Vec<FaultyLink>,
    pub disks: Vec<Disk>,
    network: Network,
}

impl Volume {
    /// Makes volume `number` with its files in `dir`, whose path must be short, and starts it.
    ///
    /// # Errors
    /// Something does not start.
    pub fn start(dir: &Path, number: usize, options: &SoakOptions) -> Result<Volume> {
        let network = Network::create(REPLICAS)?;
        let engine_host = number % REPLICAS;
        let name = format!("v{number}");
        let disk = |replica: usize| {
            let group = format!("shorthorn-{}-{number}-{replica}", std::process::id());
            Disk::make(&dir.join(format!("disk{replica}")), DISK_MIB, &group)
        };
        let disks = (0..REPLICAS).map(disk).collect::<Result<Vec<_>>>()?;
        let link = |replica: usize| {
            let at = link_address(engine_host, replica)?;
            FaultyLink::start(&network.file(engine_host), at, replica_address(replica)?)
        };
        let links = (0..REPLICAS).map(link).collect::<Result<Vec<_>>>()?;
        let files = Files { dir, name: &name, disks: &disks };
        files.write_specs(engine_host, options)?;
        let mut commands = Vec::new();
        for replica in 0..REPLICAS {
            commands.push((format!("replica {replica}"), files.replica_command(&network, replica)?));
        }
        commands.push((ENGINE_NAME.to_owned(), files.engine_command(&network, engine_host)?));
        let processes = Supervisor::start(commands);
        let frontend = options.frontend;
        Ok(Volume { dir: dir.to_owned(), name, engine_host, frontend, processes, links, disks, network })
    }

    pub fn link(&self, replica: usize) -> &FaultyLink {
        &self.links[replica]
    }

    pub fn processes(&self) -> &Supervisor {
        &self.processes
    }

    /// Kills the process with SIGKILL; it starts again once [`Volume::revive`] is called.
    pub fn kill(&self, process: VolumeProcess) -> Result<()> {
        self.processes.kill(process.index())
    }

    pub fn revive(&self, process: VolumeProcess) {
        self.processes.release(process.index());
    }

    pub fn signal(&self, process: VolumeProcess, what: Signal) -> Result<()> {
        self.processes.signal(process.index(), what)
    }

    /// Cuts the link to a replica in both directions, or heals it.
    pub fn cut(&self, replica: usize, is_cut: bool) -> Result<()> {
        if replica != self.engine_host {
            return self.network.set_link(replica, !is_cut);
        }
        // Nothing of this link leaves the host.
        for direction in [LinkDirection::ToReplica, LinkDirection::FromReplica] {
            self.links[replica].cut(direction, is_cut);
        }
        Ok(())
    }

    /// Returns the number of engines that have ended by themselves.
    pub fn engine_ends(&self) -> u32 {
        let ends = self.processes.ends();
        ends.iter().filter(|(end, _)| end.starts_with(ENGINE_NAME)).map(|(_, count)| count).sum()
    }

    /// Returns the last error in the engine's log with which a process has ended.
    ///
    /// # Errors
    /// The log cannot be read.
    pub fn last_error_of_engine(&self) -> Result<String> {
        let path = self.dir.join(format!("{ENGINE_NAME}.log"));
        let log = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        let last = log.lines().rev().find_map(|line| line.strip_prefix("shorthorn-agent: "));
        Ok(last.unwrap_or("no error in its log").to_owned())
    }

    fn engine_control(&self) -> PathBuf {
        self.dir.join("engine.control")
    }

    pub fn status(&self) -> Result<EngineStatus> {
        engine_status(&self.engine_control())
    }

    /// Lets late replicas come back at once, like an operator who repairs the volume.
    pub fn forgive(&self) -> Result<()> {
        let command = ScrubCommand { bytes_per_s: Some(1 << 20), repair: false };
        for scrub in [Some(command), None] {
            ControlClient::connect(&self.engine_control())?.request(&ProcessCommand::Scrub { scrub })?;
        }
        Ok(())
    }

    /// Waits until all replicas are members. Replicas that have to stay away because they were late are let
    /// in.
    ///
    /// # Errors
    /// That is not so within `limit`; the status of the engine is in the message.
    pub fn until_whole(&self, limit: Duration) -> Result<()> {
        /// Between two orders to let replicas in.
        const FORGIVE_EVERY: u32 = 200;
        let mut looks = 0;
        until("volume with all members", limit, || {
            let status = self.status()?;
            if is_whole(&status) {
                return Ok(Some(()));
            }
            looks += 1;
            if looks % FORGIVE_EVERY == 0 {
                self.forgive()?;
            }
            anyhow::bail!("{status:#?}")
        })
    }

    /// Returns a client that may have `depth` requests in flight.
    pub fn client(&self, depth: usize) -> Result<Box<dyn VolumeClient + Send>> {
        if self.frontend == FrontendChoice::Socket {
            return Ok(Box::new(NbdClient::connect(&self.dir.join("nbd"), &self.name, START_LIMIT)?));
        }
        let device = self.status()?.endpoint.context("the engine has no device")?;
        Ok(Box::new(DeviceClient::open(&device, depth)?))
    }

    /// Stops all processes in order.
    ///
    /// # Errors
    /// One does not stop.
    pub fn stop(&mut self) -> Result<()> {
        self.processes.let_end();
        if self.frontend != FrontendChoice::Socket {
            // SIGTERM alone leaves the device to the next engine.
            ControlClient::connect(&self.engine_control())?.request(&ProcessCommand::Stop)?;
        }
        self.processes.stop()
    }

    /// Checks that no frame was sent to a replica in clear, and that the kernels have encrypted.
    ///
    /// # Errors
    /// The host or the link with the problem.
    pub fn check_encrypted(&self) -> Result<()> {
        /// The counters of records and of sockets with keys, by Documentation/networking/tls.rst of Linux.
        const COUNTERS: [&str; 2] = ["TlsTxSw", "TlsRxSw"];
        for (replica, link) in self.links.iter().enumerate() {
            ensure!(!link.has_seen_clear(), "frames were sent to replica {replica} in clear");
            let mut command = Command::new("nsenter");
            let output = command.arg(net_flag(&self.network, replica)).args(["cat", TLS_STAT]).output()?;
            let text = String::from_utf8_lossy(&output.stdout);
            let of = |name: &str| {
                let line = text.lines().find(|line| line.split_whitespace().next() == Some(name))?;
                line.split_whitespace().nth(1)?.parse::<u64>().ok()
            };
            let is_used = COUNTERS.iter().all(|name| of(name).is_some_and(|count| count > 0));
            ensure!(is_used, "the kernel of host {replica} has not encrypted:\n{text}");
        }
        Ok(())
    }

    /// Compares the replicas byte by byte, once they are stopped.
    ///
    /// # Errors
    /// Two differ, or one cannot be read.
    pub fn compare_replicas(&self) -> Result<()> {
        let directories: Vec<PathBuf> = self.disks.iter().map(replica_directory).collect();
        compare_exports(&directories, &self.dir).map(drop)
    }
}

fn replica_directory(disk: &Disk) -> PathBuf {
    disk.small.mount_point.join("replica")
}

fn replica_address(replica: usize) -> Result<SocketAddr> {
    Ok(SocketAddr::new(address(replica).parse()?, REPLICA_PORT))
}

fn link_address(engine_host: usize, replica: usize) -> Result<SocketAddr> {
    let port = LINK_PORT + u16::try_from(replica)?;
    Ok(SocketAddr::new(address(engine_host).parse()?, port))
}

/// The files of a volume that is being made.
struct Files<'a> {
    dir: &'a Path,
    name: &'a str,
    disks: &'a [Disk],
}

impl Files<'_> {
    fn file(&self, replica: usize, extension: &str) -> PathBuf {
        self.dir.join(format!("replica{replica}.{extension}"))
    }

    fn write_specs(&self, engine_host: usize, options: &SoakOptions) -> Result<()> {
        let ids: Vec<ReplicaId> = (1..).map(ReplicaId::from_random).take(REPLICAS).collect();
        let volume: shorthorn_types::VolumeName = self.name.parse()?;
        let secret = Secret::new([0x5a; 32]);
        let mut endpoints = Vec::new();
        for (replica, id) in ids.iter().enumerate() {
            let spec = ReplicaSpec {
                volume: volume.clone(),
                replica: *id,
                directory: replica_directory(&self.disks[replica]),
                size_bytes: SIZE_BYTES,
                create: true,
                create_once: false,
                first_members: Members::new(ids.iter().copied())?,
                secret: secret.clone(),
                data_socket: self.file(replica, "data"),
                data_address: Some(replica_address(replica)?),
                control_socket: self.file(replica, "control"),
                sum_bytes_per_s: Some(SUM_BYTES_PER_S),
                encrypt_in_transit: options.encrypt,
                unknown: Unknown::default(),
            };
            store_spec(&self.file(replica, "json"), &spec)?;
            endpoints.push(ReplicaEndpoint {
                replica: *id,
                addresses: vec![format!("tcp:{}", link_address(engine_host, replica)?)],
                local: replica == engine_host,
            });
        }
        let spec = EngineSpec {
            volume,
            size_bytes: SIZE_BYTES,
            attach: 1,
            replicas: endpoints,
            frontend: options.frontend,
            secret,
            state_file: self.dir.join("engine.state"),
            control_socket: self.dir.join("engine.control"),
            frontend_socket: self.dir.join("nbd"),
            device_dir: self.dir.join("dev"),
            queues: 1,
            depth: 128,
            replica_timeout_ms: u32::try_from(options.replica_timeout.as_millis())?,
            granted: None,
            rebuild: RebuildLimits::default(),
            intent_clear_after_ms: Some(INTENT_CLEAR_AFTER_MS),
            verify_reads: false,
            continues: None,
            encrypt_in_transit: options.encrypt,
            unknown: Unknown::default(),
        };
        Ok(store_spec(&self.dir.join("engine.json"), &spec)?)
    }

    fn replica_command(&self, network: &Network, replica: usize) -> Result<Command> {
        // The shell becomes the process: so that one is in the control group from its beginning.
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(self.disks[replica].group_file());
        command.args([Path::new("nsenter"), &net_flag(network, replica), &binary("shorthorn-agent")?]);
        command.args(["replica", "serve", "--spec"]).arg(self.file(replica, "json"));
        self.with_log(command, &format!("replica{replica}"))
    }

    fn engine_command(&self, network: &Network, host: usize) -> Result<Command> {
        let mut command = Command::new("nsenter");
        command.args([&net_flag(network, host), &binary("shorthorn-agent")?]);
        command.args(["engine", "--spec"]).arg(self.dir.join("engine.json"));
        self.with_log(command, ENGINE_NAME)
    }

    fn with_log(&self, mut command: Command, name: &str) -> Result<Command> {
        let path = self.dir.join(format!("{name}.log"));
        let log = File::options().create(true).append(true).open(&path);
        let log = log.with_context(|| format!("opening {}", path.display()))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        Ok(command)
    }
}

fn net_flag(network: &Network, host: usize) -> PathBuf {
    PathBuf::from(format!("--net={}", network.file(host).display()))
}
