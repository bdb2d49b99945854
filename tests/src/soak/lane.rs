//! A volume and the faults that it has to survive, one episode after the other.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;

use super::faults::{Episode, FaultKind, Hit};
use super::faulty_link::LinkDirection;
use super::limits::{Times, limit};
use super::pulse::Pulse;
use super::report::{EngineEnds, EpisodeResult, Report};
use super::volume::{Volume, VolumeProcess};
use super::watch::Watch;
use super::{SoakOptions, say};
use crate::guest::{Guest, GuestOptions, WrongByte};
use crate::{is_whole, until};

/// The time limit until all replicas are members again, longer than any of their pauses.
const WHOLE_LIMIT: Duration = Duration::from_secs(240);
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// The time limit for a fault to hit: a process that was just started comes soon, and damage needs data.
const HIT_LIMIT: Duration = Duration::from_secs(20);
const SLOW_DISK_REQUESTS_PER_S: u32 = 10;
/// The interval of filling a full disk again, because trimmed ranges become free.
const FILL_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_DELAY_MS: u64 = 30;
/// The part of the volume that is used: small, so that all of it is written and compared again and again.
const SECTORS: usize = 8192;
const DEPTH: usize = 8;

/// A volume under load.
pub(super) struct Lane<'a> {
    options: &'a SoakOptions,
    pulse: &'a Pulse,
    number: usize,
    volume: Volume,
    watch: Watch,
    report: Report,
}

impl<'a> Lane<'a> {
    /// # Errors
    /// The volume does not start.
    pub fn start(options: &'a SoakOptions, pulse: &'a Pulse, dir: &Path, number: usize) -> Result<Lane<'a>> {
        let dir = dir.join(format!("v{number}"));
        std::fs::create_dir(&dir)?;
        let volume = Volume::start(&dir, number, options)?;
        volume.until_whole(WHOLE_LIMIT)?;
        let seed = options.seed ^ (number as u64) << 48;
        let guest =
            GuestOptions { sectors: SECTORS, depth: DEPTH, keeps_errors: true, ..GuestOptions::new(seed) };
        let watch = Watch::start(Guest::new(volume.client(DEPTH)?, guest));
        Ok(Lane { options, pulse, number, volume, watch, report: Report::default() })
    }

    /// Runs the episodes and compares everything at the end. All volumes stop once `stop` is set.
    pub fn run(mut self, episodes: &[Episode], deadline: Option<Instant>, stop: &AtomicBool) -> Report {
        let (number, stops_early) = (self.number, self.options.stops_early);
        for episode in episodes {
            let is_over = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if is_over || stop.load(Ordering::Relaxed) {
                break;
            }
            if let Err(error) = self.episode(episode) {
                self.report.problem(format!("volume {number} in episode {}: {error:#}", episode.number));
                break;
            }
        }
        let mut report = std::mem::take(&mut self.report);
        if let Err(error) = self.finish(&mut report) {
            report.problem(format!("volume {number} at the end: {error:#}"));
        }
        if stops_early && !report.passes_so_far() {
            stop.store(true, Ordering::Relaxed);
        }
        report
    }

    /// Compares the writes of the guest with its reads, then the replicas with each other.
    fn finish(mut self, report: &mut Report) -> Result<()> {
        report.record_ends(self.volume.processes().ends());
        let compared = self.watch.finish().and_then(|mut guest| {
            guest.compare_everything()?;
            report.record_load(&mut guest);
            Ok(())
        });
        if let Err(error) = compared {
            if error.downcast_ref::<WrongByte>().is_some() {
                report.wrong_byte();
            }
            return Err(error);
        }
        self.volume.until_whole(WHOLE_LIMIT)?;
        if self.options.encrypt {
            self.volume.check_encrypted()?;
        }
        self.volume.stop()?;
        self.volume.compare_replicas().inspect_err(|_| report.replicas_differ())
    }

    fn episode(&mut self, episode: &Episode) -> Result<()> {
        let reconnections = self.watch.take().reconnections;
        let ends = self.volume.engine_ends();
        let (begin, mut engine) = (Instant::now(), EngineTime::default());
        let inflicted = self.inflict(episode, &mut engine);
        // All held resources are released, even after errors.
        if inflicted.is_err() {
            episode.hits.iter().try_for_each(|hit| self.end(hit))?;
        }
        inflicted?;
        let (faults, healed) = (begin.elapsed(), Instant::now());
        let answered = self.until_answered();
        let whole_after = healed.elapsed();
        let machine = self.pulse.longest_since(begin);
        let times = Times { faults, engine: engine.total(), machine };
        let has_ended = self.watch.has_ended();
        let seen = self.watch.take();
        let outcome = EpisodeResult {
            reconnections: seen.reconnections - reconnections,
            seen,
            engine_ends: self.engine_ends_since(ends)?,
            times,
            limit: limit(episode.row, self.options.replica_timeout).of(times),
            whole_after,
        };
        say(&format!(
            "{:6.0} volume {} {}",
            self.options.start.elapsed().as_secs_f64(),
            self.number,
            outcome.describe(episode)
        ));
        self.report.add(episode, self.number, outcome);
        ensure!(!has_ended, "the load has ended");
        answered
    }

    fn engine_ends_since(&self, before: u32) -> Result<EngineEnds> {
        let count = self.volume.engine_ends() - before;
        let error = if count == 0 { String::new() } else { self.volume.last_error_of_engine()? };
        Ok(EngineEnds { count, error })
    }

    /// Waits until all replicas are members and have been so for a while: the engine may not have noticed yet
    /// that one is lost. Of the requests that are sent after the faults some need every member. When they are
    /// answered, it has.
    fn until_answered(&self) -> Result<()> {
        loop {
            self.volume.until_whole(WHOLE_LIMIT)?;
            // Twice: the requests that are in flight then were all sent after the faults.
            for _ in 0..2 {
                self.watch.wait_for_answers(Instant::now(), ANSWER_LIMIT)?;
            }
            if is_whole(&self.volume.status()?) {
                return Ok(());
            }
        }
    }

    fn inflict(&self, episode: &Episode, engine: &mut EngineTime) -> Result<()> {
        let begin = Instant::now();
        let mut full: Vec<usize> = Vec::new();
        for step in episode.steps() {
            let hit = &episode.hits[step.hit];
            self.keep_full(&full, begin + step.at)?;
            if step.is_end {
                self.until_damaged(hit)?;
                self.end(hit)?;
                full.retain(|replica| *replica != hit.replica);
            } else {
                let what = format!("chance for {:?} of replica {}", hit.kind, hit.replica);
                until(&what, HIT_LIMIT, || self.begin(hit).map(Some))?;
                if hit.kind == FaultKind::DiskFull {
                    full.push(hit.replica);
                }
            }
            if matches!(hit.kind, FaultKind::EngineKilled | FaultKind::EnginePaused) {
                engine.record();
            }
        }
        Ok(())
    }

    /// Sleeps until `until`, and meanwhile fills the space again that trims free on full disks.
    fn keep_full(&self, full: &[usize], until: Instant) -> Result<()> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            for replica in full {
                self.volume.disks[*replica].small.fill()?;
            }
            // How long a fault lasts is the random part of the run; nothing waits for it.
            thread::sleep(if full.is_empty() { left } else { left.min(FILL_PAUSE) });
        }
    }

    fn begin(&self, hit: &Hit) -> Result<()> {
        let (replica, link) = (hit.replica, self.volume.link(hit.replica));
        match hit.kind {
            FaultKind::ReplicaKilled => self.volume.kill(VolumeProcess::Replica(replica))?,
            FaultKind::EngineKilled => self.volume.kill(VolumeProcess::Engine)?,
            FaultKind::ReplicaPaused => {
                self.volume.signal(VolumeProcess::Replica(replica), Signal::SIGSTOP)?
            }
            FaultKind::EnginePaused => self.volume.signal(VolumeProcess::Engine, Signal::SIGSTOP)?,
            FaultKind::LinkCut => self.volume.cut(replica, true)?,
            FaultKind::ToReplicaCut => link.cut(LinkDirection::ToReplica, true),
            FaultKind::FromReplicaCut => link.cut(LinkDirection::FromReplica, true),
            FaultKind::ConnectionsClosed => link.close(),
            FaultKind::LinkDelayed => link.delay(Duration::from_millis(1 + hit.choice % LONGEST_DELAY_MS)),
            FaultKind::ToReplicaCorrupted => link.damage(LinkDirection::ToReplica, hit.choice),
            FaultKind::FromReplicaCorrupted => link.damage(LinkDirection::FromReplica, hit.choice),
            FaultKind::DiskSlow => self.volume.disks[replica].limit(Some(SLOW_DISK_REQUESTS_PER_S))?,
            FaultKind::DiskFull => self.volume.disks[replica].small.fill()?,
        }
        Ok(())
    }

    /// Waits for a damage that has not happened yet.
    fn until_damaged(&self, hit: &Hit) -> Result<()> {
        let direction = match hit.kind {
            FaultKind::ToReplicaCorrupted => LinkDirection::ToReplica,
            FaultKind::FromReplicaCorrupted => LinkDirection::FromReplica,
            _ => return Ok(()),
        };
        let link = self.volume.link(hit.replica);
        until("frame to damage", HIT_LIMIT, || Ok((!link.is_to_damage(direction)).then_some(())))
    }

    fn end(&self, hit: &Hit) -> Result<()> {
        let (replica, link) = (hit.replica, self.volume.link(hit.replica));
        match hit.kind {
            FaultKind::ReplicaKilled => self.volume.revive(VolumeProcess::Replica(replica)),
            FaultKind::EngineKilled => self.volume.revive(VolumeProcess::Engine),
            FaultKind::ReplicaPaused => self.resume(VolumeProcess::Replica(replica)),
            FaultKind::EnginePaused => self.resume(VolumeProcess::Engine),
            FaultKind::LinkCut => self.volume.cut(replica, false)?,
            FaultKind::ToReplicaCut => link.cut(LinkDirection::ToReplica, false),
            FaultKind::FromReplicaCut => link.cut(LinkDirection::FromReplica, false),
            FaultKind::ConnectionsClosed => {}
            FaultKind::LinkDelayed => link.delay(Duration::ZERO),
            FaultKind::ToReplicaCorrupted => link.spare(LinkDirection::ToReplica),
            FaultKind::FromReplicaCorrupted => link.spare(LinkDirection::FromReplica),
            FaultKind::DiskSlow => self.volume.disks[replica].limit(None)?,
            FaultKind::DiskFull => self.volume.disks[replica].small.empty()?,
        }
        Ok(())
    }

    /// Continues the processes; one that has ended meanwhile needs no SIGCONT.
    fn resume(&self, process: VolumeProcess) {
        let _ = self.volume.signal(process, Signal::SIGCONT);
    }
}

/// The time without an engine, from its first fault to the last.
#[derive(Debug, Default)]
struct EngineTime {
    first: Option<Instant>,
    last: Option<Instant>,
}

impl EngineTime {
    fn record(&mut self) {
        let now = Instant::now();
        self.first.get_or_insert(now);
        self.last = Some(now);
    }

    fn total(&self) -> Duration {
        self.first.zip(self.last).map_or(Duration::ZERO, |(first, last)| last - first)
    }
}
