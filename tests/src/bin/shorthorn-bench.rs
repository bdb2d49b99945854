//! `make bench`: speed, CPU and memory of volumes beside the ceilings of the same machine in the same run.

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Result;
use clap::Parser;
use shorthorn_tests::bench::{
    Measured, Row, Target, TargetKind, VmFigure, WORKLOADS, measure_in_vm, median, print,
};

/// Measures volumes behind the NBD socket beside fio on plain files and an NBD server with one hop.
#[derive(Debug, Parser)]
struct Arguments {
    /// Seconds per measurement.
    #[arg(long, default_value_t = 5)]
    seconds: u32,
    /// How often everything is measured; the table shows medians.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// How much of the volume is used, as fio takes it.
    #[arg(long, default_value = "1g")]
    size: String,
    /// Where the files go: the disk that is measured.
    #[arg(long, default_value = "/var/tmp")]
    dir: PathBuf,
    /// Only the comparison of ublk and NBD in a virtual machine.
    #[arg(long, conflicts_with = "no_vm")]
    only_vm: bool,
    /// Without the comparison of ublk and NBD in a virtual machine.
    #[arg(long)]
    no_vm: bool,
}

const TARGETS: [(&str, TargetKind); 5] = [
    ("fio on 1 file", TargetKind::Files { files: 1 }),
    ("fio on 3 files", TargetKind::Files { files: 3 }),
    ("qemu-nbd, 1 file", TargetKind::OneHop),
    ("shorthorn, 1 replica", TargetKind::Shorthorn { replicas: 1 }),
    ("shorthorn, 3 replicas", TargetKind::Shorthorn { replicas: 3 }),
];

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if !arguments.only_vm {
        on_this_host(&arguments)?;
    }
    if !arguments.no_vm {
        in_a_vm(&arguments)?;
    }
    Ok(())
}

fn on_this_host(arguments: &Arguments) -> Result<()> {
    let mut results = vec![vec![Vec::<Measured>::new(); TARGETS.len()]; WORKLOADS.len()];
    for round in 1..=arguments.rounds {
        for (at, (name, kind)) in TARGETS.iter().enumerate() {
            progress(&format!("round {round} of {}: {name}", arguments.rounds));
            let target = Target::start(*kind, &arguments.dir, &arguments.size)?;
            for (workload, results) in WORKLOADS.iter().zip(&mut results) {
                results[at].push(target.measure(workload, arguments.seconds)?);
            }
        }
    }
    println!(
        "Medians of {} rounds of {} s, {} used. CPU and memory: all server processes, not fio.",
        arguments.rounds, arguments.seconds, arguments.size
    );
    for (workload, results) in WORKLOADS.iter().zip(&results) {
        let medians: Vec<Measured> = results.iter().map(|all| Measured::median(all)).collect();
        let rows: Vec<Row> = TARGETS
            .iter()
            .zip(&medians)
            .map(|((name, kind), measured)| {
                let ceiling = match kind {
                    TargetKind::Shorthorn { replicas: 3 } => Some(1),
                    TargetKind::Shorthorn { .. } | TargetKind::OneHop => Some(0),
                    TargetKind::Files { .. } => None,
                };
                let of_files = ceiling.map(|at: usize| measured.requests_per_s / medians[at].requests_per_s);
                Row { target: (*name).to_owned(), measured: *measured, of_files }
            })
            .collect();
        print(workload.name, &rows);
    }
    Ok(())
}

fn in_a_vm(arguments: &Arguments) -> Result<()> {
    let mut figures: Vec<VmFigure> = Vec::new();
    for round in 1..=arguments.rounds {
        for replicas in [1, 3] {
            progress(&format!("round {round} of {}: ublk and NBD, {replicas} replicas", arguments.rounds));
            figures.extend(measure_in_vm(&WORKLOADS, replicas)?);
        }
    }
    println!(
        "\nublk against NBD in a virtual machine, virtual time; requests/s and how far the rounds differ"
    );
    for replicas in [1, 3] {
        for workload in WORKLOADS.iter().filter(|workload| workload.block_size == "4k") {
            let values = |frontend: &str| -> Vec<f64> {
                let wanted = |one: &&VmFigure| {
                    (one.frontend, one.replicas, one.workload) == (frontend, replicas, workload.name)
                };
                figures.iter().filter(wanted).map(|one| one.requests_per_s).collect()
            };
            let (ublk, nbd) = (values("ublk"), values("nbd"));
            println!(
                "  {replicas} replicas, {:<28} ublk {:>7.0} ({:.1} %)   nbd {:>7.0} ({:.1} %)   ratio {:.2}",
                workload.name,
                median(&ublk),
                spread_percent(&ublk),
                median(&nbd),
                spread_percent(&nbd),
                median(&ublk) / median(&nbd)
            );
        }
    }
    Ok(())
}

/// How far the values are apart, in percent of the median.
fn spread_percent(values: &[f64]) -> f64 {
    let most = values.iter().copied().fold(f64::MIN, f64::max);
    let least = values.iter().copied().fold(f64::MAX, f64::min);
    (most - least) / median(values) * 100.0
}

fn progress(text: &str) {
    // Where standard error is closed nobody wants to know.
    let _ = writeln!(io::stderr(), "{text}");
}
