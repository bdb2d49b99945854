use shorthorn_types::limits::MAX_MEMBERS;
use shorthorn_types::{ByteRange, Regions};

use crate::copy::{Copy, CopyReason};
use crate::membership::{PeerIndex, PeerMask};
use crate::scrub_result::VolumeCheck;
use crate::slot::SlotId;

/// The job of a copy slot.
#[derive(Clone, Debug)]
pub(crate) enum Job {
    Idle,
    Flush(FlushFor),
    Copy(Copy),
    Check(RangeCheck),
}

/// The reason of a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlushFor {
    /// Regions that will be cleared.
    Clearing,
    /// A replica that will become a member.
    Rebuilding,
}

/// A check of a range by the members.
#[derive(Clone, Debug)]
pub(crate) struct RangeCheck {
    pub range: ByteRange,
    pub checks: [Option<VolumeCheck>; MAX_MEMBERS],
    /// True if the job repairs differing blocks.
    pub repairs: bool,
    /// Members that know that they hold something else than was stored there.
    pub rotten: PeerMask,
}

/// The jobs of all copy slots.
#[derive(Debug)]
pub(crate) struct Jobs {
    jobs: Vec<(SlotId, Job)>,
    /// Bytes that were copied by all jobs so far.
    copied_bytes: u64,
}

impl Jobs {
    pub fn new(slots: impl Iterator<Item = SlotId>) -> Jobs {
        Jobs { jobs: slots.map(|slot| (slot, Job::Idle)).collect(), copied_bytes: 0 }
    }

    /// Counts bytes that were copied.
    pub fn copied(&mut self, bytes: u64) {
        self.copied_bytes += bytes;
    }

    /// Returns the bytes that were copied so far.
    pub fn copied_bytes(&self) -> u64 {
        self.copied_bytes
    }

    pub fn at(&mut self, index: usize) -> &mut Job {
        &mut self.jobs[index].1
    }

    /// Returns a slot for anything but a resync, for which the last one is reserved. Copies that wait for the
    /// range of a failed request must not block its resync.
    pub fn free(&self) -> Option<SlotId> {
        let others = self.jobs.len().saturating_sub(1);
        self.jobs[..others].iter().find(|(_, job)| matches!(job, Job::Idle)).map(|(slot, _)| *slot)
    }

    pub fn free_for_resync(&self) -> Option<SlotId> {
        self.jobs.last().filter(|(_, job)| matches!(job, Job::Idle)).map(|(slot, _)| *slot)
    }

    /// Returns the copies to replicas that are rebuilt, and their slots.
    pub fn rebuilds(&mut self) -> impl Iterator<Item = (SlotId, &mut Copy)> {
        self.jobs.iter_mut().filter_map(|(slot, job)| match job {
            Job::Copy(copy) if matches!(copy.why(), CopyReason::Rebuild { .. }) => Some((*slot, copy)),
            _ => None,
        })
    }

    pub fn copies(&self) -> impl Iterator<Item = &Copy> {
        self.jobs.iter().filter_map(|(_, job)| match job {
            Job::Copy(copy) => Some(copy),
            _ => None,
        })
    }

    /// Returns true if the slot copies a region to replicas that are rebuilt.
    pub fn is_rebuild(&self, slot: SlotId) -> bool {
        let is_rebuild =
            |job: &Job| matches!(job, Job::Copy(copy) if matches!(copy.why(), CopyReason::Rebuild { .. }));
        self.jobs.iter().any(|(of, job)| *of == slot && is_rebuild(job))
    }

    pub fn is_checking(&self) -> bool {
        let is_scrub = |job: &Job| match job {
            Job::Check(_) => true,
            Job::Copy(copy) => matches!(copy.why(), CopyReason::Repair { .. }),
            Job::Idle | Job::Flush(_) => false,
        };
        self.jobs.iter().any(|(_, job)| is_scrub(job))
    }

    /// Returns true if the region is being copied.
    pub fn has(&self, why: CopyReason) -> bool {
        self.copies().any(|copy| copy.why() == why)
    }

    /// Drops `lost` from all copies.
    pub fn forget(&mut self, lost: PeerMask) {
        for (_, job) in &mut self.jobs {
            if let Job::Copy(copy) = job {
                copy.forget(lost);
            }
        }
    }

    /// Handles that the index of a lost replica means another replica from now on: the results of scrubs are
    /// not about that one.
    pub fn replaced(&mut self, peer: PeerIndex) {
        let replaced = PeerMask::one(peer);
        for (_, job) in &mut self.jobs {
            match job {
                Job::Copy(copy) => copy.replaced(replaced),
                Job::Check(check) => {
                    check.checks[usize::from(peer)] = None;
                    check.rotten = check.rotten.without(replaced);
                }
                Job::Idle | Job::Flush(_) => {}
            }
        }
    }

    /// Returns the regions that are being copied or compared.
    pub fn touched(&self, regions: Regions) -> impl Iterator<Item = std::ops::Range<u32>> {
        self.jobs.iter().filter_map(move |(_, job)| match job {
            Job::Copy(copy) => Some(regions.touched(copy.range())),
            Job::Check(check) => Some(regions.touched(check.range)),
            Job::Idle | Job::Flush(_) => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slot::Slots;

    fn jobs() -> Jobs {
        Jobs::new(Slots::new(2, 8, 3).copies())
    }

    fn slot(slot: u16) -> SlotId {
        SlotId { queue: 0, slot }
    }

    fn copy(why: CopyReason) -> Job {
        Job::Copy(Copy::new(why, ByteRange::new(64 << 10, 4096).unwrap(), PeerMask::one(1)))
    }

    #[test]
    fn the_last_slot_is_kept_for_failed_requests() {
        let mut jobs = jobs();
        assert_eq!((jobs.free(), jobs.free_for_resync()), (Some(slot(8)), Some(slot(10))));
        *jobs.at(0) = Job::Flush(FlushFor::Clearing);
        *jobs.at(1) = Job::Flush(FlushFor::Rebuilding);
        assert_eq!((jobs.free(), jobs.free_for_resync()), (None, Some(slot(10))));
        *jobs.at(2) = copy(CopyReason::Resync { region: 0 });
        assert_eq!(jobs.free_for_resync(), None);
    }

    #[test]
    fn repairs_count_as_part_of_a_check() {
        let mut jobs = jobs();
        *jobs.at(0) = copy(CopyReason::Rebuild { region: 1 });
        assert!(!jobs.is_checking() && jobs.has(CopyReason::Rebuild { region: 1 }));
        assert!(!jobs.has(CopyReason::Resync { region: 1 }));
        assert_eq!(jobs.rebuilds().map(|(slot, _)| slot).collect::<Vec<_>>(), [slot(8)]);
        assert!(jobs.touched(Regions::of(1 << 20)).eq(std::iter::once(1..2)));
        *jobs.at(1) = copy(CopyReason::Repair { odd: PeerMask::one(1), sources: PeerMask::one(0) });
        assert!(jobs.is_checking());
    }

    #[test]
    fn a_lost_replica_leaves_all_copies() {
        let mut jobs = jobs();
        *jobs.at(0) = copy(CopyReason::Rebuild { region: 1 });
        *jobs.at(1) = copy(CopyReason::Resync { region: 1 });
        jobs.forget(PeerMask::one(1));
        assert!(jobs.copies().all(|copy| copy.targets().is_empty()));
    }
}
