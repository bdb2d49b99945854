//! The layers of the volume: the layout of the directory, the open files of its chain, and the map of their
//! blocks.
//!
//! Files and map follow the layout. Between the change of the layout ([`Image::set_layout`]) and that of the
//! files ([`Image::push_head`], [`Image::fold`], [`Image::reopen`]), plans are of the chain before.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use nix::fcntl::{FallocateFlags, fallocate};
use shorthorn_chain::{
    BlockMap, BlockSource, Checks, EdgeBlock, FileIndex, ImageName, Layout, MapUsage, ReadSegment, Recovery,
    VolumeMeta, WritePlan, ZeroStep,
};
use shorthorn_types::ByteRange;
use shorthorn_types::limits::BLOCK_BYTES;

use crate::block_sums::sum_of_data;
use crate::buffer::{AlignedBuffer, CHUNK_BYTES};
use crate::directory_scan::recover_directory;
use crate::error::StoreError;
use crate::files::{Files, Writable, data_extents, next_data, signed};
use crate::info::LayerInfo;
use crate::medium::Medium;

type Result<T> = std::result::Result<T, StoreError>;

/// The open layers of a volume.
#[derive(Debug)]
pub(crate) struct Image {
    layout: Layout,
    files: Files,
    map: BlockMap,
    /// The deviations that are accepted if the directory is read again.
    checks: Checks,
    /// True if another thread copies a layer over the one below: both have to stay.
    fold_running: bool,
    scratch: AlignedBuffer,
}

impl Image {
    /// Opens the files of the layout's chain.
    pub fn open(medium: &Medium, layout: Layout, checks: Checks, writable: Writable) -> Result<Image> {
        let (files, map) = open_chain(medium, &layout, writable)?;
        let scratch = AlignedBuffer::new(CHUNK_BYTES);
        Ok(Image { layout, files, map, checks, fold_running: false, scratch })
    }

    /// Opens the files of the chain again and drops the block map.
    pub fn reopen(&mut self, medium: &Medium, writable: Writable) -> Result<()> {
        (self.files, self.map) = open_chain(medium, &self.layout, writable)?;
        Ok(())
    }

    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Replaces the layout after an operation.
    pub fn set_layout(&mut self, layout: Layout) {
        self.layout = layout;
    }

    /// Returns the document of the volume, to change. It has no effect on the files.
    pub fn volume_mut(&mut self) -> &mut VolumeMeta {
        self.layout.volume_mut()
    }

    /// Derives the layout from the directory again.
    pub fn recover(&self, medium: &Medium) -> Result<Recovery> {
        recover_directory(medium.directory(), &self.checks)
    }

    /// Accepts layers of these sizes from now on.
    pub fn accept_sizes(&mut self, known_sizes: &BTreeMap<String, u64>) {
        self.checks.known_sizes.clone_from(known_sizes);
    }

    pub fn size_bytes(&self) -> u64 {
        self.layout.size_bytes()
    }

    /// Returns the index of the head's file.
    pub fn head(&self) -> FileIndex {
        self.map.head()
    }

    /// Returns the name of the head's file.
    pub fn head_name(&self) -> &ImageName {
        self.layout.head()
    }

    /// Returns the open file of a layer of the chain.
    pub fn find(&self, image: &ImageName) -> Option<FileIndex> {
        self.files.find(image)
    }

    pub fn file(&self, index: FileIndex) -> &File {
        self.files.get(index)
    }

    pub fn fd(&self, index: FileIndex) -> BorrowedFd<'_> {
        self.files.fd(index)
    }

    /// Returns the name of a file, for messages.
    pub fn name(&self, index: FileIndex) -> &str {
        name_of(&self.files, index)
    }

    /// Returns the indices of all open files.
    pub fn indices(&self) -> impl Iterator<Item = FileIndex> + '_ {
        self.files.indices()
    }

    /// Returns the memory of the block map.
    pub fn usage(&self) -> MapUsage {
        self.map.usage()
    }

    /// Returns the layers from the head to the oldest.
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

    /// Returns the first run of data of a layer that ends after `from_bytes`; it begins there or later.
    pub fn next_data_of(
        &self,
        medium: &Medium,
        file: FileIndex,
        from_bytes: u64,
    ) -> Result<Option<ByteRange>> {
        next_data(self.files.get(file), from_bytes).map_err(|errno| {
            StoreError::io("find the data of", medium.directory().path_of(self.name(file)), errno)
        })
    }
}

/// The data of a layer.
impl Image {
    /// Returns the runs of whole blocks inside `range` that a layer has, in order, each as long as can be.
    pub fn layer_blocks(&self, medium: &Medium, file: FileIndex, range: ByteRange) -> Result<Vec<ByteRange>> {
        let mut runs: Vec<ByteRange> = Vec::new();
        let mut add = |extent: ByteRange| {
            let blocks = extent.grown_to_blocks();
            let start = runs.last().map_or_else(|| range.offset(), |last| last.end()).max(blocks.offset());
            let end = blocks.end().min(range.end());
            let Some(length) = end.checked_sub(start).filter(|length| *length > 0) else { return };
            match runs.last_mut() {
                Some(last) if last.end() == start => {
                    *last = ByteRange::new(last.offset(), last.length() + length).unwrap_or(*last);
                }
                _ => runs.extend(ByteRange::new(start, length)),
            }
        };
        data_extents(self.files.get(file), range, &mut add).map_err(|errno| {
            StoreError::io("find the data of", medium.directory().path_of(self.name(file)), errno)
        })?;
        Ok(runs)
    }
}

/// Changes of the chain.
impl Image {
    /// Refuses a change of layers while a fold is running.
    pub fn check_no_fold(&self) -> Result<()> {
        if self.fold_running { Err(StoreError::FoldRunning) } else { Ok(()) }
    }

    pub fn begin_fold(&mut self) {
        self.fold_running = true;
    }

    pub fn end_fold(&mut self) {
        self.fold_running = false;
    }

    /// Stores the head's inode in the layout once it exists.
    pub fn learn_inode(&mut self, medium: &Medium) -> Result<()> {
        let head = self.layout.head().clone();
        if let Some(stat) = medium.directory().stat(head.as_str())? {
            self.layout.set_inode(&head, stat.inode);
        }
        Ok(())
    }

    /// Opens the head `image` above the file that is the layer `snapshot` now.
    pub fn push_head(
        &mut self,
        medium: &Medium,
        old_head: FileIndex,
        image: &ImageName,
        snapshot: ImageName,
    ) -> Result<()> {
        let head = self.files.open(medium.directory(), image, medium.direct_io(), true)?;
        self.files.rename(old_head, snapshot);
        self.map.push_head(head);
        Ok(())
    }

    /// Drops the file `upper`, whose data `lower` has now, and its name `child` too.
    pub fn fold(&mut self, upper: FileIndex, lower: FileIndex, child: ImageName) {
        self.map.fold(upper, lower);
        self.files.close(upper);
        self.files.rename(lower, child);
    }

    /// Takes over a greater size. The files stay as they are.
    pub fn grow_map(&mut self, size_bytes: u64) {
        self.map.grow(size_bytes);
    }

    /// Drops the block map.
    pub fn forget_map(&mut self, medium: &Medium) {
        let chain = self.layout.chain().iter().filter_map(|image| self.files.find(image)).collect();
        self.map = BlockMap::new(self.layout.size_bytes(), chain, medium.can_punch());
    }
}

/// Plans, and the reports on them.
impl Image {
    pub fn plan_read(&mut self, range: ByteRange, segments: &mut Vec<ReadSegment>) -> Result<()> {
        Ok(self.map.plan_read(range, &mut self.files, segments)?)
    }

    pub fn plan_write(&mut self, range: ByteRange) -> Result<WritePlan> {
        Ok(self.map.plan_write(range, &mut self.files)?)
    }

    pub fn plan_discard(&mut self, range: ByteRange, steps: &mut Vec<ZeroStep>) -> Result<()> {
        Ok(self.map.plan_discard(range, &mut self.files, steps)?)
    }

    pub fn plan_write_zeroes(&mut self, range: ByteRange, steps: &mut Vec<ZeroStep>) -> Result<()> {
        Ok(self.map.plan_write_zeroes(range, &mut self.files, steps)?)
    }

    pub fn written(&mut self, range: ByteRange) {
        self.map.written(range);
    }

    pub fn punched(&mut self, range: ByteRange) {
        self.map.punched(range);
    }

    /// Looks the head's data in `range` up again.
    pub fn forget(&mut self, range: ByteRange) {
        self.map.forget(range);
    }
}

/// The I/O of the synchronous calls.
impl Image {
    /// Reads a range of whole sectors.
    pub fn read_at(&mut self, range: ByteRange, buffer: &mut [u8]) -> Result<()> {
        let mut rest = buffer;
        let mut segments = Vec::new();
        for chunk in chunks(range) {
            let (part, after) = rest.split_at_mut(length_of(chunk));
            rest = after;
            segments.clear();
            self.plan_read(chunk.grown_to_blocks(), &mut segments)?;
            for segment in &segments {
                self.read_segment(*segment, chunk, part)?;
            }
        }
        Ok(())
    }

    /// Returns the sum of the data that a reader sees in a block, if that can be read.
    pub fn sum_shown(&mut self, block: u64) -> Option<u32> {
        let mut buffer = AlignedBuffer::new(usize::try_from(BLOCK_BYTES).unwrap_or(0));
        let range = ByteRange::new(block * BLOCK_BYTES, BLOCK_BYTES).ok()?.check(self.size_bytes()).ok()?;
        let read = self.read_at(range, buffer.as_mut_slice());
        read.ok().map(|()| sum_of_data(buffer.as_slice()))
    }

    /// Reads the part of a segment of whole blocks that lies in `wanted` into its place in `buffer`.
    fn read_segment(&mut self, segment: ReadSegment, wanted: ByteRange, buffer: &mut [u8]) -> Result<()> {
        let start = segment.range.offset().max(wanted.offset());
        let end = segment.range.end().min(wanted.end());
        let target = &mut buffer[index(start - wanted.offset())..index(end - wanted.offset())];
        let BlockSource::File(file) = segment.source else {
            target.fill(0);
            return Ok(());
        };
        let bytes = &mut self.scratch.as_mut_slice()[..length_of(segment.range)];
        read_blocks(self.files.get(file), bytes, segment.range.offset())
            .map_err(|error| data_error("read", &self.files, file, error))?;
        let skip = index(start - segment.range.offset());
        target.copy_from_slice(&bytes[skip..skip + target.len()]);
        Ok(())
    }

    /// Writes `data`, which is that of `chunk`, as planned.
    pub fn write_chunk(&mut self, plan: WritePlan, chunk: ByteRange, data: &[u8]) -> Result<()> {
        let part = |range: ByteRange| &data[index(range.offset() - chunk.offset())..][..length_of(range)];
        for edge in [plan.first, plan.last].into_iter().flatten() {
            self.merge(edge, |target| target.copy_from_slice(part(edge.part)))?;
        }
        if let Some(whole) = plan.whole {
            let head = self.head();
            let bytes = &mut self.scratch.as_mut_slice()[..length_of(whole)];
            bytes.copy_from_slice(part(whole));
            self.files
                .get(head)
                .write_all_at(bytes, whole.offset())
                .map_err(|error| data_error("write", &self.files, head, error))?;
        }
        Ok(())
    }

    /// Reads a block, lets `change` change the part of it, and writes it to the head.
    fn merge(&mut self, edge: EdgeBlock, change: impl FnOnce(&mut [u8])) -> Result<()> {
        let head = self.head();
        let block = &mut self.scratch.as_mut_slice()[..length_of(edge.block)];
        match edge.source {
            BlockSource::Zero => block.fill(0),
            BlockSource::File(file) => read_blocks(self.files.get(file), block, edge.block.offset())
                .map_err(|error| data_error("read", &self.files, file, error))?,
        }
        let start = index(edge.part.offset() - edge.block.offset());
        change(&mut block[start..start + length_of(edge.part)]);
        self.files
            .get(head)
            .write_all_at(block, edge.block.offset())
            .map_err(|error| data_error("write", &self.files, head, error))
    }

    /// Does a step of a discard or of zeroing.
    pub fn zero_step(&mut self, step: ZeroStep) -> Result<()> {
        match step {
            ZeroStep::Punch(blocks) => self.punch(blocks),
            ZeroStep::WriteZeroes(blocks) => self.write_zero_blocks(blocks),
            ZeroStep::Merge(edge) => self.merge(edge, |part| part.fill(0)),
        }
    }

    fn punch(&mut self, range: ByteRange) -> Result<()> {
        let how = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let head = self.head();
        fallocate(self.files.get(head).as_fd(), how, signed(range.offset()), signed(range.length()))
            .map_err(|errno| data_error("make a hole in", &self.files, head, errno.into()))
    }

    fn write_zero_blocks(&mut self, range: ByteRange) -> Result<()> {
        let head = self.head();
        for chunk in chunks(range) {
            let zeroes = &mut self.scratch.as_mut_slice()[..length_of(chunk)];
            zeroes.fill(0);
            self.files
                .get(head)
                .write_all_at(zeroes, chunk.offset())
                .map_err(|error| data_error("write", &self.files, head, error))?;
        }
        Ok(())
    }

    /// Makes the data of the head durable.
    pub fn sync_head(&self) -> Result<()> {
        let head = self.head();
        let synced = self.files.get(head).sync_data();
        synced.map_err(|error| data_error("sync", &self.files, head, error).not_durable())
    }

    /// Returns memory of [`CHUNK_BYTES`], whose content lasts until the next call.
    pub fn scratch(&mut self) -> &mut AlignedBuffer {
        &mut self.scratch
    }
}

fn open_chain(medium: &Medium, layout: &Layout, writable: Writable) -> Result<(Files, BlockMap)> {
    let direct_io = medium.direct_io();
    let (files, indices) = Files::open_chain(medium.directory(), layout.chain(), direct_io, writable)?;
    let map = BlockMap::new(layout.size_bytes(), indices, medium.can_punch());
    Ok((files, map))
}

/// Reads whole blocks. The part beyond the end of a file reads as zeroes, because a layer may be smaller than
/// the volume. A block can extend beyond the end only if the file ends inside it.
fn read_blocks(file: &File, bytes: &mut [u8], offset: u64) -> std::io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read_at(&mut bytes[filled..], offset + filled as u64) {
            Ok(0) => {
                bytes[filled..].fill(0);
                return Ok(());
            }
            Ok(count) => filled += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Returns a range in pieces that fit the scratch buffer and, but for its ends, begin and end with a block.
pub(crate) fn chunks(range: ByteRange) -> impl Iterator<Item = ByteRange> {
    let step = CHUNK_BYTES as u64 - BLOCK_BYTES;
    let mut offset = range.offset();
    std::iter::from_fn(move || {
        let end = (offset / BLOCK_BYTES * BLOCK_BYTES).saturating_add(step).min(range.end());
        let chunk =
            ByteRange::new(offset, end.saturating_sub(offset)).ok().filter(|chunk| !chunk.is_empty())?;
        offset = end;
        Some(chunk)
    })
}

fn name_of(files: &Files, file: FileIndex) -> &str {
    files.name(file).map_or("a layer", ImageName::as_str)
}

fn data_error(action: &'static str, files: &Files, file: FileIndex, error: std::io::Error) -> StoreError {
    StoreError::io(action, name_of(files, file), error)
}

/// Returns the length of a range that lies in a buffer.
pub(crate) fn length_of(range: ByteRange) -> usize {
    index(range.length())
}

/// Returns a distance inside a buffer, which always fits.
#[allow(clippy::cast_possible_truncation)]
fn index(distance: u64) -> usize {
    distance as usize
}
