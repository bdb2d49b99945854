//! Measures the cost of encryption in transit. The same loads run on two volumes by turns, both over TCP on
//! the loopback interface, where encryption costs the largest part.

use std::path::Path;

use anyhow::Result;

use super::rebuild::{USED, WRITE, load_at};
use super::turns::{CostFigure, measure_by_turns};
use super::workload::Workload;
use crate::{BareVolume, BareVolumeOptions, Transport};

const LOADS: [Workload; 4] = [
    Workload { name: "write 4 KiB random, depth 1", rw: "randwrite", block_size: "4k", depth: 1 },
    Workload { name: "write 4 KiB random, depth 32", rw: "randwrite", block_size: "4k", depth: 32 },
    WRITE,
    Workload { name: "read 4 KiB random, depth 32", rw: "randread", block_size: "4k", depth: 32 },
];

/// Returns the reason why this kernel cannot encrypt; none if it can.
#[must_use]
pub fn no_encryption() -> Option<String> {
    shorthorn_tls::check_kernel().err().map(|error| error.to_string())
}

/// Measures `turns` turns of each load with the files below `base`, alternately on both volumes.
///
/// # Errors
/// A volume does not start, or a load sees an error.
pub fn measure_encryption(base: &Path, seconds: u32, turns: u32) -> Result<Vec<CostFigure>> {
    let (with, without) =
        (MeasuredVolume::start(base, Transport::EncryptedTcp)?, MeasuredVolume::start(base, Transport::Tcp)?);
    let mut figures = Vec::new();
    for workload in &LOADS {
        let measure = |subject: &MeasuredVolume| -> Result<f64> {
            Ok(load_at(&subject.volume.uri(), workload, USED, seconds)?.requests_per_s)
        };
        figures.extend(measure_by_turns(workload.name, (&with, &without), turns, measure)?);
    }
    with.volume.stop()?;
    without.volume.stop()?;
    Ok(figures)
}

/// A volume whose used part was written once.
struct MeasuredVolume {
    volume: BareVolume,
    // After the volume, whose files it has.
    _folder: tempfile::TempDir,
}

impl MeasuredVolume {
    fn start(base: &Path, transport: Transport) -> Result<MeasuredVolume> {
        let folder = tempfile::Builder::new().prefix("bench-").tempdir_in(base)?;
        let options =
            BareVolumeOptions { size_bytes: 2 << 30, transport, ..BareVolumeOptions::new(folder.path()) };
        let volume = BareVolume::start(options)?;
        load_at(&volume.uri(), &WRITE, USED, 0)?;
        Ok(MeasuredVolume { volume, _folder: folder })
    }
}
