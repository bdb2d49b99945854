use std::fs;

use anyhow::{Context, Result};

/// The resources that some processes have used so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// CPU time of all their threads, kernel side included, in microseconds. The kernel counts in ticks of 10
    /// ms.
    pub cpu_us: u64,
    /// Resident memory; shared memory counts for each process.
    pub resident_bytes: u64,
}

impl Usage {
    /// Returns the usage of the processes `pids` now.
    ///
    /// # Errors
    /// One of them is gone.
    pub fn of(pids: &[i32]) -> Result<Usage> {
        let mut sum = Usage::default();
        for pid in pids {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat"))
                .with_context(|| format!("process {pid} is gone"))?;
            let ticks =
                ticks_of(&stat).with_context(|| format!("/proc/{pid}/stat is not as proc(5) says"))?;
            sum.cpu_us += ticks * 1_000_000 / TICKS_PER_S;
            sum.resident_bytes += resident(*pid)?;
        }
        Ok(sum)
    }
}

/// USER_HZ, which proc(5) counts in; the same on every Linux that Rust's std runs on.
const TICKS_PER_S: u64 = 100;

/// Returns utime and stime: fields 14 and 15, counted behind the name, which may contain anything.
fn ticks_of(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

fn resident(pid: i32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    Ok(kib.with_context(|| format!("/proc/{pid}/status has no VmRSS"))? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_brackets_do_not_confuse_it() {
        let stat = "7 (a) b) S 1 1 1 0 -1 0 0 0 0 0 30 12 0 0 20 0 1 0 5 0 0";
        assert_eq!(ticks_of(stat), Some(42));
    }

    #[test]
    fn sees_itself() {
        let own = Usage::of(&[i32::try_from(std::process::id()).unwrap()]).unwrap();
        assert!(own.resident_bytes > 100_000);
    }
}
