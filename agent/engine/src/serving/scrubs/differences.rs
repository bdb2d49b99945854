//! Collects the differences that a scrub of the volume finds. A scrub may find one in each block of a volume:
//! the log gets a line for many of them.

use std::time::{Duration, Instant};

use shorthorn_types::ByteRange;

/// The interval of logging the differences of a running scrub.
const LOG_INTERVAL: Duration = Duration::from_secs(30);
/// The maximum number of groups. Differences of further ones are logged at once.
const GROUPS_MAX: usize = 16;

/// Ranges in which the same members differ, with the same outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::serving) struct Difference {
    /// The replicas with other data, as the log names them.
    pub odd: String,
    pub repaired: bool,
    pub count: u64,
    pub first: ByteRange,
    pub last: ByteRange,
}

impl Difference {
    /// Returns the difference in one range.
    pub fn new(range: ByteRange, odd: String, repaired: bool) -> Difference {
        Difference { odd, repaired, count: 1, first: range, last: range }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Differences {
    groups: Vec<Difference>,
    logged: Option<Instant>,
}

impl Differences {
    /// Adds a difference. Returns it if it has to be logged at once.
    pub fn add(&mut self, found: Difference) -> Option<Difference> {
        let is_like = |group: &&mut Difference| group.odd == found.odd && group.repaired == found.repaired;
        if let Some(group) = self.groups.iter_mut().find(is_like) {
            (group.count, group.last) = (group.count + found.count, found.last);
            return None;
        }
        if self.groups.len() >= GROUPS_MAX {
            return Some(found);
        }
        self.groups.push(found);
        None
    }

    /// Returns the groups to log `now`: none if others were logged shortly before.
    pub fn take_due(&mut self, now: Instant) -> Vec<Difference> {
        let is_early = self.logged.is_some_and(|logged| now.duration_since(logged) < LOG_INTERVAL);
        if self.groups.is_empty() || is_early {
            return Vec::new();
        }
        self.logged = Some(now);
        std::mem::take(&mut self.groups)
    }

    /// Returns all groups: the scrub has ended.
    pub fn take_all(&mut self) -> Vec<Difference> {
        self.logged = None;
        std::mem::take(&mut self.groups)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(number: u64) -> ByteRange {
        ByteRange::new(number * 4096, 4096).unwrap()
    }

    fn difference(number: u64, odd: &str, repaired: bool) -> Difference {
        Difference::new(block(number), odd.to_owned(), repaired)
    }

    #[test]
    fn blocks_with_the_same_members_and_outcome_are_one_group() {
        let mut differences = Differences::default();
        for found in
            [(3, "a b", false), (4, "a b", false), (7, "a b", true), (9, "a b", false), (11, "b", false)]
        {
            assert_eq!(differences.add(difference(found.0, found.1, found.2)), None);
        }
        let first = Difference { count: 3, last: block(9), ..difference(3, "a b", false) };
        let groups = vec![first, difference(7, "a b", true), difference(11, "b", false)];
        assert_eq!(differences.take_all(), groups);
        assert_eq!(differences.take_all(), []);
    }

    #[test]
    fn groups_are_logged_at_once_and_then_at_an_interval_until_the_scrub_ends() {
        let (mut differences, now) = (Differences::default(), Instant::now());
        assert_eq!(differences.take_due(now).len(), 0);
        let add =
            |differences: &mut Differences| assert_eq!(differences.add(difference(3, "a", false)), None);
        add(&mut differences);
        assert_eq!(differences.take_due(now).len(), 1, "nothing was logged yet");
        add(&mut differences);
        assert_eq!(differences.take_due(now + LOG_INTERVAL / 2).len(), 0);
        assert_eq!(differences.take_due(now + LOG_INTERVAL).len(), 1);
        add(&mut differences);
        assert_eq!(differences.take_all().len(), 1);
        add(&mut differences);
        assert_eq!(differences.take_due(now + LOG_INTERVAL).len(), 1, "of another scrub");
    }

    #[test]
    fn the_number_of_groups_is_bounded() {
        let mut differences = Differences::default();
        let names = || (0..).map(|number| format!("{number}"));
        let added = names().take_while(|odd| differences.add(difference(3, odd, false)).is_none());
        assert_eq!(added.count(), GROUPS_MAX);
        assert_eq!(differences.add(difference(4, "0", false)), None, "a known group takes more");
    }
}
