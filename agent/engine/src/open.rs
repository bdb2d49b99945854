//! Opens a volume: fences the replicas, plans the first view, has the replicas store it, and reads the
//! regions to resync.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use shorthorn_control::{
    EnginePhase, EngineSpec, GrantWanted, MemberMode, MemberStatus, ProcessCommand, Publisher,
    ReplicaEndpoint,
};
use shorthorn_recovery::{
    Grant, NotOpen, OTHER_RUN, Offenders, OpenRequest, OpeningEngine, Proposal, conclude, propose_to,
};
use shorthorn_types::{Members, Regions, ReplicaId, ReplicaReport, View};
use shorthorn_views::{FencedReplica, MemberSets, NoPlan, StartPlan, ViewChange};

use crate::connection::{ConnectError, ReplicaConnection, finish};
use crate::connector::ReplicaConnector;
use crate::error::EngineError;
use crate::events::{Ending, MainEvent};
use crate::state::EngineState;
use crate::status;

/// The time limit for members that do not answer, if the others are enough: a process that is being restarted
/// is back by then.
const MISSING_LIMIT: Duration = Duration::from_secs(5);
/// The time limit for them if the others have lost writes that a user counts on: one of the missing replicas
/// may have kept them.
const MEMBER_LIMIT: Duration = Duration::from_secs(30);
/// The pause between two attempts to reach missing replicas. The first pauses are shorter, because a replica
/// that restarts answers soon.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);
const FIRST_RETRY: Duration = Duration::from_millis(20);
/// The time limit for a replica to store a view and to list its sets of regions. The engine takes no command
/// meanwhile, and the other replicas close connections that are silent for a minute.
const PROPOSAL_LIMIT: Duration = Duration::from_secs(45);
/// The interval of PINGs while the engine waits for the arbiter or a replica. The other replicas close
/// connections that are silent for a minute.
const PING_INTERVAL: Duration = Duration::from_secs(10);

/// A volume that may be served, with the status of its replicas.
#[derive(Debug)]
pub struct OpenedVolume {
    /// The result of the attempt, with a connection per queue for each member, in the order of the replicas
    /// in the spec.
    pub volume: shorthorn_recovery::Opened<Vec<Vec<ReplicaConnection>>>,
    pub members: Vec<MemberStatus>,
    pub size_bytes: u64,
    /// A new size that was requested meanwhile.
    pub expand_to_bytes: Option<u64>,
    /// See [`EngineState::lost_writes`].
    pub lost_writes: bool,
}

impl OpenedVolume {
    /// Returns the bytes to resync before they are served, because the members may differ there.
    pub fn unequal_bytes(&self) -> Option<u64> {
        let region_bytes = Regions::of(self.size_bytes).region_bytes();
        let bytes = u64::from(self.volume.dirty.len()) * region_bytes;
        (bytes > 0 && self.volume.view.members.len() > 1).then_some(bytes)
    }
}

/// The result of waiting for the volume.
#[derive(Debug)]
pub enum OpenResult {
    /// The volume may be served.
    Open(Box<OpenedVolume>),
    /// The process has to end before the volume is open.
    Ended(Ending),
}

/// The reason why an attempt to open the volume failed.
#[derive(Debug)]
enum OpenError {
    /// Every further attempt would fail: a newer engine holds the volume, or this host fails.
    Fatal(EngineError),
    /// The process has to end.
    Ended(Ending),
    /// A later attempt may succeed; nothing was proposed.
    Missing { reason: String, members: Vec<MemberStatus> },
    /// A later attempt may succeed, with a new generation: a view was proposed, and some replica may have
    /// stored it.
    Aborted { reason: String, members: Vec<MemberStatus> },
}

/// The inputs of opening a volume.
pub struct Opener<'a> {
    pub spec: &'a mut EngineSpec,
    pub state: &'a mut EngineState,
    pub publisher: &'a Publisher,
    pub events: &'a Receiver<MainEvent>,
    /// A new size that was requested, for the next attempt: each has one size from its beginning to its end.
    pub expand_to_bytes: Option<u64>,
}

impl Opener<'_> {
    /// Opens the volume; waits for replicas that are missing, and for the arbiter.
    ///
    /// # Errors
    /// An error that a further attempt cannot repair.
    pub fn run(mut self) -> Result<OpenResult, EngineError> {
        let begin = Instant::now();
        let mut pause = FIRST_RETRY;
        let mut reported = String::new();
        let mut offenders = Offenders::default();
        loop {
            self.take_size();
            match self.attempt(begin, &mut offenders) {
                Ok(opened) => return Ok(OpenResult::Open(Box::new(opened))),
                Err(OpenError::Fatal(error)) => return Err(error),
                Err(OpenError::Ended(ending)) => return Ok(OpenResult::Ended(ending)),
                Err(OpenError::Missing { reason, members }) => {
                    if reason != reported {
                        tracing::warn!(volume = %self.spec.volume, "the volume waits: {reason}");
                        reported.clone_from(&reason);
                    }
                    status::publish(self.publisher, |engine| {
                        engine.message = format!("waiting: {reason}");
                        engine.members = members;
                    });
                }
                Err(OpenError::Aborted { reason, members }) => {
                    tracing::warn!(
                        volume = %self.spec.volume, reason, "opening failed half-way, trying again"
                    );
                    let generation = self.state.next_generation()?;
                    status::publish(self.publisher, |engine| {
                        engine.message = reason;
                        engine.members = members;
                        engine.generation = generation;
                    });
                }
            }
            match self.wait(pause.max(offenders.pause())) {
                Ok(_) => {}
                Err(StopReason::Ended(ending)) => return Ok(OpenResult::Ended(ending)),
                Err(StopReason::Fatal(error)) => return Err(error),
            }
            pause = (pause * 2).min(RETRY_INTERVAL);
        }
    }

    fn take_size(&mut self) {
        if let Some(size_bytes) = self.expand_to_bytes.take().filter(|size| *size > self.spec.size_bytes) {
            tracing::info!(volume = %self.spec.volume, size_bytes, "the next attempt uses the new size");
            self.spec.size_bytes = size_bytes;
        }
    }

    /// Waits at most `pause` for a command, a grant or a signal.
    fn wait(&mut self, pause: Duration) -> Result<Wakeup, StopReason> {
        let command = match self.events.recv_timeout(pause) {
            Ok(MainEvent::Terminate) => return Err(StopReason::Ended(Ending::Terminate)),
            Ok(MainEvent::ControlCommand(command)) => command,
            // The queues do not run yet, so no other event can come.
            Ok(_) | Err(RecvTimeoutError::Timeout) => return Ok(Wakeup::Nothing),
            Err(RecvTimeoutError::Disconnected) => return Err(StopReason::Ended(Ending::Terminate)),
        };
        let volume = &self.spec.volume;
        match command {
            ProcessCommand::Stop => return Err(StopReason::Ended(Ending::Stop)),
            ProcessCommand::Handover => return Err(StopReason::Ended(Ending::Terminate)),
            ProcessCommand::Grant { view } if view.id.generation.attach <= self.spec.attach => {
                tracing::info!(%volume, %view, "the arbiter has granted a view");
                self.state.keep_grant(view)?;
                return Ok(Wakeup::Grant(view));
            }
            ProcessCommand::Replicas { replicas } if replicas != self.spec.replicas => {
                match status::check_replicas(&replicas) {
                    Ok(()) => {
                        self.spec.replicas = replicas;
                        return Ok(Wakeup::Replicas);
                    }
                    Err(reason) => tracing::warn!(%volume, reason, "a command is ignored"),
                }
            }
            ProcessCommand::Replicas { .. } => {}
            ProcessCommand::Limits { limits } => self.spec.rebuild = limits,
            ProcessCommand::Expand { size_bytes } => {
                self.expand_to_bytes = self.expand_to_bytes.max(Some(size_bytes));
                if size_bytes > self.spec.size_bytes {
                    return Ok(Wakeup::Size);
                }
            }
            command => tracing::warn!(%volume, ?command, "a command is ignored: the volume is not open yet"),
        }
        Ok(Wakeup::Nothing)
    }

    /// Makes one attempt. The first one began at `first`.
    fn attempt(&mut self, first: Instant, offenders: &mut Offenders) -> Result<OpenedVolume, OpenError> {
        let begin = Instant::now();
        let generation = self.state.generation();
        let request = OpenRequest {
            generation,
            replicas: self.spec.replicas.iter().map(|endpoint| endpoint.replica).collect(),
            size_bytes: self.spec.size_bytes,
            granted: [self.spec.granted, self.state.granted()]
                .into_iter()
                .flatten()
                .max_by_key(|view| view.id),
            missing_limit_ms: millis(MISSING_LIMIT),
            member_limit_ms: millis(MEMBER_LIMIT),
        };
        let mut attempt = OpenAttempt {
            connector: ReplicaConnector::new(self.spec, generation),
            endpoints: self.spec.replicas.clone(),
            members: self.spec.replicas.iter().map(status::connecting).collect(),
            first,
            tried_until: None,
            reached_ms: 0,
            search: None,
            pinged: begin,
            opener: self,
        };
        let opened = finish(shorthorn_recovery::open(&mut attempt, &request, offenders));
        let OpenAttempt { members, reached_ms, .. } = attempt;
        let opened = opened.map_err(|error| match error {
            NotOpen::Waiting(reason) => OpenError::Missing { reason, members: members.clone() },
            NotOpen::Aborted { reason, .. } => OpenError::Aborted { reason, members: members.clone() },
            NotOpen::Deposed(holder) => OpenError::Fatal(EngineError::Deposed { generation, holder }),
            NotOpen::Stopped(StopReason::Fatal(error)) => OpenError::Fatal(error),
            NotOpen::Stopped(StopReason::Ended(ending)) => OpenError::Ended(ending),
        })?;
        let (name, connected_ms) = (&self.spec.volume, millis(begin.elapsed()));
        let (dirty, in_view) = (opened.dirty.len(), &opened.view.members);
        tracing::info!(
            volume = %name, %generation, members = %in_view, dirty, reached_ms, connected_ms, "opened"
        );
        Ok(self.opened(opened, members))
    }

    fn opened(
        &self,
        volume: shorthorn_recovery::Opened<Vec<Vec<ReplicaConnection>>>,
        mut members: Vec<MemberStatus>,
    ) -> OpenedVolume {
        for member in &mut members {
            let in_view = volume.view.members.contains(member.replica);
            member.mode = if in_view { MemberMode::Member } else { MemberMode::Failed };
            if !in_view {
                member.away_since_ms = Some(status::now_ms());
                if member.message.is_empty() {
                    "not in the view: the replica is rebuilt as soon as it answers"
                        .clone_into(&mut member.message);
                }
            }
        }
        OpenedVolume {
            volume,
            members,
            size_bytes: self.spec.size_bytes,
            expand_to_bytes: self.expand_to_bytes,
            lost_writes: self.state.lost_writes(),
        }
    }
}

/// An event that ends a wait.
enum Wakeup {
    /// The arbiter has granted this view.
    Grant(View),
    /// The spec has other replicas, or other addresses of them.
    Replicas,
    /// The spec has a larger size.
    Size,
    Nothing,
}

/// The reason why the process does not open the volume.
#[derive(Debug)]
enum StopReason {
    /// An operation of this host failed.
    Fatal(EngineError),
    /// The process has to end.
    Ended(Ending),
}

impl From<EngineError> for StopReason {
    fn from(error: EngineError) -> StopReason {
        StopReason::Fatal(error)
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// An attempt to open the volume, driven by [`shorthorn_recovery`].
struct OpenAttempt<'a, 'b> {
    opener: &'a mut Opener<'b>,
    connector: ReplicaConnector,
    /// The replicas of the spec when it began.
    endpoints: Vec<ReplicaEndpoint>,
    members: Vec<MemberStatus>,
    /// The time at which the first attempt began.
    first: Instant,
    /// The time at which the first unreached replica was given up.
    tried_until: Option<Instant>,
    reached_ms: u64,
    /// The replicas that answer late, while the engine waits for the arbiter.
    search: Option<Receiver<ReplicaId>>,
    pinged: Instant,
}

type Reached = shorthorn_recovery::Reached<ReplicaConnection>;

impl OpeningEngine for OpenAttempt<'_, '_> {
    type Link = ReplicaConnection;
    /// A connection per queue for each member, in the order of the replicas in the spec.
    type Connections = Vec<Vec<ReplicaConnection>>;
    type Stop = StopReason;

    /// Waits for each replica until it has answered or its time is over: a replica that is left out has to be
    /// rebuilt later.
    async fn reach(&mut self) -> Result<Vec<Reached>, NotOpen<StopReason>> {
        let begin = Instant::now();
        let (sender, answers) = mpsc::channel();
        for (index, endpoint) in self.endpoints.iter().cloned().enumerate() {
            let (sender, connector) = (sender.clone(), self.connector.clone());
            thread::spawn(move || {
                let answer = connector.connect(&endpoint, 0);
                // The receiver is gone if the answer of another replica was fatal. This answer does not
                // matter then.
                let _ = sender.send((index, answer, Instant::now()));
            });
        }
        drop(sender);
        let mut reached = Vec::new();
        loop {
            let (index, answer, at) = match answers.recv_timeout(PING_INTERVAL) {
                Ok(answer) => answer,
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    self.ping_reached(&mut reached);
                    continue;
                }
            };
            match answer {
                Ok((link, welcome)) => {
                    let replica = self.endpoints[index].replica;
                    reached.push((index, Reached { replica, link, welcome }));
                }
                Err(ConnectError::Deposed { holder, .. }) => return Err(NotOpen::Deposed(holder)),
                Err(error) => {
                    self.tried_until = Some(self.tried_until.map_or(at, |before| before.min(at)));
                    self.members[index].mode = MemberMode::Failed;
                    self.members[index].message = error.to_string();
                }
            }
        }
        reached.sort_unstable_by_key(|(index, _)| *index);
        self.reached_ms = millis(begin.elapsed());
        Ok(reached.into_iter().map(|(_, one)| one).collect())
    }

    /// Shows and logs the replicas that are members by the views but not of the first view.
    fn planned(&mut self, _: &[FencedReplica], plan: Result<&StartPlan, &NoPlan>) {
        for (replica, why) in plan.map_or_else(|none| &none.unfit, |plan| &plan.unfit) {
            let volume = &self.opener.spec.volume;
            tracing::error!(%volume, %replica, why, "a replica of the view does not become a member");
            let (replica, why) = (*replica, why.clone());
            self.show(replica, why);
        }
    }

    fn offended(&mut self, replica: ReplicaId, reason: &str) {
        let volume = &self.opener.spec.volume;
        tracing::warn!(%volume, %replica, reason, "a replica accepts the engine and then fails its requests");
        self.show(replica, format!("attempts to open the volume fail because of this replica: {reason}"));
    }

    fn leaves_out(&mut self, replica: ReplicaId, reason: &str) {
        let volume = &self.opener.spec.volume;
        tracing::warn!(
            %volume, %replica, reason,
            "opening the volume without a replica that made attempts fail"
        );
        self.show(
            replica,
            format!("the volume is opened without it, as it has made attempts fail: {reason}"),
        );
    }

    /// Returns the wait for the replicas that refused at once and may be back by now. A hanging replica does
    /// not prolong it.
    fn waited_ms(&self) -> u64 {
        let until = self.tried_until.unwrap_or_else(Instant::now);
        millis(until.saturating_duration_since(self.first))
    }

    fn has_user(&self) -> bool {
        self.opener.state.was_live() && !self.opener.state.lost_writes()
    }

    fn ask_arbiter(&mut self, change: &ViewChange, stored: Members) {
        let (view, honoured) = (change.target, change.honoured.clone());
        let message = format!("waiting for the arbiter's grant of view {view}: the others do not answer");
        tracing::warn!(
            volume = %self.opener.spec.volume, %view,
            "only half of the replicas are left: frozen until the arbiter grants the view or another is back"
        );
        status::publish(self.opener.publisher, |engine| {
            engine.phase = EnginePhase::Frozen;
            engine.message = message;
            engine.members = self.members.clone();
            engine.grant_wanted = Some(GrantWanted { view, honoured, stored });
        });
    }

    async fn next_grant(&mut self, reached: &mut [Reached]) -> Result<Grant, NotOpen<StopReason>> {
        match self.opener.wait(RETRY_INTERVAL).map_err(NotOpen::Stopped)? {
            Wakeup::Grant(view) => return Ok(Grant::Answered(view)),
            Wakeup::Replicas => return Err(NotOpen::aborted("the volume has other replicas now")),
            // Only an engine that knows the larger size accepts a replica that another engine has enlarged.
            Wakeup::Size => return Err(NotOpen::aborted("the volume has a new size now")),
            Wakeup::Nothing => {}
        }
        if self.search.is_none() {
            self.search = Some(self.search_others(reached));
        }
        match self.search.as_ref().map(Receiver::try_recv) {
            Some(Ok(replica)) => return Ok(Grant::Back(replica)),
            Some(Err(mpsc::TryRecvError::Disconnected)) => self.search = None,
            Some(Err(mpsc::TryRecvError::Empty)) | None => {}
        }
        if self.pinged.elapsed() >= PING_INTERVAL {
            self.pinged = Instant::now();
            for one in reached {
                one.link.ping().map_err(|error| NotOpen::aborted_by(one.replica, error))?;
            }
        }
        Ok(Grant::Nothing)
    }

    fn ask_no_more(&mut self) {
        status::publish(self.opener.publisher, |engine| {
            engine.phase = EnginePhase::Starting;
            engine.message.clear();
            engine.grant_wanted = None;
        });
    }

    fn record_start(&mut self, honoured: &ReplicaReport, lost_writes: bool) -> Result<(), StopReason> {
        if self.opener.state.confirm_device(honoured)? {
            let volume = &self.opener.spec.volume;
            let newest = honoured.committed;
            tracing::error!(%volume, %newest, "requests that the device holds back fail: they are too old");
        }
        if !lost_writes {
            return Ok(());
        }
        let state = &mut *self.opener.state;
        state.record_lost_writes()?;
        let lost_writes = state.lost_writes();
        if lost_writes {
            tracing::error!(volume = %self.opener.spec.volume, "the hosts of all members restarted while \
             data was not durable: acknowledged writes may be gone. Every request fails until the volume is \
             attached again");
        }
        status::publish(self.opener.publisher, |engine| engine.lost_writes = lost_writes);
        Ok(())
    }

    async fn propose(&mut self, to: Vec<Reached>, proposal: &Proposal) -> Vec<Proposed> {
        let propose = |mut one: Reached| {
            one.link.set_deadline(Some(Instant::now() + PROPOSAL_LIMIT));
            let answer = finish(propose_to(&mut one, proposal));
            one.link.set_deadline(None);
            (one, answer)
        };
        at_once(to, propose)
    }

    async fn connect(
        &mut self,
        reached: Vec<Reached>,
        proposal: &Proposal,
    ) -> Result<Vec<Vec<ReplicaConnection>>, NotOpen<StopReason>> {
        let (spec, connector) = (&*self.opener.spec, &self.connector);
        let connected = at_once(reached, |one| connect_queues(spec, one, connector, proposal));
        let mut connections: Vec<Vec<ReplicaConnection>> =
            self.endpoints.iter().map(|_| Vec::new()).collect();
        for result in connected {
            let (replica, opened) =
                result.map_err(|(replica, reason)| NotOpen::aborted_by(replica, reason))?;
            let index = self.endpoints.iter().position(|endpoint| endpoint.replica == replica);
            if let Some(place) = index.and_then(|index| connections.get_mut(index)) {
                *place = opened;
            }
        }
        Ok(connections)
    }
}

impl OpenAttempt<'_, '_> {
    /// Pings the replicas that have answered, because they close silent connections while the engine waits
    /// for another one. A replica that does not answer any more is no longer reached.
    fn ping_reached(&mut self, reached: &mut Vec<(usize, Reached)>) {
        let members = &mut self.members;
        reached.retain_mut(|(index, one)| match one.link.ping() {
            Ok(()) => true,
            Err(error) => {
                members[*index].mode = MemberMode::Failed;
                members[*index].message = error.to_string();
                false
            }
        });
    }
}

/// A replica and its answer to a proposal.
type Proposed = (Reached, Result<Option<MemberSets>, ConnectError>);

impl OpenAttempt<'_, '_> {
    /// Shows a message beside a replica.
    fn show(&mut self, replica: ReplicaId, message: String) {
        if let Some(member) = self.members.iter_mut().find(|member| member.replica == replica) {
            member.message = message;
        }
    }

    /// Does the handshake with the replicas that have not answered, each on its own thread. The receiver
    /// yields those that answer.
    fn search_others(&self, reached: &[Reached]) -> Receiver<ReplicaId> {
        let (sender, found) = mpsc::channel();
        let is_reached = |replica: ReplicaId| reached.iter().any(|one| one.replica == replica);
        for endpoint in self.endpoints.iter().filter(|endpoint| !is_reached(endpoint.replica)).cloned() {
            let (sender, connector) = (sender.clone(), self.connector.clone());
            thread::spawn(move || {
                if connector.connect(&endpoint, 0).is_ok() {
                    // The receiver is gone once the grant has come.
                    let _ = sender.send(endpoint.replica);
                }
            });
        }
        found
    }
}

/// Runs the same work for each replica on its own thread, and waits for all.
fn at_once<T: Send>(reached: Vec<Reached>, act: impl Fn(Reached) -> T + Sync) -> Vec<T> {
    let act = &act;
    thread::scope(|scope| {
        let threads: Vec<_> = reached.into_iter().map(|one| scope.spawn(move || act(one))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a panic ends the process")).collect()
    })
}

/// Makes a replica mark the view as committed, and opens the connections of a member. The connection of queue
/// 0 exists, and those of the other queues are made now. Fails with the replica and the reason.
fn connect_queues(
    spec: &EngineSpec,
    mut one: Reached,
    connector: &ReplicaConnector,
    proposal: &Proposal,
) -> Result<(ReplicaId, Vec<ReplicaConnection>), (ReplicaId, String)> {
    let replica = one.replica;
    if let Err(error) = finish(conclude(&mut one, proposal)) {
        tracing::warn!(
            volume = %spec.volume, %replica, tracks = %one.welcome.tracks, %error,
            "a replica does not know that the view is committed, or still keeps out-of-sync sets of replicas \
             that are gone"
        );
    }
    if !proposal.view.members.contains(replica) {
        return Ok((replica, Vec::new()));
    }
    let endpoint = spec.replicas.iter().find(|endpoint| endpoint.replica == replica);
    let endpoint = endpoint.ok_or_else(|| (replica, "not a replica of the volume".to_owned()))?;
    let mut connections = vec![one.link];
    for queue in 1..spec.queues {
        let opened = connector.connect(endpoint, queue);
        let (connection, welcome) = opened.map_err(|error| (replica, error.to_string()))?;
        if welcome.run != one.welcome.run {
            return Err((replica, OTHER_RUN.to_owned()));
        }
        connections.push(connection);
    }
    Ok((replica, connections))
}
