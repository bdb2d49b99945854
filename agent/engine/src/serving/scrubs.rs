//! The scrubs that the control socket requests, one at a time: its steps, and its findings for the log.

mod differences;

use std::time::Instant;

use shorthorn_core::ScrubConfig;

pub(super) use differences::Difference;
use differences::Differences;

/// The scrubs of a volume. `S` is the scrub of the snapshots, which stops when it is dropped.
#[derive(Debug)]
pub(super) struct Scrubs<S> {
    /// The number of scrubs so far, which is the number of the current scrub.
    count: u64,
    phase: ScrubPhase<S>,
    /// Differences of the current scrub that are not logged yet.
    differences: Differences,
}

#[derive(Debug)]
enum ScrubPhase<S> {
    /// No scrub is running.
    Idle,
    /// The snapshots are compared. The scrub of the volume follows with `config`.
    Snapshots { _scrub: S, config: ScrubConfig },
    /// The core compares the volume.
    Volume,
}

impl<S> Scrubs<S> {
    pub fn new() -> Scrubs<S> {
        Scrubs { count: 0, phase: ScrubPhase::Idle, differences: Differences::default() }
    }

    /// Returns true from the start of a scrub until it has compared everything or is stopped.
    pub fn is_running(&self) -> bool {
        !matches!(self.phase, ScrubPhase::Idle)
    }

    /// Stops the current scrub, if any. Events that it has sent already do not count.
    pub fn stop(&mut self) {
        self.phase = ScrubPhase::Idle;
    }

    /// Returns the number of the scrub that [`Scrubs::start`] starts.
    pub fn next_number(&self) -> u64 {
        self.count + 1
    }

    /// Replaces the current scrub by the next one, whose scrub of the snapshots has begun. The scrub of the
    /// volume follows with `config`.
    pub fn start(&mut self, scrub: S, config: ScrubConfig) {
        self.count += 1;
        self.phase = ScrubPhase::Snapshots { _scrub: scrub, config };
    }

    /// Returns true if scrub `number` is the current one and compares the snapshots.
    pub fn compares_snapshots(&self, number: u64) -> bool {
        number == self.count && matches!(self.phase, ScrubPhase::Snapshots { .. })
    }

    /// Continues with the volume after the snapshots. Returns the settings for that, and none if the current
    /// scrub does not compare snapshots.
    pub fn begin_volume(&mut self) -> Option<ScrubConfig> {
        let ScrubPhase::Snapshots { config, .. } = self.phase else { return None };
        self.phase = ScrubPhase::Volume;
        Some(config)
    }

    /// Ends the current scrub if it compares the volume. Returns false for the end of one that was stopped.
    pub fn end_volume(&mut self) -> bool {
        let is_current = matches!(self.phase, ScrubPhase::Volume);
        if is_current {
            self.phase = ScrubPhase::Idle;
        }
        is_current
    }

    /// Adds a difference that a scrub or a read has found. Returns it if it has to be logged at once: a read
    /// finds few.
    pub fn found(&mut self, difference: Difference) -> Option<Difference> {
        if self.is_running() { self.differences.add(difference) } else { Some(difference) }
    }

    /// Returns the differences to log `now`: none if others were logged shortly before.
    pub fn take_due(&mut self, now: Instant) -> Vec<Difference> {
        self.differences.take_due(now)
    }

    /// Returns all differences that are not logged yet, because the scrub or the engine ends.
    pub fn take_all(&mut self) -> Vec<Difference> {
        self.differences.take_all()
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use shorthorn_types::ByteRange;

    use super::*;

    const CONFIG: ScrubConfig = ScrubConfig { bytes_per_s: None, repair: true };

    fn scrubs() -> Scrubs<Rc<()>> {
        Scrubs::new()
    }

    fn difference() -> Difference {
        Difference::new(ByteRange::new(4096, 4096).unwrap(), "a".to_owned(), false)
    }

    #[test]
    fn a_scrub_compares_the_snapshots_and_then_the_volume() {
        let mut scrubs = scrubs();
        assert!(!scrubs.is_running() && !scrubs.compares_snapshots(0) && !scrubs.compares_snapshots(1));
        assert_eq!(scrubs.next_number(), 1);
        let scrub = Rc::new(());
        scrubs.start(Rc::clone(&scrub), CONFIG);
        assert!(scrubs.is_running() && scrubs.compares_snapshots(1));
        assert!(!scrubs.end_volume(), "the volume is not compared yet");
        assert_eq!(scrubs.begin_volume(), Some(CONFIG));
        assert_eq!(Rc::strong_count(&scrub), 1, "the scrub of the snapshots is dropped");
        assert!(scrubs.is_running() && !scrubs.compares_snapshots(1));
        assert_eq!(scrubs.begin_volume(), None, "once");
        assert!(scrubs.end_volume() && !scrubs.is_running());
        assert!(!scrubs.end_volume(), "once");
        assert_eq!(scrubs.next_number(), 2);
    }

    #[test]
    fn late_events_of_a_stopped_scrub_do_not_count() {
        let mut scrubs = scrubs();
        let scrub = Rc::new(());
        scrubs.start(Rc::clone(&scrub), CONFIG);
        scrubs.stop();
        assert_eq!(Rc::strong_count(&scrub), 1, "the scrub of the snapshots is dropped");
        assert!(!scrubs.is_running() && !scrubs.compares_snapshots(1));
        assert_eq!(scrubs.begin_volume(), None);
        scrubs.start(scrub, CONFIG);
        assert!(scrubs.compares_snapshots(2) && !scrubs.compares_snapshots(1));
        assert!(!scrubs.end_volume(), "the former scrub has compared the volume, and not this one");
        assert!(scrubs.is_running());
    }

    #[test]
    fn differences_are_collected_only_during_a_scrub() {
        let mut scrubs = scrubs();
        assert_eq!(scrubs.found(difference()), Some(difference()), "a read has found it");
        scrubs.start(Rc::new(()), CONFIG);
        assert_eq!(scrubs.found(difference()), None);
        assert_eq!(scrubs.take_due(Instant::now()), [difference()]);
        assert_eq!(scrubs.found(difference()), None);
        scrubs.begin_volume();
        assert_eq!(scrubs.found(difference()), None);
        assert!(scrubs.end_volume());
        assert_eq!(scrubs.take_all().len(), 1);
        assert_eq!(scrubs.found(difference()), Some(difference()));
    }
}
