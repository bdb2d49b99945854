//! All histories of a piece of a snapshot: members rot, are replaced by copies of others, and are scrubbed.
//!
//! A copy does not compare blocks that later layers hide, so it may copy their rot. A member may be absent
//! from a scrub.

use std::collections::HashSet;

use super::*;

const MEMBERS: usize = 3;
/// The data as it was written; its sum is the same number.
const RIGHT: u32 = 10;
/// The numbers of different rot.
const ROT: std::ops::Range<u32> = 11..14;

/// A member: its data, none if it cannot be read, and the sum that it has kept.
type Member = (Option<u32>, Option<u32>);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct PieceState {
    members: [Member; MEMBERS],
    /// The number of rot that comes next.
    next_rot: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Course {
    /// No repair is made, or none succeeds.
    Reports,
    /// Every repair succeeds.
    Repairs,
    /// Only the repair of the first member succeeds.
    RepairsOne,
    /// Every repair succeeds, and then the scrub is stopped: members keep new sums only at its end.
    Stops,
}

/// Scrubs the members of `present`. Returns the new state.
fn scrub(state: PieceState, present: &[usize], course: Course) -> PieceState {
    let checksums = |at: &usize| {
        let (sum, kept) = state.members[*at];
        (u8::try_from(*at).unwrap(), ReplicaSums { sum, kept, shown: sum, is_confirmed: false })
    };
    let member_sums: Vec<MemberSums> = present.iter().map(checksums).collect();
    let scrub_result = compare_sums(&member_sums);
    let mut after = state;
    let mut is_repaired = false;
    if let ScrubResult::Odd { odd, sources } = &scrub_result {
        let count = match course {
            Course::Reports => 0,
            Course::RepairsOne => 1,
            Course::Repairs | Course::Stops => odd.len(),
        };
        let data = state.members[usize::from(sources[0])].0;
        odd.iter().take(count).for_each(|peer| after.members[usize::from(*peer)].0 = data);
        is_repaired = count >= odd.len();
    }
    if present.len() == 1 || course == Course::Stops {
        return after;
    }
    let keep = |peer| sum_to_keep(&member_sums, &scrub_result, is_repaired, peer);
    for (peer, _) in &member_sums {
        after.members[usize::from(*peer)].1 = keep(*peer);
    }
    if let (ScrubResult::Odd { odd, sources }, true) = (&scrub_result, is_repaired) {
        odd.iter().for_each(|peer| after.members[usize::from(*peer)].1 = keep(sources[0]));
    }
    after
}

/// Checks a scrub of the members of `present`.
fn check(before: PieceState, present: &[usize], course: Course) -> Result<PieceState, String> {
    let after = scrub(before, present, course);
    let keepers = present.iter().filter(|at| before.members[**at].1.is_some()).count();
    let first = before.members[present[0]].0;
    let agree = first.is_some() && present.iter().all(|at| before.members[*at].0 == first);
    let knows = present.iter().any(|at| before.members[*at].1 == Some(RIGHT));
    for at in present {
        let ((data, kept), (data_after, kept_after)) = (before.members[*at], after.members[*at]);
        if data == Some(RIGHT) && data_after != data && knows {
            return Err(format!("{at} has lost its data, and a kept sum says that it was right"));
        }
        // Otherwise a majority without that data decides.
        let is_decided = data_after == Some(RIGHT) || agree;
        if kept == Some(RIGHT) && kept_after != kept && keepers == 1 && is_decided {
            return Err(format!("{at} has lost the only kept sum"));
        }
    }
    Ok(after)
}

/// Checks that scrubs of all members give them the right data if one has it, and a kept sum says so.
fn check_end(state: PieceState) -> Result<(), String> {
    let is_known = state.members.iter().any(|(_, kept)| *kept == Some(RIGHT));
    let is_there = state.members.iter().any(|(data, _)| *data == Some(RIGHT));
    // Members that have kept rot may have differed always.
    let is_doubted = state.members.iter().any(|(_, kept)| kept.is_some_and(|kept| kept != RIGHT));
    let end = (0..2).fold(state, |state, _| scrub(state, &[0, 1, 2], Course::Repairs));
    let is_right = end.members.iter().all(|member| *member == (Some(RIGHT), Some(RIGHT)));
    if is_known && is_there && !is_doubted && !is_right { Err(format!("{end:?}")) } else { Ok(()) }
}

fn next_states(state: PieceState) -> Vec<PieceState> {
    let mut next = Vec::new();
    for at in 0..MEMBERS {
        let mut with = |member: Member, next_rot| {
            let mut members = state.members;
            members[at] = member;
            next.push(PieceState { members, next_rot });
        };
        let (_, kept) = state.members[at];
        if ROT.contains(&state.next_rot) {
            with((Some(state.next_rot), kept), state.next_rot + 1);
            with((None, kept), state.next_rot + 1);
        }
        for source in (0..MEMBERS).filter(|source| *source != at) {
            if state.members[source].0.is_some() {
                with((state.members[source].0, None), state.next_rot);
            }
        }
    }
    next
}

#[test]
fn no_scrub_loses_data_that_a_kept_sum_proves() {
    let first = PieceState { members: [(Some(RIGHT), None); MEMBERS], next_rot: ROT.start };
    let (mut seen, mut open) = (HashSet::from([first]), vec![first]);
    let presents: [&[usize]; 7] = [&[0], &[1], &[2], &[0, 1], &[0, 2], &[1, 2], &[0, 1, 2]];
    while let Some(state) = open.pop() {
        let courses = [Course::Reports, Course::Repairs, Course::RepairsOne, Course::Stops];
        let scrubs = presents.into_iter().flat_map(|present| courses.map(|course| (present, course)));
        let scrubbed = scrubs.map(|(present, course)| {
            check(state, present, course)
                .unwrap_or_else(|wrong| panic!("{state:?}, scrub of {present:?}, {course:?}: {wrong}"))
        });
        check_end(state).unwrap_or_else(|end| panic!("{state:?} ends as {end}"));
        let next = next_states(state).into_iter().chain(scrubbed);
        open.extend(next.filter(|next| seen.insert(*next)));
    }
    assert!(seen.len() > 1000, "{}", seen.len());
}
