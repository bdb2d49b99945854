//! `make bench`: speed, CPU and memory of volumes beside the ceilings of the same machine in the same run.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Result;
use clap::Parser;
use shorthorn_tests::bench::{
    BenchTarget, Cost, CostFigure, Measured, RebuildFigures, Row, TargetKind, VmFigure, WORKLOADS,
    measure_cost, measure_encryption, measure_in_vm, measure_pauses, measure_rebuild, median, no_encryption,
    print,
};

/// Measures volumes behind the NBD socket beside fio on plain files and an NBD server with one hop.
#[derive(Debug, Parser)]
struct Arguments {
    /// Seconds per measurement.
    #[arg(long, default_value_t = 5)]
    seconds: u32,
    /// Number of rounds; the table shows medians.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Size of the used part of the volume, in the format of fio.
    #[arg(long, default_value = "1g")]
    size: String,
    /// Directory of the files, on the disk to measure.
    #[arg(long, default_value = "/var/tmp")]
    dir: PathBuf,
    /// Only the comparison of ublk and NBD in a virtual machine.
    #[arg(long, conflicts_with = "no_vm")]
    only_vm: bool,
    /// Without the comparison of ublk and NBD in a virtual machine.
    #[arg(long)]
    no_vm: bool,
    /// Measure only rebuilds.
    #[arg(long, conflicts_with = "only_vm")]
    only_rebuild: bool,
    /// Measure only the cost of the write-intent log.
    #[arg(long, conflicts_with_all = ["only_vm", "only_rebuild"])]
    only_intent: bool,
    /// Only the cost of sums of blocks and of verified reads.
    #[arg(long, conflicts_with_all = ["only_vm", "only_rebuild", "only_intent"])]
    only_sums: bool,
    /// Only the cost of encryption in transit.
    #[arg(long, conflicts_with_all = ["only_vm", "only_rebuild", "only_intent", "only_sums"])]
    only_encryption: bool,
}

/// Turns of the two volumes per round.
const COST_TURNS: u32 = 4;

const TARGETS: [(&str, TargetKind); 5] = [
    ("fio on 1 file", TargetKind::Files { files: 1 }),
    ("fio on 3 files", TargetKind::Files { files: 3 }),
    ("qemu-nbd, 1 file", TargetKind::OneHop),
    ("shorthorn, 1 replica", TargetKind::Shorthorn { replicas: 1 }),
    ("shorthorn, 3 replicas", TargetKind::Shorthorn { replicas: 3 }),
];

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let only = [
        arguments.only_vm,
        arguments.only_rebuild,
        arguments.only_intent,
        arguments.only_sums,
        arguments.only_encryption,
    ];
    let is_all = only.iter().all(|only| !only);
    if is_all {
        on_this_host(&arguments)?;
    }
    if is_all || arguments.only_intent {
        measure_costs(
            &arguments,
            Cost::Noting,
            "regions cleared and marked dirty again, against regions that stay dirty",
        )?;
    }
    if is_all || arguments.only_sums {
        measure_costs(&arguments, Cost::Sums, "with sums of blocks, against none")?;
        measure_costs(&arguments, Cost::VerifiedReads, "verified reads, against reads")?;
    }
    if is_all || arguments.only_encryption {
        encrypting(&arguments)?;
    }
    if is_all || arguments.only_rebuild {
        rebuilding(&arguments)?;
    }
    if is_all && !arguments.no_vm || arguments.only_vm {
        in_a_vm(&arguments)?;
        pauses()?;
    }
    Ok(())
}

fn on_this_host(arguments: &Arguments) -> Result<()> {
    let mut results = vec![vec![Vec::<Measured>::new(); TARGETS.len()]; WORKLOADS.len()];
    for round in 1..=arguments.rounds {
        for (at, (name, kind)) in TARGETS.iter().enumerate() {
            progress(&format!("round {round} of {}: {name}", arguments.rounds));
            let target = BenchTarget::start(*kind, &arguments.dir, &arguments.size)?;
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

fn measure_costs(arguments: &Arguments, cost: Cost, what: &str) -> Result<()> {
    let turns = arguments.rounds * COST_TURNS;
    progress(&format!("{turns} turns: {what}"));
    print_costs(measure_cost(cost, &arguments.dir, arguments.seconds, turns)?, turns, what);
    Ok(())
}

fn encrypting(arguments: &Arguments) -> Result<()> {
    let what = "encrypted in transit, against TCP in clear on the loopback interface";
    if let Some(reason) = no_encryption() {
        println!("\n{what}: left out: {reason}");
        return Ok(());
    }
    let turns = arguments.rounds * COST_TURNS;
    progress(&format!("{turns} turns: {what}"));
    print_costs(measure_encryption(&arguments.dir, arguments.seconds, turns)?, turns, what);
    Ok(())
}

fn print_costs(measured: Vec<CostFigure>, turns: u32, what: &str) {
    let mut all: BTreeMap<&str, Vec<CostFigure>> = BTreeMap::new();
    for one in measured {
        all.entry(one.workload).or_default().push(one);
    }
    println!("\n{what}: 3 replicas, 1 GiB used, medians of {turns} turns");
    for (workload, figures) in all {
        let of = |value: fn(&CostFigure) -> f64| figures.iter().map(value).collect::<Vec<f64>>();
        let mut shares = of(|one| one.with / one.without * 100.0);
        shares.sort_by(f64::total_cmp);
        let quarter = shares.len() / 4;
        println!(
            "  {workload:<32} {:>7.0} against {:>7.0} requests/s: {:.1} %, half of the turns {:.1} to {:.1} \
             %",
            median(&of(|one| one.with)),
            median(&of(|one| one.without)),
            median(&shares),
            shares[quarter],
            shares[shares.len() - 1 - quarter],
        );
    }
}

fn rebuilding(arguments: &Arguments) -> Result<()> {
    let mut all: Vec<RebuildFigures> = Vec::new();
    for round in 1..=arguments.rounds {
        progress(&format!("round {round} of {}: rebuilding", arguments.rounds));
        all.push(measure_rebuild(&arguments.dir, arguments.seconds)?);
    }
    let of = |value: &dyn Fn(&RebuildFigures) -> f64| median(&all.iter().map(value).collect::<Vec<_>>());
    let mib = f64::from(1 << 20);
    println!("\nrebuilding, 3 replicas, medians of {} rounds", arguments.rounds);
    println!(
        "  rebuilding alone                 {:>7.0} MiB/s, {:.0} % of the client's sequential writes ({:.0} \
         MiB/s)",
        of(&|one| one.copied_bytes_per_s) / mib,
        of(&|one| one.copied_bytes_per_s / one.written_bytes_per_s) * 100.0,
        of(&|one| one.written_bytes_per_s) / mib,
    );
    println!(
        "  rebuilding beside random writes  {:>7.0} MiB/s; the writes have {:.0} % of their speed with \
         nothing copied ({:.0} of {:.0} requests/s, {:.0} with all replicas)",
        of(&|one| one.copied_beside_bytes_per_s) / mib,
        of(&|one| one.beside_rebuild / one.degraded) * 100.0,
        of(&|one| one.beside_rebuild),
        of(&|one| one.degraded),
        of(&|one| one.whole),
    );
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

fn pauses() -> Result<()> {
    progress("the pause while an engine is replaced");
    println!("\nThe pause while an engine is replaced, 3 replicas in a virtual machine, virtual time");
    for pause in measure_pauses()? {
        println!(
            "  {:<4} depth {:>2}, {:<8} the longest request took {:>5} ms, the replacement {:>5} ms",
            pause.frontend,
            pause.depth,
            format!("{:?}:", pause.replacement),
            pause.longest_request.as_millis(),
            pause.replaced.as_millis(),
        );
    }
    Ok(())
}

/// Returns the spread of the values, in percent of the median.
fn spread_percent(values: &[f64]) -> f64 {
    let most = values.iter().copied().fold(f64::MIN, f64::max);
    let least = values.iter().copied().fold(f64::MAX, f64::min);
    (most - least) / median(values) * 100.0
}

fn progress(text: &str) {
    // If standard error is closed, no message is possible.
    let _ = writeln!(io::stderr(), "{text}");
}
