use shorthorn_types::{Generation, Members, ReplicaId, ReplicaReport, View, ViewId};
use shorthorn_views::{
    Arbiter, Basis, ChangeProgress, NotGranted, Quorum, Refused, ReplicaViews, ViewChange, basis,
    basis_without, quorum,
};

use crate::bits::{Bits, id, members};
use crate::mutation::Mutation;
use crate::state::{Engine, Proposal, Underway};

/// The real rules, called as the real programs call them; a [`Mutation`] is put around the real call.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rules {
    pub mutation: Option<Mutation>,
}

impl Rules {
    fn is(self, mutation: Mutation) -> bool {
        self.mutation == Some(mutation)
    }

    /// Opens a replica and returns its report, unless it refuses.
    pub fn open(self, views: &mut ReplicaViews, generation: Generation) -> Option<ReplicaReport> {
        if !self.is(Mutation::ServeBeforeFence) {
            views.fence(generation).ok()?;
        }
        let mut report = views.report().clone();
        if self.is(Mutation::NewestProposed) {
            report.proposed = report.proposed.pop().into_iter().collect();
        }
        if let (Some(Mutation::OneView), Some(committed)) = (self.mutation, report.proposed.last().copied()) {
            report = ReplicaReport { committed, proposed: Vec::new() };
        }
        Some(report)
    }

    /// Returns the generation of an engine process; `next` is the nonce that it draws if others have had this
    /// pair.
    pub fn nonce(self, pair: Generation, next: Option<u64>) -> Generation {
        let is_drawn = !self.is(Mutation::NoNonce) && !self.is(Mutation::UsedTwice);
        if is_drawn { pair.of_nonce(next.unwrap_or(FIRST_NONCE)) } else { pair }
    }

    /// Returns the arbiter's record, once it is known to be older than the volume.
    pub fn stale(self, arbiter: &Arbiter, since: u64) -> Arbiter {
        if self.is(Mutation::TrustRestored) { arbiter.clone() } else { arbiter.stale(since) }
    }

    /// Proposes a view to a replica. Whether it has stored it.
    pub fn propose(self, views: &mut ReplicaViews, generation: Generation, proposal: &Proposal) -> bool {
        if self.is(Mutation::ServeBeforeFence) && views.fence(generation).is_err() {
            return false;
        }
        match views.propose(generation, proposal.target, &proposal.honoured) {
            // The replica has not stored it, and says that it has.
            Err(Refused::NotNewer { .. } | Refused::SameNumber { .. }) => {
                self.is(Mutation::UsedTwice) || self.is(Mutation::NoGeneration)
            }
            answer => answer.is_ok(),
        }
    }

    /// Returns true if an engine may touch the data of a replica before its first view is committed.
    pub fn may_copy(self, views: &ReplicaViews, generation: Generation) -> bool {
        views.generation() == generation || self.is(Mutation::ServeBeforeFence)
    }

    /// Returns the basis of a starting engine.
    pub fn basis(self, mut reports: Vec<Reported>, known: Option<View>) -> Option<Basis> {
        let reached = Members::new(reports.iter().map(|(reached, _)| *reached)).ok()?;
        match self.mutation {
            Some(Mutation::GiveUpGranted) => {
                for (_, report) in &mut reports {
                    report.committed = newer(report.committed, known);
                }
            }
            Some(Mutation::LessThanHalf) => {
                let report = reports.first()?.1.clone();
                reports.extend((0..8).map(|replica| (id(replica), report.clone())));
            }
            Some(Mutation::KeepDead) => keep(&mut reports, known, |_| true),
            Some(Mutation::KeepMinority) => keep(&mut reports, known, |view| !is_overruled(view, known)),
            Some(Mutation::DropOlder) => {
                forget(&mut reports, |view| Some(view.id) < known.map(|known| known.id))
            }
            Some(Mutation::DropOverruled) => forget(&mut reports, |view| is_overruled(view, known)),
            Some(Mutation::DropUnseen) => forget(&mut reports, |view| !view.members.is_subset_of(&reached)),
            _ => {}
        }
        let mut found = basis(&reports, known).ok()?;
        if self.is(Mutation::KeepOverruled) || self.is(Mutation::KeepDead) {
            found = honour_overruled(found, &reports, known, &reached)?;
        }
        found.members = found.members.intersection(&reached);
        if self.is(Mutation::DropGrant) {
            let stored = |view: &View| reports.iter().any(|(_, report)| report.proposed.contains(view));
            found.honoured.proposed.retain(stored);
        }
        if self.is(Mutation::NewestMembers) {
            let newest = found.honoured.proposed.last().copied().unwrap_or(found.honoured.committed);
            found.members = newest.members.intersection(&reached);
        }
        Some(found).filter(|found| !found.members.is_empty())
    }

    /// Returns the basis of a starting engine that leaves `offenders` out.
    pub fn basis_without(
        self,
        reports: &[Reported],
        known: Option<View>,
        offenders: &Members,
        stored: &Members,
    ) -> Option<Basis> {
        if !self.is(Mutation::CountOffenders) {
            return basis_without(reports, known, offenders, stored).ok();
        }
        let mut found = basis(reports, known).ok()?;
        found.members = found.members.filter(|id| !offenders.contains(id));
        Some(found).filter(|found| !found.members.is_empty())
    }

    /// Returns the reached replicas that have to store the first view of a start.
    pub fn asked_to_store(self, reached: Bits, stored: Bits) -> Bits {
        if self.is(Mutation::CountOffenders) { reached } else { stored }
    }

    /// Returns the number of the next view of an engine.
    pub fn view_id(self, engine: &Engine) -> ViewId {
        let generation = if self.is(Mutation::NoGeneration) { Generation::NEVER } else { engine.generation };
        ViewId { generation, number: u32::from(engine.last_number()) + 1 }
    }

    /// Returns the progress of the engine's change.
    pub fn progress(self, engine: &Engine, underway: &Underway, fenced: Bits) -> ChangeProgress {
        let change = &underway.change;
        let progress = change.progress();
        match self.mutation {
            Some(Mutation::LessThanHalf) if progress == ChangeProgress::NoQuorum => match underway.granted {
                true => ChangeProgress::Committed,
                false => ChangeProgress::NeedsGrant,
            },
            Some(Mutation::CountFenced) if !engine.served && progress != ChangeProgress::Storing => {
                with(change, &members(fenced)).progress()
            }
            Some(Mutation::CountOffenders) if !engine.served && progress != ChangeProgress::Storing => {
                let left_out = underway.reached.iter().fold(engine.reached, Bits::without);
                with(change, &members(left_out)).progress()
            }
            Some(Mutation::EarlyMember) if progress == ChangeProgress::Storing => match engine.rebuilt {
                Some(rebuilt) if change.stored_by().contains(id(rebuilt)) => ChangeProgress::Committed,
                _ => progress,
            },
            _ => progress,
        }
    }

    /// Asks the arbiter. Returns the record that it has to store before it answers.
    #[allow(clippy::result_large_err)]
    pub fn ask(
        self,
        arbiter: &Arbiter,
        attach: u64,
        asker: Generation,
        proposal: &Proposal,
    ) -> Result<Arbiter, NotGranted> {
        let mut target = proposal.target;
        target.id.generation = asker;
        match arbiter.ask(attach, target, &proposal.honoured, &proposal.stored) {
            Ok(_) if self.is(Mutation::NoGeneration) => forced(arbiter, proposal.target),
            Err(NotGranted::NoQuorum { .. }) if self.is(Mutation::LessThanHalf) => forced(arbiter, target),
            Err(NotGranted::DoesNotFollow { .. } | NotGranted::NotHonoured { .. })
                if self.is(Mutation::GiveUpGranted) =>
            {
                forced(arbiter, target)
            }
            Err(NotGranted::NotHonoured { .. }) if self.is(Mutation::ForgetGrant) => forced(arbiter, target),
            answer => answer,
        }
    }

    /// Returns true if a start has to ask the arbiter before it proposes `change` to the replicas that it has
    /// `reached`.
    pub fn asks_first(self, change: &ViewChange, reached: &Members) -> bool {
        match self.mutation {
            Some(Mutation::ProposeFirst) => false,
            Some(Mutation::LessThanHalf) => {
                change.would_need_grant(reached)
                    || with(change, reached).progress() == ChangeProgress::NoQuorum
            }
            _ => change.would_need_grant(reached),
        }
    }

    /// Returns true if an engine asks the arbiter for its proposal. A starting one has asked before, or need
    /// not ask.
    pub fn asks_late(self, engine: &Engine) -> bool {
        engine.view.is_some() || self.is(Mutation::ProposeFirst)
    }

    /// Returns true if a running engine proposes the rest of its view.
    pub fn may_propose(self, current: &Members, left: Bits) -> bool {
        quorum(current, &members(left)) != Quorum::Less || self.is(Mutation::ProposeMinority)
    }

    /// Returns true if an engine may continue without the pending view.
    pub fn may_give_up(self, underway: &Underway) -> bool {
        !underway.asked || self.is(Mutation::GiveUpGranted)
    }

    /// Returns true if a rebuilding replica is sent the requests in flight again.
    pub fn sends_again(self) -> bool {
        !self.is(Mutation::ForgetInFlight)
    }
}

/// The nonce of the first process of a pair: there is room for others above it and below it.
const FIRST_NONCE: u64 = 16;

/// The report of one replica at a start.
pub(crate) type Reported = (ReplicaId, ReplicaReport);

fn newer(one: View, other: Option<View>) -> View {
    other.filter(|other| other.id > one.id).unwrap_or(one)
}

/// Gives all reports the proposed views for which `keep` is true: none of these is dead then.
fn keep(reports: &mut [Reported], known: Option<View>, keep: impl Fn(&View) -> bool) {
    let proposed = reports.iter().flat_map(|(_, report)| report.proposed.iter().copied()).chain(known);
    let kept: Vec<View> = proposed.filter(keep).collect();
    for (_, report) in reports {
        report.proposed.extend(&kept);
    }
}

/// Returns the basis with the overruled views in it, or none if too few replicas of one are reached.
fn honour_overruled(
    mut found: Basis,
    reports: &[Reported],
    known: Option<View>,
    reached: &Members,
) -> Option<Basis> {
    let committed = found.honoured.committed.id;
    let proposed = reports.iter().flat_map(|(_, report)| report.proposed.iter());
    for view in proposed.filter(|view| view.id > committed && is_overruled(view, known)) {
        match quorum(&view.members, reached) {
            Quorum::Less => return None,
            Quorum::Half => found.needs_grant = true,
            Quorum::More => {}
        }
        found.members = found.members.intersection(&view.members);
        found.honoured.proposed.push(*view);
    }
    found.honoured.proposed.sort_unstable_by_key(|view| view.id);
    found.honoured.proposed.dedup();
    Some(found)
}

fn is_overruled(view: &View, known: Option<View>) -> bool {
    known.is_some_and(|known| view.id < known.id && !known.members.is_subset_of(&view.members))
}

/// Removes the proposed views for which `dead` is true from all reports.
fn forget(reports: &mut [Reported], dead: impl Fn(&View) -> bool) {
    for (_, report) in reports {
        report.proposed.retain(|view| !dead(view));
    }
}

/// Returns `change` with the additional votes of `more`.
fn with(change: &ViewChange, more: &Members) -> ViewChange {
    let mut change = change.clone();
    more.iter().for_each(|replica| change.stored(replica));
    change
}

/// Returns the arbiter's record after it has granted `target`, right or wrong.
#[allow(clippy::result_large_err)]
fn forced(arbiter: &Arbiter, target: View) -> Result<Arbiter, NotGranted> {
    let before = arbiter.granted().map_or_else(ViewId::default, |granted| granted.id);
    let honoured = View { id: before, members: target.members };
    let honoured = ReplicaReport { committed: honoured, proposed: Vec::new() };
    arbiter.ask(target.id.generation.attach, target, &honoured, &target.members)
}

pub(crate) fn view(id: ViewId, replicas: Bits) -> View {
    let members: Members = members(replicas);
    View { id, members }
}
