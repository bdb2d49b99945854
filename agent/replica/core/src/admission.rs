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
pub struct Place {
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
    connections: Vec<(C, Place)>,
    waiting: VecDeque<(Place, W)>,
}

/// A connection or candidate that has to be closed.
#[derive(Debug, PartialEq, Eq)]
pub struct Displaced<C, W> {
    /// Connections to close; some may be closed already, and not gone.
    pub close: Vec<C>,
    /// Candidates to refuse.
    pub refuse: Vec<(Place, W, Why)>,
}

/// The reason why a candidate is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// A newer engine holds the replica.
    Fenced,
    /// A newer connection of the same queue has come.
    QueueAgain,
    /// [`CANDIDATES_MAX`] are waiting.
    TooMany,
}

/// A candidate that nothing stands in the way of.
#[derive(Debug, PartialEq, Eq)]
pub enum Ready<W> {
    /// The candidate is admitted: [`Admission::open`] its connection.
    Welcome(Place, W),
    /// The replica has failed while it waited: it is refused.
    Refuse(Place, W),
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
    pub fn arrive(&mut self, place: Place, candidate: W) -> Displaced<C, W> {
        let mut displaced = self.fence(place.generation);
        displaced.close.extend(self.connections.iter().filter(|(_, other)| *other == place).map(|(c, _)| *c));
        displaced.refuse.extend(self.take_waiting(Why::QueueAgain, |waiting| waiting == place));
        if self.waiting.len() >= CANDIDATES_MAX {
            displaced.refuse.push((place, candidate, Why::TooMany));
        } else {
            self.waiting.push_back((place, candidate));
        }
        displaced
    }

    /// Displaces everything of a lower generation than `generation`, which is stored.
    pub fn fence(&mut self, generation: Generation) -> Displaced<C, W> {
        let older = self.connections.iter().filter(|(_, place)| place.generation < generation);
        let close = older.map(|(connection, _)| *connection).collect();
        Displaced { close, refuse: self.take_waiting(Why::Fenced, |place| place.generation < generation) }
    }

    fn take_waiting(&mut self, why: Why, which: impl Fn(Place) -> bool) -> Vec<(Place, W, Why)> {
        let (taken, kept): (Vec<_>, Vec<_>) = self.waiting.drain(..).partition(|(place, _)| which(*place));
        self.waiting.extend(kept);
        taken.into_iter().map(|(place, candidate)| (place, candidate, why)).collect()
    }

    /// Returns the first candidate that can be admitted, if another connection is possible. An engine waits
    /// until no connection of another generation is left, so that all requests of an older one have ended. A
    /// queue waits until its last connection is gone, because the engine will send again its requests in
    /// flight there.
    ///
    /// The replica may have failed while a candidate waited: then it is not admitted.
    pub fn next_ready(&mut self, has_failed: bool) -> Option<Ready<W>> {
        let connections = &self.connections;
        let is_free = |place: &Place| {
            let is_apart = |other: &Place| other.generation == place.generation && other.queue != place.queue;
            connections.len() < CONNECTIONS_MAX && connections.iter().all(|(_, other)| is_apart(other))
        };
        let at = self.waiting.iter().position(|(place, _)| is_free(place))?;
        let (place, candidate) = self.waiting.remove(at)?;
        Some(if has_failed { Ready::Refuse(place, candidate) } else { Ready::Welcome(place, candidate) })
    }

    /// Records the connection of an admitted candidate.
    pub fn open(&mut self, connection: C, place: Place) {
        self.connections.push((connection, place));
    }

    /// Removes a closed connection, none of whose requests is in execution any more.
    pub fn gone(&mut self, connection: C) {
        self.connections.retain(|(other, _)| *other != connection);
    }

    /// Returns the place of a connection, until the connection is removed.
    pub fn place(&self, connection: C) -> Option<Place> {
        self.connections.iter().find(|(other, _)| *other == connection).map(|(_, place)| *place)
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
    pub fn take_candidates(&mut self) -> impl Iterator<Item = (Place, W)> + '_ {
        self.waiting.drain(..)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(attach: u64, queue: u16) -> Place {
        Place { generation: Generation::new(attach, 0), queue }
    }

    fn admission(open: &[(u64, u16)], waiting: &[(u64, u16, char)]) -> Admission<usize, char> {
        let mut admission = Admission::default();
        for (number, (attach, queue)) in open.iter().enumerate() {
            admission.open(number, place(*attach, *queue));
        }
        for (attach, queue, name) in waiting {
            admission.arrive(place(*attach, *queue), *name);
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
        let displaced = admission.arrive(place(2, 0), 'a');
        assert_eq!(displaced, Displaced { close: vec![0, 1], refuse: vec![] });
        assert_eq!(admission.arrive(place(2, 1), 'b').close, [0, 1], "they are not gone yet");
        assert_eq!(next(&mut admission), None);
        admission.gone(0);
        assert_eq!(next(&mut admission), None);
        admission.gone(1);
        assert_eq!(next(&mut admission), Some('a'));
        admission.open(2, place(2, 0));
        assert_eq!(next(&mut admission), Some('b'));
        assert_eq!(next(&mut admission), None);
    }

    #[test]
    fn older_engines_do_not_wait_any_more() {
        let mut admission = admission(&[(1, 0)], &[(1, 1, 'a'), (2, 0, 'b'), (2, 1, 'c')]);
        let displaced = admission.fence(Generation::new(2, 0));
        assert_eq!(displaced, Displaced { close: vec![0], refuse: vec![] }, "'a' has gone when 'b' came");
        let refused = |attach, queue, name| (place(attach, queue), name, Why::Fenced);
        let newer = admission.arrive(place(3, 0), 'd');
        assert_eq!(newer.refuse, [refused(2, 0, 'b'), refused(2, 1, 'c')]);
        admission.gone(0);
        assert_eq!(next(&mut admission), Some('d'));
    }

    #[test]
    fn a_queue_waits_for_its_last_connection_only() {
        let mut admission = admission(&[(2, 0), (2, 1)], &[(2, 2, 'c')]);
        let displaced = admission.arrive(place(2, 0), 'a');
        assert_eq!(displaced, Displaced { close: vec![0], refuse: vec![] });
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
        let displaced = admission.arrive(place(2, 0), 'b');
        assert_eq!(displaced.refuse, [(place(2, 0), 'a', Why::QueueAgain)]);
        admission.gone(0);
        assert_eq!(next(&mut admission), Some('b'));
        assert_eq!(next(&mut admission), None);
    }

    #[test]
    fn nobody_is_let_in_by_what_has_failed_meanwhile() {
        let mut admission = admission(&[(1, 0)], &[(2, 0, 'a')]);
        admission.gone(0);
        assert_eq!(admission.next_ready(true), Some(Ready::Refuse(place(2, 0), 'a')));
        assert_eq!(admission.next_ready(true), None);
    }

    #[test]
    fn candidates_have_a_bound() {
        let mut admission = admission(&[(1, 0)], &[]);
        for queue in 0..18 {
            assert_eq!(admission.arrive(place(2, queue), 'w').refuse, []);
        }
        assert_eq!(admission.arrive(place(2, 18), 'x').refuse, [(place(2, 18), 'x', Why::TooMany)]);
        let again = admission.arrive(place(2, 15), 'y');
        assert_eq!(again.refuse, [(place(2, 15), 'w', Why::QueueAgain)], "it takes the place of another");
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
