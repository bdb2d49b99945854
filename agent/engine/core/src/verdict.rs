//! The rule of a scrub: which members are right if they differ, for the volume and for single layers.
//!
//! A snapshot's layer never changes, and a member may have kept a sum of it from the last agreement. Such a
//! sum tells rot from old differences, with two members as well as with three. If no member has kept one, the
//! majority is right.

use crate::membership::PeerIndex;

/// The evidence about the data of one member in a range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evidence {
    /// The current sum of the range; none if it cannot be read.
    pub sum: Option<u32>,
    /// The sum that the member has kept, if it has kept one.
    pub kept: Option<u32>,
    /// The checksum of the data that a reader sees there, once it was asked for. Members may hold the same
    /// data in different layers: then their layer sums differ, and this one does not.
    pub shown: Option<u32>,
}

impl Evidence {
    /// Returns the evidence for a range of the volume, which has only the data that a reader sees.
    #[must_use]
    pub fn of_volume(sum: u32) -> Evidence {
        Evidence { sum: Some(sum), kept: None, shown: Some(sum) }
    }

    fn is_sound(&self) -> bool {
        self.sum.is_some() && self.sum == self.kept
    }

    fn contradicts_itself(&self) -> bool {
        self.kept.is_some() && self.sum != self.kept
    }
}

/// The conclusion from the evidence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// All members agree.
    Equal,
    /// The verdict depends on [`Evidence::shown`] of all members that can read the range.
    LookFurther,
    /// Some members are wrong, and others are right.
    Odd {
        /// Members with wrong data.
        odd: Vec<PeerIndex>,
        /// Members to copy from.
        sources: Vec<PeerIndex>,
    },
    /// The evidence does not show which of these members is right.
    Torn(Vec<PeerIndex>),
}

/// A member and its evidence.
pub type Witness = (PeerIndex, Evidence);

/// Decides which members are right.
#[must_use]
pub fn judge(witnesses: &[Witness]) -> Verdict {
    if agree(witnesses) {
        // If two members hold the same, the kept sum is wrong. A single one has no confirmation.
        return match witnesses {
            [(alone, evidence)] if evidence.contradicts_itself() => Verdict::Torn(vec![*alone]),
            _ => Verdict::Equal,
        };
    }
    let sound: Vec<&Witness> = witnesses.iter().filter(|(_, evidence)| evidence.is_sound()).collect();
    if sound.is_empty() { by_majority(witnesses) } else { by_kept_sums(witnesses, &sound) }
}

fn agree(witnesses: &[Witness]) -> bool {
    let mut sums = witnesses.iter().map(|(_, evidence)| evidence.sum);
    let Some(first) = sums.next() else { return true };
    first.is_some() && sums.all(|sum| sum == first)
}

/// Decides by kept sums: members that still hold the data of the last agreement are right, even if they
/// differ from each other.
fn by_kept_sums(witnesses: &[Witness], sound: &[&Witness]) -> Verdict {
    let mut odd = Vec::new();
    for (peer, evidence) in witnesses {
        let is_as_a_sound_one = sound.iter().any(|(_, other)| other.sum == evidence.sum);
        if evidence.is_sound() || (evidence.kept.is_none() && is_as_a_sound_one) {
            continue;
        }
        // A member without a kept sum may hold the same in another layer.
        if evidence.kept.is_none() && evidence.sum.is_some() {
            let shown = sound.iter().map(|(_, other)| other.shown);
            if evidence.shown.is_none() || shown.clone().any(|shown| shown.is_none()) {
                return Verdict::LookFurther;
            }
            if shown.clone().any(|shown| shown == evidence.shown) {
                continue;
            }
        }
        odd.push(*peer);
    }
    if odd.is_empty() {
        return Verdict::Equal;
    }
    Verdict::Odd { odd, sources: sound.iter().map(|(peer, _)| *peer).collect() }
}

/// Decides by majority: more than half of at least three members that show the same are right. A member that
/// cannot read is wrong if all others agree.
fn by_majority(witnesses: &[Witness]) -> Verdict {
    let readable: Vec<&Witness> = witnesses.iter().filter(|(_, evidence)| evidence.sum.is_some()).collect();
    let all = || witnesses.iter().map(|(peer, _)| *peer).collect();
    if readable.len() > 1 && readable.iter().any(|(_, evidence)| evidence.shown.is_none()) {
        return Verdict::LookFurther;
    }
    let with = |shown| readable.iter().filter(move |(_, evidence)| evidence.shown == shown);
    let Some(largest) =
        readable.iter().map(|(_, evidence)| evidence.shown).max_by_key(|shown| with(*shown).count())
    else {
        return Verdict::Torn(all());
    };
    let sources: Vec<PeerIndex> = with(largest).map(|(peer, _)| *peer).collect();
    if sources.len() == witnesses.len() {
        return Verdict::Equal;
    }
    let is_alone_in_doubt = matches!(&readable[..], [(_, evidence)] if evidence.contradicts_itself());
    let is_majority = readable.len() >= 3 && 2 * sources.len() > readable.len();
    if (sources.len() == readable.len() && !is_alone_in_doubt) || is_majority {
        let odd = witnesses.iter().map(|(peer, _)| *peer).filter(|peer| !sources.contains(peer));
        return Verdict::Odd { odd: odd.collect(), sources };
    }
    Verdict::Torn(all())
}

/// Returns the sum that a member keeps from now on, after this verdict. None: the sum is not known. No member
/// keeps a sum that no other one confirms, because it could be of rot.
#[must_use]
pub fn sum_to_keep(witnesses: &[Witness], verdict: &Verdict, peer: PeerIndex) -> Option<u32> {
    let (_, evidence) = witnesses.iter().find(|(index, _)| *index == peer)?;
    let is_confirmed = match verdict {
        Verdict::Equal => witnesses.len() >= 2,
        Verdict::Odd { odd, .. } => {
            !odd.contains(&peer) && (evidence.is_sound() || witnesses.len() - odd.len() >= 2)
        }
        Verdict::LookFurther | Verdict::Torn(_) => false,
    };
    if is_confirmed { evidence.sum } else { evidence.kept }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: u32 = 0;

    /// Members with sum, kept sum and shown sum; [`NONE`] stands for an absent one.
    type Members<'a> = &'a [(u32, u32, u32)];

    fn verdict(members: Members<'_>) -> Verdict {
        let some = |sum| Some(sum).filter(|sum| *sum != NONE);
        let evidence = members.iter().map(|(sum, kept, shown)| Evidence {
            sum: some(*sum),
            kept: some(*kept),
            shown: some(*shown),
        });
        judge(&(0..).zip(evidence).collect::<Vec<_>>())
    }

    fn odd(odd: &[PeerIndex], sources: &[PeerIndex]) -> Verdict {
        Verdict::Odd { odd: odd.to_vec(), sources: sources.to_vec() }
    }

    #[test]
    fn of_the_volume_a_majority_is_right() {
        let verdict = |sums: &[u32]| {
            judge(&(0..).zip(sums.iter().map(|sum| Evidence::of_volume(*sum))).collect::<Vec<_>>())
        };
        assert_eq!(verdict(&[]), Verdict::Equal);
        assert_eq!(verdict(&[1]), Verdict::Equal);
        assert_eq!(verdict(&[1, 1]), Verdict::Equal);
        assert_eq!(verdict(&[1, 2]), Verdict::Torn(vec![0, 1]));
        assert_eq!(verdict(&[1, 2, 3]), Verdict::Torn(vec![0, 1, 2]));
        assert_eq!(verdict(&[1, 1, 2, 2]), Verdict::Torn(vec![0, 1, 2, 3]));
        assert_eq!(verdict(&[1, 2, 1]), odd(&[1], &[0, 2]));
        assert_eq!(verdict(&[1, 2, 1, 3, 1]), odd(&[1, 3], &[0, 2, 4]));
    }

    #[test]
    fn of_a_layer_a_kept_sum_is_right() {
        let cases: [(&str, Members<'_>, Verdict); 15] = [
            ("two, one as it was", &[(1, 1, NONE), (2, 1, NONE)], odd(&[1], &[0])),
            ("two, the first one rotten", &[(2, 1, NONE), (1, 1, NONE)], odd(&[0], &[1])),
            ("the minority is as it was", &[(2, 1, NONE), (2, 1, NONE), (1, 1, NONE)], odd(&[0, 1], &[2])),
            ("two that always differed", &[(1, 1, NONE), (2, 2, NONE)], Verdict::Equal),
            ("and a third is rotten", &[(1, 1, NONE), (2, 2, NONE), (3, 1, NONE)], odd(&[2], &[0, 1])),
            ("nobody is as it was", &[(2, 1, 2), (3, 1, 3)], Verdict::Torn(vec![0, 1])),
            ("nor here, but two agree", &[(2, 1, 2), (3, 1, 3), (2, NONE, 2)], odd(&[1], &[0, 2])),
            ("a new one without a sum is the same", &[(1, 1, NONE), (1, NONE, NONE)], Verdict::Equal),
            ("a new one is not", &[(1, 1, NONE), (2, NONE, NONE)], Verdict::LookFurther),
            ("a new one that shows the same", &[(1, 1, 7), (2, NONE, 7)], Verdict::Equal),
            ("a new one that shows something else", &[(1, 1, 7), (2, NONE, 8)], odd(&[1], &[0])),
            ("both agree against a kept sum", &[(2, 1, NONE), (2, 1, NONE)], Verdict::Equal),
            ("alone, and not as it was", &[(2, 1, NONE)], Verdict::Torn(vec![0])),
            ("alone, and as it was", &[(1, 1, NONE)], Verdict::Equal),
            ("alone, and unknown", &[(1, NONE, NONE)], Verdict::Equal),
        ];
        for (what, members, expected) in cases {
            assert_eq!(verdict(members), expected, "{what}");
        }
    }

    #[test]
    fn without_kept_sums_it_counts_what_is_shown() {
        assert_eq!(verdict(&[(1, NONE, NONE), (2, NONE, NONE)]), Verdict::LookFurther);
        assert_eq!(verdict(&[(1, NONE, 7), (2, NONE, 7)]), Verdict::Equal, "laid out otherwise");
        assert_eq!(verdict(&[(1, NONE, 7), (2, NONE, 8)]), Verdict::Torn(vec![0, 1]));
        assert_eq!(verdict(&[(1, NONE, 7), (2, NONE, 7), (3, NONE, 8)]), odd(&[2], &[0, 1]));
    }

    #[test]
    fn what_cannot_be_read_is_wrong_where_the_others_agree() {
        assert_eq!(verdict(&[(1, 1, NONE), (NONE, 1, NONE)]), odd(&[1], &[0]));
        assert_eq!(verdict(&[(1, 1, NONE), (NONE, NONE, NONE)]), odd(&[1], &[0]));
        assert_eq!(
            verdict(&[(1, NONE, NONE), (NONE, NONE, NONE)]),
            odd(&[1], &[0]),
            "there is no other copy"
        );
        assert_eq!(verdict(&[(2, 1, NONE), (NONE, NONE, NONE)]), Verdict::Torn(vec![0, 1]));
        assert_eq!(verdict(&[(1, NONE, 7), (2, NONE, 8), (NONE, 1, NONE)]), Verdict::Torn(vec![0, 1, 2]));
        assert_eq!(verdict(&[(NONE, 1, NONE), (NONE, 1, NONE)]), Verdict::Torn(vec![0, 1]));
        assert_eq!(verdict(&[(NONE, NONE, NONE)]), Verdict::Torn(vec![0]));
    }

    #[test]
    fn only_what_another_one_confirms_is_kept() {
        let kept = |members: &[(u32, u32)]| {
            let some = |sum| Some(sum).filter(|sum| *sum != NONE);
            let evidence =
                |(sum, kept): &(u32, u32)| Evidence { sum: some(*sum), kept: some(*kept), shown: some(*sum) };
            let witnesses: Vec<Witness> = (0..).zip(members.iter().map(evidence)).collect();
            let verdict = judge(&witnesses);
            let keep = |(peer, _): &Witness| sum_to_keep(&witnesses, &verdict, *peer).unwrap_or(NONE);
            witnesses.iter().map(keep).collect::<Vec<_>>()
        };
        assert_eq!(kept(&[(1, NONE), (1, NONE)]), [1, 1], "the first time that all agree");
        assert_eq!(kept(&[(1, NONE)]), [NONE], "nobody else says so");
        assert_eq!(kept(&[(2, 1)]), [1], "what it holds now is rot");
        assert_eq!(kept(&[(1, NONE), (2, NONE)]), [NONE, NONE]);
        assert_eq!(kept(&[(1, NONE), (2, NONE), (1, NONE)]), [1, NONE, 1], "the majority says so");
        assert_eq!(kept(&[(1, 1), (2, 1)]), [1, 1], "it still has to be found the next time");
        assert_eq!(kept(&[(1, NONE), (NONE, NONE)]), [NONE, NONE]);
        assert_eq!(kept(&[(2, 1), (2, 1)]), [2, 2], "both agree on what came after");
    }
}
