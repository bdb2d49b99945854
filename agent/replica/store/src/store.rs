//! An open replica directory.
//!
//! [`Store`] only coordinates its parts, whose rules are in their own files. Its calls on several parts are
//! in the folder `store`. Requests are in `data`, and changes of the chain in `snapshots`, `fold` and
//! `operations`.

mod copy;
mod data;
mod fold;
mod operations;
mod snapshots;

use std::os::fd::BorrowedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use nix::sys::statvfs::fstatvfs;
use shorthorn_chain::{
    Checks, DirectoryEntry, FileIndex, FileStep, ImageName, Recovery, VOLUME_META, VolumeMeta, classify,
    create_steps,
};

use crate::binding;
use crate::block_sums::BlockSumsFile;
use crate::boot::{Boot, LossRecord};
use crate::chain::Chain;
use crate::copy_record::{CopyRecord, Resumed};
use crate::directory::{Directory, RESERVE_FILE};
use crate::directory_scan::{collect, recover_directory};
use crate::epoch_record::{EPOCH_RECORD_FILE, EpochRecord};
use crate::error::StoreError;
use crate::files::Writable;
use crate::former_writes::wait_for_former_writes;
use crate::host::{HostFileSystem, PROBE_FILE};
use crate::image::Image;
use crate::info::{LayerInfo, Provenance, SnapshotInfo, StoreInfo, snapshots};
use crate::lock::{LOCK_FILE, Lock};
use crate::lost_blocks::{FoundLostBlocks, LostBlocks, LostBlocksFile};
use crate::medium::Medium;
use crate::ongoing_copy::OngoingCopy;
use crate::opening::Opening;
use crate::options::{CreateOptions, OpenOptions};
use crate::regions::RegionFiles;
use crate::revision;
use crate::state::{self, SavedState, StateWriter};
use crate::step_executor::StepExecutor;
use crate::sums::SnapshotLayers;
use crate::sums_files::sweep_sums;
use crate::timestamp::now_rfc3339;
use crate::unwritten::{self, UnverifiedRange};

pub use fold::{FoldJob, FoldedJob};

type Result<T> = std::result::Result<T, StoreError>;

/// An open replica directory, held exclusively.
///
/// Calls that change the directory (operations) wait for the disk and take milliseconds. Plans do not wait,
/// except when they meet a part of the volume for the first time and query the file system. Dropping a store
/// leaves the directory as after a crash: nothing is lost, but it counts as dirty until it is opened again.
/// [`Store::close`] leaves it clean.
#[derive(Debug)]
pub struct Store {
    /// The directory, and whether it may be changed.
    medium: Medium,
    /// The layers: layout, files, and the map of their blocks.
    image: Image,
    /// The record that no other program has had the directory open.
    epoch_record: EpochRecord,
    /// The copy from another replica that is under way.
    copy: OngoingCopy,
    /// The part of the head that may have blocks that are allocated but not written.
    unverified: UnverifiedRange,
    /// The findings of the opening.
    opening: Opening,
    /// The losses of unflushed data.
    boot: Boot,
    /// Released last.
    _lock: Lock,
}

impl Store {
    /// Makes a replica of an empty volume and opens it. The directory must not exist, be empty, or
    /// hold no more than an interrupted `create` left.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn create(path: impl AsRef<Path>, options: CreateOptions) -> Result<Store> {
        let path = path.as_ref();
        let created = options.created.unwrap_or_else(now_rfc3339);
        let operation =
            create_steps(options.size_bytes, &created).map_err(|error| StoreError::chain(path, error))?;
        make_directory(path)?;
        let directory = Directory::open(path)?;
        let lock = Lock::exclusive(&directory)?;
        sweep_for_create(&directory)?;
        let host = HostFileSystem::probe(&directory, false)?;
        let medium = Medium::new(directory, host, options.fault, false);
        medium.check_layers(2)?; // a snapshot may follow
        medium.executor().run(&operation.steps, &mut EpochRecord::new())?;
        let options = OpenOptions { loss_record: options.loss_record, ..OpenOptions::default() };
        Store::open_locked(medium, lock, options)
    }

    /// Opens a replica, and finishes or reverts interrupted operations. If the disk fails meanwhile, the next
    /// opening treats it as a loss of data ([`StoreInfo::lost_cache`]).
    ///
    /// # Errors
    /// [`StoreError`]; the directory is then as it was, unless a repair was under way.
    pub fn open(path: impl AsRef<Path>, options: OpenOptions) -> Result<Store> {
        let directory = Directory::open(path.as_ref())?;
        let lock = if options.read_only { Lock::shared(&directory) } else { Lock::exclusive(&directory) }?;
        wait_for_former_writes(&directory, options.read_only)?;
        let host = HostFileSystem::probe(&directory, options.read_only)?;
        let medium = Medium::new(directory, host, options.fault.clone(), options.read_only);
        Store::open_locked(medium, lock, options)
    }

    /// Opens a directory that is locked. The medium has the options for changes.
    fn open_locked(medium: Medium, lock: Lock, options: OpenOptions) -> Result<Store> {
        let directory = medium.directory();
        let found = EpochRecord::load(directory)?;
        let known_sizes =
            found.as_ref().map(|epoch_record| epoch_record.known_sizes().clone()).unwrap_or_default();
        let (mut epoch_record, provenance) = match directory.stat(VOLUME_META)? {
            Some(_) => EpochRecord::judge(directory, found)?,
            None => (EpochRecord::new(), Provenance::Ours), // refused below
        };
        let executor = medium.executor();
        let Resumed { copy, dropped } =
            CopyRecord::resume(&executor, &mut epoch_record, medium.is_read_only())?;
        let checks = Checks {
            accept_rebuilding: options.accept_rebuilding,
            // The copied replica has accepted the sizes of its layers.
            accept_short_layers: options.accept_short_layers || copy.is_some() || dropped.is_some(),
            known_sizes,
        };
        let Recovery { layout, steps, messages } = recover_directory(directory, &checks)?;
        medium.check_layers(layout.chain().len())?;
        if checks.accept_short_layers {
            epoch_record.set_sizes(layout.short_layers());
        }
        let was_dirty = layout.volume().dirty;
        let (mut boot, damage) = Boot::judge(directory, was_dirty, options.loss_record)?;
        let image = if medium.is_read_only() {
            Image::open(&medium, layout, checks, Writable::None)?
        } else {
            boot.recording(directory, executor.run(&steps, &mut epoch_record))?;
            let writable = if copy.is_some() { Writable::All } else { Writable::Head };
            let mut image = Image::open(&medium, layout, checks, writable)?;
            take_over(&executor, &mut image, &mut epoch_record, &mut boot)?;
            image
        };
        let repairs = dropped.into_iter().chain(messages).chain(damage).collect();
        let opening = Opening::new(was_dirty, provenance, repairs);
        let (copy, unverified) = (OngoingCopy::new(copy), UnverifiedRange::default());
        let store = Store { medium, image, epoch_record, copy, unverified, opening, boot, _lock: lock };
        store.mended()
    }

    /// Returns the store with its head repaired, if a crash may have damaged it.
    fn mended(mut self) -> Result<Store> {
        if self.opening.was_dirty() && !self.medium.is_read_only() {
            self.unverified = UnverifiedRange::everywhere(self.size_bytes());
            let mended = self.mend_head();
            self.boot.recording(self.medium.directory(), mended)?;
        }
        Ok(self)
    }

    /// Makes holes of the blocks of the head that are allocated and were never written, as far as writes may
    /// have left any.
    fn mend_head(&mut self) -> Result<()> {
        let punched_bytes = self.punch_unwritten();
        if let Some(repair) = unwritten::repair_line(punched_bytes, self.image.head_name())? {
            self.opening.add_repair(repair);
        }
        Ok(())
    }

    /// Does the same after failed writes. No request may be in flight. Returns how many bytes were such.
    pub(crate) fn punch_unwritten(&mut self) -> Result<u64> {
        if !self.unverified.needs_holes(&self.medium) {
            return Ok(0);
        }
        // Data in the page cache counts as written only once it is on the disk.
        self.flush()?;
        self.unverified.make_holes(&self.medium, &mut self.image)
    }

    /// Makes all data durable, marks the directory as cleanly closed and gives it up.
    ///
    /// # Errors
    /// [`StoreError`]; the directory then counts as dirty. So it does for good once data may be lost
    /// ([`Store::has_lost_cache_now`]): the dirty flag may be the only sign of that.
    pub fn close(mut self) -> Result<()> {
        if self.medium.is_read_only() {
            return Ok(());
        }
        self.medium.check_writable()?;
        if self.boot.is_lost_now() {
            return Err(self.medium.broken_error());
        }
        self.punch_unwritten()?;
        let head = self.image.head_name().clone();
        // Not only the data: the time of change, which the epoch record has, must be durable too.
        self.run(&[FileStep::SyncFile { name: head.to_string() }])?;
        self.epoch_record.seal(self.medium.directory(), head.as_str())?;
        self.image.volume_mut().dirty = false;
        self.run(&self.image.layout().volume_steps())
    }

    /// Returns the size of the volume.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.image.size_bytes()
    }

    /// Returns the free space of the disk in bytes; none if the file system does not report it.
    #[must_use]
    pub fn free_bytes(&self) -> Option<u64> {
        let found = fstatvfs(self.fd(self.head())).ok()?;
        Some(found.blocks_available().saturating_mul(found.fragment_size()))
    }

    /// Returns the head, which takes all writes.
    #[must_use]
    pub fn head(&self) -> FileIndex {
        self.image.head()
    }

    /// Returns the descriptor of a file that a plan names. Valid until the next operation; reads that the
    /// kernel has already taken are not disturbed by one.
    ///
    /// # Panics
    /// The plan is older than the last operation and names a file that has left the chain.
    #[must_use]
    pub fn fd(&self, index: FileIndex) -> BorrowedFd<'_> {
        self.image.fd(index)
    }

    /// Returns true if [`Store::fd`] does direct I/O: memory must then be aligned to
    /// [`MEMORY_ALIGNMENT`](crate::MEMORY_ALIGNMENT), and offset and length to [`Store::alignment_bytes`].
    #[must_use]
    pub fn direct_io(&self) -> bool {
        self.medium.direct_io()
    }

    /// Returns the alignment of offset and length of a read in bytes: 1, 512 or 4096. Whole blocks always
    /// suffice. If it is 4096 and a read is for less, plan it for whole blocks and drop the rest.
    #[must_use]
    pub fn alignment_bytes(&self) -> u32 {
        self.medium.alignment_bytes()
    }

    /// Returns true if holes can be made. Otherwise discards and zeroes are written out.
    #[must_use]
    pub fn can_punch(&self) -> bool {
        self.medium.can_punch()
    }

    /// Returns the layers from the head to the oldest.
    #[must_use]
    pub fn layers(&self) -> Vec<LayerInfo> {
        self.image.layers()
    }

    /// Returns all snapshots: the chain's from the oldest to the newest, then those on side branches.
    #[must_use]
    pub fn snapshots(&self) -> Vec<SnapshotInfo> {
        snapshots(self.image.layout())
    }

    /// Returns the layers of the chain, to read their data.
    #[must_use]
    pub fn chain(&self) -> Chain<'_> {
        Chain::new(&self.medium, &self.image)
    }

    /// Returns the layers of the chain's snapshots, which may have sums.
    #[must_use]
    pub fn snapshot_layers(&self) -> SnapshotLayers<'_> {
        SnapshotLayers::new(&self.medium, &self.image, self.epoch_record.epoch(), self.is_copying())
    }

    /// Returns the findings at the opening, and the current state.
    #[must_use]
    pub fn info(&self) -> StoreInfo {
        StoreInfo {
            size_bytes: self.size_bytes(),
            head: self.image.head_name().clone(),
            was_dirty: self.opening.was_dirty(),
            rebuilding: self.image.layout().volume().is_rebuilding(),
            has_left: self.image.layout().volume().has_left(),
            lost_cache: self.boot.lost_cache(),
            failures: self.boot.failures(),
            provenance: self.opening.provenance().clone(),
            epoch: self.epoch_record.epoch(),
            repairs: self.opening.repairs().to_vec(),
            map: self.image.usage(),
        }
    }

    /// Reads the state that [`Store::save_state`] saved.
    ///
    /// # Errors
    /// [`StoreError::StateDamaged`], or an I/O error.
    pub fn load_state(&self) -> Result<SavedState> {
        let is_foreign = *self.opening.provenance() != Provenance::Ours;
        let is_trusted = !(self.medium.is_read_only() && is_foreign);
        let trusted = is_trusted.then(|| self.epoch_record.epoch());
        state::load(self.medium.directory(), trusted)
    }

    /// Saves bytes beside the volume, durably and whole. From then on a missing state is a loss.
    ///
    /// # Errors
    /// An I/O error. A former state still exists then, and a first state may exist.
    pub fn save_state(&mut self, payload: &[u8]) -> Result<()> {
        self.medium.check_writable()?;
        StateWriter::new(self.medium.shared_directory(), self.epoch_record.epoch()).save(payload)?;
        self.epoch_record.expect_state(self.medium.directory())
    }

    /// Saves state from another thread. Hold one writer at a time. From now on a missing state is a loss.
    ///
    /// # Errors
    /// [`StoreError::ReadOnly`], or an I/O error.
    pub fn state_writer(&mut self) -> Result<StateWriter> {
        self.medium.check_writable()?;
        self.epoch_record.expect_state(self.medium.directory())?;
        Ok(StateWriter::new(self.medium.shared_directory(), self.epoch_record.epoch()))
    }

    /// Compares the fingerprint of the directory with that of the secret of a volume. A directory that has
    /// none gets it.
    ///
    /// # Errors
    /// [`StoreError::OtherSecret`] if the directory belongs to another volume.
    pub fn bind(&mut self, fingerprint: &str) -> Result<()> {
        self.medium.check_writable()?;
        binding::bind(self.medium.directory(), fingerprint)
    }

    /// Stores the number that Longhorn compares with those of other replicas. Durable on return. The caller
    /// chooses the number.
    ///
    /// # Errors
    /// An I/O error; the number from before is then still there.
    pub fn set_revision_counter(&mut self, counter: u64) -> Result<()> {
        self.medium.check_writable()?;
        revision::save_counter(self.medium.directory(), counter)
    }

    /// Opens the file of the sums of blocks. Starts a new series unless the existing one counts. From now on
    /// callers that change the volume keep the set of regions without sums: otherwise all sums are void after
    /// a change.
    ///
    /// # Errors
    /// An I/O error. Then no sum counts, as long as [`Store::forget_block_sums`] succeeds.
    pub fn open_block_sums(&mut self) -> Result<BlockSumsFile> {
        self.medium.check_writable()?;
        BlockSumsFile::open(&self.medium, &mut self.epoch_record)
    }

    /// Invalidates all sums of blocks, durably.
    ///
    /// # Errors
    /// An I/O error: they may count after the next opening.
    pub fn forget_block_sums(&mut self) -> Result<()> {
        self.medium.check_writable()?;
        self.epoch_record.forget_sums(self.medium.directory())
    }

    /// Invalidates all sums before the volume changes, unless the set of unsummed regions is kept.
    fn check_sums_follow(&mut self) -> Result<()> {
        if self.epoch_record.has_unkept_sums() { self.forget_block_sums() } else { Ok(()) }
    }

    /// Returns the blocks that are recorded as lost.
    ///
    /// # Errors
    /// An I/O error: it is not known which blocks are lost.
    pub fn load_lost_blocks(&mut self) -> Result<FoundLostBlocks> {
        let file = LostBlocksFile::new(&self.medium, self.epoch_record.epoch());
        let size_bytes = self.image.size_bytes();
        file.load(size_bytes, |block| self.image.sum_shown(block))
    }

    /// Records the sums of blocks that a crash has torn in the middle of a merge or write. `lost` was just
    /// loaded, and nothing is modifying the volume.
    ///
    /// # Errors
    /// An I/O error: the sums are not recorded.
    pub fn record_torn_blocks(&mut self, lost: &mut LostBlocks) -> Result<()> {
        let file = LostBlocksFile::new(&self.medium, self.epoch_record.epoch());
        file.record_torn(lost, |block| self.image.sum_shown(block))
    }

    /// Records these, durably, in place of those that are recorded.
    ///
    /// # Errors
    /// An I/O error; those from before are then still recorded.
    pub fn save_lost_blocks(&mut self, lost: &LostBlocks) -> Result<()> {
        LostBlocksFile::new(&self.medium, self.epoch_record.epoch()).save(lost)
    }

    /// Makes this a replica that lacks data: it is not known which blocks are lost, so none counts. The next
    /// copy keeps no layer. That is durable before the damaged record is removed.
    ///
    /// # Errors
    /// [`StoreError`]; the record is still there then.
    pub fn distrust_data(&mut self) -> Result<()> {
        if !self.info().rebuilding {
            self.set_rebuilding(true)?;
        }
        self.copy.forget_done(self.medium.directory())?;
        self.save_lost_blocks(&LostBlocks::new())
    }

    /// Removes a record that is damaged or cannot be read, because the operator has chosen this replica. From
    /// then on the blocks in the record count as sound. [`Store::accept_unfinished_copy`] follows: no
    /// snapshot is known to be that of other replicas.
    ///
    /// # Errors
    /// The record could not be removed.
    pub fn drop_damaged_lost_blocks(&mut self) -> Result<()> {
        match self.load_lost_blocks() {
            Ok(FoundLostBlocks::Known(_)) => Ok(()),
            // No snapshot is known to be sound any more.
            Ok(FoundLostBlocks::Damaged) | Err(_) => self.distrust_data(),
        }
    }

    /// Returns the files of the sets of regions.
    #[must_use]
    pub fn region_files(&self) -> RegionFiles<'_> {
        RegionFiles::new(&self.medium)
    }

    /// Marks the replica as lacking data, or as whole again.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn set_rebuilding(&mut self, rebuilding: bool) -> Result<()> {
        self.change_volume(|volume| volume.set_rebuilding(rebuilding))
    }

    /// Marks the replica as one that has left its view, or is back in it. Longhorn, which has no views,
    /// treats a replica that has left as one that is being rebuilt. Shorthorn relies on the views instead of
    /// the mark.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn set_left(&mut self, has_left: bool) -> Result<()> {
        self.change_volume(|volume| volume.set_left(has_left))
    }

    fn change_volume(&mut self, change: impl FnOnce(&mut VolumeMeta)) -> Result<()> {
        self.medium.check_writable()?;
        let before = self.image.layout().volume().clone();
        change(self.image.volume_mut());
        let stored = self.run(&self.image.layout().volume_steps());
        if stored.is_err() {
            *self.image.volume_mut() = before;
        }
        stored
    }

    /// Records that a rebuild from another replica has made up for all losses before the store was opened.
    ///
    /// # Errors
    /// An I/O error; it then counts as lost still.
    pub fn cache_made_up_for(&mut self) -> Result<()> {
        self.medium.check_writable()?;
        let boot = self.boot.made_up_for();
        boot.save(self.medium.directory())?;
        self.boot = boot;
        Ok(())
    }

    /// Records that data that is not durable may be lost, because the disk has failed. The record is durable
    /// on return, so that the next opening reports it, in this boot of the host too. If nothing in the
    /// directory can be changed, the record is in [`OpenOptions::loss_record`]. Whatever the result, the loss
    /// holds for this store, and nothing here makes up for it. The caller calls this before it reports the
    /// failure. `failures` is the number of failures in a row.
    ///
    /// # Errors
    /// An I/O error: the next process may not know of it.
    pub fn record_lost_cache(&mut self, failures: u32) -> Result<LossRecord> {
        self.medium.check_not_read_only()?;
        self.boot.lose(self.medium.directory(), failures)
    }

    /// Returns true if a loss was recorded since the store was opened, by [`Store::record_lost_cache`] or by
    /// an operation that could not make data durable ([`StoreError::NotDurable`]).
    #[must_use]
    pub fn has_lost_cache_now(&self) -> bool {
        self.boot.is_lost_now()
    }

    /// Records that data may be lost if the result of an operation says so.
    fn recording_loss<T>(&mut self, mut result: Result<T>) -> Result<T> {
        if let Err(StoreError::NotDurable { recorded, .. }) = &mut result {
            // The caller decides whether the replica fails by that, and counts its failures.
            *recorded = self.record_lost_cache(self.boot.failures()).is_ok();
        }
        result
    }

    /// Returns true if an operation failed half-way: the store has to be opened again.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.medium.is_broken()
    }

    /// Executes steps; a stop by the test hook leaves the store broken.
    fn run(&mut self, steps: &[FileStep]) -> Result<()> {
        let result = self.medium.executor().run(steps, &mut self.epoch_record);
        self.medium.record_stop(result.as_ref().err());
        self.recording_loss(result)
    }
}

/// Takes over a directory that interrupted operations have left whole. It counts as dirty from now on.
fn take_over(
    executor: &StepExecutor<'_>,
    image: &mut Image,
    epoch_record: &mut EpochRecord,
    boot: &mut Boot,
) -> Result<()> {
    let directory = executor.directory();
    let saved = boot.take_over(directory);
    boot.recording(directory, saved)?;
    image.volume_mut().dirty = true;
    boot.recording(directory, executor.run(&image.layout().volume_steps(), epoch_record))?;
    sweep_sums(directory, |layer| image.layout().disks().contains_key(layer))?;
    directory.keep_reserve();
    Ok(())
}

fn make_directory(path: &Path) -> Result<()> {
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => {
            // The new directory's own name must be durable before anything in it counts.
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            Directory::open(parent.unwrap_or_else(|| Path::new(".")))?.sync()
        }
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(StoreError::io("make the directory", path, error)),
    }
}

/// Removes the remains of an interrupted `create`, and refuses anything else.
fn sweep_for_create(directory: &Directory) -> Result<()> {
    let facts = collect(directory)?;
    if facts.volume_meta.is_some() {
        return Err(StoreError::Exists(directory.path().to_owned()));
    }
    let first = ImageName::head(0);
    let mut leftovers = Vec::new();
    for name in directory.list()? {
        let ours = match classify(&name) {
            DirectoryEntry::Temp => true,
            DirectoryEntry::Meta(image) => image == first,
            DirectoryEntry::Image(image) => {
                image == first && facts.images.get(&image).is_some_and(|image| !image.holds_data)
            }
            _ => [EPOCH_RECORD_FILE, RESERVE_FILE, PROBE_FILE].contains(&name.as_str()),
        };
        if !ours && name != LOCK_FILE {
            return Err(StoreError::NotEmpty { directory: directory.path().to_owned(), entry: name });
        }
        if ours {
            leftovers.push(name);
        }
    }
    leftovers.iter().try_for_each(|name| directory.unlink(name))?;
    directory.sync()
}
