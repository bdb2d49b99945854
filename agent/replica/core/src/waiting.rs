//! Requests that wait for pages of region sets.

use shorthorn_regions::{DirtyMark, PageWrite, Ticket, WriteIntentLog};
use shorthorn_types::{ByteRange, Errno};

use crate::durable_step::is_final;
use crate::state::ReplicaState;

/// Interrupted system call (EINTR).
const INTERRUPTED: Errno = Errno::new(4);
/// Try again (EAGAIN).
const AGAIN: Errno = Errno::new(11);

/// The modifications and marks that wait until pages are written. `M` is a modification, `T` names a mark.
#[derive(Debug)]
pub struct WaitingRequests<M, T> {
    modifications: Vec<M>,
    marks: Vec<(T, Ticket)>,
    /// True if the last write of a page has failed for lack of space. The next attempt is made when another
    /// request waits.
    is_stalled: bool,
}

/// A waiting request.
#[derive(Debug, PartialEq, Eq)]
pub enum Waiter<M, T> {
    /// A modification that waits for its regions to be marked.
    Modification(M),
    /// A change of region sets that an engine has sent.
    Mark(T),
}

/// The result of the end of a page write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageEnd {
    /// The page is durable: the waiting requests are [examined again](WaitingRequests::take_modifications).
    Written,
    /// The page has to be written again.
    Again,
    /// All waiting requests [are given up](WaitingRequests::give_up) with this error.
    NoSpace(Errno),
    /// The content of the disk is not known: the replica [fails](ReplicaState::fail).
    Failed(Errno),
}

impl<M, T> WaitingRequests<M, T> {
    /// Creates an empty queue with room for `count` of each kind.
    #[must_use]
    pub fn with_capacity(count: usize) -> WaitingRequests<M, T> {
        let (modifications, marks) = (Vec::with_capacity(count), Vec::with_capacity(count));
        WaitingRequests { modifications, marks, is_stalled: false }
    }

    /// Returns the modification of `range` if it may be executed. Else it waits until its regions are durably
    /// in the sets, because a crash would otherwise leave unknown differences between the replicas.
    pub fn admit(&mut self, state: &mut ReplicaState, range: ByteRange, modification: M) -> Option<M> {
        let mark = state.intent_log_mut().mark_dirty(range);
        self.marked(mark, modification)
    }

    /// Returns the repair of `range` like [`WaitingRequests::admit`]. The sums of its regions
    /// [count further](WriteIntentLog::mark_dirty_for_repair).
    pub fn admit_repair(&mut self, state: &mut ReplicaState, range: ByteRange, repair: M) -> Option<M> {
        let mark = state.intent_log_mut().mark_dirty_for_repair(range);
        self.marked(mark, repair)
    }

    fn marked(&mut self, mark: DirtyMark, modification: M) -> Option<M> {
        if mark == DirtyMark::Durable {
            return Some(modification);
        }
        self.is_stalled = false;
        self.modifications.push(modification);
        None
    }

    /// Makes the mark wait until the change of the ticket is durable.
    pub fn add_mark(&mut self, mark: T, ticket: Ticket) {
        self.is_stalled = false;
        self.marks.push((mark, ticket));
    }

    /// Replaces the files of the sets, after the volume has grown.
    pub fn grown(&mut self) {
        self.is_stalled = false;
    }

    /// Returns the next page to write. With `lazy`, this may be a page that no request waits for.
    pub fn next_write<'a>(&self, state: &'a mut ReplicaState, lazy: bool) -> Option<PageWrite<'a>> {
        let may_write = !self.is_stalled && state.failure().is_none();
        if may_write { state.intent_log_mut().begin_write(lazy) } else { None }
    }

    /// Ends the write of a page. Without space nothing that waits can be executed, and it can be tried again.
    pub fn page_ended(&mut self, state: &mut ReplicaState, slot: u8, outcome: Result<(), Errno>) -> PageEnd {
        state.intent_log_mut().end_write(slot, outcome.is_ok());
        match outcome {
            Ok(()) => PageEnd::Written,
            Err(INTERRUPTED | AGAIN) => PageEnd::Again,
            Err(errno) if is_final(errno) => PageEnd::Failed(errno),
            Err(_) => {
                self.is_stalled = true;
                PageEnd::NoSpace(Errno::NO_SPACE)
            }
        }
    }

    /// Takes all modifications, to ask for each again whether it may be executed. `modifications` is empty.
    pub fn take_modifications(&mut self, modifications: &mut Vec<M>) {
        debug_assert!(modifications.is_empty());
        std::mem::swap(&mut self.modifications, modifications);
    }

    /// Takes a durable mark, if any.
    pub fn next_durable_mark(&mut self, intent_log: &WriteIntentLog) -> Option<T> {
        let at = self.marks.iter().position(|(_, ticket)| intent_log.is_durable(ticket))?;
        Some(self.marks.remove(at).0)
    }

    /// Takes a waiting request, which has to be answered with an error. The caller repeats this until it
    /// returns none.
    pub fn give_up(&mut self) -> Option<Waiter<M, T>> {
        let modification = self.modifications.pop().map(Waiter::Modification);
        modification.or_else(|| Some(Waiter::Mark(self.marks.pop()?.0)))
    }

    /// Returns the modifications that wait.
    pub fn modifications(&self) -> impl Iterator<Item = &M> + '_ {
        self.modifications.iter()
    }

    /// Returns the marks that wait.
    pub fn marks(&self) -> impl Iterator<Item = &T> + '_ {
        self.marks.iter().map(|(mark, _)| mark)
    }
}

impl<M, T> Default for WaitingRequests<M, T> {
    fn default() -> WaitingRequests<M, T> {
        WaitingRequests::with_capacity(0)
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_types::{MarkAction, MarkRegions, RegionsOf};

    use super::*;
    use crate::state::tests::{Memory, opened};

    /// Returns a replica for which modification 'm' and mark 't' wait, for the page that is being written to
    /// the slot.
    fn waiting() -> (Memory, ReplicaState, WaitingRequests<char, char>, u8) {
        let (mut disk, mut state) = opened();
        let mut waiting = WaitingRequests::default();
        assert_eq!(waiting.admit(&mut state, range(), 'm'), None);
        let (of, action) = (RegionsOf::Intent, MarkAction::Add);
        let mark = MarkRegions { of, action, runs: vec![(3, 1)], stamp: 0, size_bytes: None };
        let ticket = state.mark(&mut disk, &mark).unwrap().unwrap();
        waiting.add_mark('t', ticket);
        let slot = waiting.next_write(&mut state, false).unwrap().slot;
        assert!(waiting.next_write(&mut state, false).is_none(), "there is one page");
        (disk, state, waiting, slot)
    }

    fn range() -> ByteRange {
        ByteRange::new(0, 4096).unwrap()
    }

    #[test]
    fn all_requests_continue_when_their_page_is_written() {
        let (_, mut state, mut waiting, slot) = waiting();
        assert_eq!(waiting.next_durable_mark(state.intent_log()), None);
        assert_eq!(waiting.page_ended(&mut state, slot, Ok(())), PageEnd::Written);
        let mut again = Vec::new();
        waiting.take_modifications(&mut again);
        assert_eq!(again, ['m']);
        assert_eq!(waiting.admit(&mut state, range(), 'm'), Some('m'));
        assert_eq!(waiting.next_durable_mark(state.intent_log()), Some('t'));
        assert_eq!(waiting.give_up(), None);
    }

    #[test]
    fn a_page_that_was_interrupted_is_written_again() {
        for errno in [INTERRUPTED, AGAIN] {
            let (_, mut state, mut waiting, slot) = waiting();
            assert_eq!(waiting.page_ended(&mut state, slot, Err(errno)), PageEnd::Again);
            assert_eq!(waiting.admit(&mut state, range(), 'n'), None, "it is not durable");
            assert!(waiting.next_write(&mut state, false).is_some());
        }
    }

    #[test]
    fn without_space_no_page_is_written_before_the_next_request_waits() {
        let (_, mut state, mut waiting, slot) = waiting();
        let ended = waiting.page_ended(&mut state, slot, Err(Errno::new(122)));
        assert_eq!(ended, PageEnd::NoSpace(Errno::NO_SPACE));
        assert_eq!(waiting.give_up(), Some(Waiter::Modification('m')));
        assert_eq!(waiting.give_up(), Some(Waiter::Mark('t')));
        assert_eq!(waiting.give_up(), None);
        assert!(waiting.next_write(&mut state, true).is_none());
        assert_eq!(waiting.admit(&mut state, range(), 'n'), None, "it is not recorded yet");
        assert!(waiting.next_write(&mut state, false).is_some());
    }

    #[test]
    fn after_a_failure_no_page_is_written() {
        let (mut disk, mut state, mut waiting, slot) = waiting();
        let ended = waiting.page_ended(&mut state, slot, Err(Errno::IO));
        assert_eq!(ended, PageEnd::Failed(Errno::IO));
        state.fail(&mut disk, "a page".to_owned());
        assert!(waiting.next_write(&mut state, false).is_none());
    }
}
