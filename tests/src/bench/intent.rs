//! Measures the cost, in the steady state, of marking regions dirty before they are written, of keeping sums
//! of blocks, and of verified reads. The same loads run on two volumes at the same time, one with the feature
//! and one without. They take short turns, so that a change on the machine changes both.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use shorthorn_store::{SUM_PAGE_BYTES, SUM_PAGE_SPAN_BYTES};

use super::rebuild::{USED, WRITE, load};
use super::turns::{CostFigure, measure_by_turns};
use super::workload::Workload;
use crate::{LocalVolume, LocalVolumeOptions, until};

/// Before anything is measured: long enough that regions which are left alone have been cleared.
const WARM_UP_S: u32 = 12;
const WRITES: [Workload; 2] = [
    Workload { name: "write 4 KiB random, depth 1", rw: "randwrite", block_size: "4k", depth: 1 },
    Workload { name: "write 4 KiB random, depth 32", rw: "randwrite", block_size: "4k", depth: 32 },
];
const READS: [Workload; 2] = [
    Workload { name: "read 4 KiB random, depth 1", rw: "randread", block_size: "4k", depth: 1 },
    Workload { name: "read 4 KiB random, depth 32", rw: "randread", block_size: "4k", depth: 32 },
];
/// The time limit for a replica to sum the data written before.
const SUMS_LIMIT: Duration = Duration::from_secs(180);
const USED_BYTES: u64 = 1 << 30;

/// The feature that only one of the volumes has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cost {
    /// Regions are cleared and recorded again; on the other they all stay recorded.
    Noting,
    /// Sums of blocks are kept.
    Sums,
    /// Reads are compared with the sums; the other keeps sums too.
    VerifiedReads,
}

impl Cost {
    /// Returns the arguments of the volume with it, or of the one without.
    fn arguments(self, is_with: bool) -> &'static [&'static str] {
        match (self, is_with) {
            (Cost::Noting, false) => &["--intent-clear-after-ms", "0"],
            (Cost::Sums, false) => &["--sum-mib-per-s", "0"],
            (Cost::VerifiedReads, true) => &["--verify-reads"],
            _ => &[],
        }
    }

    fn loads(self) -> &'static [Workload] {
        if self == Cost::VerifiedReads { &READS } else { &WRITES }
    }
}

/// Measures `turns` turns of each load with the files below `base`: which volume comes first changes from
/// turn to turn.
///
/// # Errors
/// A volume does not start, or a load sees an error.
pub fn measure_cost(cost: Cost, base: &Path, seconds: u32, turns: u32) -> Result<Vec<CostFigure>> {
    let (with, without) =
        (MeasuredVolume::start(base, cost, true)?, MeasuredVolume::start(base, cost, false)?);
    let mut figures = Vec::new();
    for workload in cost.loads() {
        for subject in [&with, &without] {
            load(&subject.volume, workload, USED, WARM_UP_S)?;
        }
        let measure = |subject: &MeasuredVolume| -> Result<f64> {
            Ok(load(&subject.volume, workload, USED, seconds)?.requests_per_s)
        };
        figures.extend(measure_by_turns(workload.name, (&with, &without), turns, measure)?);
    }
    with.volume.stop()?;
    without.volume.stop()?;
    Ok(figures)
}

/// A volume whose used part was written once.
struct MeasuredVolume {
    volume: LocalVolume,
    // After the volume, whose files it has.
    _folder: tempfile::TempDir,
}

impl MeasuredVolume {
    fn start(base: &Path, cost: Cost, is_with: bool) -> Result<MeasuredVolume> {
        let folder = tempfile::Builder::new().prefix("bench-").tempdir_in(base)?;
        let mut options = LocalVolumeOptions::new(folder.path());
        options.size = "10GiB".into();
        options.extra = cost.arguments(is_with).iter().map(|argument| (*argument).to_owned()).collect();
        let volume = LocalVolume::start(&options)?;
        // First writes cost more. And all regions are recorded now: they stay so, or are cleared when the
        // loads leave them alone.
        for _ in 0..2 {
            load(&volume, &WRITE, USED, 0)?;
        }
        if cost == Cost::VerifiedReads {
            wait_for_sums(&volume)?;
        }
        Ok(MeasuredVolume { volume, _folder: folder })
    }
}

/// Waits until every replica has stored the sums of the used part.
fn wait_for_sums(volume: &LocalVolume) -> Result<()> {
    const SECTOR_BYTES: u64 = 512;
    let wanted_bytes = USED_BYTES / SUM_PAGE_SPAN_BYTES * SUM_PAGE_BYTES as u64;
    for replica in &volume.ready.replicas {
        let path = replica.directory.join("shorthorn.block-sums");
        until(&format!("sums of all blocks in {}", path.display()), SUMS_LIMIT, || {
            let stored_bytes = std::fs::metadata(&path)?.blocks() * SECTOR_BYTES;
            Ok((stored_bytes >= wanted_bytes).then_some(()))
        })?;
    }
    Ok(())
}
