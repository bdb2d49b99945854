//! `shorthorn-vm`: the test VMs by hand.
#![allow(clippy::print_stderr, reason = "a program for the command line")]

use std::env;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use shorthorn_vmkit::{
    DataDisk, FileSystem, Image, Kernel, Vm, VmOptions, check_template, interactive_shell, prepare,
    print_output,
};

const USAGE: &str = "\
Usage: shorthorn-vm COMMAND

  prepare [OPTIONS]         build the disk image and bake the templates
  check                     start a VM of each template and check it
  shell [OPTIONS]           a root shell in a new VM
  run [OPTIONS] -- CMD ...  run one command in a new VM, end with its exit status

Options of prepare:
  --refresh                 build a new image with the newest packages
  --kernel KERNEL           only the template of that kernel

Options of shell and run:
  --kernel KERNEL           ublk (Debian 13's, the default), nbd (Debian 12's),
                            newest, or iscsi (neither driver)
  --push HOST:GUEST         copy a file or a folder into the VM (repeatable)
  --data-disk ext4|xfs      a disk of 16 GiB at /var/lib/longhorn
  --icount                  virtual time counts instructions
  --memory MIB              memory of the VM
  --cold                    boot instead of cloning a template
  --time-limit SECONDS      for run (default: 3600)
";

const DATA_DISK_MIB: u64 = 16 * 1024;

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match command(&arguments) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("shorthorn-vm: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn command(arguments: &[String]) -> Result<ExitCode> {
    let Some((name, rest)) = arguments.split_first() else { bail!("no command\n\n{USAGE}") };
    match name.as_str() {
        "prepare" => prepare_all(rest),
        "check" => check(),
        "shell" => shell(&Options::parse(rest)?),
        "run" => run(&Options::parse(rest)?),
        "help" | "--help" | "-h" => {
            print!("{USAGE}");
            Ok(ExitCode::SUCCESS)
        }
        other => bail!("unknown command {other}\n\n{USAGE}"),
    }
}

fn prepare_all(arguments: &[String]) -> Result<ExitCode> {
    let (mut only, mut refreshes) = (None, false);
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "--refresh" => refreshes = true,
            "--kernel" => only = Some(kernel_named(rest.next().context("--kernel needs a value")?)?),
            other => bail!("prepare does not know {other}\n\n{USAGE}"),
        }
    }
    if refreshes {
        Image::refresh()?;
    }
    let started = Instant::now();
    let image = Image::open()?;
    eprintln!("image {}: {:.1} s", image.dir().display(), started.elapsed().as_secs_f32());
    prepare(&image, only, |line| eprintln!("{line}"))?;
    image.remove_others()?;
    Ok(ExitCode::SUCCESS)
}

fn kernel_named(name: &str) -> Result<Kernel> {
    Kernel::from_name(name).with_context(|| format!("{name} is not ublk, nbd, newest or iscsi"))
}

fn check() -> Result<ExitCode> {
    for kernel in [Kernel::Ublk, Kernel::Nbd, Kernel::Newest] {
        let line = check_template(kernel).with_context(|| format!("the {kernel} template"))?;
        println!("{line}");
    }
    Ok(ExitCode::SUCCESS)
}

fn shell(options: &Options) -> Result<ExitCode> {
    if !options.command.is_empty() {
        bail!("shell takes no command");
    }
    let vm = options.start()?;
    exit_code(interactive_shell(&vm)?)
}

fn run(options: &Options) -> Result<ExitCode> {
    if options.command.is_empty() {
        bail!("no command to run after --");
    }
    let vm = options.start()?;
    let argv: Vec<&str> = options.command.iter().map(String::as_str).collect();
    // One word is a line for the shell, more are a program with its arguments.
    let command = match argv.as_slice() {
        [line] => vm.command(line),
        argv => vm.command_argv(argv),
    };
    exit_code(command.limit(options.time_limit).run_streaming(print_output)?.status)
}

fn exit_code(status: i32) -> Result<ExitCode> {
    u8::try_from(status).map(ExitCode::from).context("the exit status is out of range")
}

struct Options {
    vm: VmOptions,
    push: Vec<(String, String)>,
    time_limit: Duration,
    command: Vec<String>,
}

impl Options {
    fn parse(arguments: &[String]) -> Result<Self> {
        let mut kernel = Kernel::Ublk;
        let mut settings: Vec<Box<dyn Fn(VmOptions) -> VmOptions>> = Vec::new();
        let mut push = Vec::new();
        let mut time_limit = Duration::from_secs(3600);
        let mut command = Vec::new();
        let mut words = arguments.iter();
        while let Some(word) = words.next() {
            let mut value = || words.next().with_context(|| format!("{word} needs a value\n\n{USAGE}"));
            match word.as_str() {
                "--kernel" => kernel = kernel_named(value()?)?,
                "--push" => {
                    let pair = value()?;
                    let (host, guest) =
                        pair.split_once(':').with_context(|| format!("{pair} is not HOST:GUEST"))?;
                    push.push((host.to_owned(), guest.to_owned()));
                }
                "--data-disk" => {
                    let file_system = match value()?.as_str() {
                        "ext4" => FileSystem::Ext4,
                        "xfs" => FileSystem::Xfs,
                        other => bail!("{other} is not ext4 or xfs"),
                    };
                    let disk = DataDisk::new(DATA_DISK_MIB, file_system);
                    settings.push(Box::new(move |vm| vm.data_disk(disk.clone())));
                }
                "--icount" => settings.push(Box::new(VmOptions::icount)),
                "--memory" => {
                    let memory_mib = value()?.parse().context("--memory needs a number")?;
                    settings.push(Box::new(move |vm| vm.memory_mib(memory_mib)));
                }
                "--cold" => settings.push(Box::new(VmOptions::cold)),
                "--time-limit" => {
                    let seconds = value()?.parse().context("--time-limit needs a number")?;
                    time_limit = Duration::from_secs(seconds);
                }
                "--" => command = words.by_ref().cloned().collect(),
                other => bail!("unknown option {other}\n\n{USAGE}"),
            }
        }
        let vm = settings.iter().fold(VmOptions::new(kernel), |vm, set| set(vm));
        Ok(Self { vm, push, time_limit, command })
    }

    fn start(&self) -> Result<Vm> {
        let vm = Vm::start(self.vm.clone())?;
        if !self.push.is_empty() {
            let files = self
                .push
                .iter()
                .map(|(host, guest)| Ok((host, guest.as_str(), mode_of(host)?)))
                .collect::<Result<Vec<_>>>()?;
            vm.push(&files)?;
        }
        Ok(vm)
    }
}

fn mode_of(host: &str) -> Result<u32> {
    use std::os::unix::fs::PermissionsExt;
    let metadata = std::fs::metadata(host).with_context(|| format!("cannot read {host}"))?;
    Ok(metadata.permissions().mode() & 0o7777)
}
