//! `make demo`: a replicated volume as a block device in a virtual machine, surviving kills.
//! With `--shell`, a root shell in such a machine.

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Parser;
use shorthorn_tests::{NODE, VmHost};
use shorthorn_vmkit::{Kernel, interactive_shell};

const LOAD_LIMIT: Duration = Duration::from_secs(240);

/// Shows a volume of Shorthorn at work in a virtual machine.
#[derive(Debug, Parser)]
struct Arguments {
    /// Only prepares the machine (agent and controller run, a disk is added) and gives a root shell in it.
    #[arg(long)]
    shell: bool,
    /// The kernel of the machine: ublk (Debian 13's, with ublk and NBD), nbd (Debian 12's, with NBD only) or
    /// newest.
    #[arg(long, default_value = "ublk")]
    kernel: String,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // If standard error is closed, no message is possible.
            let _ = writeln!(io::stderr(), "\nThe demonstration failed: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let kernel = match arguments.kernel.as_str() {
        "ublk" => Kernel::Ublk,
        "nbd" => Kernel::Nbd,
        "newest" => Kernel::Newest,
        other => bail!("--kernel {other}: use ublk, nbd or newest"),
    };
    let mut steps = Steps { start: Instant::now(), number: 0 };
    steps.say("Starting a virtual machine with its own Linux kernel, agent and controller")?;
    let host = VmHost::start(VmHost::options(kernel))?;
    if arguments.shell {
        println!("Try: shorthornctl volume create v1 --size 1GiB --soft-anti-affinity");
        println!("     shorthornctl volume attach v1 --node {NODE}; lsblk");
        interactive_shell(&host.vm)?;
        return Ok(());
    }
    show(&host, &mut steps)
}

/// Prints the steps, with the seconds since the start.
struct Steps {
    start: Instant,
    number: u32,
}

impl Steps {
    fn say(&mut self, text: &str) -> Result<()> {
        self.number += 1;
        println!("[{:>3} s] {:>2}. {text}", self.start.elapsed().as_secs(), self.number);
        io::stdout().flush().context("writing to standard output")
    }
}

fn show(host: &VmHost, steps: &mut Steps) -> Result<()> {
    steps.say("Creating volume 'demo': 256 MiB, three replicas (all in this one machine)")?;
    host.ctl("volume create demo --size 256MiB --replicas 3 --soft-anti-affinity")?;
    steps.say("Attaching it: an engine process makes a block device of the three replicas")?;
    host.ctl(&format!("volume attach demo --node {NODE}"))?;
    let volume = host.inspect("demo")?;
    let frontend = volume["engine"]["frontend"].as_str().unwrap_or_default();
    steps.say(&format!("The device is /dev/longhorn/demo, made through {frontend}"))?;
    host.sh("test -b /dev/longhorn/demo")?;
    steps.say("Making an ext4 file system on it, mounting it, writing a file")?;
    host.sh("mkfs.ext4 -q /dev/longhorn/demo && mkdir -p /mnt/demo && mount /dev/longhorn/demo /mnt/demo")?;
    host.sh("head -c 24M /dev/urandom > /mnt/demo/file && sync && sha256sum /mnt/demo/file > /root/sum")?;

    steps.say("Starting a load: fio writes, and reads everything back to check it")?;
    let load = host.spawn(
        "fio --name=load --directory=/mnt/demo --size=16m --rw=randwrite --bs=4k --ioengine=libaio \
         --direct=1 --iodepth=8 --verify=crc32c --verify_fatal=1 --loops=4 --output-format=terse",
    )?;
    let replicas = host.replica_units("demo")?;
    let victim = replicas.first().context("no replica runs")?;
    steps.say("Killing one replica with kill -9 under the load: the other two continue")?;
    host.kill(victim)?;
    wait_for_degraded(host)?;
    steps.say(
        "Killing the engine with kill -9 under the load: systemd starts it again, the device recovers",
    )?;
    host.kill("shorthorn-engine@demo.service")?;
    host.finish(load, LOAD_LIMIT)?;
    steps.say("fio has finished: not one error, every block read back right")?;
    host.sh("echo 3 > /proc/sys/vm/drop_caches && sha256sum --check --quiet /root/sum")?;
    steps.say("The file is right too")?;

    steps.say("Detaching, attaching again, reading the file once more")?;
    host.sh("umount /mnt/demo")?;
    host.ctl("volume detach demo")?;
    host.sh("test ! -e /dev/longhorn/demo")?;
    host.ctl(&format!("volume attach demo --node {NODE}"))?;
    host.sh("mount /dev/longhorn/demo /mnt/demo && sha256sum --check --quiet /root/sum && umount /mnt/demo")?;
    host.ctl("volume detach demo")?;
    steps.say("Deleting the volume")?;
    host.ctl("volume delete demo --yes")?;
    println!("Done: everything that was written was there.");
    Ok(())
}

/// Waits until the volume is degraded: the controller learns of the loss a moment after the engine has acted
/// on it.
fn wait_for_degraded(host: &VmHost) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let volume = host.inspect("demo")?;
        if volume["robustness"] == "degraded" {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("the volume is {} a minute after the loss of a replica", volume["robustness"]);
        }
    }
}
