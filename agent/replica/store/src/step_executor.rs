//! Executes the steps that the chain crate plans.

use std::fs::File;
use std::os::unix::fs::FileExt;

use shorthorn_chain::{FileStep, ImageName, WINDOW_BYTES};
use shorthorn_types::ByteRange;

use crate::buffer::AlignedBuffer;
use crate::directory::{Directory, stat_of};
use crate::epoch_record::EpochRecord;
use crate::error::StoreError;
use crate::files::{data_extents, open_image};
use crate::options::{Fault, FaultHook};

type Result<T> = std::result::Result<T, StoreError>;

/// The bytes that a fold copies at a time.
const COPY_BYTES: usize = 1 << 20;

/// Executes steps in one directory.
pub(crate) struct StepExecutor<'a> {
    directory: &'a Directory,
    fault: Option<&'a FaultHook>,
    direct_io: bool,
}

impl<'a> StepExecutor<'a> {
    pub fn new(directory: &'a Directory, fault: Option<&'a FaultHook>, direct_io: bool) -> StepExecutor<'a> {
        StepExecutor { directory, fault, direct_io }
    }

    pub fn directory(&self) -> &'a Directory {
        self.directory
    }

    /// Executes `steps`, which may replace `volume.meta`.
    pub fn run(&self, steps: &[FileStep], epoch_record: &mut EpochRecord) -> Result<()> {
        let mut made = None;
        let mut before = None;
        for step in steps {
            match step {
                FileStep::SyncFile { name } if let Some(bytes) = written(before, name) => {
                    self.directory.sync_document(name, bytes)?;
                }
                FileStep::Vouch { name } => epoch_record.vouch(self.directory, name)?,
                // A new file has nothing to lose.
                FileStep::SyncFile { name } if ImageName::parse(name).is_some() && made != Some(name) => {
                    self.sync_data(name)?;
                }
                step => self.execute(step, &mut |_| {})?,
            }
            if let FileStep::CreateSparse { name, .. } = step {
                made = Some(name);
            }
            before = Some(step);
            self.pass(|| format!("{step:?}"))?;
        }
        Ok(())
    }

    /// Executes the copy steps of a fold. Data that cannot be made durable is still in the layer above, and
    /// is copied again. `progress` gets the number of further bytes copied.
    pub fn copy(&self, steps: &[FileStep], progress: &mut dyn FnMut(u64)) -> Result<()> {
        for step in steps {
            self.execute(step, progress)?;
            self.pass(|| format!("{step:?}"))?;
        }
        Ok(())
    }

    pub fn pass(&self, done: impl FnOnce() -> String) -> Result<()> {
        match self.fault.map_or(Fault::None, |hook| hook.after(&done())) {
            Fault::None => Ok(()),
            Fault::Die => Err(StoreError::Stopped),
            Fault::Fail(errno) => {
                let error = std::io::Error::from_raw_os_error(errno);
                Err(StoreError::io("change", self.directory.path(), error))
            }
        }
    }

    fn execute(&self, step: &FileStep, progress: &mut dyn FnMut(u64)) -> Result<()> {
        let directory = self.directory;
        match step {
            FileStep::Write { name, bytes } => directory.write(name, bytes),
            FileStep::SyncFile { name } => directory.sync_file(name),
            FileStep::Rename { from, to } => directory.rename(from, to),
            FileStep::Link { from, to } => directory.link(from, to),
            FileStep::Unlink { name } => directory.unlink(name),
            FileStep::SyncDirectory => directory.sync(),
            FileStep::CreateSparse { name, size_bytes } => directory.create_sparse(name, *size_bytes),
            FileStep::Grow { name, size_bytes } => directory.grow(name, *size_bytes),
            FileStep::Fold { from, into } => self.fold(from, into, progress),
            // Only changes of the head come with this step, and they run with an epoch record.
            FileStep::Vouch { .. } => Ok(()),
        }
    }

    /// Makes the data of a layer durable. The hook comes before it too, so that it can fail. A layer that
    /// cannot even be opened has failed as well: that is all that some file systems say once they have given
    /// up.
    pub fn sync_data(&self, image: &str) -> Result<()> {
        self.pass(|| format!("about to sync {image}"))
            .and_then(|()| self.directory.sync_file(image))
            .map_err(StoreError::not_durable)
    }

    /// Copies the data of `from` over that of `into`, hole by hole, whole blocks at a time. Zeroes are copied
    /// too: a block of zeroes hides the data of lower layers, a hole does not.
    fn fold(&self, from: &ImageName, into: &ImageName, progress: &mut dyn FnMut(u64)) -> Result<()> {
        let upper = open_image(self.directory, from, self.direct_io, false)?;
        let lower = open_image(self.directory, into, self.direct_io, true)?;
        let looked = stat_of(&upper).map_err(|error| self.error("look at", from, error))?;
        let whole = ByteRange::new(0, looked.size_bytes)?;
        let mut buffer = AlignedBuffer::new(COPY_BYTES);
        let mut extents = Vec::new();
        let mut start = 0;
        while start < whole.end() {
            let window = ByteRange::new(start, WINDOW_BYTES.min(whole.end() - start))?;
            extents.clear();
            data_extents(&upper, window, &mut |extent| extents.push(extent.grown_to_blocks()))
                .map_err(|errno| self.error("find the data of", from, errno))?;
            for extent in &extents {
                self.copy_extent((&upper, from), (&lower, into), *extent, &mut buffer, progress)?;
            }
            start = window.end();
        }
        Ok(())
    }

    fn copy_extent(
        &self,
        (upper, from): (&File, &ImageName),
        (lower, into): (&File, &ImageName),
        extent: ByteRange,
        buffer: &mut AlignedBuffer,
        progress: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let mut at = extent.offset();
        while at < extent.end() {
            let length = (extent.end() - at).min(COPY_BYTES as u64);
            // No more than the buffer holds.
            #[allow(clippy::cast_possible_truncation)]
            let chunk = &mut buffer.as_mut_slice()[..length as usize];
            upper.read_exact_at(chunk, at).map_err(|error| self.error("read", from, error))?;
            lower.write_all_at(chunk, at).map_err(|error| self.error("write", into, error))?;
            at += length;
            progress(length);
            self.pass(|| format!("copied {length} bytes up to {at}"))?;
        }
        Ok(())
    }

    fn error(
        &self,
        action: &'static str,
        image: &ImageName,
        source: impl Into<std::io::Error>,
    ) -> StoreError {
        StoreError::io(action, self.directory.path_of(image.as_str()), source)
    }
}

/// Returns the content that the step before has written to the file, if it has.
fn written<'a>(before: Option<&'a FileStep>, file: &str) -> Option<&'a [u8]> {
    match before {
        Some(FileStep::Write { name, bytes }) if name == file => Some(bytes),
        _ => None,
    }
}
