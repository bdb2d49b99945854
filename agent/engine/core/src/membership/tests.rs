use super::*;

/// Returns four replicas of which the first `members` are in the view. The first `local` are on this host.
fn membership(members: u64, local: u64) -> Membership {
    let peer = |n| PeerConfig { replica: ReplicaId::from_random(n), local: n < local };
    let peers: Vec<PeerConfig> = (0..4).map(peer).collect();
    let id = ViewId { generation: Generation::new(1, 0), number: 1 };
    let members = Members::new((0..members).map(ReplicaId::from_random)).unwrap();
    Membership::new(&peers, View { id, members })
}

fn peers(peers: &[PeerIndex]) -> PeerMask {
    peers.iter().copied().map(PeerMask::one).fold(PeerMask::NONE, PeerMask::with)
}

/// Returns the proposed view, and how many members it has.
fn proposed(step: MembershipStep) -> (ViewId, usize) {
    let MembershipStep::Propose(view, _) = step else { panic!("no proposal: {step:?}") };
    (view.id, view.members.len())
}

#[test]
fn a_majority_changes_the_view_when_all_of_it_have_stored_it() {
    let mut membership = membership(3, 0);
    let (id, count) = proposed(membership.lose(1));
    assert_eq!((count, membership.proposed_to()), (2, peers(&[0, 2])));
    assert!(
        membership.is_changing() && membership.in_view().has(1),
        "the view without the replica is not complete"
    );
    assert_eq!(membership.stored(0, id), MembershipStep::Wait);
    assert_eq!(membership.unstored(), peers(&[2]));
    let MembershipStep::Installed(view, rebuilt) = membership.stored(2, id) else { panic!() };
    assert_eq!((view.id, rebuilt), (id, PeerMask::NONE));
    assert_eq!((membership.is_changing(), membership.in_view()), (false, peers(&[0, 2])));
    assert_eq!(membership.lose(1), MembershipStep::Wait, "it has left");
}

#[test]
fn a_further_loss_replaces_the_proposal() {
    let mut membership = membership(4, 0);
    let (first, _) = proposed(membership.lose(1));
    let (second, count) = proposed(membership.lose(2));
    assert!(second > first && count == 2);
    assert_eq!(membership.stored(0, first), MembershipStep::Wait, "of a proposal that counts no more");
    assert_eq!(membership.unstored(), peers(&[0, 3]));
    assert!(matches!(membership.lose(3), MembershipStep::Frozen(_)), "less than half of the view");
}

#[test]
fn half_of_the_view_needs_a_grant_and_no_further_loss() {
    let mut membership = membership(2, 0);
    let (id, _) = proposed(membership.lose(0));
    assert!(matches!(membership.stored(1, id), MembershipStep::AskGrant(view, ..) if view.id == id));
    assert_eq!(membership.quorum_of(peers(&[0, 1])), Quorum::Less, "a further loss is the end");
    let MembershipStep::Installed(..) = membership.granted(id) else { panic!() };
    assert_eq!((membership.in_view(), membership.is_frozen()), (peers(&[1]), false));
    let MembershipStep::Frozen(_) = membership.lose(1) else { panic!() };
    assert!(membership.is_frozen() && membership.is_changing());
}

#[test]
fn a_loss_while_the_arbiter_is_asked_freezes_the_volume() {
    let mut membership = membership(4, 0);
    membership.lose(0);
    let (id, count) = proposed(membership.lose(1));
    assert_eq!((count, membership.stored(2, id)), (2, MembershipStep::Wait));
    assert!(matches!(membership.stored(3, id), MembershipStep::AskGrant(..)));
    assert!(matches!(membership.lose(2), MembershipStep::Frozen(_)) && membership.is_frozen());
}

#[test]
fn a_grant_that_arrives_in_a_frozen_volume_installs_its_view_and_the_volume_stays_frozen() {
    let mut membership = membership(4, 0);
    membership.lose(0);
    let (id, _) = proposed(membership.lose(1));
    assert_eq!(membership.stored(2, id), MembershipStep::Wait);
    assert!(matches!(membership.stored(3, id), MembershipStep::AskGrant(..)));
    assert!(matches!(membership.lose(2), MembershipStep::Frozen(_)));
    let MembershipStep::Installed(view, rebuilt) = membership.granted(id) else { panic!() };
    assert_eq!((view.id, rebuilt, membership.in_view()), (id, PeerMask::NONE, peers(&[2, 3])));
    assert_eq!((membership.is_changing(), membership.is_frozen()), (false, true));
    assert_eq!(membership.granted(id), MembershipStep::Wait, "the change is complete");
}

#[test]
fn a_grant_does_not_count_after_the_last_member_is_lost() {
    let mut membership = membership(2, 0);
    let (id, _) = proposed(membership.lose(0));
    assert!(matches!(membership.stored(1, id), MembershipStep::AskGrant(..)));
    assert!(matches!(membership.lose(1), MembershipStep::Frozen(_)));
    assert_eq!(membership.granted(id), MembershipStep::Wait, "its change is replaced");
    assert_eq!(membership.quorum_of(peers(&[0, 1])), Quorum::Less, "the arbiter is still asked");
    assert!(membership.is_changing() && membership.is_frozen());
}

#[test]
fn a_rebuilt_replica_becomes_a_member_with_its_view() {
    let mut membership = membership(2, 0);
    membership.start_rebuild(2);
    assert_eq!((membership.answering(), membership.connected()), (peers(&[0, 1]), peers(&[0, 1, 2])));
    assert_eq!(membership.losses_of_member(2), None);
    let (id, count) = proposed(membership.admit(2));
    assert_eq!((count, membership.proposed_to()), (3, peers(&[0, 1, 2])));
    assert_eq!(membership.stored(0, id), MembershipStep::Wait);
    assert_eq!(membership.stored(1, id), MembershipStep::Wait, "it has to store it itself");
    let MembershipStep::Installed(_, rebuilt) = membership.stored(2, id) else { panic!() };
    assert_eq!((rebuilt, membership.answering()), (peers(&[2]), peers(&[0, 1, 2])));
    assert_eq!(membership.losses_of_member(2), Some(0));
}

#[test]
fn the_loss_of_a_rebuilding_replica_changes_only_the_view_that_has_it() {
    let mut membership = membership(2, 0);
    membership.start_rebuild(2);
    assert_eq!(membership.lose(2), MembershipStep::Wait);
    membership.start_rebuild(2);
    let (first, _) = proposed(membership.admit(2));
    let (second, count) = proposed(membership.lose(2));
    assert!(second > first && count == 2);
}

#[test]
fn reads_take_turns_on_this_host_and_avoid_slow_members() {
    let mut near = membership(3, 2);
    assert_eq!(near.nearest(near.answering()), Some(0));
    assert_eq!((near.nearest(peers(&[1, 2])), near.nearest(peers(&[2]))), (Some(1), Some(2)));
    let mut read = |slow: &[PeerIndex], rotten: &[PeerIndex]| near.reader(peers(slow), peers(rotten));
    assert_eq!((read(&[], &[]), read(&[], &[]), read(&[], &[])), (Some(0), Some(1), Some(0)));
    assert_eq!(read(&[1], &[]), Some(0), "the other one on this host is slow");
    assert_eq!(read(&[0, 1], &[]), Some(2), "a prompt one elsewhere");
    assert_eq!(read(&[0, 1, 2], &[]), Some(0), "all are slow");
    assert_eq!((read(&[], &[0, 1]), read(&[], &[0, 1, 2])), (Some(2), None), "rot is never read");
    let mut far = membership(3, 0);
    let mut read = || far.reader(PeerMask::NONE, PeerMask::NONE);
    assert_eq!((read(), read(), read(), read()), (Some(0), Some(1), Some(2), Some(0)));
}
