//! Replicas that greet an engine well and then make its attempts to open the volume fail.
//!
//! Without such a replica the others may be able to open the volume. So after some failures every second attempt leaves the replica
//! out, as if it did not answer. The attempts between them have it: the others may need it.

use shorthorn_types::{Members, ReplicaId};

/// So many attempts may fail because of a replica before others leave it out.
const FAILURES_MAX: u32 = 3;

/// See the module.
#[derive(Debug, Default)]
pub struct Offenders {
    failures: Vec<(ReplicaId, u32)>,
    is_next_without: bool,
}

impl Offenders {
    /// The replicas that the next attempt leaves out.
    #[must_use]
    pub fn left_out(&self) -> Members {
        if self.is_next_without { self.all() } else { Members::NONE }
    }

    /// An attempt with `replicas` has failed, and `blamed` are the replicas that made it fail, if it was replicas.
    pub fn failed(&mut self, replicas: &[ReplicaId], blamed: &Members) {
        self.failures.retain(|(replica, _)| replicas.contains(replica));
        for replica in blamed.iter().filter(|replica| replicas.contains(replica)) {
            match self.failures.iter_mut().find(|(known, _)| *known == replica) {
                Some((_, count)) => *count = count.saturating_add(1),
                None => self.failures.push((replica, 1)),
            }
        }
        self.is_next_without = !self.is_next_without && !self.all().is_empty();
    }

    fn all(&self) -> Members {
        let offenders = self.failures.iter().filter(|(_, count)| *count >= FAILURES_MAX);
        // They are among the replicas of the volume: a set has room for all of them.
        Members::new(offenders.map(|(replica, _)| *replica)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u64) -> ReplicaId {
        ReplicaId::from_random(number)
    }

    fn members(numbers: &[u64]) -> Members {
        Members::new(numbers.iter().map(|number| id(*number))).unwrap()
    }

    #[test]
    fn every_second_attempt_leaves_a_replica_out_that_has_failed_three_times() {
        let replicas = [id(1), id(2), id(3)];
        let mut offenders = Offenders::default();
        let mut left_out = Vec::new();
        for _ in 0..7 {
            let without = offenders.left_out();
            assert!(without.is_empty() || without == members(&[2]));
            left_out.push(!without.is_empty());
            let blamed = if without.is_empty() { members(&[2]) } else { Members::NONE };
            offenders.failed(&replicas, &blamed);
        }
        assert_eq!(left_out, [false, false, false, true, false, true, false]);
    }

    #[test]
    fn replicas_that_the_volume_does_not_have_any_more_are_forgotten() {
        let mut offenders = Offenders::default();
        for _ in 0..FAILURES_MAX {
            offenders.failed(&[id(1), id(2)], &members(&[1, 2, 3]));
        }
        assert_eq!(offenders.left_out(), members(&[1, 2]), "replica 3 is none of the volume's");
        offenders.failed(&[id(2)], &Members::NONE);
        offenders.failed(&[id(2)], &Members::NONE);
        assert_eq!(offenders.left_out(), members(&[2]));
    }
}
