//! Start of a replica from the files on its disk.

use shorthorn_regions::{PageDamage, SetKey, WriteIntentLog};
use shorthorn_types::{RegionSet, Regions, ReplicaId};
use shorthorn_views::{ReplicaViews, remembers};

use crate::durable_step::{Disk, DurableStep, StepError, is_final};
use crate::state::{LeftRecord, ReplicaState};

/// The files that a replica finds on its disk.
#[derive(Clone, Debug)]
pub struct StoredFiles {
    /// The identity in the spec, which the files must confirm.
    pub me: ReplicaId,
    /// The generation and the views that the replica had stored.
    pub views: ReplicaViews,
    /// The division of the volume into regions.
    pub regions: Regions,
    /// The epoch that counts.
    pub epoch: u64,
    /// The file of the intent set, if any.
    pub intent: Option<Vec<u8>>,
    /// The files of the out-of-sync sets.
    pub out_of_sync: Vec<(ReplicaId, Vec<u8>)>,
    /// The setting for sums of blocks, and then the file of the set of unsummed regions, if any.
    pub sums: SumsFound,
    /// True if anything was ever written to the volume.
    pub holds_data: bool,
    /// Data may be gone that was written here.
    pub lost_cache: bool,
    /// The disk says to Longhorn that the replica has left a view.
    pub is_left_recorded: bool,
    /// The number of failures in a row.
    pub failures: u32,
}

/// The state of the sums of blocks on the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SumsFound {
    /// Sums are not to be kept. The file of unsummed regions, if any, is outdated then and is removed.
    Unwanted {
        /// True if the file exists.
        has_file: bool,
    },
    /// Sums are to be kept.
    Wanted(Option<Vec<u8>>),
}

/// The result of starting from the found files.
#[derive(Debug)]
pub struct Started {
    /// The views and sets with which the replica serves.
    pub state: ReplicaState,
    /// The sets that count as full in part, or do not count, and the reasons.
    pub damages: Vec<(SetKey, Vec<PageDamage>)>,
}

impl ReplicaState {
    /// Returns the state of a replica that starts. Every set that is kept is whole on the disk then.
    ///
    /// - Without an intent set everything counts as written lately, unless the volume is empty. Without the
    ///   set, a replica that knows of an engine does not know which stamp it was sent.
    /// - An out-of-sync set that does not count is removed, and so is one without space. That costs a full
    ///   copy of its replica, and never data.
    /// - Sets of replicas that all views have again are removed.
    /// - Without a set of unsummed regions no sum counts. If it has no space, neither it nor sums are kept.
    /// - If data may be gone, views and sets are stored again.
    /// - The record that data may be gone is taken back if no region was written lately.
    /// - If a view that may count lacks the replica, that is recorded for Longhorn.
    ///
    /// # Errors
    /// A step has failed: the replica does not start.
    pub fn start<D: Disk>(disk: &mut D, found: StoredFiles) -> Result<Started, D::Error> {
        let StoredFiles {
            me,
            views,
            regions,
            epoch,
            intent,
            out_of_sync,
            sums,
            holds_data,
            lost_cache,
            is_left_recorded,
            failures,
        } = found;
        let mut damages = Vec::new();
        let (intent_log, is_whole) = match intent {
            Some(file) => {
                let (intent_log, damage) = WriteIntentLog::load(regions, epoch, &file);
                let is_whole = damage.is_empty();
                damages.push((SetKey::Intent, damage));
                (intent_log, is_whole)
            }
            None => (without_intent(regions, epoch, holds_data, &views), false),
        };
        let recorded = views.clone();
        let is_loss_recorded = lost_cache;
        let mut state = ReplicaState {
            me,
            views,
            intent_log,
            is_loss_recorded,
            left_record: if is_left_recorded { LeftRecord::Present } else { LeftRecord::Absent },
            failures,
            failure: None,
        };
        state.record_left(disk, &recorded)?;
        if lost_cache {
            // As with the sets, the data that was read may be in the page cache alone, and engines rely on a
            // stored view.
            state.perform(disk, DurableStep::SaveViews(&recorded))?;
        }
        state.renew(disk, SetKey::Intent, is_whole)?;
        for (replica, file) in out_of_sync {
            damages.extend(state.start_out_of_sync(disk, replica, &file)?);
        }
        damages.extend(state.start_sums(disk, sums)?);
        state.end_sets_of_members(disk)?;
        if lost_cache {
            state.intent_log.lost_cache();
            state.record_made_up_for(disk)?;
        }
        damages.retain(|(_, damage)| !damage.is_empty());
        Ok(Started { state, damages })
    }

    /// Keeps the regions that `replica` misses, unless their set does not count.
    fn start_out_of_sync<D: Disk>(
        &mut self,
        disk: &mut D,
        replica: ReplicaId,
        file: &[u8],
    ) -> Result<Option<(SetKey, Vec<PageDamage>)>, D::Error> {
        let key = SetKey::OutOfSync(replica);
        let Ok((is_kept, damage)) = self.intent_log.load_out_of_sync(replica, file) else {
            self.perform(disk, DurableStep::RemoveSet(key))?;
            return Ok(None);
        };
        if is_kept {
            self.renew(disk, key, damage.is_empty())?;
        } else {
            self.perform(disk, DurableStep::RemoveSet(key))?;
        }
        Ok(Some((key, damage)))
    }

    /// Keeps unsummed regions, if that is wanted and possible.
    fn start_sums<D: Disk>(
        &mut self,
        disk: &mut D,
        sums: SumsFound,
    ) -> Result<Option<(SetKey, Vec<PageDamage>)>, D::Error> {
        let key = SetKey::Unsummed;
        let file = match sums {
            SumsFound::Wanted(file) => file,
            SumsFound::Unwanted { has_file: false } => return Ok(None),
            SumsFound::Unwanted { has_file: true } => {
                self.perform(disk, DurableStep::RemoveSet(key))?;
                return Ok(None);
            }
        };
        let damage = self.intent_log.keep_unsummed(file.as_deref());
        match self.renew(disk, key, damage.is_empty()) {
            Err(error) if is_final(error.errno()) => return Err(error),
            Err(_) => {
                self.intent_log.forget_unsummed();
                if file.is_some() {
                    self.perform(disk, DurableStep::RemoveSet(key))?;
                }
            }
            Ok(()) => {}
        }
        // A missing file is not damage.
        Ok(file.map(|_| (key, damage)))
    }

    /// Rewrites the file of a set, unless it is complete, has this size of the volume, and is surely on the
    /// disk. After a loss, data read from the file may be in the page cache alone.
    fn renew<D: Disk>(&mut self, disk: &mut D, key: SetKey, is_whole: bool) -> Result<(), D::Error> {
        if is_whole && !self.intent_log.is_outgrown(key) && !self.is_loss_recorded {
            return Ok(());
        }
        let file = self.intent_log.file(key).unwrap_or_default();
        self.perform(disk, DurableStep::MakeSet(key, &file))
    }
}

fn without_intent(regions: Regions, epoch: u64, holds_data: bool, views: &ReplicaViews) -> WriteIntentLog {
    let count = regions.count();
    let intent = if holds_data { RegionSet::full(count) } else { RegionSet::empty(count) };
    let mut intent_log = WriteIntentLog::new(regions, epoch, &intent);
    if remembers(views.report(), None) {
        intent_log.forget_stamp();
    }
    intent_log
}

#[cfg(test)]
mod tests {
    use shorthorn_regions::Marked;
    use shorthorn_types::limits::MAX_MEMBERS;
    use shorthorn_types::{Errno, Generation, MarkAction, MarkRegions, Members, RegionsOf, View, ViewId};

    use super::*;
    use crate::failure::RecordOutcome;

    const SIZE_BYTES: u64 = 64 << 20;

    fn id(n: u64) -> ReplicaId {
        ReplicaId::from_random(n)
    }

    fn views(attach: u64, members: &[u64]) -> ReplicaViews {
        let id_of_view = ViewId { generation: Generation::new(attach, 0), number: 0 };
        let members = Members::new(members.iter().copied().map(id)).unwrap();
        ReplicaViews::new(View { id: id_of_view, members })
    }

    fn regions() -> Regions {
        Regions::of(SIZE_BYTES)
    }

    /// Returns the file of an intent set without regions.
    fn intent(regions: Regions, epoch: u64) -> Vec<u8> {
        let intent_log = WriteIntentLog::new(regions, epoch, &RegionSet::empty(regions.count()));
        intent_log.file(SetKey::Intent).unwrap()
    }

    /// Returns the file of an out-of-sync set.
    fn out_of_sync(replica: u64, epoch: u64) -> Vec<u8> {
        let mut intent_log = WriteIntentLog::new(regions(), epoch, &RegionSet::empty(regions().count()));
        let (of, action) = (RegionsOf::OutOfSync(id(replica)), MarkAction::Add);
        let mark = MarkRegions { of, action, runs: vec![(1, 2)], stamp: 0, size_bytes: None };
        let Ok(Marked::Begin(set)) = intent_log.mark(&mark) else { panic!("it begins") };
        set.file()
    }

    /// Returns files without damage, while replica 3 is absent.
    fn found() -> StoredFiles {
        StoredFiles {
            me: id(1),
            views: views(1, &[1, 2]),
            regions: regions(),
            epoch: 1,
            intent: Some(intent(regions(), 1)),
            out_of_sync: vec![(id(3), out_of_sync(3, 1))],
            sums: SumsFound::Unwanted { has_file: false },
            holds_data: true,
            lost_cache: false,
            is_left_recorded: false,
            failures: 0,
        }
    }

    /// Returns the file of a set of unsummed regions, of a replica that has sums of all but one region.
    fn unsummed(epoch: u64) -> Vec<u8> {
        let mut intent_log = WriteIntentLog::new(regions(), epoch, &RegionSet::empty(regions().count()));
        intent_log.keep_unsummed(None);
        for first in (1..regions().count()).step_by(64) {
            let run = first..(first + 64).min(regions().count());
            intent_log.want_sums(run.clone());
            assert!(intent_log.begin_sums(run));
            intent_log.end_sums(true);
        }
        intent_log.file(SetKey::Unsummed).unwrap()
    }

    /// Records the names of the steps.
    #[derive(Default)]
    struct Steps(Vec<String>);

    impl Disk for Steps {
        type Error = Errno;

        fn perform(&mut self, step: DurableStep<'_>) -> Result<(), Errno> {
            if matches!(step, DurableStep::MakeSet(SetKey::Unsummed, _))
                && self.0.iter().any(|step| step == "full")
            {
                return Err(Errno::NO_SPACE);
            }
            self.0.push(match step {
                DurableStep::SaveViews(_) => "views".to_owned(),
                DurableStep::MakeSet(key, file) => {
                    assert!(!file.is_empty());
                    format!("make {key}")
                }
                DurableStep::RemoveSet(key) => format!("remove {key}"),
                DurableStep::RecordMadeUpFor => "made up for".to_owned(),
                DurableStep::RecordLeft => "left".to_owned(),
                DurableStep::RecordMember => "member".to_owned(),
            });
            Ok(())
        }

        fn record_failure(&mut self, _: u32) -> RecordOutcome {
            unreachable!("no step fails")
        }
    }

    fn start(found: StoredFiles) -> (ReplicaState, Vec<SetKey>, Vec<String>) {
        let mut steps = Steps::default();
        let Started { state, damages } = ReplicaState::start(&mut steps, found).unwrap();
        (state, damages.into_iter().map(|(key, _)| key).collect(), steps.0)
    }

    fn intent_of(state: &ReplicaState) -> RegionSet {
        state.intent_log().content(SetKey::Intent).unwrap()
    }

    #[test]
    fn undamaged_sets_stay_unchanged() {
        let (state, damages, steps) = start(found());
        assert_eq!((damages, steps), (vec![], vec![]));
        assert_eq!(state.intent_log().tracks(), Members::new([id(3)]).unwrap());
        assert!(intent_of(&state).is_empty());
    }

    #[test]
    fn a_missing_intent_set_counts_as_full_unless_the_replica_has_no_data() {
        let lacking = |holds_data, attach| StoredFiles {
            intent: None,
            out_of_sync: vec![],
            holds_data,
            views: views(attach, &[1, 2]),
            ..found()
        };
        let (state, _, steps) = start(lacking(true, 1));
        assert_eq!(
            (intent_of(&state), steps),
            (RegionSet::full(regions().count()), vec!["make intent".into()])
        );
        assert_eq!(state.intent_log().stamp(), None);
        let (state, ..) = start(lacking(false, 1));
        assert!(intent_of(&state).is_empty());
        assert_eq!(state.intent_log().stamp(), None, "it may have been sent one");
        let (state, ..) = start(lacking(false, 0));
        assert_eq!(state.intent_log().stamp(), Some(0), "it is new");
    }

    #[test]
    fn damaged_sets_are_recreated() {
        let damaged = |mut file: Vec<u8>| {
            file[100] ^= 1;
            file
        };
        let out_of_sync = vec![(id(3), damaged(out_of_sync(3, 1)))];
        let (state, damages, steps) =
            start(StoredFiles { intent: Some(damaged(intent(regions(), 1))), out_of_sync, ..found() });
        assert_eq!(damages, [SetKey::Intent, SetKey::OutOfSync(id(3))]);
        assert_eq!(steps, ["make intent".to_owned(), format!("make missed-{}", id(3))]);
        assert!(!intent_of(&state).is_empty() && state.intent_log().tracks().contains(id(3)));
    }

    #[test]
    fn sets_of_a_smaller_volume_are_recreated() {
        let (_, _, steps) =
            start(StoredFiles { intent: Some(intent(Regions::of(SIZE_BYTES / 2), 1)), ..found() });
        assert_eq!(steps, ["make intent"]);
    }

    #[test]
    fn sets_of_another_epoch_are_worth_nothing() {
        let (state, _, steps) =
            start(StoredFiles { out_of_sync: vec![(id(3), out_of_sync(3, 2))], ..found() });
        assert_eq!(steps, [format!("remove missed-{}", id(3))]);
        assert!(state.intent_log().tracks().is_empty());
    }

    #[test]
    fn a_set_too_many_is_removed_and_the_replica_starts() {
        let all: Vec<u64> = (3..=MAX_MEMBERS as u64 + 3).collect();
        let sets = all.iter().map(|n| (id(*n), out_of_sync(*n, 1))).collect();
        let (state, _, steps) = start(StoredFiles { out_of_sync: sets, ..found() });
        assert_eq!(steps, [format!("remove missed-{}", id(MAX_MEMBERS as u64 + 3))]);
        assert_eq!(state.intent_log().tracks().len(), MAX_MEMBERS);
    }

    #[test]
    fn without_a_set_of_unsummed_regions_no_sum_counts() {
        let with = |file| start(StoredFiles { sums: SumsFound::Wanted(file), ..found() });
        let (state, damages, steps) = with(Some(unsummed(1)));
        assert_eq!((damages, steps), (vec![], vec![]));
        assert_eq!([0, 1, 2].map(|region| state.intent_log().is_summed(region)), [false, true, true]);
        for (file, is_damaged) in [(None, false), (Some(unsummed(2)), true), (Some(vec![]), true)] {
            let (state, damages, steps) = with(file);
            assert_eq!((damages.len(), steps), (usize::from(is_damaged), vec!["make unsummed".to_owned()]));
            assert!((0..regions().count()).all(|region| !state.intent_log().is_summed(region)));
        }
        let (state, _, steps) =
            start(StoredFiles { sums: SumsFound::Unwanted { has_file: true }, ..found() });
        assert_eq!((state.intent_log().keeps_sums(), steps), (false, vec!["remove unsummed".to_owned()]));
    }

    #[test]
    fn a_full_disk_keeps_no_sums_and_the_replica_starts() {
        let mut steps = Steps(vec!["full".to_owned()]);
        let sums = SumsFound::Wanted(Some(unsummed(2)));
        let Started { state, .. } = ReplicaState::start(&mut steps, StoredFiles { sums, ..found() }).unwrap();
        assert!(!state.intent_log().keeps_sums() && state.failure().is_none());
        assert_eq!(steps.0, ["full", "remove unsummed"]);
    }

    #[test]
    fn sets_of_members_end() {
        let (state, _, steps) =
            start(StoredFiles { out_of_sync: vec![(id(2), out_of_sync(2, 1))], ..found() });
        assert_eq!(steps, [format!("remove missed-{}", id(2))]);
        assert!(state.intent_log().tracks().is_empty());
    }

    #[test]
    fn a_start_notes_that_a_view_lacks_the_replica_and_never_takes_that_back() {
        let lacking = || StoredFiles { views: views(1, &[2]), out_of_sync: vec![], ..found() };
        assert_eq!(start(lacking()).2, ["left"]);
        assert!(start(StoredFiles { is_left_recorded: true, ..lacking() }).2.is_empty());
        // The process may have ended before it stored the view that lacks it.
        assert!(start(StoredFiles { is_left_recorded: true, ..found() }).2.is_empty());
    }

    #[test]
    fn after_a_loss_of_the_cache_all_sets_are_written_again() {
        let (state, damages, steps) = start(StoredFiles { lost_cache: true, ..found() });
        let made =
            ["views", "make intent", &format!("make missed-{}", id(3)), "made up for"].map(str::to_owned);
        assert_eq!((damages, steps), (vec![], made.to_vec()));
        assert!(!state.intent_log().has_lost_cache(), "nothing was written lately");
        let full = StoredFiles { intent: None, lost_cache: true, out_of_sync: vec![], ..found() };
        let (state, _, steps) = start(full);
        assert_eq!(
            (state.intent_log().has_lost_cache(), steps),
            (true, vec!["views".to_owned(), "make intent".to_owned()])
        );
    }
}
