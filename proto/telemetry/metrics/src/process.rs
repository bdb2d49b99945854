//! Standard process metrics of Prometheus.

use std::fs;

use crate::page::MetricsPage;

/// USER_HZ, which is 100 on every architecture that we run on.
const TICKS_PER_S: f64 = 100.0;

pub fn show(page: &mut MetricsPage, program: &str, version: &str) {
    let build = page.gauges("shorthorn_build_info", "1, with the program and its version as labels");
    build.set(&[("program", program), ("version", version)], 1);
    // Unreadable values are not shown.
    if let Some(kib) = field_kib(&fs::read_to_string("/proc/self/status").unwrap_or_default(), "VmRSS:") {
        let memory = page.gauges("process_resident_memory_bytes", "Resident memory of this process");
        memory.set(&[], kib.saturating_mul(1024));
    }
    if let Some(ticks) = cpu_ticks(&fs::read_to_string("/proc/self/stat").unwrap_or_default()) {
        let cpu = page.seconds("process_cpu_seconds", "CPU time of this process, user and system");
        cpu.add(&[], f64::from(ticks) / TICKS_PER_S);
    }
}

fn field_kib(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}

/// Returns utime and stime of proc_pid_stat(5). The second field is the name, in parentheses, which may have
/// any character.
fn cpu_ticks(stat: &str) -> Option<u32> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace().skip(11);
    let (user, system): (u32, u32) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    user.checked_add(system)
}

#[cfg(test)]
mod tests {
    use shorthorn_testkit::docs::check_generated;
    use shorthorn_testkit::metrics::documented;

    use super::*;

    #[test]
    fn the_documentation_has_every_metric() {
        let mut page = MetricsPage::default();
        show(&mut page, "agent", "0.1.0");
        check_generated("docs/metrics.md", "process", &documented(&page.text().unwrap()));
    }

    #[test]
    fn files_of_proc_are_read() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194304 100 0 0 0 30 12 0 0 20 0 1 0 5 1 2 3";
        assert_eq!(cpu_ticks(stat), Some(42));
        assert_eq!(cpu_ticks(""), None);
        assert_eq!(field_kib("Name:\ta\nVmRSS:\t    1234 kB\n", "VmRSS:"), Some(1234));
        assert_eq!(field_kib("Name:\ta\n", "VmRSS:"), None);
    }
}
