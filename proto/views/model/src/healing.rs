//! Checks that a volume can be started once all faults are over.

use shorthorn_types::{Generation, View};
use shorthorn_views::{ChangeProgress, ReplicaViews, ViewChange};

use crate::bits::{Bits, bits, id, members};
use crate::rules::{Reported, Rules, view};
use crate::state::{Engine, Proposal, State};

/// The number of new generations after which an engine counts as one that never starts.
const ATTEMPTS: u32 = 4;

/// A volume that has healed, and an engine that starts.
#[derive(Clone)]
struct Start<'a> {
    rules: Rules,
    state: &'a State,
    attach: u64,
    restart: u32,
    known: Option<View>,
    /// The replicas that can be reached.
    reached: Bits,
    views: Vec<ReplicaViews>,
}

/// The reason why an attempt fails.
enum Failed {
    /// No replica can be a member.
    NoBasis(String),
    /// Some replicas can be members, but the first view does not become committed.
    NotThrough(String),
}

/// Returns an error unless an engine of a new attachment can start, and a new one of the current attachment,
/// too. If only some replicas are reached, an engine that finds a basis and knows the last grant must
/// succeed.
pub(crate) fn starts_again(rules: Rules, state: &State) -> Result<(), String> {
    let views: Vec<ReplicaViews> = state.replicas.iter().map(|replica| replica.views.clone()).collect();
    let all = Bits::below(u8::try_from(views.len()).unwrap_or(u8::MAX));
    let (attach, known) = (state.attach + 1, state.arbiter.granted());
    let new = Start { rules, state, attach, restart: 0, known, reached: all, views };
    if let Some(host) = state.hosts.last().filter(|host| !host.has_lost) {
        let (attach, restart, known) = (state.attach, host.restart + 1, host.known);
        Start { attach, restart, known, ..new.clone() }.run()?;
    }
    new.clone().run()?;
    for reached in all.subsets() {
        if let Err(Failed::NotThrough(what)) = (Start { reached, ..new.clone() }).attempt() {
            return Err(format!("{} never starts from {reached:?}: {what}", new.generation()));
        }
    }
    Ok(())
}

impl Start<'_> {
    /// Makes a bounded number of attempts, each with a generation of its own.
    fn run(mut self) -> Result<(), String> {
        let mut what = String::new();
        for _ in 0..ATTEMPTS {
            match self.attempt() {
                Ok(()) => return Ok(()),
                Err(Failed::NoBasis(why) | Failed::NotThrough(why)) => what = why,
            }
            self.restart += 1;
            // In both cases, refused or without a question, the arbiter returns the last grant.
            self.known = self.state.arbiter.granted();
        }
        Err(format!("{} never starts: {what}", self.generation()))
    }

    fn generation(&self) -> Generation {
        Generation::new(self.attach, self.restart)
    }

    /// Fences the reached replicas, asks the arbiter if necessary, and proposes the first view.
    fn attempt(&mut self) -> Result<(), Failed> {
        let engine = Engine::new(self.generation());
        let (rules, reached) = (self.rules, members(self.reached));
        let opened = self.reached_views().filter_map(|(replica, views)| {
            let report = rules.open(views, engine.generation)?;
            Some((id(replica), report))
        });
        let reports: Vec<Reported> = opened.collect();
        let Some(found) = rules.basis(reports.clone(), self.known) else {
            return Err(Failed::NoBasis(format!("no basis in {reports:?}, {:?} granted", self.known)));
        };
        let target = view(rules.view_id(&engine), bits(&found.members));
        let mut change = ViewChange::new(found.honoured.clone(), target);
        let proposal = Proposal { target, honoured: found.honoured, stored: reached };
        if rules.asks_first(&change, &reached) {
            self.ask(&mut change, &proposal)?;
        }
        for (replica, views) in self.reached_views() {
            if rules.propose(views, engine.generation, &proposal) {
                change.stored(id(replica));
            }
        }
        if change.progress() == ChangeProgress::NeedsGrant && rules.asks_late(&engine) {
            self.ask(&mut change, &proposal)?;
        }
        match change.progress() {
            ChangeProgress::Committed => Ok(()),
            progress => Err(Failed::NotThrough(format!("{progress:?}, from {reports:?}"))),
        }
    }

    fn ask(&self, change: &mut ViewChange, proposal: &Proposal) -> Result<(), Failed> {
        let answer = self.rules.ask(&self.state.arbiter, self.attach, self.generation(), proposal);
        answer.map_err(|refused| Failed::NotThrough(refused.to_string()))?;
        change.granted();
        Ok(())
    }

    fn reached_views(&mut self) -> impl Iterator<Item = (u8, &mut ReplicaViews)> {
        let reached = self.reached;
        (0..).zip(&mut self.views).filter(move |(replica, _)| reached.has(*replica))
    }
}
