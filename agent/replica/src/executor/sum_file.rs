//! The file of the sums of blocks, with the pages of it that are in memory.

use std::io;
use std::os::fd::RawFd;

use shorthorn_ring::Ring;
use shorthorn_store::{BlockSumsFile, SUM_PAGE_BYTES, SumPage};

use super::operation::{kind, numbered_token};
use super::sum_pages::{PageSearch, SumPages};

/// See the module.
#[derive(Debug)]
pub(super) struct SumFile {
    /// None: no sums are kept.
    file: Option<BlockSumsFile>,
    /// Files of series that are over, which the ring may still have.
    retired: Vec<BlockSumsFile>,
    pages: SumPages,
    /// Reads and writes of pages that the ring has.
    in_flight: usize,
}

impl SumFile {
    pub fn new(file: Option<BlockSumsFile>) -> io::Result<SumFile> {
        Ok(SumFile { file, retired: Vec::new(), pages: SumPages::new()?, in_flight: 0 })
    }

    /// Returns true if sums are kept.
    pub fn is_kept(&self) -> bool {
        self.file.is_some()
    }

    /// Returns true if the ring reads and writes no page.
    pub fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    fn fd(&self) -> Option<RawFd> {
        self.file.as_ref().map(BlockSumsFile::raw_fd)
    }

    fn series(&self) -> u64 {
        self.file.as_ref().map_or(0, BlockSumsFile::series)
    }

    /// Returns the place of a page, if it is in memory; else it is being read, or will be asked for again.
    pub fn load(&mut self, number: u64, ring: &mut Ring) -> Option<usize> {
        let found = self.is_kept().then(|| self.pages.find(number))?;
        self.read(found, number, ring)
    }

    /// Loads a page for a read that is compared, which may take more memory.
    pub fn load_for_read(&mut self, number: u64, ring: &mut Ring) {
        if self.is_kept() {
            let found = self.pages.find_for_read(number);
            self.read(found, number, ring);
        }
    }

    fn read(&mut self, found: PageSearch, number: u64, ring: &mut Ring) -> Option<usize> {
        let fd = self.fd()?;
        match found {
            PageSearch::Here(at) => Some(at),
            PageSearch::Loading | PageSearch::Full => None,
            PageSearch::Load(at) => {
                self.begin_read(fd, at, number, ring);
                None
            }
        }
    }

    fn begin_read(&mut self, fd: RawFd, at: usize, number: u64, ring: &mut Ring) {
        let token = numbered_token(kind::SUMS_READ, place(at));
        ring.read(fd, self.pages.buf(at), number * SUM_PAGE_BYTES as u64, token);
        self.in_flight += 1;
    }

    /// Begins an interrupted read of a page again. Returns false if the page is not needed any more.
    pub fn read_again(&mut self, at: usize, ring: &mut Ring) -> bool {
        let Some((fd, number)) = self.fd().zip(self.pages.loading(at)) else { return false };
        self.in_flight -= 1;
        self.begin_read(fd, at, number, ring);
        true
    }

    /// Ends the read of a page after `count` bytes: see [`SumPages::loaded`].
    pub fn loaded(&mut self, at: usize, count: usize) -> Option<(u64, bool)> {
        self.in_flight -= 1;
        self.drop_retired();
        self.pages.loaded(at, self.series(), count)
    }

    /// Begins the write of a page, durably. False if it is being written already, or is not in memory.
    pub fn write(&mut self, at: usize, number: u64, ring: &mut Ring) -> bool {
        let Some(fd) = self.fd() else { return false };
        if !self.pages.begin_write(at, self.series()) {
            return false;
        }
        let token = numbered_token(kind::SUMS_WRITE, place(at));
        ring.write(fd, self.pages.buf(at), number * SUM_PAGE_BYTES as u64, true, token);
        self.in_flight += 1;
        true
    }

    /// Ends the write of a page: see [`SumPages::written`].
    pub fn written(&mut self, at: usize, well: bool) -> bool {
        self.in_flight -= 1;
        self.drop_retired();
        self.pages.written(at, well)
    }

    /// Returns the content of a page, if it is in memory.
    pub fn peek(&self, number: u64) -> Option<&SumPage> {
        self.pages.peek(number)
    }

    /// Marks a page as used. Returns true if its content is in memory.
    pub fn touch(&mut self, number: u64) -> bool {
        self.pages.touch(number)
    }

    /// Frees memory of pages that reads do not use any more.
    pub fn release_unused(&mut self) {
        self.pages.release_unused();
    }

    pub fn sums_mut(&mut self, at: usize) -> &mut SumPage {
        self.pages.sums_mut(at)
    }

    /// Ends the series: its sums do not count any more. Returns false if no sums were kept.
    pub fn retire(&mut self) -> bool {
        let Some(file) = self.file.take() else { return false };
        self.retired.push(file);
        self.drop_retired();
        self.pages.forget();
        true
    }

    /// Begins a series after the last one was retired.
    pub fn begin(&mut self, file: BlockSumsFile) {
        self.file = Some(file);
    }

    /// Closes the files of former series, unless the ring may still have one.
    fn drop_retired(&mut self) {
        if self.is_idle() {
            self.retired.clear();
        }
    }
}

fn place(at: usize) -> u16 {
    u16::try_from(at).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use shorthorn_ring::Completion;

    use super::*;
    use crate::executor::tests::new_store;

    fn wait(ring: &mut Ring) -> Completion {
        let mut completions = Vec::new();
        ring.wait(None, &mut completions).unwrap();
        completions[0]
    }

    #[test]
    fn a_page_is_read_once_and_written_for_the_series() {
        let temp = tempfile::tempdir().unwrap();
        let (mut store, ..) = new_store(&temp.path().join("replica"));
        let mut file = SumFile::new(Some(store.open_block_sums().unwrap())).unwrap();
        let mut ring = Ring::new(16).unwrap();
        assert_eq!(file.load(0, &mut ring), None);
        assert_eq!(file.load(0, &mut ring), None, "it is being read");
        assert!(!file.is_idle());
        let at = usize::from(wait(&mut ring).token.index);
        assert!(file.read_again(at, &mut ring) && !file.is_idle(), "the read was interrupted");
        let count = wait(&mut ring).count().unwrap();
        assert_eq!(file.loaded(at, count), Some((0, false)), "it was never written");
        assert!(file.is_idle() && !file.read_again(at, &mut ring));
        assert_eq!(file.load(0, &mut ring), Some(at));
        file.sums_mut(at).set(1, 7);
        assert!(file.write(at, 0, &mut ring));
        assert!(!file.write(at, 0, &mut ring), "it is being written");
        assert_eq!(wait(&mut ring).count().unwrap(), SUM_PAGE_BYTES);
        assert!(!file.is_idle() && file.written(at, true) && file.is_idle());
        assert_eq!(file.peek(0).and_then(|sums| sums.sum(1)), Some(7));
    }

    #[test]
    fn a_retired_file_stays_open_while_the_ring_has_it() {
        let temp = tempfile::tempdir().unwrap();
        let (mut store, ..) = new_store(&temp.path().join("replica"));
        let mut file = SumFile::new(Some(store.open_block_sums().unwrap())).unwrap();
        let mut ring = Ring::new(16).unwrap();
        file.load(0, &mut ring);
        assert!(file.retire() && !file.retire());
        assert_eq!((file.is_kept(), file.retired.len()), (false, 1));
        file.begin(store.open_block_sums().unwrap());
        let read = wait(&mut ring);
        let (at, count) = (usize::from(read.token.index), read.count().unwrap_or(0));
        assert_eq!(file.loaded(at, count), None, "it is of the series before");
        assert!(file.is_kept() && file.retired.is_empty());
    }
}
