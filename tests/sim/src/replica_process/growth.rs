//! The growth of a replica.

use super::*;

impl Simulation {
    /// Grows the volume here: the directory first, then the files of the sets, one by one. The process may
    /// die in between.
    pub(super) fn expand_replica(&mut self, at: usize, op: &Op, size_bytes: u64) {
        let is_calm = self.calm;
        let replica = &mut self.replicas[at];
        let is_cut_off = !is_calm && replica.rng.u8(..) < 20;
        let left = replica.rng.usize(0..3);
        if size_bytes > replica.size_bytes && replica.full_for_pages {
            return self.answer(op.conn, op.number, ReplicaAnswer::Error(Errno::NO_SPACE));
        }
        if size_bytes > replica.size_bytes {
            replica.grows_to(size_bytes);
            let grown = replica.state.intent_log().grown(Regions::of(size_bytes));
            let files: Vec<_> = grown.files().collect();
            let done = if is_cut_off { left.min(files.len()) } else { files.len() };
            replica.durable.sets.extend(files.into_iter().take(done));
            replica.void_summing();
            for (_, key, ..) in replica.pages.values_mut() {
                *key = None;
            }
            if is_cut_off {
                self.count("expansions cut off");
                let mut rng = self.rng.fork();
                self.kill_replica(at, false, 0, &mut rng);
                return;
            }
            replica.state.intent_log_mut().grow(grown);
            replica.heal_unknown();
            replica.waiting.grown();
            replica.map.grow(size_bytes);
            self.trace(|| format!("replica {at} has {size_bytes} bytes now"));
        }
        let outcome = match size_bytes < self.replicas[at].size_bytes {
            true => ReplicaAnswer::Error(Errno::INVALID),
            false => ReplicaAnswer::Done,
        };
        self.answer(op.conn, op.number, outcome);
        self.resume_waiting(at);
    }
}
