//! Tests of a core that refuses requests: no replica gets any, none waits, and all else continues.

use super::*;

/// The first slot for copies.
const COPY: u16 = 8;
const ALL: [Operation; 6] = [
    Operation::Read,
    WRITE,
    Operation::Write { fua: true },
    Operation::Flush,
    Operation::Discard,
    Operation::WriteZeroes { fua: true },
];

/// Returns three replicas, of which the first `members` are in the view and may differ in the first region.
fn refusing(members: u64) -> Bench {
    let mut config = config(3, members);
    config.dirty = region_set(&[0]);
    config.refuses_requests = true;
    Bench::with(&config)
}

/// Checks that each kind of request, twice in the same slot and to the same block, is answered with an error
/// and with nothing else.
fn assert_refuses(bench: &mut Bench, when: &str) {
    for operation in ALL.into_iter().chain(ALL) {
        let range = ByteRange::new(4096, if operation == Operation::Flush { 0 } else { 4096 }).unwrap();
        let (slot, errno, cause) = (id(3), Errno::IO, Cause::LostWrites);
        let refused = [
            Output::Failed(FailedRequest { slot, operation, range, errno, cause }),
            Output::Complete { slot, outcome: Err(errno) },
        ];
        let out = bench.submit(3, operation, 1);
        assert_eq!(out, refused, "{operation:?} {when}");
        assert_eq!(bench.core.unfinished(), 0);
    }
}

#[test]
fn every_request_is_refused_while_members_are_made_equal_and_afterwards() {
    let mut bench = refusing(3);
    let out = bench.tick(1);
    assert_eq!(sent_to(&out, COPY), [0], "the members are resynced all the same");
    assert_refuses(&mut bench, "while members differ");
    let out = bench.answer(out, &[]);
    assert!(out.contains(&Output::Resynced));
    assert_refuses(&mut bench, "when the members are equal");
}

#[test]
fn every_request_is_refused_while_the_view_changes_and_when_it_is_frozen() {
    let mut bench = refusing(3);
    let out = bench.lose(2);
    assert!(bench.core.membership().is_changing());
    assert_refuses(&mut bench, "while the view changes");
    bench.answer(out, &[]);
    assert_refuses(&mut bench, "in another view");
    bench.lose(1);
    assert_refuses(&mut bench, "while the arbiter is asked");
    let out = bench.lose(0);
    assert!(out.iter().any(|output| matches!(output, Output::Frozen { .. })));
    assert_refuses(&mut bench, "without a quorum");
}

#[test]
fn a_volume_that_refuses_requests_rebuilds_a_replica() {
    let mut bench = refusing(2);
    let out = bench.tick(1);
    bench.answer(out, &[]);
    let out = bench.apply(Event::Rebuild { peer: 2, missing: Box::new(region_set(&[4])) });
    assert_refuses(&mut bench, "while a replica is rebuilt");
    let out = bench.answer(out, &[]);
    assert!(out.contains(&Output::Rebuilt { peer: 2 }));
    assert_refuses(&mut bench, "when it is a member");
}
