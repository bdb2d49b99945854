//! Searches the rules of views and generations for a way to lose data.
#![allow(clippy::disallowed_types)] // the program has a clock, the model has none

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use shorthorn_views_model::{Limits, Model, ModelStep, Mutation, Violation, search, walk};

/// Searches the rules of views and generations for a way to lose data.
#[derive(Debug, Parser)]
#[command(version)]
struct Options {
    /// The number of replicas, at most four
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=4))]
    replicas: u8,
    /// The number of engine processes
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=8))]
    engines: u8,
    /// The number of writes
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=8))]
    writes: u8,
    /// The number of view changes that each engine may make
    #[arg(long, default_value_t = 4)]
    changes: u8,
    /// Engines may also continue in the old view; the real one never does
    #[arg(long)]
    giving_up: bool,
    /// The engine's host keeps the grants that it was given
    #[arg(long)]
    keeps_grants: bool,
    /// Number of times that the controller's store may be restored from a backup; recovery is not checked
    /// then
    #[arg(long, default_value_t = 0)]
    restores: u8,
    /// Number of times that hosts may lose their state
    #[arg(long, default_value_t = 0)]
    losses: u8,
    /// Starts may leave out replicas that they have reached
    #[arg(long)]
    offenders: bool,
    /// Do not check that a healed volume can be started; with --giving-up that is not checked anyway
    #[arg(long)]
    safety_only: bool,
    /// Put a wrong rule in place of the real one
    #[arg(long, value_enum)]
    mutation: Option<Mutation>,
    /// Search breadth first until this many states are seen
    #[arg(long, value_name = "STATES")]
    search: Option<u32>,
    /// Replay one random walk
    #[arg(long, value_name = "SEED", conflicts_with = "search")]
    walk_seed: Option<u64>,
    /// Walk at random for this number of seconds
    #[arg(long, default_value_t = 60, conflicts_with_all = ["search", "walk_seed"])]
    seconds: u64,
    /// The seed of the first of these walks; those after it have the numbers that follow
    #[arg(long, default_value_t = 1)]
    first_seed: u64,
    /// The length of a walk in steps
    #[arg(long, default_value_t = 150)]
    steps: usize,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let limits = Limits {
        replicas: options.replicas,
        engines: options.engines,
        writes: options.writes,
        changes: options.changes,
        replica_crashes: options.search.is_none(),
        giving_up: options.giving_up,
        keeps_grants: options.keeps_grants,
        restores: options.restores,
        losses: options.losses,
        offenders: options.offenders,
        healing: !options.safety_only && !options.giving_up && options.restores == 0,
    };
    let model = Model::new(limits, options.mutation);
    match (options.search, options.walk_seed) {
        (Some(states), _) => run_search(&model, states),
        (None, Some(seed)) => replay(&model, seed, options.steps),
        (None, None) => run_walks(&model, &options),
    }
}

fn run_search(model: &Model, states: u32) -> ExitCode {
    let begun = Instant::now();
    let found = search(model, states);
    let seconds = begun.elapsed().as_secs_f64();
    let extent = if found.exhausted { "all states" } else { "no more were looked for" };
    println!("{} states, {} steps deep, {seconds:.1} s; {extent}", found.states, found.depth);
    match found.violation {
        Some((violation, steps)) => violated(&violation, &steps),
        None => fine(),
    }
}

fn replay(model: &Model, seed: u64, steps: usize) -> ExitCode {
    let walk = walk(model, seed, steps);
    match walk.violation {
        Some(violation) => violated(&violation, &walk.steps),
        None => {
            show(&walk.steps);
            fine()
        }
    }
}

fn run_walks(model: &Model, options: &Options) -> ExitCode {
    let begun = Instant::now();
    let limit = Duration::from_secs(options.seconds);
    let mut walks = 0_u64;
    let mut counts: BTreeMap<String, u64> = BTreeMap::new();
    for seed in options.first_seed.. {
        let walk = walk(model, seed, options.steps);
        walks += 1;
        for step in &walk.steps {
            *counts.entry(name(step)).or_default() += 1;
        }
        let is_over = walk.violation.is_some() || begun.elapsed() >= limit;
        if is_over {
            let seconds = begun.elapsed().as_secs_f64();
            let steps: u64 = counts.values().sum();
            println!("{walks} walks, {steps} steps, {seconds:.1} s");
            for (name, count) in &counts {
                println!("{count:10} {name}");
            }
        }
        if let Some(violation) = walk.violation {
            println!("seed {seed}");
            return violated(&violation, &walk.steps);
        }
        if is_over {
            break;
        }
    }
    fine()
}

/// Returns the name of the kind of step, for the count.
fn name(step: &ModelStep) -> String {
    let text = format!("{step:?}");
    text.split([' ', '{']).next().unwrap_or_default().to_owned()
}

fn fine() -> ExitCode {
    println!("no violation");
    ExitCode::SUCCESS
}

fn show(steps: &[ModelStep]) {
    for (number, step) in steps.iter().enumerate() {
        println!("{:4} {step:?}", number + 1);
    }
}

fn violated(violation: &Violation, steps: &[ModelStep]) -> ExitCode {
    show(steps);
    println!("VIOLATION after {} steps, {violation}", steps.len());
    ExitCode::FAILURE
}
