use super::*;

const START: u64 = 8 << 20;

fn range(length: u64) -> ByteRange {
    part(START, length)
}

fn peers(peers: &[PeerIndex]) -> PeerMask {
    peers.iter().copied().map(PeerMask::one).fold(PeerMask::NONE, PeerMask::with)
}

fn rebuild(length: u64) -> Copy {
    Copy::new(CopyReason::Rebuild { region: 0 }, range(length), peers(&[2]))
}

fn failed(length: u64) -> Copy {
    let request = SlotId { queue: 0, slot: 1 };
    let why = CopyReason::Failed { request, sources: peers(&[0]), tried: PeerMask::NONE };
    Copy::new(why, range(length), peers(&[0, 1, 2]))
}

/// Reads the piece from replica 0, and returns the offset, length and kind of each part that is written.
fn runs(copy: &mut Copy, zeroes: ZeroBlocks) -> Vec<(u64, u64, bool)> {
    assert_eq!(copy.next_action(), CopyAction::Read);
    assert_eq!(copy.read_from(Some(0), peers(&[0, 1]), PeerMask::NONE), Some(Operation::CheckedRead));
    assert!(copy.piece_read(zeroes) && !copy.piece_read(zeroes));
    let mut runs = Vec::new();
    while let CopyAction::Write { operation, range, buffer_offset, .. } = copy.next_action() {
        assert_eq!(range.offset() - copy.piece().offset(), u64::from(buffer_offset));
        let is_zero = matches!(operation, Operation::WriteZeroes { .. });
        runs.push((u64::from(buffer_offset), range.length(), is_zero));
    }
    runs
}

#[test]
fn zeroes_and_data_are_written_in_runs() {
    assert_eq!(runs(&mut rebuild(64 << 10), [0; 4]), [(0, 64 << 10, false)]);
    assert_eq!(runs(&mut rebuild(64 << 10), [u64::MAX; 4]), [(0, 64 << 10, true)]);
    let mixed = runs(&mut rebuild(16 << 10), [0b0110, 0, 0, 0]);
    assert_eq!(mixed, [(0, 4096, false), (4096, 8192, true), (12288, 4096, false)]);
    let short = runs(&mut rebuild(4096 + 512), [0b10, 0, 0, 0]);
    assert_eq!(short, [(0, 4096, false), (4096, 512, true)], "the end of the volume");
}

#[test]
fn a_large_region_is_split_into_pieces() {
    let mut copy = rebuild((2 << 20) + 4096);
    let mut lengths = Vec::new();
    while copy.next_action() == CopyAction::Read {
        lengths.push(copy.piece().length());
        copy.read_from(Some(0), peers(&[0, 1]), PeerMask::NONE);
        copy.piece_read([0; 4]);
        assert!(matches!(copy.next_action(), CopyAction::Write { .. }));
    }
    assert_eq!(lengths, [1 << 20, 1 << 20, 4096]);
    assert_eq!((copy.next_action(), copy.targets()), (CopyAction::End, peers(&[2])));
}

#[test]
fn a_copy_ends_without_targets_or_a_source() {
    let mut copy = rebuild(4096);
    copy.forget(peers(&[2]));
    assert_eq!(copy.next_action(), CopyAction::End);
    let mut copy = rebuild(4096);
    assert_eq!(copy.read_from(None, PeerMask::NONE, PeerMask::NONE), None);
    assert_eq!((copy.next_action(), copy.targets()), (CopyAction::End, PeerMask::NONE));
    let mut copy = rebuild(4096);
    assert_eq!((copy.cancel(), copy.next_action()), (peers(&[2]), CopyAction::End));
}

#[test]
fn the_source_is_not_a_target_of_its_piece() {
    let mut resync = Copy::new(CopyReason::Resync { region: 0 }, range(4096), peers(&[0, 1]));
    assert!(resync.read_from(Some(1), peers(&[0, 1, 2]), PeerMask::NONE).is_some());
    assert_eq!(resync.targets(), peers(&[0, 2]), "the members at the time");
    resync.read_from(Some(1), peers(&[0, 1, 2]), peers(&[0, 1]));
    assert_eq!(resync.targets(), peers(&[2]), "another one holds the same as the source");
    let mut failed = failed(2 << 20);
    failed.read_from(Some(0), peers(&[0, 1, 2]), PeerMask::NONE);
    assert_eq!(failed.targets(), peers(&[1, 2]));
    failed.read_from(Some(1), peers(&[0, 1, 2]), PeerMask::NONE);
    assert_eq!(failed.targets(), peers(&[0, 2]), "the source of one piece is a target of another");
}

#[test]
fn a_member_with_rot_gets_the_piece_from_another() {
    let mut copy = rebuild(4096);
    assert!(copy.expects_rot());
    assert_eq!(copy.found_rot(0), Some(range(4096)));
    assert!(copy.read_from(Some(1), peers(&[0, 1]), PeerMask::NONE).is_some() && copy.piece_read([0; 4]));
    assert!(!copy.expects_rot(), "it was read");
    let CopyAction::Write { to, .. } = copy.next_action() else { panic!("{copy:?}") };
    assert_eq!((to, copy.targets()), (peers(&[0, 2]), peers(&[2])));
    assert!(copy.leaves_rot(0) && !copy.leaves_rot(2), "a target has to get all of the copy");
}

#[test]
fn rot_of_all_members_is_copied_unchanged_in_single_blocks() {
    let mut copy = rebuild(2 * 4096);
    assert_eq!(copy.found_rot(0), None, "the piece may hold rot in one block only");
    assert_eq!((copy.piece(), copy.rotten()), (range(4096), PeerMask::NONE));
    assert_eq!(copy.found_rot(0), Some(range(4096)));
    assert_eq!(copy.all_sources_rotten(), NoSource::Unchecked);
    assert_eq!(copy.read_from(Some(0), peers(&[0]), PeerMask::NONE), Some(Operation::Read));
    assert!(!copy.expects_rot() && copy.piece_read([0; 4]));
    assert!(matches!(copy.next_action(), CopyAction::Write { .. }));
    assert_eq!(copy.next_action(), CopyAction::Read);
    assert!(copy.expects_rot(), "the next block is compared again");
    let why = CopyReason::Repair { odd: peers(&[2]), sources: peers(&[0]) };
    let mut repair = Copy::new(why, range(4096), peers(&[2]));
    repair.found_rot(0);
    assert_eq!((repair.all_sources_rotten(), repair.next_action()), (NoSource::GivenUp, CopyAction::End));
}

#[test]
fn a_full_member_becomes_the_source_of_a_failed_request_once() {
    assert!(!rebuild(4096).becomes_source(1));
    let mut copy = failed(4096);
    copy.read_from(Some(0), peers(&[0, 1, 2]), PeerMask::NONE);
    assert!(copy.piece_read([0; 4]) && matches!(copy.next_action(), CopyAction::Write { .. }));
    assert!(copy.becomes_source(1) && !copy.becomes_source(1));
    assert_eq!(copy.next_action(), CopyAction::Read, "the piece starts over");
    assert!(matches!(copy.why(), CopyReason::Failed { sources, .. } if sources == peers(&[1])));
}

#[test]
fn rot_beside_a_failed_request_is_narrowed_to_single_blocks_first() {
    let mut copy = failed(2 * 4096);
    assert_eq!(copy.found_rot(0), None);
    assert_eq!(copy.found_rot(0), Some(range(4096)));
    copy.read_from(Some(1), peers(&[0, 1]), PeerMask::NONE);
    assert!(copy.piece_read([0; 4]) && copy.leaves_rot(0));
    assert!(copy.targets().has(0), "it stays a target of the pieces that follow");
}

#[test]
fn only_the_targets_that_are_left_hold_requests_up() {
    let mut copy = Copy::new(CopyReason::Rebuild { region: 0 }, range(4096), peers(&[1, 2]));
    copy.hold_up(peers(&[1, 2]), 100);
    copy.hold_up(peers(&[2]), 50);
    assert_eq!((copy.held_up_beyond(150), copy.held_up_beyond(149)), (None, Some((2, 150))));
    copy.forget(peers(&[2]));
    assert_eq!(copy.held_up_beyond(100), None);
}
