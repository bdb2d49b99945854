//! Many faults of all kinds on several volumes at once, under a load that checks every answer.
//!
//! Each volume has three hosts, which are network namespaces, and a load of its own. Its faults come one
//! episode after the other, so that each stall has one cause. Several volumes make faults of all kinds
//! overlap on one machine.

mod disk;
mod faults;
mod faulty_link;
mod in_vm;
mod lane;
mod limits;
mod pulse;
mod report;
mod supervisor;
mod volume;
mod watch;

pub use in_vm::run_in_vm;
pub use report::Report;

use std::io::Write;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use shorthorn_control::FrontendChoice;

use faults::Episode;
use lane::Lane;
use pulse::Pulse;

/// The options of a run.
#[derive(Clone, Debug)]
pub struct SoakOptions {
    /// The seed of the order of faults, and of the data of the loads.
    pub seed: u64,
    /// The minimum number of faults, unless the time is over before.
    pub faults: usize,
    /// No fault begins later than that.
    pub time: Option<Duration>,
    /// Volumes that are under load at the same time.
    pub volumes: usize,
    /// Only this one of them runs.
    pub only: Option<usize>,
    /// No fault lasts longer.
    pub longest: Duration,
    /// The frontend between the loads and the volumes.
    pub frontend: FrontendChoice,
    /// `replica_timeout_ms` of the volumes.
    pub replica_timeout: Duration,
    /// True if the volumes encrypt in transit. The kernel needs its module tls.
    pub encrypt: bool,
    /// The start of the printed times.
    pub start: Instant,
    /// True if all volumes stop after a violation on one of them.
    pub stops_early: bool,
}

/// Runs with all files in `dir`, whose path must be short.
///
/// # Errors
/// A volume does not start. Later problems are in the report.
pub fn run(options: &SoakOptions, dir: &Path) -> Result<Report> {
    let episodes = faults::draw(options.seed, options.faults, options.longest);
    let stop = AtomicBool::new(false);
    let pulse = Pulse::start(dir)?;
    let numbers = (0..options.volumes).filter(|number| options.only.is_none_or(|only| only == *number));
    // One after the other: each one makes namespaces and file systems.
    let lanes = numbers.map(|number| {
        let lane =
            Lane::start(options, &pulse, dir, number).with_context(|| format!("starting volume {number}"))?;
        let mine = episodes.iter().skip(number).step_by(options.volumes).cloned();
        Ok((lane, mine.collect::<Vec<Episode>>()))
    });
    let lanes = lanes.collect::<Result<Vec<_>>>()?;
    let deadline = options.time.map(|time| Instant::now() + time);
    say(&format!("{} volumes serve", lanes.len()));
    let mut report = Report::new(options.replica_timeout);
    thread::scope(|scope| {
        let stop = &stop;
        let running: Vec<_> = lanes
            .into_iter()
            .map(|(lane, mine)| scope.spawn(move || lane.run(&mine, deadline, stop)))
            .collect();
        for lane in running {
            match lane.join() {
                Ok(one) => report.merge(one),
                Err(_) => bail!("the thread of a volume panicked"),
            }
        }
        Ok(())
    })?;
    pulse.finish()?;
    Ok(report)
}

/// Prints the progress.
fn say(what: &str) {
    // A run continues without a reader.
    let _ = writeln!(std::io::stdout(), "{what}");
}
