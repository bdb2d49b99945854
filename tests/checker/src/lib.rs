//! The possible contents of each sector in the reads of a guest.
//!
//! Every write has an id, and a sector's content is the id of the write that it shows (0: zeroes). The
//! checker knows when each write was submitted and when it ended, and from that which ids a read may return:
//!
//! - never one that a later write has surely replaced. That write was submitted after the earlier ended, and
//!   was acknowledged or read before the read began;
//! - after a loss of power that no host survives, also data that was replaced by writes without a flush.
#![forbid(unsafe_code)]

/// The id of a write; 0 stands for zeroes.
pub type Id = u32;

/// The content of a sector that a disk has changed by itself.
pub const ROT: Id = Id::MAX;
/// The content of blocks that a disk has changed by itself once more.
pub const ROT_AGAIN: Id = ROT - 1;

/// Returns true if the sector is one that a disk has changed by itself.
pub const fn is_rot(id: Id) -> bool {
    id >= ROT_AGAIN
}

/// Returns true if any of the sectors is one that a disk has changed by itself.
pub fn has_rot(sectors: &[Id]) -> bool {
    sectors.iter().any(|id| is_rot(*id))
}

/// Microseconds of simulated time.
pub type Micros = u64;

#[derive(Clone, Debug)]
struct Write {
    id: Id,
    submitted: Micros,
    /// From here on it can no longer begin to take effect.
    ended: Option<Micros>,
    /// The time before which the write surely took effect.
    effective: Option<Micros>,
    /// A flush covers it.
    durable: bool,
    /// The time since which the write has surely been replaced.
    dead: Option<Micros>,
    /// True if the write is replaced for good, and no read can return it any more.
    gone: bool,
}

impl Write {
    /// Returns the write that exists from the beginning.
    fn first(id: Id) -> Write {
        let done = Some(0);
        Write { id, submitted: 0, ended: done, effective: done, durable: true, dead: None, gone: false }
    }
}

/// All sectors of a volume.
#[derive(Debug)]
pub struct Checker {
    sectors: Vec<Vec<Write>>,
    horizon: Micros,
    /// Sectors with more than one durable write, in any order.
    ambiguous: Vec<u32>,
    is_ambiguous: Vec<bool>,
    /// By id: the sectors that the write was about.
    written: Vec<std::ops::Range<usize>>,
}

impl Checker {
    /// Creates a volume whose sectors show `initial`.
    pub fn new(initial: &[Id]) -> Checker {
        let mut checker = Checker {
            sectors: initial.iter().map(|id| vec![Write::first(*id)]).collect(),
            horizon: 0,
            ambiguous: Vec::new(),
            is_ambiguous: vec![false; initial.len()],
            written: Vec::new(),
        };
        for (sector, id) in initial.iter().enumerate() {
            let first = checker.written.get(*id as usize).filter(|range| !range.is_empty());
            let first = first.map_or(sector, |range| range.start.min(sector));
            checker.remember(*id, first..sector + 1);
        }
        checker
    }

    fn remember(&mut self, id: Id, sectors: std::ops::Range<usize>) {
        let at = id as usize;
        if self.written.len() <= at {
            self.written.resize(at + 1, 0..0);
        }
        self.written[at] = sectors;
    }

    /// Grows the volume to `sectors`; the new part shows zeroes.
    pub fn grow(&mut self, sectors: usize) {
        let sectors = sectors.max(self.sectors.len());
        self.sectors.resize_with(sectors, || vec![Write::first(0)]);
        self.is_ambiguous.resize(sectors, false);
    }

    /// Returns the size of the checked volume in sectors.
    pub fn sectors(&self) -> usize {
        self.sectors.len()
    }

    /// Records a write, discard or write of zeroes that the device gets.
    pub fn submit(&mut self, sectors: std::ops::Range<usize>, id: Id, now: Micros) {
        self.remember(id, sectors.clone());
        for at in sectors {
            self.sectors[at].push(Write {
                id,
                submitted: now,
                ended: None,
                effective: None,
                durable: false,
                dead: None,
                gone: false,
            });
            if !std::mem::replace(&mut self.is_ambiguous[at], true) {
                self.ambiguous.push(u32::try_from(at).unwrap_or(u32::MAX));
            }
        }
    }

    /// Records that a write was acknowledged; `durable` for a FUA write.
    pub fn acknowledged(
        &mut self,
        sectors: std::ops::Range<usize>,
        id: Id,
        submitted: Micros,
        now: Micros,
        durable: bool,
    ) {
        self.end(sectors, id, submitted, now, Some(durable));
    }

    /// Records that a write may or may not have taken effect, and will not later.
    pub fn undecided(&mut self, sectors: std::ops::Range<usize>, id: Id, submitted: Micros, now: Micros) {
        self.end(sectors, id, submitted, now, None);
    }

    /// Records that a write has failed. It may or may not have taken effect, and a read meanwhile may have
    /// seen data that is gone again.
    pub fn failed(&mut self, sectors: std::ops::Range<usize>, id: Id, submitted: Micros, now: Micros) {
        for sector in &mut self.sectors[sectors] {
            let found = sector.iter_mut().find(|write| write.id == id && write.submitted == submitted);
            let Some(write) = found else { continue };
            write.ended = Some(now);
            write.effective = None;
            sector.iter_mut().for_each(|write| write.dead = None);
            prune(sector, self.horizon);
        }
    }

    /// Forgets writes that were replaced before `horizon`, because every unfinished read began later.
    pub fn forget_before(&mut self, horizon: Micros) {
        self.horizon = horizon;
    }

    fn end(
        &mut self,
        sectors: std::ops::Range<usize>,
        id: Id,
        submitted: Micros,
        now: Micros,
        acked: Option<bool>,
    ) {
        for sector in &mut self.sectors[sectors] {
            let found = sector.iter_mut().find(|write| write.id == id && write.submitted == submitted);
            let Some(write) = found else { continue };
            write.ended = Some(now);
            if let Some(durable) = acked {
                write.effective.get_or_insert(now);
                write.durable |= durable;
            }
            prune(sector, self.horizon);
        }
    }

    /// Records the acknowledgement of a flush that the device got at `submitted`.
    pub fn flushed(&mut self, submitted: Micros) {
        let horizon = self.horizon;
        let (sectors, is_ambiguous) = (&mut self.sectors, &mut self.is_ambiguous);
        self.ambiguous.retain(|at| {
            let sector = &mut sectors[*at as usize];
            let mut news = false;
            for write in sector.iter_mut().filter(|write| !write.durable && write.effective.is_some()) {
                write.durable = write.ended.is_some_and(|ended| ended <= submitted);
                news |= write.durable;
            }
            if news {
                prune(sector, horizon);
            }
            let stays = sector.len() > 1 || !sector.iter().all(|write| write.durable);
            is_ambiguous[*at as usize] = stays;
            stays
        });
    }

    /// Records a power loss: data without a flush may be lost in whole or in part.
    pub fn power_lost(&mut self, now: Micros) {
        for at in &self.ambiguous {
            let sector = &mut self.sectors[*at as usize];
            for write in sector.iter_mut().filter(|write| !write.durable) {
                write.effective = None;
                // An unfinished write may still be done.
                write.ended = write.ended.map(|_| now);
            }
            for write in sector.iter_mut() {
                write.dead = None;
            }
            prune(sector, self.horizon);
        }
    }

    /// Records a salvage: the operator has made one possibly incomplete replica the volume, which has its
    /// content from now on.
    ///
    /// # Errors
    /// The replica holds data that was never written there.
    pub fn salvaged(&mut self, content: &[Id]) -> Result<(), String> {
        for (at, id) in content.iter().enumerate() {
            let was_written = self.written.get(*id as usize).is_some_and(|range| range.contains(&at));
            if *id != 0 && !was_written {
                return Err(format!("sector {at} shows write {id}, which was never about it"));
            }
            if let Some(sector) = self.sectors.get_mut(at) {
                *sector = vec![Write::first(*id)];
            }
        }
        self.ambiguous.clear();
        self.is_ambiguous.fill(false);
        Ok(())
    }

    /// Checks a read that the device got at `start` and that showed `ids`.
    ///
    /// # Errors
    /// The violation.
    pub fn read(
        &mut self,
        first_sector: usize,
        ids: &[Id],
        start: Micros,
        now: Micros,
    ) -> Result<(), String> {
        for (at, id) in ids.iter().enumerate() {
            // Unchecked reads may show it.
            if is_rot(*id) {
                continue;
            }
            let sector = &mut self.sectors[first_sector + at];
            let may = |write: &&mut Write| write.id == *id && write.dead.is_none_or(|dead| dead >= start);
            let Some(write) = sector.iter_mut().rev().find(may) else {
                let known: Vec<_> = sector
                    .iter()
                    .map(|w| (w.id, w.submitted, w.ended, w.effective, w.durable, w.dead))
                    .collect();
                return Err(format!(
                    "sector {} reads as write {id} at {now} (asked at {start}); (id, submitted, ended, \
                     effective, durable, dead): {known:?}",
                    first_sector + at
                ));
            };
            if write.effective.is_none() {
                write.effective = Some(now);
                prune(sector, self.horizon);
            }
        }
        Ok(())
    }
}

impl Checker {
    /// Returns the first sector that a read shows as it surely was not any more at `start`. The read says
    /// nothing about writes that no reader has seen yet.
    #[must_use]
    pub fn stale(&self, first_sector: usize, ids: &[Id], start: Micros) -> Option<String> {
        let is_stale = |(at, id): &(usize, &Id)| {
            let may = |write: &Write| write.id == **id && write.dead.is_none_or(|dead| dead >= start);
            !is_rot(**id) && !self.sectors[first_sector + at].iter().any(may)
        };
        let (at, id) = ids.iter().enumerate().find(is_stale)?;
        Some(format!("sector {} as write {id}, asked at {start}", first_sector + at))
    }
}

/// Finds the writes that have surely been replaced, and forgets those that cannot come back: replaced by
/// durable ones, before `horizon`.
fn prune(sector: &mut Vec<Write>, horizon: Micros) {
    if sector.len() < 2 {
        return;
    }
    for at in 0..sector.len() {
        let Some(ended) = sector[at].ended else { continue };
        let (mut dead, mut for_good) = (sector[at].dead, false);
        for (killer, write) in sector.iter().enumerate() {
            let (Some(effective), true) = (write.effective, killer != at && write.submitted >= ended) else {
                continue;
            };
            dead = Some(dead.map_or(effective, |dead| dead.min(effective)));
            for_good |= write.durable && effective < horizon;
        }
        sector[at].dead = dead;
        sector[at].gone |= for_good;
    }
    sector.retain(|write| !write.gone);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written() -> Checker {
        let mut checker = Checker::new(&[0; 4]);
        checker.submit(0..2, 1, 10);
        checker.acknowledged(0..2, 1, 10, 20, false);
        checker
    }

    #[test]
    fn an_acknowledged_write_is_read() {
        let mut checker = written();
        assert!(checker.read(0, &[1, 1, 0], 30, 40).is_ok());
        assert!(checker.read(0, &[0], 30, 40).is_err());
        assert!(checker.read(0, &[0], 15, 40).is_ok(), "the read began before the write was acknowledged");
        assert!(checker.read(2, &[1], 30, 40).is_err());
    }

    #[test]
    fn a_value_that_was_read_stays() {
        let mut checker = written();
        checker.submit(0..1, 2, 30);
        assert!(checker.read(0, &[1], 40, 41).is_ok());
        assert!(checker.read(0, &[2], 50, 51).is_ok());
        assert!(checker.read(0, &[1], 60, 61).is_err());
    }

    #[test]
    fn a_salvaged_volume_has_the_data_of_its_replica() {
        let mut checker = written();
        checker.flushed(25);
        checker.salvaged(&[0, 1, 0, 0]).unwrap();
        assert!(checker.read(0, &[0, 1], 50, 51).is_ok());
        assert!(checker.read(0, &[1], 50, 51).is_err(), "it is gone");
        assert!(written().salvaged(&[0, 0, 1, 0]).unwrap_err().contains("never about it"));
    }

    #[test]
    fn a_power_loss_takes_unflushed_writes() {
        let mut checker = written();
        checker.submit(0..1, 2, 30);
        checker.acknowledged(0..1, 2, 30, 31, false);
        checker.flushed(25);
        checker.power_lost(40);
        assert!(checker.read(0, &[1], 50, 51).is_ok(), "2 was not flushed");
        let mut checker = written();
        checker.flushed(25);
        checker.power_lost(40);
        assert!(checker.read(0, &[0], 50, 51).is_err(), "1 was flushed");
    }
}
