//! Tests a power loss of a machine under load, whose disk loses unflushed data. After the restart all durable
//! data is there, and all replicas are equal.
//!
//! The power is cut in two ways. Once the machine is switched off. Once the disk's writes are recorded and
//! replayed up to each acknowledged flush, without any data that was not flushed by then.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use shorthorn_tests::{NODE, ReadyAnnouncement, VmHost, until};
use shorthorn_vmkit::{DataDisk, Durability, FileSystem, Kernel, Output, RunningCommand};

const LIMIT: Duration = Duration::from_secs(300);
const CUTS: u32 = 2;

#[test]
fn flushed_data_survives_power_cuts() -> Result<()> {
    let disk = DataDisk::new(4096, FileSystem::Ext4).durability(Durability::VolatileCache);
    let mut host = VmHost::start(VmHost::options(Kernel::Ublk).data_disk(disk))?;
    push_scripts(&host)?;
    for volume in ["raw", "files"] {
        host.ctl(&format!("volume create {volume} --size 128MiB --replicas 3 --soft-anti-affinity"))?;
        host.ctl(&format!("volume attach {volume} --node {NODE}"))?;
    }
    host.sh(
        "mkfs.ext4 -q /dev/longhorn/files && mkdir -p /mnt/files && mount /dev/longhorn/files /mnt/files",
    )?;
    // The programs and the configuration are on the root disk: they are not under test.
    host.sh("sync")?;
    for cut in 0..CUTS {
        let writers = start_writers(&host, cut)?;
        let heard = cut_under_load(&mut host, writers)?;
        boot_again(&mut host)?;
        for (writer, heard) in &heard {
            host.sh(&format!("/root/writer.py check {writer} {heard}"))
                .with_context(|| format!("after power cut {cut}"))?;
        }
        println!("power cut {cut}: durable rounds {:?}", heard.map(|(_, heard)| heard));
    }
    host.sh("umount /mnt/files")?;
    for volume in ["raw", "files"] {
        host.ctl(&format!("volume detach {volume}"))?;
        replicas_are_equal(&host, &format!("/var/lib/longhorn/replicas/{volume}-*"))
            .with_context(|| volume.to_owned())?;
    }
    Ok(())
}

fn push_scripts(host: &VmHost) -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vm_power");
    let files = [
        (folder.join("writer.py"), "/root/writer.py", 0o755),
        (folder.join("replay.py"), "/root/replay.py", 0o755),
    ];
    host.vm.push(&files)
}

/// The name of a writer, and its process.
type Writer = (String, RunningCommand);

fn start_writers(host: &VmHost, cut: u32) -> Result<[Writer; 3]> {
    let (first, second) = (2 * cut, 2 * cut + 1);
    let start = |what: String| -> Result<Writer> {
        let running = host.spawn(&format!("exec /root/writer.py write {what}"))?;
        Ok((what, running))
    };
    Ok([
        start(format!("device /dev/longhorn/raw {first}"))?,
        start(format!("device /dev/longhorn/raw {second}"))?,
        start(format!("files /mnt/files {cut}"))?,
    ])
}

/// Cuts the power while all writers write; returns the last durable mark of each writer.
fn cut_under_load(host: &mut VmHost, writers: [Writer; 3]) -> Result<[(String, u32); 3]> {
    // Not always at the same place: somewhere between a few rounds and a few more.
    let rounds = fastrand::u32(3..24);
    until("durable rounds", LIMIT, || {
        for (what, running) in &writers {
            let heard = last_round(&running.output_so_far())?;
            ensure!(heard >= rounds, "{what}: {heard} of {rounds} rounds");
        }
        Ok(Some(()))
    })
    .with_context(|| host.journal())?;
    host.vm.power_cut()?;
    let heard = |(what, running): Writer| -> Result<(String, u32)> {
        Ok((what, last_round(&running.output_so_far())?))
    };
    let [first, second, third] = writers;
    Ok([heard(first)?, heard(second)?, heard(third)?])
}

/// Returns the last line that is whole.
fn last_round(output: &Output) -> Result<u32> {
    let text = String::from_utf8_lossy(&output.stdout);
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().next_back().map_or(Ok(0), |line| line.parse()).with_context(|| output.text())
}

fn boot_again(host: &mut VmHost) -> Result<()> {
    let started = Instant::now();
    host.vm.cold_start()?;
    host.sh("systemctl start shorthorn-agent shorthorn-controller")?;
    for volume in ["raw", "files"] {
        until("healthy volume", LIMIT, || {
            // Until it has seen the agent, the controller shows the state before the cut: the device says
            // more.
            let shown = host.inspect(volume)?;
            ensure!(shown["state"] == "attached" && shown["robustness"] == "healthy", "{shown:#}");
            Ok(host.vm.run(&format!("test -b /dev/longhorn/{volume}"))?.success().then_some(()))
        })
        .with_context(|| host.journal())?;
    }
    println!("booted and attached again after {:.1} s", started.elapsed().as_secs_f32());
    host.sh("mount /dev/longhorn/files /mnt/files").map(drop)
}

/// Compares the content of the three replicas `directories`. Sums take emulated processors several times as
/// long.
fn replicas_are_equal(host: &VmHost, directories: &str) -> Result<()> {
    host.sh(&format!(
        "rm -rf /dev/shm/copies; mkdir /dev/shm/copies; \
         for directory in {directories}; do \
         shorthorn-agent replica export $directory /dev/shm/copies/$(basename $directory); done; \
         set -- /dev/shm/copies/*; test $# = 3 && cmp $1 $2 && cmp $1 $3"
    ))
    .map(drop)
    .context("replicas differ")
}

const REPLAYS: u32 = 2;

#[test]
fn every_flush_is_a_point_to_start_from() -> Result<()> {
    let host = VmHost::bare(VmHost::options(Kernel::Ublk).data_disk(DataDisk::blank(4096)))?;
    push_scripts(&host)?;
    // The first 256 MiB are recorded, the record is behind them.
    host.sh(&format!(
        "modprobe -a dm_log_writes loop && mkdir -p /mnt/disk /mnt/ram && mount -t tmpfs -o size=600m tmpfs \
         /mnt/ram && dmsetup create store --table '0 524288 linear {disk} 0' && dmsetup create log --table \
         '0 7340032 linear {disk} 524288' && dmsetup create logged --table '0 524288 log-writes \
         /dev/mapper/store /dev/mapper/log' && mkfs.ext4 -q -b 4096 /dev/mapper/logged && mount \
         /dev/mapper/logged /mnt/disk",
        disk = DataDisk::guest_path()
    ))?;
    let (volume, ready) = run_volume(&host)?;
    let device = ready.device.context("the volume has no device")?;
    let write = |seed: u32, environment: &str| {
        host.spawn(&format!("{environment} exec /root/writer.py write device {} {seed}", device.display()))
    };
    // The second one has writes under way whenever the first one gets the answer that its own are durable.
    let (marker, other) = (write(0, "MARK=logged")?, write(1, "")?);
    until("durable rounds", LIMIT, || {
        let (heard, busy) = (last_round(&marker.output_so_far())?, last_round(&other.output_so_far())?);
        ensure!(heard >= 20 && busy > 0, "{heard} of 20 rounds");
        Ok(Some(()))
    })?;
    let heard = last_round(&marker.output_so_far())?;
    marker.kill();
    other.kill();
    host.sh(&format!("kill -TERM {}", ready.pids.supervisor))?;
    host.finish(volume, LIMIT)?;
    host.sh("umount /mnt/disk && dmsetup remove logged")?;
    for replay in 1..=REPLAYS {
        let mark = fastrand::u32(1..=heard * replay / REPLAYS);
        start_from(&host, mark, heard).with_context(|| format!("replayed to round {mark} of {heard}"))?;
        println!("round {mark} of {heard} is there when nothing later is");
    }
    Ok(())
}

/// Starts the volume from the state of its disk when round `mark` was durable; round `last` came later or is
/// the same.
fn start_from(host: &VmHost, mark: u32, last: u32) -> Result<()> {
    // This acts like a new boot for the replicas: data that they had not made durable is lost.
    host.sh("umount /proc/sys/kernel/random/boot_id 2>/dev/null || true; \
         cat /proc/sys/kernel/random/uuid > /mnt/ram/boot_id; \
         mount --bind /mnt/ram/boot_id /proc/sys/kernel/random/boot_id")?;
    host.sh(&format!(
        "rm -f /mnt/ram/disk; truncate --size 256M /mnt/ram/disk; \
         /root/replay.py /dev/mapper/log /mnt/ram/disk {mark} && mount -o loop /mnt/ram/disk /mnt/disk"
    ))?;
    let (volume, ready) = run_volume(host)?;
    let device = ready.device.context("the volume has no device")?;
    let check = |round: u32| format!("/root/writer.py check device {} 0 {round}", device.display());
    host.sh(&check(mark))?;
    // One later round may have been durable before its mark; several show that nothing was left out.
    ensure!(last < mark + 3 || !host.vm.run(&check(last))?.success(), "round {last} is there too");
    host.sh(&format!("kill -TERM {}", ready.pids.supervisor))?;
    host.finish(volume, LIMIT)?;
    replicas_are_equal(host, "/mnt/disk/volume/replicas/*")?;
    host.sh("umount /mnt/disk").map(drop)
}

fn run_volume(host: &VmHost) -> Result<(RunningCommand, ReadyAnnouncement)> {
    let running = host.spawn(
        "exec shorthorn-agent run v --dir /mnt/disk/volume --size 16MiB --replicas 3 --frontend ublk \
         --replica-timeout-ms 60000",
    )?;
    let ready = until("line that says that the volume is ready", LIMIT, || {
        let output = running.output_so_far();
        let text = String::from_utf8_lossy(&output.stdout);
        let line = text.lines().find(|line| line.starts_with('{')).with_context(|| output.text())?;
        Ok(Some(serde_json::from_str(line)?))
    })?;
    Ok((running, ready))
}
