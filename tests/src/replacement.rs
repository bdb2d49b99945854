//! Replacing the process of an engine in a virtual machine while fio uses its device.

use std::time::Duration;

use anyhow::{Context, Result};

use crate::VmHost;

/// Defines a function that prints the process of `$unit`.
const MAIN_PID: &str = "main_pid() { systemctl show --property MainPID --value $unit; }";
/// Waits until `$unit` has another process than `$old`, which is ready.
const WAIT_FOR_NEXT: &str = "for n in $(seq 2400); do new=$(main_pid); test $new != 0 && test $new != $old \
                             && systemctl is-active --quiet $unit && break; sleep 0.05; done; \
                             systemctl is-active $unit";

/// A way to replace the engine of a volume that systemd runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replacement {
    /// systemd restarts the engine.
    Restart,
    /// The process is killed, and systemd starts the next one.
    Kill,
}

impl Replacement {
    /// Returns the script that replaces the engine and waits until the next one is ready.
    #[must_use]
    pub fn script(self, volume: &str) -> String {
        let unit = format!("shorthorn-engine@{volume}");
        match self {
            Replacement::Restart => format!("systemctl restart {unit}"),
            Replacement::Kill => {
                format!("unit={unit}; {MAIN_PID}; old=$(main_pid); kill -9 $old; {WAIT_FOR_NEXT}")
            }
        }
    }

    /// Returns a script that also records its duration. See [`Replacement::took`].
    #[must_use]
    pub fn timed(self, volume: &str) -> String {
        let script = self.script(volume);
        format!("begin=$(date +%s%N); {script}; echo $((($(date +%s%N) - begin) / 1000000)) > /root/replaced")
    }

    /// Returns the duration of the last script of [`Replacement::timed`], by the clock of the guest.
    ///
    /// # Errors
    /// No such script has run.
    pub fn took(host: &VmHost) -> Result<Duration> {
        Ok(Duration::from_millis(host.sh("cat /root/replaced")?.parse()?))
    }
}

/// Returns the duration of the longest request in fio's reports `files`.
///
/// # Errors
/// A report cannot be read, or has no latency.
pub fn longest_request(host: &VmHost, files: &str) -> Result<Duration> {
    let mut longest_ns = None;
    let reports = host.sh(&format!("cat {files}"))?;
    for report in serde_json::Deserializer::from_str(&reports).into_iter::<serde_json::Value>() {
        let report = report?;
        let of = |direction: &str| report["jobs"][0][direction]["lat_ns"]["max"].as_u64();
        longest_ns = longest_ns.max(of("read")).max(of("write"));
    }
    Ok(Duration::from_nanos(longest_ns.context("the reports of fio have no latency")?))
}
