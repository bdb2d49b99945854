//! Runs seeds of the simulation: one, a range, or as many as fit a time.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use shorthorn_sim::{Options, Sabotage, run};

/// Simulates a volume under faults. A failing seed is printed, and replays the same way.
#[derive(Clone, Copy, Debug, Parser)]
struct Args {
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// How many seeds.
    #[arg(long, default_value_t = 1)]
    count: u64,
    /// Go on with new seeds for this many seconds, however many those are.
    #[arg(long)]
    seconds: Option<u64>,
    /// Runs at once.
    #[arg(long, default_value_t = 1)]
    jobs: u64,
    /// End after so many failures.
    #[arg(long, default_value_t = 5)]
    failures: u64,
    /// Print what happens in every run.
    #[arg(long)]
    trace: bool,
    /// Leave a part of the rules out.
    #[arg(long)]
    sabotage: Option<Sabotage>,
}

/// What all runs share.
struct Progress {
    args: Args,
    begun: Instant,
    next: AtomicU64,
    failures: AtomicU64,
}

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

    /// Runs seeds until there is none left; how often what happened.
    fn work(&self) -> BTreeMap<&'static str, u64> {
        let mut counts = BTreeMap::new();
        while let Some(seed) = self.next_seed() {
            let outcome =
                run(Options { trace: self.args.trace, sabotage: self.args.sabotage, ..Options::of(seed) });
            outcome.log.iter().for_each(|line| println!("{line}"));
            for (what, count) in outcome.counts {
                *counts.entry(what).or_insert(0) += count;
            }
            *counts.entry("seeds").or_insert(0) += 1;
            if let Some(violation) = outcome.violation {
                self.failures.fetch_add(1, Ordering::Relaxed);
                println!("seed {seed}: {violation}");
            }
        }
        counts
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    let next = AtomicU64::new(args.seed);
    let progress = Progress { args, begun: Instant::now(), next, failures: AtomicU64::new(0) };
    let mut counts: BTreeMap<&'static str, u64> = BTreeMap::new();
    thread::scope(|scope| {
        let workers: Vec<_> = (0..args.jobs.max(1)).map(|_| scope.spawn(|| progress.work())).collect();
        for worker in workers {
            // A worker that panics has ended the process: panics abort.
            for (what, count) in worker.join().unwrap_or_default() {
                *counts.entry(what).or_insert(0) += count;
            }
        }
    });
    let failures = progress.failures.load(Ordering::Relaxed);
    println!("{failures} failed, {:.1} s; {counts:?}", progress.begun.elapsed().as_secs_f64());
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
