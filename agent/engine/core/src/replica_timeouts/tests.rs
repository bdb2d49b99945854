use shorthorn_types::{ByteRange, Generation, MarkRegions, Members, ReplicaId, View, ViewId};

use super::*;
use crate::copy::Copy;
use crate::job::Job;
use crate::marks::MarkFor;
use crate::membership::PeerConfig;
use crate::request::Request;
use crate::slot::SlotId;

const TIMEOUT_MS: u64 = 5000;
const LIMIT_MS: u64 = 60_000;
const SLOT: SlotId = SlotId { queue: 0, slot: 0 };

fn timeouts() -> ReplicaTimeouts {
    ReplicaTimeouts::new(2, TIMEOUT_MS, LIMIT_MS)
}

fn all() -> PeerMask {
    (0..3).map(PeerMask::one).fold(PeerMask::NONE, PeerMask::with)
}

/// Returns three members.
fn members() -> Membership {
    let peer = |n| PeerConfig { replica: ReplicaId::from_random(n), local: false };
    let peers: Vec<PeerConfig> = (0..3).map(peer).collect();
    let id = ViewId { generation: Generation::new(1, 0), number: 1 };
    let members = Members::new(peers.iter().map(|peer| peer.replica)).unwrap();
    Membership::new(&peers, View { id, members })
}

fn debts(work_ms: [u64; 3], silent_ms: [u64; 3]) -> Debts {
    let mut debts = Debts::default();
    for (at, debt) in debts.iter_mut().take(3).enumerate() {
        *debt = Debt { work_ms: work_ms[at], silent_ms: silent_ms[at] };
    }
    debts
}

#[test]
fn each_line_of_the_table_has_its_limits() {
    let timeouts = timeouts();
    let limit_ms = |is_silent: bool, prompt, alive, changing_ms| {
        let others = Others { prompt, alive, changing_ms };
        let debt = |ms| Debt { work_ms: ms, silent_ms: if is_silent { ms } else { 0 } };
        let is_limit =
            |ms: &u64| timeouts.is_over(debt(ms + 1), others) && !timeouts.is_over(debt(*ms), others);
        [TIMEOUT_MS, 3 * TIMEOUT_MS, LIMIT_MS].into_iter().find(is_limit)
    };
    let (most, half, less) = (Quorum::More, Quorum::Half, Quorum::Less);
    assert_eq!(limit_ms(false, most, most, None), Some(TIMEOUT_MS));
    assert_eq!(limit_ms(true, most, most, None), Some(TIMEOUT_MS));
    assert_eq!(limit_ms(false, half, half, None), Some(3 * TIMEOUT_MS), "the arbiter may be unreachable");
    assert_eq!(limit_ms(true, half, half, None), Some(TIMEOUT_MS));
    assert_eq!(limit_ms(false, less, less, Some(u64::MAX)), Some(LIMIT_MS));
    assert_eq!(limit_ms(false, less, less, Some(LIMIT_MS)), None, "it was proposed a moment ago");
    assert_eq!(limit_ms(false, less, half, None), Some(LIMIT_MS), "the others are slow, and less so");
    assert_eq!(limit_ms(false, less, less, None), None, "a new start would need the same replicas");
    assert_eq!(limit_ms(true, less, less, None), Some(LIMIT_MS));
}

#[test]
fn a_majority_counts_when_it_has_lasted() {
    let mut steady = Steady::default();
    assert_eq!(steady.update(Quorum::Less, 1000, 500), Quorum::Less);
    assert_eq!(steady.update(Quorum::More, 1400, 500), Quorum::Less);
    assert_eq!(steady.update(Quorum::Half, 1500, 500), Quorum::Half, "at least half since 1000");
    assert_eq!(steady.update(Quorum::More, 1999, 500), Quorum::Half);
    assert_eq!(steady.update(Quorum::More, 2000, 500), Quorum::More);
}

#[test]
fn the_oldest_question_counts() {
    let (mut timeouts, mut marks, membership) = (timeouts(), Marks::default(), members());
    let mut slots = Slots::new(2, 4, 2);
    let discard =
        Request { slot: 0, operation: Operation::Discard, range: ByteRange::new(0, 8 << 20).unwrap() };
    slots.open(SLOT, discard);
    let owed = |timeouts: &ReplicaTimeouts, slots: &Slots, marks: &Marks| {
        timeouts.debts(slots, &membership, marks, 5000).map(|debt| debt.work_ms)
    };
    assert_eq!(owed(&timeouts, &slots, &marks), [0; MAX_MEMBERS], "nothing was sent");
    slots.at_mut(SLOT).ask(PeerMask::one(1), 1000);
    assert_eq!(owed(&timeouts, &slots, &marks)[..3], [0, 3000, 0], "a second longer for 8 MiB of zeroes");
    let to = PeerMask::one(1).with(PeerMask::one(2));
    marks.send(MarkFor::Rebuilding, to, &MarkRegions::stamp(1), 1500, &mut Vec::new());
    assert_eq!(owed(&timeouts, &slots, &marks)[..3], [0, 3500, 3500]);
    timeouts.proposed(0);
    assert_eq!(owed(&timeouts, &slots, &marks)[..3], [0, 3500, 3500], "the view is not changing");
}

#[test]
fn a_late_member_is_dropped_when_the_others_were_prompt_for_long_enough() {
    let (mut timeouts, membership) = (timeouts(), members());
    let late = debts([6000, 0, 0], [0; 3]);
    assert_eq!(timeouts.check(&late, &membership, 1000).late, PeerMask::NONE);
    assert_eq!(timeouts.slow(), PeerMask::one(0));
    let late_replicas = timeouts.check(&late, &membership, TIMEOUT_MS / 2);
    assert_eq!(late_replicas, LateReplicas { late: PeerMask::one(0), awaited: PeerMask::NONE });
    let both_late = debts([6000, 6000, 0], [0; 3]);
    let late_replicas = timeouts.check(&both_late, &membership, TIMEOUT_MS / 2);
    assert_eq!(late_replicas.late, PeerMask::NONE, "one of three cannot continue");
    assert_eq!(late_replicas.awaited, PeerMask::one(0).with(PeerMask::one(1)));
}

#[test]
fn the_volume_is_out_of_touch_without_a_majority_that_answers() {
    let (mut timeouts, membership) = (timeouts(), members());
    let silent = |peers: [u64; 3]| debts([0; 3], peers);
    assert!(!timeouts.keep_in_touch(&silent([6000, 0, 0]), &membership));
    assert!(!timeouts.is_out_of_touch(), "two of three have answered");
    assert!(!timeouts.keep_in_touch(&silent([6000, 6000, 0]), &membership));
    assert!(timeouts.is_out_of_touch());
    assert!(timeouts.keep_in_touch(&silent([6000, 5000, 0]), &membership), "requests may continue");
    assert!(!timeouts.is_out_of_touch());
    assert!(!timeouts.keep_in_touch(&silent([6000, 5000, 0]), &membership), "once");
}

#[test]
fn awaited_members_are_reported_once_and_when_they_fall_silent() {
    let mut timeouts = timeouts();
    let mut report = |awaited, debts: &Debts| {
        let mut out = Vec::new();
        timeouts.report_awaited(awaited, debts, all(), &mut out);
        out
    };
    let (one, late) = (PeerMask::one(1), debts([0, 7000, 0], [0; 3]));
    assert_eq!(report(one, &late), [Output::Awaited { peer: 1, late_ms: 7000, is_silent: false }]);
    assert_eq!(report(one, &late), []);
    let silent = debts([0, 7000, 0], [0, 2501, 0]);
    assert_eq!(report(one, &silent), [Output::Awaited { peer: 1, late_ms: 7000, is_silent: true }]);
    assert_eq!(report(PeerMask::NONE, &silent), [Output::Prompt { peer: 1 }]);
}

#[test]
fn pings_are_sent_on_every_connection_of_a_replica_that_owes_none() {
    let mut timeouts = timeouts();
    let mut out = Vec::new();
    timeouts.ping(PeerMask::one(1), 1000, &mut out);
    assert_eq!(out, [Output::Ping { peer: 1, queue: 0 }, Output::Ping { peer: 1, queue: 1 }]);
    out.clear();
    assert_eq!((timeouts.ponged(1, 0), timeouts.ponged(1, 0)), (Some(1000), None));
    timeouts.ping(PeerMask::one(1), 2000, &mut out);
    assert_eq!(out, [], "it owes one on its other connection");
    timeouts.heard(1, 1, 2500);
    let silent_ms = |timeouts: &ReplicaTimeouts| {
        timeouts.debts(&Slots::new(2, 4, 2), &members(), &Marks::default(), 4000)[1].silent_ms
    };
    assert_eq!(silent_ms(&timeouts), 1500, "since its last answer of any kind");
    timeouts.ponged(1, 1);
    assert_eq!(silent_ms(&timeouts), 0);
    timeouts.ping(PeerMask::one(1), 2999, &mut out);
    assert_eq!(out, [], "a second after the last ones");
    timeouts.ping_soon();
    timeouts.ping(PeerMask::one(1), 2999, &mut out);
    assert_eq!(out.len(), 2);
    timeouts.forgive(1, 3000);
    assert_eq!((silent_ms(&timeouts), timeouts.ponged(1, 0)), (0, None));
}

#[test]
fn a_replica_is_silent_from_an_unanswered_ping_on_each_connection() {
    let mut timeouts = timeouts();
    assert_eq!(timeouts.silent_ms(1, 60_000), 0, "it was asked nothing");
    timeouts.ping(PeerMask::one(1), 60_000, &mut Vec::new());
    assert_eq!(timeouts.silent_ms(1, 61_000), 1000);
    timeouts.heard(1, 0, 60_500);
    assert_eq!(timeouts.silent_ms(1, 61_000), 500, "the other connection may be dead");
    timeouts.ponged(1, 0);
    assert_eq!(timeouts.silent_ms(1, 70_000), 0, "the first connection owes nothing");
    timeouts.ponged(1, 1);
    assert_eq!(timeouts.silent_ms(1, 70_000), 0);
}

#[test]
fn a_copy_that_holds_requests_up_has_a_limit_by_its_length() {
    let (timeouts, mut jobs) = (timeouts(), Jobs::new(Slots::new(1, 1, 2).copies()));
    let range = ByteRange::new(0, 4 << 20).unwrap();
    let mut copy = Copy::new(CopyReason::Rebuild { region: 0 }, range, PeerMask::one(2));
    copy.hold_up(PeerMask::one(2), TIMEOUT_MS + 2000);
    *jobs.at(0) = Job::Copy(copy.clone());
    assert_eq!(timeouts.holds_requests_up(&jobs), None);
    copy.hold_up(PeerMask::one(2), 1);
    *jobs.at(0) = Job::Copy(copy);
    assert_eq!(timeouts.holds_requests_up(&jobs).map(|(peer, _)| peer), Some(2));
}

#[test]
fn requests_wait_after_a_pause_until_a_majority_has_answered_since() {
    let (mut timeouts, membership, mut out) = (timeouts(), members(), Vec::new());
    timeouts.ping(all(), 1000, &mut out);
    assert_eq!(out.len(), 6, "three replicas with two connections each");
    (0..3).for_each(|peer| assert!(timeouts.ponged(peer, 1).is_some()));
    timeouts.paused();
    assert!(timeouts.is_out_of_touch());
    assert!(!timeouts.keep_in_touch(&Debts::default(), &membership) && timeouts.is_out_of_touch());
    // The answers to the PINGs from before the pause may be from before it, too.
    (0..3).for_each(|peer| assert!(timeouts.ponged(peer, 0).is_some()));
    assert!(!timeouts.ends_pause(&membership));
    out.clear();
    timeouts.ping(all(), 1001, &mut out);
    assert_eq!(out.len(), 6, "at once");
    timeouts.ponged(0, 0);
    timeouts.ponged(0, 1);
    assert!(!timeouts.ends_pause(&membership), "one of three");
    out.clear();
    timeouts.ping(all(), 1002, &mut out);
    assert!(out.is_empty(), "one has answered, and the others owe an answer");
    timeouts.ponged(2, 1);
    assert!(timeouts.ends_pause(&membership) && !timeouts.is_out_of_touch());
    assert!(!timeouts.ends_pause(&membership), "once");
}
