//! Sums of blocks that stay known although their region has none any more.
//!
//! Sums count by region, and rot is repaired by block. The first write of a repair removes the sums of the
//! whole region; the other rot there would look sound, and would be summed. When rot is found in a page, its
//! sums are therefore kept, for every block until that block gets other data.
//!
//! A request that gives a block other data may fail for lack of space, and may have done a part. Until its
//! outcome is known, and after it has failed, the former data and the data of the request are both sound. All
//! other data is rot, as before. The data of a repair has the known sum: that sum stays, whatever the outcome
//! of the request.
//!
//! A request that changes a part of a block merges it with the data of the block. If that is rot, the result
//! is rot too, also if the request succeeds, until such requests have changed every sector. Between them the
//! block has to stay as it is: if its disk has changed it once more, none of its sectors counts.
//!
//! If an engine knows that the block holds rot, other members decide about its data. They may have the data
//! of a request that has failed here. It is then the only sound data, also if it cannot be written here for
//! lack of space. The repair of a layer may show the former data again. It does not decide: the sum alone
//! says whether the block is sound.
//!
//! The repair of a layer may also show data in a block that has read as zeroes until then. Either may be
//! right: the disk has lost the block, and a request has made zeroes of it since, or none has. If no sum says
//! which, other members have to decide first: see [`KnownRot::decide_about_hole`]. The block then stays known
//! with the data that it gets. Zeroes only make a hole, of which no sum would say that it is right.
//!
//! A *lost* block is one that no replica had sound. The disk records it, whatever it holds, until other data
//! for the whole block is durable: see [`KnownRot::cured_by`]. It is never forgotten for another reason. No
//! sum stands for its data, so that no data which it gets by a merge, or by rot, can look sound.
//!
//! The number of known blocks is bounded. A block is forgotten when it gets other data. It also is when it
//! was read back sound and its sum is durable again. If a page with rot exceeds the limit, its blocks must
//! not be modified, because that would invalidate its sums. The rot thus stays known by the page.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use shorthorn_types::ByteRange;
use shorthorn_types::limits::{BLOCK_BYTES, SECTOR_BYTES};

/// The maximum number of failed requests whose data a block may hold. After more of them the block is not
/// compared any more.
const FAILED_MAX: usize = 3;
/// The maximum number of results of merges with rot that a block may hold. After more failed requests, their
/// sectors count as rot.
const MERGED_MAX: usize = FAILED_MAX + 1;

/// The sum that no data has. A block with this known sum holds wrong data, as far as anything says.
const NO_SUM: u32 = 0;

/// The bounds of the knowledge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RotLimits {
    /// The maximum number of blocks with a known sum. Lost blocks come on top: the file that records them has
    /// a bound of its own.
    pub blocks: usize,
    /// The maximum number of untracked pages: those with rot that exceed `blocks`. Beyond that, every page
    /// counts as one.
    pub untracked_pages: usize,
}

impl Default for RotLimits {
    /// The blocks of 64 pages of the file of sums.
    fn default() -> RotLimits {
        RotLimits { blocks: 64 * 512, untracked_pages: 4096 }
    }
}

/// The data that a block has to show after the repair of a layer, if no layer has had it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AboutHole {
    /// Zeroes: a request may have made them.
    StaysZeroes,
    /// The data of the layer.
    ShowsLayer,
    /// No sum says which. The layer must not be repaired before the block has got data.
    Undecided,
}

/// The data of a block after a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// The request changes a part of the block, which it has not merged with the rest yet: it has written
    /// nothing there.
    Unmerged,
    /// The request makes a part of the block zeroes, the sum of a block of which is `zeroes`. Unless it
    /// merges the block, that is a hole, and the request writes nothing there.
    PartlyZeroes {
        /// The sum of a block of zeroes.
        zeroes: u32,
    },
    /// Data of which this is the sum.
    Sum(u32),
    /// Rot: the same once more, or the result of a merge with it.
    Rot,
}

/// See the module. `R` identifies a request in execution.
#[derive(Clone, Debug)]
pub struct KnownRot<R> {
    limits: RotLimits,
    blocks: BTreeMap<u64, Known<R>>,
    /// The number of blocks that requests are modifying.
    under_way: usize,
    /// The number of lost blocks.
    lost: usize,
    /// The pages with rot that exceed the limit of blocks; none: there were too many.
    untracked: Option<BTreeSet<u64>>,
}

/// The knowledge about one block.
#[derive(Clone, Debug)]
struct Known<R> {
    /// The sum of its correct data before any request; none: it is lost, as the disk records.
    former: Option<u32>,
    /// The sums of the data of requests that have failed: it may hold that.
    failed: Vec<u32>,
    /// The results that it may hold of requests that were merged with its rot.
    merged: Vec<Merged>,
    /// An engine knows of its rot, and may be about to decide about its data: see [`KnownRot::reported`].
    is_reported: bool,
    /// The repair of a layer waits for its next data: see [`AboutHole::Undecided`].
    is_undecided: bool,
    /// The request that is modifying it.
    change: Option<BlockChange<R>>,
}

/// The result of requests that were merged with rot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Merged {
    /// The sum of the block. If it has another one, its disk may have changed these sectors too.
    sum: u32,
    /// The sectors that have the data of the requests, a bit for each.
    fresh: u8,
}

/// The state of a block after a request that has ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// Unchanged data: the request has written nothing there.
    Unchanged,
    /// Unchanged rot, and no sum is known of the correct data any more.
    OutOfDate,
    /// Rot: the request was a repair, or was merged with rot.
    StaysRot,
    /// Other data than before.
    OtherData,
}

impl<R> Known<R> {
    const fn new(former: Option<u32>) -> Known<R> {
        Known {
            former,
            failed: Vec::new(),
            merged: Vec::new(),
            is_reported: false,
            is_undecided: false,
            change: None,
        }
    }

    const fn is_lost(&self) -> bool {
        self.former.is_none()
    }

    /// Returns true if data with this sum is its correct former data, or that of a failed request.
    fn may_have(&self, sum: u32) -> bool {
        self.former == Some(sum) || self.failed.contains(&sum)
    }

    /// A request has failed that may have given the block this data. If an engine knows of the rot, and the
    /// request is for the whole block, its data is that of another member.
    fn has_failed(&mut self, after: u32, is_whole: bool) {
        if is_whole && std::mem::take(&mut self.is_reported) {
            (self.former, self.failed) = (self.former.map(|_| after), Vec::new());
            self.merged.clear();
        }
        if !self.may_have(after) {
            self.failed.push(after);
        }
    }

    /// Returns the sectors that have the data of requests, if the block has this sum.
    fn fresh(&self, sum: u32) -> u8 {
        self.merged.iter().filter(|merged| merged.sum == sum).fold(0, |fresh, merged| fresh | merged.fresh)
    }

    /// A request has decided about the data, and the block stays known with it. Returns false if its sum is
    /// not known.
    fn decide(&mut self, after: After) -> bool {
        let After::Sum(sum) = after else { return false };
        *self = Known::new(Some(sum));
        true
    }

    fn fate(&self, after: After) -> Fate {
        match after {
            // Zeroes change no part of a hole.
            After::Unmerged => Fate::Unchanged,
            After::PartlyZeroes { zeroes } if self.is_lost() || self.may_have(zeroes) => Fate::Unchanged,
            // Rot has made that hole: the former data, too, lacks these zeroes now.
            After::PartlyZeroes { .. } => Fate::OutOfDate,
            After::Rot => Fate::StaysRot,
            After::Sum(after) if self.former == Some(after) => Fate::StaysRot,
            After::Sum(_) => Fate::OtherData,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct BlockChange<R> {
    request: R,
    /// True if it gives the whole block other data.
    is_whole: bool,
    after: After,
    /// The result, if it is rot: see [`After::Rot`].
    merged: Option<Merged>,
}

/// The sectors of a block that are in `range`.
fn sectors(block: u64, range: ByteRange) -> u8 {
    let start = |sector: u64| block * BLOCK_BYTES + sector * SECTOR_BYTES;
    let is_in = |sector: &u64| start(*sector) >= range.offset() && start(sector + 1) <= range.end();
    (0..BLOCK_BYTES / SECTOR_BYTES).filter(is_in).fold(0, |mask, sector| mask | 1 << sector)
}

impl<R> Default for KnownRot<R> {
    fn default() -> KnownRot<R> {
        KnownRot {
            limits: RotLimits::default(),
            blocks: BTreeMap::new(),
            under_way: 0,
            lost: 0,
            untracked: Some(BTreeSet::new()),
        }
    }
}

impl<R: Copy + PartialEq> KnownRot<R> {
    /// Sets the bounds of what can be known from now on.
    pub fn set_limits(&mut self, limits: RotLimits) {
        self.limits = limits;
    }

    /// Keeps the sums, which count, of some blocks. Known blocks stay. Returns false if they exceed the
    /// limit.
    pub fn keep_some(&mut self, sums: impl IntoIterator<Item = (u64, u32)>) -> bool {
        let new: Vec<(u64, u32)> =
            sums.into_iter().filter(|(block, _)| !self.blocks.contains_key(block)).collect();
        let fits = self.blocks.len() - self.lost + new.len() <= self.limits.blocks;
        if fits {
            self.blocks.extend(new.into_iter().map(|(block, sum)| (block, Known::new(Some(sum)))));
        }
        fits
    }

    /// The repair of a layer is about to show other data, with the sum `shown`, in a block that reads as
    /// `zeroes` now. No request is modifying the block. `kept` is its sum in a page, if that counts. If
    /// nothing decides, the block counts as rot from now on, so that other members decide. Such blocks get no
    /// more than half of the limit.
    pub fn decide_about_hole(
        &mut self,
        block: u64,
        (zeroes, shown): (u32, u32),
        kept: Option<u32>,
    ) -> AboutHole {
        let (has_zeroes, has_shown) = match self.blocks.get(&block) {
            Some(known) if known.is_lost() => (false, true),
            Some(known) => (known.may_have(zeroes), known.may_have(shown)),
            None => (kept == Some(zeroes), kept == Some(shown)),
        };
        if has_zeroes {
            return AboutHole::StaysZeroes;
        }
        if has_shown {
            return AboutHole::ShowsLayer;
        }
        if self.blocks.len() - self.lost < self.limits.blocks / 2 {
            self.keep_some([(block, kept.unwrap_or(NO_SUM))]);
        }
        if let Some(known) = self.blocks.get_mut(&block) {
            known.is_undecided = true;
        }
        AboutHole::Undecided
    }

    /// Keeps the sums, which count, of all blocks of a page with rot. Known blocks stay. Returns false if the
    /// page exceeds the limit: see [`KnownRot::may_modify`].
    pub fn keep(&mut self, page: u64, sums: impl IntoIterator<Item = (u64, u32)>) -> bool {
        let fits = self.keep_some(sums);
        let Some(untracked) = &mut self.untracked else { return fits };
        if fits {
            untracked.remove(&page);
        } else {
            untracked.insert(page);
        }
        if untracked.len() > self.limits.untracked_pages {
            self.untracked = None;
        }
        fits
    }

    /// Returns false if the page has rot that would be forgotten when its sums end. The sums of a region may
    /// end once they are kept: see [`KnownRot::keep_some`].
    #[must_use]
    pub fn may_modify(&self, page: u64) -> bool {
        self.untracked.as_ref().is_some_and(|untracked| !untracked.contains(&page))
    }

    /// Forgets a block that was read back with this sum: a sum that says the same is durable, and
    /// counts. A block with rot, or that a request is modifying, stays known.
    pub fn summed(&mut self, block: u64, found: u32) {
        let is_over = |known: &Known<R>| !known.is_lost() && known.change.is_none();
        if self.is_rotten(block, found) == Some(false) && self.blocks.get(&block).is_some_and(is_over) {
            self.forget_block(block);
        }
    }

    /// Keeps lost blocks, which the caller bounds, in place of all that is known of them.
    pub fn keep_lost(&mut self, blocks: impl IntoIterator<Item = u64>) {
        for block in blocks {
            self.forget_block(block);
            self.blocks.insert(block, Known::new(None));
            self.lost += 1;
        }
    }

    /// Returns true if the block is known, and lost.
    #[must_use]
    pub fn is_lost(&self, block: u64) -> bool {
        self.blocks.get(&block).is_some_and(Known::is_lost)
    }

    /// Returns the lost blocks that the request gives other data if it ends well. That is for the caller to
    /// record before [`KnownRot::ended`] and before the answer: first the data becomes durable, and then the
    /// record. After a crash in between, a block that was not answered counts as lost. In the other order,
    /// the disk could show the rot again after a loss of power, and no record of it.
    pub fn cured_by(&self, request: R) -> impl Iterator<Item = u64> + '_ {
        let cured = self.lost_changed_by(request);
        cured
            .filter(|(_, known, change)| known.fate(change.after) == Fate::OtherData)
            .map(|(block, ..)| block)
    }

    /// Returns the lost blocks of which the request has merged a part with the rot, and the sums of the
    /// results. That is for the caller to record before it writes them.
    pub fn merged_by(&self, request: R) -> impl Iterator<Item = (u64, u32)> + '_ {
        self.lost_changed_by(request).filter_map(|(block, _, change)| Some((block, change.merged?.sum)))
    }

    /// Returns the lost blocks that the request modifies. Cheap if no known block is modified.
    fn lost_changed_by(&self, request: R) -> impl Iterator<Item = (u64, &Known<R>, BlockChange<R>)> {
        let blocks = self.blocks.iter().take_while(|_| self.under_way > 0);
        blocks.filter(|(_, known)| known.is_lost()).filter_map(move |(block, known)| {
            known.change.filter(|change| change.request == request).map(|change| (*block, known, change))
        })
    }

    /// An engine gets the answer that the block holds rot. It takes the data of another member for the right
    /// one, and writes that here next. If that fails, the former data is not sound any more.
    pub fn reported(&mut self, block: u64) {
        if let Some(known) = self.blocks.get_mut(&block) {
            known.is_reported = true;
        }
    }

    /// A request that gives the block the data `after` was refused for lack of space, before it changed
    /// anything. If an engine knows of the rot, that is the data of another member, as after a request that
    /// [has failed](KnownRot::ended). The page of sums still has the sum of the former data. The repair with
    /// this data must therefore end the sums of the region.
    pub fn refused(&mut self, block: u64, after: After) {
        let decides = |known: &&mut Known<R>| known.is_reported && known.change.is_none();
        let (Some(known), After::Sum(after)) = (self.blocks.get_mut(&block).filter(decides), after) else {
            return;
        };
        let is_in_page = known.former == Some(after) && known.failed.is_empty();
        known.has_failed(after, true);
        if !is_in_page && known.failed.is_empty() {
            known.failed.push(after);
        }
    }

    /// The request is about to fail on the only member, so no other one decides about its data.
    pub fn failed_alone(&mut self, request: R) {
        for known in self.blocks.values_mut().take_while(|_| self.under_way > 0) {
            known.is_reported &= known.change.is_none_or(|change| change.request != request);
        }
    }

    /// An engine gets the answer that the block is sound, so that it may take this data for the right one.
    pub fn found_sound(&mut self, block: u64) {
        if let Some(known) = self.blocks.get_mut(&block) {
            known.is_reported = false;
        }
    }

    /// Returns true if an engine may be about to decide for the data of another member.
    #[must_use]
    pub fn is_reported(&self, block: u64) -> bool {
        self.blocks.get(&block).is_some_and(|known| known.is_reported)
    }

    /// Returns true if no block is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Returns the known blocks among these, in order. A block that the disk has lost may be a hole without a
    /// sum.
    pub fn blocks_in(&self, blocks: Range<u64>) -> impl Iterator<Item = u64> + '_ {
        self.blocks.range(blocks).map(|(block, _)| *block)
    }

    /// Returns true if the block is known.
    #[must_use]
    pub fn has(&self, block: u64) -> bool {
        self.blocks.contains_key(&block)
    }

    /// Returns true if a block with this sum holds wrong data; none if the block is not known.
    #[must_use]
    pub fn is_rotten(&self, block: u64, found: u32) -> Option<bool> {
        let known = self.blocks.get(&block)?;
        let may_get = known.change.is_some_and(|change| change.after == After::Sum(found));
        Some(!may_get && !known.may_have(found))
    }

    /// Returns true if the block has the correct former data, and no request may have given it other data.
    #[must_use]
    pub fn confirms(&self, block: u64, found: u32) -> bool {
        self.blocks.get(&block).is_some_and(|known| {
            known.former == Some(found)
                && known.failed.is_empty()
                && known.change.is_none()
                && !known.is_reported
        })
    }

    /// Returns true if `request` repairs the block with data that has this sum. An engine knows of the rot,
    /// the data is the former data, and no other request may have given the block other data. If the sums of
    /// its region count, they count after the repair too.
    #[must_use]
    pub fn is_repaired_by(&self, block: u64, request: R, given: u32) -> bool {
        // A request that has waited is examined again.
        let is_own = |change: &BlockChange<R>| change.request == request && change.after == After::Sum(given);
        self.blocks.get(&block).is_some_and(|known| {
            known.is_reported
                && known.former == Some(given)
                && known.failed.is_empty()
                && known.change.as_ref().is_none_or(is_own)
        })
    }

    /// Returns the sum to store for a block whose data has the sum `found`. Rot keeps the sum of the correct
    /// data, and a lost block gets a wrong sum.
    #[must_use]
    pub fn sum_to_store(&self, block: u64, found: u32) -> u32 {
        match (self.is_rotten(block, found), self.blocks.get(&block)) {
            (Some(true), Some(known)) => known.former.unwrap_or_else(|| (!found).max(1)),
            _ => found,
        }
    }

    /// The request is about to modify the block.
    pub fn modified(&mut self, request: R, block: u64, after: After) {
        let Some(known) = self.blocks.get_mut(&block) else { return };
        let is_whole = matches!(after, After::Sum(_));
        let is_sound_if_former = known.failed.is_empty() && !known.is_reported;
        let changes_nothing = !known.is_lost() && is_sound_if_former && known.fate(after) == Fate::StaysRot;
        match &mut known.change {
            // It is begun once more.
            Some(change) if change.request == request => (change.after, change.is_whole) = (after, is_whole),
            // Two requests modify one block: their order is unknown.
            Some(_) => self.lose_track(block),
            None if changes_nothing => known.merged.clear(),
            None => {
                known.change = Some(BlockChange { request, is_whole, after, merged: None });
                self.under_way += 1;
            }
        }
    }

    /// Returns true if the request modifies a known block. Cheap if none is known.
    #[must_use]
    pub fn awaits(&self, request: R) -> bool {
        let is_its = |known: &Known<R>| known.change.is_some_and(|change| change.request == request);
        self.under_way > 0 && self.blocks.values().any(is_its)
    }

    /// Records that the request for `range` has merged its part of the block with the former data. The sum
    /// was `before` and is `after` now.
    pub fn merged(&mut self, request: R, range: ByteRange, block: u64, (before, after): (u32, u32)) {
        let Some(known) = self.blocks.get_mut(&block) else { return };
        let fresh = known.fresh(before) | sectors(block, range);
        // If every sector gets other data, nothing is left of the rot.
        let is_sound = known.may_have(before) || fresh == u8::MAX;
        let merged = Merged { sum: after, fresh };
        if let Some(change) = known.change.as_mut().filter(|change| change.request == request) {
            (change.after, change.merged) =
                if is_sound { (After::Sum(after), None) } else { (After::Rot, Some(merged)) };
        }
    }

    /// Records the end of the request; if not `well`, it has done a part of its work, or nothing.
    pub fn ended(&mut self, request: R, well: bool) {
        if self.under_way == 0 {
            return;
        }
        let (mut ended, mut cured) = (0, 0);
        self.blocks.retain(|_, known| {
            let Some(BlockChange { is_whole, after, merged, .. }) =
                known.change.filter(|change| change.request == request)
            else {
                return true;
            };
            known.change = None;
            ended += 1;
            match known.fate(after) {
                _ if !well => {
                    if let After::Sum(after) = after {
                        known.has_failed(after, is_whole);
                    }
                    let merged = merged.filter(|merged| !known.merged.contains(merged));
                    known.merged.extend(merged);
                }
                Fate::Unchanged => {}
                Fate::OutOfDate => {
                    (known.former, known.failed) = (Some(NO_SUM), Vec::new());
                    known.merged.clear();
                }
                Fate::StaysRot => {
                    known.is_reported &= merged.is_some();
                    known.failed.clear();
                    known.merged.clear();
                    known.merged.extend(merged);
                }
                Fate::OtherData => {
                    cured += usize::from(known.is_lost());
                    return known.is_undecided && known.decide(after);
                }
            }
            if known.is_lost() && known.failed.len() > FAILED_MAX {
                // The data of the older requests may be anywhere: it counts as rot.
                known.failed.drain(..known.failed.len() - 1);
            }
            if known.merged.len() > MERGED_MAX {
                // The first one stays: most requests that fail have changed nothing.
                known.merged.remove(1);
            }
            known.failed.len() <= FAILED_MAX
        });
        self.under_way -= ended;
        self.lost -= cured;
    }

    /// Forgets the data that the block may have. That of a lost block is rot until a later request.
    fn lose_track(&mut self, block: u64) {
        let is_lost = self.is_lost(block);
        self.forget_block(block);
        self.keep_lost(is_lost.then_some(block));
    }

    /// Forgets the block, also if it is lost.
    pub fn forget_block(&mut self, block: u64) {
        let Some(known) = self.blocks.remove(&block) else { return };
        self.under_way -= usize::from(known.change.is_some());
        self.lost -= usize::from(known.is_lost());
    }

    /// No page of sums counts any more: none of them knows untracked rot.
    pub fn forget_pages(&mut self) {
        self.untracked = Some(BTreeSet::new());
    }

    /// Forgets all blocks but the lost ones, which the caller bounds: no sum counts any more. A request that
    /// is modifying a lost block may still give it other data, or merge a part of it.
    pub fn forget_sums(&mut self, lost: impl IntoIterator<Item = u64>) {
        let before = std::mem::replace(self, KnownRot { limits: self.limits, ..KnownRot::default() });
        self.keep_lost(lost);
        for (block, known) in before.blocks.into_iter().filter(|(_, known)| known.is_lost()) {
            if let Some(kept) = self.blocks.get_mut(&block) {
                kept.change = known.change;
                self.under_way += usize::from(known.change.is_some());
            }
        }
    }
}

#[cfg(test)]
mod model;

#[cfg(test)]
mod tests;
