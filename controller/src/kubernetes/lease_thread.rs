//! The lease on a thread of its own, with a runtime and connections of its own: no work of the controller
//! delays a renewal.
//!
//! The thread also ensures that the process ends once the lease is lost, even if everything else hangs.
//! Another controller may work by then. If the runtime of the controller runs nothing for
//! [`BEATS_MISSED_MAX`] seconds, the thread gives the lease up. A controller that hangs must not keep others
//! from leading.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use shorthorn_kube::CallError;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;

use super::lease::Leadership;
use super::{KubernetesConfig, connect};

/// The time limit for the process to end after the lease is lost. Another controller may lead four seconds
/// after the loss: the lease lasts so much longer than `HOLD_LIMIT`.
pub const END_LIMIT: Duration = Duration::from_secs(2);
/// The interval of beats, by which the runtime of the controller shows that it runs.
const BEAT_EVERY: Duration = Duration::from_secs(1);
/// The maximum number of missed beats in a row. The thread counts its own looks: a pause of the whole process
/// misses none.
const BEATS_MISSED_MAX: u32 = 10;

#[derive(Clone, Debug, PartialEq, Eq)]
enum LeaseState {
    /// The thread has made no request yet.
    Starting,
    /// The controller requests the lease; the error of its last call, if any.
    Waiting(Option<String>),
    /// The number of this leader.
    Held(Option<u64>),
    /// The reason why the lease is lost.
    Lost(String),
    Released,
}

/// A running thread. It ends with this value, and does not give the lease back then.
#[derive(Debug)]
pub struct LeaseThread {
    state: watch::Receiver<LeaseState>,
    release: Option<oneshot::Sender<()>>,
    /// Ends with this value.
    _beating: JoinSet<()>,
}

impl LeaseThread {
    /// Starts the thread, which asks for the lease at once, for the runtime that this is called in. `hangs`
    /// runs if the process still exists [`END_LIMIT`] after the lease was lost, or after this value was
    /// dropped without giving the lease back.
    ///
    /// # Errors
    /// The operating system gives no thread.
    pub fn start(config: &KubernetesConfig, identity: String, hangs: fn()) -> io::Result<LeaseThread> {
        let (sender, state) = watch::channel(LeaseState::Starting);
        let (release, released) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let config = config.clone();
        let (beats, mut beating) = (Arc::<AtomicU64>::default(), JoinSet::new());
        beating.spawn(beat(Arc::clone(&beats)));
        thread::Builder::new().name("lease".to_owned()).spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    () = sender.closed() => {}
                    () = keep(&config, &identity, &sender, released, &beats) => {}
                }
                if matches!(&*sender.borrow(), LeaseState::Held(_) | LeaseState::Lost(_)) {
                    // A process that ends in order takes this thread with it.
                    tokio::time::sleep(END_LIMIT).await;
                    hangs();
                }
            });
        })?;
        Ok(LeaseThread { state, release: Some(release), _beating: beating })
    }

    /// Waits until this controller has the lease, and returns its number as a leader; `looked` gets the
    /// outcome of each call before that.
    ///
    /// # Errors
    /// Why the lease cannot be asked for, or was lost at once.
    pub async fn acquired(&mut self, looked: impl Fn(Option<String>)) -> Result<Option<u64>, String> {
        loop {
            match self.state.borrow_and_update().clone() {
                LeaseState::Starting => {}
                LeaseState::Waiting(error) => looked(error),
                LeaseState::Held(number) => return Ok(number),
                LeaseState::Lost(reason) => return Err(reason),
                LeaseState::Released => return Err("the Lease was released".to_owned()),
            }
            if self.state.changed().await.is_err() {
                return Err(ENDED.to_owned());
            }
        }
    }

    /// Waits until the lease is lost; returns why.
    pub async fn lost(&mut self) -> String {
        match self.state.wait_for(|state| matches!(state, LeaseState::Lost(_))).await.as_deref() {
            Ok(LeaseState::Lost(reason)) => reason.clone(),
            _ => ENDED.to_owned(),
        }
    }

    /// Gives the lease back, so that the next controller need not wait.
    pub async fn release(mut self) {
        if let Some(release) = self.release.take() {
            let _ = release.send(());
        }
        // An error means that the thread has ended.
        let _ = self.state.wait_for(|state| !matches!(state, LeaseState::Held(_))).await;
    }
}

const ENDED: &str = "the thread of the Lease has ended";

/// Shows that the runtime runs, until it is dropped.
async fn beat(beats: Arc<AtomicU64>) {
    loop {
        beats.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(BEAT_EVERY).await;
    }
}

/// Waits until the runtime of the controller does not run; returns that as the reason for the loss of the
/// lease.
async fn hang(beats: &AtomicU64) -> String {
    let (mut last, mut missed) = (0, 0);
    while missed <= BEATS_MISSED_MAX {
        let now = beats.load(Ordering::Relaxed);
        missed = if now == last { missed + 1 } else { 0 };
        last = now;
        tokio::time::sleep(BEAT_EVERY).await;
    }
    format!("this controller has not run a task for {BEATS_MISSED_MAX} s")
}

/// Asks for the lease, and renews it until it is lost or to be given back.
async fn keep(
    config: &KubernetesConfig,
    identity: &str,
    state: &watch::Sender<LeaseState>,
    released: oneshot::Receiver<()>,
    beats: &AtomicU64,
) {
    let client = match connect(config).await {
        Ok(client) => client,
        Err(error) => {
            state.send_replace(LeaseState::Lost(format!("cannot connect to the API server: {error}")));
            return;
        }
    };
    let looked = |error: Option<&CallError>| {
        state.send_replace(LeaseState::Waiting(error.map(ToString::to_string)));
    };
    let mut leadership = Leadership::acquire(client, &config.namespace, identity, looked).await;
    state.send_replace(LeaseState::Held(leadership.number()));
    let lost = tokio::select! {
        reason = leadership.hold() => Some(reason),
        reason = hang(beats) => Some(reason),
        // An error means that no request for that can come any more.
        Ok(()) = released => None,
    };
    match lost {
        Some(reason) => drop(state.send_replace(LeaseState::Lost(reason))),
        None => {
            leadership.release().await;
            state.send_replace(LeaseState::Released);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::path::Path;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::sync::{Arc, mpsc};
    use std::time::Instant;

    use serde_json::{Value, json};

    use super::*;
    use crate::kubernetes::lease::HOLD_LIMIT;
    use crate::kubernetes::{NodeDrainPolicy, PodsOfLostNodes};

    /// An API server that has one Lease.
    #[derive(Default)]
    struct OneLease {
        writes: AtomicU64,
        /// Another controller has taken the Lease.
        is_taken: AtomicBool,
        version: AtomicU64,
    }

    impl OneLease {
        /// Answers one request for each connection, until the test ends.
        fn serve(self: &Arc<Self>) -> String {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let url = format!("http://{}", listener.local_addr().unwrap());
            let api = Arc::clone(self);
            thread::spawn(move || {
                for stream in listener.incoming() {
                    // A client opens connections that it does not use.
                    let (api, stream) = (Arc::clone(&api), stream.unwrap());
                    thread::spawn(move || api.answer(stream));
                }
            });
            url
        }

        fn answer(&self, mut stream: TcpStream) {
            let (mut request, mut part) = (Vec::new(), [0; 4096]);
            let body = loop {
                let count = stream.read(&mut part).unwrap();
                if count == 0 {
                    return;
                }
                request.extend_from_slice(&part[..count]);
                let text = String::from_utf8_lossy(&request);
                let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
                let length = head.lines().find_map(|line| {
                    line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse::<usize>().ok()
                });
                if body.len() >= length.unwrap_or(0) {
                    break body.to_owned();
                }
            };
            let (code, answer) = self.decide(request.starts_with(b"GET"), &body);
            let answer = answer.to_string();
            let length = answer.len();
            let head = format!("HTTP/1.1 {code} -\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n");
            stream.write_all((head + &answer).as_bytes()).unwrap();
        }

        fn decide(&self, is_read: bool, body: &str) -> (u16, Value) {
            let lease = |holder: &str| {
                let version = self.version.load(Ordering::Relaxed).to_string();
                json!({ "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                    "metadata": { "name": "shorthorn-controller", "resourceVersion": version },
                    "spec": { "holderIdentity": holder, "leaseDurationSeconds": 12 } })
            };
            let refusal = |code: u16, reason: &str| {
                (code, json!({ "kind": "Status", "status": "Failure", "reason": reason, "code": code }))
            };
            match (is_read, self.is_taken.load(Ordering::Relaxed)) {
                (true, true) => (200, lease("other")),
                (true, false) => refusal(404, "NotFound"),
                (false, true) => refusal(409, "Conflict"),
                (false, false) => {
                    self.writes.fetch_add(1, Ordering::Relaxed);
                    self.version.fetch_add(1, Ordering::Relaxed);
                    let written: Value = serde_json::from_str(body).unwrap();
                    (200, lease(written["spec"]["holderIdentity"].as_str().unwrap()))
                }
            }
        }
    }

    fn config(directory: &Path, url: &str) -> KubernetesConfig {
        let path = directory.join("kubeconfig");
        let text = json!({ "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{ "name": "c", "cluster": { "server": url } }],
            "users": [{ "name": "c", "user": {} }],
            "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "c" } }] });
        std::fs::write(&path, text.to_string()).unwrap();
        KubernetesConfig {
            namespace: "n".to_owned(),
            kubeconfig: Some(path),
            agent_port: 1,
            pods_of_lost_nodes: PodsOfLostNodes::Keep,
            ends_pods_without_device: false,
            node_drain_policy: NodeDrainPolicy::AlwaysAllow,
            guard_image: None,
        }
    }

    static HUNG: AtomicBool = AtomicBool::new(false);

    #[tokio::test]
    async fn the_lease_outlives_a_stall_and_a_controller_that_hangs_loses_it_and_ends() {
        let api = Arc::<OneLease>::default();
        let directory = tempfile::tempdir().unwrap();
        let config = config(directory.path(), &api.serve());
        let mut lease =
            LeaseThread::start(&config, "me".to_owned(), || HUNG.store(true, Ordering::Relaxed)).unwrap();
        lease.acquired(|error| assert_eq!(error, None)).await.unwrap();
        // The runtime of this test does nothing else meanwhile.
        let until = |what: &str, is_so: &dyn Fn() -> bool| {
            let begun = Instant::now();
            while !is_so() {
                assert!(begun.elapsed() < 3 * HOLD_LIMIT, "{what}");
                thread::park_timeout(Duration::from_millis(20));
            }
        };
        until("it is not renewed", &|| api.writes.load(Ordering::Relaxed) >= 2);
        until("the process is not ended", &|| HUNG.load(Ordering::Relaxed));
        assert!(lease.lost().await.contains("has not run a task"));
    }

    #[tokio::test]
    async fn a_lease_that_another_controller_takes_is_lost() {
        let api = Arc::<OneLease>::default();
        let directory = tempfile::tempdir().unwrap();
        let config = config(directory.path(), &api.serve());
        let mut lease = LeaseThread::start(&config, "me".to_owned(), || {}).unwrap();
        assert!(lease.acquired(|_| {}).await.unwrap().is_some(), "the leader has a number");
        api.is_taken.store(true, Ordering::Relaxed);
        assert!(lease.lost().await.contains("other"));
    }

    #[tokio::test]
    async fn a_lease_is_given_back_and_an_api_server_that_is_away_is_reported() {
        let api = Arc::<OneLease>::default();
        let directory = tempfile::tempdir().unwrap();
        let known = config(directory.path(), &api.serve());
        let never = || unreachable!("the lease was not lost");
        let mut lease = LeaseThread::start(&known, "me".to_owned(), never).unwrap();
        lease.acquired(|_| {}).await.unwrap();
        let before = api.writes.load(Ordering::Relaxed);
        lease.release().await;
        assert_eq!(api.writes.load(Ordering::Relaxed), before + 1);

        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let away = config(directory.path(), &format!("http://{closed}"));
        let mut lease = LeaseThread::start(&away, "me".to_owned(), never).unwrap();
        let (sender, heard) = mpsc::channel();
        let asking = tokio::spawn(async move { lease.acquired(|error| drop(sender.send(error))).await });
        let error = tokio::task::spawn_blocking(move || heard.recv_timeout(HOLD_LIMIT)).await.unwrap();
        assert!(error.unwrap().unwrap().contains("cannot be reached"));
        asking.abort();
    }
}
