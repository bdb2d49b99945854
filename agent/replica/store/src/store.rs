//! An open replica directory.

use std::os::fd::BorrowedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::Arc;

use nix::sys::statvfs::fstatvfs;
use shorthorn_chain::{
    BlockMap, Checks, DirectoryEntry, FileIndex, FileStep, ImageName, Layout, Recovery, VOLUME_META,
    VolumeMeta, classify, create_steps,
};
use shorthorn_types::ByteRange;

use crate::boot::{Boot, LossRecord};
use crate::buffer::AlignedBuffer;
use crate::copy_record::{Copy, Resumed};
use crate::directory::{Directory, RESERVE_FILE};
use crate::error::StoreError;
use crate::facts::{collect, recover_directory};
use crate::files::{Files, Writable};
use crate::guard::{GUARD_FILE, Guard};
use crate::host::{HostFileSystem, PROBE_FILE};
use crate::info::{LayerInfo, Provenance, SnapshotInfo, StoreInfo, snapshots};
use crate::lock::{LOCK_FILE, Lock};
use crate::options::{CreateOptions, FaultHook, OpenOptions};
use crate::state::{self, SavedState, StateWriter};
use crate::steps::Executor;
use crate::sums_files::sweep_sums;
use crate::timestamp::now_rfc3339;

type Result<T> = std::result::Result<T, StoreError>;

/// The bytes that the synchronous calls move at a time.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;

/// An open replica directory, held exclusively.
///
/// Calls that change the directory (operations) wait for the disk and take milliseconds. Plans do not wait,
/// except when they meet a part of the volume for the first time and query the file system. Dropping a store
/// leaves the directory as after a crash: nothing is lost, but it counts as dirty until it is opened again.
/// [`Store::close`] leaves it clean.
#[derive(Debug)]
pub struct Store {
    pub(crate) directory: Arc<Directory>,
    pub(crate) host: HostFileSystem,
    pub(crate) layout: Layout,
    pub(crate) files: Files,
    pub(crate) map: BlockMap,
    pub(crate) guard: Guard,
    pub(crate) checks: Checks,
    pub(crate) fault: Option<FaultHook>,
    pub(crate) scratch: AlignedBuffer,
    pub(crate) read_only: bool,
    pub(crate) broken: bool,
    pub(crate) fold_running: bool,
    pub(crate) copy: Option<Copy>,
    /// True if the callers that change the volume keep the set of regions without sums.
    pub(crate) keeps_sums: bool,
    /// The range in which blocks of the head may be allocated but not written.
    pub(crate) unwritten: Option<ByteRange>,
    pub(crate) repairs: Vec<String>,
    boot: Boot,
    was_dirty: bool,
    provenance: Provenance,
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
        let executor =
            Executor { directory: &directory, fault: options.fault.as_ref(), direct_io: host.direct_io };
        let mut guard = Guard::new();
        executor.run(&operation.steps, &mut guard)?;
        let CreateOptions { fault, loss_record, .. } = options;
        let options = OpenOptions { fault, loss_record, ..OpenOptions::default() };
        Store::open_locked(directory, lock, host, options)
    }

    /// Opens a replica, and finishes or reverts interrupted operations. If the disk fails meanwhile, the next
    /// opening treats it as a loss of data ([`StoreInfo::lost_cache`]).
    ///
    /// # Errors
    /// [`StoreError`]; the directory is then as it was, unless a repair was under way.
    pub fn open(path: impl AsRef<Path>, options: OpenOptions) -> Result<Store> {
        let directory = Directory::open(path.as_ref())?;
        let lock = if options.read_only { Lock::shared(&directory) } else { Lock::exclusive(&directory) }?;
        let host = HostFileSystem::probe(&directory, options.read_only)?;
        Store::open_locked(directory, lock, host, options)
    }

    fn open_locked(
        directory: Directory,
        lock: Lock,
        host: HostFileSystem,
        options: OpenOptions,
    ) -> Result<Store> {
        let found = Guard::load(&directory)?;
        let known_sizes = found.as_ref().map(|guard| guard.known_sizes.clone()).unwrap_or_default();
        let (mut guard, provenance) = match directory.stat(VOLUME_META)? {
            Some(_) => Guard::judge(&directory, found)?,
            None => (Guard::new(), Provenance::Ours), // refused below
        };
        let executor =
            Executor { directory: &directory, fault: options.fault.as_ref(), direct_io: host.direct_io };
        let Resumed { copy, dropped } = Copy::resume(&executor, &mut guard, options.read_only)?;
        let checks = Checks {
            accept_rebuilding: options.accept_rebuilding,
            // The copied replica has accepted the sizes of its layers.
            accept_short_layers: options.accept_short_layers || copy.is_some() || dropped.is_some(),
            known_sizes,
        };
        let Recovery { layout, steps, messages } = recover_directory(&directory, &checks)?;
        if checks.accept_short_layers {
            guard.known_sizes = layout.short_layers();
        }
        let was_dirty = layout.volume().dirty;
        let (mut boot, damage) = Boot::judge(&directory, was_dirty, options.loss_record.clone())?;
        let (layout, files, map) = if options.read_only {
            open_chain(&directory, layout, host, Writable::None)?
        } else {
            boot.recording(&directory, executor.run(&steps, &mut guard))?;
            let writable = if copy.is_some() { Writable::All } else { Writable::Head };
            let (mut layout, files, map) = open_chain(&directory, layout, host, writable)?;
            take_over(&executor, &mut layout, &mut guard, &mut boot)?;
            (layout, files, map)
        };
        let store = Store {
            directory: Arc::new(directory),
            host,
            layout,
            files,
            map,
            guard,
            checks,
            fault: options.fault,
            scratch: AlignedBuffer::new(CHUNK_BYTES),
            read_only: options.read_only,
            broken: false,
            fold_running: false,
            copy,
            keeps_sums: false,
            unwritten: None,
            repairs: dropped.into_iter().chain(messages).chain(damage).collect(),
            boot,
            was_dirty,
            provenance,
            _lock: lock,
        };
        store.mended()
    }

    /// Returns the store with its head mended, if that may be needed after a crash.
    fn mended(mut self) -> Result<Store> {
        if self.was_dirty && !self.read_only {
            let mended = self.mend_head();
            self.boot.recording(&self.directory, mended)?;
        }
        Ok(self)
    }

    /// Makes all data durable, marks the directory as cleanly closed and gives it up.
    ///
    /// # Errors
    /// [`StoreError`]; the directory then counts as dirty. So it does for good once data may be lost
    /// ([`Store::has_lost_cache_now`]): the dirty flag may be the only sign of that.
    pub fn close(mut self) -> Result<()> {
        if self.read_only {
            return Ok(());
        }
        self.check_writable()?;
        if self.boot.is_lost_now() {
            return Err(StoreError::Broken(self.directory.path().to_owned()));
        }
        self.punch_unwritten()?;
        let head = self.layout.head().clone();
        // Not only the data: the time of change, which the guard records, must be durable too.
        self.run(&[FileStep::SyncFile { name: head.to_string() }])?;
        self.guard.seal(&self.directory, head.as_str())?;
        self.layout.volume_mut().dirty = false;
        self.run(&self.layout.volume_steps())
    }

    /// Returns the size of the volume.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.layout.size_bytes()
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
        self.map.head()
    }

    /// Returns the descriptor of a file that a plan names. Valid until the next operation; reads that the
    /// kernel has already taken are not disturbed by one.
    ///
    /// # Panics
    /// The plan is older than the last operation and names a file that has left the chain.
    #[must_use]
    pub fn fd(&self, index: FileIndex) -> BorrowedFd<'_> {
        self.files.fd(index)
    }

    /// Returns true if [`Store::fd`] does direct I/O: memory must then be aligned to
    /// [`MEMORY_ALIGNMENT`](crate::MEMORY_ALIGNMENT), and offset and length to [`Store::alignment_bytes`].
    #[must_use]
    pub fn direct_io(&self) -> bool {
        self.host.direct_io
    }

    /// Returns the alignment of offset and length of a read in bytes: 1, 512 or 4096. Whole blocks always
    /// suffice. If it is 4096 and a read is for less, plan it for whole blocks and drop the rest.
    #[must_use]
    pub fn alignment_bytes(&self) -> u32 {
        self.host.alignment_bytes
    }

    /// Returns true if holes can be made. Otherwise discards and zeroes are written out.
    #[must_use]
    pub fn can_punch(&self) -> bool {
        self.host.can_punch
    }

    /// Returns the layers from the head to the oldest.
    #[must_use]
    pub fn layers(&self) -> Vec<LayerInfo> {
        let info = |image: &ImageName| {
            let disk = self.layout.disks().get(image)?;
            Some(LayerInfo {
                index: self.files.find(image)?,
                image: image.clone(),
                size_bytes: disk.size_bytes,
                snapshot: image.snapshot_name().map(str::to_owned),
                removed: disk.meta.removed,
            })
        };
        self.layout.chain().iter().filter_map(info).collect()
    }

    /// Returns all snapshots: the chain's from the oldest to the newest, then those on side branches.
    #[must_use]
    pub fn snapshots(&self) -> Vec<SnapshotInfo> {
        snapshots(&self.layout)
    }

    /// Returns the findings at the opening, and the current state.
    #[must_use]
    pub fn info(&self) -> StoreInfo {
        StoreInfo {
            size_bytes: self.size_bytes(),
            head: self.layout.head().clone(),
            was_dirty: self.was_dirty,
            rebuilding: self.layout.volume().is_rebuilding(),
            has_left: self.layout.volume().has_left(),
            lost_cache: self.boot.lost_cache(),
            failures: self.boot.failures(),
            provenance: self.provenance.clone(),
            epoch: self.guard.epoch,
            repairs: self.repairs.clone(),
            map: self.map.usage(),
        }
    }

    /// Reads the state that [`Store::save_state`] saved.
    ///
    /// # Errors
    /// [`StoreError::StateDamaged`], or an I/O error.
    pub fn load_state(&self) -> Result<SavedState> {
        let trusted =
            if self.read_only && self.provenance != Provenance::Ours { u64::MAX } else { self.guard.epoch };
        state::load(&self.directory, trusted)
    }

    /// Saves bytes beside the volume, durably and whole.
    ///
    /// # Errors
    /// An I/O error; the former state still exists then.
    pub fn save_state(&mut self, payload: &[u8]) -> Result<()> {
        self.state_writer()?.save(payload)
    }

    /// Saves state from another thread. Hold one writer at a time.
    ///
    /// # Errors
    /// [`StoreError::ReadOnly`].
    pub fn state_writer(&self) -> Result<StateWriter> {
        self.check_writable()?;
        Ok(StateWriter::new(Arc::clone(&self.directory), self.guard.epoch))
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
        self.check_writable()?;
        let before = self.layout.volume().clone();
        change(self.layout.volume_mut());
        let stored = self.run(&self.layout.volume_steps());
        if stored.is_err() {
            *self.layout.volume_mut() = before;
        }
        stored
    }

    /// Records that a rebuild from another replica has made up for all losses before the store was opened.
    ///
    /// # Errors
    /// An I/O error; it then counts as lost still.
    pub fn cache_made_up_for(&mut self) -> Result<()> {
        self.check_writable()?;
        let boot = self.boot.made_up_for();
        boot.save(&self.directory)?;
        self.boot = boot;
        Ok(())
    }

    /// Records that data that is not durable may be lost, because the disk has failed. Durable on return, so
    /// that the next opening reports it, in this boot of the host too, with [`OpenOptions::loss_record`] if
    /// nothing in the directory can be changed. Whatever the result, it holds for this store, and nothing
    /// here makes up for it. The caller calls this before it reports the failure. `failures` is the number of
    /// failures in a row.
    ///
    /// # Errors
    /// An I/O error: the next process may not know of it.
    pub fn record_lost_cache(&mut self, failures: u32) -> Result<LossRecord> {
        if self.read_only {
            return Err(StoreError::ReadOnly(self.directory.path().to_owned()));
        }
        self.boot.lose(&self.directory, failures)
    }

    /// Returns true if a loss was recorded since the store was opened, by [`Store::record_lost_cache`] or by
    /// an operation that could not make data durable ([`StoreError::NotDurable`]).
    #[must_use]
    pub fn has_lost_cache_now(&self) -> bool {
        self.boot.is_lost_now()
    }

    /// Records that data may be lost if the result of an operation says so.
    pub(crate) fn noting_loss<T>(&mut self, mut result: Result<T>) -> Result<T> {
        if let Err(StoreError::NotDurable { recorded, .. }) = &mut result {
            // Whether it fails by that, and how often it has, is for the caller to say.
            *recorded = self.record_lost_cache(self.boot.failures()).is_ok();
        }
        result
    }

    /// Drops the block map.
    pub(crate) fn forget_map(&mut self) {
        let chain = self.layout.chain().iter().filter_map(|image| self.files.find(image)).collect();
        self.map = BlockMap::new(self.layout.size_bytes(), chain, self.host.can_punch);
    }

    /// Returns true if an operation failed half-way: the store has to be opened again.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    pub(crate) fn check_writable(&self) -> Result<()> {
        if self.read_only {
            return Err(StoreError::ReadOnly(self.directory.path().to_owned()));
        }
        if self.broken {
            return Err(StoreError::Broken(self.directory.path().to_owned()));
        }
        Ok(())
    }

    /// Executes steps; a stop by the test hook leaves the store broken.
    pub(crate) fn run(&mut self, steps: &[FileStep]) -> Result<()> {
        let executor = Executor {
            directory: &self.directory,
            fault: self.fault.as_ref(),
            direct_io: self.host.direct_io,
        };
        let result = executor.run(steps, &mut self.guard);
        self.broken |= matches!(result, Err(StoreError::Stopped));
        self.noting_loss(result)
    }

    pub(crate) fn chain_error(&self, source: shorthorn_chain::ChainError) -> StoreError {
        StoreError::chain(self.directory.path(), source)
    }
}

/// Takes over a directory that interrupted operations have left whole. It counts as dirty from now on.
fn take_over(executor: &Executor<'_>, layout: &mut Layout, guard: &mut Guard, boot: &mut Boot) -> Result<()> {
    let directory = executor.directory;
    let saved = boot.take_over(directory);
    boot.recording(directory, saved)?;
    layout.volume_mut().dirty = true;
    boot.recording(directory, executor.run(&layout.volume_steps(), guard))?;
    sweep_sums(directory, |image| layout.disks().contains_key(image))?;
    directory.keep_reserve();
    Ok(())
}

/// Opens the files of the layout's chain.
pub(crate) fn open_chain(
    directory: &Directory,
    layout: Layout,
    host: HostFileSystem,
    writable: Writable,
) -> Result<(Layout, Files, BlockMap)> {
    let (files, indices) = Files::open_chain(directory, layout.chain(), host.direct_io, writable)?;
    let map = BlockMap::new(layout.size_bytes(), indices, host.can_punch);
    Ok((layout, files, map))
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
            _ => [GUARD_FILE, RESERVE_FILE, PROBE_FILE].contains(&name.as_str()),
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
