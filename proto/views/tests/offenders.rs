//! Tests starts that leave replicas out. Such a start never does more than one with all replicas, nor than
//! one that does not reach them.
#![allow(clippy::unwrap_used)] // clippy does not count helpers as tests

use proptest::collection::vec;
use proptest::prelude::*;
use shorthorn_types::{Generation, Members, ReplicaId, ReplicaReport, View, ViewId};
use shorthorn_views::{FencedReplica, Quorum, StartPlan, plan, quorum};

const REPLICAS: u64 = 4;

fn set(bits: u8) -> Members {
    let of = (0..REPLICAS).filter(|n| bits & 1 << n != 0);
    Members::new(of.map(ReplicaId::from_random)).unwrap()
}

/// Views of one number, oldest first: each has the members of some bits. The first is that of a new volume.
fn views(members: &[u8]) -> Vec<View> {
    let view = |(attach, bits): (u64, &u8)| View {
        id: ViewId { generation: Generation::new(attach, 0), number: u32::from(attach > 0) },
        members: set(if attach == 0 { u8::MAX } else { *bits }),
    };
    (0..).zip(members).map(view).collect()
}

/// The statement of one replica: index of its committed view, bits of the proposed ones, lack of data, loss
/// of power, and stamp.
type Said = (usize, u8, bool, bool, Option<u32>);

fn fenced(number: u64, said: &Said, views: &[View]) -> FencedReplica {
    let (committed, proposed, rebuilding, lost_cache, stamp) = *said;
    let proposed = (committed + 1..views.len()).filter(|place| proposed & 1 << place != 0);
    let report =
        ReplicaReport { committed: views[committed], proposed: proposed.map(|place| views[place]).collect() };
    FencedReplica { replica: ReplicaId::from_random(number), report, rebuilding, lost_cache, stamp }
}

fn said() -> impl Strategy<Value = Said> {
    let stamp = prop_oneof![6 => (5_u32..8).prop_map(Some), 1 => Just(None)];
    let rarely = || prop::bool::weighted(0.2);
    (0..3_usize, any::<u8>(), rarely(), rarely(), stamp)
}

fn is_part(some: &[View], of: &[View]) -> bool {
    some.iter().all(|view| of.contains(view))
}

/// Checks that the replicas that store the view are a quorum of every view, and that the members are in all
/// of them.
fn check_stores(
    found: &StartPlan,
    fenced_replicas: &[FencedReplica],
    offenders: &Members,
) -> Result<(), TestCaseError> {
    let stores = fenced_replicas.iter().map(|one| one.replica);
    let stores =
        Members::new(stores.filter(|id| !offenders.contains(*id) && !found.blank.contains(*id))).unwrap();
    prop_assert!(found.members.is_subset_of(&stores));
    for view in found.basis.honoured.views() {
        prop_assert!(found.members.is_subset_of(&view.members));
        prop_assert!(quorum(&view.members, &stores) != Quorum::Less);
        prop_assert!(quorum(&view.members, &stores) == Quorum::More || found.basis.needs_grant);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4096, ..ProptestConfig::default() })]

    #[test]
    fn leaving_replicas_out_gives_nothing_up(
        members in vec(1_u8..16, 5),
        sayings in vec(said(), 4),
        reached in 1_u8..16,
        offenders in 1_u8..16,
        granted in prop::option::of(1..5_usize),
    ) {
        let views = views(&members);
        let granted = granted.map(|place| views[place]);
        let offenders = set(offenders);
        let fenced_replicas: Vec<FencedReplica> = (0..)
            .zip(&sayings)
            .filter(|(number, _)| reached & 1 << number != 0)
            .map(|(number, said)| fenced(number, said, &views))
            .collect();
        let Ok(all) = plan(&fenced_replicas, granted) else { return Ok(()) };
        let plan_of_all = plan(&fenced_replicas, granted).unwrap();
        let Some(found) = all.without(&offenders, &fenced_replicas, granted) else { return Ok(()) };

        // It is a part of the start with all of them.
        prop_assert!(!found.members.is_empty());
        prop_assert!(found.members.is_subset_of(&plan_of_all.members));
        prop_assert!(found.members.intersection(&offenders).is_empty());
        prop_assert_eq!(found.blank, plan_of_all.blank);
        prop_assert_eq!(found.lost_writes, plan_of_all.lost_writes);
        let (honoured, of_all) = (&found.basis.honoured, &plan_of_all.basis.honoured);
        prop_assert_eq!(honoured.committed, of_all.committed);
        prop_assert!(is_part(&of_all.proposed, &honoured.proposed));

        check_stores(&found, &fenced_replicas, &offenders)?;

        // A start that does not reach the offenders, but knows as new a view and the same blank ones, has to
        // honour no more. A restored disk is the exception: the report of its replica is dropped, with views
        // that no other one reports. The report of an offender, which is fenced, may have ruled these out
        // before.
        let others: Vec<FencedReplica> =
            fenced_replicas.iter().filter(|one| !offenders.contains(one.replica)).cloned().collect();
        let newest = others.iter().map(|one| one.report.committed).max_by_key(|view| view.id);
        let is_blank = |of: &StartPlan| of.blank.filter(|id| !offenders.contains(id));
        let stamps = || fenced_replicas.iter().filter_map(|one| one.stamp);
        let is_restored = stamps().max().unwrap_or(0) > stamps().min().unwrap_or(0) + 1;
        if newest == Some(honoured.committed) && !is_restored {
            match plan(&others, granted) {
                Ok(unreached) if unreached.blank == is_blank(&found) => {
                    prop_assert!(is_part(&unreached.basis.honoured.proposed, &honoured.proposed));
                    prop_assert!(found.members.is_subset_of(&unreached.basis.members));
                    prop_assert!(found.lost_writes || found.members.is_subset_of(&unreached.members));
                    prop_assert!(found.lost_writes || !unreached.lost_writes);
                }
                Ok(_) => {}
                Err(none) => prop_assert!(false, "{none:?} without {offenders}"),
            }
        }
    }
}
