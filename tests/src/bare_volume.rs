use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use shorthorn_control::{
    ControlClient, EnginePhase, EngineSpec, FrontendChoice, INTENT_CLEAR_AFTER_MS, ProcessCommand,
    RebuildLimits, ReplicaEndpoint, ReplicaPhase, ReplicaSpec, SUM_BYTES_PER_S, ScrubCommand, ScrubStatus,
    Secret, Unknown, store_spec,
};
use shorthorn_types::{Members, ReplicaId};

use crate::{NbdClient, binary, engine_status, replica_status, signal, until};

const READY_LIMIT: Duration = Duration::from_secs(60);
const STOP_LIMIT: Duration = Duration::from_secs(60);
const NAME: &str = "bare";
const SECRET: Secret = Secret::new([0x5a; 32]);

/// The connections between the engine and the replicas of a [`BareVolume`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Unix sockets.
    Unix,
    /// TCP on the loopback interface.
    Tcp,
    /// The same, encrypted.
    EncryptedTcp,
}

/// Settings for a volume whose processes the test starts itself.
#[derive(Clone, Debug)]
pub struct BareVolumeOptions {
    /// The directory of its files.
    pub dir: PathBuf,
    /// `size_bytes` in the specs of all processes.
    pub size_bytes: u64,
    /// The directories of its replicas.
    pub disks: Vec<PathBuf>,
    /// `replica_timeout_ms` of the engine.
    pub replica_timeout_ms: u32,
    /// True if replicas compare every read with their sums.
    pub verify_reads: bool,
    /// The connections between the engine and the replicas. By TCP, a replica cannot be started again.
    pub transport: Transport,
}

impl BareVolumeOptions {
    /// Returns 64 MiB and three replicas, all in `dir`.
    #[must_use]
    pub fn new(dir: &Path) -> BareVolumeOptions {
        let disks = vec![dir.to_owned(); 3];
        BareVolumeOptions {
            dir: dir.to_owned(),
            size_bytes: 64 << 20,
            disks,
            replica_timeout_ms: 5000,
            verify_reads: false,
            transport: Transport::Unix,
        }
    }
}

/// Replicas and an engine without a supervisor: a killed process stays dead until the test starts it again.
#[derive(Debug)]
pub struct BareVolume {
    options: BareVolumeOptions,
    ids: Vec<ReplicaId>,
    replicas: Vec<Option<Child>>,
    engine: Option<Child>,
}

impl BareVolume {
    /// Makes a volume and starts everything.
    ///
    /// # Errors
    /// Something does not start.
    pub fn start(options: BareVolumeOptions) -> Result<BareVolume> {
        let ids: Vec<ReplicaId> = (1..).map(ReplicaId::from_random).take(options.disks.len()).collect();
        let replicas = ids.iter().map(|_| None).collect();
        let mut volume = BareVolume { options, ids, replicas, engine: None };
        volume.write_replica_specs()?;
        for index in 0..volume.ids.len() {
            volume.start_replica(index)?;
        }
        volume.write_engine_spec()?;
        volume.start_engine()?;
        Ok(volume)
    }

    fn write_replica_specs(&self) -> Result<()> {
        let volume: shorthorn_types::VolumeName = NAME.parse()?;
        let by_tcp = self.options.transport != Transport::Unix;
        for (index, id) in self.ids.iter().enumerate() {
            let spec = ReplicaSpec {
                volume: volume.clone(),
                replica: *id,
                directory: self.directory(index),
                size_bytes: self.options.size_bytes,
                create: true,
                create_once: false,
                first_members: Members::new(self.ids.iter().copied())?,
                secret: SECRET,
                data_socket: self.file(index, "data"),
                data_address: by_tcp.then(|| SocketAddr::from((Ipv4Addr::LOCALHOST, 0))),
                control_socket: self.file(index, "control"),
                sum_bytes_per_s: Some(SUM_BYTES_PER_S),
                encrypt_in_transit: self.encrypts(),
                unknown: Unknown::default(),
            };
            store_spec(&self.file(index, "json"), &spec)?;
        }
        Ok(())
    }

    fn encrypts(&self) -> bool {
        self.options.transport == Transport::EncryptedTcp
    }

    /// Writes the spec of the engine, with the addresses of the replicas, which run already.
    fn write_engine_spec(&self) -> Result<()> {
        let scheme = if self.options.transport == Transport::Unix { "unix:" } else { "tcp:" };
        let endpoint = |(index, id): (usize, &ReplicaId)| {
            let known = replica_status(&self.file(index, "control"))?.addresses;
            let addresses = known.into_iter().filter(|address| address.starts_with(scheme)).collect();
            Ok(ReplicaEndpoint { replica: *id, addresses, local: true })
        };
        let spec = EngineSpec {
            volume: NAME.parse()?,
            size_bytes: self.options.size_bytes,
            attach: 1,
            replicas: self.ids.iter().enumerate().map(endpoint).collect::<Result<_>>()?,
            frontend: FrontendChoice::Socket,
            secret: SECRET,
            state_file: self.options.dir.join("engine.state"),
            control_socket: self.engine_control(),
            frontend_socket: self.options.dir.join("nbd"),
            device_dir: self.options.dir.join("dev"),
            queues: 1,
            depth: 128,
            replica_timeout_ms: self.options.replica_timeout_ms,
            granted: None,
            rebuild: RebuildLimits::default(),
            intent_clear_after_ms: Some(INTENT_CLEAR_AFTER_MS),
            verify_reads: self.options.verify_reads,
            continues: None,
            encrypt_in_transit: self.encrypts(),
            unknown: Unknown::default(),
        };
        Ok(store_spec(&self.options.dir.join("engine.json"), &spec)?)
    }

    fn file(&self, replica: usize, extension: &str) -> PathBuf {
        self.options.dir.join(format!("replica{replica}.{extension}"))
    }

    /// Returns the path of the files that the replica serves.
    #[must_use]
    pub fn directory(&self, replica: usize) -> PathBuf {
        self.options.disks[replica].join(format!("replica{replica}"))
    }

    /// Returns the directories of all replicas.
    #[must_use]
    pub fn directories(&self) -> Vec<PathBuf> {
        (0..self.ids.len()).map(|index| self.directory(index)).collect()
    }

    /// Returns the control socket of the engine.
    #[must_use]
    pub fn engine_control(&self) -> PathBuf {
        self.options.dir.join("engine.control")
    }

    /// Starts a replica and waits until it serves.
    ///
    /// # Errors
    /// It does not.
    pub fn start_replica(&mut self, index: usize) -> Result<()> {
        let mut command = Command::new(binary("shorthorn-agent")?);
        command.args(["replica", "serve", "--spec"]).arg(self.file(index, "json"));
        let control = self.file(index, "control");
        let serves = |pid: u32| {
            let status = replica_status(&control)?;
            Ok((status.phase == ReplicaPhase::Serving && status.pid == pid).then_some(()))
        };
        start_until(&mut command, &mut self.replicas[index], "replica that serves", serves)
    }

    /// Starts the engine and waits until it serves.
    ///
    /// # Errors
    /// It does not.
    pub fn start_engine(&mut self) -> Result<()> {
        let mut command = Command::new(binary("shorthorn-agent")?);
        command.args(["engine", "--spec"]).arg(self.options.dir.join("engine.json"));
        let control = self.engine_control();
        let serves = |pid: u32| {
            let status = engine_status(&control)?;
            Ok((status.phase == EnginePhase::Serving && status.pid == Some(pid)).then_some(()))
        };
        start_until(&mut command, &mut self.engine, "engine that serves", serves)
    }

    /// Returns the id of a replica in the engine's status.
    #[must_use]
    pub fn replica_id(&self, index: usize) -> ReplicaId {
        self.ids[index]
    }

    /// Returns the process id of a replica.
    ///
    /// # Errors
    /// It does not run.
    pub fn replica_pid(&self, index: usize) -> Result<i32> {
        let child = self.replicas[index].as_ref().context("the replica does not run")?;
        Ok(child.id().try_into()?)
    }

    /// Kills the engine with SIGKILL.
    ///
    /// # Errors
    /// It does not run.
    pub fn kill_engine(&mut self) -> Result<()> {
        kill(self.engine.take().context("no engine runs")?)
    }

    /// Kills a replica with SIGKILL.
    ///
    /// # Errors
    /// It does not run.
    pub fn kill_replica(&mut self, index: usize) -> Result<()> {
        kill(self.replicas[index].take().context("the replica does not run")?)
    }

    /// Returns the address of the volume for NBD clients.
    #[must_use]
    pub fn uri(&self) -> String {
        format!("nbd+unix:///{NAME}?socket={}", self.options.dir.join("nbd").display())
    }

    /// Returns a client of the volume.
    ///
    /// # Errors
    /// Its engine does not answer.
    pub fn client(&self) -> Result<NbdClient> {
        NbdClient::connect(&self.options.dir.join("nbd"), NAME, READY_LIMIT)
    }

    /// Orders the engine to scrub, and waits until it has seen everything.
    ///
    /// # Errors
    /// It does not, within `limit`.
    pub fn scrub(&self, command: ScrubCommand, limit: Duration) -> Result<ScrubStatus> {
        let control = self.engine_control();
        let before = engine_status(&control)?.scrub.and_then(|scrub| scrub.number);
        ControlClient::connect(&control)?.request(&ProcessCommand::Scrub { scrub: Some(command) })?;
        until("end of the scrub", limit, || {
            let scrub = engine_status(&control)?.scrub.context("no scrub has begun")?;
            Ok(Some(scrub).filter(|scrub| scrub.number > before && !scrub.running))
        })
    }

    /// Stops the engine, then the replicas, as a supervisor would.
    ///
    /// # Errors
    /// One does not end in time, or not well.
    pub fn stop(mut self) -> Result<()> {
        for child in self.engine.take().into_iter().chain(self.replicas.iter_mut().filter_map(Option::take)) {
            terminate(child)?;
        }
        Ok(())
    }
}

impl Drop for BareVolume {
    fn drop(&mut self) {
        for child in self.engine.take().into_iter().chain(self.replicas.iter_mut().filter_map(Option::take)) {
            let _ = kill(child);
        }
    }
}

/// Starts a process, and again if it ends, like a supervisor: resources may still be in use.
fn start_until(
    command: &mut Command,
    child: &mut Option<Child>,
    what: &str,
    serves: impl Fn(u32) -> Result<Option<()>>,
) -> Result<()> {
    command.stdin(Stdio::null());
    until(what, READY_LIMIT, || {
        let ended =
            child.as_mut().map_or(Ok(true), |child| child.try_wait().map(|status| status.is_some()))?;
        if ended {
            *child = Some(command.spawn()?);
        }
        serves(child.as_ref().context("nothing was started")?.id())
    })
}

fn kill(mut child: Child) -> Result<()> {
    child.kill()?;
    child.wait()?;
    Ok(())
}

fn terminate(mut child: Child) -> Result<()> {
    signal(child.id().try_into()?, Signal::SIGTERM)?;
    let ended = until("end of a process that has to stop", STOP_LIMIT, || Ok(child.try_wait()?));
    match ended {
        Ok(status) => ensure!(status.success(), "a process ended with {status}"),
        Err(error) => {
            let _ = kill(child);
            return Err(error);
        }
    }
    Ok(())
}
