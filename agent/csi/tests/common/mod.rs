//! A node with the driver on a Unix socket, and volumes that are loop devices of this host.
//!
//! Everything is in a directory of its own, so that tests run beside each other. Its mounts, and the loop
//! devices, are removed when the node is dropped, also when its test has failed. Needs root.
#![allow(dead_code, reason = "every test binary uses a part")]

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use shorthorn_api::csi::v1;
use shorthorn_api::csi::v1::identity_client::IdentityClient;
use shorthorn_api::csi::v1::node_client::NodeClient;
use shorthorn_api::csi::v1::volume_capability::access_mode::Mode;
use shorthorn_api::csi::v1::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use shorthorn_csi::{DRIVER_NAME, IdentityService};
use shorthorn_csi_node::{
    CsiNodeService, DeadMounts, DeviceNumber, NodeOptions, NodeVolume, NodeVolumes, VolumeDevice,
    VolumeHealth, VolumesError,
};
use shorthorn_types::VolumeName;
use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::Code;
use tonic::transport::{Channel, Endpoint, Server};

/// Far more than anything takes.
pub const LIMIT: Duration = Duration::from_secs(120);
/// The smallest volume that mkfs.xfs makes a file system on is 300 MiB.
pub const SIZE: u64 = 320 << 20;

/// Returns true if ext4 lets this process resize: root in a container need not have the right
/// (CAP_SYS_RESOURCE).
pub fn may_resize_ext4() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    u64::from_str_radix(line.trim(), 16).unwrap() >> 24 & 1 == 1
}

/// Runs a program that has to succeed; its output.
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).env("LC_ALL", "C").output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

/// Writes to a file or a device on a mount; false: it cannot be.
///
/// A separate process does that. If another test, or the driver, starts a process, that inherits the open
/// files of this one until it runs its program. A mount would then be busy without a user.
pub fn put(path: &Path, text: &str) -> bool {
    let script = r#"printf %s "$2" 1<> "$1""#;
    let writes = Command::new("sh").args(["-c", script, "sh"]).arg(path).arg(text).output().unwrap();
    writes.status.success()
}

/// Returns the content of a file on a mount; as in [`put`], it is never open here.
pub fn text_at(path: &Path) -> String {
    run("cat", &[path.to_str().unwrap()])
}

/// A loop device over a file.
pub struct Loop {
    pub path: PathBuf,
    pub file: PathBuf,
}

impl Loop {
    pub fn over(file: &Path) -> Loop {
        // Beside other tests the first free one may be gone when it is taken.
        let file_text = file.display().to_string();
        for _ in 0..20 {
            let output = Command::new("losetup").args(["--find", "--show", &file_text]).output().unwrap();
            if output.status.success() {
                let path = String::from_utf8(output.stdout).unwrap().trim().into();
                return Loop { path, file: file.to_owned() };
            }
        }
        panic!("no loop device for {file_text}");
    }

    pub fn device(&self) -> VolumeDevice {
        let number = DeviceNumber::of(fs::metadata(&self.path).unwrap().rdev());
        let sectors = fs::read_to_string(format!("/sys/dev/block/{number}/size")).unwrap();
        let size_bytes = sectors.trim().parse::<u64>().unwrap() * 512;
        VolumeDevice { path: self.path.clone(), number, size_bytes }
    }

    /// Makes the device larger, as an engine does.
    pub fn grow(&self, size_bytes: u64) {
        fs::OpenOptions::new().write(true).open(&self.file).unwrap().set_len(size_bytes).unwrap();
        run("losetup", &["-c", self.path.to_str().unwrap()]);
    }

    pub fn write(&self, offset: u64, data: &[u8]) {
        let device = fs::OpenOptions::new().write(true).open(&self.path).unwrap();
        device.write_all_at(data, offset).unwrap();
        device.sync_all().unwrap();
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        // Otherwise the next user of this loop device has it read-only.
        let _ = Command::new("blockdev").arg("--setrw").arg(&self.path).status();
        let _ = Command::new("losetup").arg("-d").arg(&self.path).status();
    }
}

/// The volumes, and their devices after they are staged again.
#[derive(Default)]
struct Table(Mutex<HashMap<String, NodeVolume>>, Mutex<HashMap<String, VolumeDevice>>);

#[tonic::async_trait]
impl NodeVolumes for Table {
    async fn find(&self, volume: &VolumeName) -> Result<NodeVolume, VolumesError> {
        let found = self.0.lock().unwrap().get(volume.as_str()).cloned();
        found.ok_or_else(|| VolumesError::NotFound(volume.clone()))
    }

    async fn take_size(&self, volume: &VolumeName) {
        if let Some(renewed) = self.1.lock().unwrap().remove(volume.as_str()) {
            self.0.lock().unwrap().get_mut(volume.as_str()).unwrap().device = Some(renewed);
        }
    }
}

/// A node with its driver, devices and kubelet directories under test.
pub struct Node {
    table: Arc<Table>,
    /// Dead mounts that the driver has found for kubelet.
    pub dead_mounts: Arc<DeadMounts>,
    loops: Vec<Loop>,
    pub root: PathBuf,
    dir: TempDir,
}

impl Node {
    /// Creates a node without volumes.
    pub fn new() -> Node {
        assert!(is_root(), "loop devices and mounts need root: run this test as root");
        let dir = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(dir.path()).unwrap().join("kubelet");
        fs::create_dir_all(root.join("staging")).unwrap();
        fs::create_dir_all(root.join("pods")).unwrap();
        Node { table: Arc::default(), dead_mounts: Arc::default(), loops: Vec::new(), root, dir }
    }

    /// Adds a volume on an empty device.
    pub fn volume(&mut self, name: &str) -> &Loop {
        self.volume_of(name, SIZE)
    }

    pub fn volume_of(&mut self, name: &str, size_bytes: u64) -> &Loop {
        let file = self.dir.path().join(format!("{name}.img"));
        fs::File::create(&file).unwrap().set_len(size_bytes).unwrap();
        let made = Loop::over(&file);
        self.set(name, |volume| volume.device = Some(made.device()));
        self.loops.push(made);
        self.loops.last().unwrap()
    }

    pub fn device(&self, name: &str) -> VolumeDevice {
        self.table.0.lock().unwrap()[name].device.clone().unwrap()
    }

    /// Changes the reported state of a volume.
    pub fn set(&self, name: &str, change: impl FnOnce(&mut NodeVolume)) {
        let mut table = self.table.0.lock().unwrap();
        let new = || NodeVolume { device: None, read_only: false, condition: VolumeHealth::Healthy };
        change(table.entry(name.to_owned()).or_insert_with(new));
    }

    /// Makes a volume larger; how large its device is then.
    pub fn loops_grow(&self, name: &str, size_bytes: u64) -> u64 {
        let path = self.device(name).path;
        let made = self.loops.iter().find(|made| made.path == path).unwrap();
        made.grow(size_bytes);
        let device = made.device();
        self.set(name, |volume| volume.device = Some(device.clone()));
        device.size_bytes
    }

    /// Sets the device that a volume has once it is staged again.
    pub fn renewed(&self, name: &str, device: VolumeDevice) {
        self.table.1.lock().unwrap().insert(name.to_owned(), device);
    }

    pub fn forget(&self, name: &str) {
        self.table.0.lock().unwrap().remove(name);
    }

    /// Serves the driver as an agent would, and connects to it.
    pub async fn serve(&self) -> Client {
        self.serve_with(Arc::clone(&self.table) as Arc<dyn NodeVolumes>).await
    }

    pub async fn serve_with(&self, volumes: Arc<dyn NodeVolumes>) -> Client {
        let socket = self.dir.path().join(format!("csi-{}.sock", Arc::strong_count(&self.table)));
        let _ = fs::remove_file(&socket);
        let incoming = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
        let options = NodeOptions {
            node_id: "n1".into(),
            zone: Some("z1".into()),
            max_volumes: Some(7),
            roots: vec![self.root.clone()],
        };
        let server = Server::builder()
            .add_service(IdentityService::new(DRIVER_NAME, "1.2.3").server())
            .add_service(
                CsiNodeService::new(volumes, options)
                    .with_dead_mounts(Arc::clone(&self.dead_mounts))
                    .server(),
            )
            .serve_with_incoming(incoming);
        tokio::spawn(server);
        let uri = format!("unix://{}", socket.display());
        let channel = Endpoint::from_shared(uri).unwrap().timeout(LIMIT).connect().await.unwrap();
        Client { node: NodeClient::new(channel.clone()), identity: IdentityClient::new(channel) }
    }

    pub fn staging(&self, name: &str) -> PathBuf {
        let path = self.root.join("staging").join(name);
        let _ = fs::create_dir(&path);
        path
    }

    pub fn target(&self, pod: &str) -> PathBuf {
        let parent = self.root.join("pods").join(pod);
        fs::create_dir_all(&parent).unwrap();
        parent.join("mount")
    }
}

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|meta| meta.uid() == 0)
}

impl Drop for Node {
    fn drop(&mut self) {
        let inside = fs::canonicalize(self.dir.path()).unwrap();
        let mut points: Vec<PathBuf> = mounts().into_iter().map(|mount| mount.1).collect();
        points.reverse();
        for point in points.iter().filter(|point| point.starts_with(&inside)) {
            let _ = Command::new("umount").arg("-l").arg(point).status();
        }
    }
}

/// Returns the number and place of every mount.
pub fn mounts() -> Vec<(String, PathBuf)> {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let fields = table.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    fields.map(|fields| (fields[2].to_owned(), PathBuf::from(fields[4]))).collect()
}

pub fn mounts_at(path: &Path) -> usize {
    mounts().iter().filter(|(_, point)| point == path).count()
}

/// Options of the last mount at a path: of the mount, and of its file system.
pub fn options_at(path: &Path) -> (String, String) {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = table.lines().rfind(|line| line.split(' ').nth(4) == path.to_str()).unwrap();
    let fields: Vec<&str> = line.split(' ').collect();
    (fields[5].to_owned(), (*fields.last().unwrap()).to_owned())
}

pub fn is_block_device(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|meta| meta.file_type().is_block_device())
}

/// Both clients of the socket.
#[derive(Clone)]
pub struct Client {
    pub node: NodeClient<Channel>,
    pub identity: IdentityClient<Channel>,
}

pub type Outcome = Result<(), (Code, String)>;

pub fn outcome<T>(result: Result<tonic::Response<T>, tonic::Status>) -> Outcome {
    result.map(drop).map_err(|status| {
        assert!(status.details().is_empty(), "details have to stay empty: {status:?}");
        (status.code(), status.message().to_owned())
    })
}

#[track_caller]
pub fn refused(outcome: Outcome, code: Code, text: &str) {
    let (found, message) = outcome.unwrap_err();
    assert!(found == code && message.contains(text), "{found:?}: {message}");
}

impl Client {
    pub async fn stage(&mut self, request: v1::NodeStageVolumeRequest) -> Outcome {
        outcome(self.node.node_stage_volume(request).await)
    }

    pub async fn unstage(&mut self, volume: &str, staging: &Path) -> Outcome {
        let staging_target_path = staging.display().to_string();
        let request = v1::NodeUnstageVolumeRequest { volume_id: volume.into(), staging_target_path };
        outcome(self.node.node_unstage_volume(request).await)
    }

    pub async fn publish(&mut self, request: v1::NodePublishVolumeRequest) -> Outcome {
        outcome(self.node.node_publish_volume(request).await)
    }

    pub async fn unpublish(&mut self, volume: &str, target: &Path) -> Outcome {
        let target_path = target.display().to_string();
        let request = v1::NodeUnpublishVolumeRequest { volume_id: volume.into(), target_path };
        outcome(self.node.node_unpublish_volume(request).await)
    }

    pub async fn stats(
        &mut self,
        volume: &str,
        path: &Path,
    ) -> Result<v1::NodeGetVolumeStatsResponse, (Code, String)> {
        let request = v1::NodeGetVolumeStatsRequest {
            volume_id: volume.into(),
            volume_path: path.display().to_string(),
            staging_target_path: String::new(),
        };
        let answer = self.node.node_get_volume_stats(request).await;
        answer.map(tonic::Response::into_inner).map_err(|status| (status.code(), status.message().to_owned()))
    }

    pub async fn expand(
        &mut self,
        volume: &str,
        path: &Path,
        required_bytes: u64,
    ) -> Result<i64, (Code, String)> {
        let request = v1::NodeExpandVolumeRequest {
            volume_id: volume.into(),
            volume_path: path.display().to_string(),
            capacity_range: Some(v1::CapacityRange {
                required_bytes: i64::try_from(required_bytes).unwrap(),
                limit_bytes: 0,
            }),
            ..v1::NodeExpandVolumeRequest::default()
        };
        let answer = self.node.node_expand_volume(request).await;
        answer
            .map(|answer| answer.into_inner().capacity_bytes)
            .map_err(|status| (status.code(), status.message().to_owned()))
    }
}

pub fn capability(access_type: AccessType, mode: Mode) -> v1::VolumeCapability {
    v1::VolumeCapability {
        access_type: Some(access_type),
        access_mode: Some(AccessMode { mode: mode.into() }),
    }
}

pub fn file_system(fs_type: &str) -> v1::VolumeCapability {
    let wanted = MountVolume { fs_type: fs_type.into(), ..MountVolume::default() };
    capability(AccessType::Mount(wanted), Mode::SingleNodeWriter)
}

pub fn block() -> v1::VolumeCapability {
    capability(AccessType::Block(BlockVolume {}), Mode::SingleNodeWriter)
}

pub fn with_mode(wanted: v1::VolumeCapability, mode: Mode) -> v1::VolumeCapability {
    v1::VolumeCapability { access_mode: Some(AccessMode { mode: mode.into() }), ..wanted }
}

pub fn stage(volume: &str, staging: &Path, wanted: v1::VolumeCapability) -> v1::NodeStageVolumeRequest {
    v1::NodeStageVolumeRequest {
        volume_id: volume.into(),
        staging_target_path: staging.display().to_string(),
        volume_capability: Some(wanted),
        ..v1::NodeStageVolumeRequest::default()
    }
}

pub fn publish(
    volume: &str,
    staging: &Path,
    target: &Path,
    wanted: v1::VolumeCapability,
) -> v1::NodePublishVolumeRequest {
    v1::NodePublishVolumeRequest {
        volume_id: volume.into(),
        staging_target_path: staging.display().to_string(),
        target_path: target.display().to_string(),
        volume_capability: Some(wanted),
        ..v1::NodePublishVolumeRequest::default()
    }
}
