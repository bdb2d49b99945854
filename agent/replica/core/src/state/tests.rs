use std::collections::BTreeMap;

use shorthorn_regions::DirtyMark;
use shorthorn_types::{ByteRange, Errno, MarkAction, Members, Regions, RegionsOf, ViewId};

use super::*;
use crate::start::{Started, StoredFiles, SumsFound};

const SIZE_BYTES: u64 = 64 << 20;

fn id(n: u64) -> ReplicaId {
    ReplicaId::from_random(n)
}

fn view(number: u32, members: &[u64]) -> View {
    let members = Members::new(members.iter().copied().map(id)).unwrap();
    View { id: ViewId { generation: Generation::new(1, 0), number }, members }
}

/// A disk in memory.
#[derive(Clone, Debug)]
pub(crate) struct Memory {
    views: ReplicaViews,
    sets: BTreeMap<SetKey, Vec<u8>>,
    lost_cache: bool,
    failures: u32,
    /// The fate of the record of a failure.
    recorded: RecordOutcome,
    says_left: bool,
    /// The executed steps.
    done: Vec<String>,
    /// The index of the step that fails, the error, and whether it is done.
    fails: Option<(usize, Errno, bool)>,
}

impl Memory {
    fn new() -> Memory {
        let first = View { id: ViewId { generation: Generation::NEVER, number: 0 }, ..view(0, &[1, 2, 3]) };
        let (views, sets) = (ReplicaViews::new(first), BTreeMap::new());
        Memory {
            views,
            sets,
            lost_cache: false,
            failures: 0,
            recorded: RecordOutcome::Counted,
            says_left: false,
            done: Vec::new(),
            fails: None,
        }
    }

    fn start(&mut self) -> ReplicaState {
        let out_of_sync = self.sets.iter().filter_map(|(key, file)| match key {
            SetKey::OutOfSync(replica) => Some((*replica, file.clone())),
            SetKey::Intent | SetKey::Unsummed => None,
        });
        let found = StoredFiles {
            me: id(1),
            views: self.views.clone(),
            regions: Regions::of(SIZE_BYTES),
            epoch: 1,
            intent: self.sets.get(&SetKey::Intent).cloned(),
            out_of_sync: out_of_sync.collect(),
            sums: SumsFound::Unwanted { has_file: false },
            holds_data: false,
            lost_cache: self.lost_cache,
            is_left_recorded: self.says_left,
            failures: self.failures,
        };
        let Started { state, damages } = ReplicaState::start(self, found).unwrap();
        assert!(damages.is_empty());
        self.done.clear();
        state
    }

    fn done(&mut self) -> Vec<String> {
        std::mem::take(&mut self.done)
    }
}

impl Disk for Memory {
    type Error = Errno;

    fn perform(&mut self, step: DurableStep<'_>) -> Result<(), Errno> {
        let failure = match &mut self.fails {
            Some((0, errno, is_done)) => Some((*errno, *is_done)),
            _ => None,
        };
        if let Some((left, ..)) = &mut self.fails {
            *left = left.wrapping_sub(1);
        }
        if failure.is_some_and(|(_, is_done)| !is_done) {
            return failure.map_or(Ok(()), |(errno, _)| Err(errno));
        }
        self.done.push(match step {
            DurableStep::SaveViews(_) => "views".to_owned(),
            DurableStep::MakeSet(key, _) => format!("make {key}"),
            DurableStep::RemoveSet(key) => format!("remove {key}"),
            DurableStep::RecordMadeUpFor => "made up for".to_owned(),
            DurableStep::RecordLeft => "left".to_owned(),
            DurableStep::RecordMember => "member".to_owned(),
        });
        match step {
            DurableStep::SaveViews(views) => self.views = views.clone(),
            DurableStep::MakeSet(key, file) => drop(self.sets.insert(key, file.to_vec())),
            DurableStep::RemoveSet(key) => drop(self.sets.remove(&key)),
            DurableStep::RecordMadeUpFor => self.lost_cache = false,
            DurableStep::RecordLeft => self.says_left = true,
            DurableStep::RecordMember => self.says_left = false,
        }
        failure.map_or(Ok(()), |(errno, _)| Err(errno))
    }

    fn record_failure(&mut self, in_a_row: u32) -> RecordOutcome {
        self.done.push(format!("lost, {in_a_row}"));
        match self.recorded {
            RecordOutcome::Counted => (self.lost_cache, self.failures) = (true, in_a_row),
            RecordOutcome::Uncounted => (self.lost_cache, self.failures) = (true, 0),
            RecordOutcome::Not => {}
        }
        self.recorded
    }
}

/// Returns a replica that engine 1 has opened.
pub(crate) fn opened() -> (Memory, ReplicaState) {
    let mut disk = Memory::new();
    let mut state = disk.start();
    state.fence(&mut disk, Generation::new(1, 0)).unwrap();
    disk.done();
    (disk, state)
}

fn propose(disk: &mut Memory, state: &mut ReplicaState, view: View) -> Result<(), Errno> {
    let basis = state.views().report().clone();
    state.propose(disk, Generation::new(1, 0), view, &basis)
}

fn forget(replica: u64) -> MarkRegions {
    mark(RegionsOf::OutOfSync(id(replica)), MarkAction::Forget, &[])
}

fn mark(of: RegionsOf, action: MarkAction, runs: &[(u32, u32)]) -> MarkRegions {
    MarkRegions { of, action, runs: runs.to_vec(), stamp: 0, size_bytes: None }
}

/// Checks that the replica has a set for every replica that a view that may count lacks, as it promises with
/// the view.
fn check_promise(disk: &Memory) {
    for view in disk.views.report().views() {
        for gone in [2, 3].into_iter().filter(|n| !view.members.contains(id(*n))) {
            assert!(disk.sets.contains_key(&SetKey::OutOfSync(id(gone))), "no set of {gone} for {view}");
        }
    }
}

/// Runs `change` with each of its steps failing in turn, done or not, and calls `check` on the remaining
/// state.
fn with_each_failure(
    change: impl Fn(&mut Memory, &mut ReplicaState) -> Result<(), Errno>,
    prepare: impl Fn() -> (Memory, ReplicaState),
    check: impl Fn(&Memory, &ReplicaState),
) {
    let (mut disk, mut state) = prepare();
    change(&mut disk, &mut state).unwrap();
    let steps = disk.done().len();
    assert!(steps > 0);
    for (failing, is_done) in (0..steps).flat_map(|step| [(step, false), (step, true)]) {
        let (mut disk, mut state) = prepare();
        disk.fails = Some((failing, Errno::IO, is_done));
        assert_eq!(change(&mut disk, &mut state), Err(Errno::IO));
        check(&disk, &state);
    }
}

#[test]
fn a_generation_is_stored_once() {
    let mut disk = Memory::new();
    let mut state = disk.start();
    let generation = Generation::new(2, 0);
    assert_eq!(state.fence(&mut disk, generation), Ok(Fence::Raised));
    assert_eq!((disk.done(), disk.views.generation()), (vec!["views".to_owned()], generation));
    assert_eq!(state.fence(&mut disk, generation), Ok(Fence::Same));
    assert_eq!(state.fence(&mut disk, Generation::new(1, 0)), Err(Errno::NOT_PERMITTED));
    assert!(disk.done().is_empty());
}

#[test]
fn a_generation_that_could_not_be_stored_holds_nothing() {
    let mut disk = Memory::new();
    let mut state = disk.start();
    disk.fails = Some((0, Errno::NO_SPACE, false));
    assert_eq!(state.fence(&mut disk, Generation::new(2, 0)), Err(Errno::NO_SPACE));
    assert_eq!((state.views().generation(), state.failure()), (Generation::NEVER, None));
    assert_eq!(state.fence(&mut disk, Generation::new(1, 0)), Ok(Fence::Raised), "the generation is new");
}

#[test]
fn a_view_is_stored_after_the_sets_that_it_needs() {
    let (mut disk, mut state) = opened();
    propose(&mut disk, &mut state, view(1, &[1])).unwrap();
    let [two, three] = [2, 3].map(|n| format!("make missed-{}", id(n)));
    assert_eq!(disk.done(), [two, three, "views".to_owned()]);
    assert_eq!(state.intent_log().tracks().len(), 2);
    propose(&mut disk, &mut state, view(1, &[1])).unwrap();
    assert!(disk.done().is_empty(), "it is stored already");
}

/// Replica 3 left while this one was away, and replica 2 is given up: only the engine knows what they miss.
#[test]
fn a_replica_that_becomes_a_member_again_keeps_only_the_sets_that_the_engine_has_sent() {
    let add = |replica| mark(RegionsOf::OutOfSync(id(replica)), MarkAction::Add, &[(1, 1)]);
    let generation = Generation::new(1, 0);
    let serving = ReplicaReport { committed: view(4, &[4]), proposed: Vec::new() };
    for (is_sent, kept) in [(false, Members::NONE), (true, Members::new([id(2)]).unwrap())] {
        let (mut disk, mut state) = opened();
        propose(&mut disk, &mut state, view(1, &[1, 3])).unwrap();
        state.commit(&mut disk, generation, view(1, &[1, 3])).unwrap();
        // An earlier connection of the engine counts for nothing.
        state.mark(&mut disk, &add(2)).unwrap();
        state.hello(&mut disk, generation, 0).unwrap();
        if is_sent {
            state.mark(&mut disk, &add(2)).unwrap();
            // Other connections of the engine come and go.
            state.hello(&mut disk, generation, 1).unwrap();
            state.fence(&mut disk, generation).unwrap();
        }
        let target = view(5, &[1, 4]);
        state.propose(&mut disk, generation, target, &serving).unwrap();
        assert_eq!(state.intent_log().tracks(), kept);
        assert!(state.views().report().proposed.contains(&target));
    }
}

#[test]
fn the_incomplete_sets_of_a_new_member_end_before_the_view_is_stored() {
    let prepare = || {
        let (mut disk, mut state) = opened();
        propose(&mut disk, &mut state, view(1, &[1, 3])).unwrap();
        disk.done();
        (disk, state)
    };
    let serving = ReplicaReport { committed: view(4, &[4]), proposed: Vec::new() };
    let change = |disk: &mut Memory, state: &mut ReplicaState| {
        state.propose(disk, Generation::new(1, 0), view(5, &[1, 4]), &serving)
    };
    with_each_failure(change, prepare, |disk, _| {
        let is_stored = disk.views.report().proposed.contains(&view(5, &[1, 4]));
        assert!(!is_stored || !disk.sets.contains_key(&SetKey::OutOfSync(id(2))));
    });
}

#[test]
fn a_refused_view_begins_no_set() {
    let (mut disk, mut state) = opened();
    let basis = state.views().report().clone();
    let refused = state.propose(&mut disk, Generation::new(9, 0), view(1, &[1]), &basis);
    assert_eq!(refused, Err(Errno::NOT_PERMITTED));
    assert!(disk.done().is_empty());
}

#[test]
fn whatever_fails_no_view_is_left_without_its_sets() {
    let check = |disk: &Memory, state: &ReplicaState| {
        check_promise(disk);
        assert!(disk.lost_cache, "it is recorded before any answer");
        assert!(state.failure().is_some());
        let mut disk = Memory { fails: None, ..disk.clone() };
        let next = disk.start();
        assert_eq!(next.views().report(), disk.views.report());
        check_promise(&disk);
    };
    with_each_failure(|disk, state| propose(disk, state, view(1, &[1])), opened, check);
    let proposed = || {
        let (mut disk, mut state) = opened();
        propose(&mut disk, &mut state, view(1, &[1])).unwrap();
        propose(&mut disk, &mut state, view(2, &[1, 2, 3])).unwrap();
        disk.done();
        (disk, state)
    };
    let back = |disk: &mut Memory, state: &mut ReplicaState| {
        state.commit(disk, Generation::new(1, 0), view(2, &[1, 2, 3]))
    };
    with_each_failure(back, proposed, check);
}

#[test]
fn without_space_the_sets_that_were_begun_are_kept() {
    let (mut disk, mut state) = opened();
    disk.fails = Some((1, Errno::NO_SPACE, false));
    assert_eq!(propose(&mut disk, &mut state, view(1, &[1])), Err(Errno::NO_SPACE));
    assert_eq!((state.failure(), disk.lost_cache), (None, false));
    assert_eq!(state.views().report().proposed, []);
    assert_eq!(state.intent_log().tracks(), Members::new([id(2)]).unwrap());
    propose(&mut disk, &mut state, view(1, &[1])).unwrap();
    assert_eq!(disk.done().len(), 3, "one set, then the other, then the view");
}

#[test]
fn sets_of_members_end_after_the_view_is_stored() {
    let (mut disk, mut state) = opened();
    propose(&mut disk, &mut state, view(1, &[1])).unwrap();
    propose(&mut disk, &mut state, view(2, &[1, 2])).unwrap();
    disk.done();
    disk.fails = Some((1, Errno::NO_SPACE, false));
    state.commit(&mut disk, Generation::new(1, 0), view(2, &[1, 2])).unwrap();
    assert_eq!(disk.done(), ["views"]);
    assert_eq!(state.intent_log().tracks().len(), 2, "one set too many does no harm");
    state.commit(&mut disk, Generation::new(1, 0), view(2, &[1, 2])).unwrap();
    assert_eq!(disk.done(), [format!("remove missed-{}", id(2))]);
    assert_eq!(state.intent_log().tracks(), Members::new([id(3)]).unwrap());
}

/// Checks that Longhorn takes no replica as whole that has stored a view without it.
fn check_record(disk: &Memory) {
    let is_in_all = disk.views.report().views().all(|view| view.members.contains(id(1)));
    assert!(is_in_all || disk.says_left);
}

fn commit(disk: &mut Memory, state: &mut ReplicaState, view: View) -> Result<(), Errno> {
    state.commit(disk, Generation::new(1, 0), view)
}

#[test]
fn leaving_is_recorded_before_the_view_and_returning_after_its_commit() {
    let (mut disk, mut state) = opened();
    propose(&mut disk, &mut state, view(1, &[2, 3])).unwrap();
    assert_eq!(disk.done(), ["left", "views"]);
    commit(&mut disk, &mut state, view(1, &[2, 3])).unwrap();
    propose(&mut disk, &mut state, view(2, &[1, 2, 3])).unwrap();
    assert_eq!(disk.done(), ["views", "views"], "it is not a member before the view is committed");
    commit(&mut disk, &mut state, view(2, &[1, 2, 3])).unwrap();
    assert_eq!(disk.done(), ["views", "member"]);
    commit(&mut disk, &mut state, view(2, &[1, 2, 3])).unwrap();
    assert!(disk.done().is_empty(), "once");
    // It receives the change only when that is complete.
    commit(&mut disk, &mut state, view(3, &[2, 3])).unwrap();
    assert_eq!(disk.done(), ["left", "views"]);
}

#[test]
fn whatever_fails_longhorn_takes_no_replica_as_whole_that_knows_it_has_left() {
    let check = |disk: &Memory, state: &ReplicaState| {
        check_record(disk);
        assert!(state.failure().is_some());
        let mut disk = Memory { fails: None, ..disk.clone() };
        disk.start();
        check_record(&disk);
    };
    with_each_failure(|disk, state| propose(disk, state, view(1, &[2, 3])), opened, check);
    with_each_failure(|disk, state| commit(disk, state, view(1, &[2, 3])), opened, check);
    let returning = || {
        let (mut disk, mut state) = opened();
        commit(&mut disk, &mut state, view(1, &[2, 3])).unwrap();
        propose(&mut disk, &mut state, view(2, &[1, 2, 3])).unwrap();
        disk.done();
        (disk, state)
    };
    with_each_failure(|disk, state| commit(disk, state, view(2, &[1, 2, 3])), returning, check);
}

#[test]
fn without_space_for_the_record_the_view_is_not_stored() {
    let (mut disk, mut state) = opened();
    disk.fails = Some((0, Errno::NO_SPACE, false));
    assert_eq!(propose(&mut disk, &mut state, view(1, &[2, 3])), Err(Errno::NO_SPACE));
    assert_eq!((disk.done().len(), state.failure(), disk.says_left), (0, None, false));
    propose(&mut disk, &mut state, view(1, &[2, 3])).unwrap();
    disk.done();
    disk.fails = Some((1, Errno::NO_SPACE, false));
    commit(&mut disk, &mut state, view(2, &[1, 2, 3])).unwrap();
    assert_eq!((disk.done(), disk.says_left), (vec!["views".to_owned()], true), "it is tried again");
    commit(&mut disk, &mut state, view(2, &[1, 2, 3])).unwrap();
    assert_eq!((disk.done(), disk.says_left), (vec!["member".to_owned()], false));
}

#[test]
fn a_set_begins_and_ends_on_the_disk_first() {
    let (mut disk, mut state) = opened();
    let begin = mark(RegionsOf::OutOfSync(id(2)), MarkAction::Add, &[(1, 1)]);
    disk.fails = Some((0, Errno::NO_SPACE, false));
    assert_eq!(state.mark(&mut disk, &begin), Err(Errno::NO_SPACE));
    assert!(state.intent_log().tracks().is_empty());
    assert_eq!(state.mark(&mut disk, &begin), Ok(None));
    assert_eq!(disk.done(), [format!("make missed-{}", id(2))]);
    disk.fails = Some((0, Errno::NO_SPACE, false));
    assert_eq!(state.mark(&mut disk, &forget(2)), Err(Errno::NO_SPACE));
    assert!(state.intent_log().tracks().contains(id(2)));
    assert_eq!(state.mark(&mut disk, &forget(2)), Ok(None));
    assert!(state.intent_log().tracks().is_empty() && disk.sets.len() == 1);
}

#[test]
fn a_set_that_cannot_be_removed_by_a_broken_disk_fails_the_replica() {
    let (mut disk, mut state) = opened();
    state.mark(&mut disk, &mark(RegionsOf::OutOfSync(id(2)), MarkAction::Add, &[(1, 1)])).unwrap();
    disk.done();
    disk.fails = Some((0, Errno::IO, false));
    assert_eq!(state.mark(&mut disk, &forget(2)), Err(Errno::IO));
    assert_eq!(disk.done(), ["lost, 1"]);
    assert!(state.failure().is_some());
}

#[test]
fn a_lost_cache_ends_when_the_last_lost_region_is_cleared() {
    let (mut disk, mut state) = opened();
    assert_eq!(state.intent_log_mut().mark_dirty(ByteRange::new(0, 4096).unwrap()), DirtyMark::Pending);
    disk.sets.insert(SetKey::Intent, state.intent_log().file(SetKey::Intent).unwrap());
    disk.lost_cache = true;
    let mut state = disk.start();
    assert!(state.intent_log().has_lost_cache());
    let stamp = state.mark(&mut disk, &mark(RegionsOf::Intent, MarkAction::Stamp, &[]));
    assert!(stamp.unwrap().is_some(), "it waits for a page");
    disk.fails = Some((0, Errno::NO_SPACE, false));
    let clear = mark(RegionsOf::Intent, MarkAction::Clear, &[(0, 1)]);
    assert_eq!(state.mark(&mut disk, &clear), Ok(None), "the set is changed");
    assert!(disk.lost_cache && !state.intent_log().has_lost_cache());
    assert_eq!(state.mark(&mut disk, &clear), Ok(None));
    assert_eq!((disk.done(), disk.lost_cache), (vec!["made up for".to_owned()], false));
    assert_eq!(state.mark(&mut disk, &clear), Ok(None));
    assert!(disk.done().is_empty(), "once");
}

#[test]
fn a_replica_fails_once() {
    let (mut disk, mut state) = opened();
    state.fail(&mut disk, "first".to_owned());
    state.fail(&mut disk, "second".to_owned());
    let message = state.failure().map(|failure| failure.message.as_str());
    assert_eq!((message, disk.done()), (Some("first"), vec!["lost, 1".to_owned()]));
}

fn pause_s(state: &ReplicaState) -> Option<u64> {
    state.failure().unwrap().pause_before_end().map(|pause| pause.as_secs())
}

/// Fails once after it has served for the given time.
fn failed_after(disk: &mut Memory, served: Duration) -> ReplicaState {
    let mut state = disk.start();
    state.served_for(served);
    state.fail(disk, "again".to_owned());
    state
}

#[test]
fn failures_in_a_row_are_counted_across_processes_and_forgiven_after_an_hour() {
    let mut disk = Memory::new();
    let just_before = FAILURES_FORGIVEN_AFTER.saturating_sub(Duration::from_secs(1));
    for (served, in_a_row, pause) in [
        (Duration::ZERO, 1, 0),
        (just_before, 2, 60),
        (Duration::ZERO, 3, 600),
        (FAILURES_FORGIVEN_AFTER, 1, 0),
        (Duration::ZERO, 2, 60),
    ] {
        let state = failed_after(&mut disk, served);
        assert_eq!((disk.failures, pause_s(&state)), (in_a_row, Some(pause)));
    }
}

#[test]
fn a_failed_replica_runs_until_its_loss_is_recorded() {
    let mut disk = Memory { recorded: RecordOutcome::Not, ..Memory::new() };
    let mut state = failed_after(&mut disk, Duration::ZERO);
    assert_eq!((pause_s(&state), disk.lost_cache), (None, false));
    assert!(!state.retry_record(&mut disk));
    assert_eq!(pause_s(&state), None);
    disk.recorded = RecordOutcome::Counted;
    assert!(state.retry_record(&mut disk));
    assert_eq!((pause_s(&state), disk.lost_cache, disk.failures), (Some(0), true, 1));
    assert!(!state.retry_record(&mut disk), "once is enough");
}

#[test]
fn an_engine_that_starts_later_ends_the_pause() {
    let mut disk = Memory { failures: 2, ..Memory::new() };
    let mut state = disk.start();
    state.fence(&mut disk, Generation::new(5, 1)).unwrap();
    assert!(!state.asked_by(Generation::new(6, 1)), "it has not failed");
    state.fail(&mut disk, "again".to_owned());
    for left_out in [Generation::new(5, 1), Generation::new(4, 9)] {
        assert!(!state.asked_by(left_out));
    }
    assert_eq!(pause_s(&state), Some(600));
    assert!(state.asked_by(Generation::new(5, 2)));
    assert_eq!(pause_s(&state), Some(10));
    assert!(!state.asked_by(Generation::new(5, 2)), "once is enough");
}

#[test]
fn a_member_with_data_is_never_recreated() {
    let (_, state) = opened();
    assert_eq!(state.check_may_discard(false, true, false), Err(Denied::IsMember(id(1))));
    assert_eq!(state.check_may_discard(true, true, false), Ok(()));
    assert_eq!(state.check_may_discard(false, false, false), Ok(()));
    assert_eq!(state.check_may_discard(true, true, true), Err(Denied::Busy));
}

#[test]
fn every_view_that_may_count_protects_its_members() {
    let denied = |committed: &[u64], proposed: &[u64]| {
        let (_, mut state) = opened();
        state.views = ReplicaViews::new(view(0, committed));
        state.views.fence(Generation::new(1, 0)).unwrap();
        let basis = state.views.report().clone();
        state.views.propose(Generation::new(1, 0), view(1, proposed), &basis).unwrap();
        state.check_may_discard(false, true, false).is_err()
    };
    assert!(denied(&[2], &[1, 2]), "it may be a member");
    assert!(denied(&[1, 2], &[2]), "it may not have left");
    assert!(!denied(&[2], &[2, 3]));
}
