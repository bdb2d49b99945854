//! The state of a device that cannot be taken over, for the log: the driver's view of its requests, the
//! holders of its character device, and the kernel's threads that end rings.
//!
//! It is gone after a restart of the host, which is the usual remedy. So it is logged while it lasts. Files
//! of debugfs: `blk_mq_debugfs_queue_attrs` and `blk_mq_debugfs_hctx_attrs` in block/blk-mq-debugfs.c of the
//! kernel; stacks: proc_pid_stack(5).

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use shorthorn_types::VolumeName;

/// Bytes that are read of a file.
const FILE_BYTES_MAX: u64 = 4096;
/// Lines of a report.
const LINES_MAX: usize = 400;
/// Files in the folder of a device in debugfs.
const QUEUE_FILES: [&str; 2] = ["state", "requeue_list"];
/// Files in the folder of each of its hardware queues.
const HARDWARE_QUEUE_FILES: [&str; 5] = ["state", "busy", "tags", "dispatch", "flags"];
/// Functions that a thread of the kernel runs while it ends a ring, or while the driver waits for one.
const FUNCTIONS: [&str; 2] = ["io_ring_exit_work", "ublk_"];

/// Logs the state of `ublkb{id}`, which process `server_pid` served.
pub(super) fn log(id: u32, volume: &VolumeName, server_pid: i32) {
    for line in Host::default().report(id, server_pid) {
        tracing::warn!(%volume, id, "stuck device: {line}");
    }
}

/// The paths of the kernel's information about itself.
struct Host {
    debugfs: PathBuf,
    proc: PathBuf,
}

impl Default for Host {
    fn default() -> Host {
        Host { debugfs: "/sys/kernel/debug".into(), proc: "/proc".into() }
    }
}

impl Host {
    fn report(&self, id: u32, server_pid: i32) -> Vec<String> {
        let mut lines = Vec::new();
        self.add_requests(id, &mut lines);
        let holders = self.holders(id);
        if holders.is_empty() {
            lines.push(format!("no process has ublkc{id} open as a file"));
        }
        for pid in &holders {
            lines.push(format!("process {pid} ({}) has ublkc{id} open", self.command(pid)));
        }
        for pid in self.processes() {
            let is_meant = holders.contains(&pid) || pid == server_pid.to_string();
            self.add_stacks(&pid, is_meant, &mut lines);
        }
        if lines.len() > LINES_MAX {
            let more = lines.len() - LINES_MAX;
            lines.truncate(LINES_MAX);
            lines.push(format!("{more} more lines"));
        }
        lines
    }

    /// Adds the state of the queues of the device.
    fn add_requests(&self, id: u32, lines: &mut Vec<String>) {
        let folder = self.debugfs.join(format!("block/ublkb{id}"));
        for name in QUEUE_FILES {
            add_file(&folder.join(name), lines);
        }
        let queues = fs::read_dir(&folder).into_iter().flatten().flatten().map(|entry| entry.path());
        let is_queue = |path: &PathBuf| {
            path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("hctx"))
        };
        let mut queues: Vec<PathBuf> = queues.filter(is_queue).collect();
        queues.sort();
        for queue in queues {
            for name in HARDWARE_QUEUE_FILES {
                add_file(&queue.join(name), lines);
            }
        }
    }

    /// Returns the processes that have the character device open.
    fn holders(&self, id: u32) -> Vec<String> {
        let device = PathBuf::from(format!("/dev/ublkc{id}"));
        let holds = |pid: &String| {
            let files = fs::read_dir(self.proc.join(pid).join("fd")).into_iter().flatten().flatten();
            files.into_iter().any(|file| fs::read_link(file.path()).is_ok_and(|path| path == device))
        };
        self.processes().into_iter().filter(holds).collect()
    }

    fn processes(&self) -> Vec<String> {
        numbered(&self.proc)
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
            lines.extend(text.lines().map(|line| format!("    {line}")));
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

    fn write(path: &Path, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn a_report_has_the_requests_the_holders_and_the_stacks() {
        let temp = tempfile::tempdir().unwrap();
        let host = Host { debugfs: temp.path().join("debug"), proc: temp.path().join("proc") };
        let device = host.debugfs.join("block/ublkb3");
        write(&device.join("requeue_list"), "");
        write(&device.join("hctx0/busy"), "request 7\n");
        write(&host.proc.join("12/task/12/stack"), "[<0>] do_wait\n");
        write(&host.proc.join("12/comm"), "engine\n");
        fs::create_dir_all(host.proc.join("12/fd")).unwrap();
        symlink("/dev/ublkc3", host.proc.join("12/fd/5")).unwrap();
        write(&host.proc.join("40/task/40/stack"), "[<0>] io_ring_exit_work+0x1\n");
        write(&host.proc.join("40/task/40/comm"), "kworker/u4:1\n");
        write(&host.proc.join("41/task/41/stack"), "[<0>] worker_thread\n");
        let report = host.report(3, 11).join("\n");
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
    fn a_report_has_an_end() {
        let temp = tempfile::tempdir().unwrap();
        let host = Host { debugfs: temp.path().join("debug"), proc: temp.path().join("proc") };
        for queue in 0..LINES_MAX {
            write(&host.debugfs.join(format!("block/ublkb3/hctx{queue}/tags")), "one\n");
        }
        let report = host.report(3, 11);
        assert_eq!(report.len(), LINES_MAX + 1);
        assert!(report.last().unwrap().ends_with("more lines"), "{report:?}");
    }
}
