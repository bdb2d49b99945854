mod nested;

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use shorthorn_types::status::{Frontend, UnknownFrontend};
use shorthorn_types::{Members, ReplicaId, Secret, View, VolumeName};
use thiserror::Error;

/// The fields of a file that this version does not know. A later version has written them, and may be
/// installed again, so they are kept when the file is written. A setting that must not be overlooked gets
/// another file name instead of a field.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Unknown(BTreeMap<String, Value>);

/// The settings of a replica process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaSpec {
    /// The volume that it belongs to.
    pub volume: VolumeName,
    /// Identity of the replica in views; the engine refuses a process with another one.
    pub replica: ReplicaId,
    /// The directory with the replica's files.
    pub directory: PathBuf,
    /// The size of a new directory in bytes. An existing one keeps the size to which engines have grown it.
    pub size_bytes: u64,
    /// True if a missing directory may be made.
    pub create: bool,
    /// True if a process makes the directory only once until the host boots. A directory that is missing
    /// afterwards is on a disk that is not mounted. A record beside the control socket says that it was made.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub create_once: bool,
    /// Members of the view that the volume was created with.
    pub first_members: Members,
    /// Secret of the volume.
    pub secret: Secret,
    /// Unix socket for data, for engines on the same host.
    pub data_socket: PathBuf,
    /// IP address and port (0: any) for data, for engines on other hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_address: Option<std::net::SocketAddr>,
    /// The path at which the process serves its status and commands.
    pub control_socket: PathBuf,
    /// The maximum rate in bytes per second at which a replica reads idle blocks for their sums. None, which
    /// is 0 in the file: the replica keeps no sums, and does not detect rot.
    #[serde(
        default = "sum_bytes_per_s_default",
        with = "shorthorn_types::optional::number",
        skip_serializing_if = "is_sum_bytes_per_s_default"
    )]
    pub sum_bytes_per_s: Option<u64>,
    /// True if connections to other hosts are encrypted. The fingerprint of the directory says so too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub encrypt_in_transit: bool,
    /// Fields of a later version.
    #[serde(flatten)]
    pub unknown: Unknown,
}

/// The default of [`ReplicaSpec::sum_bytes_per_s`].
pub const SUM_BYTES_PER_S: u64 = 32 << 20;

fn sum_bytes_per_s_default() -> Option<u64> {
    Some(SUM_BYTES_PER_S)
}

/// Returns true if the value is the default. Then it is omitted, so that replicas of an earlier version
/// accept the spec.
#[allow(clippy::trivially_copy_pass_by_ref)] // as serde wants it
fn is_sum_bytes_per_s_default(value: &Option<u64>) -> bool {
    *value == sum_bytes_per_s_default()
}

/// The settings of an engine process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineSpec {
    /// The name by which device nodes, logs and replicas know the volume.
    pub volume: VolumeName,
    /// The size of the volume in bytes. Smaller replicas grow before they are used, and larger ones are
    /// refused.
    pub size_bytes: u64,
    /// The number of the attachment, a part of the generation of the engine.
    pub attach: u64,
    /// Every replica of the volume, with its addresses.
    pub replicas: Vec<ReplicaEndpoint>,
    /// The driver that makes the device, or automatic.
    pub frontend: FrontendChoice,
    /// Secret of the volume.
    pub secret: Secret,
    /// State file of the engine: the number of its last start, and its device. Locked while it runs.
    pub state_file: PathBuf,
    /// The path at which the process serves its status and commands.
    pub control_socket: PathBuf,
    /// Socket of the frontend `socket`; empty for other frontends.
    pub frontend_socket: PathBuf,
    /// Directory of the device nodes, /dev/longhorn.
    pub device_dir: PathBuf,
    /// Threads, rings and connections per replica.
    pub queues: u16,
    /// Requests in flight per queue.
    pub depth: u16,
    /// The time after which a replica that does not answer a request has failed.
    pub replica_timeout_ms: u32,
    /// The view that the arbiter granted last, as far as the controller knew when it attached the volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub granted: Option<View>,
    /// The share of the volume's speed that copies may take.
    #[serde(default)]
    pub rebuild: RebuildLimits,
    /// The time after the last write to a region after which the members count as equal there, in
    /// milliseconds. After the engine's death, its successor resyncs only regions that were written since. A
    /// short time makes resyncs small. With a long one, a region that is in use is not marked dirty again and
    /// again before it is written. While that is no more than 1 GiB, it is twelve times as long. None, which
    /// is 0 in the file: regions are cleared only at the engine's orderly end, and an interrupted copy to a
    /// replica starts over.
    #[serde(
        default = "intent_clear_after_ms_default",
        with = "shorthorn_types::optional::count",
        skip_serializing_if = "is_intent_clear_after_ms_default"
    )]
    pub intent_clear_after_ms: Option<u32>,
    /// True if replicas compare every read with the sums of its blocks. A read of rot is answered by another
    /// replica.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub verify_reads: bool,
    /// The first number of attachment since which no user had to release the volume. A current user may have
    /// used it since then, through engines with other numbers. None: no number before this one.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "shorthorn_types::optional::number::deserialize"
    )]
    pub continues: Option<u64>,
    /// True if connections to replicas on other hosts are encrypted. Replicas of such a volume refuse others.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub encrypt_in_transit: bool,
    /// Fields of a later version.
    #[serde(flatten)]
    pub unknown: Unknown,
}

/// The default of [`EngineSpec::intent_clear_after_ms`].
pub const INTENT_CLEAR_AFTER_MS: u32 = 5000;

fn intent_clear_after_ms_default() -> Option<u32> {
    Some(INTENT_CLEAR_AFTER_MS)
}

/// Returns true if the value is the default. Then it is omitted, so that engines of an earlier version accept
/// the spec.
#[allow(clippy::trivially_copy_pass_by_ref)] // as serde wants it
fn is_intent_clear_after_ms_default(value: &Option<u32>) -> bool {
    *value == intent_clear_after_ms_default()
}

/// The share of a volume's speed that copies may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RebuildLimits {
    /// The maximum number of bytes copied per second; none: no limit.
    #[serde(with = "shorthorn_types::optional::number")]
    pub bytes_per_s: Option<u64>,
    /// The most that copying may take of the bytes that move while the volume is busy, 1 to 100.
    pub share_percent: u8,
}

impl Default for RebuildLimits {
    fn default() -> RebuildLimits {
        RebuildLimits { bytes_per_s: None, share_percent: 30 }
    }
}

/// The address of one replica of the volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaEndpoint {
    /// The id of the replica that has to answer there.
    pub replica: ReplicaId,
    /// `unix:<path>` or `tcp:<ip>:<port>`, in the order to try.
    pub addresses: Vec<String>,
    /// True if it is on this host: the engine then reads there first.
    pub local: bool,
}

/// The frontend that the spec of an engine asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FrontendChoice {
    /// The first that works of ublk, nbd, iscsi.
    Auto,
    /// ublk or nothing.
    Ublk,
    /// NBD or nothing.
    Nbd,
    /// iSCSI or nothing.
    Iscsi,
    /// NBD on a Unix socket.
    Socket,
}

impl TryFrom<Frontend> for FrontendChoice {
    type Error = UnknownFrontend;

    fn try_from(frontend: Frontend) -> Result<FrontendChoice, UnknownFrontend> {
        Ok(match frontend {
            Frontend::Auto => FrontendChoice::Auto,
            Frontend::Ublk => FrontendChoice::Ublk,
            Frontend::Nbd => FrontendChoice::Nbd,
            Frontend::Iscsi => FrontendChoice::Iscsi,
            Frontend::Socket => FrontendChoice::Socket,
            Frontend::Unknown => return Err(UnknownFrontend::new(frontend.as_str())),
        })
    }
}

/// The reason why a spec file cannot be used.
#[derive(Debug, Error)]
pub enum SpecError {
    /// The file cannot be read or written.
    #[error("spec file {path}: {source}")]
    Io {
        /// Path of the spec file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The content of the file is not a valid spec.
    #[error("spec file {path}: {source}")]
    Content {
        /// Path of the spec file.
        path: PathBuf,
        /// The error of the parser, with line and column.
        source: serde_json::Error,
    },
}

/// Reads a spec file.
///
/// # Errors
/// [`SpecError`] has the file and its problem.
pub fn load_spec<T: DeserializeOwned>(path: &Path) -> Result<T, SpecError> {
    let bytes = fs::read(path).map_err(|source| SpecError::Io { path: path.to_owned(), source })?;
    serde_json::from_slice(&bytes).map_err(|source| SpecError::Content { path: path.to_owned(), source })
}

/// Writes a spec file, readable by its owner only: whole or not at all, and durably.
///
/// # Errors
/// [`SpecError`] has the file and its problem.
pub fn store_spec<T: Serialize>(path: &Path, spec: &T) -> Result<(), SpecError> {
    let content = |source| SpecError::Content { path: path.to_owned(), source };
    let bytes = serde_json::to_vec_pretty(spec).map_err(content)?;
    write_durably(path, &bytes).map_err(|source| SpecError::Io { path: path.to_owned(), source })
}

/// Writes a changed spec into its file, like [`store_spec`]. Fields of a later version stay at any depth, in
/// `replicas` as well. The types of this version keep those of the top level only.
///
/// # Errors
/// [`SpecError`] has the file and its problem.
pub fn update_spec<T: Serialize + DeserializeOwned>(path: &Path, spec: &T) -> Result<(), SpecError> {
    let content = |source| SpecError::Content { path: path.to_owned(), source };
    let mut new = serde_json::to_value(spec).map_err(content)?;
    // A file that this version cannot read has nothing to keep.
    if let Ok(stored) = load_spec::<Value>(path)
        && let Ok(known) = serde_json::from_value::<T>(stored.clone())
    {
        nested::keep(&stored, &serde_json::to_value(known).map_err(content)?, &mut new);
    }
    store_spec(path, &new)
}

fn write_durably(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension("tmp");
    let mut file =
        fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    fs::File::open(path.parent().unwrap_or_else(|| Path::new("/")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> EngineSpec {
        EngineSpec {
            volume: "v1".parse().unwrap(),
            size_bytes: 4096,
            attach: 1,
            replicas: vec![ReplicaEndpoint {
                replica: ReplicaId::from_random(1),
                addresses: vec!["unix:/run/r".into()],
                local: true,
            }],
            frontend: FrontendChoice::Auto,
            secret: Secret::new([0xa5; 32]),
            state_file: "/tmp/state".into(),
            control_socket: "/tmp/control".into(),
            frontend_socket: "/tmp/nbd".into(),
            device_dir: "/dev/longhorn".into(),
            queues: 1,
            depth: 128,
            replica_timeout_ms: 5000,
            granted: None,
            rebuild: RebuildLimits::default(),
            intent_clear_after_ms: Some(INTENT_CLEAR_AFTER_MS),
            verify_reads: false,
            continues: None,
            encrypt_in_transit: false,
            unknown: Unknown::default(),
        }
    }

    #[test]
    fn files_and_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v1.json");
        store_spec(&path, &spec()).unwrap();
        assert_eq!(load_spec::<EngineSpec>(&path).unwrap(), spec());
    }

    #[test]
    fn work_that_is_off_is_zero_in_the_file() {
        let off = EngineSpec { intent_clear_after_ms: None, ..spec() };
        let written = serde_json::to_value(&off).unwrap();
        assert_eq!(written["intent_clear_after_ms"], 0);
        assert_eq!(serde_json::from_value::<EngineSpec>(written).unwrap(), off);
        let default = serde_json::to_value(spec()).unwrap();
        assert!(default.get("intent_clear_after_ms").is_none(), "the default is left out: {default}");
        let seldom = EngineSpec { intent_clear_after_ms: Some(60_000), ..spec() };
        assert_eq!(serde_json::to_value(&seldom).unwrap()["intent_clear_after_ms"], 60_000);

        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/releases/0.1.0/replica.json");
        let replica: ReplicaSpec = load_spec(&file).unwrap();
        assert!(serde_json::to_value(&replica).unwrap().get("sum_bytes_per_s").is_none());
        let off = ReplicaSpec { sum_bytes_per_s: None, ..replica };
        let written = serde_json::to_value(&off).unwrap();
        assert_eq!(written["sum_bytes_per_s"], 0);
        assert_eq!(serde_json::from_value::<ReplicaSpec>(written).unwrap(), off);
    }

    #[test]
    fn a_spec_of_an_earlier_version_has_the_defaults() {
        let mut old = serde_json::to_value(spec()).unwrap();
        for added in ["rebuild", "intent_clear_after_ms"] {
            old.as_object_mut().unwrap().remove(added);
        }
        assert_eq!(serde_json::from_value::<EngineSpec>(old).unwrap(), spec());
    }

    /// Specs as release 0.1.0 has written them. They stay readable for as long as an update from that release
    /// is.
    #[test]
    fn specs_of_earlier_releases_can_be_read() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/releases/0.1.0");
        let engine: EngineSpec = load_spec(&folder.join("engine.json")).unwrap();
        assert_eq!((engine.attach, engine.replicas.len(), engine.frontend), (4, 2, FrontendChoice::Socket));
        assert_eq!(engine.granted.as_ref().unwrap().members.len(), 1);
        let replica: ReplicaSpec = load_spec(&folder.join("replica.json")).unwrap();
        assert_eq!((replica.first_members.len(), replica.create), (2, false));
        assert_eq!(replica.sum_bytes_per_s, Some(SUM_BYTES_PER_S));
        // The spec is written unchanged: a release that refuses unknown fields accepts it again.
        let written = |spec: serde_json::Value, file: &str| {
            let stored: serde_json::Value = load_spec(&folder.join(file)).unwrap();
            assert_eq!(spec, stored, "{file}");
        };
        written(serde_json::to_value(engine).unwrap(), "engine.json");
        written(serde_json::to_value(replica).unwrap(), "replica.json");
    }

    #[test]
    fn fields_of_a_later_version_are_tolerated_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v1.json");
        let mut later = serde_json::to_value(spec()).unwrap();
        later["colour"] = serde_json::json!({ "hue": 7 });
        later["rebuild"]["haste"] = true.into();
        later["replicas"][0]["rack"] = "b".into();
        fs::write(&path, later.to_string()).unwrap();
        let known: EngineSpec = load_spec(&path).unwrap();
        store_spec(&path, &EngineSpec { attach: 9, ..known }).unwrap();
        let kept: serde_json::Value = load_spec(&path).unwrap();
        assert_eq!((&kept["colour"]["hue"], &kept["attach"]), (&7.into(), &9.into()));
    }

    #[test]
    fn an_update_keeps_fields_of_a_later_version_at_any_depth() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v1.json");
        let second = ReplicaEndpoint { replica: ReplicaId::from_random(2), ..spec().replicas[0].clone() };
        let replicas = vec![spec().replicas[0].clone(), second.clone()];
        let mut later = serde_json::to_value(EngineSpec { replicas, ..spec() }).unwrap();
        later["colour"] = serde_json::json!({ "hue": 7 });
        later["rebuild"]["haste"] = true.into();
        later["replicas"][0]["rack"] = "a".into();
        later["replicas"][1]["rack"] = "b".into();
        fs::write(&path, later.to_string()).unwrap();
        let known: EngineSpec = load_spec(&path).unwrap();
        let third = ReplicaEndpoint { replica: ReplicaId::from_random(3), ..second.clone() };
        let rebuild = RebuildLimits { bytes_per_s: Some(5), ..known.rebuild };
        let changed = EngineSpec { attach: 9, rebuild, replicas: vec![third, second], ..known };
        update_spec(&path, &changed).unwrap();
        assert_eq!(load_spec::<EngineSpec>(&path).unwrap(), changed);
        let kept: Value = load_spec(&path).unwrap();
        assert_eq!((&kept["colour"]["hue"], &kept["rebuild"]["haste"]), (&7.into(), &true.into()));
        assert_eq!(kept["rebuild"]["bytes_per_s"], 5);
        // The replica that is left has its field, and a new one does not get that of another.
        assert_eq!((&kept["replicas"][0]["rack"], &kept["replicas"][1]["rack"]), (&Value::Null, &"b".into()));
    }

    #[test]
    fn an_update_does_not_need_an_earlier_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v1.json");
        update_spec(&path, &spec()).unwrap();
        assert_eq!(load_spec::<EngineSpec>(&path).unwrap(), spec());
        fs::write(&path, "{").unwrap();
        update_spec(&path, &spec()).unwrap();
        assert_eq!(load_spec::<EngineSpec>(&path).unwrap(), spec());
    }

    #[test]
    fn errors_name_file_and_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v1.json");
        fs::write(&path, "{\n  \"volume\": \"v1\",\n  \"attach\": \"x\"\n}").unwrap();
        let text = load_spec::<EngineSpec>(&path).unwrap_err().to_string();
        assert!(
            text.contains("v1.json") && text.contains("expected u64") && text.contains("line 3"),
            "{text}"
        );
    }
}
