//! Engines that have proven who they are and wait for older connections to end.

use std::collections::VecDeque;

use shorthorn_types::Generation;

use crate::limits::CANDIDATES_MAX;

/// A connection of an engine, open or about to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Of the engine.
    pub generation: Generation,
    /// Which of its queues.
    pub queue: u16,
}

/// Those who wait, with what comes with them (their socket).
#[derive(Debug)]
pub(crate) struct Candidates<T> {
    waiting: VecDeque<(Place, T)>,
}

impl<T> Candidates<T> {
    pub fn new() -> Candidates<T> {
        Candidates { waiting: VecDeque::with_capacity(CANDIDATES_MAX) }
    }

    /// Takes one more; gives it back where too many wait. Appends those to `displaced` that it takes the place
    /// of: of lower generations, and of the same queue.
    pub fn push(&mut self, place: Place, candidate: T, displaced: &mut Vec<T>) -> Result<(), T> {
        let mut kept = VecDeque::with_capacity(CANDIDATES_MAX);
        for (waiting, other) in self.waiting.drain(..) {
            if waiting.generation < place.generation || waiting == place {
                displaced.push(other);
            } else {
                kept.push_back((waiting, other));
            }
        }
        self.waiting = kept;
        if self.waiting.len() >= CANDIDATES_MAX {
            return Err(candidate);
        }
        self.waiting.push_back((place, candidate));
        Ok(())
    }

    /// The first that nothing stands in the way of: `connected` are all connections that are there, also those
    /// that are ending. An engine waits until nothing of another generation is left, so that what an older one
    /// has sent is done or gone; and a queue waits until its last connection is gone, because the engine will
    /// send again what was in flight there.
    pub fn next_ready(&mut self, connected: impl Iterator<Item = Place> + Clone) -> Option<(Place, T)> {
        let free = |place: &Place| {
            connected.clone().all(|other| other.generation == place.generation && other.queue != place.queue)
        };
        let at = self.waiting.iter().position(|(place, _)| free(place))?;
        self.waiting.remove(at)
    }

    /// Takes those that wait and are of lower generations.
    pub fn displace(&mut self, generation: Generation) -> Vec<T> {
        let (older, kept) =
            self.waiting.drain(..).partition::<Vec<_>, _>(|(place, _)| place.generation < generation);
        self.waiting.extend(kept);
        older.into_iter().map(|(_, candidate)| candidate).collect()
    }

    /// Takes all that wait.
    pub fn drain(&mut self) -> impl Iterator<Item = T> + '_ {
        self.waiting.drain(..).map(|(_, candidate)| candidate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(attach: u64, queue: u16) -> Place {
        Place { generation: Generation::new(attach, 0), queue }
    }

    #[test]
    fn a_new_engine_waits_for_the_old_one_to_be_gone() {
        let mut candidates = Candidates::new();
        candidates.push(place(2, 0), 'a', &mut vec![]).unwrap();
        candidates.push(place(2, 1), 'b', &mut vec![]).unwrap();
        assert_eq!(candidates.next_ready([place(1, 5)].into_iter()), None);
        assert_eq!(candidates.next_ready([].into_iter()), Some((place(2, 0), 'a')));
        assert_eq!(candidates.next_ready([place(2, 0)].into_iter()), Some((place(2, 1), 'b')));
    }

    #[test]
    fn older_engines_do_not_wait_any_more() {
        let mut candidates = Candidates::new();
        candidates.push(place(2, 0), 'a', &mut vec![]).unwrap();
        candidates.push(place(2, 1), 'b', &mut vec![]).unwrap();
        assert!(candidates.displace(Generation::new(2, 0)).is_empty());
        assert_eq!(candidates.displace(Generation::new(2, 1)), ['a', 'b']);
        assert_eq!(candidates.next_ready([].into_iter()), None);
    }

    #[test]
    fn a_queue_waits_for_its_last_connection_only() {
        let mut candidates = Candidates::new();
        candidates.push(place(2, 0), 'a', &mut vec![]).unwrap();
        candidates.push(place(2, 1), 'b', &mut vec![]).unwrap();
        assert_eq!(candidates.next_ready([place(2, 0)].into_iter()), Some((place(2, 1), 'b')));
        assert_eq!(candidates.next_ready([place(2, 0), place(2, 1)].into_iter()), None);
    }

    #[test]
    fn newer_ones_displace() {
        let mut candidates = Candidates::new();
        let mut displaced = Vec::new();
        for (attach, queue, name) in [(1, 0, 'a'), (1, 1, 'b'), (1, 1, 'c'), (2, 0, 'd')] {
            candidates.push(place(attach, queue), name, &mut displaced).unwrap();
        }
        assert_eq!(displaced, ['b', 'a', 'c']);
        assert_eq!(candidates.drain().collect::<Vec<_>>(), ['d']);
    }

    #[test]
    fn there_is_a_bound() {
        let mut candidates = Candidates::new();
        for queue in 0..18 {
            candidates.push(place(1, queue), queue, &mut vec![]).unwrap();
        }
        assert_eq!(candidates.push(place(1, 18), 16, &mut vec![]), Err(16));
        assert_eq!(candidates.push(place(1, 15), 16, &mut vec![]), Ok(()));
    }
}
