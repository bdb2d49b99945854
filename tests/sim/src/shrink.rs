//! Makes a failing script smaller, as long as it fails: the rest is relevant.

use crate::script::Script;
use crate::{RunOptions, run};

/// The rest of a failing script.
#[derive(Debug)]
pub struct Shrunk {
    /// The script, which fails.
    pub script: Script,
    /// The violated rule.
    pub violation: String,
    /// The number of runs on the way.
    pub runs: u32,
}

/// Shrinks `script`, which fails with `violation`, with at most `runs_max` runs.
#[must_use]
pub fn shrink(script: &Script, violation: String, options: RunOptions, runs_max: u32) -> Shrunk {
    let options = RunOptions { trace: false, ..options };
    let mut shrunk = Shrunk { script: script.clone(), violation, runs: 0 };
    let mut before = usize::MAX;
    while size(&shrunk.script) < before && shrunk.runs < runs_max {
        before = size(&shrunk.script);
        shrunk.drop_faults(options, runs_max);
        for simpler in simpler(&shrunk.script) {
            // Each is simpler than its predecessor.
            let one = simpler(&shrunk.script);
            shrunk.attempt(one, options, runs_max);
        }
    }
    shrunk
}

type Simpler = fn(&Script) -> Script;

/// Returns the scripts with one more part left out.
fn simpler(script: &Script) -> Vec<Simpler> {
    let mut all: Vec<Simpler> = vec![
        |script| Script { slow_network: false, ..script.clone() },
        |script| Script { queues: 1, ..script.clone() },
        |script| Script { layouts: Vec::new(), ..script.clone() },
        |script| Script { odd_blocks: 0, ..script.clone() },
        |script| Script { rot_places: 0, ..script.clone() },
        |script| Script { requests: script.requests / 2, ..script.clone() },
        |script| Script { requests: script.requests * 4 / 5, ..script.clone() },
        |script| {
            let last = script.faults.last().map_or(0, |strike| strike.at_us);
            let trouble_us = (last + 1_000_000).min(script.trouble_us);
            Script { trouble_us, ..script.clone() }
        },
    ];
    if script.replicas > 1 {
        all.push(|script| Script { replicas: script.replicas - 1, ..script.clone() });
    }
    all
}

fn size(script: &Script) -> usize {
    script.faults.len() * 10_000 + usize::try_from(script.requests).unwrap_or(0)
}

impl Shrunk {
    /// Takes `script` if it is another one and fails too.
    fn attempt(&mut self, script: Script, options: RunOptions, runs_max: u32) -> bool {
        if script == self.script || self.runs >= runs_max {
            return false;
        }
        self.runs += 1;
        let Some(violation) = run(&script, options).violation else { return false };
        (self.script, self.violation) = (script, violation);
        true
    }

    /// Leaves faults out: first halves, in the end one by one.
    fn drop_faults(&mut self, options: RunOptions, runs_max: u32) {
        let mut count = self.script.faults.len().div_ceil(2);
        while count > 0 {
            let mut at = 0;
            while at < self.script.faults.len() {
                let mut script = self.script.clone();
                let end = (at + count).min(script.faults.len());
                script.faults.drain(at..end);
                if !self.attempt(script, options, runs_max) {
                    at += count;
                }
            }
            count = if count == 1 { 0 } else { count.div_ceil(2) };
        }
    }
}
