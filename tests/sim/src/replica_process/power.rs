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

    /// Starts a replica process.
    pub fn start_replica(&mut self, at: usize, boot: u64) {
        if !self.replicas[at].up && !self.replicas[at].gone {
            self.trace(|| format!("replica {at} starts"));
            self.replicas[at].restart(boot, self.options.sabotage);
            if let Some(block) = self.replicas[at].unknown_lost() {
                self.violate(format!("replica {at} has forgotten that block {block} is lost"));
            }
            self.after(1000, Occurrence::Sum { replica: at, boot, is_read: None });
        }
    }
}
