//! Loads the state that a replica keeps beside the data from its directory.

use std::time::Instant;

use shorthorn_regions::{PageDamage, SetKey};
use shorthorn_replica_core::{ReplicaState, Started, StoredFiles, SumsFound};
use shorthorn_store::{BlockSumsFile, Store};
use shorthorn_types::Regions;
use shorthorn_views::ReplicaViews;

use super::background_sums::BackgroundSums;
use super::block_sums::BlockSums;
use super::durable_steps::ReplicaFiles;
use super::region_sets::RegionSets;
use super::sum_schedule::SumSchedule;
use crate::error::ReplicaError;
use crate::state::{Owner, holds_data};

/// The loaded state.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(super) state: ReplicaState,
    pub(super) region_sets: RegionSets,
    pub(super) block_sums: BlockSums,
    pub(super) background_sums: BackgroundSums,
}

impl Loaded {
    /// Loads the state of `owner` from its directory: see [`ReplicaState::start`]. Blocks will be summed at
    /// this rate per second; without one, no block is.
    ///
    /// # Errors
    /// If the files cannot be read or made.
    pub fn load(
        store: &mut Store,
        owner: &Owner,
        views: ReplicaViews,
        sum_bytes_per_s: Option<u64>,
    ) -> Result<Loaded, ReplicaError> {
        let found = read_files(store, owner, views, sum_bytes_per_s.is_some())?;
        let mut region_sets = RegionSets::new()
            .map_err(|source| ReplicaError::system("map memory for pages of regions", source))?;
        let mut files = ReplicaFiles { store, sets: region_sets.files_mut(), owner };
        let Started { mut state, damages } = ReplicaState::start(&mut files, found)?;
        // Without it the number is too small, or one of Longhorn's: then Longhorn rebuilds the replica.
        if let Err(error) = files.store_revision(state.views()) {
            tracing::warn!(%error, "the revision counter for Longhorn could not be stored");
        }
        damages.iter().for_each(|(key, damages)| report_damages(*key, damages));
        let sums_file = open_sums(store, &mut state)?;
        let schedule = SumSchedule::new(sums_file.is_some(), sum_bytes_per_s, Instant::now());
        let background_sums = BackgroundSums::new(schedule);
        let mut block_sums = BlockSums::new(sums_file)
            .map_err(|source| ReplicaError::system("map memory for sums of blocks", source))?;
        block_sums.load_lost(store)?;
        open_sets(store, &state, &mut region_sets)?;
        if state.intent_log().has_lost_cache() {
            tracing::warn!(
                "the host was restarted while this replica was open, or its disk has failed. Other replicas \
                 are preferred until all regions that were written lately are copied from them or known to \
                 be equal"
            );
        }
        Ok(Loaded { state, region_sets, block_sums, background_sums })
    }

    /// Returns the state with which the replica can serve.
    pub fn state(&self) -> &ReplicaState {
        &self.state
    }
}

/// Opens the files of the sets that the start has not made.
fn open_sets(store: &Store, state: &ReplicaState, region_sets: &mut RegionSets) -> Result<(), ReplicaError> {
    let unsummed = state.intent_log().keeps_sums().then_some(SetKey::Unsummed);
    let out_of_sync = state.intent_log().tracks();
    for key in out_of_sync.iter().map(SetKey::OutOfSync).chain([SetKey::Intent]).chain(unsummed) {
        if !region_sets.has_file(key) {
            region_sets.put_file(key, store.region_files().open(key)?);
        }
    }
    Ok(())
}

/// Returns the file of the sums of blocks, if an account is kept of the regions that have none. Otherwise no
/// sum counts from now on. The same holds if the file cannot be opened or created: a replica without sums is
/// better than none.
fn open_sums(store: &mut Store, state: &mut ReplicaState) -> Result<Option<BlockSumsFile>, ReplicaError> {
    if state.intent_log().keeps_sums() {
        match store.open_block_sums() {
            Ok(file) => return Ok(Some(file)),
            Err(error) => {
                tracing::warn!(%error, "block checksums are off: rot on the disk is not detected");
                state.intent_log_mut().forget_unsummed();
            }
        }
    }
    store.forget_block_sums()?;
    Ok(None)
}

/// Reads the files that the directory has beside the data.
fn read_files(
    store: &Store,
    owner: &Owner,
    views: ReplicaViews,
    wants_sums: bool,
) -> Result<StoredFiles, ReplicaError> {
    let unsummed = store.region_files().read(SetKey::Unsummed)?;
    let sums = match wants_sums {
        true => SumsFound::Wanted(unsummed),
        false => SumsFound::Unwanted { has_file: unsummed.is_some() },
    };
    let mut out_of_sync = Vec::new();
    for replica in store.region_files().out_of_sync()? {
        out_of_sync
            .push((replica, store.region_files().read(SetKey::OutOfSync(replica))?.unwrap_or_default()));
    }
    let info = store.info();
    Ok(StoredFiles {
        me: owner.replica,
        views,
        regions: Regions::of(store.size_bytes()),
        epoch: info.epoch,
        intent: store.region_files().read(SetKey::Intent)?,
        out_of_sync,
        sums,
        holds_data: holds_data(store)?,
        lost_cache: info.lost_cache,
        is_left_recorded: info.has_left,
        failures: info.failures,
    })
}

fn report_damages(key: SetKey, damages: &[PageDamage]) {
    if let Some(damage) = damages.first() {
        let pages = damages.len();
        tracing::warn!(
            pages,
            "the set of regions '{key}' cannot be trusted, and counts as full there: {damage}"
        );
    }
}
