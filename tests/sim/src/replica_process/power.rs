//! Power cuts, and starts of replica processes.

use super::*;

impl Simulation {
    /// Cuts the power of all hosts at once.
    pub fn cut_power_of_all(&mut self, rng: &mut Rng) {
        for host in 0..self.hosts.len() {
            self.kill_engine(host, 0, rng);
        }
        for at in 0..self.replicas.len() {
            self.kill_replica(at, true, 0, rng);
        }
        for host in &mut self.hosts {
            (host.was_live, host.lost_writes) = (false, false);
        }
        // The guest was on one of the hosts.
        let now = self.now;
        self.guest_moves();
        self.mark_forgotten_undecided();
        self.checker.power_lost(now);
    }

    /// Switches the host of a replica off. Rot may be back that was repaired just before: the disk changes no
    /// block that no other replica has.
    pub(super) fn lose_power(&mut self, at: usize, rng: &mut Rng) {
        let replica = &mut self.replicas[at];
        let back = replica.files.lose_power(rng);
        replica.durable.lose_power(rng);
        for block in back {
            if self.has_other(at, block) {
                self.count("rot that a loss of power brings back");
                self.trace(|| format!("block {block} of replica {at} is rotten again"));
            } else {
                self.replicas[at].files.heal(block);
            }
        }
    }

    fn has_other(&self, at: usize, block: u64) -> bool {
        let is_source = |other: &Replica| self.guest.replicas.contains(&other.id) && other.is_sound(block);
        (0..self.replicas.len()).any(|other| other != at && is_source(&self.replicas[other]))
    }

    /// Starts a replica process.
    pub fn start_replica(&mut self, at: usize, boot: u64) {
        if !self.replicas[at].up && !self.replicas[at].gone {
            self.trace(|| format!("replica {at} starts"));
            self.replicas[at].restart(boot, self.options.sabotage);
            if let Some(block) = self.replicas[at].unknown_lost() {
                self.violate(format!("replica {at} has forgotten that block {block} is lost"));
            }
            if let Some(block) = self.replicas[at].forgotten_rot.take() {
                self.violate(format!("a repair of replica {at} has ended the sum of block {block}"));
            }
            self.after(1000, Occurrence::Sum { replica: at, boot, is_read: None });
        }
    }
}
