//! The pages of sums of blocks that are in memory: those used last. Modifications and the summing of clean
//! regions need a few. Reads that are compared get more entries, as long as they need them.

use std::collections::HashMap;
use std::io;

use shorthorn_ring::{Arena, IoBuf};
use shorthorn_store::{SUM_PAGE_BYTES, SumPage};

use crate::limits::{SUM_PAGES, SUM_PAGES_MAX};

#[derive(Debug)]
struct CachedPage {
    number: Option<u64>,
    state: PageState,
    sums: SumPage,
    used: u64,
}

impl CachedPage {
    fn empty() -> CachedPage {
        CachedPage { number: None, state: PageState::Ready, sums: SumPage::unknown(), used: 0 }
    }
}

/// The operation of the ring on a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PageState {
    /// The page is in memory, and no operation runs on it.
    Ready,
    /// The page is being read: its sums are not known yet.
    Loading,
    /// The page is being written as it is in memory.
    Writing,
    /// The result of reading or writing the page is not used, because its sums do not count any more.
    Orphan,
}

/// The result of a search for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PageSearch {
    /// The page is in this entry.
    Here(usize),
    /// The page is being read.
    Loading,
    /// The page has to be read into this entry.
    Load(usize),
    /// No entry is free before something ends that is under way.
    Full,
}

/// See the module.
#[derive(Debug)]
pub(super) struct SumPages {
    entries: Vec<CachedPage>,
    /// The entry of each number.
    by_number: HashMap<u64, usize>,
    /// A buffer for each entry; a buffer that was never used takes no memory.
    arena: Arena,
    clock: u64,
    /// The clock at the last call of [`SumPages::release_unused`].
    released_at: u64,
}

impl SumPages {
    pub fn new() -> io::Result<SumPages> {
        Ok(SumPages {
            entries: (0..SUM_PAGES).map(|_| CachedPage::empty()).collect(),
            by_number: HashMap::with_capacity(SUM_PAGES),
            arena: Arena::new(SUM_PAGES_MAX, SUM_PAGE_BYTES)?,
            clock: 0,
            released_at: 0,
        })
    }

    /// Searches a page. A page that has to be loaded is marked as being read.
    pub fn find(&mut self, number: u64) -> PageSearch {
        self.clock += 1;
        if let Some(at) = self.by_number.get(&number).copied() {
            self.entries[at].used = self.clock;
            return if self.entries[at].state == PageState::Loading {
                PageSearch::Loading
            } else {
                PageSearch::Here(at)
            };
        }
        let free = self.entries.iter().enumerate().filter(|(_, entry)| entry.state == PageState::Ready);
        let Some((at, _)) = free.min_by_key(|(_, entry)| entry.used) else { return PageSearch::Full };
        self.empty(at);
        let entry = &mut self.entries[at];
        (entry.number, entry.state, entry.used) = (Some(number), PageState::Loading, self.clock);
        self.by_number.insert(number, at);
        PageSearch::Load(at)
    }

    /// Searches a page for a read, which may add an entry: up to [`SUM_PAGES_MAX`].
    pub fn find_for_read(&mut self, number: u64) -> PageSearch {
        let is_known = self.by_number.contains_key(&number);
        if !is_known && self.by_number.len() >= SUM_PAGES && self.entries.len() < SUM_PAGES_MAX {
            self.entries.push(CachedPage::empty());
        }
        self.find(number)
    }

    /// Marks a page as used. Returns true if its content is cached.
    pub fn touch(&mut self, number: u64) -> bool {
        self.clock += 1;
        let Some(at) = self.by_number.get(&number) else { return false };
        let entry = &mut self.entries[*at];
        entry.used = self.clock;
        entry.state != PageState::Loading
    }

    /// Returns the content of a page, if it is cached.
    pub fn peek(&self, number: u64) -> Option<&SumPage> {
        let entry = &self.entries[*self.by_number.get(&number)?];
        (entry.state != PageState::Loading).then_some(&entry.sums)
    }

    /// Removes the entries that reads have added, if nothing has used them since the last call.
    pub fn release_unused(&mut self) {
        let since = std::mem::replace(&mut self.released_at, self.clock);
        let is_unused = |entry: &CachedPage| entry.state == PageState::Ready && entry.used <= since;
        while self.entries.len() > SUM_PAGES && self.entries.last().is_some_and(is_unused) {
            let at = self.entries.len() - 1;
            self.empty(at);
            self.entries.pop();
            self.arena.release_pages(at, 0);
        }
        if self.entries.len() == SUM_PAGES {
            self.by_number.shrink_to(SUM_PAGES);
        }
    }

    /// Removes the page from an entry.
    fn empty(&mut self, at: usize) {
        let entry = &mut self.entries[at];
        entry.sums.clear();
        if let Some(number) = entry.number.take() {
            self.by_number.remove(&number);
        }
    }

    pub fn sums_mut(&mut self, at: usize) -> &mut SumPage {
        &mut self.entries[at].sums
    }

    /// Returns the buffer from which a page is read and written.
    pub fn buf(&self, at: usize) -> IoBuf {
        self.arena.buf(at)
    }

    /// Returns the number of the page that is being read into this entry, if it is still needed.
    pub fn loading(&self, at: usize) -> Option<u64> {
        let entry = &self.entries[at];
        entry.number.filter(|_| entry.state == PageState::Loading)
    }

    /// Ends the read of a page after `count` bytes. Returns its number, and whether it has valid sums; none
    /// if the page is not needed any more.
    pub fn loaded(&mut self, at: usize, series: u64, count: usize) -> Option<(u64, bool)> {
        let entry = &mut self.entries[at];
        let state = std::mem::replace(&mut entry.state, PageState::Ready);
        let number = entry.number.filter(|_| state == PageState::Loading)?;
        let mut bytes = [0; SUM_PAGE_BYTES];
        self.arena.buf(at).copy_to(&mut bytes);
        let known = entry.sums.decode(number, series, &bytes[..count.min(SUM_PAGE_BYTES)]);
        Some((number, known))
    }

    /// Begins the write of the page. False if it is being written already, or is not here.
    pub fn begin_write(&mut self, at: usize, series: u64) -> bool {
        let entry = &mut self.entries[at];
        let Some(number) = entry.number.filter(|_| entry.state == PageState::Ready) else { return false };
        let mut bytes = [0; SUM_PAGE_BYTES];
        entry.sums.encode(number, series, &mut bytes);
        self.arena.buf(at).copy_from(&bytes);
        entry.state = PageState::Writing;
        true
    }

    /// Ends the write of a page. After a failure it is read again before it is used. Returns false if it is
    /// not needed any more.
    pub fn written(&mut self, at: usize, well: bool) -> bool {
        let entry = &mut self.entries[at];
        let state = std::mem::replace(&mut entry.state, PageState::Ready);
        if !well {
            self.empty(at);
        }
        state == PageState::Writing
    }

    pub fn forget(&mut self) {
        self.by_number.clear();
        for entry in &mut self.entries {
            (entry.number, entry.used) = (None, 0);
            if entry.state != PageState::Ready {
                entry.state = PageState::Orphan;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(pages: &mut SumPages, number: u64) -> usize {
        let PageSearch::Load(at) = pages.find(number) else { panic!("it is there already") };
        let mut bytes = [0; SUM_PAGE_BYTES];
        let mut sums = SumPage::unknown();
        sums.set(1, 7);
        sums.encode(number, 5, &mut bytes);
        pages.buf(at).copy_from(&bytes);
        assert_eq!(pages.find(number), PageSearch::Loading);
        assert_eq!(pages.loaded(at, 5, SUM_PAGE_BYTES), Some((number, true)));
        at
    }

    #[test]
    fn those_used_last_stay() {
        let mut pages = SumPages::new().unwrap();
        let entries: Vec<usize> = (0..SUM_PAGES as u64).map(|number| load(&mut pages, number)).collect();
        assert_eq!(pages.find(0), PageSearch::Here(entries[0]));
        assert_eq!(pages.find(100), PageSearch::Load(entries[1]), "0 was used later");
        assert_eq!(pages.find(0), PageSearch::Here(entries[0]));
        assert_eq!(pages.peek(0).and_then(|sums| sums.sum(1)), Some(7));
    }

    #[test]
    fn reads_add_entries_that_end_when_they_are_not_used() {
        let mut pages = SumPages::new().unwrap();
        for number in 0..SUM_PAGES_MAX as u64 + 1 {
            let PageSearch::Load(at) = pages.find_for_read(number) else { panic!("{number}") };
            pages.loaded(at, 5, 0);
        }
        assert_eq!((pages.entries.len(), pages.by_number.len()), (SUM_PAGES_MAX, SUM_PAGES_MAX));
        assert_eq!(pages.find_for_read(0), PageSearch::Load(1), "it was used first; now 1 was");
        pages.loaded(1, 5, 0);
        pages.release_unused();
        assert_eq!(pages.entries.len(), SUM_PAGES_MAX, "they were used since the start");
        assert!(pages.touch(100));
        assert!(!pages.touch(1), "0 has its entry");
        pages.release_unused();
        assert_eq!((pages.entries.len(), pages.by_number.len()), (101, 101), "100 was used");
        pages.release_unused();
        assert_eq!(pages.entries.len(), SUM_PAGES);
        assert_eq!(pages.find(3), PageSearch::Here(3));
        assert!(matches!(pages.find(100), PageSearch::Load(_)));
    }

    #[test]
    fn modifications_add_no_entry() {
        let mut pages = SumPages::new().unwrap();
        for number in 0..SUM_PAGES as u64 * 2 {
            let PageSearch::Load(at) = pages.find(number) else { panic!("{number}") };
            pages.loaded(at, 5, 0);
        }
        assert_eq!(pages.entries.len(), SUM_PAGES);
    }

    #[test]
    fn an_entry_of_the_ring_stays() {
        let mut pages = SumPages::new().unwrap();
        let at = load(&mut pages, 0);
        assert!(pages.begin_write(at, 5) && !pages.begin_write(at, 5));
        for number in 1..SUM_PAGES as u64 {
            assert!(matches!(pages.find(number), PageSearch::Load(_)));
        }
        assert_eq!(pages.find(100), PageSearch::Full);
        assert_eq!(pages.find(0), PageSearch::Here(at), "it can be used while it is written");
        assert!(pages.written(at, true));
        assert_eq!(pages.find(100), PageSearch::Load(at));
    }

    #[test]
    fn reads_and_writes_of_a_former_series_are_ignored() {
        let mut pages = SumPages::new().unwrap();
        let written = load(&mut pages, 0);
        pages.begin_write(written, 5);
        let PageSearch::Load(read) = pages.find(1) else { panic!() };
        pages.forget();
        assert!(!pages.written(written, true));
        assert_eq!(pages.loaded(read, 6, SUM_PAGE_BYTES), None);
        let PageSearch::Load(at) = pages.find(0) else { panic!("it is read again") };
        assert_eq!(pages.loaded(at, 6, SUM_PAGE_BYTES), Some((0, false)), "it is of another series");
        assert_eq!(pages.peek(0).map(|sums| sums.sum(1)), Some(None));
    }
}
