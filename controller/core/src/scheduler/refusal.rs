//! Explains for programs and people why no place was found.

use std::collections::BTreeMap;
use std::fmt;

use super::filters::{self, Filter};
use super::request::{NodeCandidate, PlacementRequest};
use super::zones::Zones;
use crate::NodeName;

/// The maximum number of nodes that a text names with their reasons. The text is stored with the volume, and
/// too long for people with a thousand.
const NAMED_MAX: usize = 10;

/// The reason why a node takes no replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Removal {
    /// The filter that has removed the node.
    pub filter: Filter,
    /// A sentence about it.
    pub reason: String,
}

/// The lack of a place for a replica, with the reason of each node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementRefusal {
    /// The number of replicas that have a place.
    pub placed: u32,
    /// The number of wanted replicas.
    pub wanted: u32,
    /// The reason why each node takes no more.
    pub by_node: BTreeMap<NodeName, Removal>,
    /// The number of removed nodes for each reason, in words, the largest first.
    pub summary: String,
}

impl PlacementRefusal {
    pub(super) fn new(
        request: &PlacementRequest,
        nodes: &[NodeCandidate],
        zones: &Zones,
        placed: u32,
        wanted: u32,
    ) -> PlacementRefusal {
        let removal = |(at, node): (usize, &NodeCandidate)| {
            let (filter, reason) = filters::explain(request, node, zones.of_node(at))?;
            Some((node.name.clone(), Removal { filter, reason }))
        };
        let by_node = nodes.iter().enumerate().filter_map(removal).collect();
        PlacementRefusal::of(request, by_node, placed, wanted)
    }

    /// Returns the refusal for the removed nodes.
    pub(super) fn of(
        request: &PlacementRequest,
        by_node: BTreeMap<NodeName, Removal>,
        placed: u32,
        wanted: u32,
    ) -> PlacementRefusal {
        let summary = sum_up(request, &by_node);
        PlacementRefusal { placed, wanted, by_node, summary }
    }

    /// Returns true if time alone can bring a place: no event reports deleted files on a disk.
    #[must_use]
    pub fn waits_for_space(&self) -> bool {
        self.by_node.values().any(|removal| removal.filter == Filter::MinimalAvailable)
    }

    /// Returns true if `text` is a text of this refusal, apart from sizes: free space changes all the time.
    #[must_use]
    pub fn is_described_by(&self, text: &str) -> bool {
        without_sizes(text).eq(without_sizes(&self.to_string()))
    }

    fn head(&self) -> String {
        format!("{} of {} replicas have a place; ", self.placed, self.wanted)
    }

    /// Returns true if a node would take it once it has completed other rebuilds.
    #[must_use]
    pub fn waits_for_rebuilds(&self) -> bool {
        self.by_node.values().any(|removal| removal.filter == Filter::Rebuilds)
    }
}

/// Returns the words of the text without sizes, like 1.5 GiB.
fn without_sizes(text: &str) -> impl Iterator<Item = &str> {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let is_unit = |word: &str| UNITS.contains(&word.trim_end_matches([',', ';', ':', '.', ')']));
    let next = text.split_whitespace().skip(1).map(Some).chain([None]);
    let words = text.split_whitespace().zip(next);
    words.filter(move |(word, next)| !is_unit(word) && !next.is_some_and(is_unit)).map(|(word, _)| word)
}

fn sum_up(request: &PlacementRequest, by_node: &BTreeMap<NodeName, Removal>) -> String {
    let mut counts: BTreeMap<Filter, usize> = BTreeMap::new();
    for removal in by_node.values() {
        *counts.entry(removal.filter).or_default() += 1;
    }
    let mut counts: Vec<(Filter, usize)> = counts.into_iter().collect();
    counts.sort_by_key(|(filter, count)| (std::cmp::Reverse(*count), *filter));
    let parts = counts.iter().map(|(filter, count)| format!("{count} {}", filter.of_nodes(request, *count)));
    let nodes = if by_node.len() == 1 { "node" } else { "nodes" };
    format!("{} {nodes}: {}", by_node.len(), parts.collect::<Vec<_>>().join(", "))
}

impl fmt::Display for PlacementRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.head())?;
        if self.by_node.is_empty() {
            return f.write_str("no nodes: shorthornctl node add NAME --address HOST:PORT");
        }
        f.write_str(&self.summary)?;
        for (node, removal) in self.by_node.iter().take(NAMED_MAX) {
            write!(f, "; {node}: {}", removal.reason)?;
        }
        match self.by_node.len().saturating_sub(NAMED_MAX) {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}
