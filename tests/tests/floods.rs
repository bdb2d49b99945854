//! Floods of requests over links of 1 Gbit/s. The bytes in flight are bounded, so no replica becomes late, no
//! request fails, and no process grows. Needs root, for network namespaces.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use shorthorn_control::EngineStatus;
use shorthorn_tests::hosts::{Hosts, name};
use shorthorn_tests::{NbdClient, NbdRequest, is_whole, until_whole};

/// Far more than anything takes.
const LIMIT: Duration = Duration::from_secs(120);
const VOLUME: &str = "v";
const HOSTS: usize = 3;
/// The host of the engine.
const ENGINE: usize = 0;
const MBIT_PER_S: u32 = 1000;
const REQUESTS: u64 = 128;
const ZERO_BYTES: u32 = 32 << 20;
const WRITE_BYTES: u32 = 1 << 20;
/// The engine's buffers of the queue, which has a slot of [`WRITE_BYTES`] for each request.
const SLOTS_KIB: u64 = (REQUESTS * WRITE_BYTES as u64) >> 10;
/// The additional memory of a process during a flood. A replica has room for 20 MiB of data in flight
/// (`BYTES_IN_FLIGHT_MAX`), an engine for 8 MiB of copies.
const GROWTH_MAX_KIB: u64 = 32 << 10;

struct Cluster {
    hosts: Hosts,
    client: NbdClient,
    _folder: tempfile::TempDir,
}

/// Three hosts behind links of 1 Gbit/s, with a volume that is attached to the first.
fn cluster() -> Result<Cluster> {
    let folder = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
    let hosts = Hosts::start(folder.path(), HOSTS)?;
    hosts.ctl(&["volume", "create", VOLUME, "--size", "4GiB", "--frontend", "socket", "--replicas", "3"])?;
    hosts.ctl(&["volume", "attach", VOLUME, "--node", &name(ENGINE)])?;
    until_whole(&hosts.engine_control(ENGINE, VOLUME), LIMIT)?;
    (0..HOSTS).try_for_each(|host| hosts.limit_rate(host, MBIT_PER_S))?;
    let client = hosts.client(ENGINE, VOLUME)?;
    Ok(Cluster { hosts, client, _folder: folder })
}

/// The largest memory of the processes of a volume.
#[derive(Debug)]
struct Peaks {
    engine_kib: u64,
    replicas_kib: Vec<u64>,
}

impl Cluster {
    /// Sends all requests at once and waits for all answers.
    fn flood(&mut self, requests: impl Iterator<Item = NbdRequest>) -> Result<Duration> {
        let begin = Instant::now();
        let sent = requests.map(|request| self.client.submit(request)).count();
        for answered in 0..sent {
            let answer = self.client.wait(LIMIT)?;
            let answer = answer.with_context(|| format!("{answered} answers, and no more in {LIMIT:?}"))?;
            ensure!(answer.outcome.is_ok(), "answer {answered} is {:?}", answer.outcome);
        }
        Ok(begin.elapsed())
    }

    /// Compares the beginning of each write of [`mixed`] with a read.
    fn compare_writes(&mut self) -> Result<()> {
        for number in 0..REQUESTS {
            let read = NbdRequest::Read { offset: offset(number, WRITE_BYTES), length: 4096 };
            let data = self.client.call(read, LIMIT)?;
            ensure!(data == Ok(vec![byte_of(number); 4096]), "write {number} is not there");
        }
        Ok(())
    }

    fn status(&self) -> Result<EngineStatus> {
        self.hosts.engine_status(ENGINE, VOLUME)
    }

    fn peaks(&self) -> Result<Peaks> {
        let of = |host, role| -> Result<Vec<u64>> {
            self.hosts.processes(host, role)?.into_iter().map(peak_kib).collect()
        };
        let engine_kib = of(ENGINE, "engine")?.into_iter().max().context("no engine runs")?;
        let mut replicas_kib = Vec::new();
        for host in 0..HOSTS {
            replicas_kib.extend(of(host, "replica")?);
        }
        ensure!(replicas_kib.len() == HOSTS, "not every host has one replica: {replicas_kib:?}");
        Ok(Peaks { engine_kib, replicas_kib })
    }

    /// Checks that no member was dropped or waited for, and that no process was replaced or has grown.
    fn check(&self, (status, peaks): (&EngineStatus, &Peaks), engine_growth_kib: u64) -> Result<()> {
        let (now, peaks_now) = (self.status()?, self.peaks()?);
        println!("peaks in KiB: {peaks:?}, then {peaks_now:?}");
        ensure!(is_whole(&now) && now.view == status.view, "a member was dropped: {now:#?}");
        let awaited = now.members.iter().find(|member| member.times_awaited > 0);
        ensure!(awaited.is_none(), "requests have waited for a member: {awaited:#?}");
        ensure!(self.client.reconnections() == 0, "the engine has closed its client");
        ensure!(
            peaks_now.engine_kib <= peaks.engine_kib + engine_growth_kib,
            "the engine grows from {peaks:?} to {peaks_now:?}"
        );
        for (before, after) in peaks.replicas_kib.iter().zip(&peaks_now.replicas_kib) {
            ensure!(*after <= before + GROWTH_MAX_KIB, "a replica grows from {before} to {after} KiB");
        }
        Ok(())
    }
}

/// Returns the writes of a deep queue, with reads of the same blocks and zeroes elsewhere between them.
fn mixed() -> impl Iterator<Item = NbdRequest> {
    let after_writes = REQUESTS * u64::from(WRITE_BYTES) / u64::from(ZERO_BYTES);
    (0..REQUESTS).flat_map(move |number| {
        let start = offset(number, WRITE_BYTES);
        let data = vec![byte_of(number); WRITE_BYTES as usize];
        let write = NbdRequest::Write { offset: start, data, fua: number % 8 == 0 };
        let zeroes = (number >= after_writes).then_some(NbdRequest::WriteZeroes {
            offset: offset(number, ZERO_BYTES),
            length: ZERO_BYTES,
            fua: number % 2 == 0,
        });
        let read = NbdRequest::Read { offset: start, length: 4096 };
        [Some(write), zeroes, Some(read)].into_iter().flatten()
    })
}

fn byte_of(number: u64) -> u8 {
    u8::try_from(number % 251 + 1).unwrap_or_default()
}

fn peak_kib(pid: i32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM")?;
    Ok(peak.trim().trim_end_matches(" kB").parse()?)
}

fn offset(number: u64, bytes: u32) -> u64 {
    number * u64::from(bytes)
}

#[test]
fn floods_over_slow_links_drop_no_member() -> Result<()> {
    let mut cluster = cluster()?;
    let before = (cluster.status()?, cluster.peaks()?);
    let zeroes = (0..REQUESTS).map(|number| NbdRequest::WriteZeroes {
        offset: offset(number, ZERO_BYTES),
        length: ZERO_BYTES,
        fua: false,
    });
    println!("{REQUESTS} writes of zeroes: {:?}", cluster.flood(zeroes)?);
    let discards = (0..REQUESTS)
        .map(|number| NbdRequest::Trim { offset: offset(number, ZERO_BYTES), length: ZERO_BYTES });
    println!("{REQUESTS} discards: {:?}", cluster.flood(discards)?);
    cluster.check((&before.0, &before.1), GROWTH_MAX_KIB)?;
    let took = cluster.flood(mixed())?;
    println!("{REQUESTS} writes with zeroes and reads between them: {took:?}");
    // Else the links would not be slow. Two of the replicas are on other hosts, behind one link of the
    // engine.
    let sent_bits = 2 * REQUESTS * u64::from(WRITE_BYTES) * 8;
    let least = Duration::from_millis(sent_bits / (u64::from(MBIT_PER_S) * 1000));
    ensure!(took > least * 9 / 10, "the writes took {took:?}, less than {least:?} of the link");
    cluster.check((&before.0, &before.1), SLOTS_KIB + GROWTH_MAX_KIB)?;
    cluster.compare_writes()
}
