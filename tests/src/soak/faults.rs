//! Derives the faults and their order from a seed.

use std::time::Duration;

/// A kind of fault of a process, a link or a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FaultKind {
    /// kill -9, and a start some time later.
    ReplicaKilled,
    /// kill -9 of the engine, and a start some time later.
    EngineKilled,
    /// SIGSTOP, and SIGCONT some time later.
    ReplicaPaused,
    /// The engine is paused for a while.
    EnginePaused,
    /// The link carries nothing in either direction, and no connection ends.
    LinkCut,
    /// The link delivers nothing to the replica.
    ToReplicaCut,
    /// The link delivers nothing from the replica.
    FromReplicaCut,
    /// All connections to the replica end.
    ConnectionsClosed,
    /// The link carries everything with a delay.
    LinkDelayed,
    /// A part of the stream to the replica is damaged, missing, or there twice.
    ToReplicaCorrupted,
    /// The same, from the replica.
    FromReplicaCorrupted,
    /// The disk of the replica does ten requests per second.
    DiskSlow,
    /// The disk of the replica has no room.
    DiskFull,
}

/// The objects that the same fault hits at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Group {
    /// Hits one replica, or the engine: a majority of the replicas is healthy.
    Alone,
    /// Hits one replica, and the engine is killed meanwhile: a majority of the replicas is healthy.
    WithEngine,
    /// Two or three replicas.
    Majority,
}

impl Group {
    /// Returns true if enough replicas are healthy that the user of the volume must not see an error.
    #[must_use]
    pub fn leaves_majority(self) -> bool {
        self != Group::Majority
    }
}

/// The row of the table in which an [`Episode`] counts.
pub type Row = (Group, FaultKind);

/// A fault of an episode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hit {
    /// The fault that begins.
    pub kind: FaultKind,
    /// The index of the replica; meaningless for the engine.
    pub replica: usize,
    /// The time after the beginning of the previous hit, or after its end if the kind is the same.
    pub after: Duration,
    /// Time between the fault and its repair.
    pub hold: Duration,
    /// A choice that depends on the kind.
    pub choice: u64,
}

/// Faults that belong together. The volume has all its replicas before an episode, and again after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Episode {
    /// Counted from 1, over all volumes.
    pub number: usize,
    /// The row of the table.
    pub row: Row,
    /// In their order.
    pub hits: Vec<Hit>,
}

/// A step of a fault and its time, counted from the beginning of the episode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FaultStep {
    /// The time of the step.
    pub at: Duration,
    /// True if it ends then; else it begins.
    pub is_end: bool,
    /// The index in [`Episode::hits`].
    pub hit: usize,
}

impl Episode {
    /// Returns all steps, in order.
    #[must_use]
    pub fn steps(&self) -> Vec<FaultStep> {
        let (mut steps, mut before) = (Vec::new(), None::<(&Hit, Duration)>);
        for (at, hit) in self.hits.iter().enumerate() {
            let begin = hit.after
                + match before {
                    Some((other, begin)) if other.is_again(hit) => begin + other.hold,
                    Some((_, begin)) => begin,
                    None => Duration::ZERO,
                };
            steps.push(FaultStep { at: begin, is_end: false, hit: at });
            steps.push(FaultStep { at: begin + hit.hold, is_end: true, hit: at });
            before = Some((hit, begin));
        }
        steps.sort_unstable();
        steps
    }
}

impl Hit {
    fn is_again(&self, next: &Hit) -> bool {
        self.kind == next.kind && self.replica == next.replica
    }
}

const ALONE: [(FaultKind, u32); 13] = [
    (FaultKind::ReplicaKilled, 22),
    (FaultKind::EngineKilled, 14),
    (FaultKind::ReplicaPaused, 14),
    (FaultKind::EnginePaused, 7),
    (FaultKind::LinkCut, 10),
    (FaultKind::ToReplicaCut, 5),
    (FaultKind::FromReplicaCut, 5),
    (FaultKind::ConnectionsClosed, 6),
    (FaultKind::LinkDelayed, 4),
    (FaultKind::ToReplicaCorrupted, 8),
    (FaultKind::FromReplicaCorrupted, 8),
    (FaultKind::DiskSlow, 5),
    (FaultKind::DiskFull, 6),
];
const WITH_ENGINE: [(FaultKind, u32); 6] = [
    (FaultKind::ReplicaKilled, 4),
    (FaultKind::ReplicaPaused, 3),
    (FaultKind::LinkCut, 3),
    (FaultKind::FromReplicaCorrupted, 1),
    (FaultKind::DiskSlow, 1),
    (FaultKind::DiskFull, 1),
];
const MAJORITY: [(FaultKind, u32); 7] = [
    (FaultKind::ReplicaKilled, 4),
    (FaultKind::ReplicaPaused, 3),
    (FaultKind::LinkCut, 3),
    (FaultKind::ConnectionsClosed, 2),
    (FaultKind::FromReplicaCorrupted, 2),
    (FaultKind::DiskSlow, 1),
    (FaultKind::DiskFull, 1),
];
const GROUPS: [(Group, u32); 3] = [(Group::Alone, 75), (Group::WithEngine, 12), (Group::Majority, 13)];
const SLOW_DISK: Duration = Duration::from_secs(20);
const REPLICAS: usize = 3;

/// Draws episodes: first one of each row, then at random until there are at least `faults` faults. None lasts
/// longer than `longest`.
#[must_use]
pub fn draw(seed: u64, faults: usize, longest: Duration) -> Vec<Episode> {
    let mut drawing = Drawing { random: fastrand::Rng::with_seed(seed), longest };
    let mut rows = every_row();
    drawing.random.shuffle(&mut rows);
    let mut rows = rows.into_iter();
    let (mut episodes, mut drawn) = (Vec::<Episode>::new(), 0);
    while drawn < faults || rows.len() > 0 {
        let row = rows.next().unwrap_or_else(|| drawing.row());
        let hits = drawing.hits(row);
        drawn += hits.len();
        episodes.push(Episode { number: episodes.len() + 1, row, hits });
    }
    episodes
}

/// Returns all rows in which episodes can count.
#[must_use]
pub fn every_row() -> Vec<Row> {
    let of = |group: Group, kinds: &[(FaultKind, u32)]| -> Vec<Row> {
        kinds.iter().map(|(kind, _)| (group, *kind)).collect()
    };
    [of(Group::Alone, &ALONE), of(Group::WithEngine, &WITH_ENGINE), of(Group::Majority, &MAJORITY)].concat()
}

struct Drawing {
    random: fastrand::Rng,
    longest: Duration,
}

impl Drawing {
    fn weighted<T: Copy>(&mut self, all: &[(T, u32)]) -> T {
        let mut left = self.random.u32(0..all.iter().map(|(_, weight)| weight).sum());
        for (one, weight) in all {
            match left.checked_sub(*weight) {
                Some(rest) => left = rest,
                None => return *one,
            }
        }
        all[0].0
    }

    fn row(&mut self) -> Row {
        let group = self.weighted(&GROUPS);
        let kinds: &[(FaultKind, u32)] = match group {
            Group::Alone => &ALONE,
            Group::WithEngine => &WITH_ENGINE,
            Group::Majority => &MAJORITY,
        };
        (group, self.weighted(kinds))
    }

    fn hits(&mut self, (group, kind): Row) -> Vec<Hit> {
        let mut replicas: Vec<usize> = (0..REPLICAS).collect();
        self.random.shuffle(&mut replicas);
        match group {
            Group::Alone => {
                // Some come again while the replica, or the engine, is coming back.
                let times = match kind {
                    FaultKind::ReplicaKilled | FaultKind::EngineKilled | FaultKind::ConnectionsClosed => {
                        self.random.usize(1..4)
                    }
                    _ => 1,
                };
                (0..times).map(|_| self.hit(kind, replicas[0], 200..3000)).collect()
            }
            Group::WithEngine => {
                let replica = self.hit(kind, replicas[0], 0..100);
                vec![replica, self.hit(FaultKind::EngineKilled, replicas[0], 20..1000)]
            }
            Group::Majority => {
                let count = self.random.usize(2..=REPLICAS);
                replicas[..count].iter().map(|replica| self.hit(kind, *replica, 0..300)).collect()
            }
        }
    }

    fn hit(&mut self, kind: FaultKind, replica: usize, after_ms: std::ops::Range<u64>) -> Hit {
        let after = self.ms(after_ms);
        let hold = self.hold(kind).min(self.longest);
        Hit { kind, replica, after, hold, choice: self.random.u64(..) }
    }

    fn hold(&mut self, kind: FaultKind) -> Duration {
        let most = self.random.u8(0..100);
        match kind {
            FaultKind::ReplicaKilled | FaultKind::EngineKilled if most < 70 => Duration::ZERO,
            FaultKind::ReplicaKilled | FaultKind::EngineKilled => self.ms(200..5000),
            FaultKind::ReplicaPaused | FaultKind::EnginePaused => match most {
                0..80 => self.ms(1000..4000),
                80..95 => self.ms(4000..12_000),
                _ => self.ms(12_000..30_000),
            },
            FaultKind::LinkCut | FaultKind::ToReplicaCut | FaultKind::FromReplicaCut => self.ms(200..8000),
            FaultKind::ConnectionsClosed => Duration::ZERO,
            FaultKind::LinkDelayed | FaultKind::DiskFull => self.ms(2000..8000),
            FaultKind::ToReplicaCorrupted | FaultKind::FromReplicaCorrupted => self.ms(200..1500),
            FaultKind::DiskSlow => SLOW_DISK,
        }
    }

    fn ms(&mut self, range: std::ops::Range<u64>) -> Duration {
        Duration::from_millis(self.random.u64(range))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONGEST: Duration = Duration::from_secs(30);

    #[test]
    fn a_seed_determines_all_faults() {
        assert_eq!(draw(7, 500, LONGEST), draw(7, 500, LONGEST));
        assert_ne!(draw(7, 500, LONGEST), draw(8, 500, LONGEST));
    }

    #[test]
    fn every_row_comes_before_any_comes_twice() {
        let rows = every_row();
        let mut drawn: Vec<Row> =
            draw(1, 500, LONGEST).iter().map(|episode| episode.row).take(rows.len()).collect();
        drawn.sort_unstable();
        let mut expected = rows;
        expected.sort_unstable();
        assert_eq!(drawn, expected);
    }

    #[test]
    fn only_groups_for_several_replicas_break_the_majority() {
        for episode in draw(3, 2000, LONGEST) {
            let mut replicas: Vec<usize> = episode.hits.iter().map(|hit| hit.replica).collect();
            replicas.sort_unstable();
            replicas.dedup();
            assert_eq!(replicas.len() == 1, episode.row.0.leaves_majority(), "{episode:?}");
        }
    }

    #[test]
    fn every_hit_ends_before_the_same_begins_again() {
        for episode in draw(9, 2000, LONGEST) {
            let steps = episode.steps();
            assert_eq!(steps.len(), 2 * episode.hits.len());
            let mut held: Vec<(FaultKind, usize)> = Vec::new();
            for step in steps {
                let hit = &episode.hits[step.hit];
                let what = (hit.kind, hit.replica);
                assert_eq!(held.contains(&what), step.is_end, "{episode:?}");
                if step.is_end {
                    held.retain(|other| *other != what);
                } else {
                    held.push(what);
                }
            }
        }
    }

    #[test]
    fn pauses_take_one_to_thirty_seconds() {
        let episodes = draw(5, 3000, LONGEST);
        let holds =
            |kind: FaultKind| episodes.iter().flat_map(|one| &one.hits).filter(move |hit| hit.kind == kind);
        let pauses: Vec<Duration> = holds(FaultKind::ReplicaPaused).map(|hit| hit.hold).collect();
        assert!(pauses.iter().all(|hold| (Duration::from_secs(1)..LONGEST).contains(hold)), "{pauses:?}");
        assert!(pauses.iter().any(|hold| *hold > Duration::from_secs(20)), "{pauses:?}");
        assert!(holds(FaultKind::DiskSlow).all(|hit| hit.hold == SLOW_DISK));
    }
}
