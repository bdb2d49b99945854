use std::time::Duration;

use anyhow::{Context, Result, ensure};
use shorthorn_vmkit::RunningCommand;

use crate::{VmHost, until};

/// The file that ends the load.
const STOP: &str = "/root/enough";

/// A load in a machine that verifies its data. It is one short run of fio after the other, so that the load
/// ends soon after its stop.
///
/// The machine sends a line after each run. A command that counts runs again and again would take the
/// processors from the load.
#[derive(Debug)]
pub struct FioRuns<'a> {
    host: &'a VmHost,
    running: RunningCommand,
}

impl<'a> FioRuns<'a> {
    /// The files in the machine with the reports of all runs, in JSON.
    pub const REPORTS: &'static str = "/root/fio.[0-9]*";

    /// Starts runs of fio with these options.
    ///
    /// # Errors
    /// The machine does not answer.
    pub fn start(host: &'a VmHost, options: &str) -> Result<FioRuns<'a>> {
        FioRuns::start_by(host, "fio", options)
    }

    /// Starts runs of fio that leave the processors to everything else. Beside a load of equal rights, a call
    /// of systemctl takes many seconds. A fault that needs requests in flight has to wait for them.
    ///
    /// # Errors
    /// The machine does not answer.
    pub fn start_nice(host: &'a VmHost, options: &str) -> Result<FioRuns<'a>> {
        FioRuns::start_by(host, "nice -n 19 fio", options)
    }

    fn start_by(host: &'a VmHost, fio: &str, options: &str) -> Result<FioRuns<'a>> {
        let report = "/root/fio.$run";
        let running = host.spawn(&format!(
            "run=0; while test ! -e {STOP}; do run=$((run + 1)); {fio} --name=load {options} --direct=1 \
             --ioengine=libaio --verify=crc32c --verify_fatal=1 --do_verify=1 --output-format=json \
             --output={report} || {{ cat {report}; exit 1; }}; echo run $run; done"
        ))?;
        Ok(FioRuns { host, running })
    }

    /// Waits until `more` runs have ended, all without an error.
    ///
    /// # Errors
    /// fio saw an error, or they do not end within `limit`; the log of all units is in the error.
    pub fn wait_for(&self, more: usize, limit: Duration) -> Result<()> {
        let enough = self.ended().unwrap_or_default() + more;
        let ended = until("finished run of fio", limit, || match self.ended() {
            Ok(ended) if ended < enough => Ok(None),
            other => Ok(Some(other)),
        });
        ended.and_then(|ended| ended).map(drop).with_context(|| self.host.journal())
    }

    /// Returns the number of runs that have ended, unless one saw an error.
    fn ended(&self) -> Result<usize> {
        let output = self.running.output_so_far();
        let text = output.text();
        ensure!(text.lines().all(|line| line.starts_with("run ")), "fio saw an error: {output}");
        Ok(text.lines().count())
    }

    /// Ends the load after its run.
    ///
    /// # Errors
    /// fio saw an error, or the run does not end within `limit`; the log of all units is in the error.
    pub fn finish(self, limit: Duration) -> Result<()> {
        self.host.sh(&format!("touch {STOP}"))?;
        self.host.finish(self.running, limit).context("fio saw an error").map(drop)
    }
}
