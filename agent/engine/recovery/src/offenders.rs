//! Replicas that welcome an engine and then fail its requests. Attempts to open the volume fail because of
//! them, although the others could open it. The list also has members that answer reads of a copy with an
//! error or nonsense.
//!
//! All of this is remembered for one process of the engine, and for one run of the replica's process.

use std::time::Duration;

use shorthorn_types::{Members, ReplicaId};

/// The number of failures in a row that make a replica an offender: the next attempt leaves it out if
/// possible.
const FAILURES_MAX: u32 = 3;
/// The number of failures in a row that cost no pause: the attempt that leaves the offender out does not
/// wait.
const FREE_FAILURES: u32 = FAILURES_MAX + 1;
/// The pause after the first failure beyond these; doubled with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// The longest pause. The volume does not serve meanwhile, and a replica that is well again is wanted soon.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The part of an attempt in which a replica has failed. A replica that has come further than that is well
/// again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum AttemptPart {
    /// The replica was asked to store the view, and which sets of regions it keeps.
    Storing,
    /// The replica was asked for a connection of each queue.
    Connecting,
}

/// A replica with a handshake in the last attempt that has reached it.
#[derive(Clone, Debug)]
struct ReachedReplica {
    replica: ReplicaId,
    /// The run of its process.
    run: u64,
    /// The number of failures in a row.
    failures: u32,
    /// The part of an attempt in which it has failed last.
    part: AttemptPart,
    /// The description of the last failure.
    reason: String,
}

/// The replicas that make attempts to open the volume fail. It is kept from one attempt to the next.
#[derive(Debug, Default)]
pub struct Offenders {
    /// No more than the volume has replicas.
    reached: Vec<ReachedReplica>,
    /// The last attempt that could leave offenders out did.
    was_without: bool,
}

impl Offenders {
    /// Records that an attempt has reached these replicas, with their runs, out of all that the volume is to
    /// have. A replica that was restarted since is not an offender any more.
    pub(crate) fn reached(&mut self, reached: impl IntoIterator<Item = (ReplicaId, u64)>, of: &[ReplicaId]) {
        self.reached.retain(|known| of.contains(&known.replica));
        for (replica, run) in reached.into_iter().filter(|(replica, _)| of.contains(replica)) {
            let is_same = |known: &ReachedReplica| known.replica == replica && known.run == run;
            if self.reached.iter().any(is_same) {
                continue;
            }
            self.reached.retain(|known| known.replica != replica);
            let (failures, part, reason) = (0, AttemptPart::Storing, String::new());
            self.reached.push(ReachedReplica { replica, run, failures, part, reason });
        }
    }

    /// Returns the replicas that this attempt leaves out if it can do without them. Every second attempt has
    /// all: an offender may be well again, and the others may need it.
    pub(crate) fn next_left_out(&mut self) -> Members {
        let offenders = self.reached.iter().filter(|known| known.failures >= FAILURES_MAX);
        // A set can hold all replicas.
        let offenders = Members::new(offenders.map(|known| known.replica)).unwrap_or_default();
        self.was_without = !self.was_without && !offenders.is_empty();
        if self.was_without { offenders } else { Members::NONE }
    }

    /// Records that a replica has failed a request.
    pub(crate) fn failed(&mut self, replica: ReplicaId, part: AttemptPart, reason: String) {
        if let Some(known) = self.reached.iter_mut().find(|known| known.replica == replica) {
            known.failures = known.failures.saturating_add(1);
            (known.part, known.reason) = (part, reason);
        }
    }

    /// Records that a replica has done all requests in a part of an attempt.
    pub(crate) fn did(&mut self, replica: ReplicaId, part: AttemptPart) {
        if let Some(known) =
            self.reached.iter_mut().find(|known| known.replica == replica && known.part <= part)
        {
            known.failures = 0;
        }
    }

    /// Returns the last failure of a replica, in words.
    pub(crate) fn reason(&self, replica: ReplicaId) -> &str {
        let known = self.reached.iter().find(|known| known.replica == replica);
        known.map_or("", |known| &known.reason)
    }

    /// Returns the minimum pause before the next attempt.
    #[must_use]
    pub fn pause(&self) -> Duration {
        let failures = self.reached.iter().map(|known| known.failures).max().unwrap_or(0);
        match failures.checked_sub(FREE_FAILURES + 1) {
            Some(doublings) => FIRST_PAUSE.saturating_mul(1 << doublings.min(16)).min(LONGEST_PAUSE),
            None => Duration::ZERO,
        }
    }
}

/// The members that were read to rebuild one replica and have failed: the next attempt reads another one. The
/// rebuild task keeps the list from one attempt to the next.
#[derive(Debug, Default)]
pub struct BadSources {
    /// The number of failures of each replica; at most one entry for each replica of the volume.
    failures: Vec<(ReplicaId, u32)>,
}

impl BadSources {
    /// Returns the member that has failed least often, of those the first. So all get their turns if all
    /// fail.
    pub(crate) fn best<T>(
        &self,
        members: impl IntoIterator<Item = T>,
        replica: impl Fn(&T) -> ReplicaId,
    ) -> Option<T> {
        members.into_iter().min_by_key(|member| self.failures_of(replica(member)))
    }

    /// Returns true if the replica has failed as a source.
    pub(crate) fn has_failed(&self, replica: ReplicaId) -> bool {
        self.failures_of(replica) > 0
    }

    fn failures_of(&self, replica: ReplicaId) -> u32 {
        let known = self.failures.iter().find(|(known, _)| *known == replica);
        known.map_or(0, |(_, failures)| *failures)
    }

    /// Records that a member has answered with an error or nonsense, or not at all. `members` are the current
    /// ones.
    pub(crate) fn failed(&mut self, replica: ReplicaId, members: &Members) {
        self.failures.retain(|(known, _)| members.contains(*known));
        match self.failures.iter_mut().find(|(known, _)| *known == replica) {
            Some((_, failures)) => *failures = failures.saturating_add(1),
            None if members.contains(replica) => self.failures.push((replica, 1)),
            None => {}
        }
    }

    /// Clears the drops of a replica that is back.
    pub(crate) fn clear(&mut self) {
        *self = BadSources::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u64) -> ReplicaId {
        ReplicaId::from_random(number)
    }

    fn ids(of: &[u64]) -> Members {
        Members::new(of.iter().copied().map(id)).unwrap()
    }

    /// Makes an attempt that reaches replicas 1 to 3, and fails because of some of them unless it leaves them
    /// out. Returns the replicas that it has left out.
    fn attempt(offenders: &mut Offenders, runs: [u64; 3], failing: &[u64]) -> Members {
        let replicas = [1, 2, 3].map(id);
        offenders.reached(replicas.into_iter().zip(runs), &replicas);
        let left_out = offenders.next_left_out();
        for number in [1, 2, 3] {
            match failing.contains(&number) {
                _ if left_out.contains(id(number)) => {}
                true => offenders.failed(id(number), AttemptPart::Storing, "it lies".to_owned()),
                false => offenders.did(id(number), AttemptPart::Storing),
            }
        }
        left_out
    }

    #[test]
    fn a_replica_that_fails_again_and_again_is_left_out_of_every_second_attempt() {
        let mut offenders = Offenders::default();
        let left_out = [(); 8].map(|()| attempt(&mut offenders, [7; 3], &[2]));
        let (all, without) = (Members::NONE, ids(&[2]));
        assert_eq!(left_out, [all, all, all, without, all, without, all, without]);
        assert_eq!(offenders.reason(id(2)), "it lies");
    }

    #[test]
    fn a_success_or_a_new_run_clears_the_failures() {
        for (runs, failing) in [([7, 7, 7], &[][..]), ([7, 8, 7], &[2])] {
            let mut offenders = Offenders::default();
            for _ in 0..4 {
                attempt(&mut offenders, [7; 3], &[2]);
            }
            attempt(&mut offenders, runs, failing);
            assert_eq!(attempt(&mut offenders, runs, &[2]), Members::NONE, "{runs:?}");
            assert_eq!(attempt(&mut offenders, runs, &[2]), Members::NONE, "{runs:?}");
        }
    }

    #[test]
    fn a_replica_that_stores_views_and_opens_no_queue_is_an_offender() {
        let mut offenders = Offenders::default();
        offenders.reached([(id(1), 7)], &[id(1)]);
        for _ in 0..FAILURES_MAX {
            assert_eq!(offenders.next_left_out(), Members::NONE);
            offenders.did(id(1), AttemptPart::Storing);
            offenders.failed(id(1), AttemptPart::Connecting, String::new());
        }
        assert_eq!(offenders.next_left_out(), ids(&[1]));
        offenders.did(id(1), AttemptPart::Connecting);
        offenders.next_left_out();
        assert_eq!(offenders.next_left_out(), Members::NONE);
    }

    #[test]
    fn a_replica_that_the_volume_no_longer_has_is_forgotten() {
        let mut offenders = Offenders::default();
        for _ in 0..4 {
            attempt(&mut offenders, [7; 3], &[2]);
        }
        offenders.reached([(id(1), 7), (id(2), 7)], &[id(1), id(3)]);
        assert_eq!(offenders.reached.len(), 2);
        offenders.failed(id(2), AttemptPart::Storing, String::new());
        assert!(offenders.reached.iter().all(|known| known.failures == 0));
    }

    #[test]
    fn pauses_grow_and_have_an_end() {
        let mut offenders = Offenders::default();
        let mut pauses = Vec::new();
        for _ in 0..24 {
            attempt(&mut offenders, [7; 3], &[2]);
            pauses.push(offenders.pause().as_millis());
        }
        pauses.dedup();
        assert_eq!(pauses, [0, 250, 500, 1000, 2000, 4000, 5000]);
        attempt(&mut offenders, [7; 3], &[]);
        attempt(&mut offenders, [7; 3], &[]);
        assert_eq!(offenders.pause(), Duration::ZERO);
    }

    #[test]
    fn the_source_that_has_failed_least_is_the_next() {
        let (mut bad, members) = (BadSources::default(), ids(&[1, 2]));
        let best = |bad: &BadSources| bad.best([1, 2], |number| id(*number)).unwrap();
        assert_eq!(best(&bad), 1);
        bad.failed(id(1), &members);
        assert_eq!(best(&bad), 2);
        bad.failed(id(2), &members);
        assert_eq!(best(&bad), 1, "each has its turn");
        bad.failed(id(1), &members);
        assert_eq!(best(&bad), 2);
        bad.clear();
        assert_eq!(best(&bad), 1);
        bad.failed(id(3), &members);
        bad.failed(id(1), &ids(&[2]));
        assert!(bad.failures.is_empty(), "only members are counted");
    }
}
