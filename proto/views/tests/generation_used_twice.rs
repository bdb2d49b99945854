//! An attachment and a restart that are used twice: an engine has lost its state file, or the controller's
//! store was restored from a backup. In the order of the real programs.
#![allow(clippy::unwrap_used)] // clippy does not count helpers as tests

use shorthorn_types::{Generation, Members, ReplicaId, ReplicaReport, View, ViewId};
use shorthorn_views::{Arbiter, ChangeProgress, Fence, NotGranted, Refused, ReplicaViews, ViewChange, basis};

fn id(n: u64) -> ReplicaId {
    ReplicaId::from_random(n)
}

fn view(generation: Generation, number: u32, ids: &[u64]) -> View {
    let members = Members::new(ids.iter().copied().map(id)).unwrap();
    View { id: ViewId { generation, number }, members }
}

fn only(committed: View) -> ReplicaReport {
    ReplicaReport { committed, proposed: Vec::new() }
}

/// Two replicas, and the record of the arbiter.
struct Volume {
    replicas: [ReplicaViews; 2],
    arbiter: Arbiter,
}

/// Makes a volume of which both are members; the second leaves with a grant, and comes back.
fn used(generation: Generation) -> Volume {
    let first = view(Generation::NEVER, 0, &[1, 2]);
    let mut volume = Volume {
        replicas: [ReplicaViews::new(first), ReplicaViews::new(first)],
        arbiter: Arbiter::default(),
    };
    let (both, alone) = (view(generation, 1, &[1, 2]), view(generation, 2, &[1]));
    for replica in &mut volume.replicas {
        assert_eq!(replica.fence(generation), Ok(Fence::Raised));
        replica.propose(generation, both, &only(first)).unwrap();
        replica.commit(generation, both).unwrap();
    }
    volume.replicas[0].propose(generation, alone, &only(both)).unwrap();
    volume.arbiter = volume.arbiter.ask(7, alone, &only(both), &alone.members).unwrap();
    volume.replicas[0].commit(generation, alone).unwrap();
    let again = view(generation, 3, &[1, 2]);
    for replica in &mut volume.replicas {
        replica.propose(generation, again, &only(alone)).unwrap();
        replica.commit(generation, again).unwrap();
    }
    volume
}

fn reports(volume: &Volume) -> Vec<(ReplicaId, ReplicaReport)> {
    (1..).zip(&volume.replicas).map(|(n, replica)| (id(n), replica.report().clone())).collect()
}

#[test]
fn a_refused_view_is_not_answered_as_stored() {
    let seven = Generation::new(7, 0);
    let mut volume = used(seven);
    let honoured = basis(&reports(&volume), volume.arbiter.granted()).unwrap().honoured;
    for replica in &mut volume.replicas {
        assert_eq!(replica.fence(seven), Ok(Fence::Same), "without a nonce they look the same");
        let refused = replica.propose(seven, view(seven, 1, &[1, 2]), &honoured);
        assert!(matches!(refused, Err(Refused::NotNewer { .. })), "{refused:?}");
    }
}

#[test]
fn the_lower_generation_is_refused() {
    let (first, second) = (Generation::new(7, 0).of_nonce(9), Generation::new(7, 0).of_nonce(5));
    let mut volume = used(first);
    let fenced = Err(Refused::Fenced { asked: second, holder: first });
    assert_eq!(volume.replicas[0].fence(second), fenced);
}

#[test]
fn the_higher_generation_continues_and_no_write_is_lost() {
    let (first, second) = (Generation::new(7, 0).of_nonce(5), Generation::new(7, 0).of_nonce(9));
    let mut volume = used(first);
    for replica in &mut volume.replicas {
        assert_eq!(replica.fence(second), Ok(Fence::Raised));
    }
    let found = basis(&reports(&volume), volume.arbiter.granted()).unwrap();
    let both = view(second, 1, &[1, 2]);
    for replica in &mut volume.replicas {
        replica.propose(second, both, &found.honoured).unwrap();
        replica.commit(second, both).unwrap();
    }
    // The second replica fails, and writes are acknowledged that the first alone has.
    let alone = view(second, 2, &[1]);
    let mut change = ViewChange::new(only(both), alone);
    volume.replicas[0].propose(second, alone, &only(both)).unwrap();
    change.stored(id(1));
    assert_eq!(change.progress(), ChangeProgress::NeedsGrant);
    assert_ne!(volume.arbiter.granted(), Some(alone), "it was granted to the other process only");
    volume.arbiter = volume.arbiter.ask(7, alone, &only(both), &alone.members).unwrap();
    change.granted();
    assert_eq!(change.progress(), ChangeProgress::Committed);

    // The next engine reaches the second one alone.
    let eight = Generation::new(8, 0).of_nonce(1);
    volume.replicas[1].fence(eight).unwrap();
    let found = basis(&reports(&volume)[1..], None).unwrap();
    let target = view(eight, 1, &[2]);
    let refused = volume.arbiter.ask(8, target, &found.honoured, &target.members);
    assert_eq!(refused, Err(NotGranted::NotHonoured { granted: alone }));
}
