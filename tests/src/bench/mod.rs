//! The measurements of `make bench`.

mod encryption;
mod in_vm;
mod intent;
mod pause;
mod process;
mod rebuild;
mod table;
mod targets;
mod turns;
mod workload;

pub use encryption::{measure_encryption, no_encryption};
pub use in_vm::{VmFigure, measure_in_vm};
pub use intent::{Cost, measure_cost};
pub use pause::{Pause, measure_pauses};
pub use process::Usage;
pub use rebuild::{RebuildFigures, measure_rebuild};
pub use table::{Row, median, print};
pub use targets::{BenchTarget, Measured, TargetKind};
pub use turns::CostFigure;
pub use workload::{WORKLOADS, Workload};
