//! Every wrong rule is found: else the model proves nothing.

use std::ops::RangeInclusive;

use shorthorn_views_model::{Limits, Model, Mutation, walk};

const THREE: Limits = Limits {
    replicas: 3,
    engines: 4,
    writes: 3,
    changes: 4,
    replica_crashes: true,
    giving_up: true,
    keeps_grants: false,
    restores: 0,
    losses: 0,
    offenders: false,
    healing: false,
};

const TWO: Limits = Limits { replicas: 2, ..THREE };

/// Limits with which hosts lose their state.
const LOSING: Limits = Limits { losses: 2, giving_up: false, ..TWO };

/// The controller's store is restored from a backup.
const RESTORING: Limits = Limits { restores: 1, giving_up: false, ..TWO };

/// A smaller world, in which some are found sooner.
const NO_GIVING_UP: Limits = Limits { engines: 3, writes: 2, giving_up: false, ..THREE };

/// Engines as they are, and rule 6.
const HEALING: Limits = Limits { giving_up: false, healing: true, ..TWO };

/// Most are found early; in the slow cases, the first seeds that find nothing are left out.
const SEEDS: RangeInclusive<u64> = 1..=10_000;

/// Walks until something is wrong, and says at which seed, and after how many steps of that walk and of all,
/// that was.
fn find(mutation: Mutation, limits: Limits, seeds: RangeInclusive<u64>) {
    find_broken(mutation, limits, seeds, |rule| {
        assert_eq!(rule == 6, limits.healing, "rule {rule}");
        true
    });
}

/// Does the same for a write that is lost, even if other rules are violated before.
fn find_loss(mutation: Mutation, limits: Limits, seeds: RangeInclusive<u64>) {
    find_broken(mutation, limits, seeds, |rule| rule == 1);
}

fn find_broken(
    mutation: Mutation,
    limits: Limits,
    seeds: RangeInclusive<u64>,
    is_looked_for: impl Fn(u8) -> bool,
) {
    let model = Model::new(limits, Some(mutation));
    let mut steps = 0;
    for seed in seeds.clone() {
        let found = walk(&model, seed, 150);
        steps += found.steps.len();
        if let Some(violation) = found.violation.filter(|violation| is_looked_for(violation.rule)) {
            let last = found.steps.len();
            println!("{mutation:?}: seed {seed}, {last} of {steps} steps, {violation}");
            return;
        }
    }
    panic!("{mutation:?} was not found by the seeds {seeds:?}");
}

#[test]
fn one_stored_view_only() {
    find(Mutation::OneView, TWO, SEEDS);
}

#[test]
fn only_the_newest_proposed_view_reported() {
    find(Mutation::NewestProposed, NO_GIVING_UP, SEEDS);
}

#[test]
fn a_grant_for_less_than_half() {
    find(Mutation::LessThanHalf, THREE, SEEDS);
}

#[test]
fn a_start_that_counts_the_fenced() {
    find(Mutation::CountFenced, Limits { engines: 4, ..NO_GIVING_UP }, SEEDS);
}

#[test]
fn a_start_that_counts_those_that_it_leaves_out() {
    find(Mutation::CountOffenders, Limits { offenders: true, ..NO_GIVING_UP }, SEEDS);
}

#[test]
fn members_from_the_newest_proposed_view_alone() {
    find(Mutation::NewestMembers, THREE, SEEDS);
}

#[test]
fn a_granted_change_given_up() {
    find(Mutation::GiveUpGranted, Limits { keeps_grants: true, ..THREE }, 4_001..=14_000);
}

#[test]
fn writes_in_flight_forgotten() {
    find(Mutation::ForgetInFlight, TWO, SEEDS);
}

#[test]
fn views_without_the_generation() {
    find(Mutation::NoGeneration, TWO, SEEDS);
}

#[test]
fn serving_before_fencing() {
    find(Mutation::ServeBeforeFence, THREE, SEEDS);
}

#[test]
fn a_generation_used_twice() {
    find_loss(Mutation::UsedTwice, LOSING, SEEDS);
}

#[test]
fn a_restored_record_that_is_trusted() {
    find_loss(Mutation::TrustRestored, RESTORING, SEEDS);
}

#[test]
fn a_generation_without_a_nonce() {
    find_loss(Mutation::NoNonce, LOSING, SEEDS);
}

#[test]
fn a_member_before_its_time() {
    find(Mutation::EarlyMember, NO_GIVING_UP, 12_001..=22_000);
}

#[test]
fn a_grant_that_is_not_honoured() {
    find(Mutation::ForgetGrant, TWO, SEEDS);
}

#[test]
fn a_view_taken_for_dead_because_a_later_one_was_granted() {
    find(Mutation::DropOlder, THREE, SEEDS);
}

#[test]
fn a_view_taken_for_dead_that_replicas_not_reached_may_have() {
    find(Mutation::DropUnseen, TWO, SEEDS);
}

#[test]
fn a_start_that_proposes_before_it_asks() {
    find(Mutation::ProposeFirst, HEALING, SEEDS);
}

#[test]
fn less_than_half_proposed() {
    find(Mutation::ProposeMinority, HEALING, SEEDS);
}

#[test]
fn dead_views_honoured() {
    find(Mutation::KeepDead, HEALING, SEEDS);
}

#[test]
fn overruled_views_honoured() {
    find(Mutation::KeepOverruled, HEALING, SEEDS);
}

#[test]
fn views_of_a_minority_honoured() {
    find(Mutation::KeepMinority, HEALING, SEEDS);
}

#[test]
fn a_dead_grant_not_honoured() {
    find(Mutation::DropGrant, HEALING, SEEDS);
}
