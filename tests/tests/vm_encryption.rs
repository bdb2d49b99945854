//! Volumes that encrypt in transit, under faults, with the TLS of a real kernel.
//!
//! The hosts of a volume are network namespaces of one virtual machine. Each link is looked at: no frame may
//! pass in clear. The counters of the kernel have to show that it has encrypted.

use std::time::Duration;

use anyhow::{Result, ensure};
use shorthorn_tests::soak::run_in_vm;
use shorthorn_vmkit::Kernel;

/// Far more than emulated processors need.
const LIMIT: Duration = Duration::from_secs(900);

#[test]
fn data_is_encrypted_in_transit_and_survives_faults() -> Result<()> {
    let seed = fastrand::u64(..);
    println!("shorthorn-soak --in-vm --kernel ublk --encrypt-in-transit --volumes 2 --seed {seed}");
    let words = [
        "--encrypt-in-transit --frontend socket --volumes 2 --faults 16 --longest 5",
        "--seconds 60 --replica-timeout-ms 10000",
        &format!("--seed {seed}"),
    ];
    ensure!(run_in_vm(Kernel::Ublk, &words.map(str::to_owned), LIMIT)?, "see the report above");
    Ok(())
}
