//! Exports the volume, or the state of a snapshot, as one raw image. Changes nothing in the directory.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use shorthorn_chain::{
    BlockMap, BlockSource, Checks, FileIndex, ImageName, Layout, PlanError, ReadSegment, WINDOW_BYTES,
};
use shorthorn_types::ByteRange;
use shorthorn_types::limits::BLOCK_BYTES;

use crate::buffer::{AlignedBuffer, CHUNK_BYTES};
use crate::directory::Directory;
use crate::directory_scan::recover_directory;
use crate::epoch_record::EpochRecord;
use crate::error::StoreError;
use crate::files::{Files, Writable, data_extents};
use crate::former_writes::wait_for_former_writes;
use crate::host::HostFileSystem;
use crate::lock::Lock;

type Result<T> = std::result::Result<T, StoreError>;

/// A block of zeroes, to compare with.
const ZEROES: [u8; 4096] = [0; 4096];

/// The file or device that an export writes to.
#[derive(Debug)]
pub enum ExportTarget {
    /// A file, which is created or overwritten, and sparse.
    File(PathBuf),
    /// A stream, such as standard output, which gets every byte.
    Stream(Box<dyn WriteDebug>),
}

/// The traits of a stream.
pub trait WriteDebug: Write + std::fmt::Debug {}
impl<T: Write + std::fmt::Debug> WriteDebug for T {}

/// The result of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportedVolume {
    /// The size of the image.
    pub size_bytes: u64,
    /// The bytes that are not zeroes.
    pub data_bytes: u64,
    /// True if the directory had not been closed cleanly: the last writes may be missing.
    pub was_dirty: bool,
}

/// Exports the volume, or the state of `snapshot`. `progress` gets the bytes done and the total.
///
/// # Errors
/// [`StoreError`]; the target may then hold a part.
pub fn export(
    path: impl AsRef<Path>,
    snapshot: Option<&str>,
    target: ExportTarget,
    mut progress: impl FnMut(u64, u64),
) -> Result<ExportedVolume> {
    let directory = Directory::open(path.as_ref())?;
    let lock = Lock::shared(&directory)?;
    wait_for_former_writes(&directory, true)?;
    let mut volume = LayeredVolume::open(&directory, snapshot)?;
    let mut output = ImageOutput::open(target, &directory, volume.size_bytes)?;
    let mut buffer = AlignedBuffer::new(CHUNK_BYTES);
    let mut extents = Vec::new();
    let mut done = 0;
    while done < volume.size_bytes {
        let window = ByteRange::new(done, WINDOW_BYTES.min(volume.size_bytes - done))?;
        extents.clear();
        volume.data_in(window, &mut extents)?;
        for (file, extent) in &extents {
            for chunk in chunks(*extent) {
                let bytes = &mut buffer.as_mut_slice()[..length_of(chunk)];
                volume.read(*file, bytes, chunk.offset())?;
                output.put(bytes, chunk.offset())?;
                progress(chunk.end(), volume.size_bytes);
            }
        }
        done = window.end();
        progress(done, volume.size_bytes);
    }
    let data_bytes = output.finish(volume.size_bytes)?;
    lock.still_alone(&directory)?;
    Ok(ExportedVolume { size_bytes: volume.size_bytes, data_bytes, was_dirty: volume.was_dirty })
}

/// A chain of layers, to read.
struct LayeredVolume {
    size_bytes: u64,
    was_dirty: bool,
    files: Files,
    map: BlockMap,
    segments: Vec<ReadSegment>,
}

impl LayeredVolume {
    fn open(directory: &Directory, snapshot: Option<&str>) -> Result<LayeredVolume> {
        let host = HostFileSystem::probe(directory, true)?;
        let epoch_record = EpochRecord::load(directory)?;
        let known_sizes =
            epoch_record.map(|epoch_record| epoch_record.known_sizes().clone()).unwrap_or_default();
        let checks = Checks { known_sizes, ..Checks::default() };
        let layout = recover_directory(directory, &checks)?.layout;
        let chain = chain_of(&layout, snapshot, &checks)
            .map_err(|error| StoreError::chain(directory.path(), error))?;
        // A snapshot shows the volume in the size that it had.
        let size_bytes = layout.disks()[&chain[0]].size_bytes;
        let (files, indices) = Files::open_chain(directory, &chain, host.direct_io, Writable::None)?;
        let map = BlockMap::new(size_bytes, indices, false);
        Ok(LayeredVolume { size_bytes, was_dirty: layout.volume().dirty, files, map, segments: Vec::new() })
    }

    /// Visits the runs of data in a window, with the file that has them.
    fn data_in(&mut self, window: ByteRange, found: &mut Vec<(FileIndex, ByteRange)>) -> Result<()> {
        if self.map.is_head_only() {
            let head = self.map.head();
            let mut add = |extent: ByteRange| found.push((head, extent.grown_to_blocks()));
            return data_extents(self.files.get(head), window, &mut add)
                .map_err(|errno| StoreError::io("find the data of", "the volume", errno));
        }
        self.segments.clear();
        self.map.plan_read(window, &mut self.files, &mut self.segments).map_err(|error| match error {
            PlanError::Range(range) => StoreError::Range(range),
            PlanError::Source(source) => source,
        })?;
        found.extend(self.segments.iter().filter_map(|segment| match segment.source {
            BlockSource::Zero => None,
            BlockSource::File(file) => Some((file, segment.range)),
        }));
        Ok(())
    }

    fn read(&self, file: FileIndex, bytes: &mut [u8], offset: u64) -> Result<()> {
        self.files.get(file).read_exact_at(bytes, offset).map_err(|error| {
            StoreError::io("read", self.files.name(file).map_or("a layer", ImageName::as_str), error)
        })
    }
}

fn chain_of(
    layout: &Layout,
    snapshot: Option<&str>,
    checks: &Checks,
) -> std::result::Result<Vec<ImageName>, shorthorn_chain::ChainError> {
    match snapshot {
        Some(name) => layout.chain_of_snapshot(name, checks),
        None => Ok(layout.chain().to_vec()),
    }
}

/// The target of the image. Offsets only rise.
struct ImageOutput {
    sink: Sink,
    position: u64,
    data_bytes: u64,
}

enum Sink {
    File(PathBuf, File),
    Stream(Box<dyn WriteDebug>),
}

impl ImageOutput {
    fn open(target: ExportTarget, directory: &Directory, size_bytes: u64) -> Result<ImageOutput> {
        let sink = match target {
            ExportTarget::Stream(stream) => Sink::Stream(stream),
            ExportTarget::File(path) => {
                refuse_inside(&path, directory)?;
                let file = File::create(&path).map_err(|error| StoreError::io("create", &path, error))?;
                file.set_len(size_bytes).map_err(|error| StoreError::io("set the size of", &path, error))?;
                Sink::File(path, file)
            }
        };
        Ok(ImageOutput { sink, position: 0, data_bytes: 0 })
    }

    /// Writes whole blocks; blocks of zeroes stay holes in a file.
    fn put(&mut self, bytes: &[u8], offset: u64) -> Result<()> {
        let mut at = offset;
        let (blocks, _) = bytes.as_chunks::<{ ZEROES.len() }>();
        for run in blocks.chunk_by(|one, next| (*one == ZEROES) == (*next == ZEROES)) {
            let bytes = run.as_flattened();
            if run[0] != ZEROES {
                self.put_data(bytes, at)?;
            }
            at += bytes.len() as u64;
        }
        Ok(())
    }

    fn put_data(&mut self, bytes: &[u8], offset: u64) -> Result<()> {
        self.data_bytes += bytes.len() as u64;
        match &mut self.sink {
            Sink::File(path, file) => {
                file.write_all_at(bytes, offset).map_err(|error| StoreError::io("write", &path, error))
            }
            Sink::Stream(stream) => {
                fill(stream, offset - self.position)?;
                self.position = offset + bytes.len() as u64;
                stream.write_all(bytes).map_err(stream_error)
            }
        }
    }

    fn finish(self, size_bytes: u64) -> Result<u64> {
        match self.sink {
            Sink::File(path, file) => {
                file.sync_all().map_err(|error| StoreError::io("sync", &path, error))?
            }
            Sink::Stream(mut stream) => {
                fill(&mut stream, size_bytes - self.position)?;
                stream.flush().map_err(stream_error)?;
            }
        }
        Ok(self.data_bytes)
    }
}

/// Writes zeroes.
fn fill(stream: &mut Box<dyn WriteDebug>, mut length: u64) -> Result<()> {
    while length > 0 {
        // No more than a block.
        #[allow(clippy::cast_possible_truncation)]
        let part = length.min(BLOCK_BYTES) as usize;
        stream.write_all(&ZEROES[..part]).map_err(stream_error)?;
        length -= part as u64;
    }
    Ok(())
}

fn stream_error(error: std::io::Error) -> StoreError {
    StoreError::io("write", "the output", error)
}

/// Refuses an export into the replica itself, which could overwrite a layer.
fn refuse_inside(path: &Path, directory: &Directory) -> Result<()> {
    let parent =
        path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    let same = |one: &Path, other: &Path| {
        matches!(
            (one.canonicalize(), other.canonicalize()), (Ok(one), Ok(other)) if one == other
        )
    };
    if same(parent, directory.path()) {
        return Err(StoreError::TargetInside(path.to_owned()));
    }
    Ok(())
}

/// Returns a run of blocks in pieces that fit the buffer.
fn chunks(extent: ByteRange) -> impl Iterator<Item = ByteRange> {
    let starts = (extent.offset()..extent.end()).step_by(CHUNK_BYTES);
    starts.filter_map(move |start| ByteRange::new(start, (CHUNK_BYTES as u64).min(extent.end() - start)).ok())
}

/// Returns the length of a piece, which fits the buffer.
#[allow(clippy::cast_possible_truncation)]
fn length_of(chunk: ByteRange) -> usize {
    chunk.length() as usize
}
