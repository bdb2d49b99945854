use serde::{Deserialize, Serialize};
use shorthorn_types::limits::MAX_PROPOSED_VIEWS;
use shorthorn_types::{Generation, ReplicaReport, View, ViewId};
use thiserror::Error;

/// The state that one replica keeps of the views of its volume. The shell stores it durably before it
/// answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaViews {
    generation: Generation,
    report: ReplicaReport,
}

/// The result of fencing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    /// The engine holds the replica already: this is one more connection of it.
    Same,
    /// The engine is newer. Before the answer, later requests of the former one must be refused, and its
    /// earlier ones must have ended.
    Raised,
}

/// The reason why the replica refuses a request of an engine. The state has not changed.
#[derive(Debug, Error, PartialEq, Eq, Clone, Copy)]
pub enum Refused {
    /// A newer engine holds the replica.
    #[error("generation {asked} is fenced: generation {holder} holds this replica")]
    Fenced {
        /// The generation of the asking engine.
        asked: Generation,
        /// The generation of the engine that holds the replica.
        holder: Generation,
    },
    /// An engine that has not opened the replica wants to change its views.
    #[error("generation {asked} has not opened this replica: generation {holder} holds it")]
    NotOpened {
        /// The generation of the asking engine.
        asked: Generation,
        /// The generation of the engine that holds the replica.
        holder: Generation,
    },
    /// The proposed view differs from the committed one and is not newer.
    #[error("view {proposed} is not newer than view {committed}, which is committed")]
    NotNewer {
        /// The view in the request.
        proposed: ViewId,
        /// The view that the replica, or the engine itself, knows as committed.
        committed: ViewId,
    },
    /// Another view was proposed with the same number.
    #[error("view {proposed} has other members than the view of that number that was proposed before")]
    SameNumber {
        /// The id that both views have.
        proposed: ViewId,
    },
    /// The proposed views are more than a replica keeps.
    #[error("more than {MAX_PROPOSED_VIEWS} proposed views: none of them has been committed")]
    TooManyProposed,
}

impl ReplicaViews {
    /// Creates a replica that was just made for a volume whose first view is `first`.
    #[must_use]
    pub fn new(first: View) -> ReplicaViews {
        ReplicaViews {
            generation: Generation::NEVER,
            report: ReplicaReport { committed: first, proposed: Vec::new() },
        }
    }

    /// Returns the generation that holds the replica.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Returns the report for an engine that opens the replica.
    #[must_use]
    pub fn report(&self) -> &ReplicaReport {
        &self.report
    }

    /// Opens the replica for an engine of `generation`.
    ///
    /// # Errors
    /// [`Refused::Fenced`] if a newer one holds it.
    pub fn fence(&mut self, generation: Generation) -> Result<Fence, Refused> {
        if generation < self.generation {
            return Err(Refused::Fenced { asked: generation, holder: self.generation });
        }
        let fence = if generation == self.generation { Fence::Same } else { Fence::Raised };
        self.generation = generation;
        Ok(fence)
    }

    /// Proposes `view`; `basis` is the report that the engine had to honour. Repeating it changes nothing, be
    /// it committed meanwhile. Nothing else is answered as stored that is not.
    ///
    /// Of views with the same members the newest is kept: it asks the same of a start, and stays proposed for
    /// longer. So an engine whose first view is never committed does not fill the replicas.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn propose(
        &mut self,
        generation: Generation,
        view: View,
        basis: &ReplicaReport,
    ) -> Result<(), Refused> {
        self.check(generation)?;
        let committed = newer(self.report.committed, basis.committed);
        if view == committed {
            return Ok(());
        }
        if view.id <= committed.id {
            return Err(Refused::NotNewer { proposed: view.id, committed: committed.id });
        }
        let mut proposed: Vec<View> = self.report.proposed.clone();
        proposed.extend(&basis.proposed);
        if proposed.iter().any(|known| known.id == view.id && *known != view) {
            return Err(Refused::SameNumber { proposed: view.id });
        }
        proposed.push(view);
        proposed.retain(|view| view.id > committed.id);
        proposed.sort_unstable_by_key(|view| view.id);
        proposed.dedup();
        let all = proposed.clone();
        proposed.retain(|view| !all.iter().any(|newer| stands_for(newer, view)));
        if proposed.len() > MAX_PROPOSED_VIEWS {
            return Err(Refused::TooManyProposed);
        }
        self.report = ReplicaReport { committed, proposed };
        Ok(())
    }

    /// Commits `view`, which clears everything older.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn commit(&mut self, generation: Generation, view: View) -> Result<(), Refused> {
        self.check(generation)?;
        self.report.committed = newer(self.report.committed, view);
        let committed = self.report.committed.id;
        self.report.proposed.retain(|view| view.id > committed);
        Ok(())
    }

    fn check(&self, asked: Generation) -> Result<(), Refused> {
        let holder = self.generation;
        match asked.cmp(&holder) {
            std::cmp::Ordering::Less => Err(Refused::Fenced { asked, holder }),
            std::cmp::Ordering::Greater => Err(Refused::NotOpened { asked, holder }),
            std::cmp::Ordering::Equal => Ok(()),
        }
    }
}

/// Returns true if a replica that has stored `newer` may have had `older` and dropped it.
pub(crate) fn stands_for(newer: &View, older: &View) -> bool {
    newer.id > older.id && newer.members == older.members
}

pub(crate) fn newer(one: View, other: View) -> View {
    if other.id > one.id { other } else { one }
}

#[cfg(test)]
mod tests {
    use shorthorn_types::{Members, ReplicaId};

    use super::*;

    fn view(attach: u64, number: u32, ids: &[u64]) -> View {
        View {
            id: ViewId { generation: Generation::new(attach, 0), number },
            members: Members::new(ids.iter().copied().map(ReplicaId::from_random)).unwrap(),
        }
    }

    fn opened(attach: u64) -> ReplicaViews {
        let mut views = ReplicaViews::new(view(0, 0, &[1, 2, 3]));
        views.fence(Generation::new(attach, 0)).unwrap();
        views
    }

    #[test]
    fn refuses_lower_generations_everywhere() {
        let mut views = opened(2);
        let old = Generation::new(1, 9);
        let before = views.clone();
        assert!(matches!(views.fence(old), Err(Refused::Fenced { .. })));
        let basis = views.report().clone();
        assert!(matches!(views.propose(old, view(1, 1, &[1]), &basis), Err(Refused::Fenced { .. })));
        assert!(matches!(views.commit(old, view(1, 1, &[1])), Err(Refused::Fenced { .. })));
        assert_eq!(views, before);
        assert_eq!(views.fence(Generation::new(2, 0)), Ok(Fence::Same));
        assert_eq!(views.fence(Generation::new(2, 1)), Ok(Fence::Raised));
    }

    #[test]
    fn an_engine_opens_before_it_proposes() {
        let mut views = opened(1);
        let basis = views.report().clone();
        let refused = views.propose(Generation::new(2, 0), view(2, 1, &[1]), &basis);
        assert!(matches!(refused, Err(Refused::NotOpened { .. })));
    }

    #[test]
    fn keeps_every_proposed_view_until_one_is_committed() {
        let mut views = opened(1);
        let basis = views.report().clone();
        let generation = Generation::new(1, 0);
        for number in 1..4 {
            views.propose(generation, view(1, number, &[1, u64::from(number) + 1]), &basis).unwrap();
        }
        views.propose(generation, view(1, 2, &[1, 3]), &basis).unwrap();
        assert_eq!(views.report().proposed.len(), 3);
        views.commit(generation, view(1, 2, &[1, 3])).unwrap();
        assert_eq!(views.report().committed, view(1, 2, &[1, 3]));
        assert_eq!(views.report().proposed, [view(1, 3, &[1, 4])]);
        views.commit(generation, view(1, 1, &[1, 2])).unwrap();
        assert_eq!(views.report().committed, view(1, 2, &[1, 3]));
    }

    #[test]
    fn the_newest_of_views_with_the_same_members_is_kept() {
        let mut views = opened(1);
        for attach in 1..40 {
            let generation = Generation::new(attach, 0);
            views.fence(generation).unwrap();
            let basis = views.report().clone();
            views.propose(generation, view(attach, 1, &[1, 2]), &basis).unwrap();
        }
        assert_eq!(views.report().proposed, [view(39, 1, &[1, 2])]);
    }

    #[test]
    fn answers_nothing_as_stored_that_is_not() {
        let mut views = opened(1);
        let (basis, generation) = (views.report().clone(), Generation::new(1, 0));
        let committed = view(1, 2, &[1, 2]);
        views.propose(generation, committed, &basis).unwrap();
        let known = view(1, 3, &[1]);
        views.propose(generation, known, &basis).unwrap();
        views.commit(generation, committed).unwrap();
        let before = views.clone();
        assert_eq!(views.propose(generation, committed, &basis), Ok(()), "a proposal that comes again");
        for (number, members) in [(1, [1, 2].as_slice()), (2, &[1]), (2, &[2, 3])] {
            let proposed = view(1, number, members);
            let refused = views.propose(generation, proposed, &basis);
            let (proposed, committed) = (proposed.id, committed.id);
            assert_eq!(refused, Err(Refused::NotNewer { proposed, committed }));
        }
        let proposed = view(1, 3, &[2]);
        assert_eq!(
            views.propose(generation, proposed, &basis),
            Err(Refused::SameNumber { proposed: known.id }),
            "one number stands for one view"
        );
        let honours = ReplicaReport { committed: view(1, 5, &[1]), proposed: vec![] };
        let proposed = view(1, 4, &[1]);
        let refused = views.propose(generation, proposed, &honours);
        let committed = honours.committed.id;
        assert_eq!(refused, Err(Refused::NotNewer { proposed: proposed.id, committed }));
        assert_eq!(views, before);
    }

    #[test]
    fn adopts_the_views_that_the_engine_honoured() {
        let mut views = opened(5);
        let basis = ReplicaReport { committed: view(3, 1, &[1, 2]), proposed: vec![view(4, 1, &[1, 3])] };
        views.propose(Generation::new(5, 0), view(5, 1, &[1]), &basis).unwrap();
        assert_eq!(views.report().committed, basis.committed);
        assert_eq!(views.report().proposed, [view(4, 1, &[1, 3]), view(5, 1, &[1])]);
    }

    #[test]
    fn has_a_bound() {
        let mut views = opened(1);
        let basis = views.report().clone();
        let mut propose = |number| {
            let members = [u64::from(number)];
            views.propose(Generation::new(1, 0), view(1, number, &members), &basis)
        };
        for number in 1..=16 {
            propose(number).unwrap();
        }
        assert_eq!(propose(17), Err(Refused::TooManyProposed));
    }
}
