//! A virtual machine in which the example `memory_device` serves a volume through a frontend. The volume is a
//! file on tmpfs, so it survives the death of the process that serves it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use shorthorn_testkit::waiting::retry;
use shorthorn_vmkit::{Kernel, RunningCommand, Vm, VmOptions};

/// The time limit of steps without much I/O; software emulation is slow.
pub const MINUTE: Duration = Duration::from_secs(60);
/// The node of volume `memory`.
pub const NODE: &str = "/dev/longhorn/memory";
/// The limit for a request beyond the time without a server. On NBD the timer of a request takes 3 s of it at
/// most: 2 s, which the block layer rounds up. The rest is for emulated processors.
pub const REQUEST_LIMIT: Duration = Duration::from_secs(5);
/// mkfs.xfs wants 300 MiB at least.
pub const SIZE_BYTES: u64 = 384 << 20;
/// The tests of single requests write to no byte behind this. Emulated processors need seconds to read on.
pub const USED_BYTES: u64 = 160 << 20;
/// Keeps a copy of the volume `memory`, without its holes. Emulated processors compare it in a fraction of
/// the time of a sum.
pub const KEEP: &str = "cp --sparse=always /mem/memory.data /mem/kept";

/// A VM in which `memory_device` can be started and killed.
pub struct Guest {
    pub vm: Vm,
    frontend: &'static str,
    /// The processes that were started, by their ids.
    servers: Mutex<BTreeMap<u32, RunningCommand>>,
}

impl Guest {
    pub fn start(kernel: Kernel, frontend: &'static str) -> Result<Guest> {
        let vm = Vm::start(VmOptions::new(kernel).name(frontend))?;
        vm.push(&[(memory_device()?, "/usr/local/bin/memory_device", 0o755)])?;
        vm.sh("mkdir -p /mem && mount -t tmpfs -o size=1g tmpfs /mem && dmesg -C")?;
        Ok(Guest { vm, frontend, servers: Mutex::default() })
    }

    /// Returns the command that serves volume `name`.
    pub fn command(&self, name: &str, options: &str) -> String {
        let frontend = self.frontend;
        format!(
            "memory_device --frontend {frontend} --volume {name} --size {SIZE_BYTES} --backing \
             /mem/{name}.data --state /mem/{name}.state {options}"
        )
    }

    /// Starts `memory_device` for volume `name` and waits until its device is ready. Returns its process id.
    pub fn serve(&self, name: &str, options: &str) -> Result<u32> {
        let command = self.command(name, options);
        // Its output shows the start and the end. A loop in the machine would take the processors from
        // the process that it waits for.
        let server = self.vm.spawn(&format!(
            "{command} </dev/null 2>/mem/{name}.err & echo $!; wait $! || {{ echo ended; cat \
             /mem/{name}.err; }}"
        ))?;
        let text = || server.output_so_far().text();
        // The process id, and the line that says that the device is ready, or that the process has ended.
        let said = retry(MINUTE, || Some(text()).filter(|text| text.matches('\n').count() > 1).ok_or(()));
        if said.is_err() {
            bail!("{name} is not ready: {}\n{}", text(), self.vm.sh(&format!("cat /mem/{name}.err"))?);
        }
        let said = text();
        let mut lines = said.lines();
        let pid =
            lines.next().unwrap_or_default().parse().with_context(|| format!("no process id: {said}"))?;
        ensure!(lines.next().is_some_and(|line| line.contains("device")), "{name} is not ready: {said}");
        self.servers().insert(pid, server);
        Ok(pid)
    }

    fn servers(&self) -> MutexGuard<'_, BTreeMap<u32, RunningCommand>> {
        self.servers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the process with `signal` and waits until it is gone.
    pub fn end(&self, pid: u32, signal: &str) -> Result<()> {
        self.vm.sh(&format!("kill -{signal} {pid}"))?;
        self.wait_for_end(pid).with_context(|| format!("after SIG{signal}"))
    }

    /// Waits until the process, which has got a signal, is gone.
    pub fn wait_for_end(&self, pid: u32) -> Result<()> {
        let server = self.servers().remove(&pid).with_context(|| format!("process {pid} was not started"))?;
        server.wait(2 * MINUTE).map(drop).with_context(|| format!("process {pid} does not end"))
    }

    /// Waits until the device has answered `more` requests.
    pub fn answers(&self, more: u32) -> Result<()> {
        let disk = if self.frontend == "ublk" { "ublkb0" } else { "nbd0" };
        // Reads and writes of Documentation/block/stat.rst.
        let script = format!(
            "count() {{ read -ra fields </sys/block/{disk}/stat; count=$((fields[0] + fields[4])); }}; \
             count; goal=$((count + {more})); \
             for n in $(seq 600); do count; ((count >= goal)) && exit; sleep 0.1; done; exit 1"
        );
        let output = self.vm.command(&script).limit(2 * MINUTE).run()?;
        ensure!(output.success(), "{disk} has not answered {more} requests: {output}");
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

    /// Starts [`Guest::start_fio`] for longer than any test needs; [`Guest::end_fio`] ends it.
    pub fn start_endless_fio(&self, target: &str) -> Result<RunningCommand> {
        self.start_fio(target, "randwrite", 600)
    }

    /// Ends a load when the requests since the last fault are compared.
    pub fn end_fio(&self, fio: RunningCommand) -> Result<()> {
        // More than fio writes before it reads them back, and these reads.
        self.answers(600)?;
        self.vm
            .sh("pkill -INT --oldest --exact fio")
            .context("fio has ended before: it shows nothing of the last faults")?;
        let output = fio.wait(10 * MINUTE)?;
        // The status after a signal, also if a verification failed before.
        ensure!(output.status == 128, "fio: {output}");
        let report = self.report("/mem/fio.json")?;
        ensure!(report["jobs"][0]["error"] == 0, "fio: {output}\n{report:#}");
        Ok(())
    }

    /// Starts fio on `target`: reads the writes of `mode` (randwrite, randtrimwrite) back and compares them.
    /// Its report is /mem/fio.json.
    pub fn start_fio(&self, target: &str, mode: &str, seconds: u32) -> Result<RunningCommand> {
        let command = format!(
            "cd /mem && fio --name=verify --filename={target} --size=96m --rw={mode} --bsrange=4k-64k \
             --blockalign=4k --direct=1 --ioengine=libaio --iodepth=16 --time_based --runtime={seconds} \
             --verify=crc32c --verify_backlog=256 --verify_fatal=1 --output-format=json \
             --output=/mem/fio.json"
        );
        self.vm.command(&command).limit(10 * MINUTE).spawn()
    }

    /// Checks that the volume `memory` has the data that [`KEEP`] has kept.
    pub fn has_kept_data(&self) -> Result<()> {
        let compare = format!("cmp -n {USED_BYTES} {NODE} /mem/kept && rm /mem/kept");
        self.vm.sh(&compare).map(drop).context("the content changed over a stop and a start")
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
        let report = self.report(file)?;
        let of = |direction: &str| report["jobs"][0][direction]["lat_ns"]["max"].as_u64();
        let longest = of("read").max(of("write")).context("fio tells no latency")?;
        Ok(Duration::from_nanos(longest))
    }

    fn report(&self, file: &str) -> Result<Value> {
        let text = self.vm.sh(&format!("cat {file}"))?;
        // After a signal fio says so first.
        let json = text.find('{').map_or("", |start| &text[start..]);
        serde_json::from_str(json).with_context(|| format!("reading {text}"))
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
