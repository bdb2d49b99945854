//! The order of the steps of a start, and the way each of their outcomes is taken, with an engine that writes down its calls.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use shorthorn_recovery::{
    Grant, Link, LinkError, NotOpen, OpeningEngine, Proposal, Reached, Volume, conclude, open, propose_to,
};
use shorthorn_types::{
    Errno, Generation, MarkRegions, Members, RegionsOf, ReplicaId, ReplicaReport, View, ViewId,
};
use shorthorn_views::{Change, Kept, NoPlan, Plan, Witness};
use shorthorn_wire::{CopyState, ExtentsPage, ExtentsQuery, LayerList, RegionsPage, RegionsQuery, Welcome};

const SIZE_BYTES: u64 = 16 << 20;

fn finish<T>(steps: impl Future<Output = T>) -> T {
    match pin!(steps).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => panic!("nothing here waits"),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    Refuses(Errno),
    Deposed(Generation),
}

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self:?}")
    }
}

impl LinkError for Broken {
    fn deposed_by(&self) -> Option<Generation> {
        match self {
            Broken::Deposed(holder) => Some(*holder),
            Broken::Refuses(_) => None,
        }
    }

    fn is_refusal(&self) -> bool {
        matches!(self, Broken::Refuses(_))
    }
}

type Calls = Rc<RefCell<Vec<String>>>;

/// A replica that does as it is told, and answers proposals with `answer`.
struct Replica {
    id: ReplicaId,
    calls: Calls,
    answer: Result<(), Broken>,
}

impl Replica {
    fn called(&self, what: &str) {
        self.calls.borrow_mut().push(format!("{} {what}", self.id));
    }
}

impl Link for Replica {
    type Error = Broken;

    async fn propose(&mut self, _: View, _: &ReplicaReport) -> Result<(), Broken> {
        self.called("propose");
        self.answer
    }

    async fn commit(&mut self, _: View, _: &ReplicaReport) -> Result<(), Broken> {
        self.called("commit");
        Ok(())
    }

    async fn expand(&mut self, _: u64) -> Result<(), Broken> {
        unreachable!("it has the size of the volume")
    }

    async fn regions_page(&mut self, query: RegionsQuery) -> Result<RegionsPage, Broken> {
        self.called(if query.of == RegionsOf::Intent { "intent" } else { "missed" });
        Ok(RegionsPage { kept: true, runs: vec![], next: None, stamp: 0 })
    }

    async fn mark(&mut self, change: &MarkRegions) -> Result<(), Broken> {
        self.called(&format!("{:?}", change.action));
        Ok(())
    }

    async fn layers(&mut self) -> Result<LayerList, Broken> {
        unreachable!("a start copies nothing")
    }

    async fn extents(&mut self, _: ExtentsQuery) -> Result<ExtentsPage, Broken> {
        unreachable!("a start copies nothing")
    }

    async fn copy_begin(&mut self, _: &LayerList) -> Result<CopyState, Broken> {
        unreachable!("a start copies nothing")
    }

    async fn copy_end(&mut self) -> Result<(), Broken> {
        unreachable!("a start copies nothing")
    }
}

struct Engine {
    calls: Calls,
    reached: Vec<Reached<Replica>>,
    grants: VecDeque<Grant>,
    waited_ms: u64,
}

impl Engine {
    fn called(&self, what: &str) {
        self.calls.borrow_mut().push(what.to_owned());
    }
}

impl OpeningEngine for Engine {
    type Link = Replica;
    type Connections = Vec<ReplicaId>;
    type Stop = &'static str;

    async fn reach(&mut self) -> Result<Vec<Reached<Replica>>, NotOpen<&'static str>> {
        Ok(std::mem::take(&mut self.reached))
    }

    fn planned(&mut self, _: &[Witness], _: Result<&Plan, &NoPlan>) {}

    fn waited_ms(&self) -> u64 {
        self.waited_ms
    }

    fn has_user(&self) -> bool {
        true
    }

    fn ask_arbiter(&mut self, _: &Change, _: Members) {
        self.called("ask");
    }

    async fn next_grant(&mut self, _: &mut [Reached<Replica>]) -> Result<Grant, NotOpen<&'static str>> {
        self.called("wait");
        self.grants.pop_front().ok_or(NotOpen::Stopped("nobody answers"))
    }

    fn ask_no_more(&mut self) {
        self.called("ask no more");
    }

    fn note_lost_writes(&mut self) -> Result<(), &'static str> {
        self.called("note lost writes");
        Ok(())
    }

    async fn propose(
        &mut self,
        to: Vec<Reached<Replica>>,
        proposal: &Proposal,
    ) -> Vec<(Reached<Replica>, Result<Option<Kept>, Broken>)> {
        let mut answers = Vec::new();
        for mut one in to {
            let answer = propose_to(&mut one, proposal).await;
            answers.push((one, answer));
        }
        answers
    }

    async fn connect(
        &mut self,
        reached: Vec<Reached<Replica>>,
        proposal: &Proposal,
    ) -> Result<Vec<ReplicaId>, NotOpen<&'static str>> {
        let mut members = Vec::new();
        for mut one in reached {
            conclude(&mut one, proposal).await.unwrap();
            members.push(one.replica);
        }
        Ok(members)
    }
}

fn id(number: u64) -> ReplicaId {
    ReplicaId::from_random(number)
}

/// The view that the engine before has left, with replicas 1 to `count`.
fn last_view(count: u64) -> View {
    let members = Members::new((1..=count).map(id)).unwrap();
    View { id: ViewId { generation: Generation::new(1, 0), number: 1 }, members }
}

fn volume(count: u64) -> Volume {
    Volume {
        generation: Generation::new(2, 0),
        replicas: (1..=count).map(id).collect(),
        size_bytes: SIZE_BYTES,
        granted: None,
        missing_limit_ms: 1000,
        keeper_limit_ms: 5000,
    }
}

/// An engine that reaches some of `count` replicas, long after its start.
fn engine(count: u64, reached: &[u64], lost_cache: bool) -> Engine {
    let calls = Calls::default();
    let welcome = |_: &u64| Welcome {
        run: 7,
        size_bytes: SIZE_BYTES,
        report: ReplicaReport { committed: last_view(count), proposed: Vec::new() },
        lost_cache,
        rebuilding: false,
        tracks: Members::NONE,
        stamp: Some(4),
    };
    let reached = reached.iter().map(|number| Reached {
        replica: id(*number),
        link: Replica { id: id(*number), calls: Rc::clone(&calls), answer: Ok(()) },
        welcome: welcome(number),
    });
    Engine {
        reached: reached.collect(),
        grants: VecDeque::new(),
        waited_ms: 60_000,
        calls: Rc::clone(&calls),
    }
}

fn calls(engine: &Engine) -> Vec<String> {
    engine.calls.borrow().clone()
}

#[test]
fn sets_are_asked_for_after_the_proposal_and_nothing_is_committed_before_all_have_answered() {
    let mut engine = engine(2, &[1, 2], false);
    let opened = finish(open(&mut engine, &volume(2))).unwrap();
    assert_eq!(opened.connections, [id(1), id(2)]);
    assert_eq!(opened.last_view, last_view(2));
    let ids = (id(1), id(2));
    let wanted = ["propose", "intent"].map(|call| format!("{} {call}", ids.0));
    let wanted = wanted.into_iter().chain(["propose", "intent"].map(|call| format!("{} {call}", ids.1)));
    let wanted: Vec<_> = wanted.chain([format!("{} commit", ids.0), format!("{} commit", ids.1)]).collect();
    assert_eq!(calls(&engine), wanted);
}

#[test]
fn half_of_a_view_proposes_nothing_before_the_grant() {
    let mut engine = engine(2, &[1], false);
    let granted = View {
        id: ViewId { generation: Generation::new(2, 0), number: 1 },
        members: Members::new([id(1)]).unwrap(),
    };
    engine.grants = [Grant::Nothing, Grant::Told(last_view(2)), Grant::Told(granted)].into();
    assert_eq!(finish(open(&mut engine, &volume(2))).unwrap().view, granted);
    assert_eq!(calls(&engine)[..5], ["ask", "wait", "wait", "wait", "ask no more"]);
    assert!(calls(&engine)[5].ends_with("propose"));
}

#[test]
fn a_grant_of_another_view_or_a_replica_that_is_back_ends_the_attempt() {
    let other = View {
        id: ViewId { generation: Generation::new(1, 7), number: 1 },
        members: Members::new([id(2)]).unwrap(),
    };
    for grant in [Grant::Told(other), Grant::Back(id(2))] {
        let mut engine = engine(2, &[1], false);
        engine.grants = [grant].into();
        let error = finish(open(&mut engine, &volume(2))).unwrap_err();
        assert!(matches!(error, NotOpen::Torn(_)), "{grant:?}: {error:?}");
        assert_eq!(calls(&engine), ["ask", "wait", "ask no more"], "{grant:?}");
    }
}

#[test]
fn lost_writes_are_noted_before_the_proposal() {
    let mut engine = engine(2, &[1, 2], true);
    finish(open(&mut engine, &volume(2))).unwrap();
    assert_eq!(calls(&engine)[0], "note lost writes");
}

#[test]
fn a_missing_member_is_waited_for_longer_if_the_others_have_lost_writes() {
    for (lost_cache, waited_ms, waits) in [
        (false, 1000, true),
        (false, 1001, false),
        (true, 1001, true),
        (true, 5000, true),
        (true, 5001, false),
    ] {
        let mut engine = engine(3, &[1, 2], lost_cache);
        engine.waited_ms = waited_ms;
        let opened = finish(open(&mut engine, &volume(3)));
        assert_eq!(matches!(opened, Err(NotOpen::Waiting(_))), waits, "{lost_cache} {waited_ms}: {opened:?}");
        assert_eq!(calls(&engine).is_empty(), waits, "nothing is proposed before");
    }
}

#[test]
fn a_member_that_does_not_store_the_view_tears_the_attempt_and_a_newer_engine_ends_it() {
    let holder = Generation::new(3, 0);
    for answer in [Broken::Refuses(Errno::IO), Broken::Deposed(holder)] {
        let mut engine = engine(3, &[1, 2, 3], false);
        engine.reached[1].link.answer = Err(answer);
        match finish(open(&mut engine, &volume(3))).unwrap_err() {
            NotOpen::Torn(why) => assert!(answer.is_refusal() && why.contains("Refuses"), "{why}"),
            NotOpen::Deposed(by) => assert_eq!((by, answer), (holder, Broken::Deposed(holder))),
            other => panic!("{other:?}"),
        }
        assert!(!calls(&engine).iter().any(|call| call.ends_with("commit")), "{:?}", calls(&engine));
    }
}
