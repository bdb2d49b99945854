//! The words of volumes, engines, replicas, devices and certificates, for stored objects and for messages.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Gives a type its words: as they are stored, sent and shown.
macro_rules! has_words {
    ($($kind:ident { $($variant:ident => $word:literal),* $(,)? })*) => {$(
        impl $kind {
            /// All words of this version.
            pub const WORDS: &'static [&'static str] = &[$($word),*];

            /// Returns the word that is stored, sent and shown.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self {
                    $($kind::$variant => $word,)*
                }
            }

            /// Returns the value with that word; none for an unknown word.
            #[must_use]
            pub fn of_word(word: &str) -> Option<$kind> {
                [$($kind::$variant),*].into_iter().find(|value| value.as_str() == word)
            }
        }
    )*};
}

has_words! {
    VolumeState {
        Creating => "creating",
        Attached => "attached",
        Detached => "detached",
        Attaching => "attaching",
        Detaching => "detaching",
        Deleting => "deleting",
    }
    Robustness {
        Healthy => "healthy",
        Degraded => "degraded",
        Faulted => "faulted",
        Unknown => "unknown",
    }
    Frontend {
        Auto => "auto",
        Ublk => "ublk",
        Nbd => "nbd",
        Iscsi => "iscsi",
        Socket => "socket",
        Unknown => "unknown",
    }
    DataLocality {
        Disabled => "disabled",
        BestEffort => "best-effort",
    }
    DesireState {
        Running => "running",
        Stopped => "stopped",
    }
    CurrentState {
        Stopped => "stopped",
        Starting => "starting",
        Running => "running",
        Stopping => "stopping",
        Error => "error",
        Unknown => "unknown",
    }
    CheckOutcome {
        Passed => "passed",
        Warned => "warned",
        Failed => "failed",
    }
    RollOverPhase {
        Idle => "idle",
        Distributing => "distributing",
        Reissuing => "reissuing",
    }
    DeviceState {
        Live => "live",
        Recovering => "recovering",
        Stale => "stale",
    }
}

/// The stage of a volume's life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VolumeState {
    /// The volume gets disks for its replicas.
    #[default]
    Creating,
    /// The volume has a device.
    Attached,
    /// The volume has no process.
    Detached,
    /// Replicas, then the engine, are being started.
    Attaching,
    /// The engine, then the replicas, are being stopped.
    Detaching,
    /// The volume is being detached, and then its data is deleted.
    Deleting,
}

/// The robustness of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Robustness {
    /// Every replica has every acknowledged write.
    Healthy,
    /// The volume serves, with fewer replicas than it should have.
    Degraded,
    /// The volume cannot serve.
    Faulted,
    /// The robustness is unknown: the volume is detached, or its node does not answer.
    #[default]
    Unknown,
}

/// The choice of a volume's frontend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Frontend {
    /// The best that the node can do.
    #[default]
    Auto,
    /// A ublk disk.
    Ublk,
    /// The NBD driver of the kernel.
    Nbd,
    /// The iSCSI initiator of the kernel, for kernels with neither ublk nor NBD.
    Iscsi,
    /// NBD on a Unix socket, no kernel device.
    Socket,
    /// The frontend is one of a later version: no engine can be started.
    #[serde(other)]
    Unknown,
}

impl Frontend {
    /// Returns the frontend if an owner can choose it.
    ///
    /// # Errors
    /// The frontend is one of a later version.
    pub fn chosen(self) -> Result<Frontend, UnknownFrontend> {
        if self == Frontend::Unknown { Err(UnknownFrontend::new(self.as_str())) } else { Ok(self) }
    }
}

/// The rule for a replica on the node of the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DataLocality {
    /// The volume needs no replica on the node of its engine.
    #[default]
    Disabled,
    /// A replica that gets a place anyway gets it on the node of the engine, if possible.
    BestEffort,
}

/// A text names no data locality.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("unknown data locality {0:?}: use disabled or best-effort")]
pub struct DataLocalityError(String);

impl FromStr for DataLocality {
    type Err = DataLocalityError;
    fn from_str(text: &str) -> Result<DataLocality, DataLocalityError> {
        DataLocality::of_word(text).ok_or_else(|| DataLocalityError(text.chars().take(80).collect()))
    }
}

/// A text names no frontend.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("unknown frontend {0:?}: use auto, ublk, nbd, iscsi or socket")]
pub struct UnknownFrontend(String);

impl UnknownFrontend {
    /// Returns the error for a word that no owner can choose.
    #[must_use]
    pub fn new(word: &str) -> UnknownFrontend {
        UnknownFrontend(word.chars().take(80).collect())
    }
}

impl FromStr for Frontend {
    type Err = UnknownFrontend;
    fn from_str(text: &str) -> Result<Frontend, UnknownFrontend> {
        Frontend::of_word(text).ok_or_else(|| UnknownFrontend::new(text))?.chosen()
    }
}

impl fmt::Display for Frontend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The desired state of an instance (an engine or a replica process).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DesireState {
    /// A process serves.
    Running,
    /// The process does not exist.
    #[default]
    Stopped,
}

/// The observed state of an instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CurrentState {
    /// The instance has no process, and no call that starts one is under way.
    #[default]
    Stopped,
    /// A start was decided; the process may or may not be there.
    Starting,
    /// The process serves.
    Running,
    /// The process is on its way out.
    Stopping,
    /// The process cannot serve; the message says why.
    Error,
    /// The agent of the node has not been reached for a while.
    Unknown,
}

/// The outcome of a check of the setup, the worst one last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CheckOutcome {
    /// The check has found no problem.
    Passed,
    /// The setup works now, but may fail after an event.
    Warned,
    /// A part of the setup does not work.
    Failed,
}

/// The steps of replacing the CA of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RollOverPhase {
    /// The cluster has one CA.
    Idle,
    /// The new CA is added to trust lists; the old CA signs.
    Distributing,
    /// The new CA signs; certificates of the old one are replaced.
    Reissuing,
}

/// The state of the device node of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceState {
    /// The device exists, and its engine runs.
    Live,
    /// The device exists. Its engine does not run, and may take the device over again.
    Recovering,
    /// The device does not exist any more.
    Stale,
}

impl DeviceState {
    /// Every state that metrics count.
    pub const ALL: [DeviceState; 3] = [DeviceState::Live, DeviceState::Recovering, DeviceState::Stale];
}

impl fmt::Display for RollOverPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
