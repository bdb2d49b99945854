//! The order of the steps of a start, and the way each of their outcomes is taken, with an engine that writes
//! down its calls.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use shorthorn_recovery::{
    Grant, LinkError, NotOpen, Offenders, OpenRequest, Opened, OpeningEngine, Proposal, Reached, ReplicaLink,
    conclude, propose_to,
};
use shorthorn_types::{
    Errno, Generation, MarkRegions, Members, RegionsOf, ReplicaId, ReplicaReport, View, ViewId,
};
use shorthorn_views::{FencedReplica, MemberSets, NoPlan, StartPlan, ViewChange};
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

/// Returns the first attempt to open the volume.
fn open(engine: &mut Engine, request: &OpenRequest) -> Result<Opened<Vec<ReplicaId>>, NotOpen<&'static str>> {
    finish(shorthorn_recovery::open(engine, request, &mut Offenders::default()))
}

/// A well-behaved replica, which answers proposals with `answer`.
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

impl ReplicaLink for Replica {
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

    async fn layers(&mut self, _: impl FnOnce() -> u64) -> Result<LayerList, Broken> {
        unreachable!("a start copies nothing")
    }

    async fn extents(&mut self, _: ExtentsQuery, _: impl FnOnce() -> u64) -> Result<ExtentsPage, Broken> {
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
    /// True if the process waits after these grants, else it ends.
    is_arbiter_silent: bool,
    waited_ms: u64,
    /// The replica whose queues cannot be connected.
    unconnected: Option<ReplicaId>,
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

    fn planned(&mut self, _: &[FencedReplica], _: Result<&StartPlan, &NoPlan>) {}

    fn offended(&mut self, replica: ReplicaId, _: &str) {
        self.called(&format!("{replica} offends"));
    }

    fn leaves_out(&mut self, replica: ReplicaId, reason: &str) {
        self.called(&format!("without {replica}: {reason}"));
    }

    fn waited_ms(&self) -> u64 {
        self.waited_ms
    }

    fn has_user(&self) -> bool {
        true
    }

    fn ask_arbiter(&mut self, _: &ViewChange, _: Members) {
        self.called("ask");
    }

    async fn next_grant(&mut self, _: &mut [Reached<Replica>]) -> Result<Grant, NotOpen<&'static str>> {
        self.called("wait");
        match self.grants.pop_front() {
            Some(grant) => Ok(grant),
            None if self.is_arbiter_silent => Ok(Grant::Nothing),
            None => Err(NotOpen::Stopped("no replica answers")),
        }
    }

    fn ask_no_more(&mut self) {
        self.called("ask no more");
    }

    fn record_start(&mut self, _: &ReplicaReport, lost_writes: bool) -> Result<(), &'static str> {
        if lost_writes {
            self.called("record lost writes");
        }
        Ok(())
    }

    async fn propose(
        &mut self,
        to: Vec<Reached<Replica>>,
        proposal: &Proposal,
    ) -> Vec<(Reached<Replica>, Result<Option<MemberSets>, Broken>)> {
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
            if self.unconnected == Some(one.replica) {
                return Err(NotOpen::aborted_by(one.replica, "a queue is not connected"));
            }
            members.push(one.replica);
        }
        Ok(members)
    }
}

fn id(number: u64) -> ReplicaId {
    ReplicaId::from_random(number)
}

/// Returns the view that the engine before has left, with replicas 1 to `count`.
fn last_view(count: u64) -> View {
    let members = Members::new((1..=count).map(id)).unwrap();
    View { id: ViewId { generation: Generation::new(1, 0), number: 1 }, members }
}

fn request(count: u64) -> OpenRequest {
    OpenRequest {
        generation: Generation::new(2, 0),
        replicas: (1..=count).map(id).collect(),
        size_bytes: SIZE_BYTES,
        granted: None,
        missing_limit_ms: 1000,
        member_limit_ms: 5000,
    }
}

/// Returns an engine that reaches some of `count` replicas, long after its start.
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
        is_arbiter_silent: false,
        waited_ms: 60_000,
        unconnected: None,
        calls: Rc::clone(&calls),
    }
}

fn calls(engine: &Engine) -> Vec<String> {
    engine.calls.borrow().clone()
}

#[test]
fn sets_are_requested_after_the_proposal_and_answered_before_the_commit() {
    let mut engine = engine(2, &[1, 2], false);
    let opened = open(&mut engine, &request(2)).unwrap();
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
    engine.grants = [Grant::Nothing, Grant::Answered(last_view(2)), Grant::Answered(granted)].into();
    assert_eq!(open(&mut engine, &request(2)).unwrap().view, granted);
    assert_eq!(calls(&engine)[..5], ["ask", "wait", "wait", "wait", "ask no more"]);
    assert!(calls(&engine)[5].ends_with("propose"));
}

#[test]
fn a_grant_of_another_view_or_a_replica_that_is_back_ends_the_attempt() {
    let other = View {
        id: ViewId { generation: Generation::new(1, 7), number: 1 },
        members: Members::new([id(2)]).unwrap(),
    };
    for grant in [Grant::Answered(other), Grant::Back(id(2))] {
        let mut engine = engine(2, &[1], false);
        engine.grants = [grant].into();
        let error = open(&mut engine, &request(2)).unwrap_err();
        assert!(matches!(error, NotOpen::Aborted { .. }), "{grant:?}: {error:?}");
        assert_eq!(calls(&engine), ["ask", "wait", "ask no more"], "{grant:?}");
    }
}

#[test]
fn lost_writes_are_recorded_before_the_proposal() {
    let mut engine = engine(2, &[1, 2], true);
    open(&mut engine, &request(2)).unwrap();
    assert_eq!(calls(&engine)[0], "record lost writes");
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
        let opened = open(&mut engine, &request(3));
        assert_eq!(matches!(opened, Err(NotOpen::Waiting(_))), waits, "{lost_cache} {waited_ms}: {opened:?}");
        assert_eq!(calls(&engine).is_empty(), waits, "nothing is proposed before");
    }
}

#[test]
fn a_member_that_refuses_the_view_aborts_the_start_and_a_newer_engine_ends_it() {
    let holder = Generation::new(3, 0);
    for answer in [Broken::Refuses(Errno::IO), Broken::Deposed(holder)] {
        let mut engine = engine(3, &[1, 2, 3], false);
        engine.reached[1].link.answer = Err(answer);
        match open(&mut engine, &request(3)).unwrap_err() {
            NotOpen::Aborted { reason, .. } => {
                assert!(answer.is_refusal() && reason.contains("Refuses"), "{reason}")
            }
            NotOpen::Deposed(by) => assert_eq!((by, answer), (holder, Broken::Deposed(holder))),
            other => panic!("{other:?}"),
        }
        assert!(!calls(&engine).iter().any(|call| call.ends_with("commit")), "{:?}", calls(&engine));
    }
}

/// The result of an attempt.
type Attempted = Result<Opened<Vec<ReplicaId>>, NotOpen<&'static str>>;

/// Returns an attempt to open a volume of `count` replicas of which the second refuses every proposal, and
/// the calls that it makes.
fn attempt_with_a_liar(
    offenders: &mut Offenders,
    count: u64,
    change: impl Fn(&mut Engine),
) -> (Attempted, Vec<String>) {
    let all: Vec<u64> = (1..=count).collect();
    let mut engine = engine(count, &all, false);
    engine.reached[1].link.answer = Err(Broken::Refuses(Errno::IO));
    change(&mut engine);
    let opened = finish(shorthorn_recovery::open(&mut engine, &request(count), offenders));
    (opened, calls(&engine))
}

/// Makes the attempts after which the second is an offender.
fn fail(offenders: &mut Offenders, count: u64, change: impl Fn(&mut Engine)) {
    for _ in 0..3 {
        let (aborted, _) = attempt_with_a_liar(offenders, count, &change);
        assert!(matches!(aborted, Err(NotOpen::Aborted { by: None, .. })), "{aborted:?}");
    }
}

#[test]
fn a_replica_that_fails_again_and_again_keeps_no_volume_from_opening() {
    let mut offenders = Offenders::default();
    for _ in 0..3 {
        let (aborted, calls) = attempt_with_a_liar(&mut offenders, 3, |_| {});
        assert!(matches!(aborted, Err(NotOpen::Aborted { .. })), "{aborted:?}");
        assert!(calls.contains(&format!("{} offends", id(2))), "{calls:?}");
    }
    let (opened, calls) = attempt_with_a_liar(&mut offenders, 3, |_| {});
    let opened = opened.unwrap();
    assert_eq!(opened.view.members, Members::new([id(1), id(3)]).unwrap());
    assert_eq!((opened.runs[1], opened.last_view), (None, last_view(3)));
    assert_eq!(calls[0], format!("without {}: Refuses({:?})", id(2), Errno::IO));
    assert!(
        !calls.iter().any(|call| call.starts_with(&id(2).to_string())),
        "nothing is asked of it: {calls:?}"
    );
}

#[test]
fn an_offender_is_waited_for_as_a_replica_that_does_not_answer() {
    let mut offenders = Offenders::default();
    let early = |engine: &mut Engine| engine.waited_ms = 1000;
    for _ in 0..2 {
        fail(&mut offenders, 3, early);
    }
    assert!(attempt_with_a_liar(&mut offenders, 3, |engine| engine.waited_ms = 1001).0.is_ok());
}

#[test]
fn a_stamp_that_only_an_offender_knows_is_not_used() {
    let mut offenders = Offenders::default();
    let forget = |engine: &mut Engine| {
        [0, 2].into_iter().for_each(|place| engine.reached[place].welcome.stamp = None);
        engine.reached[1].welcome.stamp = Some(20);
    };
    fail(&mut offenders, 3, forget);
    let (opened, _) = attempt_with_a_liar(&mut offenders, 3, forget);
    assert_eq!(opened.unwrap().stamp, 22);
}

#[test]
fn half_of_a_view_continues_without_an_offender_only_with_a_grant() {
    let mut offenders = Offenders::default();
    fail(&mut offenders, 2, |_| {});
    let granted = View {
        id: ViewId { generation: Generation::new(2, 0), number: 1 },
        members: Members::new([id(1)]).unwrap(),
    };
    let grant = |engine: &mut Engine| engine.grants = [Grant::Nothing, Grant::Answered(granted)].into();
    let (opened, calls) = attempt_with_a_liar(&mut offenders, 2, grant);
    assert_eq!(opened.unwrap().view, granted);
    assert_eq!(calls[1..5], ["ask", "wait", "wait", "ask no more"]);
}

#[test]
fn the_wait_for_that_grant_ends_and_the_next_attempt_has_all() {
    let mut offenders = Offenders::default();
    fail(&mut offenders, 2, |_| {});
    let silent = |engine: &mut Engine| engine.is_arbiter_silent = true;
    let (aborted, calls) = attempt_with_a_liar(&mut offenders, 2, silent);
    assert!(matches!(aborted, Err(NotOpen::Aborted { by: None, .. })), "{aborted:?}");
    assert_eq!(calls.iter().filter(|call| *call == "wait").count(), 20);
    assert!(!calls.iter().any(|call| call.ends_with("propose")), "{calls:?}");
    let well = |engine: &mut Engine| engine.reached[1].link.answer = Ok(());
    let (opened, _) = attempt_with_a_liar(&mut offenders, 2, well);
    assert_eq!(opened.unwrap().view.members, last_view(2).members);
}

#[test]
fn an_offender_that_the_start_needs_is_asked_again() {
    let mut offenders = Offenders::default();
    // Only this replica has kept everything.
    let lose = |engine: &mut Engine| {
        [0, 2].into_iter().for_each(|place| engine.reached[place].welcome.lost_cache = true);
    };
    fail(&mut offenders, 3, lose);
    for _ in 0..4 {
        let (aborted, calls) = attempt_with_a_liar(&mut offenders, 3, lose);
        assert!(matches!(aborted, Err(NotOpen::Aborted { .. })), "{aborted:?}");
        assert!(calls.contains(&format!("{} propose", id(2))), "{calls:?}");
        assert!(!calls.contains(&"record lost writes".to_owned()), "{calls:?}");
    }
}

#[test]
fn a_member_whose_queues_cannot_be_connected_is_left_out_too() {
    let mut offenders = Offenders::default();
    let attempt = |offenders: &mut Offenders| {
        let mut engine = engine(3, &[1, 2, 3], false);
        engine.unconnected = Some(id(2));
        finish(shorthorn_recovery::open(&mut engine, &request(3), offenders))
    };
    for _ in 0..3 {
        match attempt(&mut offenders) {
            Err(NotOpen::Aborted { reason, .. }) => assert!(reason.contains(&id(2).to_string()), "{reason}"),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(attempt(&mut offenders).unwrap().view.members, Members::new([id(1), id(3)]).unwrap());
}
