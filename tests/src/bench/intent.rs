//! What it costs in the steady state that a region is noted before it is written: the same load on the same volume,
//! once with regions that are cleared as usual and noted again, once with regions that all stay noted.

use std::path::Path;

use anyhow::Result;

use super::rebuild::{USED, WRITE, load};
use super::workload::Workload;
use crate::{LocalVolume, LocalVolumeOptions};

/// Before anything is measured: long enough that regions which are left alone have been cleared.
const WARM_UP_S: u32 = 12;
const LOADS: [Workload; 2] = [
    Workload { name: "write 4 KiB random, depth 1", rw: "randwrite", block_size: "4k", depth: 1 },
    Workload { name: "write 4 KiB random, depth 32", rw: "randwrite", block_size: "4k", depth: 32 },
];

/// One load, in one round.
#[derive(Clone, Copy, Debug)]
pub struct IntentFigure {
    /// Of the load.
    pub workload: &'static str,
    /// Requests per second where regions are cleared and noted again.
    pub cleared: f64,
    /// Where all regions stay noted.
    pub kept: f64,
}

/// Measures round number `round` with the files below `base`: which comes first changes from round to round.
///
/// # Errors
/// The volume does not start, or a load sees an error.
pub fn measure_intent(base: &Path, seconds: u32, round: u32) -> Result<Vec<IntentFigure>> {
    let folder = tempfile::Builder::new().prefix("bench-").tempdir_in(base)?;
    // What is written for the first time costs more: that comes before both.
    run(folder.path(), true, |volume| load(volume, &WRITE, USED, 0).map(drop))?;
    let kept_first = round.is_multiple_of(2);
    let first = measure(folder.path(), kept_first, seconds)?;
    let second = measure(folder.path(), !kept_first, seconds)?;
    let (kept, cleared) = if kept_first { (first, second) } else { (second, first) };
    let figure = |((workload, kept), cleared): ((&Workload, f64), f64)| IntentFigure {
        workload: workload.name,
        cleared,
        kept,
    };
    Ok(LOADS.iter().zip(kept).zip(cleared).map(figure).collect())
}

/// Requests per second of each load.
fn measure(folder: &Path, is_kept: bool, seconds: u32) -> Result<[f64; 2]> {
    run(folder, is_kept, |volume| {
        // All regions are noted now, and stay so, or those that the loads leave alone are cleared after a while.
        load(volume, &WRITE, USED, 0)?;
        let mut measured = [0.0; 2];
        for (measured, workload) in measured.iter_mut().zip(&LOADS) {
            load(volume, workload, USED, WARM_UP_S)?;
            *measured = load(volume, workload, USED, seconds)?.requests_per_s;
        }
        Ok(measured)
    })
}

fn run<T>(folder: &Path, is_kept: bool, act: impl FnOnce(&LocalVolume) -> Result<T>) -> Result<T> {
    let mut options = LocalVolumeOptions::new(folder);
    options.size = "10GiB".into();
    if is_kept {
        options.extra = ["--intent-clear-after-ms", "0"].map(str::to_owned).to_vec();
    }
    let volume = LocalVolume::start(&options)?;
    let done = act(&volume)?;
    volume.stop()?;
    Ok(done)
}
