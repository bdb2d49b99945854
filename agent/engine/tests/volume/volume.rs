//! A volume whose processes a test starts and kills.

use std::cell::Cell;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use shorthorn_control::{
    ControlClient, EnginePhase, EngineSpec, EngineStatus, FrontendChoice, INTENT_CLEAR_AFTER_MS, IoCounters,
    ProcessCommand, ProcessStatus, RebuildLimits, ReplicaEndpoint, ReplicaSpec, SUM_BYTES_PER_S, Secret,
    Unknown, store_spec,
};
use shorthorn_regions::{Marked, SetKey, WriteIntentLog};
use shorthorn_store::{OpenOptions, Store};
use shorthorn_testkit::waiting::wait_for;
use shorthorn_types::{MarkAction, MarkRegions, Members, RegionSet, Regions, RegionsOf, ReplicaId};

use crate::LIMIT;

pub struct Volume {
    dir: tempfile::TempDir,
    pub size_bytes: u64,
    /// Number of the attachment that the next engine is started for.
    pub attach: u64,
    /// The minimum time for which a region stays dirty.
    pub intent_clear_after_ms: u32,
    pub replica_timeout_ms: u32,
    /// Replicas from this one on have their directories in a file system of their own, which can be frozen.
    pub first_on_disk: usize,
    disk: Option<Disk>,
    engine: Option<Child>,
    replicas: Vec<Option<Child>>,
    first: usize,
}

impl Volume {
    /// Returns a new volume that is served.
    pub fn start(replicas: usize, size_bytes: u64) -> Volume {
        Volume::start_with(replicas, size_bytes, |_| {})
    }

    pub fn start_with(replicas: usize, size_bytes: u64, change: impl FnOnce(&mut Volume)) -> Volume {
        // Not /tmp: that may be a file system without O_DIRECT.
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let (engine, attach) = (None, 1);
        let mut volume = Volume {
            dir,
            size_bytes,
            attach,
            intent_clear_after_ms: INTENT_CLEAR_AFTER_MS,
            replica_timeout_ms: 5000,
            first_on_disk: usize::MAX,
            disk: None,
            engine,
            replicas: Vec::new(),
            first: replicas,
        };
        change(&mut volume);
        volume.disk = (volume.first_on_disk < replicas)
            .then(|| Disk::mount(&volume.file("image"), &volume.file("disk")));
        for _ in 0..replicas {
            volume.add_replica();
        }
        volume.start_engine();
        volume.wait("it serves", |engine| engine.phase == EnginePhase::Serving);
        volume
    }

    fn id(number: usize) -> ReplicaId {
        ReplicaId::from_random(u64::try_from(number).unwrap() + 10)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn place(&self, number: usize) -> PathBuf {
        let folder = if number < self.first_on_disk { "" } else { "disk/" };
        self.file(&format!("{folder}replica{number}"))
    }

    /// Freezes the file system of the replicas from [`Volume::first_on_disk`] on: it takes no more writes.
    pub fn freeze_disk(&self) {
        self.disk.as_ref().unwrap().freeze(true);
    }

    /// Writes that have waited meanwhile are done.
    pub fn thaw_disk(&self) {
        self.disk.as_ref().unwrap().freeze(false);
    }

    pub fn frontend(&self) -> PathBuf {
        self.file("nbd")
    }

    pub fn endpoints(&self) -> Vec<ReplicaEndpoint> {
        let endpoint = |number: usize| ReplicaEndpoint {
            replica: Volume::id(number),
            addresses: vec![format!("unix:{}", self.file(&format!("data{number}")).display())],
            local: number == 0,
        };
        (0..self.replicas.len()).map(endpoint).collect()
    }

    fn spawn(&self, role: &str, spec: &str) -> Child {
        let exe = std::env::current_exe().unwrap();
        let program = exe.parent().unwrap().parent().unwrap().join("examples/volume_process");
        let log =
            fs::File::options().create(true).append(true).open(self.file(&format!("{spec}.log"))).unwrap();
        Command::new(program)
            .arg(role)
            .arg(self.file(spec))
            .env_remove("NOTIFY_SOCKET")
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("the example volume_process is built with the tests")
    }

    /// Adds a replica that the engine does not know yet.
    pub fn add_replica(&mut self) {
        self.replicas.push(None);
        self.start_replica(self.replicas.len() - 1);
    }

    pub fn start_replica(&mut self, number: usize) {
        let spec = ReplicaSpec {
            volume: "v1".parse().unwrap(),
            replica: Volume::id(number),
            directory: self.place(number),
            size_bytes: self.size_bytes,
            create: true,
            create_once: false,
            first_members: Members::new((0..self.first).map(Volume::id)).unwrap(),
            secret: Secret::new([7; 32]),
            data_socket: self.file(&format!("data{number}")),
            data_address: None,
            control_socket: self.file(&format!("control{number}")),
            sum_bytes_per_s: Some(SUM_BYTES_PER_S),
            encrypt_in_transit: false,
            unknown: Unknown::default(),
        };
        let name = format!("replica{number}.json");
        store_spec(&self.file(&name), &spec).unwrap();
        self.replicas[number] = Some(self.spawn("replica", &name));
    }

    pub fn start_engine(&mut self) {
        let spec = EngineSpec {
            volume: "v1".parse().unwrap(),
            size_bytes: self.size_bytes,
            attach: self.attach,
            replicas: self.endpoints(),
            frontend: FrontendChoice::Socket,
            secret: Secret::new([7; 32]),
            state_file: self.file("state.json"),
            control_socket: self.file("engine.control"),
            frontend_socket: self.frontend(),
            device_dir: self.file("devices"),
            queues: 2,
            depth: 16,
            replica_timeout_ms: self.replica_timeout_ms,
            granted: None,
            rebuild: RebuildLimits::default(),
            intent_clear_after_ms: Some(self.intent_clear_after_ms),
            verify_reads: false,
            continues: None,
            encrypt_in_transit: false,
            unknown: Unknown::default(),
        };
        store_spec(&self.file("engine.json"), &spec).unwrap();
        self.engine = Some(self.spawn("engine", "engine.json"));
    }

    pub fn kill(&mut self, number: usize) {
        let mut child = self.replicas[number].take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Stops a replica in order: everything that it knows is on its disk.
    pub fn stop_replica(&mut self, number: usize) {
        let mut child = self.replicas[number].take().unwrap();
        kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), Signal::SIGTERM).unwrap();
        assert!(child.wait().unwrap().success());
    }

    /// Returns the directory of a replica.
    pub fn directory(&self, number: usize) -> String {
        self.place(number).display().to_string()
    }

    /// Removes the data of a stopped replica, as if its disk had been replaced.
    pub fn lose_directory(&self, number: usize) {
        fs::remove_dir_all(self.directory(number)).unwrap();
    }

    /// Simulates a power loss of a running replica's host, which loses the block at `offset`, because it was
    /// not durable.
    pub fn lose_power(&mut self, number: usize, offset: u64) {
        self.kill(number);
        let directory = self.place(number);
        let boot = directory.join("shorthorn.boot");
        let mut content: serde_json::Value = serde_json::from_slice(&fs::read(&boot).unwrap()).unwrap();
        content["boot_id"] = "another boot".into();
        // The old check would not match. A document without a check is accepted.
        content.as_object_mut().unwrap().remove("ShorthornCheck");
        fs::write(&boot, content.to_string()).unwrap();
        let head = fs::File::options().write(true).open(directory.join("volume-head-000.img")).unwrap();
        head.write_all_at(&[0; 4096], offset).unwrap();
    }

    /// Pauses a replica. `kill` returns before the threads of a process have stopped, so this waits for that.
    pub fn pause(&self, number: usize) {
        let pid = self.pid(number);
        kill(pid, Signal::SIGSTOP).unwrap();
        let flags = WaitPidFlag::WSTOPPED | WaitPidFlag::WNOWAIT;
        let status = waitid(Id::Pid(pid), flags).unwrap();
        assert_eq!(status, WaitStatus::Stopped(pid, Signal::SIGSTOP));
    }

    /// Continues a stopped replica.
    pub fn resume(&self, number: usize) {
        kill(self.pid(number), Signal::SIGCONT).unwrap();
    }

    fn pid(&self, number: usize) -> Pid {
        let child = self.replicas[number].as_ref().unwrap();
        Pid::from_raw(i32::try_from(child.id()).unwrap())
    }

    /// Asks the engine to leave its device to the next one; the frontend of the tests has none.
    pub fn hand_over(&mut self) {
        let mut engine = self.engine.take().unwrap();
        kill(Pid::from_raw(i32::try_from(engine.id()).unwrap()), Signal::SIGTERM).unwrap();
        assert!(engine.wait().unwrap().success(), "{}", self.log_of_engine());
    }

    /// Waits until the engine has logged `text` more than `times` times.
    pub fn wait_for_log(&self, text: &[&str], times: usize) {
        wait_for(&format!("the engine logs {text:?}"), LIMIT, || {
            if self.count_in_log(text) > times { Ok(()) } else { Err(self.log_of_engine()) }
        });
    }

    /// Returns the number of log lines with all of `text`.
    pub fn count_in_log(&self, text: &[&str]) -> usize {
        let log = self.log_of_engine();
        text.iter().map(|text| log.matches(text).count()).sum()
    }

    pub fn kill_engine(&mut self) {
        let mut child = self.engine.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    pub fn request(&self, command: &ProcessCommand) {
        ControlClient::connect(&self.file("engine.control")).unwrap().request(command).unwrap();
    }

    /// Returns the counters of the engine.
    pub fn counters(&self) -> IoCounters {
        let mut stream = UnixStream::connect(self.file("engine.control")).unwrap();
        stream.write_all(b"\"io\"\n").unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    /// Returns the first status of the engine that is as `wanted`.
    pub fn wait(&self, what: &str, wanted: impl Fn(&EngineStatus) -> bool + Send + 'static) -> EngineStatus {
        let (done, waited) = mpsc::channel();
        let path = self.file("engine.control");
        let (stop, stopped) = mpsc::channel::<()>();
        thread::spawn(move || {
            let mut last = None;
            while stopped.try_recv() != Err(mpsc::TryRecvError::Disconnected) {
                let watch = ControlClient::connect(&path).and_then(ControlClient::watch);
                for status in watch.into_iter().flatten().map_while(Result::ok) {
                    let ProcessStatus::Engine(engine) = status else { continue };
                    if wanted(&engine) {
                        let _ = done.send(engine);
                        return;
                    }
                    last = Some(engine);
                }
                thread::yield_now();
            }
            println!("at last {last:#?}");
        });
        let found = waited.recv_timeout(LIMIT);
        drop(stop);
        found.unwrap_or_else(|_| panic!("{what}: never; the engine's log:\n{}", self.log_of_engine()))
    }

    /// Orders a larger size, which the next engine and new replicas are started with too.
    pub fn expand(&mut self, size_bytes: u64) {
        self.size_bytes = size_bytes;
        self.request(&ProcessCommand::Expand { size_bytes });
    }

    /// Reads the log file of the last process of the replica.
    pub fn log_of_replica(&self, number: usize) -> String {
        fs::read_to_string(self.file(&format!("replica{number}.json.log"))).unwrap_or_default()
    }

    /// Waits until a replica has grown.
    pub fn wait_for_growth(&self, number: usize) {
        wait_for(&format!("replica {number} grows"), LIMIT, || {
            let has_grown = self.log_of_replica(number).contains("the volume has grown");
            if has_grown { Ok(()) } else { Err(self.log_of_engine()) }
        });
    }

    pub fn log_of_engine(&self) -> String {
        fs::read_to_string(self.file("engine.json.log")).unwrap_or_default()
    }

    pub fn stop_engine(&mut self) {
        self.request(&ProcessCommand::Stop);
        let status = self.engine.take().unwrap().wait().unwrap();
        assert_eq!(status.code(), Some(12), "{}", self.log_of_engine());
    }

    /// Stops everything, cleanly.
    pub fn stop(&mut self) {
        self.stop_engine();
        for number in 0..self.replicas.len() {
            if self.replicas[number].is_some() {
                self.stop_replica(number);
            }
        }
    }

    /// Returns how many regions a stopped replica counts as written lately.
    pub fn dirty_regions(&self, number: usize) -> u32 {
        let directory = self.place(number);
        let options = OpenOptions { read_only: true, ..OpenOptions::default() };
        let store = Store::open(directory, options).unwrap();
        let bytes = store.region_files().read(SetKey::Intent).unwrap().unwrap();
        let regions = Regions::of(self.size_bytes);
        let (intent_log, damages) = WriteIntentLog::load(regions, store.info().epoch, &bytes);
        assert!(damages.is_empty(), "{damages:?}");
        intent_log.content(SetKey::Intent).unwrap().len()
    }

    /// Returns the replicas whose out-of-sync sets a stopped replica keeps.
    pub fn out_of_sync_sets(&self, number: usize) -> Vec<ReplicaId> {
        let options = OpenOptions { read_only: true, ..OpenOptions::default() };
        Store::open(self.place(number), options).unwrap().region_files().out_of_sync().unwrap()
    }

    /// Gives a stopped replica the out-of-sync sets of `count` replicas that the volume does not have.
    pub fn keep_unneeded_out_of_sync_sets(&self, number: usize, count: u64) {
        let directory = self.place(number);
        let store = Store::open(directory, OpenOptions::default()).unwrap();
        let regions = Regions::of(self.size_bytes);
        let nothing = RegionSet::empty(regions.count());
        let mut intent_log = WriteIntentLog::new(regions, store.info().epoch, &nothing);
        for gone in 0..count {
            let replica = ReplicaId::from_random(1000 + gone);
            let (of, runs) = (RegionsOf::OutOfSync(replica), Vec::new());
            let mark = MarkRegions { of, action: MarkAction::Add, runs, stamp: 0, size_bytes: None };
            let Marked::Begin(new) = intent_log.mark(&mark).unwrap() else { panic!("it begins") };
            store.region_files().make(SetKey::OutOfSync(replica), &new.file()).unwrap();
        }
        store.close().unwrap();
    }

    /// Checks that all stopped replicas have the same content.
    pub fn assert_equal(&self) {
        let image = |number: usize| {
            let directory = self.place(number);
            let head = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
            let head = head.filter(|path| path.extension().is_some_and(|extension| extension == "img"));
            let heads: Vec<_> = head.collect();
            assert_eq!(heads.len(), 1, "one layer");
            fs::read(&heads[0]).unwrap()
        };
        let first = image(0);
        assert_eq!(first.len() as u64, self.size_bytes);
        for number in 1..self.replicas.len() {
            let other = image(number);
            assert_eq!(first.len(), other.len(), "replica {number} has another size");
            let differs = first.chunks(4096).zip(other.chunks(4096)).position(|(one, two)| one != two);
            assert_eq!(
                differs,
                None,
                "replicas 0 and {number} differ; the engine's log:\n{}",
                self.log_of_engine()
            );
        }
    }
}

/// A file system on a loop device, mounted until this is dropped.
struct Disk {
    at: PathBuf,
    is_frozen: Cell<bool>,
}

impl Disk {
    fn mount(image: &Path, at: &Path) -> Disk {
        fs::create_dir(at).unwrap();
        fs::File::create(image).unwrap().set_len(512 << 20).unwrap();
        run("mkfs.ext4", &[Path::new("-q"), image]);
        run("mount", &[Path::new("-o"), Path::new("loop"), image, at]);
        Disk { at: at.to_owned(), is_frozen: Cell::new(false) }
    }

    fn freeze(&self, is_frozen: bool) {
        run("fsfreeze", &[Path::new(if is_frozen { "-f" } else { "-u" }), &self.at]);
        self.is_frozen.set(is_frozen);
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if self.is_frozen.get() {
            self.freeze(false);
        }
        run("umount", &[Path::new("-l"), &self.at]);
    }
}

fn run(program: &str, arguments: &[&Path]) {
    let status = Command::new(program).args(arguments).status().unwrap();
    assert!(status.success(), "{program} {arguments:?}: {status}; it needs root");
}

impl Drop for Volume {
    fn drop(&mut self) {
        if let Some(disk) = self.disk.as_ref().filter(|disk| disk.is_frozen.get()) {
            disk.freeze(false); // else the processes could not end
        }
        for child in self.engine.iter_mut().chain(self.replicas.iter_mut().flatten()) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
