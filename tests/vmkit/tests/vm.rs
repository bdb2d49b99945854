//! The harness itself, on real VMs. These tests fail if VMs cannot run.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use shorthorn_testkit::waiting::wait_for;
use shorthorn_vmkit::{DataDisk, Durability, FileSystem, Kernel, Lan, Vm, VmOptions, check_template};

const MINUTE: Duration = Duration::from_secs(60);

#[test]
fn the_ublk_template_has_ublk_and_nbd() -> Result<()> {
    println!("{}", check_template(Kernel::Ublk)?);
    Ok(())
}

#[test]
fn the_newest_template_has_ublk_and_nbd() -> Result<()> {
    println!("{}", check_template(Kernel::Newest)?);
    Ok(())
}

#[test]
fn the_nbd_template_has_nbd_only() -> Result<()> {
    println!("{}", check_template(Kernel::Nbd)?);
    Ok(())
}

#[test]
fn commands_report_status_and_both_outputs() -> Result<()> {
    let vm = Vm::start(VmOptions::new(Kernel::Nbd))?;
    let output = vm.run("echo out; echo err >&2; exit 7")?;
    ensure!(output.status == 7 && output.stdout == b"out\n" && output.stderr == b"err\n", "{output}");
    ensure!(vm.run("kill -9 $$")?.status == 137, "a signal is reported as 128 and its number");

    // A child that keeps the pipes open does not keep the command from ending.
    let started = Instant::now();
    ensure!(vm.sh("sleep 600 & echo started")? == "started");
    ensure!(started.elapsed() < MINUTE, "waited for a background child");

    let input = vec![b'x'; 3_000_000];
    let output = vm.command("cat").stdin(input.clone()).run()?;
    ensure!(output.stdout == input, "3 MB through the guest came back as {}", output.stdout.len());

    let error = vm.sh("echo first; false; echo second").expect_err("`false` must fail");
    let text = format!("{error:#}");
    ensure!(text.contains("first") && !text.contains("--- stdout\nsecond"), "{text}");
    ensure!(text.contains("console log"), "{text}");
    Ok(())
}

#[test]
fn a_command_over_its_limit_is_killed() -> Result<()> {
    let vm = Vm::start(VmOptions::new(Kernel::Nbd))?;
    let command = "echo so far; sleep 54321";
    let error = vm.command(command).limit(Duration::from_secs(3)).run().expect_err("must not end");
    ensure!(format!("{error:#}").contains("so far"), "{error:#}");
    vm.command("while pidof -q sleep; do sleep 0.1; done").limit(MINUTE).run()?;

    let background = vm.spawn("echo begun; sleep 54321")?;
    wait_for("the command in the background writes its line", MINUTE, || {
        let output = background.output_so_far().stdout;
        if output == b"begun\n" { Ok(()) } else { Err(output) }
    });
    background.kill();
    vm.command("while pgrep -x sleep; do :; done").limit(MINUTE).run()?;
    ensure!(vm.spawn("sleep 0.2; exit 3")?.wait(MINUTE)?.status == 3);
    Ok(())
}

#[test]
fn files_are_copied_in_and_out() -> Result<()> {
    let vm = Vm::start(VmOptions::new(Kernel::Nbd))?;
    let dir = std::env::temp_dir().join(format!("vmkit-files-{}", std::process::id()));
    fs::create_dir_all(dir.join("tree/sub"))?;
    let content: Vec<u8> = (0..30_000_001_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    fs::write(dir.join("big"), &content)?;
    fs::write(dir.join("empty"), "")?;
    fs::write(dir.join("tree/sub/script"), "#!/bin/sh\necho pushed\n")?;

    let started = Instant::now();
    vm.push(&[
        (dir.join("big"), "/opt/test/big", 0o640),
        (dir.join("empty"), "/opt/test/empty", 0o600),
        (dir.join("tree"), "/opt/tree", 0o755),
    ])?;
    println!("pushed 30 MB in {:.1} s", started.elapsed().as_secs_f32());
    ensure!(vm.sh("stat -c '%a %s' /opt/test/*")? == "640 30000001\n600 0");
    ensure!(vm.sh("sh /opt/tree/sub/script")? == "pushed");

    let started = Instant::now();
    ensure!(vm.pull("/opt/test/big")? == content, "the file came back different");
    println!("pulled 30 MB in {:.1} s", started.elapsed().as_secs_f32());
    ensure!(vm.pull("/no/such/file").is_err());
    // A program comes without its symbols.
    let program = std::env::current_exe()?;
    vm.push(&[(&program, "/opt/test/program", 0o755)])?;
    let size: u64 = vm.sh("/opt/test/program --list >/dev/null && stat -c %s /opt/test/program")?.parse()?;
    ensure!(size < fs::metadata(&program)?.len(), "the program has its symbols: {size} bytes");
    // A second push finds the place free again.
    vm.push(&[(dir.join("empty"), "/opt/again", 0o755)])?;
    ensure!(vm.sh("lsblk -ndo NAME")? == "vda", "a disk was left behind");
    fs::remove_dir_all(&dir)?;
    Ok(())
}

#[test]
fn a_crash_loses_unsynced_data() -> Result<()> {
    let disk = DataDisk::new(4096, FileSystem::Ext4);
    let mut vm = Vm::start(VmOptions::new(Kernel::Ublk).data_disk(disk))?;
    let id = vm.sh("cat /etc/machine-id")?;
    vm.sh("echo kept >/var/lib/longhorn/a; sync; echo lost >/var/lib/longhorn/b")?;
    let orphan = vm.spawn("sleep 1000")?;

    let started = Instant::now();
    vm.crash_reboot()?;
    println!("crash and reboot: {:.1} s", started.elapsed().as_secs_f32());
    ensure!(orphan.wait(MINUTE).is_err(), "a command outlived the crash");
    ensure!(vm.sh("findmnt -no FSTYPE /var/lib/longhorn")? == "ext4");
    ensure!(vm.sh("cat /var/lib/longhorn/a")? == "kept");
    ensure!(vm.run("test -s /var/lib/longhorn/b")?.status == 1, "unsynced data survived");
    ensure!(vm.sh("cat /etc/machine-id")? == id);
    ensure!(vm.sh("modprobe ublk_drv; ls /dev/ublk-control")? == "/dev/ublk-control");
    Ok(())
}

#[test]
fn a_power_cut_keeps_the_disks() -> Result<()> {
    let disk = DataDisk::new(4096, FileSystem::Xfs);
    let mut vm = Vm::start(VmOptions::new(Kernel::Nbd).data_disk(disk))?;
    vm.sh("echo kept >/var/lib/longhorn/a; echo kept >/root/a; sync")?;
    vm.power_cut()?;
    ensure!(vm.run("true").is_err(), "a VM without power runs commands");
    let started = Instant::now();
    vm.cold_start()?;
    println!("cold start: {:.1} s", started.elapsed().as_secs_f32());
    ensure!(vm.sh("cat /var/lib/longhorn/a /root/a")? == "kept\nkept");
    ensure!(vm.sh("findmnt -no FSTYPE /var/lib/longhorn")? == "xfs");
    ensure!(vm.run("modprobe ublk_drv")?.status != 0, "a cold start brought another kernel");
    Ok(())
}

#[test]
fn a_volatile_cache_loses_unflushed_data() -> Result<()> {
    let disk = DataDisk::blank(1024).durability(Durability::VolatileCache);
    let mut vm = Vm::start(VmOptions::new(Kernel::Nbd).data_disk(disk))?;
    let device = DataDisk::guest_path();
    let write = |at: u32, flush: &str| {
        format!(
            "udevadm settle; head -c 1M /dev/zero | tr '\\0' y | \
             dd of={device} bs=1M seek={at} count=1 iflag=fullblock oflag=direct {flush} status=none"
        )
    };
    vm.sh(&write(1, "conv=fsync"))?;
    // Neither dd nor the kernel flushes this write: a bare device is not synced.
    vm.sh(&write(100, ""))?;
    vm.power_cut()?;
    vm.cold_start()?;
    let first_byte =
        |at: u32| format!("udevadm settle; dd if={device} bs=1M skip={at} count=1 status=none | head -c 1");
    ensure!(vm.run(&first_byte(1))?.stdout == b"y", "flushed data is gone");
    ensure!(vm.run(&first_byte(100))?.stdout == b"\0", "unflushed data survived");
    Ok(())
}

#[test]
fn three_vms_share_a_network_and_nothing_else() -> Result<()> {
    let lan = Lan::new()?;
    let started = Instant::now();
    let vms = std::thread::scope(|scope| {
        let starts: Vec<_> = (1..=3)
            .map(|number| {
                let options = VmOptions::new(Kernel::Ublk).name(&format!("node{number}")).lan(&lan);
                scope.spawn(|| Vm::start(options))
            })
            .collect();
        starts.into_iter().map(|start| start.join().expect("a start panicked")).collect::<Result<Vec<_>>>()
    })?;
    println!("three VMs: {:.1} s", started.elapsed().as_secs_f32());

    let facts = vms
        .iter()
        .map(|vm| vm.sh("hostname; cat /etc/machine-id /sys/class/net/eth1/address"))
        .collect::<Result<Vec<_>>>()?;
    for line in 0..3 {
        let mut values: Vec<_> = facts.iter().filter_map(|fact| fact.lines().nth(line)).collect();
        values.sort_unstable();
        values.dedup();
        ensure!(values.len() == 3, "not unique: {values:?}");
    }
    for vm in &vms {
        for other in &vms {
            let address = other.lan_address().context("no address")?;
            vm.sh(&format!("ping -c 1 -W 10 {address}"))?;
        }
    }
    Ok(())
}

#[test]
fn nothing_outlives_a_killed_process() -> Result<()> {
    let mut process = Command::new(env!("CARGO_BIN_EXE_shorthorn-vm"))
        .args(["run", "--", "echo up; sleep 54321"])
        .stdout(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    BufReader::new(process.stdout.take().context("no pipe")?).read_line(&mut line)?;
    ensure!(line == "up\n", "{line}");
    let qemu = qemus_of(process.id())?;
    ensure!(qemu.len() == 1, "{qemu:?}");

    process.kill()?;
    process.wait()?;
    wait_for("QEMU ends", MINUTE, || {
        let qemus = qemus_of(process.id()).map_err(|error| format!("{error:#}"))?;
        if qemus.is_empty() { Ok(()) } else { Err(format!("{qemus:?} still run")) }
    });
    Ok(())
}

/// Returns the QEMU processes that use the folder of a VM which that process started.
fn qemus_of(pid: u32) -> Result<Vec<PathBuf>> {
    let folder = format!("/run/{pid}-");
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let path = entry?.path();
        // Processes end while we look.
        let Ok(arguments) = fs::read(path.join("cmdline")) else { continue };
        let arguments = String::from_utf8_lossy(&arguments);
        if arguments.starts_with("qemu-system") && arguments.contains(&folder) {
            found.push(path);
        }
    }
    Ok(found)
}
