//! Power cuts.

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
}
