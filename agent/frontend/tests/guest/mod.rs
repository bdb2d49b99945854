//! A virtual machine in which the example `memory_device` serves a volume through a frontend. The volume is a
//! file on tmpfs, so it survives the death of the process that serves it.

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use shorthorn_vmkit::{Kernel, Running, Vm, VmOptions};

/// The time limit of steps without much I/O; software emulation is slow.
pub const MINUTE: Duration = Duration::from_secs(60);
/// The node of volume `memory`.
pub const NODE: &str = "/dev/longhorn/memory";
/// The limit for a request beyond the time without a server. On NBD the timer of a request takes 3 s of it at
/// most: 2 s, which the block layer rounds up. The rest is for emulated processors.
pub const REQUEST_LIMIT: Duration = Duration::from_secs(5);
/// mkfs.xfs wants 300 MiB at least.
pub const SIZE_BYTES: u64 = 384 << 20;

/// A VM in which `memory_device` can be started and killed.
pub struct Guest {
    pub vm: Vm,
    frontend: &'static str,
}

impl Guest {
    pub fn start(kernel: Kernel, frontend: &'static str) -> Result<Guest> {
        let vm = Vm::start(VmOptions::new(kernel).name(frontend))?;
        vm.push(&[(memory_device()?, "/usr/local/bin/memory_device", 0o755)])?;
        vm.sh("mkdir -p /mem && mount -t tmpfs -o size=1g tmpfs /mem && dmesg -C")?;
        Ok(Guest { vm, frontend })
    }

    /// Returns the command that serves volume `name`.
    pub fn command(&self, name: &str, options: &str) -> String {
        let frontend = self.frontend;
        format!(
            "memory_device --frontend {frontend} --volume {name} --size {SIZE_BYTES} --backing /mem/{name}.data \
             --state /mem/{name}.state {options}"
        )
    }

    /// Starts `memory_device` for volume `name` and waits until its device is ready. Returns its process id.
    pub fn serve(&self, name: &str, options: &str) -> Result<u32> {
        let command = self.command(name, options);
        let pid = self.vm.sh(&format!(
            "setsid {command} </dev/null >/mem/{name}.out 2>/mem/{name}.err & \
             for n in $(seq 1200); do \
                 if grep -q device /mem/{name}.out; then echo $!; exit; fi; \
                 kill -0 $! || {{ cat /mem/{name}.err >&2; exit 1; }}; \
                 sleep 0.05; \
             done; \
             echo 'not ready' >&2; cat /mem/{name}.err >&2; exit 1"
        ))?;
        pid.parse().with_context(|| format!("no process id: {pid}"))
    }

    /// Ends the process with `signal` and waits until it is gone.
    pub fn end(&self, pid: u32, signal: &str) -> Result<()> {
        let script = format!(
            "kill -{signal} {pid}; \
             for n in $(seq 1200); do test -e /proc/{pid} || exit 0; sleep 0.05; done; cat /mem/*.err >&2; exit 1"
        );
        let output = self.vm.command(&script).limit(2 * MINUTE).run()?;
        ensure!(output.success(), "process {pid} does not end on SIG{signal}: {output}");
        Ok(())
    }

    /// Sends `signal` and returns the line that the process says to it.
    pub fn ask(&self, pid: u32, signal: &str) -> Result<String> {
        self.vm.sh(&format!(
            "before=$(wc -l </mem/memory.err); kill -{signal} {pid}; \
             for n in $(seq 600); do \
                 test $(wc -l </mem/memory.err) -gt $before && exec tail -n 1 /mem/memory.err; sleep 0.05; \
             done; exit 1"
        ))
    }

    /// Starts fio on `target`: reads the writes of `mode` (randwrite, randtrimwrite) back and compares them.
    /// Its report is /mem/fio.json.
    pub fn start_fio(&self, target: &str, mode: &str, seconds: u32) -> Result<Running> {
        let command = format!(
            "cd /mem && fio --name=verify --filename={target} --size=96m --rw={mode} --bsrange=4k-64k --blockalign=4k --direct=1 \
             --ioengine=libaio --iodepth=16 --time_based --runtime={seconds} --verify=crc32c --verify_backlog=256 \
             --verify_fatal=1 --output-format=json --output=/mem/fio.json"
        );
        self.vm.command(&command).limit(10 * MINUTE).spawn()
    }

    /// Checks BLKZEROOUT, which blkdiscard -z uses and which asks for no hole, and fallocate -p, which asks
    /// for one.
    pub fn zeroes_take_space_unless_a_hole_is_allowed(&self) -> Result<()> {
        let allocated =
            || -> Result<u64> { Ok(self.vm.sh("stat -c %b /mem/memory.data")?.parse::<u64>()? * 512) };
        let before = allocated()?;
        let range = "-o 134217728 -l 12582912";
        self.vm.sh(&format!("blkdiscard -z {range} {NODE}"))?;
        let taken = allocated()? - before;
        ensure!(taken == 12 << 20, "12 MiB of zeroes take {taken} bytes");
        self.vm.sh(&format!("fallocate -p {range} {NODE}"))?;
        ensure!(allocated()? == before, "a hole takes space");
        Ok(())
    }

    /// Returns the time of the longest request in fio's report `file`.
    pub fn worst_wait(&self, file: &str) -> Result<Duration> {
        let report: serde_json::Value = serde_json::from_str(&self.vm.sh(&format!("cat {file}"))?)?;
        let of = |direction: &str| report["jobs"][0][direction]["lat_ns"]["max"].as_u64();
        let longest = of("read").max(of("write")).context("fio tells no latency")?;
        Ok(Duration::from_nanos(longest))
    }

    /// Waits until a process of this name waits for a disk.
    pub fn waits_for_disk(&self, process: &str) -> Result<()> {
        let is_waiting = format!("ps -o stat= -C {process} | grep -q D");
        let wait = format!("for n in $(seq 1200); do {is_waiting} && exit; sleep 0.05; done; exit 1");
        self.vm.sh(&wait).map(drop).with_context(|| format!("{process} does not wait for a disk"))
    }

    pub fn no_io_errors(&self) -> Result<()> {
        let log = self.vm.sh("dmesg | grep -iE 'i/o error|oops:|bug:|warning:|call trace' || true")?;
        ensure!(log.is_empty(), "the kernel complains:\n{log}");
        Ok(())
    }
}

/// Builds the example with the profile of this test, once in this process, and returns its path.
fn memory_device() -> Result<PathBuf> {
    static BUILT: Mutex<Option<PathBuf>> = Mutex::new(None);
    // A panic elsewhere cannot leave a half-made value behind.
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    if built.is_none() {
        *built = Some(build_memory_device()?);
    }
    built.clone().context("the example was built just now")
}

fn build_memory_device() -> Result<PathBuf> {
    let mut dir = std::env::current_exe()?;
    dir.pop();
    dir.pop();
    let profile = match dir.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(name) => name,
    };
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--workspace", "--example", "memory_device", "--profile", profile]);
    // The build script of ring runs again when one of these has another value, and cargo sets them for this
    // test. All crates above ring would be built twice: for the example, and for the next test.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_MANIFEST_") || text.starts_with("CARGO_PKG_") {
            cargo.env_remove(name);
        }
    }
    let built = cargo.status()?;
    ensure!(built.success(), "cargo build --example memory_device: {built}");
    Ok(dir.join("examples/memory_device"))
}
