//! The region sets of the members of a first view, combined. They show which regions the engine has to resync
//! after an unclean stop, and which regions each absent replica lacks.

use shorthorn_types::RegionSet;

/// The sets that one member keeps beside the data.
#[derive(Clone, Debug)]
pub struct MemberSets {
    /// The write intent of the member.
    pub intent: RegionSet,
    /// The newest stamp that the member was sent; none if it does not know.
    pub stamp: Option<u32>,
    /// For each replica of the spec: its out-of-sync set; none if the member keeps none.
    pub out_of_sync: Vec<Option<OutOfSyncSet>>,
}

/// The out-of-sync set of a replica, as a member keeps it.
#[derive(Clone, Debug)]
pub struct OutOfSyncSet {
    /// Regions in which the replica lacks data.
    pub out_of_sync: RegionSet,
    /// The newest stamp that was sent to the replica. If its disk has lost that stamp, it lacks more regions
    /// than `out_of_sync`.
    pub stamp: u32,
}

/// The region sets and stamps of all members together.
#[derive(Debug)]
pub struct CombinedSets {
    /// The regions to resync: the union of the write intents. The members may differ in them.
    pub dirty: RegionSet,
    /// For each member: the regions to resync from it, or from another one that has the region here. In the
    /// other regions any member is the source.
    pub sources: Vec<RegionSet>,
    /// The newest stamp that any member was sent; none if no member knows its stamp.
    pub stamp: Option<u32>,
    /// For each replica of the spec: its out-of-sync set.
    pub out_of_sync: Vec<RegionSet>,
    /// For each replica of the spec: the newest stamp that it was sent; none if no member keeps its set.
    pub stamps: Vec<Option<u32>>,
    /// For each replica of the spec: true if its out-of-sync set has every region that it lacks.
    pub is_complete: Vec<bool>,
}

impl CombinedSets {
    /// Returns the newest stamp, from which the next ones continue. `reached` has the stamps of all reached
    /// replicas. If no member knows its stamp, all count as current. The result is then a stamp that no
    /// replica was sent.
    #[must_use]
    pub fn first_stamp(&self, reached: impl IntoIterator<Item = Option<u32>>) -> u32 {
        let others = || reached.into_iter().flatten().chain(self.stamps.iter().flatten().copied()).max();
        self.stamp.unwrap_or_else(|| others().unwrap_or(0).saturating_add(2))
    }
}

/// Combines the sets of the members of a first view. The out-of-sync set of a replica is complete if every
/// member keeps one.
#[must_use]
pub fn combine_sets(member_sets: &[MemberSets], replicas: usize, regions: u32) -> CombinedSets {
    let mut all = CombinedSets {
        dirty: RegionSet::empty(regions),
        sources: Vec::new(),
        stamp: member_sets.iter().filter_map(|member| member.stamp).max(),
        out_of_sync: vec![RegionSet::empty(regions); replicas],
        stamps: vec![None; replicas],
        is_complete: vec![!member_sets.is_empty(); replicas],
    };
    for member in member_sets {
        all.dirty.insert_all(&member.intent);
        for (replica, out_of_sync_set) in member.out_of_sync.iter().enumerate().take(replicas) {
            match out_of_sync_set {
                Some(out_of_sync_set) => {
                    all.out_of_sync[replica].insert_all(&out_of_sync_set.out_of_sync);
                    all.stamps[replica] = all.stamps[replica].max(Some(out_of_sync_set.stamp));
                }
                None => all.is_complete[replica] = false,
            }
        }
    }
    all.sources = sources(member_sets, &all.dirty);
    all
}

/// Returns for each member the regions of `dirty` that it has not modified, like more than half of the
/// members.
///
/// An acknowledged write is in the write intent of all members until all have flushed it. So these members
/// hold every acknowledged write. A member that has modified the region may be one that differed from the
/// majority, and was being repaired.
fn sources(member_sets: &[MemberSets], dirty: &RegionSet) -> Vec<RegionSet> {
    let mut sources = vec![RegionSet::empty(dirty.limit()); member_sets.len()];
    for region in dirty.iter() {
        let modified = member_sets.iter().filter(|member| member.intent.contains(region)).count();
        if modified * 2 >= member_sets.len() {
            continue;
        }
        for (member, sources) in member_sets.iter().zip(&mut sources) {
            if !member.intent.contains(region) {
                sources.insert(region);
            }
        }
    }
    sources
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_that_few_members_have_modified_are_copied_from_the_others() {
        let set = |of: &[u32]| {
            let mut set = RegionSet::empty(10);
            for region in of {
                set.insert(*region);
            }
            set
        };
        let member = |of: &[u32]| MemberSets { intent: set(of), stamp: None, out_of_sync: Vec::new() };
        let three = [member(&[1, 2, 3]), member(&[2, 3]), member(&[3])];
        assert_eq!(combine_sets(&three, 0, 10).sources, [set(&[]), set(&[1]), set(&[1])]);
        assert_eq!(
            combine_sets(&three[..2], 0, 10).sources,
            [set(&[]), set(&[])],
            "half is not the majority"
        );
    }

    #[test]
    fn an_out_of_sync_set_is_complete_if_every_member_keeps_one() {
        let set = |of: &[u32]| {
            let mut set = RegionSet::empty(10);
            for region in of {
                set.insert(*region);
            }
            set
        };
        let out_of_sync_set = |of, stamp| Some(OutOfSyncSet { out_of_sync: set(of), stamp });
        let one = MemberSets {
            intent: set(&[1]),
            stamp: Some(7),
            out_of_sync: vec![None, out_of_sync_set(&[4], 3), out_of_sync_set(&[6], 2)],
        };
        let two = MemberSets {
            intent: set(&[2]),
            stamp: Some(8),
            out_of_sync: vec![None, out_of_sync_set(&[5], 4), None],
        };
        let all = combine_sets(&[one.clone(), two.clone()], 3, 10);
        assert_eq!(all.dirty, set(&[1, 2]));
        assert_eq!(all.out_of_sync, [set(&[]), set(&[4, 5]), set(&[6])]);
        assert_eq!(all.is_complete, [false, true, false]);
        assert_eq!((all.stamp, &all.stamps[..]), (Some(8), &[None, Some(4), Some(2)][..]));
        let unknown = MemberSets { stamp: None, ..two.clone() };
        assert_eq!(combine_sets(&[one, unknown.clone()], 3, 10).stamp, Some(7));
        let none = combine_sets(&[unknown], 3, 10);
        assert_eq!(
            (all.first_stamp([Some(20)]), none.first_stamp([None])),
            (8, 6),
            "above the stamps that others may have"
        );
        assert_eq!(none.first_stamp([None, Some(20), Some(3)]), 22);
        assert_eq!(combine_sets(&[], 1, 10).is_complete, [false]);
    }
}
