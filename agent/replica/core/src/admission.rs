//! Manages the connections of engines, and the engines that wait for the end of older connections.

use std::collections::VecDeque;

use shorthorn_types::Generation;
use shorthorn_wire::CONTROL_QUEUE;

/// The maximum number of connections of one engine: its queues, and the control connection of its main
/// thread, which also copies.
const ENGINE_CONNECTIONS_MAX: usize = CONTROL_QUEUE as usize + 1;
/// The maximum number of connections: those of one engine, and as many that are ending or about to replace
/// them.
pub const CONNECTIONS_MAX: usize = ENGINE_CONNECTIONS_MAX * 2;
/// Candidates that wait at once.
pub const CANDIDATES_MAX: usize = ENGINE_CONNECTIONS_MAX * 2;

/// The engine and queue of a connection, open or about to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueId {
    /// The generation of the engine.
    pub generation: Generation,
    /// The index of the engine's queue.
    pub queue: u16,
}

/// The connections of a replica process. `C` names an admitted connection. `W` is the state of a candidate:
/// an engine that has proven its identity and waits for the answer to its hello.
///
/// A candidate [arrives](Admission::arrive) when its generation is stored. The shell closes and refuses the
/// connections and candidates that this displaces. It reports when a connection is [gone](Admission::gone):
/// closed, with none of its requests in execution. After each of these events it asks which candidate is
/// [ready](Admission::next_ready), and [opens](Admission::open) its connection.
#[derive(Debug)]
pub struct Admission<C, W> {
    connections: Vec<(C, QueueId)>,
    waiting: VecDeque<(QueueId, W)>,
}

/// A connection or candidate that has to be closed.
#[derive(Debug, PartialEq, Eq)]
pub struct Superseded<C, W> {
    /// Connections to close; some may be closed already, and not gone.
    pub close: Vec<C>,
    /// Candidates to refuse.
    pub refuse: Vec<(QueueId, W, RefusalReason)>,
}

/// The reason why a candidate is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalReason {
    /// A newer engine holds the replica.
    Fenced,
    /// A newer connection of the same queue has come.
    QueueAgain,
    /// [`CANDIDATES_MAX`] are waiting.
    TooMany,
}

/// A candidate that does not have to wait any more.
#[derive(Debug, PartialEq, Eq)]
pub enum Ready<W> {
    /// The candidate is admitted: [`Admission::open`] its connection.
    Welcome(QueueId, W),
    /// The replica has failed while it waited: it is refused.
    Refuse(QueueId, W),
}

impl<C, W> Default for Admission<C, W> {
    fn default() -> Admission<C, W> {
        Admission {
            connections: Vec::with_capacity(CONNECTIONS_MAX),
            waiting: VecDeque::with_capacity(CANDIDATES_MAX),
        }
    }
}

impl<C: Copy + PartialEq, W> Admission<C, W> {
    /// Adds a candidate, whose generation is stored and not lower than any that was stored before. Displaces
    /// everything of lower generations, and the connection of the same queue, which the engine has given up.
    pub fn arrive(&mut self, queue_id: QueueId, candidate: W) -> Superseded<C, W> {
        let mut superseded = self.fence(queue_id.generation);
        superseded
            .close
            .extend(self.connections.iter().filter(|(_, other)| *other == queue_id).map(|(c, _)| *c));
        superseded.refuse.extend(self.take_waiting(RefusalReason::QueueAgain, |waiting| waiting == queue_id));
        if self.waiting.len() >= CANDIDATES_MAX {
            superseded.refuse.push((queue_id, candidate, RefusalReason::TooMany));
        } else {
            self.waiting.push_back((queue_id, candidate));
        }
        superseded
    }

    /// Displaces everything of a lower generation than `generation`, which is stored.
    pub fn fence(&mut self, generation: Generation) -> Superseded<C, W> {
        let older = self.connections.iter().filter(|(_, queue_id)| queue_id.generation < generation);
        let close = older.map(|(connection, _)| *connection).collect();
        Superseded {
            close,
            refuse: self.take_waiting(RefusalReason::Fenced, |queue_id| queue_id.generation < generation),
        }
    }

    fn take_waiting(
        &mut self,
        why: RefusalReason,
        which: impl Fn(QueueId) -> bool,
    ) -> Vec<(QueueId, W, RefusalReason)> {
        let (taken, kept): (Vec<_>, Vec<_>) =
            self.waiting.drain(..).partition(|(queue_id, _)| which(*queue_id));
        self.waiting.extend(kept);
        taken.into_iter().map(|(queue_id, candidate)| (queue_id, candidate, why)).collect()
    }

    /// Returns the first candidate that can be admitted, if another connection is possible. An engine waits
    /// until no connection of another generation is left, so that all requests of an older one have ended. A
    /// queue waits until its last connection is gone, because the engine will send again its requests in
    /// flight there.
    ///
    /// The replica may have failed while a candidate waited: then it is not admitted.
    pub fn next_ready(&mut self, has_failed: bool) -> Option<Ready<W>> {
        let connections = &self.connections;
        let is_free = |queue_id: &QueueId| {
            let is_apart =
                |other: &QueueId| other.generation == queue_id.generation && other.queue != queue_id.queue;
            connections.len() < CONNECTIONS_MAX && connections.iter().all(|(_, other)| is_apart(other))
        };
        let at = self.waiting.iter().position(|(queue_id, _)| is_free(queue_id))?;
        let (queue_id, candidate) = self.waiting.remove(at)?;
        Some(if has_failed {
            Ready::Refuse(queue_id, candidate)
        } else {
            Ready::Welcome(queue_id, candidate)
        })
    }

    /// Records the connection of an admitted candidate.
    pub fn open(&mut self, connection: C, queue_id: QueueId) {
        self.connections.push((connection, queue_id));
    }

    /// Removes a closed connection, none of whose requests is in execution any more.
    pub fn gone(&mut self, connection: C) {
        self.connections.retain(|(other, _)| *other != connection);
    }

    /// Returns the queue of a connection, until the connection is removed.
    pub fn queue_id(&self, connection: C) -> Option<QueueId> {
        self.connections.iter().find(|(other, _)| *other == connection).map(|(_, queue_id)| *queue_id)
    }

    /// Returns the admitted connections that are not removed yet.
    pub fn connections(&self) -> impl Iterator<Item = C> + '_ {
        self.connections.iter().map(|(connection, _)| *connection)
    }

    /// Returns the waiting candidates.
    pub fn candidates(&self) -> impl Iterator<Item = &W> + '_ {
        self.waiting.iter().map(|(_, candidate)| candidate)
    }

    /// Takes all candidates, because no engine is admitted any more.
    pub fn take_candidates(&mut self) -> impl Iterator<Item = (QueueId, W)> + '_ {
        self.waiting.drain(..)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue_id(attach: u64, queue: u16) -> QueueId {
        QueueId { generation: Generation::new(attach, 0), queue }
    }

    fn admission(open: &[(u64, u16)], waiting: &[(u64, u16, char)]) -> Admission<usize, char> {
        let mut admission = Admission::default();
        for (number, (attach, queue)) in open.iter().enumerate() {
            admission.open(number, queue_id(*attach, *queue));
        }
        for (attach, queue, name) in waiting {
            admission.arrive(queue_id(*attach, *queue), *name);
        }
        admission
    }

    fn next(admission: &mut Admission<usize, char>) -> Option<char> {
        match admission.next_ready(false)? {
            Ready::Welcome(_, name) => Some(name),
            Ready::Refuse(..) => panic!("it has not failed"),
        }
    }

    #[test]
    fn a_new_engine_waits_for_the_old_one_to_be_gone() {
        let mut admission = admission(&[(1, 5), (1, 6)], &[]);
        let superseded = admission.arrive(queue_id(2, 0), 'a');
        assert_eq!(superseded, Superseded { close: vec![0, 1], refuse: vec![] });
        assert_eq!(admission.arrive(queue_id(2, 1), 'b').close, [0, 1], "they are not gone yet");
        assert_eq!(next(&mut admission), None);
        admission.gone(0);
        assert_eq!(next(&mut admission), None);
        admission.gone(1);
        assert_eq!(next(&mut admission), Some('a'));
        admission.open(2, queue_id(2, 0));
        assert_eq!(next(&mut admission), Some('b'));
        assert_eq!(next(&mut admission), None);
    }

    #[test]
    fn older_engines_do_not_wait_any_more() {
        let mut admission = admission(&[(1, 0)], &[(1, 1, 'a'), (2, 0, 'b'), (2, 1, 'c')]);
        let superseded = admission.fence(Generation::new(2, 0));
        assert_eq!(superseded, Superseded { close: vec![0], refuse: vec![] }, "'a' has gone when 'b' came");
        let refused = |attach, queue, name| (queue_id(attach, queue), name, RefusalReason::Fenced);
        let newer = admission.arrive(queue_id(3, 0), 'd');
        assert_eq!(newer.refuse, [refused(2, 0, 'b'), refused(2, 1, 'c')]);
        admission.gone(0);
        assert_eq!(next(&mut admission), Some('d'));
    }

    #[test]
    fn a_queue_waits_for_its_last_connection_only() {
        let mut admission = admission(&[(2, 0), (2, 1)], &[(2, 2, 'c')]);
        let superseded = admission.arrive(queue_id(2, 0), 'a');
        assert_eq!(superseded, Superseded { close: vec![0], refuse: vec![] });
        assert_eq!(next(&mut admission), Some('c'), "another queue");
        assert_eq!(next(&mut admission), None);
        admission.gone(1);
        assert_eq!(next(&mut admission), None, "it waits for connection 0");
        admission.gone(0);
        assert_eq!(next(&mut admission), Some('a'));
    }

    #[test]
    fn the_newest_candidate_of_a_queue_counts() {
        let mut admission = admission(&[(2, 0)], &[(2, 0, 'a')]);
        let superseded = admission.arrive(queue_id(2, 0), 'b');
        assert_eq!(superseded.refuse, [(queue_id(2, 0), 'a', RefusalReason::QueueAgain)]);
        admission.gone(0);
        assert_eq!(next(&mut admission), Some('b'));
        assert_eq!(next(&mut admission), None);
    }

    #[test]
    fn no_engine_is_admitted_after_its_queue_failed() {
        let mut admission = admission(&[(1, 0)], &[(2, 0, 'a')]);
        admission.gone(0);
        assert_eq!(admission.next_ready(true), Some(Ready::Refuse(queue_id(2, 0), 'a')));
        assert_eq!(admission.next_ready(true), None);
    }

    #[test]
    fn candidates_have_a_bound() {
        let mut admission = admission(&[(1, 0)], &[]);
        for queue in 0..18 {
            assert_eq!(admission.arrive(queue_id(2, queue), 'w').refuse, []);
        }
        assert_eq!(
            admission.arrive(queue_id(2, 18), 'x').refuse,
            [(queue_id(2, 18), 'x', RefusalReason::TooMany)]
        );
        let again = admission.arrive(queue_id(2, 15), 'y');
        assert_eq!(
            again.refuse,
            [(queue_id(2, 15), 'w', RefusalReason::QueueAgain)],
            "it takes the place of another"
        );
        assert_eq!(admission.take_candidates().count(), 18);
    }

    #[test]
    fn connections_have_a_bound() {
        let open: Vec<(u64, u16)> = (0..18).map(|queue| (1, queue)).collect();
        let mut admission = admission(&open, &[(1, 18, 'a')]);
        assert_eq!(next(&mut admission), None);
        admission.gone(3);
        assert_eq!(next(&mut admission), Some('a'));
    }
}
