//! The real rules hold, as far as a short search sees.

use std::ops::RangeInclusive;

use shorthorn_views_model::{Limits, Model, search, walk};

const LIMITS: Limits = Limits {
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

/// Real engines, which never continue in the old view; and rule 6.
const HEALING: Limits = Limits { giving_up: false, healing: true, ..LIMITS };

#[test]
fn a_single_replica_in_every_state() {
    let limits = Limits { writes: 2, changes: 2, replica_crashes: false, ..LIMITS };
    let found = search(&Model::new(Limits { replicas: 1, engines: 3, ..limits }, None), u32::MAX);
    assert_eq!(found.violation, None);
    assert!(found.exhausted);
}

#[test]
fn two_replicas_and_three_in_the_states_nearest_to_the_start() {
    for replicas in [2, 3] {
        let limits = Limits { replicas, writes: 2, changes: 2, replica_crashes: false, ..HEALING };
        let found = search(&Model::new(limits, None), 40_000);
        assert_eq!(found.violation, None);
        assert!(!found.exhausted);
    }
}

#[test]
fn random_walks() {
    for (replicas, keeps_grants) in [(2, false), (3, false), (2, true), (3, true)] {
        for limits in [LIMITS, HEALING] {
            walks(&Model::new(Limits { replicas, keeps_grants, ..limits }, None), replicas, 1..=500);
        }
    }
}

/// A start leaves out replicas that it has reached.
#[test]
fn random_walks_with_starts_that_leave_replicas_out() {
    for (replicas, keeps_grants) in [(2, false), (3, false), (2, true), (3, true)] {
        for limits in [LIMITS, HEALING] {
            let limits = Limits { replicas, keeps_grants, offenders: true, ..limits };
            walks(&Model::new(limits, None), replicas, 1..=250);
        }
        let limits = Limits {
            replicas,
            keeps_grants,
            offenders: true,
            restores: 2,
            losses: 1,
            giving_up: false,
            ..LIMITS
        };
        walks(&Model::new(limits, None), replicas, 1..=250);
    }
}

#[test]
fn the_nearest_states_with_starts_that_leave_replicas_out() {
    for replicas in [2, 3] {
        let limits =
            Limits { replicas, writes: 2, changes: 2, replica_crashes: false, offenders: true, ..HEALING };
        let found = search(&Model::new(limits, None), 40_000);
        assert_eq!(found.violation, None);
    }
}

/// Numbers of generations are used again, by engines that draw their nonces.
#[test]
fn random_walks_with_hosts_that_lose_their_state_files() {
    for replicas in [2, 3] {
        let limits = Limits { replicas, keeps_grants: true, losses: 2, ..HEALING };
        walks(&Model::new(limits, None), replicas, 1..=500);
    }
}

/// The controller draws numbers again and has forgotten grants.
#[test]
fn random_walks_with_a_store_restored_from_a_backup() {
    for replicas in [2, 3] {
        let limits = Limits { replicas, restores: 2, losses: 1, giving_up: false, ..LIMITS };
        walks(&Model::new(limits, None), replicas, 1..=500);
    }
}

fn walks(model: &Model, replicas: u8, seeds: RangeInclusive<u64>) {
    for seed in seeds {
        let walk = walk(model, seed, 150);
        assert_eq!(walk.violation, None, "{replicas} replicas, seed {seed}");
    }
}
