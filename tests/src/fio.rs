use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

/// A run of fio with one job.
#[derive(Clone, Debug)]
pub struct FioJob {
    /// The arguments without the format of the report.
    pub arguments: Vec<String>,
}

/// The measurements of fio.
#[derive(Clone, Copy, Debug)]
pub struct FioReport {
    /// Requests per second.
    pub requests_per_s: f64,
    /// Bytes per second.
    pub bytes_per_s: f64,
    /// Mean time of a request, in microseconds.
    pub mean_us: f64,
    /// The number of requests of the run.
    pub requests: u64,
}

#[derive(Deserialize)]
struct Report {
    jobs: Vec<Job>,
}

#[derive(Deserialize)]
struct Job {
    error: i32,
    read: Side,
    write: Side,
}

#[derive(Deserialize)]
struct Side {
    iops: f64,
    bw_bytes: f64,
    total_ios: u64,
    clat_ns: Latency,
}

#[derive(Deserialize)]
struct Latency {
    mean: f64,
}

/// Runs fio. Any error that fio sees, a failed verification among them, is an error here.
///
/// # Errors
/// fio is missing, or has failed; its own messages are in the error.
pub fn fio(job: &FioJob) -> Result<FioReport> {
    let output = Command::new("fio")
        .args(["--output-format=json", "--group_reporting"])
        .args(&job.arguments)
        .output()
        .context("running fio")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("fio {:?} failed: {}\n{errors}\n{text}", job.arguments, output.status);
    }
    parse_fio(&text).with_context(|| format!("fio {:?}: {errors}", job.arguments))
}

/// Reads the report of `fio --output-format=json` with one group of jobs.
///
/// # Errors
/// The text is not such a report, or a job has failed.
pub fn parse_fio(text: &str) -> Result<FioReport> {
    let json = text.find('{').map_or("", |start| &text[start..]);
    let report: Report = serde_json::from_str(json).with_context(|| format!("reading {text}"))?;
    let job = report.jobs.first().context("fio reports no job")?;
    if job.error != 0 {
        bail!("fio reports error {}", job.error);
    }
    let (read, write) = (&job.read, &job.write);
    let requests = read.total_ios + write.total_ios;
    let weighted = |side: &Side| side.clat_ns.mean * precise(side.total_ios);
    Ok(FioReport {
        requests_per_s: read.iops + write.iops,
        bytes_per_s: read.bw_bytes + write.bw_bytes,
        mean_us: (weighted(read) + weighted(write)) / precise(requests.max(1)) / 1000.0,
        requests,
    })
}

#[allow(clippy::cast_precision_loss)] // counts of a benchmark are far below 2^52
fn precise(count: u64) -> f64 {
    count as f64
}
