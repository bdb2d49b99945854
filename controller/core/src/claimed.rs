//! Which volumes a PersistentVolume of Kubernetes keeps: their data is not deleted, whoever asks for that.
//!
//! It is noted in the status of the volume, so that the admission policy, which sees nothing but the object that is to be
//! deleted, refuses the same as the controller. A VolumeAttachment names a PersistentVolume, which its attacher keeps for as
//! long; so there is nothing to note of it.

use std::collections::BTreeMap;

use crate::World;
use crate::objects::Volume;
use crate::requests::{self, Change, RequestError};

/// What is noted of the PersistentVolumes of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Note {
    /// The one that keeps the volume, if one does.
    pub keeper: Option<String>,
    /// The claim that has it, or had it last, as NAMESPACE/NAME.
    pub claim: Option<String>,
}

/// What matters here of a PersistentVolume of our driver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PersistentVolume {
    /// The volume that it is.
    pub handle: String,
    /// Available, Bound, Released, Failed, Pending.
    pub phase: String,
    /// Whether the volume is to be deleted with it.
    pub deletes: bool,
    /// Whether its deletion was asked for.
    pub is_deleting: bool,
    /// The claim that it is bound to, or was last, as NAMESPACE/NAME.
    pub claim: Option<String>,
}

impl PersistentVolume {
    /// Whether the volume has to stay. Its driver is asked to delete the volume while the PersistentVolume is still there: once
    /// no claim has it, or when it is deleted unbound.
    #[must_use]
    pub fn keeps(&self) -> bool {
        let is_free = matches!(self.phase.as_str(), "Released" | "Failed");
        let is_dropped = self.is_deleting && self.phase != "Bound";
        !(self.deletes && (is_free || is_dropped))
    }
}

/// What is to be noted, by volume. `all` has PersistentVolumes by name.
#[must_use]
pub fn by_volume(all: &BTreeMap<String, PersistentVolume>) -> BTreeMap<String, Note> {
    // Of several the first counts, so that what is noted does not change to and fro; one that keeps its volume before others.
    let (keepers, others): (Vec<_>, Vec<_>) = all.iter().partition(|(_, found)| found.keeps());
    let mut notes = BTreeMap::new();
    for (name, found) in keepers.into_iter().chain(others) {
        let keeper = found.keeps().then(|| name.clone());
        notes.entry(found.handle.clone()).or_insert_with(|| Note { keeper, claim: found.claim.clone() });
    }
    notes
}

/// What is noted of a volume.
fn noted_of(volume: &Volume) -> Note {
    Note { keeper: volume.status.persistent_volume.clone(), claim: volume.status.claim.clone() }
}

/// Whether something else is noted in a volume than what is so.
#[must_use]
pub fn is_outdated(volume: &Volume, notes: &BTreeMap<String, Note>) -> bool {
    let noted = noted_of(volume);
    notes.get(&volume.metadata.name).map_or_else(|| noted != Note::default(), |note| *note != noted)
}

/// The volumes of which something else is noted than what is so.
#[must_use]
pub fn outdated(world: &World, notes: &BTreeMap<String, Note>) -> Vec<String> {
    let outdated = world.volumes.values().filter(|volume| is_outdated(volume, notes));
    outdated.map(|volume| volume.metadata.name.clone()).collect()
}

/// The volume with what is so noted.
///
/// # Errors
/// [`RequestError::NoVolume`].
pub fn noted(
    world: &World,
    notes: &BTreeMap<String, Note>,
    name: &str,
) -> Result<Change<Volume>, RequestError> {
    let mut volume = requests::find(world, name)?.clone();
    if !is_outdated(&volume, notes) {
        return Ok(Change::AlreadySo(volume));
    }
    let Note { keeper, claim } = notes.get(name).cloned().unwrap_or_default();
    (volume.status.persistent_volume, volume.status.claim) = (keeper, claim);
    Ok(Change::Store(volume))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Timestamp;
    use crate::objects::{Secret, VolumeState};
    use crate::requests::{CreateVolume, ask_for_deletion, delete};

    fn world(persistent_volume: Option<&str>) -> World {
        let wanted = CreateVolume { name: "v".to_owned(), size_bytes: 1 << 20, ..CreateVolume::default() };
        let made = wanted.apply(&World::default(), Secret::new([1; 32]), Timestamp::UNIX_EPOCH).unwrap();
        let Change::Store(mut volume) = made else { panic!("{made:?}") };
        volume.status.persistent_volume = persistent_volume.map(str::to_owned);
        let mut world = World::default();
        world.insert(volume.into());
        world
    }

    fn found(handle: &str, phase: &str, deletes: bool, is_deleting: bool) -> PersistentVolume {
        let (handle, phase) = (handle.to_owned(), phase.to_owned());
        let claim = Some(format!("shop/{handle}"));
        PersistentVolume { handle, phase, deletes, is_deleting, claim }
    }

    #[test]
    fn a_persistent_volume_keeps_its_volume_until_its_driver_is_asked_to_delete_it() {
        let keeps = |phase: &str, deletes, is_deleting| found("v", phase, deletes, is_deleting).keeps();
        for phase in ["Pending", "Available", "Bound"] {
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
    fn what_is_noted_follows_what_is_so() {
        let all = |pairs: &[(&str, &str, &str)]| {
            let one = |(name, volume, phase): &(&str, &str, &str)| {
                ((*name).to_owned(), found(volume, phase, true, false))
            };
            pairs.iter().map(one).collect::<BTreeMap<_, _>>()
        };
        let kept = by_volume(&all(&[
            ("c", "v", "Bound"),
            ("b", "v", "Bound"),
            ("a", "v", "Released"),
            ("d", "w", "Released"),
        ]));
        assert_eq!(kept["v"].keeper.as_deref(), Some("b"), "the first that keeps it");
        let released = Note { keeper: None, claim: Some("shop/w".to_owned()) };
        assert_eq!(kept["w"], released, "whose it was is known for as long as it is there");
        let (free, taken) = (world(None), world(Some("b")));
        assert_eq!(outdated(&free, &kept), ["v"]);
        assert_eq!(outdated(&taken, &kept), ["v"], "its claim is not noted yet");
        let Ok(Change::Store(volume)) = noted(&free, &kept, "v") else { panic!("nothing is noted") };
        assert_eq!(volume.status.persistent_volume.as_deref(), Some("b"));
        assert_eq!(volume.status.claim.as_deref(), Some("shop/v"));
        let mut taken = World::default();
        taken.insert(volume.into());
        assert!(outdated(&taken, &kept).is_empty());
        assert_eq!(outdated(&taken, &BTreeMap::new()), ["v"]);
        assert!(matches!(noted(&taken, &kept, "v"), Ok(Change::AlreadySo(_))));
        assert_eq!(noted(&free, &kept, "w"), Err(RequestError::NoVolume("w".to_owned())));
    }

    #[test]
    fn a_volume_that_kubernetes_needs_is_not_deleted_and_lives_if_its_deletion_was_asked_for() {
        let now = Timestamp::UNIX_EPOCH;
        let error = delete(&world(Some("pvc-1")), "v", now).unwrap_err();
        assert!(
            matches!(error, RequestError::IsPersistentVolume { .. }) && error.to_string().contains("pvc-1")
        );
        assert!(matches!(delete(&world(None), "v", now), Ok(Change::Store(_))));
        let asked = |persistent_volume| match ask_for_deletion(&world(persistent_volume), "v", now) {
            Ok(Change::Store(volume)) => volume,
            other => panic!("{other:?}"),
        };
        let mut kept = asked(Some("pvc-1"));
        assert!(kept.metadata.is_deleting() && !kept.is_deleting());
        assert_eq!(kept.deletion_waits_for(), Some("pvc-1"));
        kept.status.state = VolumeState::Deleting;
        assert!(kept.is_deleting() && kept.deletion_waits_for().is_none(), "what has begun is ended");
        assert!(asked(None).is_deleting());
    }
}
