//! Reads a block that the source of a copy has lost from another member.

use crate::link::LinkError;
use crate::rebuild::{SOURCE_HAS_LEFT, Source, Trouble};

/// Judges the answer of a member that was asked for one block of a snapshot. `read` is true if the member has
/// sent the block, and false if it has no such snapshot or no data there. Returns true if the block is sound.
///
/// Only the answers that the block is rotten, or is not there, say that the member does not have it. Every
/// other answer ends the attempt, which is made again: the member may have the block. So does a member that
/// has left meanwhile.
///
/// # Errors
/// [`Trouble`]: it is not known whether the member has the block.
pub fn judge_other<E: LinkError>(
    other: Source,
    has_stayed: bool,
    read: Result<bool, E>,
) -> Result<bool, Trouble<E>> {
    let is_sound = match read {
        Err(error) if error.is_rot() => false,
        read => read
            .map_err(Trouble::while_reading(other, "reading a block that the source of the copy has lost"))?,
    };
    if has_stayed { Ok(is_sound) } else { Err(Trouble::NotYet(SOURCE_HAS_LEFT)) }
}

#[cfg(test)]
mod tests {
    use shorthorn_types::{Generation, ReplicaId};

    use super::*;
    use crate::serving::Address;

    /// The answer of a member.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Answer {
        Rotten,
        Io,
        Broken,
    }

    impl std::fmt::Display for Answer {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "{self:?}")
        }
    }

    impl LinkError for Answer {
        fn deposed_by(&self) -> Option<Generation> {
            None
        }

        fn is_refusal(&self) -> bool {
            *self != Answer::Broken
        }

        fn is_rot(&self) -> bool {
            *self == Answer::Rotten
        }
    }

    #[test]
    fn a_block_is_lost_only_if_the_others_say_so() {
        let replica = ReplicaId::from_random(5);
        let other = Source::new(Address { peer: 1, replica }, 0);
        assert!(judge_other(other, true, Ok::<_, Answer>(true)).unwrap());
        assert!(!judge_other(other, true, Ok::<_, Answer>(false)).unwrap());
        assert!(!judge_other(other, true, Err(Answer::Rotten)).unwrap());
        for error in [Answer::Io, Answer::Broken] {
            let trouble = judge_other(other, true, Err(error)).unwrap_err();
            assert!(
                matches!(trouble, Trouble::SourceFailed { source, error: of, .. } if (source, of) == (replica, error))
            );
        }
        for read in [Ok(true), Ok(false), Err(Answer::Rotten)] {
            let trouble = judge_other(other, false, read).unwrap_err();
            assert!(matches!(trouble, Trouble::NotYet(SOURCE_HAS_LEFT)), "{read:?}");
        }
    }
}
