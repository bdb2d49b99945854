//! The results of a run, as a table.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};
use std::time::Duration;

use super::faults::{Episode, FaultKind, Group, Row, every_row};
use super::limits::{Beyond, MACHINE_MAX, Times, VIEW_WRITES, limit};
use super::watch::{Load, Seen};

/// The maximum number of printed lines of one kind.
const SHOWN_MAX: usize = 20;

#[derive(Clone, Debug)]
pub(super) struct EpisodeResult {
    pub seen: Seen,
    pub times: Times,
    pub limit: Duration,
    /// The time from the faults until all replicas were members again.
    pub whole_after: Duration,
    /// The ends of engines by themselves, and the error of the last one.
    pub engine_ends: EngineEnds,
    /// The number of connections that the load made again.
    pub reconnections: u64,
}

/// Engines that have ended by themselves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct EngineEnds {
    pub count: u32,
    /// The last error in the engine's log, if one has ended.
    pub error: String,
}

impl EpisodeResult {
    pub fn describe(&self, episode: &Episode) -> String {
        let replicas: Vec<usize> = episode.hits.iter().map(|hit| hit.replica).collect();
        format!(
            "episode {}: {} of {replicas:?}, {:.1} s; longest wait {:.2} s ({}), limit {:.1} s; {} errors; \
             {} ends of engines; whole after {:.1} s; machine late by {:.2} s",
            episode.number,
            name_of(episode.row),
            self.times.faults.as_secs_f64(),
            self.seen.longest.time.as_secs_f64(),
            self.seen.longest.request,
            self.limit.as_secs_f64(),
            self.seen.errors.len(),
            self.engine_ends.count,
            self.whole_after.as_secs_f64(),
            self.times.machine.as_secs_f64(),
        )
    }
}

/// The results of the episodes of one row.
#[derive(Clone, Copy, Debug, Default)]
struct Figures {
    episodes: usize,
    faults: usize,
    errors: usize,
    wrong: usize,
    /// The number of requests that have waited beyond their limit.
    over: usize,
    /// The number of engines that have ended by themselves.
    ends: u32,
    /// The number of connections of the load that broke although the engine was not killed.
    breaks: u64,
    longest: Duration,
    closest: Closest,
}

/// The wait that came closest to its limit, or exceeded it most.
#[derive(Clone, Copy, Debug, Default)]
struct Closest {
    waited: Duration,
    limit: Duration,
}

impl Closest {
    fn max(self, other: Closest) -> Closest {
        let share = |one: Closest| one.waited.as_secs_f64() / one.limit.as_secs_f64().max(1e-3);
        if share(other) > share(self) { other } else { self }
    }
}

impl Figures {
    fn add(&mut self, other: Figures) {
        self.episodes += other.episodes;
        self.faults += other.faults;
        self.errors += other.errors;
        self.wrong += other.wrong;
        self.over += other.over;
        self.ends += other.ends;
        self.breaks += other.breaks;
        self.longest = self.longest.max(other.longest);
        self.closest = self.closest.max(other.closest);
    }
}

/// The results of all episodes.
#[derive(Clone, Debug, Default)]
pub struct Report {
    replica_timeout: Duration,
    rows: BTreeMap<Row, Figures>,
    last_row: Option<Row>,
    volumes_that_differ: usize,
    /// Forbidden errors and waits, and other problems.
    problems: Vec<String>,
    /// Errors, and ends of engines, while no majority existed.
    honest: Vec<String>,
    /// The ends of processes by themselves, with their numbers.
    ends: BTreeMap<String, u32>,
    answered: u64,
    reconnections: u64,
}

impl Report {
    pub(super) fn new(replica_timeout: Duration) -> Report {
        Report { replica_timeout, ..Report::default() }
    }

    pub(super) fn add(&mut self, episode: &Episode, volume: usize, outcome: EpisodeResult) {
        let (row, waited, errors) = (episode.row, outcome.seen.longest.time, outcome.seen.errors);
        let is_over = waited > outcome.limit;
        let breaks = if kills_engine(row) { 0 } else { outcome.reconnections };
        let figures = Figures {
            episodes: 1,
            faults: episode.hits.len(),
            errors: errors.len(),
            wrong: 0,
            over: usize::from(is_over),
            ends: outcome.engine_ends.count,
            breaks,
            longest: waited,
            closest: Closest { waited, limit: outcome.limit },
        };
        self.rows.entry(row).or_default().add(figures);
        self.last_row = Some(row);
        let place = format!("volume {volume}, episode {}, {}", episode.number, name_of(row));
        if is_over {
            let (waited, limit) = (waited.as_secs_f64(), outcome.limit.as_secs_f64());
            let request = outcome.seen.longest.request;
            self.problems.push(format!("{place}: {waited:.2} s of at most {limit:.2} s for {request}"));
        }
        let list = if row.0.leaves_majority() { &mut self.problems } else { &mut self.honest };
        if let Some(first) = errors.first() {
            list.push(format!("{place}: {} errors, the first: {first}", errors.len()));
        }
        let EngineEnds { count, error } = outcome.engine_ends;
        if count > 0 {
            list.push(format!("{place}: {count} engines have ended by themselves, the last one: {error}"));
        }
        if breaks > 0 {
            list.push(format!("{place}: {breaks} connections of the load broke"));
        }
    }

    pub(super) fn problem(&mut self, problem: String) {
        self.problems.push(problem);
    }

    /// Counts a wrong byte that the load has read, in the last added episode or after it.
    pub(super) fn wrong_byte(&mut self) {
        if let Some(figures) = self.last_row.and_then(|row| self.rows.get_mut(&row)) {
            figures.wrong += 1;
        }
    }

    pub(super) fn replicas_differ(&mut self) {
        self.volumes_that_differ += 1;
    }

    pub(super) fn record_ends(&mut self, ends: BTreeMap<String, u32>) {
        for (end, count) in ends {
            *self.ends.entry(end).or_default() += count;
        }
    }

    /// Adds the counters of a load without a violation.
    pub(super) fn record_load(&mut self, guest: &mut Load) {
        self.answered += guest.counts().answered;
        self.reconnections += guest.reconnections();
        let errors = guest.take_errors();
        self.problems.extend(errors.into_iter().map(|error| format!("after all faults: {error}")));
    }

    pub(super) fn merge(&mut self, other: Report) {
        for (row, figures) in other.rows {
            self.rows.entry(row).or_default().add(figures);
        }
        self.record_ends(other.ends);
        self.volumes_that_differ += other.volumes_that_differ;
        self.problems.extend(other.problems);
        self.honest.extend(other.honest);
        self.answered += other.answered;
        self.reconnections += other.reconnections;
    }

    /// Counts the faults of all episodes.
    #[must_use]
    pub fn faults(&self) -> usize {
        self.rows.values().map(|figures| figures.faults).sum()
    }

    /// Returns the number of rows without any fault.
    #[must_use]
    pub fn missing(&self) -> usize {
        every_row().iter().filter(|row| !self.rows.contains_key(row)).count()
    }

    /// Returns true if nothing has been seen that must not be.
    #[must_use]
    pub fn passes_so_far(&self) -> bool {
        self.problems.is_empty() && self.volumes_that_differ == 0
    }

    fn show_row(&self, row: Row, figures: Figures, to: &mut Formatter<'_>) -> fmt::Result {
        let limit = limit(row, self.replica_timeout);
        let is_harmed = figures.errors > 0 || figures.ends > 0 || figures.breaks > 0;
        let is_over = figures.over + figures.wrong > 0 || row.0.leaves_majority() && is_harmed;
        let beyond = match limit.beyond {
            Beyond::Nothing => "",
            Beyond::Engine => "no engine + ",
            Beyond::Faults => "the faults + ",
        };
        writeln!(
            to,
            "{:<47} {:>8} {:>6} {:>6} {:>5} {:>4} {:>6} {:>9.2} {:>6.2} of {:>5.1}  {:<7} {beyond}{:.0} s: \
             {}",
            name_of(row),
            figures.episodes,
            figures.faults,
            figures.errors,
            figures.wrong,
            figures.ends,
            figures.breaks,
            figures.longest.as_secs_f64(),
            figures.closest.waited.as_secs_f64(),
            figures.closest.limit.as_secs_f64(),
            if is_over { "OVER" } else { "ok" },
            limit.time.as_secs_f64(),
            limit.why,
        )
    }
}

impl Display for Report {
    fn fmt(&self, to: &mut Formatter<'_>) -> fmt::Result {
        writeln!(
            to,
            "{:<47} {:>8} {:>6} {:>6} {:>5} {:>4} {:>6} {:>9} {:>15}  {:<7} limit",
            "fault",
            "episodes",
            "faults",
            "errors",
            "wrong",
            "ends",
            "breaks",
            "longest s",
            "closest s of s",
            "verdict"
        )?;
        self.rows.iter().try_for_each(|(row, figures)| self.show_row(*row, *figures, to))?;
        writeln!(
            to,
            "\nAn episode has {VIEW_WRITES} times the longest delay of a durable write in its time beyond \
             the limit, at most {} s. A thread measures it on the disk of the replicas' files.",
            MACHINE_MAX.as_secs()
        )?;
        let mut total = Figures::default();
        self.rows.values().for_each(|figures| total.add(*figures));
        writeln!(
            to,
            "\n{} faults in {} episodes, {} wrong reads, {} volumes whose replicas differ at the end; {} \
             requests answered, {} connections of the loads made again",
            total.faults,
            total.episodes,
            total.wrong,
            self.volumes_that_differ,
            self.answered,
            self.reconnections
        )?;
        show_list(to, "Errors and ends of engines without a majority", &self.honest)?;
        show_list(to, "MUST NOT BE", &self.problems)?;
        let ends: Vec<String> = self.ends.iter().map(|(end, count)| format!("{count} × {end}")).collect();
        show_list(to, "Processes that have ended by themselves and were started again", &ends)
    }
}

/// Returns true if the load has to connect again.
fn kills_engine((group, kind): Row) -> bool {
    group == Group::WithEngine || kind == FaultKind::EngineKilled
}

fn show_list(to: &mut Formatter<'_>, title: &str, lines: &[String]) -> fmt::Result {
    if lines.is_empty() {
        return Ok(());
    }
    writeln!(to, "\n{title}: {}", lines.len())?;
    lines.iter().take(SHOWN_MAX).try_for_each(|line| writeln!(to, "  {line}"))
}

fn name_of((group, kind): Row) -> String {
    let kind = match kind {
        FaultKind::ReplicaKilled => "replica killed",
        FaultKind::EngineKilled => "engine killed",
        FaultKind::ReplicaPaused => "replica paused",
        FaultKind::EnginePaused => "engine paused",
        FaultKind::LinkCut => "link cut",
        FaultKind::ToReplicaCut => "link cut towards the replica",
        FaultKind::FromReplicaCut => "link cut from the replica",
        FaultKind::ConnectionsClosed => "connections closed",
        FaultKind::LinkDelayed => "link slow",
        FaultKind::ToReplicaCorrupted => "frame to the replica corrupted",
        FaultKind::FromReplicaCorrupted => "frame from the replica corrupted",
        FaultKind::DiskSlow => "disk at 10 requests/s",
        FaultKind::DiskFull => "disk full",
    };
    match group {
        Group::Alone => kind.to_owned(),
        Group::WithEngine => format!("{kind}, engine killed"),
        Group::Majority => format!("two or three: {kind}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn episode(row: Row) -> Episode {
        Episode { number: 1, row, hits: Vec::new() }
    }

    fn outcome(ends: u32, reconnections: u64) -> EpisodeResult {
        EpisodeResult {
            seen: Seen::default(),
            times: Times::default(),
            limit: Duration::from_secs(5),
            whole_after: Duration::ZERO,
            engine_ends: EngineEnds { count: ends, error: "frozen".to_owned() },
            reconnections,
        }
    }

    /// Returns true if a run with this outcome passes.
    fn passes(row: Row, outcome: EpisodeResult) -> bool {
        let mut report = Report::default();
        report.add(&episode(row), 0, outcome);
        let table = report.to_string();
        assert_eq!(table.contains("OVER"), !report.passes_so_far(), "{table}");
        report.passes_so_far()
    }

    #[test]
    fn an_engine_ends_only_without_a_majority() {
        for kind in [FaultKind::ReplicaKilled, FaultKind::EngineKilled, FaultKind::DiskSlow] {
            assert!(passes((Group::Alone, kind), outcome(0, 0)));
            assert!(!passes((Group::Alone, kind), outcome(1, 0)));
            assert!(!passes((Group::WithEngine, kind), outcome(1, 0)));
            assert!(passes((Group::Majority, kind), outcome(1, 0)));
        }
    }

    #[test]
    fn a_client_is_closed_only_with_its_engine() {
        assert!(!passes((Group::Alone, FaultKind::ReplicaPaused), outcome(0, 1)));
        assert!(passes((Group::Alone, FaultKind::EngineKilled), outcome(0, 1)));
        assert!(passes((Group::WithEngine, FaultKind::ReplicaPaused), outcome(0, 1)));
        assert!(passes((Group::Majority, FaultKind::ReplicaPaused), outcome(0, 1)));
    }
}
