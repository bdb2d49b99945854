//! Reads a block that the source of a copy cannot give from another member.

use shorthorn_types::ByteRange;

use crate::rebuild::{RebuildError, SOURCE_HAS_LEFT, Source};
use crate::replica_link::LinkError;

/// The maximum number of blocks of one attempt that a source may be unable to read. With more, the next
/// attempt reads another member: a disk that fails everywhere is not a source. A source that had failed
/// before has no limit, because the others had their turns.
pub const UNREAD_MAX: u32 = 256;
/// The purpose of the requests to the other members.
const READING_OTHER: &str = "reading a block that the source of the copy cannot give";

/// The search for one block of a snapshot, at all members but the source of the copy.
///
/// Only the answers that the block is rotten, or is not there, say that a member does not have it. After
/// every other answer the member may have it. So does a member that has left meanwhile.
#[derive(Debug)]
pub struct BlockSearch<E> {
    range: ByteRange,
    /// The first answer after which a member may have the block.
    unclear: Option<RebuildError<E>>,
}

impl<E: LinkError> BlockSearch<E> {
    /// Begins the search after the source has not given the block in `range`, for the reason `error`.
    /// `unread` counts the blocks that it could not read in this attempt.
    ///
    /// # Errors
    /// [`RebuildError`]: another source is needed.
    pub fn after(
        source: Source,
        range: ByteRange,
        error: E,
        unread: &mut u32,
    ) -> Result<BlockSearch<E>, RebuildError<E>> {
        if error.is_rot() {
            return Ok(BlockSearch { range, unclear: None });
        }
        *unread = unread.saturating_add(1);
        let is_bearable = *unread <= UNREAD_MAX || source.has_failed;
        if !error.is_refusal() || !is_bearable {
            return Err(RebuildError::while_reading(source, "reading a layer of a member")(error));
        }
        let member = source.address.replica;
        Ok(BlockSearch { range, unclear: Some(RebuildError::Unread { member, range, error }) })
    }

    /// Takes the answer of another member. `read` is true if it has sent the block, and false if it has no
    /// such snapshot or no data there. Returns true if the block is sound, which ends the search.
    ///
    /// # Errors
    /// [`RebuildError`]: a newer engine holds the member.
    pub fn answered(
        &mut self,
        other: Source,
        has_stayed: bool,
        read: Result<bool, E>,
    ) -> Result<bool, RebuildError<E>> {
        let member = other.address.replica;
        let unclear = match read {
            Err(error) if error.deposed_by().is_some() => {
                return Err(RebuildError::while_reading(other, READING_OTHER)(error));
            }
            _ if !has_stayed => RebuildError::NotYet(SOURCE_HAS_LEFT),
            Ok(is_sound) => return Ok(is_sound),
            Err(error) if error.is_rot() => return Ok(false),
            Err(error) if error.is_refusal() => RebuildError::Unread { member, range: self.range, error },
            Err(error) => RebuildError::while_reading(other, READING_OTHER)(error),
        };
        self.unclear.get_or_insert(unclear);
        Ok(false)
    }

    /// Ends a search in which no member has given the block: it is lost, as each has said that it lacks it.
    ///
    /// # Errors
    /// [`RebuildError`]: a member may have the block, so the attempt has to be made again.
    pub fn conclude(self) -> Result<(), RebuildError<E>> {
        self.unclear.map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_types::{Generation, ReplicaId};

    use super::*;
    use crate::serving::Address;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum MemberAnswer {
        Rotten,
        Io,
        Broken,
        Deposed,
    }

    impl std::fmt::Display for MemberAnswer {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "{self:?}")
        }
    }

    impl LinkError for MemberAnswer {
        fn deposed_by(&self) -> Option<Generation> {
            (*self == MemberAnswer::Deposed).then_some(Generation::NEVER)
        }

        fn is_refusal(&self) -> bool {
            matches!(self, MemberAnswer::Rotten | MemberAnswer::Io)
        }

        fn is_rot(&self) -> bool {
            *self == MemberAnswer::Rotten
        }
    }

    fn member(number: u64) -> Source {
        let peer = u8::try_from(number).unwrap();
        Source::new(Address { peer, replica: ReplicaId::from_random(number) }, 0)
    }

    fn block() -> ByteRange {
        ByteRange::new(8192, 4096).unwrap()
    }

    /// Searches a block that member 1 has not given for this reason, at members 2 and 3. True if one of them
    /// has it, false if it is lost.
    fn search(
        of_source: MemberAnswer,
        others: [Result<bool, MemberAnswer>; 2],
    ) -> Result<bool, RebuildError<MemberAnswer>> {
        let mut search = BlockSearch::after(member(1), block(), of_source, &mut 0)?;
        for (number, read) in (2..).zip(others) {
            if search.answered(member(number), true, read)? {
                return Ok(true);
            }
        }
        search.conclude().map(|()| false)
    }

    /// The member that cannot read the block, or has no usable answer.
    fn named(trouble: Result<bool, RebuildError<MemberAnswer>>) -> (ReplicaId, bool) {
        match trouble.unwrap_err() {
            RebuildError::Unread { member, range, .. } if range == block() => (member, true),
            RebuildError::SourceFailed { source, .. } => (source, false),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_block_is_lost_only_if_all_members_say_so() {
        for others in [[Ok(false), Err(MemberAnswer::Rotten)], [Err(MemberAnswer::Rotten), Ok(false)]] {
            assert!(!search(MemberAnswer::Rotten, others).unwrap());
        }
        for (error, is_read_error) in [(MemberAnswer::Io, true), (MemberAnswer::Broken, false)] {
            let trouble = search(MemberAnswer::Rotten, [Err(error), Ok(false)]);
            assert_eq!(named(trouble), (ReplicaId::from_random(2), is_read_error));
        }
        let trouble = search(MemberAnswer::Io, [Ok(false), Err(MemberAnswer::Rotten)]);
        assert_eq!(named(trouble), (ReplicaId::from_random(1), true), "the source may have it");
    }

    #[test]
    fn a_member_that_has_the_block_gives_it_although_others_cannot_read_it() {
        for of_source in [MemberAnswer::Rotten, MemberAnswer::Io] {
            for other in
                [Ok(false), Err(MemberAnswer::Rotten), Err(MemberAnswer::Io), Err(MemberAnswer::Broken)]
            {
                assert!(search(of_source, [other, Ok(true)]).unwrap(), "{of_source:?}, {other:?}");
            }
        }
    }

    #[test]
    fn a_broken_connection_and_a_newer_engine_end_the_attempt() {
        assert_eq!(named(search(MemberAnswer::Broken, [Ok(true); 2])), (ReplicaId::from_random(1), false));
        let deposed = search(MemberAnswer::Rotten, [Err(MemberAnswer::Deposed), Ok(true)]);
        assert!(matches!(deposed, Err(RebuildError::SourceFailed { error: MemberAnswer::Deposed, .. })));
    }

    #[test]
    fn answers_of_members_that_have_left_are_ignored() {
        for read in [Ok(true), Ok(false), Err(MemberAnswer::Rotten), Err(MemberAnswer::Io)] {
            let mut search = BlockSearch::after(member(1), block(), MemberAnswer::Rotten, &mut 0).unwrap();
            assert!(!search.answered(member(2), false, read).unwrap());
            assert!(matches!(search.conclude(), Err(RebuildError::NotYet(SOURCE_HAS_LEFT))), "{read:?}");
        }
    }

    #[test]
    fn a_source_that_reads_next_to_nothing_is_left_for_another_one_once() {
        let (mut unread, mut source) = (UNREAD_MAX, member(1));
        BlockSearch::after(source, block(), MemberAnswer::Rotten, &mut unread).unwrap();
        assert!(BlockSearch::after(source, block(), MemberAnswer::Io, &mut unread).is_err());
        source.has_failed = true;
        BlockSearch::after(source, block(), MemberAnswer::Io, &mut unread).unwrap();
    }
}
