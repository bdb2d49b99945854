//! Leader election: the controller that holds the Lease leads.
//!
//! The holder renews it; another controller that sees it unchanged for its whole duration, by its own clock,
//! takes it. Clocks of different machines are never compared. The holder counts from before the request of
//! the last successful renewal, and ends [`HOLD_LIMIT`] after that. That is well before any other one can
//! have seen the lease unchanged for [`DURATION`]. A process that was halted and does not know the time yet
//! can still try to write. The stored objects have changed since, and the write is refused.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::Client;
use kube::api::{Api, ObjectMeta, PostParams};
use shorthorn_controller_core::Timestamp;
use shorthorn_kube::{CallError, LEASE_NAME, bounded, is_code};
use tokio::time::Instant;

/// The time for which other controllers respect a lease that is not renewed.
pub const DURATION: Duration = Duration::from_secs(12);
/// The time after the last renewal for which the holder continues.
pub const HOLD_LIMIT: Duration = Duration::from_secs(8);
/// The interval of renewals.
const RENEW_EVERY: Duration = Duration::from_secs(3);
/// The wait before a renewal is tried again, or the lease of another is looked at again.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// The lease of a controller that is the leader, or may become it.
#[derive(Debug)]
pub struct Leadership {
    leases: Api<Lease>,
    identity: String,
    /// The lease as this controller holds it, and the time since which that is sure.
    held: Lease,
    renewed: Instant,
}

/// The last observation of another holder's lease.
#[derive(Debug)]
struct ObservedLease {
    version: Option<String>,
    since: Instant,
}

/// Returns true if a lease can be taken, seen unchanged for that long.
fn is_free(lease: &Lease, unchanged: Duration) -> bool {
    let spec = lease.spec.as_ref();
    let is_held =
        spec.and_then(|spec| spec.holder_identity.as_deref()).is_some_and(|holder| !holder.is_empty());
    let seconds =
        spec.and_then(|spec| spec.lease_duration_seconds).and_then(|seconds| u64::try_from(seconds).ok());
    !is_held || unchanged >= seconds.map_or(DURATION, Duration::from_secs)
}

/// Returns the time that the holder may still continue, `since_renewal` after its last renewal began; none if
/// it must stop.
fn time_left(since_renewal: Duration) -> Option<Duration> {
    HOLD_LIMIT.checked_sub(since_renewal).filter(|left| !left.is_zero())
}

/// Returns `lease` as taken by this controller.
fn taken(lease: Lease, identity: &str, now: Timestamp) -> Lease {
    let old = lease.spec.unwrap_or_default();
    let spec = LeaseSpec {
        holder_identity: Some(identity.to_owned()),
        lease_duration_seconds: i32::try_from(DURATION.as_secs()).ok(),
        acquire_time: Some(MicroTime(now)),
        renew_time: Some(MicroTime(now)),
        lease_transitions: Some(old.lease_transitions.unwrap_or(0).saturating_add(1)),
        ..old
    };
    Lease { spec: Some(spec), ..lease }
}

fn holder(lease: &Lease) -> &str {
    lease.spec.as_ref().and_then(|spec| spec.holder_identity.as_deref()).unwrap_or_default()
}

impl Leadership {
    /// Waits without limit until this controller holds the lease; `looked` gets the result of every look.
    pub async fn acquire(
        client: Client,
        namespace: &str,
        identity: &str,
        looked: impl Fn(Option<&CallError>),
    ) -> Leadership {
        let leases: Api<Lease> = Api::namespaced(client, namespace);
        let mut seen: Option<ObservedLease> = None;
        loop {
            match Leadership::try_acquire(&leases, identity, &mut seen).await {
                Ok(Some((held, renewed))) => {
                    tracing::info!(identity, "leading");
                    return Leadership { leases, identity: identity.to_owned(), held, renewed };
                }
                Ok(None) => looked(None),
                Err(error) => {
                    tracing::warn!(%error, "cannot acquire the lease");
                    looked(Some(&error));
                }
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    async fn try_acquire(
        leases: &Api<Lease>,
        identity: &str,
        seen: &mut Option<ObservedLease>,
    ) -> Result<Option<(Lease, Instant)>, CallError> {
        let start = Instant::now();
        let found = bounded(leases.get_opt(LEASE_NAME)).await?;
        let Some(found) = found else {
            let metadata = ObjectMeta { name: Some(LEASE_NAME.to_owned()), ..ObjectMeta::default() };
            let lease = taken(Lease { metadata, spec: None }, identity, Timestamp::now());
            return mine(bounded(leases.create(&PostParams::default(), &lease)).await, start);
        };
        let version = found.metadata.resource_version.clone();
        let observed = match seen.take() {
            Some(observed) if observed.version == version => observed,
            _ => {
                tracing::info!(holder = holder(&found), "standing by");
                ObservedLease { version, since: start }
            }
        };
        let unchanged = observed.since.elapsed();
        *seen = Some(observed);
        if !is_free(&found, unchanged) {
            return Ok(None);
        }
        let start = Instant::now();
        let lease = taken(found, identity, Timestamp::now());
        mine(bounded(leases.replace(LEASE_NAME, &PostParams::default(), &lease)).await, start)
    }

    /// The number of this leader: the version of the Lease, which rises with every change of any object.
    #[must_use]
    pub fn number(&self) -> Option<u64> {
        self.held.metadata.resource_version.as_ref()?.parse().ok()
    }

    /// Renews the lease for as long as that works; returns why it does not any more.
    pub async fn hold(&mut self) -> String {
        let too_late = || format!("the Lease could not be renewed for {} s", HOLD_LIMIT.as_secs());
        loop {
            // No request is made when no time is left: a refusal comes at once, and the request would be
            // repeated again and again.
            let Some(left) = time_left(self.renewed.elapsed()) else { return too_late() };
            let mut wait = RENEW_EVERY;
            if self.renewed.elapsed() >= RENEW_EVERY {
                match tokio::time::timeout(left, self.renew()).await {
                    // An earlier renewal came through, of which no answer came: its time is not known.
                    Ok(Ok(None)) if self.renewed.elapsed() >= RENEW_EVERY => wait = LOOK_AGAIN,
                    Ok(Ok(None)) => {}
                    Ok(Ok(Some(other))) => return other,
                    Ok(Err(error)) => {
                        // A log that blocks does not delay the end of the lease.
                        tokio::task::spawn_blocking(move || tracing::warn!(%error, "cannot renew the lease"));
                        wait = LOOK_AGAIN;
                    }
                    Err(_) => return too_late(),
                }
            }
            tokio::time::sleep(wait.min(time_left(self.renewed.elapsed()).unwrap_or_default())).await;
        }
    }

    /// Renews the lease. Returns the other holder, if the lease was taken.
    async fn renew(&mut self) -> Result<Option<String>, CallError> {
        let start = Instant::now();
        let mut lease = self.held.clone();
        if let Some(spec) = &mut lease.spec {
            spec.renew_time = Some(MicroTime(Timestamp::now()));
        }
        match bounded(self.leases.replace(LEASE_NAME, &PostParams::default(), &lease)).await {
            Ok(held) => (self.held, self.renewed) = (held, start),
            Err(error) if is_code(&error, 409) || is_code(&error, 404) => {
                // Perhaps an earlier renewal came through of which no answer came.
                match bounded(self.leases.get_opt(LEASE_NAME)).await? {
                    Some(found) if holder(&found) == self.identity => self.held = found,
                    Some(found) => return Ok(Some(format!("{} has acquired the Lease", holder(&found)))),
                    None => return Ok(Some("the Lease was deleted".to_owned())),
                }
            }
            Err(error) => return Err(error),
        }
        Ok(None)
    }

    /// Gives it back, so that the next one need not wait.
    pub async fn release(mut self) {
        if let Some(spec) = &mut self.held.spec {
            spec.holder_identity = Some(String::new());
        }
        let parameters = PostParams::default();
        let released = self.leases.replace(LEASE_NAME, &parameters, &self.held);
        if let Ok(Err(error)) = tokio::time::timeout(LOOK_AGAIN, released).await {
            tracing::debug!(%error, "cannot release the lease");
        }
    }
}

fn mine(answer: Result<Lease, CallError>, start: Instant) -> Result<Option<(Lease, Instant)>, CallError> {
    match answer {
        Ok(held) => Ok(Some((held, start))),
        // Another controller was first.
        Err(error) if is_code(&error, 409) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(holder: &str, seconds: Option<i32>) -> Lease {
        let spec = LeaseSpec {
            holder_identity: Some(holder.to_owned()),
            lease_duration_seconds: seconds,
            lease_transitions: Some(4),
            ..LeaseSpec::default()
        };
        Lease { metadata: ObjectMeta::default(), spec: Some(spec) }
    }

    #[test]
    fn a_lease_is_free_without_a_holder_or_after_missed_renewals() {
        let seconds = Duration::from_secs;
        assert!(is_free(&Lease::default(), seconds(0)));
        assert!(is_free(&lease("", Some(20)), seconds(0)));
        assert!(!is_free(&lease("a", Some(20)), seconds(19)));
        assert!(is_free(&lease("a", Some(20)), seconds(20)));
        assert!(!is_free(&lease("a", None), DURATION - seconds(1)));
        assert!(is_free(&lease("a", Some(-1)), DURATION));
    }

    #[test]
    fn the_holder_ends_at_its_limit() {
        let millis = Duration::from_millis;
        assert_eq!(time_left(millis(0)), Some(HOLD_LIMIT));
        assert_eq!(time_left(HOLD_LIMIT - millis(1)), Some(millis(1)));
        assert_eq!(time_left(HOLD_LIMIT), None);
        assert_eq!(time_left(HOLD_LIMIT + millis(1)), None);
    }

    /// An API server that refuses every call at once.
    #[tokio::test]
    async fn a_holder_whose_renewals_are_refused_asks_now_and_then_and_ends() {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let config = kube::Config::new(format!("http://127.0.0.1:{port}").parse().unwrap());
        let client = Client::try_from(config).unwrap();
        let started = Instant::now();
        let mut leadership = Leadership {
            leases: Api::namespaced(client, "n"),
            identity: "a".into(),
            held: lease("a", Some(15)),
            renewed: started - (HOLD_LIMIT - Duration::from_millis(500)),
        };
        let why = tokio::time::timeout(HOLD_LIMIT, leadership.hold()).await.unwrap();
        assert!(why.contains("could not be renewed"), "{why}");
        assert!(started.elapsed() >= Duration::from_millis(500));
    }

    #[test]
    fn a_taken_lease_names_its_new_holder() {
        let now: Timestamp = "2026-01-02T03:04:05Z".parse().unwrap();
        let lease = taken(lease("a", Some(20)), "b", now);
        assert_eq!(holder(&lease), "b");
        let spec = lease.spec.unwrap();
        assert_eq!((spec.lease_transitions, spec.lease_duration_seconds), (Some(5), Some(12)));
        // The holder ends before others may take it, with time for running calls.
        assert!(HOLD_LIMIT + RENEW_EVERY < DURATION && RENEW_EVERY + LOOK_AGAIN < HOLD_LIMIT);
    }
}
