//! What it costs in the steady state that a region is noted before it is written, and that sums of blocks are kept: the same loads on
//! two volumes that are there at the same time, one with it and one without: with regions that all stay noted, or with no
//! sums. They take short turns, so that what changes on the machine changes for both.

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

/// What one volume does and the other does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cost {
    /// Regions are cleared and noted again; on the other they all stay noted.
    Noting,
    /// Sums of blocks are kept.
    Sums,
}

impl Cost {
    /// The arguments of the volume without it.
    fn without(self) -> [&'static str; 2] {
        match self {
            Cost::Noting => ["--intent-clear-after-ms", "0"],
            Cost::Sums => ["--sum-mib-per-s", "0"],
        }
    }
}

/// One turn of both volumes under one load.
#[derive(Clone, Copy, Debug)]
pub struct CostFigure {
    /// The load.
    pub workload: &'static str,
    /// Requests per second of the volume with it.
    pub with: f64,
    /// Of the one without.
    pub without: f64,
}

/// Measures `turns` turns of each load with the files below `base`: which volume comes first changes from turn to turn.
///
/// # Errors
/// A volume does not start, or a load sees an error.
pub fn measure_cost(cost: Cost, base: &Path, seconds: u32, turns: u32) -> Result<Vec<CostFigure>> {
    let (with, without) = (Subject::start(base, None)?, Subject::start(base, Some(cost))?);
    let mut figures = Vec::new();
    for workload in &LOADS {
        for subject in [&with, &without] {
            load(&subject.volume, workload, USED, WARM_UP_S)?;
        }
        let measure = |subject: &Subject| -> Result<f64> {
            Ok(load(&subject.volume, workload, USED, seconds)?.requests_per_s)
        };
        for turn in 0..turns {
            let (with, without) = if turn.is_multiple_of(2) {
                let first = measure(&without)?;
                (measure(&with)?, first)
            } else {
                (measure(&with)?, measure(&without)?)
            };
            figures.push(CostFigure { workload: workload.name, with, without });
        }
    }
    with.volume.stop()?;
    without.volume.stop()?;
    Ok(figures)
}

/// A volume whose used part was written once.
struct Subject {
    volume: LocalVolume,
    // After the volume, whose files it has.
    _folder: tempfile::TempDir,
}

impl Subject {
    fn start(base: &Path, without: Option<Cost>) -> Result<Subject> {
        let folder = tempfile::Builder::new().prefix("bench-").tempdir_in(base)?;
        let mut options = LocalVolumeOptions::new(folder.path());
        options.size = "10GiB".into();
        if let Some(cost) = without {
            options.extra = cost.without().map(str::to_owned).to_vec();
        }
        let volume = LocalVolume::start(&options)?;
        // What is written for the first time costs more. And all regions are noted now: they stay so, or are cleared
        // when the loads leave them alone.
        for _ in 0..2 {
            load(&volume, &WRITE, USED, 0)?;
        }
        Ok(Subject { volume, _folder: folder })
    }
}
