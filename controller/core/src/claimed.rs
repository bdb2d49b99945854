//! Tracks the volumes that PersistentVolumes of Kubernetes need: the controller refuses to delete their data.
//!
//! The record is in the status of the volume. So the admission policy, which sees only the object to delete,
//! refuses the same requests as the controller. A VolumeAttachment needs no record: it names a
//! PersistentVolume, which its attacher keeps meanwhile.

use std::collections::{BTreeMap, BTreeSet};

use crate::ClusterState;
use crate::objects::Volume;
use crate::requests::{self, Change, RequestError};

/// The information on PersistentVolumes that is stored with a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ClaimRecord {
    /// The PersistentVolume that keeps the volume, if any.
    persistent_volume: Option<String>,
    /// The claim that has it, or had it last, as NAMESPACE/NAME.
    claim: Option<String>,
}

/// The phase of a PersistentVolume in Kubernetes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PersistentVolumePhase {
    /// Not available yet; a phase of a later version of Kubernetes counts as this one.
    #[default]
    Pending,
    /// No claim has it yet.
    Available,
    /// A claim has it.
    Bound,
    /// The claim that had it is deleted.
    Released,
    /// The claim that had it is deleted, and the driver could not delete the volume.
    Failed,
}

impl PersistentVolumePhase {
    /// Returns the phase with that word of Kubernetes.
    #[must_use]
    pub fn of_word(word: &str) -> PersistentVolumePhase {
        match word {
            "Available" => PersistentVolumePhase::Available,
            "Bound" => PersistentVolumePhase::Bound,
            "Released" => PersistentVolumePhase::Released,
            "Failed" => PersistentVolumePhase::Failed,
            _ => PersistentVolumePhase::Pending,
        }
    }
}

/// The relevant part of a PersistentVolume of Shorthorn's driver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PersistentVolume {
    /// The volume that it provides.
    pub handle: String,
    /// The phase that Kubernetes reports.
    pub phase: PersistentVolumePhase,
    /// True if the volume has to be deleted with the PersistentVolume.
    pub deletes: bool,
    /// True if it is being deleted.
    pub is_deleting: bool,
    /// The claim that it is bound to, or was last, as NAMESPACE/NAME.
    pub claim: Option<String>,
}

impl PersistentVolume {
    /// Returns true if the volume has to stay. Its driver is asked to delete the volume while the
    /// PersistentVolume is still there: once no claim has it, or when it is deleted unbound.
    #[must_use]
    pub fn keeps(&self) -> bool {
        let is_free = matches!(self.phase, PersistentVolumePhase::Released | PersistentVolumePhase::Failed);
        let is_dropped = self.is_deleting && self.phase != PersistentVolumePhase::Bound;
        !(self.deletes && (is_free || is_dropped))
    }
}

/// The PersistentVolumes of our driver, with their volumes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claims {
    by_name: BTreeMap<String, PersistentVolume>,
    /// The names of the PersistentVolumes of a volume, by its name.
    of_volume: BTreeMap<String, BTreeSet<String>>,
}

impl Claims {
    /// Creates the claims, by name.
    #[must_use]
    pub fn new(all: BTreeMap<String, PersistentVolume>) -> Claims {
        let mut claims = Claims::default();
        for (name, found) in all {
            claims.set(name, Some(found));
        }
        claims
    }

    /// Sets the current PersistentVolume of that name. Returns the volumes whose record may have to change.
    pub fn set(&mut self, name: String, found: Option<PersistentVolume>) -> BTreeSet<String> {
        let mut volumes = BTreeSet::new();
        if let Some(before) = self.by_name.remove(&name) {
            if let Some(names) = self.of_volume.get_mut(&before.handle) {
                names.remove(&name);
                if names.is_empty() {
                    self.of_volume.remove(&before.handle);
                }
            }
            volumes.insert(before.handle);
        }
        if let Some(found) = found {
            self.of_volume.entry(found.handle.clone()).or_default().insert(name.clone());
            volumes.insert(found.handle.clone());
            self.by_name.insert(name, found);
        }
        volumes
    }

    /// Returns the current record of a volume. Of several PersistentVolumes, one that keeps its volume comes
    /// first, and then the first by name, so that the record does not alternate.
    fn record_of(&self, volume: &str) -> ClaimRecord {
        let names = self.of_volume.get(volume).into_iter().flatten();
        let found = || names.clone().filter_map(|name| Some((name, self.by_name.get(name)?)));
        let keeps = found().find(|(_, found)| found.keeps());
        let first = keeps.or_else(|| found().next());
        let claim = first.and_then(|(_, found)| found.claim.clone());
        ClaimRecord { persistent_volume: keeps.map(|(name, _)| name.clone()), claim }
    }

    /// Returns true if the stored record of a volume differs from the current one.
    #[must_use]
    pub fn is_outdated(&self, volume: &Volume) -> bool {
        recorded_of(volume) != self.record_of(&volume.metadata.name)
    }

    /// Returns the volumes whose stored record differs from the current one.
    #[must_use]
    pub fn outdated(&self, cluster: &ClusterState) -> BTreeSet<String> {
        let outdated = cluster.volumes.values().filter(|volume| self.is_outdated(volume));
        outdated.map(|volume| volume.metadata.name.clone()).collect()
    }
}

/// Returns the stored record of a volume.
fn recorded_of(volume: &Volume) -> ClaimRecord {
    ClaimRecord {
        persistent_volume: volume.status.persistent_volume.clone(),
        claim: volume.status.claim.clone(),
    }
}

/// Returns the volume with the current record.
///
/// # Errors
/// [`RequestError::NoVolume`].
pub fn recorded(cluster: &ClusterState, claims: &Claims, name: &str) -> Result<Change<Volume>, RequestError> {
    let mut volume = requests::find(cluster, name)?.clone();
    if !claims.is_outdated(&volume) {
        return Ok(Change::AlreadySo(volume));
    }
    let record = claims.record_of(name);
    (volume.status.persistent_volume, volume.status.claim) = (record.persistent_volume, record.claim);
    Ok(Change::Store(volume))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Timestamp;
    use crate::objects::{Secret, VolumeState};
    use crate::requests::{CreateVolume, ask_for_deletion, delete};

    fn cluster(persistent_volume: Option<&str>) -> ClusterState {
        let wanted = CreateVolume { name: "v".to_owned(), size_bytes: 1 << 20, ..CreateVolume::default() };
        let made =
            wanted.apply(&ClusterState::default(), Secret::new([1; 32]), Timestamp::UNIX_EPOCH).unwrap();
        let Change::Store(mut volume) = made else { panic!("{made:?}") };
        volume.status.persistent_volume = persistent_volume.map(str::to_owned);
        let mut cluster = ClusterState::default();
        cluster.insert(volume.into());
        cluster
    }

    fn found(handle: &str, phase: &str, deletes: bool, is_deleting: bool) -> PersistentVolume {
        let (handle, phase) = (handle.to_owned(), PersistentVolumePhase::of_word(phase));
        let claim = Some(format!("shop/{handle}"));
        PersistentVolume { handle, phase, deletes, is_deleting, claim }
    }

    #[test]
    fn a_persistent_volume_keeps_its_volume_until_its_driver_is_asked_to_delete_it() {
        let keeps = |phase: &str, deletes, is_deleting| found("v", phase, deletes, is_deleting).keeps();
        for phase in ["Pending", "Available", "Bound", "Levitating", ""] {
            assert!(keeps(phase, true, false) && keeps(phase, false, false), "{phase}");
        }
        assert!(keeps("Bound", true, true), "a claim has it");
        assert!(
            !keeps("Available", true, true)
                && !keeps("Released", true, false)
                && !keeps("Failed", true, false)
        );
        for phase in ["Available", "Bound", "Released", "Failed"] {
            assert!(keeps(phase, false, true), "{phase}: it is to be kept");
        }
    }

    #[test]
    fn recorded_claims_follow_the_persistent_volumes() {
        let all = |pairs: &[(&str, &str, &str)]| {
            let one = |(name, volume, phase): &(&str, &str, &str)| {
                ((*name).to_owned(), found(volume, phase, true, false))
            };
            pairs.iter().map(one).collect::<BTreeMap<_, _>>()
        };
        let mut kept = Claims::new(all(&[
            ("c", "v", "Bound"),
            ("b", "v", "Bound"),
            ("a", "v", "Released"),
            ("d", "w", "Released"),
        ]));
        assert_eq!(kept.record_of("v").persistent_volume.as_deref(), Some("b"), "the first that keeps it");
        let released = ClaimRecord { persistent_volume: None, claim: Some("shop/w".to_owned()) };
        assert_eq!(kept.record_of("w"), released, "whose it was is known for as long as it is there");
        let (free, taken) = (cluster(None), cluster(Some("b")));
        let only = |name: &str| BTreeSet::from([name.to_owned()]);
        assert_eq!(kept.outdated(&free), only("v"));
        assert_eq!(kept.outdated(&taken), only("v"), "its claim is not recorded yet");
        let Ok(Change::Store(volume)) = recorded(&free, &kept, "v") else { panic!("nothing is recorded") };
        assert_eq!(volume.status.persistent_volume.as_deref(), Some("b"));
        assert_eq!(volume.status.claim.as_deref(), Some("shop/v"));
        let mut taken = ClusterState::default();
        taken.insert(volume.into());
        assert!(kept.outdated(&taken).is_empty());
        assert_eq!(Claims::default().outdated(&taken), only("v"));
        assert!(matches!(recorded(&taken, &kept, "v"), Ok(Change::AlreadySo(_))));
        assert_eq!(recorded(&free, &kept, "w"), Err(RequestError::NoVolume("w".to_owned())));
        // A deleted one, and one that is another volume now.
        assert_eq!(kept.set("b".to_owned(), None), only("v"));
        assert_eq!(kept.record_of("v").persistent_volume.as_deref(), Some("c"));
        let both = BTreeSet::from(["v".to_owned(), "x".to_owned()]);
        assert_eq!(kept.set("c".to_owned(), Some(found("x", "Bound", true, false))), both);
        assert_eq!(
            kept.record_of("v"),
            ClaimRecord { persistent_volume: None, claim: Some("shop/v".to_owned()) }
        );
        assert_eq!(kept.record_of("x").persistent_volume.as_deref(), Some("c"));
        assert_eq!(kept.set("a".to_owned(), None), only("v"));
        assert_eq!(kept.record_of("v"), ClaimRecord::default());
    }

    #[test]
    fn a_volume_that_kubernetes_needs_survives_a_request_to_delete_it() {
        let now = Timestamp::UNIX_EPOCH;
        let error = delete(&cluster(Some("pvc-1")), "v", now).unwrap_err();
        assert!(
            matches!(error, RequestError::IsPersistentVolume { .. }) && error.to_string().contains("pvc-1")
        );
        assert!(matches!(delete(&cluster(None), "v", now), Ok(Change::Store(_))));
        let asked = |persistent_volume| match ask_for_deletion(&cluster(persistent_volume), "v", now) {
            Ok(Change::Store(volume)) => volume,
            other => panic!("{other:?}"),
        };
        let mut kept = asked(Some("pvc-1"));
        assert!(kept.metadata.is_deleting() && !kept.is_deleting());
        assert_eq!(kept.deletion_waits_for(), Some("pvc-1"));
        kept.status.state = VolumeState::Deleting;
        assert!(
            kept.is_deleting() && kept.deletion_waits_for().is_none(),
            "a deletion that has begun continues"
        );
        assert!(asked(None).is_deleting());
    }
}
