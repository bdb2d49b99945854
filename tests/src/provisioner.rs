//! A provisioner as a container beside a controller. It follows the rules of kubernetes-csi/csi-lib-utils
//! (`connection`, `rpc`) without leader election. It gives up on a socket without a server after 30 s, and
//! asks Probe once a second until that says ready. It ends at any other answer, and when its connection is
//! lost. It is restarted as by kubelet.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use shorthorn_api::csi::v1;
use shorthorn_api::csi::v1::identity_client::IdentityClient;
use shorthorn_csi::DRIVER_NAME;

use crate::apiserver::ApiServer;
use crate::claims::text;
use crate::{Caller, Sidecars};

/// The time limit of a sidecar for connecting.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);
/// Between two attempts to connect, and between two probes.
const PAUSE: Duration = Duration::from_secs(1);
/// The time limit of a call, the default of the sidecars.
const CALL_LIMIT: Duration = Duration::from_secs(15);
/// The pause of kubelet before it starts a container for the third time; it doubles after that.
const FIRST_BACKOFF: Duration = Duration::from_secs(10);
/// The interval of checking for a lost connection, or a new claim.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// The container.
#[derive(Debug)]
pub struct Provisioner<'a> {
    api: &'a ApiServer,
    socket: PathBuf,
    stopped: AtomicBool,
    ready: AtomicBool,
    ends: AtomicU32,
}

impl<'a> Provisioner<'a> {
    /// Creates a provisioner beside the controller with that socket, which need not exist.
    #[must_use]
    pub fn new(api: &'a ApiServer, socket: PathBuf) -> Provisioner<'a> {
        let (stopped, ready, ends) = (AtomicBool::new(false), AtomicBool::new(false), AtomicU32::new(0));
        Provisioner { api, socket, stopped, ready, ends }
    }

    /// Starts it again and again, until it is stopped.
    pub fn run(&self) {
        let mut backoff = Duration::ZERO;
        while !self.is_stopped() {
            if let Err(error) = self.live() {
                println!("the provisioner at {} ends: {error:#}", self.socket.display());
                self.ready.store(false, Ordering::Release);
                self.ends.fetch_add(1, Ordering::AcqRel);
                self.rest(backoff);
                backoff = (backoff * 2).max(FIRST_BACKOFF);
            }
        }
    }

    /// Has [`Provisioner::run`] return.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
    }

    /// Returns the number of times that the container has ended.
    #[must_use]
    pub fn ends(&self) -> u32 {
        self.ends.load(Ordering::Acquire)
    }

    /// Returns true if its controller is ready.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    fn rest(&self, pause: Duration) {
        let end = Instant::now() + pause;
        while !self.is_stopped() && Instant::now() < end {
            // Short enough that a stop does not wait for the whole pause.
            thread::sleep(LOOK_AGAIN.min(pause));
        }
    }

    fn live(&self) -> Result<()> {
        let started = Instant::now();
        while UnixStream::connect(&self.socket).is_err() {
            ensure!(started.elapsed() < CONNECT_LIMIT, "no process serves the socket");
            if self.is_stopped() {
                return Ok(());
            }
            self.rest(PAUSE);
        }
        let identity = Caller::unix(&self.socket)?;
        while !probe(&identity)? {
            if self.is_stopped() {
                return Ok(());
            }
            self.rest(PAUSE);
        }
        let request = v1::GetPluginInfoRequest {};
        let info = identity.call(request, CALL_LIMIT, async |channel, request| {
            IdentityClient::new(channel).get_plugin_info(request).await
        })?;
        ensure!(info.name == DRIVER_NAME, "{info:?}");
        self.ready.store(true, Ordering::Release);
        self.work(&identity)
    }

    /// Provisions every claim that waits for it, until its controller is gone.
    fn work(&self, identity: &Caller) -> Result<()> {
        let sidecars = Sidecars::new(self.api, &self.socket)?;
        while !self.is_stopped() {
            // Stands for the connection, which breaks with the process at its other end.
            if !probe(identity)? {
                bail!("the controller is not ready any more");
            }
            for claim in self.waiting_claims()? {
                sidecars.provision(&claim)?;
            }
            self.rest(LOOK_AGAIN);
        }
        Ok(())
    }

    fn waiting_claims(&self) -> Result<Vec<String>> {
        let list = self.api.ok("GET", "/api/v1/namespaces/default/persistentvolumeclaims", None)?;
        let claims = list["items"].as_array().cloned().unwrap_or_default();
        let is_waiting = |claim: &&serde_json::Value| {
            claim["spec"]["volumeName"].is_null()
                && claim["metadata"]["annotations"]["volume.beta.kubernetes.io/storage-provisioner"]
                    == DRIVER_NAME
        };
        claims.iter().filter(is_waiting).map(|claim| text(&claim["metadata"]["name"])).collect()
    }
}

fn probe(identity: &Caller) -> Result<bool> {
    let answer = identity.call(v1::ProbeRequest {}, CALL_LIMIT, async |channel, request| {
        IdentityClient::new(channel).probe(request).await
    })?;
    // An answer without a word on it says ready.
    Ok(answer.ready.unwrap_or(true))
}
