//! Repairs data of a snapshot's layer that does not match its sums.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use nix::fcntl::{FallocateFlags, OFlag, fallocate};
use shorthorn_chain::FileIndex;
use shorthorn_types::ByteRange;
use shorthorn_types::limits::BLOCK_BYTES;

use crate::buffer::{AlignedBuffer, CHUNK_BYTES};
use crate::error::StoreError;
use crate::files::signed;
use crate::image::Image;
use crate::medium::Medium;
use crate::sums::drop_sums;

type Result<T> = std::result::Result<T, StoreError>;

impl Image {
    /// Writes the blocks of `runs` to the layer `index`, whose file is `image`. The other blocks of `range`
    /// become holes. `data` has the contents of `runs` back to back. Durable on return.
    pub fn repair_layer(
        &mut self,
        medium: &Medium,
        (image, index): (&str, FileIndex),
        range: ByteRange,
        runs: &[ByteRange],
        data: &[u8],
    ) -> Result<()> {
        let before = self.layer_blocks(medium, index, range)?;
        let is_there = |block: u64| before.iter().any(|run| run.offset() <= block && block < run.end());
        let mut blocks = runs.iter().flat_map(|run| block_starts(*run));
        if blocks.any(|block| !is_there(block)) {
            self.drop_sums_above(medium, image)?;
        }
        let file = medium.directory().open_file(image, OFlag::O_RDWR | medium.direct_flag())?;
        let holes = gaps(range, runs).filter(|hole| before.iter().any(|run| run.overlaps(*hole)));
        let changed = punch(&file, holes)
            .and_then(|()| write_runs(&file, runs, data, self.scratch()))
            .and_then(|()| file.sync_all());
        if before != runs || changed.is_err() {
            // The map has remembered the blocks of the layer.
            self.forget_map(medium);
        }
        changed.map_err(|error| StoreError::io("repair", medium.directory().path_of(image), error))
    }

    /// Removes the sums of the snapshots above a layer. A block that comes back to the layer shows there,
    /// too. Requests may have made zeroes of it before one of these snapshots, which has no data there then.
    /// Its sum would say that this is right.
    fn drop_sums_above(&self, medium: &Medium, image: &str) -> Result<()> {
        let layers = self.layout().chain().iter();
        // The head has none.
        let mut above = layers.take_while(|layer| layer.as_str() != image).skip(1);
        above.try_for_each(|layer| drop_sums(medium.directory(), layer))
    }
}

fn block_starts(blocks: ByteRange) -> impl Iterator<Item = u64> {
    (0..blocks.length() / BLOCK_BYTES).map(move |block| blocks.offset() + block * BLOCK_BYTES)
}

fn punch(file: &File, holes: impl Iterator<Item = ByteRange>) -> std::io::Result<()> {
    let how = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    for hole in holes {
        fallocate(file.as_fd(), how, signed(hole.offset()), signed(hole.length()))?;
    }
    Ok(())
}

/// Writes `data` to `runs`, by way of a buffer that direct I/O accepts.
fn write_runs(
    file: &File,
    runs: &[ByteRange],
    data: &[u8],
    buffer: &mut AlignedBuffer,
) -> std::io::Result<()> {
    let mut rest = data;
    for run in runs {
        let mut at = run.offset();
        while at < run.end() {
            let length = usize::try_from(run.end() - at).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
            let (part, after) = rest.split_at_checked(length).ok_or(std::io::ErrorKind::UnexpectedEof)?;
            rest = after;
            let aligned = &mut buffer.as_mut_slice()[..length];
            aligned.copy_from_slice(part);
            file.write_all_at(aligned, at)?;
            at += length as u64;
        }
    }
    Ok(())
}

/// Returns the parts of `range` between `runs`.
fn gaps(range: ByteRange, runs: &[ByteRange]) -> impl Iterator<Item = ByteRange> {
    let starts = std::iter::once(range.offset()).chain(runs.iter().map(|run| run.end()));
    let ends = runs.iter().map(|run| run.offset()).chain(std::iter::once(range.end()));
    starts
        .zip(ends)
        .filter_map(|(start, end)| ByteRange::new(start, end.checked_sub(start)?).ok())
        .filter(|gap| !gap.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_the_ranges_outside_of_runs() {
        let range = |start: u64, end: u64| ByteRange::new(start * 4096, (end - start) * 4096).unwrap();
        let found = |runs: &[ByteRange]| gaps(range(2, 10), runs).collect::<Vec<_>>();
        assert_eq!(found(&[]), [range(2, 10)]);
        assert_eq!(found(&[range(2, 10)]), []);
        assert_eq!(found(&[range(3, 4), range(6, 10)]), [range(2, 3), range(4, 6)]);
    }

    #[test]
    fn data_is_written_to_its_runs_and_a_lack_of_it_is_an_error() {
        let file = tempfile::tempfile().unwrap();
        let run = |block: u64| ByteRange::new(block * 4096, 4096).unwrap();
        let mut buffer = AlignedBuffer::new(CHUNK_BYTES);
        let data = [[1; 4096], [2; 4096]].concat();
        write_runs(&file, &[run(1), run(3)], &data, &mut buffer).unwrap();
        let mut read = vec![9; 4 * 4096];
        file.read_exact_at(&mut read, 0).unwrap();
        assert!(read == [[0; 4096], [1; 4096], [0; 4096], [2; 4096]].concat());
        write_runs(&file, &[run(1), run(3)], &data[..4096], &mut buffer).unwrap_err();
    }
}
