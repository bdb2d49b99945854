/// A kind of load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// For the table.
    pub name: &'static str,
    /// fio's `rw`.
    pub rw: &'static str,
    /// Bytes per request, as fio takes it.
    pub block_size: &'static str,
    /// Requests in flight.
    pub depth: u32,
}

/// The workloads in the order of the run: the first fills the range that the others overwrite and read.
pub const WORKLOADS: [Workload; 6] = [
    Workload { name: "write 1 MiB sequential, depth 8", rw: "write", block_size: "1m", depth: 8 },
    Workload { name: "read 1 MiB sequential, depth 8", rw: "read", block_size: "1m", depth: 8 },
    Workload { name: "write 4 KiB random, depth 1", rw: "randwrite", block_size: "4k", depth: 1 },
    Workload { name: "write 4 KiB random, depth 32", rw: "randwrite", block_size: "4k", depth: 32 },
    Workload { name: "read 4 KiB random, depth 1", rw: "randread", block_size: "4k", depth: 1 },
    Workload { name: "read 4 KiB random, depth 32", rw: "randread", block_size: "4k", depth: 32 },
];

impl Workload {
    /// Returns true if it writes.
    #[must_use]
    pub fn writes(&self) -> bool {
        self.rw.ends_with("write")
    }

    /// Returns the arguments of fio for the load, without the target.
    #[must_use]
    pub fn arguments(&self, seconds: u32, size: &str) -> Vec<String> {
        let mut arguments = vec![
            format!("--rw={}", self.rw),
            format!("--bs={}", self.block_size),
            format!("--iodepth={}", self.depth),
            format!("--size={size}"),
            "--randrepeat=1".into(),
            "--norandommap=1".into(),
        ];
        if self.rw == "write" {
            return arguments; // once over the whole range: the others overwrite it
        }
        arguments.extend(["--time_based=1".into(), format!("--runtime={seconds}")]);
        arguments
    }
}
