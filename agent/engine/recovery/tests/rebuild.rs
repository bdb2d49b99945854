//! A replica is rebuilt while the volume changes. It is given up and another one gets its number, or the
//! member that it is copied from leaves.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::cell::{Cell, RefCell};
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use shorthorn_core::{
    CopyLimits, CoreConfig, EngineCore, Event, FlightLimits, Output, Outputs, PeerConfig, PeerIndex,
    PeerState,
};
use shorthorn_recovery::{
    Address, BadSources, KnownPeer, LinkError, PendingView, RebuildError, ReplicaLink, ReplicaRebuild,
    ServingEngine, Source,
};
use shorthorn_types::{
    Generation, MarkRegions, Members, RegionSet, Regions, RegionsOf, ReplicaId, ReplicaReport, View, ViewId,
};
use shorthorn_wire::{
    CopyState, ExtentsPage, ExtentsQuery, LayerList, RegionsPage, RegionsQuery, Welcome, WireLayer,
};

const SIZE_BYTES: u64 = 16 << 20;
/// The document of a layer that no replica takes.
const BAD_DOCUMENT: &str = "{";
/// The number of the replica that is away.
const AWAY: PeerIndex = 1;

fn finish<T>(steps: impl Future<Output = T>) -> T {
    match pin!(steps).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => panic!("nothing here waits"),
    }
}

/// Makes the first attempt to rebuild the replica.
fn rebuild(engine: &Engine) -> Result<(), RebuildError<Gone>> {
    finish(shorthorn_recovery::rebuild(&engine, &mut BadSources::default()))
}

fn id(number: u64) -> ReplicaId {
    ReplicaId::from_random(number)
}

fn view(members: &[u64]) -> View {
    let members = Members::new(members.iter().copied().map(id)).unwrap();
    View { id: ViewId { generation: Generation::new(1, 0), number: 1 }, members }
}

/// The error of a replica.
#[derive(Debug, PartialEq, Eq)]
enum Gone {
    /// The replica was given up.
    Away,
    /// The request makes no sense to it.
    Invalid,
}

impl std::fmt::Display for Gone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self:?}")
    }
}

impl LinkError for Gone {
    fn deposed_by(&self) -> Option<Generation> {
        None
    }

    fn is_refusal(&self) -> bool {
        self.is_invalid()
    }

    fn is_invalid(&self) -> bool {
        *self == Gone::Invalid
    }
}

/// The moment of a change of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    Handshake,
    Layers,
    Connecting,
    /// The queues are connected, and the core has no count of the regions that the replica misses.
    Uncounted,
    /// The copied member lists its extents.
    Allocated,
    Never,
}

/// An engine with replicas 1 and 4 in the view, and replica 2 away.
struct Engine {
    core: RefCell<EngineCore>,
    peers: RefCell<Vec<KnownPeer>>,
    outputs: RefCell<Outputs>,
    moment: Moment,
    /// The rebuild task has to end, and sets of regions have two pages.
    ends_between_pages: bool,
    /// Members that do not list their extents.
    rotten: Vec<ReplicaId>,
    /// Members that were asked that, in order.
    read: RefCell<Vec<ReplicaId>>,
    /// Members whose layers no replica can have, by their documents.
    lying: Vec<ReplicaId>,
    /// Replicas that were asked for their layers, in order.
    listed: RefCell<Vec<ReplicaId>>,
    /// The number of copies that were ended.
    ended_copies: Cell<u32>,
}

impl Engine {
    /// Creates an engine. `is_complete`: all that replica 2 has missed is known.
    fn new(moment: Moment, is_complete: bool) -> Engine {
        let peer = |number: u64, is_local, is_complete| KnownPeer {
            replica: id(number),
            is_local,
            is_complete,
            last_view: Some(view(&[1, 2, 4])),
        };
        let peers = vec![peer(1, true, true), peer(2, false, is_complete), peer(4, false, true)];
        let config = |peer: &KnownPeer| PeerConfig { replica: peer.replica, local: peer.is_local };
        let nothing = RegionSet::empty(Regions::of(SIZE_BYTES).count());
        let core = EngineCore::new(&CoreConfig {
            queues: 1,
            depth: 4,
            peers: peers.iter().map(config).collect(),
            view: view(&[1, 4]),
            replica_timeout_ms: 1000,
            late_limit_ms: 1000,
            flight_limits: FlightLimits { bytes: 4 << 20, requests: 100 },
            size_bytes: SIZE_BYTES,
            dirty: nothing.clone(),
            resync_sources: Vec::new(),
            out_of_sync: vec![nothing.clone(), nothing.clone(), nothing],
            stamp: 0,
            out_of_sync_stamps: Vec::new(),
            copy_slots: 4,
            copy_limits: CopyLimits { bytes_per_s: None, share_percent: 50 },
            intent_interval_ms: None,
            intent_keep_bytes: 0,
            verify_reads: false,
            refuses_requests: false,
        });
        Engine {
            core: RefCell::new(core),
            peers: RefCell::new(peers),
            outputs: RefCell::default(),
            moment,
            ends_between_pages: false,
            rotten: Vec::new(),
            read: RefCell::default(),
            lying: Vec::new(),
            listed: RefCell::default(),
            ended_copies: Cell::new(0),
        }
    }

    /// Changes the volume at its moment. Either replica 3 replaces replica 2 and gets its number, or member 1
    /// leaves.
    fn reaches(&self, moment: Moment) {
        if self.moment != moment {
            return;
        }
        if moment == Moment::Allocated {
            let lost = Event::Lost { peer: 0, reason: "the test wants it".to_owned() };
            self.core.borrow_mut().apply(lost, &mut self.outputs.borrow_mut());
        } else if moment == Moment::Uncounted {
            self.core.borrow_mut().apply(Event::Forget { peer: AWAY }, &mut self.outputs.borrow_mut());
        } else {
            let new = KnownPeer { replica: id(3), is_local: false, is_complete: false, last_view: None };
            self.peers.borrow_mut()[usize::from(AWAY)] = new;
            let (mut core, mut outputs) = (self.core.borrow_mut(), self.outputs.borrow_mut());
            core.apply(Event::Forget { peer: AWAY }, &mut outputs);
            let config = PeerConfig { replica: id(3), local: false };
            core.apply(Event::Track { peer: AWAY, config }, &mut outputs);
        }
    }
}

impl ServingEngine for Engine {
    type Error = Gone;
    type Control<'a> = Control<'a>;

    fn peers(&self) -> Vec<(PeerIndex, KnownPeer)> {
        (0..).zip(self.peers.borrow().iter().copied()).collect()
    }

    fn set_complete(&self, of: Address, is_complete: bool) {
        let mut peers = self.peers.borrow_mut();
        let peer = peers.get_mut(usize::from(of.peer)).filter(|peer| peer.replica == of.replica);
        peer.expect("it is known").is_complete = is_complete;
    }

    fn size_bytes(&self) -> u64 {
        SIZE_BYTES
    }

    fn pending_view(&self) -> Option<PendingView> {
        None
    }

    fn is_disconnected(&self, _: PeerIndex) -> bool {
        true
    }

    fn read_core<R>(&self, at: impl FnOnce(&EngineCore) -> R) -> Option<R> {
        Some(at(&self.core.borrow()))
    }

    fn decide<R>(&self, act: impl FnOnce(&mut EngineCore, &mut Outputs) -> R) -> Option<R> {
        Some(act(&mut self.core.borrow_mut(), &mut self.outputs.borrow_mut()))
    }

    fn control(&self, to: Address) -> Control<'_> {
        Control { engine: self, to }
    }

    async fn open_control(&self, to: Address) -> Result<Welcome, Gone> {
        assert_eq!(to, Address { peer: AWAY, replica: id(2) });
        self.reaches(Moment::Handshake);
        Ok(Welcome {
            run: 7,
            size_bytes: SIZE_BYTES,
            report: ReplicaReport { committed: view(&[1, 2, 4]), proposed: Vec::new() },
            lost_cache: false,
            rebuilding: false,
            tracks: Members::NONE,
            stamp: Some(0),
        })
    }
}

/// A line to a well-behaved replica that keeps nothing, while the volume has it.
struct Control<'a> {
    engine: &'a Engine,
    to: Address,
}

impl Control<'_> {
    fn reach(&self) -> Result<(), Gone> {
        let known = self.engine.peer(self.to.peer).filter(|peer| peer.replica == self.to.replica);
        known.map(drop).ok_or(Gone::Away)
    }
}

impl ReplicaLink for Control<'_> {
    type Error = Gone;

    async fn propose(&mut self, _: View, _: &ReplicaReport) -> Result<(), Gone> {
        self.reach()
    }

    async fn commit(&mut self, _: View, _: &ReplicaReport) -> Result<(), Gone> {
        self.reach()
    }

    async fn expand(&mut self, _: u64) -> Result<(), Gone> {
        self.reach()
    }

    async fn regions_page(&mut self, query: RegionsQuery) -> Result<RegionsPage, Gone> {
        self.reach()?;
        if query.of == RegionsOf::Intent && self.engine.ends_between_pages {
            assert_eq!(query.from, 0, "nothing is asked any more");
            return Ok(RegionsPage { kept: true, runs: vec![], next: Some(1), stamp: 0 });
        }
        if query.of == RegionsOf::Allocated {
            self.engine.read.borrow_mut().push(self.to.replica);
            if self.engine.rotten.contains(&self.to.replica) {
                return Err(Gone::Away);
            }
            self.engine.reaches(Moment::Allocated);
        }
        Ok(RegionsPage { kept: true, runs: vec![], next: None, stamp: 0 })
    }

    async fn mark(&mut self, _: &MarkRegions) -> Result<(), Gone> {
        self.reach()
    }

    async fn layers(&mut self, volume_bytes: impl FnOnce() -> u64) -> Result<LayerList, Gone> {
        self.reach()?;
        if self.to.replica == id(2) {
            self.engine.reaches(Moment::Layers);
        }
        self.engine.listed.borrow_mut().push(self.to.replica);
        let meta = if self.engine.lying.contains(&self.to.replica) { BAD_DOCUMENT } else { "" }.to_owned();
        let image = "volume-head-000.img".to_owned();
        let list = LayerList { layers: vec![WireLayer { image, meta, size_bytes: SIZE_BYTES }] };
        list.check(volume_bytes()).unwrap();
        Ok(list)
    }

    async fn extents(&mut self, _: ExtentsQuery, _: impl FnOnce() -> u64) -> Result<ExtentsPage, Gone> {
        unreachable!("the volume has no snapshot")
    }

    async fn copy_begin(&mut self, layers: &LayerList) -> Result<CopyState, Gone> {
        self.reach()?;
        if layers.layers.iter().any(|layer| layer.meta == BAD_DOCUMENT) {
            return Err(Gone::Invalid);
        }
        Ok(CopyState { done: vec![false; layers.layers.len()] })
    }

    async fn copy_end(&mut self) -> Result<(), Gone> {
        self.engine.ended_copies.set(self.engine.ended_copies.get() + 1);
        self.reach()
    }
}

impl ReplicaRebuild for &Engine {
    type Engine = Engine;

    fn engine(&self) -> &Engine {
        self
    }

    fn peer(&self) -> PeerIndex {
        AWAY
    }

    fn has_to_end(&self) -> bool {
        self.ends_between_pages
    }

    async fn copy_snapshots(
        &self,
        _: Address,
        _: Source,
        _: &[Source],
        _: &LayerList,
        _: &CopyState,
    ) -> Result<(), RebuildError<Gone>> {
        Ok(())
    }

    async fn connect_queues(&self, replica: ReplicaId, _: u64) -> Result<u64, RebuildError<Gone>> {
        assert_eq!(replica, id(2));
        self.reaches(Moment::Connecting);
        self.reaches(Moment::Uncounted);
        Ok(SIZE_BYTES)
    }

    fn report_restored(&self, _: Option<u32>, _: u32) {}

    fn report_rebuilding(&self, _: u64, _: bool) {}
}

fn state_of_the_absent(engine: &Engine) -> PeerState {
    engine.core.borrow().membership().state(AWAY)
}

#[test]
fn a_replica_that_was_away_joins() {
    for is_complete in [true, false] {
        let engine = Engine::new(Moment::Never, is_complete);
        rebuild(&engine).unwrap();
        assert_eq!(state_of_the_absent(&engine), PeerState::Rebuilding);
        assert!(
            engine.peers.borrow()[usize::from(AWAY)].is_complete,
            "a copy is known too when it has ended"
        );
    }
}

/// The member may have been recreated before it has listed its extents.
#[test]
fn a_copy_of_a_member_that_has_left_does_not_join() {
    let engine = Engine::new(Moment::Allocated, false);
    let trouble = rebuild(&engine).unwrap_err();
    assert!(matches!(trouble, RebuildError::NotYet(why) if why.contains("has left")), "{trouble:?}");
    assert_eq!(state_of_the_absent(&engine), PeerState::Failed);
}

/// The regions that the attempt has found are in no set of the core then. The next attempt has to find them
/// again.
#[test]
fn a_copy_that_the_core_does_not_take_is_not_ended() {
    for is_complete in [true, false] {
        let engine = Engine::new(Moment::Uncounted, is_complete);
        let trouble = rebuild(&engine).unwrap_err();
        assert!(
            matches!(trouble, RebuildError::NotYet(why) if why.contains("cannot rebuild")),
            "{trouble:?}"
        );
        assert_eq!(state_of_the_absent(&engine), PeerState::Failed);
        assert_eq!(engine.peers.borrow()[usize::from(AWAY)].is_complete, is_complete);
        assert_eq!(engine.ended_copies.get(), 0);
        let is_drop = |output: &Output| matches!(output, Output::Drop { peer: AWAY, .. });
        assert!(engine.outputs.borrow().iter().any(is_drop), "the queues give its connections up");
    }
}

#[test]
fn the_replica_that_has_got_its_number_does_not_join_in_its_place() {
    let moments = [Moment::Handshake, Moment::Layers, Moment::Connecting];
    for (moment, is_complete) in moments.into_iter().flat_map(|moment| [(moment, true), (moment, false)]) {
        let engine = Engine::new(moment, is_complete);
        let trouble = rebuild(&engine).unwrap_err();
        assert!(
            matches!(trouble, RebuildError::Ended | RebuildError::Failed { .. }),
            "{moment:?}: {trouble:?}"
        );
        assert_eq!(engine.core.borrow().membership().replica(AWAY), Some(id(3)));
        assert_eq!(state_of_the_absent(&engine), PeerState::Failed, "{moment:?}");
        assert!(!engine.peers.borrow()[usize::from(AWAY)].is_complete);
        let is_drop = |output: &Output| matches!(output, Output::Drop { peer: AWAY, .. });
        let drops = engine.outputs.borrow().iter().filter(|output| is_drop(output)).count();
        assert_eq!(drops, usize::from(moment == Moment::Connecting), "the queues give its connections up");
    }
}

#[test]
fn another_member_is_read_after_one_that_does_not_answer() {
    let engine = Engine { rotten: vec![id(1)], ..Engine::new(Moment::Never, false) };
    let mut bad_sources = BadSources::default();
    let trouble = finish(shorthorn_recovery::rebuild(&&engine, &mut bad_sources)).unwrap_err();
    assert!(matches!(trouble, RebuildError::SourceFailed { source, .. } if source == id(1)), "{trouble:?}");
    finish(shorthorn_recovery::rebuild(&&engine, &mut bad_sources)).unwrap();
    assert_eq!(*engine.read.borrow(), [id(1), id(4)]);
    assert_eq!(state_of_the_absent(&engine), PeerState::Rebuilding);
}

/// Only the replica reads the documents of the layers. Else the first member would be asked for ever.
#[test]
fn another_member_is_copied_after_one_whose_layers_are_refused() {
    let engine = Engine { lying: vec![id(1)], ..Engine::new(Moment::Never, false) };
    let mut bad_sources = BadSources::default();
    let trouble = finish(shorthorn_recovery::rebuild(&&engine, &mut bad_sources)).unwrap_err();
    assert!(matches!(trouble, RebuildError::SourceFailed { source, .. } if source == id(1)), "{trouble:?}");
    finish(shorthorn_recovery::rebuild(&&engine, &mut bad_sources)).unwrap();
    assert_eq!(*engine.listed.borrow(), [1, 2, 4, 2].map(id));
    assert_eq!(state_of_the_absent(&engine), PeerState::Rebuilding);
}

#[test]
fn members_that_do_not_answer_are_read_in_turn() {
    let engine = Engine { rotten: vec![id(1), id(4)], ..Engine::new(Moment::Never, false) };
    let mut bad_sources = BadSources::default();
    for _ in 0..4 {
        finish(shorthorn_recovery::rebuild(&&engine, &mut bad_sources)).unwrap_err();
    }
    assert_eq!(*engine.read.borrow(), [1, 4, 1, 4].map(id));
}

#[test]
fn a_rebuild_task_that_has_to_end_asks_for_no_further_page() {
    let engine = Engine { ends_between_pages: true, ..Engine::new(Moment::Never, true) };
    let trouble = rebuild(&engine).unwrap_err();
    assert!(matches!(trouble, RebuildError::Ended), "{trouble:?}");
}
