//! Opens a volume: fences the replicas, plans the first view, has it stored, and learns which regions have to
//! be copied.

use shorthorn_types::{
    Generation, Members, RegionSet, Regions, RegionsOf, ReplicaId, ReplicaReport, View, ViewId,
};
use shorthorn_views::{
    ChangeProgress, CombinedSets, FencedReplica, MemberSets, NoPlan, OutOfSyncSet, StartPlan, ViewChange,
    combine_sets, out_of_sync_sets_to_forget, plan,
};
use shorthorn_wire::Welcome;

use crate::offenders::{AttemptPart, Offenders};
use crate::out_of_sync_sets::{forget, make_room};
use crate::replica_link::{LinkError, ReplicaLink, regions, regions_or_all};

/// The maximum number of calls of [`OpeningEngine::next_grant`] in an attempt that leaves replicas out. One
/// of them may be well again, and then no grant is needed. The engine waits for a quarter of a second in
/// each.
const GRANT_WAITS_MAX: u32 = 20;

/// The input of one attempt to open the volume. It stays the same until the attempt has ended.
#[derive(Clone, Debug)]
pub struct OpenRequest {
    /// The generation of the attempt.
    pub generation: Generation,
    /// The replicas that the volume is to have, in the order of their numbers.
    pub replicas: Vec<ReplicaId>,
    /// The size of the volume in bytes.
    pub size_bytes: u64,
    /// The newest grant of the arbiter that is known.
    pub granted: Option<View>,
    /// The time limit for members that do not answer properly, if the others are enough, in milliseconds.
    pub missing_limit_ms: u64,
    /// The same if the others have lost writes that a user counts on: one of the missing may have kept them.
    pub member_limit_ms: u64,
}

/// A replica that answers, fenced.
#[derive(Debug)]
pub struct Reached<L> {
    /// The identity that it stated in its welcome.
    pub replica: ReplicaId,
    /// The connection of queue 0.
    pub link: L,
    /// The answer of the replica.
    pub welcome: Welcome,
}

/// The proposed first view of this engine.
#[derive(Clone, Debug)]
pub struct Proposal {
    /// The first view of this generation.
    pub view: View,
    /// The views that it honours.
    pub honoured: ReplicaReport,
    /// See [`OpenRequest::replicas`].
    pub replicas: Vec<ReplicaId>,
    /// See [`OpenRequest::size_bytes`].
    pub size_bytes: u64,
}

impl Proposal {
    /// Returns the replicas that the volume is to have. A set can hold them all, as the engine checked when
    /// it got the list.
    fn wanted(&self) -> Members {
        Members::new(self.replicas.iter().copied()).unwrap_or_default()
    }
}

/// A volume that may be served: its first view is committed.
#[derive(Debug)]
pub struct Opened<C> {
    /// The first view.
    pub view: View,
    /// The newest view of earlier engines that is known to be committed.
    pub last_view: View,
    /// The connections to the members.
    pub connections: C,
    /// The regions in which the members may differ.
    pub dirty: RegionSet,
    /// The regions to resync from each replica: see [`CombinedSets::sources`].
    pub resync_sources: Vec<RegionSet>,
    /// The out-of-sync regions of each replica, as far as the members know.
    pub out_of_sync: Vec<RegionSet>,
    /// True for each replica whose out-of-sync regions are all known.
    pub is_out_of_sync_complete: Vec<bool>,
    /// The newest stamp that any member was sent: see [`shorthorn_types::is_current`].
    pub stamp: u32,
    /// For every replica that is not a member: the newest stamp that it was sent, if that is known.
    pub out_of_sync_stamps: Vec<Option<u32>>,
    /// The run of the process of each replica that was reached.
    pub runs: Vec<Option<u64>>,
}

/// The reason why an attempt did not open the volume.
#[derive(Debug)]
pub enum NotOpen<S> {
    /// The attempt has proposed no view: the next one may use the same generation.
    Waiting(String),
    /// A view was proposed or asked for, and may be stored somewhere. The next attempt needs a newer
    /// generation, because a view's number never stands for two sets.
    Aborted {
        /// The reason, in words.
        reason: String,
        /// The replica whose failed request ended the attempt; none if it is recorded already.
        by: Option<ReplicaId>,
    },
    /// A newer engine holds a replica.
    Deposed(Generation),
    /// The process has to end, or cannot continue.
    Stopped(S),
}

impl<S> NotOpen<S> {
    /// Returns the error of a failure without an offender.
    pub fn aborted(reason: impl Into<String>) -> NotOpen<S> {
        NotOpen::Aborted { reason: reason.into(), by: None }
    }

    /// Returns the error of a failed request to a replica.
    pub fn aborted_by(replica: ReplicaId, error: impl std::fmt::Display) -> NotOpen<S> {
        NotOpen::Aborted { reason: error.to_string(), by: Some(replica) }
    }
}

/// The next thing that happens to an engine that waits for a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grant {
    /// The arbiter says that it has granted this view.
    Answered(View),
    /// A replica that had not answered does.
    Back(ReplicaId),
    /// The arbiter has not answered yet.
    Nothing,
}

/// The process while it opens the volume. The functions that take several replicas ask them at once.
pub trait OpeningEngine {
    /// A connection to a replica.
    type Link: ReplicaLink;
    /// The connections of all queues to the members.
    type Connections;
    /// The reason why the process ends.
    type Stop;

    /// Connects to every replica. The handshake fences it and has the size of the volume ([`crate::fit`]).
    /// Replicas that do not answer in time, refuse, or are too large are left out.
    async fn reach(&mut self) -> Result<Vec<Reached<Self::Link>>, NotOpen<Self::Stop>>;

    /// Learns the outcome of the planning and shows it.
    fn planned(&mut self, fenced_replicas: &[FencedReplica], plan: Result<&StartPlan, &NoPlan>);

    /// Records that a replica that has welcomed the engine has failed a request since. Shows and logs that.
    fn offended(&mut self, replica: ReplicaId, reason: &str);

    /// Learns that the attempt continues without a replica that has made others fail. `reason` is its last
    /// failure. Shows and logs that.
    fn leaves_out(&mut self, replica: ReplicaId, reason: &str);

    /// Returns the time since the first attempt to open the volume, in milliseconds.
    fn waited_ms(&self) -> u64;

    /// Returns true if a user of the device may count on writes that were not flushed. The user does not know
    /// yet that they may be lost.
    fn has_user(&self) -> bool;

    /// Begins to ask the arbiter for the view of `change`, which `stored` are to store.
    fn ask_arbiter(&mut self, change: &ViewChange, stored: Members);

    /// Waits for the next thing that happens, for a moment, and keeps the connections alive.
    async fn next_grant(&mut self, reached: &mut [Reached<Self::Link>])
    -> Result<Grant, NotOpen<Self::Stop>>;

    /// Asks the arbiter no more.
    fn ask_no_more(&mut self);

    /// Records durably, before anything is proposed, that a device ends if it is older than a view to honour.
    /// If `lost_writes` and [`OpeningEngine::has_user`], also that writes may be gone.
    fn record_start(&mut self, honoured: &ReplicaReport, lost_writes: bool) -> Result<(), Self::Stop>;

    /// Calls [`propose_to`] for every replica.
    async fn propose(
        &mut self,
        to: Vec<Reached<Self::Link>>,
        proposal: &Proposal,
    ) -> Vec<(Reached<Self::Link>, Result<Option<MemberSets>, <Self::Link as ReplicaLink>::Error>)>;

    /// Calls [`conclude`] for every replica, and connects all queues to the members. Fails with
    /// [`NotOpen::aborted_by`] if a member is to blame.
    async fn connect(
        &mut self,
        reached: Vec<Reached<Self::Link>>,
        proposal: &Proposal,
    ) -> Result<Self::Connections, NotOpen<Self::Stop>>;
}

/// Makes one attempt to open the volume. `offenders` come from the attempt before, and are for the next one.
///
/// # Errors
/// [`NotOpen`] has the next step.
pub async fn open<E: OpeningEngine>(
    engine: &mut E,
    request: &OpenRequest,
    offenders: &mut Offenders,
) -> Result<Opened<E::Connections>, NotOpen<E::Stop>> {
    let mut reached = engine.reach().await?;
    offenders.reached(reached.iter().map(|one| (one.replica, one.welcome.run)), &request.replicas);
    let (plan, left_out) = plan_view(engine, request, &reached, offenders)?;
    let view = View { id: ViewId { generation: request.generation, number: 1 }, members: plan.members };
    let mut change = ViewChange::new(plan.basis.honoured, view);
    let is_asked = |id| !plan.blank.contains(id) && !left_out.contains(id);
    let asked = reached.iter().map(|one| one.replica).filter(|id| is_asked(*id));
    let stored = Members::new(asked).unwrap_or_default(); // a volume has no more replicas than a set can have
    if change.would_need_grant(&stored) {
        // Nothing is proposed before the grant. A view that one half has stored and that is never granted
        // would stand in the way of the other half for ever.
        engine.ask_arbiter(&change, stored);
        let waits_max = (!left_out.is_empty()).then_some(GRANT_WAITS_MAX);
        let granted = await_grant(engine, &change, &mut reached, waits_max).await;
        engine.ask_no_more();
        granted.map_err(|error| blamed(engine, offenders, AttemptPart::Storing, error))?;
        change.granted();
    }
    // The proposal makes the members look as if nothing had happened.
    engine.record_start(&change.honoured, plan.lost_writes).map_err(NotOpen::Stopped)?;
    let stamps: Vec<Option<u32>> = reached.iter().map(|one| one.welcome.stamp).collect();
    // A blank replica would learn the views by the proposal, and look like one that has kept its data.
    reached.retain(|one| is_asked(one.replica));
    commit_first_view(engine, request, change, (reached, stamps), offenders).await
}

/// Returns the plan for the first view, unless a member has to be waited for. A replica that is left out has
/// to be rebuilt later. Also returns the offenders that it leaves out. All that they have reported counts,
/// but they are not members and store nothing.
fn plan_view<E: OpeningEngine>(
    engine: &mut E,
    request: &OpenRequest,
    reached: &[Reached<E::Link>],
    offenders: &mut Offenders,
) -> Result<(StartPlan, Members), NotOpen<E::Stop>> {
    let fenced_replicas: Vec<FencedReplica> = reached.iter().map(fenced).collect();
    let plan = plan(&fenced_replicas, request.granted);
    engine.planned(&fenced_replicas, plan.as_ref());
    let plan = plan.map_err(|none| NotOpen::Waiting(with_unfit(&none)))?;
    let answers = |id| reached.iter().any(|one| one.replica == id);
    let silent = plan.basis.holders.filter(|id| !answers(id));
    let loses = plan.lost_writes && engine.has_user();
    let limit_ms = if loses { request.member_limit_ms } else { request.missing_limit_ms };
    let has_waited = engine.waited_ms() > limit_ms;
    if !silent.is_empty() && !has_waited {
        let why = if loses { ", and the others have lost unflushed writes" } else { "" };
        return Err(NotOpen::Waiting(format!("{silent} of the view do not answer{why}")));
    }
    // An offender is left out no sooner than a replica that does not answer: it has to be rebuilt later too.
    let left_out = if has_waited { offenders.next_left_out() } else { Members::NONE };
    if left_out.is_empty() {
        return Ok((plan, Members::NONE));
    }
    let Some(fewer) = plan.clone().without(&left_out, &fenced_replicas, request.granted) else {
        return Ok((plan, Members::NONE));
    };
    left_out.iter().for_each(|replica| engine.leaves_out(replica, offenders.reason(replica)));
    Ok((fewer, left_out))
}

fn fenced<L>(one: &Reached<L>) -> FencedReplica {
    FencedReplica {
        replica: one.replica,
        report: one.welcome.report.clone(),
        rebuilding: one.welcome.rebuilding,
        lost_cache: one.welcome.lost_cache,
        stamp: one.welcome.stamp,
    }
}

fn with_unfit(none: &NoPlan) -> String {
    let others: String = none.unfit.iter().map(|(replica, why)| format!("; {replica}: {why}")).collect();
    format!("{}{others}", none.cannot)
}

/// Waits until the arbiter has granted the view of `change`.
///
/// If another replica is back, or another view was granted, the start begins again with the next generation.
/// A grant that comes late is for the requested view, and never for another one of its number. The same
/// happens after `waits_max` calls.
async fn await_grant<E: OpeningEngine>(
    engine: &mut E,
    change: &ViewChange,
    reached: &mut [Reached<E::Link>],
    waits_max: Option<u32>,
) -> Result<(), NotOpen<E::Stop>> {
    let mut waits = 0;
    loop {
        if waits_max.is_some_and(|most| waits >= most) {
            return Err(NotOpen::aborted("the arbiter has not granted in time that replicas are left out"));
        }
        waits = waits.saturating_add(1);
        match engine.next_grant(reached).await? {
            Grant::Answered(view) if view == change.target => return Ok(()),
            Grant::Answered(view) if view.id > change.honoured.committed.id => {
                return Err(NotOpen::aborted(format!(
                    "the arbiter has granted view {view}, which this start does not honour"
                )));
            }
            Grant::Back(replica) => return Err(NotOpen::aborted(format!("{replica} is back"))),
            Grant::Answered(_) | Grant::Nothing => {}
        }
    }
}

/// Has the replicas store the view. If it succeeds, and every member has reported its sets of regions, marks
/// the view as committed and connects the queues. `stamps` are those of all reached replicas, also of those
/// that are not asked.
async fn commit_first_view<E: OpeningEngine>(
    engine: &mut E,
    request: &OpenRequest,
    mut change: ViewChange,
    (asked, stamps): (Vec<Reached<E::Link>>, Vec<Option<u32>>),
    offenders: &mut Offenders,
) -> Result<Opened<E::Connections>, NotOpen<E::Stop>> {
    let (view, honoured) = (change.target, change.honoured.clone());
    let replicas = request.replicas.clone();
    let proposal = Proposal { view, honoured, replicas, size_bytes: request.size_bytes };
    let (mut kept, mut members) = (Vec::new(), Vec::new());
    let (mut stored, mut refused) = (Vec::new(), Vec::new());
    let mut deposed_by = None;
    for (one, answer) in engine.propose(asked, &proposal).await {
        match answer {
            Ok(sets) => {
                offenders.did(one.replica, AttemptPart::Storing);
                change.stored(one.replica);
                if let Some(sets) = sets {
                    kept.push(sets);
                    members.push(one.replica);
                }
                stored.push(one);
            }
            Err(error) if error.deposed_by().is_some() => deposed_by = deposed_by.max(error.deposed_by()),
            Err(error) => {
                let reason = error.to_string();
                engine.offended(one.replica, &reason);
                refused.push(format!("{}: {reason}", one.replica));
                offenders.failed(one.replica, AttemptPart::Storing, reason);
            }
        }
    }
    if let Some(holder) = deposed_by {
        return Err(NotOpen::Deposed(holder));
    }
    if change.progress() != ChangeProgress::Committed || kept.len() != view.members.len() {
        return Err(NotOpen::aborted(format!("view {view} is not complete: {}", refused.join("; "))));
    }
    let combined = combine_sets(&kept, request.replicas.len(), Regions::of(request.size_bytes).count());
    let stamp = combined.first_stamp(stamps);
    let CombinedSets { dirty, sources, out_of_sync, stamps, is_complete, .. } = combined;
    let run = |id: &ReplicaId| stored.iter().find(|one| one.replica == *id).map(|one| one.welcome.run);
    let runs = request.replicas.iter().map(run).collect();
    let connected = engine.connect(stored, &proposal).await;
    let connections = connected.map_err(|error| blamed(engine, offenders, AttemptPart::Connecting, error))?;
    let last_view = proposal.honoured.committed;
    Ok(Opened {
        view,
        last_view,
        connections,
        dirty,
        resync_sources: sources_by_replica(&request.replicas, &members, &sources),
        out_of_sync,
        is_out_of_sync_complete: is_complete,
        stamp,
        out_of_sync_stamps: stamps,
        runs,
    })
}

/// Returns the sources of the members in the order of all `replicas`; others have none.
fn sources_by_replica(
    replicas: &[ReplicaId],
    members: &[ReplicaId],
    sources: &[RegionSet],
) -> Vec<RegionSet> {
    let of = |id| members.iter().zip(sources).find(|(member, _)| *member == id).map(|(_, of)| of.clone());
    let none = RegionSet::empty(sources.first().map_or(0, RegionSet::limit));
    replicas.iter().map(|id| of(id).unwrap_or_else(|| none.clone())).collect()
}

/// Records the replica that made an attempt fail.
fn blamed<E: OpeningEngine>(
    engine: &mut E,
    offenders: &mut Offenders,
    part: AttemptPart,
    error: NotOpen<E::Stop>,
) -> NotOpen<E::Stop> {
    match error {
        NotOpen::Aborted { reason, by: Some(replica) } => {
            engine.offended(replica, &reason);
            let aborted = NotOpen::aborted(format!("{replica}: {reason}"));
            offenders.failed(replica, part, reason);
            aborted
        }
        error => error,
    }
}

/// Has one replica store the view. A member may begin some sets of regions by storing it, so it is asked
/// afterwards which sets it keeps.
///
/// # Errors
/// The replica has not stored it, or has not said which sets it keeps.
pub async fn propose_to<L: ReplicaLink>(
    one: &mut Reached<L>,
    proposal: &Proposal,
) -> Result<Option<MemberSets>, L::Error> {
    let Reached { replica, link, welcome } = one;
    let Proposal { view, honoured, .. } = proposal;
    make_room(link, (*replica, welcome), &proposal.wanted(), view, honoured).await?;
    link.propose(*view, honoured).await?;
    if !view.members.contains(*replica) {
        return Ok(None);
    }
    let divided = Regions::of(proposal.size_bytes);
    let intent = regions_or_all(link, RegionsOf::Intent, divided).await?;
    let mut out_of_sync = Vec::with_capacity(proposal.replicas.len());
    for other in &proposal.replicas {
        out_of_sync.push(if view.members.contains(*other) {
            None
        } else {
            let out_of_sync_set = regions(link, RegionsOf::OutOfSync(*other), divided).await?;
            out_of_sync_set.map(|(out_of_sync, stamp)| OutOfSyncSet { out_of_sync, stamp })
        });
    }
    Ok(Some(MemberSets { intent, stamp: welcome.stamp, out_of_sync }))
}

/// Makes one replica that has stored the committed view mark it as committed, and forget the out-of-sync sets
/// that it does not need.
///
/// # Errors
/// Nothing is lost: a mark that gets lost leaves more to honour at the next start, and out-of-sync sets stay
/// until then.
pub async fn conclude<L: ReplicaLink>(one: &mut Reached<L>, proposal: &Proposal) -> Result<(), L::Error> {
    let Reached { link, welcome, .. } = one;
    link.commit(proposal.view, &proposal.honoured).await?;
    // It knows no other view now.
    let gone = out_of_sync_sets_to_forget(&welcome.tracks, &proposal.wanted(), [&proposal.view]);
    forget(link, &gone).await
}
