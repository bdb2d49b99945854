//! The frontend ublk on a real kernel, in a virtual machine. These tests fail if VMs cannot run.

mod guest;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use guest::{Guest, KEEP, MINUTE, NODE, REQUEST_LIMIT, SIZE_BYTES, USED_BYTES};
use shorthorn_vmkit::Kernel;

/// The depth of a device by default.
const DEPTH: u32 = 128;
/// The longest time that a new device waits for udev.
const UDEV_LIMIT: Duration = Duration::from_secs(10);

fn start() -> Result<Guest> {
    Guest::start(Kernel::Ublk, "ublk")
}

#[test]
fn the_block_layer_shows_the_exported_limits() -> Result<()> {
    the_block_layer_sees(Kernel::Ublk)
}

#[test]
fn the_newest_block_layer_shows_the_exported_limits_and_grows() -> Result<()> {
    the_block_layer_sees(Kernel::Newest)
}

fn the_block_layer_sees(kernel: Kernel) -> Result<()> {
    let guest = Guest::start(kernel, "ublk")?;
    let pid = guest.serve("memory", "--queues 8 --depth 64")?;
    let read = |file: &str| guest.vm.sh(&format!("cat /sys/block/ublkb0/{file}"));
    for (file, expected) in [
        ("size", "786432"),
        ("ro", "0"),
        ("queue/logical_block_size", "512"),
        ("queue/physical_block_size", "4096"),
        ("queue/minimum_io_size", "4096"),
        ("queue/write_cache", "write back"),
        ("queue/fua", "1"),
        ("queue/discard_granularity", "4096"),
        ("queue/discard_max_bytes", "33554432"),
        ("queue/write_zeroes_max_bytes", "33554432"),
        ("queue/max_hw_sectors_kb", "1024"),
        ("queue/nr_requests", "64"),
        ("queue/rotational", "0"),
    ] {
        let found = read(file)?;
        ensure!(found == expected, "{file} is {found}, not {expected}");
    }
    // The driver makes no more queues than there are processors.
    let (queues, cpus) = (guest.vm.sh("ls /sys/block/ublkb0/mq | wc -l")?, guest.vm.sh("nproc")?);
    ensure!(queues == cpus, "{queues} queues on {cpus} processors");
    let record = guest.vm.sh("cat /mem/memory.state")?;
    ensure!(record.contains(&format!(r#""kernel_id":0,"queues":{cpus},"depth":64"#)), "{record}");
    let node = guest.vm.sh(&format!("stat -c '%F %a %G %Hr:%Lr' {NODE}"))?;
    let number = read("dev")?;
    ensure!(node == format!("block special file 660 disk {number}"), "{node}");
    guest.vm.sh(&format!("test -e /run/udev/data/b{number}")).context("udev was not waited for")?;

    guest.vm.sh(&format!(
        "kill -USR1 {pid}; for n in $(seq 600); do grep -q 'volume has' /mem/memory.err && exit; sleep 0.05; \
         done; exit 1"
    ))?;
    let said = guest.vm.sh("cat /mem/memory.err")?;
    let sectors = read("size")?;
    if kernel == Kernel::Newest {
        let grown = SIZE_BYTES + (64 << 20);
        ensure!(said.contains(&format!("the volume has {grown} bytes")), "{said}");
        ensure!(sectors == (grown / 512).to_string(), "{sectors} sectors: {said}");
        guest.vm.sh(&format!(
            "dd if={NODE} of=/dev/null bs=1M skip={} count=64 iflag=direct status=none",
            SIZE_BYTES >> 20
        ))?;
    } else {
        ensure!(said.contains("cannot resize a device in use"), "{said}");
        ensure!(sectors == (SIZE_BYTES / 512).to_string(), "{sectors} sectors: {said}");
    }
    guest.end(pid, "TERM")?;
    guest.vm.sh(&format!("test ! -e {NODE} && test ! -e /dev/ublkb0 && test ! -e /dev/ublkc0"))?;
    guest.no_io_errors()
}

#[test]
fn every_request_has_its_effect() -> Result<()> {
    let guest = start()?;
    let pid = guest.serve("memory", "")?;
    let vm = &guest.vm;
    vm.sh(&format!(
        "head -c 64M /dev/urandom >/mem/random && \
         dd if=/mem/random of={NODE} bs=1M oflag=direct status=none && \
         dd if=/mem/random of={NODE} bs=3584 count=512 seek=20000 oflag=direct,dsync status=none && \
         cmp -n 67108864 /mem/random {NODE} && \
         cmp -n 1835008 /mem/random <(dd if={NODE} bs=3584 skip=20000 count=512 iflag=direct status=none)"
    ))?;
    // A discard of half, zeroes over the odd sectors around a block boundary.
    vm.sh(&format!(
        "blkdiscard -o 33554432 -l 33554432 {NODE} && blkdiscard -z -o 3584 -l 1024 {NODE} && cmp -n 3584 \
         /mem/random {NODE} && cmp -n 1024 <(dd if={NODE} bs=512 skip=7 count=2 status=none) /dev/zero && \
         cmp -i 4608 -n $((33554432 - 4608)) /mem/random {NODE} && cmp -i 33554432:0 -n 33554432 {NODE} \
         /dev/zero"
    ))?;
    guest.zeroes_take_space_unless_a_hole_is_allowed()?;
    vm.sh(KEEP)?;
    guest.end(pid, "TERM")?;
    let pid = guest.serve("memory", "")?;
    guest.has_kept_data()?;
    vm.sh(&format!("blkdiscard -z {NODE} && cmp -n {USED_BYTES} {NODE} /dev/zero"))?;
    // Buffered writes without a flush are written when the device stops. The last close would flush them, so
    // a holder keeps it open.
    let holder =
        vm.spawn(&format!("exec 3<>{NODE}; head -c 8M /mem/random >&3; touch /mem/written; sleep 1000"))?;
    vm.sh("for n in $(seq 600); do test -e /mem/written && exit; sleep 0.05; done; exit 1")?;
    guest.end(pid, "TERM")?;
    vm.sh("cmp -n 8388608 /mem/random /mem/memory.data")?;
    holder.kill();
    guest.no_io_errors()
}

#[test]
fn the_host_reads_no_partition_table() -> Result<()> {
    let guest = start()?;
    let vm = &guest.vm;
    let pid = guest.serve("memory", "--queues 2")?;
    // One partition of 64 MiB, which begins at 1 MiB.
    let table =
        r#"print "\0" x 446, pack("C8VV", 0, 0, 2, 0, 0x83, 0, 0, 0, 2048, 131072), "\0" x 48, "\x55\xaa""#;
    vm.sh(&format!("perl -e '{table}' | dd of={NODE} bs=512 conv=fsync status=none"))?;
    guest.end(pid, "TERM")?;
    guest.serve("memory", "--queues 2")?;
    vm.sh("udevadm settle && test -e /sys/block/ublkb0 && ! test -e /sys/block/ublkb0/ublkb0p1")?;
    vm.sh("partx -a /dev/ublkb0 && test -e /sys/block/ublkb0/ublkb0p1")
        .context("on demand they are there")?;
    guest.no_io_errors()
}

#[test]
fn a_device_is_ready_when_udev_has_handled_it() -> Result<()> {
    let guest = start()?;
    let vm = &guest.vm;
    vm.sh("udevadm control --stop-exec-queue")?;
    let command = guest.command("memory", "");
    let server = vm.spawn(&format!("exec {command} </dev/null >/mem/memory.out 2>/mem/memory.err"))?;
    vm.sh("for n in $(seq 600); do test -e /sys/block/ublkb0 && exit; sleep 0.05; done; exit 1")?;
    vm.sh("sleep 2; ! grep device /mem/memory.out").context("ready before udev has seen the disk")?;
    // Shorter than the rest of the limit, after which it would be ready in any case.
    vm.sh("udevadm control --start-exec-queue; \
           for n in $(seq 120); do grep -q device /mem/memory.out && exit; sleep 0.05; done; exit 1")
        .context("the event of udev was not heard")?;
    vm.sh("test -e /run/udev/data/b$(cat /sys/block/ublkb0/dev)")?;
    vm.sh("pkill -TERM -x memory_device")?;
    let output = server.wait(MINUTE)?;
    ensure!(output.success(), "{output}");
    guest.no_io_errors()
}

#[test]
fn a_host_without_udevd_is_not_waited_for() -> Result<()> {
    let guest = start()?;
    guest.vm.sh(
        "systemctl stop systemd-udevd-control.socket systemd-udevd-kernel.socket systemd-udevd.service; \
                 rm -f /run/udev/control",
    )?;
    let begin = Instant::now();
    let pid = guest.serve("memory", "")?;
    let took = begin.elapsed();
    ensure!(took < UDEV_LIMIT, "ready after {took:?}, as if udevd had been waited for");
    guest.vm.sh("! test -e /run/udev/data/b$(cat /sys/block/ublkb0/dev)").context("a udevd runs")?;
    guest.end(pid, "TERM")?;
    guest.no_io_errors()
}

#[test]
fn file_systems_work_and_users_are_named() -> Result<()> {
    let guest = start()?;
    let pid = guest.serve("memory", "")?;
    let vm = &guest.vm;
    ensure!(guest.ask(pid, "USR2")? == "used: by no process");
    for file_system in ["ext4", "xfs"] {
        let force = if file_system == "xfs" { "-f" } else { "-F" };
        vm.sh(&format!(
            "mkfs.{file_system} -q {force} {NODE} && mkdir -p '/mnt/a b' && mount -o discard {NODE} '/mnt/a \
             b'"
        ))?;
        ensure!(guest.ask(pid, "USR2")? == "used: mounted at /mnt/a b");
        let fio = guest.start_fio("'/mnt/a b/file'", "randwrite", 2)?.wait(5 * MINUTE)?;
        ensure!(fio.success(), "fio on {file_system}: {fio}");
        vm.sh("rm '/mnt/a b/file' && fstrim '/mnt/a b' && umount '/mnt/a b'")?;
    }
    vm.sh(&format!("mkswap {NODE} && swapon {NODE}"))?;
    ensure!(guest.ask(pid, "USR2")? == "used: used as swap");
    vm.sh(&format!("swapoff {NODE} && echo '0 8 linear {NODE} 0' | dmsetup create on-top"))?;
    let users = guest.ask(pid, "USR2")?;
    ensure!(users.starts_with("used: held by dm-"), "{users}");
    vm.sh("dmsetup remove on-top")?;
    ensure!(guest.ask(pid, "USR2")? == "used: by no process");
    guest.end(pid, "TERM")?;
    guest.no_io_errors()
}

#[test]
fn killed_under_load_and_back_without_an_error() -> Result<()> {
    killed_under_load(Kernel::Ublk)
}

#[test]
fn killed_under_load_and_back_without_an_error_on_the_newest_kernel() -> Result<()> {
    killed_under_load(Kernel::Newest)
}

fn killed_under_load(kernel: Kernel) -> Result<()> {
    let guest = Guest::start(kernel, "ublk")?;
    let mut pid = guest.serve("memory", "")?;
    guest.vm.sh(&format!("mkfs.ext4 -q {NODE} && mkdir /mnt/m && mount -o discard {NODE} /mnt/m"))?;
    let fio = guest.start_endless_fio("/mnt/m/file")?;
    // Beside it, files that come and go, so that discards are in flight as well.
    let files = "while ! test -e /mem/enough; do dd if=/dev/urandom of=/mnt/m/f bs=1M count=8 conv=fsync && \
                 rm /mnt/m/f && sync -f /mnt/m; done";
    let files = guest.vm.command(&format!("set -e; {files}")).limit(10 * MINUTE).spawn()?;
    for _ in 0..4 {
        // The load runs, and then writes wait for a device that no process serves.
        guest.vm.sh("sleep 2")?;
        guest.end(pid, "KILL")?;
        guest.vm.sh("sleep 0.5")?;
        pid = guest.serve("memory", "")?;
    }
    guest.vm.sh("touch /mem/enough")?;
    let output = files.wait(10 * MINUTE)?;
    ensure!(output.success(), "files that come and go: {output}");
    guest.end_fio(fio)?;
    guest.vm.sh("umount /mnt/m")?;
    guest.vm.sh(&format!("fsck.ext4 -fn {NODE}"))?;
    guest.end(pid, "TERM")?;
    guest.no_io_errors()
}

/// Checks that the driver gets every delivered request back, including those that arrive just then.
#[test]
fn left_to_the_next_process_again_and_again() -> Result<()> {
    let guest = start()?;
    let mut pid = guest.serve("memory", "")?;
    let fio = guest.start_endless_fio(NODE)?;
    // In turns as on a kernel whose io_uring hangs with deferred task work.
    for (round, options) in ["", "", "--task-work cooperative"].into_iter().cycle().take(40).enumerate() {
        let signal = if round % 10 == 9 { "KILL" } else { "HUP" };
        guest.end(pid, signal)?;
        pid = guest.serve("memory", options).with_context(|| format!("round {round}"))?;
    }
    guest.end_fio(fio)?;
    guest.end(pid, "TERM")?;
    guest.no_io_errors()
}

#[test]
fn ended_with_every_tag_taken() -> Result<()> {
    every_tag_taken(Kernel::Ublk)
}

#[test]
fn ended_with_every_tag_taken_on_the_newest_kernel() -> Result<()> {
    every_tag_taken(Kernel::Newest)
}

/// Replaces a process that has every tag, so no command waits to be cancelled. Some drivers notice the end of
/// such a process only by the timer of a request.
fn every_tag_taken(kernel: Kernel) -> Result<()> {
    let guest = Guest::start(kernel, "ublk")?;
    let vm = &guest.vm;
    let options = format!("--queues 1 --depth {DEPTH} --delay-ms 250");
    let begin = Instant::now();
    let mut pid = guest.serve("memory", &options)?;
    let start = begin.elapsed();
    if kernel == Kernel::Ublk {
        let is_short = "test $(cat /sys/block/ublkb0/queue/io_timeout) = 1000";
        vm.sh(&format!("for n in $(seq 600); do {is_short} && exit; sleep 0.05; done; exit 1"))
            .context("the timer of requests is not 1 s")?;
    }
    // Writes from the page cache come in requests of 64 KiB then, 512 each time. The block layer does
    // not limit them to some of the tags.
    vm.sh("cd /sys/block/ublkb0/queue && echo 64 >max_sectors_kb && echo 0 >wbt_lat_usec && \
         head -c 32M /dev/urandom >/mem/random")?;
    let buffered = format!(
        "while ! test -e /mem/enough; do \
             dd if=/mem/random of={NODE} bs=1M seek=128 conv=notrunc,fsync status=none || exit; \
         done; dd if={NODE} bs=1M skip=128 count=32 iflag=direct status=none | cmp - /mem/random"
    );
    let fio = guest.start_endless_fio(NODE)?;
    vm.sh("for n in $(seq 1200); do read reads writes </sys/block/ublkb0/inflight; \
           test $((reads + writes)) -ge 16 && exit; sleep 0.05; done; exit 1")
        .context("the direct writer does not write")?;
    let buffered = vm.command(&buffered).limit(10 * MINUTE).spawn()?;
    let mut longest = Duration::ZERO;
    for signal in ["HUP", "KILL", "HUP", "KILL"] {
        // The requests of the round before are answered: none waits for two processes.
        vm.sh("writes() { set -- $(cat /sys/block/ublkb0/stat); echo $5; }; goal=$(($(writes) + 512)); \
               for n in $(seq 1200); do test $(writes) -ge $goal && exit; sleep 0.05; done; exit 1")
            .context("the process answers nothing")?;
        let ended = end_with_every_tag_taken(&guest, pid, signal)?;
        let begin = Instant::now();
        pid = guest.serve("memory", &options).with_context(|| format!("after SIG{signal}"))?;
        longest = longest.max(ended + begin.elapsed());
    }
    vm.sh("touch /mem/enough")?;
    let output = buffered.wait(10 * MINUTE)?;
    ensure!(output.success(), "the buffered writer: {output}");
    guest.end_fio(fio)?;
    let worst = guest.worst_wait("/mem/fio.json")?;
    println!("{kernel:?}: worst wait {worst:?}, longest recovery {longest:?}, first start {start:?}");
    ensure!(longest < start + REQUEST_LIMIT, "a recovery took {longest:?}, and the first start {start:?}");
    ensure!(worst < longest + REQUEST_LIMIT, "a request has waited {worst:?}");
    guest.end(pid, "TERM")?;
    guest.no_io_errors()
}

/// Ends the process as soon as it has every tag. Returns the time from the signal to its end.
fn end_with_every_tag_taken(guest: &Guest, pid: u32, signal: &str) -> Result<Duration> {
    let micros = guest.vm.sh(&format!(
        "SECONDS=0; while ((SECONDS < 60)); do \
             read reads writes </sys/block/ublkb0/inflight; ((reads + writes == {DEPTH})) && break; \
         done; \
         kill -{signal} {pid}; begin=${{EPOCHREALTIME/./}}; \
         ((reads + writes == {DEPTH})) || {{ echo \"$((reads + writes)) tags are taken\" >&2; exit 1; }}; \
         for n in $(seq 1200); do \
             test -e /proc/{pid} || {{ echo $((${{EPOCHREALTIME/./}} - begin)); exit; }}; sleep 0.05; \
         done; exit 1"
    ))?;
    Ok(Duration::from_micros(micros.parse().with_context(|| format!("no time: {micros}"))?))
}

#[test]
fn killed_during_a_recovery() -> Result<()> {
    let guest = start()?;
    let pid = guest.serve("memory", "")?;
    let fio = guest.start_fio(NODE, "randtrimwrite", 5)?;
    // fio has begun, and does not end before the kill.
    guest.vm.sh("sleep 2")?;
    guest.end(pid, "KILL")?;
    for _ in 0..2 {
        // It has taken the device over when it dies, and has fetched nothing.
        let dies = "memory_device --volume memory --backing /mem/memory.data --state /mem/memory.state \
                    --fault killed";
        let output = guest.vm.run(&format!("{dies} --size {SIZE_BYTES}"))?;
        ensure!(output.status == 137, "{output}");
    }
    let pid = guest.serve("memory", "")?;
    let output = fio.wait(10 * MINUTE)?;
    ensure!(output.success(), "fio: {output}");
    guest.end(pid, "TERM")?;
    guest.no_io_errors()
}

/// Before Linux 6.15 the driver takes no other process after that, unless it has noticed the death before.
#[test]
fn killed_between_mapping_and_fetching() -> Result<()> {
    let guest = start()?;
    let vm = &guest.vm;
    let pid = guest.serve("memory", "")?;
    let waiting = vm.spawn(&format!(
        "dd if={NODE} of=/dev/null bs=4k count=1 iflag=direct status=none; kill -KILL {pid}; touch \
         /mem/killed; dd if=/dev/zero of={NODE} bs=4k count=1 oflag=direct"
    ))?;
    vm.sh("for n in $(seq 600); do test -e /mem/killed && exit; sleep 0.05; done; exit 1")?;
    let dies = guest.command("memory", "--fault mapped");
    let output = vm.run(&dies)?;
    ensure!(output.status == 137, "{output}");
    // At once, not when START_LIMIT is over.
    let output = vm.run(&format!("timeout --signal=KILL 25 {}", guest.command("memory", "")))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    // On a busy machine the driver may have noticed the death by itself. Then it takes the next process,
    // which serves until its time is over.
    let is_taken = output.status == 137 && String::from_utf8_lossy(&output.stdout).contains("\"device\"");
    if !is_taken {
        ensure!(output.status == 1 && stderr.contains("resume the device ublkb0 of memory"), "{output}");
        ensure!(stderr.contains("a process died after it had mapped them"), "{output}");
        ensure!(stderr.contains("Detach the volume"), "{output}");
    }
    // As a detachment and the next attachment do.
    vm.sh("rm /mem/memory.state")?;
    let pid = guest.serve("memory", "")?;
    let output = waiting.wait(MINUTE)?;
    ensure!(output.success() == is_taken, "a write to the device that was removed: {output}");
    vm.sh(&format!("dd if={NODE} of=/dev/null bs=1M count=1 iflag=direct status=none"))?;
    guest.end(pid, "TERM")
}

#[test]
fn killed_between_mapping_and_fetching_on_the_newest_kernel() -> Result<()> {
    let guest = Guest::start(Kernel::Newest, "ublk")?;
    let pid = guest.serve("memory", "")?;
    let fio = guest.start_fio(NODE, "randwrite", 5)?;
    // fio has begun, and does not end before the kill.
    guest.vm.sh("sleep 2")?;
    guest.end(pid, "KILL")?;
    let output = guest.vm.run(&guest.command("memory", "--fault mapped"))?;
    ensure!(output.status == 137, "{output}");
    let pid = guest.serve("memory", "")?;
    let output = fio.wait(10 * MINUTE)?;
    ensure!(output.success(), "fio: {output}");
    guest.end(pid, "TERM")?;
    guest.no_io_errors()
}

/// The process lives, but does not run.
#[test]
fn a_living_process_keeps_its_device_and_its_state_is_logged() -> Result<()> {
    let guest = start()?;
    let vm = &guest.vm;
    let pid = guest.serve("memory", "")?;
    vm.sh(&format!("kill -STOP {pid}"))?;
    let waiting = vm.spawn(&format!("dd if=/dev/zero of={NODE} bs=4k count=1 oflag=direct"))?;
    guest.waits_for_disk("dd")?;
    let reason = format!("process {pid}, which must have ended: the driver still waits for it (state LIVE");
    take_over_fails(&guest, &reason, (pid, "memory_device"))?;
    vm.sh(&format!("kill -CONT {pid}"))?;
    let output = waiting.wait(MINUTE)?;
    ensure!(output.success(), "a write to a device whose process was stopped: {output}");
    guest.end(pid, "TERM")?;
    guest.no_io_errors()
}

#[test]
fn an_open_device_of_a_dead_process_is_not_taken_over() -> Result<()> {
    open_in_another_process(Kernel::Ublk, |pid| format!("process {pid}, which must have ended"))
}

/// From Linux 6.15 on, the state is LIVE until the character device is closed.
#[test]
fn an_open_device_of_a_dead_process_is_not_taken_over_on_the_newest_kernel() -> Result<()> {
    open_in_another_process(Kernel::Newest, |_| "a process that has ended".to_owned())
}

fn open_in_another_process(kernel: Kernel, server: fn(u32) -> String) -> Result<()> {
    let guest = Guest::start(kernel, "ublk")?;
    let vm = &guest.vm;
    let pid = guest.serve("memory", "")?;
    // pidfd_open(2) and pidfd_getfd(2): a copy of the descriptor of the process.
    let copy = r#"$pid = syscall(434, shift() + 0, 0); $copy = syscall(438, $pid, shift() + 0, 0); die $! if $copy < 0;
        open($file, ">", "/mem/holder"); print $file $$; close $file; sleep 1000"#;
    let holder = vm.spawn(&format!(
        "exec perl -e '{copy}' {pid} $(find /proc/{pid}/fd -lname /dev/ublkc0 -printf '%f ' | cut -d ' ' -f \
         1)"
    ))?;
    vm.sh("for n in $(seq 600); do test -s /mem/holder && exit; sleep 0.05; done; exit 1")?;
    let holder_pid = vm.sh("cat /mem/holder")?.parse()?;
    vm.sh(&format!("kill -STOP {pid}"))?;
    let waiting = vm.spawn(&format!("dd if=/dev/zero of={NODE} bs=4k count=1 oflag=direct"))?;
    guest.waits_for_disk("dd")?;
    guest.end(pid, "KILL")?;
    let reason = format!("{}: the character device is still open", server(pid));
    take_over_fails(&guest, &reason, (holder_pid, "perl"))?;
    vm.sh(&format!("kill -KILL {holder_pid}"))?;
    holder.wait(MINUTE)?;
    let pid = guest.serve("memory", "")?;
    let output = waiting.wait(MINUTE)?;
    ensure!(output.success(), "a write that has waited: {output}");
    guest.end(pid, "TERM")?;
    guest.no_io_errors()
}

/// Checks that a second process gives up, with the reason, and that the log has the state of the device. That
/// is its request, the holder of its character device, and the stack of that process.
fn take_over_fails(guest: &Guest, reason: &str, (pid, command): (u32, &str)) -> Result<()> {
    guest.vm.sh("mountpoint -q /sys/kernel/debug || mount -t debugfs debugfs /sys/kernel/debug")?;
    let output = guest.vm.command(&guest.command("memory", "")).limit(3 * MINUTE).run()?;
    let log = String::from_utf8_lossy(&output.stderr);
    println!("{log}");
    ensure!(output.status == 1, "{output}");
    for part in [
        format!("take over ublkb0 of memory from {reason}").as_str(),
        "stuck device: /sys/kernel/debug/block/ublkb0/hctx0/tags:",
        "nr_tags=128",
        ".op=WRITE",
        &format!("stuck device: process {pid} ({command}) has ublkc0 open"),
        &format!("stuck device: stack of thread {pid} ({command}) of process {pid}:"),
        "stuck device:     [<0>] ",
    ] {
        ensure!(log.contains(part), "{part}: {log}");
    }
    Ok(())
}

#[test]
fn a_start_that_hangs_ends_with_an_error() -> Result<()> {
    let guest = start()?;
    let vm = &guest.vm;
    // START_DEV waits until all tags are fetched; here no process fetches any.
    let output = vm.run(&format!(
        "time timeout --signal=KILL 90 memory_device --volume memory --size {SIZE_BYTES} --backing \
         /mem/memory.data --state /mem/memory.state --frontend ublk --fault stalled"
    ))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status == 1 && stderr.contains("start the device ublkb0"), "{output}");
    ensure!(stderr.contains("no answer within 30s"), "{output}");
    ensure!(stderr.contains("0 of 2 have fetched their tags"), "{output}");
    let pid = guest.serve("memory", "")?;
    ensure!(vm.sh("ls /sys/class/ublk-char | wc -l")? == "1", "the device that never started is still there");
    guest.end(pid, "TERM")?;
    guest.no_io_errors()
}

/// Checks that no command to the driver is lost when its process is stopped for a moment. A debugger or the
/// freezer of control groups does that. The wait for the command ends then, and the command does not.
#[test]
fn paused_again_and_again_during_a_start() -> Result<()> {
    let guest = start()?;
    let command = guest.command("memory", "");
    for round in 0..12 {
        let script = format!(
            "rm -f /mem/memory.out; {command} </dev/null >/mem/memory.out 2>/mem/memory.err & pid=$!; \
             for n in $(seq 400); do \
                 kill -STOP $pid && kill -CONT $pid || break; grep -q device /mem/memory.out && break; \
             done; \
             for n in $(seq 1200); do \
                 grep -q device /mem/memory.out && break; \
                 kill -0 $pid || {{ cat /mem/memory.err >&2; exit 1; }}; \
                 sleep 0.05; \
             done; \
             kill -TERM $pid && wait $pid"
        );
        let output = guest.vm.command(&script).limit(2 * MINUTE).run()?;
        ensure!(output.success(), "round {round}: {output}");
    }
    guest.no_io_errors()
}

#[test]
fn a_start_on_a_kernel_without_ublk_names_the_missing_module() -> Result<()> {
    let guest = Guest::start(Kernel::Nbd, "ublk")?;
    let device =
        format!("memory_device --size {SIZE_BYTES} --backing /mem/memory.data --state /mem/memory.state");
    let output = guest.vm.run(&format!("{device} --frontend ublk"))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.success() && stderr.contains("kernel module ublk_drv"), "{output}");
    ensure!(stderr.contains("CONFIG_BLK_DEV_UBLK"), "{output}");
    // For any choice, the report says of each frontend whether it works.
    ensure!(stderr.contains("ublk: does not work: ") && stderr.contains("nbd: works: "), "{output}");
    Ok(())
}

#[test]
fn devices_belong_to_their_volumes() -> Result<()> {
    let guest = start()?;
    let vm = &guest.vm;
    let first = guest.serve("memory", "")?;
    // A record from before a restart of the host: its number is another volume's now.
    vm.sh("cp /mem/memory.state /mem/other.state")?;
    let other = guest.serve("other", "")?;
    ensure!(
        vm.sh("cat /mem/other.state")?.contains(r#""kernel_id":1"#),
        "took over the device of another volume"
    );
    ensure!(vm.sh("ls /dev/longhorn")? == "memory\nother");

    // A second server of the same volume, which knows nothing of the first.
    let output = vm.run(&format!(
        "memory_device --volume memory --size {SIZE_BYTES} --backing /mem/second.data --state \
         /mem/second.state --frontend ublk"
    ))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.success() && stderr.contains(&format!("process {first} serves ublkb0")), "{output}");

    // The record is lost: the old device must not be taken over, as its requests are from another time.
    guest.end(first, "KILL")?;
    vm.sh("rm /mem/memory.state")?;
    let waiting = vm.spawn(&format!("dd if=/dev/zero of={NODE} bs=4k count=1 oflag=direct"))?;
    guest.waits_for_disk("dd")?;
    let first = guest.serve("memory", "")?;
    let output = waiting.wait(MINUTE)?;
    ensure!(!output.success(), "a write to the device that was removed: {output}");
    ensure!(vm.sh("ls /sys/class/ublk-char | wc -l")? == "2");
    guest.end(other, "TERM")?;
    guest.end(first, "TERM")?;
    ensure!(vm.sh("ls /sys/class/ublk-char | wc -l")? == "0");
    ensure!(vm.sh("ls -A /dev/longhorn")?.is_empty());
    Ok(())
}
