//! Status of the engine on its control socket.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use shorthorn_control::{
    CopyStatus, EngineSpec, EngineStatus, MemberMode, MemberStatus, ProcessStatus, Publisher, ReplicaEndpoint,
};
use shorthorn_types::limits::MAX_MEMBERS;

use crate::state::EngineState;

/// Returns the status of a process that has just begun.
pub fn first(spec: &EngineSpec, state: &EngineState) -> ProcessStatus {
    ProcessStatus::Engine(EngineStatus {
        pid: Some(std::process::id()),
        lost_writes: state.lost_writes(),
        version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        ..EngineStatus::starting(spec.volume.clone(), state.generation(), spec.size_bytes)
    })
}

/// Returns the message of a serving engine; empty without a problem.
pub fn of_serving(lost_writes: bool) -> &'static str {
    if lost_writes {
        "every request is answered with an error: all replicas lost power, and acknowledged writes that were \
         not flushed may be gone. Stop the users of the device, then detach the volume and attach it again"
    } else {
        ""
    }
}

/// Changes the published status.
pub fn publish(publisher: &Publisher, change: impl FnOnce(&mut EngineStatus)) {
    publisher.update(|status| {
        if let ProcessStatus::Engine(engine) = status {
            change(engine);
        }
    });
}

/// Returns the status of a replica that is being reached.
pub fn connecting(endpoint: &ReplicaEndpoint) -> MemberStatus {
    MemberStatus {
        address: endpoint.addresses.first().cloned().unwrap_or_default(),
        ..MemberStatus::of(endpoint.replica, MemberMode::Connecting)
    }
}

/// Milliseconds since 1970.
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Returns an error unless a volume can have these replicas.
pub fn check_replicas(replicas: &[ReplicaEndpoint]) -> Result<(), String> {
    if replicas.is_empty() || replicas.len() > MAX_MEMBERS {
        return Err(format!("{} replicas: a volume has 1 to {MAX_MEMBERS}", replicas.len()));
    }
    for (at, endpoint) in replicas.iter().enumerate() {
        if replicas[..at].iter().any(|other| other.replica == endpoint.replica) {
            return Err(format!("replica {} is listed twice", endpoint.replica));
        }
    }
    Ok(())
}

/// Repeatedly makes a [`CopyStatus`] from the remaining bytes.
#[derive(Clone, Debug)]
pub struct Meter {
    total_bytes: u64,
    left_bytes: u64,
    bytes_per_s: u64,
    measured: Instant,
    begun: Instant,
}

/// A speed is measured over this at least. It is a little less than the interval of reports, so that each
/// report has a new speed.
const MEASURE_INTERVAL: Duration = Duration::from_millis(900);

impl Meter {
    /// Begins with `left_bytes` to do.
    pub fn new(left_bytes: u64, now: Instant) -> Meter {
        Meter { total_bytes: left_bytes, left_bytes, bytes_per_s: 0, measured: now, begun: now }
    }

    /// Returns the time since it was begun.
    pub fn runs_for(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.begun)
    }

    /// Records the bytes that are left now. They may have become more.
    pub fn update(&mut self, left_bytes: u64, now: Instant) {
        let took = now.saturating_duration_since(self.measured);
        if took < MEASURE_INTERVAL {
            return;
        }
        let done = self.left_bytes.saturating_sub(left_bytes);
        let took_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX).max(1);
        let speed = done.saturating_mul(1000) / took_ms;
        // Half of the last speed: it does not jump, and follows within seconds.
        self.bytes_per_s = if self.bytes_per_s == 0 { speed } else { self.bytes_per_s.midpoint(speed) };
        (self.left_bytes, self.measured) = (left_bytes, now);
        self.total_bytes = self.total_bytes.max(left_bytes);
    }

    /// Returns the status to publish.
    pub fn status(&self) -> CopyStatus {
        CopyStatus {
            total_bytes: self.total_bytes,
            left_bytes: self.left_bytes,
            bytes_per_s: self.bytes_per_s,
        }
    }

    /// Returns the total of the bytes to copy.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// Returns the time since the start.
    pub fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_control::ScrubStatus;
    use shorthorn_types::{Generation, ReplicaId};

    use super::*;

    #[test]
    fn a_meter_shows_the_bytes_left_and_the_speed() {
        let mut now = Instant::now();
        let mut meter = Meter::new(1000 << 20, now);
        for left in [900, 800, 700u64] {
            now += Duration::from_secs(1);
            meter.update(left << 20, now);
        }
        let shown = meter.status();
        assert_eq!(
            shown,
            CopyStatus { total_bytes: 1000 << 20, left_bytes: 700 << 20, bytes_per_s: 100 << 20 }
        );
        assert_eq!((shown.percent(), shown.left_s()), (30, Some(7)));
        meter.update(0, now + Duration::from_millis(10));
        assert_eq!(meter.status().left_bytes, 700 << 20, "too soon to measure");
        meter.update(2000 << 20, now + Duration::from_secs(2));
        assert_eq!(meter.status().total_bytes, 2000 << 20, "there is more to do than at first");
    }

    #[test]
    fn no_scrub_is_shown_but_one_that_was_ordered() {
        let volume = "v1".parse().unwrap();
        let mut status = EngineStatus::starting(volume, Generation::new(1, 0), 4096);
        status.count_found(true, "a block".to_owned());
        status.change_scrub(|scrub| scrub.at_bytes = 4096);
        assert_eq!(status.scrub, None);
        assert_eq!(status.read_findings.as_ref().map(|read| read.found), Some(1), "a read has found it");
        status.scrub = Some(ScrubStatus { number: Some(1), running: true, ..ScrubStatus::default() });
        status.count_found(false, "another".to_owned());
        status.change_scrub(ScrubStatus::stop);
        status.count_found(true, "after the stop".to_owned());
        status.change_scrub(|scrub| (scrub.running, scrub.at_bytes) = (true, 4096));
        let scrub = status.scrub.unwrap();
        assert_eq!((scrub.running, scrub.at_bytes, scrub.found, scrub.repaired), (false, 0, 1, 0));
        let last = scrub.last.as_deref();
        assert_eq!(last, Some("another; stopped before everything was compared"));
        assert_eq!(status.read_findings.as_ref().map(|read| (read.found, read.repaired)), Some((2, 2)));
        status.scrub = Some(ScrubStatus { number: Some(2), running: true, ..ScrubStatus::default() });
        status.complete_scrub(4096);
        assert_eq!(status.read_findings, None, "a complete scrub has seen them too");
        assert!(status.scrub.is_some_and(|scrub| !scrub.running && scrub.at_bytes == 4096));
    }

    #[test]
    fn lists_of_replicas_are_checked() {
        let endpoint = |n| ReplicaEndpoint {
            replica: ReplicaId::from_random(n),
            addresses: vec!["unix:/r".to_owned()],
            local: true,
        };
        assert!(check_replicas(&[endpoint(1), endpoint(2)]).is_ok());
        assert!(check_replicas(&[]).is_err());
        assert!(check_replicas(&[endpoint(1), endpoint(1)]).unwrap_err().contains("twice"));
        assert!(check_replicas(&(0..9).map(endpoint).collect::<Vec<_>>()).is_err());
    }
}
