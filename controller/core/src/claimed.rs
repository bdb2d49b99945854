//! Which volumes a PersistentVolume of Kubernetes keeps: their data is not deleted, whoever asks for that.
//!
//! It is noted in the status of the volume, so that the admission policy, which sees nothing but the object that is to be
//! deleted, refuses the same as the controller. A VolumeAttachment names a PersistentVolume, which its attacher keeps for as
//! long; so there is nothing to note of it.

use std::collections::BTreeMap;

use crate::World;
use crate::objects::Volume;
use crate::requests::{self, Change, RequestError};

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

/// The name of the PersistentVolume that keeps it, by volume. `all` has by name those that keep theirs.
#[must_use]
pub fn by_volume(all: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    // Of several the first counts, so that what is noted does not change to and fro.
    let mut kept = BTreeMap::new();
    for (name, volume) in all {
        kept.entry(volume.clone()).or_insert_with(|| name.clone());
    }
    kept
}

/// The volumes of which something else is noted than what is so.
#[must_use]
pub fn outdated(world: &World, kept: &BTreeMap<String, String>) -> Vec<String> {
    let differs =
        |volume: &&Volume| volume.status.persistent_volume.as_ref() != kept.get(&volume.metadata.name);
    world.volumes.values().filter(differs).map(|volume| volume.metadata.name.clone()).collect()
}

/// The volume with what is so noted.
///
/// # Errors
/// [`RequestError::NoVolume`].
pub fn noted(
    world: &World,
    kept: &BTreeMap<String, String>,
    name: &str,
) -> Result<Change<Volume>, RequestError> {
    let mut volume = requests::find(world, name)?.clone();
    let persistent_volume = kept.get(name).cloned();
    if volume.status.persistent_volume == persistent_volume {
        return Ok(Change::AlreadySo(volume));
    }
    volume.status.persistent_volume = persistent_volume;
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

    #[test]
    fn a_persistent_volume_keeps_its_volume_until_its_driver_is_asked_to_delete_it() {
        let keeps = |phase: &str, deletes, is_deleting| {
            PersistentVolume { handle: "v".to_owned(), phase: phase.to_owned(), deletes, is_deleting }.keeps()
        };
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
        let all = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(name, volume)| ((*name).to_owned(), (*volume).to_owned())).collect()
        };
        let kept = by_volume(&all(&[("b", "v"), ("a", "v"), ("c", "w")]));
        assert_eq!((kept["v"].as_str(), kept["w"].as_str()), ("a", "c"));
        let (free, taken) = (world(None), world(Some("a")));
        assert_eq!(outdated(&free, &kept), ["v"]);
        assert!(outdated(&taken, &kept).is_empty());
        assert_eq!(outdated(&taken, &BTreeMap::new()), ["v"]);
        let Ok(Change::Store(volume)) = noted(&free, &kept, "v") else { panic!("nothing is noted") };
        assert_eq!(volume.status.persistent_volume.as_deref(), Some("a"));
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
