use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::limits::MAX_MEMBERS;
use crate::{Generation, ParseViewError, ReplicaId};

/// The number of a view: the generation of the engine that made it, and a count within that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ViewId {
    /// The generation of the engine that made the view.
    pub generation: Generation,
    /// Sequence number of the view in this generation, from 1. The view of a new or salvaged volume has 0.
    pub number: u32,
}

impl fmt::Display for ViewId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.generation, self.number)
    }
}

/// The replicas that hold every acknowledged write, and since when.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct View {
    /// The id of the view; the newer view has the greater id.
    pub id: ViewId,
    /// The replicas that hold every acknowledged write.
    pub members: Members,
}

impl View {
    /// Returns true if no engine has made the view: a volume begins with it, or starts over after a salvage.
    #[must_use]
    pub fn is_first(&self) -> bool {
        self.id.number == 0
    }
}

impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.id, self.members)
    }
}

impl FromStr for View {
    type Err = ParseViewError;

    fn from_str(text: &str) -> Result<View, ParseViewError> {
        let parse = || {
            let (id, members) = text.split_once(" of {")?;
            let (generation, number) = id.split_once('/')?;
            let id = ViewId { generation: generation.parse().ok()?, number: number.parse().ok()? };
            let members = members.strip_suffix('}')?.split(", ").filter(|member| !member.is_empty());
            let members: Vec<ReplicaId> = members.map(|id| id.parse().ok()).collect::<Option<_>>()?;
            Some(View { id, members: Members::new(members).ok()? })
        };
        parse().ok_or_else(|| ParseViewError(text.to_owned()))
    }
}

/// The views of the volume that a replica knows. Everything in the report is durable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaReport {
    /// The newest committed view.
    pub committed: View,
    /// Every proposed view newer than that, oldest first.
    pub proposed: Vec<View>,
}

impl ReplicaReport {
    /// Returns all views in it, the committed one first.
    pub fn views(&self) -> impl Iterator<Item = &View> {
        std::iter::once(&self.committed).chain(&self.proposed)
    }
}

/// A set of at most [`MAX_MEMBERS`] replicas, kept in order, without allocation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<ReplicaId>", into = "Vec<ReplicaId>")]
pub struct Members {
    ids: [Option<ReplicaId>; MAX_MEMBERS],
    count: u8,
}

/// A volume was given more replicas than [`MAX_MEMBERS`].
#[derive(Debug, Error, PartialEq, Eq, Clone, Copy)]
#[error("{0} replicas are more than the {MAX_MEMBERS} that a volume can have")]
pub struct TooManyMembers(pub usize);

impl Members {
    /// The empty set.
    pub const NONE: Members = Members { ids: [None; MAX_MEMBERS], count: 0 };

    /// Creates the set of `ids`; repeated ones count once.
    ///
    /// # Errors
    /// [`TooManyMembers`].
    pub fn new(ids: impl IntoIterator<Item = ReplicaId>) -> Result<Members, TooManyMembers> {
        let mut sorted: Vec<ReplicaId> = ids.into_iter().collect();
        sorted.sort_unstable();
        sorted.dedup();
        if sorted.len() > MAX_MEMBERS {
            return Err(TooManyMembers(sorted.len()));
        }
        let mut members = Members::NONE;
        for id in sorted {
            members.append(id);
        }
        Ok(members)
    }

    fn append(&mut self, id: ReplicaId) {
        self.ids[usize::from(self.count)] = Some(id);
        self.count += 1;
    }

    /// Returns the number of members, at most [`MAX_MEMBERS`].
    #[must_use]
    pub fn len(&self) -> usize {
        usize::from(self.count)
    }

    /// Returns true if the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns true if `id` is one of them.
    #[must_use]
    pub fn contains(&self, id: ReplicaId) -> bool {
        self.iter().any(|member| member == id)
    }

    /// Returns all members in order.
    pub fn iter(&self) -> impl Iterator<Item = ReplicaId> + '_ {
        self.ids.iter().flatten().copied()
    }

    /// Returns the members for which `keep` is true.
    #[must_use]
    pub fn filter(&self, keep: impl Fn(ReplicaId) -> bool) -> Members {
        let mut kept = Members::NONE;
        for id in self.iter().filter(|id| keep(*id)) {
            kept.append(id);
        }
        kept
    }

    /// Returns the members of both sets.
    #[must_use]
    pub fn intersection(&self, other: &Members) -> Members {
        self.filter(|id| other.contains(id))
    }

    /// Returns all members but `id`.
    #[must_use]
    pub fn without(&self, id: ReplicaId) -> Members {
        self.filter(|member| member != id)
    }

    /// Returns all members and `id`.
    ///
    /// # Errors
    /// [`TooManyMembers`].
    pub fn with(&self, id: ReplicaId) -> Result<Members, TooManyMembers> {
        Members::new(self.iter().chain([id]))
    }

    /// Returns true if all of these are in `other`.
    #[must_use]
    pub fn is_subset_of(&self, other: &Members) -> bool {
        self.iter().all(|id| other.contains(id))
    }
}

impl Default for Members {
    fn default() -> Members {
        Members::NONE
    }
}

impl TryFrom<Vec<ReplicaId>> for Members {
    type Error = TooManyMembers;
    fn try_from(ids: Vec<ReplicaId>) -> Result<Members, TooManyMembers> {
        Members::new(ids)
    }
}

impl From<Members> for Vec<ReplicaId> {
    fn from(members: Members) -> Vec<ReplicaId> {
        members.iter().collect()
    }
}

impl fmt::Display for Members {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

impl fmt::Debug for Members {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn id(n: u64) -> ReplicaId {
        ReplicaId::from_random(n)
    }

    #[test]
    fn is_a_set() {
        let all = Members::new([id(3), id(1), id(2), id(1)]).unwrap();
        assert_eq!(all.len(), 3);
        assert_eq!(all.iter().collect::<Vec<_>>(), [id(1), id(2), id(3)]);
        let two = all.without(id(2));
        assert!(two.is_subset_of(&all) && !all.is_subset_of(&two));
        assert_eq!(two.with(id(2)), Ok(all));
        assert_eq!(all.intersection(&two), two);
    }

    #[test]
    fn has_a_bound() {
        assert_eq!(Members::new((0..9).map(id)), Err(TooManyMembers(9)));
    }

    #[test]
    fn newer_views_have_greater_numbers() {
        let number =
            |attach, restart, number| ViewId { generation: Generation::new(attach, restart), number };
        assert!(number(2, 0, 1) > number(1, 9, 9));
        assert!(number(1, 1, 1) > number(1, 0, 9));
        assert!(number(1, 1, 2) > number(1, 1, 1));
    }

    proptest! {
        #[test]
        fn texts_read_back(
            (attach, restart, nonce, number) in any::<(u64, u32, u64, u32)>(),
            ids in vec(any::<u64>(), 0..=MAX_MEMBERS),
        ) {
            let id = ViewId { generation: Generation::new(attach, restart).of_nonce(nonce), number };
            let members = Members::new(ids.into_iter().map(ReplicaId::from_random)).unwrap();
            let view = View { id, members };
            prop_assert_eq!(view.to_string().parse::<View>(), Ok(view));
        }

        #[test]
        fn other_texts_are_refused(text in "[0-9./#{} ,of]{0,20}") {
            if let Ok(view) = text.parse::<View>() {
                prop_assert_eq!(view.to_string().parse::<View>(), Ok(view));
            }
        }
    }

    #[test]
    fn reads_back_from_json() {
        let view = View {
            id: ViewId { generation: Generation::new(1, 2), number: 3 },
            members: Members::new([id(1), id(2)]).unwrap(),
        };
        let text = serde_json::to_string(&view).unwrap();
        assert_eq!(serde_json::from_str::<View>(&text).unwrap(), view);
    }
}
