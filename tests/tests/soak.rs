//! Tests one episode of each kind of fault on real processes. `make soak` runs a thousand faults.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use shorthorn_control::FrontendChoice;
use shorthorn_tests::soak::{SoakOptions, run};

#[test]
fn faults_show_only_if_they_must() -> Result<()> {
    let seed = match std::env::var("SHORTHORN_SEED") {
        Ok(seed) => seed.parse().context("SHORTHORN_SEED is not a number")?,
        Err(_) => fastrand::u64(..),
    };
    println!("SHORTHORN_SEED={seed}");
    let options = SoakOptions {
        seed,
        // One episode of each kind is always drawn.
        faults: 0,
        time: None,
        volumes: 4,
        only: None,
        longest: Duration::from_secs(6),
        frontend: FrontendChoice::Socket,
        replica_timeout: Duration::from_secs(3),
        encrypt: false,
        start: Instant::now(),
        stops_early: false,
    };
    let folder = tempfile::Builder::new().prefix("soak").tempdir_in("/var/tmp").context("making a folder")?;
    let report = run(&options, folder.path())?;
    println!("{report}");
    if !report.passes_so_far() {
        println!("logs and disks: {}", folder.keep().display());
    }
    ensure!(report.missing() == 0, "{} kinds of faults have not happened", report.missing());
    ensure!(report.passes_so_far(), "something was seen that must not be");
    Ok(())
}
