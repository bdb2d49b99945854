//! Makes one attempt to rebuild a replica. The attempt finds the regions that the replica lacks, and makes it
//! a copy if its former data does not count. Then it hands the replica to the core, which copies the rest.

mod error;
mod missing_regions;
mod source;

use shorthorn_core::{DropCause, EngineCore, Event, Output, Outputs, PeerIndex, PeerState};
use shorthorn_types::{
    ByteRange, MarkAction, MarkRegions, RUNS_PER_MARK_MAX, RegionSet, Regions, RegionsOf, ReplicaId,
    ReplicaReport, is_current,
};
use shorthorn_views::remembers;
use shorthorn_wire::{CopyState, Extent, ExtentsQuery, LayerList, Welcome};

pub use self::error::RebuildError;
use self::error::describe;
use self::missing_regions::MissingRegions;
pub use self::source::Source;
use crate::offenders::BadSources;
use crate::replica_link::{LinkError, ReplicaLink, regions_unless};
use crate::serving::{Address, KnownPeer, ServingEngine, members};

/// The maximum number of attempts to report the end of a copy.
const COPY_END_TRIES: u32 = 5;
/// The maximum number of stamps that a copy is sent, if the core sends newer ones meanwhile.
const STAMP_TRIES: u32 = 5;

/// The answers of a replica count for one run of its process only: see [`Welcome::run`].
pub const OTHER_RUN: &str = "the replica restarted during the attempt";
/// The reason why a copy has to be made again.
pub const SOURCE_HAS_LEFT: &str = "the member that it was copied from has left";

/// The core cannot rebuild the replica yet: requests to its former connections have not ended, for example.
const NOT_TAKEN: &str = "the engine cannot rebuild the replica yet";

/// The task that rebuilds one replica. Each replica has only one.
pub trait ReplicaRebuild {
    /// The engine that it belongs to.
    type Engine: ServingEngine;

    /// Returns the engine whose replica is rebuilt.
    fn engine(&self) -> &Self::Engine;

    /// Returns the index of the replica in the core.
    fn peer(&self) -> PeerIndex;

    /// Returns true if it has to end. It is asked between the steps of something long.
    fn has_to_end(&self) -> bool;

    /// Copies the data of every snapshot layer of `source` to `target` that is not whole there yet. It ends
    /// the copy of a layer only if the source [has stayed](Source::has_stayed), else it fails with
    /// [`SOURCE_HAS_LEFT`]. Snapshots never change, so nothing has to wait for that.
    ///
    /// The source compares its reads with its sums. A block in which it holds rot, or that it cannot read, is
    /// read from the first of `others` that has it sound: see [`BlockSearch`](crate::BlockSearch). If each
    /// member says that it has rot there or nothing, the rot is copied, and the target learns that it is rot.
    async fn copy_snapshots(
        &self,
        target: Address,
        source: Source,
        others: &[Source],
        layers: &LayerList,
        state: &CopyState,
    ) -> Result<(), RebuildError<Error<Self>>>;

    /// Opens a connection to `replica` for every queue and waits until the queues have them. Fails with
    /// [`OTHER_RUN`] if one of them leads to another run of its process than `run`. Returns the size that it
    /// has at least: the size of the volume before the first was opened.
    async fn connect_queues(&self, replica: ReplicaId, run: u64) -> Result<u64, RebuildError<Error<Self>>>;

    /// Reports that the replica's disk has lost stored data, and that the replica gets a full copy.
    fn report_restored(&self, kept: Option<u32>, sent: u32);

    /// Reports that the core copies the rest. `is_copy`: the replica receives a full copy, and has not kept
    /// its data.
    fn report_rebuilding(&self, missing_bytes: u64, is_copy: bool);
}

type Error<C> = <<C as ReplicaRebuild>::Engine as ServingEngine>::Error;

/// Makes one attempt, from the first message to the core. `bad_sources` come from the attempt before, and are
/// for the next one.
///
/// # Errors
/// [`RebuildError`]; the replica is not in the view, and the attempt can be made again.
pub async fn rebuild<C: ReplicaRebuild>(
    rebuild_task: &C,
    bad_sources: &mut BadSources,
) -> Result<(), RebuildError<Error<C>>> {
    let (engine, me) = (rebuild_task.engine(), rebuild_task.peer());
    let peer = engine.peer(me).ok_or(RebuildError::Ended)?;
    let attempt = RebuildAttempt { rebuild_task, engine, me, replica: peer.replica, bad_sources };
    let rebuilt = attempt.run(&peer).await;
    match &rebuilt {
        Ok(()) => bad_sources.clear(),
        Err(RebuildError::SourceFailed { source, .. } | RebuildError::Unread { member: source, .. }) => {
            let members = engine.read_core(|core| core.membership().view().members).unwrap_or_default();
            bad_sources.failed(*source, &members);
        }
        Err(_) => {}
    }
    rebuilt
}

/// The state of one attempt. The replica may be given up at any time, and come back under another number.
struct RebuildAttempt<'a, C: ReplicaRebuild> {
    rebuild_task: &'a C,
    engine: &'a C::Engine,
    me: PeerIndex,
    replica: ReplicaId,
    bad_sources: &'a BadSources,
}

impl<C: ReplicaRebuild> RebuildAttempt<'_, C> {
    async fn run(&self, peer: &KnownPeer) -> Result<(), RebuildError<Error<C>>> {
        if !self.engine.is_disconnected(self.me) {
            return Err(RebuildError::NotYet("the previous connections are being closed"));
        }
        let opened = self.engine.open_control(self.address()).await;
        let welcome = opened.map_err(RebuildError::while_doing("connecting"))?;
        let remembers = remembers(&welcome.report, peer.last_view) && !self.was_restored(peer, &welcome)?;
        if remembers {
            self.bring_views(&welcome.report).await?;
        }
        if self.engine.pending_view().is_some() {
            return Err(RebuildError::NotYet("the view is being changed"));
        }
        let missing = self.find_missing_regions(peer, &welcome, remembers).await?;
        self.keep_out_of_sync_sets(&welcome, missing.is_copy).await?;
        let size_bytes = match self.rebuild_task.connect_queues(self.replica, welcome.run).await {
            Ok(size_bytes) => size_bytes,
            Err(trouble) => {
                self.drop_queues("not every queue is connected to it");
                return Err(trouble);
            }
        };
        self.hand_to_core(missing, size_bytes).await
    }

    /// Reads the core, if the number is still that of the replica.
    fn read_core<R>(&self, at: impl FnOnce(&EngineCore) -> R) -> Result<R, RebuildError<Error<C>>> {
        let seen = self.engine.read_core(|core| self.is_known_to(core).then(|| at(core)));
        seen.flatten().ok_or(RebuildError::Ended)
    }

    /// Changes the core, if the number is still that of the replica.
    fn decide<R>(
        &self,
        act: impl FnOnce(&mut EngineCore, &mut Outputs) -> R,
    ) -> Result<R, RebuildError<Error<C>>> {
        let decided = self.engine.decide(|core, outputs| self.is_known_to(core).then(|| act(core, outputs)));
        decided.flatten().ok_or(RebuildError::Ended)
    }

    fn is_known_to(&self, core: &EngineCore) -> bool {
        core.membership().replica(self.me) == Some(self.replica)
    }

    fn control(&self) -> <C::Engine as ServingEngine>::Control<'_> {
        self.engine.control(self.address())
    }

    fn address(&self) -> Address {
        Address { peer: self.me, replica: self.replica }
    }

    /// Returns whether it lacks more than is counted, as its disk has not kept all that it had stored before
    /// it left.
    fn was_restored(&self, peer: &KnownPeer, welcome: &Welcome) -> Result<bool, RebuildError<Error<C>>> {
        let sent = self.read_core(|core| core.stamp_of(self.me))?;
        let is_counted = peer.is_complete && !welcome.rebuilding;
        let lost = sent.filter(|sent| is_counted && !is_current(welcome.stamp, *sent));
        Ok(lost.inspect(|sent| self.rebuild_task.report_restored(welcome.stamp, *sent)).is_some())
    }

    /// Sends the replica the current view, and the pending one to store. If too few of the others are left,
    /// this replica may complete the quorum.
    async fn bring_views(&self, report: &ReplicaReport) -> Result<(), RebuildError<Error<C>>> {
        let view = self.read_core(|core| core.membership().view())?;
        if report.committed.id < view.id {
            self.send_view().await?;
        }
        if let Some(pending) = self.engine.pending_view() {
            let proposed = self.control().propose(pending.view, &pending.honoured).await;
            proposed.map_err(RebuildError::while_doing("proposing a view"))?;
            let stored = Event::ViewStored { peer: self.me, view: pending.view.id };
            self.decide(|core, outputs| core.apply(stored, outputs))?;
        }
        Ok(())
    }

    /// Has it learn the current view.
    async fn send_view(&self) -> Result<(), RebuildError<Error<C>>> {
        let view = self.read_core(|core| core.membership().view())?;
        let committed = ReplicaReport { committed: view, proposed: Vec::new() };
        let sent = self.control().commit(view, &committed).await;
        sent.map_err(RebuildError::while_doing("sending the view to the replica"))
    }

    /// Deposes the replica, because its former data does not count. From now on its views say that it is not
    /// a member. The regions counted since it left no longer pass for all that it lacks.
    async fn depose(&self) -> Result<(), RebuildError<Error<C>>> {
        self.engine.set_complete(self.address(), false);
        self.decide(|core, _| core.distrust(self.me))?;
        for tracker in self.trackers()? {
            let forgotten = self.engine.control(tracker).mark(&MarkRegions::forget(self.replica)).await;
            forgotten.map_err(RebuildError::while_doing(
                "removing the out-of-sync set of a replica from a member",
            ))?;
        }
        self.send_view().await
    }

    /// Finds the regions that the replica lacks besides those counted by the core. Makes it a copy of a
    /// member first if its former data does not count.
    async fn find_missing_regions(
        &self,
        peer: &KnownPeer,
        welcome: &Welcome,
        remembers: bool,
    ) -> Result<MissingRegions, RebuildError<Error<C>>> {
        let source = self.source()?;
        let size_bytes = || self.engine.size_bytes();
        let size_before = size_bytes();
        let theirs = self.engine.control(source.address).layers(size_bytes).await;
        let theirs = theirs.map_err(RebuildError::while_reading(source, "asking a member for its layers"))?;
        let mine = self.control().layers(size_bytes).await;
        let mine = mine.map_err(RebuildError::while_doing("asking the replica for its layers"))?;
        let is_what_it_was =
            peer.is_complete && !welcome.rebuilding && remembers && have_same_snapshots(&mine, &theirs);
        let regions = self.engine.regions();
        let mut set = if is_what_it_was {
            RegionSet::empty(regions.count())
        } else {
            self.make_copy(source, (&theirs, size_before), remembers, regions).await?
        };
        // Data that it had not made durable may be lost, and data that only it was sent is in no member.
        let failed = RebuildError::while_doing("asking the replica for its write intents");
        set.insert_all(&self.regions_or_all(self.address(), RegionsOf::Intent, regions, failed).await?);
        Ok(MissingRegions { set, regions, is_copy: !is_what_it_was })
    }

    /// Returns the member that the replica is compared with and copied from: one on this host, if possible.
    /// After an attempt that has failed because of its source, another one.
    fn source(&self) -> Result<Source, RebuildError<Error<C>>> {
        let sources = self.sources()?;
        let source = self.bad_sources.best(sources, |source| source.address.replica);
        source.ok_or(RebuildError::NotYet("no member can be the source of the copy"))
    }

    /// Returns the members that the copy may be read from.
    fn sources(&self) -> Result<Vec<Source>, RebuildError<Error<C>>> {
        let members = members(self.engine).ok_or(RebuildError::Ended)?;
        self.read_core(|core| {
            let source = |(index, peer): (PeerIndex, KnownPeer)| {
                let losses = core.membership().losses_of_member(index)?;
                let has_failed = self.bad_sources.has_failed(peer.replica);
                let address = Address { peer: index, replica: peer.replica };
                Some(Source { address, has_failed, losses })
            };
            members.into_iter().filter_map(source).collect()
        })
    }

    /// A set of regions of a replica; full if it does not keep that one.
    async fn regions_or_all(
        &self,
        of_replica: Address,
        of: RegionsOf,
        regions: Regions,
        failed: impl FnOnce(Error<C>) -> RebuildError<Error<C>>,
    ) -> Result<RegionSet, RebuildError<Error<C>>> {
        let has_to_end = || self.rebuild_task.has_to_end();
        let set = regions_unless(&mut self.engine.control(of_replica), of, regions, &has_to_end).await;
        let set = set.map_err(failed)?.ok_or(RebuildError::Ended)?;
        Ok(set.map_or_else(|| RegionSet::full(regions.count()), |(set, _)| set))
    }

    /// Makes it a copy of `source`: the same layers, with the data of the snapshots. Returns the regions in
    /// which the source has data beside. The volume had `size_before` bytes before the source was asked for
    /// its layers.
    ///
    /// Until [`RebuildAttempt::hand_to_core`] has ended the copy, it counts as being rebuilt. Otherwise an
    /// incomplete out-of-sync set would pass for all that it lacks.
    async fn make_copy(
        &self,
        source: Source,
        (layers, size_before): (&LayerList, u64),
        remembers: bool,
        regions: Regions,
    ) -> Result<RegionSet, RebuildError<Error<C>>> {
        let begun = match self.control().copy_begin(layers).await {
            // It remembers a view that it was in, although not the last one: it holds old data.
            Err(error) if error.is_refusal() && !error.is_invalid() && !remembers => {
                self.depose().await?;
                self.control().copy_begin(layers).await
            }
            begun => begun,
        };
        // The next attempt reads another member. If the replica is to blame, the members take turns, and each
        // attempt fails. An expansion since makes the layers of an honest member too short.
        let has_grown = size_before != self.engine.size_bytes();
        let state = begun.map_err(|error| match error.is_invalid() && !has_grown {
            true => RebuildError::while_reading(source, "beginning a copy of the layers of a member")(error),
            false => RebuildError::while_doing("beginning a copy")(error),
        })?;
        self.send_view().await?;
        let others: Vec<Source> = self.sources()?.into_iter().filter(|other| *other != source).collect();
        self.rebuild_task.copy_snapshots(self.address(), source, &others, layers, &state).await?;
        // First they begin to count, then the source is looked at: a change meanwhile is in one or the other.
        let trackers = self.trackers()?;
        self.add_out_of_sync(&trackers, self.replica, &RegionSet::empty(regions.count()), regions).await?;
        let missing = self.find_data(source, layers, regions).await?;
        self.add_out_of_sync(&trackers, self.replica, &missing, regions).await?;
        match self.read_core(|core| source.has_stayed(core))? {
            true => Ok(missing),
            false => Err(RebuildError::NotYet(SOURCE_HAS_LEFT)),
        }
    }

    /// Returns the regions in which the head of the source has data; everything else it shares with the
    /// snapshots, which are complete.
    async fn find_data(
        &self,
        source: Source,
        layers: &LayerList,
        regions: Regions,
    ) -> Result<RegionSet, RebuildError<Error<C>>> {
        let Some(head) = layers.layers.len().checked_sub(1).filter(|head| *head > 0) else {
            let failed = RebuildError::while_reading(source, "reading the extents of a member");
            return self.regions_or_all(source.address, RegionsOf::Allocated, regions, failed).await;
        };
        let mut control = self.engine.control(source.address);
        let layer = u32::try_from(head).unwrap_or(u32::MAX);
        let mut data = RegionSet::empty(regions.count());
        let mut from = Some(0);
        while let Some(from_bytes) = from {
            if self.rebuild_task.has_to_end() {
                return Err(RebuildError::Ended);
            }
            // The head grows with the volume.
            let size_bytes = || self.engine.size_bytes();
            let page = control.extents(ExtentsQuery { layer, from_bytes }, size_bytes).await;
            let page =
                page.map_err(RebuildError::while_reading(source, "reading the extents of a member's layer"))?;
            for Extent { offset_bytes, length_bytes } in page.extents {
                if let Ok(range) = ByteRange::new(offset_bytes, length_bytes) {
                    data.insert_run(regions.touched(range));
                }
            }
            from = page.next_bytes.filter(|next| *next > from_bytes);
        }
        Ok(data)
    }

    /// Makes it count the regions that the other absent ones miss, as the members do. If the members do not
    /// know all of these, it keeps no set. A set from before its absence lacks the regions missed meanwhile.
    /// If it alone is left at the next start, such a set would pass for all.
    async fn keep_out_of_sync_sets(
        &self,
        welcome: &Welcome,
        is_copy: bool,
    ) -> Result<(), RebuildError<Error<C>>> {
        let (engine, regions) = (self.engine, self.engine.regions());
        let nothing = RegionSet::empty(regions.count());
        for other in self.others(welcome)? {
            let is_complete = engine.find(other).is_some_and(|(_, peer)| peer.is_complete);
            // The out-of-sync sets of a replica that receives a full copy do not describe this volume.
            if is_copy || !is_complete {
                let forgotten = self.control().mark(&MarkRegions::forget(other)).await;
                forgotten
                    .map_err(RebuildError::while_doing("removing an out-of-sync set from the replica"))?;
            }
            if is_complete {
                self.add_out_of_sync(&[self.address()], other, &nothing, regions).await?;
            }
        }
        Ok(())
    }

    /// Returns the replicas outside the view that it may keep an out-of-sync set of.
    fn others(&self, welcome: &Welcome) -> Result<Vec<ReplicaId>, RebuildError<Error<C>>> {
        let view = self.read_core(|core| core.membership().view())?;
        let mut others: Vec<ReplicaId> = welcome.tracks.iter().collect();
        // It may have begun these by storing a view in this attempt.
        others.extend(welcome.report.views().flat_map(|view| view.members.iter()));
        others.extend(self.engine.peers().into_iter().map(|(_, peer)| peer.replica));
        others.sort_unstable();
        others.dedup();
        others.retain(|id| *id != self.replica && !view.members.contains(*id));
        Ok(others)
    }

    /// Makes the queues give their connections up, which the next attempt would have to wait for.
    fn drop_queues(&self, reason: &str) {
        self.engine.decide(|_, outputs| outputs.push(self.unused(reason)));
    }

    fn unused(&self, reason: &str) -> Output {
        Output::Drop { peer: self.me, reason: reason.to_owned(), cause: DropCause::Unused }
    }

    /// Hands the replica, which has `size_bytes`, to the core, if it has followed every expansion that the
    /// core may already know.
    async fn hand_to_core(
        &self,
        missing: MissingRegions,
        size_bytes: u64,
    ) -> Result<(), RebuildError<Error<C>>> {
        let is_copy = missing.is_copy;
        // Replicas that count by now, or are about to, are asked under the same lock: later ones learn from
        // the core.
        let counting = self.decide(|core, outputs| {
            if size_bytes < self.engine.size_bytes() {
                outputs.push(self.unused("the replica has not followed an expansion yet"));
                return Err("the volume is being expanded");
            }
            let missing = Box::new(missing.converted(core.regions()));
            if is_copy {
                core.start_full_copy(self.me);
            }
            core.apply(Event::Rebuild { peer: self.me, missing }, outputs);
            if core.membership().state(self.me) != PeerState::Rebuilding {
                return Err(NOT_TAKEN); // it has dropped the replica, and does not know `missing`
            }
            // The number includes the regions counted while it was absent. It is reported here, before the
            // end of even the shortest copy.
            let left = core.copy_progress().rebuilds.into_iter().find(|(peer, _)| *peer == self.me);
            self.rebuild_task.report_rebuilding(left.map_or(0, |(_, bytes)| bytes), is_copy);
            Ok(self.counting(core))
        });
        let count_now = match counting {
            Ok(Ok(count_now)) => count_now,
            Ok(Err(why)) => return Err(RebuildError::NotYet(why)),
            Err(trouble) => {
                self.drop_queues("the rebuild was given up");
                return Err(trouble);
            }
        };
        if !is_copy {
            return Ok(());
        }
        let ended = self.complete_copy(&count_now).await;
        let event = match &ended {
            Ok(()) => Event::CopyEnded { peer: self.me },
            // A member that counts as being rebuilt would be none at the next start.
            Err(trouble) => Event::Lost { peer: self.me, reason: describe(trouble) },
        };
        if ended.is_ok() {
            // From here on its absence costs the regions that it misses, no longer a copy.
            self.engine.set_complete(self.address(), true);
        }
        self.decide(|core, outputs| core.apply(event, outputs))?;
        ended
    }

    async fn complete_copy(&self, trackers: &[Address]) -> Result<(), RebuildError<Error<C>>> {
        self.complete_out_of_sync_sets(trackers).await?;
        self.stamp().await?;
        self.end_copy().await
    }

    /// Has `trackers` keep the complete out-of-sync set of this replica, which the core knows by now. Some of
    /// them may have begun their sets after the source was read, or again. They therefore begin to count
    /// before this asks the core.
    async fn complete_out_of_sync_sets(&self, trackers: &[Address]) -> Result<(), RebuildError<Error<C>>> {
        let (replica, regions) = (self.replica, self.engine.regions());
        self.add_out_of_sync(trackers, replica, &RegionSet::empty(regions.count()), regions).await?;
        let (out_of_sync, regions) =
            self.read_core(|core| (core.out_of_sync(self.me).cloned(), core.regions()))?;
        // Without one the core has forgotten the replica. It is no member before the end of its copy.
        let out_of_sync = out_of_sync.ok_or(RebuildError::Ended)?;
        self.add_out_of_sync(trackers, replica, &out_of_sync, regions).await
    }

    /// Invalidates all stamps that the replica was sent before, because it was recreated. The core sends it
    /// stamps too, over another connection: it must not be left with an older one.
    async fn stamp(&self) -> Result<(), RebuildError<Error<C>>> {
        for _ in 0..STAMP_TRIES {
            let stamp = self.read_core(EngineCore::stamp)?;
            let sent = self.control().mark(&MarkRegions::stamp(stamp)).await;
            sent.map_err(RebuildError::while_doing("sending a stamp to the replica"))?;
            if self.read_core(EngineCore::stamp)? == stamp {
                return Ok(());
            }
        }
        Err(RebuildError::NotYet("the engine sends stamps to the replica all the time"))
    }

    /// Ends the copy: the replica has all data of the members, apart from the regions that they count as
    /// missed. Until the replica knows this, the next engine that starts does not treat it as a member.
    async fn end_copy(&self) -> Result<(), RebuildError<Error<C>>> {
        let mut tries = 0;
        loop {
            match self.control().copy_end().await {
                Ok(()) => return Ok(()),
                Err(error) if tries >= COPY_END_TRIES || self.engine.is_disconnected(self.me) => {
                    return Err(RebuildError::Failed { doing: "ending a copy", error });
                }
                Err(_) => tries += 1,
            }
        }
    }

    /// Returns the replicas that have to count the regions that this one misses: the members and the future
    /// members.
    fn trackers(&self) -> Result<Vec<Address>, RebuildError<Error<C>>> {
        self.read_core(|core| self.counting(core))
    }

    fn counting(&self, core: &EngineCore) -> Vec<Address> {
        let membership = core.membership();
        let counts = |index: PeerIndex| {
            index != self.me && matches!(membership.state(index), PeerState::Member | PeerState::Rebuilding)
        };
        let peers = self.engine.peers().into_iter().filter(|(index, _)| counts(*index));
        peers.map(|(index, peer)| Address { peer: index, replica: peer.replica }).collect()
    }

    /// Has `trackers` count the regions that `replica` misses, and `out_of_sync`, which counts in `regions`,
    /// as a part of them.
    async fn add_out_of_sync(
        &self,
        trackers: &[Address],
        replica: ReplicaId,
        out_of_sync: &RegionSet,
        regions: Regions,
    ) -> Result<(), RebuildError<Error<C>>> {
        let found = self.engine.find(replica);
        let stamp = found.map_or(Ok(None), |(at, _)| self.read_core(|core| core.stamp_of(at)))?.unwrap_or(0);
        for tracker in trackers {
            for runs in pages(out_of_sync) {
                let (of, size_bytes) = (RegionsOf::OutOfSync(replica), Some(regions.size_bytes()));
                let change = MarkRegions { of, action: MarkAction::Add, runs, stamp, size_bytes };
                let marked = self.engine.control(*tracker).mark(&change).await;
                marked.map_err(RebuildError::while_doing("starting an out-of-sync set on a replica"))?;
            }
        }
        Ok(())
    }
}

/// Returns a set in pieces that fit a message; the empty set is one empty piece.
fn pages(set: &RegionSet) -> impl Iterator<Item = Vec<(u32, u32)>> + '_ {
    let mut runs = set.runs(0).map(|run| (run.start, run.end - run.start));
    let mut first = true;
    std::iter::from_fn(move || {
        let page: Vec<_> = runs.by_ref().take(RUNS_PER_MARK_MAX).collect();
        let more = std::mem::take(&mut first) || !page.is_empty();
        more.then_some(page)
    })
}

/// Returns true if two replicas have the same snapshots: they differ in their heads at most.
fn have_same_snapshots(one: &LayerList, other: &LayerList) -> bool {
    fn snapshots(list: &LayerList) -> impl Iterator<Item = (&str, u64)> {
        let count = list.layers.len().saturating_sub(1);
        list.layers.iter().take(count).map(|layer| (layer.image.as_str(), layer.size_bytes))
    }
    one.layers.len() == other.layers.len() && snapshots(one).eq(snapshots(other))
}

#[cfg(test)]
mod tests {
    use shorthorn_wire::WireLayer;

    use super::*;

    #[test]
    fn sets_are_cut_into_messages() {
        let mut set = RegionSet::empty(10_000);
        for n in 0..1000 {
            set.insert(n * 3);
        }
        let cut: Vec<_> = pages(&set).collect();
        assert_eq!(cut.iter().map(Vec::len).collect::<Vec<_>>(), [800, 200]);
        assert_eq!((cut[0][1], cut[1][0]), ((3, 1), (2400, 1)));
        assert_eq!(
            pages(&RegionSet::empty(10)).collect::<Vec<_>>(),
            [vec![]],
            "a set begins by an empty message"
        );
    }

    #[test]
    fn heads_may_differ_and_snapshots_not() {
        let list = |images: &[&str]| LayerList {
            layers: images
                .iter()
                .map(|image| WireLayer { image: (*image).to_owned(), meta: String::new(), size_bytes: 4096 })
                .collect(),
        };
        assert!(have_same_snapshots(&list(&["a", "b", "head-1"]), &list(&["a", "b", "head-2"])));
        assert!(!have_same_snapshots(&list(&["a", "head-1"]), &list(&["b", "head-1"])));
        assert!(!have_same_snapshots(&list(&["a", "head-1"]), &list(&["head-1"])));
        assert!(have_same_snapshots(&list(&["head-1"]), &list(&["head-1"])));
    }
}
