//! The state of a device that cannot be taken over, for the log. It has the driver's view of its requests,
//! the holders of its character device, and the kernel's threads that end rings.
//!
//! It is gone after a restart of the host, which is the usual remedy. So it is logged while it lasts. Files
//! of debugfs: `blk_mq_debugfs_queue_attrs` and `blk_mq_debugfs_hctx_attrs` in block/blk-mq-debugfs.c of the
//! kernel; stacks: proc_pid_stack(5). Reading a file of debugfs takes locks of the device, so it has a limit.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use shorthorn_types::VolumeName;

use crate::wait;

/// Bytes that are read of a file.
const FILE_BYTES_MAX: u64 = 4096;
/// Lines of each part of a report. A device of many queues must not hide the processes.
const LINES_MAX: usize = 400;
/// The time limit for each part of a report.
const PART_LIMIT: Duration = Duration::from_secs(5);
/// Files in the folder of a device in debugfs.
const QUEUE_FILES: [&str; 2] = ["state", "requeue_list"];
/// Files in the folder of each of its hardware queues.
const HARDWARE_QUEUE_FILES: [&str; 5] = ["state", "busy", "tags", "dispatch", "flags"];
/// Lines that are logged of a file `tags`, by their beginnings. The other lines are about waiters for a tag.
const TAGS_LINES: [&str; 3] = ["nr_tags=", "active_queues=", "busy="];
/// Functions that a thread of the kernel runs while it ends a ring, or while the driver waits for one.
const FUNCTIONS: [&str; 2] = ["io_ring_exit_work", "ublk_"];
/// The parts of a report about device `id`, which process `server_pid` served.
const PARTS: [(&str, ReportPart); 2] =
    [("requests", StuckDeviceFiles::requests), ("processes", StuckDeviceFiles::processes)];
type ReportPart = fn(&StuckDeviceFiles, u32, i32) -> Vec<String>;

/// Logs the state of `ublkb{id}`, which process `server_pid` served.
pub(super) fn log(id: u32, volume: &VolumeName, server_pid: i32) {
    for line in report(&StuckDeviceFiles::default(), id, server_pid, PART_LIMIT) {
        tracing::warn!(%volume, id, "stuck device: {line}");
    }
}

fn report(files: &StuckDeviceFiles, id: u32, server_pid: i32, limit: Duration) -> Vec<String> {
    let mut report = Vec::new();
    for (name, part) in PARTS {
        let files = files.clone();
        match wait::within(limit, move || Ok(part(&files, id, server_pid))) {
            Ok(mut lines) => {
                let more = lines.len().saturating_sub(LINES_MAX);
                lines.truncate(LINES_MAX);
                report.extend(lines);
                if more > 0 {
                    report.push(format!("{name}: {more} more lines"));
                }
            }
            Err(error) => report.push(format!("{name}: {error}")),
        }
    }
    report
}

/// The file systems that show the state of a stuck device.
#[derive(Clone)]
struct StuckDeviceFiles {
    debugfs: PathBuf,
    proc: PathBuf,
}

impl Default for StuckDeviceFiles {
    fn default() -> StuckDeviceFiles {
        StuckDeviceFiles { debugfs: "/sys/kernel/debug".into(), proc: "/proc".into() }
    }
}

impl StuckDeviceFiles {
    /// Returns the state of the queues of the device.
    fn requests(&self, id: u32, _server_pid: i32) -> Vec<String> {
        let mut lines = Vec::new();
        let folder = self.debugfs.join(format!("block/ublkb{id}"));
        for name in QUEUE_FILES {
            add_file(&folder.join(name), &mut lines);
        }
        let queues = fs::read_dir(&folder).into_iter().flatten().flatten().map(|entry| entry.path());
        let is_queue = |path: &PathBuf| {
            path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("hctx"))
        };
        let mut queues: Vec<PathBuf> = queues.filter(is_queue).collect();
        queues.sort();
        for queue in queues {
            for name in HARDWARE_QUEUE_FILES {
                add_file(&queue.join(name), &mut lines);
            }
        }
        lines
    }

    /// Returns the holders of the character device. Their stacks follow, and those of the server and of
    /// threads that run one of [`FUNCTIONS`].
    fn processes(&self, id: u32, server_pid: i32) -> Vec<String> {
        let mut lines = Vec::new();
        let holders = self.holders(id);
        if holders.is_empty() {
            lines.push(format!("no process has ublkc{id} open as a file"));
        }
        for pid in &holders {
            lines.push(format!("process {pid} ({}) has ublkc{id} open", self.command(pid)));
        }
        for pid in numbered(&self.proc) {
            let is_meant = holders.contains(&pid) || pid == server_pid.to_string();
            self.add_stacks(&pid, is_meant, &mut lines);
        }
        lines
    }

    /// Returns the processes that have the character device open.
    fn holders(&self, id: u32) -> Vec<String> {
        let device = PathBuf::from(format!("/dev/ublkc{id}"));
        let holds = |pid: &String| {
            let files = fs::read_dir(self.proc.join(pid).join("fd")).into_iter().flatten().flatten();
            files.into_iter().any(|file| fs::read_link(file.path()).is_ok_and(|path| path == device))
        };
        numbered(&self.proc).into_iter().filter(holds).collect()
    }

    fn command(&self, pid: &str) -> String {
        fs::read_to_string(self.proc.join(pid).join("comm")).unwrap_or_default().trim_end().to_owned()
    }

    /// Adds the stacks of the threads of a process: all, or those that run one of [`FUNCTIONS`].
    fn add_stacks(&self, pid: &str, all: bool, lines: &mut Vec<String>) {
        let tasks = self.proc.join(pid).join("task");
        for task in numbered(&tasks) {
            let stack = match read_start(&tasks.join(&task).join("stack")) {
                Ok(stack) => stack,
                // The thread has ended.
                Err(error) if error.kind() == io::ErrorKind::NotFound || !all => continue,
                Err(error) => {
                    lines.push(format!("stack of thread {task} of process {pid}: {error}"));
                    continue;
                }
            };
            if all || FUNCTIONS.iter().any(|function| stack.contains(function)) {
                let name = self.command(&format!("{pid}/task/{task}"));
                lines.push(format!("stack of thread {task} ({name}) of process {pid}:"));
                lines.extend(stack.lines().map(|line| format!("    {line}")));
            }
        }
    }
}

/// Returns the entries of a folder whose names are numbers, in their order.
fn numbered(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let mut numbers: Vec<u64> = names.filter_map(|name| name.to_str()?.parse().ok()).collect();
    numbers.sort_unstable();
    numbers.into_iter().map(|number| number.to_string()).collect()
}

/// Adds the content of a file that belongs to a device, or the reason why it is unreadable.
fn add_file(path: &Path, lines: &mut Vec<String>) {
    match read_start(path) {
        Ok(text) if text.trim().is_empty() => lines.push(format!("{}: empty", path.display())),
        Ok(text) => {
            lines.push(format!("{}:", path.display()));
            let is_logged = |line: &&str| {
                !path.ends_with("tags") || TAGS_LINES.iter().any(|beginning| line.starts_with(beginning))
            };
            lines.extend(text.lines().filter(is_logged).map(|line| format!("    {line}")));
        }
        Err(error) => lines.push(format!("{}: {error}", path.display())),
    }
}

fn read_start(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    fs::File::open(path)?.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn write(path: &Path, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn a_report_has_the_requests_the_holders_and_the_stacks() {
        let temp = tempfile::tempdir().unwrap();
        let files = StuckDeviceFiles { debugfs: temp.path().join("debug"), proc: temp.path().join("proc") };
        let device = files.debugfs.join("block/ublkb3");
        write(&device.join("requeue_list"), "");
        write(&device.join("hctx0/busy"), "request 7\n");
        write(&files.proc.join("12/task/12/stack"), "[<0>] do_wait\n");
        write(&files.proc.join("12/comm"), "engine\n");
        fs::create_dir_all(files.proc.join("12/fd")).unwrap();
        symlink("/dev/ublkc3", files.proc.join("12/fd/5")).unwrap();
        write(&files.proc.join("40/task/40/stack"), "[<0>] io_ring_exit_work+0x1\n");
        write(&files.proc.join("40/task/40/comm"), "kworker/u4:1\n");
        write(&files.proc.join("41/task/41/stack"), "[<0>] worker_thread\n");
        let report = report(&files, 3, 11, LONG).join("\n");
        for part in [
            "requeue_list: empty",
            "hctx0/busy:\n    request 7",
            "hctx0/tags: No such file",
            "process 12 (engine) has ublkc3 open",
            "stack of thread 12 () of process 12:\n    [<0>] do_wait",
            "stack of thread 40 (kworker/u4:1) of process 40:\n    [<0>] io_ring_exit_work+0x1",
        ] {
            assert!(report.contains(part), "{part} in {report}");
        }
        assert!(!report.contains("worker_thread"), "{report}");
    }

    #[test]
    fn a_report_has_an_end_and_no_part_of_it_hides_another() {
        let temp = tempfile::tempdir().unwrap();
        let files = StuckDeviceFiles { debugfs: temp.path().join("debug"), proc: temp.path().join("proc") };
        for queue in 0..LINES_MAX {
            write(&files.debugfs.join(format!("block/ublkb3/hctx{queue}/tags")), "busy=1\nws={\n");
        }
        write(&files.proc.join("11/task/11/stack"), "[<0>] do_wait\n");
        let report = report(&files, 3, 11, LONG);
        assert!(report[LINES_MAX].starts_with("requests: ") && report[LINES_MAX].ends_with(" more lines"));
        assert_eq!(report[LINES_MAX + 1..].len(), 3, "{report:?}");
        assert!(report.last().unwrap().contains("do_wait"), "{report:?}");
    }

    #[test]
    fn a_file_that_does_not_answer_is_not_waited_for() {
        let temp = tempfile::tempdir().unwrap();
        let files = StuckDeviceFiles { debugfs: temp.path().join("debug"), proc: temp.path().join("proc") };
        let device = files.debugfs.join("block/ublkb3");
        fs::create_dir_all(&device).unwrap();
        // Opening it waits for a writer.
        nix::unistd::mkfifo(&device.join("state"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let report = report(&files, 3, 11, Duration::from_millis(100));
        assert_eq!(report, ["requests: no answer within 100ms", "no process has ublkc3 open as a file"]);
    }
}
