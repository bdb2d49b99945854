//! Generates the messages, clients and servers; needs `protoc` on the PATH, with the
//! common types of Protocol Buffers (package libprotobuf-dev).

/// Messages that shorthornctl prints as they are: the JSON of `--output json` has their fields. Scripts rely
/// on the names.
const PRINTED: [&str; 21] = [
    "Condition",
    "CopyStatus",
    "DiscoveredDevice",
    "Disk",
    "Drain",
    "DrainLeft",
    "EngineMember",
    "EngineStatus",
    "Explanation",
    "LeftOut",
    "NodeDisk",
    "NodeInfo",
    "NodeObject",
    "Orphan",
    "ReplicaMove",
    "ReplicaStatus",
    "Salvage",
    "ScrubStatus",
    "UpgradeEngineResponse",
    "View",
    "Workload",
];

/// Fields with another name in JSON: that of Longhorn, or of a Kubernetes object.
const RENAMED: [(&str, &str); 10] = [
    ("Condition.last_transition", "lastTransitionTime"),
    ("CopyStatus.bytes_per_s", "bytesPerSecond"),
    ("NodeDisk.available_bytes", "storageAvailable"),
    ("NodeDisk.reserved_bytes", "storageReserved"),
    ("NodeDisk.scheduled_bytes", "storageScheduled"),
    ("NodeDisk.total_bytes", "storageMaximum"),
    ("NodeDisk.uuid", "diskUUID"),
    ("Orphan.disk_uuid", "diskUUID"),
    ("Orphan.node", "nodeID"),
    ("Salvage.replica_id", "replicaID"),
];

/// Fields that are not printed, by message: they are of no use for scripts, or the output has them elsewhere.
/// All other fields are printed, which includes new ones.
const HIDDEN: [(&str, &[&str]); 5] = [
    (
        "Disk",
        &[
            "available_bytes",
            "filesystem",
            "path",
            "problem",
            "replicas",
            "total_bytes",
            "trash_bytes",
            "uuid",
        ],
    ),
    (
        "EngineMember",
        &[
            "address",
            "awaited",
            "message",
            "mode",
            "mode_word",
            "replica_id",
            "times_awaited",
            "times_rot_copied",
            "times_rotten",
        ],
    ),
    (
        "EngineStatus",
        &[
            "attach",
            "device",
            "endpoint",
            "expansion",
            "frontend",
            "frontend_word",
            "generation",
            "generation_text",
            "grant_wanted",
            "lost_writes",
            "members",
            "needs_upgrade",
            "phase",
            "phase_word",
            "read_findings",
            "resync",
            "scrub",
            "size_bytes",
            "version",
            "view",
            "view_text",
            "volume",
        ],
    ),
    (
        "NodeInfo",
        &[
            "cluster",
            "data_address",
            "dead_mounts",
            "feature_level",
            "frontends",
            "max_volumes",
            "name",
            "version",
            "warnings",
            "zone",
        ],
    ),
    (
        "ReplicaStatus",
        &[
            "addresses",
            "allocated_bytes",
            "committed",
            "directory",
            "failures",
            "generation",
            "generation_text",
            "proposed",
            "replica_id",
            "size_bytes",
            "volume",
        ],
    ),
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = [
        "shorthorn/v1/status.proto",
        "shorthorn/v1/node.proto",
        "shorthorn/v1/nodes.proto",
        "shorthorn/v1/controller.proto",
        "shorthorn/v1/tls.proto",
        "csi/v1/csi.proto",
        "pluginregistration/v1/registration.proto",
    ];
    let descriptors = std::path::PathBuf::from(std::env::var("OUT_DIR")?).join("descriptors.bin");
    let mut builder = tonic_prost_build::configure().file_descriptor_set_path(descriptors);
    for message in PRINTED {
        let derive = "#[derive(serde::Serialize)] #[serde(rename_all = \"camelCase\")]";
        builder = builder.message_attribute(format!(".shorthorn.v1.{message}"), derive);
    }
    for (field, name) in RENAMED {
        let rename = format!("#[serde(rename = {name:?})]");
        builder = builder.field_attribute(format!(".shorthorn.v1.{field}"), rename);
    }
    // The printed fields of the disk are those of the NodeDisk.
    builder = builder.field_attribute(".shorthorn.v1.NodeDisk.disk", "#[serde(flatten)]");
    for (message, fields) in HIDDEN {
        for field in fields {
            builder = builder.field_attribute(format!(".shorthorn.v1.{message}.{field}"), "#[serde(skip)]");
        }
    }
    builder.compile_protos(&files, &["."])?;
    Ok(())
}
