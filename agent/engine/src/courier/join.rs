//! One attempt to bring a replica back: what it lacks, and how the core gets it.

use std::sync::mpsc;
use std::time::Duration;

use shorthorn_core::{Event, Output, PeerIndex, PeerState};
use shorthorn_types::{
    MarkAction, MarkRegions, RUNS_PER_MARK_MAX, RegionSet, Regions, RegionsOf, ReplicaId, ReplicaReport,
    is_current,
};
use shorthorn_views::remembers;
use shorthorn_wire::{LayerList, Welcome};

use crate::accounts::order_to_forget;
use crate::connection::{ConnectError, Connection};
use crate::courier::{Courier, Desk, Peer, Told, Trouble};

/// How long a queue may take to take over a connection.
const INSTALL_LIMIT: Duration = Duration::from_secs(5);
/// How often the end of a copy is told again, where that fails.
const COPY_END_TRIES: u32 = 5;
/// How often a copy is sent a stamp, if the core sends newer ones meanwhile.
const STAMP_TRIES: u32 = 5;

/// What a replica lacks that is about to join.
struct Lack {
    missing: RegionSet,
    /// What it counts in: the volume may grow meanwhile.
    regions: Regions,
    /// It was made anew.
    is_copy: bool,
}

impl Courier {
    /// One attempt, from the first word to the core.
    pub(super) fn attempt(&mut self) -> Result<(), Trouble> {
        let desk = std::sync::Arc::clone(&self.desk);
        let Some(peer) = desk.peer(self.peer) else { return Err(Trouble::Ended) };
        if !desk.shared.is_disconnected(self.peer) {
            return Err(Trouble::NotYet("its last connections are being closed"));
        }
        let welcome = desk.open_line(self.peer).map_err(Trouble::while_doing("connecting"))?;
        let remembers = remembers(&welcome.report, peer.last_view) && !self.was_rolled_back(&peer, &welcome);
        if remembers {
            self.bring_views(&welcome.report)?;
        }
        if desk.shared.pending_view().is_some() {
            return Err(Trouble::NotYet("the view is being changed"));
        }
        let lack = self.find_lack(&peer, &welcome, remembers)?;
        self.keep_accounts(&welcome, lack.is_copy)?;
        let size_bytes = self.connect_queues(&peer).inspect_err(|_| self.drop_queues())?;
        self.hand_to_core(lack, size_bytes)
    }

    /// Whether it lacks more than what is counted, as its disk has not kept what it had stored before it left.
    fn was_rolled_back(&self, peer: &Peer, welcome: &Welcome) -> bool {
        let sent = self.desk.shared.look(|core| core.stamp_of(self.peer));
        let rolled_back = peer.is_complete && !welcome.rebuilding && !is_current(welcome.stamp, sent);
        if rolled_back {
            let (volume, replica, kept) = (&self.desk.greeter.volume, &peer.endpoint.replica, &welcome.stamp);
            tracing::error!(%volume, %replica, ?kept, sent, "a replica lacks what it had stored: its disk was restored to an older state; it is rebuilt");
        }
        rolled_back
    }

    /// Has the replica learn the current view, and store the one that is being brought through: where too few of the
    /// others are left, that may be what is missing.
    fn bring_views(&self, report: &ReplicaReport) -> Result<(), Trouble> {
        let (desk, me) = (&self.desk, self.peer);
        let view = desk.shared.look(|core| core.membership().view());
        if report.committed.id < view.id {
            self.tell_view()?;
        }
        if let Some(pending) = desk.shared.pending_view() {
            desk.with_line(me, |line| line.propose(pending.view, &pending.honoured))
                .map_err(Trouble::while_doing("proposing a view"))?;
            desk.shared.tell_core(Event::ViewStored { peer: me, view: pending.view.id });
        }
        Ok(())
    }

    /// Has it learn the current view.
    fn tell_view(&self) -> Result<(), Trouble> {
        let view = self.desk.shared.look(|core| core.membership().view());
        let committed = ReplicaReport { committed: view, proposed: Vec::new() };
        self.desk
            .with_line(self.peer, |line| line.commit(view, &committed))
            .map_err(Trouble::while_doing("telling it the view"))
    }

    /// It is not what it was. From now on its views say that it is no member, and nobody takes what was counted
    /// since it left for all that it lacks.
    fn depose(&self) -> Result<(), Trouble> {
        let Some(replica) = self.desk.peer(self.peer).map(|peer| peer.endpoint.replica) else {
            return Err(Trouble::Ended);
        };
        self.desk.update(self.peer, |peer| peer.is_complete = false);
        self.desk.shared.decide(|core, _| core.distrust(self.peer));
        let forget = order_to_forget(replica);
        for keeper in self.desk.accountants(self.peer) {
            self.desk
                .with_line(keeper, |line| line.mark(&forget))
                .map_err(Trouble::while_doing("having a member forget what a replica missed"))?;
        }
        self.tell_view()
    }

    /// What it lacks beside what the core has counted. Makes it a copy of a member first, where it is not what it was.
    fn find_lack(&mut self, peer: &Peer, welcome: &Welcome, remembers: bool) -> Result<Lack, Trouble> {
        let (desk, me) = (std::sync::Arc::clone(&self.desk), self.peer);
        let source = *desk.sources().first().ok_or(Trouble::NotYet("there is no member to copy from"))?;
        let theirs = desk
            .with_line(source, Connection::layers)
            .map_err(Trouble::while_doing("asking a member for its layers"))?;
        let mine =
            desk.with_line(me, Connection::layers).map_err(Trouble::while_doing("asking for its layers"))?;
        let is_what_it_was =
            peer.is_complete && !welcome.rebuilding && remembers && have_same_snapshots(&mine, &theirs);
        let regions = desk.regions();
        let mut missing = if is_what_it_was {
            RegionSet::empty(regions.count())
        } else {
            self.make_copy(source, &theirs, remembers, regions)?
        };
        // What it had not made durable may be gone, and what it alone was sent is in no member.
        let intent = desk.with_line(me, |line| line.regions(RegionsOf::Intent, regions));
        let intent = intent.map_err(Trouble::while_doing("asking for its write intents"))?;
        missing.insert_all(&intent.map_or_else(|| RegionSet::full(regions.count()), |(set, _)| set));
        Ok(Lack { missing, regions, is_copy: !is_what_it_was })
    }

    /// Makes it a copy of `source`: the same layers, with the data of the snapshots. Returns where the source has data
    /// beside.
    ///
    /// Until [`Courier::hand_to_core`] has ended the copy, it counts as being rebuilt: so nobody takes an account that
    /// is not yet whole for all that it lacks.
    fn make_copy(
        &mut self,
        source: PeerIndex,
        layers: &LayerList,
        remembers: bool,
        regions: Regions,
    ) -> Result<RegionSet, Trouble> {
        let (desk, me) = (std::sync::Arc::clone(&self.desk), self.peer);
        let begin = || desk.with_line(me, |line| line.copy_begin(layers));
        let state = match begin() {
            // It remembers a view that it was in, although not the last one: it holds old data.
            Err(ConnectError::Refused { .. }) if !remembers => {
                self.depose()?;
                begin()
            }
            begun => begun,
        };
        let state = state.map_err(Trouble::while_doing("beginning a copy"))?;
        self.tell_view()?;
        self.copy_snapshots(source, layers, &state)?;
        let Some(replica) = desk.peer(me).map(|peer| peer.endpoint.replica) else {
            return Err(Trouble::Ended);
        };
        // First they begin to count, then the source is looked at: what changes meanwhile is in one or the other.
        let accountants = desk.accountants(me);
        desk.keep_missed(&accountants, replica, &RegionSet::empty(regions.count()), regions)?;
        let missing = self.find_data(source, layers, regions)?;
        desk.keep_missed(&accountants, replica, &missing, regions)?;
        Ok(missing)
    }

    /// From now on it counts what the other absent ones miss, as the members do; where they do not know all of that, it
    /// keeps no account. One that it has kept from before it was away lacks what was missed meanwhile: if it alone
    /// is left at the next start, that would pass for all.
    fn keep_accounts(&self, welcome: &Welcome, is_copy: bool) -> Result<(), Trouble> {
        let (desk, regions) = (&self.desk, self.desk.regions());
        let nothing = RegionSet::empty(regions.count());
        let view = desk.shared.look(|core| core.membership().view());
        let mut others: Vec<ReplicaId> = welcome.tracks.iter().collect();
        // It may have begun these by storing a view in this attempt.
        others.extend(welcome.report.views().flat_map(|view| view.members.iter()));
        others.extend(desk.peers().into_iter().map(|(_, peer)| peer.endpoint.replica));
        others.sort_unstable();
        others.dedup();
        let me = desk.peer(self.peer).map(|peer| peer.endpoint.replica);
        for other in others.into_iter().filter(|id| Some(*id) != me && !view.members.contains(*id)) {
            let known = desk.index_of(other).and_then(|index| desk.peer(index));
            let is_complete = known.is_some_and(|peer| peer.is_complete);
            // One of a replica that was made anew says nothing of this volume.
            if is_copy || !is_complete {
                desk.with_line(self.peer, |line| line.mark(&order_to_forget(other)))
                    .map_err(Trouble::while_doing("having it forget what others have missed"))?;
            }
            if is_complete {
                desk.keep_missed(&[self.peer], other, &nothing, regions)?;
            }
        }
        Ok(())
    }

    /// Opens a connection for every queue and waits until the queues have them. Returns the size that the replica has
    /// at least.
    fn connect_queues(&self, peer: &Peer) -> Result<u64, Trouble> {
        let desk = &self.desk;
        let size_bytes = desk.greeter.size_bytes();
        let (installed, acknowledged) = mpsc::sync_channel(usize::from(desk.queues));
        for queue in 0..desk.queues {
            let (connection, _) = desk
                .greeter
                .greet(&peer.endpoint, queue)
                .map_err(Trouble::while_doing("connecting a queue"))?;
            let socket = connection.into_socket().map_err(|source| Trouble::Failed {
                doing: "connecting a queue",
                error: ConnectError::Io { action: "set up the socket".to_owned(), source },
            })?;
            desk.shared.connect(queue, self.peer, socket, installed.clone());
        }
        for _ in 0..desk.queues {
            acknowledged
                .recv_timeout(INSTALL_LIMIT)
                .map_err(|_| Trouble::NotYet("a queue does not take its connection"))?;
        }
        Ok(size_bytes)
    }

    /// Not every queue has its connection: those that have one give it up, else the next attempt would wait for their end.
    fn drop_queues(&self) {
        let (peer, reason) = (self.peer, "not every queue is connected to it".to_owned());
        self.desk.shared.decide(|_, outputs| outputs.push(Output::Drop { peer, reason }));
    }

    /// The core takes over, if the replica, which has `size_bytes`, has followed every expansion that the core may be
    /// told of without it.
    fn hand_to_core(&mut self, lack: Lack, size_bytes: u64) -> Result<(), Trouble> {
        let (desk, me) = (&self.desk, self.peer);
        let Some(replica) = desk.peer(me).map(|peer| peer.endpoint.replica) else {
            return Err(Trouble::Ended);
        };
        let is_copy = lack.is_copy;
        // Whoever counts by now, or is about to, is asked under the same lock: later ones learn from the core.
        let count_now = desk.shared.decide(|core, outputs| {
            if size_bytes < desk.greeter.size_bytes() {
                let reason = "it has not followed an expansion yet".to_owned();
                outputs.push(Output::Drop { peer: me, reason });
                return None;
            }
            let missing = Box::new(lack.missing.converted(lack.regions, core.regions()));
            if is_copy {
                core.is_in_copy(me);
            }
            core.apply(Event::Join { peer: me, missing }, outputs);
            // With what was counted while it was away. Told here, it is told before the end of even the shortest copy.
            let left = core.copy_progress().joins.into_iter().find(|(peer, _)| *peer == me);
            let missing_bytes = left.map_or(0, |(_, bytes)| bytes);
            self.tell(Told::Joining { missing_bytes, is_copy });
            Some(desk.counting(core, me))
        });
        let Some(count_now) = count_now else {
            return Err(Trouble::NotYet("the volume is being expanded"));
        };
        if !is_copy {
            return Ok(());
        }
        let kept = self.complete_accounts(&count_now, replica);
        let ended = kept.and_then(|()| self.stamp()).and_then(|()| self.end_copy());
        match &ended {
            // From here on its absence costs what it misses, no longer a copy.
            Ok(()) => {
                desk.update(me, |peer| peer.is_complete = true);
                desk.shared.tell_core(Event::CopyEnded { peer: me });
            }
            // A member that counts as being rebuilt would be none at the next start.
            Err(trouble) => {
                desk.shared.tell_core(Event::Lost { peer: me, reason: format!("{trouble:?}") });
            }
        }
        ended
    }

    /// Has `keepers` keep all that this one misses, which the core knows by now. Some of them may have begun to count later
    /// than the source was looked at, or anew: so first they count, then the core is asked.
    fn complete_accounts(&self, keepers: &[PeerIndex], replica: ReplicaId) -> Result<(), Trouble> {
        let (desk, regions) = (&self.desk, self.desk.regions());
        desk.keep_missed(keepers, replica, &RegionSet::empty(regions.count()), regions)?;
        let (missed, regions) = desk.shared.look(|core| (core.missed(self.peer).cloned(), core.regions()));
        // Where it has none any more, it is a member, or given up.
        missed.map_or(Ok(()), |missed| desk.keep_missed(keepers, replica, &missed, regions))
    }

    /// It was made anew: no stamp that it was sent before counts. The core sends it stamps too, over another connection: it must
    /// not be left with an older one.
    fn stamp(&self) -> Result<(), Trouble> {
        let newest = || self.desk.shared.look(shorthorn_core::EngineCore::stamp);
        for _ in 0..STAMP_TRIES {
            let stamp = newest();
            self.send_stamp(stamp)?;
            if newest() == stamp {
                return Ok(());
            }
        }
        Err(Trouble::NotYet("it is sent stamps all the time"))
    }

    fn send_stamp(&self, stamp: u32) -> Result<(), Trouble> {
        let (of, action) = (RegionsOf::Intent, MarkAction::Stamp);
        let change = MarkRegions { of, action, runs: Vec::new(), stamp, size_bytes: 0 };
        self.desk
            .with_line(self.peer, |line| line.mark(&change))
            .map_err(Trouble::while_doing("sending it a stamp"))
    }

    /// It has what the members have, apart from what they count as missed. Until it knows that it is no member
    /// at the next start of an engine.
    fn end_copy(&self) -> Result<(), Trouble> {
        let mut tries = 0;
        loop {
            match self.desk.with_line(self.peer, |line| line.copy_end(None)) {
                Ok(()) => return Ok(()),
                Err(error) if tries >= COPY_END_TRIES || self.desk.shared.is_disconnected(self.peer) => {
                    return Err(Trouble::Failed { doing: "ending a copy", error });
                }
                Err(_) => tries += 1,
            }
        }
    }
}

impl Desk {
    pub(crate) fn regions(&self) -> Regions {
        Regions::of(self.greeter.size_bytes())
    }

    /// Members, those on this host first.
    pub fn sources(&self) -> Vec<PeerIndex> {
        let mut members = self.members();
        members.sort_by_key(|index| !self.peer(*index).is_some_and(|peer| peer.endpoint.local));
        members
    }

    /// Who has to count what `absent` misses: the members, and those that are about to be.
    fn accountants(&self, absent: PeerIndex) -> Vec<PeerIndex> {
        self.shared.look(|core| self.counting(core, absent))
    }

    fn counting(&self, core: &shorthorn_core::EngineCore, absent: PeerIndex) -> Vec<PeerIndex> {
        let membership = core.membership();
        let counts = |index: &PeerIndex| {
            *index != absent && matches!(membership.state(*index), PeerState::Member | PeerState::Joining)
        };
        self.peers().into_iter().map(|(index, _)| index).filter(counts).collect()
    }

    /// Has `keepers` count what `replica` misses, and `missed`, which counts in `regions`, as a part of that.
    fn keep_missed(
        &self,
        keepers: &[PeerIndex],
        replica: ReplicaId,
        missed: &RegionSet,
        regions: Regions,
    ) -> Result<(), Trouble> {
        let stamp = self.index_of(replica).map_or(0, |index| self.shared.look(|core| core.stamp_of(index)));
        for keeper in keepers {
            for runs in pages(missed) {
                let (of, size_bytes) = (RegionsOf::Missed(replica), regions.size_bytes());
                let change = MarkRegions { of, action: MarkAction::Add, runs, stamp, size_bytes };
                self.with_line(*keeper, |line| line.mark(&change))
                    .map_err(Trouble::while_doing("having a replica count what another one misses"))?;
            }
        }
        Ok(())
    }
}

/// A set in pieces that fit a message; the empty set is one empty piece.
fn pages(set: &RegionSet) -> impl Iterator<Item = Vec<(u32, u32)>> + '_ {
    let mut runs = set.runs(0).map(|run| (run.start, run.end - run.start));
    let mut first = true;
    std::iter::from_fn(move || {
        let page: Vec<_> = runs.by_ref().take(RUNS_PER_MARK_MAX).collect();
        let more = std::mem::take(&mut first) || !page.is_empty();
        more.then_some(page)
    })
}

/// Whether two replicas have the same snapshots: they differ in their heads at most.
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
