//! The parameters of a StorageClass, with Longhorn's names where the meaning is the same.

use shorthorn_types::limits::MAX_MEMBERS;
use thiserror::Error;

use crate::objects::{DataLocality, Frontend};
use crate::requests::CreateVolume;

/// The most that all keys and values together may take.
const MAX_BYTES: usize = 4 << 10;
/// What sidecars tell of where a volume comes from, and whose it is.
const OF_KUBERNETES: [&str; 4] = [
    "csi.storage.k8s.io/pvc/name",
    "csi.storage.k8s.io/pvc/namespace",
    "csi.storage.k8s.io/pv/name",
    "csi.storage.k8s.io/fstype",
];
/// What Longhorn knows and we do not.
const OF_LONGHORN: [&str; 35] = [
    "staleReplicaTimeout",
    "fromBackup",
    "backupTargetName",
    "backupBlockSize",
    "mkfsParams",
    "share",
    "exclusive",
    "migratable",
    "nfsOptions",
    "encrypted",
    "replicaAutoBalance",
    "recurringJobSelector",
    "backingImage",
    "backingImageDataSourceType",
    "backingImageDataSourceParameters",
    "backingImageChecksum",
    "backingImageMinNumberOfCopies",
    "backingImageNodeSelector",
    "backingImageDiskSelector",
    "unmapMarkSnapChainRemoved",
    "disableRevisionCounter",
    "freezeFilesystemForSnapshot",
    "dataEngine",
    "ublkNumberOfQueue",
    "ublkQueueDepth",
    "nvmeTcpNrIoQueues",
    "dataSource",
    "cloneMode",
    "strictTopology",
    "storageCapacityMode",
    "dataLayout.type",
    "dataLayout.mode",
    "dataLayout.dataChunks",
    "dataLayout.parityChunks",
    "dataLayout.stripSizeKB",
];
const KNOWN: &str = "numberOfReplicas, dataLocality, replicaSoftAntiAffinity, replicaZoneSoftAntiAffinity, \
                     replicaDiskSoftAntiAffinity, nodeSelector, diskSelector, verifyReads, frontend and fsType";

/// Why parameters cannot be used.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ParameterError {
    /// Nobody knows it.
    #[error("parameter {0:?} is not known; known are {KNOWN}")]
    Unknown(String),
    /// Longhorn has it.
    #[error("parameter {0} of Longhorn is not supported: leave it out; known are {KNOWN}")]
    Longhorn(String),
    /// Its value can never work.
    #[error("parameter {key} = {value:?}: use {expected}")]
    Value {
        /// Which one.
        key: String,
        /// What it has.
        value: String,
        /// What it may have.
        expected: String,
    },
    /// All of them together are too large.
    #[error("the parameters have {0} bytes, and {MAX_BYTES} are the most")]
    Length(usize),
}

/// What these parameters say of a volume, and the defaults of what they do not say.
///
/// # Errors
/// [`ParameterError`] says what to change.
pub fn parameters<'a>(
    pairs: impl Iterator<Item = (&'a str, &'a str)> + Clone,
) -> Result<CreateVolume, ParameterError> {
    let bytes = pairs.clone().map(|(key, value)| key.len() + value.len()).sum();
    if bytes > MAX_BYTES {
        return Err(ParameterError::Length(bytes));
    }
    // In their order, so that the same mistakes are always told in the same way.
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
        "numberOfReplicas" => volume.number_of_replicas = number_of_replicas(key, value)?,
        "dataLocality" => {
            let locality: Result<DataLocality, _> = value.parse();
            locality.map_err(|_| wrong(key, value, "disabled or best-effort"))?;
            volume.data_locality = value.to_owned();
        }
        "replicaSoftAntiAffinity" => volume.replica_soft_anti_affinity = switch(key, value, false)?,
        "replicaZoneSoftAntiAffinity" => volume.replica_zone_hard_anti_affinity = !switch(key, value, true)?,
        "replicaDiskSoftAntiAffinity" => volume.replica_disk_hard_anti_affinity = !switch(key, value, true)?,
        "nodeSelector" => volume.node_selector = list(value),
        "diskSelector" => volume.disk_selector = list(value),
        "verifyReads" => volume.verify_reads = switch(key, value, false)?,
        "frontend" => volume.frontend = frontend(key, value)?.to_string(),
        // Sidecars take it for csi.storage.k8s.io/fstype, and hand it on: it is in the capabilities.
        _ if key.eq_ignore_ascii_case("fsType") => {
            if !matches!(value, "" | "ext4" | "xfs") {
                return Err(wrong(key, value, "ext4 or xfs"));
            }
        }
        _ if OF_KUBERNETES.contains(&key) => {}
        _ if OF_LONGHORN.contains(&key) => return Err(ParameterError::Longhorn(key.to_owned())),
        _ => return Err(ParameterError::Unknown(short(key))),
    }
    Ok(())
}

fn number_of_replicas(key: &str, value: &str) -> Result<u32, ParameterError> {
    let number = value.parse().ok().filter(|number: &u32| *number > 0 && *number as usize <= MAX_MEMBERS);
    number.ok_or_else(|| wrong(key, value, &format!("1 to {MAX_MEMBERS}")))
}

/// Longhorn says `ignored` for its default.
fn switch(key: &str, value: &str, default: bool) -> Result<bool, ParameterError> {
    match value {
        "enabled" | "true" => Ok(true),
        "disabled" | "false" => Ok(false),
        "ignored" => Ok(default),
        _ => Err(wrong(key, value, "enabled, disabled or ignored")),
    }
}

fn list(value: &str) -> Vec<String> {
    value.split(',').map(str::trim).filter(|tag| !tag.is_empty()).map(ToOwned::to_owned).collect()
}

/// Only those that make a device of the kernel.
fn frontend(key: &str, value: &str) -> Result<Frontend, ParameterError> {
    match value {
        "" | "auto" | "blockdev" => Ok(Frontend::Auto),
        "ublk" => Ok(Frontend::Ublk),
        "nbd" => Ok(Frontend::Nbd),
        _ => Err(wrong(key, value, "auto (or blockdev), ublk or nbd")),
    }
}

fn wrong(key: &str, value: &str, expected: &str) -> ParameterError {
    ParameterError::Value { key: key.to_owned(), value: short(value), expected: expected.to_owned() }
}

fn short(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, &str)]) -> Result<CreateVolume, ParameterError> {
        parameters(pairs.iter().copied())
    }

    #[test]
    fn every_parameter_arrives() {
        let volume = of(&[
            ("numberOfReplicas", "2"),
            ("dataLocality", "best-effort"),
            ("verifyReads", "true"),
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
        assert_eq!(volume.number_of_replicas, 2);
        assert_eq!(volume.data_locality, "best-effort");
        assert!(volume.verify_reads);
        assert!(volume.replica_soft_anti_affinity);
        assert!(volume.replica_zone_hard_anti_affinity && volume.replica_disk_hard_anti_affinity);
        assert_eq!(volume.node_selector, ["fast", "big"]);
        assert_eq!(volume.disk_selector, ["ssd"]);
        assert_eq!(volume.frontend, "nbd");
        let ignored =
            ["replicaSoftAntiAffinity", "replicaZoneSoftAntiAffinity", "replicaDiskSoftAntiAffinity"];
        let default = of(&ignored.map(|key| (key, "ignored"))).unwrap();
        assert!(!default.replica_soft_anti_affinity && !default.replica_zone_hard_anti_affinity);
        assert!(!default.replica_disk_hard_anti_affinity);
        assert_eq!(of(&[("frontend", "blockdev")]).unwrap().frontend, "auto");
    }

    #[test]
    fn the_storage_class_that_is_installed_can_be_used() {
        let class = include_str!("../../../deploy/storageclass.yaml");
        let (_, lines) = class.split_once("\nparameters:\n").unwrap();
        let pairs: Vec<(&str, &str)> = lines
            .lines()
            .map(|line| line.trim().split_once(": ").unwrap())
            .map(|(key, value)| (key, value.trim_matches('"')))
            .collect();
        let volume = of(&pairs).unwrap();
        assert_eq!((volume.number_of_replicas, volume.data_locality.as_str()), (3, "best-effort"));
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
            ("frontend", "iscsi", "nbd"),
            ("fsType", "btrfs", "ext4"),
            ("fromBackup", "", "of Longhorn"),
            ("staleReplicaTimeout", "30", "of Longhorn"),
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
