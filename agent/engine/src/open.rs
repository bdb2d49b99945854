//! Opening a volume: fence the replicas, find the view, bring the first one through, learn what has to be copied.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use shorthorn_control::{
    Command, EnginePhase, EngineSpec, GrantWanted, MemberMode, MemberStatus, Publisher, ReplicaEndpoint,
};
use shorthorn_types::{
    Generation, Members, RegionSet, Regions, RegionsOf, ReplicaId, ReplicaReport, View, ViewId,
};
use shorthorn_views::{
    Account, Change, Combined, Kept, Progress, Witness, accounts_to_forget, combine, plan,
};
use shorthorn_wire::{Hello, Welcome};

use crate::accounts;
use crate::connection::{ConnectError, Connection};
use crate::error::EngineError;
use crate::shared::News;
use crate::state::EngineState;
use crate::status;

/// How long members that do not answer are waited for when the others are enough: a process that is being
/// restarted is back by then.
const MISSING_LIMIT: Duration = Duration::from_secs(5);
/// The same where the others have lost writes that somebody counts on: one of the missing may have kept them.
const KEEPER_LIMIT: Duration = Duration::from_secs(30);
/// Between two attempts to reach the replicas that are missing; the first ones come sooner, as a replica that is
/// being restarted is back soon.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);
const FIRST_RETRY: Duration = Duration::from_millis(20);
/// While the arbiter is waited for: a replica closes connections that are silent for a minute.
const PING_INTERVAL: Duration = Duration::from_secs(10);

/// A volume that may be served: its first view is through.
#[derive(Debug)]
pub struct Opened {
    pub view: View,
    /// The newest view of earlier engines that is known to be through.
    pub last_view: View,
    /// For every replica of the spec, in its order: a connection per queue, where it is a member.
    pub connections: Vec<Vec<Connection>>,
    pub members: Vec<MemberStatus>,
    pub size_bytes: u64,
    /// Where the members may differ.
    pub dirty: RegionSet,
    /// For every replica: what it has missed, as far as the members know.
    pub missed: Vec<RegionSet>,
    /// For every replica: whether that is all that it has missed.
    pub is_missed_complete: Vec<bool>,
    /// The newest stamp that any member was sent: see [`shorthorn_types::is_current`].
    pub stamp: u32,
    /// For every replica that is no member: the newest stamp that it was sent.
    pub missed_stamps: Vec<u32>,
    /// A size that was ordered meanwhile.
    pub expand_to_bytes: Option<u64>,
    /// See [`EngineState::lost_writes`].
    pub lost_writes: bool,
}

impl Opened {
    /// How much has to be made equal before it is served, where the members may differ.
    pub fn unequal_bytes(&self) -> Option<u64> {
        let region_bytes = Regions::of(self.size_bytes).region_bytes();
        let bytes = u64::from(self.dirty.len()) * region_bytes;
        (bytes > 0 && self.view.members.len() > 1).then_some(bytes)
    }
}

/// How waiting for the volume has ended.
#[derive(Debug)]
pub enum Opening {
    /// It may be served.
    Open(Box<Opened>),
    /// The process has to end before; whether for good.
    Ended { for_good: bool },
}

/// Why an attempt to open the volume failed.
#[derive(Debug)]
enum OpenError {
    /// Never again: a newer engine holds it, or this host fails.
    Fatal(EngineError),
    /// The process has to end.
    Ended { for_good: bool },
    /// Perhaps later; nothing was proposed.
    Missing { reason: String, members: Vec<MemberStatus> },
    /// Perhaps later, with a new generation: a view was proposed and may be stored somewhere.
    Torn(String),
}

impl From<EngineError> for OpenError {
    fn from(error: EngineError) -> OpenError {
        OpenError::Fatal(error)
    }
}

/// Who is greeted, and as whom.
#[derive(Clone, Debug)]
pub struct Greeter {
    pub volume: shorthorn_types::VolumeName,
    /// Of the volume. All clones of a greeter have the same.
    size_bytes: Arc<AtomicU64>,
    pub secret: shorthorn_control::Secret,
    pub generation: Generation,
    pub timeout: Duration,
}

impl Greeter {
    pub fn new(spec: &EngineSpec, generation: Generation) -> Greeter {
        Greeter {
            volume: spec.volume.clone(),
            size_bytes: Arc::new(AtomicU64::new(spec.size_bytes)),
            secret: spec.secret.clone(),
            generation,
            timeout: Duration::from_millis(u64::from(spec.replica_timeout_ms)),
        }
    }

    /// Size of the volume.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    /// The volume is to have this size: whoever is greeted from now on grows first.
    pub fn set_size(&self, size_bytes: u64) {
        self.size_bytes.fetch_max(size_bytes, Ordering::AcqRel);
    }

    /// Opens one connection to a replica, at the first of its addresses that answers.
    pub fn greet(
        &self,
        endpoint: &ReplicaEndpoint,
        queue: u16,
    ) -> Result<(Connection, Welcome), ConnectError> {
        let mut last = ConnectError::Address(String::new());
        for address in &endpoint.addresses {
            match self.greet_at(address, endpoint.replica, queue) {
                Ok(answer) => return Ok(answer),
                Err(deposed @ ConnectError::Deposed { .. }) => return Err(deposed),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn greet_at(
        &self,
        address: &str,
        replica: ReplicaId,
        queue: u16,
    ) -> Result<(Connection, Welcome), ConnectError> {
        let (volume, generation) = (self.volume.clone(), self.generation);
        let hello = Hello { volume, replica, generation, queue, proof: String::new() };
        let mut connection = Connection::open(address, self.timeout)?;
        let mut welcome = connection.greet(hello, &self.secret)?;
        let size_bytes = self.size_bytes();
        if welcome.size_bytes > size_bytes {
            let message = format!(
                "it has {} bytes, the volume {size_bytes}: nobody has told this engine of an expansion yet",
                welcome.size_bytes
            );
            return Err(ConnectError::Refused { message, errno: shorthorn_types::Errno::INVALID });
        }
        if welcome.size_bytes < size_bytes {
            // It was away while the volume has grown, or the volume was not attached then.
            connection.expand(size_bytes)?;
            welcome.size_bytes = size_bytes;
        }
        Ok((connection, welcome))
    }
}

/// A replica that answers, fenced.
struct Reached {
    index: usize,
    connection: Connection,
    welcome: Welcome,
    /// See [`shorthorn_views::Plan::blank`].
    is_blank: bool,
}

/// A view that is being proposed, and to whom.
struct Proposal {
    change: Change,
    reached: Vec<Reached>,
    kept: Vec<Kept>,
    refused: Vec<String>,
    /// A newer engine, where one holds a replica.
    deposed_by: Option<Generation>,
}

/// What opening a volume needs.
pub struct Opener<'a> {
    pub spec: &'a mut EngineSpec,
    pub state: &'a mut EngineState,
    pub publisher: &'a Publisher,
    pub news: &'a Receiver<News>,
    /// A size that was ordered, for the next attempt: each has one size from its beginning to its end.
    pub expand_to_bytes: Option<u64>,
}

impl Opener<'_> {
    /// Opens the volume; waits for replicas that are missing, and for the arbiter.
    ///
    /// # Errors
    /// Where waiting is of no use.
    pub fn run(mut self) -> Result<Opening, EngineError> {
        let begin = Instant::now();
        let mut pause = FIRST_RETRY;
        let mut told = String::new();
        loop {
            self.take_size();
            match self.attempt(begin.elapsed()) {
                Ok(opened) => return Ok(Opening::Open(Box::new(opened))),
                Err(OpenError::Fatal(error)) => return Err(error),
                Err(OpenError::Ended { for_good }) => return Ok(Opening::Ended { for_good }),
                Err(OpenError::Missing { reason, members }) => {
                    if reason != told {
                        tracing::warn!(volume = %self.spec.volume, "the volume waits: {reason}");
                        told.clone_from(&reason);
                    }
                    status::publish(self.publisher, |engine| {
                        engine.message = format!("waiting: {reason}");
                        engine.members = members;
                    });
                }
                Err(OpenError::Torn(reason)) => {
                    tracing::warn!(volume = %self.spec.volume, reason, "opening failed half-way, trying again");
                    let generation = self.state.next_generation()?;
                    status::publish(self.publisher, |engine| {
                        engine.message = reason;
                        engine.generation = generation;
                    });
                }
            }
            match self.wait(pause) {
                Ok(_) => {}
                Err(OpenError::Ended { for_good }) => return Ok(Opening::Ended { for_good }),
                Err(OpenError::Fatal(error)) => return Err(error),
                Err(_) => unreachable!("waiting opens nothing"),
            }
            pause = (pause * 2).min(RETRY_INTERVAL);
        }
    }

    fn take_size(&mut self) {
        if let Some(size_bytes) = self.expand_to_bytes.take().filter(|size| *size > self.spec.size_bytes) {
            tracing::info!(volume = %self.spec.volume, size_bytes, "the volume is to be larger");
            self.spec.size_bytes = size_bytes;
        }
    }

    /// Takes what is told within `pause`; the view that the arbiter has granted, if that is it.
    fn wait(&mut self, pause: Duration) -> Result<Option<View>, OpenError> {
        let order = match self.news.recv_timeout(pause) {
            Ok(News::Terminate) => return Err(OpenError::Ended { for_good: false }),
            Ok(News::Order(order)) => order,
            // The queues do not run yet: nobody else has anything to tell.
            Ok(_) | Err(RecvTimeoutError::Timeout) => return Ok(None),
            Err(RecvTimeoutError::Disconnected) => return Err(OpenError::Ended { for_good: false }),
        };
        let volume = &self.spec.volume;
        match order {
            Command::Stop => return Err(OpenError::Ended { for_good: true }),
            Command::Handover => return Err(OpenError::Ended { for_good: false }),
            Command::Grant { view } if view.id.generation.attach <= self.spec.attach => {
                tracing::info!(%volume, %view, "the arbiter has granted a view");
                self.state.keep_grant(view)?;
                return Ok(Some(view));
            }
            Command::Replicas { replicas } => match status::check_replicas(&replicas) {
                Ok(()) => self.spec.replicas = replicas,
                Err(reason) => tracing::warn!(%volume, reason, "an order is ignored"),
            },
            Command::Limits { limits } => self.spec.rebuild = limits,
            Command::Expand { size_bytes } => {
                self.expand_to_bytes = self.expand_to_bytes.max(Some(size_bytes));
            }
            order => tracing::warn!(%volume, ?order, "an order is ignored: the volume is not open yet"),
        }
        Ok(None)
    }

    /// One attempt, after the others have taken so long. A member of the view that does not answer is waited for at first:
    /// who is left out has to be brought up again later.
    fn attempt(&mut self, waited: Duration) -> Result<Opened, OpenError> {
        let begin = Instant::now();
        let generation = self.state.generation();
        let greeter = Greeter::new(self.spec, generation);
        let (reached, mut members) = reach(&self.spec.replicas, &greeter)?;
        let reached_ms = begin.elapsed().as_millis();
        let plan = plan(&witnesses(self.spec, &reached), self.granted());
        note_unfit(
            self.spec,
            &mut members,
            plan.as_ref().map_or_else(|none| &none.unfit, |plan| &plan.unfit),
        );
        let plan = match plan {
            Ok(plan) => plan,
            Err(none) => {
                return Err(OpenError::Missing { reason: with_unfit(&none.cannot, &none.unfit), members });
            }
        };
        let answers = |id| reached.iter().any(|one| self.spec.replicas[one.index].replica == id);
        let silent = plan.basis.holders.filter(|id| !answers(id));
        let loses = plan.lost_writes && self.state.was_live() && !self.state.lost_writes();
        if !silent.is_empty() && waited <= if loses { KEEPER_LIMIT } else { MISSING_LIMIT } {
            let why = if loses { ", and the others have lost what was not flushed" } else { "" };
            let reason = format!("{silent} of the view do not answer{why}");
            return Err(OpenError::Missing { reason, members });
        }
        let view = View { id: ViewId { generation, number: 1 }, members: plan.members };
        let mut change = Change::new(plan.basis.honoured, view);
        let mut reached = reached;
        for one in &mut reached {
            one.is_blank = plan.blank.contains(self.spec.replicas[one.index].replica);
        }
        self.ask_the_arbiter(&greeter, &mut change, &mut reached, &members)?;
        if plan.lost_writes {
            // Before anything is proposed: what follows makes the members look as if nothing had happened.
            self.note_lost_writes()?;
        }
        let proposal = self.propose(reached, change);
        if let Some(holder) = proposal.deposed_by {
            return Err(OpenError::Fatal(EngineError::Deposed { generation, holder }));
        }
        if proposal.change.progress() != Progress::Through || proposal.kept.len() != view.members.len() {
            let refused = proposal.refused.join("; ");
            return Err(OpenError::Torn(format!("view {view} is not through: {refused}")));
        }
        let proposed_ms = begin.elapsed().as_millis();
        let opened = self.finish(proposal, &greeter, view, members)?;
        let (volume, connected_ms) = (&self.spec.volume, begin.elapsed().as_millis());
        let (dirty, members) = (opened.dirty.len(), &opened.view.members);
        tracing::info!(%volume, %generation, %members, dirty, reached_ms, proposed_ms, connected_ms, "opened");
        Ok(opened)
    }

    fn note_lost_writes(&mut self) -> Result<(), OpenError> {
        self.state.note_lost_writes()?;
        let lost_writes = self.state.lost_writes();
        if lost_writes {
            tracing::error!(volume = %self.spec.volume, "the hosts of all members were restarted while data was not durable: writes may be gone that the user of the device was told are stored, so every request is refused until the volume is attached anew");
        }
        status::publish(self.publisher, |engine| engine.lost_writes = lost_writes);
        Ok(())
    }

    fn granted(&self) -> Option<View> {
        [self.spec.granted, self.state.granted()].into_iter().flatten().max_by_key(|view| view.id)
    }

    /// Has every replica that was reached and is not blank store the view, and asks the members which sets of regions
    /// they keep.
    fn propose(&self, mut reached: Vec<Reached>, change: Change) -> Proposal {
        let spec: &EngineSpec = self.spec;
        reached.retain(|one| !one.is_blank);
        let Change { target, honoured, .. } = &change;
        let answers: Vec<_> = thread::scope(|scope| {
            let ask = |one| scope.spawn(|| propose_to(spec, one, *target, honoured));
            let asked: Vec<_> = reached.iter_mut().map(ask).collect();
            asked.into_iter().map(|thread| thread.join().expect("a panic ends the process")).collect()
        });
        let mut proposal =
            Proposal { change, reached: Vec::new(), kept: Vec::new(), refused: Vec::new(), deposed_by: None };
        for (one, answer) in reached.into_iter().zip(answers) {
            proposal.take(spec, one, answer);
        }
        proposal
    }

    /// Where those who were reached are exactly half of a view, waits until the arbiter has granted the new one.
    ///
    /// Nothing is proposed before: what one half has stored and is never granted would stand in the way of the other
    /// half for ever.
    fn ask_the_arbiter(
        &mut self,
        greeter: &Greeter,
        change: &mut Change,
        reached: &mut [Reached],
        members: &[MemberStatus],
    ) -> Result<(), OpenError> {
        let asked = reached.iter().filter(|one| !one.is_blank);
        let stored = Members::new(asked.map(|one| self.spec.replicas[one.index].replica));
        let stored = stored.unwrap_or_default(); // there are no more replicas than a set can have
        if !change.would_need_grant(&stored) {
            return Ok(());
        }
        let (view, honoured) = (change.target, change.honoured.clone());
        let message = format!("waiting for the arbiter's grant of view {view}: the others do not answer");
        tracing::warn!(volume = %self.spec.volume, %view, "only half of the replicas are left: frozen until the arbiter grants the view or another one is back");
        status::publish(self.publisher, |engine| {
            engine.phase = EnginePhase::Frozen;
            engine.message = message;
            engine.members = members.to_vec();
            engine.grant_wanted = Some(GrantWanted { view, honoured, stored });
        });
        let result = self.await_grant(greeter, change, reached);
        status::publish(self.publisher, |engine| {
            engine.phase = EnginePhase::Starting;
            engine.message.clear();
            engine.grant_wanted = None;
        });
        result
    }

    /// Where another replica is back, or another view was granted, the start begins again with the next generation:
    /// a grant that comes late is for the view that was asked for, and never for another of its number.
    fn await_grant(
        &mut self,
        greeter: &Greeter,
        change: &mut Change,
        reached: &mut [Reached],
    ) -> Result<(), OpenError> {
        let mut search = None;
        let mut pinged = Instant::now();
        loop {
            match self.wait(RETRY_INTERVAL)? {
                Some(view) if view == change.target => {
                    change.granted();
                    return Ok(());
                }
                Some(view) if view.id > change.honoured.committed.id => {
                    return Err(OpenError::Torn(format!(
                        "the arbiter has granted view {view}, which this start does not honour"
                    )));
                }
                _ => {}
            }
            let running = search.get_or_insert_with(|| self.search(greeter, reached));
            match running.try_recv() {
                Ok(replica) => return Err(OpenError::Torn(format!("{replica} is back"))),
                Err(mpsc::TryRecvError::Disconnected) => search = None,
                Err(mpsc::TryRecvError::Empty) => {}
            }
            if pinged.elapsed() >= PING_INTERVAL {
                pinged = Instant::now();
                ping(self.spec, reached)?;
            }
        }
    }

    /// Greets those who have not answered, on threads of their own; who answers comes out.
    fn search(&self, greeter: &Greeter, reached: &[Reached]) -> Receiver<ReplicaId> {
        let (sender, found) = mpsc::channel();
        let is_reached = |index: usize| reached.iter().any(|one| one.index == index);
        for (index, endpoint) in self.spec.replicas.iter().cloned().enumerate() {
            if !is_reached(index) {
                let (sender, greeter) = (sender.clone(), greeter.clone());
                thread::spawn(move || {
                    if greeter.greet(&endpoint, 0).is_ok() {
                        // Nobody listens any more where the grant has come.
                        let _ = sender.send(endpoint.replica);
                    }
                });
            }
        }
        found
    }

    /// The view is through: marks it as committed, and connects every queue to the members.
    fn finish(
        &self,
        proposal: Proposal,
        greeter: &Greeter,
        view: View,
        mut members: Vec<MemberStatus>,
    ) -> Result<Opened, OpenError> {
        let spec: &EngineSpec = self.spec;
        let regions = Regions::of(spec.size_bytes).count();
        let combined = combine(&proposal.kept, spec.replicas.len(), regions);
        let stamp = combined.first_stamp(proposal.reached.iter().map(|one| one.welcome.stamp));
        let Combined { dirty, missed, stamps, is_complete, .. } = combined;
        let honoured = &proposal.change.honoured;
        let connected: Vec<_> = thread::scope(|scope| {
            let connect = |one| scope.spawn(move || connect_queues(spec, one, greeter, view, honoured));
            let threads: Vec<_> = proposal.reached.into_iter().map(connect).collect();
            threads.into_iter().map(|thread| thread.join().expect("a panic ends the process")).collect()
        });
        let mut connections: Vec<Vec<Connection>> = spec.replicas.iter().map(|_| Vec::new()).collect();
        for result in connected {
            let (index, opened) = result.map_err(OpenError::Torn)?;
            connections[index] = opened;
        }
        for member in &mut members {
            let in_view = view.members.contains(member.replica);
            member.mode = if in_view { MemberMode::Member } else { MemberMode::Failed };
            if !in_view {
                member.away_since_ms = Some(status::now_ms());
                if member.message.is_empty() {
                    "it is not in the view: it is brought up as soon as it answers"
                        .clone_into(&mut member.message);
                }
            }
        }
        let last_view = honoured.committed;
        Ok(Opened {
            view,
            last_view,
            connections,
            members,
            size_bytes: spec.size_bytes,
            dirty,
            missed,
            is_missed_complete: is_complete,
            stamp,
            missed_stamps: stamps,
            expand_to_bytes: self.expand_to_bytes,
            lost_writes: self.state.lost_writes(),
        })
    }
}

impl Proposal {
    /// Takes the answer of a replica to the proposal.
    fn take(&mut self, spec: &EngineSpec, one: Reached, answer: Result<Option<Kept>, ConnectError>) {
        let replica = spec.replicas[one.index].replica;
        match answer {
            Ok(kept) => {
                self.change.stored(replica);
                self.kept.extend(kept);
                self.reached.push(one);
            }
            Err(ConnectError::Deposed { holder, message }) => {
                self.refused.push(format!("{replica}: {message}"));
                self.deposed_by = self.deposed_by.max(Some(holder));
            }
            Err(error) => self.refused.push(format!("{replica}: {error}")),
        }
    }
}

/// Keeps the connections from being closed for silence.
fn ping(spec: &EngineSpec, reached: &mut [Reached]) -> Result<(), OpenError> {
    for one in reached {
        let replica = spec.replicas[one.index].replica;
        one.connection.ping().map_err(|error| OpenError::Torn(format!("{replica}: {error}")))?;
    }
    Ok(())
}

/// Fences all replicas at once, and waits for each until it has answered or its time is over: whoever is
/// left out here has to be brought up later.
fn reach(
    replicas: &[ReplicaEndpoint],
    greeter: &Greeter,
) -> Result<(Vec<Reached>, Vec<MemberStatus>), OpenError> {
    let (sender, answers) = mpsc::channel();
    for (index, endpoint) in replicas.iter().cloned().enumerate() {
        let (sender, greeter) = (sender.clone(), greeter.clone());
        thread::spawn(move || {
            // The receiver has gone when somebody else's answer was fatal: then this one does not matter.
            let _ = sender.send((index, greeter.greet(&endpoint, 0)));
        });
    }
    drop(sender);
    let mut reached: Vec<Reached> = Vec::new();
    let mut members: Vec<MemberStatus> = replicas.iter().map(status::connecting).collect();
    for (index, answer) in answers {
        match answer {
            Ok((connection, welcome)) => {
                reached.push(Reached { index, connection, welcome, is_blank: false });
            }
            Err(ConnectError::Deposed { holder, .. }) => {
                let generation = greeter.generation;
                return Err(OpenError::Fatal(EngineError::Deposed { generation, holder }));
            }
            Err(error) => {
                members[index].mode = MemberMode::Failed;
                members[index].message = error.to_string();
            }
        }
    }
    reached.sort_unstable_by_key(|one| one.index);
    Ok((reached, members))
}

fn witnesses(spec: &EngineSpec, reached: &[Reached]) -> Vec<Witness> {
    let witness = |one: &Reached| Witness {
        replica: spec.replicas[one.index].replica,
        report: one.welcome.report.clone(),
        rebuilding: one.welcome.rebuilding,
        lost_cache: one.welcome.lost_cache,
        stamp: one.welcome.stamp,
    };
    reached.iter().map(witness).collect()
}

/// Shows and logs who is no member although the views say so.
fn note_unfit(spec: &EngineSpec, members: &mut [MemberStatus], unfit: &[(ReplicaId, String)]) {
    for (replica, why) in unfit {
        tracing::error!(volume = %spec.volume, %replica, why, "a replica of the view is not taken as a member");
        for member in members.iter_mut().filter(|member| member.replica == *replica) {
            member.message.clone_from(why);
        }
    }
}

fn with_unfit(cannot: &impl std::fmt::Display, unfit: &[(ReplicaId, String)]) -> String {
    let others: String = unfit.iter().map(|(replica, why)| format!("; {replica}: {why}")).collect();
    format!("{cannot}{others}")
}

/// Has one replica store the view; a member is asked which sets of regions it keeps after that, as it may begin
/// some by storing it.
fn propose_to(
    spec: &EngineSpec,
    one: &mut Reached,
    view: View,
    honoured: &ReplicaReport,
) -> Result<Option<Kept>, ConnectError> {
    let me = spec.replicas[one.index].replica;
    let wanted = accounts::wanted(spec);
    accounts::make_room(&mut one.connection, (me, &one.welcome), &wanted, &view, honoured)?;
    one.connection.propose(view, honoured)?;
    if !view.members.contains(spec.replicas[one.index].replica) {
        return Ok(None);
    }
    let regions = Regions::of(spec.size_bytes);
    let intent = one.connection.regions(RegionsOf::Intent, regions)?;
    let intent = intent.map_or_else(|| RegionSet::full(regions.count()), |(set, _)| set);
    let mut missed = Vec::with_capacity(spec.replicas.len());
    for endpoint in &spec.replicas {
        missed.push(if view.members.contains(endpoint.replica) {
            None
        } else {
            let account = one.connection.regions(RegionsOf::Missed(endpoint.replica), regions)?;
            account.map(|(missed, stamp)| Account { missed, stamp })
        });
    }
    Ok(Some(Kept { intent, stamp: one.welcome.stamp, missed }))
}

/// Marks the view as committed, and opens the connections of a member: the one of queue 0 is there, those of the
/// others are made now.
fn connect_queues(
    spec: &EngineSpec,
    mut one: Reached,
    greeter: &Greeter,
    view: View,
    honoured: &ReplicaReport,
) -> Result<(usize, Vec<Connection>), String> {
    let endpoint = &spec.replicas[one.index];
    // A mark that gets lost only leaves more to honour at the next start, and accounts that are kept in vain until then.
    if one.connection.commit(view, honoured).is_ok() {
        // It knows no other view now.
        let gone = accounts_to_forget(&one.welcome.tracks, &accounts::wanted(spec), [&view]);
        if let Err(error) = accounts::forget(&mut one.connection, endpoint.replica, &gone) {
            tracing::warn!(volume = %spec.volume, replica = %endpoint.replica, %gone, %error, "a replica still counts what replicas miss that are gone");
        }
    }
    if !view.members.contains(endpoint.replica) {
        return Ok((one.index, Vec::new()));
    }
    let mut connections = vec![one.connection];
    for queue in 1..spec.queues {
        let opened = greeter.greet(endpoint, queue);
        let (connection, _) = opened.map_err(|error| format!("{}: {error}", endpoint.replica))?;
        connections.push(connection);
    }
    Ok((one.index, connections))
}
