//! Runs scripts of the simulation: that of a seed, of a range of seeds, of as many as fit a time, or a stored
//! one.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Parser;
use shorthorn_sim::{COVERED, RunOptions, Sabotage, Script, ScriptResult, run, shrink};

/// Simulates a volume under faults. Shrinks each failing run and prints it as a script that replays it.
#[derive(Clone, Debug, Parser)]
struct Args {
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Number of seeds.
    #[arg(long, default_value_t = 1)]
    count: u64,
    /// Run new seeds for this many seconds.
    #[arg(long)]
    seconds: Option<u64>,
    /// Run these stored scripts instead of seeds.
    #[arg(long, num_args = 1..)]
    script: Vec<PathBuf>,
    /// Print the script of the seed without running it.
    #[arg(long)]
    print: bool,
    /// Concurrent runs; 0: one per processor.
    #[arg(long, default_value_t = 1)]
    jobs: u64,
    /// Stop after this number of failures.
    #[arg(long, default_value_t = 5)]
    failures: u64,
    /// Maximum number of runs to shrink a failing script; 0: do not shrink.
    #[arg(long, default_value_t = 200)]
    shrink_runs: u32,
    /// Trace every run.
    #[arg(long)]
    trace: bool,
    /// Sabotage: leave out one of the rules.
    #[arg(long)]
    sabotage: Option<Sabotage>,
    /// Fail if a required kind of fault did not happen in any run.
    #[arg(long)]
    assert_coverage: bool,
}

/// The state that all runs share.
struct Progress {
    args: Args,
    begun: Instant,
    next: AtomicU64,
    failures: AtomicU64,
}

type Counts = BTreeMap<&'static str, u64>;

impl Progress {
    fn next_seed(&self) -> Option<u64> {
        let seed = self.next.fetch_add(1, Ordering::Relaxed);
        let over = match self.args.seconds {
            Some(seconds) => self.begun.elapsed() >= Duration::from_secs(seconds),
            None => seed >= self.args.seed.saturating_add(self.args.count),
        };
        let failed = self.failures.load(Ordering::Relaxed) >= self.args.failures;
        (!over && !failed).then_some(seed)
    }

    /// Runs seeds until none is left; returns the number of occurrences of each event.
    fn work(&self) -> Counts {
        let mut counts = BTreeMap::new();
        while let Some(seed) = self.next_seed() {
            let script = Script::of(seed);
            self.judge(&format!("seed {seed}"), &script, &mut counts);
        }
        counts
    }

    /// Runs a script; prints its problem, if any.
    fn judge(&self, name: &str, script: &Script, counts: &mut Counts) {
        let options = RunOptions { trace: self.args.trace, sabotage: self.args.sabotage };
        let ScriptResult { violation, counts: new, log } = run(script, options);
        log.iter().for_each(|line| println!("{line}"));
        for (what, count) in new {
            *counts.entry(what).or_insert(0) += count;
        }
        *counts.entry("runs").or_insert(0) += 1;
        let Some(violation) = violation else { return };
        self.failures.fetch_add(1, Ordering::Relaxed);
        println!("{name}: {violation}");
        if self.args.shrink_runs > 0 {
            let shrunk = shrink(script, violation, options, self.args.shrink_runs);
            let text = serde_json::to_string(&shrunk.script).unwrap_or_default();
            let runs = shrunk.runs;
            println!("{name}, shrunk in {runs} runs: {}\n{text}", shrunk.violation);
            println!("replay: store that line as FILE; shorthorn-sim --script FILE --trace");
        }
    }

    fn run_seeds(&self) -> Counts {
        let jobs = match self.args.jobs {
            0 => thread::available_parallelism().map_or(1, |count| count.get() as u64),
            jobs => jobs,
        };
        let mut counts: Counts = BTreeMap::new();
        thread::scope(|scope| {
            let workers: Vec<_> = (0..jobs).map(|_| scope.spawn(|| self.work())).collect();
            for worker in workers {
                // A worker that panics has ended the process: panics abort.
                for (what, count) in worker.join().unwrap_or_default() {
                    *counts.entry(what).or_insert(0) += count;
                }
            }
        });
        counts
    }

    fn run_scripts(&self) -> anyhow::Result<Counts> {
        let mut counts = BTreeMap::new();
        for path in &self.args.script {
            let name = path.display().to_string();
            let text = fs::read_to_string(path).with_context(|| name.clone())?;
            let script: Script = serde_json::from_str(&text).with_context(|| name.clone())?;
            self.judge(&name, &script, &mut counts);
        }
        Ok(counts)
    }
}

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    if args.print {
        println!("{}", serde_json::to_string(&Script::of(args.seed))?);
        return Ok(ExitCode::SUCCESS);
    }
    let next = AtomicU64::new(args.seed);
    let progress = Progress { args, begun: Instant::now(), next, failures: AtomicU64::new(0) };
    let counts =
        if progress.args.script.is_empty() { progress.run_seeds() } else { progress.run_scripts()? };
    let failures = progress.failures.load(Ordering::Relaxed);
    println!("{failures} failed, {:.1} s; {counts:?}", progress.begun.elapsed().as_secs_f64());
    let missing: Vec<&&str> = COVERED.iter().filter(|what| !counts.contains_key(**what)).collect();
    if progress.args.assert_coverage && !missing.is_empty() {
        println!("never happened: {missing:?}");
        return Ok(ExitCode::FAILURE);
    }
    Ok(if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
