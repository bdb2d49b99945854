//! A set: its content in memory, its content that is surely on the disk, and the pages to write.

use std::ops::Range;

use shorthorn_types::{RegionSet, Regions};

use crate::page::{
    PAGE_BYTES, PAGE_WORDS, PageBits, PageContent, PageDamage, PageHeader, REGIONS_PER_PAGE, made_for,
};

/// Most pages of one set: a mask of them fits a word.
const PAGES_MAX: u64 = 64;
/// The page behind those of the regions, which holds nothing but the stamp.
const STAMP_PAGES: usize = 1;
const _: () =
    assert!(shorthorn_types::REGIONS_MAX <= (PAGES_MAX - STAMP_PAGES as u64) * REGIONS_PER_PAGE as u64);

/// A page in memory.
#[derive(Clone, Debug)]
struct SetPage {
    /// The set as it is.
    wanted: PageBits,
    /// Regions that are surely on the disk after a crash, whatever the result of a running write.
    durable: PageBits,
    /// Number of the newest write that has ended well; see [`PagedSet::begin_write`].
    written: u64,
}

/// See the module.
///
/// Invariant: a region that is wanted and not durable is in a due page, or in the image of that page that is
/// being written.
#[derive(Clone, Debug)]
pub(crate) struct PagedSet {
    pub name: [u8; 8],
    /// A number that differs from that of an earlier set of the same name.
    pub serial: u64,
    regions: Regions,
    epoch: u64,
    /// The pages of the regions, followed by the page of the stamp.
    pages: Box<[SetPage]>,
    /// The stamp; none if it is unknown.
    stamp: Option<u32>,
    /// True if the file that it was read from has a whole page for the stamp.
    pub has_stamp_page: bool,
    /// True if the file that it was read from is of the volume before it has grown, and has to be recreated.
    pub is_outgrown: bool,
    /// Pages that a request waits for.
    due: u64,
    /// Pages that have lost regions since they were last written.
    stale: u64,
    /// Pages that are being written.
    writing: u64,
    version: u64,
}

/// The purpose of a set, and its directory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SetIdentity {
    pub name: [u8; 8],
    pub regions: Regions,
    pub epoch: u64,
}

impl PagedSet {
    /// Returns the empty set, which is not on the disk yet but counts as if: its write-intent log has put it
    /// there before.
    pub fn empty(identity: SetIdentity) -> PagedSet {
        let SetIdentity { name, regions, epoch } = identity;
        let page = SetPage { wanted: [0; PAGE_WORDS], durable: [0; PAGE_WORDS], written: 0 };
        let region_pages = regions.count().div_ceil(REGIONS_PER_PAGE).max(1) as usize;
        let pages = vec![page; region_pages + STAMP_PAGES].into();
        PagedSet {
            name,
            serial: 0,
            regions,
            epoch,
            pages,
            stamp: Some(0),
            has_stamp_page: true,
            is_outgrown: false,
            due: 0,
            stale: 0,
            writing: 0,
            version: 1,
        }
    }

    /// Loads the set from a file, and returns the damage of each page. A damaged page has all its regions in
    /// the set.
    ///
    /// A file that was made for the volume before it has grown is taken as such. The process has ended after
    /// the volume had grown, and before the file was recreated.
    pub fn load(identity: SetIdentity, file: &[u8]) -> (PagedSet, Vec<PageDamage>) {
        match made_for(file).filter(|size_bytes| *size_bytes < identity.regions.size_bytes()) {
            None => PagedSet::load_as(identity, file),
            Some(size_bytes) => {
                let before = SetIdentity { regions: Regions::of(size_bytes), ..identity };
                let (set, damages) = PagedSet::load_as(before, file);
                let has_stamp_page = set.has_stamp_page;
                (PagedSet { is_outgrown: true, has_stamp_page, ..set.grown(identity.regions) }, damages)
            }
        }
    }

    /// Returns the set for the volume after it has grown. As with [`PagedSet::empty`], the caller writes it
    /// to the disk first.
    pub fn grown(&self, regions: Regions) -> PagedSet {
        let PagedSet { name, epoch, version, .. } = *self;
        let mut grown =
            PagedSet { version, stamp: self.stamp, ..PagedSet::empty(SetIdentity { name, regions, epoch }) };
        for run in self.content().converted(self.regions, regions).runs(0) {
            grown.add_durable(run);
        }
        grown
    }

    fn load_as(identity: SetIdentity, file: &[u8]) -> (PagedSet, Vec<PageDamage>) {
        let mut set = PagedSet { stamp: None, ..PagedSet::empty(identity) };
        let mut damages = Vec::new();
        for number in 0..set.pages.len() {
            let from = (number * PAGE_BYTES).min(file.len());
            match set.header(number).decode(&file[from..]) {
                Ok(PageContent { version, stamp, bits }) => {
                    if version >= set.version {
                        set.stamp = Some(stamp);
                    }
                    set.version = set.version.max(version);
                    set.pages[number].wanted = bits;
                }
                // It holds no region. Whether it was torn by a crash or is damaged, a newer stamp may have
                // been there.
                Err(_) if number >= set.region_pages() => set.has_stamp_page = false,
                Err(damage) => {
                    damages.push(damage);
                    set.add_page(number);
                }
            }
            // After the next crash, the page reads the same until it is written.
            set.pages[number].durable = set.pages[number].wanted;
        }
        (set, damages)
    }

    fn region_pages(&self) -> usize {
        self.pages.len() - STAMP_PAGES
    }

    /// Returns the newest stamp that is kept with the set, if it is known.
    pub fn stamp(&self) -> Option<u32> {
        self.stamp
    }

    pub fn forget_stamp(&mut self) {
        self.stamp = None;
    }

    /// Raises the stamp, which is written with every page from now on. The page that has to be written before
    /// it is durable, as a mask.
    pub fn raise_stamp(&mut self, stamp: u32) -> u64 {
        if self.stamp >= Some(stamp) { 0 } else { self.put_stamp(stamp) }
    }

    /// Returns the page that has to be written before the stamp is durable, as a mask.
    pub fn put_stamp(&mut self, stamp: u32) -> u64 {
        self.stamp = Some(stamp);
        1 << self.region_pages()
    }

    fn add_page(&mut self, number: usize) {
        let start = u32::try_from(number).unwrap_or(u32::MAX).saturating_mul(REGIONS_PER_PAGE);
        self.add_durable(start..start.saturating_add(REGIONS_PER_PAGE));
    }

    fn header(&self, number: usize) -> PageHeader {
        PageHeader {
            set: self.name,
            page: u32::try_from(number).unwrap_or(u32::MAX),
            version: self.version,
            region_bytes: self.regions.region_bytes(),
            epoch: self.epoch,
            size_bytes: self.regions.size_bytes(),
            stamp: self.stamp.unwrap_or(0),
        }
    }

    /// Puts regions in, of a set that will be on the disk before it is kept.
    pub fn add_durable(&mut self, regions: Range<u32>) {
        let count = self.regions.count();
        for (page, word, mask) in words(regions, count) {
            let page = &mut self.pages[page];
            page.wanted[word] |= mask;
            page.durable[word] |= mask;
        }
    }

    /// Adds the content of `other`, a set of the same volume, like [`PagedSet::add_durable`].
    pub fn add_all_durable(&mut self, other: &PagedSet) {
        for (mine, theirs) in self.pages.iter_mut().zip(&other.pages) {
            for (word, more) in theirs.wanted.iter().enumerate() {
                mine.wanted[word] |= more;
                mine.durable[word] |= more;
            }
        }
    }

    /// Puts regions in. The pages that have to be written before they are durable, as a mask.
    pub fn put(&mut self, regions: Range<u32>) -> u64 {
        let mut lacking_pages = 0;
        for (number, word, mask) in words(regions, self.regions.count()) {
            let page = &mut self.pages[number];
            let new = mask & !page.wanted[word];
            page.wanted[word] |= mask;
            let lacking = mask & !page.durable[word];
            if lacking != 0 {
                lacking_pages |= 1 << number;
                if new & lacking != 0 {
                    self.due |= 1 << number;
                }
            }
        }
        lacking_pages
    }

    /// Demands the write of `pages`, even if one is under way.
    pub fn demand(&mut self, pages: u64) {
        self.due |= pages;
    }

    /// Takes regions out, lazily.
    pub fn clear(&mut self, regions: Range<u32>) {
        for (number, word, mask) in words(regions, self.regions.count()) {
            self.pages[number].wanted[word] &= !mask;
            self.stale |= 1 << number;
        }
    }

    /// Returns the next page to write: a page that a request waits for, or with `lazy` a page that has lost
    /// regions.
    pub fn next_page(&self, lazy: bool) -> Option<usize> {
        let ready = (self.due | if lazy { self.stale } else { 0 }) & !self.writing;
        (ready != 0).then(|| ready.trailing_zeros() as usize)
    }

    /// Begins to write page `number` in its current state, as write number `write`. Until the write has ended
    /// the disk may hold either page, so only the regions in both are surely there.
    pub fn begin_write(&mut self, number: usize, image: &mut [u8; PAGE_BYTES], bits: &mut PageBits) {
        debug_assert_eq!(self.writing & 1 << number, 0, "a page is written once at a time");
        self.version += 1;
        self.due &= !(1 << number);
        self.stale &= !(1 << number);
        self.writing |= 1 << number;
        let header = self.header(number);
        let page = &mut self.pages[number];
        header.encode(&page.wanted, image);
        *bits = page.wanted;
        for (durable, wanted) in page.durable.iter_mut().zip(&page.wanted) {
            *durable &= wanted;
        }
    }

    /// Ends the write of page `number` with `bits`, well or not.
    pub fn end_write(&mut self, number: usize, bits: &PageBits, write: u64, well: bool) {
        self.writing &= !(1 << number);
        if well {
            self.pages[number].durable = *bits;
            self.pages[number].written = write;
        } else {
            // A request still waits for it.
            self.due |= 1 << number;
        }
    }

    /// Returns true if each of `pages` was written by a write later than `after`.
    pub fn written_since(&self, pages: u64, after: u64) -> bool {
        let asked = |number: &usize| pages & 1 << number != 0;
        (0..self.pages.len()).filter(asked).all(|number| self.pages[number].written > after)
    }

    /// Returns the whole file. The page for a stamp that is not known is not a valid page, and yet has its
    /// place on the disk.
    pub fn file(&self) -> Vec<u8> {
        let mut file = Vec::with_capacity(self.pages.len() * PAGE_BYTES);
        let mut image = [0; PAGE_BYTES];
        for (number, page) in self.pages.iter().enumerate() {
            self.header(number).encode(&page.wanted, &mut image);
            if number >= self.region_pages() && self.stamp.is_none() {
                image.fill(0);
            }
            file.extend_from_slice(&image);
        }
        file
    }

    /// Returns true if the region is in.
    pub fn contains(&self, region: u32) -> bool {
        let run = region..region.saturating_add(1);
        words(run, self.regions.count()).all(|(page, word, mask)| self.pages[page].wanted[word] & mask != 0)
    }

    /// Returns all regions that the pages hold.
    pub fn content(&self) -> RegionSet {
        let mut content = RegionSet::empty(self.regions.count());
        for (number, page) in (0u32..).zip(&self.pages) {
            for (at, word) in (0u32..).zip(page.wanted) {
                let base = number * REGIONS_PER_PAGE + at * 64;
                let mut rest = word;
                while rest != 0 {
                    content.insert(base + rest.trailing_zeros());
                    rest &= rest - 1;
                }
            }
        }
        content
    }
}

/// Returns the words that `regions` lie in, as far as there are `count`: page, word of the page, and mask.
fn words(regions: Range<u32>, count: u32) -> impl Iterator<Item = (usize, usize, u64)> {
    let (mut at, end) = (regions.start, regions.end.min(count));
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let (page, bit) = (at / REGIONS_PER_PAGE, at % REGIONS_PER_PAGE);
        let in_word = (64 - bit % 64).min(end - at);
        let mask = u64::MAX >> (64 - in_word) << (bit % 64);
        at += in_word;
        Some((page as usize, (bit / 64) as usize, mask))
    })
}
