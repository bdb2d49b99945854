//! The parameters of a StorageClass, with Longhorn's names if the meaning is the same.

use shorthorn_types::limits::MAX_MEMBERS;
use thiserror::Error;

use crate::objects::Frontend;
use crate::requests::CreateVolume;

/// The maximum size of all keys and values together.
const MAX_BYTES: usize = 4 << 10;
/// The parameters by which sidecars describe the origin of a volume.
const OF_KUBERNETES: [&str; 4] = [
    "csi.storage.k8s.io/pvc/name",
    "csi.storage.k8s.io/pvc/namespace",
    "csi.storage.k8s.io/pv/name",
    "csi.storage.k8s.io/fstype",
];
/// The values of a parameter of Longhorn that do not ask for other behaviour than that of Shorthorn.
#[derive(Clone, Copy, Debug)]
enum Harmless {
    /// Any value is accepted, because the parameter has no effect here.
    Any,
    /// The values that are accepted; any other one requests a missing feature.
    Only(&'static [&'static str]),
}

/// The parameters of Longhorn. The use of a backing image is refused by `backingImage` itself, and that of a
/// data source by `dataSource`.
const OF_LONGHORN: [(&str, Harmless); 35] = [
    ("staleReplicaTimeout", Harmless::Any),
    ("fromBackup", Harmless::Only(&[""])),
    ("backupTargetName", Harmless::Only(&["", "default"])),
    ("backupBlockSize", Harmless::Any),
    ("mkfsParams", Harmless::Only(&[""])),
    ("share", Harmless::Only(&["", "false"])),
    ("exclusive", Harmless::Any),
    ("migratable", Harmless::Only(&["", "false"])),
    ("nfsOptions", Harmless::Any),
    ("encrypted", Harmless::Only(&["", "false"])),
    ("replicaAutoBalance", Harmless::Only(&["", "ignored", "disabled"])),
    ("recurringJobSelector", Harmless::Only(&["", "[]"])),
    ("backingImage", Harmless::Only(&[""])),
    ("backingImageDataSourceType", Harmless::Any),
    ("backingImageDataSourceParameters", Harmless::Any),
    ("backingImageChecksum", Harmless::Any),
    ("backingImageMinNumberOfCopies", Harmless::Any),
    ("backingImageNodeSelector", Harmless::Any),
    ("backingImageDiskSelector", Harmless::Any),
    ("unmapMarkSnapChainRemoved", Harmless::Any),
    ("disableRevisionCounter", Harmless::Any),
    ("freezeFilesystemForSnapshot", Harmless::Only(&["", "ignored", "disabled"])),
    ("dataEngine", Harmless::Only(&["", "v1"])),
    ("ublkNumberOfQueue", Harmless::Any),
    ("ublkQueueDepth", Harmless::Any),
    ("nvmeTcpNrIoQueues", Harmless::Any),
    ("dataSource", Harmless::Only(&[""])),
    ("cloneMode", Harmless::Any),
    ("strictTopology", Harmless::Only(&["", "false"])),
    ("storageCapacityMode", Harmless::Only(&[""])),
    ("dataLayout.type", Harmless::Only(&[""])),
    ("dataLayout.mode", Harmless::Only(&[""])),
    ("dataLayout.dataChunks", Harmless::Only(&[""])),
    ("dataLayout.parityChunks", Harmless::Only(&[""])),
    ("dataLayout.stripSizeKB", Harmless::Only(&[""])),
];

fn of_longhorn(key: &str) -> Option<Harmless> {
    OF_LONGHORN.iter().find(|(known, _)| *known == key).map(|(_, harmless)| *harmless)
}

/// A parameter of a StorageClass that has an effect.
#[derive(Clone, Copy, Debug)]
pub struct Parameter {
    /// The name, which is Longhorn's if Longhorn has the parameter.
    pub name: &'static str,
    /// The accepted values.
    pub values: &'static str,
    /// The value that an absent parameter stands for.
    pub default: &'static str,
    /// The meaning, for the documentation.
    pub meaning: &'static str,
}

const SWITCH: &str = "enabled, disabled or ignored";

/// The parameters that have an effect.
pub const PARAMETERS: [Parameter; 11] = [
    Parameter {
        name: "numberOfReplicas",
        values: "1 to 8",
        default: "3",
        meaning: "Number of replicas, each a full copy of the data",
    },
    Parameter {
        name: "dataLocality",
        values: "disabled or best-effort",
        default: "disabled",
        meaning: "best-effort places a replica on the node of the pod if possible",
    },
    Parameter {
        name: "replicaSoftAntiAffinity",
        values: SWITCH,
        default: "disabled",
        meaning: "Allows several replicas on one node",
    },
    Parameter {
        name: "replicaZoneSoftAntiAffinity",
        values: SWITCH,
        default: "enabled",
        meaning: "Allows several replicas in one zone; they are apart if possible",
    },
    Parameter {
        name: "replicaDiskSoftAntiAffinity",
        values: SWITCH,
        default: "enabled",
        meaning: "Allows several replicas on one disk; they are apart if possible",
    },
    Parameter {
        name: "nodeSelector",
        values: "tags, separated by commas",
        default: "",
        meaning: "Tags that a node must have to get a replica",
    },
    Parameter {
        name: "diskSelector",
        values: "tags, separated by commas",
        default: "",
        meaning: "Tags that a disk must have to get a replica",
    },
    Parameter {
        name: "verifyReads",
        values: SWITCH,
        default: "disabled",
        meaning: "Replicas compare every read with their block checksums; another replica answers if one has \
                  rot",
    },
    Parameter {
        name: "encryptInTransit",
        values: SWITCH,
        default: "disabled",
        meaning: "Encrypts data between nodes by TLS 1.3 of the kernel (kTLS)",
    },
    Parameter {
        name: "frontend",
        values: "auto (or blockdev), ublk, nbd or iscsi",
        default: "auto",
        meaning: "Driver of the device; auto is the first of ublk, nbd and iscsi that the kernel has",
    },
    Parameter {
        name: "fsType",
        values: "ext4 or xfs",
        default: "ext4",
        meaning: "File system of the volume",
    },
];

fn known() -> String {
    PARAMETERS.map(|parameter| parameter.name).join(", ")
}

/// Returns the parameters of Longhorn that are accepted without effect, each with the accepted values; none
/// stands for any value.
pub fn longhorn_parameters() -> impl Iterator<Item = (&'static str, Option<&'static [&'static str]>)> {
    OF_LONGHORN.iter().map(|(name, harmless)| match harmless {
        Harmless::Any => (*name, None),
        Harmless::Only(values) => (*name, Some(*values)),
    })
}

/// The reason why parameters cannot be used.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ParameterError {
    /// The parameter is not known.
    #[error("parameter {0:?} is not known; known are {known}", known = known())]
    Unknown(String),
    /// Longhorn has the parameter, and its value requests a missing feature.
    #[error(
        "parameter {key} = {value:?} of Longhorn is not supported: leave it out; known are {known}",
        known = known()
    )]
    Longhorn {
        /// The key as in the StorageClass.
        key: String,
        /// The given value.
        value: String,
    },
    /// The value can never work.
    #[error("parameter {key} = {value:?}: use {expected}")]
    Value {
        /// The key as in the StorageClass.
        key: String,
        /// The given value.
        value: String,
        /// The allowed values.
        expected: String,
    },
    /// All of them together are too large.
    #[error("the parameters have {0} bytes, and the maximum is {MAX_BYTES}")]
    Length(usize),
}

/// Parses the parameters of a volume, with defaults for absent ones.
///
/// # Errors
/// [`ParameterError`] has the remedy.
pub fn parameters<'a>(
    pairs: impl Iterator<Item = (&'a str, &'a str)> + Clone,
) -> Result<CreateVolume, ParameterError> {
    let bytes = pairs.clone().map(|(key, value)| key.len() + value.len()).sum();
    if bytes > MAX_BYTES {
        return Err(ParameterError::Length(bytes));
    }
    // The parameters are in their order, so that the same mistakes are always reported in the same way.
    let mut pairs: Vec<_> = pairs.collect();
    pairs.sort_unstable();
    let mut volume = CreateVolume::default();
    for (key, value) in pairs {
        take(&mut volume, key, value)?;
    }
    Ok(volume)
}

fn take(volume: &mut CreateVolume, key: &str, value: &str) -> Result<(), ParameterError> {
    match key {
        "numberOfReplicas" => volume.number_of_replicas = Some(number_of_replicas(key, value)?),
        "dataLocality" => {
            volume.data_locality = value.parse().map_err(|_| wrong(key, value))?;
        }
        "replicaSoftAntiAffinity" => volume.replica_soft_anti_affinity = switch(key, value, false)?,
        "replicaZoneSoftAntiAffinity" => volume.replica_zone_hard_anti_affinity = !switch(key, value, true)?,
        "replicaDiskSoftAntiAffinity" => volume.replica_disk_hard_anti_affinity = !switch(key, value, true)?,
        "nodeSelector" => volume.node_selector = list(value),
        "diskSelector" => volume.disk_selector = list(value),
        "verifyReads" => volume.verify_reads = switch(key, value, false)?,
        "encryptInTransit" => volume.encrypt_in_transit = switch(key, value, false)?,
        "frontend" => volume.frontend = frontend(key, value)?,
        // Sidecars take it for csi.storage.k8s.io/fstype, and hand it on: it is in the capabilities.
        _ if key.eq_ignore_ascii_case("fsType") => {
            if !matches!(value, "" | "ext4" | "xfs") {
                return Err(wrong("fsType", value));
            }
        }
        _ if OF_KUBERNETES.contains(&key) => {}
        _ => return check_longhorn(key, value),
    }
    Ok(())
}

/// Accepts parameters without effect here, so that a StorageClass of Longhorn works unchanged.
fn check_longhorn(key: &str, value: &str) -> Result<(), ParameterError> {
    match of_longhorn(key) {
        Some(Harmless::Any) => Ok(()),
        Some(Harmless::Only(values)) if values.contains(&value) => Ok(()),
        Some(Harmless::Only(_)) => Err(ParameterError::Longhorn { key: key.to_owned(), value: short(value) }),
        None => Err(ParameterError::Unknown(short(key))),
    }
}

/// Returns the accepted parameters (see [`parameters`]) that have no effect here, for people; empty if none.
#[must_use]
pub fn ignored<'a>(pairs: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let mut ignored: Vec<String> = pairs
        .filter(|(key, _)| of_longhorn(key).is_some())
        .map(|(key, value)| format!("{key}: {:?}", short(value)))
        .collect();
    ignored.sort_unstable();
    ignored.join(", ")
}

fn number_of_replicas(key: &str, value: &str) -> Result<u32, ParameterError> {
    let number = value.parse().ok().filter(|number: &u32| *number > 0 && *number as usize <= MAX_MEMBERS);
    number.ok_or_else(|| wrong(key, value))
}

/// Parses a switch; Longhorn says `ignored` for its default.
fn switch(key: &str, value: &str, default: bool) -> Result<bool, ParameterError> {
    match value {
        "enabled" | "true" => Ok(true),
        "disabled" | "false" => Ok(false),
        "ignored" => Ok(default),
        _ => Err(wrong(key, value)),
    }
}

fn list(value: &str) -> Vec<String> {
    value.split(',').map(str::trim).filter(|tag| !tag.is_empty()).map(ToOwned::to_owned).collect()
}

/// Parses the frontend. Only frontends that make a device of the kernel are accepted.
fn frontend(key: &str, value: &str) -> Result<Frontend, ParameterError> {
    match value {
        "" | "auto" | "blockdev" => Ok(Frontend::Auto),
        "ublk" => Ok(Frontend::Ublk),
        "nbd" => Ok(Frontend::Nbd),
        "iscsi" => Ok(Frontend::Iscsi),
        _ => Err(wrong(key, value)),
    }
}

fn wrong(key: &str, value: &str) -> ParameterError {
    let known = PARAMETERS.iter().find(|parameter| parameter.name == key);
    let expected = known.map_or("", |parameter| parameter.values).to_owned();
    ParameterError::Value { key: key.to_owned(), value: short(value), expected }
}

fn short(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Timestamp;
    use crate::objects::{DataLocality, SECRET_BYTES, Secret};

    fn of(pairs: &[(&str, &str)]) -> Result<CreateVolume, ParameterError> {
        parameters(pairs.iter().copied())
    }

    #[test]
    fn every_parameter_arrives() {
        let volume = of(&[
            ("numberOfReplicas", "2"),
            ("dataLocality", "best-effort"),
            ("verifyReads", "true"),
            ("encryptInTransit", "true"),
            ("replicaSoftAntiAffinity", "enabled"),
            ("replicaZoneSoftAntiAffinity", "disabled"),
            ("replicaDiskSoftAntiAffinity", "false"),
            ("nodeSelector", "fast, big,"),
            ("diskSelector", "ssd"),
            ("frontend", "nbd"),
            ("fsType", "xfs"),
            ("csi.storage.k8s.io/pvc/name", "data"),
        ])
        .unwrap();
        assert_eq!(volume.number_of_replicas, Some(2));
        assert_eq!(volume.data_locality, DataLocality::BestEffort);
        assert!(volume.verify_reads && volume.encrypt_in_transit);
        assert!(volume.replica_soft_anti_affinity);
        assert!(volume.replica_zone_hard_anti_affinity && volume.replica_disk_hard_anti_affinity);
        assert_eq!(volume.node_selector, ["fast", "big"]);
        assert_eq!(volume.disk_selector, ["ssd"]);
        assert_eq!(volume.frontend, Frontend::Nbd);
        let ignored =
            ["replicaSoftAntiAffinity", "replicaZoneSoftAntiAffinity", "replicaDiskSoftAntiAffinity"];
        let default = of(&ignored.map(|key| (key, "ignored"))).unwrap();
        assert!(!default.replica_soft_anti_affinity && !default.replica_zone_hard_anti_affinity);
        assert!(!default.replica_disk_hard_anti_affinity);
        assert_eq!(of(&[("frontend", "blockdev")]).unwrap().frontend, Frontend::Auto);
    }

    #[test]
    fn an_absent_parameter_has_the_documented_default() {
        let spec = |pairs: &[(&str, &str)]| {
            let volume = CreateVolume { name: "v".to_owned(), size_bytes: 1 << 30, ..of(pairs).unwrap() };
            volume.sketch(Secret::new([1; SECRET_BYTES]), Timestamp::UNIX_EPOCH).unwrap().spec
        };
        for Parameter { name, default, .. } in PARAMETERS {
            assert_eq!(spec(&[(name, default)]), spec(&[]), "{name} = {default:?}");
            assert!(of_longhorn(name).is_none(), "{name} has an effect");
        }
        assert_eq!(PARAMETERS[0].values, format!("1 to {MAX_MEMBERS}"));
    }

    #[test]
    fn the_storage_classes_that_are_installed_can_be_used() {
        let classes = include_str!("../../../../packaging/deploy/storageclass.yaml");
        let volumes = classes.split("\n---\n").map(|class| {
            let (_, lines) = class.split_once("\nparameters:\n").unwrap();
            let pairs: Vec<(&str, &str)> = lines
                .lines()
                .map(|line| line.trim().split_once(": ").unwrap())
                .map(|(key, value)| (key, value.trim_matches('"')))
                .collect();
            let volume = of(&pairs).unwrap();
            (volume.number_of_replicas, volume.data_locality)
        });
        let expected = [(Some(3), DataLocality::BestEffort), (Some(1), DataLocality::BestEffort)];
        assert_eq!(volumes.collect::<Vec<_>>(), expected);
    }

    /// Has the parameters with which Longhorn 1.12 installs its own class, and parameters that people add
    /// without effect.
    #[test]
    fn a_storage_class_of_longhorn_works_as_it_is() {
        let class = [
            ("numberOfReplicas", "3"),
            ("staleReplicaTimeout", "30"),
            ("fromBackup", ""),
            ("fsType", "ext4"),
            ("dataLocality", "disabled"),
            ("unmapMarkSnapChainRemoved", "ignored"),
            ("disableRevisionCounter", "true"),
            ("dataEngine", "v1"),
            ("backupTargetName", "default"),
            ("encrypted", "false"),
            ("migratable", "false"),
            ("replicaAutoBalance", "ignored"),
            ("csi.storage.k8s.io/pvc/name", "data"),
        ];
        assert_eq!(of(&class).unwrap().number_of_replicas, Some(3));
        let listed = ignored(class.into_iter());
        assert!(
            listed.starts_with(r#"backupTargetName: "default", dataEngine: "v1", disableRev"#),
            "{listed}"
        );
        assert!(listed.contains(r#"staleReplicaTimeout: "30""#), "{listed}");
        assert!(!listed.contains("numberOfReplicas") && !listed.contains("pvc/name"), "{listed}");
        assert_eq!(ignored([("numberOfReplicas", "3")].into_iter()), "");
    }

    #[test]
    fn mistakes_are_named() {
        for (key, value, words) in [
            ("numberOfReplicas", "0", "1 to 8"),
            ("numberOfReplicas", "9", "1 to 8"),
            ("numberOfReplicas", "three", "1 to 8"),
            ("dataLocality", "strict-local", "best-effort"),
            ("replicaSoftAntiAffinity", "yes", "enabled"),
            ("frontend", "socket", "ublk"),
            ("frontend", "nvmf", "iscsi"),
            ("fsType", "btrfs", "ext4"),
            ("fromBackup", "s3://a@b/?backup=c", "of Longhorn"),
            ("encrypted", "true", "of Longhorn"),
            ("dataEngine", "v2", "of Longhorn"),
            ("migratable", "true", "of Longhorn"),
            ("backingImage", "ubuntu", "of Longhorn"),
            ("recurringJobSelector", r#"[{"name":"daily"}]"#, "of Longhorn"),
            ("numberofreplicas", "3", "known are numberOfReplicas"),
            ("csi.storage.k8s.io/other", "", "not known"),
        ] {
            let error = of(&[(key, value)]).unwrap_err().to_string();
            assert!(error.contains(key) && error.contains(words), "{error}");
        }
        let long = "x".repeat(MAX_BYTES);
        assert_eq!(of(&[("a", &long)]).unwrap_err(), ParameterError::Length(MAX_BYTES + 1));
    }
}
