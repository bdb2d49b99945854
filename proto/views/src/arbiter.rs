#![allow(clippy::result_large_err)] // once per view change, and it carries the views that are in the way

use serde::{Deserialize, Serialize};
use shorthorn_types::{Generation, Members, ReplicaReport, View};
use thiserror::Error;

use crate::quorum::{Quorum, quorum};

/// The arbiter's record of one volume: the view that it granted last.
///
/// Half of a view does not know whether the other half continues as well. The arbiter knows: it lets one half
/// continue, and the other only if that knows the view of the first. Every grant therefore follows from the
/// one before.
///
/// The arbiter has to trust two statements: which replicas have stored the target, and that the engine
/// reports all views that it must honour. The replicas and [`crate::ViewChange`] ensure that.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arbiter {
    granted: Option<View>,
    /// The attachment from which on this record is known to be older than the volume; none if it is not.
    #[serde(default, with = "shorthorn_types::optional::number", skip_serializing_if = "Option::is_none")]
    stale_since: Option<u64>,
}

/// The reason why the arbiter does not grant a view. The record has not changed; the engine can only stop.
#[derive(Debug, Error, PartialEq, Eq, Clone)]
pub enum NotGranted {
    /// The volume has been attached again since, or is attached nowhere.
    #[error(
        "the engine of generation {asked} is not attached: the attachment of the volume is number {attach}"
    )]
    NotAttached {
        /// The generation of the asking engine.
        asked: Generation,
        /// The current attachment.
        attach: u64,
    },
    /// The record was restored from a backup, so later grants are missing.
    #[error(
        "grants before attachment {since} are unknown because the record was restored from a backup: start \
         the volume once from more than half of its replicas"
    )]
    Stale {
        /// The first attachment since that was noticed.
        since: u64,
    },
    /// A later view, or another one of the same number, was granted before.
    #[error("view {target} is not newer than view {granted}, which is granted already")]
    Outdated {
        /// The requested view.
        target: View,
        /// The last grant.
        granted: View,
    },
    /// The engine does not know the last grant: the engine of that grant may have continued without its
    /// replicas.
    #[error("view {granted} is granted already, and the engine has not honoured it")]
    NotHonoured {
        /// The last grant.
        granted: View,
    },
    /// A member of the target has not stored it, or is not fenced for it.
    #[error("the members {missing} of view {target} have neither stored it nor been fenced for it")]
    NotStored {
        /// The requested view.
        target: View,
        /// Members of the target that have not stored it.
        missing: Members,
    },
    /// The target has no member, or is not newer than the view that it replaces, or has members from outside
    /// of that view.
    #[error("view {target} cannot follow view {honoured}")]
    DoesNotFollow {
        /// The requested view.
        target: View,
        /// The view that the target would have to honour.
        honoured: View,
    },
    /// Less than half: no grant helps.
    #[error("the replicas {stored} are less than half of view {honoured}")]
    NoQuorum {
        /// Replicas that have stored the target, or are fenced for it.
        stored: Members,
        /// A view that it would have to honour.
        honoured: View,
    },
}

impl NotGranted {
    /// Returns the grant that the engine did not know of: it has to honour it when it starts again.
    #[must_use]
    pub fn granted(&self) -> Option<View> {
        match self {
            NotGranted::Outdated { granted, .. } | NotGranted::NotHonoured { granted } => Some(*granted),
            _ => None,
        }
    }
}

impl Arbiter {
    /// Returns the view that was granted last: an engine is given it when it is attached, and honours it.
    #[must_use]
    pub fn granted(&self) -> Option<View> {
        self.granted
    }

    /// Marks the record as older than the volume; attachment `since`, which is newer than all known ones, was
    /// drawn because of that. Nothing is granted until [`Arbiter::renewed`].
    #[must_use]
    pub fn stale(&self, since: u64) -> Arbiter {
        Arbiter { granted: self.granted, stale_since: Some(since) }
    }

    /// Returns the attachment from which on the record is known to be stale, if it is.
    #[must_use]
    pub fn stale_since(&self) -> Option<u64> {
        self.stale_since
    }

    /// Returns the renewed record after an engine without a grant has committed the view `committed` since
    /// the record became stale. The engine had more than half of every view in which another one may have
    /// continued. From here on, every asking engine has to have honoured that view or a newer one; earlier
    /// grants do not matter any more.
    #[must_use]
    pub fn renewed(&self, committed: View) -> Option<Arbiter> {
        let since = self.stale_since()?;
        let is_later = committed.id.generation.attach >= since && !committed.is_first();
        is_later.then_some(Arbiter { granted: Some(committed), stale_since: None })
    }

    /// Handles the question of an engine for `target`, which honours the views in `honoured`. The replicas in
    /// `stored` have stored it or, if the engine starts, are fenced and will get the proposal. `attach` is
    /// the current attachment. The result has to be stored, by the same compare-and-swap that `attach` was
    /// read with, before the engine is answered. A repeated question for the granted view changes nothing.
    ///
    /// # Errors
    /// [`NotGranted`].
    pub fn ask(
        &self,
        attach: u64,
        target: View,
        honoured: &ReplicaReport,
        stored: &Members,
    ) -> Result<Arbiter, NotGranted> {
        let asked = target.id.generation;
        if asked.attach != attach {
            return Err(NotGranted::NotAttached { asked, attach });
        }
        if let Some(since) = self.stale_since() {
            return Err(NotGranted::Stale { since });
        }
        if self.granted == Some(target) {
            return Ok(self.clone());
        }
        self.check_order(target, honoured)?;
        check_quorum(target, honoured, stored)?;
        Ok(Arbiter { granted: Some(target), stale_since: None })
    }

    /// Checks that the engine knows the last grant, or something committed since.
    fn check_order(&self, target: View, honoured: &ReplicaReport) -> Result<(), NotGranted> {
        let Some(granted) = self.granted else { return Ok(()) };
        if target.id <= granted.id {
            return Err(NotGranted::Outdated { target, granted });
        }
        if honoured.committed.id < granted.id && !honoured.proposed.contains(&granted) {
            return Err(NotGranted::NotHonoured { granted });
        }
        Ok(())
    }
}

/// Checks that the target is newer than every view that it honours and part of each. At least half of each
/// must have stored it.
fn check_quorum(target: View, honoured: &ReplicaReport, stored: &Members) -> Result<(), NotGranted> {
    if !target.members.is_subset_of(stored) {
        let missing = target.members.filter(|id| !stored.contains(id));
        return Err(NotGranted::NotStored { target, missing });
    }
    for honoured in honoured.views() {
        let honoured = *honoured;
        let is_part = target.members.is_subset_of(&honoured.members) && !target.members.is_empty();
        if !is_part || target.id <= honoured.id {
            return Err(NotGranted::DoesNotFollow { target, honoured });
        }
        if quorum(&honoured.members, stored) == Quorum::Less {
            return Err(NotGranted::NoQuorum { stored: *stored, honoured });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use shorthorn_types::{ReplicaId, ViewId};

    use super::*;

    fn members(ids: &[u64]) -> Members {
        Members::new(ids.iter().copied().map(ReplicaId::from_random)).unwrap()
    }

    fn view(attach: u64, restart: u32, number: u32, ids: &[u64]) -> View {
        let id = ViewId { generation: Generation::new(attach, restart), number };
        View { id, members: members(ids) }
    }

    fn honouring(committed: View, proposed: &[View]) -> ReplicaReport {
        ReplicaReport { committed, proposed: proposed.to_vec() }
    }

    const NEVER_ASKED: Arbiter = Arbiter { granted: None, stale_since: None };

    #[test]
    fn a_stored_zero_means_that_the_record_is_not_stale_and_none_is_not_written() {
        let read = |text: &str| serde_json::from_str::<Arbiter>(text).unwrap();
        for text in [r#"{"granted":null,"stale_since":0}"#, r#"{"granted":null}"#] {
            assert_eq!(read(text), NEVER_ASKED, "{text}");
        }
        let write = |arbiter: &Arbiter| serde_json::to_string(arbiter).unwrap();
        assert_eq!(write(&NEVER_ASKED), r#"{"granted":null}"#);
        let stale = NEVER_ASKED.stale(7);
        assert_eq!(write(&stale), r#"{"granted":null,"stale_since":7}"#);
        assert_eq!(read(&write(&stale)), stale);
    }

    #[test]
    fn a_stale_record_grants_nothing_until_a_majority_has_started() {
        let (old, target) = (view(1, 0, 1, &[1, 2]), view(7, 0, 1, &[2]));
        // Before: 1 had continued alone, by a grant that is not in the record.
        let record = NEVER_ASKED.stale(7);
        let refused = record.ask(7, target, &honouring(old, &[]), &members(&[2]));
        assert_eq!(refused, Err(NotGranted::Stale { since: 7 }));
        assert_eq!(record.renewed(view(6, 0, 1, &[1, 2])), None, "an engine from before");
        assert_eq!(NEVER_ASKED.renewed(target), None, "nothing is wrong with it");
        let committed = view(7, 1, 1, &[1, 2]);
        let renewed = record.renewed(committed).unwrap();
        let outdated = renewed.ask(8, view(8, 0, 1, &[2]), &honouring(old, &[]), &members(&[2]));
        assert_eq!(outdated, Err(NotGranted::NotHonoured { granted: committed }));
        let alone = view(7, 1, 2, &[1]);
        assert!(renewed.ask(7, alone, &honouring(committed, &[]), &members(&[1])).is_ok());
    }

    #[test]
    fn grants_one_of_two_once_and_again() {
        let (old, target) = (view(1, 0, 1, &[1, 2]), view(1, 0, 2, &[1]));
        let ask = |arbiter: &Arbiter| arbiter.ask(1, target, &honouring(old, &[]), &members(&[1])).unwrap();
        let once = ask(&NEVER_ASKED);
        assert_eq!(once.granted(), Some(target));
        assert_eq!(ask(&once), once);
    }

    #[test]
    fn the_other_half_gets_the_grant_of_the_first() {
        let (old, granted) = (view(0, 0, 0, &[1, 2]), view(1, 0, 2, &[1]));
        let arbiter = Arbiter { granted: Some(granted), ..NEVER_ASKED };
        let other = view(1, 1, 1, &[2]);
        let refused = arbiter.ask(1, other, &honouring(old, &[]), &members(&[2])).unwrap_err();
        assert_eq!(refused, NotGranted::NotHonoured { granted });
        assert_eq!(refused.granted(), Some(granted));
    }

    #[test]
    fn a_grant_follows_from_the_one_before() {
        let (old, granted) = (view(0, 0, 0, &[1, 2]), view(1, 0, 2, &[1]));
        let arbiter = Arbiter { granted: Some(granted), ..NEVER_ASKED };
        let again = view(1, 1, 1, &[1]);
        assert!(arbiter.ask(1, again, &honouring(old, &[granted]), &members(&[1])).is_ok());
        // Something newer than the grant was committed since: both are members once more.
        let (newer, other) = (view(1, 1, 1, &[1, 2]), view(1, 1, 2, &[2]));
        assert!(arbiter.ask(1, other, &honouring(newer, &[]), &members(&[2])).is_ok());
    }

    #[test]
    fn only_the_attached_engine_gets_one() {
        let (old, target) = (view(1, 0, 1, &[1, 2]), view(2, 3, 2, &[1]));
        for attach in [1, 3] {
            let refused = NEVER_ASKED.ask(attach, target, &honouring(old, &[]), &members(&[1]));
            assert_eq!(refused, Err(NotGranted::NotAttached { asked: Generation::new(2, 3), attach }));
        }
        // The engine does not even know the grant of its attachment.
        let arbiter = Arbiter { granted: Some(target), ..NEVER_ASKED };
        assert!(arbiter.ask(3, target, &honouring(old, &[]), &members(&[1])).is_err());
    }

    #[test]
    fn older_and_equal_numbers_are_refused() {
        let old = view(1, 0, 1, &[1, 2]);
        let granted = view(1, 0, 3, &[1]);
        let arbiter = Arbiter { granted: Some(granted), ..NEVER_ASKED };
        for target in [view(1, 0, 2, &[1]), view(1, 0, 3, &[2])] {
            let honoured = honouring(old, &[granted]);
            let refused = arbiter.ask(1, target, &honoured, &target.members);
            assert_eq!(refused, Err(NotGranted::Outdated { target, granted }));
        }
    }

    #[test]
    fn less_than_half_of_any_honoured_view_is_refused() {
        let (old, between) = (view(1, 0, 1, &[1, 2]), view(1, 0, 2, &[1, 2, 3]));
        let target = view(2, 0, 1, &[1]);
        let ask = |stored: &[u64]| NEVER_ASKED.ask(2, target, &honouring(old, &[between]), &members(stored));
        assert!(matches!(ask(&[1]), Err(NotGranted::NoQuorum { honoured, .. }) if honoured == between));
        assert!(
            ask(&[1, 3]).is_ok(),
            "3 is not a member, but its vote counts in the view that it is part of"
        );
        assert!(matches!(ask(&[3]), Err(NotGranted::NotStored { .. })));
    }

    #[test]
    fn a_target_that_does_not_follow_the_honoured_view_is_refused() {
        let old = view(1, 0, 2, &[1, 2]);
        for target in [view(1, 0, 3, &[1, 3]), view(1, 0, 3, &[]), view(1, 0, 1, &[1])] {
            let refused = NEVER_ASKED.ask(1, target, &honouring(old, &[]), &target.members);
            assert_eq!(refused, Err(NotGranted::DoesNotFollow { target, honoured: old }));
        }
    }
}
