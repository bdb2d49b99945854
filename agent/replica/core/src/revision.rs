//! The value of Longhorn's revision counter for a replica of ours.
//!
//! Longhorn counts the writes of a replica in `revision.counter`, if a volume has that enabled. It takes the
//! opened replicas with the highest number, and drops the others. Shorthorn counts no writes: an unchanged
//! number would be the same in a replica that has missed everything since. Its number stands for the newest
//! view that the replica has stored. So all members show the same number as soon as they know their view. A
//! replica that was left behind, whether or not it knows that, shows a smaller one. A member that does not
//! know its newest view yet shows a smaller one too: Longhorn rebuilds it.

use shorthorn_types::{Generation, ReplicaId};
use shorthorn_views::ReplicaViews;

/// The first number: above every number of writes of Longhorn, so that a replica that Shorthorn never had is
/// older than all others. A signed number of 64 bits has room for as much again, for views and for the writes
/// that Longhorn counts on.
const FIRST: u64 = 1 << 62;

/// Bits for the number of the attachment: one attachment a minute for 30 years.
const ATTACH_BITS: u32 = 24;
/// Bits for the number of the engine's process within the attachment.
const RESTART_BITS: u32 = 18;
/// Bits for the number of the engine's view.
const NUMBER_BITS: u32 = 20;

/// Returns the number for a replica with these views. None if it has to keep the number that it has. That is
/// so if no engine has ever had the replica, or it is not in all of its views.
#[must_use]
pub fn revision_counter(me: ReplicaId, views: &ReplicaViews) -> Option<u64> {
    let report = views.report();
    if !report.views().all(|view| view.members.contains(me)) {
        return None;
    }
    let newest = report.views().map(|view| view.id).max()?;
    let Generation { attach, restart, .. } = newest.generation;
    if newest.generation == Generation::NEVER {
        return None;
    }
    // A part that is too large counts as the largest that fits: then two views can have one number, as
    // without a counter.
    let fit = |value: u64, bits: u32| value.min((1 << bits) - 2);
    let attach = fit(attach, ATTACH_BITS) << (RESTART_BITS + NUMBER_BITS);
    let restart = fit(u64::from(restart), RESTART_BITS) << NUMBER_BITS;
    Some(FIRST + attach + restart + fit(u64::from(newest.number), NUMBER_BITS))
}

#[cfg(test)]
mod tests {
    use shorthorn_types::{Members, View, ViewId};

    use super::*;

    fn view(generation: Generation, number: u32, members: &[u64]) -> View {
        let members = Members::new(members.iter().copied().map(ReplicaId::from_random)).unwrap();
        View { id: ViewId { generation, number }, members }
    }

    fn counter(views: &ReplicaViews) -> Option<u64> {
        revision_counter(ReplicaId::from_random(1), views)
    }

    fn of(attach: u64, restart: u32, number: u32) -> u64 {
        counter(&ReplicaViews::new(view(Generation::new(attach, restart), number, &[1, 2]))).unwrap()
    }

    #[test]
    fn newer_views_have_greater_numbers_than_older_ones_and_than_any_count_of_writes() {
        let ordered = [
            of(1, 0, 1),
            of(1, 0, 2),
            of(1, 1, 0),
            of(1, 1, 1_000_000),
            of(2, 0, 0),
            of(16_000_000, 200_000, 9),
        ];
        assert!(ordered.is_sorted_by(|older, newer| older < newer), "{ordered:?}");
        assert!(ordered[0] > u64::MAX / 4);
        let most = of(u64::MAX, u32::MAX, u32::MAX);
        assert!(
            most > ordered[5] && i64::try_from(most + (1 << 38)).is_ok(),
            "Longhorn counts on from there"
        );
    }

    #[test]
    fn a_proposed_view_counts_as_soon_as_it_is_stored() {
        let generation = Generation::new(3, 0);
        let mut views = ReplicaViews::new(view(generation, 1, &[1, 2]));
        views.fence(generation).unwrap();
        let basis = views.report().clone();
        views.propose(generation, view(generation, 2, &[1]), &basis).unwrap();
        assert_eq!(counter(&views), Some(of(3, 0, 2)));
    }

    #[test]
    fn a_replica_that_has_left_or_is_new_keeps_the_number_that_it_has() {
        assert_eq!(counter(&ReplicaViews::new(view(Generation::new(3, 0), 1, &[2]))), None);
        assert_eq!(counter(&ReplicaViews::new(view(Generation::NEVER, 0, &[1, 2]))), None);
        // It is in one of its views and not in the other, either way.
        let generation = Generation::new(3, 0);
        for (before, after) in [(&[1, 2][..], &[2][..]), (&[2], &[1, 2])] {
            let mut views = ReplicaViews::new(view(generation, 1, before));
            views.fence(generation).unwrap();
            let basis = views.report().clone();
            views.propose(generation, view(generation, 2, after), &basis).unwrap();
            assert_eq!(counter(&views), None);
        }
    }
}
