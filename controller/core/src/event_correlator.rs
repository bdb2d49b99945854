//! Correlates events: repeated events are counted, and their rate is limited.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::objects::Key;
use crate::{Event, Timestamp};

/// An event that comes again within this time belongs to the same series.
pub const SERIES_WINDOW: Duration = Duration::from_secs(600);
/// The maximum number of different events of one object at once; more are sent at the rate of [`REFILL`].
pub const BURST: u32 = 25;
/// The interval after which one more different event of an object is sent.
pub const REFILL: Duration = Duration::from_secs(30);
/// The maximum number of remembered events, and of remembered objects.
pub const KNOWN_MAX: usize = 4096;
/// The maximum bytes of an object's name in the name of an event.
const NAME_BYTES_MAX: usize = 200;

/// The treatment of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Correlation {
    /// The event is sent under this name.
    New(String),
    /// The event was sent under this name, and has occurred this number of times.
    Repeated(String, u32),
    /// The event was sent. The repetition is sent later, if the event continues.
    Counted,
    /// The event is dropped, because the object has too many.
    RateLimited,
}

/// An object that an event can be about.
pub trait About: Clone + Ord {
    /// Returns the name of the object.
    fn name(&self) -> &str;
}

impl About for Key {
    fn name(&self) -> &str {
        &self.name
    }
}

/// The recent events.
#[derive(Clone, Debug)]
pub struct EventCorrelator<A = Key> {
    series: BTreeMap<Event<A>, Series>,
    budgets: BTreeMap<A, Budget>,
}

impl<A> Default for EventCorrelator<A> {
    fn default() -> EventCorrelator<A> {
        EventCorrelator { series: BTreeMap::new(), budgets: BTreeMap::new() }
    }
}

#[derive(Clone, Debug)]
struct Series {
    name: String,
    count: u32,
    last: Timestamp,
}

/// The events that may still be sent for an object.
#[derive(Clone, Copy, Debug)]
struct Budget {
    left: u32,
    refilled: Timestamp,
}

impl<A: About> EventCorrelator<A> {
    /// Records an event that happens now.
    pub fn take(&mut self, event: &Event<A>, now: Timestamp) -> Correlation {
        if let Some(series) = self.series.get_mut(event).filter(|series| !is_over(series, now)) {
            series.count = series.count.saturating_add(1);
            series.last = now;
            // The rate falls, so that an endless series costs next to nothing.
            return if series.count.is_power_of_two() {
                Correlation::Repeated(series.name.clone(), series.count)
            } else {
                Correlation::Counted
            };
        }
        if !self.spend(&event.about, now) {
            return Correlation::RateLimited;
        }
        self.make_room(now);
        let name = name(event.about.name(), now);
        self.series.insert(event.clone(), Series { name: name.clone(), count: 1, last: now });
        Correlation::New(name)
    }

    fn spend(&mut self, about: &A, now: Timestamp) -> bool {
        let budget = self.budgets.entry(about.clone()).or_insert(Budget { left: BURST, refilled: now });
        *budget = budget.at(now);
        let may = budget.left > 0;
        budget.left = budget.left.saturating_sub(1);
        may
    }

    /// Removes outdated entries, or all entries if that is not enough: then some events are sent twice.
    fn make_room(&mut self, now: Timestamp) {
        if self.series.len() >= KNOWN_MAX {
            self.series.retain(|_, series| !is_over(series, now));
            if self.series.len() >= KNOWN_MAX {
                self.series.clear();
            }
        }
        if self.budgets.len() > KNOWN_MAX {
            self.budgets.retain(|_, budget| budget.at(now).left < BURST);
            if self.budgets.len() > KNOWN_MAX {
                self.budgets.clear();
            }
        }
    }
}

impl Budget {
    fn at(self, now: Timestamp) -> Budget {
        let refills = since(self.refilled, now).as_secs() / REFILL.as_secs();
        if refills == 0 {
            return self;
        }
        let refills = u32::try_from(refills).unwrap_or(u32::MAX);
        Budget { left: self.left.saturating_add(refills).min(BURST), refilled: now }
    }
}

fn is_over(series: &Series, now: Timestamp) -> bool {
    since(series.last, now) > SERIES_WINDOW
}

/// Returns the time since then. If the clock was set back, no time counts as passed.
fn since(start: Timestamp, now: Timestamp) -> Duration {
    let passed_ms = now.as_millisecond().saturating_sub(start.as_millisecond()).max(0);
    Duration::from_millis(passed_ms.unsigned_abs())
}

/// Returns a name that no other event has: that of the object, and the time.
fn name(object: &str, now: Timestamp) -> String {
    let end =
        object.char_indices().map(|(at, _)| at).find(|at| *at >= NAME_BYTES_MAX).unwrap_or(object.len());
    let object = object[..end].trim_end_matches(['.', '-']);
    format!("{object}.{:x}", now.as_nanosecond())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::Kind;

    fn event(volume: &str, message: &str) -> Event {
        let about = Key::new(Kind::Volume, volume);
        Event { about, warning: false, reason: "Attached", message: message.to_owned() }
    }

    fn at(seconds: i64) -> Timestamp {
        Timestamp::new(1_000_000 + seconds, 0).unwrap()
    }

    #[test]
    fn repetitions_are_one_event_that_is_recorded_less_and_less_often() {
        let mut correlator = EventCorrelator::default();
        let Correlation::New(name) = correlator.take(&event("v", "a"), at(0)) else { panic!("not recorded") };
        assert!(name.starts_with("v."), "{name}");
        let queued: Vec<Correlation> =
            (1..8).map(|second| correlator.take(&event("v", "a"), at(second))).collect();
        let again = |count| Correlation::Repeated(name.clone(), count);
        let counted = Correlation::Counted;
        let all = [again(2), counted.clone(), again(4), counted.clone(), counted.clone(), counted, again(8)];
        assert_eq!(queued, all);
        // Much later it is a new event again.
        let later = at(8 + i64::try_from(SERIES_WINDOW.as_secs()).unwrap());
        assert!(matches!(correlator.take(&event("v", "a"), later), Correlation::New(other) if other != name));
    }

    #[test]
    fn an_object_with_ever_new_events_does_not_flood() {
        let mut correlator = EventCorrelator::default();
        let queued = |correlation: &Correlation| matches!(correlation, Correlation::New(_));
        let all = (0..100).map(|number| correlator.take(&event("v", &number.to_string()), at(0)));
        assert_eq!(all.filter(queued).count(), BURST as usize);
        assert!(queued(&correlator.take(&event("w", "a"), at(0))), "others are recorded");
        assert_eq!(correlator.take(&event("v", "later"), at(1)), Correlation::RateLimited);
        let refill = i64::try_from(REFILL.as_secs()).unwrap();
        assert!(queued(&correlator.take(&event("v", "later"), at(refill + 1))));
    }

    #[test]
    fn the_correlator_stays_small() {
        let mut correlator = EventCorrelator::default();
        for number in 0..3 * KNOWN_MAX {
            correlator.take(&event(&format!("v{number}"), "a"), at(0));
        }
        assert!(correlator.series.len() <= KNOWN_MAX && correlator.budgets.len() <= KNOWN_MAX + 1);
    }

    #[test]
    fn names_are_those_of_objects() {
        let long = name(&format!("{}-{}", "n".repeat(NAME_BYTES_MAX - 1), "x".repeat(50)), at(0));
        assert!(long.len() < 253 && long.contains("n."), "{long}");
    }
}
