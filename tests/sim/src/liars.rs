//! Replicas that lie for a while, also after all other trouble. If the others are enough, the volume has to
//! start and to become healthy without their help.

use shorthorn_checker::Micros;
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_types::{Members, ReplicaId, View};

use crate::faults::LieAt;
use crate::replica::{Judgement, Replica};
use crate::simulation::Simulation;

/// The number of blocks of which a disk cannot read one, if it cannot read all.
const UNREAD_OF: u64 = 7;
/// The time in which an engine makes several attempts to open the volume.
const ATTEMPTS_US: Micros = 15_000_000;

impl Simulation {
    /// Returns true if a replica lies.
    pub fn has_liars(&self) -> bool {
        self.replicas.iter().any(|replica| !replica.lies.is_empty() && !replica.gone)
    }

    /// Ends the lies of all processes.
    pub fn end_lies(&mut self) {
        self.replicas.iter_mut().for_each(|replica| replica.lies.clear());
    }

    /// Returns true if a replica lies at proposals.
    pub fn has_liar_at_proposals(&self) -> bool {
        self.replicas.iter().any(|replica| lies(replica, LieAt::Proposals) && !replica.gone)
    }

    /// Returns true if an engine serves, and all replicas are members that can be while some lie.
    pub fn serves_with_liars(&self) -> bool {
        self.serving().is_some() && self.absent().is_none()
    }

    /// Handles the end of the liars' time, if [`Simulation::serves_with_liars`] did not hold. Is that their
    /// doing?
    pub fn judge_liars(&mut self) {
        match self.serving() {
            None if self.could_start_without_liars() => {
                self.violate("the volume does not start without a replica that lies".to_owned());
            }
            Some(members) if self.has_honest_source(&members) => {
                if let Some(absent) = self.absent() {
                    self.violate(format!("{absent} is not rebuilt from a member that does not lie"));
                }
            }
            _ => {}
        }
    }

    /// Returns the members, if the attached engine serves, and does not change its view.
    pub fn serving(&self) -> Option<Members> {
        let engine = self.hosts[self.controller.host].engine.and_then(|engine| self.engines.get(&engine));
        let core = engine?.core.as_ref()?;
        (!core.membership().is_changing()).then(|| core.membership().view().members)
    }

    /// Returns a replica that could be a member and is none. A rebuild needs a view that every member stores,
    /// and so no liar at proposals.
    fn absent(&self) -> Option<ReplicaId> {
        let members = self.serving()?;
        if self.has_liar_at_proposals() {
            return None;
        }
        // A lying replica may take itself for a member, and then does not even list its layers.
        let is_there = |replica: &Replica| {
            replica.up && !replica.gone && replica.lies.is_empty() && !members.contains(replica.id)
        };
        let absent = self.replicas.iter().find(|replica| is_there(replica) && self.is_wanted(replica));
        absent.map(|replica| replica.id)
    }

    fn is_wanted(&self, replica: &Replica) -> bool {
        self.guest.replicas.contains(&replica.id)
    }

    fn has_honest_source(&self, members: &Members) -> bool {
        let is_one = |replica: &Replica| members.contains(replica.id) && !lies(replica, LieAt::Source);
        self.replicas.iter().any(is_one) && self.can_read_snapshot(members)
    }

    /// Returns true if every block of the snapshot that some member cannot read is one that another member
    /// has sound and can read.
    fn can_read_snapshot(&self, members: &Members) -> bool {
        let is_member = |(_, replica): &(usize, &Replica)| members.contains(replica.id);
        let known: Vec<(usize, &Replica)> = self.replicas.iter().enumerate().filter(is_member).collect();
        let mut blocks = 0..self.controller.size_bytes / BLOCK_BYTES;
        blocks.all(|block| {
            let is_unread = known.iter().any(|(at, replica)| replica.cannot_read(*at, block));
            let gives = |(at, replica): &(usize, &Replica)| {
                replica.has_sound_below(block) && !replica.cannot_read(*at, block)
            };
            !is_unread || known.iter().any(gives)
        })
    }

    /// Returns true if replicas that do not lie at proposals are more than half of every view that may count.
    /// One of them must be in all of these views and have kept everything. It looks at the disks directly.
    fn could_start_without_liars(&self) -> bool {
        let engine = self.hosts[self.controller.host].engine.and_then(|engine| self.engines.get(&engine));
        let has_tried =
            engine.is_some_and(|engine| engine.core.is_none() && engine.begun_us + ATTEMPTS_US < self.now);
        let is_whole = |replica: &Replica| replica.up && !replica.gone && !replica.is_rolled_back;
        let wanted: Vec<&Replica> = self.replicas.iter().filter(|replica| self.is_wanted(replica)).collect();
        if !has_tried || !self.has_liar_at_proposals() || !wanted.iter().all(|replica| is_whole(replica)) {
            return false;
        }
        let known: Vec<(&Replica, Judgement)> =
            wanted.into_iter().map(|replica| (replica, replica.judgement())).collect();
        let Some(newest) = known.iter().map(|(_, one)| one.report.committed).max_by_key(|view| view.id)
        else {
            return false;
        };
        let proposed = known.iter().flat_map(|(_, one)| one.report.proposed.clone());
        let granted = self.hosts.iter().flat_map(|host| [host.granted, host.granted_before]).flatten();
        let may_count: Vec<View> = proposed
            .chain(granted)
            .chain(self.controller.arbiter.granted())
            .filter(|view| view.id > newest.id)
            .chain([newest])
            .collect();
        let honest = |replica: &Replica| !lies(replica, LieAt::Proposals);
        let is_quorum = |view: &View| {
            let have =
                known.iter().filter(|(replica, _)| honest(replica) && view.members.contains(replica.id));
            2 * have.count() > view.members.len()
        };
        let has_all = |(replica, one): &(&Replica, Judgement)| {
            honest(replica)
                && !one.rebuilding
                && !one.lost_cache
                && may_count.iter().all(|view| view.members.contains(replica.id))
        };
        may_count.iter().all(is_quorum) && known.iter().any(has_all)
    }
}

impl Replica {
    /// Returns true if the disk of the replica, which has the number `at`, cannot read this block of the
    /// snapshot.
    pub fn cannot_read(&self, at: usize, block: u64) -> bool {
        let is_bad = block % UNREAD_OF == at as u64 % UNREAD_OF;
        is_bad && lies(self, LieAt::Blocks) && self.files.snapshot.get(block).is_some()
    }
}

fn lies(replica: &Replica, at: LieAt) -> bool {
    replica.lies.contains_key(&at)
}
