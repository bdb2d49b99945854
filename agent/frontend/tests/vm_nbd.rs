//! The frontend nbd on real kernels, in a virtual machine: most of them on Debian 12's, which has no ublk.
//! These tests fail if VMs cannot run.

mod guest;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use guest::{Guest, KEEP, MINUTE, NODE, REQUEST_LIMIT, SIZE_BYTES};
use shorthorn_vmkit::Kernel;

fn start() -> Result<Guest> {
    Guest::start(Kernel::Nbd, "nbd")
}

/// Checks the limits. A child process of the server does that, soon after the device is ready.
fn requests_are_limited(guest: &Guest) -> Result<()> {
    let is_limited = "test $(cat /sys/block/nbd0/queue/max_sectors_kb) = 1024";
    let wait = format!("for n in $(seq 600); do {is_limited} && exit; sleep 0.05; done; exit 1");
    guest.vm.sh(&wait).map(drop).context("the size of requests is not limited to 1 MiB")
}

/// On Linux 6.1: a device in use grows before Linux 6.9.
#[test]
fn the_block_layer_shows_the_exported_limits_and_grows() -> Result<()> {
    let guest = start()?;
    let pid = guest.serve("memory", "--queues 4 --depth 64")?;
    requests_are_limited(&guest)?;
    let read = |file: &str| guest.vm.sh(&format!("cat /sys/block/nbd0/{file}"));
    for (file, expected) in [
        ("size", "786432"),
        ("ro", "0"),
        ("backend", "shorthorn:memory"),
        ("queue/logical_block_size", "512"),
        ("queue/write_cache", "write back"),
        ("queue/fua", "1"),
        ("queue/rotational", "0"),
    ] {
        let found = read(file)?;
        ensure!(found == expected, "{file} is {found}, not {expected}");
    }
    ensure!(read("queue/discard_max_bytes")?.parse::<u64>()? > 0);
    // Connections beyond the number of processors are spare.
    let (queues, cpus) = (guest.vm.sh("ls /sys/block/nbd0/mq | wc -l")?, guest.vm.sh("nproc")?);
    ensure!(queues == cpus, "{queues} queues on {cpus} processors");
    let record = guest.vm.sh("cat /mem/memory.state")?;
    ensure!(record.contains(r#""kernel_id":0,"queues":4,"depth":64"#), "{record}");
    let node = guest.vm.sh(&format!("stat -c '%F %a %G %Hr:%Lr' {NODE}"))?;
    let number = read("dev")?;
    ensure!(node == format!("block special file 660 disk {number}"), "{node}");

    ensure!(guest.ask(pid, "USR2")? == "used: by no process");
    guest.vm.sh(&format!("mkfs.ext4 -q {NODE} && mkdir /mnt/m && mount {NODE} /mnt/m"))?;
    ensure!(guest.ask(pid, "USR2")? == "used: mounted at /mnt/m");
    let fio = guest.start_fio("/mnt/m/file", "randwrite", 5)?;
    let grown = SIZE_BYTES + (64 << 20);
    let said = guest.ask(pid, "USR1")?;
    ensure!(said == format!("the volume has {grown} bytes"), "{said}");
    ensure!(read("size")? == (grown / 512).to_string());
    let output = fio.wait(5 * MINUTE)?;
    ensure!(output.success(), "fio: {output}");
    guest.vm.sh(&format!("resize2fs {NODE} && umount /mnt/m && fsck.ext4 -fn {NODE}"))?;

    guest.end(pid, "TERM")?;
    guest.vm.sh(&format!("test ! -e {NODE} && test ! -e /sys/block/nbd0/pid"))?;
    guest.no_io_errors()
}

/// On Linux 6.12: the driver freezes the queue for a change of the size.
#[test]
fn a_live_device_keeps_its_size_if_the_driver_would_freeze_it() -> Result<()> {
    let guest = Guest::start(Kernel::Ublk, "nbd")?;
    let has_bytes = |bytes: u64| -> Result<()> {
        let sectors = guest.vm.sh("cat /sys/block/nbd0/size")?;
        ensure!(sectors == (bytes / 512).to_string(), "{sectors} sectors, and not {bytes} bytes");
        Ok(())
    };
    let pid = guest.serve("memory", "--queues 1")?;
    let fio = guest.start_endless_fio(NODE)?;
    requests_are_in_flight(&guest)?;
    guest.vm.sh(&format!(
        "kill -USR1 {pid}; for n in $(seq 600); do grep -q 'volume has' /mem/memory.err && exit; sleep 0.05; \
         done; exit 1"
    ))?;
    let said = guest.vm.sh("cat /mem/memory.err")?;
    ensure!(said.contains("cannot resize a device in use"), "{said}");
    has_bytes(SIZE_BYTES)?;
    // The next process knows the new size, and takes the device over with the old one.
    guest.end(pid, "KILL")?;
    let grown = SIZE_BYTES + (64 << 20);
    let larger = format!("--queues 1 --size {grown}");
    let pid = guest.serve("memory", &larger)?;
    let said = guest.vm.sh("cat /mem/memory.err")?;
    ensure!(said.contains("the device keeps its size"), "{said}");
    has_bytes(SIZE_BYTES)?;
    guest.end_fio(fio)?;
    guest.end(pid, "TERM")?;
    let pid = guest.serve("memory", &larger)?;
    has_bytes(grown)?;
    guest.end(pid, "TERM")?;
    guest.no_io_errors()
}

/// On a kernel whose driver knows WRITE_ZEROES: Linux 6.12 or later.
#[test]
fn every_request_has_its_effect() -> Result<()> {
    let guest = Guest::start(Kernel::Ublk, "nbd")?;
    let vm = &guest.vm;
    // The kernel writes nothing back by itself for an hour. 0 would have it look at once for too many dirty
    // pages.
    vm.sh("cd /proc/sys/vm && echo 360000 | tee dirty_writeback_centisecs >dirty_expire_centisecs")?;
    let pid = guest.serve("memory", "")?;
    requests_are_limited(&guest)?;
    // As large as the driver can, as small as it can.
    vm.sh(&format!(
        "echo 32768 >/sys/block/nbd0/queue/max_sectors_kb && \
         head -c 64M /dev/urandom >/mem/random && \
         dd if=/mem/random of={NODE} bs=32M oflag=direct status=none && \
         dd if={NODE} of=/mem/back bs=32M count=2 iflag=direct status=none && cmp /mem/random /mem/back && \
         dd if=/mem/random of={NODE} bs=3584 count=512 seek=20000 oflag=direct,dsync status=none && \
         cmp -n 67108864 /mem/random {NODE} && \
         cmp -n 1835008 /mem/random <(dd if={NODE} bs=3584 skip=20000 count=512 iflag=direct status=none)"
    ))?;
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
    // Buffered writes without a flush, of a process that has the device open.
    let writer = vm.spawn(&format!(
        "exec 3<>{NODE}; head -c 8M /mem/random >&3; touch /mem/written; for n in $(seq 1200); do test -e \
         /mem/enough && exit; sleep 0.05; done"
    ))?;
    vm.sh("for n in $(seq 1200); do test -e /mem/written && exit; sleep 0.05; done; exit 1")?;
    ensure!(
        !vm.run("cmp -n 8388608 /mem/random /mem/memory.data")?.success(),
        "nothing is left to be written"
    );
    vm.sh(&format!(
        "kill -TERM {pid}; for n in $(seq 1200); do test -e {NODE} || exit 0; sleep 0.05; done; exit 1"
    ))?;
    let written = "cmp -n 8388608 /mem/random /mem/memory.data";
    vm.sh(&format!("for n in $(seq 1200); do {written} && exit; sleep 0.05; done; {written}"))?;
    vm.sh("touch /mem/enough")?;
    writer.wait(MINUTE)?;
    guest.wait_for_end(pid)?;
    guest.no_io_errors()
}

/// Checks the timer. A child process of the server does that, soon after a device of one queue is ready.
fn timer_is_short(guest: &Guest) -> Result<()> {
    let is_short = "test $(cat /sys/block/nbd0/queue/io_timeout) = 2000";
    let wait = format!("for n in $(seq 600); do {is_short} && exit; sleep 0.05; done; exit 1");
    guest.vm.sh(&wait).map(drop).context("the timer of requests is not 2 s")
}

/// Waits until the kernel has sent requests that are not answered yet.
fn requests_are_in_flight(guest: &Guest) -> Result<()> {
    guest.vm.sh(
        "for n in $(seq 1200); do grep -q '[1-9]' /sys/block/nbd0/inflight && exit; sleep 0.05; done; exit 1",
    )?;
    Ok(())
}

fn kernel_lines(guest: &Guest, pattern: &str) -> Result<usize> {
    Ok(guest.vm.sh(&format!("dmesg | grep -cE '{pattern}' || true"))?.parse()?)
}

#[test]
fn killed_under_load_and_back_without_an_error() -> Result<()> {
    killed_under_load(Kernel::Nbd)
}

#[test]
fn killed_under_load_and_back_without_an_error_on_the_newest_kernel() -> Result<()> {
    killed_under_load(Kernel::Newest)
}

fn killed_under_load(kernel: Kernel) -> Result<()> {
    let guest = Guest::start(kernel, "nbd")?;
    let mut pid = guest.serve("memory", "--queues 1")?;
    timer_is_short(&guest)?;
    guest.vm.sh(&format!("mkfs.ext4 -q {NODE} && mkdir /mnt/m && mount {NODE} /mnt/m"))?;
    let fio = guest.start_endless_fio("/mnt/m/file")?;
    let mut longest_restart = Duration::ZERO;
    for _ in 0..4 {
        // The load runs twice as long as the timer of requests.
        guest.vm.sh("sleep 4")?;
        requests_are_in_flight(&guest)?;
        let begin = Instant::now();
        guest.end(pid, "KILL")?;
        pid = guest.serve("memory", "--queues 1")?;
        longest_restart = longest_restart.max(begin.elapsed());
    }
    guest.end_fio(fio)?;
    let (worst, resent) = (guest.worst_wait("/mem/fio.json")?, kernel_lines(&guest, "Possible stuck")?);
    println!("worst wait {worst:?}, longest restart {longest_restart:?}, {resent} times a timer ran out");
    ensure!(resent > 0, "no request was in flight at a kill: the test shows nothing");
    ensure!(worst < longest_restart + REQUEST_LIMIT, "a request has waited {worst:?}");
    guest.vm.sh("umount /mnt/m")?;
    guest.vm.sh(&format!("fsck.ext4 -fn {NODE}"))?;
    guest.end(pid, "TERM")?;
    guest.no_io_errors()
}

#[test]
fn several_queues_are_back_after_the_request_time_out() -> Result<()> {
    let guest = start()?;
    let pid = guest.serve("memory", "--queues 2")?;
    let fio = guest.start_endless_fio(NODE)?;
    requests_are_in_flight(&guest)?;
    guest.end(pid, "KILL")?;
    let pid = guest.serve("memory", "--queues 2")?;
    guest.end_fio(fio)?;
    let replaced = kernel_lines(&guest, "reconnected socket")?;
    // On a slow machine a timer may run out for one of the new connections too.
    ensure!(replaced >= 2, "{replaced} connections were replaced, not two");
    guest.end(pid, "TERM")?;
    guest.no_io_errors()
}

#[test]
fn a_server_that_hangs_keeps_its_connection() -> Result<()> {
    let guest = start()?;
    let pid = guest.serve("memory", "--queues 1")?;
    timer_is_short(&guest)?;
    // Small requests: while the socket is full, no timer runs out.
    let fio = guest
        .vm
        .command(&format!(
            "fio --name=small --filename={NODE} --rw=randrw --bs=4k --direct=1 --ioengine=libaio \
             --iodepth=16 --time_based --runtime=30 --output-format=json --output=/mem/fio.json"
        ))
        .limit(10 * MINUTE)
        .spawn()?;
    requests_are_in_flight(&guest)?;
    guest.vm.sh(&format!("kill -STOP {pid}; sleep 20; kill -CONT {pid}"))?;
    let output = fio.wait(10 * MINUTE)?;
    ensure!(output.success(), "fio: {output}");
    let worst = guest.worst_wait("/mem/fio.json")?;
    let ran_out = kernel_lines(&guest, "Possible stuck")?;
    println!("worst wait {worst:?}, {ran_out} times a timer ran out");
    ensure!(ran_out > 0, "no timer ran out: the test shows nothing");
    let lost = kernel_lines(&guest, "timed out|reconnected|send failed|control failed")?;
    ensure!(lost == 0, "the kernel has given up the connection");
    guest.vm.sh(&format!("dd if=/dev/zero of={NODE} bs=1M count=64 oflag=direct status=none"))?;
    guest.end(pid, "TERM")?;
    guest.no_io_errors()
}

#[test]
fn a_server_of_several_queues_that_hangs_gets_its_connections_back() -> Result<()> {
    let guest = Guest::start(Kernel::Ublk, "nbd")?;
    let pid = guest.serve("memory", "--queues 2")?;
    let fio = guest.start_endless_fio(NODE)?;
    requests_are_in_flight(&guest)?;
    guest.vm.sh(&format!("kill -STOP {pid}; sleep 20; kill -CONT {pid}"))?;
    guest.end_fio(fio)?;
    let given_up = kernel_lines(&guest, "Connection timed out")?;
    ensure!(given_up != 0, "no connection was given up: the test shows nothing");
    guest.vm.sh(&format!("dd if=/dev/zero of={NODE} bs=1M count=64 oflag=direct status=none"))?;
    guest.end(pid, "TERM")?;
    guest.no_io_errors()
}

#[test]
fn the_host_reads_no_partition_table() -> Result<()> {
    let guest = start()?;
    let vm = &guest.vm;
    let file = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../systemd").join(name);
    vm.push(&[(file("udev/rules.d/59-shorthorn.rules"), "/etc/udev/rules.d/59-shorthorn.rules", 0o644)])?;
    vm.sh("udevadm control --reload")?;
    // As on a host that had loaded the driver before the installation.
    vm.sh("modprobe -r nbd && modprobe nbd max_part=16")?;
    let pid = guest.serve("memory", "")?;
    let log = vm.sh("cat /mem/memory.err")?;
    ensure!(log.contains("reads partition tables") && log.contains("modprobe nbd max_part=0"), "{log}");
    // One partition of 64 MiB, which begins at 1 MiB.
    let table =
        r#"print "\0" x 446, pack("C8VV", 0, 0, 2, 0, 0x83, 0, 0, 0, 2048, 131072), "\0" x 48, "\x55\xaa""#;
    vm.sh(&format!("perl -e '{table}' | dd of={NODE} bs=512 conv=fsync status=none"))?;
    guest.end(pid, "TERM")?;
    let pid = guest.serve("memory", "")?;
    vm.sh("udevadm settle && test -e /sys/block/nbd0/nbd0p1")
        .context("the driver reads no table in any case")?;
    guest.end(pid, "TERM")?;

    vm.push(&[(file("modprobe.d/shorthorn.conf"), "/etc/modprobe.d/shorthorn.conf", 0o644)])?;
    vm.sh("udevadm settle && modprobe -r nbd")?;
    let pid = guest.serve("memory", "")?;
    vm.sh("udevadm settle && test -e /sys/block/nbd0/pid && ! test -e /sys/block/nbd0/nbd0p1")?;
    let log = vm.sh("cat /mem/memory.err")?;
    ensure!(!log.contains("reads partition tables"), "{log}");
    // udev reads the partition then.
    vm.sh("partx -a /dev/nbd0 && test -e /sys/block/nbd0/nbd0p1 && udevadm settle")
        .context("on demand they are there")?;
    guest.end(pid, "TERM")?;
    guest.no_io_errors()
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

    // A second server of the same volume, with the record and without it.
    for state in ["/mem/memory.state", "/mem/none.state"] {
        let output = vm.run(&guest.command("memory", &format!("--state {state}")))?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(!output.success() && stderr.contains("another process serves it"), "{output}");
    }
    vm.sh(&format!("dd if={NODE} of=/dev/null bs=1M count=1 iflag=direct status=none"))?;

    // It dies between asking for the device and storing its number.
    guest.end(first, "KILL")?;
    vm.sh(r#"sed -i 's/"kernel_id":0/"kernel_id":null/' /mem/memory.state"#)?;
    let first = guest.serve("memory", "")?;
    ensure!(vm.sh("cat /mem/memory.state")?.contains(r#""kernel_id":0"#), "the device was not found");

    // The record is lost: the old device must not be taken over, as its requests are from another time.
    guest.end(first, "KILL")?;
    vm.sh("rm /mem/memory.state")?;
    let waiting = vm.spawn(&format!("dd if=/dev/zero of={NODE} bs=4k count=1 oflag=direct"))?;
    guest.waits_for_disk("dd")?;
    let first = guest.serve("memory", "")?;
    let output = waiting.wait(MINUTE)?;
    ensure!(!output.success(), "a write to the device that was removed: {output}");
    ensure!(vm.sh("grep -l shorthorn:memory /sys/block/nbd*/backend | wc -l")? == "1");
    guest.end(other, "TERM")?;
    guest.end(first, "TERM")?;
    ensure!(vm.sh("ls -A /dev/longhorn")?.is_empty());
    vm.sh("for n in /sys/block/nbd*/pid; do test ! -e $n || exit 1; done")?;
    Ok(())
}
