//! The rule of a scrub: which members are right if they differ, for the volume and for single layers.
//!
//! A snapshot's layer never changes, and a member may have kept a sum of it from the last agreement. Such a
//! sum distinguishes rot from old differences, with two members as well as with three. If no member has kept
//! one, the majority is right.

use crate::membership::PeerIndex;

/// The sum of a piece in which a layer has no blocks.
pub const SUM_OF_NO_BLOCKS: u32 = 1;

/// The answer of a member about a range of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeCheck {
    /// CRC-32C of the range as the member reads it.
    pub sum: u32,
    /// True if the member has compared all of it with block checksums that count.
    pub is_confirmed: bool,
}

impl VolumeCheck {
    /// Returns the answer of a member that has not compared all of the range with checksums.
    #[must_use]
    pub const fn unconfirmed(sum: u32) -> VolumeCheck {
        VolumeCheck { sum, is_confirmed: false }
    }
}

/// The checksums of the data of one member in a range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplicaSums {
    /// The current sum of the range; none if it cannot be read.
    pub sum: Option<u32>,
    /// The sum that the member has kept, if it has kept one.
    pub kept: Option<u32>,
    /// The checksum of the data that a reader sees there, once it was asked for. Members may hold the same
    /// data in different layers: then their layer sums differ, and this one does not.
    pub shown: Option<u32>,
    /// True if the member has compared all of it with block checksums that count.
    pub is_confirmed: bool,
}

impl ReplicaSums {
    /// Returns the checksums for a range of the volume, which has only the data that a reader sees.
    #[must_use]
    pub fn of_volume(VolumeCheck { sum, is_confirmed }: VolumeCheck) -> ReplicaSums {
        ReplicaSums { sum: Some(sum), kept: None, shown: Some(sum), is_confirmed }
    }

    fn is_sound(&self) -> bool {
        self.sum.is_some() && self.sum == self.kept
    }

    fn contradicts_itself(&self) -> bool {
        self.kept.is_some() && self.sum != self.kept
    }
}

/// The result of the comparison of the checksums of all members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScrubResult {
    /// All members agree.
    Equal,
    /// The result depends on [`ReplicaSums::shown`] of all members that can read the range.
    CompareShownData,
    /// Some members are wrong, and others are right.
    Odd {
        /// Members with wrong data.
        odd: Vec<PeerIndex>,
        /// Members to copy from.
        sources: Vec<PeerIndex>,
    },
    /// The checksums do not show which of these members is right.
    Undecided(Vec<PeerIndex>),
}

/// A member and its checksums.
pub type MemberSums = (PeerIndex, ReplicaSums);

/// Decides which members are right.
#[must_use]
pub fn compare_sums(member_sums: &[MemberSums]) -> ScrubResult {
    if agree(member_sums) {
        // If two members that have kept sums hold the same, the differing sum is wrong. Members without kept
        // sums confirm nothing: they may be copies of the rot.
        let mut with_kept = member_sums.iter().filter(|(_, checksums)| checksums.kept.is_some());
        return match (with_kept.next(), with_kept.next()) {
            (Some((alone, checksums)), None) if checksums.contradicts_itself() => {
                ScrubResult::Undecided(vec![*alone])
            }
            _ => ScrubResult::Equal,
        };
    }
    let sound: Vec<&MemberSums> =
        member_sums.iter().filter(|(_, checksums)| is_proven(member_sums, checksums)).collect();
    if sound.is_empty() { by_majority(member_sums) } else { by_kept_sums(member_sums, &sound) }
}

/// Returns true if a kept sum proves the data of this member: its own, or that of another one, which may
/// have rot by now. A scrub may have repaired this member, and was stopped before it kept the new sum.
/// The sum of a piece without blocks proves nothing about another member. Each may hold the same data in a
/// different layer.
fn is_proven(member_sums: &[MemberSums], checksums: &ReplicaSums) -> bool {
    let is_kept = |(_, other): &MemberSums| other.kept == checksums.sum;
    let is_kept_elsewhere = || member_sums.iter().any(is_kept);
    let has_blocks = checksums.sum.is_some_and(|sum| sum != SUM_OF_NO_BLOCKS);
    checksums.is_sound() || has_blocks && is_kept_elsewhere()
}

fn agree(member_sums: &[MemberSums]) -> bool {
    let mut sums = member_sums.iter().map(|(_, checksums)| checksums.sum);
    let Some(first) = sums.next() else { return true };
    first.is_some() && sums.all(|sum| sum == first)
}

/// Decides by kept sums: members that still hold the data of the last agreement are right, even if they
/// differ from each other.
fn by_kept_sums(member_sums: &[MemberSums], sound: &[&MemberSums]) -> ScrubResult {
    let mut odd = Vec::new();
    for (peer, checksums) in member_sums {
        if is_proven(member_sums, checksums) {
            continue;
        }
        // A member without a kept sum may hold the same in another layer.
        if checksums.kept.is_none() && checksums.sum.is_some() {
            let shown = sound.iter().map(|(_, other)| other.shown);
            if checksums.shown.is_none() || shown.clone().any(|shown| shown.is_none()) {
                return ScrubResult::CompareShownData;
            }
            if shown.clone().any(|shown| shown == checksums.shown) {
                continue;
            }
        }
        odd.push(*peer);
    }
    if odd.is_empty() {
        return ScrubResult::Equal;
    }
    ScrubResult::Odd { odd, sources: sound.iter().map(|(peer, _)| *peer).collect() }
}

/// Decides by majority: more than half of at least three members that show the same are right. A member that
/// cannot read is wrong if all others agree.
fn by_majority(member_sums: &[MemberSums]) -> ScrubResult {
    let readable: Vec<&MemberSums> =
        member_sums.iter().filter(|(_, checksums)| checksums.sum.is_some()).collect();
    let all = || member_sums.iter().map(|(peer, _)| *peer).collect();
    if readable.len() > 1 && readable.iter().any(|(_, checksums)| checksums.shown.is_none()) {
        return ScrubResult::CompareShownData;
    }
    let with = |shown| readable.iter().filter(move |(_, checksums)| checksums.shown == shown);
    let Some(largest) =
        readable.iter().map(|(_, checksums)| checksums.shown).max_by_key(|shown| with(*shown).count())
    else {
        return ScrubResult::Undecided(all());
    };
    let sources: Vec<PeerIndex> = with(largest).map(|(peer, _)| *peer).collect();
    if sources.len() == member_sums.len() {
        return ScrubResult::Equal;
    }
    let is_alone_in_doubt = matches!(&readable[..], [(_, alone)] if contradicts_any(member_sums, alone.sum));
    let is_larger = readable.len() >= 3 && 2 * sources.len() > readable.len();
    let is_majority = is_larger && !contradicts_block_sums(&readable, &sources);
    if (sources.len() == readable.len() && !is_alone_in_doubt) || is_majority {
        let odd = member_sums.iter().map(|(peer, _)| *peer).filter(|peer| !sources.contains(peer));
        return ScrubResult::Odd { odd: odd.collect(), sources };
    }
    ScrubResult::Undecided(all())
}

/// Returns true if a single member that can read the range holds something else than another one has kept.
/// That other one may be able to read most blocks: a repair of the whole range would replace them with rot.
fn contradicts_any(member_sums: &[MemberSums], sum: Option<u32>) -> bool {
    member_sums.iter().any(|(_, checksums)| checksums.kept.is_some() && checksums.kept != sum)
}

/// Returns true if checksums confirm the data of another member, and of none of `sources`, which may be
/// copies of the same rot.
fn contradicts_block_sums(readable: &[&MemberSums], sources: &[PeerIndex]) -> bool {
    let (of_sources, of_others): (Vec<&MemberSums>, Vec<&MemberSums>) =
        readable.iter().partition(|(peer, _)| sources.contains(peer));
    let is_any_confirmed =
        |members: &[&MemberSums]| members.iter().any(|(_, checksums)| checksums.is_confirmed);
    is_any_confirmed(&of_others) && !is_any_confirmed(&of_sources)
}

/// The reason to take the data of a source for the right one, in a piece of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceProof {
    /// A member has kept its sum, so all of it is as at the last agreement.
    Kept,
    /// More than half of the members hold the same.
    Majority,
    /// The other members cannot read the whole piece.
    OnlyReadable,
}

/// The state of a block of an odd member that differs from its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// The member cannot read it, or knows that it is rotten.
    Unreadable,
    /// The member can read it, and no checksum says more.
    Readable,
    /// The member has a checksum of the block that counts, and the block matches it.
    Confirmed,
}

impl SourceProof {
    /// Returns the proof for one of `sources`, according to the comparison of the piece.
    #[must_use]
    pub fn of(source: PeerIndex, sources: &[PeerIndex], member_sums: &[MemberSums]) -> SourceProof {
        let of_source = member_sums.iter().find(|(peer, _)| *peer == source);
        if of_source.is_some_and(|(_, checksums)| is_proven(member_sums, checksums)) {
            SourceProof::Kept
        } else if sources.len() > 1 && 2 * sources.len() > member_sums.len() {
            SourceProof::Majority
        } else {
            SourceProof::OnlyReadable
        }
    }

    /// Returns true if the block of the odd member gets the data of the source. `confirms` returns true if a
    /// source has confirmed its block by a checksum.
    pub fn replaces(self, block: BlockState, confirms: impl FnOnce() -> bool) -> bool {
        match (self, block) {
            (SourceProof::Kept, _) | (_, BlockState::Unreadable) => true,
            (SourceProof::Majority, BlockState::Readable) => true,
            (SourceProof::Majority, BlockState::Confirmed) => confirms(),
            // The source may hold rot that it has not noticed.
            (SourceProof::OnlyReadable, BlockState::Readable | BlockState::Confirmed) => false,
        }
    }
}

/// Returns the sum that a member keeps from now on, after this result. None: the sum is not known. No member
/// keeps a sum that no other one confirms, because it could be of rot.
///
/// `is_repaired` is true if the odd members hold the same as the sources now. If a majority differs from
/// them still, it may be copies of rot: a kept sum would prove that rot in the next scrub.
#[must_use]
pub fn sum_to_keep(
    member_sums: &[MemberSums],
    scrub_result: &ScrubResult,
    is_repaired: bool,
    peer: PeerIndex,
) -> Option<u32> {
    let (_, checksums) = member_sums.iter().find(|(index, _)| *index == peer)?;
    let is_confirmed = match scrub_result {
        ScrubResult::Equal => member_sums.len() >= 2,
        ScrubResult::Odd { odd, .. } => {
            let is_agreed = is_repaired && member_sums.len() - odd.len() >= 2;
            !odd.contains(&peer) && (is_agreed || is_proven(member_sums, checksums))
        }
        ScrubResult::CompareShownData | ScrubResult::Undecided(_) => false,
    };
    if is_confirmed { checksums.sum } else { checksums.kept }
}

#[cfg(test)]
mod model;

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: u32 = 0;

    /// Members with sum, kept sum and shown sum; [`NONE`] stands for an absent one.
    type Members<'a> = &'a [(u32, u32, u32)];

    fn scrub_result(members: Members<'_>) -> ScrubResult {
        let some = |sum| Some(sum).filter(|sum| *sum != NONE);
        let checksums = members.iter().map(|(sum, kept, shown)| ReplicaSums {
            sum: some(*sum),
            kept: some(*kept),
            shown: some(*shown),
            is_confirmed: false,
        });
        compare_sums(&(0..).zip(checksums).collect::<Vec<_>>())
    }

    fn odd(odd: &[PeerIndex], sources: &[PeerIndex]) -> ScrubResult {
        ScrubResult::Odd { odd: odd.to_vec(), sources: sources.to_vec() }
    }

    #[test]
    fn of_the_volume_a_majority_is_right() {
        let scrub_result = |sums: &[u32]| {
            let checks = sums.iter().map(|sum| VolumeCheck::unconfirmed(*sum));
            let checksums = checks.map(ReplicaSums::of_volume);
            compare_sums(&(0..).zip(checksums).collect::<Vec<_>>())
        };
        assert_eq!(scrub_result(&[]), ScrubResult::Equal);
        assert_eq!(scrub_result(&[1]), ScrubResult::Equal);
        assert_eq!(scrub_result(&[1, 1]), ScrubResult::Equal);
        assert_eq!(scrub_result(&[1, 2]), ScrubResult::Undecided(vec![0, 1]));
        assert_eq!(scrub_result(&[1, 2, 3]), ScrubResult::Undecided(vec![0, 1, 2]));
        assert_eq!(scrub_result(&[1, 1, 2, 2]), ScrubResult::Undecided(vec![0, 1, 2, 3]));
        assert_eq!(scrub_result(&[1, 2, 1]), odd(&[1], &[0, 2]));
        assert_eq!(scrub_result(&[1, 2, 1, 3, 1]), odd(&[1, 3], &[0, 2, 4]));
    }

    /// The larger part may be copies of one member, which was rotten before anything was summed there.
    #[test]
    fn members_without_checksums_do_not_outvote_one_that_its_checksums_confirm() {
        let scrub_result = |checks: &[(u32, bool)]| {
            let check =
                |(sum, is_confirmed): &(u32, bool)| VolumeCheck { sum: *sum, is_confirmed: *is_confirmed };
            let checksums = checks.iter().map(check).map(ReplicaSums::of_volume);
            compare_sums(&(0..).zip(checksums).collect::<Vec<_>>())
        };
        let all = ScrubResult::Undecided(vec![0, 1, 2]);
        assert_eq!(scrub_result(&[(1, true), (2, false), (2, false)]), all);
        assert_eq!(scrub_result(&[(1, true), (2, false), (2, true)]), odd(&[0], &[1, 2]), "nor is it alone");
        assert_eq!(scrub_result(&[(1, false), (2, false), (2, true)]), odd(&[0], &[1, 2]));
        assert_eq!(scrub_result(&[(1, true), (1, false)]), ScrubResult::Equal);
        // A checksum alone does not decide: a disk that has lost a write was summed after that.
        assert_eq!(scrub_result(&[(1, true), (2, false)]), ScrubResult::Undecided(vec![0, 1]));
    }

    #[test]
    fn a_block_that_a_member_can_read_is_replaced_only_if_the_source_is_proven() {
        use BlockState::{Confirmed, Readable, Unreadable};
        let replaced = |proof: SourceProof, confirms: bool| {
            [Unreadable, Readable, Confirmed].map(|block| proof.replaces(block, || confirms))
        };
        for confirms in [false, true] {
            assert_eq!(replaced(SourceProof::Kept, confirms), [true, true, true]);
            assert_eq!(replaced(SourceProof::Majority, confirms), [true, true, confirms]);
            assert_eq!(replaced(SourceProof::OnlyReadable, confirms), [true, false, false]);
        }
    }

    #[test]
    fn a_source_is_proven_by_a_kept_sum_or_by_a_majority() {
        let proof = |source, sources: &[PeerIndex], sums: &[(u32, u32)]| {
            let some = |sum| Some(sum).filter(|sum| *sum != NONE);
            let checksums = |(sum, kept): &(u32, u32)| ReplicaSums {
                sum: some(*sum),
                kept: some(*kept),
                ..ReplicaSums::default()
            };
            let members: Vec<MemberSums> = (0..).zip(sums.iter().map(checksums)).collect();
            SourceProof::of(source, sources, &members)
        };
        assert_eq!(proof(0, &[0], &[(9, 9), (NONE, 9)]), SourceProof::Kept);
        assert_eq!(proof(0, &[0], &[(9, NONE), (NONE, 9)]), SourceProof::Kept, "as it was kept there");
        assert_eq!(proof(0, &[0], &[(9, NONE), (NONE, NONE)]), SourceProof::OnlyReadable);
        assert_eq!(proof(0, &[0, 1], &[(9, NONE), (9, NONE), (2, NONE)]), SourceProof::Majority);
        assert_eq!(
            proof(0, &[0, 1], &[(9, NONE), (9, NONE), (NONE, NONE), (NONE, NONE)]),
            SourceProof::OnlyReadable
        );
        assert_eq!(proof(0, &[0], &[(NONE, NONE), (NONE, NONE)]), SourceProof::OnlyReadable);
    }

    #[test]
    fn of_a_layer_a_kept_sum_is_right() {
        let cases: [(&str, Members<'_>, ScrubResult); 21] = [
            ("two, one as it was", &[(1, 1, NONE), (2, 1, NONE)], odd(&[1], &[0])),
            ("two, the first one rotten", &[(2, 1, NONE), (1, 1, NONE)], odd(&[0], &[1])),
            ("the minority is as it was", &[(2, 1, NONE), (2, 1, NONE), (1, 1, NONE)], odd(&[0, 1], &[2])),
            ("two that always differed", &[(1, 1, NONE), (2, 2, NONE)], ScrubResult::Equal),
            ("and a third is rotten", &[(1, 1, NONE), (2, 2, NONE), (3, 1, NONE)], odd(&[2], &[0, 1])),
            ("both have changed", &[(2, 1, 2), (3, 1, 3)], ScrubResult::Undecided(vec![0, 1])),
            ("nor here, but two agree", &[(2, 1, 2), (3, 1, 3), (2, NONE, 2)], odd(&[1], &[0, 2])),
            ("a new one without a sum is the same", &[(1, 1, NONE), (1, NONE, NONE)], ScrubResult::Equal),
            ("a new one is not", &[(1, 1, NONE), (2, NONE, NONE)], ScrubResult::CompareShownData),
            ("a new one that shows the same", &[(1, 1, 7), (2, NONE, 7)], ScrubResult::Equal),
            ("a new one that shows something else", &[(1, 1, 7), (2, NONE, 8)], odd(&[1], &[0])),
            ("a new one as the first was", &[(2, 9, 2), (9, NONE, 9), (2, NONE, 2)], odd(&[0, 2], &[1])),
            ("of two", &[(2, 9, 2), (9, NONE, 9)], odd(&[0], &[1])),
            ("a new one has no blocks", &[(2, 1, 2), (1, NONE, 1), (2, NONE, 2)], odd(&[1], &[0, 2])),
            ("both agree against a kept sum", &[(2, 1, NONE), (2, 1, NONE)], ScrubResult::Equal),
            ("a copy of the rot", &[(2, 1, NONE), (2, NONE, NONE)], ScrubResult::Undecided(vec![0])),
            ("and another one", &[(2, NONE, 2), (2, 1, 2), (2, NONE, 2)], ScrubResult::Undecided(vec![1])),
            ("and one that has kept it", &[(2, 1, 2), (2, NONE, 2), (2, 2, 2)], ScrubResult::Equal),
            ("alone, and not as it was", &[(2, 1, NONE)], ScrubResult::Undecided(vec![0])),
            ("alone, and as it was", &[(1, 1, NONE)], ScrubResult::Equal),
            ("alone, and unknown", &[(1, NONE, NONE)], ScrubResult::Equal),
        ];
        for (what, members, expected) in cases {
            assert_eq!(scrub_result(members), expected, "{what}");
        }
    }

    #[test]
    fn without_kept_sums_the_shown_contents_are_compared() {
        assert_eq!(scrub_result(&[(1, NONE, NONE), (2, NONE, NONE)]), ScrubResult::CompareShownData);
        assert_eq!(scrub_result(&[(1, NONE, 7), (2, NONE, 7)]), ScrubResult::Equal, "laid out otherwise");
        assert_eq!(scrub_result(&[(1, NONE, 7), (2, NONE, 8)]), ScrubResult::Undecided(vec![0, 1]));
        assert_eq!(scrub_result(&[(1, NONE, 7), (2, NONE, 7), (3, NONE, 8)]), odd(&[2], &[0, 1]));
    }

    #[test]
    fn an_unreadable_copy_is_wrong_if_the_others_agree() {
        assert_eq!(scrub_result(&[(1, 1, NONE), (NONE, 1, NONE)]), odd(&[1], &[0]));
        assert_eq!(scrub_result(&[(1, 1, NONE), (NONE, NONE, NONE)]), odd(&[1], &[0]));
        assert_eq!(
            scrub_result(&[(1, NONE, NONE), (NONE, NONE, NONE)]),
            odd(&[1], &[0]),
            "the other copy cannot be read"
        );
        assert_eq!(scrub_result(&[(2, 1, NONE), (NONE, NONE, NONE)]), ScrubResult::Undecided(vec![0, 1]));
        assert_eq!(
            scrub_result(&[(1, NONE, NONE), (NONE, 1, NONE)]),
            odd(&[1], &[0]),
            "as it was kept there"
        );
        assert_eq!(
            scrub_result(&[(2, NONE, NONE), (NONE, 1, NONE)]),
            ScrubResult::Undecided(vec![0, 1]),
            "the other one may be right in the blocks that it can read"
        );
        assert_eq!(
            scrub_result(&[(1, NONE, 7), (2, NONE, 8), (NONE, 1, NONE)]),
            ScrubResult::Undecided(vec![0, 1, 2])
        );
        assert_eq!(scrub_result(&[(9, NONE, 7), (2, NONE, 8), (NONE, 9, NONE)]), odd(&[1, 2], &[0]));
        assert_eq!(scrub_result(&[(NONE, 1, NONE), (NONE, 1, NONE)]), ScrubResult::Undecided(vec![0, 1]));
        assert_eq!(scrub_result(&[(NONE, NONE, NONE)]), ScrubResult::Undecided(vec![0]));
    }

    #[test]
    fn only_sums_that_another_member_confirms_are_kept() {
        let kept_after = |is_repaired: bool, members: &[(u32, u32)]| {
            let some = |sum| Some(sum).filter(|sum| *sum != NONE);
            let checksums = |(sum, kept): &(u32, u32)| ReplicaSums {
                sum: some(*sum),
                kept: some(*kept),
                shown: some(*sum),
                is_confirmed: false,
            };
            let member_sums: Vec<MemberSums> = (0..).zip(members.iter().map(checksums)).collect();
            let scrub_result = compare_sums(&member_sums);
            let keep = |(peer, _): &MemberSums| {
                sum_to_keep(&member_sums, &scrub_result, is_repaired, *peer).unwrap_or(NONE)
            };
            member_sums.iter().map(keep).collect::<Vec<_>>()
        };
        let kept = |members: &[(u32, u32)]| kept_after(true, members);
        assert_eq!(kept(&[(1, NONE), (1, NONE)]), [1, 1], "the first time that all agree");
        assert_eq!(kept(&[(1, NONE)]), [NONE], "no other member says so");
        assert_eq!(kept(&[(2, 1)]), [1], "the present data is rot");
        assert_eq!(kept(&[(1, NONE), (2, NONE)]), [NONE, NONE]);
        assert_eq!(kept(&[(1, NONE), (2, NONE), (1, NONE)]), [1, NONE, 1], "the majority says so");
        assert_eq!(kept(&[(1, 1), (2, 1)]), [1, 1], "it still has to be found the next time");
        assert_eq!(kept(&[(1, NONE), (NONE, NONE)]), [NONE, NONE]);
        assert_eq!(kept(&[(2, 1), (2, 1)]), [2, 2], "both agree on later data");
        assert_eq!(kept(&[(2, 1), (2, NONE)]), [1, NONE], "the second may be a copy of the first");
        assert_eq!(kept(&[(2, 9), (9, NONE), (2, NONE)]), [9, 9, NONE], "the first one says so");
        let left = |members: &[(u32, u32)]| kept_after(false, members);
        assert_eq!(left(&[(1, NONE), (2, NONE), (1, NONE)]), [NONE; 3], "the larger part may be rot");
        assert_eq!(left(&[(1, NONE), (NONE, NONE), (1, NONE)]), [NONE; 3], "it has other blocks");
        assert_eq!(left(&[(1, NONE), (1, NONE)]), [1, 1]);
        assert_eq!(left(&[(2, 9), (9, NONE), (2, NONE)]), [9, 9, NONE]);
        assert_eq!(left(&[(1, 1), (2, 1)]), [1, 1]);
    }
}
